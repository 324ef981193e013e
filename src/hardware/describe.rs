//! Turns the record of a PCI function into its devices: its class decides which file reads the
//! rest.

use super::disks::Disks;
use super::facts::{Facts, Part, required};
use super::kfd::Kfd;
use super::numa::NumaNodes;
use super::pci::folder;
use super::rdma::RdmaNodes;
use super::routes::{self, DefaultRoutes};
use super::{Scan, accel, classify, drm, fpga, mdev, net, nvidia, nvme, rdma, sf, tegra, vfio};
use crate::domain::{
    Device, DeviceClass, DeviceId, DeviceNode, INTEGRATED_KEY, NvmlSnapshot, PciAddress,
    PciFunction,
};
use crate::host::{HostNode, HostRoot, Listings, ReadFailure};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// A value that is read once for a whole scan. A failed read of it counts for every device that
/// uses it.
#[derive(Debug, Default)]
pub(super) struct Shared<T> {
    value: T,
    failures: Vec<ReadFailure>,
}

impl<T> Shared<T> {
    fn read(root: &HostRoot, read: impl FnOnce(&HostRoot) -> T) -> Self {
        let value = read(root);
        Shared { value, failures: root.take_failures() }
    }

    /// The value, with its failures recorded in `root`.
    pub(super) fn get(&self, root: &HostRoot) -> &T {
        root.repeat_failures(&self.failures);
        &self.value
    }
}

/// The values that all devices of a scan share. Its root records failed reads.
pub(super) struct Describer<'a> {
    root: &'a HostRoot,
    scan: &'a Scan,
    nvml: &'a NvmlSnapshot,
    nvidia: Shared<nvidia::Gpus>,
    integrated: Shared<Option<Facts>>,
    nvlink_hives: BTreeMap<PciAddress, String>,
    rdma: Shared<RdmaNodes>,
    numa: Shared<NumaNodes>,
    kfd: Shared<Kfd>,
    disks: &'a Disks<'a>,
    routes: Shared<DefaultRoutes>,
    groups: vfio::Groups,
    /// The nodes that were checked, with their numbers; `None` for absent ones.
    nodes: RefCell<BTreeMap<String, Option<HostNode>>>,
    listings: RefCell<Listings>,
    missing: RefCell<BTreeSet<String>>,
}

impl<'a> Describer<'a> {
    pub(super) fn new(
        root: &'a HostRoot,
        scan: &'a Scan,
        nvml: &'a NvmlSnapshot,
        disks: &'a Disks<'a>,
    ) -> Self {
        let mut nvidia = Shared::read(root, nvidia::Gpus::read);
        let may_have = scan.is_tegra && !nvidia.value.has_integrated();
        let integrated =
            Shared::read(root, |root| may_have.then(|| tegra::platform_gpu(root)).flatten());
        nvidia.value.has_platform = integrated.value.is_some();
        Describer {
            root,
            scan,
            nvml,
            nvidia,
            integrated,
            nvlink_hives: nvml.hives(),
            rdma: Shared::read(root, RdmaNodes::read),
            numa: Shared::read(root, NumaNodes::read),
            kfd: Shared::read(root, |root| Kfd::read(root, scan)),
            disks,
            routes: Shared::read(root, DefaultRoutes::read),
            groups: vfio::Groups::of(scan),
            nodes: RefCell::default(),
            listings: RefCell::default(),
            missing: RefCell::default(),
        }
    }

    /// The machine's NUMA nodes.
    pub(super) fn numa(&self) -> &Shared<NumaNodes> {
        &self.numa
    }

    /// The nodes that a device requires and that are absent.
    pub(super) fn missing_nodes(&self) -> BTreeSet<String> {
        self.missing.borrow().clone()
    }

    /// A node as a container gets it; `None` if it is absent and optional. Allocate does not check
    /// that again.
    fn node(&self, node: DeviceNode) -> Option<DeviceNode> {
        let known = self.nodes.borrow().get(&node.host).cloned();
        let failed = self.root.failure_count();
        let found = known
            .unwrap_or_else(|| self.root.node_among(&mut self.listings.borrow_mut(), &node.host));
        if self.root.failure_count() > failed {
            return Some(node);
        }
        self.nodes.borrow_mut().entry(node.host.clone()).or_insert_with(|| found.clone());
        match found {
            Some(found) => Some(DeviceNode { number: found.number, ..node }),
            None if node.required => {
                self.missing.borrow_mut().insert(node.host.clone());
                Some(node)
            }
            None => None,
        }
    }

