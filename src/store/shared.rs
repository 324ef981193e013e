//! What the shelver's thread and its handle both see.

use crate::domain::{Entry, Unreadable};
use crate::host;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What was found after the store was open.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// What was wrong, in words.
    pub(super) findings: Vec<String>,
    /// What was moved away.
    pub(super) quarantined: Vec<PathBuf>,
    /// What the journal has lost and the database has: to be recorded again.
    pub(super) found: Vec<Entry>,
    /// Grants among these, since the start.
    pub(super) from_database: usize,
}

/// Findings that are kept, the first ones: a disk may damage a database again and again.
const FINDINGS_MAX: usize = 32;

impl Late {
    /// Adds what was found after that.
    pub(super) fn add(&mut self, later: Late) {
        self.findings.extend(later.findings);
        self.findings.truncate(FINDINGS_MAX);
        self.quarantined.extend(later.quarantined);
        self.quarantined.truncate(FINDINGS_MAX);
        self.found.extend(later.found);
        self.from_database += later.from_database;
    }
}

/// Both sides of the handle.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The database is closed after an error, or late to open.
    pub(super) closed: AtomicBool,
    /// The thread was not told everything.
    pub(super) behind: AtomicBool,
    late: Mutex<Late>,
    unreadable: Mutex<Option<Unreadable>>,
    /// Since when the thread has been at one thing, or got on with it last.
    busy: Mutex<Option<Instant>>,
    /// The thread has been given up, and another one has its place.
    left: AtomicBool,
    /// Somebody waits for the end.
    hurries: AtomicBool,
}

impl Shared {
    /// Does something that may never end.
    pub(super) fn while_at_it<T>(&self, run: impl FnOnce() -> T) -> T {
        let note = |since| *held(&self.busy) = since;
        note(Some(Instant::now()));
        let done = run();
        note(None);
        done
    }

    /// It gets on.
    pub(super) fn beat(&self) {
        if let Some(since) = &mut *held(&self.busy) {
            *since = Instant::now();
        }
    }

    /// Whether the thread has been at one thing for longer than that, and does not wait for the disk: a slow one is no reason to leave
    /// it.
    pub(super) fn is_stuck(&self, patience: Duration) -> bool {
        let at_it = held(&self.busy).map(|since| since.elapsed());
        at_it.is_some_and(|at_it| at_it >= patience && (patience.is_zero() || !host::waits_for_disk()))
    }

    /// From now on only what has to be done is done.
    pub(super) fn hurry(&self) {
        self.hurries.store(true, Ordering::Release);
    }

    /// Whether somebody waits for the end.
    pub(super) fn hurries(&self) -> bool {
        self.hurries.load(Ordering::Acquire)
    }

    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// Whether the thread is to touch nothing any more.
    pub(super) fn is_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// What was found since the start.
    pub(super) fn late(&self) -> MutexGuard<'_, Late> {
        held(&self.late)
    }

    /// Since when the history cannot be read, and why.
    pub(super) fn unreadable(&self) -> Option<Unreadable> {
        *held(&self.unreadable)
    }

    /// Says so, or that it can.
    pub(super) fn note_unreadable(&self, unreadable: Option<Unreadable>) {
        self.closed.store(unreadable.is_some(), Ordering::Release);
        *held(&self.unreadable) = unreadable;
    }

    /// Takes over what was found before; nothing of it is lost with a thread.
    pub(super) fn inherit(&self, from: &Shared) {
        let mut before = std::mem::take(&mut *from.late());
        let mut late = self.late();
        before.add(std::mem::take(&mut *late));
        *late = before;
    }
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
