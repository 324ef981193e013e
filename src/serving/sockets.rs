//! The sockets: one for each registration, in a directory of our own, which the kubelet's clean-up
//! does not touch.
//!
//! The table outlives the serving actor, as the connections do. A superseded socket is closed when
//! its last stream has ended: the kubelet still reads it, and its early end would cut off the newer
//! one.

use super::connections::Connections;
use super::dra_sockets::DraSockets;
use crate::domain::ResourceName;
use crate::domain::limits::ConnectionLimits;
use crate::handover::{Label, PassedFds};
use crate::host::peer::{TrustedListener, is_stale};
use crate::host::{self, private};
use crate::kubelet::uds::SOCKET_PATH_MAX;
use crate::messages::RegistrationNumber;
use crate::telemetry::metrics;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::watch;

/// The directory of our sockets, below the kubelet's device-plugin directory.
///
/// At every start the kubelet removes the sockets next to its own, but not subdirectories. It also
/// checks whether a checkpoint exists, and any entry without a leading dot counts as one; hence the
/// dot.
const DIRECTORY: &str = ".holdfast";

/// Bytes of the resource's name in the socket's name, if there is space.
const NAME_MAX: usize = 12;

/// The first number for sockets of earlier instances. No registration has so high a number.
const PASSED: RegistrationNumber = RegistrationNumber::MAX / 2;

type Key = (ResourceName, RegistrationNumber);

#[derive(Debug)]
struct Socket {
    path: PathBuf,
    /// Owned by its server.
    listener: Weak<TrustedListener>,
    streams: usize,
    superseded: bool,
    /// Set to true to end the server of the socket.
    close: watch::Sender<bool>,
}

/// The table of open sockets.
#[derive(Debug)]
pub struct Sockets {
    directory: PathBuf,
    /// Distinguishes the sockets of this process from those of any other.
    stamp: String,
    open: Mutex<BTreeMap<Key, Socket>>,
    /// The kubelet's connections.
    pub(crate) connections: Connections,
    /// The sockets of the DRA driver.
    pub(crate) dra: DraSockets,
    /// Whether another process may have copies of the sockets. Their files stay then.
    is_shared: AtomicBool,
}

/// A new listening socket.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) listener: Arc<TrustedListener>,
    /// The path below the device-plugin directory, as Register wants it.
    pub(super) endpoint: String,
    /// Becomes true when the server should end. The server drops its last copy when it has ended.
    pub(super) close: watch::Receiver<bool>,
}

impl Sockets {
    /// An empty table. No file is created before the first `bind`.
    #[must_use]
    pub fn new(device_plugins: &Path, limits: ConnectionLimits) -> Self {
        let millis = host::now().wall.0;
        Sockets {
            directory: device_plugins.join(DIRECTORY),
            stamp: format!("{millis:x}"),
            open: Mutex::default(),
            connections: Connections::new(limits.plugin, limits.held),
            dra: DraSockets::default(),
            is_shared: AtomicBool::new(false),
        }
    }

