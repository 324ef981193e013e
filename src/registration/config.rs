//! What the registration actor is built with, and what it publishes.

use crate::domain::{Inventory, KubeletGeneration, ResourceName};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::messages::{Bind, Mailbox, Retire};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{RwLock, watch};

/// One resource's place in the kubelet, for `status` and readiness.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourceStatus {
    /// Whether the kubelet has opened our stream.
    pub registered: bool,
    /// Whether there is no kubelet to register with.
    pub awaiting_kubelet: bool,
    /// Why the last registration failed, until one succeeds.
    pub problem: Option<String>,
    /// Whether another plugin seems to take the resource again and again.
    pub contested: bool,
    /// What the kubelet has otherwise than we do, although our stream is open.
    pub disagreement: Option<String>,
    /// From the begin of the last registration to its stream, in microseconds.
    pub last_registration_us: Option<u64>,
    /// The version of the device-plugin API that the kubelet took last.
    pub api_version: Option<&'static str>,
}

impl ResourceStatus {
    /// Whether the kubelet has it from here, or there is no kubelet that could.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.registered || self.awaiting_kubelet
    }
}

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct RegistrationConfig {
    /// `<kubelet-dir>/device-plugins/kubelet.sock`.
    pub kubelet_socket: PathBuf,
    /// `<kubelet-dir>/device-plugins`.
    pub device_plugins: PathBuf,
    /// The kubelet's checkpoint.
    pub checkpoint: CheckpointReader,
    /// The pod-resources API.
    pub pod_resources: PodResources,
    /// What the kubelet is told, and so what is to be registered.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Makes sockets.
    pub bind: Mailbox<Bind>,
    /// Closes superseded sockets.
    pub retire: Mailbox<Retire>,
    /// The kubelet's socket as last seen by the host watch.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// Where the state of every resource is published.
    pub status: Arc<watch::Sender<BTreeMap<ResourceName, ResourceStatus>>>,
    /// Read while a Register is in flight. Written while another instance has been offered the
    /// kubelet's connections.
    pub registering: Arc<RwLock<()>>,
    /// Whether this instance ends or hands over. It registers nothing more then.
    pub leaving: watch::Receiver<bool>,
}
