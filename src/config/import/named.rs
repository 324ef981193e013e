//! Several named configurations of NVIDIA's plugin, among which a label of the node chooses.
//!
//! In its pod the program `config-manager` follows the label `nvidia.com/device-plugin.config`. It
//! uses the file of this name. Without the label it uses the default file, else the first of its
//! fallback strategies that finds one (cmd/config-manager of k8s-device-plugin).

use super::containers::program;
use super::doc::Doc;
use super::draft::Draft;
use super::field::Field;
use super::flags::Flags;
use super::values::texts;
use crate::config::tree::{Is, Table, Value};

/// The label, if no variable names another one.
const LABEL: &str = "nvidia.com/device-plugin.config";
/// The file that the strategy `named` searches.
const NAMED: &str = "default";
/// The fallback strategies of the chart. Without the chart the program has none.
const STRATEGIES: [&str; 2] = ["named", "single"];

/// The files with their names, and the choice among them.
#[derive(Debug)]
pub(super) struct Named {
    /// Each with its documents; the plugin reads the first.
    pub(super) files: Vec<(String, Vec<Doc>)>,
    pub(super) selection: Selection,
}

/// How a file is chosen.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Selection {
    pub(super) label: String,
    /// The file of nodes without the label. Empty means that the strategies apply.
    default: String,
    strategies: Vec<String>,
    /// Whether the input has this choice. Otherwise it is that of NVIDIA's chart without values.
    is_given: bool,
}

impl Default for Selection {
    fn default() -> Self {
        Selection {
            label: LABEL.to_owned(),
            default: String::new(),
            strategies: STRATEGIES.map(str::to_owned).to_vec(),
            is_given: false,
        }
    }
}

/// What nodes without the label use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fallback {
    /// The file of this name.
    To(String),
    /// An empty file.
    Empty,
    /// Nothing: the plugin does not start there.
    None,
}

impl Selection {
    /// Takes the values that are known.
    pub(super) fn take(
        &mut self,
        label: Option<String>,
        default: Option<String>,
        strategies: Option<Vec<String>>,
    ) {
        self.is_given = true;
        self.label = label.filter(|label| !label.is_empty()).unwrap_or(self.label.clone());
        self.default = default.unwrap_or(std::mem::take(&mut self.default));
        self.strategies = strategies.unwrap_or(std::mem::take(&mut self.strategies));
    }

    /// The name of the file that most nodes use.
    pub(super) fn usual(&self) -> &str {
        if self.default.is_empty() { NAMED } else { &self.default }
    }

    /// Takes the flags and variables of a container, if it runs `config-manager`.
    pub(super) fn read(&mut self, container: &Field<'_>) {
        if program(container).as_deref() != Some("config-manager") {
            return;
        }
        let mut flags = Flags::default();
        flags.read(container, &["oneshot", "send-signal"]);
        let text = |flag: &str, variable: &str| match &flags.last(&[flag], variable)?.value.is {
            super::doc::Is::Scalar(scalar) => Some(scalar.text.clone()),
            _ => None,
        };
        let split = |text: String| {
            let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
            words.map(str::to_owned).collect()
        };
        self.take(
            text("node-label", "NODE_LABEL"),
            text("default-config", "DEFAULT_CONFIG"),
            text("fallback-strategies", "FALLBACK_STRATEGIES").map(split),
        );
    }
}

impl Named {
    fn has(&self, name: &str) -> bool {
        self.files.iter().any(|(known, _)| known == name)
    }

    /// What nodes without the label use.
    ///
    /// # Errors
    /// When the program would end with an error: a default that does not exist, or an unknown
    /// strategy.
    pub(super) fn fallback(&self) -> Result<Fallback, String> {
        let Selection { default, strategies, .. } = &self.selection;
        if !default.is_empty() {
            return match self.has(default) {
                true => Ok(Fallback::To(default.clone())),
                false => Err(format!("the default configuration `{default}` does not exist")),
            };
        }
        for strategy in strategies {
            match strategy.as_str() {
                "named" if self.has(NAMED) => return Ok(Fallback::To(NAMED.to_owned())),
                "single" if self.files.len() == 1 => {
                    return Ok(Fallback::To(self.files[0].0.clone()));
                }
                "named" | "single" => {}
                "empty" => return Ok(Fallback::Empty),
                other => {
                    return Err(format!(
                        "the fallback strategy `{other}` is unknown; they are `named`, `single` \
                         and `empty`"
                    ));
                }
            }
        }
        Ok(Fallback::None)
    }

