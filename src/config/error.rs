//! What is wrong with a configuration, in one sentence.

use super::tree::Place;
use crate::domain;
use std::fmt;
use std::path::{Path, PathBuf};

/// A configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    file: Option<PathBuf>,
    /// Line and column.
    at: Option<(usize, usize)>,
    problem: String,
}

impl ConfigError {
    /// In one line, whatever of the file it quotes.
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        ConfigError { file: None, at: None, problem: printable(&problem.into()) }
    }

    pub(super) fn in_file(self, file: &Path) -> Self {
        ConfigError { file: Some(file.to_owned()), ..self }
    }

    /// At a place, where it is known.
    pub(super) fn at(self, place: Option<&Place>) -> Self {
        match place {
            Some(place) => ConfigError { file: Some(place.file.to_path_buf()), at: Some((place.line, place.column)), ..self },
            None => self,
        }
    }

    /// Says what the parser says, in one line.
    pub(super) fn of_parser(error: &toml::de::Error, place: Option<&Place>) -> Self {
        ConfigError::new(error.message().lines().next().unwrap_or("not valid TOML")).at(place)
    }

    /// The file that is meant.
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

    /// What is wrong, and what would be right.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("configuration")?;
        if let Some(file) = &self.file {
            write!(f, " `{}`", file.display())?;
        }
        if let Some((line, column)) = self.at {
            write!(f, ", line {line}, column {column}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for ConfigError {}

/// The text on one line, whatever of a file it quotes. TOML has no unprintable character in a comment either.
pub(super) fn printable(text: &str) -> String {
    domain::printable(text).into_owned()
}

/// Turns serde's "unknown field `x`, expected one of `a`, `b`" into a question with the nearest answer, and its types into
/// words of TOML.
pub(super) fn explain(message: &str) -> String {
    if let Some((found, wanted)) = message.strip_prefix("invalid type: ").and_then(|rest| rest.split_once(", expected ")) {
        let wanted = match wanted {
            "u32" | "u64" | "usize" => "a whole number that is not negative",
            "a sequence" => "a list such as [\"a\", \"b\"]",
            "a boolean" => "`true` or `false`",
            "a string" | "path string" | "string or table" => "a text in quotes",
            "a map" => "a table such as { key = \"value\" }",
            wanted if wanted.starts_with("struct ") => "a table such as { key = \"value\" }",
            wanted => wanted,
        };
        return format!("found {}, where {wanted} is expected", found.replace("sequence", "a list").replace("map", "a table"));
    }
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let kind = ["unknown field", "unknown variant"].into_iter().find(|kind| message.starts_with(kind));
    match (kind, quoted.as_slice()) {
        (Some("unknown field"), [unknown, known @ ..]) => self::unknown("key", unknown, known),
        (Some(_), [unknown, known @ ..]) => self::unknown("value", unknown, known),
        _ => message.to_owned(),
    }
}

/// An unknown key or value, with the nearest known one or with all of them.
pub(super) fn unknown(what: &str, unknown: &str, known: &[&str]) -> String {
    match nearest(unknown, known) {
        Some(near) => format!("unknown {what} `{unknown}`; did you mean `{near}`?"),
        None => format!("unknown {what} `{unknown}`; known are {}", list(known)),
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
        let known = "unknown field `replica`, expected one of `name`, `class`, `replicas`";
        assert_eq!(explain(known), "unknown key `replica`; did you mean `replicas`?");
        let far = "unknown field `zzz`, expected `listen`";
        assert_eq!(explain(far), "unknown key `zzz`; known are `listen`");
        assert_eq!(explain("missing field `name`"), "missing field `name`");
    }

    #[test]
    fn what_is_quoted_stays_in_its_line_and_commands_no_terminal() {
        let error = ConfigError::new(unknown("value", "e\nvv\u{1b}[31mär", &["envvar"]));
        assert_eq!(error.to_string(), "configuration: unknown value `e\\nvv\\u{1b}[31mär`; known are `envvar`");
    }

    #[test]
    fn a_wrong_type_is_said_in_words_of_toml() {
        let said = explain("invalid type: string \"4\", expected u32");
        assert_eq!(said, "found string \"4\", where a whole number that is not negative is expected");
        assert_eq!(explain("invalid type: map, expected a sequence"), "found a table, where a list such as [\"a\", \"b\"] is expected");
    }
}
