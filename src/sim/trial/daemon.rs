//! The daemon: the cores, and what the actors do around them.

use super::durable::{Disk, Hardware};
use super::service::Service;
use crate::domain::{AllocId, Checkpoint, DeviceClass, DeviceId, Entry, Grant, Inventory, ResourceName, ResourceSpec, Safeguard, Select};
use crate::health::core::{Judge, held};
use crate::kubelet::register::REGISTER_DEADLINE;
use crate::ledger::core::{Agenda, Ledger, Sight, Watchlist, has_dead_holder, next_look, reconcile};
use crate::ledger::observe::KubeletAge;
use crate::registration::core::{Event, Machine, State};
use crate::sim::memory::{Bound, Node, Process, RegisterError, RegisterRequest};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{RwLock, mpsc, watch};

/// The resource that is offered.
pub(super) fn gpu() -> ResourceName {
    "example.com/gpu".parse().unwrap()
}

fn specs() -> Arc<[Arc<ResourceSpec>]> {
    let spec = ResourceSpec { class: DeviceClass::Gpu, select: Select::default(), ..ResourceSpec::orphan(gpu()) };
    Arc::new([Arc::new(spec)])
}

/// A life of the daemon.
#[derive(Debug, Clone)]
pub(super) struct Daemon {
    /// When it was started.
    pub(super) since: Duration,
    pub(super) process: Process,
    pub(super) inner: Arc<Inner>,
}

/// What its tasks share.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) node: Node,
    pub(super) disk: Disk,
    hardware: Hardware,
    process: Process,
    life: u64,
    pub(super) inventory: watch::Sender<Arc<Inventory>>,
    pub(super) events: mpsc::UnboundedSender<Event>,
    pub(super) gate: RwLock<()>,
    /// Allocates under way, as far as the daemon can know.
    pub(super) allocates: AtomicUsize,
    cores: Mutex<Cores>,
}

#[derive(Debug)]
pub(super) struct Cores {
    pub(super) ledger: Ledger,
    pub(super) watchlist: Watchlist,
    pub(super) age: KubeletAge,
    judge: Judge,
    pub(super) machine: Machine,
    sockets: BTreeMap<u64, Socket>,
}

#[derive(Debug)]
struct Socket {
    bound: Bound,
    streams: u32,
    superseded: bool,
}

impl Daemon {
    /// Starts the daemon on what the disk has.
    pub(super) fn start(node: &Node, disk: &Disk, hardware: &Hardware) -> Self {
        let process = node.process();
        let (life, ledger) = {
            let mut journal = disk.lock();
            journal.lives += 1;
            // What is known is what was written, not what an earlier life thought.
            let mut ledger = Ledger::default();
            journal.entries.iter().for_each(|entry| {
                ledger.evolve(entry);
            });
            (journal.lives, ledger)
        };
        for path in node.sockets().into_iter().filter(|path| path.starts_with(".holdfast/")) {
            node.unlink(&path);
        }
        let (events, received) = mpsc::unbounded_channel();
        let judge = Judge::new(specs(), Arc::default(), ledger.listed());
        let cores = Cores {
            ledger,
            watchlist: Watchlist::default(),
            age: KubeletAge::default(),
            judge,
            machine: Machine::new(node.moment().boot, 0),
            sockets: BTreeMap::new(),
        };
        let inner = Arc::new(Inner {
            node: node.clone(),
            disk: disk.clone(),
            hardware: hardware.clone(),
            process: process.clone(),
            life,
            inventory: watch::Sender::default(),
            events,
            gate: RwLock::new(()),
            allocates: AtomicUsize::new(0),
            cores: Mutex::new(cores),
        });
        inner.scan();
        process.spawn(Arc::clone(&inner).watch_hardware());
        process.spawn(Arc::clone(&inner).register(received));
        process.spawn(Arc::clone(&inner).look());
        Daemon { since: node.handle().now(), process, inner }
    }
}

