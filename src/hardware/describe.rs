//! From the record of a PCI function to a device: its class decides which file knows the rest.

use super::facts::{Facts, required};
use super::numa::NumaNodes;
use super::rdma::RdmaNodes;
use super::{classify, drm, fpga, nvidia, nvme, rdma};
use crate::domain::{Device, DeviceClass, DeviceId, DeviceNode, PciFunction};
use crate::host::HostRoot;

/// What one look at the host serves for every device of a pass.
pub(super) struct Describer<'a> {
    root: &'a HostRoot,
    rdma: RdmaNodes,
    numa: NumaNodes,
}

impl<'a> Describer<'a> {
    pub(super) fn new(root: &'a HostRoot) -> Self {
        Describer { root, rdma: RdmaNodes::read(root), numa: NumaNodes::read(root) }
    }

    pub(super) fn device(&self, function: &PciFunction) -> Device {
        let class = classify::classify(self.root, function);
        let mut facts = self.facts(class, function);
        if function.driver.as_deref() == Some("vfio-pci") {
            facts.nodes = vfio_nodes(function);
        }
        let root = self.root;
        let id = |number: Option<u16>| number.map_or_else(|| "????".to_owned(), |number| format!("{number:04x}"));
        Device {
            id: DeviceId::new(facts.identity.unwrap_or_else(|| function.address.to_string())),
            key: format!("pci:{}/{}:{}", function.address, id(function.vendor), id(function.device)),
            class,
            pci: Some(function.clone()),
            numa_nodes: if class == DeviceClass::Other { Vec::new() } else { self.numa.near(root, function) },
            // A node that may be missing is offered where it is there: what allocates a device does not look.
            nodes: facts.nodes.into_iter().filter(|node| node.required || root.node_exists(&node.host)).collect(),
            attributes: facts.attributes,
        }
    }

    fn facts(&self, class: DeviceClass, function: &PciFunction) -> Facts {
        match class {
            DeviceClass::Gpu if function.vendor == Some(nvidia::VENDOR) => nvidia::facts(self.root, function),
            DeviceClass::Gpu => drm::facts(self.root, function),
            DeviceClass::Rdma => rdma::facts(self.root, function, &self.rdma),
            DeviceClass::Nvme => nvme::facts(self.root, function),
            DeviceClass::Fpga => fpga::facts(self.root, function),
            DeviceClass::Nic | DeviceClass::Accelerator | DeviceClass::Char | DeviceClass::Other => Facts::default(),
        }
    }
}

/// The nodes of a function that is handed to a guest: VFIO's own and that of its group, which exists while a member is
/// bound (Linux `Documentation/driver-api/vfio.rst`).
fn vfio_nodes(function: &PciFunction) -> Vec<DeviceNode> {
    let group = function.iommu_group.map(|group| required(format!("/dev/vfio/{group}")));
    std::iter::once(required("/dev/vfio/vfio")).chain(group).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    fn describe(dir: &tempfile::TempDir, function: &PciFunction) -> Device {
        Describer::new(&HostRoot::new(dir.path())).device(function)
    }

    #[test]
    fn a_function_for_a_guest_has_vfios_nodes_whatever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = PciFunction {
            vendor: Some(nvidia::VENDOR),
            class: Some(0x03_0200),
            driver: Some("vfio-pci".into()),
            iommu_group: Some(38),
            ..function("0000:08:00.0")
        };
        let device = describe(&dir, &gpu);
        let nodes: Vec<_> = device.nodes.iter().map(|node| node.host.as_str()).collect();
        assert_eq!((device.class, nodes), (DeviceClass::Gpu, vec!["/dev/vfio/vfio", "/dev/vfio/38"]));
        assert_eq!(device.key, "pci:0000:08:00.0/10de:????");
    }

    #[test]
    fn nodes_that_may_be_missing_are_left_out_where_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let info = "Device Minor: \t 2\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0000:08:00.0/information", info);
        write(dir.path(), "proc/driver/nvidia/capabilities/gpu2/mig/gi3/access", "DeviceFileMinor: 30\n");
        write(dir.path(), "dev/nvidia-uvm", "");
        let gpu = PciFunction {
            vendor: Some(nvidia::VENDOR),
            class: Some(0x03_0200),
            driver: Some(nvidia::DRIVER.into()),
            ..function("0000:08:00.0")
        };
        let device = describe(&dir, &gpu);
        let nodes: Vec<_> = device.nodes.iter().map(|node| node.host.as_str()).collect();
        assert_eq!(nodes, ["/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm"]);
        assert_eq!(device.attributes["mig"], "enabled", "cut into instances: no resource offers the whole");
    }
}
