//! The store's maintenance as a part of the actor: the tasks that run, and the last known state of
//! the store.

use super::committer::lock;
use super::config::LedgerConfig;
use crate::domain::LedgerHealth;
use actix::SpawnHandle;

/// The state of the store's maintenance.
#[derive(Debug)]
pub(super) struct Upkeep {
    /// The last known state of the store.
    pub(super) kept: LedgerHealth,
    /// Whether a sync after the answer runs.
    pub(super) syncing: bool,
    /// Whether the query database may lag behind the journal.
    pub(super) behind: bool,
    pub(super) checkpoint_timer: Option<SpawnHandle>,
    pub(super) retry_timer: Option<SpawnHandle>,
}

impl Upkeep {
    pub(super) fn new(config: &LedgerConfig) -> Self {
        let kept = lock(&config.store).kept();
        config.kept.send_replace(kept);
        // The segments that the start read are no longer needed after it.
        Upkeep { kept, syncing: false, behind: true, checkpoint_timer: None, retry_timer: None }
    }
}
