//! The kubelet's part in claims: its file, Prepare before a sandbox, Unprepare after the
//! containers.
//!
//! - The entry of a claim is in the file before Prepare, and until after Unprepare. `prepared` is
//!   known in memory only.
//! - A failed Prepare is repeated after 60 to 90 s. Pods whose sandbox runs get none.
//! - Unprepare comes with the claim's last pod on the node. For a pod that was deleted by force it
//!   may come while its containers run.
//! - With the fault of releases up to 1.36, a repeated Prepare appends its devices to the former
//!   ones, and the Unprepare of a deleted pod ignores the claim's other pods.

mod ends;

use super::cluster::{self, Pod, id_of};
use super::machine::Held;
use super::slices;
use super::world::{MS, SECOND, Tasks, World, by_number};
use crate::domain::{CheckpointEntry, ClaimRef, DeviceId, PreparedDevice};
use crate::lab::sim::executor::Task;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// The limit of Prepare and Unprepare.
const CALL: Duration = Duration::from_secs(45);

/// What a kubelet does in a run.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Habits {
    /// A repeated Prepare appends.
    pub(super) appends: bool,
    /// Unprepare ignores the claim's other pods.
    pub(super) unprepares_shared: bool,
}

/// A claim in the kubelet's memory.
#[derive(Debug, Clone)]
pub(super) struct ClaimInfo {
    pub(super) of: ClaimRef,
    pub(super) pods: BTreeSet<String>,
    pub(super) devices: Vec<PreparedDevice>,
    prepared: bool,
}

pub(super) struct Kubelet {
    world: Arc<World>,
    tasks: Mutex<Tasks>,
    /// By name.
    claims: Mutex<BTreeMap<String, ClaimInfo>>,
    /// The pods that a task of this instance starts or ends.
    known: Mutex<BTreeMap<String, bool>>,
    starters: Mutex<BTreeMap<String, Task>>,
    /// By the name of a claim: one flow at a time adds or removes its pods.
    locks: Mutex<BTreeMap<String, Arc<AsyncMutex<()>>>>,
}

impl std::fmt::Debug for Kubelet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kubelet").finish_non_exhaustive()
    }
}

impl Kubelet {
    pub(super) fn start(world: &Arc<World>) -> Arc<Self> {
        let now = world.moment().wall;
        let mut claims = world.machine().claims_file().claims.clone();
        claims.values_mut().for_each(|info| info.prepared = false);
        world.machine().new_kubelet(now);
        let kubelet = Arc::new(Kubelet {
            world: Arc::clone(world),
            tasks: Mutex::default(),
            claims: Mutex::new(claims),
            known: Mutex::default(),
            starters: Mutex::default(),
            locks: Mutex::default(),
        });
        kubelet.spawn(Arc::clone(&kubelet).watch_pods());
        kubelet.spawn(Arc::clone(&kubelet).clean_up());
        kubelet.spawn(slices::wipe(Arc::clone(world)));
        kubelet
    }

    pub(super) fn kill(&self) {
        let tasks = self.tasks.lock().unwrap().take();
        tasks.iter().for_each(Task::abort);
        self.starters.lock().unwrap().clear();
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Task {
        let task = self.world.handle.spawn(task);
        self.tasks.lock().unwrap().add(&task);
        task
    }

    pub(super) fn claims(&self) -> MutexGuard<'_, BTreeMap<String, ClaimInfo>> {
        self.claims.lock().unwrap()
    }

    /// The claims that it does not prepare again.
    pub(super) fn prepared(&self) -> Vec<ClaimInfo> {
        self.claims().values().filter(|info| info.prepared).cloned().collect()
    }

    async fn lock(&self, names: impl IntoIterator<Item = &String>) -> Vec<OwnedMutexGuard<()>> {
        let names: BTreeSet<&String> = names.into_iter().collect();
        let mut guards = Vec::new();
        for name in names {
            let lock = self.locks.lock().unwrap().entry(name.clone()).or_default().clone();
            guards.push(lock.lock_owned().await);
        }
        guards
    }

    /// Writes the file.
    pub(super) fn checkpoint(&self) {
        let claims = self.claims().clone();
        self.world.machine().write_claims(claims);
        self.world.records.send_modify(|count| *count += 1);
    }

