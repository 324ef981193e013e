//! A simulated kubelet, as a device plugin sees it.
//!
//! It answers Register, dials plugins, follows their lists, admits pods, allocates, starts
//! containers, reports the node's status, keeps the checkpoint and answers the pod-resources API.
//! It also creates the log folders and cgroups that the daemon reads. Order, texts, codes and
//! effects on disk are those of the kubelet, including its races. Up to 1.36 the end of an old
//! stream cuts the new client. A listing forgets the reservation of an Allocate under way. A
//! restart rejects pods whose plugin is late. Where the real kubelet would dereference a device
//! that is not in the list, this one records the crash and stops.
//!
//! ```text
//!  plugin ── Register ─▶ registration ─▶ client ── GetDevicePluginOptions, ListAndWatch ─▶ plugin
//!                             │ profile: known clients, whom an end cuts         │
//!                             ▼                                                  ▼
//!  add_pod ─▶ admission ◀─▶ core (pure: the device manager) ◀───────────────── lists
//!                 │           └─▶ checkpoint                 status ─▶ capacity, every ten seconds
//!                 ├── GetPreferredAllocation, Allocate ─▶ plugin
//!                 └─▶ worker ── PreStartContainer ─▶ plugin;  containers start, end, start again
//!
//!  all of it in an `environment`: sockets (gRPC, files, tokio: [`Kubelet`])
//!  or memory (a seed: `sim::memory`)
//! ```
//!
//! `core` decides and knows no clock, socket or file. The flows around it are written once and
//! pause at every [`Hook`], where a seed or a test decides how they continue. [`Interleaving`]
//! names the event orders that occur. A stop is a kill: every connection is cut, nothing is
//! unlinked. The node (pods, containers, events) outlives the kubelet, and the next start finds it.

mod admission;
mod behaviour;
pub mod claims;
mod client;
pub mod core;
pub(in crate::lab::sim) mod environment;
pub mod error;
mod event;
pub mod held;
mod hook;
mod instance;
mod interleaving;
mod limiter;
mod pod;
mod pod_actions;
pub(in crate::lab::sim) mod pod_resources;
mod profile;
pub(in crate::lab::sim) mod registration;
mod sockets;
pub(in crate::lab::sim) mod start;
pub(in crate::lab::sim) mod state;
mod status;
mod view;
mod worker;

#[cfg(test)]
mod tests;

pub use self::behaviour::{Behaviour, Gaps};
pub use self::core::{Capacity, ENDPOINT_GRACE};
pub use self::event::{Event, EventKind, EventLog};
pub use self::hook::{Gate, Hook, HookTable, Verdict};
pub use self::interleaving::Interleaving;
pub use self::pod::{Container, ContainerKind, ContainerSpec, Pod, PodPhase, PodSpec};
pub use self::profile::Profile;
pub use self::start::Start;
pub use self::status::Readings;
pub use self::view::{EndpointState, Holder, View};

