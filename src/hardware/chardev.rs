//! Plain nodes in `/dev`, named by the configuration.
//!
//! A node is found by what it is now (`/dev/ttyUSB0`) and named by what stays the same: udev's link to it, else the
//! kernel's subsystem and name. No node is ever opened: that alone can reset a modem or arm a watchdog.

use super::disks::Disks;
use crate::domain::{CharPath, Device, DeviceClass, DeviceId, DeviceNode, Gather, ResourceName, ResourceSpec};
use crate::host::{HostNode, HostRoot, Listings};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Folders of udev's links, best first: the thing's own identity, then the place where it is plugged in.
const LINK_FOLDERS: [&str; 8] = [
    "dev/serial/by-id",
    "dev/disk/by-id",
    "dev/v4l/by-id",
    "dev/input/by-id",
    "dev/serial/by-path",
    "dev/disk/by-path",
    "dev/v4l/by-path",
    "dev/input/by-path",
];

/// The nodes that the `char` resources name.
#[derive(Debug, Default)]
pub(super) struct CharDevices {
    /// By resource, in the order of their nodes. Each node is in the first resource that names it.
    pub(super) by_resource: BTreeMap<ResourceName, Vec<Device>>,
    /// Globs that match nothing.
    pub(super) warnings: Vec<String>,
}

pub(super) fn discover(root: &HostRoot, specs: &[Arc<ResourceSpec>], disks: &Disks<'_>) -> CharDevices {
    let mut found = CharDevices::default();
    let specs: Vec<_> = specs.iter().filter(|spec| spec.class == DeviceClass::Char).collect();
    if specs.is_empty() {
        return found;
    }
    let links = stable_links(root);
    let kernel = KernelNames::of(root);
    let (mut taken, mut listings) = (BTreeSet::new(), Listings::default());
    for spec in specs {
        let devices = found.by_resource.entry(spec.name.clone()).or_default();
        for path in &spec.paths {
            // Two links to one node are one device. A link that leads out of `/dev` leads to no node of this host.
            let paths = root.glob_among(&mut listings, &path.host);
            let nodes = paths.into_iter().filter_map(|node| root.node_among(&mut listings, &node));
            let nodes: BTreeSet<HostNode> = nodes.filter(|node| node.path.starts_with("/dev/")).gather();
            if nodes.is_empty() {
                found.warnings.push(format!("{}: no device node matches {}", spec.name, path.host));
            }
            for node in nodes {
                if taken.insert(node.path.clone()) {
                    let mut device = describe(&node, path, &links, &kernel);
                    note_use(&mut device, base_name(&node.path), disks);
                    devices.push(device);
                }
            }
        }
    }
    found
}

fn describe(found: &HostNode, path: &CharPath, links: &BTreeMap<String, String>, kernel: &KernelNames<'_>) -> Device {
    let node = found.path.as_str();
    let container = match &path.container {
        None => node.to_owned(),
        Some(folder) if folder.ends_with('/') => format!("{folder}{}", base_name(node)),
        Some(container) => container.clone(),
    };
    let link = links.get(node);
    let kernel = kernel.of_node(found);
    let id = link.map(|link| base_name(link).to_owned()).or_else(|| kernel.clone()).unwrap_or_else(|| plain_id(node));
    let mut attributes = BTreeMap::new();
    if let Some(kernel) = kernel {
        attributes.insert("kernel_name".to_owned(), kernel);
    }
    Device {
        id: DeviceId::new(id),
        // The link where there is one: after a replug another thing may be /dev/ttyUSB0.
        key: format!("dev:{}", link.map_or(node, String::as_str)),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: vec![DeviceNode { host: node.to_owned(), container, permissions: path.permissions.clone(), required: true }],
        attributes,
    }
}

/// Notes what the host does with a node that is a disk.
fn note_use(device: &mut Device, name: &str, disks: &Disks<'_>) {
    if disks.has(name) {
        device.attributes.insert("disk".to_owned(), name.to_owned());
        disks.note(&mut device.attributes, name);
    }
}

/// udev's best link to each node, by the node's real path.
fn stable_links(root: &HostRoot) -> BTreeMap<String, String> {
    let mut links = BTreeMap::new();
    for folder in LINK_FOLDERS {
        for name in root.entries(folder) {
            let link = format!("/{folder}/{name}");
            if let Some(node) = root.canonical_node(&link).filter(|node| *node != link) {
                links.entry(node).or_insert(link);
            }
        }
    }
    links
}

/// What the kernel calls a node: `subsystem:name`.
struct KernelNames<'a> {
    root: &'a HostRoot,
    /// The one class that has a device of a name, `None` where several have; listed when the first node without numbers is met.
    class_of: OnceCell<BTreeMap<String, Option<String>>>,
}

impl<'a> KernelNames<'a> {
    fn of(root: &'a HostRoot) -> Self {
        KernelNames { root, class_of: OnceCell::new() }
    }

