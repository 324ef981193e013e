//! The world of a run: the machine, the control plane, the processes, and the crashes.

use super::cluster::Cluster;
use super::daemon::Daemon;
use super::kubelet::{Habits, Kubelet};
use super::machine::Machine;
use super::oracles::Oracles;
use crate::domain::{DeviceClass, DeviceId, DraName, Moment, ResourceName, Timestamp};
use crate::lab::sim::executor::{Handle, Task};
use crate::lab::sim::random::Random;
use crate::slices::names::{Family, NodeName, device_name};
use std::cell::Cell;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);
/// The wall clock at time 0: 2027-01-15T08:00:00Z.
const EPOCH_MS: u64 = 1_800_000_000_000;

/// The devices of one resource for claims.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) resource: &'static str,
    pub(super) class: DeviceClass,
    pub(super) prefix: &'static str,
    pub(super) count: u32,
    /// Whether these are the shares of one device, of whose capacity claims have parts.
    pub(super) is_divided: bool,
}

const fn pool(resource: &'static str, class: DeviceClass, prefix: &'static str, n: u32) -> Pool {
    Pool { resource, class, prefix, count: n, is_divided: matches!(class, DeviceClass::Fpga) }
}

const POOLS: [Pool; 3] = [
    pool("example.com/gpu", DeviceClass::Gpu, "GPU", 4),
    pool("example.com/nic", DeviceClass::Nic, "NIC", 2),
    pool("example.com/fpga", DeviceClass::Fpga, "FPGA", 3),
];

thread_local! {
    static HAS_PARTS: Cell<bool> = const { Cell::new(false) };
}

/// Whether claims have parts of a device in this run. A run has one thread.
pub(super) fn has_parts() -> bool {
    HAS_PARTS.get()
}

/// Sets it, for this run.
pub(super) fn with_parts(has_parts: bool) {
    HAS_PARTS.set(has_parts);
}

/// The devices of the node, by their resources.
pub(super) fn pools() -> impl Iterator<Item = &'static Pool> {
    POOLS.iter().filter(|pool| !pool.is_divided || has_parts())
}

/// The name of a device in its slice. Claims do not see the shares of a divided one.
pub(super) fn slice_name_of(id: &DeviceId, class: DeviceClass) -> DraName {
    name_of(&id.shared().unwrap_or_else(|| id.clone()), class)
}

/// The resource that offers the GPUs by number too.
pub(super) fn by_number() -> ResourceName {
    "example.com/number".parse().unwrap()
}

pub(super) fn node_name() -> NodeName {
    NodeName::new("n1").unwrap()
}

/// The name of a device in the DRA API.
pub(super) fn name_of(id: &DeviceId, class: DeviceClass) -> DraName {
    let family = Family::of(class).unwrap();
    DraName { pool: node_name().pool(family), device: device_name(id) }
}

/// A step of the daemon: it may die between any two of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    PrepareAsked,
    /// The API server has answered.
    Read,
    /// The ledger has the request.
    Requested,
    /// A commit is in the page cache.
    Written,
    /// A commit is on the disk, and the ledger does not have it yet.
    Synced,
    /// The claim is recorded, and has no file yet.
    Recorded,
    /// The file is written, and nothing is answered yet.
    Filed,
    PrepareAnswered,
    UnprepareAsked,
    /// The release is recorded, and the file still exists.
    Released,
    /// The file is removed, and nothing is answered yet.
    Removed,
    UnprepareAnswered,
}

impl Step {
    pub(super) const ALL: [Step; 12] = [
        Step::PrepareAsked,
        Step::Read,
        Step::Requested,
        Step::Written,
        Step::Synced,
        Step::Recorded,
        Step::Filed,
        Step::PrepareAnswered,
        Step::UnprepareAsked,
        Step::Released,
        Step::Removed,
        Step::UnprepareAnswered,
    ];
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Crash {
    /// `kill -9` of the daemon.
    Kill,
    PowerCut,
}

/// The tasks of a process, which end together.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    is_dead: bool,
    tasks: Vec<Task>,
}

impl Tasks {
    /// Adds a task. That of a dead process never runs.
    pub(super) fn add(&mut self, task: &Task) {
        self.tasks.retain(|task| !task.is_finished());
        if self.is_dead { task.abort() } else { self.tasks.push(task.clone()) }
    }

    /// Marks the process as dead. Returns its tasks, to be aborted without a lock.
    pub(super) fn take(&mut self) -> Vec<Task> {
        self.is_dead = true;
        std::mem::take(&mut self.tasks)
    }
}

pub(super) struct World {
    pub(super) handle: Handle,
    machine: Mutex<Machine>,
    cluster: Mutex<Cluster>,
    oracles: Mutex<Oracles>,
    daemon: Mutex<Option<Arc<Daemon>>>,
    kubelet: Mutex<Option<Arc<Kubelet>>>,
    /// What the next daemon to reach the step does.
    armed: Mutex<Option<(Step, Crash)>>,
    log: Mutex<Vec<String>>,
    pub(super) habits: Habits,
    /// Kubelets that have registered the driver.
    pub(super) kubelets: watch::Sender<u64>,
    /// Changes of the slices.
    pub(super) slices: watch::Sender<u64>,
    /// Changes of the kubelet's file of claims.
    pub(super) records: watch::Sender<u64>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").finish_non_exhaustive()
    }
}

