//! What the shelver's thread is given: a database to begin with, and then one piece of work after the other.

use super::StoreError;
use super::database::Reader;
#[cfg(test)]
use super::database::Shelf;
use super::follow::Start;
use super::journal::PendingSync;
use super::opening::{Attempt, Opened};
use super::recovery::{LivePayloads, Truth};
use crate::domain::{AllocId, DeviceId, Grant, PendingHook};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

/// The database as the thread takes it over.
#[derive(Debug)]
pub(super) enum Database {
    /// It is open. What it and the journal say together, and the payloads of what is live.
    Opened(Box<(Opened, Truth, LivePayloads)>),
    /// It goes on opening, or is opened later.
    Later(Box<(Option<Attempt>, Start)>),
    /// The thread that had it does not come back: its files are copied.
    Stuck,
}

/// What the thread is told.
pub(super) enum Work {
    Put {
        alloc_id: AllocId,
        seq: u64,
        payload: Vec<u8>,
    },
    Retire {
        grant: Arc<Grant>,
        seq: u64,
        payload: Vec<u8>,
    },
    Name {
        key: String,
        seq: u64,
        id: DeviceId,
    },
    ForgetName {
        key: String,
    },
    Hook {
        hook: Box<PendingHook>,
        seq: u64,
        payload: Vec<u8>,
    },
    Checkpoint(Box<Order>, SyncSender<Result<(), StoreError>>),
    Read(SyncSender<Result<Reader, StoreError>>),
    #[cfg(test)]
    Meddle(Meddling),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(super) type Meddling = Box<dyn FnOnce(&mut Option<Shelf>) + Send>;

/// A checkpoint that is wanted.
#[derive(Debug)]
pub(super) struct Order {
    /// Everything up to this sequence number has been told.
    pub(super) applied: u64,
    /// What the journal has to sync first, so that its newest head may stand for the older segments.
    pub(super) sync: Option<PendingSync>,
    /// Bytes of what is live, as the newest head has it.
    pub(super) live: u64,
    /// The first segment that is still needed after it.
    pub(super) newest_segment: u64,
}
