//! The thread that keeps the query database behind the journal, so that nobody ever waits for sled: not an Allocate, and
//! not a start, which sled's opening would make three times as long, and now and then ten times.
//!
//! It is told every confirmed entry, in order, and its `Desk` owns the `Shelf`: several at once and behind the answers, for
//! to wake a thread costs an idle machine as much as an answer. What it is not told (its queue was full) or cannot write
//! (sled failed) it reads again from the journal's segments at the next checkpoint: they hold everything that the last
//! successful one did not, and only a successful one deletes them.
//!
//! sled may never come back from an error of the disk. So it writes only where there is room, and a thread that has been
//! at one thing for too long is left where it is, with its database, and another one takes over
//! ([`Shelver::replace_stuck`]).

use super::database::Reader;
#[cfg(test)]
use super::database::Shelf;
use super::desk::Desk;
use super::layout::{database_dir, with_my_steps};
use super::shared::Shared;
use super::work::{Database, Order, Work};
use super::{RecoveryReport, StoreError};
use crate::domain::{AllocId, DeviceId, Entry, Grant, PendingHook, Retention, Unreadable};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Entries that may wait for sled: 3 MB of grants. More than that and it catches up from the journal.
const QUEUE_MAX: usize = 4096;
/// Entries that wait for somebody to say that it is time to tell them.
const UNTOLD_MAX: usize = 256;
/// How long somebody waits for the thread.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the thread may be at one thing, while nothing of it waits for the disk. Opening is none: it is left to take as long as it
/// does.
const STUCK_AFTER: Duration = Duration::from_secs(20);
/// The same at the end of the process, which a service manager does not wait for long. A checkpoint takes milliseconds.
const PATIENCE_AT_THE_END: Duration = Duration::from_secs(3);
/// Threads that are left behind, at most: each keeps its database's memory, some 2 MB.
const LEFT_MAX: usize = 4;

/// The handle. Dropping it lets the thread finish what it was told and close the database, and waits for that as long as
/// it gets on.
#[derive(Debug)]
pub(super) struct Shelver {
    state_dir: PathBuf,
    retention: Retention,
    dir: PathBuf,
    thread: Thread,
    /// What the thread is yet to be told.
    untold: RefCell<Vec<Work>>,
    /// Whether it is told of entries, see [`Shelver::leave_out`].
    is_told: bool,
    patience: Duration,
    /// How many threads have been left behind.
    left: usize,
}

#[derive(Debug)]
struct Thread {
    /// `None` only while it is ended.
    queue: Option<SyncSender<Work>>,
    shared: Arc<Shared>,
    handle: Option<JoinHandle<()>>,
    /// Disconnected by its end, in whatever way.
    ended: Receiver<()>,
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
        self.wait_for(PATIENCE)
    }

    /// The same, for somebody who has less time.
    ///
    /// # Errors
    /// As [`PendingCheckpoint::wait`].
    pub fn wait_for(self, patience: Duration) -> Result<(), StoreError> {
        let silent = || StoreError::Database { path: self.dir.clone(), why: "it does not answer".into() };
        self.done.recv_timeout(patience).map_err(|_| silent())?
    }
}

impl Thread {
    /// Starts one, which takes the database over.
    fn start(state_dir: &Path, retention: Retention, database: Database) -> Result<Self, StoreError> {
        let (queue, work) = sync_channel(QUEUE_MAX);
        let (alive, ended) = sync_channel(0);
        let shared = Arc::new(Shared::default());
        let mut desk = Desk::new(state_dir, retention, Arc::clone(&shared));
        let run = with_my_steps(move || {
            let _alive: SyncSender<()> = alive;
            crate::host::lower_thread_priority();
            desk.serve(database, &work);
        });
        let error = StoreError::io("start a thread for", state_dir);
        let handle = thread::Builder::new().name("shelver".into()).spawn(run).map_err(error)?;
        Ok(Thread { queue: Some(queue), shared, handle: Some(handle), ended })
    }

    /// Ends it, or leaves it where it is if it does not get on. Whether it has ended.
    fn end(&mut self, patience: Duration) -> bool {
        self.queue = None;
        while self.ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            if self.shared.is_stuck(patience) {
                self.shared.leave();
                return false;
            }
        }
        // A panic of the thread has been reported, and the journal has everything.
        drop(self.handle.take().map(JoinHandle::join));
        true
    }
}

impl Shelver {
    /// Starts the thread, which first gives the database what it lacks.
    pub(super) fn start(state_dir: &Path, retention: Retention, database: Database) -> Result<Self, StoreError> {
        let thread = Thread::start(state_dir, retention, database)?;
        let state_dir = state_dir.to_owned();
        let (dir, untold) = (database_dir(&state_dir), RefCell::default());
        Ok(Shelver { state_dir, retention, dir, thread, untold, is_told: true, patience: STUCK_AFTER, left: 0 })
    }

