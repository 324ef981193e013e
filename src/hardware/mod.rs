//! Discovery of hardware: turns sysfs records into devices, with one file for each subject.
//!
//! ```text
//!  sys/bus/pci ─ pci ─▶ Scan ─ describe ─┐
//!  dev ─ chardev ────────────────────────┴▶ devices
//!  devices ─ identity (unique, remembered ids) ─ select (resources) ─▶ Discovery
//!  a device ─ signals ─▶ symptoms that speak against it now
//!  the driver's root ─ nvidia_driver ─▶ files for containers
//!  a uevent ─ event, a line of the kernel log ─ xid ─▶ an event of a device
//! ```
//!
//! `describe` uses `classify`, then one file for each subject: `nvidia`, `drm`, `kfd`, `rdma`,
//! `tegra`, `net`, `sf`, `routes`, `nvme`, `disks`, `fpga`, `accel`, `mdev`, `vfio` and `numa`.
//! `nvidia_node` describes a node for its labels.
//!
//! All results are functions of five inputs: the host's files, the configuration, the remembered
//! ids, NVML's answers, and the scan before. NVML's answers come as a value; no code here calls
//! NVML. What cannot be read now is taken from the scan before. No state is kept between two scans,
//! and nothing is written.

mod accel;
mod char_devices;
mod chardev;
mod classify;
pub mod defaults;
mod describe;
mod disks;
mod drm;
mod event;
mod facts;
mod fpga;
mod identity;
mod kernel_names;
mod kfd;
mod ld_cache;
mod matches;
mod mdev;
mod net;
mod node_names;
mod numa;
mod nvidia;
mod nvidia_driver;
mod nvidia_features;
mod nvidia_node;
mod nvidia_programs;
mod nvme;
mod patterns;
mod pci;
mod profiles;
mod rdma;
mod routes;
mod select;
mod sf;
mod signals;
mod tegra;
#[cfg(test)]
pub(crate) mod testing;
mod udev;
mod uevent;
mod usb;
mod vfio;
mod virtual_functions;
mod xid;

pub use chardev::{known_node, objects_of_node};
pub(crate) use disks::DISK_LINKS;
pub use disks::used_for;
pub use event::event;
pub use identity::remember;
pub use net::interface;
pub use node_names::{HeldNode, NamedNode, NodeName, name_nodes};
pub use nvidia::{driver_version as nvidia_driver_version, nvidia_gpu};
pub use nvidia_driver::{KnownHook, no_nvidia_driver, nvidia_driver};
pub use nvidia_features::{gds_files, imex_channel, nvidia_feature_nodes, nvidia_features};
pub use nvidia_node::nvidia_node;
pub use nvidia_programs::{NvidiaPrograms, nvidia_programs};
pub use patterns::{ExpandedSpecs, expand_patterns};
pub use pci::{Scan, scan, scan_after};
pub use profiles::spec_named;
pub use select::{NearMiss, Nearest, Selection, near_misses, select, uplink};
pub use signals::signals;
pub use xid::{is_driver_start, xid};

use crate::contract;
use crate::domain::{
    Device, DeviceClass, DeviceId, Health, INTEGRATED_KEY, NvmlQuery, NvmlSnapshot, PciAddress,
    ResourceName, ResourceSpec, Unread,
};
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The result of one scan under one configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Discovery {
    /// The PCI functions as sysfs shows them.
    pub scan: Scan,
    /// A device for every PCI function, also of the class `other`, in the order of their addresses;
    /// each is followed by its parts. Then the GPU of a system on a chip, and the nodes of the
    /// `char` resources.
    pub devices: Vec<Arc<Device>>,
    /// The resources, with those for each node among them: see [`expand_patterns`].
    pub specs: Vec<Arc<ResourceSpec>>,
    /// Which resource offers which of these devices.
    pub selection: Selection,
    /// New ids of selected devices, by key. They must be durable before they are published (I6).
    pub named: Vec<(String, DeviceId)>,
    /// Nodes that a device requires and that are absent.
    pub missing_nodes: BTreeSet<String>,
    /// What a container would miss of a selected device, or of one that is not selected because it
    /// lacks this, although all its known nodes exist.
    pub unfulfilled: BTreeMap<DeviceId, String>,
    /// What could not be read. It stays as in the former scan (I12).
    pub unread: Unread,
}