impl World {
    pub(super) fn new(handle: Handle, habits: Habits) -> Arc<Self> {
        Arc::new(World {
            handle,
            machine: Mutex::new(Machine::new()),
            cluster: Mutex::default(),
            oracles: Mutex::default(),
            daemon: Mutex::default(),
            kubelet: Mutex::default(),
            armed: Mutex::default(),
            log: Mutex::default(),
            habits,
            kubelets: watch::Sender::default(),
            slices: watch::Sender::default(),
            records: watch::Sender::default(),
        })
    }

    pub(super) fn machine(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap()
    }

    pub(super) fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().unwrap()
    }

    pub(super) fn oracles(&self) -> MutexGuard<'_, Oracles> {
        self.oracles.lock().unwrap()
    }

    pub(super) fn daemon(&self) -> Option<Arc<Daemon>> {
        self.daemon.lock().unwrap().clone()
    }

    pub(super) fn kubelet(&self) -> Option<Arc<Kubelet>> {
        self.kubelet.lock().unwrap().clone()
    }

    pub(super) fn log(&self, line: impl fmt::Display) {
        self.log.lock().unwrap().push(format!("{:?} {line}", self.handle.now()));
    }

    pub(super) fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.lock().unwrap())
    }

    pub(super) fn moment(&self) -> Moment {
        let boot = self.handle.now();
        let wall = EPOCH_MS + u64::try_from(boot.as_millis()).unwrap();
        Moment { boot, wall: Timestamp(wall) }
    }

    pub(super) fn random<R>(&self, draw: impl FnOnce(&mut Random) -> R) -> R {
        self.handle.random(draw)
    }

    /// Waits for a random time.
    pub(super) async fn pause(&self, least: Duration, most: Duration) {
        let time = self.random(|random| random.between(least, most));
        self.handle.sleep(time).await;
    }

    pub(super) fn arm(&self, step: Option<(Step, Crash)>) {
        *self.armed.lock().unwrap() = step;
    }

    /// The daemon reaches a step, and may die there.
    pub(super) async fn step(self: &Arc<Self>, step: Step) {
        self.handle.pass().await;
        let armed = self.armed.lock().unwrap().take_if(|(at, _)| *at == step);
        if let Some((_, crash)) = armed {
            *self.oracles().crashes.entry((step, crash)).or_default() += 1;
            self.log(format_args!("{crash:?} at {step:?}"));
            let world = Arc::clone(self);
            self.handle.spawn(async move { world.crash(crash).await });
            std::future::pending::<()>().await;
        }
    }

    /// Kills the daemon, or everything, and starts it again.
    pub(super) async fn crash(self: &Arc<Self>, crash: Crash) {
        match crash {
            Crash::Kill => {
                self.kill_daemon();
                self.pause(Duration::ZERO, 2 * SECOND).await;
                self.start_daemon();
            }
            Crash::PowerCut => self.boot(true).await,
        }
    }

    /// Boots the machine, after a power cut or an orderly stop of all processes.
    pub(super) async fn boot(self: &Arc<Self>, is_cut: bool) {
        self.kill_daemon();
        self.kill_kubelet();
        {
            let mut machine = self.machine();
            if is_cut {
                self.random(|random| machine.cut_power(random));
            } else {
                machine.sync_entries();
                machine.reboot();
            }
        }
        self.pause(SECOND, 5 * SECOND).await;
        if self.random(|random| random.chance(0.5)) {
            self.start_daemon();
            self.pause(Duration::ZERO, SECOND).await;
            self.start_kubelet();
        } else {
            self.start_kubelet();
            self.pause(Duration::ZERO, SECOND).await;
            self.start_daemon();
        }
    }

    pub(super) fn kill_daemon(&self) {
        let daemon = self.daemon.lock().unwrap().take();
        if let Some(daemon) = daemon {
            self.log("the daemon is killed");
            daemon.kill();
        }
    }

    /// Starts the daemon if none runs.
    pub(super) fn start_daemon(self: &Arc<Self>) {
        if self.daemon().is_none() {
            self.log("the daemon starts");
            let daemon = Daemon::start(self);
            *self.daemon.lock().unwrap() = Some(daemon);
        }
    }

    pub(super) fn kill_kubelet(&self) {
        let kubelet = self.kubelet.lock().unwrap().take();
        if let Some(kubelet) = kubelet {
            self.log("the kubelet is killed");
            kubelet.kill();
        }
    }

    /// Starts the kubelet if none runs.
    pub(super) fn start_kubelet(self: &Arc<Self>) {
        if self.kubelet().is_none() {
            self.log("the kubelet starts");
            let kubelet = Kubelet::start(self);
            *self.kubelet.lock().unwrap() = Some(kubelet);
        }
    }
}
