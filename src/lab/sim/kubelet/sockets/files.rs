//! The files of a kubelet and its containers: cleaned-up sockets, checkpoint, log folders, cgroups.

use super::super::pod::PodSpec;
use super::checkpoint;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// The directories that the simulated kubelet writes to.
#[derive(Debug, Clone)]
pub(in super::super) struct Files {
    pub(in super::super) kubelet_dir: PathBuf,
    pub(in super::super) host_root: PathBuf,
}

impl Files {
    pub(super) fn plugins_dir(&self) -> PathBuf {
        self.kubelet_dir.join("device-plugins")
    }

    pub(super) fn registration_socket(&self) -> PathBuf {
        self.plugins_dir().join("kubelet.sock")
    }

    fn checkpoint(&self) -> PathBuf {
        self.plugins_dir().join(checkpoint::FILE_NAME)
    }

    pub(super) fn pod_resources_socket(&self) -> PathBuf {
        self.kubelet_dir.join("pod-resources/kubelet.sock")
    }

    fn kubepods(&self) -> PathBuf {
        self.host_root.join("sys/fs/cgroup/kubepods")
    }

    fn pod_cgroup(&self, uid: &str) -> PathBuf {
        self.kubepods().join(format!("pod{uid}"))
    }

    fn pod_logs(&self, spec: &PodSpec) -> PathBuf {
        self.host_root
            .join("var/log/pods")
            .join(format!("{}_{}_{}", spec.namespace, spec.name, spec.uid))
    }

    /// Creates the directories of a node; existing ones stay as they are.
    pub(super) fn create(&self) -> io::Result<()> {
        private_dir(&self.plugins_dir())?;
        private_dir(&self.kubelet_dir.join("pod-resources"))?;
        fs::create_dir_all(self.host_root.join("var/log/pods"))?;
        fs::create_dir_all(self.kubepods())?;
        // This file distinguishes cgroup v2 from v1.
        let controllers = self.host_root.join("sys/fs/cgroup/cgroup.controllers");
        if controllers.exists() {
            Ok(())
        } else {
            fs::write(controllers, "cpuset cpu io memory pids\n")
        }
    }

    /// The sockets that the kubelet's clean-up removes: those directly in the device-plugin
    /// directory, and links to sockets. Everything else stays, including sub-directories with their
    /// sockets.
    pub(super) fn stale_sockets(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(self.plugins_dir())?.collect::<Result<Vec<_>, _>>()?;
        let others = entries.iter().filter(|entry| entry.file_name() != checkpoint::FILE_NAME);
        // As in the kubelet, `metadata` follows links, and entries that cannot be read are skipped.
        let sockets = others.filter(|entry| {
            fs::metadata(entry.path()).is_ok_and(|metadata| metadata.file_type().is_socket())
        });
        Ok(sockets.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
    }

    pub(super) fn read_checkpoint(&self) -> io::Result<Vec<u8>> {
        fs::read(self.checkpoint())
    }

    /// Writes a temporary file and renames it: a watcher sees one move, never a partial file.
    pub(super) fn write_checkpoint(&self, bytes: &[u8], sync: bool) -> io::Result<()> {
        let temporary = self.plugins_dir().join(format!(".{}.tmp", checkpoint::FILE_NAME));
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(bytes)?;
        if sync {
            file.sync_all()?;
        }
        fs::rename(temporary, self.checkpoint())
    }

    /// Creates the pod's cgroup, at its first container start.
    pub(super) fn create_pod(&self, spec: &PodSpec) -> io::Result<()> {
        let cgroup = self.pod_cgroup(&spec.uid);
        fs::create_dir_all(&cgroup)?;
        fs::write(cgroup.join("cgroup.procs"), "")?;
        fs::write(cgroup.join("cgroup.events"), "populated 1\nfrozen 0\n")
    }

    /// Creates the log folder of a container that is about to start.
    pub(super) fn create_logs(&self, spec: &PodSpec, container: &str) -> io::Result<()> {
        fs::create_dir_all(self.pod_logs(spec).join(container))
    }

    /// Empties and then removes the pod's cgroup: its processes have exited.
    pub(super) fn remove_cgroup(&self, uid: &str) -> io::Result<()> {
        let cgroup = self.pod_cgroup(uid);
        if !cgroup.exists() {
            return Ok(());
        }
        fs::write(cgroup.join("cgroup.events"), "populated 0\nfrozen 0\n")?;
        fs::remove_dir_all(cgroup)
    }

    /// Removes the pod's log folder: its object was deleted.
    pub(super) fn remove_logs(&self, spec: &PodSpec) -> io::Result<()> {
        match fs::remove_dir_all(self.pod_logs(spec)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        }
    }
}

fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o750).create(path)
}

/// Removes a file; its absence is no error.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