/// The inputs of a scan besides the host's files and the configuration.
#[derive(Debug, Clone, Copy)]
pub struct DiscoverInput<'a> {
    /// The ids that were assigned before, by [`Device::key`].
    pub names: &'a BTreeMap<String, DeviceId>,
    /// NVML's answers to [`nvml_query`].
    pub nvml: &'a NvmlSnapshot,
    /// The nodes of `/dev` that containers hold.
    pub held: &'a [HeldNode],
    /// The scan before: what cannot be read now is taken from it.
    pub former: Option<&'a Discovery>,
}

impl<'a> DiscoverInput<'a> {
    /// For a first scan: only the ids that were assigned before are known.
    #[must_use]
    pub fn first(names: &'a BTreeMap<String, DeviceId>) -> Self {
        static NO_NVML: NvmlSnapshot = NvmlSnapshot::empty();
        DiscoverInput { names, nvml: &NO_NVML, held: &[], former: None }
    }
}

/// The NUMA nodes of these processors; empty where sysfs does not state them.
#[must_use]
pub fn numa_nodes_of(root: &HostRoot, processors: &BTreeSet<u32>) -> BTreeSet<u32> {
    numa::NumaNodes::read(root).of(processors)
}

/// The NUMA node that the kernel states for a function. A value of −1 (the firmware states no node)
/// is `None`.
#[must_use]
pub fn stated_numa_node(root: &HostRoot, address: PciAddress) -> Option<u32> {
    numa::stated(root, address)
}

/// What NVML must return, because the files of NVIDIA's driver do not contain it. `offered`
/// limits the query about links to offered GPUs. Labels of the node need every GPU `described`.
#[must_use]
pub fn nvml_query(root: &HostRoot, offered: &Selection, described: bool) -> NvmlQuery {
    nvidia::query(root, offered, described)
}

/// Scans the host once. `remembered` holds the ids that were assigned before, by [`Device::key`].
#[must_use]
pub fn discover(
    root: &HostRoot,
    specs: &[Arc<ResourceSpec>],
    remembered: &BTreeMap<String, DeviceId>,
) -> Discovery {
    discover_with(root, scan(root), specs, &DiscoverInput::first(remembered))
}

/// [`discover`] with an existing PCI scan and all other inputs. [`defaults::specs`] needs that scan
/// before there are resources.
#[must_use]
pub fn discover_with(
    root: &HostRoot,
    scan: Scan,
    specs: &[Arc<ResourceSpec>],
    known: &DiscoverInput<'_>,
) -> Discovery {
    let ExpandedSpecs { specs, mut warnings } = expand_patterns(root, specs, known.nvml)
        .unwrap_or_else(|failure| {
            let specs = specs.iter().filter(|spec| !spec.name.is_pattern()).cloned().collect();
            ExpandedSpecs {
                specs,
                warnings: vec![format!(
                    "resources with `{{node}}` in their names cannot be determined: {failure}"
                )],
            }
        });
    let root = &root.recording();
    let disks = disks::Disks::of(root);
    let describer = describe::Describer::new(root, &scan, known.nvml, &disks);
    let mut unread = scan.unread.clone();
    let mut devices = functions(root, &scan, &describer, known.former, &mut unread);
    devices.extend(integrated(root, &describer, known.former, &mut unread));
    let former: Vec<(ResourceName, Arc<Device>)> =
        known.former.map(former_nodes).unwrap_or_default();
    let search = chardev::Search {
        specs: &specs,
        disks: &disks,
        scan: &scan,
        numa: describer.numa(),
        held: known.held,
        names: known.names,
        former: &former,
    };
    let found = chardev::discover(root, &search);
    unread.resources = found.unread;
    let mut chars: BTreeMap<String, ResourceName> = BTreeMap::new();
    for (resource, nodes) in found.by_resource {
        for node in nodes {
            chars.insert(node.key.clone(), resource.clone());
            devices.push(node);
        }
    }
    identity::merge_paths(&mut devices, known.names);
    identity::make_unique(&mut devices);
    let mut named = remember(&mut devices, known.names);
    let devices = shared(devices, known.former);
    let mut selection = select(&devices, &chars, &specs);
    unread.resources.extend(profiles::unknown(&devices, &specs));
    let mut unfulfilled = unfulfilled(root, &selection, &specs, &mut unread);
    let without_namespace = devices
        .iter()
        .filter_map(|device| Some((device.id.clone(), nvme::missing(device)?.into())));
    unfulfilled.extend(without_namespace);
    warnings.extend(found.warnings);
    selection.warnings.splice(0..0, warnings);
    if specs.iter().any(|spec| spec.class == DeviceClass::Gpu) {
        selection.warnings.extend(nvidia::without_instances(&devices));
        selection.warnings.extend(kfd::without_partitions(&devices));
    }
    selection.warnings.extend(
        unread.reasons().into_iter().map(|why| format!("{why}; its last known state is kept")),
    );
    // Only ids of selected devices are remembered: a node has hundreds of bridges.
    let selected = selection.resource_of();
    named.retain(|(key, _)| selected.contains_key(key.as_str()));
    let mut missing_nodes = describer.missing_nodes();
    let kept = devices
        .iter()
        .filter(|device| unread.why_of(device).is_some())
        .flat_map(|device| &device.nodes);
    missing_nodes.extend(
        known
            .former
            .iter()
            .flat_map(|former| {
                kept.clone().filter(|node| former.missing_nodes.contains(&node.host))
            })
            .map(|node| node.host.clone()),
    );
    Discovery { devices, specs, selection, named, scan, missing_nodes, unfulfilled, unread }
}

