//! The store's upkeep as a part of the actor: what is under way, and how the store was last seen to be kept.

use super::committer::lock;
use super::config::LedgerConfig;
use crate::domain::{Evidence, LedgerHealth};
use actix::SpawnHandle;
use std::sync::Arc;

/// What is known for forgetting devices that have gone.
#[derive(Debug, Default)]
pub(super) struct Forgetting {
    /// What the latest scan has found. Without one no device has gone.
    pub(super) found: Option<Arc<Evidence>>,
    /// Whether a look is due.
    pub(super) is_due: bool,
}

/// The part.
#[derive(Debug)]
pub(super) struct Upkeep {
    /// How the store was last seen to be kept.
    pub(super) kept: LedgerHealth,
    /// Whether a sync after the answer is under way.
    pub(super) syncing: bool,
    /// Whether the query database may lack something.
    pub(super) behind: bool,
    pub(super) checkpoint_timer: Option<SpawnHandle>,
    pub(super) settle_timer: Option<SpawnHandle>,
    pub(super) forgetting: Forgetting,
}

impl Upkeep {
    pub(super) fn new(config: &LedgerConfig) -> Self {
        let kept = lock(&config.store).kept();
        config.kept.send_replace(kept);
        // The segments that the start has read are of no more use after it.
        Upkeep { kept, syncing: false, behind: true, checkpoint_timer: None, settle_timer: None, forgetting: Forgetting::default() }
    }
}