use self::sockets::Sockets;
use self::sockets::files::Files;
use self::state::Shared;
use crate::domain::{DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The directories of a kubelet, and its behaviour.
#[derive(Debug, Clone)]
pub struct KubeletConfig {
    /// Replaces `/var/lib/kubelet`.
    pub kubelet_dir: PathBuf,
    /// Replaces `/`: log folders and cgroups are created below it.
    pub host_root: PathBuf,
    /// From the registration socket to the admission of the pods that the node has already: see
    /// [`Gaps::to_first_batch`].
    pub first_batch_after: Duration,
    /// The wait of a container before its next start, after an end or a failure.
    pub restart_after: Duration,
    /// The longest time for a Register to dial its endpoint.
    pub dial_within: Duration,
    /// Whether the checkpoint is synced to disk before it is renamed, as in the real kubelet. Off
    /// by default, so that a benchmark of a plugin in the same process does not measure this file.
    pub sync_checkpoint: bool,
    /// Whether a topology policy is active: the kubelet then reads more devices, and so crashes at
    /// more places.
    pub topology_manager: bool,
    /// Whether it crashes where it uses a device that has left the list: from 1.35 on.
    pub panics: bool,
    /// Its version, for registration and for the versions of its APIs.
    pub profile: Profile,
    /// The hooks where a test holds the kubelet's flows.
    pub hooks: HookTable,
}

impl KubeletConfig {
    /// The usual behaviour, in these directories.
    pub fn new(kubelet_dir: impl Into<PathBuf>, host_root: impl Into<PathBuf>) -> Self {
        KubeletConfig {
            kubelet_dir: kubelet_dir.into(),
            host_root: host_root.into(),
            first_batch_after: Duration::from_millis(75),
            restart_after: Behaviour::default().restart_after,
            dial_within: Duration::from_secs(10),
            sync_checkpoint: false,
            topology_manager: false,
            panics: true,
            profile: Profile::K125,
            hooks: HookTable::default(),
        }
    }

    /// The behaviour of this configuration. Phases that a demonstration does not show are skipped.
    fn behaviour(&self) -> Behaviour {
        let gaps = Gaps {
            to_container_manager: Duration::ZERO,
            to_device_manager: Duration::ZERO,
            to_first_batch: self.first_batch_after,
            ..Behaviour::default().gaps
        };
        Behaviour {
            profile: self.profile,
            topology_manager: self.topology_manager,
            restart_after: self.restart_after,
            dial_within: self.dial_within,
            gaps,
            panics: self.panics,
            init_takes: Duration::ZERO,
            kill_within: Duration::ZERO,
        }
    }
}

/// The result of an added pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOutcome {
    /// Its UID.
    pub uid: String,
    /// Running or failed; pending only if the kubelet stops or the pod is deleted before a
    /// decision.
    pub phase: PodPhase,
}

/// A wait that took too long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the condition was not met within {within:?}; the newest events:\n{events}")]
pub struct WaitError {
    /// The time limit.
    pub within: Duration,
    /// The newest events.
    pub events: String,
}

/// The simulated kubelet. Dropping it is a kill.
#[derive(Debug)]
pub struct Kubelet {
    shared: Arc<Shared>,
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Kubelet {
    /// Makes the node's directories and starts a kubelet on them.
    pub async fn start(config: KubeletConfig) -> Result<Self, io::Error> {
        let files =
            Files { kubelet_dir: config.kubelet_dir.clone(), host_root: config.host_root.clone() };
        let environment = Sockets::new(files, config.hooks.clone(), config.sync_checkpoint);
        let kubelet =
            Kubelet { shared: Arc::new(Shared::new(config.behaviour(), Arc::new(environment))) };
        kubelet.start_again().await?;
        Ok(kubelet)
    }

    /// Kills the kubelet: connections are cut, the files of its sockets stay. Containers continue
    /// to run.
    pub fn stop(&self) {
        self.shared.close();
    }

    /// Starts it again on the state that the last one left. An error if it runs.
    pub async fn start_again(&self) -> Result<(), io::Error> {
        start::start(&self.shared, Start::default()).await
    }

    /// [`Kubelet::stop`] and [`Kubelet::start_again`].
    pub async fn restart(&self) -> Result<(), io::Error> {
        self.stop();
        self.start_again().await
    }

    /// Replaces the kubelet in place: another version starts on the state that this one leaves.
    pub async fn replace(&self, profile: Profile) -> Result<(), io::Error> {
        self.stop();
        self.shared.replace(profile);
        self.start_again().await
    }

    /// Binds a pod to the node and waits until the kubelet has decided on it.
    pub async fn add_pod(&self, spec: PodSpec) -> PodOutcome {
        let uid = spec.uid.clone();
        let mut changes = self.shared.changes();
        self.shared.bind_pod(spec);
        loop {
            changes.borrow_and_update();
            let decided = self.view(|view| {
                let Some(pod) = view.pod(&uid) else { return Some(PodPhase::Pending) };
                (pod.is_decided() || !view.is_running()).then(|| pod.phase.clone())
            });
            if let Some(phase) = decided {
                return PodOutcome { uid, phase };
            }
            if changes.changed().await.is_err() {
                return PodOutcome { uid, phase: PodPhase::Pending };
            }
        }
    }

    /// Deletes a pod: its containers end, its cgroup empties and is removed, its log folder is
    /// removed. Also removes the rest of a pod that was deleted by force. Returns whether there was
    /// one.
    pub fn delete_pod(&self, uid: &str) -> Result<bool, io::Error> {
        self.shared.end_pod(uid)
    }

    /// Deletes a pod by force: the kubelet counts its devices as free at once, while its containers
    /// continue to run until [`Kubelet::delete_pod`]. Returns whether there was one.
    pub fn force_delete_pod(&self, uid: &str) -> bool {
        self.shared.orphan_pod(uid)
    }

    /// The containers of a pod have done their work: its cgroup is removed and its devices are
    /// free. Returns whether it ran.
    pub fn complete_pod(&self, uid: &str) -> Result<bool, io::Error> {
        let ran = self.shared.complete_pod(uid);
        if ran {
            self.shared.environment.remove_cgroup(uid)?;
        }
        Ok(ran)
    }

    /// A container crashes and waits for its next start: after a restart of the kubelet it does not
    /// count as running.
    pub fn crash_container(&self, pod_uid: &str, container: &str) {
        worker::crash(&self.shared, pod_uid, container);
    }

    /// The present time, on the clock of the events.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.shared.environment.now()
    }

