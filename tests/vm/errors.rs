//! Errors of PCI Express (AER), which the kernel's module `aer_inject` reports as the hardware
//! would. QEMU's own errors do not reach the kernel from this adapter.

use crate::hardware::ADAPTER;
use crate::machine::Machine;
use crate::node::Node;
use serde_json::json;

const RESOURCE: &str = "example.com/adapter";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/adapter"
class = "nic"
"#;
/// Bits of the registers of status: Bad TLP, and Malformed TLP, which is fatal (`pci_regs.h`).
const BAD_TLP: u32 = 0x40;
pub(crate) const MALFORMED_TLP: u32 = 0x0004_0000;

/// Injects an error by its bits of the two registers: `struct aer_error_inj` of the kernel's
/// `drivers/pci/pcie/aer_inject.c`.
pub(crate) fn inject(machine: &Machine, function: &str, uncorrectable: u32, correctable: u32) {
    let bus = u8::from_str_radix(&function[5..7], 16).unwrap();
    let mut bytes = vec![bus, 0, 0, 0];
    // The registers, four words of the header log, the domain.
    for word in [uncorrectable, correctable, 1, 2, 3, 4, 0] {
        bytes.extend(word.to_le_bytes());
    }
    let text: String = bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    machine.run(&format!("printf '{text}' > /run/error && cat /run/error > /dev/aer_inject"));
}

/// The errors that the kernel has counted for a function.
fn counted(machine: &Machine, function: &str, kind: &str) -> u64 {
    let file = format!("/sys/bus/pci/devices/{function}/aer_dev_{kind}");
    let total = machine.run(&format!("grep ^TOTAL_ERR {file}"));
    total.split(' ').next_back().unwrap().parse().unwrap()
}

pub(crate) fn of_an_adapter(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    let adapter = machine.address_in(ADAPTER);
    node.wait_for_healthy(RESOURCE, std::slice::from_ref(&adapter));
    let pod = node.pod("holder", RESOURCE);

    let before = counted(machine, &adapter, "correctable");
    inject(machine, &adapter, 0, BAD_TLP);
    node.wait("the kernel counts the correctable error", |_| {
        (counted(machine, &adapter, "correctable") > before).then_some(())
    });
    inject(machine, &adapter, MALFORMED_TLP, 0);
    node.wait_for_health(RESOURCE, &adapter, "error_recovery");
    assert_eq!(node.holders(&adapter), ["holder"]);
    // The kernel resets the adapter, which is the evidence. Then the hold time passes.
    node.wait_for_health(RESOURCE, &adapter, "");
    assert_eq!(node.holders(&adapter), ["holder"]);
    let failures = node.failures(&adapter);
    let [failure] = &failures[..] else {
        panic!("the correctable error is no failure: {failures:#?}")
    };
    assert_eq!(failure["reason"], "error_recovery");
    assert_eq!(failure["held_by"], json!([pod.alloc_id()]));
    node.end_daemon();
}
