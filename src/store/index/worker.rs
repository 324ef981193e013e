//! The handle of the index thread. It receives every confirmed entry in order, after the answers; nobody waits for it.
//!
//! The queue is bounded. An entry that it does not take, or that sled does not write, comes from the journal at the next checkpoint.
//! Only a successful checkpoint deletes the segments that have it.
//!
//! sled may hang after an error of the disk. Then the database stays as it is until the next start, and the journal serves alone:
//! queries and checkpoints fail at once, and `status` and a metric say so.

#[cfg(test)]
use super::database::Database;
use super::database::Update;
use super::reader::Reader;
use super::shared::Shared;
use super::task::IndexTask;
use super::work::{Begin, CheckpointOrder, Start, Work};
use crate::domain::{Entry, Retention, Timestamp, Unreadable, UnreadableReason};
use crate::host;
use crate::store::layout::{database_dir, has_free_space, with_my_steps};
use crate::store::{RecoveryReport, StoreError};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Entries that may wait for sled: 3 MB of grants.
const QUEUE_MAX: usize = 4096;
/// Entries that wait in the handle until the callers of their commit are answered.
const PENDING_MAX: usize = 256;
/// How long a query or a checkpoint waits for the thread.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the thread may be at one thing without waiting for the disk. Opening does not count: it may take long.
const HANGS_AFTER: Duration = Duration::from_secs(20);
/// The same at the end of the process, which a service manager does not wait for long. A checkpoint takes milliseconds.
const HANGS_AFTER_AT_END: Duration = Duration::from_secs(3);

/// A checkpoint that is under way.
#[derive(Debug)]
pub struct PendingCheckpoint {
    dir: PathBuf,
    done: Receiver<Result<(), StoreError>>,
}

impl PendingCheckpoint {
    /// Waits for its end. A database that fails is no error: it follows at a later checkpoint.
    ///
    /// # Errors
    /// When the journal cannot be synced, or old segments cannot be deleted.
    pub fn wait(self) -> Result<(), StoreError> {
        self.wait_for(PATIENCE)
    }

    /// The same, for a caller that has less time.
    ///
    /// # Errors
    /// As [`PendingCheckpoint::wait`].
    pub fn wait_for(self, patience: Duration) -> Result<(), StoreError> {
        let silent = || StoreError::Database { path: self.dir.clone(), why: "it does not answer".into() };
        self.done.recv_timeout(patience).map_err(|_| silent())?
    }
}

/// The handle. Dropping it lets the thread finish its queue and close the database, and waits for that unless it hangs.
#[derive(Debug)]
pub(crate) struct IndexWorker {
    dir: PathBuf,
    /// `None` only while the thread is ended.
    queue: Option<SyncSender<Work>>,
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
    /// Disconnected by the thread's end, in whatever way.
    ended: Receiver<()>,
    /// What is to be sent after the answers.
    pending: RefCell<Vec<(u64, Update)>>,
    patience: Duration,
}

impl IndexWorker {
    /// Starts the thread, which first gives the database what it lacks.
    pub(crate) fn start(state_dir: &Path, retention: Retention, begin: Begin, start: Start) -> Result<Self, StoreError> {
        let (queue, work) = sync_channel(QUEUE_MAX);
        let (alive, ended) = sync_channel(0);
        let shared = Arc::new(Shared::default());
        let mut task = IndexTask::new(state_dir, retention, start, Arc::clone(&shared));
        let run = with_my_steps(move || {
            let _alive: SyncSender<()> = alive;
            host::lower_thread_priority();
            task.serve(begin, &work);
        });
        let handle = thread::Builder::new().name("index".into()).spawn(run).map_err(StoreError::io("start a thread for", state_dir))?;
        let (dir, pending) = (database_dir(state_dir), RefCell::default());
        Ok(IndexWorker { dir, queue: Some(queue), shared, handle: Some(handle), ended, pending, patience: HANGS_AFTER })
    }

    /// Takes a change, to be sent by [`IndexWorker::send_pending`]. Many at once are sent at once.
    pub(crate) fn add(&self, seq: u64, update: Update) {
        self.pending.borrow_mut().push((seq, update));
        if self.pending.borrow().len() >= PENDING_MAX {
            self.send_pending();
        }
    }

    /// Sends the changes. What the queue does not take comes from the journal.
    pub(crate) fn send_pending(&self) {
        for (seq, update) in self.pending.take() {
            if self.send(Work::Update(seq, update)).is_err() {
                self.fall_behind();
            }
        }
    }

    /// The database is to read the journal at the next checkpoint.
    pub(crate) fn fall_behind(&self) {
        if !self.shared.behind.swap(true, Ordering::AcqRel) {
            // As at the first start of a node with thousands of devices, which all get their names at once: nothing is wrong.
            tracing::info!("the query database cannot follow the journal; it catches up at the next checkpoint");
        }
    }

    fn send(&self, work: Work) -> Result<(), StoreError> {
        let why = match self.queue.as_ref().map(|queue| queue.try_send(work)) {
            Some(Ok(())) => return Ok(()),
            Some(Err(TrySendError::Full(_))) => "too much waits for it",
            Some(Err(TrySendError::Disconnected(_))) | None => "its thread is gone",
        };
        Err(StoreError::Database { path: self.dir.clone(), why: why.into() })
    }

