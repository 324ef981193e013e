//! The replies of nodes, and one document of all of them. Pure.
//!
//! Documents are merged as JSON values, not as types: nodes may run other versions. Their unknown
//! fields are kept, and missing ones are empty in tables.

use super::exec::Ended;
use crate::cli::query::UNKNOWN_NAMES;
use crate::console::exit::{FINDINGS, NO_HOLDER};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The longest part of a foreign text in a reason, in characters.
const REASON_CHARS_MAX: usize = 300;

/// What a node replied.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Reply {
    /// Its document, and its remarks on standard error.
    Document(Value, Vec<String>),
    /// It knows no device or resource of that name.
    Unknown(String),
    /// Why there is no answer.
    Failed(String),
}

impl Reply {
    /// The reply of a command that has ended.
    pub(super) fn of(ended: &Ended) -> Reply {
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let lines = stderr.lines().map(|line| line.strip_prefix("holdfast: ").unwrap_or(line));
        let lines: Vec<&str> = lines.filter(|line| !line.trim().is_empty()).collect();
        if [0, i32::from(NO_HOLDER), i32::from(FINDINGS)].contains(&ended.code) {
            return match serde_json::from_slice(&ended.stdout) {
                Ok(document @ Value::Object(_)) => {
                    Reply::Document(document, lines.into_iter().map(clipped).collect())
                }
                _ => Reply::Failed("its answer is no JSON document".into()),
            };
        }
        match lines.last() {
            Some(line) if UNKNOWN_NAMES.iter().any(|name| line.starts_with(name)) => {
                Reply::Unknown((*line).to_owned())
            }
            Some(line) => Reply::Failed(clipped(line)),
            None => Reply::Failed(format!("exit code {}", ended.code)),
        }
    }
}

fn clipped(text: &str) -> String {
    text.chars().take(REASON_CHARS_MAX).collect()
}

/// Which lists of a node's document become lists of the merged one.
pub(super) const LISTS_OF_GRANTS: &[&str] = &["grants", "last", "failures"];

/// All replies, by kind. Everything is sorted by node.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Merged {
    /// The rows of each list, with their node.
    pub(super) lists: BTreeMap<&'static str, Vec<Value>>,
    /// The rest of each node's document, with its node.
    pub(super) nodes: Vec<Value>,
    /// Nodes that know no device or resource of that name, with their sentences.
    pub(super) unknown: BTreeMap<String, String>,
    /// Nodes without an answer, with the reason.
    pub(super) failed: BTreeMap<String, String>,
    /// Nodes without a daemon.
    pub(super) without_daemon: BTreeSet<String>,
    /// Remarks, with the nodes that made them.
    pub(super) remarks: BTreeMap<String, Vec<String>>,
}

impl Merged {
    /// Merges replies. `lists` are the names of lists, or of single objects, that are moved out of
    /// the documents.
    pub(super) fn of(replies: BTreeMap<String, Reply>, lists: &[&'static str]) -> Merged {
        let mut merged = Merged::default();
        merged.lists.extend(lists.iter().map(|list| (*list, Vec::new())));
        for (node, reply) in replies {
            match reply {
                Reply::Document(mut document, remarks) => {
                    for list in lists {
                        let rows = document.as_object_mut().and_then(|all| all.remove(*list));
                        let rows = match rows {
                            Some(Value::Array(rows)) => rows,
                            Some(row @ Value::Object(_)) => vec![row],
                            _ => continue,
                        };
                        let rows = rows.into_iter().map(|row| with_node(&node, row));
                        merged.lists.entry(list).or_default().extend(rows);
                    }
                    merged.nodes.push(with_node(&node, document));
                    for remark in remarks {
                        merged.remarks.entry(remark).or_default().push(node.clone());
                    }
                }
                Reply::Unknown(sentence) => {
                    merged.unknown.insert(node, sentence);
                }
                Reply::Failed(reason) => {
                    merged.failed.insert(node, reason);
                }
            }
        }
        merged
    }

    /// The rows of a list.
    pub(super) fn rows(&self, list: &str) -> &[Value] {
        self.lists.get(list).map_or(&[], Vec::as_slice)
    }

    /// The number of nodes that answered.
    pub(super) fn answered(&self) -> usize {
        self.nodes.len() + self.unknown.len()
    }

    /// The whole as one document.
    pub(super) fn document(&self) -> Value {
        let failed = self.failed.iter().map(|(node, why)| json!({"node": node, "reason": why}));
        let mut document = Map::new();
        document.insert("schema".into(), json!(1));
        document.insert("nodes".into(), json!(self.nodes));
        document.insert("failed".into(), failed.collect());
        document.insert("without_daemon".into(), json!(self.without_daemon));
        for (list, rows) in &self.lists {
            document.insert((*list).to_owned(), json!(rows));
        }
        Value::Object(document)
    }

    /// Moves the devices of each topology, which is a tree, into a list.
    pub(super) fn devices_of_trees(&mut self) {
        let mut devices = Vec::new();
        for node in &self.nodes {
            let name = text(node, "node");
            let mut found = Vec::new();
            collect_devices(&node["parts"], &mut found);
            devices.extend(found.into_iter().map(|device| with_node(&name, device.clone())));
        }
        self.lists.insert("devices", devices);
    }

    /// Keeps only devices with this text in a value.
    pub(super) fn keep_devices(&mut self, wanted: &str) {
        let wanted = wanted.to_lowercase();
        self.lists.entry("devices").or_default().retain(|device| has_text(device, &wanted));
    }
}

/// Adds the name of the node to a row or a document.
fn with_node(node: &str, mut row: Value) -> Value {
    if let Some(row) = row.as_object_mut() {
        row.insert("node".into(), node.into());
    }
    row
}

/// The devices of parts and of the parts below them (`Picture` of `holdfast topology`).
fn collect_devices<'a>(parts: &'a Value, devices: &mut Vec<&'a Value>) {
    for part in parts.as_array().into_iter().flatten() {
        devices.extend(part.get("device").filter(|device| device.is_object()));
        collect_devices(&part["parts"], devices);
    }
}

