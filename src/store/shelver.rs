//! The thread that keeps the query database behind the journal, so that nobody ever waits for sled: not an Allocate, and
//! not a start, which sled's opening would make three times as long, and now and then ten times.
//!
//! It is told every confirmed entry, in order, and its `Desk` owns the `Shelf`. What it is not told (its queue was full)
//! or cannot write (sled failed) it reads again from the journal's segments at the next checkpoint: they hold everything
//! that the last successful one did not, and only a successful one deletes them.

use super::database::Reader;
#[cfg(test)]
use super::database::Shelf;
use super::desk::{Database, Desk, Order, Shared, Work};
use super::layout::{database_dir, with_my_steps};
use super::recovery::{LivePayloads, Truth};
use super::{RecoveryReport, StoreError};
use crate::domain::{AllocId, DeviceId, Grant, Retention};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Entries that may wait for sled: 3 MB of grants. More than that and it catches up from the journal.
const QUEUE_MAX: usize = 4096;
/// How long after a start in the same boot the database is opened, unless it is wanted before: sled's opening would take a
/// core from the registrations.
const OPENS_AFTER: Duration = Duration::from_millis(300);
/// How long somebody waits for the thread: longer than sled may take to open.
const PATIENCE: Duration = Duration::from_secs(30);

/// The handle. Dropping it lets the thread finish what it was told and close the database, and waits for that.
#[derive(Debug)]
pub(super) struct Shelver {
    dir: PathBuf,
    /// `None` only while it is dropped.
    queue: Option<SyncSender<Work>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
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
    pub(super) fn start(
        state_dir: &Path,
        retention: Retention,
        database: Database,
        first: u64,
        truth: Truth,
        live: LivePayloads,
    ) -> Result<Self, StoreError> {
        let (queue, work) = sync_channel(QUEUE_MAX);
        let shared = Arc::new(Shared::default());
        let dir = database_dir(state_dir);
        let mut desk = Desk::new(state_dir, retention, Arc::clone(&shared));
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

    /// The database to be read, once it has everything that it was told.
    pub(super) fn reader(&self) -> Result<PendingReader, StoreError> {
        let (sender, answer) = sync_channel(1);
        self.try_tell(Work::Read(sender))?;
        Ok(PendingReader { dir: self.dir.clone(), answer })
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
        self.queue.as_ref().unwrap().send(Work::Read(sender)).unwrap();
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

/// A reader that was asked for.
#[derive(Debug)]
pub(super) struct PendingReader {
    dir: PathBuf,
    answer: Receiver<Option<Reader>>,
}

impl PendingReader {
    pub(super) fn wait(&self) -> Result<Reader, StoreError> {
        let error = |why: &str| StoreError::Database { path: self.dir.clone(), why: why.into() };
        let reader = self.answer.recv_timeout(PATIENCE).map_err(|_| error("it does not answer"))?;
        reader.ok_or_else(|| error("it is closed after an error"))
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
