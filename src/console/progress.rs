//! How far something has come that takes long: one line on standard error, where that is a terminal and somebody waits.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// Nobody is told of what is soon done.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often the line changes.
const EVERY: Duration = Duration::from_millis(100);

/// The line. It is wiped when it is dropped.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    next: Option<Instant>,
    is_shown: bool,
}

impl Progress {
    /// Begins; `what` is done, such as `reading grants`.
    #[must_use]
    pub fn new(what: &'static str) -> Progress {
        let next = stderr().is_terminal().then(|| Instant::now() + PATIENCE);
        Progress { what, next, is_shown: false }
    }

    /// Begins what nobody counts.
    #[must_use]
    pub fn uncounted(what: &'static str) -> Progress {
        let mut progress = Progress::new(what);
        if progress.next.is_some() {
            progress.is_shown = true;
            drop(write!(stderr(), "{what} …"));
        }
        progress
    }

    /// So much is done, of so much where that is known.
    pub fn at(&mut self, done: usize, of: Option<usize>) {
        let Some(next) = self.next else { return };
        let now = Instant::now();
        if now < next {
            return;
        }
        self.next = Some(now + EVERY);
        self.is_shown = true;
        // A terminal that takes nothing shows nothing.
        drop(write!(stderr(), "\r\x1b[K{}", line(self.what, done, of)));
    }
}

/// Wipes a line that was left by a thread that nobody waits for.
pub fn wipe() {
    if stderr().is_terminal() {
        drop(write!(stderr(), "\r\x1b[K"));
    }
}

fn line(what: &str, done: usize, of: Option<usize>) -> String {
    match of {
        Some(of) if of > 0 => format!("{what}: {done} of {of} ({} %)", done.saturating_mul(100) / of),
        _ => format!("{what}: {done}"),
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown {
            drop(write!(stderr(), "\r\x1b[K"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_how_far_it_has_come_where_that_is_known() {
        assert_eq!(line("reading grants", 1200, None), "reading grants: 1200");
        assert_eq!(line("calls", 500, Some(2000)), "calls: 500 of 2000 (25 %)");
        assert_eq!(line("calls", 0, Some(0)), "calls: 0");
    }
}
