//! Reads `/sys`, `/proc` and `/dev` below a root: the machine's own, a container's mount of it, or
//! a captured tree.
//!
//! A missing or empty file is `None`, never an error that could end a scan. So is a file that the
//! kernel refuses to read (EINVAL of a `carrier` of an interface that is down). A read that fails
//! for any other reason is `None` too, and is recorded by a root that is [`HostRoot::recording`]. A
//! caller that concludes from an absence must check this record first (I12).

mod nodes;

pub use self::nodes::{HostNode, Listings};

use super::failure::{Failures, ReadFailure, call, is_absence, is_dir};
use super::folder::Folder;
use super::text::{read_bounded, text_of};
use crate::domain::NvidiaRoots;
use nix::fcntl::{AT_FDCWD, OFlag};
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The longest list that is read whole: a list of ten thousand mounts has a fifth of it.
const LIST_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// The parent directory of the host's `sys`, `proc` and `dev` (`--host-root`).
#[derive(Debug, Clone)]
pub struct HostRoot {
    pub(super) root: PathBuf,
    pub(super) live: bool,
    pub(super) failures: Failures,
    pub(super) nvidia: Arc<NvidiaRoots>,
}

impl HostRoot {
    /// The host below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        // Absolute, so that the results of a glob can be stripped of the root.
        let root = std::path::absolute(&root).unwrap_or(root);
        let live = match call(|| root.join("dev/null").symlink_metadata()) {
            Ok(null) => null.file_type().is_char_device(),
            // A captured tree is always readable.
            Err(error) => !is_absence(&error),
        };
        HostRoot { root, live, failures: Failures::default(), nvidia: Arc::default() }
    }

    /// The same root, with these roots of NVIDIA's driver below it.
    #[must_use]
    pub fn with_nvidia(self, roots: &NvidiaRoots) -> Self {
        HostRoot { nvidia: Arc::new(roots.clone()), ..self }
    }

    /// The roots of NVIDIA's driver.
    #[must_use]
    pub fn nvidia(&self) -> &NvidiaRoots {
        &self.nvidia
    }

    /// The same root with its own record of failed reads.
    #[must_use]
    pub fn recording(&self) -> Self {
        HostRoot { failures: Failures::recording(), ..self.clone() }
    }

    /// Takes out the reads that failed since the last call. The results since then may be
    /// incomplete. Empty for a root that does not record.
    #[must_use]
    pub fn take_failures(&self) -> Vec<ReadFailure> {
        self.failures.take()
    }

    /// The number of failed reads since this root records, including those that were taken out.
    #[must_use]
    pub fn failure_count(&self) -> usize {
        self.failures.count()
    }

    /// Records the failures of an earlier scan whose result is used again.
    pub fn repeat_failures(&self, failures: &[ReadFailure]) {
        failures.iter().for_each(|failure| self.failures.push(failure.clone()));
    }

    /// The path of `rel` (such as `sys/bus/pci/devices`) on this machine.
    #[must_use]
    pub fn path(&self, rel: &str) -> PathBuf {
        self.root.join(rel.trim_start_matches('/'))
    }

    /// Whether this is a running machine: `dev/null` is a character device. There a node must be a
    /// real device; in a captured or simulated tree plain files replace the nodes.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// The trimmed text of a regular file, without NULs; `None` if it is unknown.
    ///
    /// A file of another kind is never read: a FIFO would block until it has a writer.
    #[must_use]
    pub fn read(&self, rel: &str) -> Option<String> {
        self.try_read(rel).ok().filter(|text| !text.is_empty())
    }

    /// The same text, or `None` with `is_denied` set if the kernel denies the read to this process
    /// (EPERM), which it will do again. Any other failure is recorded.
    #[must_use]
    pub fn read_if_permitted(&self, rel: &str, is_denied: &mut bool) -> Option<String> {
        let apart = self.recording();
        let read = apart.try_read(rel);
        if read.as_ref().err().and_then(io::Error::raw_os_error) == Some(nix::libc::EPERM) {
            *is_denied = true;
        } else {
            self.repeat_failures(&apart.take_failures());
        }
        read.ok().filter(|text| !text.is_empty())
    }

    /// The same text, which may be empty, or why it cannot be read: a signal that lacks a privilege
    /// must be reported.
    ///
    /// # Errors
    /// The error of the system; `InvalidInput` if it is not a regular file.
    pub fn try_read(&self, rel: &str) -> io::Result<String> {
        self.noting(rel, || {
            let (file, length) = self.open(rel)?;
            Ok(text_of(&call(|| read_bounded(file, length))?))
        })
    }

    /// The whole text of a list that may be long: `/proc/1/mountinfo` with a hundred pods.
    ///
    /// # Errors
    /// The error of the system; `InvalidInput` if it is not a regular file; `FileTooLarge` for more
    /// than 16 MiB, since half a list would be wrong.
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

    /// The first bytes of a regular file, at most `length`; fewer if the file is shorter.
    ///
    /// # Errors
    /// The error of the system; `InvalidInput` if it is not a regular file.
    pub fn first_bytes(&self, rel: &str, length: u64) -> io::Result<Vec<u8>> {
        self.noting(rel, || {
            let mut bytes = Vec::new();
            let file = self.open(rel)?.0;
            call(|| file.take(length).read_to_end(&mut bytes))?;
            Ok(bytes)
        })
    }

    /// Records a failure of `read`, and returns its result.
    fn noting<T>(&self, rel: &str, read: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        read().inspect_err(|error| self.failures.note(|| absolute(rel), error))
    }

    /// The value of a call. An error that does not prove absence is recorded.
    pub(super) fn found<T>(&self, rel: &str, result: io::Result<T>) -> Option<T> {
        self.failures.found(|| absolute(rel), result)
    }

    /// A regular file, with its reported length.
    fn open(&self, rel: &str) -> io::Result<(File, u64)> {
        // With O_NONBLOCK a pipe without a writer opens at once; its kind is checked afterwards.
        let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
        let file = call(|| OpenOptions::new().read(true).custom_flags(flags).open(self.path(rel)))?;
        let metadata = call(|| file.metadata())?;
        if metadata.is_file() {
            Ok((file, metadata.len()))
        } else {
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    /// The literal target of a link, also if the target does not exist.
    #[must_use]
    pub fn link_target(&self, rel: &str) -> Option<String> {
        self.found(rel, call(|| self.path(rel).read_link()))?.into_os_string().into_string().ok()
    }

    /// The last component of a link's target: the name of a `driver`, `iommu_group` or `physfn`.
    /// The target need not exist. A directory in place of the link (some captures) has no name.
    #[must_use]
    pub fn link_name(&self, rel: &str) -> Option<String> {
        let target = self.link_target(rel)?;
        let name = Path::new(&target).file_name()?.to_str()?;
        Some(name.to_owned())
    }

    /// An open directory; `None` if there is none that can be read.
    #[must_use]
    pub fn folder(&self, rel: &str) -> Option<Folder> {
        Folder::open(AT_FDCWD, &self.path(rel), absolute(rel), self.failures.clone())
    }

    /// The names in a directory, sorted; empty if it cannot be read.
    #[must_use]
    pub fn entries(&self, rel: &str) -> Vec<String> {
        self.try_entries(rel).unwrap_or_default()
    }

    /// The same; `None` if the content is unknown.
    pub(super) fn try_entries(&self, rel: &str) -> Option<Vec<String>> {
        let list = || -> io::Result<Vec<String>> {
            let entries = call(|| self.path(rel).read_dir())?.map(|entry| call(|| entry));
            let names = entries
                .map(|entry| Ok(entry?.file_name().into_string().ok()))
                .collect::<io::Result<Vec<_>>>()?;
            let mut names: Vec<String> = names.into_iter().flatten().collect();
            names.sort_unstable();
            Ok(names)
        };
        match self.noting(rel, list) {
            Ok(names) => Some(names),
            Err(error) => is_absence(&error).then(Vec::new),
        }
    }

    /// The names in a directory with their own file types, unsorted; empty if it cannot be read.
    pub(super) fn typed_entries(&self, rel: &str) -> Vec<(String, FileType)> {
        let list = || -> io::Result<Vec<(String, FileType)>> {
            let mut entries = Vec::new();
            for entry in call(|| self.path(rel).read_dir())? {
                let entry = call(|| entry)?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                match call(|| entry.file_type()) {
                    // It was removed meanwhile.
                    Err(error) if is_absence(&error) => {}
                    kind => entries.push((name, kind?)),
                }
            }
            Ok(entries)
        };
        self.noting(rel, list).unwrap_or_default()
    }

    /// The names of the directories in a directory, sorted, without links to directories; empty if
    /// it cannot be read.
    #[must_use]
    pub fn folders(&self, rel: &str) -> Vec<String> {
        let entries = self.typed_entries(rel).into_iter().filter(|(_, kind)| kind.is_dir());
        let mut names: Vec<String> = entries.map(|(name, _)| name).collect();
        names.sort_unstable();
        names
    }

    /// Whether `rel` exists; a dangling link does not.
    #[must_use]
    pub fn exists(&self, rel: &str) -> bool {
        self.found(rel, call(|| self.path(rel).metadata())).is_some()
    }

    /// Whether `rel` is a directory or leads to one.
    #[must_use]
    pub fn is_dir(&self, rel: &str) -> bool {
        self.found(rel, is_dir(&self.path(rel))).unwrap_or(false)
    }

    /// Whether there is an entry with that name; a dangling link counts.
    pub(super) fn is_listed(&self, rel: &str) -> bool {
        self.found(rel, call(|| self.path(rel).symlink_metadata())).is_some()
    }

    /// Whether it is a directory and not a link to one.
    pub(super) fn is_real_dir(&self, rel: &str) -> bool {
        self.found(rel, call(|| self.path(rel).symlink_metadata()))
            .is_some_and(|metadata| metadata.is_dir())
    }
}

/// A path for messages: without the root, beginning with `/`.
fn absolute(rel: &str) -> String {
    format!("/{}", rel.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DeviceNumber;
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
            assert_eq!(
                root.canonical_node(&format!("/dev/serial/by-id/{name}")).as_deref(),
                Some("/dev/ttyUSB0"),
                "{name}"
            );
        }
        assert!(!root.node_exists("/dev/loop"));
        assert!(!root.node_exists("/dev/serial"), "a directory is no node");
        assert!(!root.node_exists("/dev/absent"));
        // In a batch every path leads to the same node as alone, also through a folder that is a
        // link.
        symlink("/dev/serial/by-id", dir.path().join("dev/names")).unwrap();
        symlink("serial/none", dir.path().join("dev/nowhere")).unwrap();
        fs::create_dir(dir.path().join("dev/bus")).unwrap();
        fs::write(dir.path().join("dev/bus/001"), "").unwrap();
        let mut listings = Listings::default();
        let names = ["relative", "absolute", "climbing", "absent", "..", ".", "", "../../ttyUSB0"];
        let folders = [
            "/dev/serial/by-id",
            "/dev/names",
            "/dev/loop",
            "/dev/nowhere",
            "/dev/ttyUSB0",
            "/none",
            "",
            "dev",
        ];
        let others = [
            "/dev/bus/001",
            "/dev/bus/../bus/001",
            "/dev/bus",
            "//dev//ttyUSB0",
            "dev/ttyUSB0",
            "ttyUSB0",
            "/",
            "/..",
        ];
        let paths = folders.iter().flat_map(|folder| names.map(|name| format!("{folder}/{name}")));
        for path in paths.chain(others.map(str::to_owned)) {
            for _ in 0..2 {
                let among = root.node_among(&mut listings, &path);
                assert!(
                    among.as_ref().is_none_or(|node| node.number.is_none()),
                    "{path}: a plain file has none"
                );
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
        // A link to a node counts, a directory or a missing path does not.
        assert!(
            root.node_exists("/proc/self/root/dev/null")
                && !root.node_exists("/dev")
                && !root.node_exists("/dev/absent")
        );
        let null = HostNode {
            path: "/dev/null".into(),
            number: Some(DeviceNumber { is_block: false, major: 1, minor: 3 }),
        };
        assert_eq!(root.node_among(&mut Listings::default(), "/dev/null"), Some(null));
        assert!(!root.node_exists("/proc/version"));
        for path in [
            "/dev/null",
            "/proc/self/root/dev/null",
            "/dev",
            "/dev/absent",
            "/proc/version",
            "dev/null",
            "/dev/../dev/null",
            "",
        ] {
            assert_eq!(
                root.node_exists_among(&mut Listings::default(), path),
                root.node_exists(path),
                "{path}"
            );
        }
    }
}
