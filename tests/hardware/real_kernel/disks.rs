//! Disks: those that the kernel makes when a file is read, and partitions of a file that is taken for a disk.

use super::machine::{Host, ZRAM, Zram, alone, can, done, output};
use crate::common::inside::has_program;
use crate::common::{percentiles, run};
use std::fs;
use std::path::Path;

#[test]
fn what_the_kernel_makes_is_offered_and_what_it_takes_away_is_not() {
    let _alone = alone();
    if !can("what_the_kernel_makes_is_offered_and_what_it_takes_away_is_not", "a kernel with zram", Path::new(ZRAM).exists()) {
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
        println!("from the kernel to the kubelet's list, alone: made {}; taken away {}", percentiles(made), percentiles(taken));
    });
}

/// A file as a disk.
#[derive(Debug)]
struct Loop(String);

impl Loop {
    fn attach(file: &str) -> Loop {
        Loop(done("losetup", &["--find", "--show", file]))
    }

    /// Tells the kernel of a partition: its second half. Its id.
    fn add_partition(&self) -> String {
        done("addpart", &[&self.0, "1", "1024", "512"]);
        format!("block:{}p1", self.0.trim_start_matches("/dev/"))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // The kernel keeps a partition that it was told of, whatever becomes of the file. There may be none.
        output("delpart", &[&self.0, "1"]);
        done("losetup", &["--detach", &self.0]);
    }
}

#[test]
fn a_file_becomes_a_disk_whose_partition_comes_and_goes() {
    let _alone = alone();
    let has = Path::new("/dev/loop-control").exists() && has_program("losetup") && has_program("addpart");
    if !can("a_file_becomes_a_disk_whose_partition_comes_and_goes", "loop devices, losetup and addpart", has) {
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
            // A disk without partitions is a change of a device that was there: every mount of an image makes some.
            drop(Loop::attach(&plain));
            running.rest().await;
            assert_eq!(running.work().await.since(before).lists, 0, "nothing has changed that anybody offers");
            assert_eq!(running.healthy(), [id.clone()].into());
            drop(disk);
            running.listed(&id, false).await;
        }
    });
}
