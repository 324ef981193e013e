//! `kubevirt`: answers as KubeVirt's own device plugins for host devices. The launcher of a virtual
//! machine finds its functions in a variable that is named after the resource, and opens VFIO's
//! nodes.

use super::{Request, address, attribute, nodes};
use crate::domain::ContainerEdits;
use std::collections::BTreeMap;

pub(super) fn edits(request: &Request<'_>) -> ContainerEdits {
    let name = request.spec.name.as_str().to_ascii_uppercase().replace(['/', '.'], "_");
    let mut by_variable: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for device in request.devices {
        let (prefix, value) = match attribute(device, "mdev_uuid") {
            Some(uuid) => ("MDEV_PCI_RESOURCE", uuid.to_owned()),
            None => ("PCI_RESOURCE", address(device)),
        };
        by_variable.entry(format!("{prefix}_{name}")).or_default().push(value);
    }
    ContainerEdits {
        envs: by_variable
            .into_iter()
            .map(|(variable, values)| (variable, values.join(",")))
            .collect(),
        devices: nodes::with(request.devices, "mrw"),
        ..ContainerEdits::default()
    }
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
    fn mediated_devices_are_named_by_their_uuids() {
        let uuid = "e898f311-6b9e-46a2-b728-144d01af1a7c";
        let vgpu = device(uuid, &["/dev/vfio/vfio", "/dev/vfio/106"], &[("mdev_uuid", uuid)]);
        let edits = edits_of(&spec("nvidia.com/NVIDIA_A2-4Q", ContractKind::Kubevirt), &[&vgpu]);
        assert_eq!(golden(&edits), include_str!("golden/kubevirt-mdev.json").trim_end());
    }
}
