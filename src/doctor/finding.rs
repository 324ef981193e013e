//! Findings and the report of them.

use super::codes::{Code, Level};
use serde::Serialize;

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its severity.
    pub level: Level,
    /// The stable name of its kind; for level `Ok`, the name of the check.
    pub code: &'static str,
    /// The object: a path, a resource, a device.
    pub on: String,
    /// The problem.
    pub found: String,
    /// The impact.
    pub why: &'static str,
    /// The fix, in words.
    pub todo: String,
    /// The command of the fix, if one is enough.
    pub command: Option<String>,
}

impl Finding {
    /// A finding of this kind.
    pub fn new(
        code: &Code,
        on: impl ToString,
        found: impl Into<String>,
        todo: impl Into<String>,
    ) -> Self {
        let (level, why) = (code.level, code.why);
        Finding {
            level,
            code: code.name,
            on: on.to_string(),
            found: found.into(),
            why,
            todo: todo.into(),
            command: None,
        }
    }

    /// Adds the command of the fix.
    #[must_use]
    pub fn by(self, command: impl Into<String>) -> Self {
        Finding { command: Some(command.into()), ..self }
    }
}

/// All findings, the worst first (`doctor -o json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The version of this document's format.
    pub schema: u32,
    /// The version of this program.
    pub version: &'static str,
    /// The findings; level `Ok` last.
    pub findings: Vec<Finding>,
    /// The checks that could not run without more facts.
    pub unknown: Vec<&'static str>,
}

impl Report {
    /// Number of findings of a level.
    #[must_use]
    pub fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// Whether there is neither an error nor a warning.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.count(Level::Error) + self.count(Level::Warning) == 0
    }
}
