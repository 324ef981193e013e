//! NVMe controllers and their namespaces (Linux `drivers/nvme/host/sysfs.c`, `multipath.c`).
//!
//! A controller with one namespace is one device. With several namespaces each of them is a device.

use super::disks::{DISK_LINKS, Disks, disk_of};
use super::facts::{Facts, Part, required};
use super::pci::folder;
use crate::domain::{Device, DeviceClass, DeviceNode, PciFunction};
use crate::host::HostRoot;
use std::collections::BTreeMap;

pub(super) fn facts(root: &HostRoot, function: &PciFunction, disks: &Disks<'_>) -> Facts {
    let mut facts = Facts::default();
    let Some(controller) = function.nvme.first() else {
        return facts;
    };
    let below = format!("{}/nvme/{controller}", folder(function.address));
    let dir = if root.is_dir(&below) { below } else { format!("sys/class/nvme/{controller}") };
    let text = |file: &str| root.read(&format!("{dir}/{file}"));
    // The administration node `/dev/nvmeN` is not included: it can format the disk and replace its
    // firmware.
    let namespaces: BTreeMap<String, String> = root
        .entries(&dir)
        .into_iter()
        .filter_map(|entry| Some((disk_of(&entry)?, entry)))
        .collect();
    // After the namespaces: see `missing`.
    let state = text("state");
    let (serial, model) = (text("serial"), text("model"));
    // Both or none: if the model were added later, the name would change.
    facts.identity = model
        .as_ref()
        .zip(serial.as_ref())
        .filter(|_| !function.is_vf())
        .map(|(model, serial)| name_of(model, serial));
    facts.note("serial", serial);
    facts.note("model", model);
    facts.note("firmware", text("firmware_rev"));
    facts.note("subsystem_nqn", text("subsysnqn"));
    facts.note("state", state);
    let describe = |disk: &str, entry: &str, facts: &mut Facts| {
        // Facts of a disk are in its own folder. With multipath that is the subsystem's folder, not
        // the path's.
        let of_disk = |file: &str| {
            root.read(&format!("{dir}/{entry}/{file}"))
                .or_else(|| root.read(&format!("sys/class/block/{disk}/{file}")))
        };
        let nsid = of_disk("nsid");
        // One that names several disks is no identity, and its link may move to another disk.
        let wwid = of_disk("wwid").filter(|wwid| disks.names_one(wwid));
        let node = required(format!("/dev/{disk}"));
        let link = wwid.as_ref().map(|wwid| format!("/{DISK_LINKS}/nvme-{}", plain(wwid)));
        let link = link.filter(|link| root.canonical_node(link).as_ref() == Some(&node.host));
        facts.nodes.push(DeviceNode { link, ..node });
        facts.note("nsid", nsid);
        facts.note("wwid", wwid);
        disks.note(&mut facts.attributes, disk);
    };
    if let (1, Some((disk, entry))) = (namespaces.len(), namespaces.first_key_value()) {
        describe(disk, entry, &mut facts);
    } else if !namespaces.is_empty() {
        let parts = namespaces.iter().map(|(disk, entry)| {
            let mut part = Facts { attributes: facts.attributes.clone(), ..Facts::default() };
            describe(disk, entry, &mut part);
            // Not the number in its name, which follows the order of discovery.
            let number = part
                .attributes
                .get("nsid")
                .map_or_else(|| disk.clone(), |nsid| format!("ns{nsid}"));
            part.identity = part.attributes.get("wwid").map(|wwid| format!("nvme-{}", plain(wwid)));
            Part { name: plain(&number), facts: part }
        });
        let parts = parts.collect();
        facts.cut("namespace", parts);
    }
    facts
}

/// What a container would miss of a controller whose last namespace was detached. While the driver
/// removes a controller, as at an unplug, the namespaces leave first, but then it is no longer
/// live.
pub(super) fn missing(device: &Device) -> Option<&'static str> {
    let is_live = device.class == DeviceClass::Nvme && device.attribute("state") == Some("live");
    let has_namespace = !device.nodes.is_empty() || device.attribute("parts").is_some();
    (is_live && !has_namespace).then_some("/dev/nvme<N>n<M>")
}

