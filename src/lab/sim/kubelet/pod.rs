//! Pods, with the fields that matter for devices.

use crate::domain::{AllocId, ContainerEdits, DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// When a container runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerKind {
    /// Runs to its end before the next one starts, and leaves its devices to that one.
    Init,
    /// A restartable init container: starts in the order of the init containers and continues to
    /// run.
    Sidecar,
    /// Runs after the init containers.
    App,
}

/// A container and its requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Its name, unique in the pod.
    pub name: String,
    /// When it runs.
    pub kind: ContainerKind,
    /// The number of devices for each resource.
    pub resources: BTreeMap<ResourceName, u32>,
}

/// A pod to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSpec {
    /// Its UID; unique for every pod, also for pods with the same name.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its containers, in the order of the spec.
    pub containers: Vec<ContainerSpec>,
    /// Whether a later handler of its admission rejects it after its devices are allocated.
    pub lacks_cpu: bool,
}

impl Container {
    /// Whether it runs at this time. The state may not show yet that a container has done its work.
    pub(super) fn runs(&self, now: Duration) -> bool {
        self.running && self.ends_at.is_none_or(|end| end > now)
    }
}

impl PodSpec {
    /// A pod without containers, with a UID of its own.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self::with_uid(uuid::Uuid::now_v7().to_string(), namespace, name)
    }

    /// A pod without containers, with a given UID, for runs that a seed repeats.
    pub fn with_uid(
        uid: impl Into<String>,
        namespace: impl Into<String>,
        name: impl Into<String>,
    ) -> Self {
        PodSpec {
            uid: uid.into(),
            namespace: namespace.into(),
            name: name.into(),
            containers: Vec::new(),
            lacks_cpu: false,
        }
    }

    /// The pod, with too little CPU for it after its devices are allocated.
    #[must_use]
    pub fn without_cpu(self) -> Self {
        PodSpec { lacks_cpu: true, ..self }
    }

    /// The pod with another init container that requests `count` devices.
    #[must_use]
    pub fn init(self, name: &str, resource: &ResourceName, count: u32) -> Self {
        self.with(ContainerKind::Init, name, resource, count)
    }

    /// The pod with another sidecar that requests `count` devices.
    #[must_use]
    pub fn sidecar(self, name: &str, resource: &ResourceName, count: u32) -> Self {
        self.with(ContainerKind::Sidecar, name, resource, count)
    }

    /// The pod with another application container that requests `count` devices.
    #[must_use]
    pub fn app(self, name: &str, resource: &ResourceName, count: u32) -> Self {
        self.with(ContainerKind::App, name, resource, count)
    }

    fn with(
        mut self,
        kind: ContainerKind,
        name: &str,
        resource: &ResourceName,
        count: u32,
    ) -> Self {
        let resources = BTreeMap::from([(resource.clone(), count)]);
        self.containers.push(ContainerSpec { name: name.to_owned(), kind, resources });
        self
    }

    /// The containers in the order of their admission: init containers and sidecars first.
    pub fn in_order(&self) -> impl Iterator<Item = &ContainerSpec> {
        let is_app = |container: &&ContainerSpec| container.kind == ContainerKind::App;
        self.containers
            .iter()
            .filter(move |container| !is_app(container))
            .chain(self.containers.iter().filter(is_app))
    }
}

/// The phase of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodPhase {
    /// Not decided: the kubelet is down, or has not processed the pod yet.
    Pending,
    /// Admitted; its application containers and sidecars run.
    Running,
    /// Its containers have done their work, and are not started again.
    Succeeded,
    /// Rejected, for good.
    Failed {
        /// The reason of its status, `UnexpectedAdmissionError`.
        reason: String,
        /// The message of its status.
        message: String,
    },
}

/// A container of a pod, with at least one attempt to start it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Container {
    /// Whether it runs; an ended init container does not.
    pub running: bool,
    /// Whether it has done its work: an init container that is not started again.
    pub ended: bool,
    /// The edits that it was started with.
    pub edits: ContainerEdits,
    /// The ids that it was started with, by resource.
    pub devices: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// Holdfast's annotations among these edits, by resource.
    pub alloc_ids: BTreeMap<ResourceName, AllocId>,
    /// Why its last start failed.
    pub waiting: Option<String>,
    /// When it ends without a command: an init container that is at work.
    pub(super) ends_at: Option<Duration>,
    /// When it is started next, after an end or a failure.
    pub(super) retry_at: Duration,
}

/// A pod and its state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its requests.
    pub spec: PodSpec,
    /// Its phase.
    pub phase: PodPhase,
    /// Its containers by name: those that were started or will be started again.
    pub containers: BTreeMap<String, Container>,
    /// Whether its cgroup was created.
    pub(super) has_cgroup: bool,
}

impl Pod {
    pub(super) fn new(spec: PodSpec) -> Self {
        Pod { spec, phase: PodPhase::Pending, containers: BTreeMap::new(), has_cgroup: false }
    }

    /// Whether the kubelet has come to a result so far: it runs, it failed, or a container cannot
    /// be started.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        self.phase != PodPhase::Pending
            || self.containers.values().any(|container| container.waiting.is_some())
    }

    /// Whether it was rejected.
    #[must_use]
    pub fn is_failed(&self) -> bool {
        matches!(self.phase, PodPhase::Failed { .. })
    }

    /// Whether it has succeeded or failed: the kubelet counts its devices as free.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.is_failed() || self.phase == PodPhase::Succeeded
    }

    /// Whether one of its containers runs.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.containers.values().any(|container| container.running)
    }
}
