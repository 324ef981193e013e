//! The write of a batch, and the callers that wait for it.
//!
//! The first entry of a batch sends a `Commit` to the actor, behind the requests that already wait
//! in its mailbox. So one write and one fdatasync answer all of them.

use crate::domain::{AllocId, Entry, Grant, LedgerHealth};
use crate::messages::RecordError;
use crate::store::{Store, StoreError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The result of a commit.
pub(super) type Written = Result<(), Arc<StoreError>>;

/// A caller that waits for a commit. If this is dropped unanswered, because the actor failed, the
/// caller sends its message again.
pub(super) enum Reply {
    /// A part of the ledger actor.
    Internal(oneshot::Sender<Written>),
    /// An Allocate, with its grant.
    Allocate(oneshot::Sender<Result<(), RecordError>>, AllocId),
    /// A Prepare of a claim, with its answer.
    Claim(oneshot::Sender<Result<Vec<Arc<Grant>>, RecordError>>, Vec<Arc<Grant>>),
}

impl Reply {
    /// Sends the answer. Returns the grant that was written for an Allocate whose caller no longer
    /// waits: the kubelet has got an error, and no container has it. Another caller that no longer
    /// waits finds its entry when it asks again.
    #[must_use]
    pub(super) fn send(self, result: Written) -> Option<AllocId> {
        match self {
            Reply::Internal(reply) => drop(reply.send(result)),
            Reply::Allocate(reply, alloc_id) => {
                let is_written = result.is_ok();
                let is_late = reply.send(result.map_err(RecordError::from)).is_err();
                return (is_written && is_late).then_some(alloc_id);
            }
            Reply::Claim(reply, grants) => {
                drop(reply.send(result.map(|()| grants).map_err(RecordError::from)));
            }
        }
        None
    }
}

/// The outcome of writing a batch.
pub(super) struct Outcome {
    /// The result of the journal.
    pub(super) appended: Written,
    /// The result for the callers: a grant may be served without being durable
    /// (`when_not_durable`).
    pub(super) result: Written,
    /// The state of the store after the write.
    pub(super) kept: LedgerHealth,
    /// The duration of the write.
    pub(super) took: Duration,
}

impl Outcome {
    /// Whether one of the entries does not fit into a record. Then nothing of the batch was
    /// written.
    pub(super) fn is_too_large(&self) -> bool {
        self.appended.as_ref().is_err_and(|error| matches!(**error, StoreError::TooLarge { .. }))
    }
}

/// Makes entries durable (I1), or accepts them unwritten if `serves` is set.
pub(super) fn write(store: &Mutex<Store>, entries: &[Entry], serves: bool) -> Outcome {
    let began = Instant::now();
    let mut store = lock(store);
    let appended = store.commit(entries).map_err(Arc::new);
    let is_accepted = appended.is_err() && serves && store.accept_unwritten(entries).is_ok();
    let result = if is_accepted { Ok(()) } else { appended.clone() };
    Outcome { appended, result, kept: store.kept(), took: began.elapsed() }
}

/// Locks the store. A poisoned lock is safe: the store marks itself failed before any change that a
/// panic could interrupt.
pub(super) fn lock(store: &Mutex<Store>) -> MutexGuard<'_, Store> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the commit. If the actor fails before the commit, this task ends too, and the caller's
/// mailbox sends its message to the restarted actor.
pub(super) async fn answer(answered: oneshot::Receiver<Written>) -> Written {
    answered.await.unwrap_or_else(|_| die())
}

/// Ends this task like a panic, without a second report of the same failure.
fn die() -> ! {
    std::panic::resume_unwind(Box::new("the ledger actor died before its commit"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_written_grant_that_was_not_answered_is_returned() {
        let id = AllocId::new("late");
        let failed = || Err(Arc::new(StoreError::TooLarge { entry: String::new(), bytes: 1 }));
        for (waits, result, returned) in [
            (true, Ok(()), None),
            (false, Ok(()), Some(id.clone())),
            (true, failed(), None),
            (false, failed(), None),
        ] {
            let (reply, answer) = oneshot::channel();
            let answer = waits.then_some(answer);
            assert_eq!(Reply::Allocate(reply, id.clone()).send(result), returned);
            drop(answer);
        }
    }
}
