//! `holdfast run`: the daemon in the foreground, until a signal, or until another instance has
//! taken over.

use crate::app::Settings;
use crate::config;
use crate::console::Global;
use crate::console::exit::{self, Failed};
use crate::daemon;
use clap::Args;
use std::time::Duration;

/// The pause before the end of a daemon that could not read a fact of the node, which the
/// configuration needs, or could not use its state directory.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

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
    if let Err(error) = config::keep_name(&global.state_dir) {
        // The start reports the state of the directory.
        tracing::debug!(%error, "cannot keep the name of the node for other verbs");
    }
    let config = global.load_config().inspect_err(|failed| {
        // A service manager starts the daemon again at once.
        if failed.code != exit::CONFIG {
            std::thread::sleep(RETRY_PAUSE);
        }
    })?;
    let settings = Settings::new(global.roots(), config);
    let ended = daemon::run(settings, options.take_over, exit::meaning).map_err(Failed::from);
    let is_of_state = |failed: &Failed| failed.code == exit::STATE;
    // systemd starts the service again after 100 ms, also when a newer version has written the
    // ledger.
    if ended.as_ref().is_err_and(is_of_state) && std::env::var_os("INVOCATION_ID").is_some() {
        std::thread::sleep(RETRY_PAUSE);
    }
    ended
}
