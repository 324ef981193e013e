//! Plain nodes of `/dev` that the configuration names, and folders of them.
//!
//! A path that leads to a folder (`/dev/snd`) is one device with every node in it. A wildcard that
//! matches nodes and folders selects the nodes only. A group of paths is one device with the nodes
//! of all of them, and is named as its first path is. A USB device has its node and those of its
//! drivers, and is named by its serial number or its port.
//!
//! A node is found by its current name (`/dev/ttyUSB0`). Its id comes from a name that stays the
//! same: udev's link to it, else a link that selects it, else the kernel's subsystem and name. No
//! node is ever opened: opening alone can reset a modem or arm a watchdog.

use super::Scan;
use super::char_devices::{CharDevices, note_failure};
use super::describe::Shared;
use super::disks::{DISK_LINKS, Disks};
use super::kernel_names::{KernelNames, KernelRecord};
use super::matches::{Match, matches};
use super::node_names::{HeldNode, NamedNode, NodeName, below_devices, name_nodes};
use super::numa::NumaNodes;
use super::usb::{self, UsbDevice};
use crate::domain::{
    Attributes, Device, DeviceClass, DeviceId, DeviceNode, Object, ResourceName, ResourceSpec,
};
use crate::host::{HostNode, HostRoot, Listings};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Folders of udev's links, best first: by the device's own identity, then by the place where it is
/// plugged in.
const LINK_FOLDERS: [&str; 8] = [
    "dev/serial/by-id",
    DISK_LINKS,
    "dev/v4l/by-id",
    "dev/input/by-id",
    "dev/serial/by-path",
    "dev/disk/by-path",
    "dev/v4l/by-path",
    "dev/input/by-path",
];

/// The inputs of the search for nodes of `/dev`.
pub(super) struct Search<'a> {
    pub(super) specs: &'a [Arc<ResourceSpec>],
    pub(super) disks: &'a Disks<'a>,
    pub(super) scan: &'a Scan,
    pub(super) numa: &'a Shared<NumaNodes>,
    /// The nodes that containers hold, with the ids under which they were granted.
    pub(super) held: &'a [HeldNode],
    /// The ids that are remembered, by key.
    pub(super) names: &'a BTreeMap<String, DeviceId>,
    /// The nodes that the former scan offered, with the resource of each.
    pub(super) former: &'a [(ResourceName, Arc<Device>)],
}

/// Finds and names the nodes. `root` records failed reads. After a failed read a known node stays
/// as in the former scan, and a new one is not offered yet.
pub(super) fn discover(root: &HostRoot, search: &Search<'_>) -> CharDevices {
    let mut found = CharDevices::default();
    let specs: Vec<_> =
        search.specs.iter().filter(|spec| spec.class == DeviceClass::Char).collect();
    if specs.is_empty() {
        return found;
    }
    let matches = matches(root, &specs, search.disks, &mut found);
    let kernel = KernelNames::of(root);
    let links = links(root);
    let usb = usb_behind(root, &matches);
    let described = matches.iter().map(|found| named_node(root, found, &kernel, &links));
    let (nodes, records): (Vec<_>, Vec<_>) = described.unzip();
    let failures = root.take_failures();
    if !failures.is_empty() {
        // Without its links a node would get another id.
        specs.iter().for_each(|spec| note_failure(&mut found, spec, &failures));
        keep_unread(&mut found, search.former);
        return found;
    }
    let names = name_nodes(&nodes, search.held);
    for ((found_at, name), record) in matches.iter().zip(names).zip(records) {
        let name = known_name(found_at, name, search.names);
        let mut device = describe(found_at, name, record.as_ref());
        if let Some(usb) = &found_at.usb {
            note_usb(root, usb, &mut device.attributes);
        }
        note_use(&mut device, search.disks);
        let has_disk_id = device.attribute("disk_id").is_some();
        for node in &mut device.nodes {
            let is_lasting =
                |link: &String| is_lasting(link, node, (search.disks, has_disk_id), &kernel, &usb);
            node.link = node.link.clone().filter(is_lasting);
        }
        near(root, &mut device, search);
        let failures = root.take_failures();
        if failures.is_empty() {
            found.by_resource.entry(found_at.spec.name.clone()).or_default().push(device);
        } else {
            note_failure(&mut found, found_at.spec, &failures);
        }
    }
    keep_unread(&mut found, search.former);
    found
}

