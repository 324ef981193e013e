//! The node that a configuration is read for.

use super::labels::{LabelFile, Pinned, copy_of_labels};
use crate::domain::NodeLabels;
use crate::host::{HostRoot, private};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The variable with the node's name, for a daemon with a host name of its own, as in a pod.
const NODE_NAME: &str = "NODE_NAME";

/// The name that the daemon had from the variable, below the state directory.
const KEPT_NAME: &str = "node/name";

/// The value of the variable.
fn from_environment() -> Option<String> {
    std::env::var(NODE_NAME).ok().filter(|name| !name.is_empty())
}

/// Keeps the name in `NODE_NAME` of the daemon for the verbs, which run in a shell without the
/// variable.
///
/// # Errors
/// When the state directory cannot be written.
pub fn keep_name(state: &Path) -> io::Result<()> {
    keep(&state.join(KEPT_NAME), from_environment().as_deref())
}

fn keep(file: &Path, name: Option<&str>) -> io::Result<()> {
    let Some(name) = name else {
        return match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
    };
    if fs::read_to_string(file).is_ok_and(|kept| kept == name) {
        return Ok(());
    }
    private::replace_file(file, name.as_bytes())
}

/// The node that a configuration is read for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    name: Option<String>,
    /// The root directory of its files.
    root: PathBuf,
    /// The copy of the labels that the API server had; `None` for a node of another name, whose
    /// labels are unknown.
    copy: Option<PathBuf>,
    /// The source of the labels since the start of the daemon.
    pinned: Option<Pinned>,
}

impl Node {
    /// This node: by `NODE_NAME` of the environment, which the DaemonSet sets, else by that of the
    /// daemon ([`keep_name`]), else by the kernel's host name.
    ///
    /// In a pod the kernel's file contains the pod's name, below any root: the kernel answers each
    /// process with the name of its own namespace.
    #[must_use]
    pub fn here(host_root: &Path, state: &Path) -> Self {
        let name = from_environment()
            .or_else(|| fs::read_to_string(state.join(KEPT_NAME)).ok())
            .or_else(|| HostRoot::new(host_root).read("proc/sys/kernel/hostname"))
            .map(|name| name.trim().to_owned());
        Node {
            name: name.filter(|name| !name.is_empty()),
            root: host_root.to_owned(),
            copy: Some(copy_of_labels(state)),
            pinned: None,
        }
    }

    /// A node of this name, with the files of this host.
    #[must_use]
    pub fn named(name: &str, host_root: &Path) -> Self {
        Node { name: Some(name.to_owned()), root: host_root.to_owned(), copy: None, pinned: None }
    }

    /// Its name, if it is known.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Its name in the API server: the kubelet writes names in lower case.
    #[must_use]
    pub fn api_name(&self) -> Option<String> {
        self.name.as_ref().map(|name| name.to_lowercase())
    }

    /// The source of its labels: the one at the start of the daemon, else the configured one.
    #[must_use]
    pub fn label_source<'a>(&'a self, configured: &'a NodeLabels) -> &'a NodeLabels {
        self.pinned.as_ref().map_or(configured, |pinned| &pinned.source)
    }

    /// The file with its labels; `None` for a node of another name.
    pub(super) fn labels(&self, configured: &NodeLabels) -> Option<LabelFile> {
        let copy = self.copy.as_ref()?;
        Some(match self.label_source(configured) {
            NodeLabels::File(file) => LabelFile::Given(file.clone()),
            NodeLabels::Api => LabelFile::Copy {
                file: copy.clone(),
                node: self.api_name().unwrap_or_default(),
                was_known: self.pinned.as_ref().is_some_and(|pinned| pinned.was_known),
            },
        })
    }

    /// The same node for the next reads of a running daemon: the source of its labels stays, and
    /// known labels do not become unknown.
    pub(super) fn pinned(&self, configured: &NodeLabels, are_known: bool) -> Self {
        let was_known = are_known || self.pinned.as_ref().is_some_and(|pinned| pinned.was_known);
        let source = self.label_source(configured).clone();
        Node { pinned: Some(Pinned { source, was_known }), ..self.clone() }
    }

    /// The same node with the copy of its labels below this state directory.
    #[cfg(test)]
    pub(super) fn with_state(self, state: &Path) -> Self {
        Node { copy: Some(copy_of_labels(state)), ..self }
    }
}

/// A node without a name, for tests and trials.
impl Default for Node {
    fn default() -> Self {
        Node { name: None, root: PathBuf::from("/"), copy: None, pinned: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_of_a_pod_the_name_is_the_kernels() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
        fs::write(root.path().join("proc/sys/kernel/hostname"), "gpu-7\n").unwrap();
        let node = |host: &Path| Node::here(host, root.path());
        if std::env::var(NODE_NAME).is_err() {
            assert_eq!(node(root.path()).name(), Some("gpu-7"));
            assert_eq!(node(&root.path().join("proc")).name(), None);
        }
    }

    #[test]
    fn a_verb_uses_the_name_that_the_daemon_has_from_its_environment() {
        let state = tempfile::tempdir().unwrap();
        let name = || Node::here(Path::new("/nonexistent"), state.path()).name;
        if std::env::var(NODE_NAME).is_ok() {
            return;
        }
        for given in [Some("gpu-7"), Some("gpu-7"), Some("gpu-8"), None, None] {
            keep(&state.path().join(KEPT_NAME), given).unwrap();
            assert_eq!(name().as_deref(), given);
        }
    }
}
