//! Devices as a tree: NUMA nodes, host bridges, bridges, devices, and the parts of a device.

use super::leaf::Leaf;
use super::part::{Cpus, Kind, Part, Picture};
use crate::domain::PciAddress;
use std::collections::{BTreeMap, BTreeSet};

/// The version of the document.
const SCHEMA: u32 = 1;

/// The place of a part, from the processors to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    /// Known nodes sort before the unknown one.
    Numa(Option<u32>),
    OffBus,
    HostBridge(u32, u8),
    /// A bridge, with the number of bridges above it.
    Bridge(usize, PciAddress),
}

/// Puts devices into their places. Bridges with a single entry below them are left out; each device
/// names all of its own bridges.
///
/// `cpus` has the NUMA nodes of the machine, so that nodes without devices appear too.
#[must_use]
pub fn tree(leaves: impl IntoIterator<Item = Leaf>, cpus: &Cpus) -> Picture {
    let mut placed: Vec<(Vec<Place>, Part)> =
        nest(leaves.into_iter().collect()).into_iter().map(|part| (path(&part), part)).collect();
    put_bridges_on_nodes(&mut placed);
    let mut parts = group(placed, 0);
    for (node, cpus) in cpus.iter().filter(|(_, cpus)| !cpus.is_empty()) {
        let name = Some(node.to_string());
        match parts.iter_mut().find(|part| part.kind == Kind::NumaNode && part.name == name) {
            Some(part) => part.cpus = Some(cpus.clone()),
            None => parts.push(Part {
                kind: Kind::NumaNode,
                name,
                cpus: Some(cpus.clone()),
                device: None,
                parts: Vec::new(),
            }),
        }
    }
    let number = |part: &Part| {
        part.name.as_ref().and_then(|name| name.parse::<u32>().ok()).unwrap_or(u32::MAX)
    };
    parts.sort_by_key(|part| (part.kind == Kind::OffBus, number(part)));
    Picture { schema: SCHEMA, parts }
}

/// Puts virtual functions and other parts below their whole, where it exists.
fn nest(leaves: Vec<Leaf>) -> Vec<Part> {
    let is_whole = |leaf: &&Leaf| leaf.part.is_none();
    let by_address = leaves
        .iter()
        .filter(is_whole)
        .filter_map(|leaf| Some((leaf.pci_address?.to_string(), leaf.id.clone())));
    let wholes: BTreeMap<String, String> =
        by_address.chain(leaves.iter().map(|leaf| (leaf.id.clone(), leaf.id.clone()))).collect();
    let mut below: BTreeMap<String, Vec<Leaf>> = BTreeMap::new();
    let mut tops = Vec::new();
    for leaf in leaves {
        match leaf
            .above
            .as_ref()
            .and_then(|above| wholes.get(above))
            .filter(|whole| **whole != leaf.id)
        {
            Some(whole) => below.entry(whole.clone()).or_default().push(leaf),
            None => tops.push(leaf),
        }
    }
    fn part(leaf: Leaf, below: &mut BTreeMap<String, Vec<Leaf>>) -> Part {
        let mut parts: Vec<Part> =
            below.remove(&leaf.id).into_iter().flatten().map(|leaf| part(leaf, below)).collect();
        parts.sort_by_key(first);
        Part { kind: Kind::Device, name: Some(leaf.name()), cpus: None, device: Some(leaf), parts }
    }
    tops.into_iter().map(|leaf| part(leaf, &mut below)).collect()
}

fn path(part: &Part) -> Vec<Place> {
    let Some(leaf) = &part.device else { return Vec::new() };
    let Some(address) = leaf.pci_address else { return vec![Place::OffBus] };
    // Behind a volume management device the path has another domain; the first bridge is the
    // host's.
    let root = leaf.bridges.first().unwrap_or(&address);
    let bridges =
        leaf.bridges.iter().enumerate().map(|(depth, bridge)| Place::Bridge(depth, *bridge));
    [Place::Numa(leaf.numa_node), Place::HostBridge(root.domain, root.bus)]
        .into_iter()
        .chain(bridges)
        .collect()
}

/// A function that states no NUMA node is put on the lowest node that others below its host bridge
/// state. If these state several nodes, the host bridge is drawn below each.
fn put_bridges_on_nodes(placed: &mut [(Vec<Place>, Part)]) {
    let mut nodes: BTreeMap<Place, u32> = BTreeMap::new();
    for (path, _) in placed.iter() {
        if let [Place::Numa(Some(node)), bridge, ..] = path.as_slice() {
            let known = nodes.entry(*bridge).or_insert(*node);
            *known = (*known).min(*node);
        }
    }
    for (path, _) in placed {
        if let [node @ Place::Numa(None), bridge, ..] = path.as_mut_slice()
            && let Some(known) = nodes.get(bridge)
        {
            *node = Place::Numa(Some(*known));
        }
    }
}

