//! The processors that containers have exclusively, to compare with a device's NUMA node when it is
//! slow.

use crate::domain::{Grant, ListedPod, PodName, PodReport};
use crate::hardware;
use crate::host::HostRoot;
use crate::kubelet::pod_resources::PodResources;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::RwLock;

/// How long a question about processors may take. They are a hint, and a kubelet that restarts must
/// not delay the rows.
const WAIT: Duration = Duration::from_millis(500);

/// The exclusive processors of one container, by the kubelet's static CPU policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processors {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// The numbers of the processors, as the kernel counts them.
    pub cpus: BTreeSet<u32>,
    /// The NUMA nodes of these processors.
    pub numa_nodes: BTreeSet<u32>,
}

impl Processors {
    /// The numbers in the kernel's format: `2-3,10`.
    #[must_use]
    pub fn list(&self) -> String {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in &self.cpus {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == *cpu => *last = *cpu,
                _ => ranges.push((*cpu, *cpu)),
            }
        }
        let text = |(first, last): &(u32, u32)| {
            if first == last { first.to_string() } else { format!("{first}-{last}") }
        };
        ranges.iter().map(text).collect::<Vec<_>>().join(",")
    }
}

/// The client that queries the kubelet for them.
#[derive(Debug, Clone)]
pub(crate) struct CpuQuery {
    pub(crate) pod_resources: PodResources,
    /// Held by each Allocate.
    pub(crate) gate: Arc<RwLock<()>>,
    pub(crate) host_root: HostRoot,
}

impl CpuQuery {
    /// The containers of these grants' pods that have exclusive processors; `None` if the kubelet
    /// does not answer. Of more than some 50 pods the kubelet answers for the first ones only. Pods
    /// of claims are left out: a claim names no container.
    pub(super) async fn run(&self, grants: &[Arc<Grant>]) -> Option<Vec<Processors>> {
        let placed = grants.iter().filter(|grant| grant.is_placed());
        let names: BTreeSet<PodName> =
            placed.filter_map(|grant| grant.pod()?.full_name()).collect();
        let report = self.pod_resources.report(names, WAIT, &self.gate).await;
        let is_answered = report != PodReport::Nothing;
        is_answered.then(|| report.found().flat_map(|pod| self.of(pod)).collect())
    }

    fn of<'a>(&'a self, pod: &'a ListedPod) -> impl Iterator<Item = Processors> + 'a {
        let ListedPod { namespace, name, containers } = pod;
        let with_some = containers.iter().filter(|container| !container.cpus.is_empty());
        with_some.map(|container| Processors {
            namespace: namespace.clone(),
            pod: name.clone(),
            container: container.name.clone(),
            cpus: container.cpus.clone(),
            numa_nodes: hardware::numa_nodes_of(&self.host_root, &container.cpus),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_written_as_the_kernel_writes_them() {
        let list = |cpus: &[u32]| {
            Processors {
                namespace: "default".into(),
                pod: "train-0".into(),
                container: "main".into(),
                cpus: cpus.iter().copied().collect(),
                numa_nodes: BTreeSet::new(),
            }
            .list()
        };
        assert_eq!(
            [list(&[2]), list(&[2, 3, 4, 10, 12, 13]), list(&[])],
            ["2", "2-4,10,12-13", ""]
        );
    }
}
