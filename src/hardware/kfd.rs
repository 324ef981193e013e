//! AMD's compute topology (Linux `drivers/gpu/drm/amd/amdkfd/kfd_topology.c`): the partitions of a
//! GPU.
//!
//! A node is a processor, a GPU, or one partition of a GPU. It is found by the number of its render
//! node. Its `location_id` names no PCI function: the partition is in its upper bits, or with older
//! drivers in the bits of the function. The nodes of one GPU share its `domain`, bus and device.
//! They also shared `unique_id`, until Linux 6.18 gave each partition its own.
//!
//! The kernel shows the properties of a node only to a process whose device cgroup allows reading
//! and writing its render node (`kfd_devcgroup_check_permission`), which the service and an
//! unprivileged pod may not. A whole GPU is known without them. Its partitions are not.

use super::Scan;
use super::facts::{Facts, Part, optional, required, without_parts};
use super::pci::{folder, is_numbered};
use crate::domain::{Device, PciAddress, PciFunction};
use crate::host::{HostRoot, ReadFailure};
use std::collections::BTreeMap;
use std::sync::Arc;

const NODES: &str = "sys/class/kfd/kfd/topology/nodes";
/// The attributes `part` and `parts` of a partition and of its GPU.
const KIND: &str = "partition";
const PLATFORM: &str = "sys/devices/platform";

/// The GPU nodes of the topology, read once for a whole scan.
#[derive(Debug, Default)]
pub(super) struct Kfd {
    nodes: Vec<Node>,
    /// The PCI function of each render node.
    renders: BTreeMap<u32, PciAddress>,
    /// Whether the device cgroup of this process hides properties of nodes.
    is_denied: bool,
}

#[derive(Debug, Clone)]
struct Node {
    number: u32,
    render_minor: u32,
    unique_id: u64,
    domain: u32,
    location_id: u32,
    /// Vector units, and those of one compute unit; 0 if the kernel does not state them.
    simds: u32,
    simds_per_cu: u32,
    /// The version of the graphics engine: 90402 is 9.4.2.
    gfx: u32,
}

impl Node {
    /// What describes the GPU, or the partition.
    fn describe(&self, root: &HostRoot, facts: &mut Facts) {
        let known = |number: u32| (number != 0).then_some(number);
        let file = format!("{NODES}/{}/mem_banks/0/properties", self.number);
        let bank = root.read_if_permitted(&file, &mut false);
        let size = bank.as_deref().and_then(|text| properties(text).get("size_in_bytes").copied());
        facts.note(
            "vram_mib",
            size.and_then(|size| size.parse::<u64>().ok()).map(|size| size >> 20),
        );
        facts.note("simd_count", known(self.simds));
        facts.note("cu_count", self.simds.checked_div(self.simds_per_cu));
        facts.note("gfx_version", known(self.gfx));
    }

    /// PCI domain, and bus and device of `location_id`; `None` where the kernel does not report it.
    fn slot(&self) -> Option<(u32, u32)> {
        (self.location_id != 0).then_some((self.domain, self.location_id & 0xffff & !7))
    }

    /// Whether both nodes belong to one GPU.
    fn is_of_one_gpu(&self, other: &Node) -> bool {
        match (self.slot(), other.slot()) {
            (Some(one), Some(other)) => one == other,
            _ => self.unique_id != 0 && self.unique_id == other.unique_id,
        }
    }
}

impl Kfd {
    pub(super) fn read(root: &HostRoot, scan: &Scan) -> Self {
        let mut is_denied = false;
        let mut nodes: Vec<Node> = (root.entries(NODES).iter())
            .filter_map(|name| node(root, name, &mut is_denied))
            .collect();
        nodes.sort_by_key(|node| node.number);
        let minor = |name: &String| name.strip_prefix("renderD")?.parse().ok();
        let of = |function: &PciFunction| {
            function
                .drm
                .iter()
                .filter_map(minor)
                .map(|minor| (minor, function.address))
                .collect::<Vec<_>>()
        };
        Kfd { nodes, renders: scan.functions.values().flat_map(of).collect(), is_denied }
    }

    /// The node of a function by its render node: a whole GPU, or its first partition.
    fn node_of(&self, function: &PciFunction) -> Option<&Node> {
        let own = |node: &&Node| function.drm.contains(&format!("renderD{}", node.render_minor));
        self.nodes.iter().find(own)
    }

