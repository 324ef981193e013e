//! Hardware: sysfs records become devices, one file for each subject.
//!
//! ```text
//!  sys/bus/pci ─ pci ─▶ Scan ─ describe (classify; nvidia, drm, kfd, rdma, net, routes, nvme, disks, fpga, accel, mdev, vfio, numa) ─┐
//!  dev ─ chardev ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────┴▶ devices
//!  devices ─ identity (unique, remembered ids) ─ select (resources) ─▶ Discovery
//!  a device ─ signals ─▶ what speaks against it now;  a uevent ─ event, a line of the kernel's log ─ xid ─▶ what happened to it
//! ```
//!
//! Everything here is a function of the host's files, the configuration, the remembered ids and what NVML has told (a value:
//! nobody is asked here); nothing is kept between two passes, and nothing is written.

mod accel;
mod chardev;
mod classify;
pub mod defaults;
mod describe;
mod disks;
mod drm;
mod each;
mod event;
mod facts;
mod fpga;
mod identity;
mod kfd;
mod mdev;
mod net;
mod numa;
mod nvidia;
mod nvme;
mod pci;
mod rdma;
mod routes;
mod select;
mod signals;
#[cfg(test)]
pub(crate) mod testing;
mod vfio;
mod xid;

pub use disks::used_for;
pub use each::{Each, each};
pub use event::event;
pub use identity::remember;
pub use pci::{Scan, scan};
pub use select::{NearMiss, Selection, near_misses, select};
pub use signals::signals;
pub use xid::xid;

use crate::domain::{Device, DeviceClass, DeviceId, Health, NvmlQuestion, NvmlSnapshot, PciAddress, ResourceName, ResourceSpec};
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Everything that one pass found and what the configuration makes of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovery {
    /// The PCI functions as sysfs shows them.
    pub scan: Scan,
    /// A device for every PCI function, of the class `other` too, in the order of their addresses, each followed by its
    /// parts; then the nodes of the `char` resources.
    pub devices: Vec<Arc<Device>>,
    /// The resources, those for each node among them: see [`each`].
    pub specs: Vec<Arc<ResourceSpec>>,
    /// Which resource offers which of them.
    pub selection: Selection,
    /// Names of selected devices that are not remembered yet (I6): to be made durable before they are published.
    pub named: Vec<(String, DeviceId)>,
}

/// The NUMA nodes that these processors belong to; none where sysfs does not tell.
#[must_use]
pub fn numa_nodes_of(root: &HostRoot, processors: &BTreeSet<u32>) -> BTreeSet<u32> {
    numa::NumaNodes::read(root).of(processors)
}

/// The NUMA node that the kernel states for a function; −1 ("the firmware told nothing") is `None`.
#[must_use]
pub fn stated_numa_node(root: &HostRoot, address: PciAddress) -> Option<u32> {
    numa::stated(root, address)
}

/// What NVIDIA's driver does not tell in its files and NVML is to be asked for, where this is offered.
#[must_use]
pub fn nvml_question(root: &HostRoot, offered: &Selection) -> NvmlQuestion {
    nvidia::question(root, offered)
}

/// One pass over the host. `remembered` holds the ids that were given before, by [`Device::key`].
#[must_use]
pub fn discover(root: &HostRoot, specs: &[Arc<ResourceSpec>], remembered: &BTreeMap<String, DeviceId>) -> Discovery {
    discover_in(root, scan(root), specs, remembered)
}

/// [`discover`] with the PCI functions of a scan that was made already, as [`defaults::specs`] needs one first.
#[must_use]
pub fn discover_in(root: &HostRoot, scan: Scan, specs: &[Arc<ResourceSpec>], remembered: &BTreeMap<String, DeviceId>) -> Discovery {
    discover_told(root, scan, specs, remembered, &NvmlSnapshot::default())
}

/// [`discover_in`] with what NVML has told, of what [`nvml_question`] asks for.
#[must_use]
pub fn discover_told(
    root: &HostRoot,
    scan: Scan,
    specs: &[Arc<ResourceSpec>],
    remembered: &BTreeMap<String, DeviceId>,
    nvml: &NvmlSnapshot,
) -> Discovery {
    let Each { specs, mut warnings } = each(root, specs).unwrap_or_else(|error| {
        let specs = specs.iter().filter(|spec| !spec.name.is_for_each_node()).cloned().collect();
        Each { specs, warnings: vec![format!("/dev cannot be looked at, so nothing is known of resources for each node: {error}")] }
    });
    let disks = disks::Disks::of(root);
    let describer = describe::Describer::new(root, &scan, nvml, &disks);
    let mut devices: Vec<Device> = scan.functions.values().flat_map(|function| describer.devices(function)).collect();
    let found = chardev::discover(root, &specs, &disks);
    let mut chars: BTreeMap<String, ResourceName> = BTreeMap::new();
    for (resource, nodes) in found.by_resource {
        for node in nodes {
            chars.insert(node.key.clone(), resource.clone());
            devices.push(node);
        }
    }
    identity::make_unique(&mut devices);
    let mut named = remember(&mut devices, remembered);
    let devices: Vec<Arc<Device>> = devices.into_iter().map(Arc::new).collect();
    let mut selection = select(&devices, &chars, &specs);
    warnings.extend(found.warnings);
    selection.warnings.splice(0..0, warnings);
    if specs.iter().any(|spec| spec.class == DeviceClass::Gpu) {
        selection.warnings.extend(nvidia::without_instances(&devices));
    }
    // What is not published needs no memory: a node has hundreds of bridges.
    let selected = selection.resource_of();
    named.retain(|(key, _)| selected.contains_key(key.as_str()));
    Discovery { devices, specs, selection, named, scan }
}

/// What a device's record and its nodes say of its health: a required node that is missing makes it useless. `None` where
/// the tree holds no `/dev` at all, as most captures do: then nothing can be said.
#[must_use]
pub fn node_health(root: &HostRoot, device: &Device) -> Option<Health> {
    if !root.is_dir("dev") {
        return None;
    }
    let has_nodes = device.nodes.iter().all(|node| !node.required || root.node_exists(&node.host));
    Some(device.health(has_nodes))
}
