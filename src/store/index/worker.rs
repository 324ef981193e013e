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
use super::reader::{DatabaseSnapshot, Reader};
use super::shared::{LATE_AFTER, Late, Shared};
use super::task::IndexTask;
use super::work::{CheckpointOrder, Start, Work};
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

/// Entries that may wait for sled: 3 MB of grants.
const QUEUE_MAX: usize = 4096;
/// Entries that wait in the handle until the callers of their commit are answered.
const PENDING_MAX: usize = 256;
/// How long a query or a checkpoint waits for the thread.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often a waiting start or query looks whether the database is late to open.
const POLL: Duration = Duration::from_millis(20);
/// How long the thread may be at one thing without waiting for the disk. Opening does not count: it may take long.
const HANGS_AFTER: Duration = Duration::from_secs(20);
/// The same at the end of the process, which a service manager does not wait for long. A checkpoint takes milliseconds.
const HANGS_AFTER_AT_END: Duration = Duration::from_secs(3);

/// A checkpoint that is under way.
#[derive(Debug)]
pub struct PendingCheckpoint {
    shared: Arc<Shared>,
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
        let done = wait(&self.done, patience, &self.shared, &self.dir);
        // Beside a slow opening the journal has everything.
        if self.shared.late_since().is_some() { Ok(()) } else { done }
    }
}

/// Waits for an answer of the thread, but not for a slow opening.
fn wait<T>(
    answer: &Receiver<Result<T, StoreError>>,
    patience: Duration,
    shared: &Shared,
    dir: &Path,
) -> Result<T, StoreError> {
    let until = Instant::now() + patience;
    loop {
        match answer.recv_timeout(POLL) {
            Ok(answer) => return answer,
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {
                shared.late_since().map_or(Ok(()), |since| Err(late(dir, since)))?;
            }
            Err(_) => {
                return Err(StoreError::Unopened {
                    path: dir.to_owned(),
                    why: "it does not answer".into(),
                });
            }
        }
    }
}

fn late(dir: &Path, since: Timestamp) -> StoreError {
    StoreError::Unopened {
        path: dir.to_owned(),
        why: format!("it has been opening since {}, as on a slow disk", since.to_seconds()),
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
    /// The result of the opening that a start waits for.
    opened: Receiver<Result<DatabaseSnapshot, StoreError>>,
    /// What is to be sent after the answers.
    pending: RefCell<Vec<(u64, Update)>>,
    patience: Duration,
}

impl IndexWorker {
    /// Starts the thread. `opens`: it opens the database at once, for [`IndexWorker::wait_for_snapshot`].
    pub(crate) fn start(
        state_dir: &Path,
        retention: Retention,
        opens: bool,
    ) -> Result<Self, StoreError> {
        let (queue, work) = sync_channel(QUEUE_MAX);
        let (alive, ended) = sync_channel(0);
        let (wanted, opened) = sync_channel(1);
        let dir = database_dir(state_dir);
        let shared = Arc::new(Shared::new(&dir));
        let mut task = IndexTask::new(state_dir, retention, Arc::clone(&shared));
        let run = with_my_steps(move || {
            let _alive: SyncSender<()> = alive;
            host::lower_thread_priority();
            if opens {
                task.open_for_start(&wanted);
            }
            task.serve(&work);
        });
        let handle = thread::Builder::new()
            .name("index".into())
            .spawn(run)
            .map_err(StoreError::io("start a thread for", state_dir))?;
        let (queue, handle, pending) = (Some(queue), Some(handle), RefCell::default());
        Ok(IndexWorker {
            dir,
            queue,
            shared,
            handle,
            ended,
            opened,
            pending,
            patience: HANGS_AFTER,
        })
    }

    /// Waits for the opening, but not for a slow disk: `None`.
    pub(crate) fn wait_for_snapshot(&self) -> Option<Result<DatabaseSnapshot, StoreError>> {
        let until = Instant::now() + LATE_AFTER;
        loop {
            match self.opened.recv_timeout(POLL) {
                Ok(opened) => return Some(opened),
                Err(RecvTimeoutError::Timeout)
                    if self.shared.late_since().is_none() && Instant::now() < until => {}
                Err(_) => return None,
            }
        }
    }

    /// From now on the database may follow the journal.
    pub(crate) fn begin(&self, start: Start) -> Result<(), StoreError> {
        self.send(Work::Begin(start))
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
            tracing::info!(
                "the query database cannot follow the journal; it catches up at the next checkpoint"
            );
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
        self.shared.late_since().map_or(Ok(()), |since| Err(late(&self.dir, since)))?;
        if self.hangs_since().is_some() {
            return Err(StoreError::Unopened {
                path: self.dir.clone(),
                why: "it hangs until the next start".into(),
            });
        }
        self.send(work)
    }

    /// Makes the database durable with every change so far, and then deletes the segments before the order's newest.
    pub(crate) fn checkpoint(
        &self,
        order: CheckpointOrder,
    ) -> Result<PendingCheckpoint, StoreError> {
        let (sender, done) = sync_channel(1);
        if self.shared.late_since().is_some() {
            // The journal has everything.
            drop(sender.send(Ok(())));
        } else {
            self.request(Work::Checkpoint(Box::new(order), sender))?;
        }
        Ok(PendingCheckpoint { shared: Arc::clone(&self.shared), dir: self.dir.clone(), done })
    }

    /// A reader of the database, with every change so far.
    pub(crate) fn reader(&self) -> Result<PendingReader, StoreError> {
        let (sender, answer) = sync_channel(1);
        self.request(Work::Read(sender))?;
        Ok(PendingReader { shared: Arc::clone(&self.shared), dir: self.dir.clone(), answer })
    }

    /// From now on the thread does only what has to be done.
    pub(crate) fn hurry(&self) {
        self.shared.end();
    }

    fn hangs_since(&self) -> Option<Timestamp> {
        self.shared.hangs_since(self.patience)
    }

    /// Whether the database follows the journal.
    pub(crate) fn is_sound(&self) -> bool {
        !self.shared.behind.load(Ordering::Acquire) && self.unreadable().is_none()
    }

    /// Whether the next checkpoint may reach the database.
    pub(crate) fn is_writable(&self) -> bool {
        self.unreadable().is_none() && has_free_space(&self.dir)
    }

    /// Since when the history cannot be read, and why.
    pub(crate) fn unreadable(&self) -> Option<Unreadable> {
        let hangs =
            self.hangs_since().map(|since| Unreadable { since, because: UnreadableReason::Failed });
        hangs.or_else(|| self.shared.unreadable())
    }

    /// Segments were deleted that the database does not have, with releases until `until`.
    pub(crate) fn note_given_up(&self, until: Option<Timestamp>) {
        let mut given_up = self.shared.given_up();
        *given_up = given_up.max(until).or(Some(Timestamp(0)));
    }

    /// What was found since the start.
    pub(crate) fn late(&self) -> MutexGuard<'_, Late> {
        self.shared.late()
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
        while self.ended.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            if self.shared.late_since().is_some()
                || self.shared.hangs_since(HANGS_AFTER_AT_END.min(self.patience)).is_some()
            {
                tracing::error!(
                    "the query database is not closed, since it is slow or hangs; the next start reads the journal"
                );
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
        self.queue.as_ref().unwrap().send(Work::Meddle(Box::new(act))).unwrap();
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
    shared: Arc<Shared>,
    dir: PathBuf,
    answer: Receiver<Result<Reader, StoreError>>,
}

impl PendingReader {
    pub(crate) fn wait(&self) -> Result<Reader, StoreError> {
        wait(&self.answer, PATIENCE, &self.shared, &self.dir)
    }
}
