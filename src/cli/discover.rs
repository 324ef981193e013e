//! `holdfast discover`: what is on this host, as one JSON document or as a table.

use super::table::Table;
use crate::domain::{Device, DeviceClass, Health, PciAddress};
use crate::hardware::{Discovery, node_health};
use crate::host::HostRoot;
use serde::Serialize;

/// The version of the document's format.
const SCHEMA: u32 = 1;

/// The document of `discover -o json`. What is unknown is `null`, never 0 or an empty text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Document {
    /// The version of this format.
    pub schema: u32,
    /// The devices: PCI functions in the order of their addresses, then nodes of `/dev`.
    pub devices: Vec<Row>,
}

/// One device of the document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The stable id, as the kubelet is told.
    pub id: String,
    /// What it is.
    pub class: DeviceClass,
    /// PCI vendor, four hex digits.
    pub vendor_id: Option<String>,
    /// PCI device, four hex digits.
    pub device_id: Option<String>,
    /// PCI class with sub-class and programming interface, six hex digits.
    pub pci_class: Option<String>,
    /// PCI address.
    pub pci_address: Option<PciAddress>,
    /// NUMA node as the kernel states it.
    pub numa_node: Option<u32>,
    /// Kernel driver.
    pub driver: Option<String>,
    /// Whether it is an SR-IOV virtual function.
    pub is_vf: bool,
    /// The physical function of a virtual one.
    pub pf: Option<PciAddress>,
    /// The virtual functions of a physical one.
    pub vfs: Vec<PciAddress>,
    /// IOMMU group.
    pub iommu_group: Option<u32>,
    /// Network interfaces.
    pub net: Vec<String>,
    /// RDMA devices.
    pub rdma: Vec<String>,
    /// NVMe controllers.
    pub nvme: Vec<String>,
    /// Nodes that a container gets.
    pub nodes: Vec<String>,
    /// Bridges from the root port down.
    pub bridges: Vec<PciAddress>,
    /// The resource that offers it.
    pub resource: Option<String>,
    /// `Healthy` or `Unhealthy`; `null` for what no resource offers and where nothing can be known.
    pub health: Option<&'static str>,
    /// Why it is unhealthy.
    pub reason: Option<&'static str>,
}

/// Builds the document. Without `all` it holds the devices of known classes and what a resource offers; with it, every
/// PCI function.
#[must_use]
pub fn document(root: &HostRoot, discovery: &Discovery, all: bool) -> Document {
    let resources = discovery.selection.resource_of();
    let rows = discovery.devices.iter().filter_map(|device| {
        let resource = resources.get(device.key.as_str());
        if !all && resource.is_none() && device.class == DeviceClass::Other {
            return None;
        }
        let health = resource.and_then(|_| node_health(root, device));
        Some(row(device, resource.map(ToString::to_string), health))
    });
    Document { schema: SCHEMA, devices: rows.collect() }
}

fn row(device: &Device, resource: Option<String>, health: Option<Health>) -> Row {
    let pci = device.pci.as_ref();
    let hex16 = |number: u16| format!("{number:04x}");
    Row {
        id: device.id.to_string(),
        class: device.class,
        vendor_id: pci.and_then(|pci| pci.vendor).map(hex16),
        device_id: pci.and_then(|pci| pci.device).map(hex16),
        pci_class: pci.and_then(|pci| pci.class).map(|class| format!("{class:06x}")),
        pci_address: pci.map(|pci| pci.address),
        numa_node: pci.and_then(|pci| pci.numa_node),
        driver: pci.and_then(|pci| pci.driver.clone()),
        is_vf: pci.is_some_and(|pci| pci.is_vf()),
        pf: pci.and_then(|pci| pci.physfn),
        vfs: pci.map(|pci| pci.virtfns.clone()).unwrap_or_default(),
        iommu_group: pci.and_then(|pci| pci.iommu_group),
        net: pci.map(|pci| pci.net.clone()).unwrap_or_default(),
        rdma: pci.map(|pci| pci.rdma.clone()).unwrap_or_default(),
        nvme: pci.map(|pci| pci.nvme.clone()).unwrap_or_default(),
        nodes: device.nodes.iter().map(|node| node.host.clone()).collect(),
        bridges: pci.map(|pci| pci.bridges.clone()).unwrap_or_default(),
        resource,
        health: health.map(Health::as_str),
        reason: health.and_then(Health::reason).map(|reason| reason.as_str()),
    }
}

/// The same devices for people. The id stands last: a UUID or a serial number is the longest of the cells.
#[must_use]
pub fn table(document: &Document) -> Table {
    let mut table = Table::new(&["address", "class", "pci id", "driver", "numa", "interfaces", "resource", "health", "id"]);
    for row in &document.devices {
        let pci_id = row.vendor_id.as_ref().zip(row.device_id.as_ref()).map(|(vendor, device)| format!("{vendor}:{device}"));
        let address = row.pci_address.map(|address| address.to_string()).or_else(|| row.nodes.first().cloned());
        let class = if row.is_vf { format!("{} vf", row.class) } else { row.class.to_string() };
        let health = row.health.map(|health| row.reason.unwrap_or(health).to_owned());
        let interfaces = [&row.rdma, &row.nvme, &row.net].into_iter().find(|names| !names.is_empty()).map(|names| short_list(names));
        // An id that is the address says nothing new.
        let id = Some(row.id.clone()).filter(|id| Some(id) != address.as_ref());
        table.row(
            [address, Some(class), pci_id, row.driver.clone(), row.numa_node.map(|node| node.to_string())]
                .into_iter()
                .chain([interfaces, row.resource.clone(), health, id])
                .map(Option::unwrap_or_default),
        );
    }
    table
}

/// The first name, and how many there are besides: a physical function can have hundreds of representors.
fn short_list(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [only] => only.clone(),
        [first, rest @ ..] => format!("{first} +{}", rest.len()),
    }
}
