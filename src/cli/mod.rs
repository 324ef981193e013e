//! The command line: verbs, output and exit codes. Data on standard output, everything else on standard error.

pub mod bench;
pub mod configuration;
pub mod demo;
pub mod device;
pub mod discover;
pub mod doctor;
pub mod document;
pub mod exit;
pub mod handover;
pub mod history;
mod json;
pub mod ledger;
pub mod progress;
pub mod query;
pub mod run;
pub mod screen;
pub mod source;
pub mod status;
pub mod table;
pub mod text;
pub mod topology;
pub mod watch;
pub mod when;
pub mod who;

use self::exit::Failed;
use self::screen::Colour;
use self::text::Text;
use crate::config::{self, Node, Roots};
use crate::host::private::keep_files_private;
use crate::telemetry::logging::{self, LogFormat};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use std::fmt;
use std::io::{ErrorKind as ErrorKindOfIo, Write};
use std::path::PathBuf;
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

/// Options of every verb.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// The configuration file; drop-ins are read from `config.d` beside it [default: /etc/holdfast/config.toml]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where the node's sys, proc, dev, run/udev and var/log/pods lie
    #[arg(long, global = true, value_name = "DIR", default_value = "/")]
    pub host_root: PathBuf,
    /// The kubelet's directory
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// The ledger's directory
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/holdfast")]
    pub state_dir: PathBuf,
    /// Where the control socket lies
    #[arg(long, global = true, value_name = "DIR", default_value = "/run/holdfast")]
    pub run_dir: PathBuf,
    /// How results are printed
    #[arg(short, long, global = true, value_name = "FORM", default_value = "table")]
    pub output: Output,
    /// When results have colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Colour,
    /// How log lines look
    #[arg(long, global = true, value_name = "FORM", default_value = "text")]
    pub log_format: LogFormat,
}

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people; as wide as the terminal
    Table,
    /// For people whose terminals know nothing but ASCII
    Ascii,
    /// For programs
    Json,
    /// A picture: `topology` only
    Svg,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the daemon
    Run(run::Options),
    /// Show what Holdfast does, on a simulated node with a simulated kubelet: no privileges, no hardware
    Demo(demo::Options),
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
    #[command(subcommand)]
    Bench(bench::Verb),
}

impl Global {
    /// The four roots.
    #[must_use]
    pub fn roots(&self) -> Roots {
        Roots { host: self.host_root.clone(), kubelet: self.kubelet_dir.clone(), state: self.state_dir.clone(), run: self.run_dir.clone() }
    }

    /// The node that a configuration is read for: this one, or one of another name.
    fn node(&self, name: Option<&str>) -> Node {
        name.map_or_else(|| Node::here(&self.host_root), |name| Node::named(name, &self.host_root))
    }

    fn load_config(&self) -> Result<config::Config, Failed> {
        Ok(config::load(self.config.as_deref(), &self.node(None))?)
    }
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
        Verb::Demo(options) => demo::run(&options),
        Verb::Discover { all } => discover::run(&global, all),
        Verb::Doctor(options) => doctor::run(&global, &options),
        Verb::Topology(options) => topology::run(&global, &options),
        Verb::Status(options) => status::run(&global, &options),
        Verb::Who(options) => who::run(&global, &options),
        Verb::History(options) => history::run(&global, &options),
        Verb::Device(verb) => device::run(&global, &verb),
        Verb::Config(verb) => configuration::run(&global, &verb),
        Verb::Ledger(verb) => ledger::run(&global, &verb),
        Verb::Bench(verb) => bench::run(&global, &verb),
    })
}

/// The parser's report in one line: what is wrong, what may have been meant, where to read on.
fn usage(report: &str) -> String {
    let mut paragraphs = report.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    let problem = paragraphs.next().unwrap_or_default();
    let tip = paragraphs.find_map(|paragraph| paragraph.strip_prefix("tip: ").map(|tip| format!("; {tip}")));
    format!("{}{}; `holdfast --help` tells more", problem.trim_start_matches("error: "), tip.unwrap_or_default())
}

/// Prints data.
fn print(text: &Text) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| not_printed(&error))
}

/// Whoever reads has gone (`holdfast ledger export | head -1`), or the disk is full: what was printed is not all of it, and the caller
/// has to know.
fn not_printed(error: &std::io::Error) -> Failed {
    match error.kind() {
        ErrorKindOfIo::BrokenPipe => Failed::new(exit::FAILURE, "standard output was closed before everything was printed"),
        _ => Failed::new(exit::FAILURE, format_args!("cannot print: {error}")),
    }
}

/// What somebody has to say, for clap.
fn said(text: &str) -> Result<String, &'static str> {
    Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned).ok_or("it says nothing")
}

/// Says something to the person at the terminal, on one line.
fn eprintln(text: fmt::Arguments<'_>) {
    eprint(&Text::of_line(text));
}

/// The same on several lines.
fn eprint(text: &Text) {
    // When standard error is closed nobody reads it.
    drop(std::io::stderr().lock().write_all(text.as_bytes()));
}

/// Prints a document as JSON, or as what `table` makes of it.
fn show<T: Serialize>(output: Output, document: &T, table: impl FnOnce(&T) -> Text) -> Result<(), Failed> {
    print(&told(output, document, table)?)
}

/// What [`show`] prints.
fn told<T: Serialize>(output: Output, document: &T, table: impl FnOnce(&T) -> Text) -> Result<Text, Failed> {
    match output {
        // Nothing else than `topology` is drawn, and that is said before anything is done.
        Output::Table | Output::Ascii | Output::Svg => Ok(table(document)),
        Output::Json => json(document),
    }
}

fn json<T: Serialize>(document: &T) -> Result<Text, Failed> {
    let line = serde_json::to_string(document).map_err(|error| Failed::new(exit::FAILURE, error))?;
    Ok(Text::json(&(json::laid_out(&line) + "\n")))
}

/// A single-threaded runtime for verbs that ask the daemon.
fn block_on<F: Future>(future: F) -> Result<F::Output, Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}
