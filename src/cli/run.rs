//! `holdfast run`: the daemon in the foreground, until a signal, or until another instance has
//! taken over.

use crate::app::Settings;
use crate::console::Global;
use crate::console::exit::{self, Failed};
use crate::daemon;
use clap::Args;
use std::time::Duration;

/// The pause before the end of a daemon that could not read a fact of the node, which the
/// configuration needs.
const UNREAD_PAUSE: Duration = Duration::from_secs(5);

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
    let config = global.load_config().inspect_err(|failed| {
        // A service manager starts the daemon again at once.
        if failed.code != exit::CONFIG {
            std::thread::sleep(UNREAD_PAUSE);
        }
    })?;
    let settings = Settings::new(global.roots(), config);
    Ok(daemon::run(settings, options.take_over, exit::meaning)?)
}
