//! Takes secrets out of what is given away: values of environments, arguments of commands, and whatever is named as a secret.
//!
//! Two nets, since neither is enough alone. Where a document has a structure, values are taken out by where they stand. What
//! was taken out of the configuration is then also taken out of every other text, such as the log, wherever it stands; and in
//! texts, what follows a word that names a secret is taken out too.

use crate::config::Config;
use crate::domain::{Arrange, Gather, Grant};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// What stands in the place of a secret.
const REDACTED: &str = "[redacted]";
/// A shorter value (`1`, `true`, `all`) is in too many texts to be taken out of them, and is no secret.
const BYTES_MIN: usize = 6;
/// Names that have one of these in them name a secret.
const NAMES: [&str; 12] = [
    "token",
    "secret",
    "passw",
    "passphrase",
    "credential",
    "api_key",
    "apikey",
    "api-key",
    "private_key",
    "access_key",
    "authorization",
    "cookie",
];
/// Tables of environments: all of their values are taken out.
const ENVIRONMENTS: [&str; 3] = ["env", "envs", "environment"];

/// Knows the secrets of this node.
#[derive(Debug, Clone, Default)]
pub struct Redactor {
    values: BTreeSet<String>,
}

impl Redactor {
    /// Knows the environments and the arguments of commands that are configured, and those of grants that were so before.
    #[must_use]
    pub fn of(config: Option<&Config>, grants: &[Grant]) -> Self {
        let mut this = Redactor::default();
        let specs = || config.into_iter().flat_map(|config| &config.resources);
        let names: BTreeSet<&str> = specs().flat_map(|spec| spec.env.keys()).map(String::as_str).gather();
        specs().flat_map(|spec| spec.env.values()).for_each(|value| this.know(value));
        let of_grants = grants.iter().flat_map(|grant| &grant.edits.envs);
        of_grants.filter(|(name, _)| names.contains(name.as_str()) || is_secret(name)).for_each(|(_, value)| this.know(value));
        this
    }

    /// Takes this value out of everything.
    pub fn know(&mut self, value: &str) {
        if value.len() >= BYTES_MIN {
            self.values.insert(value.to_owned());
        }
    }

    /// A document without secrets.
    #[must_use]
    pub fn document(&mut self, value: Value) -> Value {
        match value {
            Value::Object(object) => Value::Object(object.into_iter().map(|(name, value)| self.member(name, value)).collect()),
            Value::Array(values) => Value::Array(values.into_iter().map(|value| self.document(value)).collect()),
            Value::String(text) => Value::String(self.text(&text)),
            other => other,
        }
    }

    fn member(&mut self, name: String, value: Value) -> (String, Value) {
        let value = match value {
            Value::Object(object) if ENVIRONMENTS.contains(&name.as_str()) => Value::Object(self.all_of(object)),
            Value::Array(mut command) if name == "command" && command.len() > 1 => {
                // Which program it is matters; what it is told may be a secret.
                for argument in command.drain(1..) {
                    self.know(argument.as_str().unwrap_or_default());
                }
                command.push(REDACTED.into());
                Value::Array(command)
            }
            Value::String(text) if is_secret(&name) && !text.is_empty() => {
                self.know(&text);
                REDACTED.into()
            }
            other => self.document(other),
        };
        (name, value)
    }

    fn all_of(&mut self, object: Map<String, Value>) -> Map<String, Value> {
        let redact = |(name, value): (String, Value)| {
            self.know(value.as_str().unwrap_or_default());
            (name, Value::from(REDACTED))
        };
        object.into_iter().map(redact).collect()
    }

    /// A text without secrets.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        // The longest first: one may be a part of another.
        let mut values: Vec<&String> = self.values.iter().filter(|value| text.contains(value.as_str())).collect();
        values.arrange_by_key(|value| std::cmp::Reverse(value.len()));
        let known = values.into_iter().fold(text.to_owned(), |text, value| text.replace(value.as_str(), REDACTED));
        without_users(&without_named(&known))
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|secret| name.contains(secret))
}

