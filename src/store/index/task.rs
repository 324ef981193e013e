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
//! The thread goes on receiving while the database opens. A query gets an error after some seconds. Entries are in the journal, which is read
//! when the database is open.

use super::compact::{compact_dir, replace_with_copy};
use super::database::Database;
use super::follow::follow;
use super::opening::{Attempt, Next};
use super::shared::Shared;
use super::work::{Begin, CheckpointOrder, Start, Work};
use crate::domain::{Retention, Timestamp, UnreadableReason};
use crate::host;
use crate::store::StoreError;
use crate::store::journal::delete_before;
use crate::store::layout::{FREE_BYTES_MIN, database_dir, delete_quarantined, has_free_space, journal_dir, remove};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// How long a look at the free space is relied on: some hundred entries that come at once take a tenth of it.
const SPACE_SEEN_FOR: Duration = Duration::from_millis(1);
/// How long after a start beside a whole journal the database is opened, unless it is wanted before: sled's opening would take a
/// core from the registrations.
const OPENS_AFTER: Duration = Duration::from_millis(300);
/// How often an opening is polled, and one that is late.
const POLL: Duration = Duration::from_millis(2);
const POLL_LATE: Duration = Duration::from_millis(100);

/// The thread's side of the handle.
pub(super) struct IndexTask {
    pub(super) state_dir: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) retention: Retention,
    pub(super) database: Option<Database>,
    pub(super) attempt: Option<Attempt>,
    pub(super) next: Option<Next>,
    /// How many attempts the system has refused, one after the other.
    pub(super) refused: u32,
    /// Why the database is not open, for the errors of queries.
    pub(super) why: String,
    pub(super) closed_at: Timestamp,
    /// For the first opening.
    pub(super) start: Option<Start>,
    /// Requests that wait for the end of an opening.
    pub(super) waiting: Vec<Work>,
    /// It could not be compacted, which is not tried again.
    pub(super) stays_large: bool,
    pub(super) space_seen: Option<Instant>,
    pub(super) shared: Arc<Shared>,
}

impl IndexTask {
    pub(super) fn new(state_dir: &Path, retention: Retention, start: Start, shared: Arc<Shared>) -> Self {
        IndexTask {
            state_dir: state_dir.to_owned(),
            dir: database_dir(state_dir),
            retention,
            database: None,
            attempt: None,
            next: None,
            refused: 0,
            why: String::new(),
            closed_at: now(),
            start: Some(start),
            waiting: Vec::new(),
            stays_large: false,
            space_seen: None,
            shared,
        }
    }

    /// Does the work of the queue until the handle is dropped, and then closes the database.
    pub(super) fn serve(&mut self, begin: Begin, work: &Receiver<Work>) {
        let shared = Arc::clone(&self.shared);
        if let Err(error) = remove(&compact_dir(&self.dir)) {
            tracing::warn!(%error, "failed to delete an unfinished compaction");
        }
        match begin {
            Begin::Later => self.next = Some(Next { at: Instant::now() + OPENS_AFTER, may_come_before: true }),
            Begin::Opening(attempt) => self.attempt = Some(attempt),
            Begin::Open(opened) => shared.while_busy(|| self.end_attempt(Ok(*opened))),
        }
        loop {
            let received = match self.wakes_after() {
                None => work.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(wait) => work.recv_timeout(wait),
            };
            match received {
                Ok(work) => shared.while_busy(|| self.perform(work)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            shared.while_busy(|| self.drive());
        }
        // The last requests are answered still, unless the database is late.
        while !self.waiting.is_empty() {
            thread::sleep(POLL);
            shared.while_busy(|| self.drive());
        }
        shared.while_busy(|| self.close());
    }

    /// How long it waits for work before it looks after the database.
    fn wakes_after(&self) -> Option<Duration> {
        match &self.attempt {
            Some(attempt) => Some(if attempt.is_late() { POLL_LATE } else { POLL }),
            None => self.next.filter(|_| self.database.is_none()).map(|next| next.at.saturating_duration_since(Instant::now())),
        }
    }

    fn perform(&mut self, work: Work) {
        match work {
            Work::Update(seq, update) => self.write(|database| database.write(seq, &update)),
            request if self.is_opening(matches!(request, Work::Checkpoint(..))) => self.waiting.push(request),
            request => self.answer(request),
        }
    }

    pub(super) fn answer(&mut self, request: Work) {
        match request {
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
                let closed = || StoreError::Unopened { path: self.dir.clone(), why: self.why.clone() };
                drop(answer.send(self.database.as_ref().map(Database::reader).ok_or_else(closed)));
            }
            #[cfg(test)]
            Work::Meddle(act) => {
                act(&mut self.database);
                self.shared.closed.store(self.database.is_none(), Ordering::Release);
            }
            Work::Update(..) => {}
        }
    }

    /// Writes, where there is space.
    pub(super) fn write(&mut self, act: impl FnOnce(&mut Database) -> Result<(), StoreError>) {
        if self.database.is_some() && self.space_seen.is_none_or(|seen| seen.elapsed() >= SPACE_SEEN_FOR) {
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
    pub(super) fn wait_for_space(&self) {
        if !self.shared.behind.swap(true, Ordering::AcqRel) {
            tracing::warn!("there is no space for the query database; it catches up with the journal when there is");
        }
    }

    /// Closes a database that failed. The next checkpoint opens it again.
    fn abandon(&mut self, error: &StoreError) {
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        (self.why, self.closed_at, self.next) = (format!("it is closed after an error: {error}"), now(), None);
        // Before the close, which may never end.
        self.shared.note_unreadable(self.closed_at, UnreadableReason::Failed);
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
        if let Some(sync) = &order.sync {
            sync.run()?;
        }
        if !has_free_space(&self.dir) {
            self.wait_for_space();
            return Ok(());
        }
        if self.shared.behind.load(Ordering::Acquire) {
            self.catch_up();
        }
        let retention = self.retention;
        self.write(|database| database.checkpoint(order.applied, now(), retention, order.live));
        match self.database {
            Some(_) if !self.shared.behind.load(Ordering::Acquire) => delete_before(&journal_dir(&self.state_dir), order.newest_segment),
            _ => Ok(()),
        }
    }

    /// Reads from the journal what the database lacks.
    fn catch_up(&mut self) {
        let Some(database) = &mut self.database else { return };
        self.shared.behind.store(false, Ordering::Release);
        let snapshot = database.reader().snapshot();
        let followed = snapshot.and_then(|snapshot| follow(database, &snapshot, &self.state_dir, None, || self.shared.beat()));
        if let Err(error) = followed {
            self.abandon(&error);
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
            return tracing::debug!(bytes = before, "there is no space to compact the query database");
        }
        let written = database.write_copy(|| {
            self.shared.beat();
            !self.shared.hurries.load(Ordering::Acquire)
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
            Ok(()) => tracing::debug!(before, after = host::size_below(&self.dir), "the query database was compacted"),
            Err(error) => {
                tracing::warn!(%error, "the query database cannot be compacted, and stays as large as it is");
                self.stays_large = true;
                drop(remove(&compact_dir(&self.dir)));
            }
        }
        if self.database.is_none() {
            self.attempt = Some(Attempt::begin(&self.dir, None));
        }
    }
}

fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}
