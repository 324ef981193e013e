//! RDMA adapters (Linux `Documentation/ABI/stable/sysfs-class-infiniband`): nodes from
//! `class/infiniband_verbs` and `class/infiniband_mad`, whose numbers differ from those of the RDMA
//! devices.
//!
//! The id of an adapter is its PCI address, as for all functions with a network interface. Multus
//! passes the kubelet's id to the CNI plugin as the address of the function (`pciBusID`,
//! `deviceID`). The plugin searches for it in sysfs. The GUID is an attribute.

use super::facts::{Facts, optional, required};
use crate::domain::PciFunction;
use crate::host::HostRoot;
use std::collections::{BTreeMap, BTreeSet};

/// The classes of the nodes; the last one exists in kernels before 5.8.
const CLASSES: [&str; 3] = ["infiniband_verbs", "infiniband_mad", "infiniband_cm"];

/// Upper bound of port numbers: more than any adapter has.
const PORTS_MAX: u32 = 4;

/// The nodes of every RDMA device, by its name. The classes are read once for a whole scan.
#[derive(Debug, Default)]
pub(super) struct RdmaNodes(BTreeMap<String, BTreeSet<String>>);

impl RdmaNodes {
    pub(super) fn read(root: &HostRoot) -> Self {
        let mut nodes: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for class in CLASSES {
            for name in root.entries(&format!("sys/class/{class}")) {
                if let Some(device) = root.read(&format!("sys/class/{class}/{name}/ibdev")) {
                    nodes.entry(device).or_default().insert(name);
                }
            }
        }
        RdmaNodes(nodes)
    }
}

/// The facts of the RDMA devices of a function, whose folder is `dir`.
pub(super) fn facts(root: &HostRoot, dir: &str, function: &PciFunction, all: &RdmaNodes) -> Facts {
    let mut facts = Facts::default();
    let mut names: BTreeSet<String> =
        function.rdma.iter().filter_map(|device| all.0.get(device)).flatten().cloned().collect();
    for class in CLASSES {
        names.extend(
            root.entries(&format!("{dir}/{class}")).into_iter().filter(|name| is_node(name)),
        );
    }
    let node = |name: &String| format!("/dev/infiniband/{name}");
    let (verbs, mads): (Vec<_>, Vec<_>) = names.iter().partition(|name| name.starts_with("uverbs"));
    facts.nodes.extend(verbs.into_iter().map(|name| required(node(name))));
    // Management datagrams: absent for an adapter that supports RoCE only.
    facts.nodes.extend(mads.into_iter().map(|name| optional(node(name))));
    // One node for all adapters. Verbs work without the module that makes it (`rdma_ucm`).
    facts.nodes.push(optional("/dev/infiniband/rdma_cm"));

    // A function has one RDMA device. If it has more, the smallest GUID does not depend on their
    // names.
    let below = |device: &String, file: &str| {
        root.read(&format!("{dir}/infiniband/{device}/{file}"))
            .or_else(|| root.read(&format!("sys/class/infiniband/{device}/{file}")))
    };
    let guid = function
        .rdma
        .iter()
        .filter_map(|device| below(device, "node_guid"))
        .filter(|guid| is_guid(guid))
        .min();
    facts.note("node_guid", guid);
    facts.note(
        "sys_image_guid",
        function
            .rdma
            .iter()
            .filter_map(|device| below(device, "sys_image_guid"))
            .filter(|guid| is_guid(guid))
            .min(),
    );
    // An adapter with two ports may have both types; the first port decides.
    let layer = function.rdma.iter().find_map(|device| {
        (1..=PORTS_MAX).find_map(|port| below(device, &format!("ports/{port}/link_layer")))
    });
    // As the SR-IOV network device plugin: entry 0 of the table of partition keys, of the first
    // port of the first RDMA device.
    let is_infiniband = layer.as_deref() == Some("InfiniBand");
    let first = function.rdma.first().filter(|_| is_infiniband);
    facts.note("pkey", first.and_then(|device| below(device, "ports/1/pkeys/0")));
    facts.note("link_type", layer.as_deref().and_then(link_type));
    facts.note("link_layer", layer);
    facts.note("firmware", function.rdma.iter().find_map(|device| below(device, "fw_ver")));
    facts
}

