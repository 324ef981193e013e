//! The index thread. It opens the database, brings it up to date with the journal, makes
//! checkpoints, and replaces a damaged database.
//!
//! ```text
//!           requested, or after OPENS_AFTER        open, and up to date with the journal
//!   closed ─────────────────────────────▶ opening ──────────────────────────────────────▶ open
//!      ▲                                    │  ▲ damaged: quarantined, an empty one opens    │
//!      ├─── the system refuses: retried ────┘  └─────────────────────────────────────────────┤
//!      └────────────────────────────────────────────────────────────────── a write has failed ┘
//! ```
//!
//! No caller waits for a slow opening: queries then get an error. The journal has every entry, and
//! is read when the database is open.

use super::compact::{compact, compact_dir};
use super::database::Database;
use super::failure::{database_finding, history_finding};
use super::follow::follow;
use super::opening::open_or_replace;
use super::reader::DatabaseSnapshot;
use super::shared::{LATE_AFTER, Shared};
use super::work::{CheckpointOrder, Start, Work};
use crate::domain::{Retention, Timestamp, Unreadable, UnreadableReason};
use crate::store::StoreError;
use crate::store::journal::{damage_finding, delete_before};
use crate::store::layout::{
    database_dir, delete_quarantined, has_free_space, journal_dir, quarantine, remove,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

/// When the database is opened after a start that does not need it, unless a query comes earlier:
/// opening takes a CPU core from the registrations.
const OPENS_AFTER: Duration = Duration::from_millis(300);
/// Backoff after the system has refused to open it, doubled each time up to the maximum.
const RETRY_AFTER: Duration =
    if cfg!(test) { Duration::from_millis(1) } else { Duration::from_secs(1) };
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// When a closed database is opened.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// At this time, or earlier for a request.
    Due(Instant),
    /// At this time: the system has refused to open it.
    Retry(Instant),
    /// At the next checkpoint: it was closed after an error.
    WithCheckpoint,
}

/// The state of the thread.
pub(super) struct IndexTask {
    state_dir: PathBuf,
    dir: PathBuf,
    retention: Retention,
    database: Option<Database>,
    next: Next,
    /// Consecutive refusals by the system.
    refused: u32,
    /// The reason why the database is closed, for the errors of queries.
    why: String,
    closed_at: Timestamp,
    /// The checks for the first time that the database follows the journal.
    start: Option<Start>,
    /// The last entry that the database had read from the journal. Queued changes up to it are old.
    followed: u64,
    /// Whether an unwritable database was replaced already, which is done once.
    was_replaced: bool,
    /// Whether compaction has failed. It is not tried again.
    compaction_failed: bool,
    shared: Arc<Shared>,
}

impl IndexTask {
    pub(super) fn new(state_dir: &Path, retention: Retention, shared: Arc<Shared>) -> Self {
        IndexTask {
            state_dir: state_dir.to_owned(),
            dir: database_dir(state_dir),
            retention,
            database: None,
            next: Next::Due(Instant::now() + OPENS_AFTER),
            refused: 0,
            why: String::new(),
            closed_at: now(),
            start: None,
            followed: 0,
            was_replaced: false,
            compaction_failed: false,
            shared,
        }
    }

