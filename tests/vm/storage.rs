//! The ledger on real file systems: the power fails while pods get devices, and a file system
//! fails.

use crate::guest::Pod;
use crate::machine::Machine;
use crate::node::{Node, name};
use std::collections::BTreeMap;

const RESOURCE: &str = "example.com/random";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/random"
class = "char"
paths = ["/dev/urandom"]
replicas = 500
"#;
const FILE_SYSTEMS: [&str; 3] = ["ext4", "xfs", "btrfs"];
/// Pods that each kubelet starts before the power fails.
const PODS: usize = 12;
/// Requests of the disk each second at the start after that: opening the database takes many.
const SLOW: u32 = 4;

/// Mounts a disk, and returns where.
fn mount(machine: &Machine, disk: &str, kind: &str) -> String {
    machine.run(&format!(
        "mkdir -p /mnt/{disk} && mount -t {kind} {} /mnt/{disk}",
        device(machine, disk)
    ));
    format!("/mnt/{disk}")
}

/// The node of a disk.
fn device(machine: &Machine, disk: &str) -> String {
    let file = machine.run(&format!("grep -lx {disk} /sys/block/vd*/serial"));
    file.replace("/sys/block", "/dev").trim_end_matches("/serial").to_owned()
}

/// A node with its ledger and its kubelet on this file system.
fn node_on<'m>(machine: &'m Machine, kind: &str) -> Node<'m> {
    let dir = mount(machine, kind, kind);
    Node::at(machine, kind, &format!("{dir}/node"), &format!("{dir}/node"), RESOURCES)
}

/// The devices of every grant that the ledger has or had, by its id.
fn recorded(node: &Node<'_>) -> BTreeMap<String, Vec<String>> {
    let document = node.json("history");
    assert!(document["problem"].is_null(), "{document}");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let grants = document["grants"].as_array().unwrap().iter();
    grants
        .map(|grant| {
            let devices = grant["devices"].as_array().unwrap().iter().map(text).collect();
            (text(&grant["alloc_id"]), devices)
        })
        .collect()
}

pub(crate) fn power_cut(machine: &Machine) {
    let nodes = FILE_SYSTEMS.map(|kind| {
        let node = node_on(machine, kind);
        machine.run(&format!("rm -rf /mnt/{kind}/node && mkdir /mnt/{kind}/node"));
        node.start_kubelet();
        node.start_daemon();
        node
    });
    let kubelets: Vec<String> = nodes.iter().map(Node::kubelet).collect();
    let of = |pods: &[Pod], kubelet: &str| -> Vec<Pod> {
        pods.iter().filter(|pod| pod.kubelet == kubelet).cloned().collect()
    };
    let answered = machine.cut_power_while_adding(&kubelets, &name(RESOURCE), |pods| {
        kubelets.iter().all(|kubelet| of(pods, kubelet).len() >= PODS)
    });
    drop(nodes);
    machine.boot();

    for kind in FILE_SYSTEMS {
        let node = node_on(machine, kind);
        let pods = of(&answered, &node.kubelet());
        crate::say(format_args!("{kind}: {} pods were answered before the cut", pods.len()));
        node.start_kubelet();
        // The first start after a boot has nothing of the database in memory.
        machine.throttle(kind, SLOW);
        node.start_daemon();
        machine.throttle(kind, 0);
        node.wait("the history is open", |node| {
            node.json("history")["problem"].is_null().then_some(())
        });
        let recorded = recorded(&node);
        for pod in &pods {
            assert_eq!(pod.rejected, None);
            assert_eq!(recorded.get(pod.alloc_id()), Some(&pod.devices), "{kind}: {pod:?}");
        }
        let files = machine.run(&format!("ls {}", node.state()));
        assert!(!files.contains("quarantine"), "{kind}: {files}");
        assert_eq!(node.json("ledger verify")["sound"], true);

        // One pod returns, and has what it had. The others do not: their grants end.
        let returns = &pods[0];
        let again = node.try_pod(&returns.name, Some(&returns.uid), RESOURCE);
        assert_eq!((again.rejected, &again.devices), (None, &returns.devices));
        node.wait("only the pod that returned holds a device", |node| {
            let grants = node.grants();
            let is_returned = |grant: &serde_json::Value| grant["pod"]["uid"] == *returns.uid;
            (!grants.is_empty() && grants.iter().all(is_returned)).then_some(())
        });
        assert_eq!(node.holders(&returns.devices[0]), [returns.name.as_str()]);
        node.end_daemon();
        machine.run(&format!("umount /mnt/{kind}"));
    }
}

/// A node with its ledger alone on a file system that can fail.
fn node_on_broken(machine: &Machine) -> Node<'_> {
    let dir = mount(machine, "broken", "ext4");
    machine.run(&format!("mount -o remount,errors=remount-ro {dir}"));
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
    let refused = node.try_pod("refused", None, RESOURCE).rejected.expect("it is refused");
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