    /// The partitions of a GPU, by number; empty for a GPU that is not partitioned.
    fn partitions(&self, function: &PciFunction) -> Vec<(u32, &Node)> {
        let Some(first) = self.node_of(function) else { return Vec::new() };
        // A virtual function in the same slot is a GPU of its own.
        let is_others = |node: &Node| {
            self.renders.get(&node.render_minor).is_some_and(|owner| *owner != function.address)
        };
        let nodes: Vec<&Node> = self
            .nodes
            .iter()
            .filter(|node| node.is_of_one_gpu(first) && !is_others(node))
            .collect();
        if nodes.len() < 2 {
            return Vec::new();
        }
        // The partition is in the upper bits, or with older drivers in the bits of the function.
        let numbers = [|node: &Node| node.location_id >> 28, |node: &Node| node.location_id & 7];
        let distinct = numbers.into_iter().find(|number| {
            nodes.iter().map(|node| number(node)).collect::<std::collections::BTreeSet<_>>().len()
                == nodes.len()
        });
        let in_order = nodes.iter().zip(0..);
        let mut numbered: Vec<_> = in_order
            .map(|(node, at)| (distinct.map_or(at, |number| number(node)), *node))
            .collect();
        numbered.sort_by_key(|(number, _)| *number);
        numbered
    }
}

/// The properties of a node, or of its memory: name and value in each line.
fn properties(text: &str) -> BTreeMap<&str, &str> {
    let lines = text.lines().filter_map(|line| line.trim().split_once(' '));
    lines.map(|(name, value)| (name, value.trim())).collect()
}

fn node(root: &HostRoot, name: &str, is_denied: &mut bool) -> Option<Node> {
    let number = name.parse().ok()?;
    let text = root.read_if_permitted(&format!("{NODES}/{name}/properties"), is_denied)?;
    let properties = properties(&text);
    let of = |key: &str| properties.get(key).and_then(|value| value.parse::<u64>().ok());
    // A node without vector units is a processor.
    of("simd_count").filter(|count| *count > 0)?;
    let narrow = |key: &str| of(key).and_then(|value| u32::try_from(value).ok());
    let render_minor = narrow("drm_render_minor").filter(|minor| *minor > 0)?;
    let (unique_id, domain, location_id) =
        (of("unique_id"), narrow("domain"), narrow("location_id"));
    let [domain, location_id] = [domain, location_id].map(Option::unwrap_or_default);
    let [simds, simds_per_cu, gfx] = ["simd_count", "simd_per_cu", "gfx_target_version"]
        .map(|key| narrow(key).unwrap_or_default());
    let unique_id = unique_id.unwrap_or(0);
    Some(Node { number, render_minor, unique_id, domain, location_id, simds, simds_per_cu, gfx })
}

/// Cuts a GPU into its partitions. The first uses the nodes of the GPU's own function. The others
/// belong to platform devices, `amdgpu_xcp_N`, which sysfs does not connect with the GPU.
pub(super) fn cut(root: &HostRoot, function: &PciFunction, kfd: &Kfd, facts: &mut Facts) {
    let mode = |file: &str| {
        root.read(&format!("{}/{file}", folder(function.address)))
            .map(|mode| mode.to_ascii_lowercase())
    };
    // A GPU that is not cut has modes too: `spx`, `nps1`.
    let current = mode("current_compute_partition");
    let is_whole = current.as_deref().is_none_or(|mode| mode == "spx");
    facts.note("compute_partition", current);
    facts.note("memory_partition", mode("current_memory_partition"));
    // The modes that the GPU can have.
    facts.note("compute_partitions", mode("available_compute_partition"));
    facts.note("memory_partitions", mode("available_memory_partition"));
    if kfd.is_denied && !is_whole {
        // Its partitions keep their last state.
        root.repeat_failures(&[ReadFailure {
            path: format!("/{NODES}"),
            error:
                "operation not permitted; to see the partitions of a GPU, Holdfast needs access \
                    to its render nodes (docs/configure.md, partitions of AMD's GPUs)"
                    .into(),
        }]);
        return;
    }
    let partitions = kfd.partitions(function);
    if partitions.is_empty() && !is_whole {
        // The driver has not added them yet. The nodes of the GPU are those of its first partition.
        facts.cut(KIND, Vec::new());
        return;
    }
    if partitions.is_empty() {
        if let Some(node) = kfd.node_of(function) {
            node.describe(root, facts);
        }
        return;
    }
    let xcps: Vec<(String, Vec<String>)> = root
        .entries(PLATFORM)
        .into_iter()
        .filter(|name| is_numbered(name, "amdgpu_xcp_"))
        .map(|name| (name.clone(), root.entries(&format!("{PLATFORM}/{name}/drm"))))
        .collect();
    let part = |(number, node): (u32, &Node)| {
        let render = format!("renderD{}", node.render_minor);
        let xcp = xcps.iter().find(|(_, names)| names.contains(&render));
        let siblings = if function.drm.contains(&render) {
            &function.drm
        } else {
            xcp.map_or(&function.drm, |(_, names)| names)
        };
        let is_own = siblings.contains(&render);
        let cards = siblings.iter().filter(|name| is_own && is_numbered(name, "card"));
        let mut part = Facts { attributes: facts.attributes.clone(), ..Facts::default() };
        part.nodes.push(required("/dev/kfd"));
        part.nodes.extend(cards.map(|card| optional(format!("/dev/dri/{card}"))));
        part.nodes.push(required(format!("/dev/dri/{render}")));
        part.note("partition", Some(number));
        part.note("render_minor", Some(node.render_minor));
        part.note("kfd_node", Some(node.number));
        part.note("xcp", xcp.map(|(name, _)| name));
        node.describe(root, &mut part);
        Part { name: format!("partition{number}"), facts: part }
    };
    let parts = partitions.into_iter().map(part).collect();
    facts.cut(KIND, parts);
}

