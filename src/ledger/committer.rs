//! Group commit: the entries that wait for the next write, and who waits for them.
//!
//! The first entry of a batch sends a `Commit` to the actor, behind the requests that already wait in its mailbox. So one
//! write and one fdatasync answer them all.

use crate::domain::{Entry, Grant, LedgerHealth};
use crate::messages::RecordError;
use crate::store::{Store, StoreError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The result of a commit.
pub(super) type Written = Result<(), Arc<StoreError>>;

/// Who waits for a commit. When it is dropped unanswered, as with an actor that dies, the caller sends its message again.
pub(super) enum Reply {
    /// A part of the actor.
    Internal(oneshot::Sender<Written>),
    /// An Allocate.
    Allocate(oneshot::Sender<Result<(), RecordError>>),
}

impl Reply {
    /// Answers. A caller that no longer waits finds its entry when it asks again.
    pub(super) fn send(self, result: Written) {
        match self {
            Reply::Internal(reply) => drop(reply.send(result)),
            Reply::Allocate(reply) => drop(reply.send(result.map_err(RecordError::from))),
        }
    }
}

/// Requests that are written together.
pub(super) type Batch = Vec<(Vec<Entry>, Reply)>;

/// The batch that is being gathered.
#[derive(Default)]
pub(super) struct Committer {
    pending: Batch,
}

/// What came of writing a batch.
pub(super) struct Outcome {
    /// What the journal answered.
    pub(super) appended: Written,
    /// What the callers are answered: a grant may be served although it is not durable (`when_not_durable`).
    pub(super) result: Written,
    /// How the store is kept now.
    pub(super) kept: LedgerHealth,
    /// How long the write took.
    pub(super) took: Duration,
}

impl Outcome {
    /// Whether one of the entries does not fit into a record. Nothing of the batch was written then.
    pub(super) fn is_too_large(&self) -> bool {
        self.appended.as_ref().is_err_and(|error| matches!(**error, StoreError::TooLarge { .. }))
    }
}

impl Committer {
    /// Adds entries to the batch. True for the first ones: then a commit is to be scheduled.
    pub(super) fn add(&mut self, entries: Vec<Entry>, reply: Reply) -> bool {
        self.pending.push((entries, reply));
        self.pending.len() == 1
    }

    /// The entries that are about to be written.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.pending.iter().flat_map(|(entries, _)| entries)
    }

    /// The grants among these.
    pub(super) fn grants(&self) -> impl Iterator<Item = &Grant> {
        self.entries().filter_map(|entry| if let Entry::Grant(grant) = entry { Some(&**grant) } else { None })
    }

    /// Takes the batch; the next one begins empty.
    pub(super) fn take(&mut self) -> Batch {
        std::mem::take(&mut self.pending)
    }
}

/// Makes entries durable (I1), or accepts them unwritten where `serves` says so.
pub(super) fn write(store: &Mutex<Store>, entries: &[Entry], serves: bool) -> Outcome {
    let began = Instant::now();
    let mut store = lock(store);
    let appended = store.commit(entries).map_err(Arc::new);
    let is_accepted = appended.is_err() && serves && store.accept_unwritten(entries).is_ok();
    let result = if is_accepted { Ok(()) } else { appended.clone() };
    Outcome { appended, result, kept: store.kept(), took: began.elapsed() }
}

/// The store. It marks itself failed before it changes anything that a panic could leave half done.
pub(super) fn lock(store: &Mutex<Store>) -> MutexGuard<'_, Store> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the commit. When the actor dies before it, the waiting message dies too, and the caller's mailbox sends
/// it to the next life.
pub(super) async fn answer(answered: oneshot::Receiver<Written>) -> Written {
    answered.await.unwrap_or_else(|_| die())
}

/// Ends this task as a panic would, without another report of the same death.
fn die() -> ! {
    std::panic::resume_unwind(Box::new("the ledger actor died before its commit"))
}
