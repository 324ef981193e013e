//! Logs, on standard error, as text for people or JSON for machines.
//!
//! ERROR: the daemon cannot keep a promise. WARN: somebody should look, not tonight. INFO: one line for each change
//! of state. DEBUG: every step. `HOLDFAST_LOG` takes filters such as `debug` or `holdfast::registration=debug`.

use super::log_writer::LogWriter;
use clap::ValueEnum;
use std::io::IsTerminal;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// How a log line looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line of text.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging for the whole process, and has panics logged as errors. The first call wins.
pub fn init(format: LogFormat, default_level: &str) {
    // `Targets`, not `EnvFilter`: that one brings a regular-expression engine, a megabyte of the daemon's memory.
    let wanted = std::env::var("HOLDFAST_LOG").ok().and_then(|filter| filter.parse::<Targets>().ok());
    let filter = wanted.or_else(|| default_level.parse().ok()).unwrap_or_default();
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = fmt::layer()
        .with_writer(LogWriter::new(std::io::stderr(), format))
        .with_ansi(colour)
        // A reader of the log that has gone must not end the daemon: the layer would report it there, and panic.
        .log_internal_errors(false);
    let layer = match format {
        LogFormat::Text => layer.with_target(false).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_current_span(false).boxed(),
    };
    let started = tracing_subscriber::registry().with(layer.with_filter(filter)).try_init();
    if started.is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            let text = panic.payload_as_str().unwrap_or("no message");
            tracing::error!(place, panic = text, "a panic was caught");
        }));
    }
}
