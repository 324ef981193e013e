//! Errors of a configuration, each one sentence.
//!
//! A value of a file may be a secret in the wrong place. So a message marks the values that it
//! quotes with [`hidden`], and has two forms. The full form is for `holdfast config check`, which a
//! person runs on the file. The form without values is for the log, the page, `status` and doctor's
//! archive.

use super::tree::Place;
use crate::domain;
use serde::de::Unexpected;
use std::fmt;
use std::path::{Path, PathBuf};

/// The error of a configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    file: Option<PathBuf>,
    /// Line and column.
    at: Option<(usize, usize)>,
    problem: String,
    /// The problem without the values that it quotes.
    public: String,
    is_unread: bool,
}

/// The marks around a quoted value: noncharacters, which no file contains (Unicode 15,
/// "Noncharacters").
const VALUE: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// A longer key, or one with other characters than a bare key of TOML, is treated as a value in the
/// wrong place.
const KEY_CHARS_MAX: usize = 32;

/// A value of a file, marked for a message.
pub(super) fn hidden(value: impl fmt::Display) -> String {
    format!("{}{}{}", VALUE[0], value.to_string().replace(VALUE, "\u{fffd}"), VALUE[1])
}

/// A message from another part of the code that quotes this value; marks the value.
pub(super) fn hidden_in(sentence: &str, value: &str) -> String {
    if value.is_empty() { sentence.to_owned() } else { sentence.replacen(value, &hidden(value), 1) }
}

/// The message without its values.
fn without_values(marked: &str) -> String {
    let mut parts = marked.split(VALUE[0]);
    let mut public = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        public.push('…');
        public.push_str(part.split_once(VALUE[1]).map_or("", |(_, rest)| rest));
    }
    public
}

impl ConfigError {
    /// An error on one line, even if it quotes text with line breaks. Values must be quoted by
    /// [`hidden`].
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        let marked = printable(&problem.into());
        ConfigError {
            file: None,
            at: None,
            public: without_values(&marked),
            problem: marked.replace(VALUE, ""),
            is_unread: false,
        }
    }

    /// The same error, if a file or a fact of the node cannot be read for now.
    pub(crate) fn unread(self) -> Self {
        ConfigError { is_unread: true, ..self }
    }

    /// Whether a file or a fact of the node cannot be read for now, such as the model of a GPU
    /// before its driver is loaded. The configuration may be valid.
    #[must_use]
    pub fn is_unread(&self) -> bool {
        self.is_unread
    }

    pub(super) fn in_file(self, file: &Path) -> Self {
        ConfigError { file: Some(file.to_owned()), ..self }
    }

    /// Adds the place, if it is known.
    pub(super) fn at(self, place: Option<&Place>) -> Self {
        match place {
            Some(place) => ConfigError {
                file: Some(place.file.to_path_buf()),
                at: Some((place.line, place.column)),
                ..self
            },
            None => self,
        }
    }

    /// An error with the first line of the TOML parser's message, and the form that it expects.
    /// Typical causes are a text without quotes, and YAML. A key that occurs twice has the form.
    pub(super) fn of_parser(error: &toml::de::Error, place: Option<&Place>) -> Self {
        let problem = error.message().lines().next().unwrap_or("not valid TOML");
        let form = match problem.starts_with("duplicate key") {
            true => "",
            false => "; TOML is expected, such as key = \"text in quotes\"",
        };
        ConfigError::new(format!("{problem}{form}")).at(place)
    }

    /// The file with the error.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// The line, counted from 1.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.at.map(|(line, _)| line)
    }

    /// The column, in characters counted from 1.
    #[must_use]
    pub fn column(&self) -> Option<usize> {
        self.at.map(|(_, column)| column)
    }

    /// The problem and the remedy. The text quotes values of the file, for the person who runs
    /// `holdfast config check`.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    fn place(&self) -> String {
        let mut place = "configuration".to_owned();
        if let Some(file) = &self.file {
            place += &format!(" `{}`", file.display());
        }
        if let Some((line, column)) = self.at {
            place += &format!(", line {line}, column {column}");
        }
        place
    }

    /// The message with its place and the values that it quotes.
    #[cfg(test)]
    pub(crate) fn in_full(&self) -> String {
        format!("{}: {}", self.place(), self.problem)
    }
}

/// The message without the values that it quotes.
impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place(), self.public)?;
        if self.public == self.problem {
            Ok(())
        } else {
            f.write_str("; `holdfast config check` shows the value")
        }
    }
}

impl std::error::Error for ConfigError {}

/// The text on one line, even if it quotes line breaks. TOML forbids unprintable characters in
/// comments too.
pub(super) fn printable(text: &str) -> String {
    domain::printable(text).into_owned()
}

