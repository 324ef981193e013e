//! The picture of a node: the place of its devices on PCI Express, their health, and their holders.
//!
//! ```text
//!  devices, health, grants ─ Leaf ─ tree ─▶ Part (printed by `topology -o json`)
//!  Part ─ fold ─▶ Figure ─▶ svg, or the lines of a verb
//! ```
//!
//! Everything here is a function of its arguments. The tree has every device. A figure omits
//! uninformative parts: bridges with one entry below them, and the fortieth virtual function that
//! equals the thirty-nine before it.

mod fold;
pub mod markup;
pub mod svg;
mod tree;

pub use fold::{Alike, Figure, Shown, fold};
pub use tree::tree;

use crate::domain::{Device, DeviceClass, DeviceId, Grant, PciAddress, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    above: Option<String>,
}

/// The holder of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Holder {
    /// The pod's namespace.
    pub namespace: Option<String>,
    /// The pod's name.
    pub pod: Option<String>,
    /// The pod's UID; `null` until it is known which container got the device.
    pub pod_uid: Option<String>,
    /// The container.
    pub container: Option<String>,
    /// Since when.
    pub since: Timestamp,
}

impl Holder {
    /// The holder of a grant.
    #[must_use]
    pub fn of(grant: &Grant) -> Holder {
        let pod = grant.pod();
        Holder {
            namespace: pod.and_then(|pod| pod.namespace.clone()),
            pod: pod.and_then(|pod| pod.name.clone()),
            pod_uid: pod.map(|pod| pod.uid.clone()),
            container: grant.container().map(str::to_owned),
            since: grant.granted_at,
        }
    }

    /// `namespace/pod`, or the pod's UID if its name is unknown, or a text for an unknown holder.
    #[must_use]
    pub fn in_words(&self) -> String {
        match (&self.namespace, &self.pod, &self.pod_uid) {
            (Some(namespace), Some(pod), _) => format!("{namespace}/{pod}"),
            (_, _, Some(uid)) => format!("uid:{uid}"),
            _ => "granted, pod not known yet".into(),
        }
    }
}

/// The holders of each device, by the device's own id, which represents all its shares. Each holder
/// is listed once, sorted.
#[must_use]
pub fn holders<'a>(grants: impl IntoIterator<Item = &'a Grant>) -> BTreeMap<DeviceId, Vec<Holder>> {
    let mut holders: BTreeMap<DeviceId, Vec<Holder>> = BTreeMap::new();
    for grant in grants.into_iter().filter(|grant| grant.is_live()) {
        for device in &grant.devices {
            let id = device.id.shared().unwrap_or_else(|| device.id.clone());
            holders.entry(id).or_default().push(Holder::of(grant));
        }
    }
    holders.values_mut().for_each(|holders| {
        holders.sort();
        holders.dedup();
    });
    holders
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

/// The kind of a place in the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The devices near the processors of one NUMA node. Without a name: devices whose node is
    /// unknown.
    NumaNode,
    /// A root complex: PCI domain and root bus.
    HostBridge,
    /// A root port.
    RootPort,
    /// A switch, by its upstream port.
    Switch,
    /// Another bridge.
    Bridge,
    /// Devices that are on no PCI bus: nodes of `/dev`.
    OffBus,
    /// A device.
    Device,
}

impl Kind {
    /// The words of a picture.
    #[must_use]
    pub fn in_words(self) -> &'static str {
        match self {
            Kind::NumaNode => "NUMA node",
            Kind::HostBridge => "host bridge",
            Kind::RootPort => "root port",
            Kind::Switch => "switch",
            Kind::Bridge => "bridge",
            Kind::OffBus => "nodes of /dev",
            Kind::Device => "device",
        }
    }
}

/// A part of the machine, with its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Its kind.
    pub kind: Kind,
    /// The number of a NUMA node; the address of any other part.
    pub name: Option<String>,
    /// For a NUMA node: its processors, in the kernel's notation.
    pub cpus: Option<String>,
    /// For a device: its facts.
    pub device: Option<Leaf>,
    /// The parts in it or below it; for a device, its virtual functions and other parts.
    pub parts: Vec<Part>,
}

/// A machine as a document: `holdfast topology -o json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Picture {
    /// The version of this format.
    pub schema: u32,
    /// NUMA nodes, then the devices on no bus.
    pub parts: Vec<Part>,
}

/// The processors of each NUMA node, in the kernel's notation.
pub type Cpus = BTreeMap<u32, String>;

/// The numbers of devices, for the head of a picture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// All devices.
    pub devices: usize,
    /// Devices that a resource offers.
    pub offered: usize,
    /// Unhealthy devices.
    pub unhealthy: usize,
    /// Held devices.
    pub held: usize,
}