fn group(placed: Vec<(Vec<Place>, Part)>, depth: usize) -> Vec<Part> {
    let mut places: BTreeMap<Place, Vec<(Vec<Place>, Part)>> = BTreeMap::new();
    let mut parts = Vec::new();
    for (path, part) in placed {
        match path.get(depth) {
            Some(place) => places.entry(*place).or_default().push((path, part)),
            None => parts.push(part),
        }
    }
    for (place, placed) in places {
        let below = group(placed, depth + 1);
        let (kind, name) = match place {
            Place::Numa(node) => (Kind::NumaNode, node.map(|node| node.to_string())),
            Place::OffBus => (Kind::OffBus, None),
            Place::HostBridge(domain, bus) => {
                (Kind::HostBridge, Some(format!("{domain:04x}:{bus:02x}")))
            }
            Place::Bridge(..) if is_one_thing(&below) => {
                parts.extend(below);
                continue;
            }
            Place::Bridge(0, address) => (Kind::RootPort, Some(address.to_string())),
            // Below a root port each switch has two bridges: the port towards the processor, and
            // one towards each device.
            Place::Bridge(above, address) => (
                if above % 2 == 1 { Kind::Switch } else { Kind::Bridge },
                Some(address.to_string()),
            ),
        };
        parts.push(Part { kind, name, cpus: None, device: None, parts: below });
    }
    parts.sort_by_key(first);
    parts
}

/// Whether it is only one card, or one bridge: then the bridge above it adds no information.
fn is_one_thing(parts: &[Part]) -> bool {
    let slot = |part: &Part| {
        part.device.as_ref()?.pci_address.map(|address| PciAddress { function: 0, ..address })
    };
    let slots: BTreeSet<_> = parts.iter().map(slot).collect();
    parts.len() < 2 || slots.len() == 1 && !slots.contains(&None)
}

/// The sort key of a part: the first address in it, then names.
fn first(part: &Part) -> (Option<PciAddress>, Option<String>) {
    let own = part.device.as_ref().and_then(|leaf| leaf.pci_address);
    let below = || part.parts.iter().filter_map(|part| first(part).0).min();
    (own.or_else(below), part.name.clone())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{leaf, machine};
    use super::*;
    use crate::domain::DeviceClass;

    /// The tree with one line for each part.
    fn outline(parts: &[Part], depth: usize) -> String {
        let line = |part: &Part| {
            let devices = if part.parts.len() > 8 {
                format!("{:d$}  ({})\n", "", part.parts.len(), d = depth * 2)
            } else {
                outline(&part.parts, depth + 1)
            };
            format!(
                "{:d$}{} {}\n{devices}",
                "",
                part.kind.in_words(),
                part.name.as_deref().unwrap_or("-"),
                d = depth * 2
            )
        };
        parts.iter().map(line).collect()
    }

    #[test]
    fn devices_are_at_their_place_and_uninformative_bridges_left_out() {
        let wanted = "\
NUMA node 0
  host bridge 0000:15
    switch 0000:16:00.0
      device 0000:18:00.0
      device 0000:19:00.0
      device 0000:1a:00.0
        (64)
NUMA node 1
  host bridge 0000:97
    device 0000:9a:00.0
NUMA node 2
nodes of /dev -
  device /dev/fuse
";
        let cpus = Cpus::from([
            (0, "0-3".into()),
            (1, "4-7".into()),
            (2, "8-11".into()),
            (8, String::new()),
        ]);
        let picture = tree(machine(), &cpus);
        assert_eq!(outline(&picture.parts, 0), wanted);
        assert_eq!(picture.parts[0].cpus.as_deref(), Some("0-3"));
        assert_eq!(picture.count().to_string(), "69 devices, 4 offered, 1 unhealthy, 2 held");
    }

    #[test]
    fn a_device_without_a_numa_node_is_on_the_lowest_of_its_host_bridge() {
        let nic = |address, numa| leaf(address, DeviceClass::Nic, &["0000:00:0c.0"], numa);
        let picture = tree(
            [
                nic("0000:01:00.0", None),
                nic("0000:01:00.1", Some(1)),
                nic("0000:02:00.0", Some(2)),
                leaf("0000:ff:00.0", DeviceClass::Nic, &[], None),
            ],
            &Cpus::new(),
        );
        let wanted = "\
NUMA node 1
  host bridge 0000:00
    device 0000:01:00.0
    device 0000:01:00.1
NUMA node 2
  host bridge 0000:00
    device 0000:02:00.0
NUMA node -
  host bridge 0000:ff
    device 0000:ff:00.0
";
        assert_eq!(outline(&picture.parts, 0), wanted);
    }

    #[test]
    fn the_document_has_the_documented_schema() {
        let picture = tree(
            [leaf("0000:18:00.0", DeviceClass::Gpu, &["0000:15:01.0"], Some(0))],
            &Cpus::new(),
        );
        let wanted = concat!(
            r#"{"schema":1,"parts":[{"kind":"numa_node","name":"0","cpus":null,"device":null,"parts":["#,
            r#"{"kind":"host_bridge","name":"0000:15","cpus":null,"device":null,"parts":["#,
            r#"{"kind":"device","name":"0000:18:00.0","cpus":null,"device":{"id":"0000:18:00.0","class":"gpu","pci_address":"0000:18:00.0","#,
            r#""bridges":["0000:15:01.0"],"numa_node":0,"is_vf":false,"part":null,"model":null,"driver":null,"names":[],"resources":[],"#,
            r#""health":null,"reason":null,"detail":null,"holders":[]},"parts":[]}]}]}]}"#,
        );
        assert_eq!(serde_json::to_string(&picture).unwrap(), wanted);
    }
}
