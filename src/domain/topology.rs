//! The distance between two devices: PCI Express first, then NUMA. Also their direct links.

use super::device::{Device, DeviceClass};
use super::pci::{PciAddress, PciFunction};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How near two devices are, from far to near.
///
/// The lowest bridge above both decides: traffic between devices below one switch does not pass the
/// processor. Without a common bridge the host bridge decides, then the NUMA node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nearness {
    /// No known common place: through the interconnect of the processors.
    System,
    /// The same NUMA node.
    Numa,
    /// The same host bridge: through the root complex of one processor.
    HostBridge,
    /// The same root port.
    RootPort,
    /// The same switch, with the depth of the lowest common bridge below the root port. Deeper is
    /// nearer.
    Switch(u8),
    /// The same hive. The first number counts the hives that they share, each within the one
    /// before. The second is their other nearness, as [`Nearness::in_hives`] counts it.
    /// [`nearness`] ignores hives.
    Hive(u8, u8),
    /// The same card: functions of one device, or virtual functions of one physical function.
    Card,
    /// The same device: two shares of it.
    Device,
}

impl Nearness {
    /// The nearness of two devices with `hives` common hives and otherwise this nearness. Direct
    /// links are nearer than any bridge. Among devices with the same hives, the other nearness
    /// decides.
    #[must_use]
    pub fn in_hives(self, hives: usize) -> Nearness {
        let besides = match self {
            Nearness::Card | Nearness::Device => return self,
            Nearness::System => 0,
            Nearness::Numa => 1,
            Nearness::HostBridge => 2,
            Nearness::RootPort => 3,
            Nearness::Switch(depth) => depth.saturating_add(3),
            Nearness::Hive(_, besides) => besides,
        };
        if hives == 0 {
            self
        } else {
            Nearness::Hive(u8::try_from(hives).unwrap_or(u8::MAX), besides)
        }
    }
}

impl fmt::Display for Nearness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Nearness::System => "system",
            Nearness::Numa => "numa",
            Nearness::HostBridge => "host-bridge",
            Nearness::RootPort => "root-port",
            Nearness::Switch(_) => "switch",
            Nearness::Hive(..) => "hive",
            Nearness::Card => "same-device",
            Nearness::Device => "same",
        })
    }
}

/// A place that several devices can be in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Below a host bridge: PCI domain and root bus.
    HostBridge(u32, u8),
    /// Below a bridge.
    Bridge(PciAddress),
    /// On a card: its first function, or its physical one.
    Card(PciAddress),
}

/// The PCI Express places of a device, from far to near, each with the nearness of devices that
/// share it. Empty for a device that is not a PCI function.
#[must_use]
pub fn places(device: &Device) -> Vec<(Nearness, Place)> {
    device.pci.as_deref().map(of_function).unwrap_or_default()
}

/// The hives of a GPU, each within the one before. All GPUs of a hive have direct links with each
/// other. The names come from the attribute `hive`: `xgmi:<id>` by AMD's driver,
/// `nvlink:0000:06:00.0` by the first GPU of the hive, and `nvlink:0000:06:00.0/0000:07:00.0` for a
/// hive within it.
pub fn hives(device: &Device) -> impl Iterator<Item = &str> {
    let is_gpu = device.class == DeviceClass::Gpu;
    let path = device.attribute("hive").filter(|_| is_gpu).unwrap_or_default();
    let ends =
        path.match_indices('/').map(|(end, _)| end).chain((!path.is_empty()).then_some(path.len()));
    ends.map(move |end| &path[..end])
}

fn of_function(function: &PciFunction) -> Vec<(Nearness, Place)> {
    // Behind a volume management device the path has another domain; the first bridge has the
    // host's.
    let root = function.bridges.first().unwrap_or(&function.address);
    let mut places = Vec::with_capacity(function.bridges.len() + 2);
    places.push((Nearness::HostBridge, Place::HostBridge(root.domain, root.bus)));
    for (depth, bridge) in function.bridges.iter().enumerate() {
        let nearness = if depth == 0 {
            Nearness::RootPort
        } else {
            Nearness::Switch(u8::try_from(depth).unwrap_or(u8::MAX))
        };
        places.push((nearness, Place::Bridge(*bridge)));
    }
    let card = function.physfn.unwrap_or(function.address);
    places.push((Nearness::Card, Place::Card(PciAddress { function: 0, ..card })));
    places
}

