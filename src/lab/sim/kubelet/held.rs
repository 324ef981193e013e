//! The devices that each container holds: the device manager's table, and the content of its
//! checkpoint.

use crate::domain::{AllocId, ContainerEdits, DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};

/// The kubelet's key for a device without a NUMA node.
pub const NO_NUMA_NODE: i64 = -1;

/// The devices that one container holds of one resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Ids by NUMA node; an id with two nodes is under both, an id without one is under
    /// [`NO_NUMA_NODE`].
    pub by_numa: BTreeMap<i64, Vec<DeviceId>>,
    /// The plugin's answer, replayed at every start of the container.
    pub edits: ContainerEdits,
}

impl Held {
    /// Every id once.
    #[must_use]
    pub fn ids(&self) -> BTreeSet<DeviceId> {
        self.by_numa.values().flatten().cloned().collect()
    }

    /// Holdfast's annotation in the plugin's answer.
    #[must_use]
    pub fn alloc_id(&self) -> Option<AllocId> {
        self.edits.annotations.get(AllocId::ANNOTATION).map(|id| AllocId::new(id.as_str()))
    }

    /// Every id with its NUMA nodes.
    #[must_use]
    pub fn numa_nodes(&self) -> BTreeMap<DeviceId, BTreeSet<i64>> {
        let mut nodes: BTreeMap<DeviceId, BTreeSet<i64>> = BTreeMap::new();
        for (node, ids) in &self.by_numa {
            for id in ids {
                let of_id = nodes.entry(id.clone()).or_default();
                if *node != NO_NUMA_NODE {
                    of_id.insert(*node);
                }
            }
        }
        nodes
    }
}

/// Pod UID, then container, then resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDevices(BTreeMap<String, BTreeMap<String, BTreeMap<ResourceName, Held>>>);

impl PodDevices {
    /// Records the devices that a container got. It replaces an older record of the same resource.
    pub fn insert(&mut self, pod_uid: &str, container: &str, resource: &ResourceName, held: Held) {
        let containers = self.0.entry(pod_uid.to_owned()).or_default();
        containers.entry(container.to_owned()).or_default().insert(resource.clone(), held);
    }

    /// Everything that one container holds.
    pub fn container(
        &self,
        pod_uid: &str,
        container: &str,
    ) -> impl Iterator<Item = (&ResourceName, &Held)> {
        self.0.get(pod_uid).and_then(|containers| containers.get(container)).into_iter().flatten()
    }

    /// The devices that one container holds of one resource.
    #[must_use]
    pub fn get(&self, pod_uid: &str, container: &str, resource: &ResourceName) -> Option<&Held> {
        self.0.get(pod_uid)?.get(container)?.get(resource)
    }

    /// Forgets every pod that is not among `active`. Returns whether there was one.
    pub fn retain(&mut self, active: &BTreeSet<String>) -> bool {
        let before = self.0.len();
        self.0.retain(|uid, _| active.contains(uid));
        self.0.len() < before
    }

    /// Every held id by resource.
    #[must_use]
    pub fn ids(&self) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        let mut ids: BTreeMap<ResourceName, BTreeSet<DeviceId>> = BTreeMap::new();
        for (_, _, resource, held) in self.iter() {
            ids.entry(resource.clone()).or_default().extend(held.ids());
        }
        ids
    }

    /// Every record: pod UID, container, resource, devices.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, &ResourceName, &Held)> {
        self.0.iter().flat_map(|(uid, containers)| {
            containers.iter().flat_map(move |(container, resources)| {
                resources
                    .iter()
                    .map(move |(resource, held)| (uid.as_str(), container.as_str(), resource, held))
            })
        })
    }

    /// The edits that a container is started with: the answers of its resources merged in this
    /// order. Where two set the same variable, path, annotation or CDI name, the first one counts.
    #[must_use]
    pub fn edits(&self, pod_uid: &str, container: &str, order: &[ResourceName]) -> ContainerEdits {
        let mut merged = ContainerEdits::default();
        for held in order.iter().filter_map(|resource| self.get(pod_uid, container, resource)) {
            let edits = &held.edits;
            for (key, value) in &edits.envs {
                merged.envs.entry(key.clone()).or_insert_with(|| value.clone());
            }
            for device in &edits.devices {
                if merged.devices.iter().all(|known| known.container != device.container) {
                    merged.devices.push(device.clone());
                }
            }
            for mount in &edits.mounts {
                if merged.mounts.iter().all(|known| known.container != mount.container) {
                    merged.mounts.push(mount.clone());
                }
            }
            for (key, value) in &edits.annotations {
                merged.annotations.entry(key.clone()).or_insert_with(|| value.clone());
            }
            for name in &edits.cdi_devices {
                if !merged.cdi_devices.contains(name) {
                    merged.cdi_devices.push(name.clone());
                }
            }
        }
        merged
    }
}
