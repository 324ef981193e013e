//! The ledger on a file system that fails while it is in use.

use crate::machine::Machine;
use crate::node::Node;

const RESOURCE: &str = "example.com/random";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/random"
class = "char"
paths = ["/dev/urandom"]
replicas = 8
"#;

/// The node of a disk.
fn device(machine: &Machine, disk: &str) -> String {
    let file = machine.run(&format!("grep -lx {disk} /sys/block/vd*/serial"));
    file.replace("/sys/block", "/dev").trim_end_matches("/serial").to_owned()
}

/// A node with its ledger alone on a file system that can fail.
fn node_on_broken(machine: &Machine) -> Node<'_> {
    let disk = device(machine, "broken");
    machine.run(&format!(
        "mkdir -p /mnt/broken && mount -t ext4 -o errors=remount-ro {disk} /mnt/broken"
    ));
    Node::at(machine, "broken", "/mnt/broken/node", "/run/broken", RESOURCES)
}

pub(crate) fn broken(machine: &Machine) {
    let node = node_on_broken(machine);
    machine.run("rm -rf /run/broken");
    node.start_kubelet();
    node.start_daemon();
    let first = node.pod("first", RESOURCE);

    let disk = device(machine, "broken");
    machine.run(&format!("echo test > /sys/fs/ext4/{}/trigger_fs_error", &disk["/dev/".len()..]));
    let refused = node.try_pod("refused", RESOURCE).rejected.expect("it is refused");
    assert!(refused.contains("could not be recorded"), "{refused}");
    assert!(refused.contains("Input/output error"), "{refused}");
    let status = node.json("status");
    assert!(!status["not_recorded"].is_null(), "{status:#}");
    assert_eq!(node.grants().len(), 1);
    node.wait_for_holders(&first.devices[0], &["first"]);
    node.end_daemon();

    // It is repaired, and has the grant.
    machine.run("umount /mnt/broken");
    let (code, output, errors) = machine.try_run(&format!("e2fsck -f -y {disk}"));
    assert_eq!(code, Some(1), "errors were corrected: {output} {errors}");
    let node = node_on_broken(machine);
    node.start_daemon();
    node.wait_for_holders(&first.devices[0], &["first"]);
    assert_ne!(node.pod("last", RESOURCE).devices, first.devices);
    node.end_daemon();
    machine.run("umount /mnt/broken");
}
