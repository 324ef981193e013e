//! The format of a log line.

use clap::ValueEnum;

/// The format of a log line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line of text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}
