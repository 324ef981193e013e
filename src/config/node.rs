//! The node that a configuration is read for.

use crate::host::HostRoot;
use std::path::{Path, PathBuf};

/// The variable with the node's name, for a daemon with a host name of its own, as in a pod.
const NODE_NAME: &str = "NODE_NAME";

/// The file with the node's labels, as this process sees it: a volume, or an administrator's file.
const LABELS: &str = "/etc/holdfast-node/labels";

/// The node that a configuration is read for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    name: Option<String>,
    /// The root directory of its files.
    root: PathBuf,
    /// The file with its labels; `None` for a node of another name, whose labels are unknown.
    labels: Option<PathBuf>,
}

impl Node {
    /// This node: by `NODE_NAME` of the environment, which the DaemonSet sets, else by the kernel's
    /// host name.
    ///
    /// In a pod the kernel's file contains the pod's name, below any root: the kernel answers each
    /// process with the name of its own namespace.
    #[must_use]
    pub fn here(host_root: &Path) -> Self {
        let from_environment = std::env::var(NODE_NAME).ok().filter(|name| !name.is_empty());
        let name = from_environment
            .or_else(|| HostRoot::new(host_root).read("proc/sys/kernel/hostname"))
            .map(|name| name.trim().to_owned());
        Node {
            name: name.filter(|name| !name.is_empty()),
            root: host_root.to_owned(),
            labels: Some(LABELS.into()),
        }
    }

    /// A node of this name, with the files of this host.
    #[must_use]
    pub fn named(name: &str, host_root: &Path) -> Self {
        Node { name: Some(name.to_owned()), root: host_root.to_owned(), labels: None }
    }

    /// Its name, if it is known.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The file with its labels.
    pub(super) fn labels(&self) -> Option<&Path> {
        self.labels.as_deref()
    }

    /// The same node with its labels in this file.
    #[cfg(test)]
    pub(super) fn with_labels(self, file: &Path) -> Self {
        Node { labels: Some(file.to_owned()), ..self }
    }
}

/// A node without a name, for tests and trials.
impl Default for Node {
    fn default() -> Self {
        Node { name: None, root: PathBuf::from("/"), labels: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_of_a_pod_the_name_is_the_kernels() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        std::fs::write(root.path().join("proc/sys/kernel/hostname"), "gpu-7\n").unwrap();
        if std::env::var(NODE_NAME).is_err() {
            assert_eq!(Node::here(root.path()).name(), Some("gpu-7"));
            assert_eq!(Node::here(&root.path().join("proc")).name(), None);
        }
    }
}
