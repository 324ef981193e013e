//! What the index thread and its handle both see.

use crate::domain::{Entry, Timestamp, Unreadable, UnreadableReason};
use crate::host;
#[cfg(test)]
use crate::store::testing::slow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Opening 1000 records takes 3 to 11 ms, and 100,000 some 100. What takes longer than this has a slow disk: a start goes on without
/// it, and a query gets an error.
pub(crate) const LATE_AFTER: Duration = Duration::from_secs(4);
/// Findings that are kept, the first ones: a disk may damage a database again and again.
const FINDINGS_MAX: usize = 32;

/// What was found after the store was open.
#[derive(Debug, Default)]
pub(crate) struct Late {
    /// What was wrong, in words.
    pub(crate) findings: Vec<String>,
    /// What was moved away.
    pub(crate) quarantined: Vec<PathBuf>,
    /// Entries that the journal lacks and the database has: to be recorded again.
    pub(super) found: Vec<Entry>,
    /// Grants among these, since the start.
    pub(crate) from_database: usize,
}

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

/// What the thread is at.
#[derive(Debug, Clone, Copy)]
enum Activity {
    Idle,
    /// It opens the database, which may take long.
    Opening(Instant),
    /// It works, and made progress last then.
    Busy(Instant),
}

/// Both sides of the handle.
#[derive(Debug)]
pub(super) struct Shared {
    #[cfg(test)]
    dir: PathBuf,
    /// The database lacks entries that the journal has.
    pub(super) behind: AtomicBool,
    /// The handle is being dropped: only what has to be done is done.
    ending: AtomicBool,
    late: Mutex<Late>,
    /// The database is closed.
    unreadable: Mutex<Option<Unreadable>>,
    /// Segments of the journal were deleted that the database does not have; the latest release in them, or 0.
    given_up: Mutex<Option<Timestamp>>,
    activity: Mutex<Activity>,
}

impl Shared {
    pub(super) fn new(_dir: &Path) -> Self {
        Shared {
            #[cfg(test)]
            dir: _dir.to_owned(),
            behind: AtomicBool::default(),
            ending: AtomicBool::default(),
            late: Mutex::default(),
            unreadable: Mutex::default(),
            given_up: Mutex::default(),
            activity: Mutex::new(Activity::Idle),
        }
    }

    /// Opens the database.
    pub(super) fn while_opening<T>(&self, run: impl FnOnce() -> T) -> T {
        let before =
            std::mem::replace(&mut *held(&self.activity), Activity::Opening(Instant::now()));
        let done = run();
        *held(&self.activity) = if matches!(before, Activity::Idle) {
            Activity::Idle
        } else {
            Activity::Busy(Instant::now())
        };
        done
    }

    /// Does something that may never end.
    pub(super) fn while_busy<T>(&self, run: impl FnOnce() -> T) -> T {
        *held(&self.activity) = Activity::Busy(Instant::now());
        let done = run();
        *held(&self.activity) = Activity::Idle;
        done
    }

    /// Notes progress.
    pub(super) fn beat(&self) {
        *held(&self.activity) = Activity::Busy(Instant::now());
    }

    /// Since when the database has been opening, if it is late.
    pub(super) fn late_since(&self) -> Option<Timestamp> {
        let Activity::Opening(since) = *held(&self.activity) else { return None };
        #[cfg(test)]
        if slow::is_held(&self.dir) {
            return Some(ago(since.elapsed()));
        }
        Some(since.elapsed()).filter(|took| *took >= LATE_AFTER).map(ago)
    }

    /// Since when the thread has hung, if it made no progress for `patience`. To wait for a slow disk is not to hang.
    pub(super) fn hangs_since(&self, patience: Duration) -> Option<Timestamp> {
        let Activity::Busy(since) = *held(&self.activity) else { return None };
        let busy = Some(since.elapsed()).filter(|busy| *busy >= patience)?;
        Some(ago(busy)).filter(|_| patience.is_zero() || !host::waits_for_disk())
    }

    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub(super) fn late(&self) -> MutexGuard<'_, Late> {
        held(&self.late)
    }

    pub(super) fn given_up(&self) -> MutexGuard<'_, Option<Timestamp>> {
        held(&self.given_up)
    }

    /// Since when the history cannot be read, and why.
    pub(super) fn unreadable(&self) -> Option<Unreadable> {
        let late =
            self.late_since().map(|since| Unreadable { since, because: UnreadableReason::Slow });
        held(&self.unreadable).or(late)
    }

    /// Notes that the database is closed, or (`None`) open. Returns what was noted before.
    pub(super) fn note_unreadable(&self, unreadable: Option<Unreadable>) -> Option<Unreadable> {
        std::mem::replace(&mut *held(&self.unreadable), unreadable)
    }
}

fn ago(took: Duration) -> Timestamp {
    let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    Timestamp(Timestamp::from_system(SystemTime::now()).0.saturating_sub(millis))
}

fn held<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
