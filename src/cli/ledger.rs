//! `holdfast ledger`: the ledger as a document, with and without a running daemon.

use super::exit::{FAILURE, Failed};
use super::{Global, document, print, source};
use crate::store::Told;
use clap::Subcommand;

/// What can be done with the ledger.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Print every grant, held and given back, as one JSON document
    Export,
}

/// Does what `verb` says.
///
/// # Errors
/// When the ledger cannot be read.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Export => {
            let mut grants = Vec::new();
            let problem = source::read(global, |told| {
                grants.extend(if let Told::Grant(grant) = told { Some(*grant) } else { None });
                true
            })?;
            if let Some(problem) = problem {
                super::eprintln(format_args!("holdfast: what was given back is missing from this export: {problem}"));
            }
            let json = serde_json::to_string_pretty(&document::document(&grants)).map_err(|error| Failed::new(FAILURE, error))?;
            print(format_args!("{json}\n"))
        }
    }
}
