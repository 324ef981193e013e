//! The registration actor's dependencies, and the state that it publishes.

use crate::domain::{Inventory, KubeletGeneration, ResourceName};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::messages::{Bind, Mailbox, Retire};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{RwLock, watch};

/// The registration of one resource, for `status` and readiness.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourceStatus {
    /// Whether the kubelet has opened our stream.
    pub registered: bool,
    /// Whether there is no kubelet to register with.
    pub awaiting_kubelet: bool,
    /// Why the last registration failed, until one succeeds.
    pub problem: Option<String>,
    /// Whether another plugin seems to take the resource repeatedly.
    pub contested: bool,
    /// How the kubelet's state differs from ours, although our stream is open.
    pub disagreement: Option<String>,
    /// The time from the start of the last registration to its stream, in microseconds.
    pub last_registration_us: Option<u64>,
    /// The API version that the kubelet accepted last.
    pub api_version: Option<&'static str>,
}

impl ResourceStatus {
    /// Whether the kubelet has the resource from us, or is absent.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.registered || self.awaiting_kubelet
    }
}

/// The actor's dependencies. They are the same for every life.
#[derive(Debug, Clone)]
pub struct RegistrationConfig {
    /// `<kubelet-dir>/device-plugins/kubelet.sock`.
    pub kubelet_socket: PathBuf,
    /// The kubelet's checkpoint.
    pub checkpoint: CheckpointReader,
    /// The pod-resources API.
    pub pod_resources: PodResources,
    /// The lists that are sent to the kubelet. Each of their resources is registered.
    pub lists: watch::Receiver<Arc<Inventory>>,
    /// Binds sockets.
    pub bind: Mailbox<Bind>,
    /// Closes superseded sockets.
    pub retire: Mailbox<Retire>,
    /// The identity of the kubelet's socket, as the host watch saw it last.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The published state of every resource.
    pub status: Arc<watch::Sender<BTreeMap<ResourceName, ResourceStatus>>>,
    /// Locked for reading during a Register, and for writing while another instance has been
    /// offered the kubelet's connections.
    pub registering: Arc<RwLock<()>>,
    /// Whether this instance ends or hands over. It registers nothing then.
    pub leaving: watch::Receiver<bool>,
}
