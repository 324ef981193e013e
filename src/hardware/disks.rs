//! What the host does with its disks: those are nobody's, and to offer one would be to give away the host's files.
//!
//! | trace | of |
//! | --- | --- |
//! | `proc/1/mountinfo` (proc(5)) | mounted file systems, by the disk's number, which is right where its name is `/dev/root`, and by its name |
//! | `sys/fs/btrfs/*/devices` | every disk of a btrfs that is mounted: mountinfo names one of them |
//! | `proc/swaps` | swap |
//! | `sys/class/block/*/holders` | what is put together of it: device mapper, MD, bcache |
//! | `run/udev/data/b*` (udev's `ID_FS_TYPE`) | members of a ZFS pool or a Ceph cluster, of which the kernel does not tell whether they are in use |

use super::pci::is_numbered;
use crate::domain::{Device, DeviceClass};
use crate::host::HostRoot;
use std::cell::OnceCell;
use std::collections::BTreeMap;

/// What a member of a pool is called by udev, and by people.
const POOLS: [(&str, &str); 2] = [("zfs_member", "a ZFS pool"), ("ceph_bluestore", "a Ceph cluster")];

/// The host's disks. What is said of all of them is read when the first one is asked for, once for a whole scan.
#[derive(Debug)]
pub(super) struct Disks<'a> {
    root: &'a HostRoot,
    uses: OnceCell<Uses>,
}

#[derive(Debug, Default)]
struct Uses {
    /// The number (`259:1`), or the name, of a disk or a partition, and what it is used for.
    of: Vec<(String, String)>,
    /// Why nobody can say what is mounted.
    unknown: Option<String>,
}

impl Uses {
    fn read(root: &HostRoot) -> Self {
        let mut uses = Uses::default();
        // The mounts of the host's first process: those of the reader may be a container's.
        match root.read_all("proc/1/mountinfo") {
            Ok(mounts) => uses.of.extend(mounts.lines().filter_map(mounted).flatten()),
            // A captured tree need not have them, and nobody is given anything of it.
            Err(error) if root.is_live() => uses.unknown = Some(format!("/proc/1/mountinfo cannot be read: {error}")),
            Err(_) => {}
        }
        let btrfs = root.entries("sys/fs/btrfs").into_iter().map(|uuid| format!("sys/fs/btrfs/{uuid}/devices"));
        uses.of.extend(btrfs.flat_map(|devices| root.entries(&devices)).map(|disk| (disk, "part of a btrfs that is mounted".to_owned())));
        let swaps = root.read("proc/swaps").unwrap_or_default();
        let swaps = swaps.lines().filter_map(|line| line.strip_prefix("/dev/")?.split_whitespace().next());
        uses.of.extend(swaps.map(|disk| (disk.to_owned(), "swap".to_owned())));
        uses
    }
}

/// By its number and by its name, what a line of mountinfo says of a disk.
fn mounted(line: &str) -> Option<[(String, String); 2]> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let (number, place) = (fields.nth(2)?, fields.nth(1)?);
    let source = file_system.split(' ').nth(1)?;
    let by = format!("mounted at {place}");
    // A file system without a disk of its own has a major number of 0.
    let number = if number.starts_with("0:") { "" } else { number };
    Some([(number.to_owned(), by.clone()), (source.strip_prefix("/dev/").unwrap_or_default().to_owned(), by)])
}

impl<'a> Disks<'a> {
    pub(super) fn of(root: &'a HostRoot) -> Self {
        Disks { root, uses: OnceCell::new() }
    }

