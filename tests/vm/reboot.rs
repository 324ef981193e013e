//! A clean reboot of the node: pods that return, a pod that does not, a verdict that the boot
//! clears, and a cordon.

use crate::errors::{MALFORMED_TLP, inject};
use crate::functions::{bind, unbind};
use crate::hardware::ADAPTER;
use crate::machine::Machine;
use crate::node::Node;
use crate::real::say;
use crate::storage;
use serde_json::Value;
use std::collections::BTreeMap;

const ADAPTERS: &str = "example.com/adapter";
const DISK: &str = "example.com/disk";
const TERMINAL: &str = "example.com/terminal";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/adapter"
class = "nic"
[[resource]]
name = "example.com/disk"
class = "nvme"
[[resource]]
name = "example.com/terminal"
class = "char"
paths = ["/dev/tty?"]
"#;

/// A node whose ledger and kubelet outlive a boot.
fn node_on_disk(machine: &Machine) -> Node<'_> {
    let dir = storage::mount(machine, "ext4", "-t ext4");
    Node::at(machine, "reboot", &format!("{dir}/reboot"), &format!("{dir}/reboot"), RESOURCES)
}

/// The node of each disk. Another boot may number the disks in another order.
fn nodes_of_disks(node: &Node<'_>) -> BTreeMap<String, Value> {
    let found = node.json("discover");
    let disks = found["devices"].as_array().unwrap().iter().filter(|it| it["resource"] == DISK);
    disks.map(|it| (it["id"].as_str().unwrap().to_owned(), it["nodes"].clone())).collect()
}

/// Makes the adapter fail for good: this driver has no handlers of errors.
fn break_adapter(machine: &Machine, node: &Node<'_>, adapter: &str) {
    unbind(machine, adapter);
    bind(machine, adapter, "uio_pci_generic");
    node.wait_for_health(ADAPTERS, adapter, "");
    inject(machine, adapter, MALFORMED_TLP, 0);
    node.wait_for_health(ADAPTERS, adapter, "recovery_failed");
}

pub(crate) fn of_the_node(machine: &Machine) {
    let node = node_on_disk(machine);
    machine.run("rm -rf /mnt/ext4/reboot && mkdir /mnt/ext4/reboot");
    node.start_kubelet();
    node.start_daemon();
    let adapter = machine.address_in(ADAPTER);
    node.wait_for_healthy(ADAPTERS, std::slice::from_ref(&adapter));
    let returning = ["static", "other"].map(|name| node.pod(name, DISK));
    let ends = node.pod("ends", TERMINAL);
    let cordoned = node.healthy(DISK).into_iter().find(|id| node.holders(id).is_empty()).unwrap();
    node.cordon(&cordoned);
    node.wait_for_health(DISK, &cordoned, "cordoned");
    break_adapter(machine, &node, &adapter);
    let nodes = nodes_of_disks(&node);

    let boot = machine.boot_id();
    node.end();
    storage::unmount(machine, "/mnt/ext4");
    drop(node);
    machine.reboot();
    assert_ne!(machine.boot_id(), boot);

    let node = node_on_disk(machine);
    node.launch();
    node.wait_until_ready();
    assert_eq!(node.holders(&ends.devices[0]), ["ends"], "its end is not proven");
    let decided = node.start_kubelet_with(&returning);
    node.wait_until_registered();
    for (pod, before) in decided.iter().zip(&returning) {
        assert_eq!(pod.rejected, None);
        assert_eq!((&pod.devices, &pod.alloc_id), (&before.devices, &before.alloc_id));
        assert_eq!(node.holders(&pod.devices[0]), [pod.name.as_str()]);
    }
    node.wait_for_health(ADAPTERS, &adapter, "");
    let failures = node.failures(&adapter);
    assert_eq!(failures.last().unwrap()["reason"], "recovery_failed", "{failures:#?}");
    node.wait_for_health(DISK, &cordoned, "cordoned");
    // The kubelet writes its checkpoint, and forgets in it what did not return.
    let next = node.pod("next", ADAPTERS);
    assert_eq!(next.devices, [adapter]);
    node.wait_for_holders(&ends.devices[0], &[]);
    node.uncordon(&cordoned);
    // The kubelet starts a container that returns with the node that it had.
    let now = &nodes_of_disks(&node)[&cordoned];
    let is_returned = returning.iter().any(|pod| nodes[&pod.devices[0]] == *now);
    say(format_args!("the disks were {nodes:?}, and the free one is {now} now"));
    node.wait_for_health(DISK, &cordoned, if is_returned { "held_as_other" } else { "" });
    node.end();
    storage::unmount(machine, "/mnt/ext4");
}
