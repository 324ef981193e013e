//! The messages to the index thread.

#[cfg(test)]
use super::database::Database;
use super::reader::{DatabaseSnapshot, Reader};
use crate::domain::{AllocId, DeviceId, Grant, PendingHook};
use crate::store::StoreError;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// Checks that a start leaves to the first time that the database follows the journal.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    /// Whether there was a database. `None`: the start has compared the two copies itself.
    pub(crate) existed: Option<bool>,
    /// Whether the power may have failed: then the history is counted.
    pub(crate) recounts: bool,
    /// The journal may have lost entries after this one that the database still has.
    pub(crate) lost_after: u64,
}

type Answer<T> = SyncSender<Result<T, StoreError>>;

/// A message to the index thread.
pub(super) enum Work {
    /// Opens the database at once.
    Open(Answer<DatabaseSnapshot>),
    /// Lets the database follow the journal.
    Begin(Start),
    /// Changes with the sequence numbers of their entries.
    Updates(Vec<(u64, Update)>),
    Checkpoint(CheckpointOrder, Answer<()>),
    Read(Answer<Reader>),
    #[cfg(test)]
    Test(TestAction),
}

/// A test's action on the database.
#[cfg(test)]
pub(super) type TestAction = Box<dyn FnOnce(&mut Option<Database>) + Send>;

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

/// A change of the database.
#[derive(Debug)]
pub(crate) enum Update {
    /// Inserts a live grant, or replaces it.
    Live(AllocId, Vec<u8>),
    /// Moves a grant from the live ones into the history. Idempotent.
    Released(Arc<Grant>, Vec<u8>),
    /// Removes a live grant that the journal does not have.
    Discard(AllocId),
    /// Sets the id of a device, by its physical key.
    Name(String, DeviceId),
    /// Removes a name.
    ForgetName(String),
    /// Sets the state of a hook. One that is done is removed.
    Hook(Box<PendingHook>, Vec<u8>),
}

/// The parameters of a checkpoint. The journal was synced before, so its newest head replaces the
/// older segments.
#[derive(Debug)]
pub(crate) struct CheckpointOrder {
    /// Changes up to this sequence number were sent.
    pub(crate) applied: u64,
    /// The size of the newest head: of everything live.
    pub(crate) live_bytes: u64,
    /// The first sequence number of the newest segment. Older segments are deleted.
    pub(crate) newest_segment: u64,
}
