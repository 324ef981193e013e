//! What a container gets for its devices: one file for each contract, all of them pure.
//!
//! A contract's output is an ABI: the kubelet keeps the response and replays it at every start of the container, for
//! as long as the pod lives and across versions of Holdfast (I6).

mod generic;
mod nvidia;

use crate::domain::{ContainerEdits, ContractKind, Device, EditDevice, EditMount, ResourceSpec};

/// What one container gets for `devices` (in the order of its request) of the resource `spec`.
#[must_use]
pub fn edits(spec: &ResourceSpec, devices: &[&Device]) -> ContainerEdits {
    // Several shares of one device are one device to the container.
    let mut distinct: Vec<&Device> = Vec::new();
    for device in devices {
        if !distinct.iter().any(|known| known.id == device.id) {
            distinct.push(device);
        }
    }
    let mut edits = match spec.contract {
        ContractKind::Generic => generic::edits(&distinct),
        ContractKind::Nvidia => nvidia::edits(&distinct),
    };
    // What the configuration says explicitly wins over the contract.
    edits.envs.extend(spec.env.clone());
    for mount in &spec.mounts {
        edits.mounts.retain(|known| known.container != mount.container);
        edits.mounts.push(EditMount { host: mount.host.clone(), container: mount.container.clone(), read_only: mount.read_only });
    }
    edits
}

/// The nodes of `devices`, each container path once: shared nodes (`/dev/kfd`, `rdma_cm`) come with every device.
fn nodes(devices: &[&Device]) -> Vec<EditDevice> {
    let mut nodes: Vec<EditDevice> = Vec::new();
    for node in devices.iter().flat_map(|device| &device.nodes) {
        if !nodes.iter().any(|known| known.container == node.container) {
            nodes.push(EditDevice { host: node.host.clone(), container: node.container.clone(), permissions: node.permissions.clone() });
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::topology::Placement;
    use crate::domain::{DeviceClass, DeviceId, DeviceNode, MountSpec, Select};
    use std::collections::BTreeMap;

    fn spec(contract: ContractKind) -> ResourceSpec {
        ResourceSpec {
            name: "example.com/device".parse().unwrap(),
            class: DeviceClass::Char,
            contract,
            select: Select::default(),
            exclude: None,
            paths: Vec::new(),
            replicas: 2,
            placement: Placement::default(),
            env: BTreeMap::from([("EXAMPLE".into(), "1".into())]),
            mounts: vec![MountSpec { host: "/etc/calibration".into(), container: "/etc/calibration".into(), read_only: true }],
        }
    }

    fn device(id: &str, nodes: &[&str], attributes: &[(&str, &str)]) -> Device {
        Device {
            id: DeviceId::new(id),
            key: format!("dev:{id}"),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: nodes.iter().map(|path| DeviceNode::at(*path)).collect(),
            attributes: attributes.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        }
    }

    /// The golden form of a response: what is printed here is the ABI.
    fn golden(edits: &ContainerEdits) -> String {
        serde_json::to_string_pretty(edits).unwrap()
    }

    #[test]
    fn generic_gives_each_node_once_and_the_configured_environment_and_mounts() {
        let (a, b) = (device("a", &["/dev/a", "/dev/shared"], &[]), device("b", &["/dev/b", "/dev/shared"], &[]));
        let edits = edits(&spec(ContractKind::Generic), &[&b, &a, &b]);
        assert_eq!(golden(&edits), include_str!("golden/generic.json").trim_end());
    }

    #[test]
    fn nvidia_names_the_gpus_in_the_order_of_the_request() {
        let first = device("GPU-1", &["/dev/nvidia0"], &[("uuid", "GPU-1"), ("minor", "0")]);
        let second = device("GPU-2", &["/dev/nvidia1"], &[("uuid", "GPU-2"), ("minor", "1")]);
        let edits = edits(&spec(ContractKind::Nvidia), &[&second, &first, &second]);
        assert_eq!(golden(&edits), include_str!("golden/nvidia.json").trim_end());
    }

    #[test]
    fn a_gpu_without_a_known_uuid_is_named_by_its_minor_number() {
        let gpu = device("0000:18:00.0", &["/dev/nvidia3"], &[("minor", "3")]);
        let edits = edits(&spec(ContractKind::Nvidia), &[&gpu]);
        assert_eq!(edits.envs["NVIDIA_VISIBLE_DEVICES"], "3");
    }
}
