//! Removes secrets from shared data: values of environments, arguments of commands, texts of
//! operators and commands, and everything that is named as a secret. This is the second line of
//! defence: none of it should be in these texts at all (`bundle.rs`).
//!
//! In structured documents, values are removed by their place. A known secret is removed from every
//! text, such as the log: whole or in part, across lines, and encoded as JSON, percent encoding or
//! Base64. In texts, the value after a word that names a secret is removed too.

use crate::config::Config;
use crate::domain::{Grant, Hook, without_output};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// The replacement of a secret.
const REDACTED: &str = "[redacted]";
/// Minimum length of a secret. A shorter value (`1`, `true`, `all`) is in too many texts, and is no
/// secret.
const BYTES_MIN: usize = 6;
/// A name that contains one of these is the name of a secret.
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
/// Tables of environments: all of their values are removed.
const ENVIRONMENTS: [&str; 3] = ["env", "envs", "environment"];
/// Texts of operators (the reason of a cordon) and of commands.
const TEXTS: [&str; 2] = ["cordoned", "said"];
/// A run of this many bytes of a secret is treated as a part of it.
const PIECE: usize = 12;

/// The known secrets of this node.
#[derive(Debug, Clone, Default)]
pub struct Redactor {
    /// Secrets that are shorter than a piece.
    short: BTreeSet<String>,
    /// All pieces of longer secrets.
    pieces: BTreeSet<[u8; PIECE]>,
}

impl Redactor {
    /// Learns the configured environments and command arguments, and the environments of grants,
    /// which may come from an earlier configuration.
    #[must_use]
    pub fn of(config: Option<&Config>, grants: &[Grant]) -> Self {
        let mut this = Redactor::default();
        for spec in config.into_iter().flat_map(|config| &config.resources) {
            spec.env.values().for_each(|value| this.add_secret(value));
            let check = spec.hooks.check.as_ref().map(|check| &check.run);
            for hook in spec.hooks.before_start.iter().chain(&spec.hooks.after_release).chain(check)
            {
                if let Hook::Command { argv, .. } = hook {
                    argv.iter().skip(1).for_each(|argument| this.add_secret(argument));
                }
            }
        }
        for grant in grants {
            // Keep values that a contract adds to name the devices: the report is about these
            // devices.
            let names_device = |value: &str| {
                let of_device = grant
                    .devices
                    .iter()
                    .flat_map(|device| [device.id.as_str(), device.key.as_str()]);
                let nodes =
                    grant.devices.iter().flat_map(|device| &device.nodes).map(String::as_str);
                of_device
                    .chain(nodes)
                    .chain(grant.devices.iter().filter_map(|device| device.function()))
                    .any(|name| !name.is_empty() && (value.contains(name) || name.contains(value)))
            };
            let of_claim = grant.claim.iter().flat_map(|hold| &hold.devices);
            let edits = of_claim.map(|claimed| &claimed.edits).chain([&grant.edits]);
            edits
                .flat_map(|edits| &edits.envs)
                .filter(|(name, value)| is_secret(name) || !names_device(value))
                .for_each(|(_, value)| this.add_secret(value));
        }
        this
    }

    /// Removes this value from all later texts.
    pub fn add_secret(&mut self, value: &str) {
        for part in std::iter::once(value).chain(value.lines().map(str::trim)) {
            if part.len() < BYTES_MIN {
                continue;
            }
            for form in forms(part) {
                match form.len() {
                    ..BYTES_MIN => {}
                    BYTES_MIN..PIECE => drop(self.short.insert(form)),
                    _ => self.pieces.extend(
                        form.as_bytes()
                            .windows(PIECE)
                            .filter_map(|piece| <[u8; PIECE]>::try_from(piece).ok()),
                    ),
                }
            }
        }
    }

    /// Learns the secrets of a document by their place.
    pub fn learn_from(&mut self, document: &Value) {
        let _redacted = self.document(document.clone());
    }

    /// The document without secrets.
    #[must_use]
    pub fn document(&mut self, value: Value) -> Value {
        match value {
            Value::Object(object) => Value::Object(
                object.into_iter().map(|(name, value)| self.member(name, value)).collect(),
            ),
            Value::Array(values) => {
                Value::Array(values.into_iter().map(|value| self.document(value)).collect())
            }
            Value::String(text) => Value::String(self.text(&text)),
            other => other,
        }
    }

    fn member(&mut self, name: String, value: Value) -> (String, Value) {
        let value = match value {
            Value::Object(object) if ENVIRONMENTS.contains(&name.as_str()) => {
                Value::Object(self.all_of(object))
            }
            Value::Array(mut command) if name == "command" && command.len() > 1 => {
                // The program matters; its arguments may be secrets.
                command.drain(1..).for_each(|argument| self.add_secrets_of(&argument));
                command.push(REDACTED.into());
                Value::Array(command)
            }
            Value::String(text) if text.is_empty() => text.into(),
            Value::Array(values) if values.is_empty() => values.into(),
            value @ (Value::String(_) | Value::Array(_) | Value::Number(_))
                if TEXTS.contains(&name.as_str()) || is_secret(&name) =>
            {
                self.add_secrets_of(&value);
                REDACTED.into()
            }
            other => self.document(other),
        };
        (name, value)
    }