    /// Leaves a thread that does not come back, and has another one rebuild the database beside the one that is stuck: from
    /// a copy of its files, and from the journal. To be called before a checkpoint that was synced.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn replace_stuck(&mut self) -> Result<(), StoreError> {
        if !self.thread.shared.is_stuck(self.patience) || self.left == LEFT_MAX {
            return Ok(());
        }
        self.left += 1;
        let last = if self.left == LEFT_MAX { "; the next one will be left for good" } else { "" };
        tracing::error!("the query database does not answer any more and is left to itself{last}; the journal has everything");
        self.thread.shared.leave();
        let fresh = Thread::start(&self.state_dir, self.retention, Database::Stuck)?;
        fresh.shared.inherit(&self.thread.shared);
        self.thread = fresh;
        Ok(())
    }

    pub(super) fn put(&self, alloc_id: &AllocId, seq: u64, payload: &[u8]) {
        self.tell(Work::Put { alloc_id: alloc_id.clone(), seq, payload: payload.to_vec() });
    }

    pub(super) fn retire(&self, grant: Arc<Grant>, seq: u64, payload: Vec<u8>) {
        self.tell(Work::Retire { grant, seq, payload });
    }

    pub(super) fn name(&self, key: &str, seq: u64, id: &DeviceId) {
        self.tell(Work::Name { key: key.to_owned(), seq, id: id.clone() });
    }

    pub(super) fn forget_name(&self, key: String) {
        self.tell(Work::ForgetName { key });
    }

    pub(super) fn hook(&self, hook: &PendingHook, seq: u64, payload: Vec<u8>) {
        self.tell(Work::Hook { hook: Box::new(hook.clone()), seq, payload });
    }

    /// From now on, or until now, the thread is told of no entry: the database reads them from the journal at the next
    /// checkpoint, in one go.
    pub(super) fn leave_out(&mut self, leave_out: bool) {
        self.is_told = !leave_out;
        self.thread.shared.behind.fetch_or(leave_out, Ordering::AcqRel);
    }

    fn tell(&self, work: Work) {
        if !self.is_told {
            return;
        }
        self.untold.borrow_mut().push(work);
        if self.untold.borrow().len() >= UNTOLD_MAX {
            self.tell_all();
        }
    }

    /// Tells the thread what it has not been told yet. Nobody waits for room in its queue: the journal has it.
    pub(super) fn tell_all(&self) {
        for work in self.untold.take() {
            if self.send(work).is_err() && !self.thread.shared.behind.swap(true, Ordering::AcqRel) {
                // As at the first start of a node with thousands of devices, which all get their names at once: nothing is wrong.
                tracing::info!("the query database cannot follow the journal; it catches up with the next checkpoint");
            }
        }
    }

    /// The store is about to be closed: what can wait for the next one is left to it.
    pub(super) fn hurry(&self) {
        self.thread.shared.hurry();
    }

    /// Asks for something that comes behind everything so far.
    fn order(&self, work: Work) -> Result<(), StoreError> {
        self.tell_all();
        self.send(work)
    }

    fn send(&self, work: Work) -> Result<(), StoreError> {
        let why = match self.thread.queue.as_ref().map(|queue| queue.try_send(work)) {
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
        self.order(Work::Checkpoint(Box::new(order), sender))?;
        Ok(PendingCheckpoint { dir: self.dir.clone(), done })
    }

    /// The database to be read, once it has everything that it was told.
    pub(super) fn reader(&self) -> Result<PendingReader, StoreError> {
        let (sender, answer) = sync_channel(1);
        self.order(Work::Read(sender))?;
        Ok(PendingReader { dir: self.dir.clone(), answer })
    }

    /// Whether the database is being kept.
    pub(super) fn is_sound(&self) -> bool {
        let Shared { closed, behind, .. } = &*self.thread.shared;
        !closed.load(Ordering::Acquire) && !behind.load(Ordering::Acquire) && !self.thread.shared.is_stuck(self.patience)
    }

    /// Since when the history cannot be read, and why.
    pub(super) fn unreadable(&self) -> Option<Unreadable> {
        self.thread.shared.unreadable()
    }

    /// Adds to the report what was found since.
    pub(super) fn add_findings(&self, report: &mut RecoveryReport) {
        let late = self.thread.shared.late();
        report.findings.extend(late.findings.iter().cloned());
        report.quarantined.extend(late.quarantined.iter().cloned());
        report.from_database += late.from_database;
    }

    /// What the database has and the journal had lost, once.
    pub(super) fn take_found(&self) -> Vec<Entry> {
        let mut late = self.thread.shared.late();
        let found = std::mem::take(&mut late.found);
        late.from_database += found.iter().filter(|entry| matches!(entry, Entry::Grant(_))).count();
        found
    }

    /// Has something done to the database behind the store's back, once it has everything that it was told.
    #[cfg(test)]
    pub(super) fn tell_to_meddle(&self, act: impl FnOnce(&mut Option<Shelf>) + Send + 'static) {
        self.order(Work::Meddle(Box::new(act))).unwrap();
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
        self.tell_all();
        self.thread.queue.as_ref().unwrap().send(Work::Read(sender)).unwrap();
        drop(answer.recv().unwrap());
    }

    /// How long the thread may be at one thing.
    #[cfg(test)]
    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }
}

impl Drop for Shelver {
    fn drop(&mut self) {
        self.hurry();
        self.tell_all();
        if !self.thread.end(PATIENCE_AT_THE_END) {
            tracing::error!(
                "the query database does not close and is left to itself; the journal has everything, and the next start reads it"
            );
        }
    }
}

/// A reader that was asked for.
#[derive(Debug)]
pub(super) struct PendingReader {
    dir: PathBuf,
    answer: Receiver<Result<Reader, StoreError>>,
}

impl PendingReader {
    pub(super) fn wait(&self) -> Result<Reader, StoreError> {
        let silent = |_| StoreError::Unopened { path: self.dir.clone(), why: "it does not answer".into() };
        self.answer.recv_timeout(PATIENCE).map_err(silent)?
    }
}
