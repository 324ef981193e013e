//! Network functions: the type of their link, and their vDPA devices (Linux
//! `Documentation/ABI/testing/sysfs-class-net`, `sysfs-bus-vdpa`). An interface itself has no node:
//! a CNI plugin moves it.

use super::facts::{Facts, required};
use super::pci::{folder, is_numbered};
use crate::domain::{Device, PciFunction, is_scalable_name};
use crate::host::HostRoot;

/// The facts of the interfaces of a function, whose folder is `dir`.
pub(super) fn facts(root: &HostRoot, dir: &str, function: &PciFunction) -> Facts {
    let mut facts = Facts::default();
    let kind = function.net.iter().find_map(|interface| {
        let below = root.read(&format!("{dir}/net/{interface}/type"));
        below.or_else(|| root.read(&format!("sys/class/net/{interface}/type")))
    });
    facts.note("link_type", kind.as_deref().and_then(link_type));
    facts
}

/// The name and the hardware address of the interface of a device, if it has one and no other, and
/// the interface is in the network namespace of the host.
#[must_use]
pub fn interface(root: &HostRoot, device: &Device) -> Option<(String, String)> {
    let function = device.pci.as_deref()?;
    let [name] = function.net.as_slice() else { return None };
    let below = root.read(&format!("{}/net/{name}/address", folder(function.address)));
    let address = below.or_else(|| root.read(&format!("sys/class/net/{name}/address")))?;
    Some((name.clone(), address)).filter(|(_, address)| !address.is_empty())
}

/// The number that the firmware gives a function of the mainboard (Linux
/// `Documentation/ABI/testing/sysfs-bus-pci`, `acpi_index`). Most functions have none.
pub(super) fn acpi_index(root: &HostRoot, function: &PciFunction) -> Option<String> {
    root.read(&format!("{}/acpi_index", folder(function.address)))
}

/// The link type, by the numbers of `if_arp.h`.
fn link_type(number: &str) -> Option<&'static str> {
    match number {
        "1" => Some("ether"),
        "32" => Some("infiniband"),
        _ => None,
    }
}

/// Adds the facts of a function's vDPA device: it has its own node if it is bound to `vhost_vdpa`.
pub(super) fn add_vdpa(root: &HostRoot, function: &PciFunction, facts: &mut Facts) {
    // The folder of a function also has those of its scalable functions.
    let is_own =
        |path: &&String| function.is_scalable() || !path.rsplit('/').skip(1).any(is_scalable_name);
    let Some(path) = function.vdpa.iter().find(is_own) else { return };
    let dir = format!("{}/{path}", folder(function.address));
    let nodes = root.entries(&dir).into_iter().filter(|entry| is_numbered(entry, "vhost-vdpa-"));
    facts.nodes.extend(nodes.map(|node| required(format!("/dev/{node}"))));
    facts.note("vdpa", path.rsplit('/').next());
    facts.note("vdpa_driver", root.link_name(&format!("{dir}/driver")));
}

#[cfg(test)]
mod tests {
    use super::super::testing::{device, function, write};
    use super::super::{discover, scan};
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_interface_decides_the_link_type() {
        let dir = tempfile::tempdir().unwrap();
        let folder = "sys/bus/pci/devices/0000:3b:00.0/net";
        for (number, expected) in
            [("1\n", Some("ether")), ("32\n", Some("infiniband")), ("772\n", None)]
        {
            write(dir.path(), &format!("{folder}/ens1/type"), number);
            let card =
                PciFunction { net: vec!["ens0".into(), "ens1".into()], ..function("0000:3b:00.0") };
            let facts = facts(&HostRoot::new(dir.path()), &super::folder(card.address), &card);
            assert_eq!(facts.attributes.get("link_type"), expected);
        }
    }

