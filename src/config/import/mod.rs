//! Takes over the configuration of another plugin: its file in, ours out, and a warning for whatever has no equal.
//!
//! Each peer has a file that says what its settings mean here. Whatever nobody read of the source becomes a warning by
//! itself (`doc`), and what comes out has passed our own validation.

mod doc;
mod generic;
mod nvidia;
mod rdma_shared;
mod smarter;
mod sriov;
#[cfg(test)]
mod tests;

use self::doc::{Doc, Field};
use super::error::printable;
use super::merge::Examined;
use super::node::Node;
use super::tree::{Is, Table, Value, written};
use clap::ValueEnum;
use std::path::Path;

/// The plugins whose files can be taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// NVIDIA/k8s-device-plugin: its YAML, `version: v1`.
    Nvidia,
    /// k8snetworkplumbingwg/sriov-network-device-plugin: `config.json`.
    Sriov,
    /// Mellanox/k8s-rdma-shared-dev-plugin: `config.json`.
    RdmaShared,
    /// squat/generic-device-plugin: its YAML.
    Generic,
    /// smarter-device-manager: `conf.yaml`.
    Smarter,
}

/// Why nothing came of it, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ImportError(String);

impl ImportError {
    /// A key may have a line's end in it, or what a terminal obeys.
    fn new(problem: impl AsRef<str>) -> Self {
        ImportError(printable(problem.as_ref()))
    }
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// A configuration file, which is valid.
    pub toml: String,
    /// One sentence each: what was left out, and what is to be done before.
    pub warnings: Vec<String>,
}

/// What the importers write.
#[derive(Debug, Default)]
struct Draft {
    resources: Vec<Table>,
    warnings: Vec<String>,
}

impl Draft {
    fn warn(&mut self, warning: impl AsRef<str>) {
        self.warnings.push(printable(warning.as_ref()));
    }

    /// Warns of those settings that say something, and have no equal for this reason.
    fn no_equal(&mut self, field: Option<&Field<'_>>, settings: &[(&str, &str)]) {
        for (key, why) in settings {
            let Some(setting) = field.and_then(|field| field.get(key)) else { continue };
            setting.read_all();
            if setting.says_something() {
                self.warn(format!("`{}` is left out: {why}", setting.path));
            }
        }
    }
}

/// Reads the file of another plugin. `key` names an entry of a ConfigMap; `prefix` is the domain that the plugin was told
/// by a flag.
///
/// # Errors
/// When the file cannot be read, or when what it says cannot be a configuration: why, and where.
pub fn import(peer: Peer, text: &str, key: Option<&str>, prefix: Option<&str>) -> Result<Imported, ImportError> {
    let inner = unwrap(text, key)?;
    let documents = Doc::parse(inner.as_deref().unwrap_or(text))?;
    let [document] = documents.as_slice() else {
        return Err(ImportError::new(format!("the file has {} documents, where one is expected", documents.len())));
    };
    let root = Field::root(document);
    let mut draft = Draft::default();
    match peer {
        Peer::Nvidia => nvidia::read(&root, &mut draft),
        Peer::Sriov => sriov::read(&root, prefix.unwrap_or("intel.com"), &mut draft),
        Peer::RdmaShared => rdma_shared::read(&root, prefix.unwrap_or("rdma"), &mut draft),
        Peer::Generic => generic::read(&root, prefix, &mut draft),
        Peer::Smarter => smarter::read(&root, &mut draft),
    }?;
    for (path, line) in root.unread() {
        draft.warn(format!("`{path}` (line {line}) is not known of this plugin, and is left out"));
    }
    finish(peer, draft)
}

fn finish(peer: Peer, draft: Draft) -> Result<Imported, ImportError> {
    let Draft { resources, warnings } = draft;
    if resources.is_empty() {
        // An empty configuration offers known hardware under its usual names, which nobody asked for.
        let why = if warnings.is_empty() { String::new() } else { format!(": {}", warnings.join("; ")) };
        return Err(ImportError::new(format!("no resource can be taken over{why}")));
    }
    let mut table = Table::default();
    let resources = resources.into_iter().map(|resource| Value { place: None, is: Is::Table(resource) });
    table.set("resource", Is::List(resources.collect()));
    let name = peer.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let toml = format!("# Written by `holdfast config import {name}`.\n\n{}", written(&table, None));
    match Examined::alone(toml.as_bytes(), Path::new("import"), &Node::default()).config() {
        Ok(_) => Ok(Imported { toml, warnings }),
        Err(error) => Err(ImportError::new(format!("what comes of it is not valid: {}", error.problem()))),
    }
}

/// The plugin's file out of a ConfigMap; `None` when the file is not one.
fn unwrap(text: &str, key: Option<&str>) -> Result<Option<String>, ImportError> {
    let documents = Doc::parse(text)?;
    let is_map = |doc: &&Doc| Field::root(doc).get("kind").is_some_and(|kind| kind.text() == Ok("ConfigMap"));
    let Some(map) = documents.iter().find(is_map) else {
        return match key {
            Some(key) => Err(ImportError::new(format!("the file is no ConfigMap, and has no entry `{key}`"))),
            None => Ok(None),
        };
    };
    let data = Field::root(map).get("data").ok_or_else(|| ImportError::new("the ConfigMap has no `data`"))?;
    let entries = data.entries()?;
    let names = || entries.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let entry = match (key, entries.as_slice()) {
        (None, [(_, entry)]) => Some(entry),
        (None, _) => return Err(ImportError::new(format!("the ConfigMap has the entries {}; `--key` says which", names()))),
        (Some(key), entries) => entries.iter().find(|(name, _)| *name == key).map(|(_, entry)| entry),
    };
    let entry =
        entry.ok_or_else(|| ImportError::new(format!("the ConfigMap has no entry `{}`; it has {}", key.unwrap_or_default(), names())))?;
    Ok(Some(entry.text()?.to_owned()))
}

/// Texts of a list as a value.
fn texts<T: AsRef<str>>(list: &[T]) -> Is {
    Is::List(list.iter().map(|text| Value { place: None, is: Is::Text(text.as_ref().to_owned()) }).collect())
}

fn text(text: &str) -> Is {
    Is::Text(text.to_owned())
}

fn plain(value: impl ToString) -> Is {
    Is::Plain(value.to_string())
}

/// A resource with a name and a class.
fn resource(name: &str, class: &str) -> Table {
    let mut table = Table::default();
    table.set("name", text(name));
    table.set("class", text(class));
    table
}

/// Puts a table in, unless it says nothing.
fn set_table(resource: &mut Table, key: &str, table: Table) {
    if !table.0.is_empty() {
        resource.set(key, Is::Table(table));
    }
}
