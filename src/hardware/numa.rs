//! The NUMA nodes near a function (Linux `Documentation/ABI/stable/sysfs-devices-node`).
//!
//! The kubelet copies reported nodes into the topology manager, so only certain nodes are reported.
//! Not reported are:
//!
//! - a node for −1 on a machine with several nodes;
//! - a node without processors (memory of a GPU);
//! - a node beyond the 64 that the kubelet can count.

use super::pci::{folder, is_numbered};
use crate::domain::{PciAddress, PciFunction};
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};

/// The kubelet's bit mask has the nodes 0 to 63.
const NODES_MAX: u32 = 64;

/// The machine's NUMA nodes with their processors; empty if unknown.
#[derive(Debug, Default)]
pub(super) struct NumaNodes(BTreeMap<u32, Cpus>);

/// A set of processor numbers, as bits: a scan makes a set of two hundred processors for every
/// device.
#[derive(Debug, Default)]
struct Cpus(Vec<u64>);

impl Cpus {
    /// Parses `0-3,8-11`. Parts that are no number are left out, and numbers above a kernel's
    /// maximum of processors are cut off.
    fn parse(list: &str) -> Self {
        const CPUS_MAX: u32 = 8192;
        let mut cpus = Cpus::default();
        for part in list.split(',') {
            let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
            if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
                (first..=last.min(CPUS_MAX)).for_each(|cpu| cpus.insert(cpu));
            }
        }
        cpus
    }

    fn insert(&mut self, cpu: u32) {
        let (word, bit) = Self::place(cpu);
        self.0.resize(self.0.len().max(word + 1), 0);
        self.0[word] |= bit;
    }

    fn place(cpu: u32) -> (usize, u64) {
        (cpu as usize / 64, 1 << (cpu % 64))
    }

    fn contains(&self, cpu: u32) -> bool {
        let (word, bit) = Self::place(cpu);
        self.0.get(word).is_some_and(|bits| bits & bit != 0)
    }

    fn contains_all(&self, other: &Cpus) -> bool {
        let ours = self.0.iter().chain(std::iter::repeat(&0));
        other.0.iter().zip(ours).all(|(theirs, ours)| theirs & !ours == 0)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl NumaNodes {
    pub(super) fn read(root: &HostRoot) -> Self {
        let dir = "sys/devices/system/node";
        let names = root.entries(dir).into_iter().filter(|name| is_numbered(name, "node"));
        let nodes = names.filter_map(|name| {
            let number = name.strip_prefix("node")?.parse().ok()?;
            Some((
                number,
                Cpus::parse(&root.read(&format!("{dir}/{name}/cpulist")).unwrap_or_default()),
            ))
        });
        NumaNodes(nodes.collect())
    }

    /// The nodes of these processors.
    pub(super) fn of(&self, processors: &BTreeSet<u32>) -> BTreeSet<u32> {
        self.0
            .iter()
            .filter(|(_, cpus)| processors.iter().any(|cpu| cpus.contains(*cpu)))
            .map(|(node, _)| *node)
            .collect()
    }

    /// The nodes near a function; empty if unknown.
    pub(super) fn near(&self, root: &HostRoot, function: &PciFunction) -> Vec<u32> {
        let with_cpus: Vec<u32> =
            self.0.iter().filter(|(_, cpus)| !cpus.is_empty()).map(|(node, _)| *node).collect();
        let nodes = if with_cpus.len() == 1 {
            with_cpus
        } else {
            let stated: Vec<u32> = stated(root, function.address).into_iter().collect();
            // A driver may have written the node (qib) or guessed it (nvme), so the processors
            // decide.
            match self.by_cpus(root, function) {
                Some(near) if !stated.iter().all(|node| near.contains(node)) => near,
                _ => stated,
            }
        };
        nodes
            .into_iter()
            .filter(|node| {
                *node < NODES_MAX && self.0.get(node).is_none_or(|cpus| !cpus.is_empty())
            })
            .collect()
    }

    /// The nodes whose processors are all in `local_cpulist`; empty if these are all processors,
    /// `None` if unknown.
    fn by_cpus(&self, root: &HostRoot, function: &PciFunction) -> Option<Vec<u32>> {
        let local =
            Cpus::parse(&root.read(&format!("{}/local_cpulist", folder(function.address)))?);
        let nodes = || self.0.iter().filter(|(_, cpus)| !cpus.is_empty());
        if local.is_empty() || nodes().next().is_none() {
            return None;
        }
        if nodes().all(|(_, cpus)| local.contains_all(cpus)) {
            return Some(Vec::new());
        }
        Some(nodes().filter(|(_, cpus)| local.contains_all(cpus)).map(|(node, _)| *node).collect())
    }
}

/// The node in the file `numa_node` of a function. It is read only for functions that need it: most
/// functions of a server are no devices, and most of a scan's time is opening files.
pub(super) fn stated(root: &HostRoot, address: PciAddress) -> Option<u32> {
    // Parsing as unsigned drops -1, which means that the firmware states no node.
    root.read(&format!("{}/numa_node", folder(address)))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    fn near(nodes: &[(u32, &str)], numa_node: Option<i32>, local: Option<&str>) -> Vec<u32> {
        let dir = tempfile::tempdir().unwrap();
        for (node, cpulist) in nodes {
            write(dir.path(), &format!("sys/devices/system/node/node{node}/cpulist"), cpulist);
        }
        if let Some(node) = numa_node {
            write(dir.path(), "sys/bus/pci/devices/0000:18:00.0/numa_node", &node.to_string());
        }
        if let Some(local) = local {
            write(dir.path(), "sys/bus/pci/devices/0000:18:00.0/local_cpulist", local);
        }
        let root = HostRoot::new(dir.path());
        NumaNodes::read(&root).near(&root, &function("0000:18:00.0"))
    }

    #[test]
    fn a_missing_numa_node_is_unknown_except_on_a_machine_with_one() {
        assert_eq!(near(&[(0, "0-3"), (1, "4-7")], None, None), Vec::<u32>::new());
        assert_eq!(near(&[(0, "0-3"), (1, "4-7")], Some(-1), None), Vec::<u32>::new());
        assert_eq!(near(&[(0, "0-3")], None, None), [0]);
        assert_eq!(near(&[], Some(1), None), [1], "captures lack the nodes");
        assert_eq!(near(&[], None, None), Vec::<u32>::new());
    }

    #[test]
    fn a_file_that_states_no_node_states_none() {
        let dir = tempfile::tempdir().unwrap();
        let read = || stated(&HostRoot::new(dir.path()), "0000:18:00.0".parse().unwrap());
        assert_eq!(read(), None, "no file");
        for (text, node) in [("1\n", Some(1)), ("-1\n", None), ("", None), ("garbage", None)] {
            write(dir.path(), "sys/bus/pci/devices/0000:18:00.0/numa_node", text);
            assert_eq!(read(), node, "{text:?}");
        }
    }

    #[test]
    fn nodes_without_processors_or_above_63_are_left_out() {
        assert_eq!(
            near(&[(0, "0-87"), (8, "88-175"), (255, "")], Some(255), None),
            Vec::<u32>::new()
        );
        assert_eq!(near(&[(0, "0-1"), (9, "")], Some(9), None), [0], "one node with processors");
        assert_eq!(near(&[(0, "0-1"), (100, "2-3")], Some(100), None), Vec::<u32>::new());
    }

    #[test]
    fn processors_overrule_a_node_that_contradicts_them() {
        let nodes = [(0, "0-3"), (1, "4-7")];
        assert_eq!(near(&nodes, Some(0), Some("4-7")), [1]);
        assert_eq!(near(&nodes, Some(1), Some("4-7")), [1]);
        assert_eq!(
            near(&nodes, Some(1), Some("0-7")),
            Vec::<u32>::new(),
            "every processor: the driver guessed"
        );
    }
}