    /// Learns every text and number of a value.
    fn add_secrets_of(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.add_secret(text),
            Value::Number(number) => self.add_secret(&number.to_string()),
            Value::Array(values) => values.iter().for_each(|value| self.add_secrets_of(value)),
            Value::Object(object) => object.values().for_each(|value| self.add_secrets_of(value)),
            Value::Bool(_) | Value::Null => {}
        }
    }

    fn all_of(&mut self, object: Map<String, Value>) -> Map<String, Value> {
        let redact = |(name, value): (String, Value)| {
            self.add_secrets_of(&value);
            (name, Value::from(REDACTED))
        };
        object.into_iter().map(redact).collect()
    }

    /// The text without secrets.
    #[must_use]
    pub fn text(&self, text: &str) -> String {
        let known = self.without_pieces(text);
        let known = self.short.iter().fold(known, |text, value| {
            if text.contains(value.as_str()) {
                text.replace(value.as_str(), REDACTED)
            } else {
                text
            }
        });
        // The log of an earlier version contains the output of hooks.
        let known: String = known
            .split_inclusive('\n')
            .map(|line| match without_output(line) {
                ended if ended.len() < line.len() => {
                    format!("{ended} {REDACTED}{}", if line.ends_with('\n') { "\n" } else { "" })
                }
                line => line.to_owned(),
            })
            .collect();
        without_users(&without_named(&known))
    }

    /// The text without each run of bytes that belongs to a secret.
    fn without_pieces(&self, text: &str) -> String {
        let bytes = text.as_bytes();
        let is_known = |start: usize| {
            let piece = bytes
                .get(start..start + PIECE)
                .and_then(|piece| <[u8; PIECE]>::try_from(piece).ok());
            piece.is_some_and(|piece| self.pieces.contains(&piece))
        };
        let (mut kept, mut copied, mut at) = (String::new(), 0, 0);
        while at + PIECE <= bytes.len() {
            if !is_known(at) {
                at += 1;
                continue;
            }
            let start = text.floor_char_boundary(at);
            let mut end = at + PIECE;
            while at < end {
                at += 1;
                if is_known(at) {
                    end = at + PIECE;
                }
            }
            kept.push_str(text.get(copied..start).unwrap_or_default());
            kept.push_str(REDACTED);
            copied = text.ceil_char_boundary(end);
            at = copied;
        }
        kept + text.get(copied..).unwrap_or_default()
    }
}

/// All encodings of a secret: plain, JSON, debug output, percent encoding, and Base64 after zero to
/// two other bytes.
fn forms(value: &str) -> Vec<String> {
    let json = serde_json::to_string(value).unwrap_or_default();
    let percent = |keep: &str| {
        let encode = |byte: u8| {
            let is_kept = byte.is_ascii_alphanumeric() || keep.as_bytes().contains(&byte);
            if is_kept { char::from(byte).to_string() } else { format!("%{byte:02X}") }
        };
        value.bytes().map(encode).collect::<String>()
    };
    let base64 = |before: usize| {
        let encoded = STANDARD_NO_PAD.encode([&[0; 2][..before], value.as_bytes()].concat());
        // The first and the last character also encode adjacent bytes.
        let (skip, end) = ((before * 8).div_ceil(6), (before + value.len()) * 8 / 6);
        encoded.get(skip..end).unwrap_or_default().to_owned()
    };
    let plain = [
        value.to_owned(),
        json.trim_matches('"').to_owned(),
        value.escape_debug().to_string(),
        percent("-._~"),
        percent("-._~/:@!$&'()*+,;="),
    ];
    let encoded =
        (0..3).map(base64).flat_map(|text| [text.replace('+', "-").replace('/', "_"), text]);
    plain.into_iter().chain(encoded).collect()
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|secret| name.contains(secret))
}

/// Removes the value after a word that names a secret: `--token=x`, `password: x`, `"secret":"x"`,
/// `Authorization: Bearer x`.
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

/// The offset and the length of the value after a name. The value of an option may follow a space.
fn value_after(after: &str, is_option: bool) -> Option<(usize, usize)> {
    let begins = |c: char| !matches!(c, '"' | '\'' | '\\' | '=' | ':' | ' ' | '\t');
    let gap = after.find(begins)?;
    let between = &after[..gap];
    let is_named = between.contains(['=', ':']) || is_option && !between.is_empty();
    let value = &after[gap..];
    let scheme = ["Bearer ", "Basic ", "bearer ", "basic "]
        .into_iter()
        .find(|scheme| value.starts_with(scheme))
        .map_or(0, str::len);
    let end = value[scheme..]
        .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '&' | '}' | ']' | '\\'))
        .map_or(value.len(), |end| scheme + end);
    (is_named && end > 0).then_some((gap, end))
}

