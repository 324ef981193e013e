//! The evidence of a scan: the devices that were found, and the nodes that are only held or listed.

use crate::domain::{
    Device, DeviceId, Evidence, Grant, GrantedDevice, Inventory, Moment, Object, ResourceName,
};
use crate::hardware::{self, HeldNode};
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The nodes of `/dev` that containers hold.
pub(crate) fn held_nodes(grants: &[Arc<Grant>]) -> Vec<HeldNode> {
    let devices =
        grants.iter().flat_map(|grant| grant.devices.iter().map(move |device| (grant, device)));
    let nodes =
        devices.filter(|(_, device)| device.key.starts_with("dev:") || device.key.is_empty());
    let held = nodes.map(|(grant, device)| HeldNode {
        id: device.id.shared().unwrap_or_else(|| device.id.clone()),
        objects: if device.objects.is_empty() { grant.objects() } else { device.objects.clone() },
    });
    held.collect()
}

/// The devices that containers hold, with the resource.
pub(crate) fn held_devices(
    grants: &[Arc<Grant>],
) -> impl Iterator<Item = (&ResourceName, &GrantedDevice)> {
    grants
        .iter()
        .flat_map(|grant| grant.devices.iter().map(move |device| (&grant.resource, device)))
}

/// Replaces each unchanged device by the one in the list. Otherwise ten thousand devices would be
/// in memory twice from the second scan on.
pub(super) fn keep_known(found: &mut [Arc<Device>], inventory: &Inventory) {
    let listed = inventory
        .resources
        .values()
        .flat_map(|offering| offering.devices.values().map(|offered| &offered.device));
    let known: BTreeMap<&DeviceId, &Arc<Device>> =
        listed.map(|device| (&device.id, device)).collect();
    for device in found {
        if let Some(known) = known.get(&device.id).filter(|known| ***known == *device) {
            *device = Arc::clone(known);
        }
    }
}

/// The evidence of a scan that began then. It includes nodes that no resource names any longer but
/// that are held or still in the list.
pub(crate) fn evidence<'a>(
    host_root: &HostRoot,
    began: Moment,
    found: &mut hardware::Discovery,
    held: impl Iterator<Item = (&'a ResourceName, &'a GrantedDevice)>,
    listed: impl Iterator<Item = (&'a ResourceName, &'a Device)>,
) -> Evidence {
    let root = host_root.recording();
    let mut devices: BTreeMap<DeviceId, Arc<Device>> =
        found.devices.iter().map(|device| (device.id.clone(), Arc::clone(device))).collect();
    // A listed node that was found under a new id is not read again under the old one.
    let keys: BTreeSet<&str> = found.devices.iter().map(|device| device.key.as_str()).collect();
    let held = held.map(|(resource, held)| {
        let node = held.objects.iter().find_map(Object::as_node);
        (
            resource,
            held.id.shared().unwrap_or_else(|| held.id.clone()),
            &held.key,
            node,
            &held.numa_nodes,
        )
    });
    let listed = listed.filter(|(_, device)| !keys.contains(device.key.as_str())).map(
        |(resource, device)| (resource, device.id.clone(), &device.key, None, &device.numa_nodes),
    );
    for (resource, id, key, node, numa_nodes) in held.chain(listed) {
        if devices.contains_key(&id) {
            continue;
        }
        let known = known_node(&id, key, node, numa_nodes, &root);
        if let Some(failure) = root.take_failures().first() {
            found.unread.resources.entry(resource.clone()).or_insert_with(|| failure.to_string());
        } else if let Some(device) = known {
            devices.insert(device.id.clone(), Arc::new(device));
        }
    }
    let ids = |devices: &Vec<Arc<Device>>| devices.iter().map(|device| device.id.clone()).collect();
    let selected = found
        .selection
        .resources
        .iter()
        .map(|(name, devices)| (name.clone(), ids(devices)))
        .collect();
    Evidence {
        began,
        devices,
        selected,
        missing_nodes: found.missing_nodes.clone(),
        unfulfilled: found.unfulfilled.clone(),
        unread: found.unread.clone(),
    }
}

/// The `/dev` node of an id that resources may no longer name: the node that its holder has, else
/// the node that its key leads to now.
fn known_node(
    id: &DeviceId,
    key: &str,
    node: Option<&str>,
    numa_nodes: &[u32],
    root: &HostRoot,
) -> Option<Device> {
    // Other devices have a key of another kind. In a rebuilt ledger the key is unknown.
    let path = key.strip_prefix("dev:").or(node.filter(|_| key.is_empty()))?;
    let of = |path: &str| hardware::known_node(root, id.clone(), key, path, numa_nodes);
    node.and_then(of).or_else(|| of(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        Attributes, DeviceClass, DeviceNode, Health, Offered, Offering, ResourceSpec,
    };

    fn device(id: &str, node: &str) -> Arc<Device> {
        let nodes = vec![DeviceNode::at(node)];
        let (key, attributes) = (format!("dev:{node}"), Attributes::default());
        Arc::new(Device {
            id: DeviceId::new(id),
            key,
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes,
            attributes,
        })
    }

    #[test]
    fn a_device_that_has_not_changed_is_in_memory_once() {
        let name: ResourceName = "example.com/x".parse().unwrap();
        let offered =
            |(id, device)| (DeviceId::new(id), Offered { device, health: Health::Healthy });
        let (same, moved, shared) =
            (device("same", "/dev/a"), device("moved", "/dev/b"), device("shared", "/dev/c"));
        let listed = [
            ("same", same.clone()),
            ("moved", moved.clone()),
            ("shared::0", shared.clone()),
            ("shared::1", shared.clone()),
        ];
        let spec = Arc::new(ResourceSpec::new(name.clone(), DeviceClass::Char));
        let offering = Offering { spec, devices: listed.into_iter().map(offered).collect() };
        let inventory = Inventory { resources: [(name, Arc::new(offering))].into() };

        let mut found = [
            device("same", "/dev/a"),
            device("moved", "/dev/z"),
            device("shared", "/dev/c"),
            device("new", "/dev/n"),
        ];
        let before = found.clone();
        keep_known(&mut found, &inventory);
        assert_eq!(found, before, "the known devices do not change the result");
        let kept = [&same, &moved, &shared]
            .map(|known| found.iter().any(|device| Arc::ptr_eq(device, known)));
        assert_eq!(kept, [true, false, true]);
    }
}
