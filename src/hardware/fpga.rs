//! FPGAs of the Device Feature List framework (Linux `Documentation/fpga/dfl.rst`) and of its predecessor.
//!
//! What a workload gets is the port, the user's half of the card. The management half, `/dev/dfl-fme.N`, can reprogram
//! the card and is never handed out.

use super::facts::{Facts, required};
use super::pci::folder;
use crate::domain::PciFunction;
use crate::host::HostRoot;

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
/// AMD's (Xilinx') Alveo cards: a management function and a user function, which has the render node.
const XILINX: u16 = 0x10ee;

/// Whether a function is (part of) an FPGA card: by its driver, by a region below it, or by its ids.
pub(super) fn is_fpga(root: &HostRoot, function: &PciFunction) -> bool {
    let driver = function.driver.as_deref().is_some_and(|driver| matches!(driver, "dfl-pci" | "intel-fpga-pci" | "xocl" | "xclmgmt"));
    let ids = function.vendor.zip(function.device);
    let known = ids.is_some_and(|ids| {
        CARDS.contains(&ids) || matches!(ids, (SILICOM, 0x1000 | 0x1001)) || (ids.0 == XILINX && function.class16() == Some(0x1200))
    });
    // A region is looked for only where the class does not already say something else: one look less per function.
    let open = matches!(function.class16(), None | Some(0x1200..=0x12ff));
    driver || known || (open && ["fpga_region", "fpga"].iter().any(|name| root.is_dir(&format!("{}/{name}", folder(function.address)))))
}

pub(super) fn facts(root: &HostRoot, function: &PciFunction) -> Facts {
    let mut facts = Facts::default();
    let dir = folder(function.address);
    // A region nested below the management half serves partial reconfiguration and has no port.
    for (class, prefix) in [("fpga_region", "dfl-port."), ("fpga", "intel-fpga-port.")] {
        for region in root.entries(&format!("{dir}/{class}")) {
            for port in root.entries(&format!("{dir}/{class}/{region}")).into_iter().filter(|entry| entry.starts_with(prefix)) {
                facts.note("afu_id", root.read(&format!("{dir}/{class}/{region}/{port}/afu_id")));
                facts.nodes.push(required(format!("/dev/{port}")));
            }
        }
    }
    if function.vendor == Some(XILINX) {
        let render = function.drm.iter().filter(|name| name.starts_with("renderD"));
        facts.nodes.extend(render.map(|name| required(format!("/dev/dri/{name}"))));
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    #[test]
    fn a_card_is_told_by_its_region_and_offers_its_ports() {
        let dir = tempfile::tempdir().unwrap();
        let regions = "sys/bus/pci/devices/0000:b1:00.0/fpga_region";
        write(dir.path(), &format!("{regions}/region0/dfl-port.0/afu_id"), "d8424dc4a4a3c413f89e433683f9040b\n");
        write(dir.path(), &format!("{regions}/region0/dfl-fme.0/dev"), "237:1\n");
        let root = HostRoot::new(dir.path());
        let card = function("0000:b1:00.0");
        assert!(is_fpga(&root, &card));
        assert!(!is_fpga(&root, &function("0000:b1:00.1")));
        assert_eq!(facts(&root, &card).nodes, [required("/dev/dfl-port.0")]);
    }

    #[test]
    fn a_virtio_function_of_the_class_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let virtio = PciFunction { vendor: Some(0x1af4), class: Some(0x12_0000), ..function("0000:b1:00.3") };
        assert!(!is_fpga(&HostRoot::new(dir.path()), &virtio));
    }
}