/// Removes users and passwords from URLs: `https://user:word@host`.
fn without_users(text: &str) -> String {
    let mut parts = text.split("://");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept.push_str("://");
        let authority =
            part.find(|c: char| c == '/' || c.is_whitespace() || c == '"').unwrap_or(part.len());
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
    use crate::domain::{AllocId, ContainerEdits, DeviceId, GrantState, GrantedDevice, Timestamp};
    use serde_json::json;

    #[test]
    fn only_values_with_a_secret_name_are_redacted() {
        let redactor = Redactor::default();
        for (text, expected) in [
            ("login --token=abc123 --user me", "login --token=[redacted] --user me"),
            ("login --token abc123 now", "login --token [redacted] now"),
            ("{\"api_token\":\"abc\",\"n\":1}", "{\"api_token\":\"[redacted]\",\"n\":1}"),
            ("Authorization: Bearer eyJhbGci.x.y done", "Authorization: [redacted] done"),
            ("DB_PASSWORD=pä55, next", "DB_PASSWORD=[redacted], next"),
            (
                "see https://me:word@host/path and http://host/x@y",
                "see https://[redacted]@host/path and http://host/x@y",
            ),
            ("the token was refused", "the token was refused"),
            ("token", "token"),
            (
                "resource=nvidia.com/gpu key=pci:0000:18:00.0",
                "resource=nvidia.com/gpu key=pci:0000:18:00.0",
            ),
            ("größe ://", "größe ://"),
            (
                "a\nit has failed (exit status: 1), and said last: s3cret\nb",
                "a\nit has failed (exit status: 1) [redacted]\nb",
            ),
        ] {
            assert_eq!(redactor.text(text), expected);
        }
    }

    #[test]
    fn environments_and_arguments_are_redacted_everywhere() {
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
        assert_eq!(
            redactor.text("1: correct horse, battery and staple!"),
            "1: [redacted], [redacted] and [redacted]"
        );
    }

    #[test]
    fn a_secret_is_found_in_part_and_in_other_encodings() {
        let mut redactor = Redactor::default();
        let secret = "correct \"horse\"\\bättery/staple+tr0ub4dor";
        redactor.add_secret(secret);
        redactor.add_secret("first line of it\nsecond line of it");
        let base64 = |text: &str| STANDARD_NO_PAD.encode(text);
        for written in [
            secret.to_owned(),
            secret[..20].to_owned(),
            secret[secret.len() - 15..].to_owned(),
            serde_json::to_string(secret).unwrap(),
            format!("{secret:?}"),
            "correct%20%22horse%22%5Cb%C3%A4ttery%2Fstaple%2Btr0ub4dor".to_owned(),
            base64(secret),
            base64(&format!("user:{secret}")),
            base64(&format!("a user:{secret}")),
            "second line of it".to_owned(),
        ] {
            let shown = redactor.text(&format!("<ä {written} ä>"));
            let rest = shown.replace(REDACTED, "");
            assert!(
                shown.contains(REDACTED)
                    && rest.starts_with("<ä ")
                    && rest.ends_with(" ä>")
                    && rest.len() < 26,
                "{written}: {shown}"
            );
        }
        assert_eq!(
            redactor.text("a correct text stays, and so does a line"),
            "a correct text stays, and so does a line"
        );
    }

    #[test]
    fn texts_of_operators_and_commands_are_redacted() {
        let mut redactor = Redactor::default();
        let report = json!({ "id": "GPU-1", "cordoned": "ask Jane", "said": [{ "said": "token abc123def456ghi", "phase": "check" }] });
        assert_eq!(
            redactor.document(report),
            json!({ "id": "GPU-1", "cordoned": REDACTED, "said": REDACTED })
        );
        assert_eq!(
            redactor.document(json!({ "cordoned": null, "said": [] })),
            json!({ "cordoned": null, "said": [] })
        );
        assert_eq!(redactor.text("it wrote: abc123def456ghi"), "it wrote:[redacted]");
    }

    #[test]
    fn secrets_of_earlier_grants_are_redacted_and_device_ids_stay() {
        let id = "GPU-5a7c1f00-1111";
        let envs = [
            ("NVIDIA_VISIBLE_DEVICES", id),
            ("LICENCE", "rotated-hunter2"),
            ("API_TOKEN", "s3cret"),
        ];
        let envs = envs.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let grant = Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: DeviceId::new(id),
                key: "pci:0000:18:00.0/10de:2330".into(),
                numa_nodes: vec![],
                nodes: vec![],
                objects: Vec::new(),
            }],
            edits: ContainerEdits { envs, ..ContainerEdits::default() },
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            granted_at: Timestamp(0),
            version: String::new(),
            state: GrantState::Granted,
        };
        let redactor = Redactor::of(None, &[grant]);
        assert_eq!(
            redactor.text(&format!("{id} rotated-hunter2 s3cret")),
            format!("{id} [redacted] [redacted]")
        );
    }
}
