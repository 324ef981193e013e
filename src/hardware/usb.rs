//! USB devices: those that the configuration selects by their ids, with the nodes of their drivers.
//!
//! | file below `sys/bus/usb/devices/<port>` | value |
//! | --- | --- |
//! | `idVendor`, `idProduct` | four hexadecimal digits |
//! | `serial`, `product` | texts that the device reports; many devices have none |
//! | `busnum`, `devnum` | the numbers in `/dev/bus/usb/001/005` |
//! | `bDeviceClass` | `09` for a hub |
//! | any folder with `dev` | a node of a driver: `DEVNAME` in its `uevent` |
//!
//! The source is Linux `Documentation/ABI/stable/sysfs-bus-usb` and `testing/sysfs-bus-usb`.
//! `devnum` changes each time the device is plugged in. So a device is named by its serial number,
//! or by the port where it is plugged in. The number of a bus depends on the order in which the
//! controllers were found, so a port is named by its controller.

use super::uevent::parse_hex;
use crate::domain::UsbSelect;
use crate::host::HostRoot;

const DEVICES: &str = "sys/bus/usb/devices";
/// `bDeviceClass` of a hub (USB 2.0, 11.23.1). A hub gives a container nothing but its other ports.
const HUB: u32 = 9;
/// The deepest folder with a node, below the device: the partition of a disk is in the seventh.
const DEPTH_MAX: u32 = 10;
/// The most nodes of one device: a sound card of a studio has some dozens.
const NODES_MAX: usize = 256;

/// A USB device that is no hub.
#[derive(Debug, Clone)]
pub(super) struct UsbDevice {
    /// The kernel's name: the bus and the ports, `1-4.2`.
    pub(super) name: String,
    pub(super) vendor: u16,
    pub(super) product: u16,
    pub(super) serial: Option<String>,
}

/// The USB devices, in the order of their names.
pub(super) fn devices(root: &HostRoot) -> Vec<UsbDevice> {
    // An interface has a colon in its name, and a root hub begins with `usb`.
    let is_device = |name: &String| name.contains('-') && !name.contains(':');
    let names = root.entries(DEVICES).into_iter().filter(is_device);
    let device = |name: String| {
        let read = |file: &str| root.read(&format!("{DEVICES}/{name}/{file}"));
        let id = |file: &str| u16::try_from(parse_hex(&read(file)?)?).ok();
        let (vendor, product) = (id("idVendor")?, id("idProduct")?);
        if read("bDeviceClass").as_deref().and_then(parse_hex) == Some(HUB) {
            return None;
        }
        let serial = read("serial").filter(|serial| !serial.is_empty());
        Some(UsbDevice { vendor, product, serial, name })
    };
    names.filter_map(device).collect()
}

impl UsbDevice {
    pub(super) fn is_selected(&self, select: &UsbSelect) -> bool {
        self.vendor == select.vendor
            && select.product.is_none_or(|product| product == self.product)
            && (select.serial.is_none() || select.serial == self.serial)
    }

    fn folder(&self) -> String {
        format!("{DEVICES}/{}", self.name)
    }

    /// Its node; `None` for a device that has just been unplugged.
    pub(super) fn node(&self, root: &HostRoot) -> Option<String> {
        let number =
            |file: &str| root.read(&format!("{}/{file}", self.folder()))?.parse::<u32>().ok();
        Some(format!("/dev/bus/usb/{:03}/{:03}", number("busnum")?, number("devnum")?))
    }

    /// The text that names the product.
    pub(super) fn model(&self, root: &HostRoot) -> Option<String> {
        root.read(&format!("{}/product", self.folder())).filter(|model| !model.is_empty())
    }

    /// The literal target of its link in sysfs.
    pub(super) fn target(&self, root: &HostRoot) -> Option<String> {
        root.link_target(&self.folder())
    }

    /// Its lasting names, best first: by the serial number, then by the port. Two devices may have
    /// the same serial number.
    pub(super) fn lasting_names(&self, root: &HostRoot) -> Vec<String> {
        let ids = format!("usb-{:04x}:{:04x}", self.vendor, self.product);
        let serial = self.serial.as_ref().map(|serial| format!("{ids}-{}", plain(serial)));
        serial.into_iter().chain([format!("{ids}-port-{}", self.port(root))]).collect()
    }

