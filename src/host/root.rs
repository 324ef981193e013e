//! Reads `/sys`, `/proc` and `/dev` below a root: the machine's own, a container's mount of it, or a captured tree.
//!
//! An answer is what is known: a file that is missing, empty, or that the kernel refuses to read (EINVAL of a `carrier` whose
//! interface is down) is `None`, never an error that could end a scan. A read that fails for any other reason is `None` too, and is
//! recorded by a root that is [`HostRoot::recording`]: whoever draws a conclusion from an absence looks there first (I12).

use super::failure::{Failures, ReadFailure, call, is_absence, is_dir};
use super::folder::Folder;
use crate::domain::DeviceNumber;
use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::{major, minor};
use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Longest text that is read of one file. A sysfs attribute is at most a page; `/proc` files are a little longer.
const FILE_BYTES_MAX: u64 = 64 * 1024;
/// Longest list that is read whole: ten thousand mounts have a fifth of it.
const LIST_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Links followed before a path counts as a loop, as in Linux (`MAXSYMLINKS`).
const LINKS_MAX: u32 = 40;

/// The root below which the host's `sys`, `proc` and `dev` lie (`--host-root`).
#[derive(Debug, Clone)]
pub struct HostRoot {
    root: PathBuf,
    live: bool,
    failures: Failures,
}

/// What one scan has seen of directories, for what asks many times for what lies in the same one.
#[derive(Debug, Default)]
pub struct Listings {
    /// What was in them when the first pattern asked: [`HostRoot::glob_among`].
    pub(super) names: BTreeMap<String, Vec<String>>,
    /// Where they really are; `None` for what leads nowhere: [`HostRoot::node_among`].
    real: BTreeMap<String, Option<String>>,
}

/// A node of the host, see [`HostRoot::node_among`]. In the order of their paths.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostNode {
    /// Its real path, without the root: `/dev/serial/by-id/x` is `/dev/ttyUSB0`.
    pub path: String,
    /// Its number; `None` for a plain file in its place.
    pub number: Option<DeviceNumber>,
}

impl HostNode {
    pub(super) fn of(path: String, metadata: &Metadata) -> Self {
        HostNode { path, number: number_of(metadata) }
    }
}

