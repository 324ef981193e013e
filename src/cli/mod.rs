//! The command line: verbs, output and exit codes. Data on standard output, everything else on standard error.

pub mod configuration;
pub mod device;
pub mod discover;
pub mod doctor;
pub mod document;
pub mod handover;
pub mod history;
#[cfg(any(test, not(feature = "lab")))]
mod lab_command;
pub mod ledger;
pub mod query;
pub mod run;
pub mod source;
pub mod status;
pub mod topology;
pub mod watch;
pub mod when;
pub mod who;

use crate::console::exit::{self, Failed};
use crate::console::text::Text;
use crate::console::{Global, Output, eprint, not_printed, screen};
use crate::host::private::keep_files_private;
#[cfg(feature = "lab")]
use crate::lab::{bench, demo};
use crate::telemetry::logging;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Offers a Kubernetes node's devices to the kubelet, and never loses track of which container holds which.
#[derive(Debug, Parser)]
#[command(name = "holdfast", version, max_term_width = 100, after_help = EXIT_CODES)]
struct Cli {
    #[command(flatten, next_help_heading = "Options of every verb")]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 failed, 2 usage, 3 configuration, 4 kubelet directory, 5 state directory, \
                          6 already running, 7 an actor died too often, 8 nobody holds what `who` was asked for, 9 `config import` left out wrong values, \
                          10 `doctor` found something to mend, 11 limits of the process.";

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the daemon
    Run(run::Options),
    /// Show what Holdfast does, on a simulated node with a simulated kubelet: no privileges, no hardware
    #[cfg(feature = "lab")]
    Demo(demo::Options),
    /// Show what Holdfast does, on a simulated node with a simulated kubelet (package holdfast-lab)
    #[cfg(not(feature = "lab"))]
    Demo(lab_command::Arguments),
    /// List the devices of this node
    Discover {
        /// Every PCI function, bridges too
        #[arg(long)]
        all: bool,
    },
    /// Check this node, and say what is wrong and what to do; or collect all that a report of a fault needs
    Doctor(doctor::Options),
    /// Draw the node: NUMA nodes, host bridges, switches, devices with their health, and who has them
    Topology(topology::Options),
    /// Show the running daemon at a glance
    Status(status::Options),
    /// Show which container holds which device, or who holds one
    Who(who::Options),
    /// Show who held which device, and when
    History(history::Options),
    /// Show devices' health, take one out, give it back
    #[command(subcommand)]
    Device(device::Verb),
    /// Have the running daemon hand over to this binary, without an Allocate that fails: after an upgrade
    Handover,
    /// Check the configuration, show what it comes to, take one over from another plugin
    #[command(subcommand)]
    Config(configuration::Verb),
    /// Work on the ledger
    #[command(subcommand)]
    Ledger(ledger::Verb),
    /// Measure
    #[cfg(feature = "lab")]
    #[command(subcommand)]
    Bench(bench::Verb),
    /// Measure (package holdfast-lab)
    #[cfg(not(feature = "lab"))]
    Bench(lab_command::Arguments),
}

/// The whole command line, for those who write manual pages and completions of it (`examples/manual.rs`).
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Parses the command line and does what it says.
#[must_use]
pub fn main() -> ExitCode {
    let Cli { global, verb } = match Cli::try_parse() {
        // Without any verb the help is the answer too.
        Err(error) if error.kind() == ErrorKind::MissingSubcommand => {
            eprint(&Text::document(&command().render_help().to_string()));
            return ExitCode::from(exit::USAGE);
        }
        Ok(cli) => cli,
        // `--help` and `--version` are no errors to their reader, nor is a verb without what it does.
        Err(error) if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let printed = error.print().map_err(|error| not_printed(&error));
            return if error.use_stderr() { ExitCode::from(exit::USAGE) } else { exit::end(printed) };
        }
        Err(error) => return exit::end(Err(Failed::new(exit::USAGE, usage(&error.to_string())))),
    };
    if global.output == Output::Svg && !matches!(verb, Verb::Topology(_)) {
        return exit::end(Err(Failed::new(exit::USAGE, "only `holdfast topology` is drawn as a picture; say `-o table` or `-o json`")));
    }
    screen::init(global.color, global.output);
    // A picture is for whoever is to look at it; everything else that is created is root's.
    if !matches!(verb, Verb::Topology(_) | Verb::Bench(_) | Verb::Demo(_)) {
        keep_files_private();
    }
    let quiet = matches!(verb, Verb::Demo(_) | Verb::Bench(_));
    logging::init(global.log_format, if quiet { "off" } else { "info" });
    exit::end(match verb {
        Verb::Run(options) => run::run(&global, &options),
        Verb::Handover => handover::run(&global),
        #[cfg(feature = "lab")]
        Verb::Demo(options) => demo::run(&options),
        #[cfg(feature = "lab")]
        Verb::Bench(verb) => bench::run(&global, &verb),
        #[cfg(not(feature = "lab"))]
        Verb::Demo(_) => lab_command::run("demo"),
        #[cfg(not(feature = "lab"))]
        Verb::Bench(_) => lab_command::run("bench"),
        Verb::Discover { all } => discover::run(&global, all),
        Verb::Doctor(options) => doctor::run(&global, &options),
        Verb::Topology(options) => topology::run(&global, &options),
        Verb::Status(options) => status::run(&global, &options),
        Verb::Who(options) => who::run(&global, &options),
        Verb::History(options) => history::run(&global, &options),
        Verb::Device(verb) => device::run(&global, &verb),
        Verb::Config(verb) => configuration::run(&global, &verb),
        Verb::Ledger(verb) => ledger::run(&global, &verb),
    })
}

/// The parser's report in one line: what is wrong, what may have been meant, where to read on.
fn usage(report: &str) -> String {
    let mut paragraphs = report.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let problem = paragraphs.next().unwrap_or_default();
    let tip = paragraphs.find_map(|paragraph| paragraph.strip_prefix("tip: ").map(|tip| format!("; {tip}")));
    format!("{}{}; `holdfast --help` tells more", problem.trim_start_matches("error: "), tip.unwrap_or_default())
}
