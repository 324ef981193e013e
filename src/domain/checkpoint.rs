//! The kubelet's checkpoint of devices, indexed for lookups. It may have entries of 100,000
//! containers.

use super::device_id::DeviceId;

use super::grant::{AllocId, Grant};
use super::resource_name::ResourceName;
use super::time::Timestamp;
use std::collections::BTreeSet;

/// The content of the kubelet's checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Sorted by UID.
    entries: Vec<CheckpointEntry>,
    /// Ids of grants, each with the position of its entry, sorted.
    grants: Vec<(AllocId, usize)>,
    /// Device ids, each with the position of its entry, sorted.
    devices: Vec<(DeviceId, usize)>,
    written_at: Timestamp,
}

/// One container's share of one resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// The pod's UID. For a static pod it is the hash of its manifest, as everywhere on the node.
    pub pod_uid: String,
    /// The container's name. Init containers are included.
    pub container: String,
    /// The resource, of any plugin.
    pub resource: ResourceName,
    /// The device ids.
    pub device_ids: BTreeSet<DeviceId>,
    /// Our annotation in the stored response; `None` when another plugin answered.
    pub alloc_id: Option<AllocId>,
}

impl CheckpointEntry {
    /// The id of its grant: from our annotation, or derived if another plugin answered.
    #[must_use]
    pub fn grant_id(&self) -> AllocId {
        self.alloc_id.clone().unwrap_or_else(|| {
            AllocId::of_other_plugin(&self.pod_uid, &self.container, &self.resource)
        })
    }
}

impl Checkpoint {
    /// Takes entries in any order, and the time when the file was written.
    #[must_use]
    pub fn new(mut entries: Vec<CheckpointEntry>, written_at: Timestamp) -> Self {
        entries.sort_by(|one, other| one.pod_uid.cmp(&other.pod_uid));
        let mut grants: Vec<(AllocId, usize)> =
            entries.iter().enumerate().map(|(at, entry)| (entry.grant_id(), at)).collect();
        grants.sort();
        let mut devices: Vec<(DeviceId, usize)> = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            devices.extend(entry.device_ids.iter().map(|id| (id.clone(), at)));
        }
        devices.sort();
        Checkpoint { entries, grants, devices, written_at }
    }

    /// Its entries. The kubelet keeps the entries of a removed pod until it next writes the file.
    #[must_use]
    pub fn entries(&self) -> &[CheckpointEntry] {
        &self.entries
    }

    /// When the file was written.
    #[must_use]
    pub fn written_at(&self) -> Timestamp {
        self.written_at
    }

    /// The entries of a pod.
    #[must_use]
    pub fn of_pod(&self, uid: &str) -> &[CheckpointEntry] {
        let begin = self.entries.partition_point(|entry| *entry.pod_uid < *uid);
        let of_pod = self.entries[begin..].partition_point(|entry| *entry.pod_uid == *uid);
        &self.entries[begin..begin + of_pod]
    }

    /// The ids of its grants, including the grants of other plugins.
    pub fn grant_ids(&self) -> impl Iterator<Item = &AllocId> {
        self.grants.iter().map(|(id, _)| id)
    }

    /// The entry of a grant.
    #[must_use]
    pub fn answered(&self, alloc_id: &AllocId) -> Option<&CheckpointEntry> {
        let after = self.grants.partition_point(|(id, _)| id <= alloc_id);
        let (id, at) = &self.grants[after.checked_sub(1)?];
        (id == alloc_id).then(|| &self.entries[*at])
    }

    /// The entries of a resource that contain a device id.
    pub fn having<'a>(
        &'a self,
        resource: &'a ResourceName,
        id: &'a DeviceId,
    ) -> impl Iterator<Item = &'a CheckpointEntry> {
        let begin = self.devices.partition_point(|(other, _)| other < id);
        let with_id = self.devices[begin..].iter().take_while(move |(other, _)| other == id);
        with_id.map(|(_, at)| &self.entries[*at]).filter(move |entry| entry.resource == *resource)
    }

    /// The grant that the kubelet keeps instead of this one for the same container and resource.
    /// The kubelet keeps one answer for each resource, and starts the container with it.
    #[must_use]
    pub fn in_place_of(&self, grant: &Grant) -> Option<&AllocId> {
        let (pod, container) = grant.pod().zip(grant.container())?;
        let of_container = |entry: &&CheckpointEntry| {
            (&*entry.container, &entry.resource) == (container, &grant.resource)
        };
        let kept = || self.of_pod(&pod.uid).iter().filter(of_container);
        if kept().any(|entry| entry.grant_id() == grant.alloc_id) {
            return None;
        }
        kept().find_map(|entry| entry.alloc_id.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries() -> impl Strategy<Value = Vec<CheckpointEntry>> {
        let entry = (
            0..4_u8,
            0..2_u8,
            prop::collection::btree_set(0..4_u8, 0..3),
            prop::option::of(0..6_u8),
        )
            .prop_map(|(pod, resource, ids, alloc_id)| CheckpointEntry {
                pod_uid: format!("u{pod}"),
                container: "main".into(),
                resource: format!("example.com/r{resource}").parse().unwrap(),
                device_ids: ids.iter().map(|id| DeviceId::new(format!("d{id}"))).collect(),
                alloc_id: alloc_id.map(|id| AllocId::new(format!("a{id}"))),
            });
        prop::collection::vec(entry, 0..12)
    }

    proptest! {
        #[test]
        fn every_index_finds_what_a_search_of_all_entries_finds(entries in entries()) {
            let checkpoint = Checkpoint::new(entries, Timestamp(7));
            let all = checkpoint.entries();
            for n in 0..7 {
                let uid = format!("u{n}");
                prop_assert!(checkpoint.of_pod(&uid).iter().eq(all.iter().filter(|entry| entry.pod_uid == uid)));
                let alloc_id = AllocId::new(format!("a{n}"));
                let answered = all.iter().rev().find(|entry| entry.alloc_id.as_ref() == Some(&alloc_id));
                prop_assert_eq!(checkpoint.answered(&alloc_id), answered);
                let of_other = AllocId::of_other_plugin(&uid, "main", &"example.com/r0".parse().unwrap());
                let given = all.iter().rev().find(|entry| entry.grant_id() == of_other);
                prop_assert_eq!(checkpoint.answered(&of_other), given);
                let (resource, id) = ("example.com/r1".parse().unwrap(), DeviceId::new(format!("d{n}")));
                let having = all.iter().filter(|entry| entry.resource == resource && entry.device_ids.contains(&id));
                prop_assert!(checkpoint.having(&resource, &id).eq(having));
            }
        }
    }
}
