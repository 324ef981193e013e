//! The ledger of a daemon: what its actor does around the cores.

mod looks;
mod record;

use super::super::actor::{Actor, Reply, answer};
use super::daemon::edits;
use super::machine::devices;
use super::world::{MS, Step, Tasks, World, by_number, name_of};
use crate::domain::{
    AllocId, ClaimHold, ClaimLook, ClaimRef, ContainerEdits, DeviceId, DraName, Entry, Grant,
    GrantState, GrantedDevice, KubeletClaims, NamedDevice, Object, Safeguard,
};
use crate::lab::sim::executor::Task;
use crate::ledger::core::{Ledger, LedgerState, Recording, is_one_claim, restore_claims};
use crate::ledger::observe::KubeletAge;
use crate::serving::claims::{
    ClaimFiles, ClaimLedger, DecidedClaim, DecidedHold, NotRecorded, RecordedClaim,
};
use crate::tasks::dra::live_claims;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, oneshot, watch};

/// The ledger of one instance of the daemon.
pub(super) struct LedgerShell {
    pub(super) world: Arc<World>,
    pub(super) tasks: Mutex<Tasks>,
    cores: Mutex<Cores>,
    /// The published grants.
    pub(super) snapshot: watch::Sender<Arc<Vec<Arc<Grant>>>>,
    pub(super) files: ClaimFiles,
    to_commit: Notify,
    to_look: Notify,
}

#[derive(Debug)]
struct Cores {
    actor: Actor,
    age: KubeletAge,
    looks: BTreeMap<String, ClaimLook>,
    /// The last read of the kubelet's file, with the pods that the ledger lacks.
    record: KubeletClaims,
}

impl Cores {
    fn new(ledger: Ledger) -> Self {
        Cores {
            actor: Actor::new(LedgerState::new(ledger, Arc::default())),
            age: KubeletAge::default(),
            looks: BTreeMap::new(),
            record: KubeletClaims::default(),
        }
    }
}

impl std::fmt::Debug for LedgerShell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LedgerShell").finish_non_exhaustive()
    }
}

impl LedgerShell {
    pub(super) fn start(world: &Arc<World>, files: ClaimFiles) -> Arc<Self> {
        restore(world);
        let ledger = world.machine().read_ledger();
        let grants: Vec<Arc<Grant>> = ledger.grants().cloned().collect();
        // The folder is empty after a boot, and the kubelet may start containers at once.
        files.keep(live_claims(&grants)).unwrap();
        let shell = Arc::new(LedgerShell {
            world: Arc::clone(world),
            tasks: Mutex::default(),
            cores: Mutex::new(Cores::new(ledger)),
            snapshot: watch::Sender::new(Arc::new(grants)),
            files,
            to_commit: Notify::new(),
            to_look: Notify::new(),
        });
        shell.spawn(Arc::clone(&shell).commit_all());
        shell.spawn(Arc::clone(&shell).reconcile_all());
        shell.spawn(Arc::clone(&shell).ask_all());
        shell.spawn(Arc::clone(&shell).follow_record());
        shell.spawn(Arc::clone(&shell).keep_files());
        shell
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Task {
        let task = self.world.handle.spawn(task);
        self.tasks.lock().unwrap().add(&task);
        task
    }

    fn cores(&self) -> MutexGuard<'_, Cores> {
        self.cores.lock().unwrap()
    }

    /// Writes, syncs and applies the entries that wait, again and again.
    async fn commit_all(self: Arc<Self>) {
        loop {
            let begun = self.cores().actor.begin_write();
            let Some((entries, replies)) = begun else {
                self.to_commit.notified().await;
                continue;
            };
            let world = &self.world;
            world.pause(MS / 20, MS).await;
            world.machine().write_entries(&entries);
            world.step(Step::Written).await;
            if !Safeguard::DurableAnswer.is_on() {
                self.apply(&entries, replies);
                self.sync().await;
                continue;
            }
            self.sync().await;
            world.step(Step::Synced).await;
            self.apply(&entries, replies);
        }
    }

    async fn sync(&self) {
        let most = if self.world.random(|random| random.chance(0.1)) { 400 * MS } else { 5 * MS };
        self.world.pause(MS / 20, most).await;
        self.world.machine().sync_entries();
    }