    /// Whether there is a disk, or a partition of one, of that name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.root.is_dir(&format!("sys/class/block/{name}"))
    }

    /// Notes what the host does with a disk among the attributes of its device.
    pub(super) fn note(&self, attributes: &mut BTreeMap<String, String>, disk: &str) {
        attributes.extend(self.used_for(disk).map(|by| ("in_use".to_owned(), by)));
        attributes.extend(self.member_of(disk).map(|pool| ("member_of".to_owned(), pool.to_owned())));
    }

    /// What the host uses a disk, one of its partitions, or the one that is named for.
    pub(super) fn used_for(&self, disk: &str) -> Option<String> {
        let uses = self.uses.get_or_init(|| Uses::read(self.root));
        let names = self.with_partitions(disk);
        let numbers: Vec<String> = names.iter().filter_map(|name| self.number(name)).collect();
        let is_it = |what: &str| is_part(disk, what) || numbers.iter().any(|number| number == what);
        let used = uses.of.iter().find(|(what, _)| is_it(what)).map(|(_, by)| by.clone());
        let holder = || names.iter().find_map(|name| self.root.entries(&format!("sys/class/block/{name}/holders")).into_iter().next());
        used.or_else(|| holder().map(|holder| format!("part of {holder}"))).or_else(|| uses.unknown.clone())
    }

    /// What it, or one of its partitions, belongs to, where that leaves no trace while it is in use.
    pub(super) fn member_of(&self, disk: &str) -> Option<&'static str> {
        let record = |name: &String| self.root.read(&format!("run/udev/data/b{}", self.number(name)?));
        let kind = |record: &str| record.lines().find_map(|line| Some(line.strip_prefix("E:ID_FS_TYPE=")?.to_owned()));
        let kinds = self.with_partitions(disk).iter().filter_map(record).filter_map(|record| kind(&record)).collect::<Vec<_>>();
        POOLS.iter().find(|(kind, _)| kinds.iter().any(|found| found == kind)).map(|(_, pool)| *pool)
    }

    fn with_partitions(&self, disk: &str) -> Vec<String> {
        let entries = self.root.entries(&format!("sys/class/block/{disk}")).into_iter();
        std::iter::once(disk.to_owned()).chain(entries.filter(|entry| entry != disk && is_part(disk, entry))).collect()
    }

    fn number(&self, name: &str) -> Option<String> {
        self.root.read(&format!("sys/class/block/{name}/dev"))
    }
}

/// Whether `name` is the disk, or a partition of it: `nvme0n1p2` of `nvme0n1`, `sda2` of `sda`.
fn is_part(disk: &str, name: &str) -> bool {
    let begin = if disk.ends_with(|c: char| c.is_ascii_digit()) { "p" } else { "" };
    name.strip_prefix(disk).is_some_and(|rest| rest.is_empty() || is_numbered(rest, begin))
}

