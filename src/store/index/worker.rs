//! The handle of the index thread.
//!
//! sled is written only at flush points: before a query, before a checkpoint, and for every batch
//! of [`BATCH`] changes. In between it has nothing that a power cut could tear. No caller waits for
//! a write. Changes that do not fit into the bounded queue, and changes that sled fails to write,
//! are read from the journal at the next checkpoint. Only a successful checkpoint deletes the
//! segments that contain them.
//!
//! sled may hang after a disk error. The database is then not used until the next start: queries
//! and checkpoints fail at once, `status` and a metric report it, and the journal has every entry.

#[cfg(test)]
use super::database::Database;
use super::reader::{DatabaseSnapshot, Reader};
use super::shared::{LATE_AFTER, LateFindings, Shared, limit};
use super::task::IndexTask;
use super::work::{CheckpointOrder, Start, Update, Work};
use crate::domain::{Entry, Retention, Timestamp, Unreadable, UnreadableReason};
use crate::host;
use crate::store::StoreError;
use crate::store::layout::{database_dir, has_free_space, with_my_steps};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Messages that may wait for the thread. With [`BATCH`]: 4096 changes, or 3 MB of grants.
const QUEUE_MAX: usize = 32;
/// Changes in one message.
const BATCH: usize = 128;
/// How long a query or a checkpoint waits for the thread.
const PATIENCE: Duration = limit(30);
/// How often a waiting caller checks whether the database opens slowly.
const POLL: Duration = Duration::from_millis(20);
/// The thread hangs if it makes no progress for this long without waiting for the disk. Opening
/// does not count: it may take long.
const HANGS_AFTER: Duration = limit(20);
/// The same limit at the end of the process, for which a service manager does not wait long. A
/// checkpoint takes milliseconds.
const HANGS_AFTER_AT_END: Duration = limit(3);

/// A request whose answer the index thread has not sent yet.
#[derive(Debug)]
pub struct Pending<T> {
    shared: Arc<Shared>,
    dir: PathBuf,
    answer: Receiver<Result<T, StoreError>>,
}

/// A checkpoint that has begun.
pub type PendingCheckpoint = Pending<()>;
/// A reader that was requested.
pub(crate) type PendingReader = Pending<Reader>;

impl<T> Pending<T> {
    /// Waits for the answer, but not for a slow opening.
    fn receive(&self, patience: Duration) -> Result<T, StoreError> {
        let until = Instant::now() + patience;
        loop {
            match self.answer.recv_timeout(POLL) {
                Ok(answer) => return answer,
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {
                    self.shared.check_opening(&self.dir)?;
                }
                Err(_) => {
                    return Err(StoreError::Unopened {
                        path: self.dir.clone(),
                        why: "it does not answer".into(),
                    });
                }
            }
        }
    }
}

impl Pending<()> {
    /// Waits for the end of the checkpoint. A database that fails is no error: it catches up at a
    /// later checkpoint.
    ///
    /// # Errors
    /// When the journal cannot be synced, or old segments cannot be deleted.
    pub fn wait(self) -> Result<(), StoreError> {
        self.wait_for(PATIENCE)
    }

    /// [`PendingCheckpoint::wait`] with another time limit.
    ///
    /// # Errors
    /// As [`PendingCheckpoint::wait`].
    pub fn wait_for(self, patience: Duration) -> Result<(), StoreError> {
        let done = self.receive(patience);
        // While the database opens, the journal has every entry.
        if self.shared.late_since().is_some() { Ok(()) } else { done }
    }
}

impl Pending<Reader> {
    pub(crate) fn wait(&self) -> Result<Reader, StoreError> {
        self.receive(PATIENCE)
    }
}

impl Pending<DatabaseSnapshot> {
    /// Waits no longer than a start may.
    pub(crate) fn wait(&self) -> Result<DatabaseSnapshot, StoreError> {
        self.receive(LATE_AFTER)
    }
}

