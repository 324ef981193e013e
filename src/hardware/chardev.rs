//! Plain nodes in `/dev`, named by the configuration, and folders of them.
//!
//! A path that leads to a folder (`/dev/snd`) is one device with every node in it. A wildcard that matches nodes and folders means the
//! nodes.
//!
//! A node is found by what it is now (`/dev/ttyUSB0`) and named by what stays the same: udev's link to it, else the
//! kernel's subsystem and name. No node is ever opened: that alone can reset a modem or arm a watchdog.

use super::disks::Disks;
use super::each::Dev;
use crate::domain::{CharPath, Device, DeviceClass, DeviceId, DeviceNode, Gather, NodePattern, ResourceName, ResourceSpec};
use crate::host::{HostNode, HostRoot, Listings, NodeFolder};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
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
    /// Globs that match nothing, or nothing that is left.
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
    let (mut taken, mut listings) = (BTreeMap::new(), Listings::default());
    let dev = Dev::of(root, specs.iter().flat_map(|spec| &spec.paths).map(|path| &path.host));
    for spec in specs {
        let devices = found.by_resource.entry(spec.name.clone()).or_default();
        let mut warn = |warning: String| found.warnings.push(format!("{}: {warning}", spec.name));
        for path in &spec.paths {
            let things = match things(root, &dev, &mut listings, path) {
                Ok(things) if things.is_empty() => {
                    let is_folder = path.host.literal().is_some_and(|path| root.is_dir(path.trim_start_matches('/')));
                    let why = if is_folder { ", which is a folder without one" } else { "" };
                    warn(format!("no device node matches {}{why}", path.host));
                    continue;
                }
                Ok(things) => things,
                Err(error) => {
                    warn(format!("{} cannot be looked at: {error}", path.host));
                    continue;
                }
            };
            let (before, mut of_other) = (devices.len(), None);
            for Thing { folder, nodes } in things {
                let (mine, others): (Vec<_>, Vec<_>) = nodes.into_iter().partition(|node| !taken.contains_key(&node.path));
                of_other = others.first().and_then(|node| taken.get(&node.path)).filter(|other| **other != spec.name).cloned().or(of_other);
                let disk = mine.iter().map(|node| base_name(&node.path)).find(|name| folder.is_some() && disks.has(name));
                if let Some(disk) = disk {
                    warn(format!("{} is a folder with the disk {disk} in it; name disks by their paths", path.host));
                    continue;
                }
                if let Some(mut device) = describe(folder.as_deref(), &mine, path, &links, &kernel) {
                    taken.extend(mine.into_iter().map(|node| (node.path, spec.name.clone())));
                    if folder.is_none() {
                        let name = device.nodes.first().map(|node| base_name(&node.host).to_owned()).unwrap_or_default();
                        note_use(&mut device, &name, disks);
                    }
                    devices.push(device);
                }
            }
            if let Some(other) = of_other.filter(|_| devices.len() == before) {
                warn(format!("what {} leads to is in {other} already, the first resource that names it", path.host));
            }
        }
    }
    found
}

/// What a path leads to that is one device: a node, or a folder of nodes.
struct Thing {
    folder: Option<String>,
    nodes: Vec<HostNode>,
}

fn things(root: &HostRoot, dev: &io::Result<Dev>, listings: &mut Listings, path: &CharPath) -> io::Result<Vec<Thing>> {
    let dev = dev.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    let paths = dev.paths(root, listings, &path.host);
    // Two links to one node are one device. A link that leads out of `/dev` leads to no node of this host.
    let nodes = paths.iter().filter_map(|path| root.node_among(listings, path));
    let nodes: BTreeSet<HostNode> = nodes.filter(|node| node.path.starts_with("/dev/")).gather();
    let is_glob = matches!(path.host, NodePattern::Glob(_));
    let mut things: Vec<Thing> = nodes.into_iter().map(|node| Thing { folder: None, nodes: vec![node] }).collect();
    if is_glob && !things.is_empty() {
        return Ok(things);
    }
    let mut folders = BTreeMap::new();
    for path in paths {
        if let Some(NodeFolder { path, nodes }) = root.folder_nodes(&path)?.filter(|folder| !folder.nodes.is_empty()) {
            folders.insert(path, nodes);
        }
    }
    things.extend(folders.into_iter().map(|(path, nodes)| Thing { folder: Some(path), nodes }));
    Ok(things)
}

