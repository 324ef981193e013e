//! The tree of a machine: its kinds of places, each with the parts below it, and the numbers of
//! devices.

use super::leaf::Leaf;
use serde::Serialize;
use std::collections::BTreeMap;

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