    /// Starts the pods that are bound, and ends those that are deleted.
    async fn watch_pods(self: Arc<Self>) {
        loop {
            let pods: Vec<Pod> = {
                let cluster = self.world.cluster();
                // Without the API server the kubelet knows what it knew.
                if cluster.is_away { Vec::new() } else { cluster.pods.values().cloned().collect() }
            };
            let is_away = self.world.cluster().is_away;
            for pod in pods.iter().filter(|pod| pod.is_bound) {
                let known = self.known.lock().unwrap().get(&pod.uid).copied();
                if pod.is_deleted && known != Some(true) {
                    self.end(&pod.uid, false);
                } else if !pod.is_deleted && known.is_none() {
                    self.known.lock().unwrap().insert(pod.uid.clone(), false);
                    if !self.world.machine().runs(&pod.uid) {
                        let task = self.spawn(Arc::clone(&self).start_pod(pod.clone()));
                        self.starters.lock().unwrap().insert(pod.uid.clone(), task);
                    }
                }
            }
            if !is_away {
                let running: BTreeSet<String> = {
                    let machine = self.world.machine();
                    let known = self.known.lock().unwrap();
                    let admitted = machine.checkpoint_entries().iter().map(|entry| &entry.pod_uid);
                    let started = known.keys().chain(machine.containers.keys()).chain(admitted);
                    started.cloned().collect()
                };
                for uid in running {
                    let is_known = self.known.lock().unwrap().get(&uid) == Some(&true);
                    if !is_known && !pods.iter().any(|pod| pod.uid == uid) {
                        self.end(&uid, true);
                    }
                }
            }
            self.world.pause(50 * MS, 300 * MS).await;
        }
    }

    /// Ends a pod. A call for it that waits is cancelled.
    fn end(self: &Arc<Self>, uid: &str, is_forced: bool) {
        self.known.lock().unwrap().insert(uid.to_owned(), true);
        let starter = self.starters.lock().unwrap().remove(uid);
        if let Some(starter) = starter {
            starter.abort();
        }
        self.spawn(Arc::clone(self).end_pod(uid.to_owned(), is_forced));
    }

    async fn start_pod(self: Arc<Self>, pod: Pod) {
        if pod.numbers > 0 && !self.has_numbers(&pod.uid) && self.allocate(&pod).await.is_err() {
            // Admission has failed: the pod ends, and its controller makes another one.
            self.world.log(format_args!("{} is not admitted", pod.uid));
            let now = self.world.handle.now();
            let mut cluster = self.world.cluster();
            cluster.pods.remove(&pod.uid);
            cluster.control(now);
            return;
        }
        loop {
            match self.prepare(&pod).await {
                Ok(()) => {
                    self.world.pause(MS, 2 * SECOND).await;
                    let _locks = self.lock(&pod.claims).await;
                    match self.held(&pod) {
                        Ok(Ok(held)) => {
                            self.world.log(format_args!("{} runs with {held:?}", pod.uid));
                            let (now, wanted) = (self.world.handle.now(), self.wanted(&pod));
                            self.world.oracles().started(now, &wanted, &held);
                            self.world.machine().start_containers(&pod.uid, held);
                            return;
                        }
                        Ok(Err((claim, why))) => {
                            self.world.log(format_args!("{}: {why}", pod.uid));
                            let now = self.world.handle.now();
                            self.world.oracles().undefined(now, &claim, why);
                        }
                        Err(why) => self.world.log(format_args!("{}: {why}", pod.uid)),
                    }
                }
                Err(why) => self.world.log(format_args!("{} waits: {why}", pod.uid)),
            }
            self.world.pause(60 * SECOND, 90 * SECOND).await;
        }
    }

    fn has_numbers(&self, uid: &str) -> bool {
        let machine = self.world.machine();
        machine.checkpoint_entries().iter().any(|entry| entry.pod_uid == uid)
    }

    /// Gives a pod devices by number: any that no pod of the checkpoint has.
    async fn allocate(&self, pod: &Pod) -> Result<(), String> {
        let ids: BTreeSet<DeviceId> = {
            let machine = self.world.machine();
            let entries = machine.checkpoint_entries();
            let is_free =
                |id: &DeviceId| !entries.iter().any(|entry| entry.device_ids.contains(id));
            let mut free: Vec<DeviceId> = super::machine::devices()
                .filter(|(_, pool)| pool.prefix == "GPU")
                .map(|(id, _)| id)
                .filter(is_free)
                .collect();
            // The two allocators begin at different ends, and meet all the same.
            let turned = self.world.random(|random| random.below(free.len()));
            free.rotate_left(turned);
            free.into_iter().take(pod.numbers).collect()
        };
        if ids.len() < pod.numbers {
            return Err("not enough devices".into());
        }
        let daemon = self.world.daemon().ok_or("no plugin")?;
        let asked = self.world.handle.timeout(10 * SECOND, daemon.allocate(ids.clone()));
        let alloc_id = asked.await.ok_or("timeout")??;
        let now = self.world.moment().wall;
        let entry = CheckpointEntry {
            pod_uid: pod.uid.clone(),
            container: "main".into(),
            resource: by_number(),
            device_ids: ids,
            alloc_id: Some(alloc_id),
        };
        self.world.machine().change_checkpoint(now, |entries| entries.push(entry));
        Ok(())
    }