/// The configuration's name for a link layer.
fn link_type(layer: &str) -> Option<&'static str> {
    match layer {
        "Ethernet" => Some("ether"),
        "InfiniBand" => Some("infiniband"),
        _ => None,
    }
}

fn is_node(name: &str) -> bool {
    ["uverbs", "umad", "issm", "ucm"].iter().any(|prefix| name.starts_with(prefix))
}

/// Whether the text is a GUID (`0c42:a103:006f:1954`) and not only zeros, which adapters without
/// one (EFA) show.
fn is_guid(text: &str) -> bool {
    text.len() == 19
        && text.bytes().all(|byte| byte == b':' || byte.is_ascii_hexdigit())
        && text.bytes().any(|byte| !matches!(byte, b':' | b'0'))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;
    use crate::hardware::pci::folder;

    fn adapter() -> PciFunction {
        PciFunction { rdma: vec!["mlx5_0".into()], ..function("0000:1b:00.0") }
    }

    #[test]
    fn nodes_are_found_by_the_rdma_devices_name() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/class/infiniband_verbs/uverbs7/ibdev", "mlx5_0\n");
        write(dir.path(), "sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_1\n");
        write(dir.path(), "sys/class/infiniband_mad/umad3/ibdev", "mlx5_0\n");
        write(dir.path(), "sys/class/infiniband_mad/issm3/ibdev", "mlx5_0\n");
        write(dir.path(), "sys/class/infiniband/mlx5_0/node_guid", "506b:4b03:003c:eee8\n");
        write(dir.path(), "sys/class/infiniband/mlx5_0/ports/2/link_layer", "InfiniBand\n");
        let root = HostRoot::new(dir.path());
        let dir = folder(adapter().address);
        let facts = facts(&root, &dir, &adapter(), &RdmaNodes::read(&root));
        let nodes: Vec<_> =
            facts.nodes.iter().map(|node| (node.host.as_str(), node.required)).collect();
        let management = [("/dev/infiniband/issm3", false), ("/dev/infiniband/umad3", false)];
        assert_eq!(
            nodes,
            [
                &[("/dev/infiniband/uverbs7", true)],
                &management[..],
                &[("/dev/infiniband/rdma_cm", false)]
            ]
            .concat()
        );
        assert_eq!(
            (&facts.attributes["link_layer"], &facts.attributes["link_type"]),
            ("InfiniBand", "infiniband")
        );
        assert_eq!(
            (&facts.attributes["node_guid"], facts.identity),
            ("506b:4b03:003c:eee8", None),
            "a CNI plugin takes the address"
        );
    }

    #[test]
    fn the_first_partition_key_is_that_of_an_infiniband_port() {
        for (layer, expected) in [("InfiniBand", Some("0x8001")), ("Ethernet", None)] {
            let dir = tempfile::tempdir().unwrap();
            let port = format!("{}/infiniband/mlx5_0/ports/1", folder(adapter().address));
            write(dir.path(), &format!("{port}/link_layer"), layer);
            write(dir.path(), &format!("{port}/pkeys/0"), "0x8001\n");
            write(dir.path(), &format!("{port}/pkeys/1"), "0x7fff\n");
            let root = HostRoot::new(dir.path());
            let dir = folder(adapter().address);
            let facts = facts(&root, &dir, &adapter(), &RdmaNodes::default());
            assert_eq!(facts.attributes.get("pkey"), expected, "{layer}");
        }
    }

    #[test]
    fn a_guid_of_zeros_is_none() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/class/infiniband/mlx5_0/node_guid", "0000:0000:0000:0000\n");
        let root = HostRoot::new(dir.path());
        let dir = folder(adapter().address);
        let facts = facts(&root, &dir, &adapter(), &RdmaNodes::default());
        assert_eq!(facts.attributes.get("node_guid"), None);
    }
}
