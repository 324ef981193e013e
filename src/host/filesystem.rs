//! The file system of a path: its kind and free space. Also the label and the lock of a file.

use nix::sys::stat::{major, minor};
use nix::sys::statfs::{FsType, NFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, statfs};
use nix::sys::statvfs::{FsFlags, statvfs};
use rustix::fs::{CWD, RenameFlags};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// `CIFS_SUPER_MAGIC`, `SMB2_SUPER_MAGIC`, `CEPH_SUPER_MAGIC` and `RAMFS_MAGIC` of Linux'
/// `magic.h`, which nix lacks. Then those of cluster file systems outside the kernel:
/// `LL_SUPER_MAGIC` of Lustre, and the numbers that `stat -f` names GPFS and BeeGFS.
const CIFS: FsType = FsType(0xFF53_4D42);
const SMB2: FsType = FsType(0xFE53_4D42);
const CEPH: FsType = FsType(0x00C3_6400);
const RAMFS: FsType = FsType(0x8584_58F6);
const LUSTRE: FsType = FsType(0x0BD0_0BD0);
const GPFS: FsType = FsType(0x4750_4653);
const BEEGFS: FsType = FsType(0x1983_0326);

/// The storage of files, by how long the files survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Medium {
    /// A disk of this machine, or an unknown kind.
    Disk,
    /// Memory: lost with the boot, or with the container.
    Memory,
    /// Layers over an image: lost with their container.
    Overlay,
    /// Another machine.
    Network,
}

/// Exchanges two files or directories in one step (`RENAME_EXCHANGE` of renameat2(2)).
///
/// # Errors
/// As rename(2); `EINVAL` if the file system has no such exchange.
pub fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

/// The medium of `path`; `None` if it cannot be determined.
#[must_use]
pub fn medium(path: &Path) -> Option<Medium> {
    Some(medium_of(statfs(path).ok()?.filesystem_type()))
}

fn medium_of(kind: FsType) -> Medium {
    match kind {
        TMPFS_MAGIC | RAMFS => Medium::Memory,
        OVERLAYFS_SUPER_MAGIC => Medium::Overlay,
        NFS_SUPER_MAGIC | CIFS | SMB2 | CEPH | LUSTRE | GPFS | BEEGFS => Medium::Network,
        _ => Medium::Disk,
    }
}

/// Whether `path` is in memory. False if that cannot be determined.
#[must_use]
pub fn is_tmpfs(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}

/// The free bytes for the file system of `path`; 0 if it is read-only. `u64::MAX` if that cannot be
/// determined, and on a file system that reports 0 for everything (ramfs).
#[must_use]
pub fn free_bytes(path: &Path) -> u64 {
    statvfs(path).map_or(u64::MAX, |about| match about.blocks() {
        _ if about.flags().contains(FsFlags::ST_RDONLY) => 0,
        0 => u64::MAX,
        _ => about.blocks_available().saturating_mul(about.fragment_size()),
    })
}

/// The additional free bytes there for root: those that ext4 reserves, by default five of a
/// hundred. ext4 uses a few MiB of them itself.
#[must_use]
pub fn free_bytes_of_root(path: &Path) -> u64 {
    let kept_back = |about: nix::sys::statvfs::Statvfs| {
        about.blocks_free().saturating_sub(about.blocks_available())
    };
    statvfs(path).map_or(0, |about| kept_back(about).saturating_mul(about.fragment_size()))
}

/// The bytes of all files in a directory and below it, to a depth that no file of ours exceeds.
/// Unreadable files are left out.
#[must_use]
pub fn size_below(dir: &Path) -> u64 {
    fn size(dir: &Path, depth: u32) -> u64 {
        let Some(depth) = depth.checked_sub(1) else { return 0 };
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let of_entry = |entry: std::fs::DirEntry| match entry.metadata() {
            Ok(about) if about.is_dir() => size(&entry.path(), depth),
            Ok(about) => about.len(),
            Err(_) => 0,
        };
        entries.map(of_entry).sum()
    }
    size(dir, 4)
}

