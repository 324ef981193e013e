//! The thread that keeps the query database behind the journal, so that nobody ever waits for sled: not an Allocate, and
//! not a start, which sled's opening would make three times as long, and now and then ten times.
//!
//! It is told every confirmed entry, in order, and owns the [`Shelf`]. What it is not told (its queue was full) or cannot
//! write (sled failed) it reads again from the journal's segments at the next checkpoint: they hold everything that the
//! last successful one did not, and only a successful one deletes them.

use super::database::{History, Image, Shelf};
use super::journal::{self, PendingSync};
use super::layout::{database_dir, journal_dir, quarantine, with_my_steps};
use super::opening::{Opened, Opening, open_or_replace};
use super::recovery::{self, LivePayloads, Truth, catch_up, database_finding, journal_findings};
use super::replay::Fold;
use super::{RecoveryReport, StoreError};
use crate::domain::{AllocId, DeviceId, Grant, Timestamp};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

/// Entries that may wait for sled: 3 MB of grants. More than that and it catches up from the journal.
const QUEUE_MAX: usize = 4096;
/// How long after a start in the same boot the database is opened, unless it is wanted before: sled's opening would take a
/// core from the registrations.
const OPENS_AFTER: Duration = Duration::from_millis(300);
/// How long somebody waits for the thread: longer than sled may take to open.
const PATIENCE: Duration = Duration::from_secs(30);
/// Older segments that are kept for a database that cannot be written, before the oldest are given up (their live grants
/// are in every later head; what goes is history).
const OLD_SEGMENTS_WITHOUT_DATABASE_MAX: usize = 64;

/// The handle. Dropping it lets the thread finish what it was told and close the database, and waits for that.
#[derive(Debug)]
pub(super) struct Shelver {
    dir: PathBuf,
    /// `None` only while it is dropped.
    queue: Option<SyncSender<Work>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What both sides see.
#[derive(Debug, Default)]
struct Shared {
    /// The database is closed after an error.
    closed: AtomicBool,
    /// The thread was not told everything.
    behind: AtomicBool,
    /// What was found after the store was open.
    late: Mutex<(Vec<String>, Vec<PathBuf>)>,
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
enum Work {
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
    History(SyncSender<Option<History>>),
    #[cfg(test)]
    Meddle(Meddling),
}

#[cfg(test)]
type Meddling = Box<dyn FnOnce(&mut Option<Shelf>) + Send>;

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

/// A checkpoint that is under way.
#[derive(Debug)]
pub struct PendingCheckpoint {
    dir: PathBuf,
    done: Receiver<Result<(), StoreError>>,
}

impl PendingCheckpoint {
    /// Waits for its end. A database that fails is no error: it is rebuilt at the next checkpoint.
    ///
    /// # Errors
    /// When the journal cannot be synced, or old segments cannot be deleted.
    pub fn wait(self) -> Result<(), StoreError> {
        let silent = || StoreError::Database { path: self.dir.clone(), why: "it does not answer".into() };
        self.done.recv_timeout(PATIENCE).map_err(|_| silent())?
    }
}

impl Shelver {
    /// Starts the thread, which first gives the database what it lacks. `first` is the number of the journal's new segment,
    /// `truth` what was released before it and what is named, `live` what its head tells.
    pub(super) fn start(state_dir: &Path, database: Database, first: u64, truth: Truth, live: LivePayloads) -> Result<Self, StoreError> {
        let (queue, work) = sync_channel(QUEUE_MAX);
        let shared = Arc::new(Shared::default());
        let dir = database_dir(state_dir);
        let mut desk = Desk { state_dir: state_dir.to_owned(), shelf: None, shared: Arc::clone(&shared) };
        let run = with_my_steps(move || {
            crate::host::step_back();
            let told = if matches!(database, Database::Later { .. }) { listen(&work) } else { Vec::new() };
            desk.begin(database, first, truth, &live);
            drop(live);
            for work in told.into_iter().chain(work) {
                desk.perform(work);
            }
            desk.close();
        });
        let thread = thread::Builder::new().name("shelver".into()).spawn(run).map_err(StoreError::io("start a thread for", &dir))?;
        Ok(Shelver { dir, queue: Some(queue), shared, thread: Some(thread) })
    }

