//! One look at what the kubelet has: its list over the pod-resources API, its answers in the checkpoint.

use super::actor::RegistrationConfig;
use super::audit::{Foreign, Seen};
use crate::kubelet::checkpoint;
use crate::kubelet::pod_resources::PodResources;
use actix::Message;
use std::path::PathBuf;

/// Looks. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Looker {
    device_plugins: PathBuf,
    pod_resources: PodResources,
}

/// A look is done.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Looked(pub(super) Seen);

impl Looker {
    pub(super) fn new(config: &RegistrationConfig) -> Self {
        Looker { device_plugins: config.device_plugins.clone(), pod_resources: PodResources::new(&config.pod_resources) }
    }

    /// GetAllocatableResources frees nothing, unlike List: it may be asked beside an Allocate.
    pub(super) async fn look(self) -> Seen {
        let healthy = self.pod_resources.allocatable().await;
        let healthy = healthy.inspect_err(|error| tracing::debug!(%error, "the kubelet does not tell its list")).ok();
        let read = move || checkpoint::read(&self.device_plugins).ok();
        let checkpoint = tokio::task::spawn_blocking(read).await.ok().flatten();
        Seen { healthy, foreign: checkpoint.map(Foreign::of) }
    }
}
