//! The store's maintenance as a part of the actor: the tasks that run, and the last known state of
//! the store.

use super::committer::lock;
use super::config::LedgerConfig;
use crate::domain::{Evidence, LedgerHealth};
use actix::SpawnHandle;
use std::sync::Arc;

/// The state of the check for absent devices.
#[derive(Debug, Default)]
pub(super) struct Forgetting {
    /// The result of the latest scan. Without one no device counts as absent.
    pub(super) found: Option<Arc<Evidence>>,
    /// Whether a check is due.
    pub(super) is_due: bool,
}

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
    pub(super) settle_timer: Option<SpawnHandle>,
    pub(super) forgetting: Forgetting,
}

impl Upkeep {
    pub(super) fn new(config: &LedgerConfig) -> Self {
        let kept = lock(&config.store).kept();
        config.kept.send_replace(kept);
        // The segments that the start read are no longer needed after it.
        Upkeep {
            kept,
            syncing: false,
            behind: true,
            checkpoint_timer: None,
            settle_timer: None,
            forgetting: Forgetting::default(),
        }
    }
}
