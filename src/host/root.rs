//! Reads `/sys`, `/proc` and `/dev` below a root: the machine's own, a container's mount of it, or a captured tree.
//!
//! Every answer is "what is known": a file that is missing, empty, unreadable, or that the kernel refuses to read
//! (EINVAL of a `carrier` whose interface is down) is `None`, never an error that could end a scan.

use super::folder::Folder;
use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::{major, minor};
use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, Metadata, OpenOptions};
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
}

/// What one scan has seen of directories, for what asks many times for what lies in the same one.
#[derive(Debug, Default)]
pub struct Listings {
    /// What was in them when the first pattern asked: [`HostRoot::glob_among`].
    names: BTreeMap<String, Vec<String>>,
    /// Where they really are; `None` for what leads nowhere: [`HostRoot::node_among`].
    real: BTreeMap<String, Option<String>>,
}

/// A node of the host, see [`HostRoot::node_among`]. In the order of their paths.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostNode {
    /// Its real path, without the root: `/dev/serial/by-id/x` is `/dev/ttyUSB0`.
    pub path: String,
    /// Its major and minor number; `None` for a plain file in its place.
    pub numbers: Option<(u64, u64)>,
}

impl HostNode {
    pub(super) fn of(path: String, metadata: &Metadata) -> Self {
        let kind = metadata.file_type();
        let has_numbers = kind.is_char_device() || kind.is_block_device();
        let numbers = has_numbers.then(|| (major(metadata.rdev()), minor(metadata.rdev())));
        HostNode { path, numbers }
    }
}

