//! The index thread: it opens the database, gives it what the journal has, makes checkpoints, and replaces a damaged database.
//!
//! ```text
//!           wanted, or its time has come           open, and it has what the journal has
//!   closed ─────────────────────────────▶ opening ───────────────────────────────────────▶ open
//!      ▲                                    │  ▲ damaged: moved away, an empty one opens     │
//!      ├──── the system refuses: later ─────┘  └─────────────────────────────────────────────┤
//!      └──────────────────────────────────────────────────────────────── a write has failed ─┘
//! ```
//!
//! Nobody waits for a slow opening: the handle answers queries with an error then. Entries are in the journal, which is read when the
//! database is open.

use super::compact::{compact_dir, replace_with_copy};
use super::database::Database;
use super::failure::{database_finding, history_finding};
use super::follow::follow;
use super::opening::open_or_replace;
use super::reader::DatabaseSnapshot;
use super::shared::{LATE_AFTER, Shared};
use super::work::{CheckpointOrder, Start, Work};
use crate::domain::{Retention, Timestamp, Unreadable, UnreadableReason};
use crate::host;
use crate::store::StoreError;
use crate::store::journal::{damage_finding, delete_before};
use crate::store::layout::{
    FREE_BYTES_MIN, database_dir, delete_quarantined, has_free_space, journal_dir, quarantine,
    remove,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant, SystemTime};

/// How long a look at the free space is relied on: some hundred entries that come at once take a tenth of it.
const SPACE_SEEN_FOR: Duration = Duration::from_millis(1);
/// How long after a start beside a whole journal the database is opened, unless it is wanted before: sled's opening would take a
/// core from the registrations.
const OPENS_AFTER: Duration = Duration::from_millis(300);
/// Backoff after the system has refused to open it: doubled each time, up to the second.
const RETRY_AFTER: Duration =
    if cfg!(test) { Duration::from_millis(1) } else { Duration::from_secs(1) };
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// When a closed database is opened.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// At this time, or for a request before.
    Due(Instant),
    /// At this time: the system has refused to open it.
    Retry(Instant),
    /// For a checkpoint: it was closed after an error.
    WithCheckpoint,
}

