//! One look at what the kubelet has: its list over the pod-resources API, its answers in the checkpoint.

use super::actor::RegistrationConfig;
use super::audit::{Foreign, Seen};
use crate::kubelet::checkpoint;
use crate::kubelet::pod_resources::PodResources;
use actix::Message;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Looks. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Looker {
    device_plugins: PathBuf,
    pod_resources: PodResources,
    /// The checkpoint that was read last: the kubelet replaces the file, and reading it again would tell nothing new.
    known: Arc<Mutex<Option<Stamp>>>,
}

/// One file of those that follow each other under a name.
type Stamp = (u64, i64, i64);

/// A look is done.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub(super) struct Looked(pub(super) Seen);

impl Looker {
    pub(super) fn new(config: &RegistrationConfig) -> Self {
        Looker { device_plugins: config.device_plugins.clone(), pod_resources: config.pod_resources.clone(), known: Arc::default() }
    }

    /// GetAllocatableResources frees nothing, unlike List: it may be asked beside an Allocate.
    pub(super) async fn look(self) -> Seen {
        let healthy = self.pod_resources.allocatable().await;
        let healthy = healthy.inspect_err(|error| tracing::debug!(%error, "the kubelet does not tell its list")).ok();
        Seen { healthy, foreign: self.foreign().await }
    }

    /// The answers of others; `None` where there is no other checkpoint than before.
    async fn foreign(self) -> Option<BTreeSet<Foreign>> {
        let metadata = self.device_plugins.join(checkpoint::FILE_NAME).symlink_metadata().ok()?;
        let stamp = (metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
        if self.known.lock().unwrap_or_else(PoisonError::into_inner).replace(stamp) == Some(stamp) {
            return None;
        }
        let read = move || checkpoint::read(&self.device_plugins).ok();
        tokio::task::spawn_blocking(read).await.ok().flatten().map(Foreign::of)
    }
}