/// `nvme-<model>_<serial>`, as udev names the links in `/dev/disk/by-id`.
fn name_of(model: &str, serial: &str) -> String {
    plain(&format!("nvme-{model}_{serial}"))
}

fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::discover;
    use super::super::testing::{function, spec, write};
    use super::*;
    use crate::domain::Select;

    #[test]
    fn the_serial_number_is_the_identity() {
        let dir = tempfile::tempdir().unwrap();
        let controller = "sys/bus/pci/devices/0000:05:00.0/nvme/nvme4";
        write(dir.path(), &format!("{controller}/serial"), "S6S2NS0TA17548X     \n");
        write(dir.path(), &format!("{controller}/model"), "Samsung SSD 970 EVO          \n");
        write(dir.path(), &format!("{controller}/nvme1c4n1/hidden"), "1\n");
        let disk = PciFunction { nvme: vec!["nvme4".into()], ..function("0000:05:00.0") };
        let root = HostRoot::new(dir.path());
        let facts = facts(&root, &disk, &Disks::of(&root));
        assert_eq!(facts.identity.as_deref(), Some("nvme-Samsung_SSD_970_EVO_S6S2NS0TA17548X"));
        assert_eq!(facts.nodes, [required("/dev/nvme1n1")]);
        assert_eq!(facts.parts_are, None);
    }

    #[test]
    fn a_disk_has_the_link_of_its_identity_where_it_leads_to_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let controller = "sys/bus/pci/devices/0000:05:00.0/nvme/nvme4";
        write(dir.path(), &format!("{controller}/nvme4n1/wwid"), "eui.0025385591b03a1f\n");
        for node in ["nvme4n1", "nvme5n1"] {
            write(dir.path(), &format!("dev/{node}"), "");
        }
        let link = dir.path().join(DISK_LINKS).join("nvme-eui.0025385591b03a1f");
        std::fs::create_dir_all(dir.path().join(DISK_LINKS)).unwrap();
        let disk = PciFunction { nvme: vec!["nvme4".into()], ..function("0000:05:00.0") };
        let root = HostRoot::new(dir.path());
        let lasting_path =
            || facts(&root, &disk, &Disks::of(&root)).nodes[0].lasting_path().to_owned();
        assert_eq!(lasting_path(), "/dev/nvme4n1", "udev made no link");
        for (leads_to, expected) in [
            ("nvme4n1", "/dev/disk/by-id/nvme-eui.0025385591b03a1f"),
            // Two disks with the same identity share a link.
            ("nvme5n1", "/dev/nvme4n1"),
            ("nvme6n1", "/dev/nvme4n1"),
        ] {
            std::os::unix::fs::symlink(format!("../../{leads_to}"), &link).unwrap();
            assert_eq!(lasting_path(), expected, "the link leads to {leads_to}");
            std::fs::remove_file(&link).unwrap();
        }
    }

    #[test]
    fn disks_are_one_only_if_their_subsystems_are_too() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        for (number, address) in [(0, "0000:01:00.0"), (1, "0000:02:00.0")] {
            let place = format!("sys/devices/pci0000:00/{address}");
            let class = "DRIVER=nvme\nPCI_CLASS=10802\n";
            write(dir.path(), &format!("{place}/uevent"), class);
            let (of_bus, of_block) = ("sys/bus/pci/devices", "sys/class/block");
            let disk = format!("nvme/nvme{number}/nvme{number}n1");
            write(dir.path(), &format!("{place}/{disk}/nsid"), "1\n");
            for (folder, name, up, below) in [
                (of_bus, address.to_owned(), "../../../", String::new()),
                (of_block, format!("nvme{number}n1"), "../../", format!("/{disk}")),
            ] {
                std::fs::create_dir_all(dir.path().join(folder)).unwrap();
                let target = format!("{up}devices/pci0000:00/{address}{below}");
                std::os::unix::fs::symlink(target, dir.path().join(folder).join(name)).unwrap();
            }
        }
        let specs = [spec("a.com/nvme", DeviceClass::Nvme, Select::default())];
        let offered = |wwid: &str, serials: [&str; 2], names: [&str; 2]| {
            for (number, address) in [(0, "0000:01:00.0"), (1, "0000:02:00.0")] {
                let at = format!("sys/devices/pci0000:00/{address}/nvme/nvme{number}");
                for (file, text) in [
                    ("model", "CHEAP"),
                    ("serial", serials[number]),
                    ("subsysnqn", names[number]),
                    (&*format!("nvme{number}n1/wwid"), wwid),
                ] {
                    write(dir.path(), &format!("{at}/{file}"), text);
                }
            }
            let found = discover(&root, &specs, &BTreeMap::new());
            found.selection.resources.values().map(Vec::len).sum::<usize>()
        };
        let (bogus, zero) = ("eui.0100000000000000", "eui.0000000000000000");
        assert_eq!(offered(bogus, ["A", "A"], ["nqn.a", "nqn.a"]), 1, "two paths to one disk");
        assert_eq!(offered(bogus, ["A", "B"], ["nqn.a", "nqn.b"]), 2);
        assert_eq!(offered(bogus, ["A", "B"], ["nqn.a", "nqn.a"]), 2);
        assert_eq!(offered(bogus, ["A", "A"], ["nqn.a", "nqn.b"]), 2);
        assert_eq!(offered(zero, ["A", "A"], ["nqn.a", "nqn.a"]), 2);
    }

    #[test]
    fn each_of_several_namespaces_is_a_device() {
        let dir = tempfile::tempdir().unwrap();
        let controller = "sys/bus/pci/devices/0000:05:00.0/nvme/nvme4";
        write(dir.path(), &format!("{controller}/serial"), "S1\n");
        write(dir.path(), &format!("{controller}/nvme4n1/wwid"), "eui.0025385591b03a1f\n");
        write(dir.path(), &format!("{controller}/nvme4n1/nsid"), "7\n");
        write(dir.path(), &format!("{controller}/nvme4n2/hidden"), "0\n");
        let disk = PciFunction { nvme: vec!["nvme4".into()], ..function("0000:05:00.0") };
        let root = HostRoot::new(dir.path());
        let facts = facts(&root, &disk, &Disks::of(&root));
        assert_eq!((facts.parts_are, facts.nodes.len()), (Some("namespace"), 0));
        let parts: Vec<_> = facts
            .parts
            .iter()
            .map(|part| (part.name.as_str(), part.facts.nodes[0].host.as_str()))
            .collect();
        assert_eq!(parts, [("ns7", "/dev/nvme4n1"), ("nvme4n2", "/dev/nvme4n2")]);
        assert_eq!(facts.parts[0].facts.identity.as_deref(), Some("nvme-eui.0025385591b03a1f"));
        assert_eq!(&facts.parts[0].facts.attributes["serial"], "S1");
    }

    #[test]
    fn a_live_controller_without_a_namespace_lacks_a_node() {
        let dir = tempfile::tempdir().unwrap();
        let place = "sys/bus/pci/devices/0000:05:00.0";
        write(dir.path(), &format!("{place}/uevent"), "DRIVER=nvme\nPCI_CLASS=10802\n");
        let controller = format!("{place}/nvme/nvme4");
        write(dir.path(), &format!("{controller}/serial"), "S1\n");
        let root = HostRoot::new(dir.path());
        let missing = || {
            let found = discover(&root, &[], &BTreeMap::new());
            found.unfulfilled.get(&found.devices[0].id).cloned()
        };
        let expected = Some("/dev/nvme<N>n<M>".to_owned());
        for (state, expected) in [
            ("live", expected.clone()),
            ("deleting", None),
            ("deleting (no IO)", None),
            ("dead", None),
            ("connecting", None),
        ] {
            write(dir.path(), &format!("{controller}/state"), state);
            assert_eq!(missing(), expected, "{state}");
        }
        write(dir.path(), &format!("{controller}/state"), "live");
        for namespace in ["nvme4n1", "nvme4n2"] {
            write(dir.path(), &format!("{controller}/{namespace}/hidden"), "0\n");
            assert_eq!(missing(), None, "{namespace}");
        }
        std::fs::remove_dir_all(dir.path().join(&controller)).unwrap();
        assert_eq!(missing(), None, "without a controller nothing is known");
    }
}