    /// The section for nodes whose label names this configuration. The section of the fallback is
    /// also for nodes without the label. An empty name is for these alone.
    pub(super) fn section(&self, name: &str, is_fallback: bool, content: Table) -> Value {
        let patterns = if is_fallback { vec![name, ""] } else { vec![name] };
        let (mut label, mut condition, mut section) =
            (Table::default(), Table::default(), Table::default());
        label.set(&self.selection.label, texts(&patterns));
        condition.set("label", Is::Table(label));
        section.set("match", Is::Table(condition));
        content.0.into_iter().for_each(|entry| section.put(entry));
        Value { place: None, is: Is::Table(section) }
    }

    /// Notes for the user: what the sections need.
    pub(super) fn note(&self, fallback: &Fallback, draft: &mut Draft) {
        let label = &self.selection.label;
        draft.warn(format!(
            "each configuration is a section for nodes whose label `{label}` has its name; \
             Holdfast needs the right to read the labels from the API server (docs/install.md), \
             or a file with them"
        ));
        if *fallback == Fallback::None {
            let why = match self.selection.is_given {
                true => "the plugin does not start there",
                false => {
                    "the input does not name a default one, as `config.default` in the values of \
                     the chart and `devicePlugin.config.default` in those of the GPU operator; \
                     import it together with these"
                }
            };
            draft.warn(format!(
                "no configuration is for nodes without the label `{label}`: {why}. Holdfast \
                 offers the known hardware there, under its usual names"
            ));
        }
    }
}

