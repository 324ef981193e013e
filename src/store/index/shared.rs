//! The state that the index thread shares with its handle.

use crate::domain::{Entry, Timestamp, Unreadable, UnreadableReason};
use crate::host;
use crate::store::StoreError;
#[cfg(test)]
use crate::store::testing::slow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// A longer opening means a slow disk: a start continues without the database, and queries fail.
/// Opening 1000 records takes 3 to 11 ms, and 100,000 about 100 ms.
pub(crate) const LATE_AFTER: Duration = limit(4);

/// A limit in seconds for a disk or a thread that is too slow. Unit tests run on machines that are
/// much slower than a node, and make a slow database themselves (`testing::slow`).
pub(super) const fn limit(seconds: u64) -> Duration {
    Duration::from_secs(if cfg!(test) { 60 * seconds } else { seconds })
}

/// The first findings are kept: a disk may damage the database repeatedly.
const FINDINGS_MAX: usize = 32;

/// Findings after the store was opened.
#[derive(Debug, Default)]
pub(crate) struct LateFindings {
    /// One sentence each.
    pub(crate) findings: Vec<String>,
    /// The new paths of damaged files.
    pub(crate) quarantined: Vec<PathBuf>,
    /// Entries that only the database has. They must be recorded again.
    pub(super) found: Vec<Entry>,
    /// The number of grants among these, since the start.
    pub(crate) from_database: usize,
}

impl LateFindings {
    pub(super) fn finding(&mut self, finding: String) {
        self.findings.push(finding);
        self.findings.truncate(FINDINGS_MAX);
    }

    pub(super) fn add_found(&mut self, found: Vec<Entry>) {
        self.from_database += found.iter().filter(|it| matches!(it, Entry::Grant(_))).count();
        self.found.extend(found);
    }

    pub(super) fn quarantined(&mut self, path: PathBuf) {
        self.quarantined.push(path);
        self.quarantined.truncate(FINDINGS_MAX);
    }
}

/// The activity of the index thread.
#[derive(Debug, Clone, Copy)]
enum Activity {
    Idle,
    /// Opens the database since then.
    Opening(Instant),
    /// Works, and made progress then.
    Busy(Instant),
}

/// The shared state.
#[derive(Debug)]
pub(super) struct Shared {
    #[cfg(test)]
    dir: PathBuf,
    /// Whether the database lacks entries of the journal.
    pub(super) behind: AtomicBool,
    /// Whether the process ends. Optional work is then skipped.
    ending: AtomicBool,
    late: Mutex<LateFindings>,
    /// Set while the database is closed.
    unreadable: Mutex<Option<Unreadable>>,
    /// Set after segments were deleted that the database does not have: their latest release, or 0.
    deleted: Mutex<Option<Timestamp>>,
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
            deleted: Mutex::default(),
            activity: Mutex::new(Activity::Idle),
        }
    }

    /// Runs `open` as the opening of the database.
    pub(super) fn while_opening<T>(&self, open: impl FnOnce() -> T) -> T {
        *locked(&self.activity) = Activity::Opening(Instant::now());
        let opened = open();
        self.note_progress();
        opened
    }

    /// Runs work that may hang.
    pub(super) fn while_busy<T>(&self, run: impl FnOnce() -> T) -> T {
        self.note_progress();
        let done = run();
        *locked(&self.activity) = Activity::Idle;
        done
    }

    pub(super) fn note_progress(&self) {
        *locked(&self.activity) = Activity::Busy(Instant::now());
    }

    /// The time since when the database has been opening, if that takes too long.
    pub(super) fn late_since(&self) -> Option<Timestamp> {
        let Activity::Opening(since) = *locked(&self.activity) else { return None };
        #[cfg(test)]
        if slow::is_held(&self.dir) {
            return Some(ago(since.elapsed()));
        }
        Some(since.elapsed()).filter(|took| *took >= LATE_AFTER).map(ago)
    }

    /// Fails if the opening takes too long.
    pub(super) fn check_opening(&self, dir: &Path) -> Result<(), StoreError> {
        let Some(since) = self.late_since() else { return Ok(()) };
        let why = format!("it has been opening since {}, as on a slow disk", since.to_seconds());
        Err(StoreError::Unopened { path: dir.to_owned(), why })
    }

    /// The time since when the thread has made no progress, if that is longer than `limit`. A wait
    /// for the disk is no hang.
    pub(super) fn hangs_since(&self, limit: Duration) -> Option<Timestamp> {
        let Activity::Busy(since) = *locked(&self.activity) else { return None };
        let busy = Some(since.elapsed()).filter(|busy| *busy >= limit)?;
        Some(ago(busy)).filter(|_| limit.is_zero() || !host::waits_for_disk())
    }

    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub(super) fn late(&self) -> MutexGuard<'_, LateFindings> {
        locked(&self.late)
    }

    pub(super) fn deleted(&self) -> MutexGuard<'_, Option<Timestamp>> {
        locked(&self.deleted)
    }

    /// The time since when the history cannot be read, with the reason.
    pub(super) fn unreadable(&self) -> Option<Unreadable> {
        let late =
            self.late_since().map(|since| Unreadable { since, because: UnreadableReason::Slow });
        locked(&self.unreadable).or(late)
    }

    /// Records that the database is closed, or (`None`) open. Returns the value before.
    pub(super) fn note_unreadable(&self, unreadable: Option<Unreadable>) -> Option<Unreadable> {
        std::mem::replace(&mut *locked(&self.unreadable), unreadable)
    }
}

fn ago(took: Duration) -> Timestamp {
    let millis = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    Timestamp(Timestamp::from_system(SystemTime::now()).0.saturating_sub(millis))
}

fn locked<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