impl Picture {
    /// Counts the devices, by state.
    #[must_use]
    pub fn count(&self) -> Count {
        fn add(parts: &[Part], count: &mut Count) {
            for part in parts {
                if let Some(leaf) = &part.device {
                    count.devices += 1;
                    count.offered += usize::from(!leaf.resources.is_empty());
                    count.unhealthy += usize::from(leaf.is_unhealthy());
                    count.held += usize::from(!leaf.holders.is_empty());
                }
                add(&part.parts, count);
            }
        }
        let mut count = Count::default();
        add(&self.parts, &mut count);
        count
    }
}

impl std::fmt::Display for Count {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Count { devices, offered, unhealthy, held } = self;
        let noun = if *devices == 1 { "device" } else { "devices" };
        write!(f, "{devices} {noun}, {offered} offered, {unhealthy} unhealthy, {held} held")
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;
    use crate::domain::{Attributes, DeviceId, DeviceNode, PciFunction};

    /// A device at an address, below these bridges, near a node.
    pub(crate) fn leaf(
        address: &str,
        class: DeviceClass,
        bridges: &[&str],
        numa: Option<u32>,
    ) -> Leaf {
        let function = PciFunction {
            bridges: bridges.iter().map(|bridge| bridge.parse().unwrap()).collect(),
            ..PciFunction::at(address.parse().unwrap())
        };
        Leaf::of(&Device {
            id: DeviceId::new(address),
            key: format!("pci:{address}"),
            class,
            pci: Some(Box::new(function)),
            numa_nodes: numa.into_iter().collect(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        })
    }

    /// A virtual function of a device.
    pub(crate) fn vf(of: &Leaf, address: &str) -> Leaf {
        let bridges: Vec<String> = of.bridges.iter().map(ToString::to_string).collect();
        let bridges: Vec<&str> = bridges.iter().map(String::as_str).collect();
        let whole = leaf(address, of.class, &bridges, of.numa_node);
        Leaf { is_vf: true, above: of.pci_address.map(|pf| pf.to_string()), ..whole }
    }

    /// A node of `/dev`.
    pub(crate) fn node(path: &str) -> Leaf {
        Leaf::of(&Device {
            id: DeviceId::new(path),
            key: format!("dev:{path}"),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: vec![DeviceNode::at(path)],
            attributes: Attributes::default(),
        })
    }

    /// A pod that holds a device.
    pub(crate) fn holder(name: &str) -> Holder {
        Holder {
            namespace: Some("ml".into()),
            pod: Some(name.into()),
            pod_uid: Some("u-1".into()),
            container: Some("main".into()),
            since: Timestamp(1_700_000_000_000),
        }
    }

    /// Two sockets: a switch with two GPUs and an adapter with virtual functions, a GPU of its own,
    /// and a node of `/dev`.
    pub(crate) fn machine() -> Vec<Leaf> {
        let offered = |leaf: Leaf| Leaf {
            resources: vec!["nvidia.com/gpu".into()],
            health: Some("Healthy"),
            ..leaf
        };
        let switch = ["0000:15:01.0", "0000:16:00.0"];
        let below = |port| [switch[0], switch[1], port];
        let adapter = Leaf {
            names: vec!["mlx5_0".into()],
            ..leaf("0000:1a:00.0", DeviceClass::Rdma, &below("0000:17:02.0"), Some(0))
        };
        let first =
            offered(leaf("0000:18:00.0", DeviceClass::Gpu, &below("0000:17:00.0"), Some(0)));
        let first = Leaf {
            holders: vec![holder("train-0")],
            model: Some("NVIDIA H100 80GB HBM3".into()),
            ..first
        };
        let second =
            offered(leaf("0000:19:00.0", DeviceClass::Gpu, &below("0000:17:01.0"), Some(0)));
        let second = Leaf {
            health: Some("Unhealthy"),
            reason: Some("xid".into()),
            detail: Some("Xid 79".into()),
            ..second
        };
        let vfs = (1..=64).map(|n| vf(&adapter, &format!("0000:1a:{:02x}.{:x}", n / 8, n % 8)));
        let mut leaves: Vec<Leaf> = vfs.collect();
        let held = leaves.get_mut(40).unwrap();
        held.holders = vec![holder("net-0")];
        leaves.extend([first, second, adapter]);
        leaves.push(offered(leaf("0000:9a:00.0", DeviceClass::Gpu, &["0000:97:01.0"], Some(1))));
        leaves.push(Leaf {
            resources: vec!["example.com/fuse".into()],
            health: Some("Healthy"),
            ..node("/dev/fuse")
        });
        leaves
    }
}
