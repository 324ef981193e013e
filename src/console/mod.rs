//! The terminal: options of every verb, exit codes, text and tables, progress. Results go to
//! standard output, everything else to standard error.

pub mod exit;
pub mod progress;
pub mod screen;
pub mod table;
pub mod text;

use self::exit::Failed;
use self::screen::Colour;
use self::text::Text;
use crate::config::{self, Node, Roots};
use crate::telemetry::LogFormat;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fmt;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

/// Options of every verb.
#[derive(Debug, Clone, Args)]
pub struct Global {
    /// The configuration file; drop-ins are read from `config.d` next to it [default:
    /// /etc/holdfast/config.toml]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The directory that contains the node's sys, proc, dev, run/udev and var/log/pods
    #[arg(long, global = true, value_name = "DIR", default_value = "/")]
    pub host_root: PathBuf,
    /// The kubelet's directory
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub kubelet_dir: PathBuf,
    /// The ledger's directory
    #[arg(long, global = true, value_name = "DIR", default_value = "/var/lib/holdfast")]
    pub state_dir: PathBuf,
    /// The directory of the control socket
    #[arg(long, global = true, value_name = "DIR", default_value = "/run/holdfast")]
    pub run_dir: PathBuf,
    /// The output format of results
    #[arg(short, long, global = true, value_name = "FORM", default_value = "table")]
    pub output: Output,
    /// When to colour results
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Colour,
    /// The format of log lines
    #[arg(long, global = true, value_name = "FORM", default_value = "text")]
    pub log_format: LogFormat,
}

/// The output format of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text for people, as wide as the terminal
    Table,
    /// Text for people, in ASCII only
    Ascii,
    /// JSON for programs
    Json,
    /// A picture: `topology` only
    Svg,
}

/// What to do when no daemon answers.
pub const START_IT: &str =
    "start it with `systemctl start holdfast` or `holdfast run`, or name its `--run-dir`";

impl Global {
    /// The four root directories.
    #[must_use]
    pub fn roots(&self) -> Roots {
        Roots {
            host: self.host_root.clone(),
            kubelet: self.kubelet_dir.clone(),
            state: self.state_dir.clone(),
            run: self.run_dir.clone(),
        }
    }

    /// The node whose configuration is read: this node, or the node of the given name.
    pub(crate) fn node(&self, name: Option<&str>) -> Node {
        match name {
            Some(name) => Node::named(name, &self.host_root),
            None => Node::here(&self.host_root, &self.state_dir),
        }
    }

    pub(crate) fn load_config(&self) -> Result<config::Config, Failed> {
        Ok(config::load(self.config.as_deref(), &self.node(None))?)
    }
}

/// Prints to standard output.
pub(crate) fn print(text: &Text) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| not_printed(&error))
}

/// The reader closed the pipe (`holdfast ledger export | head -1`), or the disk is full. The output
/// is incomplete, so the verb has to fail.
pub(crate) fn not_printed(error: &std::io::Error) -> Failed {
    match error.kind() {
        ErrorKind::BrokenPipe => {
            Failed::new(exit::FAILURE, "standard output was closed before everything was printed")
        }
        _ => Failed::new(exit::FAILURE, format_args!("cannot print: {error}")),
    }
}

/// Prints one line to standard error.
pub(crate) fn eprintln(text: fmt::Arguments<'_>) {
    eprint(&Text::of_line(text));
}

/// Prints several lines to standard error.
pub(crate) fn eprint(text: &Text) {
    // A failure is ignored: standard error may be closed.
    drop(std::io::stderr().lock().write_all(text.as_bytes()));
}

/// Prints a document as JSON, or as the text that `table` returns.
pub(crate) fn show<T: Serialize>(
    output: Output,
    document: &T,
    table: impl FnOnce(&T) -> Text,
) -> Result<(), Failed> {
    print(&format_document(output, document, table)?)
}

/// The text that [`show`] prints.
pub(crate) fn format_document<T: Serialize>(
    output: Output,
    document: &T,
    table: impl FnOnce(&T) -> Text,
) -> Result<Text, Failed> {
    match output {
        // Only `topology` supports SVG; `cli::main` rejects it for all other verbs.
        Output::Table | Output::Ascii | Output::Svg => Ok(table(document)),
        Output::Json => json(document),
    }
}

pub(crate) fn json<T: Serialize>(document: &T) -> Result<Text, Failed> {
    let text = serde_json::to_string_pretty(document)
        .map_err(|error| Failed::new(exit::FAILURE, error))?;
    Ok(Text::json(&(text + "\n")))
}

/// Value parser of clap for a text that must not be empty; trims it.
pub(crate) fn non_empty(text: &str) -> Result<String, &'static str> {
    Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned).ok_or("the text is empty")
}

/// Runs a future on a single-threaded runtime, for verbs that query the daemon.
pub(crate) fn block_on<F: Future>(future: F) -> Result<F::Output, Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}
