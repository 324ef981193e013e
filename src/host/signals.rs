//! Signals that must, or must not, end the process even if the runtime's thread is blocked.

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// While this value exists, SIGTERM and SIGINT end the process at once, with status 0. It is for a
/// start, which may hang on a disk or a file and has no commitments yet. The system's default would
/// not work: the first process of a container ignores these signals.
#[derive(Debug)]
pub struct ExitOnSignal(Arc<AtomicBool>);

impl ExitOnSignal {
    /// Begins.
    ///
    /// # Errors
    /// If a signal handler cannot be installed.
    pub fn install() -> io::Result<Self> {
        let is_on = Arc::new(AtomicBool::new(true));
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&is_on))?;
        }
        Ok(ExitOnSignal(is_on))
    }
}

impl Drop for ExitOnSignal {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Turns a file that would become too large (RLIMIT_FSIZE) into an error of the write, and not the
/// end of the process.
///
/// # Errors
/// If the signal handler cannot be installed.
pub fn ignore_sigxfsz() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}