/// The handle. Drop lets the thread finish its queue and close the database, and waits for that
/// unless the thread hangs.
#[derive(Debug)]
pub(crate) struct IndexWorker {
    dir: PathBuf,
    /// `None` only during drop.
    queue: Option<SyncSender<Work>>,
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
    /// Disconnected when the thread ends, also by a panic.
    ended: Receiver<()>,
    /// Changes for the next flush point.
    pending: RefCell<Vec<(u64, Update)>>,
    hangs_after: Duration,
}

impl IndexWorker {
    /// Starts the thread.
    pub(crate) fn start(state_dir: &Path, retention: Retention) -> Result<Self, StoreError> {
        let (queue, work) = sync_channel(QUEUE_MAX);
        let (alive, ended) = sync_channel(0);
        let dir = database_dir(state_dir);
        let shared = Arc::new(Shared::new(&dir));
        let mut task = IndexTask::new(state_dir, retention, Arc::clone(&shared));
        let run = with_my_steps(move || {
            let _alive: SyncSender<()> = alive;
            host::lower_thread_priority();
            task.serve(&work);
        });
        let handle = thread::Builder::new()
            .name("index".into())
            .spawn(run)
            .map_err(StoreError::io("start a thread for", state_dir))?;
        let (queue, handle, pending) = (Some(queue), Some(handle), RefCell::default());
        Ok(IndexWorker { dir, queue, shared, handle, ended, pending, hangs_after: HANGS_AFTER })
    }

    /// Opens the database at once, for a start that needs its content.
    pub(crate) fn open(&self) -> Result<Pending<DatabaseSnapshot>, StoreError> {
        self.request(Work::Open)
    }

    /// Lets the database follow the journal, after the start has read it.
    pub(crate) fn begin(&self, start: Start) -> Result<(), StoreError> {
        self.send(Work::Begin(start))
    }

    /// Takes a change for the next flush point.
    pub(crate) fn add(&self, seq: u64, update: Update) {
        self.pending.borrow_mut().push((seq, update));
        if self.pending.borrow().len() >= BATCH {
            self.send_pending();
        }
    }

    fn send_pending(&self) {
        let batch = self.pending.take();
        if !batch.is_empty() && self.send(Work::Updates(batch)).is_err() {
            self.fall_behind();
        }
    }

    /// Has the database read the journal at the next checkpoint.
    pub(crate) fn fall_behind(&self) {
        if !self.shared.behind.swap(true, Ordering::AcqRel) {
            // Normal on the first start of a node with thousands of devices, which get their ids.
            tracing::info!(
                "the query database lags behind the journal; it catches up at the next checkpoint"
            );
        }
    }

    fn send(&self, work: Work) -> Result<(), StoreError> {
        let why = match self.queue.as_ref().map(|queue| queue.try_send(work)) {
            Some(Ok(())) => return Ok(()),
            Some(Err(TrySendError::Full(_))) => "its queue is full",
            Some(Err(TrySendError::Disconnected(_))) | None => "its thread has ended",
        };
        Err(StoreError::Database { path: self.dir.clone(), why: why.into() })
    }

    /// Sends a request, behind every change so far.
    fn request<T>(
        &self,
        work: impl FnOnce(SyncSender<Result<T, StoreError>>) -> Work,
    ) -> Result<Pending<T>, StoreError> {
        self.send_pending();
        self.shared.check_opening(&self.dir)?;
        if self.hangs_since().is_some() {
            return Err(StoreError::Unopened {
                path: self.dir.clone(),
                why: "it hangs until the next start".into(),
            });
        }
        let (sender, answer) = sync_channel(1);
        self.send(work(sender))?;
        Ok(self.pending(answer))
    }

    fn pending<T>(&self, answer: Receiver<Result<T, StoreError>>) -> Pending<T> {
        Pending { shared: Arc::clone(&self.shared), dir: self.dir.clone(), answer }
    }

