//! Signals that must count, or must not, whatever the thread does that the runtime is polled on.

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// While this lives, SIGTERM and SIGINT end the process at once, with status 0: for a start, which may hang on a disk or a file, and has promised
/// nothing yet. The default of the system would not do: it lets the first process of a container live on.
#[derive(Debug)]
pub struct EndsAtOnce(Arc<AtomicBool>);

impl EndsAtOnce {
    /// Begins.
    ///
    /// # Errors
    /// When a signal cannot be caught.
    pub fn begin() -> io::Result<Self> {
        let is_on = Arc::new(AtomicBool::new(true));
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register_conditional_shutdown(signal, 0, Arc::clone(&is_on))?;
        }
        Ok(EndsAtOnce(is_on))
    }
}

impl Drop for EndsAtOnce {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// A file that would become too large (RLIMIT_FSIZE) is an error of the write then, and not the end of the process.
///
/// # Errors
/// When the signal cannot be caught.
pub fn outlive_too_large_files() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}
