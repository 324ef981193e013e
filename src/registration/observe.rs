//! Reads the kubelet's state for the audit: its list over the pod-resources API, its answers in the
//! checkpoint.

use super::audit::{Foreign, Seen};
use super::config::RegistrationConfig;
use crate::domain::Checkpoint;
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use actix::Message;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Reads the kubelet's state. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct KubeletObserver {
    checkpoint: CheckpointReader,
    pod_resources: PodResources,
    /// The last checkpoint. The same one again has no news.
    known: Arc<Mutex<Option<Arc<Checkpoint>>>>,
}

/// The result of a pass.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Observed(pub(super) Seen);

impl KubeletObserver {
    pub(super) fn new(config: &RegistrationConfig) -> Self {
        KubeletObserver {
            checkpoint: config.checkpoint.clone(),
            pod_resources: config.pod_resources.clone(),
            known: Arc::default(),
        }
    }

    /// GetAllocatableResources frees no devices, unlike List, so it may run during an Allocate.
    pub(super) async fn observe(self) -> Seen {
        let healthy = self.pod_resources.allocatable().await;
        let healthy = healthy
            .inspect_err(|error| tracing::debug!(%error, "cannot read the kubelet's list"))
            .ok();
        Seen { healthy, foreign: self.foreign().await }
    }

    /// The answers of other plugins. `None` if the checkpoint is unreadable or unchanged.
    async fn foreign(self) -> Option<BTreeSet<Foreign>> {
        let find = move || {
            let checkpoint = self.checkpoint.read()?;
            let before = self
                .known
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .replace(Arc::clone(&checkpoint));
            (before.as_ref() != Some(&checkpoint)).then(|| Foreign::of(&checkpoint))
        };
        tokio::task::spawn_blocking(find).await.ok().flatten()
    }
}
