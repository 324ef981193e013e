//! FPGAs of the Device Feature List framework (Linux `Documentation/fpga/dfl.rst`) and of its
//! predecessor.
//!
//! A workload gets the port, the user's half of the card. The management half, `/dev/dfl-fme.N`,
//! can reprogram the card and is never among the device's nodes. Only the mode `regiondevel` of the
//! contract `intel-fpga` grants it.

use super::Scan;
use super::facts::{Facts, Part, required};
use super::pci::{folder, is_numbered};
use crate::domain::{PciAddress, PciFunction};
use crate::host::HostRoot;
use std::collections::BTreeSet;

/// Vendor and device ids of the cards, physical and virtual functions (`drivers/fpga/dfl-pci.c`).
const CARDS: [(u16, u16); 11] = [
    (0x8086, 0xbcce),
    (0x8086, 0xbccf),
    (0x8086, 0x0b30),
    (0x8086, 0x0b2b),
    (0x8086, 0x0b2c),
    (0x8086, 0x09c4),
    (0x8086, 0x09c5),
    (0x8086, 0xbcbd),
    (0x8086, 0xbcbf),
    (0x8086, 0xbcc0),
    (0x8086, 0xbcc1),
];

/// Silicom, whose cards use the same framework.
const SILICOM: u16 = 0x1c2c;
/// AMD's (Xilinx') Alveo cards: a management function, and a user function with the render node.
pub(super) const XILINX: u16 = 0x10ee;
/// The driver of the management function.
const XILINX_MANAGEMENT: &str = "xclmgmt";

/// Whether a function belongs to an FPGA card: by its driver, by a region below it, or by its ids.
pub(super) fn is_fpga(root: &HostRoot, function: &PciFunction) -> bool {
    let driver = function
        .driver
        .as_deref()
        .is_some_and(|driver| matches!(driver, "dfl-pci" | "intel-fpga-pci" | "xocl" | "xclmgmt"));
    let ids = function.vendor.zip(function.device);
    let known = ids.is_some_and(|ids| {
        CARDS.contains(&ids)
            || matches!(ids, (SILICOM, 0x1000 | 0x1001))
            || (ids.0 == XILINX && function.class16() == Some(0x1200))
    });
    // A region is searched only if the class does not exclude an FPGA: one check less for each
    // other function.
    let open = matches!(function.class16(), None | Some(0x1200..=0x12ff));
    driver
        || known
        || (open
            && ["fpga_region", "fpga"]
                .iter()
                .any(|name| root.is_dir(&format!("{}/{name}", folder(function.address)))))
}

pub(super) fn facts(root: &HostRoot, function: &PciFunction) -> Facts {
    let mut facts = Facts::default();
    let mut ports = ports(root, function);
    if ports.len() == 1 {
        let Part { facts: port, .. } = ports.remove(0);
        facts = port;
    } else if !ports.is_empty() {
        facts.cut("port", ports);
    }
    // The management function of an Alveo card is in the same slot, and has no render node.
    if function.vendor == Some(XILINX) && function.driver.as_deref() != Some(XILINX_MANAGEMENT) {
        let render = function.drm.iter().filter(|name| is_numbered(name, "renderD"));
        facts.nodes.extend(render.map(|name| required(format!("/dev/dri/{name}"))));
    }
    facts
}

/// The ports of a card, each with its accelerator function and the interface that the function was
/// built for.
fn ports(root: &HostRoot, function: &PciFunction) -> Vec<Part> {
    let mut ports = Vec::new();
    let dir = folder(function.address);
    // A region nested below the management half serves partial reconfiguration and has no port.
    for (class, port, management) in
        [("fpga_region", "dfl-port.", "dfl-fme."), ("fpga", "intel-fpga-port.", "intel-fpga-fme.")]
    {
        for region in root.entries(&format!("{dir}/{class}")) {
            let region = format!("{dir}/{class}/{region}");
            let entries = root.entries(&region);
            let manager = entries.iter().find(|entry| is_numbered(entry, management));
            for (at, name) in entries.iter().filter(|entry| is_numbered(entry, port)).enumerate() {
                let mut facts = Facts::default();
                facts.nodes.push(required(format!("/dev/{name}")));
                facts.note(
                    "afu_id",
                    root.read(&format!("{region}/{name}/afu_id")).filter(|id| is_id(id)),
                );
                facts.note(
                    "interface_id",
                    manager.and_then(|manager| interface_id(root, &format!("{region}/{manager}"))),
                );
                facts.note("fme_node", manager.map(|manager| format!("/dev/{manager}")));
                // The port's number on the card. The number of its node counts the ports of all
                // cards.
                let number = root
                    .read(&format!("{region}/{name}/id"))
                    .and_then(|id| id.parse().ok())
                    .unwrap_or(at);
                ports.push(Part { name: format!("port{number}"), facts });
            }
        }
    }
    // Two ports with the same number cannot be distinguished permanently: only the first is kept.
    let mut seen = BTreeSet::new();
    ports.retain(|part| seen.insert(part.name.clone()));
    ports
}

/// The interface that a bitstream must be built for: that of the region that the management half
/// reconfigures.
fn interface_id(root: &HostRoot, manager: &str) -> Option<String> {
    let regions =
        root.entries(manager).into_iter().filter(|entry| is_numbered(entry, "dfl-fme-region."));
    let nested = regions.flat_map(|entry| {
        let folder = format!("{manager}/{entry}/fpga_region");
        root.entries(&folder).into_iter().map(move |region| format!("{folder}/{region}/compat_id"))
    });
    nested
        .chain([format!("{manager}/pr/interface_id")])
        .find_map(|file| root.read(&file).filter(|id| is_id(id)))
}