/// Whether a value contains a text, in any case. `wanted` is in lower case.
fn has_text(value: &Value, wanted: &str) -> bool {
    match value {
        Value::String(text) => text.to_lowercase().contains(wanted),
        Value::Array(all) => all.iter().any(|value| has_text(value, wanted)),
        Value::Object(all) => all.values().any(|value| has_text(value, wanted)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The text of a field; empty if it is missing or unknown.
pub(super) fn text(row: &Value, field: &str) -> String {
    match &row[field] {
        Value::String(text) => text.clone(),
        Value::Null | Value::Array(_) | Value::Object(_) => String::new(),
        plain => plain.to_string(),
    }
}

/// The texts of a list, separated by commas.
pub(super) fn texts(row: &Value, field: &str) -> String {
    let all = row[field].as_array().into_iter().flatten();
    let all = all.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
    all.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i32, stdout: &str, stderr: &str) -> Ended {
        Ended { code, stdout: stdout.into(), stderr: stderr.into() }
    }

    #[test]
    fn a_reply_is_a_document_or_a_reason() {
        for (ended, wanted) in [
            (
                ended(0, r#"{"a": 1}"#, "holdfast: a remark\n"),
                Reply::Document(json!({"a": 1}), vec!["a remark".into()]),
            ),
            (ended(8, "{}", ""), Reply::Document(json!({}), Vec::new())),
            (ended(10, "{}", ""), Reply::Document(json!({}), Vec::new())),
            (ended(0, "[]", ""), Reply::Failed("its answer is no JSON document".into())),
            (ended(0, "", ""), Reply::Failed("its answer is no JSON document".into())),
            (
                ended(1, "", "note\nholdfast: no daemon runs\n\n"),
                Reply::Failed("no daemon runs".into()),
            ),
            (ended(137, "", ""), Reply::Failed("exit code 137".into())),
        ] {
            assert_eq!(Reply::of(&ended), wanted);
        }
    }

    #[test]
    fn a_node_without_the_device_is_no_failure() {
        let mut query = crate::cli::query::DeviceQuery::new("GPU-ff");
        query.add("", &crate::domain::DeviceId::new("GPU-aa"));
        let sentence = query.matches().unwrap_err();
        let reply = Reply::of(&ended(1, "", &format!("holdfast: {sentence}\n")));
        assert_eq!(reply, Reply::Unknown(sentence));

        let known = crate::cli::query::KnownResources::default();
        let sentence = known.check(Some(&"a.b/c".parse().unwrap()), Vec::new).unwrap_err();
        let reply = Reply::of(&ended(1, "", &format!("holdfast: {sentence}\n")));
        assert_eq!(reply, Reply::Unknown(sentence));
    }

    #[test]
    fn rows_get_their_node_and_unknown_fields_stay() {
        let replies = BTreeMap::from([
            ("b".to_owned(), Reply::Failed("late".into())),
            (
                "c".to_owned(),
                Reply::Document(
                    json!({"grants": [{"x": 1}], "last": null, "new": "y"}),
                    vec!["r".into()],
                ),
            ),
            (
                "a".to_owned(),
                Reply::Document(json!({"grants": [], "last": {"x": 2}}), vec!["r".into()]),
            ),
            ("d".to_owned(), Reply::Document(json!({"schema": 7}), Vec::new())),
        ]);
        let mut merged = Merged::of(replies, &["grants", "last"]);
        merged.without_daemon.insert("e".into());
        assert_eq!(
            merged.document(),
            json!({
                "schema": 1,
                "nodes": [{"node": "a"}, {"node": "c", "new": "y"}, {"node": "d", "schema": 7}],
                "grants": [{"node": "c", "x": 1}],
                "last": [{"node": "a", "x": 2}],
                "failed": [{"node": "b", "reason": "late"}],
                "without_daemon": ["e"],
            })
        );
        assert_eq!(merged.remarks["r"], ["a", "c"]);
        assert_eq!(merged.answered(), 3);
    }

    #[test]
    fn the_devices_of_a_tree_are_found_at_every_depth_and_by_any_text() {
        let tree = json!({"parts": [{"device": null, "parts": [
            {"device": {"id": "GPU-a", "model": "H100"}, "parts": [{"device": {"id": "MIG-b", "names": ["mlx5_0"]}}]},
        ]}]});
        let replies = BTreeMap::from([("n".to_owned(), Reply::Document(tree, Vec::new()))]);
        let mut merged = Merged::of(replies, &[]);
        merged.devices_of_trees();
        assert_eq!(merged.rows("devices").len(), 2);
        let found = |wanted: &str| {
            let mut merged = merged.clone();
            merged.keep_devices(wanted);
            merged.rows("devices").iter().map(|row| text(row, "id")).collect::<Vec<_>>()
        };
        assert_eq!(found("h100"), ["GPU-a"]);
        assert_eq!(found("MLX5"), ["MIG-b"]);
        assert!(found("a100").is_empty());
    }
}
