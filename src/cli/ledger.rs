//! `holdfast ledger`: exports, imports and verifies the ledger.

mod export;
mod import;
mod verify;

use crate::console::Global;
use crate::console::exit::Failed;
use clap::Subcommand;
use std::path::PathBuf;

/// Verbs on the ledger.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print every grant, held or released, as one JSON document
    Export,
    /// Import an export into a ledger that no daemon uses; imports all or nothing, and overwrites
    /// nothing
    Import {
        /// A document of `holdfast ledger export`; `-` is standard input
        file: PathBuf,
    },
    /// Check both copies of the ledger without changing them; exit code 1 if there is a problem
    Verify,
}

/// Runs one verb.
///
/// # Errors
/// When the ledger cannot be read, is not sound, or rejects the import.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Export => export::run(global),
        Verb::Import { file } => import::run(global, file),
        Verb::Verify => verify::run(global),
    }
}
