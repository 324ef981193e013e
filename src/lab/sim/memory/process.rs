//! Processes: a daemon's tasks and sockets, which end together when it dies.

use super::node::Node;
use super::plugin::Plugin;
use super::sockets::Listener;
use crate::lab::sim::executor::Task;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A process on the node. Dropping its last clone kills nothing: a daemon runs until it is killed,
/// or ends.
#[derive(Debug, Clone)]
pub struct Process {
    node: Node,
    state: Arc<Mutex<ProcessState>>,
}

/// The tasks and listeners of a process; emptied when it dies.
#[derive(Debug, Default)]
pub(super) struct ProcessState {
    is_dead: bool,
    tasks: Vec<Task>,
    listeners: Vec<Arc<Listener>>,
}

impl Process {
    /// A process, and the reference with which the node kills it.
    pub(super) fn new(node: Node) -> (Self, Weak<Mutex<ProcessState>>) {
        let state = Arc::default();
        let reference = Arc::downgrade(&state);
        (Process { node, state }, reference)
    }

    fn state(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it was killed.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.state().is_dead
    }

    /// Runs a task of this process. A task that a dead process spawns never runs.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Task {
        let task = self.node.handle().spawn(task);
        let mut state = self.state();
        state.tasks.retain(|task| !task.is_finished());
        if state.is_dead {
            drop(state);
            task.abort();
        } else {
            state.tasks.push(task.clone());
        }
        task
    }

    /// Binds a socket at a path below the device-plugin directory, and serves a plugin on it.
    ///
    /// # Errors
    /// When a file is at the path, including one that a dead process has left.
    pub fn bind(&self, path: &str, plugin: Arc<dyn Plugin>) -> io::Result<Bound> {
        let listener = Arc::new(Listener::new(plugin));
        let mut state = self.state();
        if state.is_dead {
            return Err(io::Error::other("the process is dead"));
        }
        let inode = self.node.bind(path, &listener)?;
        state.listeners.push(Arc::clone(&listener));
        Ok(Bound { process: self.clone(), path: path.to_owned(), inode, listener })
    }

    /// Kills the process, as `kill -9` does: every task stops at its present wait, every connection
    /// is cut, the files of its sockets stay. A task of the process itself may call this; it stops
    /// at its next wait.
    pub fn kill(&self) {
        Self::kill_state(&self.state);
    }

    pub(super) fn kill_state(state: &Mutex<ProcessState>) {
        let (tasks, listeners) = {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            state.is_dead = true;
            (std::mem::take(&mut state.tasks), std::mem::take(&mut state.listeners))
        };
        tasks.iter().for_each(Task::abort);
        listeners.iter().for_each(|listener| listener.close());
    }

    fn close(&self, listener: &Arc<Listener>) {
        self.state().listeners.retain(|known| !Arc::ptr_eq(known, listener));
    }
}

/// A bound socket of a living process. It listens until it is closed or the process dies; dropping
/// this closes nothing.
#[derive(Debug)]
pub struct Bound {
    process: Process,
    path: String,
    inode: u64,
    listener: Arc<Listener>,
}

impl Bound {
    /// Its path, as Register needs it.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.path
    }

    /// Whether its file is still at its path: the kubelet's clean-up removes those directly in its
    /// directory.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.process.node.inode(&self.path) == Some(self.inode)
    }

    /// Connections that the kubelet has to it.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.listener.open()
    }

    /// Removes its file and stops listening; open connections stay.
    pub fn unbind(&self) {
        if self.is_linked() {
            self.process.node.unlink(&self.path);
        }
    }

    /// Removes its file and cuts its connections.
    pub fn close(self) {
        self.unbind();
        self.listener.close();
        self.process.close(&self.listener);
    }
}
