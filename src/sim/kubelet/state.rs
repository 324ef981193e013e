//! What the tasks of the simulated kubelet share: the node, which outlives the kubelet, and the kubelet's present life.

use super::KubeletConfig;
use super::checkpoint;
use super::client::Client;
use super::core::DeviceManager;
use super::error::NilDereference;
use super::event::{EventKind, EventLog};
use super::files::Files;
use super::link::Links;
use super::pod::{Pod, PodSpec};
use crate::domain::ResourceName;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// One life of the kubelet, from a start to the next stop.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) number: u64,
    pub(super) manager: DeviceManager<Arc<Client>>,
    /// The client that the kubelet believes to be connected, by name alone: it is here that a new client is mistaken
    /// for an old one.
    pub(super) clients: BTreeMap<ResourceName, Arc<Client>>,
    /// Pods that this life has heard of; the API's first batch comes only after a while.
    pub(super) known: BTreeSet<String>,
    pub(super) links: Links,
    tasks: Vec<AbortHandle>,
    pub(super) next_client: u64,
    /// Clients that the kubelet has lost sight of without closing them. It leaks their connections.
    pub(super) lost: Vec<Arc<Client>>,
}

impl Life {
    /// Keeps a client's connection open until the plugin closes it.
    pub(super) fn lose(&mut self, client: Arc<Client>) {
        self.lost.retain(|client| self.links.is_open(client.number));
        self.lost.push(client);
    }
}

/// The node: it stays when the kubelet goes.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) life: Option<Life>,
    pub(super) starts: u64,
    /// In the order of their creation.
    pub(super) pods: Vec<Pod>,
    /// Pods that were deleted by force: their containers run on, and the kubelet knows nothing of them.
    pub(super) orphans: BTreeMap<String, PodSpec>,
    pub(super) events: EventLog,
    pub(super) rejections: u64,
    pub(super) panicked: Option<String>,
}

impl State {
    pub(super) fn pod(&mut self, uid: &str) -> Option<&mut Pod> {
        self.pods.iter_mut().find(|pod| pod.spec.uid == uid)
    }

    /// What a pod asked for, also one that was deleted by force.
    pub(super) fn spec(&self, uid: &str) -> Option<&PodSpec> {
        let pod = self.pods.iter().find(|pod| pod.spec.uid == uid).map(|pod| &pod.spec);
        pod.or_else(|| self.orphans.get(uid))
    }

    /// The pods that the kubelet counts as active: known to this life and not failed.
    pub(super) fn active(&self) -> impl Iterator<Item = &Pod> {
        let known = |pod: &&Pod| self.life.as_ref().is_some_and(|life| life.known.contains(&pod.spec.uid));
        self.pods.iter().filter(|pod| !pod.is_failed()).filter(known)
    }

    /// Frees what inactive pods hold.
    pub(super) fn purge(&mut self) {
        let active = self.active().map(|pod| pod.spec.uid.clone()).collect();
        if let Some(life) = &mut self.life {
            life.manager.purge(&active);
        }
    }
}

/// Shared by every task.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: KubeletConfig,
    pub(super) files: Files,
    born: Instant,
    state: Mutex<State>,
    changed: watch::Sender<()>,
    /// Wakes the sync loop, which is alone in waiting for it.
    pub(super) pod_added: Notify,
}

impl Shared {
    pub(super) fn new(config: KubeletConfig) -> Self {
        let files = Files { kubelet_dir: config.kubelet_dir.clone(), host_root: config.host_root.clone() };
        let (changed, _) = watch::channel(());
        Shared { config, files, born: Instant::now(), state: Mutex::default(), changed, pod_added: Notify::new() }
    }

    pub(super) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Looks at the state.
    pub(super) fn peek(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes whoever waits for it.
    pub(super) fn update<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let result = act(&mut self.peek());
        self.changed.send_replace(());
        result
    }

    /// Changes the state if the kubelet still lives the given life; a task of an earlier one gets `None` and ends.
    pub(super) fn in_life<R>(&self, life: u64, act: impl FnOnce(&mut State) -> R) -> Option<R> {
        let mut state = self.peek();
        let result = state.life.as_ref().is_some_and(|present| present.number == life).then(|| act(&mut state));
        drop(state);
        self.changed.send_replace(());
        result
    }

    /// Like [`Shared::in_life`], for the life itself.
    pub(super) fn life<R>(&self, life: u64, act: impl FnOnce(&mut Life) -> R) -> Option<R> {
        self.in_life(life, |state| state.life.as_mut().map(act)).flatten()
    }

    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub(super) fn log(&self, kind: EventKind) {
        let at = self.now();
        self.update(|state| state.events.push(at, kind));
    }

    /// Opens a life. There must be none.
    pub(super) fn open(&self, manager: DeviceManager<Arc<Client>>) -> u64 {
        self.update(|state| {
            state.starts += 1;
            let life = Life {
                number: state.starts,
                manager,
                clients: BTreeMap::new(),
                known: BTreeSet::new(),
                links: Links::default(),
                tasks: Vec::new(),
                next_client: 1,
                lost: Vec::new(),
            };
            state.life = Some(life);
            state.starts
        })
    }

    /// Runs a task for as long as the life lasts.
    pub(super) fn spawn(&self, life: u64, task: impl Future<Output = ()> + Send + 'static) {
        let handle = tokio::spawn(task).abort_handle();
        let kept = self.life(life, |present| {
            present.tasks.retain(|task| !task.is_finished());
            present.tasks.push(handle.clone());
        });
        if kept.is_none() {
            handle.abort();
        }
    }

    /// Ends the present life as a kill does: nothing is unlinked, every connection is cut.
    pub(super) fn close(&self) {
        if let Some(life) = self.update(|state| state.life.take()) {
            life.tasks.iter().for_each(AbortHandle::abort);
            life.links.cut_all();
            self.log(EventKind::Stopped);
        }
    }

    /// The real kubelet would have crashed: this one stops too.
    pub(super) fn panic(&self, error: &NilDereference) {
        let site = error.to_string();
        self.update(|state| state.panicked.get_or_insert_with(|| site.clone()).clone());
        self.log(EventKind::Panicked { site });
        self.close();
    }

    /// Writes the checkpoint of the given life. The lock is held over the write, so that none is written late.
    pub(super) fn write_checkpoint(&self, life: u64) -> Result<(), String> {
        let written = self.life(life, |present| {
            let bytes = checkpoint::encode(&present.manager).map_err(|error| error.to_string())?;
            self.files.write_checkpoint(&bytes, self.config.sync_checkpoint).map_err(|error| error.to_string())
        });
        let result = written.unwrap_or(Ok(()));
        if let Err(error) = &result {
            self.log(EventKind::FileFailed { error: format!("failed to write the checkpoint: {error}") });
        }
        result
    }
}
