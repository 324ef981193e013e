//! What the index thread begins with, and what it is sent.

#[cfg(test)]
use super::database::Database;
use super::database::Update;
use super::opening::{Attempt, Opened};
use super::reader::Reader;
use crate::store::StoreError;
use crate::store::journal::PendingSync;
use std::fmt;
use std::sync::mpsc::SyncSender;

/// What the start leaves to the first opening.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    /// Whether there was a database. `None`: the start has compared it with the journal.
    pub(crate) existed: Option<bool>,
    /// Whether the power may have been cut: then the history is counted.
    pub(crate) recounts: bool,
    /// The journal may have lost entries after this one; the database may have them.
    pub(crate) lost_after: u64,
}

/// What the thread begins with: an open database, one that goes on opening, or none yet.
#[derive(Debug)]
pub(crate) enum Begin {
    Open(Box<Opened>),
    Opening(Attempt),
    Later,
}

/// What the thread is sent.
pub(super) enum Work {
    Update(u64, Update),
    Checkpoint(Box<CheckpointOrder>, SyncSender<Result<(), StoreError>>),
    Read(SyncSender<Result<Reader, StoreError>>),
    #[cfg(test)]
    Meddle(Box<dyn FnOnce(&mut Option<Database>) + Send>),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// A checkpoint that is wanted.
#[derive(Debug)]
pub(crate) struct CheckpointOrder {
    /// Everything up to this sequence number was sent.
    pub(crate) applied: u64,
    /// What the journal has to sync first, so that its newest head may stand for the older segments.
    pub(crate) sync: Option<PendingSync>,
    /// Bytes of what is live, as the newest head has it.
    pub(crate) live: u64,
    /// The first segment that is still needed after it.
    pub(crate) newest_segment: u64,
}