/// The devices; an unchanged one shares the memory of the former scan.
fn shared(devices: Vec<Device>, former: Option<&Discovery>) -> Vec<Arc<Device>> {
    let former: BTreeMap<&str, &Arc<Device>> = former
        .into_iter()
        .flat_map(|former| &former.devices)
        .map(|device| (device.key.as_str(), device))
        .collect();
    let shared = devices.into_iter().map(|device| match former.get(device.key.as_str()) {
        Some(known) if ***known == device => Arc::clone(known),
        _ => Arc::new(device),
    });
    shared.collect()
}

/// The devices of the PCI functions. A function with a failed read keeps the devices of the former
/// scan.
fn functions(
    root: &HostRoot,
    scan: &Scan,
    describer: &describe::Describer<'_>,
    former: Option<&Discovery>,
    unread: &mut Unread,
) -> Vec<Device> {
    let mut devices = Vec::new();
    for (address, function) in &scan.functions {
        if unread.functions.is_none() && !unread.of_function.contains_key(address) {
            let described = describer.devices(function);
            let Some(failure) = root.take_failures().into_iter().next() else {
                devices.extend(described);
                continue;
            };
            unread.of_function.insert(*address, failure.to_string());
        }
        let former = former.into_iter().flat_map(|former| &former.devices);
        let is_its =
            |device: &&Arc<Device>| device.pci.as_ref().is_some_and(|pci| pci.address == *address);
        devices.extend(former.filter(is_its).map(|device| (**device).clone()));
    }
    devices
}

/// The GPU of a system on a chip that is no PCI function. After a failed read it is that of the
/// former scan.
fn integrated(
    root: &HostRoot,
    describer: &describe::Describer<'_>,
    former: Option<&Discovery>,
    unread: &mut Unread,
) -> Option<Device> {
    if unread.integrated.is_none() {
        let described = describer.integrated();
        let Some(failure) = root.take_failures().into_iter().next() else { return described };
        unread.integrated = Some(failure.to_string());
    }
    let mut former = former.into_iter().flat_map(|former| &former.devices);
    former.find(|device| device.key == INTEGRATED_KEY).map(|device| (**device).clone())
}