    /// The controller, the position of the root hub on it, and the ports: `0000:00:14.0-1-4.2`. A
    /// controller has a root hub for each speed of the bus, always in the same order.
    fn port(&self, root: &HostRoot) -> String {
        let of_controller = || {
            let target = self.target(root)?;
            let (_, path) = target.split_once("devices/")?;
            let steps: Vec<&str> = path.split('/').collect();
            let hub = steps.iter().position(|step| hub_number(step).is_some())?;
            let (controller, number) = (steps.get(..hub)?, hub_number(steps[hub])?);
            let below = root.entries(&format!("sys/devices/{}", controller.join("/")));
            let earlier =
                below.iter().filter_map(|name| hub_number(name)).filter(|of| *of < number);
            let ports = self.name.split_once('-')?.1;
            Some(format!("{}-{}-{ports}", controller.last()?, earlier.count() + 1))
        };
        of_controller().unwrap_or_else(|| self.name.clone())
    }

    /// The nodes that the drivers of its interfaces made, such as `/dev/ttyUSB0` and `/dev/video0`.
    pub(super) fn nodes_of_drivers(&self, root: &HostRoot) -> Vec<String> {
        let mut nodes = Vec::new();
        collect(root, &self.folder(), DEPTH_MAX, &mut nodes);
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }
}

/// The number of a root hub: 2 for `usb2`.
fn hub_number(name: &str) -> Option<u32> {
    name.strip_prefix("usb")?.parse().ok()
}

/// Adds the nodes of the folders below `folder`. Links lead to other devices.
fn collect(root: &HostRoot, folder: &str, depth: u32, nodes: &mut Vec<String>) {
    for below in root.folders(folder) {
        let below = format!("{folder}/{below}");
        if depth == 0 || nodes.len() >= NODES_MAX {
            return;
        }
        if root.exists(&format!("{below}/dev")) {
            let uevent = root.read(&format!("{below}/uevent")).unwrap_or_default();
            let stated = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME="));
            let name = stated.or_else(|| below.rsplit('/').next()).unwrap_or_default();
            let leads_out = name.split('/').any(|step| matches!(step, "" | "." | ".."));
            nodes.extend((!leads_out).then(|| format!("/dev/{name}")));
        }
        collect(root, &below, depth - 1, nodes);
    }
}

