//! What the shelver's thread does with the query database: it takes it over at the start, follows the journal, makes
//! checkpoints, and replaces a database that has failed.

use super::database::{Image, Reader, Shelf};
use super::journal::{self, PendingSync};
use super::layout::{database_dir, has_room, journal_dir, quarantine};
use super::opening::{Opened, Opening, open_or_exchange, open_or_replace, require_room};
use super::recovery::{self, LivePayloads, Truth, catch_up, database_finding, journal_findings};
use super::replay::Fold;
use super::{RecoveryReport, StoreError};
use crate::domain::{AllocId, DeviceId, Grant, OwedHook, Retention, Timestamp};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Older segments that are kept for a database that cannot be written, before the oldest are given up (their live grants
/// are in every later head; what goes is history).
const OLD_SEGMENTS_WITHOUT_DATABASE_MAX: usize = 64;

/// How long the room that was seen is counted on: some hundred entries that come at once take a tenth of it.
const ROOM_SEEN_FOR: Duration = Duration::from_millis(1);

/// What the thread and its handle both see.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The database is closed after an error.
    pub(super) closed: AtomicBool,
    /// The thread was not told everything.
    pub(super) behind: AtomicBool,
    /// What was found after the store was open.
    pub(super) late: Mutex<(Vec<String>, Vec<PathBuf>)>,
    /// Since when the thread has been at one thing.
    busy: Mutex<Option<Instant>>,
    /// The thread has been given up, and another one has its place.
    left: AtomicBool,
}

impl Shared {
    /// Does something that may never end.
    pub(super) fn while_at_it<T>(&self, run: impl FnOnce() -> T) -> T {
        let note = |since| *self.busy.lock().unwrap_or_else(PoisonError::into_inner) = since;
        note(Some(Instant::now()));
        let done = run();
        note(None);
        done
    }

    /// Whether the thread has been at one thing for longer than that.
    pub(super) fn is_stuck(&self, patience: Duration) -> bool {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|since| since.elapsed() >= patience)
    }

    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    /// Whether the thread is to touch nothing any more.
    pub(super) fn is_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Takes over what was found before; nothing of it is lost with a thread.
    pub(super) fn inherit(&self, from: &Shared) {
        let found = std::mem::take(&mut *from.late.lock().unwrap_or_else(PoisonError::into_inner));
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        late.0.splice(0..0, found.0);
        late.1.splice(0..0, found.1);
    }
}

/// The database as the thread takes it over.
#[derive(Debug)]
pub(super) enum Database {
    /// It is open, or cannot be.
    Opened(Option<Box<Opened>>),
    /// It is opened later: the journal's newest segment has told everything that was needed.
    Later { existed: bool },
}

/// What the thread is told.
pub(super) enum Work {
    Put {
        alloc_id: AllocId,
        seq: u64,
        payload: Vec<u8>,
    },
    Retire {
        grant: Arc<Grant>,
        seq: u64,
        payload: Vec<u8>,
    },
    Name {
        key: String,
        seq: u64,
        id: DeviceId,
    },
    Hook {
        hook: Box<OwedHook>,
        seq: u64,
        payload: Vec<u8>,
    },
    Checkpoint(Box<Order>, SyncSender<Result<(), StoreError>>),
    Read(SyncSender<Option<Reader>>),
    #[cfg(test)]
    Meddle(Meddling),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(super) type Meddling = Box<dyn FnOnce(&mut Option<Shelf>) + Send>;

/// A checkpoint that is wanted.
#[derive(Debug)]
pub(super) struct Order {
    /// Everything up to this sequence number has been told.
    pub(super) applied: u64,
    /// What the journal has to sync first, so that its newest head may stand for the older segments.
    pub(super) sync: Option<PendingSync>,
    /// The first segment that is still needed after it.
    pub(super) newest_segment: u64,
}

/// The thread's side of the handle.
pub(super) struct Desk {
    state_dir: PathBuf,
    retention: Retention,
    shelf: Option<Shelf>,
    /// It could not be opened again, which has been said.
    stays_closed: bool,
    /// When there was room last.
    room_seen: Option<Instant>,
    shared: Arc<Shared>,
}

impl Desk {
    pub(super) fn new(state_dir: &Path, retention: Retention, shared: Arc<Shared>) -> Self {
        Desk { state_dir: state_dir.to_owned(), retention, shelf: None, stays_closed: false, room_seen: None, shared }
    }

    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    pub(super) fn begin(&mut self, database: Database, first: u64, truth: Truth, live: &LivePayloads) {
        // In one boot nothing is lost.
        let may_have_lost = matches!(database, Database::Opened(_));
        let begun = match database {
            Database::Opened(opened) => Ok((opened, truth)),
            Database::Later { existed } => self.open_late(existed, first),
        };
        match begun {
            Ok((Some(opened), _)) if !has_room(&database_dir(&self.state_dir)) => {
                self.shelf = Some(opened.shelf);
                self.wait_for_room();
            }
            Ok((Some(opened), truth)) => match filled(*opened, &truth, live) {
                Ok(shelf) => {
                    self.shelf = Some(shelf);
                    if may_have_lost {
                        self.recount();
                    }
                }
                Err(error) => {
                    self.abandon(&error);
                    // It opens and cannot be written: damage that a power cut leaves where opening does not look.
                    if !error.is_for_want_of_room() && !self.shared.is_left() {
                        self.restore();
                    }
                }
            },
            Ok((None, _)) => self.shared.closed.store(true, Ordering::Release),
            Err(error) => self.abandon(&error),
        }
    }