    async fn prepare(&self, pod: &Pod) -> Result<(), String> {
        let _locks = self.lock(&pod.claims).await;
        let mut batch = Vec::new();
        for name in &pod.claims {
            let claim = cluster::ask(&self.world, name).await?.ok_or("no claim")?;
            if !claim.is_allocated || !claim.reserved_for.iter().any(|of| of.uid == pod.uid) {
                return Err(format!("pod {} is not allowed to use {name}", pod.uid));
            }
            let of = claim.claim;
            {
                let mut claims = self.claims();
                let info = claims.entry(name.clone()).or_insert_with(|| ClaimInfo {
                    of: of.clone(),
                    pods: BTreeSet::new(),
                    devices: Vec::new(),
                    prepared: false,
                });
                if info.of.uid != of.uid {
                    return Err(format!("old ResourceClaim with the name {name} still exists"));
                }
                info.pods.insert(pod.uid.clone());
                if !info.prepared {
                    batch.push(of);
                }
            }
            self.checkpoint();
        }
        if batch.is_empty() {
            return Ok(());
        }
        let daemon = self.world.daemon().ok_or("DRA driver holdfast.dev is not registered")?;
        let from = self.world.handle.now();
        let asked = self.world.handle.timeout(CALL, daemon.prepare(batch));
        let answers = asked.await.ok_or("context deadline exceeded")??;
        for (of, answer) in answers {
            let devices = answer?;
            self.world.oracles().answered(&self.world, &of, &devices, from);
            let mut claims = self.claims();
            let info = claims.get_mut(&of.name).filter(|info| info.of.uid == of.uid);
            let info = info.ok_or("internal error: unable to get claim info")?;
            // Devices of a former allocation under the same UID stay there too, for the next
            // container to fail with. That is beyond a driver's reach.
            let stays = |known: &PreparedDevice| {
                let part = |it: &PreparedDevice| (it.name.clone(), it.share_id.clone());
                devices.iter().any(|it| part(it) == part(known))
            };
            info.devices.retain(|known| self.world.habits.appends && stays(known));
            info.devices.extend(devices);
            info.prepared = true;
        }
        self.checkpoint();
        Ok(())
    }

    /// What the containers of a pod get, as the runtime resolves it. The inner error is that of the
    /// runtime, with the claim.
    fn held(&self, pod: &Pod) -> Result<Result<Vec<Held>, (String, String)>, &'static str> {
        let (claims, machine) = (self.claims(), self.world.machine());
        let numbers = machine.checkpoint_entries().iter().filter(|entry| entry.pod_uid == pod.uid);
        let mut held: Vec<Held> = numbers
            .flat_map(|entry| &entry.device_ids)
            .map(|device| Held { device: device.clone(), claim: None, is_admin: false })
            .collect();
        let cluster = self.world.cluster();
        for name in &pod.claims {
            let info = claims.get(name).ok_or("unable to get claim info")?;
            let names: BTreeSet<&String> =
                info.devices.iter().flat_map(|device| &device.cdi_devices).collect();
            for cdi_name in names {
                let Some(ids) = machine.resolve(cdi_name) else {
                    let why = format!("no file defines {cdi_name}");
                    return Ok(Err((info.of.uid.clone(), why)));
                };
                held.extend(ids.into_iter().map(|device| Held {
                    is_admin: cluster.is_admin(&info.of.uid, &device),
                    device,
                    claim: Some(info.of.uid.clone()),
                }));
            }
        }
        Ok(Ok(held))
    }

    /// The devices of the pod's claims, each once, by the kubelet's record.
    fn wanted(&self, pod: &Pod) -> Vec<DeviceId> {
        let claims = self.claims();
        let infos = pod.claims.iter().filter_map(|name| claims.get(name));
        let devices = infos.flat_map(|info| {
            let own = |device: &PreparedDevice| device.own(&info.of.uid);
            let names: BTreeSet<_> = info.devices.iter().map(own).collect();
            names.iter().filter_map(id_of).collect::<Vec<_>>()
        });
        devices.collect()
    }
}