/// A serial number as a part of an id: a device may report any text.
fn plain(serial: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.+".contains(c);
    serial.chars().map(|c| if is_plain(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, fail_each_call, write};
    use super::super::{DiscoverInput, Discovery, HeldNode, discover_with, scan};
    use super::*;
    use crate::domain::{Device, NvmlSnapshot, ResourceSpec, overlap};
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::sync::Arc;

    const CONTROLLER: &str = "devices/pci0000:00/0000:00:14.0";

    /// A device at `usb<bus>/<ports>`, with the files below its folder.
    fn plug(root: &Path, place: &str, number: u32, ids: (&str, &str), files: &[(&str, &str)]) {
        let (bus, port) = (&place[3..4], place.rsplit('/').next().unwrap());
        let folder = format!("sys/{CONTROLLER}/{place}");
        for (file, text) in [("idVendor", ids.0), ("idProduct", ids.1), ("bDeviceClass", "00")] {
            write(root, &format!("{folder}/{file}"), &format!("{text}\n"));
        }
        write(root, &format!("{folder}/busnum"), &format!("{bus}\n"));
        write(root, &format!("{folder}/devnum"), &format!("{number}\n"));
        for (file, text) in files {
            write(root, &format!("{folder}/{file}"), text);
        }
        std::fs::create_dir_all(root.join(DEVICES)).unwrap();
        let link = root.join(DEVICES).join(port);
        let _ = std::fs::remove_file(&link);
        symlink(format!("../../../{CONTROLLER}/{place}"), link).unwrap();
        write(root, &format!("dev/bus/usb/00{bus}/{number:03}"), "");
    }

    fn unplug(root: &Path, place: &str, number: u32) {
        std::fs::remove_dir_all(root.join(format!("sys/{CONTROLLER}/{place}"))).unwrap();
        std::fs::remove_file(root.join(DEVICES).join(place.rsplit('/').next().unwrap())).unwrap();
        let bus = &place[3..4];
        std::fs::remove_file(root.join(format!("dev/bus/usb/00{bus}/{number:03}"))).unwrap();
    }

    fn usb(name: &str, selects: &[(u16, Option<u16>, Option<&str>)]) -> Arc<ResourceSpec> {
        let mut spec = (*char_spec(name, &[])).clone();
        let select = |(vendor, product, serial): &(u16, Option<u16>, Option<&str>)| UsbSelect {
            vendor: *vendor,
            product: *product,
            serial: serial.map(str::to_owned),
        };
        spec.usb = selects.iter().map(select).collect();
        Arc::new(spec)
    }

    fn found(root: &Path, specs: &[Arc<ResourceSpec>], held: &[HeldNode]) -> Discovery {
        let (root, names) = (HostRoot::new(root), BTreeMap::new());
        let nvml = NvmlSnapshot::default();
        let input = DiscoverInput { held, nvml: &nvml, ..DiscoverInput::first(&names) };
        discover_with(&root, scan(&root), specs, &input)
    }

    /// The devices of a resource, by id, with their nodes.
    fn devices(found: &Discovery, spec: &ResourceSpec) -> Vec<(String, Vec<String>)> {
        let of = |device: &Arc<Device>| {
            let nodes = device.nodes.iter().map(|node| node.host.clone()).collect();
            (device.id.to_string(), nodes)
        };
        found.selection.resources[&spec.name].iter().map(of).collect()
    }

    fn of(id: &str, nodes: &[&str]) -> (String, Vec<String>) {
        (id.to_owned(), nodes.iter().map(|node| format!("/dev/{node}")).collect())
    }

    #[test]
    fn devices_are_selected_by_vendor_product_and_serial_number() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        plug(root, "usb1/1-1", 2, ("0403", "6001"), &[("serial", "A1\n"), ("product", "UART\n")]);
        plug(root, "usb1/1-2", 3, ("0403", "6001"), &[("serial", "A/2 é\n")]);
        plug(root, "usb1/1-3", 4, ("0403", "6015"), &[]);
        plug(root, "usb1/1-4", 5, ("0403", "9999"), &[("bDeviceClass", "09\n")]);
        plug(root, "usb1/1-4/1-4.2", 6, ("18D1", "9302"), &[]);
        let folder = root.join(format!("sys/{CONTROLLER}/usb1/1-1/1-1:1.0"));
        std::fs::create_dir_all(folder).unwrap();
        symlink(
            format!("../../../{CONTROLLER}/usb1/1-1/1-1:1.0"),
            root.join(DEVICES).join("1-1:1.0"),
        )
        .unwrap();
        write(root, "sys/bus/pci/devices/0000:00:14.0/uevent", "PCI_CLASS=C0330\n");
        write(root, "sys/bus/pci/devices/0000:00:14.0/numa_node", "1\n");
        let one = |n: &str, select| usb(&format!("example.com/{n}"), &[select]);
        let specs = [
            one("serial", (0x0403, Some(0x6001), Some("A1"))),
            one("none", (0x0403, Some(0x6001), Some("A2"))),
            one("product", (0x0403, Some(0x6001), None)),
            usb(
                "example.com/vendor",
                &[(0x0403, None, None), (0x18d1, None, None), (0x18d1, None, None)],
            ),
        ];
        let found = found(root, &specs, &[]);
        let all: Vec<_> = specs.iter().map(|spec| devices(&found, spec)).collect();
        let expected = [
            vec![of("usb-0403:6001-A1", &["bus/usb/001/002"])],
            vec![],
            vec![of("usb-0403:6001-A_2__", &["bus/usb/001/003"])],
            vec![
                of("usb-0403:6015-port-0000:00:14.0-1-3", &["bus/usb/001/004"]),
                of("usb-18d1:9302-port-0000:00:14.0-1-4.2", &["bus/usb/001/006"]),
            ],
        ];
        assert_eq!(all, expected, "no hub");
        let device = &found.selection.resources[&specs[0].name][0];
        assert_eq!(device.key, "dev:usb-0403:6001-A1");
        assert_eq!(device.nodes[0].permissions, "rw");
        assert_eq!(
            (device.attribute("serial"), device.attribute("model"), device.attribute("usb_ids")),
            (Some("A1"), Some("UART"), Some("0403:6001"))
        );
        assert_eq!(
            (device.attribute("pci_parent"), &*device.numa_nodes),
            (Some("0000:00:14.0"), &[1][..])
        );
        let warnings = found.selection.warnings.join("\n");
        for warning in [
            "example.com/none: no device matches USB 0403:6001 with the serial number A2",
            "example.com/product: /dev/bus/usb/001/002 is not offered by USB 0403:6001, because /dev/bus/usb/001/002 already belongs to example.com/serial",
        ] {
            assert!(warnings.contains(warning), "{warnings}\nshould contain: {warning}");
        }
    }

    #[test]
    fn a_device_keeps_its_id_when_it_is_plugged_in_again() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let spec = usb("example.com/stick", &[(0x0403, None, None), (0x1a6e, None, None)]);
        let specs = std::slice::from_ref(&spec);
        let serial: &[(&str, &str)] = &[("serial", "A1")];
        plug(root, "usb1/1-1", 2, ("0403", "6001"), serial);
        plug(root, "usb2/2-1", 9, ("1a6e", "089a"), &[]);
        let port = "usb-1a6e:089a-port-0000:00:14.0-2-1";
        let expected =
            [of("usb-0403:6001-A1", &["bus/usb/001/002"]), of(port, &["bus/usb/002/009"])];
        assert_eq!(devices(&found(root, specs, &[]), &spec), expected);
        unplug(root, "usb1/1-1", 2);
        unplug(root, "usb2/2-1", 9);
        assert_eq!(devices(&found(root, specs, &[]), &spec), []);
        plug(root, "usb1/1-7", 3, ("0403", "6001"), serial);
        plug(root, "usb2/2-1", 10, ("1a6e", "089a"), &[]);
        let expected =
            [of("usb-0403:6001-A1", &["bus/usb/001/003"]), of(port, &["bus/usb/002/010"])];
        assert_eq!(devices(&found(root, specs, &[]), &spec), expected);
    }

    #[test]
    fn twins_with_one_serial_number_are_named_by_their_ports() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let spec = usb("example.com/stick", &[(0x0403, None, None)]);
        let specs = std::slice::from_ref(&spec);
        let ids = |found: &Discovery| -> Vec<String> {
            devices(found, &spec).into_iter().map(|(id, _)| id).collect()
        };
        let ports = ["usb-0403:6001-port-0000:00:14.0-1-1", "usb-0403:6001-port-0000:00:14.0-1-2"];
        plug(root, "usb1/1-2", 3, ("0403", "6001"), &[("serial", "0")]);
        let alone = found(root, specs, &[]);
        assert_eq!(ids(&alone), ["usb-0403:6001-0"]);
        let held = |found: &Discovery, n: usize| {
            let device = &found.selection.resources[&spec.name][n];
            HeldNode { id: device.id.clone(), objects: device.objects() }
        };
        let (held_alone, held_port) = (held(&alone, 0), {
            plug(root, "usb1/1-1", 4, ("0403", "6001"), &[("serial", "0")]);
            let both = found(root, specs, &[]);
            assert_eq!(ids(&both), ports);
            held(&both, 1)
        });
        let kept = found(root, specs, std::slice::from_ref(&held_alone));
        assert_eq!(ids(&kept), ["usb-0403:6001-0", ports[0]], "a held device keeps its id");
        unplug(root, "usb1/1-1", 4);
        assert_eq!(ids(&found(root, specs, &[])), ["usb-0403:6001-0"]);
        assert_eq!(ids(&found(root, specs, &[held_port])), [ports[1]], "and by its port");
    }

    #[test]
    fn the_nodes_of_drivers_go_with_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let (video, sound) = ("1-1:1.0/video4linux/video0", "1-1:1.1/sound/card1/pcmC1D0c");
        let files = [
            (&*format!("{video}/dev"), "81:0\n"),
            (&*format!("{video}/uevent"), "MAJOR=81\nDEVNAME=video0\n"),
            (&*format!("{sound}/dev"), "116:3\n"),
            (&*format!("{sound}/uevent"), "DEVNAME=snd/pcmC1D0c\n"),
            ("1-1:1.2/ttyACM0/tty/ttyACM0/dev", "166:0\n"),
            ("1-1:1.3/absent/dev", "1:1\n"),
            ("1-1:1.4/x/dev", "1:2\n"),
            ("1-1:1.4/x/uevent", "DEVNAME=../etc/passwd\n"),
        ];
        plug(root, "usb1/1-1", 2, ("046d", "082d"), &files);
        for node in ["video0", "snd/pcmC1D0c", "ttyACM0", "ttyACM1"] {
            write(root, &format!("dev/{node}"), "");
        }
        let other = root.join(format!("sys/{CONTROLLER}/usb1/1-1/1-1:1.0/other"));
        write(root, "sys/devices/other/ttyACM1/dev", "166:1\n");
        symlink("../../../../../../other", other).unwrap();
        let camera = usb("example.com/camera", &[(0x046d, None, None)]);
        let tty = char_spec("example.com/tty", &["/dev/ttyACM0"]);
        let found_in = |specs: &[Arc<ResourceSpec>]| found(root, specs, &[]);
        let before = found_in(&[camera.clone(), tty.clone()]);
        let port = "usb-046d:082d-port-0000:00:14.0-1-1";
        let nodes = ["bus/usb/001/002", "snd/pcmC1D0c", "ttyACM0", "video0"];
        assert_eq!(devices(&before, &camera), [of(port, &nodes)]);
        let device = &before.selection.resources[&camera.name][0];
        let required: Vec<bool> = device.nodes.iter().map(|node| node.required).collect();
        assert_eq!(required, [true, false, false, false]);
        assert_eq!(devices(&before, &tty), [], "its node belongs to the camera");
        let after = found_in(&[tty.clone(), camera.clone()]);
        assert_eq!((devices(&after, &tty).len(), devices(&after, &camera).len()), (1, 0));
        let warning = "example.com/camera: /dev/bus/usb/001/002 is not offered by USB 046d:*, because /dev/ttyACM0 already belongs to example.com/tty";
        let warnings = after.selection.warnings.join("\n");
        assert!(warnings.contains(warning), "{warnings}");
        write(root, "sys/class/tty/x", "");
        symlink(
            format!("../../{CONTROLLER}/usb1/1-1/1-1:1.2/ttyACM0/tty/ttyACM0"),
            root.join("sys/class/tty/ttyACM0"),
        )
        .unwrap();
        let tty = found_in(std::slice::from_ref(&tty)).selection.resources[&tty.name][0].objects();
        assert!(overlap(&tty, &device.objects()), "a holder of the one holds the other");
    }

    #[test]
    fn a_disk_that_the_host_uses_is_not_offered_as_a_usb_device() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let disk = "1-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb";
        let files = [(&*format!("{disk}/dev"), "8:16\n"), (&*format!("{disk}/sdb1/dev"), "8:17\n")];
        plug(root, "usb1/1-1", 2, ("0781", "5581"), &files);
        std::fs::create_dir_all(root.join("sys/class/block")).unwrap();
        for name in ["sdb", "sdb/sdb1"] {
            let place = format!("{CONTROLLER}/usb1/1-1/{}", disk.replace("sdb", name));
            let name = name.rsplit('/').next().unwrap();
            write(root, &format!("dev/{name}"), "");
            symlink(format!("../../{place}"), root.join("sys/class/block").join(name)).unwrap();
        }
        let stick = usb("example.com/stick", &[(0x0781, None, None)]);
        let free = found(root, std::slice::from_ref(&stick), &[]);
        let (_, nodes) = devices(&free, &stick).remove(0);
        assert_eq!(nodes, ["/dev/bus/usb/001/002", "/dev/sdb", "/dev/sdb1"]);
        let mounts = "29 1 8:17 / /data rw - ext4 /dev/sdb1 rw\n";
        write(root, "proc/1/mountinfo", mounts);
        let used = found(root, std::slice::from_ref(&stick), &[]);
        assert_eq!(devices(&used, &stick), [], "{:?}", used.selection.warnings);
        assert!(used.selection.warnings.join("\n").contains("mounted at /data"));
    }

    #[test]
    fn a_device_without_its_node_is_unhealthy_and_one_that_cannot_be_read_stays() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let tty = [("1-1:1.0/ttyUSB0/tty/ttyUSB0/dev", "188:0\n"), ("serial", "A1")];
        plug(root, "usb1/1-1", 2, ("0403", "6001"), &tty);
        write(root, "dev/ttyUSB0", "");
        let spec = usb("example.com/stick", &[(0x0403, None, None)]);
        let specs = std::slice::from_ref(&spec);
        let before = found(root, specs, &[]);
        let host = HostRoot::new(root);
        let (unread, calls) = fail_each_call(root, specs, &before);
        assert!(unread > 10, "{unread} of {calls} reads are of the device");
        std::fs::remove_file(root.join("dev/bus/usb/001/002")).unwrap();
        let after = found(root, specs, &[]);
        let device = &after.selection.resources[&spec.name][0];
        assert!(!after.health(&host, device).unwrap().is_healthy());
    }
}
