//! How the host uses its disks. A disk in use is not offered: a container would get the host's
//! files.
//!
//! | trace | of |
//! | --- | --- |
//! | `proc/1/mountinfo` (proc(5)) | mounted file systems, by the disk's number and by its name |
//! | `sys/fs/btrfs/*/devices` | every disk of a mounted btrfs |
//! | `proc/swaps` | swap |
//! | `proc/fs/jbd2/*` | a disk that is the journal of a mounted ext4 |
//! | `sys/class/block/loop*/loop/backing_file` | a loop device over a disk |
//! | `sys/class/block/*/holders` | devices that are built on it: device mapper, MD, bcache |
//! | `run/udev/data/b*` (udev's `ID_FS_TYPE`) | members of a ZFS pool or a Ceph cluster |
//!
//! In mountinfo the number is right even if the name is `/dev/root`. mountinfo names only one disk
//! of a btrfs. The kernel does not report whether a member of a ZFS pool or a Ceph cluster is in
//! use.
//!
//! A trace that cannot be read shows nothing: then the disk is not known to be free (I12). The root
//! records the failure, and the caller that would grant the disk refuses.

use super::pci::is_numbered;
use crate::domain::{Attributes, Device, DeviceClass, DeviceNumber, Object};
use crate::host::{HostRoot, ReadFailure};
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};

/// The mounted file systems of the host's first process.
const MOUNTS: &str = "proc/1/mountinfo";
const BLOCK: &str = "sys/class/block";
/// udev's records of devices.
pub(super) const UDEV_DATA: &str = "run/udev/data";
/// The folder of udev's links to disks by their own identities. A link of NVMe is `nvme-<wwid>`
/// (systemd `rules.d/60-persistent-storage.rules`).
pub(crate) const DISK_LINKS: &str = "dev/disk/by-id";
/// The most disks below one volume that are read: as many as a rack has.
const STACKED_MAX: usize = 256;
/// The members of pools: udev's name, and the name in messages.
const POOLS: [(&str, &str); 2] =
    [("zfs_member", "a ZFS pool"), ("ceph_bluestore", "a Ceph cluster")];

/// The host's disks. What concerns all of them is read on first use, once for a whole scan.
#[derive(Debug)]
pub(super) struct Disks<'a> {
    root: &'a HostRoot,
    uses: OnceCell<Uses>,
    doubled: OnceCell<Doubled>,
}

#[derive(Debug, Default)]
struct Uses {
    /// The number (`259:1`) or the name of a disk or a partition, and its use.
    of: Vec<(String, String)>,
    /// The reads that failed.
    failures: Vec<ReadFailure>,
}

impl Uses {
    fn read(root: &HostRoot) -> Self {
        let root = &root.recording();
        let mut uses = Uses::default();
        // The mounts of the host's first process: the reader's own may be those of a container.
        match root.read_all(MOUNTS) {
            Ok(mounts) => uses.of.extend(mounts.lines().filter_map(mounted).flatten()),
            // A captured tree may lack them, and no container is granted a disk of it.
            Err(error) if root.is_live() => uses
                .failures
                .push(ReadFailure { path: format!("/{MOUNTS}"), error: error.to_string() }),
            Err(_) => {}
        }
        let btrfs = root
            .entries("sys/fs/btrfs")
            .into_iter()
            .map(|uuid| format!("sys/fs/btrfs/{uuid}/devices"));
        uses.of.extend(
            btrfs
                .flat_map(|devices| root.entries(&devices))
                .map(|disk| (disk, "part of a mounted btrfs".to_owned())),
        );
        let swaps = root.read("proc/swaps").unwrap_or_default();
        let swaps =
            swaps.lines().filter_map(|line| line.strip_prefix("/dev/")?.split_whitespace().next());
        uses.of.extend(swaps.map(|disk| (disk.to_owned(), "swap".to_owned())));
        let loops =
            root.entries("sys/class/block").into_iter().filter(|name| is_numbered(name, "loop"));
        uses.of.extend(
            loops.filter_map(|name| Some((backing(root, &name)?, format!("behind {name}")))),
        );
        // `dm-0-8` is the journal in inode 8 of `dm-0`, and `dm-0` one that fills its disk.
        let journals = root.entries("proc/fs/jbd2").into_iter();
        let disks = journals.filter(|name| root.exists(&format!("sys/class/block/{name}")));
        uses.of.extend(disks.map(|disk| (disk, "the journal of a mounted ext4".to_owned())));
        // Only udev knows whether a disk is in a pool.
        if root.is_live() && root.is_dir("sys/module/zfs") && !root.is_dir(UDEV_DATA) {
            uses.failures.push(ReadFailure {
                path: format!("/{UDEV_DATA}"),
                error: "it does not exist, but ZFS is loaded".into(),
            });
        }
        uses.failures.extend(root.take_failures());
        uses
    }
}

