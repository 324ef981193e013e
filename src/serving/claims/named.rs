//! The devices of the node by their names in the DRA API, for claims that the ledger has lost.

use super::ClaimDevices;
use super::found::{Found, find};
use crate::domain::{
    ContainerEdits, DeviceClass, DeviceId, DraName, GrantedDevice, NamedDevice, NamedDevices,
};
use std::collections::BTreeMap;

/// The devices of the node with a wanted name. A device whose contract cannot be fulfilled now is
/// among them, without content: a container may have it.
pub fn named_devices(
    devices: &dyn ClaimDevices,
    is_wanted: impl Fn(&DraName) -> bool,
    name_of: &dyn Fn(&DeviceId, DeviceClass) -> DraName,
) -> NamedDevices {
    let inventory = devices.inventory();
    let found = find(&inventory, is_wanted, name_of).into_iter();
    found.map(|(name, found)| (name, named(devices, found))).collect::<BTreeMap<_, _>>()
}

fn named(devices: &dyn ClaimDevices, Found { offering, id, offered }: Found<'_>) -> NamedDevice {
    let resource = offering.spec.name.clone();
    match devices.claimed(offering, id, offered, &[]) {
        Ok((mut edits, device)) => {
            // The record has the names of the answer.
            edits.cdi_devices.clear();
            NamedDevice { resource, device, edits }
        }
        Err(why) => {
            tracing::warn!(%resource, %id, why, "restored a device of a claim without its content");
            let device = &offered.device;
            let nodes = device.nodes.iter().filter(|node| node.required);
            let device = GrantedDevice {
                id: id.clone(),
                key: device.key.clone(),
                numa_nodes: device.numa_nodes.clone(),
                nodes: nodes.map(|node| node.host.clone()).collect(),
                objects: device.objects(),
            };
            NamedDevice { resource, device, edits: ContainerEdits::default() }
        }
    }
}
