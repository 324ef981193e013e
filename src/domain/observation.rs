//! The state of the kubelet's side at one time: the evidence that moves grants on.
//!
//! All of it is advisory and may be missing. `None` and `Unknown` mean "not observed", which is
//! never evidence.

use super::checkpoint::Checkpoint;
use super::claim_evidence::ClaimEvidence;
use super::device_id::DeviceId;
use super::edits::ContainerEdits;
use super::grant::{AllocId, KubeletGeneration};
use super::pod::PodName;
use super::resource_name::ResourceName;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One observation of the kubelet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observation {
    /// The present boot (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// The kubelet's socket, if it was found.
    pub kubelet: Option<KubeletGeneration>,
    /// Whether the kubelet's registration socket is older than 60 s. Before that its listings lack
    /// pods.
    pub kubelet_settled: bool,
    /// `kubelet_internal_checkpoint`; `None` if it is missing or cannot be read.
    pub checkpoint: Option<Arc<Checkpoint>>,
    /// What the kubelet reports of its pods.
    pub pods: PodReport,
    /// Names by pod UID, from `/var/log/pods/<namespace>_<name>_<uid>`. The folder outlives its pod
    /// for a time.
    pub names: BTreeMap<String, PodName>,
    /// Cgroups by pod UID, of every pod in a grant or in [`Observation::names`].
    pub cgroups: BTreeMap<String, CgroupState>,
    /// The evidence about claims.
    pub claims: Arc<ClaimEvidence>,
}

/// An answer in the kubelet's checkpoint, ours or that of another plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointGrant {
    /// The id in the answer. An answer of another plugin has none, and gets
    /// [`AllocId::of_other_plugin`].
    pub alloc_id: AllocId,
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// The resource.
    pub resource: ResourceName,
    /// The device ids, with their NUMA nodes in the checkpoint.
    pub devices: BTreeMap<DeviceId, Vec<u32>>,
    /// The content of the answer.
    pub edits: ContainerEdits,
}

/// What the kubelet's pod-resources API reports of its pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum PodReport {
    /// It was not called, or did not answer.
    #[default]
    Nothing,
    /// Single pods by name (`Get`); `None` for one that the kubelet does not have. A pod that has
    /// ended is found until it was removed from the API server.
    Named(BTreeMap<PodName, Option<ListedPod>>),
    /// All pods (`List`). From Kubernetes 1.34 on, pods that have ended are left out.
    All(Vec<ListedPod>),
}

impl PodReport {
    /// The pods that the kubelet has.
    pub fn found(&self) -> impl Iterator<Item = &ListedPod> {
        let (named, all) = match self {
            PodReport::Nothing => (None, None),
            PodReport::Named(named) => (Some(named), None),
            PodReport::All(all) => (None, Some(all)),
        };
        named.into_iter().flat_map(BTreeMap::values).flatten().chain(all.into_iter().flatten())
    }

    /// Whether a pod with this namespace and name would be among [`PodReport::found`]; without a
    /// name, whether any pod would.
    #[must_use]
    pub fn covers(&self, name: Option<(&str, &str)>) -> bool {
        match (self, name) {
            (PodReport::Nothing, _) | (PodReport::Named(_), None) => false,
            (PodReport::Named(named), Some((namespace, name))) => named
                .keys()
                .any(|asked| (asked.namespace.as_str(), asked.name.as_str()) == (namespace, name)),
            (PodReport::All(_), _) => true,
        }
    }
}

/// A pod of the pod-resources API, which has no UIDs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedPod {
    /// Its namespace.
    pub namespace: String,
    /// Its name. The name of a static pod ends in the node's name.
    pub name: String,
    /// Its containers. Init containers that end are not listed.
    pub containers: Vec<ListedContainer>,
}

impl ListedPod {
    /// Its namespace and name.
    #[must_use]
    pub fn full_name(&self) -> PodName {
        PodName { namespace: self.namespace.clone(), name: self.name.clone() }
    }
}

/// A container of a listed pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListedContainer {
    /// Its name.
    pub name: String,
    /// Its device ids by resource.
    pub devices: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// Its exclusive processors (`cpu_ids`: the kubelet's static CPU policy). Shared processors are
    /// not included.
    pub cpus: BTreeSet<u32>,
}

/// The state of a pod's cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum CgroupState {
    /// A process runs in it, or below it: the pod is running.
    Populated,
    /// The cgroup exists and no process runs in it.
    Empty,
    /// The kubelet's hierarchy exists and does not contain the pod's cgroup.
    Absent,
    /// The kubelet's hierarchy was not found, so the state is unknown.
    #[default]
    Unknown,
}

impl CgroupState {
    /// Whether it proves that no process of the pod runs.
    #[must_use]
    pub fn is_dead(self) -> bool {
        matches!(self, CgroupState::Empty | CgroupState::Absent)
    }
}
