//! Disks, and the file systems on them.

use crate::common::inside::command;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What has to be there.
pub(crate) const NEEDS: [&str; 6] =
    ["mount", "umount", "mkfs.ext4", "e2fsck", "/dev/fuse", "/dev/loop-control"];
/// Room for a journal of ext4, two copies of the ledger, and some history.
const DISK_BYTES: usize = 24 << 20;

/// A disk with an empty ext4.
pub(crate) fn format(scratch: &Path) -> Vec<u8> {
    let path = scratch.join("empty");
    fs::write(&path, vec![0; DISK_BYTES]).unwrap();
    // Blocks as on a disk of usual size; nothing is left to be initialised later.
    let layout =
        ["-q", "-F", "-b", "4096", "-J", "size=4", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
    command(Command::new("mkfs.ext4").args(layout).arg(&path));
    let image = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    image
}

/// An ext4 that is mounted, over a loop device.
#[derive(Debug)]
pub(crate) struct Mounted {
    at: PathBuf,
}

impl Mounted {
    /// Mounts the file system in the file `disk` at `at`; what was left unfinished is replayed.
    pub(crate) fn new(disk: &Path, at: &Path) -> Mounted {
        fs::create_dir_all(at).unwrap();
        command(Command::new("mount").args(["-t", "ext4", "-o", "loop"]).arg(disk).arg(at));
        Mounted { at: at.to_owned() }
    }

    /// The same for what was found on a disk.
    pub(crate) fn image(image: &[u8], scratch: &Path) -> Mounted {
        let path = scratch.join("found");
        // A mount of the one before may still hold the old file.
        drop(fs::remove_file(&path));
        fs::write(&path, image).unwrap();
        // Every boot does this. It replays ext4's journal, and repairs a superblock that was
        // divided; exit status 1 means "repaired".
        let check = Command::new("e2fsck").arg("-fp").arg(&path).output().unwrap();
        assert!(
            matches!(check.status.code(), Some(0 | 1)),
            "{}",
            String::from_utf8_lossy(&check.stdout)
        );
        Mounted::new(&path, &scratch.join("after"))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.at
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What fails here fails louder elsewhere, and ends with the namespace.
        drop(Command::new("umount").arg(&self.at).output());
    }
}