/// How near two devices are.
#[must_use]
pub fn nearness(a: &Device, b: &Device) -> Nearness {
    if a.id == b.id {
        return Nearness::Device;
    }
    let (ours, theirs) = (places(a), places(b));
    let shared =
        ours.iter().rev().find(|place| theirs.contains(place)).map(|(nearness, _)| *nearness);
    let numa = || {
        if a.numa_nodes.iter().any(|node| b.numa_nodes.contains(node)) {
            Nearness::Numa
        } else {
            Nearness::System
        }
    };
    shared.unwrap_or_else(numa)
}

/// The preference among several suitable devices (`GetPreferredAllocation`).
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The devices that are nearest to each other. Among these, a choice that leaves whole switches
    /// free for larger requests.
    #[default]
    Closest,
    /// The devices whose neighbours are already in use, at any distance from each other, so that
    /// whole groups stay free.
    Packed,
    /// The devices whose neighbours are used least: across sockets first, then across switches.
    Spread,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Attributes, DeviceId};

    fn at(address: &str, bridges: &[&str], physfn: Option<&str>, numa: Option<u32>) -> Device {
        let function = PciFunction {
            physfn: physfn.map(|address| address.parse().unwrap()),
            bridges: bridges.iter().map(|bridge| bridge.parse().unwrap()).collect(),
            ..PciFunction::at(address.parse().unwrap())
        };
        Device {
            id: DeviceId::new(address),
            key: address.into(),
            class: DeviceClass::Gpu,
            pci: Some(Box::new(function)),
            numa_nodes: numa.into_iter().collect(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        }
    }

    #[test]
    fn the_lowest_common_bridge_decides_then_the_host_bridge_then_numa() {
        let switch = ["0000:15:01.0", "0000:16:00.0"];
        let gpu = at("0000:18:00.0", &[switch[0], switch[1], "0000:17:00.0"], None, Some(0));
        let of = |other: &Device| nearness(&gpu, other);
        assert_eq!(
            of(&at("0000:19:00.0", &[switch[0], switch[1], "0000:17:01.0"], None, None)),
            Nearness::Switch(1)
        );
        assert_eq!(
            of(&at("0000:1a:00.0", &[switch[0]], None, Some(1))),
            Nearness::RootPort,
            "the NUMA nodes do not matter"
        );
        assert_eq!(of(&at("0000:20:00.0", &["0000:15:02.0"], None, None)), Nearness::HostBridge);
        assert_eq!(
            of(&at("0000:15:00.4", &[], None, None)),
            Nearness::HostBridge,
            "an endpoint of the root complex"
        );
        assert_eq!(of(&at("0000:30:00.0", &["0000:2f:01.0"], None, Some(0))), Nearness::Numa);
        assert_eq!(of(&at("0000:30:00.0", &["0000:2f:01.0"], None, Some(1))), Nearness::System);
        assert_eq!(
            of(&at("0000:30:00.0", &["0000:2f:01.0"], None, None)),
            Nearness::System,
            "an unknown place is not near"
        );
        assert_eq!(
            of(&at("0000:18:00.1", &[switch[0], switch[1], "0000:17:00.0"], None, Some(0))),
            Nearness::Card
        );
        assert_eq!(
            of(&at(
                "0000:18:02.3",
                &[switch[0], switch[1], "0000:17:00.0"],
                Some("0000:18:00.0"),
                None
            )),
            Nearness::Card
        );
        assert_eq!(of(&gpu.clone()), Nearness::Device);
        assert!(Nearness::Switch(2) > Nearness::Switch(1) && Nearness::Card > Nearness::Switch(9));
    }

    #[test]
    fn a_hive_is_nearer_than_any_switch_and_within_it_the_rest_counts() {
        let far = Nearness::System.in_hives(1);
        assert!(far > Nearness::Switch(9) && Nearness::Switch(9).in_hives(4) < Nearness::Card);
        assert!(
            far < Nearness::Numa.in_hives(1)
                && Nearness::RootPort.in_hives(1) < Nearness::Switch(1).in_hives(1)
        );
        assert!(
            Nearness::Switch(2).in_hives(1) < Nearness::System.in_hives(2),
            "the narrower hive comes first"
        );
        assert_eq!(
            (Nearness::Numa.in_hives(0), Nearness::Card.in_hives(2)),
            (Nearness::Numa, Nearness::Card)
        );
        let mut gpu = at("0000:18:00.0", &[], None, None);
        assert_eq!(hives(&gpu).count(), 0);
        gpu.attributes.insert("hive", "nvlink:0000:06:00.0/0000:18:00.0");
        assert_eq!(
            hives(&gpu).collect::<Vec<_>>(),
            ["nvlink:0000:06:00.0", "nvlink:0000:06:00.0/0000:18:00.0"]
        );
    }
}
