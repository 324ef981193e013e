//! The effective configuration of the daemon as one file, with the origin of each value.

use super::error::printable;
use super::keys::{self, TABLES};
use super::merge::Examined;
use super::tree::{Entry, Is, Place, Table, Value};
use super::typed::number;
use super::write::written;
use super::{Config, ConfigError, Node};
use crate::domain::{PerContainer, ResourceSpec};
use serde_json::Value as Json;
use std::path::{Path, PathBuf};

/// The origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from 1.
    pub line: usize,
}

/// The effective configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Shown {
    /// A valid file, with the origin of each value in a comment.
    pub text: String,
    /// Each key with its value and origin, `None` for a default: `resource[0].select.vendor`.
    pub values: Vec<(String, Json, Option<Origin>)>,
}

impl Examined {
    /// The effective configuration.
    ///
    /// # Errors
    /// The first error of the files.
    pub fn show(&self, node: &Node) -> Result<Shown, ConfigError> {
        let table = effective(&self.merged, &self.config()?);
        let origin = |place: Option<&Place>| match place {
            Some(place) => format!("{}:{}", place.file.display(), place.line),
            None => "default".to_owned(),
        };
        let mut notes = Vec::new();
        for section in &self.sections {
            let verb = if section.matches { "matches" } else { "does not match" };
            let node = node.name().unwrap_or("this node");
            notes.push(format!(
                "[[node]] of {} {verb} {node}: {}",
                origin(section.place.as_ref()),
                section.why
            ));
        }
        if table.get("resource").is_none() {
            notes.push(
                "no [[resource]]: known hardware is offered under its usual names; `holdfast \
                 discover` shows them"
                    .into(),
            );
        }
        let mut text: String =
            notes.iter().map(|note| format!("# {}\n", printable(note))).collect();
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&written(&table, Some(&origin)));
        let mut values = Vec::new();
        for entry in &table.0 {
            list(&entry.key, &entry.value, &mut values);
        }
        Ok(Shown { text, values })
    }
}

/// Every key in the order of the table of keys. A key that no file contains has its default and no
/// place.
fn effective(merged: &Table, config: &Config) -> Table {
    let mut shown = Table::default();
    for table in TABLES.into_iter().filter(|table| *table != "resource") {
        let given = merged.0.iter().find(|entry| entry.key == table);
        let filled = with_defaults(table, given.and_then(|entry| entry.value.as_table()));
        if !filled.0.is_empty() {
            let value = Value { place: None, is: Is::Table(filled) };
            shown.put(Entry {
                key: table.to_owned(),
                place: given.and_then(|entry| entry.place.clone()),
                value,
            });
        }
    }
    let resources = merged.get("resource").and_then(Value::as_list).unwrap_or_default();
    let resources = resources.iter().zip(&config.resources).filter_map(|(value, spec)| {
        let is = Is::Table(resource(value.as_table()?, spec));
        Some(Value { place: value.place.clone(), is })
    });
    let resources: Vec<Value> = resources.collect();
    if !resources.is_empty() {
        shown.set("resource", Is::List(resources));
    }
    shown
}

/// A resource, with the defaults that follow from its class and its other keys.
fn resource(given: &Table, spec: &ResourceSpec) -> Table {
    let kind = spec.contract.kind().as_str();
    let mut given = given.clone();
    let mut follows = |key: &str, text: &str| {
        if given.get(key).is_none() {
            given.set(key, Is::Text(text.to_owned()));
        }
    };
    follows("contract", kind);
    follows(
        "per_container",
        match spec.per_container {
            PerContainer::Any => "any",
            PerContainer::One => "one",
            PerContainer::Distinct => "distinct",
        },
    );
    if keys::of(&format!("resource.{kind}")).next().is_some() {
        let options =
            with_defaults(&format!("resource.{kind}"), given.get(kind).and_then(Value::as_table));
        let place =
            given.0.iter().find(|entry| entry.key == kind).and_then(|entry| entry.place.clone());
        given.put(Entry {
            key: kind.to_owned(),
            place,
            value: Value { place: None, is: Is::Table(options) },
        });
    }
    let has_pool = given.get("pool").is_some();
    let mut filled = with_defaults("resource", Some(&given));
    if has_pool {
        // A resource has `pool` or `replicas`, not both.
        filled.take("replicas");
    }
    filled
}

fn with_defaults(table: &str, given: Option<&Table>) -> Table {
    let mut filled = Table::default();
    for (_, key, usual) in keys::of(table) {
        let entry = given.and_then(|given| given.0.iter().find(|entry| entry.key == *key));
        if let Some(entry) = entry {
            filled.put(entry.clone());
        } else if let Some(is) = default(usual) {
            filled.set(key, is);
        }
    }
    filled
}

/// A default as a value without a place.
fn default(usual: &str) -> Option<Is> {
    let read = Table::parse(&format!("key = {usual}"), Path::new("")).ok()?;
    Some(without_places(read.get("key")?).is)
}

fn without_places(value: &Value) -> Value {
    let is = match &value.is {
        Is::List(list) => Is::List(list.iter().map(without_places).collect()),
        other => other.clone(),
    };
    Value { place: None, is }
}

fn list(path: &str, value: &Value, values: &mut Vec<(String, Json, Option<Origin>)>) {
    match &value.is {
        Is::Table(Table(entries)) if !entries.is_empty() => {
            for entry in entries {
                list(&format!("{path}.{}", entry.key), &entry.value, values);
            }
        }
        Is::List(of) if of.iter().any(|value| matches!(value.is, Is::Table(_))) => {
            for (index, value) in of.iter().enumerate() {
                list(&format!("{path}[{index}]"), value, values);
            }
        }
        _ => {
            let origin = value
                .place
                .as_ref()
                .map(|place| Origin { file: place.file.to_path_buf(), line: place.line });
            values.push((path.to_owned(), json(value), origin));
        }
    }
}