/// The identities that NVMe disks of several subsystems report. Two paths to one disk are in one
/// subsystem, whose serial number and name (NQN) are the same by each path.
#[derive(Debug)]
struct Doubled {
    ids: BTreeSet<String>,
    failures: Vec<ReadFailure>,
}

impl Doubled {
    fn read(root: &HostRoot) -> Self {
        let root = &root.recording();
        let mut by_id: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for name in root.entries(BLOCK).into_iter().filter(|name| disk_of(name).is_some()) {
            if let Some(id) = root.read(&format!("{BLOCK}/{name}/wwid")) {
                by_id.entry(id).or_default().push(name);
            }
        }
        // The folder of a disk is inside that of its controller, or of its subsystem.
        let above = |name: &String| {
            let target = root.link_target(&format!("{BLOCK}/{name}"))?;
            Some(format!("sys/devices/{}", target.rsplit_once('/')?.0.split_once("devices/")?.1))
        };
        let differ = |disks: &[String], file: &str| {
            let values =
                disks.iter().filter_map(|disk| root.read(&format!("{}/{file}", above(disk)?)));
            values.collect::<BTreeSet<_>>().len() > 1
        };
        by_id.retain(|_, disks| {
            disks.len() > 1 && ["serial", "subsysnqn"].iter().any(|file| differ(disks, file))
        });
        Doubled { ids: by_id.into_keys().collect(), failures: root.take_failures() }
    }
}

/// The disks that a line of mountinfo names, by number and by name, each with its use.
fn mounted(line: &str) -> Option<Vec<(String, String)>> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut fields = mount.split(' ');
    let (number, within, place) = (fields.nth(2)?, fields.next()?, fields.next()?);
    let mut described = file_system.split(' ');
    let (kind, source, options) =
        (described.next()?, described.next()?, described.next().unwrap_or_default());
    // A file system without a disk of its own has the major number 0.
    let number = Some(number).filter(|number| !number.starts_with("0:"));
    // bcachefs names all of its disks, separated by colons.
    let sources = source.split(':').filter_map(|source| source.strip_prefix("/dev/"));
    // XFS may have its journal, or files, on another disk (xfs(5)).
    let log_disks = options.split(',').filter_map(|option| {
        let (key, disk) = option.split_once('=')?;
        disk.strip_prefix("/dev/").filter(|_| matches!(key, "logdev" | "rtdev"))
    });
    // A node that is mounted at another path: the kubelet does that for a volume of
    // `volumeMode: Block`.
    let node = within.strip_prefix('/').filter(|node| kind == "devtmpfs" && !node.is_empty());
    let of = number.into_iter().chain(sources).chain(log_disks).chain(node);
    Some(of.map(|disk| (disk.to_owned(), format!("mounted at {place}"))).collect())
}

/// The disk below a loop device; `None` if it is over a file, or over nothing.
fn backing(root: &HostRoot, name: &str) -> Option<String> {
    Some(
        root.read(&format!("sys/class/block/{name}/loop/backing_file"))?
            .strip_prefix("/dev/")?
            .to_owned(),
    )
}

