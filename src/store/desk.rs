//! What the shelver's thread does with the query database: it opens it, gives it what the journal has, makes checkpoints, and replaces a
//! database that is damaged.
//!
//! ```text
//!           wanted, or its time has come           open, and it has what the journal has
//!   closed ─────────────────────────────▶ opening ───────────────────────────────────────▶ open
//!      ▲                                    │  ▲ damaged: moved away, an empty one opens     │
//!      ├──── the system refuses: later ─────┘  └─────────────────────────────────────────────┤
//!      └──────────────────────────────────────────────────────────────── a write has failed ─┘
//! ```
//!
//! While it opens the thread answers. Who wants the history is told that it cannot be read yet; what is recorded is in the journal, and
//! that is read when the database is open.

mod attempts;
mod bounds;

use self::attempts::Next;
#[cfg(test)]
pub(super) use self::bounds::forget_aside;
use super::StoreError;
use super::database::Shelf;
use super::follow::{Start, catch_up, follow};
use super::journal;
use super::layout::{clear_up, database_dir, has_room, journal_dir};
use super::opening::{Attempt, Opened};
use super::recovery::{LivePayloads, Truth};
use super::shared::Shared;
use super::work::{Database, Order, Work};
use crate::domain::{Retention, Timestamp, Unreadable, UnreadableReason};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// How long the room that was seen is counted on: some hundred entries that come at once take a tenth of it.
const ROOM_SEEN_FOR: Duration = Duration::from_millis(1);
/// How long after a start in the same boot the database is opened, unless it is wanted before: sled's opening would take a
/// core from the registrations.
const OPENS_AFTER: Duration = Duration::from_millis(300);
/// How often it is looked whether the database is open by now; and one that is late.
const POLL: Duration = Duration::from_millis(2);
const POLL_LATE: Duration = Duration::from_millis(100);

/// The thread's side of the handle.
pub(super) struct Desk {
    state_dir: PathBuf,
    dir: PathBuf,
    retention: Retention,
    shelf: Option<Shelf>,
    /// It is being opened.
    attempt: Option<Attempt>,
    next: Option<Next>,
    /// How many attempts the system has refused, one after the other.
    refused: u32,
    /// What was said last of a database that is not open.
    why: String,
    closed_at: Timestamp,
    /// What the start has left to the first opening.
    start: Option<Start>,
    /// What waits for the end of the opening.
    waiting: Vec<Work>,
    /// Another thread of this process may have the database, and not let go.
    is_beside_stuck: bool,
    /// The directory of that, when its copy has taken its place.
    stuck: Option<PathBuf>,
    /// Segments of the journal were given up; the latest release in them, or 0.
    given_up: Option<Timestamp>,
    /// It could not be written anew, which is not tried again.
    stays_large: bool,
    /// When there was room last.
    room_seen: Option<Instant>,
    shared: Arc<Shared>,
}

impl Desk {
    pub(super) fn new(state_dir: &Path, retention: Retention, shared: Arc<Shared>) -> Self {
        Desk {
            state_dir: state_dir.to_owned(),
            dir: database_dir(state_dir),
            retention,
            shelf: None,
            attempt: None,
            next: None,
            refused: 0,
            why: String::new(),
            closed_at: now(),
            start: None,
            waiting: Vec::new(),
            is_beside_stuck: false,
            stuck: None,
            given_up: None,
            stays_large: false,
            room_seen: None,
            shared,
        }
    }

