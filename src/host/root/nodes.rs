//! The nodes of `/dev`: follows links inside the root, as the kernel does on the host itself.

use super::HostRoot;
use crate::domain::DeviceNumber;
use crate::host::failure::call;
use nix::sys::stat::{major, minor};
use std::collections::{BTreeMap, VecDeque};
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Links followed before a path counts as a loop, as in Linux (`MAXSYMLINKS`).
const LINKS_MAX: u32 = 40;

/// A cache of directories for one scan, for callers with many paths in the same directory.
#[derive(Debug, Default)]
pub struct Listings {
    /// Their names when the first pattern listed them: [`HostRoot::glob_among`].
    pub(in crate::host) names: BTreeMap<String, Vec<String>>,
    /// Their real paths; `None` for a path that leads nowhere: [`HostRoot::node_among`].
    real: BTreeMap<String, Option<String>>,
}

/// A node of the host, see [`HostRoot::node_among`]. Sorted by path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostNode {
    /// Its real path, without the root: `/dev/serial/by-id/x` is `/dev/ttyUSB0`.
    pub path: String,
    /// Its number; `None` for a plain file in its place.
    pub number: Option<DeviceNumber>,
}

impl HostNode {
    pub(in crate::host) fn of(path: String, metadata: &Metadata) -> Self {
        HostNode { path, number: number_of(metadata) }
    }
}

impl HostRoot {
    /// The node at a path that is already its real path.
    pub(in crate::host) fn node_at(&self, path: &str) -> Option<HostNode> {
        let metadata = self.found(path, call(|| self.path(path).symlink_metadata()))?;
        self.is_node(&metadata).then(|| HostNode::of(path.to_owned(), &metadata))
    }

    /// Whether `host_path` (such as `/dev/fuse`) leads to a device node.
    #[must_use]
    pub fn node_exists(&self, host_path: &str) -> bool {
        if self.root == Path::new("/") {
            // The kernel follows links in one call, as `resolve` does below a root. This matters
            // because every Allocate checks the nodes of its devices.
            let metadata = self.found(host_path, call(|| Path::new(host_path).metadata()));
            return metadata.is_some_and(|metadata| self.is_node(&metadata));
        }
        self.canonical_node(host_path).is_some()
    }

    /// The same, for many nodes in the same directory.
    #[must_use]
    pub fn node_exists_among(&self, listings: &mut Listings, host_path: &str) -> bool {
        if self.root == Path::new("/") {
            self.node_exists(host_path)
        } else {
            self.node_among(listings, host_path).is_some()
        }
    }

    /// The node's real path without the root: `/dev/ttyUSB0` for `/dev/serial/by-id/x`.
    #[must_use]
    pub fn canonical_node(&self, host_path: &str) -> Option<String> {
        let (path, metadata) = self.resolve(host_path)?;
        self.is_node(&metadata).then_some(path)
    }

    /// The node at `host_path`, for many nodes in the same directory: the directory's links are
    /// followed once, and a node costs one call.
    #[must_use]
    pub fn node_among(&self, listings: &mut Listings, host_path: &str) -> Option<HostNode> {
        let (path, metadata) = self.resolve_among(listings, host_path)?;
        self.is_node(&metadata).then(|| HostNode::of(path, &metadata))
    }

    fn resolve_among(
        &self,
        listings: &mut Listings,
        host_path: &str,
    ) -> Option<(String, Metadata)> {
        let Some((dir, name)) =
            host_path.rsplit_once('/').filter(|(_, name)| !matches!(*name, "" | "." | ".."))
        else {
            return self.resolve(host_path);
        };
        if !listings.real.contains_key(dir) {
            let failed = self.failures.count();
            let real = self.resolve(dir).map(|(real, _)| real);
            if self.failures.count() > failed {
                // The next caller must get the failure too.
                return None;
            }
            listings.real.insert(dir.to_owned(), real);
        }
        let real = format!("{}/{name}", listings.real.get(dir)?.as_ref()?);
        let metadata = self.found(&real, call(|| self.path(&real).symlink_metadata()))?;
        if metadata.file_type().is_symlink() { self.resolve(&real) } else { Some((real, metadata)) }
    }

    pub(in crate::host) fn is_node(&self, metadata: &Metadata) -> bool {
        let kind = metadata.file_type();
        kind.is_char_device() || kind.is_block_device() || (!self.live && kind.is_file())
    }

    /// Follows every link of `host_path` inside the root: an absolute target starts at the root
    /// again, and `..` stops there, as on the host itself.
    pub(in crate::host) fn resolve(&self, host_path: &str) -> Option<(String, Metadata)> {
        let mut pending: VecDeque<String> = host_path.split('/').map(str::to_owned).collect();
        let mut real = String::new();
        let mut metadata = None;
        let mut links = 0;
        while let Some(component) = pending.pop_front() {
            match component.as_str() {
                "" | "." => continue,
                ".." => {
                    real.truncate(real.rfind('/').unwrap_or(0));
                    metadata =
                        Some(self.found(&real, call(|| self.path(&real).symlink_metadata()))?);
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

/// The number of a device node; `None` for any other file.
fn number_of(metadata: &Metadata) -> Option<DeviceNumber> {
    let kind = metadata.file_type();
    let narrow = |number: u64| u32::try_from(number).ok();
    let (major, minor) = (narrow(major(metadata.rdev()))?, narrow(minor(metadata.rdev()))?);
    (kind.is_char_device() || kind.is_block_device()).then(|| DeviceNumber {
        is_block: kind.is_block_device(),
        major,
        minor,
    })
}
