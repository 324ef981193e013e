//! How an Allocate learns what became of its record: from the commit, not from a task that waits for it.
//!
//! A task would be polled when the actor has nothing left to do, behind the log, the metrics and the publication of what is
//! now held. The sender that actix hands over once the handler has returned therefore lies in a slot that the commit has too.

use super::actor::LedgerActor;
use crate::messages::RecordError;
use crate::store::StoreError;
use actix::dev::{MessageResponse, OneshotSender};
use actix::{Context, Message};
use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::oneshot;

type Recorded = Result<(), RecordError>;
/// What became of a commit.
pub(super) type Written = Result<(), Arc<StoreError>>;

/// Who waits for a commit.
pub(super) enum Waiting {
    /// A part of this actor.
    Here(oneshot::Sender<Written>),
    /// An Allocate: answered from the commit itself, before anything that comes after it on this thread.
    Allocate(Answer),
}

impl Waiting {
    pub(super) fn tell(self, result: Written) {
        // Whoever no longer waits finds the entry when it asks again.
        match self {
            Waiting::Here(answer) => drop(answer.send(result)),
            Waiting::Allocate(answer) => answer.give(result.map_err(RecordError::from)),
        }
    }
}

/// The slot. When it is dropped before an answer is given, as with an actor that dies, the caller's mailbox sends the
/// message to the next life.
#[derive(Clone, Default)]
pub struct Answer(Rc<Cell<Option<OneshotSender<Recorded>>>>);

impl Answer {
    /// Answers. A caller that no longer waits finds its grant when it asks again.
    fn give(self, result: Recorded) {
        if let Some(sender) = self.0.take() {
            drop(sender.send(result));
        }
    }
}

impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").finish_non_exhaustive()
    }
}

/// What the handler of a record returns.
pub enum Recording {
    /// It is known already what became of it.
    Now(Recorded),
    /// The commit answers.
    WithCommit(Answer),
    /// The kubelet is asked first.
    Later(Pin<Box<dyn Future<Output = Recorded>>>),
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").finish_non_exhaustive()
    }
}

impl<M: Message<Result = Recorded>> MessageResponse<LedgerActor, M> for Recording {
    fn handle(self, _: &mut Context<LedgerActor>, sender: Option<OneshotSender<Recorded>>) {
        let Some(sender) = sender else { return };
        match self {
            Recording::Now(result) => drop(sender.send(result)),
            Recording::WithCommit(answer) => answer.0.set(Some(sender)),
            Recording::Later(result) => drop(actix::spawn(async move { drop(sender.send(result.await)) })),
        }
    }
}
