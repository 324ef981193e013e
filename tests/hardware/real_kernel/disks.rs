//! Disks: those that the kernel creates when a file is read, and partitions of a loop device.

use super::machine::{Host, ZRAM, Zram, alone, can, done, output};
use crate::common::inside::has_program;
use crate::common::{percentiles, run};
use std::fs;
use std::path::Path;

#[test]
fn devices_are_offered_from_their_creation_to_their_removal() {
    let _alone = alone();
    if !can(
        "devices_are_offered_from_their_creation_to_their_removal",
        "a kernel with zram",
        Path::new(ZRAM).exists(),
    ) {
        return;
    }
    run(async {
        let host = Host::new("/dev/zram*");
        let (first, running) = Zram::offered(&host).await;
        let (mut made, mut taken) = (Vec::new(), Vec::new());
        let mut others = Vec::new();
        for _ in 0..10 {
            running.rest().await;
            let other = Zram::new();
            made.push(running.listed(&other.id(), true).await);
            others.push(other);
        }
        while let Some(other) = others.pop() {
            let id = other.id();
            running.rest().await;
            drop(other);
            taken.push(running.listed(&id, false).await);
            running.listed(&first.id(), true).await;
        }
        // It comes back under its name.
        let again = Zram::new();
        running.listed(&again.id(), true).await;
        println!(
            "from the kernel to the kubelet's list, alone: made {}; taken away {}",
            percentiles(made),
            percentiles(taken)
        );
    });
}

/// A file as a loop device.
#[derive(Debug)]
struct Loop(String);

impl Loop {
    fn attach(file: &str) -> Loop {
        Loop(done("losetup", &["--find", "--show", file]))
    }

    /// Adds a partition in the kernel: the second half of the disk. Returns its id.
    fn add_partition(&self) -> String {
        done("addpart", &[&self.0, "1", "1024", "512"]);
        format!("block:{}p1", self.0.trim_start_matches("/dev/"))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The kernel keeps a partition that was added, even without the file. There may be none.
        output("delpart", &[&self.0, "1"]);
        done("losetup", &["--detach", &self.0]);
    }
}

#[test]
fn a_file_becomes_a_disk_whose_partition_comes_and_goes() {
    let _alone = alone();
    let has =
        Path::new("/dev/loop-control").exists() && has_program("losetup") && has_program("addpart");
    if !can(
        "a_file_becomes_a_disk_whose_partition_comes_and_goes",
        "loop devices, losetup and addpart",
        has,
    ) {
        return;
    }
    run(async {
        let host = Host::new("/dev/loop*p1");
        let (plain, partitioned) = (host.path("plain"), host.path("partitioned"));
        for file in [&plain, &partitioned] {
            fs::write(file, vec![0_u8; 1 << 20]).unwrap();
        }
        let running = host.start().await;
        for _ in 0..2 {
            let disk = Loop::attach(&partitioned);
            let id = disk.add_partition();
            running.listed(&id, true).await;
            running.rest().await;
            let before = running.work().await;
            // A disk without partitions changes an existing device: every mount of an image causes
            // such events.
            drop(Loop::attach(&plain));
            running.rest().await;
            assert_eq!(
                running.work().await.since(before).lists,
                0,
                "no offered device has changed"
            );
            assert_eq!(running.healthy(), [id.clone()].into());
            drop(disk);
            running.listed(&id, false).await;
        }
    });
}
