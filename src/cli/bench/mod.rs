//! `holdfast bench`: measures on this machine, each figure beside the floor that the machine sets in the same minute.

mod allocate;
mod caller;
mod floor;
mod instance;
mod plot;
mod report;

use super::Global;
use super::exit::Failed;
use clap::Subcommand;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// How long an Allocate takes, on the file system of the state directory
    Allocate(allocate::Options),
}

/// Measures and prints.
///
/// # Errors
/// When the private instance cannot be set up, or when it does not answer as it should.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Allocate(options) => allocate::run(global, options),
    }
}
