//! `holdfast run`: the daemon in the foreground, until a signal, or until another instance has
//! taken over.

use crate::app::Settings;
use crate::console::Global;
use crate::console::exit::{self, Failed};
use crate::daemon;
use clap::Args;

/// How it begins.
#[derive(Debug, Args)]
pub struct Options {
    /// Ask a daemon that runs already to hand over, instead of ending; start as usual when there is
    /// none
    #[arg(long)]
    take_over: bool,
}

/// Runs the daemon.
///
/// # Errors
/// As [`daemon::run`].
pub fn run(global: &Global, options: &Options) -> Result<(), Failed> {
    let settings = Settings::new(global.roots(), global.load_config()?);
    Ok(daemon::run(settings, options.take_over, exit::meaning)?)
}
