//! A kubelet, as far as a device plugin can tell: the real protocol over real sockets, in this process.
//!
//! It serves Registration and the pod-resources API, dials plugins, follows their lists, admits pods, allocates, keeps
//! the checkpoint, and makes the log folders and cgroups that the node's other eyes look at. Order, texts, codes and
//! effects on disk are those of kubelet 1.25 to 1.36, its races included: the end of an old stream cuts the new client,
//! a listing forgets the reservation of an Allocate under way, a restart rejects pods whose plugin is late. Where the
//! real one would dereference a device that is not in the list, this one records it and stops.
//!
//! ```text
//!  plugin ── Register ─▶ registration ─▶ client ── GetDevicePluginOptions, ListAndWatch ─▶ plugin
//!                             │                                                 │
//!                             ▼                                                 ▼
//!  add_pod ─▶ admission ◀─▶ core (pure: the device manager) ◀──────────────── lists
//!                 │           └─▶ checkpoint ─▶ files ◀─ pod folders, cgroups
//!                 └── GetPreferredAllocation, Allocate ─▶ plugin
//! ```
//!
//! `core` decides and knows no clock, socket or file; everything else carries out. Stopping is a kill: every connection
//! is cut, nothing is unlinked. The node — pods, containers, events — outlives it, and the next start finds it.

mod admission;
mod checkpoint;
mod client;
pub mod core;
pub mod error;
mod event;
mod files;
pub mod held;
mod link;
mod pod;
mod pod_resources;
mod registration;
mod state;
mod view;
mod wire;

#[cfg(test)]
mod tests;

pub use self::core::{Capacity, ENDPOINT_GRACE};
pub use self::event::{Event, EventKind, EventLog};
pub use self::pod::{Container, ContainerKind, ContainerSpec, Pod, PodPhase, PodSpec};
pub use self::view::View;

use self::core::DeviceManager;
use self::pod_resources::PodResourcesService;
use self::registration::RegistrationService;
use self::state::Shared;
use crate::domain::{DeviceId, ResourceName};
use crate::kubelet::proto::podresources_v1::pod_resources_lister_server::PodResourcesListerServer;
use crate::kubelet::proto::v1beta1::registration_server::RegistrationServer;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::Router;

/// Where a kubelet lives, and how it behaves.
#[derive(Debug, Clone)]
pub struct KubeletConfig {
    /// Stands for `/var/lib/kubelet`.
    pub kubelet_dir: PathBuf,
    /// Stands for `/`: log folders and cgroups are made below it.
    pub host_root: PathBuf,
    /// From the registration socket to the admission of the pods that the node has already. A real one was seen to take
    /// 64 to 86 ms.
    pub first_batch_after: Duration,
    /// How long a Register may dial its endpoint.
    pub dial_within: Duration,
    /// Whether the checkpoint is synced to disk before it is renamed, as the real one is. Off, so that a benchmark of a
    /// plugin in the same process does not measure this file.
    pub sync_checkpoint: bool,
    /// Whether a topology policy is active: it looks at more devices, and so crashes at more places.
    pub topology_manager: bool,
}

impl KubeletConfig {
    /// The usual behaviour, at these places.
    pub fn new(kubelet_dir: impl Into<PathBuf>, host_root: impl Into<PathBuf>) -> Self {
        KubeletConfig {
            kubelet_dir: kubelet_dir.into(),
            host_root: host_root.into(),
            first_batch_after: Duration::from_millis(75),
            dial_within: Duration::from_secs(10),
            sync_checkpoint: false,
            topology_manager: false,
        }
    }
}

/// What became of an added pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOutcome {
    /// Its UID.
    pub uid: String,
    /// Running or failed; pending only if the kubelet goes down or the pod is deleted before it decides.
    pub phase: PodPhase,
}

