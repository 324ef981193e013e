//! A restart by systemd: its fd store holds what the kubelet has open, from the end of one process to the start of the next
//! (`FileDescriptorStoreMax=`, systemd.service(5)).
//!
//! A process that ends does not know whether another one follows. Where none does, systemd closes the descriptors when it has
//! stopped the unit. Where one cannot be started, the unit has systemd do so (`ExecStopPost=`). The kubelet then sees that the
//! devices are gone.

use super::{Label, PassedFds};
use crate::host;
use crate::host::descriptors::FILES_MAX;
use sd_notify::NotifyState;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Some hundred bytes for each descriptor.
const LABELS_BYTES_MAX: u64 = 4 << 20;

/// The name of all descriptors in the store; the unit knows it too.
const NAME: &str = "kubelet";

/// The labels, by inode: systemd gives descriptors back in any order, and has no room for so many names.
fn labels_path(run_dir: &Path) -> PathBuf {
    run_dir.join("fd-store.json")
}

/// Whether this is a process of systemd's.
#[must_use]
pub fn is_there() -> bool {
    env::var_os("NOTIFY_SOCKET").is_some()
}

/// Has systemd hold them, if there is a connection to hold.
pub fn store(passed: &PassedFds, run_dir: &Path) {
    if passed.connections() > 0
        && let Err(error) = store_all(passed, run_dir)
    {
        tracing::warn!(%error, "systemd cannot hold the kubelet's connections; the kubelet will notice the end of this process");
        remove_all();
    }
}

fn store_all(passed: &PassedFds, run_dir: &Path) -> io::Result<()> {
    let labels: Vec<(u64, &Label)> = passed.0.iter().map(|(label, fd)| Ok((inode(fd)?, label))).collect::<io::Result<_>>()?;
    fs::write(labels_path(run_dir), serde_json::to_vec(&labels)?)?;
    for fds in passed.fds().chunks(FILES_MAX) {
        sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(NAME)], fds)?;
    }
    Ok(())
}

/// What another process has left in the store; from here on only this process holds it.
#[must_use]
pub fn restore(run_dir: &Path) -> PassedFds {
    let fds = match sd_listen_fds::get() {
        Ok(fds) if fds.is_empty() => return PassedFds::default(),
        Ok(fds) => fds,
        Err(error) => {
            tracing::warn!(%error, "the descriptors in systemd's fd store cannot be taken");
            return PassedFds::default();
        }
    };
    remove_all();
    let path = labels_path(run_dir);
    let labels = host::read_bounded(&path, LABELS_BYTES_MAX).ok();
    let mut labels: Vec<(u64, Label)> = labels.and_then(|labels| serde_json::from_slice(&labels).ok()).unwrap_or_default();
    drop(fs::remove_file(&path));
    // Copies, which no program that is started from here inherits.
    let copies = fds.into_iter().filter_map(|(_, fd)| fd.into_std().try_clone().ok());
    let labelled = copies.filter_map(|fd| {
        let inode = inode(&fd).ok()?;
        let place = labels.iter().position(|(labelled, _)| *labelled == inode)?;
        Some((labels.swap_remove(place).1, fd))
    });
    let passed = PassedFds(labelled.collect());
    tracing::info!(connections = passed.connections(), lost = labels.len(), "systemd has held what the kubelet has open");
    passed
}

fn inode(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

/// Has systemd close its own.
fn remove_all() {
    if let Err(error) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(NAME)]) {
        tracing::warn!(%error, "systemd was not asked to close the kubelet's connections");
    }
}
