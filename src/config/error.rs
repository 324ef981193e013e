//! What is wrong with a configuration, in one sentence.

use std::fmt;
use std::path::{Path, PathBuf};

/// A configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    file: Option<PathBuf>,
    line: Option<usize>,
    problem: String,
}

impl ConfigError {
    pub(crate) fn new(problem: impl Into<String>) -> Self {
        ConfigError { file: None, line: None, problem: problem.into() }
    }

    pub(super) fn in_file(self, file: &Path) -> Self {
        ConfigError { file: Some(file.to_owned()), ..self }
    }

    /// Says the parser's error in our words: one line, with the nearest valid key.
    pub(super) fn of_toml(error: &toml::de::Error, text: &str, file: &Path) -> Self {
        let before = error.span().and_then(|span| text.get(..span.start));
        let line = before.map(|before| before.matches('\n').count() + 1);
        let message = error.message().lines().next().unwrap_or("not valid TOML");
        ConfigError { file: Some(file.to_owned()), line, problem: explain(message) }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("configuration")?;
        if let Some(file) = &self.file {
            write!(f, " `{}`", file.display())?;
        }
        if let Some(line) = self.line {
            write!(f, ", line {line}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for ConfigError {}

/// Turns serde's "unknown field `x`, expected one of `a`, `b`" into a question with the nearest answer.
fn explain(message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let kind = ["unknown field", "unknown variant"].into_iter().find(|kind| message.starts_with(kind));
    let (Some(kind), [unknown, known @ ..]) = (kind, quoted.as_slice()) else { return message.to_owned() };
    let what = if kind == "unknown field" { "key" } else { "value" };
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
}
