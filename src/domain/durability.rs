//! What an answered Allocate survives.

use super::time::Timestamp;
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
    /// Since when the history cannot be read, if it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<Unreadable>,
}

/// A history that cannot be read. Nothing of it is lost by that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreadable {
    /// Since when.
    pub since: Timestamp,
    /// Why.
    pub because: Because,
}

/// Why a history cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Because {
    /// Its database is slow to open.
    Slow,
    /// The system does not let its database be opened.
    Refused,
    /// Its database was closed after an error.
    Failed,
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