impl<'a> Disks<'a> {
    pub(super) fn of(root: &'a HostRoot) -> Self {
        Disks { root, uses: OnceCell::new(), doubled: OnceCell::new() }
    }

    /// Whether a disk or partition of this name exists.
    pub(super) fn has(&self, name: &str) -> bool {
        self.root.is_dir(&format!("sys/class/block/{name}"))
    }

    /// The disks that a node of `/dev` leads to: itself, if it is a disk or a partition. Other
    /// nodes write the same disk by other commands: a generic SCSI node, the node of an NVMe
    /// namespace, or an NVMe controller, which has several disks.
    ///
    /// A block node is identified by its number, because it may have any name.
    pub(super) fn disks_of_node(&self, node: &str, number: Option<DeviceNumber>) -> Vec<String> {
        let Some(name) = node.strip_prefix("/dev/") else { return Vec::new() };
        if let Some(DeviceNumber { major, minor, .. }) = number.filter(|number| number.is_block) {
            let number = format!("{major}:{minor}");
            if let Some(name) = self.of_number(name, &number) {
                return vec![name];
            }
            if self.root.is_live() {
                // Then it is unknown whether the host uses it.
                let error = format!("no disk has the number {number}");
                self.root
                    .repeat_failures(&[ReadFailure { path: "/sys/class/block".to_owned(), error }]);
                return Vec::new();
            }
        }
        if self.has(name) {
            return vec![name.to_owned()];
        }
        let of_namespace = name.strip_prefix("ng").map(|numbers| format!("nvme{numbers}"));
        if let Some(disk) = of_namespace.filter(|disk| self.has(disk)) {
            return vec![disk];
        }
        if is_numbered(name, "nvme") {
            let entries = self.root.entries(&format!("sys/class/nvme/{name}"));
            return entries
                .iter()
                .filter_map(|entry| disk_of(entry))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect();
        }
        let of_scsi = |class: &str, name: &str| {
            self.root.entries(&format!("sys/class/{class}/{name}/device/block"))
        };
        if is_numbered(name, "sg") {
            return of_scsi("scsi_generic", name);
        }
        name.strip_prefix("bsg/").map(|name| of_scsi("bsg", name)).unwrap_or_default()
    }

    /// The disk or partition with a number. Usually it has the name of its node.
    fn of_number(&self, usual: &str, number: &str) -> Option<String> {
        let has_number = |name: &str| self.number(name).as_deref() == Some(number);
        if has_number(usual) {
            return Some(usual.to_owned());
        }
        let target = self.root.link_target(&format!("sys/dev/block/{number}"));
        let linked =
            target.as_deref().and_then(|target| target.rsplit('/').next()).map(str::to_owned);
        linked.or_else(|| {
            self.root.entries("sys/class/block").into_iter().find(|name| has_number(name))
        })
    }

