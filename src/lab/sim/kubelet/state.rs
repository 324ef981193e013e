//! The shared state of the simulated kubelet's tasks: the node, which outlives the kubelet, and the
//! kubelet's present instance.

use super::behaviour::Behaviour;
use super::core::DeviceManager;
use super::environment::{Environment, Snapshot};
use super::error::NilDereference;
use super::event::{EventKind, EventLog};
use super::hook::{Hook, Verdict};
use super::instance::Instance;
use super::interleaving::{Interleaving, Streams};
use super::limiter::Limiter;
use super::pod::{Pod, PodSpec};
use super::profile::{Clients, Profile};
use super::status::Readings;
use super::view::View;
use crate::domain::ResourceName;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};

/// A flow that was held for longer is logged, to explain the later events.
const LOGGED_FROM: Duration = Duration::from_millis(1);

/// The node: it stays when the kubelet exits.
#[derive(Debug, Default)]
pub(in crate::lab::sim) struct State {
    pub(super) instance: Option<Instance>,
    pub(super) starts: u64,
    /// In the order of their creation.
    pub(super) pods: Vec<Pod>,
    /// Pods that were deleted by force: their containers continue to run, and the kubelet does not
    /// know them.
    pub(super) orphans: BTreeMap<String, Pod>,
    pub(super) events: EventLog,
    pub(super) readings: BTreeMap<ResourceName, Readings>,
    /// By reason.
    pub(super) rejections: BTreeMap<String, u64>,
    pub(super) panicked: Option<String>,
    /// Listings of the pods.
    pub(super) listings: u64,
    /// Those that were requested while an Allocate was under way.
    pub(super) listings_in_allocate: u64,
    pub(super) interleavings: BTreeMap<Interleaving, u64>,
    /// How often each hook was reached.
    pub(super) hooks: BTreeMap<Hook, u64>,
}

impl State {
    pub(super) fn pod(&mut self, uid: &str) -> Option<&mut Pod> {
        self.pods.iter_mut().find(|pod| pod.spec.uid == uid)
    }

    /// A pod's spec, including pods that were deleted by force.
    pub(super) fn spec(&self, uid: &str) -> Option<&PodSpec> {
        let pod = self.pods.iter().find(|pod| pod.spec.uid == uid);
        pod.or_else(|| self.orphans.get(uid)).map(|pod| &pod.spec)
    }

    /// The pods that are known to this instance.
    pub(super) fn known(&self) -> impl Iterator<Item = &Pod> {
        let known = |pod: &&Pod| {
            self.instance.as_ref().is_some_and(|instance| instance.known.contains(&pod.spec.uid))
        };
        self.pods.iter().filter(known)
    }

    /// The pods that the kubelet counts as active: known and not over.
    pub(super) fn active(&self) -> impl Iterator<Item = &Pod> {
        self.known().filter(|pod| !pod.is_over())
    }

    /// Frees the devices of inactive pods.
    pub(super) fn purge(&mut self) {
        let active = self.active().map(|pod| pod.spec.uid.clone()).collect();
        if let Some(instance) = &mut self.instance {
            instance.manager.purge(&active);
        }
    }
}

/// The state that every task shares.
#[derive(Debug)]
pub(in crate::lab::sim) struct Shared {
    pub(super) behaviour: Behaviour,
    /// The version of the present instance, or of the next: another version may replace the node's
    /// kubelet.
    profile: Mutex<Profile>,
    pub(super) environment: Arc<dyn Environment>,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    /// Wakes the sync loop, its only waiter.
    pub(super) pod_added: Notify,
    /// Recorded under the lock of the state, logged after it.
    unflushed: Mutex<Vec<(ResourceName, Interleaving)>>,
}

impl Shared {
    pub(in crate::lab::sim) fn new(
        behaviour: Behaviour,
        environment: Arc<dyn Environment>,
    ) -> Self {
        let (changed, _) = watch::channel(());
        let profile = Mutex::new(behaviour.profile);
        Shared {
            behaviour,
            profile,
            environment,
            state: Mutex::default(),
            changed,
            pod_added: Notify::new(),
            unflushed: Mutex::default(),
        }
    }

    /// The version of the kubelet.
    pub(in crate::lab::sim) fn profile(&self) -> Profile {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the version of the next instance.
    pub(super) fn replace(&self, profile: Profile) {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner) = profile;
    }

