//! The state of a node in memory: its sockets, checkpoint, cgroups, log folders and CDI devices as
//! tables, and its clocks.

use super::faults::Faults;
use super::sockets::{Listener, Sockets, Transport, latency};
use crate::domain::{
    CgroupState, Checkpoint, CheckpointEntry, KubeletGeneration, Moment, PodName, Timestamp,
};
use crate::lab::sim::executor::Handle;
use crate::lab::sim::kubelet::environment::Snapshot;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use tokio::sync::watch;

/// The wall clock at time 0: 2027-01-15T08:00:00Z.
const EPOCH_MS: u64 = 1_800_000_000_000;
/// The kubelet's registration socket, relative to its device-plugin directory.
pub(super) const KUBELET_SOCKET: &str = "kubelet.sock";

/// `kubelet_internal_checkpoint`.
#[derive(Debug, Default)]
pub(super) enum CheckpointFile {
    #[default]
    Missing,
    Corrupt,
    Written(Snapshot, Timestamp),
}

#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) sockets: Sockets,
    pub(super) checkpoint: CheckpointFile,
    /// By pod UID: whether a process runs in it.
    pub(super) cgroups: BTreeMap<String, bool>,
    pub(super) names: BTreeMap<String, PodName>,
    /// CDI devices that the container runtime finds; with `None` it finds every device.
    pub(super) cdi: Option<BTreeSet<String>>,
    /// The instance that answers Register.
    pub(super) registration: Option<u64>,
    /// The instance that answers the pod-resources API.
    pub(super) pod_resources: Option<u64>,
    /// The connections that the kubelet has dialled in its present instance.
    pub(super) dialled: Vec<Weak<Transport>>,
    pub(super) boots: u64,
}

/// The node's state. It is also the kubelet's environment.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) handle: Handle,
    pub(super) faults: Faults,
    /// How often any flow has reached any hook.
    pub(super) steps: AtomicU64,
    tables: Mutex<Tables>,
    pub(super) kubelet_socket: watch::Sender<Option<KubeletGeneration>>,
    pub(super) checkpoint_writes: watch::Sender<u64>,
    /// A reference to this value, for the connections that it creates.
    pub(super) this: Weak<Memory>,
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

    pub(super) fn tables(&self) -> MutexGuard<'_, Tables> {
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
pub(super) fn clean(path: &str) -> String {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").collect::<Vec<_>>().join("/")
}