/// Whether the file system of `path` is read-only.
#[must_use]
pub fn is_read_only(path: &Path) -> bool {
    statvfs(path).is_ok_and(|about| about.flags().contains(FsFlags::ST_RDONLY))
}

/// The error of the disk when a directory is read (EIO: the disk is broken or absent); `None` if
/// there is no such error.
#[must_use]
pub fn disk_error(dir: &Path) -> Option<String> {
    let error = dir.read_dir().err()?;
    (error.raw_os_error() == Some(nix::libc::EIO)).then(|| error.to_string())
}

/// The number of further files on the file system of `path`. `u64::MAX` for a file system that has
/// no such limit and reports 0.
#[must_use]
pub fn files_left(path: &Path) -> u64 {
    statvfs(path).map_or(u64::MAX, |about| {
        if about.files() == 0 { u64::MAX } else { about.files_available() }
    })
}

/// The SELinux label of a file, `system_u:object_r:container_file_t:s0`; `None` if it has none or
/// cannot be read.
#[must_use]
pub fn selinux_label(path: &Path) -> Option<String> {
    let mut label = [0; 256];
    let length = rustix::fs::getxattr(path, "security.selinux", &mut label).ok()?;
    let text = String::from_utf8_lossy(label.get(..length)?).trim_end_matches('\0').to_owned();
    Some(text).filter(|text| !text.is_empty())
}

/// The process that has `file` locked with `flock`, from the text of `/proc/locks`. `None` if no
/// process has, or if it is in another process namespace.
#[must_use]
pub fn lock_holder(locks: &str, file: &Path) -> Option<u32> {
    let about = file.metadata().ok()?;
    // `1: FLOCK  ADVISORY  WRITE 4242 fd:01:1310722 0 EOF`
    let place = format!("{:02x}:{:02x}:{}", major(about.dev()), minor(about.dev()), about.ino());
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let is_held = words.nth(1) == Some("FLOCK");
        let pid = words.nth(2)?.parse().ok().filter(|pid| *pid > 0);
        (is_held && words.next() == Some(place.as_str())).then_some(pid)?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_free_space_where_a_file_can_be_written_or_nothing_is_known() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), [7; 4096]).unwrap();
        assert!(
            free_bytes(dir.path()) > 0 && files_left(dir.path()) > 0 && !is_read_only(dir.path())
        );
        let nothing = dir.path().join("nothing");
        assert_eq!(
            (free_bytes(&nothing), files_left(&nothing), medium(&nothing)),
            (u64::MAX, u64::MAX, None)
        );
    }

    /// `tests/hardware/doctor_real` covers the file systems that a test can mount.
    #[test]
    fn network_file_systems_are_known_by_their_number() {
        let others =
            [0x6969, 0xFF53_4D42, 0xFE53_4D42, 0x00C3_6400, 0x0BD0_0BD0, 0x4750_4653, 0x1983_0326];
        assert!(others.into_iter().all(|number| medium_of(FsType(number)) == Medium::Network));
        let disks = [0xEF53, 0x5846_5342, 0x9123_683E, 0x6573_5546];
        assert!(
            disks.into_iter().all(|number| medium_of(FsType(number)) == Medium::Disk),
            "ext4, XFS, Btrfs; FUSE may be anything"
        );
    }

    #[test]
    fn the_holder_of_a_lock_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = std::fs::File::create(&path).unwrap();
        let holder = || lock_holder(&std::fs::read_to_string("/proc/locks").unwrap(), &path);
        assert_eq!(holder(), None);
        file.try_lock().unwrap();
        assert_eq!(holder(), Some(std::process::id()));
    }

    #[test]
    fn the_size_is_that_of_all_files_and_nothing_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("below")).unwrap();
        std::fs::write(dir.path().join("a"), [7; 100]).unwrap();
        std::fs::write(dir.path().join("below/b"), [7; 20]).unwrap();
        std::os::unix::fs::symlink("..", dir.path().join("below/up")).unwrap();
        assert_eq!(size_below(dir.path()), 120 + "..".len() as u64);
        assert_eq!(size_below(&dir.path().join("nothing")), 0);
    }
}
