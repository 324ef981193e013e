//! The unix sockets of a node, in memory: listeners by path, and open connections between plugins
//! and kubelet.

use super::plugin::{ConnectionId, Plugin};
use crate::lab::sim::executor::{Handle, Task};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// The shortest and the longest time of a message on a unix socket.
const LATENCY: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(150));

/// The time of one message, drawn at random.
pub(super) fn latency(handle: &Handle) -> Duration {
    handle.random(|random| random.between(LATENCY.0, LATENCY.1))
}

/// The files of the device-plugin directory that are sockets.
#[derive(Debug, Default)]
pub(super) struct Sockets {
    /// By path below the directory. A file outlives its listener.
    files: BTreeMap<String, File>,
    next_inode: u64,
    next_connection: u64,
}

#[derive(Debug)]
struct File {
    inode: u64,
    listener: Weak<Listener>,
}

impl Sockets {
    /// Creates the file of a socket. An error if there is one.
    pub(super) fn bind(&mut self, path: &str, listener: Weak<Listener>) -> io::Result<u64> {
        if self.files.contains_key(path) {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "Address already in use"));
        }
        self.next_inode += 1;
        self.files.insert(path.to_owned(), File { inode: self.next_inode, listener });
        Ok(self.next_inode)
    }

    /// The inode of the file at a path.
    pub(super) fn inode(&self, path: &str) -> Option<u64> {
        self.files.get(path).map(|file| file.inode)
    }

    pub(super) fn unlink(&mut self, path: &str) -> bool {
        self.files.remove(path).is_some()
    }

    /// Every path.
    pub(super) fn paths(&self) -> Vec<String> {
        self.files.keys().cloned().collect()
    }

    /// A new connection to the listener at a path.
    pub(super) fn dial(&mut self, path: &str) -> Option<Arc<Transport>> {
        let listener = self.files.get(path)?.listener.upgrade()?;
        let transport = listener.connect(ConnectionId(self.next_connection + 1))?;
        self.next_connection += 1;
        Some(transport)
    }
}

/// A listening socket.
pub(super) struct Listener {
    /// `None` once it is closed: the plugin may hold its own listener, and neither would be freed.
    plugin: Mutex<Option<Arc<dyn Plugin>>>,
    transports: Mutex<Vec<Weak<Transport>>>,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

impl Listener {
    pub(super) fn new(plugin: Arc<dyn Plugin>) -> Self {
        Listener { plugin: Mutex::new(Some(plugin)), transports: Mutex::default() }
    }

    fn transports(&self) -> MutexGuard<'_, Vec<Weak<Transport>>> {
        self.transports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn plugin(&self) -> MutexGuard<'_, Option<Arc<dyn Plugin>>> {
        self.plugin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` if it is closed.
    fn connect(&self, id: ConnectionId) -> Option<Arc<Transport>> {
        let plugin = self.plugin().clone()?;
        let (cut, _) = watch::channel(false);
        let transport = Arc::new(Transport { id, plugin, cut, tasks: Mutex::default() });
        let mut transports = self.transports();
        transports.retain(|known| known.strong_count() > 0);
        transports.push(Arc::downgrade(&transport));
        Some(transport)
    }

    /// Stops listening, and cuts every connection that was made through this socket.
    pub(super) fn close(&self) {
        let plugin = self.plugin().take();
        let transports = std::mem::take(&mut *self.transports());
        transports.iter().filter_map(Weak::upgrade).for_each(|transport| transport.cut());
        // Outside of the locks: it may own what locks them.
        drop(plugin);
    }

    /// Open connections.
    pub(super) fn open(&self) -> usize {
        self.transports()
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|transport| !transport.is_cut())
            .count()
    }
}

/// One connection, and the plugin's tasks for it.
pub(super) struct Transport {
    pub(super) id: ConnectionId,
    pub(super) plugin: Arc<dyn Plugin>,
    cut: watch::Sender<bool>,
    tasks: Mutex<Vec<Task>>,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport")
            .field("id", &self.id)
            .field("cut", &*self.cut.borrow())
            .finish_non_exhaustive()
    }
}

impl Transport {
    pub(super) fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }

    /// Keeps a task of the plugin's side for as long as the connection lasts.
    pub(super) fn keep(&self, task: Task) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| !task.is_finished());
        if self.is_cut() {
            drop(tasks);
            task.abort();
        } else {
            tasks.push(task);
        }
    }

    /// Ends the connection at both ends, with every call and stream on it.
    pub(super) fn cut(&self) {
        self.cut.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.iter().for_each(Task::abort);
    }
}
