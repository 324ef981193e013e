//! `kubevirt`: answers as KubeVirt's own device plugins for host devices. The launcher of a virtual
//! machine finds its functions and USB devices in a variable that is named after the resource, and
//! opens VFIO's nodes, or those of the USB devices.

use super::{Request, address, attribute, nodes};
use crate::domain::{ContainerEdits, Device};
use std::collections::BTreeMap;

pub(super) fn edits(request: &Request<'_>) -> ContainerEdits {
    let name = request.spec.name.as_str().to_ascii_uppercase().replace(['/', '.'], "_");
    let mut by_variable: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in request.devices {
        let (prefix, value) = match (attribute(device, "mdev_uuid"), usb(device)) {
            (Some(uuid), _) => ("MDEV_PCI_RESOURCE", uuid.to_owned()),
            (None, Some((_, place))) => ("USB_RESOURCE", place),
            (None, None) => ("PCI_RESOURCE", address(device)),
        };
        let values = by_variable.entry(format!("{prefix}_{name}")).or_default();
        values.push(value);
        // The guest has the whole IOMMU group, and no other guest can have these.
        values.extend(attribute(device, "group_twins").map(str::to_owned));
    }
    let is_of_driver = |host: &str| {
        let has = |device: &&&Device| device.nodes.iter().any(|node| node.host == host);
        let device = request.devices.iter().find(has);
        device.and_then(|device| usb(device)).is_some_and(|(own, _)| own != host)
    };
    let mut devices = nodes::with(request.devices, "mrw");
    devices.retain(|node| !is_of_driver(&node.host));
    ContainerEdits {
        envs: by_variable
            .into_iter()
            .map(|(variable, values)| (variable, values.join(",")))
            .collect(),
        devices,
        ..ContainerEdits::default()
    }
}

/// The node of a USB device, and its bus and number as the launcher reads them: `1:5`. The guest
/// takes the device from the host's drivers, so their nodes are of no use to it.
fn usb(device: &Device) -> Option<(&str, String)> {
    device.nodes.iter().find_map(|node| {
        let (bus, number) = node.host.strip_prefix("/dev/bus/usb/")?.split_once('/')?;
        let (bus, number): (u32, u32) = (bus.parse().ok()?, number.parse().ok()?);
        Some((node.host.as_str(), format!("{bus}:{number}")))
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, edits_of, function, golden, spec};
    use crate::domain::ContractKind;

    #[test]
    fn functions_are_named_by_their_addresses() {
        let first = function(
            "0000:08:00.0",
            "vfio-pci",
            &["/dev/vfio/vfio", "/dev/vfio/38", "/dev/vfio/devices/vfio0"],
        );
        let second = function("0000:41:00.0", "vfio-pci", &["/dev/vfio/vfio", "/dev/vfio/51"]);
        let edits = edits_of(
            &spec("nvidia.com/TU104GL_Tesla-T4", ContractKind::Kubevirt),
            &[&second, &first],
        );
        assert_eq!(golden(&edits), include_str!("golden/kubevirt.json").trim_end());
    }

    #[test]
    fn the_functions_of_one_kind_in_an_iommu_group_go_to_one_guest() {
        let mut first = function("0000:08:00.0", "vfio-pci", &["/dev/vfio/vfio", "/dev/vfio/38"]);
        first.attributes.insert("group_twins", "0000:09:00.0,0000:0a:00.0");
        let edits = edits_of(&spec("a.b/gpu", ContractKind::Kubevirt), &[&first]);
        assert_eq!(edits.envs["PCI_RESOURCE_A_B_GPU"], "0000:08:00.0,0000:09:00.0,0000:0a:00.0");
    }

    #[test]
    fn mediated_devices_are_named_by_their_uuids() {
        let uuid = "e898f311-6b9e-46a2-b728-144d01af1a7c";
        let vgpu = device(uuid, &["/dev/vfio/vfio", "/dev/vfio/106"], &[("mdev_uuid", uuid)]);
        let edits = edits_of(&spec("nvidia.com/NVIDIA_A2-4Q", ContractKind::Kubevirt), &[&vgpu]);
        assert_eq!(golden(&edits), include_str!("golden/kubevirt-mdev.json").trim_end());
    }

    #[test]
    fn usb_devices_are_named_by_bus_and_number_and_have_their_own_node_only() {
        let stick = device("usb-10c4:ea60-1", &["/dev/bus/usb/001/005", "/dev/ttyUSB0"], &[]);
        let other = device("usb-10c4:ea60-2", &["/dev/bus/usb/003/012"], &[]);
        let edits =
            edits_of(&spec("kubevirt.io/zigbee", ContractKind::Kubevirt), &[&other, &stick]);
        assert_eq!(edits.envs["USB_RESOURCE_KUBEVIRT_IO_ZIGBEE"], "3:12,1:5");
        let nodes: Vec<&str> = edits.devices.iter().map(|node| node.container.as_str()).collect();
        assert_eq!(nodes, ["/dev/bus/usb/003/012", "/dev/bus/usb/001/005"]);
    }
}
