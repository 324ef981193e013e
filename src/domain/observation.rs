//! What can be seen of the kubelet's side at one moment: the evidence that moves grants on.
//!
//! Everything here is advisory and may be missing; `None` and `Unknown` say "not seen", which is never evidence.

use super::checkpoint::Checkpoint;
use super::device::DeviceId;
use super::edits::ContainerEdits;
use super::grant::{AllocId, KubeletGeneration};
use super::resource::ResourceName;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One look at the kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observation {
    /// The present boot (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The kubelet's socket as it was seen.
    pub kubelet: Option<KubeletGeneration>,
    /// Whether the kubelet's registration socket is older than 60 s: before that its listings lack pods.
    pub kubelet_settled: bool,
    /// `kubelet_internal_checkpoint`; `None` when it is missing or cannot be read.
    pub checkpoint: Option<Arc<Checkpoint>>,
    /// The pod-resources listing; `None` when it was not asked for or did not answer.
    pub pods: Option<Vec<ListedPod>>,
    /// Names by pod UID, from `/var/log/pods/<namespace>_<name>_<uid>`. The folder outlives its pod for a while.
    pub names: BTreeMap<String, PodName>,
    /// Cgroups by pod UID: of every pod that a grant or [`Observation::names`] tells of.
    pub cgroups: BTreeMap<String, CgroupState>,
}

/// An answer, as the kubelet has kept it: of ours, or of another plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptGrant {
    /// The id that the answer carried; that of another plugin has none, and gets [`AllocId::of_other_plugin`].
    pub alloc_id: AllocId,
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// The resource.
    pub resource: ResourceName,
    /// The ids, with the NUMA nodes that the kubelet has them under.
    pub devices: BTreeMap<DeviceId, Vec<u32>>,
    /// What the container got.
    pub edits: ContainerEdits,
}

/// A pod of a pod-resources listing. It has no UID there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name; a static pod's ends in the node's name.
    pub name: String,
    /// Its containers; init containers that end are not listed.
    pub containers: Vec<ListedContainer>,
}

/// A container of a listed pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedContainer {
    /// Its name.
    pub name: String,
    /// Its ids by resource.
    pub devices: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// The processors that are its own (`cpu_ids`: the kubelet's static CPU policy); those that it shares are not among them.
    pub cpus: BTreeSet<u32>,
}

/// Namespace and name of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

/// What a pod's cgroup tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum CgroupState {
    /// A process runs in it, or below it: the pod lives.
    Populated,
    /// It is there and nothing runs in it.
    Empty,
    /// The kubelet's hierarchy is there and the pod's cgroup is not in it.
    Gone,
    /// The kubelet's hierarchy was not found: nothing can be said.
    #[default]
    Unknown,
}

impl CgroupState {
    /// Whether it proves that nothing of the pod runs.
    #[must_use]
    pub fn is_dead(self) -> bool {
        matches!(self, CgroupState::Empty | CgroupState::Gone)
    }
}