    fn apply(&self, entries: &[Entry], replies: Vec<Reply>) {
        let grants: Vec<Arc<Grant>> = {
            let mut cores = self.cores();
            cores.actor.end_write(entries);
            cores.actor.ledger().grants().cloned().collect()
        };
        self.snapshot.send_replace(Arc::new(grants));
        answer(replies);
    }

    /// Adds entries to the next commit.
    fn submit(&self, entries: Vec<Entry>) -> oneshot::Receiver<()> {
        entries.iter().for_each(|entry| self.world.log(brief(entry)));
        let done = self.cores().actor.submit(entries);
        self.to_commit.notify_one();
        done
    }

    /// Waits for the turn of a message.
    async fn turn(&self) {
        self.world.handle.pass().await;
        while self.cores().actor.is_writing {
            self.world.pause(MS / 20, MS).await;
        }
    }

    /// Waits for the turn behind a commit that concerns the claim.
    async fn turn_of_claim(&self, uid: &str) {
        self.turn().await;
        while self.cores().actor.state.is_uncommitted(uid) {
            self.world.pause(MS / 20, MS).await;
            self.turn().await;
        }
    }

    /// Gives devices by number.
    pub(super) async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<AllocId, String> {
        self.world.step(Step::Requested).await;
        let grant = Grant {
            claim: None,
            state: GrantState::Granted,
            ..self.grant(by_number(), ids.iter().map(granted).collect(), None)
        };
        let alloc_id = grant.alloc_id.clone();
        self.turn().await;
        let refusal = self.cores().actor.state.refusal(&grant);
        if let Some(refusal) = refusal {
            return Err(refusal.to_string());
        }
        let done = self.submit(vec![Entry::Grant(Arc::new(grant))]);
        done.await.map_err(|_| "the daemon ends".to_owned())?;
        Ok(alloc_id)
    }

    fn grant(
        &self,
        resource: crate::domain::ResourceName,
        devices: Vec<GrantedDevice>,
        hold: Option<ClaimHold>,
    ) -> Grant {
        let (mut machine, now) = (self.world.machine(), self.world.moment().wall);
        Grant {
            alloc_id: AllocId::new(format!("a-{:08}", machine.next_id())),
            resource,
            devices,
            edits: ContainerEdits::default(),
            claim: hold.map(Arc::new),
            boot_id: machine.boot_id(),
            kubelet: machine.kubelet,
            granted_at: now,
            version: "1".into(),
            state: GrantState::Granted,
        }
    }

    /// Keeps the files of the claims with each snapshot, which may be old when its turn comes.
    async fn keep_files(self: Arc<Self>) {
        let mut grants = self.snapshot.subscribe();
        while grants.changed().await.is_ok() {
            let now = grants.borrow_and_update().clone();
            self.world.pause(Duration::ZERO, 20 * MS).await;
            self.files.keep(live_claims(&now)).unwrap();
        }
    }
}

/// Restores the claims that the kubelet has and the ledger lacks. An Unprepare whose answer was
/// lost is such a case: the kubelet may give the claim to another pod without another Prepare.
fn restore(world: &World) {
    let mut machine = world.machine();
    let (ledger, start) = (machine.read_ledger(), machine.next_id());
    let kept = machine.kubelet_claims(world.moment());
    let named = |name: &DraName| {
        let mut all = devices().filter(|(id, pool)| name_of(id, pool.class) == *name);
        let (id, pool) = all.next()?;
        let resource = pool.resource.parse().ok()?;
        Some(NamedDevice { resource, device: granted(&id), edits: edits(&id, &machine) })
    };
    let mut count = 0;
    let new_id = || {
        count += 1;
        AllocId::new(format!("a-{start:08}-{count}"))
    };
    let restored =
        restore_claims(&kept, &ledger, named, new_id, &machine.boot_id(), world.moment().wall);
    let entries = restored.grants.into_iter().map(|grant| Entry::Grant(Arc::new(grant)));
    let entries: Vec<Entry> = entries.collect();
    if !entries.is_empty() {
        entries.iter().for_each(|entry| world.log(format_args!("restores: {}", brief(entry))));
        machine.write_entries(&entries);
        machine.sync_entries();
    }
}

/// An entry in the log of a run.
fn brief(entry: &Entry) -> String {
    match entry {
        Entry::Grant(grant) => {
            let ids: Vec<&str> = grant.devices.iter().map(|held| held.id.as_str()).collect();
            format!("records {} for {} with {ids:?}", grant.alloc_id, grant.holder())
        }
        Entry::Moved { alloc_id, state } => format!("moves {alloc_id} to {state:?}"),
        other => format!("writes {other:?}"),
    }
}