    /// The identity of a disk, as the disk reports it, and the number of a partition. For a
    /// partition it is the identity of its disk.
    pub(super) fn identity(&self, name: &str) -> Option<(String, Option<u32>)> {
        let text = |file: &str| self.root.read(&format!("sys/class/block/{file}"));
        let partition = text(&format!("{name}/partition")).and_then(|number| number.parse().ok());
        // The folder of a partition is inside the folder of its disk.
        let target = self.root.link_target(&format!("sys/class/block/{name}"));
        let above = target
            .as_deref()
            .and_then(|target| target.rsplit('/').nth(1))
            .filter(|_| partition.is_some());
        let disk = above.unwrap_or(name);
        let files = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "serial"];
        let known = files
            .iter()
            .find_map(|file| text(&format!("{disk}/{file}")))
            .filter(|id| self.names_one(id))?;
        Some((known, partition))
    }

    /// Whether an identity is that of one disk: some models have the same one for every disk.
    pub(super) fn names_one(&self, id: &str) -> bool {
        let doubled = self.doubled.get_or_init(|| Doubled::read(self.root));
        self.root.repeat_failures(&doubled.failures);
        names_something(id) && !doubled.ids.contains(id)
    }

    /// The objects below a block device (device mapper, MD, a loop device over a disk). It counts
    /// as a part of each: two logical volumes of one disk are two parts of it.
    pub(super) fn stacked_on(&self, name: &str) -> Vec<Object> {
        let below = |name: &str| -> Vec<String> {
            let slaves = self.root.entries(&format!("sys/class/block/{name}/slaves"));
            slaves.into_iter().chain(backing(self.root, name)).collect()
        };
        let (mut next, mut seen) = (below(name), BTreeSet::new());
        let mut objects = Vec::new();
        while let Some(disk) = next.pop() {
            if seen.len() == STACKED_MAX || !seen.insert(disk.clone()) {
                continue;
            }
            let identity = self.identity(&disk).map(|(id, partition)| Object::disk(&id, partition));
            let target = self.root.link_target(&format!("sys/class/block/{disk}"));
            let device = target
                .as_deref()
                .and_then(|target| target.split_once("devices/"))
                .map(|(_, path)| Object::kernel_device(path));
            objects
                .extend([identity, device].into_iter().flatten().map(|object| object.part(name)));
            next.extend(below(&disk));
        }
        objects
    }

    /// Notes the host's use of a disk in the attributes of its device.
    pub(super) fn note(&self, attributes: &mut Attributes, disk: &str) {
        attributes.extend(self.used_for(disk).map(|by| ("in_use", by)));
        attributes.extend(self.member_of(disk).map(|pool| ("member_of", pool.to_owned())));
    }

    /// The host's use of a disk, of one of its partitions, or of the partition of this name.
    pub(super) fn used_for(&self, disk: &str) -> Option<String> {
        let uses = self.uses.get_or_init(|| Uses::read(self.root));
        self.root.repeat_failures(&uses.failures);
        let names = self.with_partitions(disk);
        let numbers: Vec<String> = names.iter().filter_map(|name| self.number(name)).collect();
        let is_it = |name: &str| is_part(disk, name) || numbers.iter().any(|number| number == name);
        let used = uses.of.iter().find(|(name, _)| is_it(name)).map(|(_, by)| by.clone());
        let holder = || {
            names.iter().find_map(|name| {
                self.root.entries(&format!("sys/class/block/{name}/holders")).into_iter().next()
            })
        };
        used.or_else(|| holder().map(|holder| format!("part of {holder}")))
    }

    /// The pool that the disk or one of its partitions belongs to. An active pool leaves no other
    /// trace.
    pub(super) fn member_of(&self, disk: &str) -> Option<&'static str> {
        let record =
            |name: &String| self.root.read(&format!("{UDEV_DATA}/b{}", self.number(name)?));
        let kind = |record: &str| {
            record.lines().find_map(|line| Some(line.strip_prefix("E:ID_FS_TYPE=")?.to_owned()))
        };
        let kinds = self
            .with_partitions(disk)
            .iter()
            .filter_map(record)
            .filter_map(|record| kind(&record))
            .collect::<Vec<_>>();
        POOLS
            .iter()
            .find(|(kind, _)| kinds.iter().any(|found| found == kind))
            .map(|(_, pool)| *pool)
    }

    fn with_partitions(&self, disk: &str) -> Vec<String> {
        let entries = self.root.entries(&format!("sys/class/block/{disk}")).into_iter();
        std::iter::once(disk.to_owned())
            .chain(entries.filter(|entry| entry != disk && is_part(disk, entry)))
            .collect()
    }

    fn number(&self, name: &str) -> Option<String> {
        self.root.read(&format!("sys/class/block/{name}/dev"))
    }
}