/// What containers would miss of the selected devices. After a failed read the nodes that go with
/// the devices of a resource do not count as missing.
fn unfulfilled(
    root: &HostRoot,
    selection: &Selection,
    specs: &[Arc<ResourceSpec>],
    unread: &mut Unread,
) -> BTreeMap<DeviceId, String> {
    let mut found = BTreeMap::new();
    for spec in specs {
        let devices = selection.resources.get(&spec.name).map(Vec::as_slice).unwrap_or_default();
        for device in devices {
            let absent = || {
                let mut nodes = contract::companions(spec, device);
                let node = nodes.find(|node| node.required && !root.node_exists(&node.host));
                node.map(|node| node.host)
            };
            let missing = contract::missing(spec, device).map(str::to_owned).or_else(absent);
            if let Some(failure) = root.take_failures().first() {
                unread.resources.entry(spec.name.clone()).or_insert_with(|| failure.to_string());
            } else if let Some(missing) = missing {
                found.insert(device.id.clone(), missing);
            }
        }
    }
    found
}

/// The nodes of `/dev` that a scan offered, with their resources.
fn former_nodes(former: &Discovery) -> Vec<(ResourceName, Arc<Device>)> {
    let offered = former
        .selection
        .resources
        .iter()
        .flat_map(|(name, devices)| devices.iter().map(move |device| (name, device)));
    let nodes = offered.filter(|(_, device)| device.class == DeviceClass::Char);
    nodes.map(|(name, device)| (name.clone(), Arc::clone(device))).collect()
}

impl Discovery {
    /// The [`node_health`] of a device, under the contract of its resource.
    #[must_use]
    pub fn health(&self, root: &HostRoot, device: &Device) -> Option<Health> {
        let health = node_health(root, device)?;
        let is_unfulfilled = health.is_healthy() && self.unfulfilled.contains_key(&device.id);
        Some(if is_unfulfilled { device.health(false) } else { health })
    }
}

/// The health of a device by its record and its nodes: without a required node it is unhealthy.
/// `None` where the tree has no `/dev`, as in most captures; then nothing is known.
#[must_use]
pub fn node_health(root: &HostRoot, device: &Device) -> Option<Health> {
    if !root.is_dir("dev") {
        return None;
    }
    let has_nodes = device.nodes.iter().all(|node| !node.required || root.node_exists(&node.host));
    Some(device.health(has_nodes))
}

#[cfg(test)]
mod tests {
    use super::testing::{char_spec, spec, write};
    use super::*;
    use crate::domain::{CharPath, MemberPath, NodePattern, Select};

