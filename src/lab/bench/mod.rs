//! `holdfast bench`: measurements on this machine. Each figure is compared with the machine's
//! floor, measured in the same minute.

mod allocate;
mod caller;
mod floor;
mod holder_check;
mod instance;
mod kubelet_run;
mod logged_daemon;
mod measurements;
mod minimal_plugin;
mod node;
mod plot;
mod process;
mod report;
mod restart;
mod scale;
mod scan;
mod soak;
mod trend;
mod upgrade;

use crate::console::Global;
use crate::console::exit::Failed;
use clap::Subcommand;

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Measure the duration of an Allocate, on the file system of the state directory
    Allocate(allocate::Options),
    /// Measure the duration of a scan: of this node, a captured one, or a generated one with up to
    /// 10,000 PCI functions
    Scan(scan::Options),
    /// Measure the cost of a daemon with many devices, and of many daemons on one machine
    Scale(scale::Options),
    /// Run a daemon under load and faults: check that its memory and descriptors do not grow and
    /// that its ledger is correct
    Soak(soak::Options),
    /// Measure how long the kubelet lacks the devices after its restart, compared with a minimal
    /// plugin
    Restart(restart::Options),
    /// Measure the effects of a handover between two daemons on the kubelet, while pods are created
    /// and deleted
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
