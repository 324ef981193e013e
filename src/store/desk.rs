//! What the shelver's thread does with the query database: it takes it over at the start, follows the journal, makes
//! checkpoints, and replaces a database that has failed.

use super::database::{Image, Reader, Shelf};
use super::journal::{self, PendingSync};
use super::layout::{database_dir, journal_dir, quarantine};
use super::opening::{Opened, Opening, open_or_replace};
use super::recovery::{self, LivePayloads, Truth, catch_up, database_finding, journal_findings};
use super::replay::Fold;
use super::{RecoveryReport, StoreError};
use crate::domain::{AllocId, DeviceId, Grant, Retention, Timestamp};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// Older segments that are kept for a database that cannot be written, before the oldest are given up (their live grants
/// are in every later head; what goes is history).
const OLD_SEGMENTS_WITHOUT_DATABASE_MAX: usize = 64;

/// What the thread and its handle both see.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The database is closed after an error.
    pub(super) closed: AtomicBool,
    /// The thread was not told everything.
    pub(super) behind: AtomicBool,
    /// What was found after the store was open.
    pub(super) late: Mutex<(Vec<String>, Vec<PathBuf>)>,
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
        grant: Box<Grant>,
        seq: u64,
        payload: Vec<u8>,
    },
    Name {
        key: String,
        seq: u64,
        id: DeviceId,
    },
    Checkpoint(Box<Order>, SyncSender<Result<(), StoreError>>),
    Read(SyncSender<Option<Reader>>),
    #[cfg(test)]
    Meddle(Meddling),
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
    shared: Arc<Shared>,
}

impl Desk {
    pub(super) fn new(state_dir: &Path, retention: Retention, shared: Arc<Shared>) -> Self {
        Desk { state_dir: state_dir.to_owned(), retention, shelf: None, shared }
    }

    pub(super) fn begin(&mut self, database: Database, first: u64, truth: Truth, live: &LivePayloads) {
        let begun = match database {
            Database::Opened(opened) => Ok((opened, truth)),
            Database::Later { existed } => self.open_late(existed, first),
        };
        match begun {
            Ok((Some(opened), truth)) => match filled(*opened, &truth, live) {
                Ok(shelf) => self.shelf = Some(shelf),
                Err(error) => {
                    self.abandon(&error);
                    // It opens and cannot be written: damage that a power cut leaves where opening does not look.
                    if !error.is_for_want_of_room() {
                        self.restore();
                    }
                }
            },
            Ok((None, _)) => self.shared.closed.store(true, Ordering::Release),
            Err(error) => self.abandon(&error),
        }
    }

    /// The database beside a journal that needed none, and what the older segments tell of released grants. A database
    /// that contradicts the journal is put aside for a person.
    fn open_late(&mut self, existed: bool, first: u64) -> Result<(Option<Box<Opened>>, Truth), StoreError> {
        let dir = database_dir(&self.state_dir);
        let opening = Opening::begin(&dir);
        let fold = Fold::read_before(&journal_dir(&self.state_dir), first)?;
        let mut report = RecoveryReport { findings: journal_findings(&fold), ..RecoveryReport::default() };
        for path in &fold.damaged {
            report.quarantined.push(quarantine(path)?);
        }
        let mut opened = open_or_replace(opening, &dir, &mut report.quarantined)?;
        if opened.salvaged.is_none() && opened.holds.last > fold.last {
            report.findings.push(format!("the query database knows entry {}, and the journal ends at {}", opened.holds.last, fold.last));
            opened.shelf.close();
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
        if let Some(Err(error)) = self.shelf.as_mut().map(act) {
            self.abandon(&error);
        }
    }

    fn checkpoint(&mut self, order: &Order) -> Result<(), StoreError> {
        if let Some(sync) = &order.sync {
            sync.run()?;
        }
        if self.shared.behind.swap(false, Ordering::AcqRel) {
            self.close();
        }
        if self.shelf.is_none() {
            self.restore();
        }
        let now = Timestamp::from_system(SystemTime::now());
        let retention = self.retention;
        self.write(|shelf| shelf.checkpoint(order.applied, now, retention));
        let keep = if self.shelf.is_some() { 0 } else { OLD_SEGMENTS_WITHOUT_DATABASE_MAX };
        journal::delete_before(&journal_dir(&self.state_dir), order.newest_segment, keep)
    }

    /// Opens the database again, or a new one, and fills it from the journal's segments. One that opens and cannot be
    /// filled although there is room is damaged too.
    fn restore(&mut self) {
        let dir = database_dir(&self.state_dir);
        let (mut findings, mut quarantined) = (Vec::new(), Vec::new());
        let restored = Fold::read_beside_a_writer(&journal_dir(&self.state_dir)).and_then(|fold| {
            let mut truth = recovery::merge(fold, &Image::default(), &mut RecoveryReport::default(), |_| None);
            let live = recovery::encode_live(&mut truth)?;
            match filled(open_or_replace(Opening::begin(&dir), &dir, &mut quarantined)?, &truth, &live) {
                Err(StoreError::Database { why, .. }) => {
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
                self.shared.closed.store(false, Ordering::Release);
            }
            Err(error) => tracing::error!(%error, "the query database stays closed"),
        }
    }

    fn abandon(&mut self, error: &StoreError) {
        tracing::error!(%error, "the query database is closed; grants are still recorded in the journal");
        self.close();
        self.shared.closed.store(true, Ordering::Release);
    }

    pub(super) fn close(&mut self) {
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
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