impl HostRoot {
    /// Looks at the host below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        // Absolute, so that what a glob finds can be told below the root again.
        let root = std::path::absolute(&root).unwrap_or(root);
        let live = match call(|| root.join("dev/null").symlink_metadata()) {
            Ok(null) => null.file_type().is_char_device(),
            // Nobody captures a tree that cannot be looked at.
            Err(error) => !is_absence(&error),
        };
        HostRoot { root, live, failures: Failures::default() }
    }

    /// The same root with a record of its own of the reads that fail.
    #[must_use]
    pub fn recording(&self) -> Self {
        HostRoot { failures: Failures::recording(), ..self.clone() }
    }

    /// Takes out the reads that have failed since the last call: what was found meanwhile may lack what they would have shown. Empty for
    /// a root that does not record.
    #[must_use]
    pub fn take_failures(&self) -> Vec<ReadFailure> {
        self.failures.take()
    }

    /// How many reads have failed since this root records, those that were taken out too.
    #[must_use]
    pub fn failure_count(&self) -> usize {
        self.failures.count()
    }

    /// Records failures of an earlier look whose result is used once more.
    pub fn repeat_failures(&self, failures: &[ReadFailure]) {
        failures.iter().for_each(|failure| self.failures.push(failure.clone()));
    }

    /// Where `rel` (such as `sys/bus/pci/devices`) lies on this machine.
    #[must_use]
    pub fn path(&self, rel: &str) -> PathBuf {
        self.root.join(rel.trim_start_matches('/'))
    }

    /// Whether this is a running machine, told by a `dev/null` that is a character device. There a node must be a
    /// real device; in a captured or simulated tree plain files stand for the nodes.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// The text of a regular file without surrounding white space and NULs; `None` when nothing is known.
    ///
    /// Whatever else has the name is never opened for reading: a FIFO would wait for its writer for ever.
    #[must_use]
    pub fn read(&self, rel: &str) -> Option<String> {
        self.try_read(rel).ok().filter(|text| !text.is_empty())
    }

    /// The same text, empty too, or why it cannot be read: a signal that is off for want of a privilege is worth telling.
    ///
    /// # Errors
    /// What the system said; `InvalidInput` for whatever is no regular file.
    pub fn try_read(&self, rel: &str) -> io::Result<String> {
        self.noting(rel, || {
            let (file, length) = self.open(rel)?;
            Ok(text_of(&call(|| read_bounded(file, length))?))
        })
    }

    /// The whole text of a list that may be long: `/proc/1/mountinfo` of a node with a hundred pods.
    ///
    /// # Errors
    /// What the system said; `InvalidInput` for whatever is no regular file, `FileTooLarge` for more than 16 MiB: half a list is no
    /// answer.
    pub fn read_all(&self, rel: &str) -> io::Result<String> {
        self.noting(rel, || {
            let mut bytes = Vec::new();
            let file = self.open(rel)?.0;
            call(|| file.take(LIST_BYTES_MAX + 1).read_to_end(&mut bytes))?;
            if bytes.len() as u64 > LIST_BYTES_MAX {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        })
    }

    /// The first bytes of a regular file, at most `length`; fewer where it has fewer.
    ///
    /// # Errors
    /// What the system said; `InvalidInput` for whatever is no regular file.
    pub fn first_bytes(&self, rel: &str, length: u64) -> io::Result<Vec<u8>> {
        self.noting(rel, || {
            let mut bytes = Vec::new();
            let file = self.open(rel)?.0;
            call(|| file.take(length).read_to_end(&mut bytes))?;
            Ok(bytes)
        })
    }

    /// Records a failure of `read`, and passes its result on.
    fn noting<T>(&self, rel: &str, read: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        read().inspect_err(|error| self.failures.note(|| told(rel), error))
    }

    /// The value of a call; a failure that shows nothing is recorded.
    pub(super) fn found<T>(&self, rel: &str, result: io::Result<T>) -> Option<T> {
        self.failures.found(|| told(rel), result)
    }

    /// A regular file, with the length that it states.
    fn open(&self, rel: &str) -> io::Result<(File, u64)> {
        // A pipe without a writer opens at once with O_NONBLOCK; what was opened is then seen to be no file.
        let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
        let file = call(|| OpenOptions::new().read(true).custom_flags(flags).open(self.path(rel)))?;
        let metadata = call(|| file.metadata())?;
        if metadata.is_file() { Ok((file, metadata.len())) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// The target of a link as it is written, whether or not it exists.
    #[must_use]
    pub fn link_target(&self, rel: &str) -> Option<String> {
        self.found(rel, call(|| self.path(rel).read_link()))?.into_os_string().into_string().ok()
    }

    /// The last component of a link's target: the name of a `driver`, `iommu_group` or `physfn`, which is there even
    /// when the target is not. A directory in place of the link (some captures) names nothing.
    #[must_use]
    pub fn link_name(&self, rel: &str) -> Option<String> {
        let target = self.link_target(rel)?;
        let name = Path::new(&target).file_name()?.to_str()?;
        Some(name.to_owned())
    }

    /// A directory, held open; `None` where there is none that can be read.
    #[must_use]
    pub fn folder(&self, rel: &str) -> Option<Folder> {
        Folder::open(AT_FDCWD, &self.path(rel), told(rel), self.failures.clone())
    }

    /// The names in a directory, sorted; empty when it cannot be read.
    #[must_use]
    pub fn entries(&self, rel: &str) -> Vec<String> {
        self.try_entries(rel).unwrap_or_default()
    }

    /// The same; `None` when it is not known what is in it.
    pub(super) fn try_entries(&self, rel: &str) -> Option<Vec<String>> {
        let list = || -> io::Result<Vec<String>> {
            let entries = call(|| self.path(rel).read_dir())?.map(|entry| call(|| entry));
            let names = entries.map(|entry| Ok(entry?.file_name().into_string().ok())).collect::<io::Result<Vec<_>>>()?;
            let mut names: Vec<String> = names.into_iter().flatten().collect();
            names.sort_unstable();
            Ok(names)
        };
        match self.noting(rel, list) {
            Ok(names) => Some(names),
            Err(error) => is_absence(&error).then(Vec::new),
        }
    }

    /// The names in a directory with what each is itself, in no order; empty when it cannot be read.
    pub(super) fn typed_entries(&self, rel: &str) -> Vec<(String, FileType)> {
        let list = || -> io::Result<Vec<(String, FileType)>> {
            let mut entries = Vec::new();
            for entry in call(|| self.path(rel).read_dir())? {
                let entry = call(|| entry)?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                match call(|| entry.file_type()) {
                    // It has gone since.
                    Err(error) if is_absence(&error) => {}
                    kind => entries.push((name, kind?)),
                }
            }
            Ok(entries)
        };
        self.noting(rel, list).unwrap_or_default()
    }

    /// The node at a path that is its real one.
    pub(super) fn node_at(&self, path: &str) -> Option<HostNode> {
        let metadata = self.found(path, call(|| self.path(path).symlink_metadata()))?;
        self.is_node(&metadata).then(|| HostNode::of(path.to_owned(), &metadata))
    }

    /// Whether `rel` leads to anything; a dangling link does not.
    #[must_use]
    pub fn exists(&self, rel: &str) -> bool {
        self.found(rel, call(|| self.path(rel).metadata())).is_some()
    }

    /// Whether `rel` is a directory or leads to one.
    #[must_use]
    pub fn is_dir(&self, rel: &str) -> bool {
        self.found(rel, is_dir(&self.path(rel))).unwrap_or(false)
    }

    /// Whether a device node can be reached at `host_path` (such as `/dev/fuse`).
    #[must_use]
    pub fn node_exists(&self, host_path: &str) -> bool {
        if self.root == Path::new("/") {
            // The kernel follows links as `resolve` does below a root, in one call: every Allocate asks for its devices' nodes.
            let metadata = self.found(host_path, call(|| Path::new(host_path).metadata()));
            return metadata.is_some_and(|metadata| self.is_node(&metadata));
        }
        self.canonical_node(host_path).is_some()
    }

    /// The same, where many are asked for that lie in the same directory.
    #[must_use]
    pub fn node_exists_among(&self, listings: &mut Listings, host_path: &str) -> bool {
        if self.root == Path::new("/") { self.node_exists(host_path) } else { self.node_among(listings, host_path).is_some() }
    }

    /// The real path of the node that `host_path` leads to, without the root: `/dev/serial/by-id/x` is `/dev/ttyUSB0`.
    #[must_use]
    pub fn canonical_node(&self, host_path: &str) -> Option<String> {
        let (path, metadata) = self.resolve(host_path)?;
        self.is_node(&metadata).then_some(path)
    }

    /// The node that `host_path` leads to, where many are asked for that lie in the same directory: its links are followed once, and
    /// a node costs one call.
    #[must_use]
    pub fn node_among(&self, listings: &mut Listings, host_path: &str) -> Option<HostNode> {
        let (path, metadata) = self.resolve_among(listings, host_path)?;
        self.is_node(&metadata).then(|| HostNode::of(path, &metadata))
    }

    fn resolve_among(&self, listings: &mut Listings, host_path: &str) -> Option<(String, Metadata)> {
        let Some((dir, name)) = host_path.rsplit_once('/').filter(|(_, name)| !matches!(*name, "" | "." | "..")) else {
            return self.resolve(host_path);
        };
        if !listings.real.contains_key(dir) {
            let failed = self.failures.count();
            let real = self.resolve(dir).map(|(real, _)| real);
            if self.failures.count() > failed {
                // The next one who asks is to see the failure too.
                return None;
            }
            listings.real.insert(dir.to_owned(), real);
        }
        let real = format!("{}/{name}", listings.real.get(dir)?.as_ref()?);
        let metadata = self.found(&real, call(|| self.path(&real).symlink_metadata()))?;
        if metadata.file_type().is_symlink() { self.resolve(&real) } else { Some((real, metadata)) }
    }

    /// Whether there is something of that name; a dangling link is.
    pub(super) fn is_listed(&self, rel: &str) -> bool {
        self.found(rel, call(|| self.path(rel).symlink_metadata())).is_some()
    }

    /// Whether it is a directory and no link to one.
    pub(super) fn is_real_dir(&self, rel: &str) -> bool {
        self.found(rel, call(|| self.path(rel).symlink_metadata())).is_some_and(|metadata| metadata.is_dir())
    }

    pub(super) fn is_node(&self, metadata: &Metadata) -> bool {
        let kind = metadata.file_type();
        kind.is_char_device() || kind.is_block_device() || (!self.live && kind.is_file())
    }

    /// Follows every link of `host_path` inside the root: an absolute target starts at the root again, and `..` ends
    /// there, as they do for the host itself.
    pub(super) fn resolve(&self, host_path: &str) -> Option<(String, Metadata)> {
        let mut pending: VecDeque<String> = host_path.split('/').map(str::to_owned).collect();
        let mut real = String::new();
        let mut metadata = None;
        let mut links = 0;
        while let Some(component) = pending.pop_front() {
            match component.as_str() {
                "" | "." => continue,
                ".." => {
                    real.truncate(real.rfind('/').unwrap_or(0));
                    metadata = Some(self.found(&real, call(|| self.path(&real).symlink_metadata()))?);
                    continue;
                }
                _ => {}
            }
            let next = format!("{real}/{component}");
            let found = self.found(&next, call(|| self.path(&next).symlink_metadata()))?;
            if !found.file_type().is_symlink() {
                (real, metadata) = (next, Some(found));
                continue;
            }
            links += 1;
            if links > LINKS_MAX {
                return None;
            }
            let target = self.link_target(&next)?;
            if target.starts_with('/') {
                real.clear();
            }
            for component in target.split('/').rev() {
                pending.push_front(component.to_owned());
            }
        }
        let metadata = metadata.or_else(|| self.found("/", call(|| self.root.metadata())))?;
        Some((real, metadata))
    }
}

/// The number of a device node; `None` for whatever else it is.
fn number_of(metadata: &Metadata) -> Option<DeviceNumber> {
    let kind = metadata.file_type();
    let narrow = |number: u64| u32::try_from(number).ok();
    let (major, minor) = (narrow(major(metadata.rdev()))?, narrow(minor(metadata.rdev()))?);
    (kind.is_char_device() || kind.is_block_device()).then(|| DeviceNumber { is_block: kind.is_block_device(), major, minor })
}

/// A path as a person knows it: without the root, from `/` on.
fn told(rel: &str) -> String {
    format!("/{}", rel.trim_start_matches('/'))
}

/// The text without surrounding white space and NULs.
pub(super) fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
}

/// A scan reads thousands of small files, so one call each where that is enough: sysfs gives a whole attribute at once
/// and states a size; `/proc` states none and gives its text in parts.
pub(super) fn read_bounded(mut file: File, stated: u64) -> io::Result<Vec<u8>> {
    let mut page = [0; 4096];
    let first = file.read(&mut page)?;
    let mut bytes = page[..first].to_vec();
    if stated == 0 || first == page.len() {
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn tree() -> (tempfile::TempDir, HostRoot) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("dev/serial/by-id")).unwrap();
        fs::create_dir_all(dir.path().join("sys")).unwrap();
        let root = HostRoot::new(dir.path());
        (dir, root)
    }

    #[test]
    fn text_comes_without_newline_and_nul_padding() {
        let (dir, root) = tree();
        fs::write(dir.path().join("sys/serial"), b"S3RIAL  \0\0\n").unwrap();
        fs::write(dir.path().join("sys/empty"), b"\n").unwrap();
        assert_eq!(root.read("sys/serial").as_deref(), Some("S3RIAL"));
        fs::write(dir.path().join("sys/long"), "x".repeat(10_000)).unwrap();
        assert_eq!(root.read("sys/empty"), None);
        assert_eq!(root.read("sys/long").map(|text| text.len()), Some(10_000));
        assert_eq!(root.read("sys/missing"), None);
        assert_eq!(root.read("sys"), None, "a directory has no text");
        assert_eq!(root.try_read("sys/empty").unwrap(), "");
        assert_eq!(root.first_bytes("sys/serial", 4).unwrap(), b"S3RI");
        assert_eq!(root.first_bytes("sys/empty", 4).unwrap(), b"\n");
        let kinds = ["sys/missing", "sys"].map(|rel| root.first_bytes(rel, 4).unwrap_err().kind());
        assert_eq!(kinds, [io::ErrorKind::NotFound, io::ErrorKind::InvalidInput]);
    }

    #[test]
    fn a_pipe_in_place_of_a_file_is_unknown_and_does_not_hang() {
        let (dir, root) = tree();
        nix::unistd::mkfifo(&dir.path().join("sys/vendor"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(root.read("sys/vendor"), None);
    }

    #[test]
    fn a_dangling_link_still_has_a_name() {
        let (dir, root) = tree();
        symlink("../../../bus/pci/drivers/nvidia", dir.path().join("sys/driver")).unwrap();
        assert_eq!(root.link_name("sys/driver").as_deref(), Some("nvidia"));
        assert!(!root.exists("sys/driver"));
        fs::create_dir(dir.path().join("sys/iommu_group")).unwrap();
        assert_eq!(root.link_name("sys/iommu_group"), None);
    }

    #[test]
    fn links_to_nodes_are_followed_inside_the_root_only() {
        let (dir, root) = tree();
        fs::write(dir.path().join("dev/ttyUSB0"), "").unwrap();
        symlink("../../ttyUSB0", dir.path().join("dev/serial/by-id/relative")).unwrap();
        symlink("/dev/ttyUSB0", dir.path().join("dev/serial/by-id/absolute")).unwrap();
        symlink("/../../dev/ttyUSB0", dir.path().join("dev/serial/by-id/climbing")).unwrap();
        symlink("loop", dir.path().join("dev/loop")).unwrap();
        for name in ["relative", "absolute", "climbing"] {
            assert_eq!(root.canonical_node(&format!("/dev/serial/by-id/{name}")).as_deref(), Some("/dev/ttyUSB0"), "{name}");
        }
        assert!(!root.node_exists("/dev/loop"));
        assert!(!root.node_exists("/dev/serial"), "a directory is no node");
        assert!(!root.node_exists("/dev/absent"));
        // Among others every path leads where it leads alone, also by a folder that is a link.
        symlink("/dev/serial/by-id", dir.path().join("dev/names")).unwrap();
        symlink("serial/none", dir.path().join("dev/nowhere")).unwrap();
        fs::create_dir(dir.path().join("dev/bus")).unwrap();
        fs::write(dir.path().join("dev/bus/001"), "").unwrap();
        let mut listings = Listings::default();
        let names = ["relative", "absolute", "climbing", "absent", "..", ".", "", "../../ttyUSB0"];
        let folders = ["/dev/serial/by-id", "/dev/names", "/dev/loop", "/dev/nowhere", "/dev/ttyUSB0", "/none", "", "dev"];
        let others = ["/dev/bus/001", "/dev/bus/../bus/001", "/dev/bus", "//dev//ttyUSB0", "dev/ttyUSB0", "ttyUSB0", "/", "/.."];
        let paths = folders.iter().flat_map(|folder| names.map(|name| format!("{folder}/{name}")));
        for path in paths.chain(others.map(str::to_owned)) {
            for _ in 0..2 {
                let among = root.node_among(&mut listings, &path);
                assert!(among.as_ref().is_none_or(|node| node.number.is_none()), "{path}: a plain file has none");
                assert_eq!(root.node_exists_among(&mut listings, &path), among.is_some(), "{path}");
                assert_eq!(among.map(|node| node.path), root.canonical_node(&path), "{path}");
            }
        }
    }

    #[test]
    fn on_a_live_machine_a_plain_file_is_no_node() {
        let root = HostRoot::new("/");
        assert!(root.is_live());
        assert!(root.node_exists("/dev/null"));
        // A link to a node is one, and a directory or nothing is none.
        assert!(root.node_exists("/proc/self/root/dev/null") && !root.node_exists("/dev") && !root.node_exists("/dev/absent"));
        let null = HostNode { path: "/dev/null".into(), number: Some(DeviceNumber { is_block: false, major: 1, minor: 3 }) };
        assert_eq!(root.node_among(&mut Listings::default(), "/dev/null"), Some(null));
        assert!(!root.node_exists("/proc/version"));
        for path in ["/dev/null", "/proc/self/root/dev/null", "/dev", "/dev/absent", "/proc/version", "dev/null", "/dev/../dev/null", ""] {
            assert_eq!(root.node_exists_among(&mut Listings::default(), path), root.node_exists(path), "{path}");
        }
    }
}
