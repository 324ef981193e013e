//! How the nodes of `/dev` are named. Pure.
//!
//! A node is named by udev's best link to it, else by the kernel's subsystem and name, else by its
//! path. A link may move: two USB sticks without a serial number share one link by id, which leads
//! to the last one plugged in (systemd issue 30574). While a container holds the node that it was
//! granted by such a link, the id stays with that node. The other node gets its next best name.

use crate::domain::{DeviceId, Object, Objects};
use std::collections::BTreeMap;

/// A node that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedNode {
    /// The real path.
    pub path: String,
    /// udev's links to it, best first; for a USB device its lasting names, which two devices may
    /// share.
    pub links: Vec<String>,
    /// The kernel's name for it, `subsystem:name`.
    pub kernel: Option<String>,
    /// The objects that are held with it.
    pub objects: Vec<Object>,
}

/// A node that a container holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldNode {
    /// The id under which it was granted; for a share, the id of the device.
    pub id: DeviceId,
    /// The objects that are held with it.
    pub objects: Vec<Object>,
}

/// The name of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeName {
    /// The id.
    pub id: DeviceId,
    /// The key: the link where there is one, because after a replug another device may be
    /// `/dev/ttyUSB0`.
    pub key: String,
}

/// Names each node.
pub fn name_nodes(nodes: &[NamedNode], held: &[HeldNode]) -> Vec<NodeName> {
    let kept = kept_names(nodes, held);
    let mut leads_to: BTreeMap<&str, usize> = BTreeMap::new();
    for link in nodes.iter().flat_map(|node| &node.links) {
        *leads_to.entry(link).or_default() += 1;
    }
    let name = |(index, node): (usize, &NamedNode)| {
        if let Some(name) = kept.by_node.get(&index) {
            return name.clone();
        }
        // A name that several devices show names none of them.
        let is_one = |link: &&String| leads_to.get(link.as_str()) == Some(&1);
        let free = |link: &&String| match kept.by_link.get(link.as_str()) {
            Some(owner) => *owner == index,
            None => is_one(link),
        };
        let link = node.links.iter().find(free);
        let id = link
            .map(|link| base_name(link).to_owned())
            .or_else(|| node.kernel.clone())
            .unwrap_or_else(|| plain_id(&node.path));
        NodeName { id: DeviceId::new(id), key: format!("dev:{}", link.unwrap_or(&node.path)) }
    };
    nodes.iter().enumerate().map(name).collect()
}

/// Names that stay with a held node although their link leads elsewhere.
#[derive(Default)]
struct KeptNames<'a> {
    by_node: BTreeMap<usize, NodeName>,
    /// The node that keeps a link.
    by_link: BTreeMap<&'a str, usize>,
}

fn kept_names<'a>(nodes: &'a [NamedNode], held: &[HeldNode]) -> KeptNames<'a> {
    let mut kept = KeptNames::default();
    if held.is_empty() {
        return kept;
    }
    let mut by_link: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    let mut by_object: Objects<usize> = Objects::default();
    for (index, node) in nodes.iter().enumerate() {
        by_object.hold(&index, node.objects.iter().cloned());
        for link in &node.links {
            by_link.entry(base_name(link)).or_insert((index, link));
        }
    }
    for HeldNode { id, objects } in held {
        // Matched by id and not by key: a rebuilt ledger does not know the key.
        let Some((leads_to, link)) = by_link.get(id.as_str()).copied() else { continue };
        // The held device may have two nodes now, and the link leads to one of them.
        let is_there = by_object.conflict(objects, |node| *node != leads_to).copied();
        let elsewhere = || by_object.conflict(objects, |node| *node == leads_to).copied();
        let Some(is) = is_there.or_else(elsewhere) else { continue };
        kept.by_link.insert(link, is);
        kept.by_node.insert(is, NodeName { id: id.clone(), key: format!("dev:{link}") });
    }
    kept
}

