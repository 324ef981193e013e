//! What both simulated daemons have of the ledger's actor: its state, and the rule that it handles
//! no message while it writes.

use crate::domain::Entry;
use crate::ledger::core::{Ledger, LedgerState};
use tokio::sync::oneshot;

/// Answers a request when its entries were written. Its drop is the actor's death.
pub(super) type Reply = oneshot::Sender<()>;

/// The ledger's actor.
#[derive(Debug)]
pub(super) struct Actor {
    pub(super) state: LedgerState<Reply>,
    pub(super) is_writing: bool,
}

impl Actor {
    pub(super) fn new(state: LedgerState<Reply>) -> Self {
        Actor { state, is_writing: false }
    }

    /// The live grants.
    pub(super) fn ledger(&self) -> &Ledger {
        self.state.ledger()
    }

    /// Adds entries to the next write.
    pub(super) fn submit(&mut self, entries: Vec<Entry>) -> oneshot::Receiver<()> {
        let (reply, done) = oneshot::channel();
        self.state.add(entries, reply);
        done
    }

    /// Begins the write of the entries that wait, if there are requests.
    pub(super) fn begin_write(&mut self) -> Option<(Vec<Entry>, Vec<Reply>)> {
        let (entries, replies): (Vec<_>, Vec<_>) = self.state.take().into_iter().unzip();
        self.is_writing = !replies.is_empty();
        self.is_writing.then(|| (entries.into_iter().flatten().collect(), replies))
    }

    /// Applies entries that were written. The caller answers the requests.
    pub(super) fn end_write(&mut self, entries: &[Entry]) {
        self.state.apply(entries);
        self.is_writing = false;
    }
}

/// Answers requests whose entries were written.
pub(super) fn answer(replies: Vec<Reply>) {
    for reply in replies {
        // The caller may have given up.
        let _ = reply.send(());
    }
}