    /// Sends a request, behind every change so far.
    fn request(&self, work: Work) -> Result<(), StoreError> {
        self.send_pending();
        if self.hangs_since().is_some() {
            return Err(StoreError::Unopened { path: self.dir.clone(), why: "it hangs until the next start".into() });
        }
        self.send(work)
    }

    /// Makes the database durable with every change so far, and then deletes the segments before the order's newest.
    pub(crate) fn checkpoint(&self, order: CheckpointOrder) -> Result<PendingCheckpoint, StoreError> {
        let (sender, done) = sync_channel(1);
        self.request(Work::Checkpoint(Box::new(order), sender))?;
        Ok(PendingCheckpoint { dir: self.dir.clone(), done })
    }

    /// A reader of the database, with every change so far.
    pub(crate) fn reader(&self) -> Result<PendingReader, StoreError> {
        let (sender, answer) = sync_channel(1);
        self.request(Work::Read(sender))?;
        Ok(PendingReader { dir: self.dir.clone(), answer })
    }

    /// From now on the thread does only what has to be done.
    pub(crate) fn hurry(&self) {
        self.shared.hurries.store(true, Ordering::Release);
    }

    fn hangs_since(&self) -> Option<Timestamp> {
        self.shared.hangs_since(self.patience)
    }

    /// Whether the database follows the journal.
    pub(crate) fn is_sound(&self) -> bool {
        !self.shared.behind.load(Ordering::Acquire) && !self.shared.closed.load(Ordering::Acquire) && self.hangs_since().is_none()
    }

    /// Whether the next checkpoint may reach the database.
    pub(crate) fn is_writable(&self) -> bool {
        !self.shared.closed.load(Ordering::Acquire) && self.hangs_since().is_none() && has_free_space(&self.dir)
    }

    /// Since when the history cannot be read, and why.
    pub(crate) fn unreadable(&self) -> Option<Unreadable> {
        let hangs = self.hangs_since().map(|since| Unreadable { since, because: UnreadableReason::Failed });
        hangs.or_else(|| self.shared.unreadable())
    }

    /// Segments were deleted that the database does not have, with releases until `until`.
    pub(crate) fn note_given_up(&self, until: Option<Timestamp>) {
        let mut given_up = self.shared.given_up();
        *given_up = given_up.max(until).or(Some(Timestamp(0)));
    }

    /// Adds to the report what was found since the start.
    pub(crate) fn add_findings(&self, report: &mut RecoveryReport) {
        let late = self.shared.late();
        report.findings.extend(late.findings.iter().cloned());
        report.quarantined.extend(late.quarantined.iter().cloned());
        report.from_database += late.from_database;
    }

    /// What the database has and the journal lacks, once.
    pub(crate) fn take_found(&self) -> Vec<Entry> {
        let mut late = self.shared.late();
        let found = std::mem::take(&mut late.found);
        late.from_database += found.iter().filter(|entry| matches!(entry, Entry::Grant(_))).count();
        found
    }
}

impl Drop for IndexWorker {
    fn drop(&mut self) {
        self.hurry();
        self.send_pending();
        self.queue = None;
        while self.ended.recv_timeout(HANGS_AFTER_AT_END) == Err(RecvTimeoutError::Timeout) {
            if self.shared.hangs_since(HANGS_AFTER_AT_END.min(self.patience)).is_some() {
                tracing::error!("the query database hangs and is not closed; the next start reads the journal");
                return;
            }
        }
        // A panic of the thread was reported, and the journal has everything.
        drop(self.handle.take().map(JoinHandle::join));
    }
}

#[cfg(test)]
impl IndexWorker {
    /// Has something done to the database behind the store's back, after every change so far.
    pub(crate) fn begin_to_meddle(&self, act: impl FnOnce(&mut Option<Database>) + Send + 'static) {
        self.send_pending();
        self.send(Work::Meddle(Box::new(act))).unwrap();
    }

    /// The same, and waits for it.
    pub(crate) fn meddle(&self, act: impl FnOnce(&mut Option<Database>) + Send + 'static) {
        self.begin_to_meddle(act);
        self.settle();
    }

    /// Waits until everything that was sent is done.
    pub(crate) fn settle(&self) {
        let (sender, answer) = sync_channel(1);
        self.send_pending();
        self.queue.as_ref().unwrap().send(Work::Read(sender)).unwrap();
        drop(answer.recv().unwrap());
    }

    /// How long the thread may be at one thing.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }
}

/// A reader that was asked for.
#[derive(Debug)]
pub(crate) struct PendingReader {
    dir: PathBuf,
    answer: Receiver<Result<Reader, StoreError>>,
}

impl PendingReader {
    pub(crate) fn wait(&self) -> Result<Reader, StoreError> {
        let silent = |_| StoreError::Unopened { path: self.dir.clone(), why: "it does not answer".into() };
        self.answer.recv_timeout(PATIENCE).map_err(silent)?
    }
}