/// The device of a node, or of a folder and its nodes; none of no node.
fn describe(
    folder: Option<&str>,
    nodes: &[HostNode],
    path: &CharPath,
    links: &BTreeMap<String, String>,
    kernel: &KernelNames<'_>,
) -> Option<Device> {
    let first = nodes.first()?;
    let thing = folder.unwrap_or(&first.path);
    let container = match &path.container {
        None => thing.to_owned(),
        Some(folder) if folder.ends_with('/') => format!("{folder}{}", base_name(thing)),
        Some(container) => container.clone(),
    };
    let link = links.get(thing);
    let kernel = kernel.of_node(first).filter(|_| folder.is_none());
    let id = link.map(|link| base_name(link).to_owned()).or_else(|| kernel.clone()).unwrap_or_else(|| plain_id(thing));
    let mut attributes = BTreeMap::new();
    if let Some(kernel) = kernel {
        attributes.insert("kernel_name".to_owned(), kernel);
    }
    let node = |node: &HostNode| {
        let below = node.path.strip_prefix(thing).unwrap_or_default();
        DeviceNode {
            host: node.path.clone(),
            container: format!("{container}{below}"),
            permissions: path.permissions.clone(),
            required: true,
        }
    };
    Some(Device {
        id: DeviceId::new(id),
        // The link where there is one: after a replug another thing may be /dev/ttyUSB0.
        key: format!("dev:{}", link.map_or(thing, String::as_str)),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: nodes.iter().map(node).collect(),
        attributes,
    })
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
        let expected = [
            "example.com/second: what /dev/ttyACM0 leads to is in example.com/first already, the first resource that names it",
            "example.com/second: no device node matches /dev/none*",
        ];
        assert_eq!(found.warnings, expected);
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
    #[test]
    fn a_folder_is_one_device_with_every_node_in_it() {
        let dir = tempfile::tempdir().unwrap();
        for node in [
            "snd/controlC0",
            "snd/pcmC0D0p",
            "snd/seq",
            "dvb/adapter0/demux0",
            "dvb/adapter1/demux0",
            "input/event0",
            "input/by/x",
            "mapper/sda",
        ] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        std::fs::create_dir_all(dir.path().join("dev/empty")).unwrap();
        write(dir.path(), "sys/class/block/sda/dev", "8:0");
        let nodes = |found: &CharDevices, spec: &ResourceSpec| -> Vec<(String, Vec<String>)> {
            let of = |device: &Device| (device.id.to_string(), device.nodes.iter().map(|node| node.container.clone()).collect());
            found.by_resource[&spec.name].iter().map(of).collect()
        };
        let mut moved = (*char_spec("example.com/moved", &["/dev/dvb/adapter*"])).clone();
        moved.paths[0].container = Some("/x/".into());
        let specs = [
            char_spec("example.com/seq", &["/dev/snd/seq"]),
            char_spec("example.com/audio", &["/dev/snd"]),
            Arc::new(moved),
            char_spec("example.com/input", &["/dev/input/*"]),
            char_spec("example.com/late", &["/dev/snd/pcm*", "/dev/snd"]),
            char_spec("example.com/none", &["/dev/empty", "/dev/mapper"]),
        ];
        let found = found(&dir, &specs);
        let of = |id: &str, nodes: &[&str]| (id.to_owned(), nodes.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(nodes(&found, &specs[1]), [of("dev:snd", &["/dev/snd/controlC0", "/dev/snd/pcmC0D0p"])]);
        assert_eq!(found.by_resource[&specs[1].name][0].key, "dev:/dev/snd");
        let adapters = [of("dev:dvb-adapter0", &["/x/adapter0/demux0"]), of("dev:dvb-adapter1", &["/x/adapter1/demux0"])];
        assert_eq!(nodes(&found, &specs[2]), adapters);
        assert_eq!(nodes(&found, &specs[3]), [of("dev:input-event0", &["/dev/input/event0"])], "of nodes and folders the nodes are meant");
        let expected = [
            "example.com/late: what /dev/snd/pcm* leads to is in example.com/audio already, the first resource that names it",
            "example.com/late: what /dev/snd leads to is in example.com/audio already, the first resource that names it",
            "example.com/none: no device node matches /dev/empty, which is a folder without one",
            "example.com/none: /dev/mapper is a folder with the disk sda in it; name disks by their paths",
        ];
        assert_eq!(found.warnings, expected);
    }
}