/// Whether an identity is unique to a disk: some disks report only zeros.
fn names_something(id: &str) -> bool {
    let number = id.rsplit_once('.').map_or(id, |(_, number)| number);
    number.chars().any(|c| c.is_ascii_alphanumeric() && c != '0')
}

/// The block device behind an entry of a controller's folder.
///
/// With native multipath the entry is a hidden path, `nvme<subsystem>c<controller>n<namespace>`.
/// The disk that can be opened is the subsystem's, `nvme<subsystem>n<namespace>`. Its number can
/// differ from the controller's.
pub(super) fn disk_of(entry: &str) -> Option<String> {
    let (instance, namespace) = entry.strip_prefix("nvme")?.split_once('n')?;
    let subsystem = instance.split_once('c').map_or(instance, |(subsystem, _)| subsystem);
    let disk = format!("nvme{subsystem}n{namespace}");
    (is_numbered(subsystem, "")
        && is_numbered(namespace, "")
        && instance.bytes().all(|b| b == b'c' || b.is_ascii_digit()))
    .then_some(disk)
}

/// Whether `name` is the disk, or a partition of it: `nvme0n1p2` of `nvme0n1`, `sda2` of `sda`.
fn is_part(disk: &str, name: &str) -> bool {
    let begin = if disk.ends_with(|c: char| c.is_ascii_digit()) { "p" } else { "" };
    name.strip_prefix(disk).is_some_and(|rest| rest.is_empty() || is_numbered(rest, begin))
}

