//! Small values for the tests of the contracts.

use super::{NvidiaExtras, Request, edits};
use crate::domain::{
    AllocId, ContainerEdits, Contract, Device, DeviceClass, DeviceId, DeviceNode, MountSpec,
    PciFunction, ResourceSpec,
};
use std::collections::BTreeMap;

/// The id of the answer.
pub(super) const ALLOC_ID: &str = "0199c2ae-7b4c-7f00-8000-000000000001";

/// A resource of this name under this contract.
pub(super) fn spec(name: &str, contract: impl Into<Contract>) -> ResourceSpec {
    ResourceSpec {
        contract: contract.into(),
        ..ResourceSpec::new(name.parse().unwrap(), DeviceClass::Other)
    }
}

/// The same with environment and mounts from the configuration.
pub(super) fn with_extras(spec: ResourceSpec) -> ResourceSpec {
    let calibration = MountSpec {
        host: "/etc/calibration".into(),
        container: "/etc/calibration".into(),
        read_only: true,
    };
    ResourceSpec {
        env: BTreeMap::from([("EXAMPLE".into(), "1".into())]),
        mounts: vec![calibration],
        ..spec
    }
}

/// A device with these nodes and attributes.
pub(super) fn device(id: &str, nodes: &[&str], attributes: &[(&'static str, &str)]) -> Device {
    Device {
        id: DeviceId::new(id),
        key: format!("dev:{id}"),
        class: DeviceClass::Other,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: nodes.iter().map(|path| DeviceNode::at(*path)).collect(),
        attributes: attributes.iter().map(|(key, value)| (*key, *value)).collect(),
    }
}

/// A PCI function under a driver, whose id is its address.
pub(super) fn function(address: &str, driver: &str, nodes: &[&str]) -> Device {
    let pci = PciFunction {
        driver: Some(driver.to_owned()),
        ..PciFunction::at(address.parse().unwrap())
    };
    Device { pci: Some(Box::new(pci)), ..device(address, nodes, &[]) }
}

/// The edits of a container if every node exists.
pub(super) fn edits_of(spec: &ResourceSpec, devices: &[&Device]) -> ContainerEdits {
    edits_where(spec, devices, |_| true)
}

/// The edits of a container if only these nodes exist.
pub(super) fn edits_where(
    spec: &ResourceSpec,
    devices: &[&Device],
    node_exists: impl Fn(&str) -> bool,
) -> ContainerEdits {
    let nvidia = &NvidiaExtras::default();
    let alloc_id = &AllocId::new(ALLOC_ID);
    edits(&Request { spec, devices, alloc_id, node_exists: &node_exists, nvidia })
}

/// The edits of a container on a node that has these parts of NVIDIA's driver.
pub(super) fn edits_with(
    spec: &ResourceSpec,
    devices: &[&Device],
    nvidia: &NvidiaExtras,
) -> ContainerEdits {
    let alloc_id = &AllocId::new(ALLOC_ID);
    edits(&Request { spec, devices, alloc_id, node_exists: &|_| true, nvidia })
}

/// The golden form of an answer: this text is the ABI.
pub(super) fn golden(edits: &ContainerEdits) -> String {
    serde_json::to_string_pretty(edits).unwrap()
}

/// The nodes' paths in the container.
pub(super) fn paths(edits: &ContainerEdits) -> Vec<&str> {
    edits.devices.iter().map(|node| node.container.as_str()).collect()
}
