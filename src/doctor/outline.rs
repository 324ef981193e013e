//! The parts of the configuration and of the mounts that a problem report contains: only data that
//! is known to be no secret.
//!
//! Of a valid configuration these are the values of keys whose values are keywords of ours,
//! numbers, names of devices and paths. Of an invalid one, only keys and value types are shown,
//! since a secret may be anywhere in it. Environments, command arguments, mounts and the settings
//! for Multus are never shown.

use serde_json::{Map, Value};

/// Tables and lists with arbitrary content of the operator.
const FREE: [&str; 5] = ["env", "command", "mounts", "additional_info", "match"];
/// Maximum length of a key of ours.
const KEY_CHARS_MAX: usize = 32;

/// A configuration document without the values that only its operator may read.
#[must_use]
pub(super) fn of_config(document: Value, is_valid: bool) -> Value {
    match document {
        Value::Object(object) => Value::Object(
            object.into_iter().map(|(key, value)| entry(key, value, is_valid)).collect(),
        ),
        Value::Array(values) => {
            values.into_iter().map(|value| of_config(value, is_valid)).collect()
        }
        value if is_valid => value,
        value => kind(&value),
    }
}

fn entry(key: String, value: Value, is_valid: bool) -> (String, Value) {
    let is_free = FREE.contains(&key.as_str());
    let value = if is_free { size(value) } else { of_config(value, is_valid) };
    (shown(key, is_valid && !is_free), value)
}

/// A key as it is, if it is one of ours. A value in place of a key has other characters.
fn shown(key: String, is_known: bool) -> String {
    let is_bare = key.len() <= KEY_CHARS_MAX
        && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    if is_known || is_bare { key } else { format!("(a key of {} characters)", key.chars().count()) }
}

/// The size and the type of a value. Names of environment variables are shown; their values are
/// not.
fn size(value: Value) -> Value {
    match value {
        Value::Object(object) => Value::Object(
            object
                .into_iter()
                .map(|(key, value)| (shown(key, false), kind(&value)))
                .collect::<Map<_, _>>(),
        ),
        Value::Array(values) => format!("(a list of {})", values.len()).into(),
        other => kind(&other),
    }
}

fn kind(value: &Value) -> Value {
    match value {
        Value::String(text) => format!("(a text of {} characters)", text.chars().count()),
        Value::Number(_) => "(a number)".into(),
        Value::Bool(_) => "(true or false)".into(),
        Value::Array(values) => format!("(a list of {})", values.len()),
        Value::Object(_) => "(a table)".into(),
        Value::Null => "(nothing)".into(),
    }
    .into()
}

/// A table of mounts (`/proc/self/mountinfo`, proc(5)) without sources and without options that
/// have a value. A server's address may contain a user and a password, and a mount option may
/// contain any secret.
#[must_use]
pub(super) fn of_mounts(table: &str) -> String {
    let line = |line: &str| {
        let (mount, file_system) = line.split_once(" - ")?;
        let flags = |options: &str| {
            options.split(',').filter(|option| !option.contains('=')).collect::<Vec<_>>().join(",")
        };
        let [id, parent, device, _root, at, options] =
            mount.split(' ').take(6).collect::<Vec<_>>().try_into().ok()?;
        let mut of_file_system = file_system.splitn(3, ' ');
        let (kind, options_below) =
            (of_file_system.next()?, of_file_system.nth(1).unwrap_or_default());
        Some(format!(
            "{id} {parent} {device} {at} {} - {kind} {}\n",
            flags(options),
            flags(options_below)
        ))
    };
    table.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn free_values_are_hidden_and_invalid_ones_shown_by_type() {
        let document = json!({
            "ledger": { "durability": "power-loss" },
            "resource": [{ "name": "a.b/c", "replicas": 2, "env": { "TOKEN": "hunter2", "N": 4242 }, "paths": ["/dev/a"],
                "mounts": [{ "host": "/hunter2", "container": "/x" }],
                "check": { "command": ["/bin/hunter2", "x"], "every": "60s" } }],
        });
        let wanted = json!({
            "ledger": { "durability": "power-loss" },
            "resource": [{ "name": "a.b/c", "replicas": 2, "env": { "TOKEN": "(a text of 7 characters)", "N": "(a number)" }, "paths": ["/dev/a"],
                "mounts": "(a list of 1)", "check": { "command": "(a list of 2)", "every": "60s" } }],
        });
        assert_eq!(of_config(document, true), wanted);
        let wrong = json!({ "resorce": { "env": "TOKEN=hunter2", "name": ["hunter2"], "TOKEN=hunter2": { "class": 4242 } } });
        let wanted = json!({ "resorce": { "env": "(a text of 13 characters)", "name": ["(a text of 7 characters)"],
            "(a key of 13 characters)": { "class": "(a number)" } } });
        assert_eq!(of_config(wrong, false), wanted);
    }

    #[test]
    fn a_mount_shows_its_path_type_and_flags() {
        let table = "36 35 98:0 /root /at rw,relatime master:1 - cifs //me:hunter2@host/share ro,username=me,password=hunter2,soft\nnonsense\n";
        assert_eq!(of_mounts(table), "36 35 98:0 /at rw,relatime - cifs ro,soft\n");
    }
}