    /// Handles messages until the handle is dropped, and then closes the database.
    pub(super) fn serve(&mut self, work: &Receiver<Work>) {
        let shared = Arc::clone(&self.shared);
        if let Err(error) = remove(&compact_dir(&self.dir)) {
            tracing::warn!(%error, "failed to delete an unfinished compaction");
        }
        loop {
            let at = if let Next::Due(at) | Next::Retry(at) = self.next { Some(at) } else { None };
            let wait = at
                .filter(|_| self.database.is_none())
                .map(|at| at.saturating_duration_since(Instant::now()));
            let received = match wait {
                None => work.recv().map_err(|_| RecvTimeoutError::Disconnected),
                // Due, even if the queue is never empty.
                Some(Duration::ZERO) if !self.shared.is_ending() => Err(RecvTimeoutError::Timeout),
                Some(wait) => work.recv_timeout(wait),
            };
            match received {
                Ok(work) => shared.while_busy(|| self.perform(work)),
                Err(RecvTimeoutError::Timeout) => shared.while_busy(|| self.open()),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        shared.while_busy(|| self.close());
    }

    fn perform(&mut self, work: Work) {
        let is_due = match (&work, self.next) {
            (Work::Checkpoint(..), Next::WithCheckpoint)
            | (Work::Checkpoint(..) | Work::Read(_), Next::Due(_)) => true,
            #[cfg(test)]
            (Work::Test(_), Next::Due(_)) => true,
            _ => false,
        };
        if is_due && self.database.is_none() {
            self.open();
        }
        match work {
            // A start that waits no longer needs no answer.
            Work::Open(answer) => drop(answer.send(self.open_for_start())),
            Work::Begin(start) => {
                self.start = Some(start);
                if let Some(database) = self.database.take() {
                    self.take_over(database);
                }
            }
            Work::Updates(changes) => {
                let new = changes.iter().filter(|(seq, _)| *seq > self.followed);
                let new: Vec<_> = new.collect();
                self.write(|database| {
                    new.into_iter().try_for_each(|(seq, change)| database.write(*seq, change))
                });
            }
            Work::Checkpoint(order, done) => {
                let result = self.checkpoint(&order);
                if let Err(error) = &result {
                    tracing::warn!(%error, "the query database lags behind the journal");
                }
                // The caller may not wait.
                drop(done.send(result));
                self.compact();
                delete_quarantined(&self.state_dir, self.retention, now());
            }
            Work::Read(answer) => {
                let closed =
                    || StoreError::Unopened { path: self.dir.clone(), why: self.why.clone() };
                drop(answer.send(self.database.as_ref().map(Database::reader).ok_or_else(closed)));
            }
            #[cfg(test)]
            Work::Test(act) => {
                act(&mut self.database);
                if self.database.is_none() && self.shared.unreadable().is_none() {
                    self.note_unreadable(UnreadableReason::Failed);
                }
            }
        }
    }

    fn open_or_replace(&self) -> Result<(Database, DatabaseSnapshot), StoreError> {
        self.shared.while_opening(|| open_or_replace(&self.dir, &self.shared))
    }

    /// Opens the database at once. It follows the journal only after [`Work::Begin`].
    fn open_for_start(&mut self) -> Result<DatabaseSnapshot, StoreError> {
        let (database, snapshot) = self.open_or_replace()?;
        self.database = Some(database);
        Ok(snapshot)
    }

    /// Opens the database, and brings it up to date.
    fn open(&mut self) {
        let began = Instant::now();
        let opened = self.open_or_replace();
        if began.elapsed() >= LATE_AFTER {
            self.note_unreadable(UnreadableReason::Slow);
        }
        match opened {
            Ok((database, _)) => self.take_over(database),
            Err(error) => self.retry_later(&error),
        }
    }

    /// Takes over an open database, and first brings it up to date.
    fn take_over(&mut self, database: Database) {
        self.next = Next::WithCheckpoint;
        if !has_free_space(&self.dir) {
            self.database = Some(database);
            return self.wait_for_space();
        }
        let Err(error) = self.catch_up(database) else { return };
        // It opens, and is not writable although there is space: a power cut leaves such damage.
        let is_unwritable = matches!(error, StoreError::Database { .. });
        if !is_unwritable || self.was_replaced || self.shared.is_ending() {
            return self.retry_later(&error);
        }
        match quarantine(&self.dir) {
            Ok(moved) => {
                self.was_replaced = true;
                let mut late = self.shared.late();
                late.quarantined(moved);
                if let StoreError::Database { why, .. } = &error {
                    late.finding(history_finding(why));
                }
                drop(late);
                self.next = Next::Due(Instant::now());
            }
            Err(error) => self.retry_later(&error),
        }
    }

    /// Brings the database up to date with the journal, and reports what is wrong with the two.
    fn catch_up(&mut self, mut database: Database) -> Result<(), StoreError> {
        let shared = Arc::clone(&self.shared);
        shared.behind.store(false, Ordering::Release);
        let (start, has_found) = (self.start.as_ref(), !shared.late().found.is_empty());
        let followed = match follow(&mut database, &self.state_dir, start, has_found, || {
            shared.note_progress();
        }) {
            Ok(followed) => followed,
            Err(error) => {
                database.close();
                return Err(error);
            }
        };
        self.followed = followed.last;
        let deleted = *shared.deleted();
        if let Some(until) = deleted.filter(|until| *until > Timestamp(0)) {
            database.forget_until(until)?;
        }
        *shared.deleted() = None;
        self.database = Some(database);
        let found = followed.found.len();
        let mut late = shared.late();
        late.add_found(followed.found);
        if let Some(start) = &self.start {
            let existed = start.existed.filter(|_| deleted.is_none() && late.findings.is_empty());
            let finding = existed
                .and_then(|existed| database_finding(followed.oldest, followed.applied, existed));
            finding.into_iter().for_each(|finding| late.finding(finding));
            for path in &followed.damaged {
                late.finding(damage_finding(path));
                // The store still writes to the newest segment. The next checkpoint replaces it.
                match (*path != followed.newest).then(|| quarantine(path)).transpose() {
                    Ok(moved) => moved.into_iter().for_each(|moved| late.quarantined(moved)),
                    Err(error) => tracing::warn!(%error, "failed to quarantine a damaged segment"),
                }
            }
            if !late.findings.is_empty() {
                let found = late.findings.join("; ");
                tracing::warn!(found, moved = ?late.quarantined, "the ledger was damaged; no live grant is lost");
            }
        }
        drop(late);
        self.refused = 0;
        if let Some(Unreadable { since, .. }) = shared.note_unreadable(None) {
            tracing::info!(
                since = since.to_seconds(),
                found,
                "the query database is open, and has what the journal has"
            );
        }
        if self.start.take().is_some_and(|start| start.recounts) {
            self.recount();
        }
        Ok(())
    }

    /// Counts the history, and reports a loss.
    fn recount(&mut self) {
        let mut lost = 0;
        self.write(|database| database.recount().map(|count| lost = count));
        if lost > 0 {
            let finding = format!("the query database has lost {lost} of its released grants");
            tracing::warn!("{finding}; live grants are not affected");
            self.shared.late().finding(finding);
        }
    }

    /// Schedules the next attempt after the system has refused to open the database.
    fn retry_later(&mut self, error: &StoreError) {
        self.why = error.to_string();
        let wait = RETRY_AFTER.saturating_mul(1 << self.refused.min(6)).min(RETRY_AFTER_MAX);
        self.next = Next::Retry(Instant::now() + wait);
        self.note_unreadable(UnreadableReason::Refused);
        // Only the first of many attempts is an error in the log.
        if self.refused == 0 {
            tracing::error!(%error, "the query database stays closed, and is tried again; grants are still recorded in the journal");
        } else {
            tracing::debug!(%error, "the query database stays closed");
        }
        self.refused = self.refused.saturating_add(1);
    }

    /// Writes if there is free space: sled may hang on a full disk.
    fn write(&mut self, act: impl FnOnce(&mut Database) -> Result<(), StoreError>) {
        let Some(database) = &mut self.database else { return };
        if !has_free_space(&self.dir) {
            return self.wait_for_space();
        }
        if let Err(error) = act(database) {
            self.abandon(&error);
        }
    }

    /// Lets the database lag behind until there is free space.
    fn wait_for_space(&self) {
        if !self.shared.behind.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                "no free space for the query database; it catches up with the journal when there is"
            );
        }
    }