/// Warnings for the operator about GPUs in a mode with partitions that have none.
pub(super) fn without_partitions(devices: &[Arc<Device>]) -> Vec<String> {
    let why = "its compute partition mode is not SPX, and the kernel shows no partitions of it \
               (/sys/class/kfd); `dmesg` may have the reason";
    without_parts(devices, KIND, why)
}

#[cfg(test)]
mod tests {
    use super::super::discover;
    use super::super::testing::{function, spec, write};
    use super::*;
    use crate::domain::{DeviceClass, Select};
    use crate::host::faults::with_faults;
    use nix::libc;

    /// A topology of nodes: SIMD count, render minor, unique id, location.
    fn topology(dir: &tempfile::TempDir, nodes: &[(u32, u32, u64, u32)]) {
        for (number, (simds, minor, unique, location)) in nodes.iter().enumerate() {
            let text = format!(
                "simd_count {simds}\ndrm_render_minor {minor}\nunique_id {unique}\nlocation_id {location}\n"
            );
            write(dir.path(), &format!("{NODES}/{number}/properties"), &text);
        }
    }

    #[test]
    fn a_gpu_and_a_partition_are_described_by_their_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let text = |location: u32, minor: u32, gfx: u32| {
            format!(
                "simd_count 304\nsimd_per_cu 4\ndrm_render_minor {minor}\nunique_id 7\n\
                 location_id {location}\ngfx_target_version {gfx}\n"
            )
        };
        let at = |number: u32, file: &str| format!("{NODES}/{number}/{file}");
        write(dir.path(), &at(1, "properties"), &text(0xa00, 128, 90402));
        let bank = "heap_type 1\nsize_in_bytes 206141652992\n";
        write(dir.path(), &at(1, "mem_banks/0/properties"), bank);
        let describes = |of: &Facts| {
            let names = ["vram_mib", "simd_count", "cu_count", "gfx_version"];
            names.map(|name| of.attributes.get(name).unwrap_or_default().to_owned())
        };
        assert_eq!(describes(&cut_gpu(&dir)), ["196592", "304", "76", "90402"]);
        // Not everything is stated of the second partition.
        write(
            dir.path(),
            &at(2, "properties"),
            &text(0xa01, 129, 0).replace("simd_per_cu 4", "a 0"),
        );
        let parts = cut_gpu(&dir).parts;
        assert_eq!(describes(&parts[0].facts), ["196592", "304", "76", "90402"]);
        assert_eq!(describes(&parts[1].facts), ["", "304", "", ""]);
    }

    /// As the service and an unprivileged pod see it. Another failed read is no such case.
    #[test]
    fn a_whole_gpu_is_known_where_the_kernel_hides_the_nodes_and_a_partition_is_not() {
        let dir = tempfile::tempdir().unwrap();
        topology(&dir, &[(304, 128, 7, 0xa00)]);
        let root = HostRoot::new(dir.path()).recording();
        let read = || (Kfd::read(&root, &Scan::default()), root.take_failures());
        let calls = with_faults(|_| None, read).1;
        let denied = |errno| {
            let with =
                |failing| with_faults(move |call| (call == failing).then_some(errno), read).0;
            (0..=calls).map(with).filter(|(kfd, _)| kfd.is_denied).collect::<Vec<_>>()
        };
        assert_eq!(denied(libc::EIO).len(), 0);
        let hidden = denied(libc::EPERM);
        assert!(!hidden.is_empty() && hidden.iter().all(|(_, failures)| failures.is_empty()));
        let gpu = PciFunction { drm: vec!["renderD128".into()], ..function("0000:0a:00.0") };
        let facts = |mode: &str| {
            let file = "sys/bus/pci/devices/0000:0a:00.0/current_compute_partition";
            write(dir.path(), file, mode);
            let mut facts = Facts::default();
            cut(&root, &gpu, &hidden[0].0, &mut facts);
            (facts.attributes.get("compute_partition").map(str::to_owned), root.take_failures())
        };
        assert_eq!(facts("SPX\n"), (Some("spx".to_owned()), Vec::new()));
        let (mode, failures) = facts("CPX\n");
        assert_eq!(mode.as_deref(), Some("cpx"));
        assert!(failures[0].error.contains("access to its render nodes"), "{failures:?}");
    }

    fn cut_gpu(dir: &tempfile::TempDir) -> Facts {
        let gpu = PciFunction {
            drm: vec!["card1".into(), "renderD128".into()],
            ..function("0000:0a:00.0")
        };
        let root = HostRoot::new(dir.path());
        let mut facts = Facts::default();
        cut(&root, &gpu, &Kfd::read(&root, &Scan::default()), &mut facts);
        facts
    }

    #[test]
    fn the_nodes_of_one_unique_id_are_the_partitions_of_one_gpu() {
        for locations in [[0xa00, 0xa01, 0xb00], [0xa00, 0x1000_0a00, 0xb00]] {
            let dir = tempfile::tempdir().unwrap();
            topology(
                &dir,
                &[
                    (0, 0, 0, 0),
                    (80, 130, 7, locations[1]),
                    (80, 128, 7, locations[0]),
                    (80, 129, 8, locations[2]),
                ],
            );
            write(
                dir.path(),
                "sys/bus/pci/devices/0000:0a:00.0/current_compute_partition",
                "CPX\n",
            );
            for name in ["card3", "renderD130"] {
                std::fs::create_dir_all(
                    dir.path().join(PLATFORM).join("amdgpu_xcp_4/drm").join(name),
                )
                .unwrap();
            }
            let facts = cut_gpu(&dir);
            assert_eq!(facts.parts_are, Some("partition"));
            let nodes = |at: usize| {
                facts.parts[at]
                    .facts
                    .nodes
                    .iter()
                    .map(|node| node.host.as_str())
                    .collect::<Vec<_>>()
            };
            assert_eq!(
                facts.parts.iter().map(|part| part.name.as_str()).collect::<Vec<_>>(),
                ["partition0", "partition1"]
            );
            assert_eq!(nodes(0), ["/dev/kfd", "/dev/dri/card1", "/dev/dri/renderD128"]);
            assert_eq!(
                nodes(1),
                ["/dev/kfd", "/dev/dri/card3", "/dev/dri/renderD130"],
                "in any order of the nodes"
            );
            let second = &facts.parts[1].facts.attributes;
            assert_eq!((&second["compute_partition"], &second["xcp"]), ("cpx", "amdgpu_xcp_4"));
        }
    }

    #[test]
    fn a_gpu_in_a_mode_with_partitions_is_not_offered_whole_without_them() {
        let dir = tempfile::tempdir().unwrap();
        let place = "sys/bus/pci/devices/0000:0a:00.0";
        let uevent = "DRIVER=amdgpu\nPCI_CLASS=120000\nPCI_ID=1002:74A1\n";
        write(dir.path(), &format!("{place}/uevent"), uevent);
        write(dir.path(), &format!("{place}/drm/renderD128/dev"), "226:128\n");
        let offered = |mode: &str| {
            write(dir.path(), &format!("{place}/current_compute_partition"), mode);
            let specs = [spec("amd.com/gpu", DeviceClass::Gpu, Select::default())];
            let found = discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
            let warnings = found.selection.warnings.join("; ");
            (found.selection.resources.values().map(Vec::len).sum::<usize>(), warnings)
        };
        assert_eq!(offered("SPX\n"), (1, String::new()));
        let (count, warnings) = offered("CPX\n");
        assert!(count == 0 && warnings.contains("shows no partitions"), "{count}: {warnings}");
        // One of them is there already.
        topology(&dir, &[(0, 0, 0, 0), (38, 128, 7, 0xa00)]);
        assert_eq!(offered("CPX\n").0, 0);
    }

    #[test]
    fn a_whole_gpu_has_no_parts_and_ids_of_zero_tie_nothing_together() {
        let dir = tempfile::tempdir().unwrap();
        topology(&dir, &[(80, 128, 7, 0xa00), (80, 129, 8, 0xb00)]);
        assert_eq!(cut_gpu(&dir).parts_are, None);
        topology(&dir, &[(80, 128, 0, 0xa00), (80, 129, 0, 0xb00)]);
        assert_eq!(cut_gpu(&dir).parts_are, None);
    }
}