/// Takes out what follows a word that names a secret: `--token=x`, `password: x`, `"secret":"x"`, `Authorization: Bearer x`.
fn without_named(text: &str) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_word) {
        let (before, from) = rest.split_at(start);
        let (word, after) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
        kept.push_str(before);
        kept.push_str(word);
        rest = after;
        let value = is_secret(word).then(|| value_after(after, word.starts_with("--"))).flatten();
        if let Some((gap, value)) = value {
            kept.push_str(&after[..gap]);
            kept.push_str(REDACTED);
            rest = &after[gap + value..];
        }
    }
    kept + rest
}

/// How far away the value of a name is, and how long it is. An option may have it behind a space.
fn value_after(after: &str, is_option: bool) -> Option<(usize, usize)> {
    let begins = |c: char| !matches!(c, '"' | '\'' | '\\' | '=' | ':' | ' ' | '\t');
    let gap = after.find(begins)?;
    let between = &after[..gap];
    let is_named = between.contains(['=', ':']) || is_option && !between.is_empty();
    let value = &after[gap..];
    let scheme = ["Bearer ", "Basic ", "bearer ", "basic "].into_iter().find(|scheme| value.starts_with(scheme)).map_or(0, str::len);
    let end = value[scheme..]
        .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '&' | '}' | ']' | '\\'))
        .map_or(value.len(), |end| scheme + end);
    (is_named && end > 0).then_some((gap, end))
}

/// Takes out the users and passwords of addresses: `https://user:word@host`.
fn without_users(text: &str) -> String {
    let mut parts = text.split("://");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept.push_str("://");
        let authority = part.find(|c: char| c == '/' || c.is_whitespace() || c == '"').unwrap_or(part.len());
        match part[..authority].rfind('@') {
            Some(at) => {
                kept.push_str(REDACTED);
                kept.push_str(&part[at..]);
            }
            None => kept.push_str(part),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_named_a_secret_is_taken_out_of_texts_and_nothing_else() {
        let redactor = Redactor::default();
        for (text, expected) in [
            ("login --token=abc123 --user me", "login --token=[redacted] --user me"),
            ("login --token abc123 now", "login --token [redacted] now"),
            ("{\"api_token\":\"abc\",\"n\":1}", "{\"api_token\":\"[redacted]\",\"n\":1}"),
            ("Authorization: Bearer eyJhbGci.x.y done", "Authorization: [redacted] done"),
            ("DB_PASSWORD=pä55, next", "DB_PASSWORD=[redacted], next"),
            ("see https://me:word@host/path and http://host/x@y", "see https://[redacted]@host/path and http://host/x@y"),
            ("the token was refused", "the token was refused"),
            ("token", "token"),
            ("resource=nvidia.com/gpu key=pci:0000:18:00.0", "resource=nvidia.com/gpu key=pci:0000:18:00.0"),
            ("größe ://", "größe ://"),
        ] {
            assert_eq!(redactor.text(text), expected);
        }
    }

    #[test]
    fn environments_and_arguments_are_taken_out_of_documents_and_then_of_every_text() {
        let mut redactor = Redactor::default();
        let document = json!({
            "resource": [{ "name": "a.b/c", "env": { "HARMLESS": "correct horse", "N": "1" },
                "after_release": { "command": ["/bin/wipe", "--key", "battery"], "timeout": "5s" } }],
            "proxy_password": "staple!", "replicas": 2,
        });
        let expected = json!({
            "resource": [{ "name": "a.b/c", "env": { "HARMLESS": REDACTED, "N": REDACTED },
                "after_release": { "command": ["/bin/wipe", REDACTED], "timeout": "5s" } }],
            "proxy_password": REDACTED, "replicas": 2,
        });
        assert_eq!(redactor.document(document), expected);
        assert_eq!(redactor.text("1: correct horse, battery and staple!"), "1: [redacted], [redacted] and [redacted]");
    }
}
