//! The state directory on a full, read-only or broken disk, in memory, and in an overlay.

use super::scene::{MOUNT, Mounted, doctor, is_in_order, start};
use crate::common::inside::{command, has_program, inside, say};
use crate::common::{Node, allocate, dial, name, run, until_blocking};
use holdfast::console::exit;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const DISK: [&str; 6] =
    ["mount", "umount", "losetup", "fallocate", "mkfs.ext4", "/dev/loop-control"];

/// An ext4 in a file.
struct Disk {
    image: PathBuf,
    mounted: Option<Mounted>,
}

impl Disk {
    /// `layout` is for mkfs, `options` for the mount.
    fn new(dir: &Path, size: &str, layout: &[&str], options: &str, at: &Path) -> Disk {
        let image = dir.join("disk");
        drop(fs::remove_file(&image));
        command(Command::new("truncate").args(["-s", size]).arg(&image));
        command(
            Command::new("mkfs.ext4")
                .args(["-q", "-F", "-b", "4096", "-E", "lazy_itable_init=0"])
                .args(layout)
                .arg(&image),
        );
        fs::create_dir_all(at).unwrap();
        let mounted =
            Some(Mounted::new(&["-t", "ext4", "-o", &format!("loop,{options}")], &image, at));
        Disk { image, mounted }
    }

    fn at(&self) -> &Path {
        &self.mounted.as_ref().unwrap().0
    }

    fn devices(&self) -> String {
        String::from_utf8(
            Command::new("losetup").arg("-j").arg(&self.image).output().unwrap().stdout,
        )
        .unwrap()
    }

    /// Bytes that an unprivileged process may still write.
    fn room(&self) -> u64 {
        holdfast::host::free_bytes(self.at())
    }

    /// Allocates this many bytes without writing them.
    fn take(&self, name: &str, bytes: u64) -> bool {
        let mut fallocate = Command::new("fallocate");
        fallocate
            .arg("-l")
            .arg(bytes.to_string())
            .arg(self.at().join(name))
            .output()
            .unwrap()
            .status
            .success()
    }

    /// Allocates everything that root can have.
    fn take_everything(&self) {
        let mut bytes = 1 << 30;
        for round in 0.. {
            if !self.take(&format!("root{round}"), bytes) {
                bytes /= 2;
            }
            if bytes < 4096 {
                break;
            }
        }
        let mut rest = fs::File::create(self.at().join("rest")).unwrap();
        while rest.write_all(&[7; 4096]).is_ok() {}
    }

    /// Unmounts it and waits for the end of the loop device.
    fn end(mut self) {
        drop(self.mounted.take());
        until_blocking("the loop device is removed", || self.devices(), String::is_empty);
    }
}

#[test]
fn a_full_state_disk_is_found() {
    let Some(dir) = inside("hardware::doctor_real::disks::a_full_state_disk_is_found", &DISK)
    else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let disk = Disk::new(&dir, "1500M", &[], "rw", &node.state());
        let (kubelet, daemon) = start(&node).await;
        is_in_order(&node).await;
        let state = node.state();

        assert!(disk.take("others", disk.room() - (50 << 20)));
        doctor(&node).await.is(
            &["state-disk-low"],
            &state,
            &["MiB are free", "free space", "--state-dir"],
        );

        // The daemon is root, so it may use the blocks that ext4 reserves: grants are still
        // recorded.
        assert!(disk.take("more", disk.room()) && disk.room() < 4096, "{}", disk.room());
        let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
        for _ in 0..200 {
            allocate(&mut api, &["dev:gpu0"]).await.unwrap();
        }
        let said = doctor(&node).await;
        said.tells("state-disk-low", &state, &["reserves for root", "MiB", "free space"]);
        assert!(!said.codes().contains("ledger-not-written"), "{said:#?}");

        disk.take_everything();
        let refused = loop {
            if let Err(refused) = allocate(&mut api, &["dev:gpu0"]).await {
                break refused;
            }
        };
        assert!(refused.message().contains("make room"), "{refused}");
        let said = doctor(&node).await;
        said.tells("state-disk-full", &state, &["are free", "free space"]);
        said.tells("ledger-not-written", &state, &["full"]);
        assert_eq!(said.code, Some(exit::FINDINGS.into()));

        drop((api, daemon));
        disk.end();
    });
}

