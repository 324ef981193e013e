//! The terminal: the options of every verb, exit codes, text and tables, progress. Data goes to standard output, everything else to
//! standard error.

pub mod exit;
pub mod progress;
pub mod screen;
pub mod table;
pub mod text;

use self::exit::Failed;
use self::screen::Colour;
use self::text::Text;
use crate::config::{self, Node, Roots};
use crate::telemetry::logging::LogFormat;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

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

impl Global {
    /// The four roots.
    #[must_use]
    pub fn roots(&self) -> Roots {
        Roots { host: self.host_root.clone(), kubelet: self.kubelet_dir.clone(), state: self.state_dir.clone(), run: self.run_dir.clone() }
    }

    /// The node that a configuration is read for: this one, or one of another name.
    pub(crate) fn node(&self, name: Option<&str>) -> Node {
        name.map_or_else(|| Node::here(&self.host_root), |name| Node::named(name, &self.host_root))
    }

    pub(crate) fn load_config(&self) -> Result<config::Config, Failed> {
        Ok(config::load(self.config.as_deref(), &self.node(None))?)
    }
}

/// Prints data.
pub(crate) fn print(text: &Text) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| not_printed(&error))
}

/// Whoever reads has gone (`holdfast ledger export | head -1`), or the disk is full: what was printed is not all of it, and the caller
/// has to know.
pub(crate) fn not_printed(error: &std::io::Error) -> Failed {
    match error.kind() {
        ErrorKind::BrokenPipe => Failed::new(exit::FAILURE, "standard output was closed before everything was printed"),
        _ => Failed::new(exit::FAILURE, format_args!("cannot print: {error}")),
    }
}

/// Says something to the person at the terminal, on one line.
pub(crate) fn eprintln(text: fmt::Arguments<'_>) {
    eprint(&Text::of_line(text));
}

/// The same on several lines.
pub(crate) fn eprint(text: &Text) {
    // When standard error is closed nobody reads it.
    drop(std::io::stderr().lock().write_all(text.as_bytes()));
}

/// Prints a document as JSON, or as what `table` makes of it.
pub(crate) fn show<T: Serialize>(output: Output, document: &T, table: impl FnOnce(&T) -> Text) -> Result<(), Failed> {
    print(&told(output, document, table)?)
}

/// What [`show`] prints.
pub(crate) fn told<T: Serialize>(output: Output, document: &T, table: impl FnOnce(&T) -> Text) -> Result<Text, Failed> {
    match output {
        // Nothing else than `topology` is drawn, and that is said before anything is done.
        Output::Table | Output::Ascii | Output::Svg => Ok(table(document)),
        Output::Json => json(document),
    }
}

pub(crate) fn json<T: Serialize>(document: &T) -> Result<Text, Failed> {
    let text = serde_json::to_string_pretty(document).map_err(|error| Failed::new(exit::FAILURE, error))?;
    Ok(Text::json(&(text + "\n")))
}

/// Parses a value that must not be empty, for clap.
pub(crate) fn non_empty(text: &str) -> Result<String, &'static str> {
    Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned).ok_or("it says nothing")
}

/// A single-threaded runtime for verbs that ask the daemon.
pub(crate) fn block_on<F: Future>(future: F) -> Result<F::Output, Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}