/// `dev:` and the path below `/dev`, with `-` for each `/`.
fn plain_id(node: &str) -> String {
    format!("dev:{}", node.strip_prefix("/dev/").unwrap_or(node).replace('/', "-"))
}

/// The part of a link's target that follows `devices/`; `None` where the link does not lead below
/// `/sys/devices`.
pub(super) fn below_devices(target: &str) -> Option<String> {
    let (up, device) = target.split_once("devices/")?;
    up.split('/').all(|name| matches!(name, "" | "." | ".." | "sys")).then(|| device.to_owned())
}

pub(super) fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(path: &str, links: &[&str]) -> NamedNode {
        let links = links.iter().map(|link| format!("/dev/serial/{link}")).collect();
        NamedNode { path: path.into(), links, kernel: None, objects: vec![Object::node(path)] }
    }

    fn held(id: &str, path: &str) -> HeldNode {
        HeldNode { id: DeviceId::new(id), objects: vec![Object::node(path)] }
    }

    fn names(nodes: &[NamedNode], held: &[HeldNode]) -> Vec<(String, String)> {
        name_nodes(nodes, held).into_iter().map(|name| (name.id.to_string(), name.key)).collect()
    }

    fn name(id: &str, link: &str) -> (String, String) {
        (id.into(), format!("dev:/dev/{link}"))
    }

    #[test]
    fn a_name_that_two_nodes_show_names_only_the_held_one() {
        let twins =
            [node("/dev/a", &["serial-0", "port-1"]), node("/dev/b", &["serial-0", "port-2"])];
        let port = |n: u32| name(&format!("port-{n}"), &format!("serial/port-{n}"));
        let serial = || name("serial-0", "serial/serial-0");
        assert_eq!(names(&twins, &[]), [port(1), port(2)]);
        assert_eq!(names(&twins, &[held("serial-0", "/dev/a")]), [serial(), port(2)]);
        assert_eq!(names(&twins, &[held("serial-0", "/dev/b")]), [port(1), serial()]);
        assert_eq!(names(&twins, &[held("serial-0", "/dev/c")]), [port(1), port(2)]);
        assert_eq!(names(&twins[..1], &[]), [serial()]);
        assert_eq!(names(&twins[..1], &[held("port-1", "/dev/a")]), [port(1)]);
    }

    #[test]
    fn a_link_that_moves_does_not_take_the_id_from_a_held_node() {
        let twins = [
            node("/dev/ttyUSB0", &["by-path/1"]),
            node("/dev/ttyUSB1", &["by-id/usb-a", "by-path/2"]),
        ];
        let own = [name("1", "serial/by-path/1"), name("usb-a", "serial/by-id/usb-a")];
        assert_eq!(names(&twins, &[]), own, "no node is held");
        assert_eq!(
            names(&twins, &[held("usb-a", "/dev/ttyUSB0")]),
            [name("usb-a", "serial/by-id/usb-a"), name("2", "serial/by-path/2")]
        );
        assert_eq!(
            names(&twins, &[held("usb-a", "/dev/ttyUSB1")]),
            own,
            "the link leads to the held one"
        );
        assert_eq!(
            names(&twins, &[held("usb-a", "/dev/ttyUSB7")]),
            own,
            "it was plugged in again, and has another number"
        );
        assert_eq!(names(&twins, &[held("1", "/dev/ttyUSB0")]), own);
        assert_eq!(
            names(&twins, &[held("2", "/dev/ttyUSB1")]),
            [name("1", "serial/by-path/1"), name("2", "serial/by-path/2")],
            "a better link does not rename a held node"
        );
        let bare = [node("/dev/ttyUSB0", &[]), node("/dev/ttyUSB1", &["by-id/usb-a"])];
        let expected = [name("usb-a", "serial/by-id/usb-a"), name("dev:ttyUSB1", "ttyUSB1")];
        assert_eq!(
            names(&bare, &[held("usb-a", "/dev/ttyUSB0")]),
            expected,
            "without another link the path names it"
        );
    }
}