const A_LIST: &str = "a list such as [\"a\", \"b\"]";

/// The message for a value of the wrong type, in TOML's words.
pub(super) fn wrong_type(found: &Unexpected<'_>, wanted: &str) -> String {
    let found = match found {
        Unexpected::Bool(truth) => format!("boolean `{}`", hidden(truth)),
        Unexpected::Signed(number) => format!("integer `{}`", hidden(number)),
        Unexpected::Unsigned(number) => format!("integer `{}`", hidden(number)),
        Unexpected::Float(number) => format!("floating point `{}`", hidden(number)),
        Unexpected::Str(text) => format!("string \"{}\"", hidden(text.escape_debug())),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a table".to_owned(),
        other => hidden(other),
    };
    let wanted = match wanted {
        "u32" | "u64" | "usize" => "a whole number that is not negative",
        "a sequence" => A_LIST,
        "a boolean" => "`true` or `false`",
        "a string" | "path string" | "string or table" => "a text in quotes",
        "a map" => "a table such as { key = \"value\" }",
        wanted if wanted.starts_with("struct ") => "a table such as { key = \"value\" }",
        wanted => wanted,
    };
    let remedy = match (found.as_str(), wanted) {
        ("a table", A_LIST) => "; a list of tables has two brackets, such as [[resource]]",
        _ => "",
    };
    format!("found {found}, where {wanted} is expected{remedy}")
}

/// The message for an unknown key or value. It names the nearest known one, or all of them.
pub(super) fn unknown(what: &str, unknown: &str, known: &[&str]) -> String {
    let is_bare = unknown.len() <= KEY_CHARS_MAX
        && unknown.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    let shown = if what == "key" && is_bare { unknown.to_owned() } else { hidden(unknown) };
    match nearest(unknown, known) {
        Some(near) => format!("unknown {what} `{shown}`; did you mean `{near}`?"),
        None => format!("unknown {what} `{shown}`; the known {what}s are {}", list(known)),
    }
}

/// The known word that `unknown` is most likely a misspelling of.
pub(super) fn nearest<'a>(unknown: &str, known: &[&'a str]) -> Option<&'a str> {
    let score = |word: &&str| strsim::normalized_damerau_levenshtein(unknown, word);
    let best = known.iter().copied().max_by(|a, b| score(a).total_cmp(&score(b)))?;
    (score(&best) >= 0.5).then_some(best)
}

fn list(words: &[&str]) -> String {
    words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_named_with_the_nearest_valid_one() {
        let known = ["name", "class", "replicas"];
        assert_eq!(
            unknown("key", "replica", &known),
            "unknown key `replica`; did you mean `replicas`?"
        );
        assert_eq!(
            unknown("key", "zzz", &["listen"]),
            "unknown key `zzz`; the known keys are `listen`"
        );
        // A value where a key is expected.
        let misplaced = ConfigError::new(unknown("key", "TOKEN=abc", &["env"]));
        assert_eq!(
            misplaced.to_string(),
            "configuration: unknown key `…`; the known keys are `env`; `holdfast config check` shows the value"
        );
    }

    #[test]
    fn a_quotation_has_no_line_breaks_and_no_control_characters() {
        let error = ConfigError::new(unknown("value", "e\nvv\u{1b}[31mär", &["envvar"]));
        assert_eq!(
            error.in_full(),
            "configuration: unknown value `e\\nvv\\u{1b}[31mär`; the known values are `envvar`"
        );
        assert_eq!(
            error.to_string(),
            "configuration: unknown value `…`; the known values are `envvar`; `holdfast config check` shows the value"
        );
    }

    #[test]
    fn a_value_cannot_end_its_quotation() {
        let error = ConfigError::new(format!(
            "`a.b` is `{}`, but must be 1",
            hidden("x\u{fdd1}secret\u{fdd0}")
        ));
        assert_eq!(error.problem(), "`a.b` is `x\u{fffd}secret\u{fffd}`, but must be 1");
        assert_eq!(
            error.to_string(),
            "configuration: `a.b` is `…`, but must be 1; `holdfast config check` shows the value"
        );
        assert_eq!(hidden_in("`x` is no name", "x"), format!("`{}` is no name", hidden("x")));
    }

    #[test]
    fn a_wrong_type_is_reported_in_terms_of_toml() {
        let message =
            |found, wanted| ConfigError::new(wrong_type(&found, wanted)).problem().to_owned();
        assert_eq!(
            message(Unexpected::Str("4"), "u32"),
            "found string \"4\", where a whole number that is not negative is expected"
        );
        assert_eq!(
            message(Unexpected::Map, "a sequence"),
            "found a table, where a list such as [\"a\", \"b\"] is expected; \
             a list of tables has two brackets, such as [[resource]]"
        );
    }
}
