//! All nodes of a folder of `/dev`, as a container runtime gives them for the folder.

use super::root::{HostNode, HostRoot};
use std::os::unix::fs::FileTypeExt;

/// Folders that containerd and CRI-O leave out at any level: their content belongs to a namespace,
/// or to no device.
const NOT_GIVEN: [&str; 7] = ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"];
/// The kernel's deepest folder is `/dev/bus/usb/001`.
const DEPTH_MAX: usize = 8;
/// A response to the kubelet lists each node. A sound card has a dozen, a hub full of USB devices a
/// hundred.
const NODES_MAX: usize = 1024;

/// A folder with its nodes, see [`HostRoot::folder_nodes`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFolder {
    /// Its real path, without the root.
    pub path: String,
    /// Every node in it, and in the folders below it, sorted by path.
    pub nodes: Vec<HostNode>,
}

/// A folder with more entries than any folder of devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{folder} has more than {max} {kind}")]
pub struct TooMany {
    pub(super) folder: String,
    pub(super) kind: &'static str,
    pub(super) max: usize,
}

impl HostRoot {
    /// The nodes of the folder at `host_path`; `None` if the path does not lead to a folder below
    /// `/dev`.
    ///
    /// Links in the folder are left out, as runtimes do: the result for `/dev/disk/by-id` is empty.
    ///
    /// # Errors
    /// If it has more than 1024 nodes.
    pub fn folder_nodes(&self, host_path: &str) -> Result<Option<NodeFolder>, TooMany> {
        let Some((path, metadata)) =
            self.resolve(host_path).filter(|(path, _)| path.starts_with("/dev/"))
        else {
            return Ok(None);
        };
        if !metadata.is_dir() {
            return Ok(None);
        }
        let mut nodes = Vec::new();
        self.add_nodes(&path, DEPTH_MAX, &mut nodes)?;
        nodes.sort();
        Ok(Some(NodeFolder { path, nodes }))
    }

    fn add_nodes(
        &self,
        folder: &str,
        depth: usize,
        nodes: &mut Vec<HostNode>,
    ) -> Result<(), TooMany> {
        for (name, kind) in self.typed_entries(folder) {
            let path = format!("{folder}/{name}");
            if kind.is_dir() {
                if depth > 0 && !NOT_GIVEN.contains(&&*name) {
                    self.add_nodes(&path, depth - 1, nodes)?;
                }
            } else if name != "console" && !kind.is_fifo() && !kind.is_symlink() {
                // A node that was removed meanwhile is left out.
                nodes.extend(self.node_at(&path));
            }
            if nodes.len() > NODES_MAX {
                return Err(TooMany { folder: folder.to_owned(), kind: "nodes", max: NODES_MAX });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_folder_has_the_nodes_that_a_runtime_would_give() {
        let dir = tempfile::tempdir().unwrap();
        for node in
            ["snd/timer", "snd/controlC0", "snd/by-path/deep", "snd/pts/0", "snd/console", "other"]
        {
            let path = dir.path().join("dev").join(node);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        symlink("../controlC0", dir.path().join("dev/snd/by-path/link")).unwrap();
        symlink("snd", dir.path().join("dev/sound")).unwrap();
        symlink("/etc", dir.path().join("dev/outside")).unwrap();
        fs::create_dir(dir.path().join("etc")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("dev/snd/pipe"), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        let root = HostRoot::new(dir.path());
        let nodes = |path: &str| {
            let folder = root.folder_nodes(path).unwrap()?;
            Some((folder.path, folder.nodes.into_iter().map(|node| node.path).collect::<Vec<_>>()))
        };
        let expected = ["/dev/snd/by-path/deep", "/dev/snd/controlC0", "/dev/snd/timer"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(nodes("/dev/snd"), Some(("/dev/snd".into(), expected.clone())));
        assert_eq!(
            nodes("/dev/sound"),
            Some(("/dev/snd".into(), expected)),
            "a link leads to the folder"
        );
        assert_eq!(
            nodes("/dev/snd/pts"),
            Some(("/dev/snd/pts".into(), vec!["/dev/snd/pts/0".into()])),
            "it was requested"
        );
        for path in ["/dev/other", "/dev/none", "/dev/outside", "/etc", "/dev"] {
            assert_eq!(nodes(path), None, "{path}");
        }
        fs::create_dir(dir.path().join("dev/many")).unwrap();
        (0..=NODES_MAX)
            .for_each(|n| fs::write(dir.path().join(format!("dev/many/{n}")), "").unwrap());
        assert!(root.folder_nodes("/dev/many").is_err());
    }
}
