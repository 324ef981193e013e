//! The ledger on a file system that fails, or is full.

use crate::machine::Machine;
use crate::node::Node;

/// A device with several ids.
pub(crate) const RESOURCE: &str = "example.com/random";
pub(crate) const RESOURCES: &str = r#"
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

/// Mounts a disk, and returns where.
pub(crate) fn mount(machine: &Machine, disk: &str, options: &str) -> String {
    let device = device(machine, disk);
    machine.run(&format!("mkdir -p /mnt/{disk} && mount {options} {device} /mnt/{disk}"));
    format!("/mnt/{disk}")
}

/// Unmounts it when it is free: the kubelet's threads may end after its answer.
pub(crate) fn unmount(machine: &Machine, dir: &str) {
    machine.wait(&format!("{dir} is free"), || {
        let (code, _, _) = machine.try_run(&format!("umount {dir}"));
        (code == Some(0)).then_some(())
    });
}

/// A node with its ledger alone on a file system that can fail.
fn node_on_broken(machine: &Machine) -> Node<'_> {
    let dir = mount(machine, "broken", "-t ext4 -o errors=remount-ro");
    Node::at(machine, "broken", &format!("{dir}/node"), "/run/broken", RESOURCES)
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
    unmount(machine, "/mnt/broken");
    let (code, output, errors) = machine.try_run(&format!("e2fsck -f -y {disk}"));
    assert_eq!(code, Some(1), "errors were corrected: {output} {errors}");
    let node = node_on_broken(machine);
    node.start_daemon();
    node.wait_for_holders(&first.devices[0], &["first"]);
    assert_ne!(node.pod("last", RESOURCE).devices, first.devices);
    node.end_daemon();
    unmount(machine, "/mnt/broken");
}

/// Devices that every machine has.
pub(crate) const TERMINAL: &str = "example.com/terminal";
pub(crate) const TERMINALS: &str = r#"
[[resource]]
name = "example.com/terminal"
class = "char"
paths = ["/dev/tty?", "/dev/tty??"]
"#;
/// Devices of a large grant, of several kilobytes.
pub(crate) const LARGE: u32 = 60;
/// More large grants than the room that the journal allocates ahead.
const AHEAD: usize = 150;

pub(crate) fn full(machine: &Machine) {
    let dir = mount(machine, "small", "-t ext4");
    machine.run("rm -rf /run/small");
    let node = Node::at(
        machine,
        "small",
        &format!("{dir}/node"),
        "/run/small",
        &format!("{RESOURCES}{TERMINALS}"),
    );
    node.start_kubelet();
    node.start_daemon();
    let first = node.pod("first", RESOURCE);
    // Also the blocks that are reserved for root.
    let fill =
        format!("dd if=/dev/zero of={dir}/filler bs=64k; dd if=/dev/zero of={dir}/rest bs=1k");
    let (code, _, errors) = machine.try_run(&fill);
    assert!(code != Some(0) && errors.contains("No space left on device"), "{errors}");

    // The journal is allocated ahead, so some grants have room still: many, unless they are large.
    let refused = (0..AHEAD).find_map(|_| {
        let pod = node.try_pod_with("large", TERMINAL, LARGE);
        if pod.rejected.is_none() {
            node.delete(&pod);
        }
        pod.rejected
    });
    let refused = refused.expect("the disk is full");
    assert!(refused.contains("make room"), "{refused}");
    let status = node.json("status");
    assert!(!status["not_recorded"].is_null(), "{status:#}");
    assert_eq!(node.holders(&first.devices[0]), ["first"]);

    machine.run(&format!("rm {dir}/filler {dir}/rest"));
    let last = node.wait("a pod gets a device again", |node| {
        Some(node.try_pod("last", RESOURCE)).filter(|pod| pod.rejected.is_none())
    });
    assert_ne!(last.devices, first.devices);
    node.wait("the ledger is written again", |node| {
        node.json("status")["not_recorded"].is_null().then_some(())
    });
    node.kill_daemon();
    assert_eq!(node.json("ledger verify")["sound"], true);
    node.start_daemon();
    for pod in [first, last] {
        node.wait_for_holders(&pod.devices[0], &[&pod.name]);
    }
    assert_eq!(node.quarantined(), "");
    node.end_daemon();
    unmount(machine, &dir);
}
