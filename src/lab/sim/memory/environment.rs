//! The environment of a kubelet in memory: an executor's time and random numbers, and the node's
//! files as tables.

use super::connection::MemoryConnection;
use super::faults::Faults;
use super::sockets::{Listener, Sockets, Transport, latency};
use crate::domain::{
    CgroupState, Checkpoint, CheckpointEntry, KubeletGeneration, Moment, PodName, Timestamp,
};
use crate::lab::sim::executor::{Handle, Task};
use crate::lab::sim::kubelet::environment::{Connection, Environment, Snapshot, Stop};
use crate::lab::sim::kubelet::state::Shared;
use crate::lab::sim::kubelet::{Hook, PodSpec, Verdict};
use futures_util::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::watch;

/// The wall clock at time 0: 2027-01-15T08:00:00Z.
const EPOCH_MS: u64 = 1_800_000_000_000;
/// The kubelet's registration socket, relative to its device-plugin directory.
const KUBELET_SOCKET: &str = "kubelet.sock";
/// How long the log folder of a pod outlives it.
const LOGS_KEPT: Duration = Duration::from_secs(5);
/// The longest time from the bind of `kubelet.sock`, which watchers see, to its listen.
const LISTEN_GAP: Duration = Duration::from_micros(200);
/// The longest time between two removals of the kubelet's clean-up.
const CLEAN_UP: Duration = Duration::from_micros(500);

/// `kubelet_internal_checkpoint`.
#[derive(Debug, Default)]
enum CheckpointFile {
    #[default]
    Missing,
    Corrupt,
    Written(Snapshot, Timestamp),
}

#[derive(Debug, Default)]
struct Tables {
    sockets: Sockets,
    checkpoint: CheckpointFile,
    /// By pod UID: whether a process runs in it.
    cgroups: BTreeMap<String, bool>,
    names: BTreeMap<String, PodName>,
    /// CDI devices that the container runtime finds; with `None` it finds every device.
    cdi: Option<BTreeSet<String>>,
    /// The instance that answers Register.
    registration: Option<u64>,
    /// The instance that answers the pod-resources API.
    pod_resources: Option<u64>,
    /// The connections that the kubelet has dialled in its present instance.
    dialled: Vec<Weak<Transport>>,
    boots: u64,
}

/// The node's state, and the kubelet's environment.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) handle: Handle,
    faults: Faults,
    /// How often any flow has reached any hook.
    steps: AtomicU64,
    tables: Mutex<Tables>,
    pub(super) kubelet_socket: watch::Sender<Option<KubeletGeneration>>,
    pub(super) checkpoint_writes: watch::Sender<u64>,
    /// A reference to this value, for the connections that it creates.
    this: Weak<Memory>,
}

impl Memory {
    pub(super) fn new(handle: Handle, faults: Faults) -> Arc<Self> {
        let (kubelet_socket, _) = watch::channel(None);
        Arc::new_cyclic(|this| Memory {
            handle,
            faults,
            steps: AtomicU64::new(0),
            tables: Mutex::default(),
            kubelet_socket,
            checkpoint_writes: watch::Sender::default(),
            this: Weak::clone(this),
        })
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn moment(&self) -> Moment {
        let boot = self.handle.now();
        Moment {
            boot,
            wall: Timestamp(EPOCH_MS + u64::try_from(boot.as_millis()).unwrap_or_default()),
        }
    }

    pub(super) fn boot_id(&self) -> String {
        format!("boot-{}", self.tables().boots)
    }

    pub(super) fn bind(&self, path: &str, listener: &Arc<Listener>) -> io::Result<u64> {
        self.tables().sockets.bind(&clean(path), Arc::downgrade(listener))
    }

    pub(super) fn unlink(&self, path: &str) -> bool {
        self.tables().sockets.unlink(&clean(path))
    }

    pub(super) fn inode(&self, path: &str) -> Option<u64> {
        self.tables().sockets.inode(&clean(path))
    }

    pub(super) fn paths(&self) -> Vec<String> {
        self.tables().sockets.paths()
    }

    /// Connects to a plugin without delay; `None` if none listens.
    pub(super) fn connect(&self, path: &str) -> Option<Arc<Transport>> {
        let mut tables = self.tables();
        let transport = tables.sockets.dial(path)?;
        tables.dialled.retain(|known| known.strong_count() > 0);
        tables.dialled.push(Arc::downgrade(&transport));
        Some(transport)
    }

    /// Cuts a connection from the kubelet's side: the plugin's side learns of it a little later.
    pub(super) fn cut_soon(&self, transport: Arc<Transport>) {
        let handle = self.handle.clone();
        self.handle.spawn(async move {
            handle.sleep(latency(&handle)).await;
            transport.cut();
        });
    }

    /// The instance that answers Register; without one, an error as the system words it.
    pub(super) fn registration(&self) -> Result<u64, &'static str> {
        let tables = self.tables();
        let refused = || {
            if tables.sockets.inode(KUBELET_SOCKET).is_some() {
                "Connection refused"
            } else {
                "No such file or directory"
            }
        };
        tables.registration.ok_or_else(refused)
    }