    /// From `sys/dev/{char,block}/MAJOR:MINOR`; in a captured tree, where a node has no numbers, from the one class that has a
    /// device of its name.
    fn of_node(&self, node: &HostNode) -> Option<String> {
        let Some((major, minor)) = node.numbers else {
            let name = base_name(&node.path);
            let class = self.class_of.get_or_init(|| self.list_classes()).get(name)?.as_ref()?;
            return Some(format!("{class}:{name}"));
        };
        ["char", "block"].iter().find_map(|kind| {
            let link = format!("sys/dev/{kind}/{major}:{minor}");
            Some(format!("{}:{}", self.root.link_name(&format!("{link}/subsystem"))?, self.root.link_name(&link)?))
        })
    }

    fn list_classes(&self) -> BTreeMap<String, Option<String>> {
        let mut class_of = BTreeMap::new();
        for class in self.root.entries("sys/class") {
            let folder = format!("sys/class/{class}");
            // A link to a device that was not captured names none.
            for name in self.root.entries(&folder).into_iter().filter(|name| self.root.exists(&format!("{folder}/{name}"))) {
                class_of.entry(name).and_modify(|class| *class = None).or_insert_with(|| Some(class.clone()));
            }
        }
        class_of
    }
}

/// `dev:` and the path below `/dev`, with `-` for each `/`.
fn plain_id(node: &str) -> String {
    format!("dev:{}", node.strip_prefix("/dev/").unwrap_or(node).replace('/', "-"))
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, write};
    use super::*;
    use std::os::unix::fs::symlink;

    fn ids(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.id.as_str()).collect()
    }

    fn found(dir: &tempfile::TempDir, specs: &[Arc<ResourceSpec>]) -> CharDevices {
        let root = HostRoot::new(dir.path());
        discover(&root, specs, &Disks::of(&root))
    }

    #[test]
    fn a_node_is_named_by_id_then_by_path_then_by_the_kernel_then_by_its_path() {
        let dir = tempfile::tempdir().unwrap();
        for node in ["ttyUSB0", "ttyUSB1", "fuse", "bus/usb/001"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        write(dir.path(), "sys/class/misc/fuse/dev", "10:229");
        std::fs::create_dir_all(dir.path().join("dev/serial/by-id")).unwrap();
        std::fs::create_dir_all(dir.path().join("dev/serial/by-path")).unwrap();
        symlink("../../ttyUSB0", dir.path().join("dev/serial/by-id/usb-FTDI_A1")).unwrap();
        symlink("../../ttyUSB0", dir.path().join("dev/serial/by-path/pci-0:1")).unwrap();
        symlink("../../ttyUSB1", dir.path().join("dev/serial/by-path/pci-0:2")).unwrap();
        for class in ["video4linux", "media"] {
            write(dir.path(), &format!("sys/class/{class}/both/dev"), "81:0");
        }
        write(dir.path(), "dev/both", "");
        for name in ["fuse", "001"] {
            symlink("../../devices/none", dir.path().join("sys/class/media").join(name)).unwrap();
        }
        let specs = [char_spec("example.com/all", &["/dev/ttyUSB*", "/dev/fuse", "/dev/bus/usb/*", "/dev/both"])];
        let found = found(&dir, &specs);
        let devices = &found.by_resource[&specs[0].name];
        assert_eq!(ids(devices), ["usb-FTDI_A1", "pci-0:2", "misc:fuse", "dev:bus-usb-001", "dev:both"], "two classes have a `both`");
        assert_eq!(devices[0].key, "dev:/dev/serial/by-id/usb-FTDI_A1");
        assert_eq!(devices[2].key, "dev:/dev/fuse");
    }

    #[test]
    fn links_lead_to_one_device_with_the_real_node() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "dev/ttyACM0", "");
        std::fs::create_dir_all(dir.path().join("dev/serial/by-id")).unwrap();
        symlink("../../ttyACM0", dir.path().join("dev/serial/by-id/usb-a")).unwrap();
        symlink("/dev/ttyACM0", dir.path().join("dev/serial/by-id/usb-b")).unwrap();
        symlink("../../absent", dir.path().join("dev/serial/by-id/usb-c")).unwrap();
        write(dir.path(), "sys/class/tty/ttyACM0/dev", "166:0");
        symlink("../../../sys/class/tty/ttyACM0/dev", dir.path().join("dev/serial/by-id/usb-d")).unwrap();
        let specs = [
            char_spec("example.com/first", &["/dev/serial/by-id/*", "/dev/tty*"]),
            char_spec("example.com/second", &["/dev/ttyACM0", "/dev/none*"]),
        ];
        let found = found(&dir, &specs);
        assert_eq!(found.by_resource[&specs[0].name][0].nodes[0].host, "/dev/ttyACM0");
        assert_eq!(found.by_resource[&specs[0].name].len(), 1);
        assert!(found.by_resource[&specs[1].name].is_empty(), "the first resource has it");
        assert_eq!(found.warnings, ["example.com/second: no device node matches /dev/none*"]);
    }

    #[test]
    fn the_container_gets_the_node_where_the_configuration_says() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "dev/video3", "");
        let mut spec = (*char_spec("example.com/camera", &["/dev/video3"])).clone();
        for (container, expected) in [(None, "/dev/video3"), (Some("/dev/cam/"), "/dev/cam/video3"), (Some("/dev/cam"), "/dev/cam")] {
            spec.paths[0].container = container.map(str::to_owned);
            let found = found(&dir, &[Arc::new(spec.clone())]);
            assert_eq!(found.by_resource[&spec.name][0].nodes[0].container, expected);
        }
    }
}