fn json(value: &Value) -> Json {
    match &value.is {
        Is::Text(text) => text.as_str().into(),
        Is::Plain(plain) => number(plain).map_or_else(
            || plain.parse::<bool>().map_or_else(|_| plain.as_str().into(), Json::from),
            Json::from,
        ),
        Is::List(list) => list.iter().map(json).collect(),
        Is::Table(Table(entries)) => {
            entries.iter().map(|entry| (entry.key.clone(), json(&entry.value))).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with a file, a drop-in, and sections.
    fn folder() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("config.d")).unwrap();
        let file = dir.path().join("config.toml");
        let main = concat!(
            "[ledger]\nhistory_size = 0x1388\n",
            "[[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\nselect = { vendor = [\"10de\"] }\nnvidia = { gds = true }\n",
            "[[resource]]\nname = \"example.com/fuse\"\nclass = \"char\"\npaths = [\"/dev/fuse\"]\n",
            "[[node]]\nmatch = { name = \"gpu-*\" }\nledger.history_size = 6000\n",
            "[[node.resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\ncontract = \"generic\"\nreplicas = 4\n",
            "[[node.resource]]\nname = \"example.com/kvm\"\nclass = \"char\"\npaths = [\"/dev/kvm\"]\n",
        );
        std::fs::write(&file, main).unwrap();
        std::fs::write(
            dir.path().join("config.d/10-x.toml"),
            "[telemetry]\n# where\nlisten = \"off\"\n",
        )
        .unwrap();
        (dir, file)
    }

    fn shown(name: &str) -> (tempfile::TempDir, Shown, Config) {
        let (dir, file) = folder();
        let node = Node::named(name, dir.path());
        let examined = Examined::of(Some(&file), &node);
        let config = examined.config().unwrap();
        (dir, examined.show(&node).unwrap(), config)
    }

    #[test]
    fn every_value_has_its_origin() {
        let (dir, shown, _) = shown("cpu-1");
        let text = shown.text.replace(&dir.path().display().to_string(), "");
        for line in [
            "# [[node]] of /config.toml:12 does not match cpu-1: the name matches none of its patterns",
            "[ledger]  # /config.toml:1",
            "durability = \"power-loss\"  # default",
            "history_size = 0x1388  # /config.toml:2",
            "listen = \"off\"  # /config.d/10-x.toml:3",
            "[[resource]]  # /config.toml:3",
            "contract = \"nvidia\"  # default",
            "[resource.nvidia]  # /config.toml:7",
            "gds = true  # /config.toml:7",
            "device_id_strategy = \"uuid\"  # default",
            "vendor = [\"10de\"]  # /config.toml:6",
        ] {
            assert!(
                text.lines().any(|line_of_text| line_of_text == line),
                "{line}\nis not in\n{text}"
            );
        }
        let value = |key: &str| {
            shown
                .values
                .iter()
                .find(|(path, ..)| path == key)
                .map(|(_, value, origin)| (value.clone(), origin.clone()))
        };
        assert_eq!(value("health.at_kubelet_start"), Some(("withhold".into(), None)));
        let (size, origin) = value("ledger.history_size").unwrap();
        assert_eq!((size, origin.unwrap().line), (5000.into(), 2));
        assert_eq!(value("resource[1].name").unwrap().0, Json::from("example.com/fuse"));
    }

    #[test]
    fn comments_stay_on_one_line() {
        let text = "[ledger]\nhistory_size = 7000\n[[node]]\nmatch = { file = \"/x\\n[nvidia]\\nnvml = 'off' #\\u001b[31m\" }\n";
        let node = Node::named("gpu-1", Path::new("/"));
        for file in ["/etc/config.toml", "/etc/con\nfig\u{1b}.toml"] {
            let examined = Examined::alone(text.as_bytes(), Path::new(file), &node);
            let (config, shown) = (examined.config().unwrap(), examined.show(&node).unwrap().text);
            assert!(!shown.chars().any(|c| c.is_control() && c != '\n'), "{shown:?}");
            assert!(
                !examined.sections.iter().any(|section| section.why().contains(char::is_control)),
                "`config check` shows it too"
            );
            assert_eq!(
                Examined::alone(shown.as_bytes(), Path::new(file), &node).config(),
                Ok(config),
                "{shown}"
            );
        }
    }

    #[test]
    fn the_shown_text_is_the_effective_configuration() {
        for name in ["cpu-1", "gpu-1"] {
            let (_dir, shown, config) = shown(name);
            let again =
                Examined::alone(shown.text.as_bytes(), Path::new("shown"), &Node::default())
                    .config()
                    .unwrap();
            assert_eq!(
                Config { files: Vec::new(), ..again },
                Config { files: Vec::new(), ..config },
                "{}",
                shown.text
            );
        }
    }

    #[test]
    fn a_matching_section_overrides_keys_and_replaces_resources_by_name() {
        let (_dir, shown, config) = shown("gpu-1");
        assert!(shown.text.contains("matches gpu-1: the name matches `gpu-*`"), "{}", shown.text);
        assert_eq!(config.retention.grants, 6000);
        let names: Vec<&str> = config.resources.iter().map(|spec| spec.name.as_str()).collect();
        assert_eq!(names, ["nvidia.com/gpu", "example.com/fuse", "example.com/kvm"]);
        assert_eq!(config.resources[0].contract, crate::domain::ContractKind::Generic.into());
        assert!(config.resources[0].select.vendor.is_empty(), "the whole resource is another");
    }
}
