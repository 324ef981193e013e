//! The node in memory: its parts, and the calls and reads of a daemon on it.

use super::faults::Faults;
use super::node_state::Memory;
use super::plugin::RegisterRequest;
use super::process::{Process, ProcessState};
use super::sockets::{Listener, latency};
use crate::domain::{
    CgroupState, Checkpoint, KubeletGeneration, Moment, Observation, PodName, PodReport,
};
use crate::kubelet::register::RegisterError;
use crate::lab::sim::executor::{Executor, Handle};
use crate::lab::sim::kubelet::registration::{self, Register};
use crate::lab::sim::kubelet::state::Shared;
use crate::lab::sim::kubelet::{Behaviour, View};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tonic::Status;

/// A node and the executor that it runs on. Dropping it ends everything on it.
#[derive(Debug)]
pub struct Simulation {
    executor: Executor,
    node: Node,
}

impl Drop for Simulation {
    fn drop(&mut self) {
        // Breaks the cycle: plugins hold the node and the node holds plugins.
        self.node.kill_kubelet();
        self.node.kill_processes();
    }
}

impl Simulation {
    /// A node whose kubelet has not been started.
    #[must_use]
    pub fn new(seed: u64, behaviour: Behaviour, faults: Faults) -> Self {
        let executor = Executor::new(seed);
        let memory = Memory::new(executor.handle(), faults);
        let shared = Arc::new(Shared::new(behaviour, Arc::clone(&memory) as Arc<_>));
        Simulation {
            executor,
            node: Node(Arc::new(Inner { memory, shared, processes: Mutex::default() })),
        }
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> Node {
        self.node.clone()
    }

    /// Runs everything that happens until a time.
    pub fn run_to(&mut self, time: Duration) {
        self.executor.run_to(time);
    }

    /// Runs everything that happens within `time` from now.
    pub fn run_for(&mut self, time: Duration) {
        self.executor.run_to(self.executor.handle().now() + time);
    }

    /// Runs until the view satisfies `seen`, checked after every step, for at most `within`.
    /// Returns whether it does.
    pub fn run_until(&mut self, within: Duration, mut seen: impl FnMut(&View<'_>) -> bool) -> bool {
        let node = self.node.clone();
        let limit = self.executor.handle().now() + within;
        self.executor.run_until(limit, || node.view(&mut seen))
    }

    /// Runs a future to its end, for at most `within`. `None` if it did not end.
    pub fn run<T: Send + 'static>(
        &mut self,
        within: Duration,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.executor.run(within, future)
    }
}

/// A node: its kubelet, its files, its processes. Cheap to clone; clones are the same node.
#[derive(Debug, Clone)]
pub struct Node(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Arc<Memory>,
    shared: Arc<Shared>,
    processes: Mutex<Vec<Weak<Mutex<ProcessState>>>>,
}

impl Node {
    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0.shared
    }