    /// Takes the database over, and then does what it is told, until nobody is left to tell it anything.
    pub(super) fn serve(&mut self, database: Database, work: &Receiver<Work>) {
        let shared = Arc::clone(&self.shared);
        shared.while_at_it(|| self.begin(database));
        if let Err(error) = clear_up(&self.dir) {
            tracing::warn!(%error, "what an earlier process has left stays");
        }
        loop {
            let told = match self.wakes_after() {
                None => work.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(wait) => work.recv_timeout(wait),
            };
            match told {
                Ok(work) => shared.while_at_it(|| self.perform(work)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if shared.is_left() {
                return self.leave();
            }
            shared.while_at_it(|| self.go_on());
        }
        // What it was told last is done still, unless the database is late.
        while !self.waiting.is_empty() && !shared.is_left() {
            thread::sleep(POLL);
            shared.while_at_it(|| self.go_on());
        }
        shared.while_at_it(|| self.close());
    }

    fn begin(&mut self, database: Database) {
        match database {
            Database::Opened(opened) => {
                let (opened, truth, live) = *opened;
                if !has_room(&self.dir) {
                    self.shelf = Some(opened.shelf);
                    return self.wait_for_room();
                }
                match filled(opened, &truth, &live, || self.shared.beat()) {
                    Ok(shelf) => {
                        self.shelf = Some(shelf);
                        self.recount();
                    }
                    Err(error) => {
                        self.abandon(&error);
                        // It opens and cannot be written: damage that a power cut leaves where opening does not look.
                        if matches!(error, StoreError::Database { .. }) && !self.shared.is_left() {
                            self.try_to_open();
                        }
                    }
                }
            }
            Database::Later(later) => {
                let (attempt, start) = *later;
                self.start = Some(start);
                if attempt.is_none() {
                    self.next = Some(Next { at: Instant::now() + OPENS_AFTER, may_come_before: true });
                }
                self.attempt = attempt;
            }
            Database::Stuck => {
                self.is_beside_stuck = true;
                self.try_to_open();
            }
        }
    }

    /// How long it waits to be told something before it looks after the database.
    fn wakes_after(&self) -> Option<Duration> {
        match &self.attempt {
            Some(attempt) => Some(if attempt.is_late() { POLL_LATE } else { POLL }),
            None => self.next.filter(|_| self.shelf.is_none()).map(|next| next.at.saturating_duration_since(Instant::now())),
        }
    }

    fn perform(&mut self, work: Work) {
        match work {
            Work::Put { alloc_id, seq, payload } => self.write(|shelf| shelf.put(&alloc_id, seq, &payload)),
            Work::Retire { grant, seq, payload } => self.write(|shelf| shelf.retire(&grant, seq, &payload)),
            Work::Name { key, seq, id } => self.write(|shelf| shelf.name(&key, seq, &id)),
            Work::ForgetName { key } => self.write(|shelf| shelf.forget_name(&key)),
            Work::Hook { hook, seq, payload } => self.write(|shelf| shelf.hook(&hook, seq, &payload)),
            order => {
                if self.is_opening(matches!(order, Work::Checkpoint(..))) {
                    self.waiting.push(order);
                } else {
                    self.answer(order);
                }
            }
        }
    }

    fn answer(&mut self, order: Work) {
        match order {
            Work::Checkpoint(order, done) => {
                let result = self.checkpoint(&order);
                if let Err(error) = &result {
                    tracing::warn!(%error, "the query database lags behind the journal");
                }
                // Nobody needs to wait for it.
                drop(done.send(result));
                self.keep_small();
            }
            Work::Read(answer) => {
                let closed = || StoreError::Unopened { path: self.dir.clone(), why: self.why.clone() };
                drop(answer.send(self.shelf.as_ref().map(Shelf::reader).ok_or_else(closed)));
            }
            #[cfg(test)]
            Work::Meddle(act) => {
                act(&mut self.shelf);
                self.shared.closed.store(self.shelf.is_none(), Ordering::Release);
            }
            Work::Put { .. } | Work::Retire { .. } | Work::Name { .. } | Work::ForgetName { .. } | Work::Hook { .. } => {}
        }
    }

    fn write(&mut self, act: impl FnOnce(&mut Shelf) -> Result<(), StoreError>) {
        if self.shelf.is_some() && self.room_seen.is_none_or(|seen| seen.elapsed() >= ROOM_SEEN_FOR) {
            if !has_room(&self.dir) {
                self.room_seen = None;
                return self.wait_for_room();
            }
            self.room_seen = Some(Instant::now());
        }
        if let Some(Err(error)) = self.shelf.as_mut().map(act) {
            self.abandon(&error);
        }
    }

    /// Lets the database fall behind.
    fn wait_for_room(&self) {
        if !self.shared.behind.swap(true, Ordering::AcqRel) {
            tracing::warn!("there is no room for the query database; it catches up with the journal when there is");
        }
    }

    fn checkpoint(&mut self, order: &Order) -> Result<(), StoreError> {
        if let Some(sync) = &order.sync {
            sync.run()?;
        }
        let waits = !has_room(&self.dir);
        if !waits && self.shared.behind.load(Ordering::Acquire) {
            self.catch_up();
        }
        let now = now();
        let retention = self.retention;
        if waits {
            self.wait_for_room();
        } else {
            self.write(|shelf| shelf.checkpoint(order.applied, now, retention, order.live));
        }
        check_mine(&self.shared, &self.dir)?;
        if self.shelf.is_some() && !waits {
            journal::delete_before(&journal_dir(&self.state_dir), order.newest_segment)
        } else {
            self.give_up_oldest(order.newest_segment)
        }
    }

    /// Reads from the journal what it was not told.
    fn catch_up(&mut self) {
        self.write(|_| Ok(()));
        let Some(shelf) = &mut self.shelf else { return };
        self.shared.behind.store(false, Ordering::Release);
        let image = shelf.reader().image();
        let followed = image.and_then(|image| follow(shelf, &image, &image, &self.state_dir, None, || self.shared.beat()));
        if let Err(error) = followed {
            self.abandon(&error);
        }
    }

    fn abandon(&mut self, error: &StoreError) {
        if self.shared.is_left() {
            return;
        }
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        (self.why, self.closed_at, self.next) = (format!("it is closed after an error: {error}"), now(), None);
        // Before the attempt, which may never end.
        self.shared.note_unreadable(Some(Unreadable { since: self.closed_at, because: UnreadableReason::Failed }));
        self.close();
    }

    fn close(&mut self) {
        // Closing writes.
        if !has_room(&self.dir) {
            return self.leave();
        }
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
    }

    /// Lets the database be as it is.
    fn leave(&mut self) {
        std::mem::forget(self.shelf.take());
    }
}

fn now() -> Timestamp {
    Timestamp::from_system(SystemTime::now())
}

/// Before something is moved or deleted: a thread that comes back after it was given up must not touch what its successor uses.
fn check_mine(shared: &Shared, dir: &Path) -> Result<(), StoreError> {
    let late = || StoreError::Unopened { path: dir.to_owned(), why: "it answers too late".into() };
    if shared.is_left() { Err(late()) } else { Ok(()) }
}

/// The database with what it lacked.
fn filled(opened: Opened, truth: &Truth, live: &LivePayloads, beat: impl Fn()) -> Result<Shelf, StoreError> {
    let Opened { mut shelf, holds, .. } = opened;
    match catch_up(&mut shelf, &holds, truth, live, &[], beat) {
        Ok(()) => Ok(shelf),
        Err(error) => {
            shelf.close();
            Err(error)
        }
    }
}

/// What is said of a segment of the journal.
pub(super) fn damaged(path: &Path) -> String {
    format!("journal segment `{}` is damaged", path.display())
}

/// What is said of a database whose records were damaged.
pub(super) fn history_stays(why: &str) -> String {
    format!("the query database was damaged ({why}); its history stays in the copy that was moved away")
}