    #[test]
    fn a_node_that_a_device_needs_and_that_is_not_there_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        for (address, number) in [("0000:33:00.0", 0), ("0000:34:00.0", 1)] {
            let place = format!("sys/bus/pci/devices/{address}");
            write(
                dir.path(),
                &format!("{place}/uevent"),
                "DRIVER=habanalabs\nPCI_CLASS=120000\nPCI_ID=1DA3:1020\n",
            );
            write(dir.path(), &format!("{place}/accel/accel{number}/dev"), "261:0\n");
        }
        for node in ["accel0", "accel_controlD0"] {
            write(dir.path(), &format!("dev/accel/{node}"), "");
        }
        let specs = [spec("a.com/gaudi", DeviceClass::Accelerator, Select::default())];
        let found = discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
        assert_eq!(
            found.missing_nodes,
            ["/dev/accel/accel1".to_owned()].into(),
            "the control node is not needed"
        );
        let nodes: Vec<usize> = found.devices.iter().map(|device| device.nodes.len()).collect();
        assert_eq!(nodes, [2, 1], "a required node stays; an absent optional node is left out");
        assert_eq!(found.unread, Unread::default());
    }

    #[test]
    fn a_function_of_any_pci_class_is_offered_by_its_ids() {
        let dir = tempfile::tempdir().unwrap();
        for (address, class, id, driver, group) in [
            ("0000:01:00.1", "40300", "10DE:10FA", "vfio-pci", 7),
            ("0000:02:00.1", "40300", "10DE:10FA", "snd_hda_intel", 8),
            ("0000:00:01.0", "60400", "10DE:10FB", "pcieport", 9),
        ] {
            let place = format!("sys/bus/pci/devices/{address}");
            let text = format!("DRIVER={driver}\nPCI_CLASS={class}\nPCI_ID={id}\n");
            write(dir.path(), &format!("{place}/uevent"), &text);
            write(dir.path(), &format!("{place}/numa_node"), "0\n");
            write(dir.path(), &format!("{place}/local_cpulist"), "0\n");
            write(dir.path(), &format!("dev/vfio/{group}"), "");
            let groups = dir.path().join(format!("sys/kernel/iommu_groups/{group}/devices"));
            std::fs::create_dir_all(groups).unwrap();
            let link = dir.path().join(&place).join("iommu_group");
            let target = format!("../../../../kernel/iommu_groups/{group}");
            std::os::unix::fs::symlink(target, link).unwrap();
        }
        write(dir.path(), "dev/vfio/vfio", "");
        write(dir.path(), "sys/devices/system/node/node0/cpulist", "0\n");
        let select = Select { vendor: vec![0x10de], device: vec![0x10fa], ..Select::default() };
        let audio = spec("example.com/audio", DeviceClass::Other, select);
        let root = HostRoot::new(dir.path());
        let found = discover(&root, std::slice::from_ref(&audio), &BTreeMap::new());
        let devices = &found.selection.resources[&audio.name];
        assert_eq!(devices.len(), 1, "{:?}", found.selection.warnings);
        let nodes: Vec<&str> = devices[0].nodes.iter().map(|node| node.host.as_str()).collect();
        assert_eq!(devices[0].id.as_str(), "0000:01:00.1");
        assert_eq!(
            (nodes, &*devices[0].numa_nodes),
            (vec!["/dev/vfio/vfio", "/dev/vfio/7"], &[0][..])
        );
        let expected = "0000:02:00.1 is not offered, because it has no known node";
        let text = found.selection.warnings.join("\n");
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_missing_node_that_goes_with_a_device_makes_it_unhealthy() {
        let dir = tempfile::tempdir().unwrap();
        for node in ["davinci0", "davinci1", "log1"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        let node = |host: &str, optional| MemberPath {
            path: char_spec("a.b/c", &[host]).paths[0].clone(),
            optional,
        };
        let mut npu = (*char_spec("huawei.com/npu", &["/dev/davinci[0-9]"])).clone();
        npu.nodes = vec![node("/dev/log{index}", true), node("/dev/manager", false)];
        let (root, specs) = (HostRoot::new(dir.path()), [Arc::new(npu)]);
        let found = || discover(&root, &specs, &BTreeMap::new());
        let before = found();
        let devices = &before.selection.resources[&specs[0].name];
        assert_eq!(devices.len(), 2, "{:?}", before.selection.warnings);
        for device in devices {
            assert_eq!(before.unfulfilled[&device.id], "/dev/manager");
            assert!(!before.health(&root, device).unwrap().is_healthy());
        }
        let (blind, _) = crate::host::faults::with_faults(
            |call| (call > 0).then_some(24),
            || discover(&root, &specs, &BTreeMap::new()),
        );
        assert_eq!(blind.unfulfilled, BTreeMap::new(), "a failed read is no missing node");
        write(dir.path(), "dev/manager", "");
        let after = found();
        assert_eq!(after.unfulfilled, BTreeMap::new());
        assert!(devices.iter().all(|device| after.health(&root, device).unwrap().is_healthy()));
    }

    #[test]
    fn an_unchanged_device_shares_the_memory_of_the_former_scan() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "dev/a", "");
        write(dir.path(), "dev/b", "");
        let root = HostRoot::new(dir.path());
        let path = |host: &str| CharPath {
            host: NodePattern::Glob(host.into()),
            container: None,
            permissions: "rw".into(),
            udev: Vec::new(),
        };
        let specs = [Arc::new(ResourceSpec {
            paths: vec![path("/dev/*")],
            ..ResourceSpec::new("a.com/x".parse().unwrap(), DeviceClass::Char)
        })];
        let names = BTreeMap::new();
        let first = discover(&root, &specs, &names);
        std::fs::remove_file(dir.path().join("dev/b")).unwrap();
        std::os::unix::fs::symlink("a", dir.path().join("dev/b")).unwrap();
        let second = discover_with(
            &root,
            scan(&root),
            &specs,
            &DiscoverInput { former: Some(&first), ..DiscoverInput::first(&names) },
        );
        let [a] = &second.devices[..] else { panic!("{:?}", second.devices) };
        assert_eq!(first.devices.iter().filter(|device| Arc::ptr_eq(device, a)).count(), 1);
    }
}