    pub(super) fn put(&self, alloc_id: &AllocId, seq: u64, payload: &[u8]) {
        self.tell(Work::Put { alloc_id: alloc_id.clone(), seq, payload: payload.to_vec() });
    }

    pub(super) fn retire(&self, grant: Grant, seq: u64, payload: Vec<u8>) {
        self.tell(Work::Retire { grant: Box::new(grant), seq, payload });
    }

    pub(super) fn name(&self, key: &str, seq: u64, id: &DeviceId) {
        self.tell(Work::Name { key: key.to_owned(), seq, id: id.clone() });
    }

    /// Nobody waits for room in the queue: the journal has it.
    fn tell(&self, work: Work) {
        if self.try_tell(work).is_err() && !self.shared.behind.swap(true, Ordering::AcqRel) {
            tracing::warn!("the query database cannot follow the journal; it catches up with the next checkpoint");
        }
    }

    fn try_tell(&self, work: Work) -> Result<(), StoreError> {
        let why = match self.queue.as_ref().map(|queue| queue.try_send(work)) {
            Some(Ok(())) => return Ok(()),
            Some(Err(TrySendError::Full(_))) => "too much waits for it",
            Some(Err(TrySendError::Disconnected(_))) | None => "its thread is gone",
        };
        Err(StoreError::Database { path: self.dir.clone(), why: why.into() })
    }

    /// Makes the database durable once it has everything that it was told, and then deletes the segments before the
    /// order's newest.
    pub(super) fn checkpoint(&self, order: Order) -> Result<PendingCheckpoint, StoreError> {
        let (sender, done) = sync_channel(1);
        self.try_tell(Work::Checkpoint(Box::new(order), sender))?;
        Ok(PendingCheckpoint { dir: self.dir.clone(), done })
    }

    /// The released grants, once the database has everything that it was told.
    pub(super) fn history(&self) -> Result<PendingHistory, StoreError> {
        let (sender, answer) = sync_channel(1);
        self.try_tell(Work::History(sender))?;
        Ok(PendingHistory { dir: self.dir.clone(), answer })
    }

    /// Whether the database is being kept.
    pub(super) fn is_sound(&self) -> bool {
        !self.shared.closed.load(Ordering::Acquire) && !self.shared.behind.load(Ordering::Acquire)
    }

    /// Adds to the report what was found since.
    pub(super) fn add_findings(&self, report: &mut RecoveryReport) {
        let late = self.shared.late.lock().unwrap_or_else(PoisonError::into_inner);
        report.findings.extend(late.0.iter().cloned());
        report.quarantined.extend(late.1.iter().cloned());
    }

    /// Has something done to the database behind the store's back, once it has everything that it was told.
    #[cfg(test)]
    pub(super) fn tell_to_meddle(&self, act: impl FnOnce(&mut Option<Shelf>) + Send + 'static) {
        self.try_tell(Work::Meddle(Box::new(act))).unwrap();
    }

    /// The same, and waits for it.
    #[cfg(test)]
    pub(super) fn meddle(&self, act: impl FnOnce(&mut Option<Shelf>) + Send + 'static) {
        self.tell_to_meddle(act);
        self.settle();
    }