    /// Closes a database that failed.
    fn abandon(&mut self, error: &StoreError) {
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        (self.why, self.closed_at, self.next) =
            (format!("it is closed after an error: {error}"), now(), Next::WithCheckpoint);
        // Before the close, which may hang.
        self.note_unreadable(UnreadableReason::Failed);
        self.close();
    }

    fn note_unreadable(&self, because: UnreadableReason) {
        self.shared.note_unreadable(Some(Unreadable { since: self.closed_at, because }));
    }

    fn close(&mut self) {
        match self.database.take() {
            Some(database) if has_free_space(&self.dir) => database.close(),
            // Closing writes, and sled may hang.
            database => std::mem::forget(database),
        }
    }

    fn checkpoint(&mut self, order: &CheckpointOrder) -> Result<(), StoreError> {
        if !has_free_space(&self.dir) {
            self.wait_for_space();
            return Ok(());
        }
        if self.shared.behind.load(Ordering::Acquire)
            && let Some(database) = self.database.take()
        {
            self.take_over(database);
        }
        let retention = self.retention;
        self.write(|database| {
            database.checkpoint(order.applied, now(), retention, order.live_bytes)
        });
        match self.database {
            Some(_) if !self.shared.behind.load(Ordering::Acquire) => {
                delete_before(&journal_dir(&self.state_dir), order.newest_segment)
            }
            _ => Ok(()),
        }
    }

    /// Compacts a database whose files are far longer than its records. It stays in use until the
    /// copy is complete and durable. Changes in the meantime come from the journal.
    fn compact(&mut self) {
        let Some(database) = self.database.as_ref().filter(|_| !self.compaction_failed) else {
            return;
        };
        match database.needs_compaction() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return self.abandon(&error),
        }
        if let Err(error) = compact(&mut self.database, &self.dir, &self.shared) {
            tracing::warn!(%error, "compaction of the query database failed; it keeps its size");
            self.compaction_failed = true;
        }
        if self.database.is_none() {
            self.closed_at = now();
            self.open();
        }
    }
}

fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}
