//! systemd's fd store: it holds the kubelet's connections and our sockets from the end of one
//! process to the start of the next (`FileDescriptorStoreMax=`, systemd.service(5)).
//!
//! A process that ends does not know whether another one follows. If none follows, systemd closes
//! the descriptors when the unit has stopped. If the next one cannot be started, the unit makes
//! systemd close them (`ExecStopPost=`). The kubelet then sees that the devices are absent.

use super::{Label, PassedFds};
use crate::host;
use crate::host::descriptors::FILES_MAX;
use sd_notify::NotifyState;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Bound of the labels file. A label has some hundred bytes.
const LABELS_BYTES_MAX: u64 = 4 << 20;

/// The name of all our descriptors in the store. The unit's `ExecStopPost=` uses it too.
const NAME: &str = "kubelet";

/// The file with the labels, by inode. systemd returns descriptors in any order, and cannot store a
/// name for each.
fn labels_path(run_dir: &Path) -> PathBuf {
    run_dir.join("fd-store.json")
}

/// Whether systemd started this process and listens for notifications.
#[must_use]
pub fn is_there() -> bool {
    env::var_os("NOTIFY_SOCKET").is_some()
}

/// Stores the descriptors in systemd, if there is a connection among them. If that fails, a warning
/// is logged, and the store is emptied.
pub fn store(passed: &PassedFds, run_dir: &Path) {
    if passed.connections() > 0
        && let Err(error) = store_all(passed, run_dir)
    {
        tracing::warn!(%error, "cannot store the kubelet's connections in systemd; the kubelet will notice the end of this process");
        remove_all();
    }
}

fn store_all(passed: &PassedFds, run_dir: &Path) -> io::Result<()> {
    let labels: Vec<(u64, &Label)> =
        passed.0.iter().map(|(label, fd)| Ok((inode(fd)?, label))).collect::<io::Result<_>>()?;
    fs::write(labels_path(run_dir), serde_json::to_vec(&labels)?)?;
    for fds in passed.fds().chunks(FILES_MAX) {
        sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(NAME)], fds)?;
    }
    Ok(())
}

/// The descriptors that an earlier process stored, with their labels. They are removed from the
/// store, so only this process holds them.
#[must_use]
pub fn restore(run_dir: &Path) -> PassedFds {
    let fds = match sd_listen_fds::get() {
        Ok(fds) if fds.is_empty() => return PassedFds::default(),
        Ok(fds) => fds,
        Err(error) => {
            tracing::warn!(%error, "failed to restore file descriptors from systemd");
            return PassedFds::default();
        }
    };
    remove_all();
    let path = labels_path(run_dir);
    let labels = host::read_bounded(&path, LABELS_BYTES_MAX).ok();
    let mut labels: Vec<(u64, Label)> =
        labels.and_then(|labels| serde_json::from_slice(&labels).ok()).unwrap_or_default();
    drop(fs::remove_file(&path));
    // Duplicates with close-on-exec: programs that are started from here do not inherit them.
    let copies = fds.into_iter().filter_map(|(_, fd)| fd.into_std().try_clone().ok());
    let labelled = copies.filter_map(|fd| {
        let inode = inode(&fd).ok()?;
        let place = labels.iter().position(|(labelled, _)| *labelled == inode)?;
        Some((labels.swap_remove(place).1, fd))
    });
    let passed = PassedFds(labelled.collect());
    tracing::info!(
        connections = passed.connections(),
        lost = labels.len(),
        "restored the kubelet's connections from systemd's fd store"
    );
    passed
}

fn inode(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

/// Removes our descriptors from the store; systemd closes its copies.
fn remove_all() {
    if let Err(error) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(NAME)])
    {
        tracing::warn!(%error, "cannot remove the kubelet's connections from systemd's fd store");
    }
}