    /// The function as one device, followed by its parts, where it is cut into some.
    pub(super) fn devices(&self, function: &PciFunction) -> Vec<Device> {
        let class = classify::classify(self.root, function);
        let mut facts = self.facts(class, function);
        if vfio::is_bound(function) {
            self.groups.use_guest_nodes(self.root, function, &mut facts);
        } else if !function.mdevs.is_empty() {
            facts.cut("mdev", mdev::parts(self.root, function));
        }
        facts.note("parts", facts.parts_are);
        facts.note("hive", self.nvlink_hives.get(&function.address));
        let parts = std::mem::take(&mut facts.parts);
        // Without a node it is not offered, and a node has hundreds of bridges.
        let numa_nodes = if class == DeviceClass::Other && facts.nodes.is_empty() {
            Vec::new()
        } else {
            self.numa.get(self.root).near(self.root, function)
        };
        let device = |id: String, part: Option<&str>, facts: Facts| Device {
            id: DeviceId::new(id),
            key: key_of(function, part),
            class,
            pci: Some(Box::new(function.clone())),
            numa_nodes: numa_nodes.clone(),
            nodes: facts.nodes.into_iter().filter_map(|node| self.node(node)).collect(),
            attributes: facts.attributes,
        };
        let whole = facts.identity.clone().unwrap_or_else(|| function.address.to_string());
        let parts_are = facts.parts_are;
        let mut devices = vec![device(whole.clone(), None, facts)];
        for Part { name, mut facts } in parts {
            facts.note("part", parts_are);
            facts.note("parent", Some(&whole));
            let id = facts.identity.clone().unwrap_or_else(|| format!("{whole}-{name}"));
            devices.push(device(id, Some(&name), facts));
        }
        let scalable = function.sfs.iter().map(|name| self.scalable(function, name, &devices[0]));
        let scalable: Vec<Device> = scalable.collect();
        // Who moves the function into a pod takes the uplink of these.
        let mut ways = scalable.iter().filter_map(|device| device.attribute("default_route"));
        if let Some(way) = ways.next()
            && devices[0].attribute("default_route").is_none()
        {
            devices[0].attributes.insert("default_route", way);
        }
        devices.extend(scalable);
        devices
    }

    /// A scalable function on `function`, which is the device `on`: a device of its own, as a
    /// virtual function is.
    fn scalable(&self, function: &PciFunction, name: &str, on: &Device) -> Device {
        let dir = format!("{}/{name}", folder(function.address));
        let own = sf::function(self.root, &dir, function);
        let (class, mut facts) = if own.rdma.is_empty() {
            (DeviceClass::Nic, net::facts(self.root, &dir, &own))
        } else {
            (DeviceClass::Rdma, rdma::facts(self.root, &dir, &own, self.rdma.get(self.root)))
        };
        if !own.net.is_empty() {
            facts.note("default_route", self.routes.get(self.root).among(&own.net));
            facts.note("master", routes::master(self.root, &own.net));
        }
        net::add_vdpa(self.root, &own, &mut facts);
        facts.note("part", Some(sf::KIND));
        facts.note("parent", Some(&on.id));
        facts.note("auxiliary", Some(name));
        Device {
            // A CNI plugin gets the kubelet's id, and searches for it on the auxiliary bus.
            id: DeviceId::new(name),
            key: key_of(function, Some(name)),
            class,
            pci: Some(Box::new(own)),
            numa_nodes: on.numa_nodes.clone(),
            nodes: facts.nodes.into_iter().filter_map(|node| self.node(node)).collect(),
            attributes: facts.attributes,
        }
    }

    /// The GPU of a Tegra system that is no PCI function.
    pub(super) fn integrated(&self) -> Option<Device> {
        let failed = self.root.failure_count();
        self.nvidia.get(self.root);
        // After a failed read the facts may be wrong, and their nodes would count as missing.
        let facts = self.integrated.get(self.root).as_ref();
        let facts = facts.filter(|_| self.root.failure_count() == failed)?;
        Some(Device {
            id: DeviceId::new(tegra::ID),
            key: INTEGRATED_KEY.to_owned(),
            class: DeviceClass::Gpu,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: facts.nodes.iter().filter_map(|node| self.node(node.clone())).collect(),
            attributes: facts.attributes.clone(),
        })
    }