    /// Waits until everything that it was told is done.
    #[cfg(test)]
    pub(super) fn settle(&self) {
        let (sender, answer) = sync_channel(1);
        self.queue.as_ref().unwrap().send(Work::History(sender)).unwrap();
        drop(answer.recv().unwrap());
    }
}

impl Drop for Shelver {
    fn drop(&mut self) {
        self.queue = None;
        // A panic of the thread has been reported, and the journal has everything.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// A history that was asked for.
#[derive(Debug)]
pub(super) struct PendingHistory {
    dir: PathBuf,
    answer: Receiver<Option<History>>,
}

impl PendingHistory {
    pub(super) fn wait(&self) -> Result<History, StoreError> {
        let error = |why: &str| StoreError::Database { path: self.dir.clone(), why: why.into() };
        let history = self.answer.recv_timeout(PATIENCE).map_err(|_| error("it does not answer"))?;
        history.ok_or_else(|| error("it is closed after an error"))
    }
}

/// The thread's side.
struct Desk {
    state_dir: PathBuf,
    shelf: Option<Shelf>,
    shared: Arc<Shared>,
}

impl Desk {
    fn begin(&mut self, database: Database, first: u64, truth: Truth, live: &LivePayloads) {
        let begun = match database {
            Database::Opened(opened) => Ok((opened, truth)),
            Database::Later { existed } => self.open_late(existed, first),
        };
        match begun {
            Ok((Some(opened), truth)) => {
                let Opened { shelf, holds, .. } = *opened;
                self.shelf = Some(shelf);
                self.write(|shelf| catch_up(shelf, &holds, &truth, live));
            }
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
        let truth = recovery::merge(fold, &Image::default(), &mut report, |_| BTreeMap::new());
        // What is live is known from the newest segment, whatever an older one lacks.
        report.missing = 0;
        if !report.is_clean() {
            tracing::warn!(%report, "the ledger was damaged, and has lost nothing that is live");
        }
        *self.shared.late.lock().unwrap_or_else(PoisonError::into_inner) = (report.findings, report.quarantined);
        Ok((Some(Box::new(opened)), truth))
    }

    fn perform(&mut self, work: Work) {
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
            Work::History(answer) => drop(answer.send(self.shelf.as_ref().map(Shelf::history))),
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
        self.write(|shelf| shelf.checkpoint(order.applied, now));
        let keep = if self.shelf.is_some() { 0 } else { OLD_SEGMENTS_WITHOUT_DATABASE_MAX };
        journal::delete_before(&journal_dir(&self.state_dir), order.newest_segment, keep)
    }

    /// Opens the database again, or a new one, and fills it from the journal's segments.
    fn restore(&mut self) {
        let dir = database_dir(&self.state_dir);
        let mut quarantined = Vec::new();
        let restored = Fold::read_beside_a_writer(&journal_dir(&self.state_dir)).and_then(|fold| {
            let Opened { mut shelf, holds, .. } = open_or_replace(Opening::begin(&dir), &dir, &mut quarantined)?;
            let mut truth = recovery::merge(fold, &Image::default(), &mut RecoveryReport::default(), |_| BTreeMap::new());
            let live = recovery::encode_live(&mut truth)?;
            catch_up(&mut shelf, &holds, &truth, &live)?;
            Ok(shelf)
        });
        self.shared.late.lock().unwrap_or_else(PoisonError::into_inner).1.extend(quarantined);
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

    fn close(&mut self) {
        if let Some(shelf) = self.shelf.take() {
            shelf.close();
        }
    }
}

/// What the thread is told while the database may stay closed.
fn listen(work: &Receiver<Work>) -> Vec<Work> {
    let until = Instant::now() + OPENS_AFTER;
    let mut told = Vec::new();
    while let Ok(work) = work.recv_timeout(until.saturating_duration_since(Instant::now())) {
        let can_wait = matches!(work, Work::Put { .. } | Work::Retire { .. } | Work::Name { .. });
        told.push(work);
        if !can_wait || told.len() == QUEUE_MAX {
            break;
        }
    }
    told
}

/// What is said of a database whose records were damaged.
pub(super) fn history_stays(why: &str) -> String {
    format!("the query database was damaged ({why}); its history stays in the copy that was moved away")
}