    pub(super) fn pod_resources(&self) -> Option<u64> {
        self.tables().pod_resources
    }

    /// The checkpoint as a reader parses it.
    pub(super) fn checkpoint(&self) -> Option<Arc<Checkpoint>> {
        let tables = self.tables();
        let CheckpointFile::Written(snapshot, written_at) = &tables.checkpoint else { return None };
        let entries =
            snapshot.held.iter().map(|(pod_uid, container, resource, held)| CheckpointEntry {
                pod_uid: pod_uid.to_owned(),
                container: container.to_owned(),
                resource: resource.clone(),
                device_ids: held.ids(),
                alloc_id: held.alloc_id(),
            });
        Some(Arc::new(Checkpoint::new(entries.collect(), *written_at)))
    }

    pub(super) fn delete_checkpoint(&self) {
        self.tables().checkpoint = CheckpointFile::Missing;
    }

    pub(super) fn corrupt_checkpoint(&self) {
        self.tables().checkpoint = CheckpointFile::Corrupt;
    }

    pub(super) fn names(&self) -> BTreeMap<String, PodName> {
        self.tables().names.clone()
    }

    pub(super) fn cgroup(&self, uid: &str) -> CgroupState {
        match self.tables().cgroups.get(uid) {
            Some(true) => CgroupState::Populated,
            Some(false) => CgroupState::Empty,
            None => CgroupState::Absent,
        }
    }

    /// The containers of a pod have ended; its cgroup still exists.
    pub(super) fn empty_cgroup(&self, uid: &str) {
        if let Some(populated) = self.tables().cgroups.get_mut(uid) {
            *populated = false;
        }
    }

    pub(super) fn remove_pod_cgroup(&self, uid: &str) {
        self.tables().cgroups.remove(uid);
    }

    pub(super) fn set_cdi(&self, names: Option<BTreeSet<String>>) {
        self.tables().cdi = names;
    }

    /// Applies a reboot to the files: the disk stays; cgroups, listening sockets and CDI devices
    /// are removed.
    pub(super) fn reboot(&self) {
        let mut tables = self.tables();
        tables.boots += 1;
        tables.cgroups.clear();
        if let Some(cdi) = &mut tables.cdi {
            cdi.clear();
        }
    }
}

/// The relevant part of `filepath.Join`: an absolute path is below the directory too.
fn clean(path: &str) -> String {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/")
}

impl Stop for Task {
    fn stop(&self) {
        self.abort();
    }

    fn is_over(&self) -> bool {
        self.is_finished()
    }
}

impl Environment for Memory {
    fn now(&self) -> Duration {
        self.handle.now()
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        Box::pin(self.handle.sleep(time))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Box<dyn Stop> {
        Box::new(self.handle.spawn(task))
    }

    fn below(&self, count: usize) -> usize {
        self.handle.random(|random| random.below(count))
    }

    fn hook(&self, hook: Hook) -> Option<BoxFuture<'static, Verdict>> {
        let now = self.handle.now();
        let nth = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let decision = self.handle.random(|random| self.faults.decide(nth, hook, now, random))?;
        let handle = self.handle.clone();
        Some(Box::pin(async move {
            handle.pass().await;
            handle.sleep(decision.wait).await;
            decision.verdict
        }))
    }

