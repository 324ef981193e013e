//! What an answered Allocate survives.

use serde::{Deserialize, Serialize};

/// When a grant counts as recorded (I1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// It survives a power cut: on disk before Allocate answers.
    #[default]
    PowerLoss,
    /// It survives the death of the process: written before Allocate answers, on disk right after.
    ProcessCrash,
}

impl Durability {
    /// The word of the configuration file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Durability::PowerLoss => "power-loss",
            Durability::ProcessCrash => "process-crash",
        }
    }
}