impl Inner {
    pub(super) fn lock(&self) -> MutexGuard<'_, Cores> {
        self.cores.lock().unwrap()
    }

    fn scan(&self) {
        let evidence = self.hardware.scan(&self.node);
        self.lock().judge.discovered(evidence);
        self.judge();
    }

    /// Judges, and publishes what changed. Says when the list may change by itself.
    pub(super) fn judge(&self) -> Option<Duration> {
        let mut cores = self.lock();
        let held = held(cores.ledger.grants().map(AsRef::as_ref));
        let inventory = cores.judge.judge(&held, self.node.moment().boot)?;
        self.inventory.send_if_modified(|published| {
            let changed = **published != *inventory;
            *published = inventory;
            changed
        });
        cores.judge.next_deadline()
    }

    async fn watch_hardware(self: Arc<Self>) {
        let mut changes = self.hardware.0.subscribe();
        loop {
            let deadline = self.judge();
            let wait = deadline.map_or(Duration::from_secs(3600), |deadline| deadline.saturating_sub(self.node.moment().boot));
            tokio::select! {
                biased;
                _ = changes.changed() => self.scan(),
                () = self.node.handle().sleep(wait) => {}
            }
        }
    }

    async fn register(self: Arc<Self>, mut events: mpsc::UnboundedReceiver<Event>) {
        let mut kubelet = self.node.kubelet_socket();
        let first = *kubelet.borrow_and_update();
        let mut attempt = None;
        self.on(Event::Kubelet(first), &mut attempt);
        self.on(Event::Tick, &mut attempt);
        loop {
            let deadline = self.lock().machine.next_deadline();
            let wait = deadline.map_or(Duration::from_secs(3600), |deadline| deadline.saturating_sub(self.node.moment().boot));
            let event = tokio::select! {
                biased;
                Some(event) = events.recv() => event,
                _ = kubelet.changed() => Event::Kubelet(*kubelet.borrow_and_update()),
                () = self.node.handle().sleep(wait) => Event::Tick,
            };
            self.on(event, &mut attempt);
        }
    }

    fn on(self: &Arc<Self>, event: Event, attempt: &mut Option<crate::sim::executor::Task>) {
        let mut cores = self.lock();
        let begin = cores.machine.on(event, self.node.moment().boot);
        if matches!(cores.machine.state(), State::Steady | State::Settling { .. }) {
            let newest = cores.machine.latest();
            cores.retire(newest);
        }
        drop(cores);
        if let Some(number) = begin {
            if let Some(superseded) = attempt.take() {
                superseded.abort();
            }
            *attempt = Some(self.process.spawn(Arc::clone(self).attempt(number)));
        }
    }

    async fn attempt(self: Arc<Self>, number: u64) {
        let event = if self.node.kubelet_socket().borrow().is_none() {
            Event::Absent(number)
        } else {
            let endpoint = self.bind(number);
            let request = RegisterRequest { version: "v1beta1".into(), resource: gpu().to_string(), endpoint, options: None };
            match self.node.handle().timeout(REGISTER_DEADLINE, self.node.register(request)).await {
                Some(Ok(())) => Event::Registered(number),
                Some(Err(RegisterError::Absent(_))) => Event::Absent(number),
                Some(Err(RegisterError::Refused(_))) | None => Event::Refused(number),
            }
        };
        if matches!(event, Event::Absent(_) | Event::Refused(_)) {
            self.lock().retire(number);
        }
        // The process may be dead.
        let _ = self.events.send(event);
    }

    /// A socket for one registration.
    fn bind(self: &Arc<Self>, number: u64) -> String {
        let unique = Safeguard::UniqueSockets.is_on();
        let path = if unique { format!(".holdfast/gpu-{}-{number}.sock", self.life) } else { ".holdfast/gpu.sock".to_owned() };
        let mut cores = self.lock();
        if !unique && let Some((_, socket)) = cores.sockets.pop_last() {
            cores.sockets.insert(number, socket);
            return path;
        }
        let service = Service { inner: Arc::clone(self), number };
        let bound = self.process.bind(&path, Arc::new(service)).unwrap();
        cores.sockets.insert(number, Socket { bound, streams: 0, superseded: false });
        path
    }

    async fn look(self: Arc<Self>) {
        let mut written = self.node.checkpoint_writes();
        loop {
            let dead = self.look_once().await;
            let wait = {
                let cores = self.lock();
                next_look(&cores.ledger, &cores.watchlist, dead)
            };
            tokio::select! {
                biased;
                _ = written.changed() => {}
                () = self.node.handle().sleep(wait) => {}
            }
        }
    }

    async fn look_once(&self) -> bool {
        let now = self.node.moment();
        let (agenda, settled) = {
            let mut cores = self.lock();
            let settled = cores.age.is_settled(*self.node.kubelet_socket().borrow(), now);
            (Agenda::of(&cores.ledger, now.wall), settled)
        };
        let mut observation = self.node.observe(&agenda.pods, settled);
        if agenda.needs_listing(&observation) {
            // Never beside an Allocate (O11).
            let gate = self.gate.try_write();
            if gate.is_ok() {
                self.disk.lock().listed_in_allocate |= self.allocates.load(Ordering::Relaxed) > 0;
                let listing = self.node.handle().timeout(Duration::from_millis(500), self.node.list_pods()).await;
                observation.pods = listing.and_then(Result::ok);
            }
        }
        let (entries, dead) = {
            let mut cores = self.lock();
            let Cores { ledger, watchlist, .. } = &mut *cores;
            (reconcile(watchlist, ledger, &observation, self.node.moment()), has_dead_holder(ledger, &observation))
        };
        self.commit(entries).await;
        dead
    }

    /// Durable, then known.
    pub(super) async fn commit(&self, entries: Vec<Entry>) {
        if entries.is_empty() {
            return;
        }
        self.disk.append(&self.node, entries.clone()).await;
        let mut cores = self.lock();
        entries.iter().for_each(|entry| {
            cores.ledger.evolve(entry);
        });
        drop(cores);
        self.judge();
    }

    pub(super) fn stream_opened(&self, number: u64) {
        if let Some(socket) = self.lock().sockets.get_mut(&number) {
            socket.streams += 1;
        }
        let _ = self.events.send(Event::StreamOpened(number));
    }

    pub(super) fn stream_ended(&self, number: u64) {
        let mut cores = self.lock();
        if let Some(socket) = cores.sockets.get_mut(&number) {
            socket.streams = socket.streams.saturating_sub(1);
        }
        cores.close_unused();
        drop(cores);
        let _ = self.events.send(Event::StreamEnded(number));
    }

    /// The number of the latest registration.
    pub(super) fn latest(&self) -> u64 {
        self.lock().machine.latest()
    }
}

