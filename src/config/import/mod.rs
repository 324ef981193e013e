//! Converts the configuration of another plugin to ours, with a warning for each setting without an
//! equivalent.
//!
//! `source` finds the plugin's file and the flags of its container in the user's input: the file, a
//! ConfigMap or a manifest. `flags` reads a command line, `chart` the values of a chart. `doc` is
//! the file as a tree, and `field` reads it by the rules of the plugin's decoder. Each peer has a
//! file with the meaning of its settings. docs/importers.md lists all of them, and a test (`table`)
//! compares it with the code.
//!
//! A wrong value drops only the resource or setting that it belongs to, with a warning that names
//! its line. Each part of the source that was not read causes a warning automatically. The result
//! has passed our own validation.

mod cdi;
mod chart;
mod doc;
mod field;
mod flags;
mod generic;
mod nvidia;
mod rdma_shared;
mod smarter;
mod source;
mod sriov;
#[cfg(test)]
mod table;
#[cfg(test)]
mod tests;

pub use self::cdi::cdi_names;

use self::doc::Lines;
use self::field::Field;
use super::error::{nearest, printable};
use super::merge::{Examined, problem_of};
use super::node::Node;
use super::tree::{Entry, Is, Place, Table, Value, written};
use crate::domain::NODE;
use clap::ValueEnum;
use std::collections::BTreeSet;
use std::path::Path;

/// The limit of warnings about unknown settings. A file with more is probably not the plugin's.
const UNKNOWN_MAX: usize = 100;

/// The plugins whose files can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Peer {
    /// NVIDIA/k8s-device-plugin: its YAML, `version: v1`.
    Nvidia,
    /// k8snetworkplumbingwg/sriov-network-device-plugin: `config.json`.
    Sriov,
    /// Mellanox/k8s-rdma-shared-dev-plugin: `config.json`.
    RdmaShared,
    /// squat/generic-device-plugin: its YAML, or its `--device` flags.
    Generic,
    /// smarter-device-manager: `conf.yaml`.
    Smarter,
}

/// Why an import failed, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct ImportError {
    problem: String,
    /// Additional warnings, one sentence each.
    pub warnings: Vec<String>,
}

impl ImportError {
    /// The message is made printable: a key may contain a line break or terminal control
    /// characters.
    fn new(problem: impl AsRef<str>) -> Self {
        ImportError { problem: printable(problem.as_ref()), warnings: Vec::new() }
    }
}

/// A successful import.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Imported {
    /// A valid configuration file.
    pub toml: String,
    /// One sentence each: settings that were left out, and steps before the change.
    pub warnings: Vec<String>,
    /// How many parts were left out because a value in them is wrong.
    pub wrong: usize,
}

/// The result of an importer before validation.
#[derive(Debug, Default)]
struct Draft {
    offers: Vec<Offer>,
    warnings: Vec<String>,
    wrong: usize,
}

/// A resource, and its place in the source.
#[derive(Debug)]
struct Offer {
    table: Table,
    place: String,
}

impl Draft {
    fn offer(&mut self, table: Table, at: &Field<'_>) {
        self.offers.push(Offer { table, place: at.place() });
    }

    fn warn(&mut self, warning: impl AsRef<str>) {
        self.warnings.push(printable(warning.as_ref()));
    }

    /// Warns of a part that is left out because a value in it is wrong.
    fn wrong(&mut self, what: &str, why: &ImportError) {
        self.wrong += 1;
        self.warn(format!("{what} is left out: {why}"));
    }

    /// The value of a setting. A setting with a wrong value is left out with a warning.
    fn setting<'a, T>(
        &mut self,
        field: Option<Field<'a>>,
        read: impl FnOnce(&Field<'a>) -> Result<T, ImportError>,
    ) -> Option<T> {
        let field = field?;
        match read(&field) {
            Ok(value) => Some(value),
            Err(error) => {
                field.read_all();
                self.wrong(&format!("`{}`", field.path), &error);
                None
            }
        }
    }

    /// Warns of a setting that has an effect in the plugin and no equivalent here.
    fn no_equivalent(&mut self, setting: Option<Field<'_>>, why: &str) {
        let Some(setting) = setting else { return };
        setting.read_all();
        if setting.has_effect() {
            self.warn(format!("{} is left out: {why}", setting.place()));
        }
    }

    /// Warns of every part that was not read, with a hint for each.
    fn unknown(&mut self, root: &Field<'_>, known: &[&str]) {
        let (unread, more) = root.unread(UNKNOWN_MAX);
        for unknown in &unread {
            let (path, line) = (&unknown.path, unknown.line);
            if let Some(by) = unknown.overruled_by {
                self.warn(format!("`{path}` (line {line}) is left out: line {by} overrides it"));
                continue;
            }
            self.warn(format!(
                "`{path}` (line {line}) is not a setting of this plugin, and is left out{}",
                hint(path, known)
            ));
        }
        if more > 0 {
            self.warn(format!("{more} more are not settings of this plugin, and are left out"));
        }
    }
}