#[test]
fn a_state_disk_without_free_inodes_is_found() {
    let Some(dir) =
        inside("hardware::doctor_real::disks::a_state_disk_without_free_inodes_is_found", &DISK)
    else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let disk = Disk::new(&dir, "256M", &["-N", "1024"], "rw", &node.state());
        let (_kubelet, daemon) = start(&node).await;
        is_in_order(&node).await;
        let made: Vec<PathBuf> = (0..)
            .map(|n| disk.at().join(format!("file{n}")))
            .take_while(|path| fs::write(path, "").is_ok())
            .collect();
        doctor(&node).await.tells(
            "state-disk-full",
            &node.state(),
            &["no free inode", "free space"],
        );
        made.iter().take(20).for_each(|path| fs::remove_file(path).unwrap());
        doctor(&node).await.tells(
            "state-disk-low",
            &node.state(),
            &["inodes are free", "free space"],
        );
        drop(daemon);
        disk.end();
    });
}

#[test]
fn a_read_only_or_broken_state_disk_is_found() {
    let Some(dir) =
        inside("hardware::doctor_real::disks::a_read_only_or_broken_state_disk_is_found", &DISK)
    else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let state = node.state();
        let disk = Disk::new(&dir, "256M", &[], "errors=remount-ro", &state);
        let (kubelet, mut daemon) = start(&node).await;
        is_in_order(&node).await;

        // An error of the disk as the kernel handles it: up to 6.14 it sets the file system
        // read-only, later it marks it elsewhere.
        let device = disk.devices();
        let device = device.split(':').next().unwrap().trim_start_matches("/dev/");
        fs::write(format!("/sys/fs/ext4/{device}/trigger_fs_error"), "made by a test").unwrap();
        let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
        let refused = allocate(&mut api, &["dev:gpu0"]).await.unwrap_err();
        assert!(refused.message().contains("ead-only"), "{refused}");
        let broken = doctor(&node).await;
        broken.tells("state-read-only", &state, &["dmesg"]);
        broken.tells("ledger-not-written", &state, &["read-only"]);
        assert!(!broken.codes().contains("ledger-damaged"), "{broken:#?}");
        daemon.kill();
        doctor(&node).await.is(&["state-read-only", "daemon-absent"], &state, &["dmesg"]);
        disk.end();

        let disk = Disk::new(&dir, "256M", &[], "rw", &state);
        let mut daemon = node.start_daemon();
        daemon.logged("registered").await;
        daemon.kill();
        disk.mounted.as_ref().unwrap().remount("ro");
        doctor(&node).await.is(
            &["state-read-only", "daemon-absent"],
            &state,
            &["its file system is read-only", "mount it writable", "dmesg"],
        );
        disk.mounted.as_ref().unwrap().remount("rw");

        // A volume with `readOnly: true`.
        {
            let bound = Mounted::new(&["--bind"], &state, &state);
            bound.remount("bind,ro");
            let words = ["read-only here", "readOnly", "ReadWritePaths", "findmnt"];
            doctor(&node).await.is(&["state-read-only", "daemon-absent"], &state, &words);
        }
        doctor(&node).await.is(
            &["daemon-absent"],
            &node.path("run/control.sock"),
            &["holdfast run"],
        );

        // The state of a disk that was pulled out, with XFS and ext4: no file of it can be read any
        // longer.
        if has_program("perl") {
            let shut_down = r#"open(my $dir, "<", $ARGV[0]) or die "$!"; my $how = pack("I", 2); ioctl($dir, 0x8004587d, $how) // die "$!""#;
            command(Command::new("perl").args(["-e", shut_down]).arg(&state));
            doctor(&node).await.is(
                &["state-read-only", "daemon-absent"],
                &state,
                &["no longer be read or written", "fsck", "dmesg"],
            );
        } else {
            say("SKIPPED: a file system that is shut down: it needs perl");
        }
        disk.end();
    });
}

#[test]
fn a_state_directory_in_memory_or_in_container_layers_is_found() {
    let Some(dir) = inside(
        "hardware::doctor_real::disks::a_state_directory_in_memory_or_in_container_layers_is_found",
        &MOUNT,
    ) else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let state = node.state();
        let words = ["put --state-dir on a disk", "hostPath"];
        // One has a size. The other has none, and must not count as full because of that.
        for (kind, options) in [("tmpfs", "size=512m"), ("ramfs", "mode=755")] {
            let mounted = Mounted::of_type(kind, options, &state);
            let (kubelet, daemon) = start(&node).await;
            doctor(&node).await.is(&["state-in-memory"], &state, &words);
            drop((daemon, kubelet, mounted));
        }
        // As a container's own files: in a layer above an image.
        let [image, upper, work] = ["image", "upper", "work"].map(|name| {
            fs::create_dir_all(dir.join("layers").join(name)).unwrap();
            dir.join("layers").join(name)
        });
        command(Command::new("mount").args(["-o", "remount,size=512m"]).arg(&dir));
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            image.display(),
            upper.display(),
            work.display()
        );
        let mounted = Mounted::of_type("overlay", &layers, &state);
        let (_kubelet, daemon) = start(&node).await;
        doctor(&node).await.is(&["state-in-container"], &state, &words);
        drop((daemon, mounted));
    });
}