    /// Reads the whole state at one time.
    pub(in crate::lab::sim) fn view<R>(&self, read: impl FnOnce(&View<'_>) -> R) -> R {
        let now = self.environment.now();
        read(&View { state: &self.peek(), now })
    }

    /// Locks and returns the state.
    pub(in crate::lab::sim) fn peek(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and notifies every waiter.
    pub(super) fn update<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.peek();
        let result = act(&mut state);
        self.flush_interleavings(&mut state);
        drop(state);
        self.changed.send_replace(());
        result
    }

    /// Changes the state if the given instance is the present one; a task of an earlier one gets
    /// `None` and ends.
    pub(super) fn in_instance<R>(
        &self,
        instance: u64,
        act: impl FnOnce(&mut State) -> R,
    ) -> Option<R> {
        self.update(|state| {
            state
                .instance
                .as_ref()
                .is_some_and(|present| present.number == instance)
                .then(|| act(state))
        })
    }

    /// Like [`Shared::in_instance`], for the instance alone.
    pub(super) fn with_instance<R>(
        &self,
        instance: u64,
        act: impl FnOnce(&mut Instance) -> R,
    ) -> Option<R> {
        self.in_instance(instance, |state| state.instance.as_mut().map(act)).flatten()
    }

    pub(in crate::lab::sim) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn log(&self, kind: EventKind) {
        let at = self.environment.now();
        self.update(|state| state.events.push(at, kind));
    }

    /// Records an interleaving; may be called under the lock of the state.
    pub(super) fn record_interleaving(&self, resource: &ResourceName, which: Option<Interleaving>) {
        if let Some(which) = which {
            self.unflushed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((resource.clone(), which));
        }
    }

    fn flush_interleavings(&self, state: &mut State) {
        let seen =
            std::mem::take(&mut *self.unflushed.lock().unwrap_or_else(PoisonError::into_inner));
        for (resource, which) in seen {
            *state.interleavings.entry(which).or_default() += 1;
            state.events.push(self.environment.now(), EventKind::Interleaving { resource, which });
        }
    }

    /// A flow of this instance reaches a hook. A flow that must not continue waits here until it is
    /// dropped.
    pub(super) async fn hook(&self, instance: u64, hook: Hook) -> Verdict {
        *self.peek().hooks.entry(hook).or_default() += 1;
        let Some(decided) = self.environment.hook(hook) else { return Verdict::Pass };
        let came_at = self.environment.now();
        let verdict = decided.await;
        let held = self.environment.now().saturating_sub(came_at);
        if verdict != Verdict::Pass || held > LOGGED_FROM {
            self.log(EventKind::Held { hook, held, verdict });
        }
        match verdict {
            Verdict::Crash => {
                if self.with_instance(instance, |_| ()).is_some() {
                    self.close();
                }
                std::future::pending().await
            }
            Verdict::Fail if !hook.can_fail() => Verdict::Pass,
            Verdict::Cancel if !hook.can_cancel() => Verdict::Pass,
            verdict => verdict,
        }
    }

    /// Opens an instance with empty state. There must be none.
    pub(super) fn open(&self) -> u64 {
        let now = self.environment.now();
        self.update(|state| {
            state.starts += 1;
            let instance = Instance {
                number: state.starts,
                manager: DeviceManager::start(
                    Default::default(),
                    BTreeSet::new(),
                    BTreeSet::new(),
                    now,
                ),
                clients: Clients::new(self.profile()),
                streams: Streams::new(),
                known: BTreeSet::new(),
                workers: BTreeSet::new(),
                resizes: VecDeque::new(),
                tasks: Vec::new(),
                clients_made: 0,
                leaked: Vec::new(),
                limiter: Limiter::new(now),
                allocating: 0,
                allocating_since: now,
                registers: BTreeMap::new(),
                lists: BTreeMap::new(),
            };
            state.instance = Some(instance);
            state.starts
        })
    }

    /// Runs a task for as long as the instance lasts.
    pub(super) fn spawn(&self, instance: u64, task: impl Future<Output = ()> + Send + 'static) {
        let mut handle = Some(self.environment.spawn(Box::pin(task)));
        self.with_instance(instance, |present| {
            present.tasks.retain(|task| !task.is_over());
            present.tasks.extend(handle.take());
        });
        if let Some(handle) = handle {
            handle.stop();
        }
    }

    /// Ends the present instance as a kill does: nothing is unlinked, every connection is cut.
    pub(in crate::lab::sim) fn close(&self) {
        let instance = self.update(|state| {
            let instance = state.instance.take();
            state.readings.values_mut().for_each(|readings| readings.down(self.environment.now()));
            instance
        });
        if let Some(instance) = instance {
            instance.tasks.iter().for_each(|task| task.stop());
            self.environment.cut();
            self.log(EventKind::Stopped);
        }
    }

    /// The real kubelet would have crashed here: this one stops too.
    pub(super) fn panic(&self, error: &NilDereference) {
        let site = error.to_string();
        self.update(|state| state.panicked.get_or_insert_with(|| site.clone()).clone());
        self.log(EventKind::Panicked { site });
        self.close();
    }

    /// Writes the checkpoint of the given instance. As in the kubelet, the content is fixed under
    /// the lock and written without it: of two writers the one with the older content may come
    /// last.
    pub(super) async fn write_checkpoint(&self, instance: u64) -> Result<(), String> {
        let fails = self.hook(instance, Hook::BeforeCheckpoint).await == Verdict::Fail;
        let snapshot = self.with_instance(instance, |present| Snapshot {
            held: present.manager.held().clone(),
            healthy: present.manager.healthy().clone(),
        });
        let Some(snapshot) = snapshot else { return Ok(()) };
        self.hook(instance, Hook::DuringCheckpoint).await;
        let written = self.with_instance(instance, |_| {
            if fails {
                Err("no space left on device".to_owned())
            } else {
                self.environment.write_checkpoint(snapshot)
            }
        });
        let result = written.unwrap_or(Ok(()));
        if let Err(error) = &result {
            self.log(EventKind::FileFailed {
                error: format!("failed to write the checkpoint: {error}"),
            });
        }
        result
    }

    /// Records the allocatable count if it has changed.
    pub(super) fn note_capacity(&self, resource: &ResourceName) {
        let now = self.environment.now();
        let mut state = self.peek();
        let Some(capacity) =
            state.instance.as_ref().map(|instance| instance.manager.capacity(resource, now))
        else {
            return;
        };
        state.readings.entry(resource.clone()).or_default().note(now, capacity);
    }
}