/// A node as it is named, with its record.
fn named_node(
    root: &HostRoot,
    found: &Match<'_>,
    kernel: &KernelNames<'_>,
    links: &BTreeMap<String, Vec<String>>,
) -> (NamedNode, Option<KernelRecord>) {
    let path = found.real_path().to_owned();
    let mut named = NamedNode {
        links: links.get(&path).cloned().unwrap_or_default(),
        path,
        kernel: None,
        objects: Vec::new(),
    };
    let mut record = None;
    for node in &found.nodes {
        record = kernel.of_node(node);
        named.objects.extend(objects(node));
        named.objects.extend(
            record.iter().filter_map(|record| record.device.as_deref()).map(Object::kernel_device),
        );
    }
    if let Some(usb) = &found.usb {
        named.links = usb.lasting_names(root);
        record = Some(kernel_record(root, usb));
        let device = record.as_ref().and_then(|record| record.device.as_deref());
        named.objects.extend(device.map(Object::kernel_device));
    }
    if let Some(link) = found.link.as_ref().filter(|link| !named.links.contains(link)) {
        // A group is named by the link that it begins with. Another node keeps the better
        // names above, and its number (`ttyUSB0`) is the last resort: it may change.
        let at = if found.is_group { 0 } else { named.links.len() };
        named.links.insert(at, link.clone());
    }
    if found.is_group {
        for node in &found.others {
            named.objects.push(Object::node(&node.host));
            named.objects.extend(node.number.map(Object::number));
        }
    }
    // The kernel has a name for each node, but none for a folder.
    let record = record.filter(|_| found.folder.is_none());
    named.kernel = record.as_ref().map(|record| record.name.clone());
    (named, record)
}

/// A node, or a folder of nodes, under the id of its grant or list entry; no resource needs to name
/// it any longer. `None` where it is absent.
#[must_use]
pub fn known_node(
    root: &HostRoot,
    id: DeviceId,
    key: &str,
    path: &str,
    numa_nodes: &[u32],
) -> Option<Device> {
    let (nodes, record) = match root.node_among(&mut Listings::default(), path) {
        Some(node) => {
            let record = KernelNames::of(root).of_node(&node);
            (vec![node], record)
        }
        None => (root.folder_nodes(path).ok().flatten()?.nodes, None),
    };
    let mut attributes = attributes_of(record.as_ref());
    let disks = Disks::of(root);
    let behind: BTreeSet<String> =
        nodes.iter().flat_map(|node| disks.disks_of_node(&node.path, node.number)).collect();
    note_disks(&mut attributes, &disks, &behind.into_iter().collect::<Vec<_>>());
    let nodes: Vec<DeviceNode> = nodes
        .into_iter()
        .map(|node| DeviceNode { number: node.number, ..DeviceNode::at(node.path) })
        .collect();
    let is_there = !nodes.is_empty();
    let device = || Device {
        id,
        key: key.to_owned(),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: numa_nodes.to_vec(),
        nodes,
        attributes,
    };
    is_there.then(device)
}

/// The objects that a container with the node at this path holds, as far as the host shows them
/// now.
#[must_use]
pub fn objects_of_node(root: &HostRoot, path: &str) -> Vec<Object> {
    known_node(root, DeviceId::new(path), "", path, &[])
        .map(|node| node.objects())
        .unwrap_or_default()
}

