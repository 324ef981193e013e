//! The host's own settings.

use super::super::Facts;
use super::{AddFacts, ReaderInput};
use crate::host::{self, HostRoot, KernelLog};
use std::path::Path;

/// Inotify instances to test: one for the daemon, one for its successor in a handover, one for a
/// restart.
pub(in super::super) const INSTANCES_WANTED: usize = 3;

pub(super) fn host(input: &ReaderInput) -> AddFacts {
    let roots = &input.target.roots;
    let mut root = HostRoot::new(&roots.host);
    if let Some(config) = &input.config {
        root = root.with_driver_root(&config.driver_root);
    }
    let iommu_groups =
        root.is_dir("sys/kernel").then(|| root.entries("sys/kernel/iommu_groups").len());
    let unsafe_mode = root.read("sys/module/vfio/parameters/enable_unsafe_noiommu_mode");
    let is_enforcing = root.read("sys/fs/selinux/enforce").as_deref() == Some("1");
    let driver_nodes = driver_nodes(&root);
    // A path that exists in every container.
    let inotify = host::inotify_limits(INSTANCES_WANTED, Path::new("/"));
    Box::new(move |facts: &mut Facts| {
        let host = facts.host.get_or_insert_default();
        host.inotify = Some(inotify);
        host.iommu_groups = iommu_groups;
        host.driver_nodes = driver_nodes;
        host.is_unsafe = unsafe_mode.is_some_and(|mode| mode == "Y" || mode == "1");
        host.is_enforcing = is_enforcing;
    })
}

/// The directory where NVIDIA's driver container creates its device nodes (the GPU operator's
/// `driver.hostRoot`), if `/dev` has none.
fn driver_nodes(root: &HostRoot) -> Option<String> {
    let directory = format!("{}/dev", root.driver_root());
    let has = |directory: &str| {
        root.entries(directory).iter().any(|name| name == "nvidiactl" || name == "nvidia0")
    };
    (has(&directory) && !has("dev")).then_some(directory)
}

pub(super) fn kernel_log(input: &ReaderInput) -> AddFacts {
    let root = HostRoot::new(&input.target.roots.host);
    // A captured or simulated tree has no log.
    let refused = || {
        super::ask(async {
            KernelLog::open(&root)
                .err()
                .map(|error| format!("the kernel log cannot be read: {error}"))
        })
        .flatten()
    };
    let refused = if root.is_live() { refused() } else { None };
    Box::new(move |facts: &mut Facts| facts.host.get_or_insert_default().kernel_log = refused)
}