/// What the host uses a disk for at this moment; `None` for what is no disk. A mount comes without an event: whoever is about to
/// hand a disk to somebody, or to wipe it, looks.
#[must_use]
pub fn used_for(root: &HostRoot, device: &Device) -> Option<String> {
    let disks = Disks::of(root);
    match device.class {
        DeviceClass::Nvme => {
            let names = device.own_nodes().filter_map(|node| node.strip_prefix("/dev/"));
            names.filter(|name| disks.has(name)).find_map(|name| disks.used_for(name))
        }
        // Known since it was found: every other node of `/dev` costs an Allocate nothing here.
        DeviceClass::Char => disks.used_for(device.attribute("disk")?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::write;
    use super::*;

    fn line(number: &str, place: &str, source: &str) -> String {
        format!("36 35 {number} / {place} rw,noatime shared:1 - ext4 {source} rw\n")
    }

    fn used(root: &HostRoot, disks: &[&str]) -> Vec<Option<String>> {
        let all = Disks::of(root);
        disks.iter().map(|disk| all.used_for(disk)).collect()
    }

    #[test]
    fn what_the_host_uses_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = ["0:21 /proc proc", "259:3 / /dev/nvme1n1p2", "259:9 /var /dev/nvme10n1", "8:2 /home /dev/sda2"];
        let mounts = mounts.map(|mount| mount.split(' ').collect::<Vec<_>>()).map(|mount| line(mount[0], mount[1], mount[2])).concat();
        write(dir.path(), "proc/1/mountinfo", &mounts);
        write(dir.path(), "proc/swaps", "Filename Type\n/dev/nvme2n1 partition 1 0 -2\n");
        write(dir.path(), "sys/class/block/nvme3n1/nvme3n1p1/dev", "259:1\n");
        write(dir.path(), "sys/class/block/nvme3n1p1/holders/dm-0/dev", "253:0\n");
        let root = HostRoot::new(dir.path());
        let disks = ["nvme1n1", "nvme10n1", "nvme2n1", "nvme3n1", "sda", "nvme4n1", "nvme1n10", "sd", "nvme1n1p3"];
        let told = |by: &str| Some(by.to_owned());
        let expected = [
            told("mounted at /"),
            told("mounted at /var"),
            told("swap"),
            told("part of dm-0"),
            told("mounted at /home"),
            None,
            None,
            None,
            None,
        ];
        assert_eq!(used(&root, &disks), expected);
    }

    #[test]
    fn a_mounted_disk_is_known_by_its_number_whatever_it_is_called_there() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/1/mountinfo", &(line("259:10", "/", "/dev/root") + &line("259:7", "/data", "/dev/disk/by-id/nvme-x")));
        write(dir.path(), "sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
        for (name, number) in [("nvme0n1", "259:8"), ("nvme0n1p1", "259:10"), ("nvme1n1", "259:7"), ("nvme2n1", "259:1")] {
            write(dir.path(), &format!("sys/class/block/{name}/dev"), &format!("{number}\n"));
        }
        let used = used(&HostRoot::new(dir.path()), &["nvme0n1", "nvme1n1", "nvme2n1"]);
        assert_eq!(used, [Some("mounted at /".to_owned()), Some("mounted at /data".to_owned()), None]);
    }

    #[test]
    fn every_disk_of_a_btrfs_is_in_use_although_one_alone_is_named() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/1/mountinfo", &line("0:42", "/srv", "/dev/nvme1n1"));
        for disk in ["nvme1n1", "nvme2n1p1"] {
            write(dir.path(), &format!("sys/fs/btrfs/6f0c/devices/{disk}/dev"), "");
        }
        let used = used(&HostRoot::new(dir.path()), &["nvme1n1", "nvme2n1", "nvme3n1"]);
        assert_eq!(used, [Some("mounted at /srv".to_owned()), Some("part of a btrfs that is mounted".to_owned()), None]);
    }

    #[test]
    fn a_mount_is_found_behind_those_of_a_hundred_pods() {
        let dir = tempfile::tempdir().unwrap();
        let layers = "/var/lib/containerd/snapshots/1234/fs:".repeat(30);
        let overlay = |n: usize| format!("{n} 27 0:{n} / /run/pod{n} rw shared:1 - overlay overlay rw,lowerdir={layers}\n");
        let mounts: String = (100..200).map(overlay).chain([line("259:7", "/var/lib/postgres", "/dev/nvme1n1")]).collect();
        assert!(mounts.len() > 100_000);
        write(dir.path(), "proc/1/mountinfo", &mounts);
        assert_eq!(used(&HostRoot::new(dir.path()), &["nvme1n1"]), [Some("mounted at /var/lib/postgres".to_owned())]);
    }

    #[test]
    fn while_nobody_can_say_what_is_mounted_every_disk_is_the_hosts() {
        // A machine that runs: its `dev/null` is one.
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev", dir.path().join("dev")).unwrap();
        let unknown = used(&HostRoot::new(dir.path()), &["nvme1n1"]).remove(0);
        assert!(unknown.is_some_and(|why| why.starts_with("/proc/1/mountinfo cannot be read: No such file")));
        write(dir.path(), "proc/1/mountinfo", &line("259:3", "/", "/dev/nvme0n1"));
        assert_eq!(used(&HostRoot::new(dir.path()), &["nvme1n1"]), [None]);
    }

    #[test]
    fn a_member_of_a_pool_is_told_by_udev() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
        for (name, number, kind) in [("nvme0n1", "259:8", "other"), ("nvme0n1p1", "259:10", "zfs_member"), ("nvme1n1", "259:7", "ext4")] {
            write(dir.path(), &format!("sys/class/block/{name}/dev"), &format!("{number}\n"));
            write(dir.path(), &format!("run/udev/data/b{number}"), &format!("S:disk/x\nE:ID_FS_TYPE={kind}\nG:systemd\n"));
        }
        let root = HostRoot::new(dir.path());
        let disks = Disks::of(&root);
        let members = ["nvme0n1", "nvme1n1", "nvme2n1"].map(|disk| disks.member_of(disk));
        assert_eq!(members, [Some("a ZFS pool"), None, None]);
    }
}