/// The thread's side of the handle.
pub(super) struct IndexTask {
    state_dir: PathBuf,
    dir: PathBuf,
    retention: Retention,
    database: Option<Database>,
    next: Next,
    /// How many attempts the system has refused, one after the other.
    refused: u32,
    /// Why the database is not open, for the errors of queries.
    why: String,
    closed_at: Timestamp,
    /// For the first time that the database follows the journal.
    start: Option<Start>,
    /// The last entry that the database had of the journal when it followed it. Earlier updates are old.
    followed: u64,
    /// One that opened and could not be written was moved away, which is not done again.
    was_replaced: bool,
    /// It could not be compacted, which is not tried again.
    stays_large: bool,
    space_seen: Option<Instant>,
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
            stays_large: false,
            space_seen: None,
            shared,
        }
    }

    /// Opens the database at once for a start that wants its snapshot.
    pub(super) fn open_for_start(
        &mut self,
        wanted: &SyncSender<Result<DatabaseSnapshot, StoreError>>,
    ) {
        let opened = self.shared.while_opening(|| open_or_replace(&self.dir, &self.shared));
        let snapshot = opened.map(|(database, snapshot, replaced)| {
            replaced.into_iter().for_each(|why| self.shared.late().finding(history_finding(&why)));
            self.database = Some(database);
            snapshot
        });
        // A start that has gone on without it does not wait.
        drop(wanted.send(snapshot));
    }

    /// Does the work of the queue until the handle is dropped, and then closes the database.
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
                // It is due, however much is in the queue.
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
            (Work::Meddle(_), Next::Due(_)) => true,
            _ => false,
        };
        if is_due && self.database.is_none() {
            self.open();
        }
        match work {
            Work::Begin(start) => {
                self.start = Some(start);
                if let Some(database) = self.database.take() {
                    self.take_over(database);
                }
            }
            Work::Update(seq, update) if seq > self.followed => {
                self.write(|database| database.write(seq, &update))
            }
            Work::Update(..) => {}
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
            Work::Meddle(act) => {
                act(&mut self.database);
                if self.database.is_none() && self.shared.unreadable().is_none() {
                    self.shared.note_unreadable(Some(Unreadable {
                        since: now(),
                        because: UnreadableReason::Failed,
                    }));
                }
            }
        }
    }

    /// Opens the database.
    fn open(&mut self) {
        self.next = Next::WithCheckpoint;
        let began = Instant::now();
        let opened = self.shared.while_opening(|| open_or_replace(&self.dir, &self.shared));
        if began.elapsed() >= LATE_AFTER {
            self.shared.note_unreadable(Some(Unreadable {
                since: self.closed_at,
                because: UnreadableReason::Slow,
            }));
        }
        match opened {
            Ok((database, _, replaced)) => {
                replaced
                    .into_iter()
                    .for_each(|why| self.shared.late().finding(history_finding(&why)));
                self.take_over(database);
            }
            Err(error) => self.retry_later(&error),
        }
    }

    /// Takes an open database over, which first is given what the journal has.
    fn take_over(&mut self, database: Database) {
        self.next = Next::WithCheckpoint;
        if !has_free_space(&self.dir) {
            self.database = Some(database);
            return self.wait_for_space();
        }
        match self.fill(database) {
            Ok(()) => {}
            // It opens and cannot be written although there is space: a power cut leaves such damage.
            Err(StoreError::Database { why, .. })
                if !self.was_replaced && !self.shared.is_ending() =>
            {
                match quarantine(&self.dir) {
                    Ok(moved) => {
                        self.was_replaced = true;
                        let mut late = self.shared.late();
                        late.quarantined(moved);
                        late.finding(history_finding(&why));
                        drop(late);
                        self.next = Next::Due(Instant::now());
                    }
                    Err(error) => self.retry_later(&error),
                }
            }
            Err(error) => self.retry_later(&error),
        }
    }

    fn fill(&mut self, mut database: Database) -> Result<(), StoreError> {
        self.shared.behind.store(false, Ordering::Release);
        let followed = match follow(&mut database, &self.state_dir, self.start.as_ref(), || {
            self.shared.beat()
        }) {
            Ok(followed) => followed,
            Err(error) => {
                database.close();
                return Err(error);
            }
        };
        self.followed = followed.last;
        let given_up = *self.shared.given_up();
        if let Some(until) = given_up.filter(|until| *until > Timestamp(0)) {
            database.forget_until(until)?;
        }
        *self.shared.given_up() = None;
        self.database = Some(database);
        let found = followed.found.len();
        let mut late = self.shared.late();
        late.found.extend(followed.found);
        if let Some(start) = &self.start {
            let existed = start.existed.filter(|_| given_up.is_none() && late.findings.is_empty());
            let finding = existed
                .and_then(|existed| database_finding(followed.oldest, followed.applied, existed));
            finding.into_iter().for_each(|finding| late.finding(finding));
            for path in &followed.damaged {
                late.finding(damage_finding(path));
                match quarantine(path) {
                    Ok(moved) => late.quarantined(moved),
                    Err(error) => {
                        tracing::warn!(%error, "failed to move a damaged journal segment away")
                    }
                }
            }
            if !late.findings.is_empty() {
                let found = late.findings.join("; ");
                tracing::warn!(found, moved = ?late.quarantined, "the ledger was damaged, and has lost nothing that is live");
            }
        }
        drop(late);
        self.refused = 0;
        if let Some(Unreadable { since, .. }) = self.shared.note_unreadable(None) {
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

    /// Reports how much of the history is gone.
    fn recount(&mut self) {
        let mut lost = 0;
        self.write(|database| database.recount().map(|count| lost = count));
        if lost > 0 {
            let finding = format!("the query database has lost {lost} of its released grants");
            tracing::warn!("{finding}; live grants are not affected");
            self.shared.late().finding(finding);
        }
    }

    /// The system does not let it be opened: it is tried again after a while.
    fn retry_later(&mut self, error: &StoreError) {
        self.why = error.to_string();
        let wait = RETRY_AFTER.saturating_mul(1 << self.refused.min(6)).min(RETRY_AFTER_MAX);
        self.next = Next::Retry(Instant::now() + wait);
        self.shared.note_unreadable(Some(Unreadable {
            since: self.closed_at,
            because: UnreadableReason::Refused,
        }));
        // There are many attempts; the first one is logged.
        if self.refused == 0 {
            tracing::error!(%error, "the query database stays closed, and is tried again; grants are still recorded in the journal");
        } else {
            tracing::debug!(%error, "the query database stays closed");
        }
        self.refused = self.refused.saturating_add(1);
    }

    /// Writes, where there is space.
    fn write(&mut self, act: impl FnOnce(&mut Database) -> Result<(), StoreError>) {
        if self.database.is_some()
            && self.space_seen.is_none_or(|seen| seen.elapsed() >= SPACE_SEEN_FOR)
        {
            if !has_free_space(&self.dir) {
                self.space_seen = None;
                return self.wait_for_space();
            }
            self.space_seen = Some(Instant::now());
        }
        if let Some(Err(error)) = self.database.as_mut().map(act) {
            self.abandon(&error);
        }
    }

    /// Lets the database fall behind.
    fn wait_for_space(&self) {
        if !self.shared.behind.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                "there is no space for the query database; it catches up with the journal when there is"
            );
        }
    }

    /// Closes a database that failed.
    fn abandon(&mut self, error: &StoreError) {
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        (self.why, self.closed_at, self.next) =
            (format!("it is closed after an error: {error}"), now(), Next::WithCheckpoint);
        // Before the close, which may never end.
        self.shared.note_unreadable(Some(Unreadable {
            since: self.closed_at,
            because: UnreadableReason::Failed,
        }));
        self.close();
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
        self.write(|database| database.checkpoint(order.applied, now(), retention, order.live));
        match self.database {
            Some(_) if !self.shared.behind.load(Ordering::Acquire) => {
                delete_before(&journal_dir(&self.state_dir), order.newest_segment)
            }
            _ => Ok(()),
        }
    }

    /// Compacts a database whose files are far longer than their records. Until the copy is whole and durable the old one is the
    /// database; what is recorded meanwhile is in the journal.
    fn compact(&mut self) {
        let Some(database) = self.database.as_ref().filter(|_| !self.stays_large) else { return };
        match database.is_bloated() {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => return self.abandon(&error),
        }
        let before = host::size_below(&self.dir);
        if host::free_bytes(&self.dir) < before.saturating_add(FREE_BYTES_MIN) {
            return tracing::debug!(
                bytes = before,
                "there is no space to compact the query database"
            );
        }
        let written = database.write_copy(|| {
            self.shared.beat();
            !self.shared.is_ending()
        });
        let replaced = match written {
            Ok(false) => return drop(remove(&compact_dir(&self.dir))),
            Ok(true) => {
                self.database.take().into_iter().for_each(Database::close);
                self.closed_at = now();
                replace_with_copy(&self.dir)
            }
            Err(error) => Err(error),
        };
        match replaced {
            Ok(()) => tracing::debug!(
                before,
                after = host::size_below(&self.dir),
                "the query database was compacted"
            ),
            Err(error) => {
                tracing::warn!(%error, "the query database cannot be compacted, and stays as large as it is");
                self.stays_large = true;
                drop(remove(&compact_dir(&self.dir)));
            }
        }
        if self.database.is_none() {
            self.open();
        }
    }
}

fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}
