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
