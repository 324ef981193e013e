//! `holdfast bench`: measures on this machine, each figure beside the floor that the machine sets in the same minute.

mod allocate;
mod bare;
mod caller;
mod floor;
mod followed;
mod instance;
mod life;
mod mapping;
mod node;
mod plot;
mod process;
mod report;
mod restart;
mod scale;
mod scan;
mod sheet;
mod soak;
mod trend;
mod upgrade;

use crate::console::Global;
use crate::console::exit::Failed;
use clap::Subcommand;

/// What can be measured.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// How long an Allocate takes, on the file system of the state directory
    Allocate(allocate::Options),
    /// How long the look at a node takes: this one, a captured one, or one of up to 10,000 PCI functions that is made for it
    Scan(scan::Options),
    /// What the daemon costs with many devices, and many daemons on one machine
    Scale(scale::Options),
    /// A daemon under load and faults for as long as one wants: whether anything of it grows, and whether the ledger is right
    Soak(soak::Options),
    /// How long the kubelet is without the devices after its own restart, beside a plugin that does nothing else
    Restart(restart::Options),
    /// What the kubelet notices when one daemon hands over to the next, while pods come and go
    Upgrade(upgrade::Options),
}

/// Measures and prints.
///
/// # Errors
/// When the private instance cannot be set up, or when it does not answer as it should.
pub fn run(global: &Global, verb: &Verb) -> Result<(), Failed> {
    match verb {
        Verb::Allocate(options) => allocate::run(global, options),
        Verb::Scan(options) => scan::run(global, options),
        Verb::Scale(options) => scale::run(global, options),
        Verb::Soak(options) => soak::run(global, options),
        Verb::Restart(options) => restart::run(global, options),
        Verb::Upgrade(options) => upgrade::run(global, options),
    }
}
