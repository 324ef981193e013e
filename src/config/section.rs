//! `[[node]]`: sections for some nodes only, so that one file serves all nodes.
//!
//! A section is a drop-in with a condition. Matching sections are merged over all files, in the
//! order of the files. A resource in a section replaces the resource with its name.

use super::ConfigError;
use super::condition::{NoResult, NodeFacts, Outcome, by_dmi, by_gpu, by_label, globs};
use super::error::{printable, unknown};
use super::node::Node;
use super::tree::{Place, Table, Value};
use crate::host::HostRoot;
use std::path::Path;

/// One `[[node]]` of a file.
#[derive(Debug, Clone)]
pub struct Section {
    pub(super) place: Option<Place>,
    pub(super) table: Table,
    pub(super) matches: bool,
    /// The reason of `matches`.
    pub(super) why: String,
}

impl Section {
    /// The file and line of the section.
    #[must_use]
    pub fn place(&self) -> Option<(&Path, usize)> {
        self.place.as_ref().map(|place| (&*place.file, place.line))
    }

    /// Whether it applies to the node.
    #[must_use]
    pub fn matches(&self) -> bool {
        self.matches
    }

    /// The reason, such as ``the name matches `gpu-*` ``.
    #[must_use]
    pub fn why(&self) -> &str {
        &self.why
    }

    /// Reads a section, and evaluates its condition for this node.
    ///
    /// # Errors
    /// An invalid condition.
    pub(super) fn read(value: &Value, facts: &NodeFacts<'_>) -> Result<Self, ConfigError> {
        let wrong = |problem: String, place: Option<&Place>| {
            Err(ConfigError::new(problem).at(place.or(value.place.as_ref())))
        };
        let Some(table) = value.as_table() else {
            return wrong(
                "`node` must be a list of sections; begin each one with [[node]]".into(),
                None,
            );
        };
        let mut table = table.clone();
        if let Some(cluster) = table.0.iter().find(|entry| entry.key == "cluster") {
            return wrong(
                "`cluster` cannot be set for some nodes only: it names the source of the labels \
                 that sections match; put it outside of the section"
                    .into(),
                cluster.place.as_ref(),
            );
        }
        let example = "such as match = { name = [\"gpu-*\"] }";
        let Some(condition) = table.take("match") else {
            return wrong(
                format!("a section `node` needs a `match` that selects its nodes, {example}"),
                None,
            );
        };
        let Some(Table(keys)) = condition.value.as_table() else {
            return wrong(format!("`match` must be a table, {example}"), condition.place.as_ref());
        };
        if keys.is_empty() {
            return wrong(
                "`match` is empty; put settings of all nodes outside the section".into(),
                condition.place.as_ref(),
            );
        }
        let (mut matches, mut why) = (true, Vec::new());
        for entry in keys {
            let condition = match &*entry.key {
                "name" => by_name(&entry.value, facts.node),
                "file" => by_file(&entry.value, &facts.root),
                "gpu" => by_gpu(&entry.value, facts),
                "dmi" => by_dmi(&entry.value, facts),
                "label" => by_label(&entry.value, facts),
                other => {
                    Err(unknown("key", other, &["name", "file", "gpu", "dmi", "label"]).into())
                }
            };
            match condition {
                Ok((holds, reason)) => {
                    matches &= holds;
                    why.push(reason);
                }
                Err(NoResult::Invalid(problem)) => return wrong(problem, entry.place.as_ref()),
                Err(NoResult::Unread(why)) => {
                    return wrong(why, entry.place.as_ref()).map_err(ConfigError::unread);
                }
            }
        }
        Ok(Section {
            place: value.place.clone(),
            table,
            matches,
            why: printable(&why.join(", and ")),
        })
    }
}

fn by_name(value: &Value, node: &Node) -> Outcome {
    let shape =
        "`match.name` must be a list of patterns of node names, such as [\"gpu-*\", \"dgx-??\"]";
    let globs = globs("match.name", value, shape)?;
    let Some(name) = node.name() else {
        return Ok((false, "the name of this node is unknown".into()));
    };
    Ok(match globs.iter().find(|glob| glob.matches(name)) {
        Some(glob) => (true, format!("the name matches `{}`", glob.text)),
        None => (false, "the name matches none of its patterns".into()),
    })
}

fn by_file(value: &Value, root: &HostRoot) -> Outcome {
    let text = value.as_text().filter(|text| text.starts_with('/'));
    let text = text.ok_or(
        "`match.file` must be the absolute path of a file that only these nodes have, such as \
         \"/etc/holdfast/role-gpu\"",
    )?;
    let root = root.recording();
    let is_there = root.exists(text.trim_start_matches('/'));
    if let Some(failure) = root.take_failures().first() {
        return Err(NoResult::unread("match.file", failure));
    }
    Ok((
        is_there,
        format!("the file `{text}` {}", if is_there { "exists" } else { "does not exist" }),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::NodeLabels;

    fn section(condition: &str, name: &str, root: &Path) -> Result<(bool, String), String> {
        let table = Table::parse(&format!("[[node]]\n{condition}\n"), Path::new("f")).unwrap();
        let value = &table.get("node").unwrap().as_list().unwrap()[0];
        let node = Node::named(name, root);
        let read = Section::read(value, &NodeFacts::of(&node, &NodeLabels::default()));
        read.map(|section| (section.matches, section.why)).map_err(|error| error.in_full())
    }

    #[test]
    fn a_section_is_for_nodes_of_a_name_or_with_a_file() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("role-gpu"), "").unwrap();
        for (condition, name, matches, why) in [
            (
                "match = { name = [\"cpu-*\", \"gpu-?\"] }",
                "gpu-7",
                true,
                "the name matches `gpu-?`",
            ),
            ("match = { name = \"GPU-*\" }", "gpu-7.example.com", true, "the name matches `GPU-*`"),
            ("match.name = [\"gpu-?\"]", "gpu-17", false, "the name matches none of its patterns"),
            ("match = { file = \"/role-gpu\" }", "x", true, "the file `/role-gpu` exists"),
            ("match = { file = \"/role-cpu\" }", "x", false, "the file `/role-cpu` does not exist"),
            (
                "match = { name = \"x\", file = \"/role-cpu\" }",
                "x",
                false,
                "the name matches `x`, and the file `/role-cpu` does not exist",
            ),
        ] {
            assert_eq!(
                section(condition, name, root.path()),
                Ok((matches, why.to_owned())),
                "{condition} {name}"
            );
        }
    }

    #[test]
    fn every_mistake_is_one_sentence_with_its_place() {
        for (condition, expected) in [
            ("", "line 1, column 1: a section `node` needs a `match`"),
            ("match = {}", "line 2, column 1: `match` is empty"),
            ("match = 1", "line 2, column 1: `match` must be a table, such as"),
            (
                "match = { nam = \"x\" }",
                "line 2, column 11: unknown key `nam`; did you mean `name`?",
            ),
            ("match = { name = [] }", "column 11: `match.name` must be a list of patterns"),
            ("match = { name = [1] }", "`match.name` must be a list of patterns"),
            ("match = { name = \"[\" }", "the pattern `[` of `match.name` is not a valid glob"),
            (
                "match = { name = \"x\" }\ncluster.node_labels = \"api\"",
                "line 3, column 1: `cluster` cannot be set for some nodes only",
            ),
            ("match = { file = \"role\" }", "`match.file` must be the absolute path"),
        ] {
            let problem = section(condition, "x", Path::new("/")).unwrap_err();
            assert!(problem.contains(expected), "{problem}\nshould contain: {expected}");
        }
    }
}