/// A wait that took too long.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not seen within {within:?}; the newest events:\n{events}")]
pub struct WaitError {
    /// How long it was waited.
    pub within: Duration,
    /// What happened last.
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
        let kubelet = Kubelet { shared: Arc::new(Shared::new(config)) };
        kubelet.start_again().await?;
        Ok(kubelet)
    }

    /// Kills the kubelet: connections are cut, sockets' files stay. Containers run on.
    pub fn stop(&self) {
        self.shared.close();
    }

    /// Starts it again on what the last one left. An error if it runs.
    pub async fn start_again(&self) -> Result<(), io::Error> {
        let shared = &self.shared;
        if shared.peek().life.is_some() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the kubelet runs"));
        }
        shared.files.create()?;
        let life = shared.open(self.recover());
        let served = self.serve(life);
        if served.is_err() {
            shared.close();
        }
        served
    }

    /// [`Kubelet::stop`] and [`Kubelet::start_again`].
    pub async fn restart(&self) -> Result<(), io::Error> {
        self.stop();
        self.start_again().await
    }

    /// The device manager as the checkpoint leaves it; an empty one where there is none.
    fn recover(&self) -> DeviceManager<Arc<client::Client>> {
        let shared = &self.shared;
        let decoded = match shared.files.read_checkpoint() {
            Ok(bytes) => checkpoint::decode(&bytes).map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Default::default()),
            Err(error) => Err(error.to_string()),
        };
        let (held, known) = decoded.unwrap_or_else(|error| {
            shared.log(EventKind::CheckpointUnreadable { error });
            Default::default()
        });
        let running = shared.peek().pods.iter().flat_map(running_containers).collect();
        DeviceManager::start(held, known, running, shared.now())
    }

    /// Binds both sockets, in the kubelet's order, and starts the sync loop.
    fn serve(&self, life: u64) -> Result<(), io::Error> {
        let shared = &self.shared;
        let service = PodResourcesService { shared: Arc::clone(shared), life };
        // Bound beside its place and moved there, so that the path is never absent.
        let socket = shared.files.pod_resources_socket();
        let temporary = socket.with_file_name(format!("kubelet.sock.{life}"));
        remove(&temporary)?;
        let listener = UnixListener::bind(&temporary)?;
        std::fs::rename(&temporary, &socket)?;
        self.spawn_server(life, listener, Server::builder().add_service(PodResourcesListerServer::new(service)));

        shared.files.remove_sockets()?;
        let listener = UnixListener::bind(shared.files.registration_socket())?;
        shared.log(EventKind::Started { start: life });
        let service = RegistrationService { shared: Arc::clone(shared), life };
        self.spawn_server(life, listener, Server::builder().add_service(RegistrationServer::new(service)));

        let looping = Arc::clone(shared);
        shared.spawn(life, async move { admission::sync_loop(&looping, life).await });
        Ok(())
    }

    fn spawn_server(&self, life: u64, listener: UnixListener, router: Router) {
        let Some(links) = self.shared.life(life, |present| present.links.clone()) else { return };
        let incoming = UnixListenerStream::new(listener).map(move |stream| links.add(0, stream?));
        self.shared.spawn(life, async move {
            // It ends with the life; a connection that fails ends alone.
            let _ = router.serve_with_incoming(incoming).await;
        });
    }

    /// Binds a pod to the node and waits until the kubelet has decided on it.
    pub async fn add_pod(&self, spec: PodSpec) -> PodOutcome {
        let uid = spec.uid.clone();
        let mut changes = self.shared.changes();
        self.shared.update(|state| state.pods.push(Pod::new(spec)));
        self.shared.pod_added.notify_one();
        loop {
            changes.borrow_and_update();
            let decided = self.view(|view| {
                let Some(pod) = view.pod(&uid) else { return Some(PodPhase::Pending) };
                (pod.phase != PodPhase::Pending || !view.is_running()).then(|| pod.phase.clone())
            });
            if let Some(phase) = decided {
                return PodOutcome { uid, phase };
            }
            if changes.changed().await.is_err() {
                return PodOutcome { uid, phase: PodPhase::Pending };
            }
        }
    }

    /// Deletes a pod: its containers end, its cgroup empties and goes, its log folder goes. Also ends what a pod left
    /// behind that was deleted by force. Says whether there was one.
    pub fn delete_pod(&self, uid: &str) -> Result<bool, io::Error> {
        let spec = self.shared.peek().spec(uid).cloned();
        let Some(spec) = spec else { return Ok(false) };
        self.shared.files.remove_cgroup(uid)?;
        self.shared.files.remove_logs(&spec)?;
        self.shared.update(|state| {
            state.orphans.remove(uid);
            state.pods.retain(|pod| pod.spec.uid != uid);
        });
        self.shared.log(EventKind::Deleted { pod_uid: uid.to_owned() });
        Ok(true)
    }

    /// Deletes a pod by force: the kubelet counts its devices as free at once, while its containers run on until
    /// [`Kubelet::delete_pod`]. Says whether there was one.
    pub fn force_delete_pod(&self, uid: &str) -> bool {
        self.shared.update(|state| {
            let orphan = state.pods.iter().position(|pod| pod.spec.uid == uid).map(|index| state.pods.remove(index));
            orphan.is_some_and(|orphan| state.orphans.insert(uid.to_owned(), orphan.spec).is_none())
        })
    }

    /// A container crashes and waits for its next start: after a restart of the kubelet it does not count as running.
    pub fn crash_container(&self, pod_uid: &str, container: &str) {
        self.shared.update(|state| {
            if let Some(container) = state.pod(pod_uid).and_then(|pod| pod.containers.get_mut(container)) {
                container.running = false;
            }
        });
    }

    /// Looks at everything at one moment.
    pub fn view<R>(&self, look: impl FnOnce(&View<'_>) -> R) -> R {
        let now = self.shared.now();
        look(&View { state: &self.shared.peek(), now })
    }

    /// Waits until the view satisfies `seen`, without polling.
    pub async fn wait_for(&self, seen: impl Fn(&View<'_>) -> bool, within: Duration) -> Result<(), WaitError> {
        self.wait_for_some(|view| seen(view).then_some(()), within).await
    }

    /// Waits until the view gives a value, without polling.
    pub async fn wait_for_some<T>(&self, look: impl Fn(&View<'_>) -> Option<T>, within: Duration) -> Result<T, WaitError> {
        let mut changes = self.shared.changes();
        let seen = async {
            loop {
                changes.borrow_and_update();
                if let Some(value) = self.view(&look) {
                    return Some(value);
                }
                changes.changed().await.ok()?;
            }
        };
        let seen = tokio::time::timeout(within, seen).await.ok().flatten();
        seen.ok_or_else(|| {
            let events = self.view(|view| view.events().iter().rev().take(20).map(Event::to_string).collect::<Vec<_>>());
            WaitError { within, events: events.into_iter().rev().collect::<Vec<_>>().join("\n") }
        })
    }

    /// Capacity and allocatable as the node's status computes them: what stopped longer ago than the grace is deleted.
    pub fn capacity(&self, resource: &ResourceName) -> Capacity {
        let now = self.shared.now();
        let life = self.view(|view| view.state.life.as_ref().map(|life| life.number));
        if let Some(life) = life
            && self.shared.life(life, |present| present.manager.expire(now)) == Some(true)
        {
            // A failure is in the event log.
            let _ = self.shared.write_checkpoint(life);
        }
        self.view(|view| view.capacity(resource))
    }

    /// Every pod, in the order of creation.
    #[must_use]
    pub fn pods(&self) -> Vec<Pod> {
        self.view(|view| view.pods().to_vec())
    }

    /// What the kubelet has recorded for a container.
    #[must_use]
    pub fn devices(&self, pod_uid: &str, container: &str) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        self.view(|view| view.devices(pod_uid, container))
    }

    /// Where the real kubelet would have crashed first, if it would have.
    #[must_use]
    pub fn panicked(&self) -> Option<String> {
        self.view(|view| view.panicked().map(str::to_owned))
    }
}

fn running_containers(pod: &Pod) -> impl Iterator<Item = (String, String)> {
    let running = pod.containers.iter().filter(|(_, container)| container.running);
    running.map(|(name, _)| (pod.spec.uid.clone(), name.clone()))
}

fn remove(path: &std::path::Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
