//! The ledger on a disk that is slow: for the reads of a start, and for the writes of an Allocate.

use crate::machine::Machine;
use crate::node::Node;
use crate::storage::{self, LARGE, RESOURCE, RESOURCES, TERMINAL, TERMINALS};
use serde_json::{Value, json};

/// Bytes that the slow disk reads in a second: a start has read the journal when the database is
/// far from open.
const READS: u64 = 64 << 10;
/// Bytes that it writes in a second: a write takes longer than a kubelet waits.
const WRITES: u64 = 256;
/// Grants of the history.
const RELEASED: usize = 300;
/// Another boot than that of the machine.
const BOOT: &str = "00000000-1111-4222-8333-444444444444";

/// The number of released grants, once the history can be read.
fn released(node: &Node<'_>) -> usize {
    node.history().iter().filter(|grant| grant["state"] == "released").count()
}

/// Gives a node that has ended a long history: copies of this grant, by way of an export.
fn import_history(machine: &Machine, node: &Node<'_>, mut exported: Value, alloc_id: &str) {
    let mut grants = exported["grants"].take();
    let grants = grants.as_array_mut().unwrap();
    let grant = grants.iter_mut().find(|grant| grant["alloc_id"] == alloc_id).unwrap();
    grant["alloc_id"] = json!("@");
    grant["state"] = json!("released");
    grant["released_at"] = grant["bound_at"].clone();
    grant["released_by"] = json!("pod_gone");
    exported["grants"] = json!(["#"]);
    let exported = exported.to_string();
    let (begin, end) = exported.split_once("\"#\"").unwrap();
    let repeat = "{ for (n = 1; n <= count; n++) { one = $0; sub(/@/, \"imported-\" n, one); \
                  printf(\"%s%s\", (n > 1) ? \",\" : \"\", one) } }";
    machine.run(&format!(
        "cd /run/slow && printf '%s' '{begin}' > export && \
         printf '%s\n' '{grant}' | awk -v count={RELEASED} '{repeat}' >> export && \
         printf '%s' '{end}' >> export"
    ));
    node.run("ledger import /run/slow/export");
}

pub(crate) fn reads_and_writes(machine: &Machine) {
    let dir = storage::mount(machine, "ext4", "-t ext4");
    machine.run(&format!("rm -rf /run/slow {dir}/slow && mkdir -p /run/slow {dir}/slow"));
    let node = Node::at(
        machine,
        "slow",
        &format!("{dir}/slow"),
        "/run/slow",
        &format!("{RESOURCES}{TERMINALS}"),
    );
    node.start_kubelet();
    node.start_daemon();
    let first = node.pod("first", RESOURCE);
    let large = node.try_pod_with("large", TERMINAL, LARGE);
    node.wait_for_holders(&large.devices[0], &["large"]);
    let exported = node.json("ledger export");
    node.end_daemon();
    import_history(machine, &node, exported, large.alloc_id());
    node.start_daemon();
    assert_eq!(released(&node), RELEASED);
    let listed = node.listed();
    node.kill_daemon();

    // As after a power cut: the database may have what the journal has lost, and nothing of the
    // disk is in memory.
    storage::unmount(machine, &dir);
    machine.run(&format!(
        "echo 3 > /proc/sys/vm/drop_caches && echo {BOOT} > /run/slow/boot_id && \
         mount --bind /run/slow/boot_id /proc/sys/kernel/random/boot_id"
    ));
    storage::mount(machine, "ext4", "-t ext4");
    machine.throttle("ext4", "bps_rd", READS);
    node.launch();
    let second = serves_without_history(&node, &first.devices[0]);
    assert_eq!(node.listed(), listed);
    machine.throttle("ext4", "bps_rd", 0);
    node.wait("the history", |node| (released(node) == RELEASED).then_some(()));
    assert!(node.json("status")["ledger"]["unreadable"].is_null());

    refuses_what_is_not_written(machine, &node);
    for pod in [&first, &large, &second] {
        node.wait_for_holders(&pod.devices[0], &[&pod.name]);
    }
    assert_eq!(node.quarantined(), "");
    node.end_daemon();
    assert_eq!(node.json("ledger verify")["sound"], true);
    storage::unmount(machine, &dir);
    machine.run("umount /proc/sys/kernel/random/boot_id");
}

/// A daemon that has just started knows who holds what, and records grants, before it has its
/// history. Returns a pod that got a device.
fn serves_without_history(node: &Node<'_>, held: &str) -> crate::guest::Pod {
    node.wait_until_registered();
    assert_eq!(node.holders(held), ["first"]);
    let second = node.pod("second", RESOURCE);
    assert_ne!(second.devices, [held]);
    let status = node.json("status");
    assert_eq!(status["ledger"]["unreadable"]["because"], "slow", "{status:#}");
    let history = node.json("history");
    let problem = history["problem"].as_str().unwrap_or_default();
    assert!(problem.contains("is not open yet"), "{problem}");
    second
}

/// No pod starts whose grant is not on the disk, and none waits for the disk.
fn refuses_what_is_not_written(machine: &Machine, node: &Node<'_>) {
    machine.throttle("ext4", "bps_wr", WRITES);
    // The disk takes the first write at once.
    let mut pods = (1..=3).map(|number| node.try_pod(&format!("slow-{number}"), RESOURCE));
    let refused = pods.find_map(|pod| pod.rejected).expect("a pod is refused");
    assert!(
        refused.contains("could not be recorded") && refused.contains("its disk may hang"),
        "{refused}"
    );
    let status = node.json("status");
    assert!(!status["not_recorded"].is_null() && status["ledger_hangs"] == true, "{status:#}");
    machine.throttle("ext4", "bps_wr", 0);
    let after = node.wait("a pod gets a device again", |node| {
        Some(node.try_pod("after", RESOURCE)).filter(|pod| pod.rejected.is_none())
    });
    node.wait_for_holders(&after.devices[0], &["after"]);
    // A grant that was written after its Allocate had failed is released.
    node.wait("no device is held for a refused pod", |node| {
        let grants = node.json("who")["grants"].take();
        let is_bound = |grant: &Value| grant["state"] == "bound";
        grants.as_array().unwrap().iter().all(is_bound).then_some(())
    });
    node.wait("a status without problems of the ledger", |node| {
        let status = node.json("status");
        (status["not_recorded"].is_null() && status["ledger_hangs"] == false).then_some(())
    });
}