    fn dial(&self, _client: u64, socket: &str) -> BoxFuture<'static, Arc<dyn Connection>> {
        let (this, handle, path) = (Weak::clone(&self.this), self.handle.clone(), clean(socket));
        Box::pin(async move {
            // grpc-go's backoff: 1 s, 1.6 times longer each time, plus or minus 20 %.
            let mut pause = Duration::from_secs(1);
            loop {
                handle.sleep(latency(&handle)).await;
                if let Some(memory) = this.upgrade()
                    && let Some(transport) = memory.connect(&path)
                {
                    return Arc::new(MemoryConnection::new(memory, path, transport))
                        as Arc<dyn Connection>;
                }
                let jitter =
                    handle.random(|random| random.between(pause.mul_f64(0.8), pause.mul_f64(1.2)));
                handle.sleep(jitter).await;
                pause = pause.mul_f64(1.6);
            }
        })
    }

    fn prepare(&self) -> io::Result<()> {
        self.tables().dialled.clear();
        Ok(())
    }

    fn serve_pod_resources(&self, _shared: &Arc<Shared>, instance: u64) -> io::Result<()> {
        self.tables().pod_resources = Some(instance);
        Ok(())
    }

    /// One snapshot, in random order as in a directory.
    fn stale_sockets(&self) -> io::Result<Vec<String>> {
        let mut paths: Vec<String> =
            self.paths().into_iter().filter(|path| !path.contains('/')).collect();
        self.handle.random(|random| {
            for end in (1..paths.len()).rev() {
                paths.swap(end, random.below(end + 1));
            }
        });
        Ok(paths)
    }

    fn remove_socket(&self, name: &str) -> BoxFuture<'static, io::Result<()>> {
        self.unlink(name);
        if name == KUBELET_SOCKET {
            self.kubelet_socket.send_replace(None);
        }
        let wait = self.handle.random(|random| random.between(Duration::ZERO, CLEAN_UP));
        let sleep = self.handle.sleep(wait);
        Box::pin(async move {
            sleep.await;
            Ok(())
        })
    }

    fn serve_registration(&self, _shared: &Arc<Shared>, instance: u64) -> io::Result<()> {
        let mut tables = self.tables();
        let inode = tables.sockets.bind(KUBELET_SOCKET, Weak::new())?;
        drop(tables);
        let (this, handle) = (Weak::clone(&self.this), self.handle.clone());
        let gap = handle.random(|random| random.between(Duration::ZERO, LISTEN_GAP));
        self.handle.spawn(async move {
            handle.sleep(gap).await;
            if let Some(memory) = this.upgrade() {
                let mut tables = memory.tables();
                // Unless it was killed before it listened.
                if tables.pod_resources == Some(instance) {
                    tables.registration = Some(instance);
                }
            }
        });
        let wall = i64::try_from(self.moment().wall.0).unwrap_or_default();
        self.kubelet_socket
            .send_replace(Some(KubeletGeneration { inode, made_ns: wall * 1_000_000 }));
        Ok(())
    }

    fn cut(&self) {
        let dialled = {
            let mut tables = self.tables();
            (tables.registration, tables.pod_resources) = (None, None);
            std::mem::take(&mut tables.dialled)
        };
        dialled.iter().filter_map(Weak::upgrade).for_each(|transport| self.cut_soon(transport));
    }

    fn read_checkpoint(&self) -> Result<Option<Snapshot>, String> {
        match &self.tables().checkpoint {
            CheckpointFile::Missing => Ok(None),
            CheckpointFile::Corrupt => Err("checkpoint is corrupted".to_owned()),
            CheckpointFile::Written(snapshot, _) => Ok(Some(snapshot.clone())),
        }
    }

    fn write_checkpoint(&self, snapshot: Snapshot) -> Result<(), String> {
        let wall = self.moment().wall;
        self.tables().checkpoint = CheckpointFile::Written(snapshot, wall);
        self.checkpoint_writes.send_modify(|writes| *writes += 1);
        Ok(())
    }

    fn create_pod(&self, spec: &PodSpec) -> io::Result<()> {
        self.tables().cgroups.insert(spec.uid.clone(), true);
        Ok(())
    }

    fn create_container(&self, spec: &PodSpec, _container: &str) -> io::Result<()> {
        let name = PodName { namespace: spec.namespace.clone(), name: spec.name.clone() };
        self.tables().names.insert(spec.uid.clone(), name);
        Ok(())
    }

    fn remove_cgroup(&self, uid: &str) -> io::Result<()> {
        self.remove_pod_cgroup(uid);
        Ok(())
    }

    fn remove_logs(&self, spec: &PodSpec) -> io::Result<()> {
        let (this, handle, uid) = (Weak::clone(&self.this), self.handle.clone(), spec.uid.clone());
        let wait = self.handle.random(|random| random.between(Duration::ZERO, LOGS_KEPT));
        self.handle.spawn(async move {
            handle.sleep(wait).await;
            if let Some(memory) = this.upgrade() {
                memory.tables().names.remove(&uid);
            }
        });
        Ok(())
    }

    fn resolves(&self, cdi_name: &str) -> bool {
        self.tables().cdi.as_ref().is_none_or(|known| known.contains(cdi_name))
    }
}
