//! `holdfast ledger`: the ledger as a document, with and without a running daemon.

use super::exit::{FAILURE, Failed};
use super::{Global, block_on, print, who};
use crate::app::{ControlError, control_get};
use crate::domain::Grant;
use crate::store;
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
            let asked: Result<Vec<Grant>, ControlError> = block_on(control_get(&global.run_dir, "/v1/export"))?;
            let grants = match asked {
                Ok(grants) => grants,
                Err(ControlError::Absent { .. }) => {
                    let mut grants = store::peek(&global.state_dir)?.grants;
                    let (released, problem) = store::peek_history(&global.state_dir)?;
                    grants.extend(released);
                    if let Some(problem) = problem {
                        super::eprintln(format_args!("holdfast: what was given back is missing from this export: {problem}"));
                    }
                    grants
                }
                Err(error) => return Err(Failed::new(FAILURE, error)),
            };
            let json = serde_json::to_string_pretty(&who::document(&grants)).map_err(|error| Failed::new(FAILURE, error))?;
            print(format_args!("{json}\n"))
        }
    }
}
