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

mod akri;
mod amd;
mod candidates;
mod cdi;
mod chart;
mod containers;
mod doc;
mod draft;
mod error;
mod field;
mod flags;
mod generic;
mod gke;
mod ids;
mod intel_gpu;
mod kubevirt;
mod named;
mod nvidia;
mod nvidia_chart;
mod peers;
mod rdma_shared;
mod smarter;
mod source;
mod sriov;
#[cfg(test)]
mod table;
#[cfg(test)]
mod tests;
mod values;
mod xids;

pub use self::error::ImportError;
pub use self::peers::Peer;

pub use self::cdi::cdi_names;

use self::doc::Lines;
use self::draft::{Draft, Offer};
use self::named::Fallback;
use self::source::Source;
use super::error::printable;
use super::merge::{Examined, problem_of};
use super::node::Node;
use super::tree::{Is, Table, Value};
use super::write::written;
use crate::domain::NODE;
use clap::ValueEnum;
use std::collections::BTreeSet;
use std::path::Path;

/// The first document of a YAML or JSON text as JSON: every scalar is a text, except `true` and
/// `false`. For files of Kubernetes, such as a kubeconfig.
///
/// # Errors
/// A text that is neither YAML nor JSON, with its line.
#[cfg_attr(
    not(feature = "cluster"),
    expect(dead_code, reason = "only the client of the API server reads a kubeconfig")
)]
pub(crate) fn yaml(text: &str) -> Result<serde_json::Value, String> {
    let documents = doc::Doc::parse(text, Lines::From(1)).map_err(|error| error.to_string())?;
    Ok(documents.into_iter().next().map(doc::Doc::into_json).unwrap_or_default())
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
    let mut source = source::find(peer, &documents, key)?;
    let mut draft = Draft {
        warnings: source.notes.iter().map(|note| printable(note)).collect(),
        ..Draft::default()
    };
    if let Some(named) = source.named.take() {
        return match sections(&named, &mut source, &mut draft) {
            Ok(table) => {
                source.flags.warn_of_unread(peers::facts(peer).file.0, &mut draft);
                finish(peer, &table, draft)
            }
            Err(error) => Err(ImportError { warnings: draft.warnings, ..error }),
        };
    }
    let read = match peer {
        Peer::Nvidia => nvidia::read(&source, &mut draft),
        Peer::Sriov => sriov::read(&source, prefix, &mut draft),
        Peer::RdmaShared => rdma_shared::read(&source, prefix, &mut draft),
        Peer::Generic => generic::read(&source, prefix, &mut draft),
        Peer::Smarter => smarter::read(&source, &mut draft),
        Peer::Gke => gke::read(&source, &mut draft),
        Peer::IntelGpu => intel_gpu::read(&source, &mut draft),
        Peer::Kubevirt => kubevirt::read(&source, &mut draft),
        Peer::Amd => amd::read(&source, &mut draft),
        Peer::Akri => akri::read(&source, &mut draft),
    };
    // Those of virt-handler are not about devices.
    if peer != Peer::Kubevirt {
        source.flags.warn_of_unread(peers::facts(peer).file.0, &mut draft);
    }
    match read.and_then(|()| checked(&mut draft)) {
        Ok(table) => finish(peer, &table, draft),
        Err(error) => Err(ImportError { warnings: draft.warnings, ..error }),
    }
}

/// The sections for the named configurations of NVIDIA's plugin, one for each, and the source of
/// the labels that they match.
fn sections(
    named: &named::Named,
    source: &mut Source,
    draft: &mut Draft,
) -> Result<Table, ImportError> {
    let mut fallback = named.fallback();
    if let Err(why) = &fallback {
        draft.wrong(
            &format!("the configuration of nodes without the label `{}`", named.selection.label),
            &ImportError::new(why),
        );
        fallback = Ok(Fallback::None);
    }
    let fallback = fallback.unwrap_or(Fallback::None);
    let files = named.files.iter().map(|(name, documents)| (name.as_str(), documents.first()));
    let empty = (fallback == Fallback::Empty).then_some(("", None));
    let (mut list, mut warnings) = (Vec::new(), Vec::new());
    for (name, file) in files.chain(empty) {
        source.file = file.cloned();
        let mut own = Draft::default();
        match nvidia::read(source, &mut own).and_then(|()| checked(&mut own)) {
            Ok(table) => {
                list.push(named.section(name, fallback == Fallback::To(name.to_owned()), table));
            }
            Err(error) => own.wrong("this configuration", &error),
        }
        draft.wrong += own.wrong;
        warnings.push((name, own.warnings));
    }
    named::add_warnings(draft, &warnings);
    if list.is_empty() {
        return Err(ImportError::new("no configuration can be imported"));
    }
    named.note(&fallback, draft);
    let mut table = Table::default();
    if cfg!(feature = "cluster") {
        let mut cluster = Table::default();
        cluster.set("node_labels", Is::Text("api".to_owned()));
        table.set("cluster", Is::Table(cluster));
    }
    table.set("node", Is::List(list));
    Ok(table)
}

/// The valid resources of a draft, with its other tables.
fn checked(draft: &mut Draft) -> Result<Table, ImportError> {
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
    draft.note_moved(&resources);
    if resources.is_empty() {
        // An empty configuration would offer known hardware under its usual names, which the user
        // did not request.
        return Err(ImportError::new("no resource can be imported"));
    }
    let mut table = std::mem::take(&mut draft.tables);
    table.set("resource", Is::List(resources));
    Ok(table)
}

fn finish(peer: Peer, table: &Table, draft: Draft) -> Result<Imported, ImportError> {
    let Draft { warnings, wrong, .. } = draft;
    let name =
        peer.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let toml = format!("# Written by `holdfast config import {name}`.\n\n{}", written(table, None));
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
