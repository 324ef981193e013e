//! One device of the picture: its facts, its health and its holders, in the words of a reader.

use super::holder::Holder;
use crate::domain::{Device, DeviceClass, PciAddress};
use serde::Serialize;

/// One device of the picture. Unknown values are `null`, as in the document of `discover`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Leaf {
    /// The kubelet's id of the device.
    pub id: String,
    /// Its class.
    pub class: DeviceClass,
    /// PCI address.
    pub pci_address: Option<PciAddress>,
    /// Bridges from the root port down.
    pub bridges: Vec<PciAddress>,
    /// The nearest NUMA node.
    pub numa_node: Option<u32>,
    /// Whether it is an SR-IOV virtual function.
    pub is_vf: bool,
    /// The kind of part that it is, such as `mig`.
    pub part: Option<String>,
    /// The model, as the device reports it.
    pub model: Option<String>,
    /// Kernel driver.
    pub driver: Option<String>,
    /// The host's names: network interfaces, RDMA devices, NVMe controllers, else its first node.
    pub names: Vec<String>,
    /// The resources that offer it.
    pub resources: Vec<String>,
    /// `Healthy` or `Unhealthy`; `null` for a device that no resource offers or that was not judged
    /// yet.
    pub health: Option<&'static str>,
    /// Why it is unhealthy.
    pub reason: Option<String>,
    /// The value behind the reason.
    pub detail: Option<String>,
    /// The holders of the device, or of its shares.
    pub holders: Vec<Holder>,
    /// The id of its whole, or the address of its physical function.
    #[serde(skip)]
    pub(super) above: Option<String>,
}

impl Leaf {
    /// A device with only the facts of its record.
    #[must_use]
    pub fn of(device: &Device) -> Leaf {
        let pci = device.pci.as_ref();
        let named = pci
            .map(|pci| [&pci.rdma, &pci.nvme, &pci.net])
            .into_iter()
            .flatten()
            .find(|names| !names.is_empty());
        let node = || device.nodes.first().map(|node| node.host.clone()).into_iter().collect();
        let function = || pci.and_then(|pci| pci.physfn).map(|pf| pf.to_string());
        Leaf {
            id: device.id.to_string(),
            class: device.class,
            pci_address: pci.map(|pci| pci.address),
            bridges: pci.map(|pci| pci.bridges.clone()).unwrap_or_default(),
            numa_node: device.numa_nodes.first().copied(),
            is_vf: pci.is_some_and(|pci| pci.is_vf()),
            part: device.attribute("part").map(str::to_owned),
            model: device
                .attribute("model")
                .or(device.attribute("mdev_type_name"))
                .map(str::to_owned),
            driver: pci.and_then(|pci| pci.driver.clone()),
            names: named.cloned().unwrap_or_else(node),
            resources: Vec::new(),
            health: None,
            reason: None,
            detail: None,
            holders: Vec::new(),
            above: device.attribute("parent").map(str::to_owned).or_else(function),
        }
    }

    /// Its name in a picture: its address, else its node; for a part, its id.
    #[must_use]
    pub fn name(&self) -> String {
        let address = self.pci_address.map(|address| address.to_string());
        let place = address.or_else(|| self.names.first().cloned()).filter(|_| self.part.is_none());
        place.unwrap_or_else(|| self.id.clone())
    }

    /// The class, with the kind of part: `gpu mig`, `rdma vf`.
    #[must_use]
    pub fn kind(&self) -> String {
        let of = self.part.as_deref().or_else(|| self.is_vf.then_some("vf"));
        of.map_or_else(|| self.class.to_string(), |of| format!("{} {of}", self.class))
    }

    /// The host's names, else the model, else the driver; `None` if all are unknown.
    #[must_use]
    pub fn about(&self) -> Option<String> {
        let names = match self.names.as_slice() {
            [first, ..] if first.starts_with('/') => None,
            [] => None,
            [only] => Some(only.clone()),
            // A physical function can have hundreds of representors.
            [first, rest @ ..] => Some(format!("{first} +{}", rest.len())),
        };
        names.or_else(|| self.model.clone()).or_else(|| self.driver.clone())
    }

    /// Whether it is unhealthy.
    #[must_use]
    pub fn is_unhealthy(&self) -> bool {
        self.health == Some("Unhealthy")
    }

    /// The reason why it is unhealthy, with its detail; otherwise its health; `None` if unknown.
    #[must_use]
    pub fn state(&self) -> Option<String> {
        match (&self.reason, &self.detail) {
            (Some(reason), Some(detail)) if self.is_unhealthy() => {
                Some(format!("{reason} ({detail})"))
            }
            (Some(reason), None) if self.is_unhealthy() => Some(reason.clone()),
            _ => self.health.map(str::to_lowercase),
        }
    }
}