    /// Says how much of the history is gone.
    fn recount(&mut self) {
        let mut lost = 0;
        self.write(|shelf| shelf.recount().map(|count| lost = count));
        if lost > 0 {
            let finding = format!("the query database has lost {lost} of its released grants");
            tracing::warn!("{finding}; what is live is not touched by that");
            self.shared.late.lock().unwrap_or_else(PoisonError::into_inner).0.push(finding);
        }
    }

    /// The database beside a journal that needed none, and what the older segments tell of released grants. A database
    /// that contradicts the journal is put aside for a person.
    fn open_late(&mut self, existed: bool, first: u64) -> Result<(Option<Box<Opened>>, Truth), StoreError> {
        let dir = database_dir(&self.state_dir);
        require_room(&dir)?;
        let opening = Opening::begin(&dir);
        let fold = Fold::read_before(&self.state_dir, first)?;
        let mut report = RecoveryReport { findings: journal_findings(&fold), ..RecoveryReport::default() };
        for path in &fold.damaged {
            report.quarantined.push(quarantine(path)?);
        }
        let mut opened = open_or_replace(opening, &dir, &mut report.quarantined)?;
        if opened.salvaged.is_none() && opened.holds.last > fold.last {
            report.findings.push(format!("the query database knows entry {}, and the journal ends at {}", opened.holds.last, fold.last));
            opened.shelf.close();
            self.check_mine()?;
            report.quarantined.push(quarantine(&dir)?);
            opened = open_or_replace(Opening::begin(&dir), &dir, &mut report.quarantined)?;
        }
        match &opened.salvaged {
            Some((_, why)) => report.findings.push(history_stays(why)),
            None => report.findings.extend(database_finding(fold.oldest(), &opened.holds, existed)),
        }
        let truth = recovery::merge(fold, &Image::default(), &mut report, |_| None);
        // What is live is known from the newest segment, whatever an older one lacks.
        report.missing = 0;
        if !report.is_clean() {
            tracing::warn!(%report, "the ledger was damaged, and has lost nothing that is live");
        }
        *self.shared.late.lock().unwrap_or_else(PoisonError::into_inner) = (report.findings, report.quarantined);
        Ok((Some(Box::new(opened)), truth))
    }

    pub(super) fn perform(&mut self, work: Work) {
        match work {
            Work::Put { alloc_id, seq, payload } => self.write(|shelf| shelf.put(&alloc_id, seq, &payload)),
            Work::Retire { grant, seq, payload } => self.write(|shelf| shelf.retire(&grant, seq, &payload)),
            Work::Name { key, seq, id } => self.write(|shelf| shelf.name(&key, seq, &id)),
            Work::Hook { hook, seq, payload } => self.write(|shelf| shelf.hook(&hook, seq, &payload)),
            Work::Checkpoint(order, done) => {
                let result = self.checkpoint(&order);
                if let Err(error) = &result {
                    tracing::warn!(%error, "the query database lags behind the journal");
                }
                // Nobody needs to wait for it.
                drop(done.send(result));
            }
            Work::Read(answer) => drop(answer.send(self.shelf.as_ref().map(Shelf::reader))),
            #[cfg(test)]
            Work::Meddle(act) => {
                act(&mut self.shelf);
                self.shared.closed.store(self.shelf.is_none(), Ordering::Release);
            }
        }
    }