    /// Time, random numbers and tasks.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.0.memory.handle
    }

    /// The present time, on both clocks. The clock since boot continues across a reboot here: it is
    /// the simulation's clock.
    #[must_use]
    pub fn moment(&self) -> Moment {
        self.0.memory.moment()
    }

    /// `/proc/sys/kernel/random/boot_id`.
    #[must_use]
    pub fn boot_id(&self) -> String {
        self.0.memory.boot_id()
    }

    /// A new process.
    #[must_use]
    pub fn process(&self) -> Process {
        let (process, state) = Process::new(self.clone());
        let mut processes = self.0.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.retain(|known| known.strong_count() > 0);
        processes.push(state);
        process
    }

    /// Kills every process but the kubelet.
    pub fn kill_processes(&self) {
        let processes =
            std::mem::take(&mut *self.0.processes.lock().unwrap_or_else(PoisonError::into_inner));
        processes.iter().filter_map(Weak::upgrade).for_each(|state| Process::kill_state(&state));
    }

    pub(super) fn bind(&self, path: &str, listener: &Arc<Listener>) -> io::Result<u64> {
        self.0.memory.bind(path, listener)
    }

    /// The inode of the socket at a path below the device-plugin directory, even if nothing listens
    /// on it.
    #[must_use]
    pub fn inode(&self, path: &str) -> Option<u64> {
        self.0.memory.inode(path)
    }

    /// Removes the file of a socket. Returns whether there was one.
    pub fn unlink(&self, path: &str) -> bool {
        self.0.memory.unlink(path)
    }

    /// The paths of all sockets below the device-plugin directory.
    #[must_use]
    pub fn sockets(&self) -> Vec<String> {
        self.0.memory.paths()
    }

    /// `kubelet.sock`: its identity each time that it is created, `None` when it is removed. A
    /// killed kubelet leaves the file.
    #[must_use]
    pub fn kubelet_socket(&self) -> watch::Receiver<Option<KubeletGeneration>> {
        self.0.memory.kubelet_socket.subscribe()
    }

    /// Changes each time that the kubelet has written its checkpoint, as inotify reports it.
    #[must_use]
    pub fn checkpoint_writes(&self) -> watch::Receiver<u64> {
        self.0.memory.checkpoint_writes.subscribe()
    }

    /// Registers a plugin. Dropping the future gives up waiting, like a deadline that the call
    /// carries.
    ///
    /// # Errors
    /// [`RegisterError::Absent`] when no kubelet listens, or it dies before it answers;
    /// [`RegisterError::Refused`] with the kubelet's text.
    pub async fn register(&self, request: RegisterRequest) -> Result<(), RegisterError> {
        let Inner { memory, shared, .. } = &*self.0;
        memory.handle.sleep(latency(&memory.handle)).await;
        let instance =
            memory.registration().map_err(|error| RegisterError::Absent(error.to_owned()))?;
        let RegisterRequest { version, resource, endpoint, options } = request;
        let result = registration::register(
            shared,
            instance,
            Register { version, resource, endpoint, options },
        )
        .await;
        memory.handle.sleep(latency(&memory.handle)).await;
        if memory.registration() != Ok(instance) {
            return Err(RegisterError::Absent("it closed the connection".to_owned()));
        }
        result.map_err(|text| RegisterError::Refused(Box::new(Status::unknown(text))))
    }

    /// `kubelet_internal_checkpoint`; `None` when it is missing or cannot be read.
    #[must_use]
    pub fn checkpoint(&self) -> Option<Arc<Checkpoint>> {
        self.0.memory.checkpoint()
    }

    /// Names by pod UID, from the log folders.
    #[must_use]
    pub fn names(&self) -> BTreeMap<String, PodName> {
        self.0.memory.names()
    }

    /// The state of a pod's cgroup.
    #[must_use]
    pub fn cgroup(&self, uid: &str) -> CgroupState {
        self.0.memory.cgroup(uid)
    }

    /// Reads the kubelet's files once, without its listing. The cgroups are those of `pods` and of
    /// every pod that has a log folder.
    #[must_use]
    pub fn observe(&self, pods: &BTreeSet<String>, kubelet_settled: bool) -> Observation {
        let names = self.names();
        let uids = pods.iter().chain(names.keys());
        let cgroups = uids.map(|uid| (uid.clone(), self.cgroup(uid))).collect();
        let (boot_id, kubelet) = (self.boot_id(), *self.kubelet_socket().borrow());
        Observation {
            boot_id,
            kubelet,
            kubelet_settled,
            checkpoint: self.checkpoint(),
            pods: PodReport::Nothing,
            names,
            cgroups,
            claims: Arc::default(),
        }
    }

    /// Sets the CDI devices that the container runtime finds; initially it finds every device.
    pub fn set_cdi(&self, names: BTreeSet<String>) {
        self.0.memory.set_cdi(Some(names));
    }
}
