//! What an answered Allocate survives.

use serde::{Deserialize, Serialize};

/// How the ledger is kept at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Whether the journal can be written: then everything that is answered is as durable as was promised.
    pub journal: bool,
    /// Whether the query database follows it.
    pub database: bool,
    /// Entries that were answered and are nowhere but in memory.
    pub not_durable: usize,
}

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
