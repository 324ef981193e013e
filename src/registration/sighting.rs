//! One look at what the kubelet has: its list over the pod-resources API, its answers in the checkpoint.

use super::audit::{Foreign, Seen};
use super::config::RegistrationConfig;
use crate::domain::Checkpoint;
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use actix::Message;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Looks. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Looker {
    checkpoint: CheckpointReader,
    pod_resources: PodResources,
    /// What it said the last time: the same again would tell nothing new.
    known: Arc<Mutex<Option<Arc<Checkpoint>>>>,
}

/// A look is done.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Looked(pub(super) Seen);

impl Looker {
    pub(super) fn new(config: &RegistrationConfig) -> Self {
        Looker { checkpoint: config.checkpoint.clone(), pod_resources: config.pod_resources.clone(), known: Arc::default() }
    }

    /// GetAllocatableResources frees nothing, unlike List: it may be asked beside an Allocate.
    pub(super) async fn look(self) -> Seen {
        let healthy = self.pod_resources.allocatable().await;
        let healthy = healthy.inspect_err(|error| tracing::debug!(%error, "the kubelet does not tell its list")).ok();
        Seen { healthy, foreign: self.foreign().await }
    }

    /// The answers of others; `None` where there is no other checkpoint than before.
    async fn foreign(self) -> Option<BTreeSet<Foreign>> {
        let find = move || {
            let checkpoint = self.checkpoint.read()?;
            let before = self.known.lock().unwrap_or_else(PoisonError::into_inner).replace(Arc::clone(&checkpoint));
            (before.as_ref() != Some(&checkpoint)).then(|| Foreign::of(&checkpoint))
        };
        tokio::task::spawn_blocking(find).await.ok().flatten()
    }
}