    /// The directory of the sockets.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<Key, Socket>> {
        // Every change below is a single step on the map, so a panic elsewhere cannot leave it half
        // done.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn bind(
        &self,
        resource: &ResourceName,
        registration: RegistrationNumber,
    ) -> io::Result<Bound> {
        if let Some(kubelets) = self.directory.parent() {
            private::make_open_folder(kubelets)?;
        }
        private::make_private_folder(&self.directory)?;
        let name = self.file_name(resource, registration);
        let path = self.directory.join(&name);
        if path.as_os_str().len() > SOCKET_PATH_MAX {
            // Without the name, which each try changes: a repeated problem is logged once.
            let problem = format!(
                "a socket there would have a path of more than {SOCKET_PATH_MAX} bytes; use a shorter --kubelet-dir"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
        }
        let listener = TrustedListener::bind(&path, || metrics::refused("plugin"))?;
        Ok(self.insert((resource.clone(), registration), listener, path))
    }

    /// Adds the socket of an earlier instance.
    pub(super) fn take(
        &self,
        resource: &ResourceName,
        socket: OwnedFd,
    ) -> io::Result<(RegistrationNumber, Bound)> {
        let listener = TrustedListener::adopt(socket, || metrics::refused("plugin"))?;
        let path = listener.path().filter(|path| path.parent() == Some(&*self.directory));
        let path = path.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, "the socket is not in our directory")
        })?;
        let number = PASSED + self.table().len() as RegistrationNumber;
        Ok((number, self.insert((resource.clone(), number), listener, path)))
    }

    fn insert(&self, key: Key, listener: TrustedListener, path: PathBuf) -> Bound {
        let listener = Arc::new(listener);
        let endpoint = format!("{DIRECTORY}/{}", path.file_name().unwrap_or_default().display());
        let (close, closed) = watch::channel(false);
        let socket = Socket {
            path,
            listener: Arc::downgrade(&listener),
            streams: 0,
            superseded: false,
            close,
        };
        self.table().insert(key, socket);
        Bound { listener, endpoint, close: closed }
    }

    /// The name of a new socket. It is short, because 107 bytes have to contain the kubelet's
    /// directory too, and unique over all processes. Below a long directory (that of MicroK8s) it
    /// contains less of the resource's name, which is only for people.
    fn file_name(&self, resource: &ResourceName, registration: RegistrationNumber) -> String {
        let hash = crc32fast::hash(resource.as_str().as_bytes());
        let unique = format!("{hash:08x}-{}-{registration:x}.sock", self.stamp);
        let space = SOCKET_PATH_MAX
            .saturating_sub(self.directory.as_os_str().len() + "/-".len() + unique.len());
        let name: String = resource
            .as_str()
            .split('/')
            .next_back()
            .unwrap_or_default()
            .chars()
            .take(space.min(NAME_MAX))
            .collect();
        if name.is_empty() { unique } else { format!("{name}-{unique}") }
    }

    /// Marks every older socket of the resource. Those without streams close at once. Those of
    /// earlier instances stay.
    pub(super) fn supersede(&self, resource: &ResourceName, newest: RegistrationNumber) {
        let mut table = self.table();
        for ((name, registration), socket) in table.iter_mut() {
            if name == resource && *registration < newest {
                socket.superseded = true;
            }
        }
        close_unused(&mut table);
    }

    /// Marks the sockets of earlier instances.
    pub(crate) fn supersede_passed(&self) {
        let mut table = self.table();
        table
            .iter_mut()
            .filter(|((_, number), _)| *number >= PASSED)
            .for_each(|(_, socket)| socket.superseded = true);
        close_unused(&mut table);
    }

    pub(super) fn stream_opened(&self, resource: &ResourceName, registration: RegistrationNumber) {
        if let Some(socket) = self.table().get_mut(&(resource.clone(), registration)) {
            socket.streams += 1;
        }
    }

    pub(super) fn stream_ended(&self, resource: &ResourceName, registration: RegistrationNumber) {
        let mut table = self.table();
        if let Some(socket) = table.get_mut(&(resource.clone(), registration)) {
            socket.streams = socket.streams.saturating_sub(1);
        }
        close_unused(&mut table);
    }

    /// Number of open streams of a resource on all of its sockets. After a second Register the
    /// kubelet reads two.
    pub(super) fn streams(&self, resource: &ResourceName) -> usize {
        self.table()
            .iter()
            .filter(|((name, _), _)| name == resource)
            .map(|(_, socket)| socket.streams)
            .sum()
    }

    /// Copies of the kubelet's connections and of the sockets, for another process. This one
    /// continues to serve.
    pub(crate) fn share(&self) -> PassedFds {
        self.is_shared.store(true, Ordering::Relaxed);
        self.copies()
    }

    fn copies(&self) -> PassedFds {
        let mut copies = self.connections.copies();
        for ((resource, _), socket) in self.table().iter() {
            if let Some(listener) = socket.listener.upgrade() {
                match listener.as_fd().try_clone_to_owned() {
                    Ok(copy) => copies.push((Label::Socket(resource.clone()), copy)),
                    Err(error) => {
                        tracing::warn!(%resource, %error, "cannot copy a socket for the next process");
                    }
                }
            }
        }
        copies.extend(self.dra.copies());
        PassedFds(copies)
    }

    /// Registrations whose socket file was removed by another process.
    #[must_use]
    pub fn lost(&self) -> Vec<(ResourceName, RegistrationNumber)> {
        let gone = |socket: &Socket| !socket.superseded && host::is_missing(&socket.path);
        self.table().iter().filter(|(_, socket)| gone(socket)).map(|(key, _)| key.clone()).collect()
    }

    /// Stops all reads and writes. Returns the connections and sockets, which end with the last
    /// copy, and for each server a channel that closes when it has ended. The socket files stay
    /// only if another process serves them, or may.
    pub(crate) fn release(&self, keep_files: bool) -> (PassedFds, Vec<watch::Sender<bool>>) {
        let copies = self.copies();
        self.connections.release();
        let keep_files = keep_files || self.is_shared.load(Ordering::Relaxed);
        let released = std::mem::take(&mut *self.table()).into_values();
        let servers = released.map(|Socket { path, close, .. }| {
            close.send_replace(true);
            if !keep_files {
                drop(std::fs::remove_file(path));
            }
            close
        });
        let servers = servers.chain(self.dra.release(keep_files)).collect();
        // It is removed only if no other process has a socket in it.
        drop(std::fs::remove_dir(&self.directory));
        (copies, servers)
    }

    /// Removes the sockets of processes that have exited: those that refuse a connection.
    pub fn sweep(&self) {
        if let Err(error) = private::make_folder_private(&self.directory) {
            tracing::warn!(path = %self.directory.display(), %error, "cannot restrict the permissions of our socket directory");
        }
        let Ok(entries) = std::fs::read_dir(&self.directory) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            if is_stale(&path).unwrap_or(false) {
                match std::fs::remove_file(&path) {
                    Ok(()) => {
                        tracing::debug!(path = %path.display(), "removed the socket of a process that has exited");
                    }
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "cannot remove the socket of a process that has exited");
                    }
                }
            }
        }
    }
}