/// A device with its kernel object, which every resource that offers it has. Shares have that of
/// their device.
pub(super) fn granted(id: &DeviceId) -> GrantedDevice {
    let whole = id.shared().unwrap_or_else(|| id.clone());
    GrantedDevice {
        id: id.clone(),
        key: format!("pci:{id}"),
        numa_nodes: Vec::new(),
        nodes: Vec::new(),
        objects: vec![Object::node(&format!("/dev/{whole}"))],
    }
}

#[tonic::async_trait]
impl ClaimLedger for LedgerShell {
    fn recorded(&self, claim: &ClaimRef) -> Option<RecordedClaim> {
        if !Safeguard::ClaimRecord.is_on() {
            return None;
        }
        let (boot_id, mut is_of_boot) = (self.world.machine().boot_id(), true);
        let grants = self.snapshot.borrow();
        let of_claim = grants.iter().filter(|grant| grant.is_live()).filter_map(|grant| {
            let hold = grant.claim.as_deref().filter(|hold| hold.claim.uid == claim.uid)?;
            is_of_boot &= !grant.is_of_former_boot(&boot_id);
            Some(DecidedHold {
                resource: grant.resource.clone(),
                devices: grant.devices.clone(),
                hold: hold.clone(),
            })
        });
        let mut holds: Vec<DecidedHold> = of_claim.collect();
        holds.sort_by(|a, b| a.resource.cmp(&b.resource));
        let known = DecidedClaim { claim: claim.clone(), reserved_for: Vec::new(), holds };
        let is_known = !known.holds.is_empty();
        is_known.then_some(RecordedClaim { claim: known, is_of_boot })
    }

    fn grants(&self) -> Arc<Vec<Arc<Grant>>> {
        Arc::clone(&self.snapshot.borrow())
    }

    async fn record(&self, decided: DecidedClaim) -> Result<Vec<ClaimHold>, NotRecorded> {
        let uid = decided.claim.uid.clone();
        self.world.step(Step::Requested).await;
        self.turn_of_claim(&uid).await;
        let now = self.world.moment();
        let pods = decided.reserved_for;
        let wanted: Vec<Arc<Grant>> = decided
            .holds
            .into_iter()
            .map(|DecidedHold { resource, devices, hold }| {
                let state = GrantState::Prepared {
                    pods: pods.clone(),
                    prepared_at: now.wall,
                    unprepared_at: None,
                };
                Arc::new(Grant { state, ..self.grant(resource, devices, Some(hold)) })
            })
            .collect();
        assert!(is_one_claim(&wanted), "{wanted:?}");
        let Recording { entries, answer } = {
            let (mut cores, machine) = (self.cores(), self.world.machine());
            cores.actor.state.record_claim(&wanted, &|uid: &str| machine.cgroup(uid), now)
        };
        // What an earlier process has recorded may not be on the disk yet.
        let writes = answer.is_ok() && Safeguard::DurableRecord.is_on() || !entries.is_empty();
        let done = writes.then(|| self.submit(entries));
        let recorded = answer.map_err(|refusal| {
            self.to_look.notify_one();
            NotRecorded::Blocked(refusal.to_string())
        })?;
        if let Some(done) = done {
            done.await.map_err(|_| NotRecorded::Failed("the daemon ends".into()))?;
        }
        self.world.step(Step::Recorded).await;
        let grants = if Safeguard::ClaimRecord.is_on() { recorded } else { wanted };
        Ok(grants.iter().filter_map(|grant| grant.claim.as_deref().cloned()).collect())
    }

    async fn release(&self, claim: &ClaimRef) -> Result<(), String> {
        let mut record = self.read_record().claims;
        let pods = record.remove(&claim.uid).map(|entry| entry.pods).unwrap_or_default();
        self.turn_of_claim(&claim.uid).await;
        let entries = {
            let (cores, machine) = (self.cores(), self.world.machine());
            let (cgroup, now) = (|uid: &str| machine.cgroup(uid), self.world.moment().wall);
            cores.actor.state.release_claim(&claim.uid, &pods, &cgroup, now)
        };
        if entries.is_empty() && !Safeguard::DurableRecord.is_on() {
            return Ok(());
        }
        self.submit(entries).await.map_err(|_| "the daemon ends".to_owned())?;
        self.world.step(Step::Released).await;
        Ok(())
    }
}
