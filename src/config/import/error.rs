//! Why an import failed.

use crate::config::error::printable;

/// Why an import failed, in one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct ImportError {
    pub(super) problem: String,
    /// Additional warnings, one sentence each.
    pub warnings: Vec<String>,
}

impl ImportError {
    /// The message is made printable: a key may contain a line break or terminal control
    /// characters.
    pub(super) fn new(problem: impl AsRef<str>) -> Self {
        ImportError { problem: printable(problem.as_ref()), warnings: Vec::new() }
    }
}
