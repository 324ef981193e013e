//! `holdfast ledger`: the ledger as a document, out of it and into it, and whether it is sound.

mod export;
mod import;
mod verify;

use crate::console::Global;
use crate::console::exit::Failed;
use clap::Subcommand;
use std::path::PathBuf;

/// What can be done with the ledger.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print every grant, held and given back, as one JSON document
    Export,
    /// Take an export into a ledger that no daemon uses: all of it or nothing, and nothing is overwritten
    Import {
        /// A document of `holdfast ledger export`; `-` is standard input
        file: PathBuf,
    },
    /// Check both copies of the ledger, and change nothing; exit code 1 when something is wrong
    Verify,
}

/// Does what `verb` says.
///
/// # Errors
/// When the ledger cannot be read, is not sound, or cannot take what is imported.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Export => export::run(global),
        Verb::Import { file } => import::run(global, file),
        Verb::Verify => verify::run(global),
    }
}
