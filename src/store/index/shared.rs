//! What the index thread and its handle both see.

use crate::domain::{Entry, Timestamp, Unreadable, UnreadableReason};
use crate::host;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// What was found after the store was open.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// What was wrong, in words.
    pub(super) findings: Vec<String>,
    /// What was moved away.
    pub(super) quarantined: Vec<PathBuf>,
    /// Entries that the journal lacks and the database has: to be recorded again.
    pub(super) found: Vec<Entry>,
    /// Grants among these, since the start.
    pub(super) from_database: usize,
}

/// Findings that are kept, the first ones: a disk may damage a database again and again.
const FINDINGS_MAX: usize = 32;

impl Late {
    pub(super) fn finding(&mut self, finding: String) {
        self.findings.push(finding);
        self.findings.truncate(FINDINGS_MAX);
    }

    pub(super) fn quarantined(&mut self, path: PathBuf) {
        self.quarantined.push(path);
        self.quarantined.truncate(FINDINGS_MAX);
    }
}

/// Both sides of the handle.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The database is closed after an error, or late to open.
    pub(super) closed: AtomicBool,
    /// The database lacks entries that the journal has.
    pub(super) behind: AtomicBool,
    /// Somebody waits for the end: only what has to be done is done.
    pub(super) hurries: AtomicBool,
    late: Mutex<Late>,
    unreadable: Mutex<Option<Unreadable>>,
    /// Segments of the journal were deleted that the database does not have; the latest release in them, or 0.
    given_up: Mutex<Option<Timestamp>>,
    /// Since when the thread has been at one thing, or made progress last.
    busy: Mutex<Option<Instant>>,
}

impl Shared {
    /// Does something that may never end.
    pub(super) fn while_busy<T>(&self, run: impl FnOnce() -> T) -> T {
        let note = |since| *held(&self.busy) = since;
        note(Some(Instant::now()));
        let done = run();
        note(None);
        done
    }

    /// Notes progress.
    pub(super) fn beat(&self) {
        if let Some(since) = &mut *held(&self.busy) {
            *since = Instant::now();
        }
    }

    /// Since when the thread has hung, if it was at one thing for longer than `patience`. To wait for a slow disk is not to hang.
    pub(super) fn hangs_since(&self, patience: Duration) -> Option<Timestamp> {
        let busy = held(&self.busy).map(|since| since.elapsed()).filter(|busy| *busy >= patience)?;
        let hangs = patience.is_zero() || !host::waits_for_disk();
        let millis = u64::try_from(busy.as_millis()).unwrap_or(u64::MAX);
        hangs.then(|| Timestamp(Timestamp::from_system(SystemTime::now()).0.saturating_sub(millis)))
    }

    pub(super) fn late(&self) -> MutexGuard<'_, Late> {
        held(&self.late)
    }

    pub(super) fn given_up(&self) -> MutexGuard<'_, Option<Timestamp>> {
        held(&self.given_up)
    }

    /// Since when the history cannot be read, and why.
    pub(super) fn unreadable(&self) -> Option<Unreadable> {
        *held(&self.unreadable)
    }

    /// The history cannot be read.
    pub(super) fn note_unreadable(&self, since: Timestamp, because: UnreadableReason) {
        self.closed.store(true, Ordering::Release);
        *held(&self.unreadable) = Some(Unreadable { since, because });
    }

    /// The history can be read. Returns since when it could not.
    pub(super) fn note_readable(&self) -> Option<Unreadable> {
        self.closed.store(false, Ordering::Release);
        held(&self.unreadable).take()
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