/// Keeps devices of the former scan for resources that could not be read completely, if they were
/// not found now.
fn keep_unread(found: &mut CharDevices, former: &[(ResourceName, Arc<Device>)]) {
    for (resource, device) in
        former.iter().filter(|(resource, _)| found.unread.contains_key(resource))
    {
        let is_known = |known: &Device| {
            known.id == device.id || known.key == device.key || known.nodes == device.nodes
        };
        if !found.by_resource.values().flatten().any(is_known)
            && let Some(devices) = found.by_resource.get_mut(resource)
        {
            devices.push((**device).clone());
        }
    }
}

/// The objects that are held with a node, as far as they are known.
fn objects(node: &HostNode) -> Vec<Object> {
    std::iter::once(Object::node(&node.path)).chain(node.number.map(Object::number)).collect()
}

fn describe(found: &Match<'_>, name: NodeName, record: Option<&KernelRecord>) -> Device {
    Device {
        id: name.id,
        key: name.key,
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: found.device_nodes(),
        attributes: attributes_of(record),
    }
}

/// Whether this is udev's link to a USB device by what the device reports.
fn is_usb_link(link: &str) -> bool {
    let (folder, name) = link.rsplit_once('/').unwrap_or_default();
    folder.ends_with("/by-id") && name.starts_with("usb-")
}