    #[test]
    fn an_only_interface_is_found_while_it_is_on_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let with = |net: &[&str]| {
            let net = net.iter().map(|name| (*name).to_owned()).collect();
            let pci = Some(Box::new(PciFunction { net, ..function("0000:3b:00.0") }));
            interface(&root, &Device { pci, ..device("0000:3b:00.0", "x") })
        };
        assert_eq!(with(&["ens1"]), None, "it is in a pod");
        write(dir.path(), "sys/class/net/ens1/address", "02:00:00:00:00:01\n");
        let found = |address: &str| Some(("ens1".to_owned(), address.to_owned()));
        assert_eq!(with(&["ens1"]), found("02:00:00:00:00:01"));
        let folder = "sys/bus/pci/devices/0000:3b:00.0/net";
        write(dir.path(), &format!("{folder}/ens1/address"), "02:00:00:00:00:02\n");
        assert_eq!(with(&["ens1"]), found("02:00:00:00:00:02"));
        assert_eq!((with(&[]), with(&["ens0", "ens1"])), (None, None));
    }

    #[test]
    fn a_vdpa_device_for_user_space_has_a_node() {
        let dir = tempfile::tempdir().unwrap();
        let vdpa = dir.path().join("sys/bus/pci/devices/0000:3b:00.2/vdpa3");
        write(&vdpa, "vhost-vdpa-1/dev", "511:1\n");
        symlink("../../../../../bus/vdpa/drivers/vhost_vdpa", vdpa.join("driver")).unwrap();
        let vf = PciFunction { vdpa: vec!["vdpa3".into()], ..function("0000:3b:00.2") };
        let mut facts = Facts::default();
        add_vdpa(&HostRoot::new(dir.path()), &vf, &mut facts);
        assert_eq!(facts.nodes, [required("/dev/vhost-vdpa-1")]);
        assert_eq!(
            (&facts.attributes["vdpa"], &facts.attributes["vdpa_driver"]),
            ("vdpa3", "vhost_vdpa")
        );
    }

    #[test]
    fn a_vdpa_device_has_any_name_and_may_be_on_a_scalable_function() {
        let dir = tempfile::tempdir().unwrap();
        let (host, bus) =
            ("sys/devices/pci0000:3a/0000:3b:00.2", dir.path().join("sys/bus/vdpa/devices"));
        write(dir.path(), &format!("{host}/uevent"), "DRIVER=mlx5_core\nPCI_CLASS=20000\n");
        std::fs::create_dir_all(&bus).unwrap();
        std::fs::create_dir_all(dir.path().join("sys/bus/pci/devices")).unwrap();
        let link = |target: &str, at: &str| symlink(target, dir.path().join(at)).unwrap();
        link("../../../devices/pci0000:3a/0000:3b:00.2", "sys/bus/pci/devices/0000:3b:00.2");
        // As the operator for SR-IOV names them, and as a person may.
        for (path, number) in [
            ("mlx5_core.sf.4/blue", 2),
            ("vdpa:0000:3b:00.2", 0),
            ("pds_core.vDPA.1/0000:00:00.0", 1),
        ] {
            write(dir.path(), &format!("{host}/{path}/vhost-vdpa-{number}/dev"), "511:0\n");
            let driver = format!("{host}/{path}/driver");
            link("../../../../../bus/vdpa/drivers/vhost_vdpa", &driver);
            let name = path.rsplit('/').next().unwrap();
            symlink(format!("../../../{}/{path}", &host[4..]), bus.join(name)).unwrap();
        }
        let root = HostRoot::new(dir.path());
        let found = || {
            let devices = discover(&root, &[], &BTreeMap::new()).devices;
            let of = |device: &std::sync::Arc<Device>| {
                let names = ["vdpa", "vdpa_driver"].map(|name| device.attribute(name));
                let nodes: Vec<_> = device.nodes.iter().map(|node| node.host.clone()).collect();
                (names.map(|name| name.unwrap_or_default().to_owned()), nodes.join(" "))
            };
            devices.iter().map(of).collect::<Vec<_>>()
        };
        let of =
            |name: &str, node: &str| ([name, "vhost_vdpa"].map(str::to_owned), node.to_owned());
        let scalable = of("blue", "/dev/vhost-vdpa-2");
        assert_eq!(found(), [of("0000:00:00.0", "/dev/vhost-vdpa-1"), scalable.clone()]);
        std::fs::remove_file(bus.join("0000:00:00.0")).unwrap();
        assert_eq!(found(), [of("vdpa:0000:3b:00.2", "/dev/vhost-vdpa-0"), scalable]);
        let vdpa = scan(&root).functions.remove(&"0000:3b:00.2".parse().unwrap()).unwrap().vdpa;
        assert_eq!(vdpa, ["mlx5_core.sf.4/blue", "vdpa:0000:3b:00.2"]);
    }
}