/// The host's current use of a disk; `None` for a device that is no disk. A mount sends no event,
/// so callers check this before they grant a disk to a container or wipe it.
///
/// # Errors
/// When the use cannot be determined: then the host may use the disk.
pub fn used_for(root: &HostRoot, device: &Device) -> Result<Option<String>, ReadFailure> {
    let root = root.recording();
    let disks = Disks::of(&root);
    let used = match device.class {
        DeviceClass::Nvme => {
            let names = device.own_nodes().filter_map(|node| node.host.strip_prefix("/dev/"));
            names.filter(|name| disks.has(name)).find_map(|name| disks.used_for(name))
        }
        // The disks of a node are known from the scan, so an Allocate of any other node costs
        // nothing here.
        DeviceClass::Char => device
            .attribute("disk")
            .and_then(|names| names.split(',').find_map(|name| disks.used_for(name))),
        _ => None,
    };
    match (used, root.take_failures().pop()) {
        (None, Some(failure)) => Err(failure),
        (used, _) => Ok(used),
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
    fn a_path_leads_to_the_subsystems_disk() {
        assert_eq!(disk_of("nvme0n1").as_deref(), Some("nvme0n1"));
        assert_eq!(disk_of("nvme1c2n1").as_deref(), Some("nvme1n1"));
        for other in ["nvme0", "ng0n1", "nvme0n1p1", "nvmen1", "power", "nvme0n"] {
            assert_eq!(disk_of(other), None, "{other}");
        }
    }

    #[test]
    fn uses_by_the_host_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = [
            "0:21 /proc proc",
            "259:3 / /dev/nvme1n1p2",
            "259:9 /var /dev/nvme10n1",
            "8:2 /home /dev/sda2",
        ];
        let mounts = mounts
            .map(|mount| mount.split(' ').collect::<Vec<_>>())
            .map(|mount| line(mount[0], mount[1], mount[2]))
            .concat();
        write(dir.path(), "proc/1/mountinfo", &mounts);
        write(dir.path(), "proc/swaps", "Filename Type\n/dev/nvme2n1 partition 1 0 -2\n");
        write(dir.path(), "sys/class/block/nvme3n1/nvme3n1p1/dev", "259:1\n");
        write(dir.path(), "sys/class/block/nvme3n1p1/holders/dm-0/dev", "253:0\n");
        let root = HostRoot::new(dir.path());
        let disks = [
            "nvme1n1",
            "nvme10n1",
            "nvme2n1",
            "nvme3n1",
            "sda",
            "nvme4n1",
            "nvme1n10",
            "sd",
            "nvme1n1p3",
        ];
        let some = |by: &str| Some(by.to_owned());
        let expected = [
            some("mounted at /"),
            some("mounted at /var"),
            some("swap"),
            some("part of dm-0"),
            some("mounted at /home"),
            None,
            None,
            None,
            None,
        ];
        assert_eq!(used(&root, &disks), expected);
    }

    #[test]
    fn a_mounted_disk_is_known_by_its_number_and_not_its_name() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            "proc/1/mountinfo",
            &(line("259:10", "/", "/dev/root") + &line("259:7", "/data", "/dev/disk/by-id/nvme-x")),
        );
        write(dir.path(), "sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
        for (name, number) in [
            ("nvme0n1", "259:8"),
            ("nvme0n1p1", "259:10"),
            ("nvme1n1", "259:7"),
            ("nvme2n1", "259:1"),
        ] {
            write(dir.path(), &format!("sys/class/block/{name}/dev"), &format!("{number}\n"));
        }
        let used = used(&HostRoot::new(dir.path()), &["nvme0n1", "nvme1n1", "nvme2n1"]);
        assert_eq!(
            used,
            [Some("mounted at /".to_owned()), Some("mounted at /data".to_owned()), None]
        );
    }

    #[test]
    fn log_disks_loop_devices_and_bind_mounts_count_as_uses() {
        let dir = tempfile::tempdir().unwrap();
        let mounts = "\
36 35 8:1 / /srv rw - xfs /dev/sda1 rw,logdev=/dev/sdb,rtdev=/dev/sdc1,noquota
37 35 0:50 / /pool rw - bcachefs /dev/sdd:/dev/sde rw
38 35 0:6 /sdf /var/lib/kubelet/plugins/x rw - devtmpfs devtmpfs rw,size=4k
39 35 0:6 / /dev rw - devtmpfs devtmpfs rw
40 35 8:97 / /ext rw - ext4 /dev/sdg1 rw
";
        write(dir.path(), "proc/1/mountinfo", mounts);
        write(dir.path(), "proc/fs/jbd2/sdh/info", "");
        write(dir.path(), "sys/class/block/sdh/dev", "8:112");
        write(dir.path(), "proc/fs/jbd2/sdg1-8/info", "");
        write(dir.path(), "sys/class/block/loop0/loop/backing_file", "/dev/sdi");
        write(dir.path(), "sys/class/block/loop1/loop/backing_file", "/var/image");
        let root = HostRoot::new(dir.path());
        let names: Vec<String> = ('a'..='j').map(|letter| format!("sd{letter}")).collect();
        let used = used(&root, &names.iter().map(String::as_str).collect::<Vec<_>>());
        let wanted =
            ["/srv", "/srv", "/srv", "/pool", "/pool", "/var/lib/kubelet/plugins/x", "/ext"];
        let wanted = wanted.map(|place| format!("mounted at {place}"));
        assert_eq!(used[..7], wanted.map(Some));
        let others = ["the journal of a mounted ext4", "behind loop0"];
        assert_eq!(used[7..9], others.map(|text| Some(text.to_owned())));
        assert_eq!(used[9], None);
    }

    #[test]
    fn a_block_node_is_known_by_its_number_and_not_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("sys/devices/virtual/block/sda")).unwrap();
        std::fs::create_dir_all(dir.path().join("sys/dev/block")).unwrap();
        std::os::unix::fs::symlink(
            "../../devices/virtual/block/sda",
            dir.path().join("sys/dev/block/8:0"),
        )
        .unwrap();
        write(dir.path(), "sys/class/block/sdb/dev", "8:16");
        let number = |is_block, minor| Some(DeviceNumber { is_block, major: 8, minor });
        let root = HostRoot::new(dir.path());
        let disks = Disks::of(&root);
        assert_eq!(disks.disks_of_node("/dev/disk-sda", number(true, 0)), ["sda"]);
        assert_eq!(disks.disks_of_node("/dev/sdb", number(true, 0)), ["sda"]);
        assert_eq!(disks.disks_of_node("/dev/sdb", None), ["sdb"]);
        assert_eq!(
            disks.disks_of_node("/dev/disk-sdb", number(true, 16)),
            ["sdb"],
            "also without its link"
        );
        assert_eq!(disks.disks_of_node("/dev/disk-sda", number(false, 0)), Vec::<String>::new());
        // A live machine shows every disk that it has.
        std::os::unix::fs::symlink("/dev", dir.path().join("dev")).unwrap();
        let root = HostRoot::new(dir.path()).recording();
        assert_eq!(
            Disks::of(&root).disks_of_node("/dev/sdb", number(true, 32)),
            Vec::<String>::new()
        );
        assert!(root.take_failures()[0].to_string().contains("no disk has the number 8:32"));
    }

    #[test]
    fn every_disk_of_a_mounted_btrfs_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/1/mountinfo", &line("0:42", "/srv", "/dev/nvme1n1"));
        for disk in ["nvme1n1", "nvme2n1p1"] {
            write(dir.path(), &format!("sys/fs/btrfs/6f0c/devices/{disk}/dev"), "");
        }
        let used = used(&HostRoot::new(dir.path()), &["nvme1n1", "nvme2n1", "nvme3n1"]);
        assert_eq!(
            used,
            [Some("mounted at /srv".to_owned()), Some("part of a mounted btrfs".to_owned()), None]
        );
    }

    #[test]
    fn a_mount_is_found_behind_those_of_a_hundred_pods() {
        let dir = tempfile::tempdir().unwrap();
        let layers = "/var/lib/containerd/snapshots/1234/fs:".repeat(30);
        let overlay = |n: usize| {
            format!(
                "{n} 27 0:{n} / /run/pod{n} rw shared:1 - overlay overlay rw,lowerdir={layers}\n"
            )
        };
        let mounts: String = (100..200)
            .map(overlay)
            .chain([line("259:7", "/var/lib/postgres", "/dev/nvme1n1")])
            .collect();
        assert!(mounts.len() > 100_000);
        write(dir.path(), "proc/1/mountinfo", &mounts);
        assert_eq!(
            used(&HostRoot::new(dir.path()), &["nvme1n1"]),
            [Some("mounted at /var/lib/postgres".to_owned())]
        );
    }

    #[test]
    fn with_unreadable_mounts_every_disk_counts_as_used() {
        // A live machine: its `dev/null` is a character device.
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev", dir.path().join("dev")).unwrap();
        let root = HostRoot::new(dir.path()).recording();
        assert_eq!(used(&root, &["nvme1n1"]), [None]);
        let unknown = root.take_failures().remove(0).to_string();
        assert!(unknown.starts_with("/proc/1/mountinfo cannot be read: No such file"), "{unknown}");
        write(dir.path(), "proc/1/mountinfo", &line("259:3", "/", "/dev/nvme0n1"));
        assert_eq!(used(&HostRoot::new(dir.path()), &["nvme1n1"]), [None]);
    }

    #[test]
    fn udev_marks_members_of_pools() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
        for (name, number, kind) in [
            ("nvme0n1", "259:8", "other"),
            ("nvme0n1p1", "259:10", "zfs_member"),
            ("nvme1n1", "259:7", "ext4"),
        ] {
            write(dir.path(), &format!("sys/class/block/{name}/dev"), &format!("{number}\n"));
            write(
                dir.path(),
                &format!("run/udev/data/b{number}"),
                &format!("S:disk/x\nE:ID_FS_TYPE={kind}\nG:systemd\n"),
            );
        }
        let root = HostRoot::new(dir.path());
        let disks = Disks::of(&root);
        let members = ["nvme0n1", "nvme1n1", "nvme2n1"].map(|disk| disks.member_of(disk));
        assert_eq!(members, [Some("a ZFS pool"), None, None]);
    }
}
