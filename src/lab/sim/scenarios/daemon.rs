//! The daemon: its cores, and the work of the actors around them.

use super::actor::Actor;
use super::auditing::Auditing;
use super::durable::Disk;
use super::hardware::Hardware;
use super::ledger::recovered;
use super::registration::Registration;
use crate::domain::{
    AllocId, Checkpoint, CheckpointGrant, ContainerEdits, DeviceId, Entry, Grant, GrantState,
    Inventory, PodReport, ResourceName, Safeguard,
};
use crate::health::core::{Judge, Rules, held};
use crate::lab::sim::memory::{Node, Process};
use crate::ledger::core::{Agenda, Observed, PodQuery, Sight, next_look, rebuild};
use crate::ledger::observe::KubeletAge;
use crate::registration::core::State;
use crate::serving::RECORDED_WITHIN;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, OwnedRwLockReadGuard, RwLock, watch};

/// An instance of the daemon.
#[derive(Debug, Clone)]
pub(super) struct Daemon {
    /// The time of its start.
    pub(super) since: Duration,
    pub(super) process: Process,
    pub(super) inner: Arc<Inner>,
}

/// The state that its tasks share.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) node: Node,
    pub(super) disk: Disk,
    pub(super) hardware: Hardware,
    pub(super) process: Process,
    pub(super) instance: u64,
    pub(super) inventory: watch::Sender<Arc<Inventory>>,
    pub(super) registrations: BTreeMap<ResourceName, Registration>,
    pub(super) audit: Auditing,
    pub(super) gate: Arc<RwLock<()>>,
    /// Allocates under way, as far as the daemon knows.
    pub(super) allocates: AtomicUsize,
    pub(super) to_commit: Notify,
    /// Hooks may have become due.
    pub(super) to_run: Notify,
    /// Asks for a pass over the kubelet.
    pub(super) to_look: Notify,
    cores: Mutex<Cores>,
}

#[derive(Debug)]
pub(super) struct Cores {
    pub(super) actor: Actor,
    pub(super) age: KubeletAge,
    judge: Judge,
}

/// How often it is checked whether the kubelet has recorded its answers.
const RECORDED_LOOK: Duration = Duration::from_millis(20);

impl Daemon {
    /// Starts the daemon on the state of the disk.
    pub(super) fn start(node: &Node, disk: &Disk, hardware: &Hardware) -> Self {
        let process = node.process();
        let instance = {
            let mut journal = disk.lock();
            journal.instances += 1;
            journal.instances
        };
        let actor = recovered(disk, &hardware.hooks);
        for path in node.sockets().into_iter().filter(|path| path.starts_with(".holdfast/")) {
            node.unlink(&path);
        }
        let (registrations, received): (BTreeMap<_, _>, Vec<_>) = hardware
            .resources()
            .map(|resource| {
                let (registration, received) = Registration::new(node.moment().boot);
                ((resource.clone(), registration), (resource.clone(), received))
            })
            .unzip();
        let rules = Rules { boot_id: node.boot_id(), ..Rules::default() };
        let judge = Judge::new(
            Arc::clone(&hardware.specs),
            Arc::default(),
            actor.ledger().listed(),
            rules,
            actor.ledger().verdicts(),
        );
        let cores = Cores { actor, age: KubeletAge::default(), judge };
        let inner = Arc::new(Inner {
            node: node.clone(),
            disk: disk.clone(),
            hardware: hardware.clone(),
            process: process.clone(),
            instance,
            inventory: watch::Sender::default(),
            registrations,
            audit: Auditing::new(node.moment().boot),
            gate: Arc::default(),
            allocates: AtomicUsize::new(0),
            to_commit: Notify::new(),
            to_run: Notify::new(),
            to_look: Notify::new(),
            cores: Mutex::new(cores),
        });
        inner.scan();
        let granted: Vec<AllocId> = {
            let cores = inner.lock();
            let granted =
                cores.actor.ledger().grants().filter(|grant| grant.state == GrantState::Granted);
            granted.map(|grant| grant.alloc_id.clone()).collect()
        };
        if let Ok(gate) = Arc::clone(&inner.gate).try_read_owned() {
            process.spawn(Arc::clone(&inner).hold_until_recorded(gate, granted));
        }
        process.spawn(Arc::clone(&inner).commit_all());
        process.spawn(Arc::clone(&inner).run_hooks());
        process.spawn(Arc::clone(&inner).follow_kubelet());
        process.spawn(Arc::clone(&inner).watch_hardware());
        for (resource, events) in received {
            process.spawn(Arc::clone(&inner).register(resource, events));
        }
        process.spawn(Arc::clone(&inner).audit());
        process.spawn(Arc::clone(&inner).reconcile_loop());
        process.spawn(Arc::clone(&inner).remember_lists());
        Daemon { since: node.handle().now(), process, inner }
    }