/// The keys where an unknown key would be read, or the known key that it resembles.
fn hint(path: &str, known: &[&str]) -> String {
    let key = path.rsplit('.').next().unwrap_or(path);
    let of = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let there: Vec<String> = known
        .iter()
        .filter(|known| of(known).eq_ignore_ascii_case(key))
        .map(|known| format!("`{known}`"))
        .collect();
    if !there.is_empty() {
        return format!("; it is read at {}", there.join(" and "));
    }
    let keys: Vec<String> = known.iter().map(|known| of(known)).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    nearest(key, &keys).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default()
}

/// Converts the file of another plugin, or a manifest that contains it. `key` names an entry of a
/// ConfigMap. `prefix` is the domain that the plugin gets by a flag.
///
/// # Errors
/// When the file cannot be read, or when no part of it can be converted: the reason and the place.
pub fn import(
    peer: Peer,
    text: &str,
    key: Option<&str>,
    prefix: Option<&str>,
) -> Result<Imported, ImportError> {
    let documents = doc::Doc::parse(text, Lines::From(1))?;
    let source = source::find(peer, &documents, key)?;
    let mut draft = Draft {
        warnings: source.notes.iter().map(|note| printable(note)).collect(),
        ..Draft::default()
    };
    let read = match peer {
        Peer::Nvidia => nvidia::read(&source, &mut draft),
        Peer::Sriov => sriov::read(&source, prefix, &mut draft),
        Peer::RdmaShared => rdma_shared::read(&source, prefix, &mut draft),
        Peer::Generic => generic::read(&source, prefix, &mut draft),
        Peer::Smarter => smarter::read(&source, &mut draft),
    };
    match read {
        Ok(()) => finish(peer, draft),
        Err(error) => Err(ImportError { warnings: draft.warnings, ..error }),
    }
}

fn finish(peer: Peer, mut draft: Draft) -> Result<Imported, ImportError> {
    let mut names = BTreeSet::new();
    let mut resources = Vec::new();
    for Offer { table, place } in std::mem::take(&mut draft.offers) {
        let name = table.get("name").and_then(Value::as_text).unwrap_or_default().to_owned();
        let resource = Value { place: None, is: Is::Table(table) };
        if let Some(problem) = problem_of("resource", Is::List(vec![resource.clone()]), &resource) {
            // A value keeps its place in the source: the path in the source is in the place of the
            // file's path.
            let at = problem
                .file()
                .zip(problem.line())
                .map_or(place, |(path, line)| format!("`{}` (line {line})", path.display()));
            let why = problem
                .problem()
                .strip_prefix(&format!("resource `{name}`: "))
                .unwrap_or(problem.problem());
            draft.wrong(&name, &ImportError::new(format!("{at}: {why}")));
        } else if names.insert(name.clone()) || name.contains(NODE) {
            resources.push(resource);
        } else {
            draft.wrong(
                &format!("{name} at {place}"),
                &ImportError::new("another resource has this name"),
            );
        }
    }
    let Draft { warnings, wrong, .. } = draft;
    if resources.is_empty() {
        // An empty configuration would offer known hardware under its usual names, which the user
        // did not request.
        return Err(ImportError { warnings, ..ImportError::new("no resource can be imported") });
    }
    let mut table = Table::default();
    table.set("resource", Is::List(resources));
    let name =
        peer.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let toml =
        format!("# Written by `holdfast config import {name}`.\n\n{}", written(&table, None));
    match Examined::alone(toml.as_bytes(), Path::new("import"), &Node::default()).config() {
        Ok(_) => Ok(Imported { toml, warnings, wrong }),
        Err(error) => Err(ImportError {
            warnings,
            ..ImportError::new(format!(
                "the result is not a valid configuration: {}",
                error.problem()
            ))
        }),
    }
}

/// A list of texts as a value.
fn texts<T: AsRef<str>>(list: &[T]) -> Is {
    Is::List(
        list.iter()
            .map(|text| Value { place: None, is: Is::Text(text.as_ref().to_owned()) })
            .collect(),
    )
}

fn text(text: &str) -> Is {
    Is::Text(text.to_owned())
}

fn plain(value: impl ToString) -> Is {
    Is::Plain(value.to_string())
}

/// Sets a value together with its place in the source.
fn set_from(table: &mut Table, key: &str, mut is: Is, from: &Field<'_>) {
    let place = Some(Place { file: Path::new(&from.path).into(), line: from.line(), column: 1 });
    if let Is::List(values) = &mut is {
        values.iter_mut().for_each(|value| value.place.clone_from(&place));
    }
    table.put(Entry { key: key.to_owned(), place: place.clone(), value: Value { place, is } });
}

/// A resource with a name and a class.
fn resource(name: &str, class: &str) -> Table {
    let mut table = Table::default();
    table.set("name", text(name));
    table.set("class", text(class));
    table
}

/// Sets a table unless it is empty.
fn set_table(resource: &mut Table, key: &str, table: Table) {
    if !table.0.is_empty() {
        resource.set(key, Is::Table(table));
    }
}