impl Cores {
    fn retire(&mut self, newest: u64) {
        for (_, socket) in self.sockets.range_mut(..newest) {
            socket.superseded = true;
        }
        self.close_unused();
    }

    fn close_unused(&mut self) {
        for (_, socket) in self.sockets.extract_if(.., |_, socket| socket.superseded && socket.streams == 0) {
            socket.bound.close();
        }
    }
}

/// What an Allocate sees of the node.
pub(super) struct Now<'a> {
    pub(super) node: &'a Node,
    pub(super) settled: bool,
    pub(super) checkpoint: Option<Checkpoint>,
}

impl Sight for Now<'_> {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> bool {
        self.node.view(|view| view.holders().iter().any(|holder| holder.pod_uid == uid))
    }

    fn is_checkpointed(&self, alloc_id: &AllocId) -> bool {
        self.checkpoint.iter().flat_map(|checkpoint| &checkpoint.entries).any(|entry| entry.alloc_id.as_ref() == Some(alloc_id))
    }
}

/// The grant of a request.
pub(super) fn grant(inner: &Inner, alloc_id: AllocId, ids: &[DeviceId], edits: crate::domain::ContainerEdits) -> Grant {
    let device = |id: &DeviceId| crate::domain::GrantedDevice { id: id.clone(), key: format!("pci:{id}"), numa_nodes: vec![0] };
    Grant {
        alloc_id,
        resource: gpu(),
        devices: ids.iter().map(device).collect(),
        edits,
        boot_id: inner.node.boot_id(),
        kubelet: *inner.node.kubelet_socket().borrow(),
        granted_at: inner.node.moment().wall,
        version: "1".into(),
        state: crate::domain::GrantState::Granted,
    }
}
