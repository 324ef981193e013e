//! The progress of a long operation: one line on standard error, if that is a terminal.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// Delay before the line of a counted operation appears; a shorter one shows no progress.
const SHOWN_AFTER: Duration = Duration::from_millis(500);
/// Interval between updates of the line.
const UPDATE_EVERY: Duration = Duration::from_millis(100);

/// The progress line. It is erased when the value is dropped.
#[derive(Debug)]
pub struct Progress {
    operation: &'static str,
    next: Option<Instant>,
    is_shown: bool,
}

impl Progress {
    /// Starts; `operation` names the operation, such as `reading grants`.
    #[must_use]
    pub fn new(operation: &'static str) -> Progress {
        let next = stderr().is_terminal().then(|| Instant::now() + SHOWN_AFTER);
        Progress { operation, next, is_shown: false }
    }

    /// Starts an operation without a counter; its line appears at once.
    #[must_use]
    pub fn uncounted(operation: &'static str) -> Progress {
        let mut progress = Progress::new(operation);
        if progress.next.is_some() {
            progress.is_shown = true;
            drop(write!(stderr(), "{operation} …"));
        }
        progress
    }

    /// Reports `done` items, out of `of` if the total is known.
    pub fn at(&mut self, done: usize, of: Option<usize>) {
        let Some(next) = self.next else { return };
        let now = Instant::now();
        if now < next {
            return;
        }
        self.next = Some(now + UPDATE_EVERY);
        self.is_shown = true;
        // A write error is ignored: progress is optional.
        drop(write!(stderr(), "\r\x1b[K{}", line(self.operation, done, of)));
    }
}

/// Erases a line left by a thread that is not joined.
pub fn wipe() {
    if stderr().is_terminal() {
        drop(write!(stderr(), "\r\x1b[K"));
    }
}

fn line(operation: &str, done: usize, of: Option<usize>) -> String {
    match of {
        Some(of) if of > 0 => {
            format!("{operation}: {done} of {of} ({} %)", done.saturating_mul(100) / of)
        }
        _ => format!("{operation}: {done}"),
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
    fn the_line_has_a_percentage_if_the_total_is_known() {
        assert_eq!(line("reading grants", 1200, None), "reading grants: 1200");
        assert_eq!(line("calls", 500, Some(2000)), "calls: 500 of 2000 (25 %)");
        assert_eq!(line("calls", 0, Some(0)), "calls: 0");
    }
}
