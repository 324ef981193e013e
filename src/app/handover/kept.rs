//! A restart by systemd: it keeps what the kubelet has open, from the end of one process to the start of the next
//! (`FileDescriptorStoreMax=`, systemd.service(5)).
//!
//! ```text
//!   the one that ends                 systemd                    the next one
//!        ── FDSTORE=1, the files ───────▶
//!   ends without an end of its streams
//!                                        ── the files, LISTEN_FDS ────▶
//!                                        ◀── FDSTOREREMOVE=1 ──────────   holds them alone, and goes on as when it
//!                                                                         takes over from an instance that died
//! ```
//!
//! Whoever ends does not know whether another one follows. Where none does, systemd closes the files when it has stopped the unit, and where
//! one cannot be started the unit itself has it do so (`ExecStopPost=`): the kubelet sees that the devices are gone.

use super::Inherited;
use crate::host;
use crate::host::descriptors::FILES_MAX;
use crate::serving::{Open, Sockets};
use sd_notify::NotifyState;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// A line of some hundred bytes for each file that systemd keeps.
const LIST_BYTES_MAX: u64 = 4 << 20;

/// What systemd calls them; the unit knows it too.
const NAME: &str = "kubelet";

/// Beside the control socket: which file is what, by its inode, since systemd gives them back in any order. A line for each: the inode, and
/// the resource of a socket, or the HTTP/2 stream of a connection's lists.
fn list_path(run_dir: &Path) -> PathBuf {
    run_dir.join("kept")
}

/// Has systemd keep what the kubelet has open. Whether it does, as far as this process can know: not where there is no systemd, or nothing
/// to keep.
pub(in super::super) fn keep(sockets: &Sockets, run_dir: &Path) -> bool {
    let open = sockets.open();
    if env::var_os("NOTIFY_SOCKET").is_none() || open.connections.is_empty() {
        return false;
    }
    let kept = keep_all(&open, run_dir);
    if let Err(error) = &kept {
        tracing::warn!(%error, "systemd cannot keep the kubelet's connections; it will notice the end of this process");
        forget();
    }
    kept.is_ok()
}

fn keep_all(open: &Open, run_dir: &Path) -> io::Result<()> {
    let resources = open.listening.iter().map(|(resource, _)| resource.to_string());
    let names = resources.chain(open.connections.iter().map(|connection| connection.lists.to_string()));
    let mut list = String::new();
    for (file, name) in open.files().iter().zip(names) {
        list.push_str(&format!("{} {name}\n", inode(file)?));
    }
    fs::write(list_path(run_dir), list)?;
    for files in open.files().chunks(FILES_MAX) {
        sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(NAME)], files)?;
    }
    Ok(())
}

/// What a process has left with systemd for this one, which alone holds it from now on.
#[must_use]
pub fn kept(run_dir: &Path) -> Inherited {
    let mut inherited = Inherited::default();
    let files = match sd_listen_fds::get() {
        Ok(files) if files.is_empty() => return inherited,
        Ok(files) => files,
        Err(error) => {
            tracing::warn!(%error, "what systemd has kept cannot be taken");
            return inherited;
        }
    };
    forget();
    let path = list_path(run_dir);
    let list = host::read_bounded(&path, LIST_BYTES_MAX).ok().and_then(|list| String::from_utf8(list).ok()).unwrap_or_default();
    drop(fs::remove_file(&path));
    // Copies, which no program that is started from here has open.
    let copies = files.into_iter().filter_map(|(_, file)| file.into_std().try_clone().ok());
    let mut files: Vec<(u64, OwnedFd)> = copies.filter_map(|file| Some((inode(&file).ok()?, file))).collect();
    let (mut resources, mut sockets, mut lists, mut connections) = (vec![], vec![], vec![], vec![]);
    for (inode, name) in list.lines().filter_map(|line| line.split_once(' ')) {
        let Ok(kept) = inode.parse::<u64>() else { continue };
        // What the kubelet has closed meanwhile is missing.
        let Some(place) = files.iter().position(|(inode, _)| *inode == kept) else { continue };
        let (_, file) = files.swap_remove(place);
        if let Ok(stream) = name.parse() {
            lists.push(stream);
            connections.push(file);
        } else if let Ok(resource) = name.parse() {
            resources.push(resource);
            sockets.push(file);
        }
    }
    tracing::info!(connections = lists.len(), unknown = files.len(), "systemd has kept what the kubelet has open");
    sockets.append(&mut connections);
    inherited.arrived(resources, lists, sockets);
    inherited
}

fn inode(file: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(file)?.st_ino)
}

/// Has systemd close its own.
fn forget() {
    if let Err(error) = sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(NAME)]) {
        tracing::warn!(%error, "systemd could not be told to let go of the kubelet's connections");
    }
}