    fn facts(&self, class: DeviceClass, function: &PciFunction) -> Facts {
        let dir = folder(function.address);
        let mut facts = match class {
            DeviceClass::Gpu if function.vendor == Some(nvidia::VENDOR) => {
                // The numbers of the GPUs depend on it.
                self.integrated.get(self.root);
                nvidia::facts(self.root, function, self.nvidia.get(self.root), self.nvml)
            }
            DeviceClass::Gpu => {
                let is_amd = function.vendor == Some(drm::VENDOR_AMD);
                drm::facts(
                    self.root,
                    function,
                    if is_amd { self.kfd.get(self.root) } else { &self.kfd.value },
                )
            }
            DeviceClass::Rdma => rdma::facts(self.root, &dir, function, self.rdma.get(self.root)),
            DeviceClass::Nvme => nvme::facts(self.root, function, self.disks),
            DeviceClass::Fpga => {
                let mut facts = fpga::facts(self.root, function);
                facts.note("mgmt", fpga::management_of(self.scan, function));
                facts
            }
            DeviceClass::Nic => net::facts(self.root, &dir, function),
            DeviceClass::Accelerator => accel::facts(self.root, function),
            DeviceClass::Char | DeviceClass::Other => Facts::default(),
        };
        if has_index(class) && !function.is_vf() {
            facts.note("acpi_index", net::acpi_index(self.root, function));
        }
        if !function.net.is_empty() {
            facts.note("default_route", self.routes.get(self.root).among(&function.net));
            facts.note("master", routes::master(self.root, &function.net));
        }
        net::add_vdpa(self.root, function, &mut facts);
        facts.nodes.extend(function.uio.iter().map(|name| required(format!("/dev/{name}"))));
        facts
    }
}

/// Whether the plugin for SR-IOV selects functions of this class by the firmware's numbers.
fn has_index(class: DeviceClass) -> bool {
    matches!(class, DeviceClass::Rdma | DeviceClass::Nic | DeviceClass::Accelerator)
}

/// The key of a function, from its place and its ids, or of one of its parts.
fn key_of(function: &PciFunction, part: Option<&str>) -> String {
    let id = |number: Option<u16>| {
        number.map_or_else(|| "????".to_owned(), |number| format!("{number:04x}"))
    };
    let part = part.map(|part| format!("/{part}")).unwrap_or_default();
    format!("pci:{}/{}:{}{part}", function.address, id(function.vendor), id(function.device))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    fn describe(dir: &tempfile::TempDir, function: &PciFunction) -> Vec<Device> {
        let scan = Scan::of([(function.address, function.clone())].into());
        let root = HostRoot::new(dir.path());
        Describer::new(&root, &scan, &NvmlSnapshot::default(), &Disks::of(&root)).devices(function)
    }

    #[test]
    fn a_function_for_a_guest_has_vfio_nodes_in_any_class() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = PciFunction {
            vendor: Some(nvidia::VENDOR),
            class: Some(0x03_0200),
            driver: Some("vfio-pci".into()),
            iommu_group: Some(38),
            ..function("0000:08:00.0")
        };
        let device = describe(&dir, &gpu).remove(0);
        let nodes: Vec<_> = device.nodes.iter().map(|node| node.host.as_str()).collect();
        assert_eq!(
            (device.class, nodes),
            (DeviceClass::Gpu, vec!["/dev/vfio/vfio", "/dev/vfio/38"])
        );
        assert_eq!(device.key, "pci:0000:08:00.0/10de:????");
    }

    #[test]
    fn absent_optional_nodes_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let info = "Device Minor: \t 2\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0000:08:00.0/information", info);
        write(dir.path(), "dev/nvidia-uvm", "");
        let gpu = PciFunction {
            vendor: Some(nvidia::VENDOR),
            class: Some(0x03_0200),
            driver: Some(nvidia::DRIVER.into()),
            ..function("0000:08:00.0")
        };
        let device = describe(&dir, &gpu).remove(0);
        let nodes: Vec<_> = device.nodes.iter().map(|node| node.host.as_str()).collect();
        assert_eq!(nodes, ["/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm"]);
        assert_eq!((device.attribute("index"), device.attribute("parts")), (Some("0"), None));
    }

    #[test]
    fn parts_are_devices_named_after_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            "proc/driver/nvidia/gpus/0000:08:00.0/information",
            "GPU UUID: \t GPU-1\nDevice Minor: \t 2\n",
        );
        let mig = "proc/driver/nvidia/capabilities/gpu2/mig";
        write(dir.path(), &format!("{mig}/gi3/access"), "DeviceFileMinor: 30\n");
        write(dir.path(), &format!("{mig}/gi3/ci0/access"), "DeviceFileMinor: 31\n");
        let gpu = PciFunction {
            vendor: Some(nvidia::VENDOR),
            device: Some(0x2330),
            class: Some(0x03_0200),
            driver: Some(nvidia::DRIVER.into()),
            ..function("0000:08:00.0")
        };
        let devices = describe(&dir, &gpu);
        let names: Vec<_> =
            devices.iter().map(|device| (device.id.as_str(), device.key.as_str())).collect();
        let place = "pci:0000:08:00.0/10de:2330";
        assert_eq!(names, [("GPU-1", place), ("GPU-1-gi3-ci0", &format!("{place}/gi3-ci0"))]);
        assert_eq!(
            (devices[0].attribute("parts"), devices[0].attribute("part")),
            (Some("mig"), None)
        );
        assert_eq!(
            (devices[1].attribute("part"), devices[1].attribute("parent")),
            (Some("mig"), Some("GPU-1"))
        );
        assert_eq!(devices[1].class, DeviceClass::Gpu);
    }
}