    /// Makes every change so far durable in the database, and then deletes the segments before the
    /// newest one.
    pub(crate) fn checkpoint(
        &self,
        order: CheckpointOrder,
    ) -> Result<PendingCheckpoint, StoreError> {
        if self.shared.late_since().is_some() {
            // While the database opens, the journal has every entry.
            let (sender, done) = sync_channel(1);
            drop(sender.send(Ok(())));
            return Ok(self.pending(done));
        }
        self.request(|done| Work::Checkpoint(order, done))
    }

    /// Requests a reader of the database with every change so far.
    pub(crate) fn reader(&self) -> Result<PendingReader, StoreError> {
        self.request(Work::Read)
    }

    /// Skips optional work from now on, since the process ends.
    pub(crate) fn end_soon(&self) {
        self.shared.end();
    }

    fn hangs_since(&self) -> Option<Timestamp> {
        self.shared.hangs_since(self.hangs_after)
    }

    /// Whether the database is readable and follows the journal.
    pub(crate) fn is_sound(&self) -> bool {
        !self.shared.behind.load(Ordering::Acquire) && self.unreadable().is_none()
    }

    /// Whether the next checkpoint can reach the database.
    pub(crate) fn is_writable(&self) -> bool {
        self.unreadable().is_none() && has_free_space(&self.dir)
    }

    /// The time since when the history cannot be read, with the reason.
    pub(crate) fn unreadable(&self) -> Option<Unreadable> {
        let hangs =
            self.hangs_since().map(|since| Unreadable { since, because: UnreadableReason::Failed });
        hangs.or_else(|| self.shared.unreadable())
    }

    /// Records that segments with releases up to `until` were deleted before the database had them.
    pub(crate) fn note_deleted(&self, until: Option<Timestamp>) {
        let mut deleted = self.shared.deleted();
        *deleted = deleted.max(until).or(Some(Timestamp(0)));
    }

    /// Findings since the start.
    pub(crate) fn late(&self) -> MutexGuard<'_, LateFindings> {
        self.shared.late()
    }

    /// The entries that only the database has, without those that are not `wanted` any longer.
    pub(crate) fn found(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let mut late = self.shared.late();
        late.found.retain(wanted);
        late.found.clone()
    }
}

impl Drop for IndexWorker {
    fn drop(&mut self) {
        self.end_soon();
        self.send_pending();
        self.queue = None;
        while self.ended.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            if self.shared.late_since().is_some()
                || self.shared.hangs_since(HANGS_AFTER_AT_END.min(self.hangs_after)).is_some()
            {
                tracing::error!(
                    "the query database is not closed, since it is slow or hangs; the next start reads the journal"
                );
                return;
            }
        }
        // A panic of the thread was reported, and the journal has every entry.
        drop(self.handle.take().map(JoinHandle::join));
    }
}

#[cfg(test)]
impl IndexWorker {
    /// Has the thread run `act` on the database, after every change so far.
    pub(crate) fn begin_with_database(
        &self,
        act: impl FnOnce(&mut Option<Database>) + Send + 'static,
    ) {
        self.send_pending();
        self.queue.as_ref().unwrap().send(Work::Test(Box::new(act))).unwrap();
    }

    /// The same, and waits for it.
    pub(crate) fn with_database(&self, act: impl FnOnce(&mut Option<Database>) + Send + 'static) {
        self.begin_with_database(act);
        self.settle();
    }

    /// Waits until the queue is empty.
    pub(crate) fn settle(&self) {
        let (sender, answer) = sync_channel(1);
        self.send_pending();
        self.queue.as_ref().unwrap().send(Work::Read(sender)).unwrap();
        drop(answer.recv().unwrap());
    }

    /// Sets the limit after which the thread counts as hung.
    pub(crate) fn set_hangs_after(&mut self, limit: Duration) {
        self.hangs_after = limit;
    }
}