    /// Reads the whole state at one time.
    pub fn view<R>(&self, read: impl FnOnce(&View<'_>) -> R) -> R {
        self.shared.view(read)
    }

    /// Waits until the view satisfies `seen`, without polling.
    pub async fn wait_for(
        &self,
        seen: impl Fn(&View<'_>) -> bool,
        within: Duration,
    ) -> Result<(), WaitError> {
        self.wait_for_some(|view| seen(view).then_some(()), within).await
    }

    /// Waits until the view returns a value, without polling.
    pub async fn wait_for_some<T>(
        &self,
        read: impl Fn(&View<'_>) -> Option<T>,
        within: Duration,
    ) -> Result<T, WaitError> {
        let mut changes = self.shared.changes();
        let seen = async {
            loop {
                changes.borrow_and_update();
                if let Some(value) = self.view(&read) {
                    return Some(value);
                }
                changes.changed().await.ok()?;
            }
        };
        let seen = tokio::time::timeout(within, seen).await.ok().flatten();
        seen.ok_or_else(|| {
            let events = self.view(|view| {
                view.events().iter().rev().take(20).map(Event::to_string).collect::<Vec<_>>()
            });
            WaitError { within, events: events.into_iter().rev().collect::<Vec<_>>().join("\n") }
        })
    }

    /// Capacity and allocatable as the node's status computes them: a resource that stopped longer
    /// ago than the grace is deleted.
    pub fn capacity(&self, resource: &ResourceName) -> Capacity {
        self.view(|view| view.capacity(resource))
    }

    /// Every pod, in the order of creation.
    #[must_use]
    pub fn pods(&self) -> Vec<Pod> {
        self.view(|view| view.pods().to_vec())
    }

    /// The devices that the kubelet has recorded for a container.
    #[must_use]
    pub fn devices(
        &self,
        pod_uid: &str,
        container: &str,
    ) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        self.view(|view| view.devices(pod_uid, container))
    }

    /// The first place where the real kubelet would have crashed, if any.
    #[must_use]
    pub fn panicked(&self) -> Option<String> {
        self.view(|view| view.panicked().map(str::to_owned))
    }
}