/// The USB devices, if a link to one by its identity selects a node.
fn usb_behind(root: &HostRoot, matches: &[Match<'_>]) -> Vec<UsbDevice> {
    let mut nodes = matches.iter().flat_map(Match::device_nodes);
    if nodes.any(|node| node.link.as_deref().is_some_and(is_usb_link)) {
        return usb::devices(root);
    }
    Vec::new()
}

/// Whether a link will lead to the same device after a reboot, and as long as the device is there.
/// Two disks or sticks without an identity have the same link by id, and it may move to the other
/// one. A link to a disk by its place may lead to another disk.
fn is_lasting(
    link: &str,
    node: &DeviceNode,
    (disks, has_disk_id): (&Disks<'_>, bool),
    kernel: &KernelNames<'_>,
    usb: &[UsbDevice],
) -> bool {
    let is_disk_link = link.rsplit_once('/').is_some_and(|(folder, _)| folder[1..] == *DISK_LINKS);
    let is_block = node.number.is_some_and(|number| number.is_block);
    if is_disk_link || is_block || !disks.disks_of_node(&node.host, node.number).is_empty() {
        return is_disk_link && has_disk_id;
    }
    if !is_usb_link(link) {
        return true;
    }
    let record = kernel.of_node(&HostNode { path: node.host.clone(), number: node.number });
    let path = record.and_then(|record| record.device).unwrap_or_default();
    let above = path.rsplit('/').find_map(|name| usb.iter().find(|usb| usb.name == name));
    above.is_none_or(|own| {
        let identity = |usb: &UsbDevice| (usb.vendor, usb.product, usb.serial.clone());
        let same = usb.iter().filter(|usb| identity(usb) == identity(own));
        own.serial.is_some() && same.count() == 1
    })
}

/// The name, with the id that the device had before its link named it: an upgrade must not rename
/// a device that is held or cordoned.
fn known_name(
    found: &Match<'_>,
    name: NodeName,
    remembered: &BTreeMap<String, DeviceId>,
) -> NodeName {
    let is_by_link =
        found.link.as_ref().is_some_and(|link| name.key.strip_prefix("dev:") == Some(link));
    if found.is_group || !is_by_link || remembered.contains_key(&name.key) {
        return name;
    }
    let Some(id) = remembered.get(&format!("dev:{}", found.real_path())) else { return name };
    // Another device has it by now, under its own link.
    let is_single = remembered.values().filter(|other| *other == id).count() == 1;
    if is_single { NodeName { id: id.clone(), ..name } } else { name }
}

/// The kernel's name for a node's device, and its path in sysfs.
fn attributes_of(record: Option<&KernelRecord>) -> Attributes {
    let mut attributes = Attributes::default();
    if let Some(record) = record {
        attributes.insert("kernel_name", record.name.clone());
        attributes.extend(record.device.clone().map(|device| ("kernel_device", device)));
    }
    attributes
}

/// The kernel's device of a USB device.
fn kernel_record(root: &HostRoot, usb: &UsbDevice) -> KernelRecord {
    let device = usb.target(root).as_deref().and_then(below_devices);
    KernelRecord { name: format!("usb:{}", usb.name), device }
}

/// Notes what a USB device reports.
fn note_usb(root: &HostRoot, usb: &UsbDevice, attributes: &mut Attributes) {
    attributes.insert("usb_ids", format!("{:04x}:{:04x}", usb.vendor, usb.product));
    attributes.extend(usb.serial.clone().map(|serial| ("serial", serial)));
    attributes.extend(usb.model(root).map(|model| ("model", model)));
}

/// Notes how the host uses a node that is a disk or leads to one.
fn note_use(device: &mut Device, disks: &Disks<'_>) {
    let names: BTreeSet<String> =
        device.nodes.iter().flat_map(|node| disks.disks_of_node(&node.host, node.number)).collect();
    if names.is_empty() {
        return;
    }
    let names: Vec<String> = names.into_iter().collect();
    note_disks(&mut device.attributes, disks, &names);
    for name in &names {
        disks.note(&mut device.attributes, name);
    }
    device.attributes.insert("disk", names.join(","));
}

/// Notes the identities of the disks that a node leads to.
fn note_disks(attributes: &mut Attributes, disks: &Disks<'_>, names: &[String]) {
    let stacked: Vec<Object> = names.iter().flat_map(|name| disks.stacked_on(name)).collect();
    if !stacked.is_empty() {
        attributes.insert(
            "stacked_on",
            stacked.iter().map(Object::as_str).collect::<Vec<_>>().join("\n"),
        );
    }
    let identities: Vec<(String, Option<u32>)> =
        names.iter().filter_map(|name| disks.identity(name)).collect();
    if let [(id, partition)] = &identities[..] {
        attributes.insert("disk_id", id.clone());
        attributes.extend(partition.map(|number| ("disk_partition", number.to_string())));
    } else if !identities.is_empty() {
        let ids: Vec<String> = identities.into_iter().map(|(id, _)| id).collect();
        attributes.insert("disk_id", ids.join(","));
    }
}

/// Notes the PCI function above a node's device, and the NUMA nodes of that function.
fn near(root: &HostRoot, device: &mut Device, search: &Search<'_>) {
    let parent = device
        .attribute("kernel_device")
        .and_then(|path| path.rsplit('/').find_map(|name| name.parse().ok()));
    let Some(function) = parent.and_then(|address| search.scan.functions.get(&address)) else {
        return;
    };
    device.attributes.insert("pci_parent", function.address.to_string());
    device.numa_nodes = search.numa.get(root).near(root, function);
}

/// udev's links to each node, best first, by the node's real path.
fn links(root: &HostRoot) -> BTreeMap<String, Vec<String>> {
    let mut links: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for folder in LINK_FOLDERS {
        for name in root.entries(folder) {
            let link = format!("/{folder}/{name}");
            if let Some(node) = root.canonical_node(&link).filter(|node| *node != link) {
                links.entry(node).or_default().push(link);
            }
        }
    }
    links
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, write};
    use super::*;
    use crate::domain::overlap;
    use std::os::unix::fs::symlink;

    fn ids(devices: &[Device]) -> Vec<&str> {
        devices.iter().map(|device| device.id.as_str()).collect()
    }

    fn found(dir: &tempfile::TempDir, specs: &[Arc<ResourceSpec>]) -> CharDevices {
        found_after(dir, specs, &BTreeMap::new())
    }

    fn found_after(
        dir: &tempfile::TempDir,
        specs: &[Arc<ResourceSpec>],
        names: &BTreeMap<String, DeviceId>,
    ) -> CharDevices {
        let root = HostRoot::new(dir.path());
        let root = root.recording();
        let numa = Shared::default();
        let search = Search {
            specs,
            disks: &Disks::of(&root),
            scan: &Scan::default(),
            numa: &numa,
            held: &[],
            names,
            former: &[],
        };
        discover(&root, &search)
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
        let specs = [char_spec(
            "example.com/all",
            &["/dev/ttyUSB*", "/dev/fuse", "/dev/bus/usb/*", "/dev/both"],
        )];
        let found = found(&dir, &specs);
        let devices = &found.by_resource[&specs[0].name];
        assert_eq!(
            ids(devices),
            ["usb-FTDI_A1", "pci-0:2", "misc:fuse", "dev:bus-usb-001", "dev:both"],
            "two classes have a `both`"
        );
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
        symlink("../../../sys/class/tty/ttyACM0/dev", dir.path().join("dev/serial/by-id/usb-d"))
            .unwrap();
        let specs = [
            char_spec("example.com/first", &["/dev/serial/by-id/*", "/dev/tty*"]),
            char_spec("example.com/second", &["/dev/ttyACM0", "/dev/none*"]),
        ];
        let found = found(&dir, &specs);
        assert_eq!(found.by_resource[&specs[0].name][0].nodes[0].host, "/dev/ttyACM0");
        assert_eq!(found.by_resource[&specs[0].name].len(), 1);
        assert!(found.by_resource[&specs[1].name].is_empty(), "the first resource has it");
        let expected = [
            "example.com/second: the nodes of /dev/ttyACM0 already belong to example.com/first, the first resource that matches them",
            "example.com/second: no device node matches /dev/none*",
        ];
        assert_eq!(found.warnings, expected);
    }

    /// Makes `dev/<link>` a link to `dev/<node>`.
    fn link(dir: &tempfile::TempDir, link: &str, node: &str) {
        let path = dir.path().join("dev").join(link);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        symlink(format!("{}{node}", "../".repeat(link.matches('/').count())), path).unwrap();
    }

    fn by_links() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (class, node) in [("tty", "ttyUSB0"), ("tty", "ttyUSB1"), ("rtc", "rtc0")] {
            write(dir.path(), &format!("dev/{node}"), "");
            write(dir.path(), &format!("sys/class/{class}/{node}/dev"), "");
        }
        write(dir.path(), "dev/dri/renderD128", "");
        write(dir.path(), "sys/class/drm/renderD128/dev", "");
        link(&dir, "zigbee", "ttyUSB0");
        link(&dir, "zwave", "ttyUSB1");
        link(&dir, "rtc", "rtc0");
        link(&dir, "dri/by-path/pci-0000:03:00.0-render", "dri/renderD128");
        dir
    }

    fn names(found: &CharDevices, spec: &ResourceSpec) -> Vec<(String, String)> {
        let of = |device: &Device| (device.id.to_string(), device.nodes[0].host.clone());
        found.by_resource[&spec.name].iter().map(of).collect()
    }

    #[test]
    fn a_link_that_selects_a_node_names_it_before_its_number_does() {
        let dir = by_links();
        let spec = char_spec(
            "example.com/x",
            &["/dev/zigbee", "/dev/zwave", "/dev/rtc*", "/dev/dri/by-path/*-render"],
        );
        let named = |ids: [(&str, &str); 4]| {
            ids.map(|(id, node)| (id.to_owned(), format!("/dev/{node}"))).to_vec()
        };
        let expected = [
            ("zigbee", "ttyUSB0"),
            ("zwave", "ttyUSB1"),
            // The pattern matches the node too, so a link of the distribution does not matter.
            ("rtc:rtc0", "rtc0"),
            ("pci-0000:03:00.0-render", "dri/renderD128"),
        ];
        assert_eq!(names(&found(&dir, std::slice::from_ref(&spec)), &spec), named(expected));
        link(&dir, "zigbee", "ttyUSB1");
        link(&dir, "zwave", "ttyUSB0");
        let swapped = [("zigbee", "ttyUSB1"), ("zwave", "ttyUSB0"), expected[2], expected[3]];
        assert_eq!(names(&found(&dir, std::slice::from_ref(&spec)), &spec), named(swapped));
        link(&dir, "serial/by-path/pci-1", "ttyUSB1");
        let better = [("pci-1", "ttyUSB1"), ("zwave", "ttyUSB0"), expected[2], expected[3]];
        assert_eq!(names(&found(&dir, std::slice::from_ref(&spec)), &spec), named(better));
    }

    #[test]
    fn a_node_that_a_link_selects_is_given_by_the_link() {
        let dir = by_links();
        let usb = "sys/devices/pci0000:00/0000:00:14.0/usb1";
        std::fs::create_dir_all(dir.path().join("sys/bus/usb/devices")).unwrap();
        let sticks = [("1-1", "A1"), ("1-2", ""), ("1-3", "twin"), ("1-4", "twin"), ("1-5", "B1")];
        for (index, (port, serial)) in sticks.into_iter().enumerate() {
            for (file, text) in [("idVendor", "10c4"), ("idProduct", "ea60"), ("serial", serial)] {
                write(dir.path(), &format!("{usb}/{port}/{file}"), text);
            }
            let of = dir.path().join("sys/bus/usb/devices").join(port);
            symlink(format!("../../../devices/pci0000:00/0000:00:14.0/usb1/{port}"), of).unwrap();
            let tty = format!("pci0000:00/0000:00:14.0/usb1/{port}/{port}:1.0/tty/ttyACM{index}");
            write(dir.path(), &format!("sys/devices/{tty}/dev"), "");
            let class = dir.path().join(format!("sys/class/tty/ttyACM{index}"));
            symlink(format!("../../devices/{tty}"), class).unwrap();
            write(dir.path(), &format!("dev/ttyACM{index}"), "");
            let folder = if port == "1-5" { "serial/by-path" } else { "serial/by-id" };
            link(&dir, &format!("{folder}/usb-{port}"), &format!("ttyACM{index}"));
        }
        let paths = ["/dev/zigbee", "/dev/rtc*", "/dev/serial/by-id/*", "/dev/serial/by-path/*"];
        let spec = char_spec("example.com/x", &paths);
        let found = found(&dir, std::slice::from_ref(&spec));
        let given: Vec<_> = found.by_resource[&spec.name]
            .iter()
            .map(|device| {
                let node = &device.nodes[0];
                (node.host.as_str(), node.lasting_path(), node.container.as_str())
            })
            .collect();
        let expected = [
            ("/dev/ttyUSB0", "/dev/zigbee", "/dev/zigbee"),
            ("/dev/rtc0", "/dev/rtc0", "/dev/rtc"),
            ("/dev/ttyACM0", "/dev/serial/by-id/usb-1-1", "/dev/serial/by-id/usb-1-1"),
            // A stick without a serial number, and two with the same.
            ("/dev/ttyACM1", "/dev/ttyACM1", "/dev/serial/by-id/usb-1-2"),
            ("/dev/ttyACM2", "/dev/ttyACM2", "/dev/serial/by-id/usb-1-3"),
            ("/dev/ttyACM3", "/dev/ttyACM3", "/dev/serial/by-id/usb-1-4"),
            ("/dev/ttyACM4", "/dev/serial/by-path/usb-1-5", "/dev/serial/by-path/usb-1-5"),
        ];
        assert_eq!(given, expected);
    }

    #[test]
    fn a_device_keeps_the_id_that_it_had_before_its_link_named_it() {
        let dir = by_links();
        let spec = char_spec("example.com/x", &["/dev/zigbee", "/dev/zwave"]);
        let specs = std::slice::from_ref(&spec);
        let known = [("dev:/dev/ttyUSB0", "tty:ttyUSB0"), ("dev:/dev/ttyUSB1", "tty:ttyUSB1")];
        let mut known: BTreeMap<String, DeviceId> =
            known.map(|(key, id)| (key.to_owned(), DeviceId::new(id))).into();
        let mut scan = |dir: &tempfile::TempDir| {
            let mut devices =
                found_after(dir, specs, &known).by_resource.remove(&spec.name).unwrap();
            known.extend(super::super::remember(&mut devices, &known.clone()));
            let of = |device: &Device| (device.id.to_string(), device.key.clone());
            devices.iter().map(of).collect::<Vec<_>>()
        };
        let expected = [("tty:ttyUSB0", "dev:/dev/zigbee"), ("tty:ttyUSB1", "dev:/dev/zwave")]
            .map(|(id, key)| (id.to_owned(), key.to_owned()));
        assert_eq!(scan(&dir), expected);
        link(&dir, "zigbee", "ttyUSB1");
        link(&dir, "zwave", "ttyUSB0");
        assert_eq!(scan(&dir), expected, "the id stays with the link");
        std::fs::remove_file(dir.path().join("dev/zwave")).unwrap();
        link(&dir, "zigbee", "ttyUSB0");
        link(&dir, "zwave-2", "ttyUSB1");
        let spec = char_spec("example.com/x", &["/dev/zwave-2"]);
        let new = found_after(&dir, std::slice::from_ref(&spec), &known);
        assert_eq!(names(&new, &spec)[0].0, "zwave-2", "another link has the id of the number");
    }

    #[test]
    fn a_disk_that_is_named_by_its_identity_is_given_by_it() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/class/block/sda/device/wwid", "naa.5");
        write(dir.path(), "sys/class/block/sdb/device/wwid", "naa.6");
        write(dir.path(), "sys/class/block/sdc/size", "1");
        for (node, link) in [
            ("sda", "disk/by-id/wwn-0x5"),
            ("sdb", "disk/by-path/pci-1"),
            ("sdc", "disk/by-id/usb-stick"),
        ] {
            write(dir.path(), &format!("dev/{node}"), "");
            let link = dir.path().join("dev").join(link);
            std::fs::create_dir_all(link.parent().unwrap()).unwrap();
            symlink(format!("../../{node}"), link).unwrap();
        }
        let paths = ["/dev/disk/by-id/*", "/dev/disk/by-path/*"];
        let spec = char_spec("example.com/disk", &paths);
        let found = found(&dir, std::slice::from_ref(&spec));
        let given: Vec<_> = found.by_resource[&spec.name]
            .iter()
            .map(|device| (device.nodes[0].host.as_str(), device.nodes[0].lasting_path()))
            .collect();
        // A place may get another disk, and a stick without an identity may have a twin.
        let expected = [
            ("/dev/sda", "/dev/disk/by-id/wwn-0x5"),
            ("/dev/sdc", "/dev/sdc"),
            ("/dev/sdb", "/dev/sdb"),
        ];
        assert_eq!(given, expected);
    }

    #[test]
    fn a_folder_with_too_many_nodes_does_not_count_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        for node in 0..1025 {
            write(dir.path(), &format!("dev/big/{node}"), "");
        }
        let specs = [char_spec("example.com/big", &["/dev/big"])];
        let found = found(&dir, &specs);
        assert!(
            found.unread[&specs[0].name].contains("more than 1024 nodes"),
            "{:?}",
            found.unread
        );
    }

    #[test]
    fn a_partition_is_a_part_of_its_disk() {
        let dir = tempfile::tempdir().unwrap();
        let pci = "devices/pci0000:00/0000:01:00.0";
        for (name, path) in [
            ("sda", format!("{pci}/host0/block/sda")),
            ("sda1", format!("{pci}/host0/block/sda/sda1")),
            ("dm-0", "devices/virtual/block/dm-0".to_owned()),
            ("dm-1", "devices/virtual/block/dm-1".to_owned()),
            ("loop5", "devices/virtual/block/loop5".to_owned()),
        ] {
            write(dir.path(), &format!("sys/{path}/dev"), "8:0");
            write(dir.path(), &format!("dev/{name}"), "");
            std::fs::create_dir_all(dir.path().join("sys/class/block")).unwrap();
            symlink(format!("../../{path}"), dir.path().join("sys/class/block").join(name))
                .unwrap();
        }
        write(dir.path(), &format!("sys/{pci}/host0/block/sda/wwid"), "naa.5001");
        write(dir.path(), &format!("sys/{pci}/host0/block/sda/sda1/partition"), "1");
        std::fs::create_dir_all(dir.path().join("sys/class/block/dm-0/slaves/sda1")).unwrap();
        std::fs::create_dir_all(dir.path().join("sys/class/block/dm-1/slaves/sda")).unwrap();
        write(dir.path(), "sys/class/block/loop5/loop/backing_file", "/dev/dm-0");
        let all = ["/dev/sda", "/dev/sda1", "/dev/dm-0", "/dev/dm-1", "/dev/loop5"];
        let specs = [char_spec("example.com/all", &all)];
        let found = found(&dir, &specs);
        let devices = &found.by_resource[&specs[0].name];
        let overlaps = |one: &str, other: &str| {
            let objects = |name: &str| {
                devices
                    .iter()
                    .find(|device| device.nodes[0].host == format!("/dev/{name}"))
                    .unwrap()
                    .objects()
            };
            overlap(&objects(one), &objects(other))
        };
        for (one, other) in [
            ("sda", "sda1"),
            ("sda", "dm-0"),
            ("sda", "dm-1"),
            ("sda", "loop5"),
            ("sda1", "dm-0"),
            ("sda1", "loop5"),
            ("dm-0", "loop5"),
        ] {
            assert!(overlaps(one, other) && overlaps(other, one), "{one} {other}");
        }
        for (one, other) in [("dm-0", "dm-1"), ("sda1", "dm-1"), ("loop5", "dm-1")] {
            assert!(!overlaps(one, other), "{one} and {other} are two parts of the disk");
        }
    }

    #[test]
    fn the_container_gets_the_node_at_the_configured_path() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "dev/video3", "");
        let mut spec = (*char_spec("example.com/camera", &["/dev/video3"])).clone();
        for (container, expected) in [
            (None, "/dev/video3"),
            (Some("/dev/cam/"), "/dev/cam/video3"),
            (Some("/dev/cam"), "/dev/cam"),
        ] {
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
            let of = |device: &Device| {
                (
                    device.id.to_string(),
                    device.nodes.iter().map(|node| node.container.clone()).collect(),
                )
            };
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
        let of = |id: &str, nodes: &[&str]| {
            (id.to_owned(), nodes.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        assert_eq!(
            nodes(&found, &specs[1]),
            [of("dev:snd", &["/dev/snd/controlC0", "/dev/snd/pcmC0D0p"])]
        );
        assert_eq!(found.by_resource[&specs[1].name][0].key, "dev:/dev/snd");
        let adapters = [
            of("dev:dvb-adapter0", &["/x/adapter0/demux0"]),
            of("dev:dvb-adapter1", &["/x/adapter1/demux0"]),
        ];
        assert_eq!(nodes(&found, &specs[2]), adapters);
        assert_eq!(
            nodes(&found, &specs[3]),
            [of("dev:input-event0", &["/dev/input/event0"])],
            "of nodes and folders the nodes are meant"
        );
        let expected = [
            "example.com/late: the nodes of /dev/snd/pcm* already belong to example.com/audio, the first resource that matches them",
            "example.com/late: the nodes of /dev/snd already belong to example.com/audio, the first resource that matches them",
            "example.com/none: no device node matches /dev/empty, which is a folder without device nodes",
            "example.com/none: /dev/mapper is a folder that contains the disk sda; configure disks by their own paths",
        ];
        assert_eq!(found.warnings, expected);
    }
}
