//! What the index thread is sent.

#[cfg(test)]
use super::database::Database;
use super::database::Update;
use super::reader::Reader;
use crate::store::StoreError;
use std::fmt;
use std::sync::mpsc::SyncSender;

/// What the start leaves to the first time that the database follows the journal.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    /// Whether there was a database. `None`: the start has compared it with the journal.
    pub(crate) existed: Option<bool>,
    /// Whether the power may have been cut: then the history is counted.
    pub(crate) recounts: bool,
    /// The journal may have lost entries after this one; the database may have them.
    pub(crate) lost_after: u64,
}

/// What the thread is sent.
pub(super) enum Work {
    /// The first message: from now on the database may follow the journal.
    Begin(Start),
    Update(u64, Update),
    Checkpoint(Box<CheckpointOrder>, SyncSender<Result<(), StoreError>>),
    Read(SyncSender<Result<Reader, StoreError>>),
    #[cfg(test)]
    Meddle(Meddling),
}

/// What a test does behind the store's back.
#[cfg(test)]
pub(super) type Meddling = Box<dyn FnOnce(&mut Option<Database>) + Send>;

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// A checkpoint that is wanted. The journal was synced before, so its newest head may stand for the older segments.
#[derive(Debug)]
pub(crate) struct CheckpointOrder {
    /// Everything up to this sequence number was sent.
    pub(crate) applied: u64,
    /// Bytes of what is live, as the newest head has it.
    pub(crate) live: u64,
    /// The first segment that is still needed after it.
    pub(crate) newest_segment: u64,
}
