//! The running configuration, as `status` reports it.

use crate::domain::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The report of the configuration in `status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigReport {
    /// The main file; `config.d` is in the same folder.
    pub source: PathBuf,
    /// The files that were read.
    pub files: Vec<PathBuf>,
    /// Counts the plans that came from the files in this process, from 1.
    pub generation: u64,
    /// CRC-32 of the files' texts, in hex.
    pub hash: String,
    /// When the files were read.
    pub loaded_at: Timestamp,
    /// Why the files are not in use; `null` when the last read succeeded.
    pub error: Option<String>,
    /// Keys that have other values in the files and take effect at the next start.
    pub needs_restart: Vec<String>,
}

/// The files and when they were read; also the generation, from the second one on.
impl fmt::Display for ConfigReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.files.is_empty() {
            return f.write_str("none: known hardware is offered under its usual names");
        }
        let files: Vec<_> = self.files.iter().map(|file| file.display().to_string()).collect();
        write!(f, "{}, read at {}", files.join(", "), self.loaded_at.to_seconds())?;
        if self.generation > 1 { write!(f, ", generation {}", self.generation) } else { Ok(()) }
    }
}