    /// The state of a resource's registration.
    pub(super) fn state(&self, resource: &ResourceName) -> State {
        self.inner.registration(resource).lock().machine.state()
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

    /// Judges, and publishes the result if it changed. Returns when the list may next change
    /// without an event.
    pub(super) fn judge(&self) -> Option<Duration> {
        let mut cores = self.lock();
        let held = held(cores.actor.ledger().grants().map(AsRef::as_ref));
        let due = cores.actor.state.due();
        let inventory = cores.judge.judge(&held, &due.free, self.node.moment().boot)?;
        self.inventory.send_if_modified(|published| {
            let changed = **published != *inventory;
            *published = inventory;
            changed
        });
        let now = self.node.moment().boot;
        [cores.judge.next_deadline(now), cores.judge.next_probe()].into_iter().flatten().min()
    }

    async fn watch_hardware(self: Arc<Self>) {
        let mut changes = self.hardware.present.subscribe();
        loop {
            let deadline = self.judge();
            let wait = deadline.map_or(Duration::from_secs(3600), |deadline| {
                deadline.saturating_sub(self.node.moment().boot)
            });
            tokio::select! {
                biased;
                _ = changes.changed() => self.scan(),
                () = self.node.handle().sleep(wait) => self.scan(),
            }
        }
    }

    /// Lists do not wait for the disk, nor do the verdicts behind them.
    async fn remember_lists(self: Arc<Self>) {
        let mut inventory = self.inventory.subscribe();
        loop {
            let listed = inventory.borrow_and_update().clone();
            let entries = {
                let mut cores = self.lock();
                let judged = cores.judge.take_changed(|_| Vec::new());
                let judged = judged.into_iter().map(|(device, verdict)| Entry::Judged {
                    device,
                    verdict: verdict.map(Box::new),
                });
                cores.actor.ledger().unlisted(&listed).into_iter().chain(judged).collect::<Vec<_>>()
            };
            self.commit(entries).await;
            if inventory.changed().await.is_err() {
                return;
            }
        }
    }

    async fn reconcile_loop(self: Arc<Self>) {
        let mut written = self.node.checkpoint_writes();
        loop {
            self.reconcile_once().await;
            let wait = {
                let cores = self.lock();
                next_look(cores.actor.ledger(), cores.actor.state.watchlist(), self.node.moment())
            };
            tokio::select! {
                biased;
                _ = written.changed() => {}
                () = self.to_look.notified() => {}
                () = self.node.handle().sleep(wait) => {}
            }
        }
    }

    async fn reconcile_once(&self) {
        let now = self.node.moment();
        let (agenda, settled) = {
            let mut cores = self.lock();
            let settled = cores.age.is_settled(*self.node.kubelet_socket().borrow(), now);
            (Agenda::of(cores.actor.ledger(), cores.actor.state.watchlist(), now), settled)
        };
        let mut observation = self.node.observe(&agenda.pods, settled);
        while let Some(query) = agenda.query(&observation) {
            observation.pods = self.ask(query).await;
            if observation.pods == PodReport::Nothing {
                break;
            }
        }
        self.turn().await;
        let is_ours = |resource: &ResourceName| self.registrations.contains_key(resource);
        let seen = self.lock().actor.state.observe(&observation, is_ours, self.node.moment());
        let entries = match seen {
            Observed::Decided(entries, _) => entries,
            Observed::TakeOver(resources) => self.others(&resources),
        };
        self.commit(entries).await;
    }

    /// The grants that another plugin made, from the kubelet's checkpoint. The next pass comes with
    /// its next write.
    fn others(&self, resources: &BTreeSet<ResourceName>) -> Vec<Entry> {
        let Some(checkpoint) = self.node.checkpoint() else { return Vec::new() };
        let others = checkpoint
            .entries()
            .iter()
            .filter(|entry| entry.alloc_id.is_none() && resources.contains(&entry.resource));
        let kept = others.map(|entry| CheckpointGrant {
            alloc_id: entry.grant_id(),
            pod_uid: entry.pod_uid.clone(),
            container: entry.container.clone(),
            resource: entry.resource.clone(),
            devices: entry.device_ids.iter().map(|id| (id.clone(), vec![0])).collect(),
            edits: ContainerEdits::default(),
        });
        // Live and released, and what was released long ago.
        let known = self.disk.granted();
        let grants = rebuild(
            kept.collect(),
            &known,
            self.lock().actor.ledger().names(),
            self.node.moment().wall,
        );
        grants.into_iter().map(|grant| Entry::Grant(Arc::new(grant))).collect()
    }

    async fn ask(&self, query: PodQuery) -> PodReport {
        if let PodQuery::Named(names) = query
            && let Ok(found) = self.node.get_pods(&names).await
        {
            return PodReport::Named(found);
        }
        // Never during an Allocate (O11).
        let Ok(_gate) = self.gate.try_write() else { return PodReport::Nothing };
        let is_early = self.allocates.load(Ordering::Relaxed) > 0 || self.has_unrecorded();
        self.disk.lock().listed_in_allocate |= is_early;
        let listing =
            self.node.handle().timeout(Duration::from_millis(500), self.node.list_pods()).await;
        listing.and_then(Result::ok).map_or(PodReport::Nothing, PodReport::All)
    }

    /// Keeps the pods unlisted until the ledger has the grants bound: the kubelet has recorded its
    /// answers then.
    pub(super) async fn hold_until_recorded(
        self: Arc<Self>,
        gate: OwnedRwLockReadGuard<()>,
        answered: Vec<AllocId>,
    ) {
        let until = self.node.handle().now() + RECORDED_WITHIN;
        let is_granted = |id| {
            self.lock()
                .actor
                .ledger()
                .grant(id)
                .is_some_and(|grant| grant.state == GrantState::Granted)
        };
        let is_over = || self.node.handle().now() >= until;
        while Safeguard::ListAfterRecord.is_on() && answered.iter().any(is_granted) && !is_over() {
            self.node.handle().sleep(RECORDED_LOOK).await;
        }
        drop(gate);
    }

    /// Whether the present kubelet has not recorded one of the last answers yet. A listing would
    /// make it forget the devices.
    fn has_unrecorded(&self) -> bool {
        let (now, kubelet) = (self.node.moment().wall, *self.node.kubelet_socket().borrow());
        let cores = self.lock();
        let answered = cores.actor.ledger().grants().filter(|grant| {
            let age = Duration::from_millis(now.0.saturating_sub(grant.granted_at.0));
            grant.state == GrantState::Granted && grant.kubelet == kubelet && age < RECORDED_WITHIN
        });
        let answered: Vec<_> = answered.map(|grant| grant.alloc_id.clone()).collect();
        self.node.view(|view| answered.iter().any(|answer| !view.has_recorded(answer)))
    }
}

/// The evidence of the node that an Allocate reads.
pub(super) struct NodeEvidence<'a> {
    pub(super) node: &'a Node,
    pub(super) settled: bool,
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
}

impl Sight for NodeEvidence<'_> {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> Result<bool, String> {
        Ok(self.node.view(|view| view.holders().iter().any(|holder| holder.pod_uid == uid)))
    }

    /// Here every container's cgroup can be read.
    fn is_listed(&self, _: &AllocId) -> bool {
        false
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_deref()
    }
}

/// The grant of a request.
pub(super) fn grant(
    inner: &Inner,
    resource: &ResourceName,
    alloc_id: AllocId,
    ids: &[DeviceId],
    edits: ContainerEdits,
) -> Grant {
    let device = |id: &DeviceId| crate::domain::GrantedDevice {
        id: id.clone(),
        key: format!("pci:{id}"),
        numa_nodes: vec![0],
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Grant {
        alloc_id,
        resource: resource.clone(),
        devices: ids.iter().map(device).collect(),
        edits,
        claim: None,
        boot_id: inner.node.boot_id(),
        kubelet: *inner.node.kubelet_socket().borrow(),
        granted_at: inner.node.moment().wall,
        version: "1".into(),
        state: GrantState::Granted,
    }
}