/// Adds the warnings of each configuration, with its name. Those of all of them are added once.
pub(super) fn add_warnings(draft: &mut Draft, of_each: &[(&str, Vec<String>)]) {
    let is_of_all = |warning: &String| of_each.iter().all(|(_, own)| own.contains(warning));
    for (index, (name, warnings)) in of_each.iter().enumerate() {
        for warning in warnings {
            match is_of_all(warning) {
                true if index == 0 => draft.warn(warning),
                true => {}
                false if name.is_empty() => draft.warn(format!("without the label: {warning}")),
                false => draft.warn(format!("configuration `{name}`: {warning}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Imported, Peer, import};
    use super::*;
    use crate::config::{Examined, Node};
    use std::path::Path;

    fn named(names: &[&str], default: &str, strategies: &[&str]) -> Named {
        let mut selection = Selection::default();
        let strategies = strategies.iter().map(ToString::to_string).collect();
        selection.take(None, Some(default.to_owned()), Some(strategies));
        let files = names.iter().map(|name| ((*name).to_owned(), Vec::new()));
        Named { files: files.collect(), selection }
    }

    #[test]
    fn nodes_without_the_label_use_the_default_or_the_first_strategy_that_finds_a_file() {
        let to = |name: &str| Ok(Fallback::To(name.to_owned()));
        for (names, default, strategies, expected) in [
            (&["a", "default"][..], "a", &["named"][..], to("a")),
            (&["a", "default"], "", &["named", "single"], to("default")),
            (&["a", "b"], "", &["named", "single"], Ok(Fallback::None)),
            (&["a"], "", &["named", "single"], to("a")),
            (&["a", "b"], "", &["single", "empty", "named"], Ok(Fallback::Empty)),
            (&["a", "default"], "", &["empty", "named"], Ok(Fallback::Empty)),
            (&["a", "default"], "", &[], Ok(Fallback::None)),
        ] {
            let found = named(names, default, strategies).fallback();
            assert_eq!(found, expected, "{names:?} {default} {strategies:?}");
        }
        let missing = named(&["a", "default"], "b", &["named"]).fallback().unwrap_err();
        assert_eq!(missing, "the default configuration `b` does not exist");
        let unknown = named(&["a", "b"], "", &["nmaed"]).fallback().unwrap_err();
        assert!(unknown.contains("`nmaed` is unknown"), "{unknown}");
    }

    const VALUES: &str = "config:
  map:
    default: |-
      version: v1
    shared: |-
      version: v1
      sharing: { timeSlicing: { renameByDefault: true, resources: [{ name: gpu, replicas: 4 }] } }
    mixed: |-
      version: v1
      flags: { migStrategy: mixed }
";

    fn imported(text: &str) -> Imported {
        import(Peer::Nvidia, text, None, None)
            .unwrap_or_else(|error| panic!("{error}: {:?}\n{text}", error.warnings))
    }

    /// The names of the resources that a node with this label offers.
    fn offered(toml: &str, label: &str) -> Vec<String> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("labels");
        std::fs::write(&file, format!("{label}\n")).unwrap();
        let toml = toml.replace("\"api\"", &format!("{:?}", file.display().to_string()));
        let node = Node::here(Path::new("/"), dir.path());
        let config = Examined::alone(toml.as_bytes(), Path::new("f"), &node).config().unwrap();
        config.resources.iter().map(|spec| spec.name.to_string()).collect()
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn each_configuration_is_a_section_for_its_label() {
        let Imported { toml, warnings, wrong } = imported(VALUES);
        assert_eq!(wrong, 0, "{warnings:?}");
        let of = |name: &str| offered(&toml, &format!("{LABEL}={name}"));
        assert_eq!(of("default"), ["nvidia.com/gpu"]);
        assert_eq!(of("shared"), ["nvidia.com/gpu.shared"]);
        assert_eq!(of("mixed"), ["nvidia.com/gpu", "nvidia.com/mig-{mig_profile}"]);
        assert_eq!(of(""), ["nvidia.com/gpu"], "{toml}");
        assert_eq!(offered(&toml, "other=1"), ["nvidia.com/gpu"], "{toml}");
        assert_eq!(of("unknown"), [""; 0], "the plugin does not start there");
        assert!(warnings.iter().any(|warning| warning.contains("has its name")), "{warnings:?}");
    }

    #[cfg(feature = "cluster")]
    #[test]
    fn the_chart_and_the_manager_choose_for_nodes_without_the_label() {
        let with = |line: &str| VALUES.replacen("config:\n", &format!("config:\n  {line}\n"), 1);
        let without = |text: &str| offered(&imported(text).toml, "other=1");
        assert_eq!(without(&with("default: shared")), ["nvidia.com/gpu.shared"]);
        // An empty file is the plugin's own default.
        assert_eq!(without(&with("fallbackStrategies: [empty]")), ["nvidia.com/gpu"]);
        let none = imported(&with("fallbackStrategies: []"));
        assert!(none.warnings.iter().any(|warning| warning.contains("no configuration is for")));
        assert_eq!(offered(&none.toml, "other=1"), [""; 0]);
        assert!(none.warnings.iter().any(|warning| warning.contains("the plugin does not start")));
        let alone = imported("kind: ConfigMap\ndata: { a: 'version: v1', b: 'version: v1' }\n");
        let unknown = "the input does not name a default one";
        assert!(alone.warnings.iter().any(|warning| warning.contains(unknown)));
        let missing = imported(&with("default: other"));
        assert_eq!(missing.wrong, 1);
        assert!(missing.warnings[0].contains("`other` does not exist"), "{:?}", missing.warnings);

        let map = VALUES
            .replacen("config:\n  map:", "kind: ConfigMap\ndata:", 1)
            .replace("\n    ", "\n  ");
        let set = "kind: DaemonSet\nspec:\n  template:\n    spec:\n      containers:\n      - image: x/k8s-device-plugin\n        command: [config-manager]\n        env: [{ name: NODE_LABEL, value: a.b/c }, { name: FALLBACK_STRATEGIES, value: 'named, empty' }, { name: DEFAULT_CONFIG, value: shared }]\n      - image: x/k8s-device-plugin\n        command: [nvidia-device-plugin]\n        env: [{ name: PASS_DEVICE_SPECS, value: 'true' }]\n";
        let found = imported(&format!("{set}---\n{map}"));
        assert_eq!(offered(&found.toml, "a.b/c=mixed").len(), 2, "{}", found.toml);
        assert_eq!(offered(&found.toml, "x=y"), ["nvidia.com/gpu.shared"]);
        assert_eq!(found.toml.matches("pass_device_specs = true").count(), 4, "{}", found.toml);
    }

    #[test]
    fn a_wrong_configuration_drops_only_itself() {
        let text = VALUES.replace("flags: { migStrategy: mixed }", "version: v2");
        let found = imported(&text);
        let warnings = found.warnings.join("\n");
        assert_eq!(found.wrong, 1, "{warnings}");
        assert!(
            warnings.contains("configuration `mixed`: this configuration is left out"),
            "{warnings}"
        );
        assert!(!found.toml.contains("mixed"), "{}", found.toml);
    }
}
