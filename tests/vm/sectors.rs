//! The ledger on a disk with sectors that cannot be read or written.
//!
//! The disk is in the guest's memory (the kernel's null_blk). Its bad sectors are those of chosen
//! files, so the file system itself continues.

use crate::guest::Pod;
use crate::machine::Machine;
use crate::node::Node;
use crate::storage::{self, RESOURCE, RESOURCES};

/// The settings of the disk, which appears as a node of the same name.
const SETTINGS: &str = "/sys/kernel/config/nullb/nullb0";
const DIR: &str = "/mnt/failing";

fn mount(machine: &Machine) {
    machine.run(&format!("mkdir -p {DIR} && mount -t ext4 /dev/nullb0 {DIR}"));
}

/// Makes a disk with a file system, and mounts it.
fn make_disk(machine: &Machine) {
    machine.run(&format!(
        "mount -t configfs configfs /sys/kernel/config && mkdir {SETTINGS} && cd {SETTINGS} && \
         echo 64 > size && echo 1 > memory_backed && echo 1 > power && \
         mkfs.ext4 -q -b 4096 /dev/nullb0"
    ));
    mount(machine);
}

fn remove_disk(machine: &Machine) {
    storage::unmount(machine, DIR);
    machine.run(&format!(
        "echo 0 > {SETTINGS}/power && rmdir {SETTINGS} && umount /sys/kernel/config"
    ));
}

/// Mounts the disk again, so that nothing of it is in memory.
fn mount_again(machine: &Machine) {
    storage::unmount(machine, DIR);
    machine.run("echo 3 > /proc/sys/vm/drop_caches");
    mount(machine);
}

/// Sectors that cannot be read or written.
#[derive(Debug)]
struct Bad<'m> {
    machine: &'m Machine,
    ranges: Vec<String>,
}

impl<'m> Bad<'m> {
    /// All sectors of these files.
    fn of(machine: &'m Machine, files: &str) -> Self {
        let extents = machine.run(&format!("filefrag -v -b512 {files}"));
        // `ext: logical: physical: length: …`, where the second and the third are `first.. last`.
        let range = |line: &str| {
            let mut columns = line.split(':').map(str::trim);
            columns.next()?.parse::<usize>().ok()?;
            let (first, last) = columns.nth(1)?.split_once("..")?;
            Some(format!("{first}-{}", last.trim()))
        };
        let ranges: Vec<String> = extents.lines().filter_map(range).collect();
        assert!(!ranges.is_empty(), "{extents}");
        let bad = Bad { machine, ranges };
        bad.write('+');
        bad
    }

    fn write(&self, sign: char) {
        for range in &self.ranges {
            self.machine.run(&format!("echo {sign}{range} > {SETTINGS}/badblocks"));
        }
    }

    fn repair(self) {
        self.write('-');
    }
}

/// A node with its ledger on the disk, and a pod that has a device.
fn node_with_a_pod(machine: &Machine) -> (Node<'_>, Pod) {
    make_disk(machine);
    machine.run("rm -rf /run/failing");
    let node = Node::at(machine, "failing", &format!("{DIR}/node"), "/run/failing", RESOURCES);
    node.start_kubelet();
    node.start_daemon();
    let first = node.pod("first", RESOURCE);
    (node, first)
}

/// The newest segment of the journal.
fn newest_segment(machine: &Machine, node: &Node<'_>) -> String {
    machine.run(&format!("ls {}/journal/*.log | tail -n 1", node.state()))
}

pub(crate) fn of_the_journal(machine: &Machine) {
    let (node, first) = node_with_a_pod(machine);

    // The grant that cannot be written is refused. The next one gets another place on the disk.
    let segment = newest_segment(machine, &node);
    let bad = Bad::of(machine, &segment);
    let refused = node.try_pod("refused", RESOURCE).rejected.expect("it is refused");
    for words in ["could not be recorded", &segment, "Input/output error"] {
        assert!(refused.contains(words), "{refused}");
    }
    let status = node.json("status");
    assert!(!status["not_recorded"].is_null(), "{status:#}");
    assert_eq!(node.holders(&first.devices[0]), ["first"]);
    let second = node.wait("a pod gets a device again", |node| {
        Some(node.try_pod("second", RESOURCE)).filter(|pod| pod.rejected.is_none())
    });
    node.wait_for_holders(&second.devices[0], &["second"]);
    assert!(node.json("status")["not_recorded"].is_null());

    // A start cannot read the newest segment either.
    node.kill_daemon();
    mount_again(machine);
    let also_bad = Bad::of(machine, &newest_segment(machine, &node));
    node.start_daemon();
    for pod in [&first, &second] {
        node.wait_for_holders(&pod.devices[0], &[&pod.name]);
    }
    assert!(node.quarantined().contains(".log.quarantine"), "{}", node.quarantined());
    assert_ne!(node.pod("third", RESOURCE).devices, second.devices);
    for bad in [bad, also_bad] {
        bad.repair();
    }
    node.end_daemon();
    remove_disk(machine);
}

pub(crate) fn of_the_database(machine: &Machine) {
    let (node, first) = node_with_a_pod(machine);
    node.delete(&node.pod("past", RESOURCE));
    let is_whole = |node: &Node<'_>| {
        let history = node.history();
        let past = history.iter().filter(|grant| grant["state"] == "released").count();
        (past == 1).then_some(())
    };
    node.wait("it is released", is_whole);
    node.end_daemon();

    // The database is not open, and is no damaged one.
    mount_again(machine);
    let bad = Bad::of(machine, &format!("{}/db/db", node.state()));
    node.start_daemon();
    assert_eq!(node.holders(&first.devices[0]), ["first"]);
    assert_ne!(node.pod("second", RESOURCE).devices, first.devices);
    node.wait("the history cannot be read", |node| {
        (node.json("status")["ledger"]["unreadable"]["because"] == "refused").then_some(())
    });
    assert!(!node.logged(&["query database", "Input/output error"]).is_empty());
    bad.repair();
    node.wait("the history can be read", is_whole);
    assert_eq!(node.quarantined(), "");
    node.end_daemon();
    assert_eq!(node.json("ledger verify")["sound"], true);
    remove_disk(machine);
}
