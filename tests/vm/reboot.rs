//! A clean reboot of the node: pods that return, a pod that does not, a verdict that the boot
//! clears, and a cordon. The kernel numbers the disks in another order, and each returning pod has
//! its own disk.

use crate::errors::{MALFORMED_TLP, inject};
use crate::functions::{bind, unbind};
use crate::hardware::{ADAPTER, CONTROLLER, PATHS};
use crate::machine::Machine;
use crate::node::Node;
use crate::real::say;
use crate::storage;
use std::iter::zip;

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

/// Has the kernel number the controllers in this order of their slots, as one boot or another may.
/// Then makes udev's links to the disks by their own identities, which the guest lacks.
fn number_disks(machine: &Machine, slots: [u8; 2]) {
    let count = || machine.run("ls /sys/class/block | grep -c nvme");
    let controllers = slots.map(|slot| machine.address_in(slot));
    let before = count();
    controllers.iter().for_each(|controller| unbind(machine, controller));
    controllers.iter().for_each(|controller| bind(machine, controller, ""));
    machine.wait("all disks", || (count() == before).then_some(()));
    machine.run(
        "mkdir -p /dev/disk/by-id && cd /sys/class/block && for disk in nvme*; do \
         ln -sfn ../../$disk /dev/disk/by-id/nvme-$(cat $disk/wwid); done",
    );
}

/// The node that a path leads to, and the identity of the disk.
fn disk_at(machine: &Machine, path: &str) -> (String, String) {
    let node = machine.run(&format!("readlink -f {path}"));
    let identity = machine.run(&format!("cat /sys/class/block/$(basename {node})/wwid"));
    (node, identity)
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
    number_disks(machine, [CONTROLLER, PATHS]);
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
    let disks = returning.clone().map(|pod| disk_at(machine, &pod.nodes[0]));

    let boot = machine.boot_id();
    node.end();
    storage::unmount(machine, "/mnt/ext4");
    drop(node);
    machine.reboot();
    assert_ne!(machine.boot_id(), boot);
    number_disks(machine, [PATHS, CONTROLLER]);

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
    // The kubelet starts a container that returns with the recorded nodes.
    for (pod, (node, identity)) in zip(&decided, &disks) {
        let now = disk_at(machine, &pod.nodes[0]);
        say(format_args!("{}: {} was {node}, and is {} now", pod.name, pod.nodes[0], now.0));
        assert_eq!(now.1, *identity, "{} has the disk of another pod", pod.name);
    }
    assert!(zip(&decided, &disks).any(|(pod, old)| disk_at(machine, &pod.nodes[0]).0 != old.0));
    node.wait_for_health(DISK, &cordoned, "");
    node.end();
    storage::unmount(machine, "/mnt/ext4");
}
