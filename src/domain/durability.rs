//! Durability of an answered Allocate.

use super::time::Timestamp;
use serde::{Deserialize, Serialize};

/// The current state of the ledger's storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerHealth {
    /// Whether the journal is writable. If so, every answered grant has the configured durability.
    pub journal: bool,
    /// Whether the query database is up to date with the journal.
    pub database: bool,
    /// Answered entries that exist only in memory.
    pub not_durable: usize,
    /// Why the history cannot be read, and since when; `None` if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreadable: Option<Unreadable>,
}

/// A history that cannot be read. None of its records is lost by that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreadable {
    /// Since when it has been unreadable.
    pub since: Timestamp,
    /// The reason.
    pub because: UnreadableReason,
}

/// Why a history cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnreadableReason {
    /// Its database is slow to open.
    Slow,
    /// The system refuses to open its database.
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
    /// The word in the configuration file.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Durability::PowerLoss => "power-loss",
            Durability::ProcessCrash => "process-crash",
        }
    }
}