fn close_unused(table: &mut BTreeMap<Key, Socket>) {
    table.retain(|_, socket| {
        let unused = socket.superseded && socket.streams == 0;
        if unused {
            socket.close.send_replace(true);
            drop(std::fs::remove_file(&socket.path));
        }
        !unused
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits =
        ConnectionLimits { telemetry: 1, plugin: 1, control: 1, handover: 1, held: 1 };

    #[tokio::test]
    async fn a_superseded_socket_stays_until_its_last_stream_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let sockets = Sockets::new(dir.path(), LIMITS);
        let name: ResourceName = "example.com/device".parse().unwrap();
        let first = sockets.bind(&name, 1).unwrap();
        let second = sockets.bind(&name, 2).unwrap();
        sockets.stream_opened(&name, 1);
        sockets.supersede(&name, 2);
        assert!(!*first.close.borrow() && dir.path().join(&first.endpoint).exists());
        sockets.stream_ended(&name, 1);
        assert!(*first.close.borrow() && !dir.path().join(&first.endpoint).exists());
        assert!(!*second.close.borrow());
        assert!(sockets.lost().is_empty());
        std::fs::remove_file(dir.path().join(&second.endpoint)).unwrap();
        assert_eq!(sockets.lost(), [(name, 2)]);
    }

    #[tokio::test]
    async fn the_sweep_removes_only_the_sockets_of_exited_processes() {
        let dir = tempfile::tempdir().unwrap();
        let sockets = Sockets::new(dir.path(), LIMITS);
        let name: ResourceName = "example.com/device".parse().unwrap();
        let living = sockets.bind(&name, 1).unwrap();
        let dead = dir.path().join(DIRECTORY).join("dead.sock");
        drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
        sockets.sweep();
        assert!(!dead.exists() && dir.path().join(&living.endpoint).exists());
        drop(living.listener);
    }

    #[tokio::test]
    async fn a_folder_with_a_long_path_is_the_same_problem_at_every_try() {
        let dir = tempfile::tempdir().unwrap();
        let sockets = Sockets::new(&dir.path().join("x".repeat(SOCKET_PATH_MAX)), LIMITS);
        let name: ResourceName = "example.com/device".parse().unwrap();
        let problem = |try_number| sockets.bind(&name, try_number).err().unwrap().to_string();
        assert!(problem(1).contains("--kubelet-dir"), "{}", problem(1));
        assert_eq!(problem(1), problem(2));
    }

    #[test]
    fn the_longest_resource_name_fits_the_kubelets_directory_also_that_of_microk8s() {
        let longest =
            format!("{}.example.com/{}", vec!["a".repeat(60); 3].join("."), "x".repeat(63));
        for (dir, newest) in [
            ("/var/lib/kubelet", u64::MAX),
            ("/var/snap/microk8s/common/var/lib/kubelet", u64::from(u32::MAX)),
        ] {
            let sockets = Sockets::new(&Path::new(dir).join("device-plugins"), LIMITS);
            let path = |registration| {
                sockets.directory().join(sockets.file_name(&longest.parse().unwrap(), registration))
            };
            assert!(
                path(newest).as_os_str().len() <= SOCKET_PATH_MAX,
                "{}",
                path(newest).display()
            );
            assert_ne!(path(newest), path(newest - 1));
        }
    }
}
