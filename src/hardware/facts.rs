//! The facts of one device beyond its PCI record, as the file of its subject reads them.

use crate::domain::{Attributes, Device, DeviceClass, DeviceNode, PciAddress};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Identity, nodes and attributes of one device.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// An identity of the device itself; `None` if only its place names it.
    pub(super) identity: Option<String>,
    /// Nodes that a container needs, in order.
    pub(super) nodes: Vec<DeviceNode>,
    /// Attributes by name, as listed at `Device::attributes`.
    pub(super) attributes: Attributes,
    /// The parts: each is a device of its own, and then the whole is not offered.
    pub(super) parts: Vec<Part>,
    /// The kind of the parts. `None` for a device that is not cut. A GPU in MIG mode without an
    /// instance has a kind but no parts.
    pub(super) parts_are: Option<&'static str>,
}

/// A part of a function that is offered on its own: a MIG instance, a mediated device, a partition,
/// a port, a namespace.
#[derive(Debug)]
pub(super) struct Part {
    /// The name among the parts of the function, for as long as the part exists: `gi1-ci0`.
    pub(super) name: String,
    /// The facts of the part.
    pub(super) facts: Facts,
}

impl Facts {
    /// Notes an attribute where it is known.
    pub(super) fn note(&mut self, name: &'static str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.attributes.insert(name, value.to_string());
        }
    }

    /// Cuts it into parts.
    pub(super) fn cut(&mut self, kind: &'static str, parts: Vec<Part>) {
        self.parts_are = Some(kind);
        self.parts = parts;
    }
}

/// A node without which the device cannot be used.
pub(super) fn required(path: impl Into<String>) -> DeviceNode {
    DeviceNode::at(path)
}

/// A node that a container gets where it exists.
pub(super) fn optional(path: impl Into<String>) -> DeviceNode {
    DeviceNode::at(path).optional()
}

/// Warnings for the operator about GPUs that are cut but have no part of this kind, one sentence
/// each.
pub(super) fn without_parts(devices: &[Arc<Device>], kind: &str, why: &str) -> Vec<String> {
    let of_gpu = |device: &&Arc<Device>, name: &str| {
        device.class == DeviceClass::Gpu && device.attribute(name) == Some(kind)
    };
    let address = |device: &Arc<Device>| device.pci.as_ref().map(|pci| pci.address);
    let cut: BTreeSet<PciAddress> =
        devices.iter().filter(|device| of_gpu(device, "part")).filter_map(address).collect();
    let empty = devices.iter().filter(|device| {
        of_gpu(device, "parts") && address(device).is_some_and(|gpu| !cut.contains(&gpu))
    });
    empty.map(|gpu| format!("{} is not offered, because {why}", gpu.id)).collect()
}