    fn write(&mut self, act: impl FnOnce(&mut Shelf) -> Result<(), StoreError>) {
        if self.shelf.is_some() && self.room_seen.is_none_or(|seen| seen.elapsed() >= ROOM_SEEN_FOR) {
            if !has_room(&database_dir(&self.state_dir)) {
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
        let waits = !has_room(&database_dir(&self.state_dir));
        if !waits && self.shared.behind.swap(false, Ordering::AcqRel) {
            self.close();
        }
        if self.shelf.is_none() {
            self.restore();
        }
        let now = Timestamp::from_system(SystemTime::now());
        let retention = self.retention;
        if waits {
            self.wait_for_room();
        } else {
            self.write(|shelf| shelf.checkpoint(order.applied, now, retention));
        }
        self.check_mine()?;
        let keep = if self.shelf.is_some() && !waits { 0 } else { OLD_SEGMENTS_WITHOUT_DATABASE_MAX };
        journal::delete_before(&journal_dir(&self.state_dir), order.newest_segment, keep)
    }

    /// Opens the database again, or a new one, and fills it from the journal's segments. One that opens and cannot be
    /// filled although there is room is damaged too.
    pub(super) fn restore(&mut self) {
        let dir = database_dir(&self.state_dir);
        let (mut findings, mut quarantined) = (Vec::new(), Vec::new());
        let restored = require_room(&dir).and_then(|()| Fold::read_beside_a_writer(&self.state_dir)).and_then(|fold| {
            let mut truth = recovery::merge(fold, &Image::default(), &mut RecoveryReport::default(), |_| None);
            let live = recovery::encode_live(&mut truth)?;
            match filled(open_or_exchange(&dir, &mut quarantined)?, &truth, &live) {
                Err(StoreError::Database { why, .. }) => {
                    self.check_mine()?;
                    findings.push(history_stays(&why));
                    quarantined.push(quarantine(&dir)?);
                    filled(open_or_replace(Opening::begin(&dir), &dir, &mut quarantined)?, &truth, &live)
                }
                done => done,
            }
        });
        let mut late = self.shared.late.lock().unwrap_or_else(PoisonError::into_inner);
        late.0.extend(findings);
        late.1.extend(quarantined);
        drop(late);
        match restored {
            Ok(shelf) => {
                self.shelf = Some(shelf);
                self.stays_closed = false;
                self.shared.closed.store(false, Ordering::Release);
                tracing::info!("the query database is open again, and has what the journal has");
            }
            Err(error) => {
                self.shared.closed.store(true, Ordering::Release);
                // There are many attempts; the first one tells.
                if std::mem::replace(&mut self.stays_closed, true) {
                    tracing::debug!(%error, "the query database stays closed");
                } else {
                    tracing::error!(%error, "the query database stays closed");
                }
            }
        }
    }

    /// Before something is moved or deleted: a thread that comes back after it was given up must not touch what its
    /// successor uses.
    fn check_mine(&self) -> Result<(), StoreError> {
        let late = || StoreError::Database { path: database_dir(&self.state_dir), why: "it answers too late".into() };
        if self.shared.is_left() { Err(late()) } else { Ok(()) }
    }

    fn abandon(&mut self, error: &StoreError) {
        if self.shared.is_left() {
            return;
        }
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        // Before the attempt, which may never end.
        self.shared.closed.store(true, Ordering::Release);
        self.close();
    }

    pub(super) fn close(&mut self) {
        // Closing writes.
        if !has_room(&database_dir(&self.state_dir)) {
            return self.leave();
        }
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
    }

    /// Lets the database be as it is.
    pub(super) fn leave(&mut self) {
        std::mem::forget(self.shelf.take());
    }
}

/// The database with what it lacked.
fn filled(opened: Opened, truth: &Truth, live: &LivePayloads) -> Result<Shelf, StoreError> {
    let Opened { mut shelf, holds, .. } = opened;
    match catch_up(&mut shelf, &holds, truth, live) {
        Ok(()) => Ok(shelf),
        Err(error) => {
            shelf.close();
            Err(error)
        }
    }
}

/// What is said of a database whose records were damaged.
pub(super) fn history_stays(why: &str) -> String {
    format!("the query database was damaged ({why}); its history stays in the copy that was moved away")
}