impl HostRoot {
    /// Looks at the host below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        // Absolute, so that what a glob finds can be told below the root again.
        let root = std::path::absolute(&root).unwrap_or(root);
        let live = root.join("dev/null").symlink_metadata().is_ok_and(|null| null.file_type().is_char_device());
        HostRoot { root, live }
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
        let (file, length) = self.open(rel)?;
        let bytes = read_bounded(file, length)?;
        Ok(text_of(&bytes))
    }

    /// The whole text of a list that may be long: `/proc/1/mountinfo` of a node with a hundred pods.
    ///
    /// # Errors
    /// What the system said; `InvalidInput` for whatever is no regular file, `FileTooLarge` for more than 16 MiB: half a list is no
    /// answer.
    pub fn read_all(&self, rel: &str) -> io::Result<String> {
        let mut bytes = Vec::new();
        self.open(rel)?.0.take(LIST_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LIST_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The first bytes of a regular file, at most `length`; fewer where it has fewer.
    ///
    /// # Errors
    /// What the system said; `InvalidInput` for whatever is no regular file.
    pub fn first_bytes(&self, rel: &str, length: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open(rel)?.0.take(length).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// A regular file, with the length that it states.
    fn open(&self, rel: &str) -> io::Result<(File, u64)> {
        // A pipe without a writer opens at once with O_NONBLOCK; what was opened is then seen to be no file.
        let flags = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(rel))?;
        let metadata = file.metadata()?;
        if metadata.is_file() { Ok((file, metadata.len())) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }

    /// The target of a link as it is written, whether or not it exists.
    #[must_use]
    pub fn link_target(&self, rel: &str) -> Option<String> {
        self.path(rel).read_link().ok()?.into_os_string().into_string().ok()
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
        Folder::open(AT_FDCWD, &self.path(rel))
    }

    /// The names in a directory, sorted; empty when it cannot be read.
    #[must_use]
    pub fn entries(&self, rel: &str) -> Vec<String> {
        let Ok(entries) = self.path(rel).read_dir() else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Whether `rel` leads to anything; a dangling link does not.
    #[must_use]
    pub fn exists(&self, rel: &str) -> bool {
        self.path(rel).exists()
    }

    /// Whether `rel` is a directory or leads to one.
    #[must_use]
    pub fn is_dir(&self, rel: &str) -> bool {
        self.path(rel).is_dir()
    }

    /// Whether a device node can be reached at `host_path` (such as `/dev/fuse`).
    #[must_use]
    pub fn node_exists(&self, host_path: &str) -> bool {
        if self.root == Path::new("/") {
            // The kernel follows links as `resolve` does below a root, in one call: every Allocate asks for its devices' nodes.
            return Path::new(host_path).metadata().is_ok_and(|metadata| self.is_node(&metadata));
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
            listings.real.insert(dir.to_owned(), self.resolve(dir).map(|(real, _)| real));
        }
        let real = format!("{}/{name}", listings.real.get(dir)?.as_ref()?);
        let metadata = self.path(&real).symlink_metadata().ok()?;
        if metadata.file_type().is_symlink() { self.resolve(&real) } else { Some((real, metadata)) }
    }

    /// The host paths that match a glob such as `/dev/ttyUSB*`, sorted; empty for a pattern that is none.
    ///
    /// As in a shell, `*` matches neither `/` nor a leading dot.
    #[must_use]
    pub fn glob(&self, pattern: &str) -> Vec<String> {
        if pattern.split('/').any(|component| component == "..") {
            return Vec::new();
        }
        let Some(root) = self.root.to_str().map(|root| root.trim_end_matches('/')) else {
            return Vec::new();
        };
        let below = format!("{}/{}", glob::Pattern::escape(root), pattern.trim_start_matches('/'));
        let options = glob::MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
        let Ok(matches) = glob::glob_with(&below, options) else {
            return Vec::new();
        };
        let mut paths: Vec<String> =
            matches.flatten().filter_map(|path| Some(format!("/{}", path.strip_prefix(&self.root).ok()?.to_str()?))).collect();
        paths.sort_unstable();
        paths
    }

    /// The same as [`HostRoot::glob`], where many patterns ask for the same directory: it is listed once, and where the names are
    /// that begin as the pattern does is found without going through all of them. Sixty-four resources of one `/dev` with ten
    /// thousand nodes would else be 640,000 names.
    #[must_use]
    pub fn glob_among(&self, listings: &mut Listings, pattern: &str) -> Vec<String> {
        const MAGIC: [char; 3] = ['*', '?', '['];
        let Some((dir, name)) = pattern.rsplit_once('/').filter(|(dir, name)| {
            // What is more than one name in one directory is rare.
            name.contains(MAGIC)
                && !name.starts_with('.')
                && !name.contains("**")
                && !dir.contains(MAGIC)
                && !dir.split('/').any(|component| component == "..")
        }) else {
            return self.glob(pattern);
        };
        let options = glob::MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: true };
        let Ok(wanted) = glob::Pattern::new(name) else { return Vec::new() };
        let names = listings.names.entry(dir.to_owned()).or_insert_with(|| self.entries(dir));
        let begin = &name[..name.find(MAGIC).unwrap_or(0)];
        let first = names.partition_point(|name| name.as_str() < begin);
        let begun = names[first..].iter().take_while(|name| name.starts_with(begin));
        let dir = dir.trim_matches('/');
        let below = if dir.is_empty() { String::new() } else { format!("/{dir}") };
        begun.filter(|name| wanted.matches_with(name, options)).map(|name| format!("{below}/{name}")).collect()
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
                    metadata = Some(self.path(&real).symlink_metadata().ok()?);
                    continue;
                }
                _ => {}
            }
            let next = format!("{real}/{component}");
            let found = self.path(&next).symlink_metadata().ok()?;
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
        let metadata = metadata.or_else(|| self.root.metadata().ok())?;
        Some((real, metadata))
    }
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
                assert!(among.as_ref().is_none_or(|node| node.numbers.is_none()), "{path}: a plain file has none");
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
        let null = HostNode { path: "/dev/null".into(), numbers: Some((1, 3)) };
        assert_eq!(root.node_among(&mut Listings::default(), "/dev/null"), Some(null));
        assert!(!root.node_exists("/proc/version"));
        for path in ["/dev/null", "/proc/self/root/dev/null", "/dev", "/dev/absent", "/proc/version", "dev/null", "/dev/../dev/null", ""] {
            assert_eq!(root.node_exists_among(&mut Listings::default(), path), root.node_exists(path), "{path}");
        }
    }

    #[test]
    fn a_glob_stays_below_the_root() {
        let (dir, root) = tree();
        for name in ["ttyUSB10", "ttyUSB2", "null"] {
            fs::write(dir.path().join("dev").join(name), "").unwrap();
        }
        assert_eq!(root.glob("/dev/ttyUSB*"), ["/dev/ttyUSB10", "/dev/ttyUSB2"]);
        assert_eq!(root.glob("/dev/../../etc/*"), Vec::<String>::new());
        assert_eq!(root.glob("/dev/[broken"), Vec::<String>::new());
        let mut listings = Listings::default();
        let patterns = [
            "/dev/ttyUSB*",
            "/dev/ttyUSB1?",
            "/dev/ttyUSB[12]",
            "/dev/ttyUSB2",
            "/dev/tty*2",
            "/dev/*",
            "/dev/?*",
            "/dev/.*",
            "/dev/**",
            "/d*/ttyUSB*",
            "/dev/../../etc/*",
            "/dev/[broken",
            "/dev/none*",
            "/none/*",
            "/dev/",
            "/dev/ttyUSB*/",
            "dev/*",
            "/*",
            "//dev/tty*",
            "/dev/zz*",
            "*",
        ];
        for pattern in patterns {
            assert_eq!(root.glob_among(&mut listings, pattern), root.glob(pattern), "{pattern}");
        }
        fs::write(dir.path().join("dev/ttyUSB3"), "").unwrap();
        assert_eq!(root.glob_among(&mut listings, "/dev/ttyUSB?"), ["/dev/ttyUSB2"], "a directory is listed once for a scan");
        assert_eq!(root.glob_among(&mut Listings::default(), "/dev/ttyUSB?"), ["/dev/ttyUSB2", "/dev/ttyUSB3"]);
    }
}