/// Whether the text is 32 hexadecimal digits.
fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The management function of an Alveo card, for its user function. It is not offered itself.
pub(super) fn management_of(scan: &Scan, function: &PciFunction) -> Option<PciAddress> {
    let is_user =
        function.vendor == Some(XILINX) && function.driver.as_deref() != Some(XILINX_MANAGEMENT);
    let same_slot = |address: &PciAddress| {
        PciAddress { function: 0, ..*address } == PciAddress { function: 0, ..function.address }
    };
    let managers =
        scan.functions.values().filter(|other| other.driver.as_deref() == Some(XILINX_MANAGEMENT));
    managers.map(|manager| manager.address).filter(|_| is_user).find(same_slot)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    #[test]
    fn a_card_is_found_by_its_region_and_offers_its_ports() {
        let dir = tempfile::tempdir().unwrap();
        let regions = "sys/bus/pci/devices/0000:b1:00.0/fpga_region";
        write(
            dir.path(),
            &format!("{regions}/region0/dfl-port.0/afu_id"),
            "d8424dc4a4a3c413f89e433683f9040b\n",
        );
        write(dir.path(), &format!("{regions}/region0/dfl-fme.0/dev"), "237:1\n");
        let root = HostRoot::new(dir.path());
        let card = function("0000:b1:00.0");
        assert!(is_fpga(&root, &card));
        assert!(!is_fpga(&root, &function("0000:b1:00.1")));
        let facts = facts(&root, &card);
        assert_eq!(facts.nodes, [required("/dev/dfl-port.0")]);
        assert_eq!(&facts.attributes["afu_id"], "d8424dc4a4a3c413f89e433683f9040b");
        assert_eq!(
            &facts.attributes["fme_node"], "/dev/dfl-fme.0",
            "named, and not among the nodes"
        );
        assert_eq!(facts.parts_are, None);
    }

    #[test]
    fn each_of_several_ports_is_a_device_with_the_interface_of_its_region() {
        let dir = tempfile::tempdir().unwrap();
        let region = "sys/bus/pci/devices/0000:b1:00.0/fpga_region/region4";
        write(dir.path(), &format!("{region}/dfl-port.8/id"), "1\n");
        write(
            dir.path(),
            &format!("{region}/dfl-port.8/afu_id"),
            "00000000000000000000000000000002\n",
        );
        write(dir.path(), &format!("{region}/dfl-port.9/id"), "0\n");
        write(dir.path(), &format!("{region}/dfl-port.9/afu_id"), "no id\n");
        let nested = format!("{region}/dfl-fme.3/dfl-fme-region.5/fpga_region/region6/compat_id");
        write(dir.path(), &nested, "9346116da52d5ca8b06aa9a389ef7c8d\n");
        let facts = facts(&HostRoot::new(dir.path()), &function("0000:b1:00.0"));
        assert_eq!((facts.parts_are, facts.nodes.len()), (Some("port"), 0));
        let parts: Vec<_> = facts
            .parts
            .iter()
            .map(|part| (part.name.as_str(), part.facts.nodes[0].host.as_str()))
            .collect();
        assert_eq!(parts, [("port1", "/dev/dfl-port.8"), ("port0", "/dev/dfl-port.9")]);
        let attributes = &facts.parts[0].facts.attributes;
        assert_eq!(&attributes["interface_id"], "9346116da52d5ca8b06aa9a389ef7c8d");
        assert!(!facts.parts[1].facts.attributes.contains_key("afu_id"));
    }

    #[test]
    fn the_older_framework_has_ports_too() {
        let dir = tempfile::tempdir().unwrap();
        let card = "sys/bus/pci/devices/0000:5e:00.0/fpga/intel-fpga-dev.0";
        write(
            dir.path(),
            &format!("{card}/intel-fpga-port.0/afu_id"),
            "d8424dc4a4a3c413f89e433683f9040b\n",
        );
        write(
            dir.path(),
            &format!("{card}/intel-fpga-fme.0/pr/interface_id"),
            "ce48969398f05f33946d560708be108a\n",
        );
        let root = HostRoot::new(dir.path());
        assert!(is_fpga(&root, &function("0000:5e:00.0")));
        let facts = facts(&root, &function("0000:5e:00.0"));
        assert_eq!(facts.nodes, [required("/dev/intel-fpga-port.0")]);
        assert_eq!(&facts.attributes["interface_id"], "ce48969398f05f33946d560708be108a");
    }

    #[test]
    fn an_alveos_user_function_is_offered_and_names_the_one_that_manages_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = HostRoot::new(dir.path());
        let of = |address: &str, driver: &str, drm: &[&str]| PciFunction {
            vendor: Some(XILINX),
            class: Some(0x12_0000),
            driver: Some(driver.into()),
            drm: drm.iter().map(|name| (*name).to_owned()).collect(),
            ..function(address)
        };
        let (manager, user) = (
            of("0000:65:00.0", "xclmgmt", &[]),
            of("0000:65:00.1", "xocl", &["card2", "renderD130"]),
        );
        let scan =
            Scan::of([&manager, &user].map(|function| (function.address, function.clone())).into());
        assert!(is_fpga(&root, &manager) && is_fpga(&root, &user));
        assert_eq!(facts(&root, &manager).nodes, []);
        assert_eq!(facts(&root, &user).nodes, [required("/dev/dri/renderD130")]);
        assert_eq!(management_of(&scan, &user), Some(manager.address));
        assert_eq!(management_of(&scan, &manager), None);
    }

    #[test]
    fn a_virtio_function_of_the_class_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let virtio = PciFunction {
            vendor: Some(0x1af4),
            class: Some(0x12_0000),
            ..function("0000:b1:00.3")
        };
        assert!(!is_fpga(&HostRoot::new(dir.path()), &virtio));
    }
}
