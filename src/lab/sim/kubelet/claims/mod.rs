//! The DRA manager of a simulated kubelet, on real sockets.
//!
//! ```text
//!  plugins_registry/*.sock ─▶ registry ── GetInfo, NotifyRegistrationStatus ─▶ driver
//!                                │ adds an instance: the newest connected one is called
//!  prepare(pod, claims) ─▶ pods ─┴─ NodePrepareResources ─▶ driver
//!                           └─▶ record: dra_manager_state, before Prepare and after Unprepare
//!  health ◀── one stream of each instance
//! ```
//!
//! Order, texts and effects on disk are those of the kubelet. Claims are given to it directly, so
//! it needs no API server. It repeats no Prepare: a test does, when the real one would.

mod instances;
mod pods;
mod record;
mod registry;
mod release;
#[cfg(test)]
mod tests;

pub use release::{Release, Version};

use self::instances::{Instance, Report};
use self::record::ClaimInfo;
use self::registry::Registry;
use super::sockets::link::Links;
use crate::domain::{CheckpointClaimDevice, ClaimHealth, ClaimRef, DraName};
use crate::host::DirWatch;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::Channel;

/// A claim as the API server has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// UID, namespace and name.
    pub claim: ClaimRef,
    /// The UIDs of the pods that it is reserved for.
    pub pods: BTreeSet<String>,
    /// The drivers of its allocation.
    pub drivers: BTreeSet<String>,
}

/// The times of the kubelet; by default those of the real one.
#[derive(Debug, Clone)]
pub struct Times {
    /// Between two turns of the plugin manager.
    pub turn: Duration,
    /// The limit to dial a registration socket.
    pub dial: Duration,
    /// After a failed dial.
    pub dial_again: Duration,
    /// The limit of GetInfo.
    pub get_info: Duration,
    /// The limit of NotifyRegistrationStatus.
    pub notify: Duration,
    /// After the first failed registration of a socket; doubled after each further one.
    pub again: Duration,
    /// The longest wait after a failed registration.
    pub again_max: Duration,
    /// The limit of Prepare and Unprepare.
    pub call: Duration,
    /// After the end of a health stream.
    pub health_again: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Times {
            turn: Duration::from_secs(1),
            dial: Duration::from_secs(10),
            dial_again: Duration::from_secs(1),
            get_info: Duration::from_secs(1),
            notify: Duration::from_secs(5),
            again: Duration::from_millis(500),
            again_max: Duration::from_secs(122),
            call: Duration::from_secs(45),
            health_again: Duration::from_secs(5),
        }
    }
}

/// The directory of a kubelet, and its behaviour.
#[derive(Debug, Clone)]
pub struct ClaimsConfig {
    /// Replaces `/var/lib/kubelet`.
    pub kubelet_dir: PathBuf,
    /// The release at the first start.
    pub release: Release,
    /// Whether a repeated Prepare appends its devices. `None` for what the release does: patch
    /// releases of 1.34 to 1.36 replace them.
    pub appends: Option<bool>,
    /// Its times.
    pub times: Times,
}

/// One registered instance of a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceView {
    /// The number of its registration, counted from the kubelet's start.
    pub number: u64,
    /// The path of its socket.
    pub endpoint: String,
    /// The version that the kubelet has chosen.
    pub version: Version,
    /// Whether it is connected.
    pub is_connected: bool,
}

/// The DRA manager. Dropping it is a kill of the kubelet.
#[derive(Debug)]
pub struct ClaimManager {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: ClaimsConfig,
    release: Mutex<Release>,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

/// The memory of the kubelet.
#[derive(Debug, Default)]
struct State {
    registry: Registry,
    /// By driver, in the order of registration.
    instances: BTreeMap<String, Vec<Instance>>,
    numbers: u64,
    claims: BTreeMap<(String, String), ClaimInfo>,
    health: BTreeMap<String, BTreeMap<DraName, (Report, Instant)>>,
    /// The errors that ended health streams.
    health_ends: Vec<String>,
    /// The errors of registrations.
    failures: Vec<String>,
    links: Links,
    tasks: JoinSet<()>,
}

impl Shared {
    /// Every change is visible to those who wait.
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let result = act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.send_replace(());
        result
    }

    fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn links(&self) -> Links {
        self.read(|state| state.links.clone())
    }

    fn release(&self) -> Release {
        *self.release.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn appends(&self) -> bool {
        self.config.appends.unwrap_or(self.release().appends())
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.with(|state| drop(state.tasks.spawn(task)));
    }

    fn set_channel(&self, number: u64, channel: Option<Channel>) {
        self.with(|state| {
            let instances = state.instances.values_mut().flatten();
            for instance in instances.filter(|instance| instance.number == number) {
                instance.channel.clone_from(&channel);
            }
        });
    }

    async fn wait_for_channel(&self, number: u64) -> Channel {
        let channel = |state: &State| {
            let mut instances = state.instances.values().flatten();
            instances.find(|instance| instance.number == number)?.channel.clone()
        };
        let mut changes = self.changed.subscribe();
        loop {
            changes.borrow_and_update();
            if let Some(channel) = self.read(channel) {
                return channel;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Adds the reports of one message. A device that it lacks keeps its last report.
    fn report(&self, driver: &str, reports: impl Iterator<Item = Report>) {
        let now = Instant::now();
        self.with(|state| {
            let known = state.health.entry(driver.to_owned()).or_default();
            known.extend(reports.map(|report| (report.name.clone(), (report, now))));
        });
    }
}

impl Drop for ClaimManager {
    fn drop(&mut self) {
        self.shared.with(|state| {
            state.tasks.abort_all();
            state.links.cut_all();
        });
    }
}

impl ClaimManager {
    /// Starts it. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// If the directories cannot be made or watched, or the file of the claims is damaged.
    pub fn start(config: ClaimsConfig) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            release: Mutex::new(config.release),
            config,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        });
        let manager = ClaimManager { shared };
        manager.start_again()?;
        Ok(manager)
    }

    /// Kills it: calls are cancelled, connections are cut, its memory is lost.
    pub async fn stop(&self) {
        let mut tasks = self.shared.with(|state| {
            state.links.cut_all();
            std::mem::take(&mut state.tasks)
        });
        tasks.shutdown().await;
        self.shared.with(|state| *state = State::default());
    }

    /// Starts it again with the claims in its file.
    ///
    /// # Errors
    /// As [`ClaimManager::start`].
    pub fn start_again(&self) -> io::Result<()> {
        let kubelet_dir = &self.shared.config.kubelet_dir;
        let registry = kubelet_dir.join("plugins_registry");
        fs::create_dir_all(&registry)?;
        let claims = record::read(kubelet_dir)?;
        let watch = DirWatch::new([registry.clone()])?;
        let key = |info: &ClaimInfo| (info.claim.namespace.clone(), info.claim.name.clone());
        self.shared.with(|state| {
            state.claims = claims.into_iter().map(|info| (key(&info), info)).collect();
            state.tasks.spawn(registry::run(Arc::clone(&self.shared), watch, registry));
        });
        Ok(())
    }

    /// [`ClaimManager::stop`] and [`ClaimManager::start_again`], as another release from now on.
    ///
    /// # Errors
    /// As [`ClaimManager::start`].
    pub async fn restart(&self, release: Release) -> io::Result<()> {
        self.stop().await;
        *self.shared.release.lock().unwrap_or_else(PoisonError::into_inner) = release;
        self.start_again()
    }

    /// Prepares the claims of a pod, as before its sandbox is created.
    ///
    /// # Errors
    /// The text of the kubelet's event. The real one tries again after 60 to 90 s.
    pub async fn prepare(&self, pod: &str, claims: &[Claim]) -> Result<(), String> {
        let (shared, pod, claims) = (Arc::clone(&self.shared), pod.to_owned(), claims.to_vec());
        self.run(async move { pods::prepare(&shared, &pod, &claims).await }).await
    }

    /// Unprepares the claims of a pod whose containers have stopped.
    ///
    /// # Errors
    /// The kubelet's text. The pod stays in Terminating, and the real one tries again.
    pub async fn unprepare(&self, pod: &str) -> Result<(), String> {
        let (shared, pod) = (Arc::clone(&self.shared), pod.to_owned());
        self.run(async move { pods::unprepare(&shared, &pod).await }).await
    }

    /// Runs a flow that ends with the kubelet.
    async fn run(
        &self,
        flow: impl Future<Output = Result<(), String>> + Send + 'static,
    ) -> Result<(), String> {
        let (send, result) = tokio::sync::oneshot::channel();
        self.shared.spawn(async move {
            // The test may have stopped waiting.
            let _ = send.send(flow.await);
        });
        result.await.unwrap_or_else(|_| Err("context canceled".to_owned()))
    }

    /// The devices that a claim has from a driver, as its containers get them.
    #[must_use]
    pub fn devices(&self, claim: &ClaimRef, driver: &str) -> Vec<CheckpointClaimDevice> {
        let key = (claim.namespace.clone(), claim.name.clone());
        self.shared.read(|state| {
            let devices = state.claims.get(&key).and_then(|info| info.drivers.get(driver));
            devices.cloned().unwrap_or_default()
        })
    }

    /// The instances of a driver, in the order of registration.
    #[must_use]
    pub fn instances(&self, driver: &str) -> Vec<InstanceView> {
        let view = |instance: &Instance| InstanceView {
            number: instance.number,
            endpoint: instance.endpoint.clone(),
            version: instance.version,
            is_connected: instance.channel.is_some(),
        };
        self.shared
            .read(|state| state.instances.get(driver).into_iter().flatten().map(view).collect())
    }

    /// The health of a driver's devices as the status of a pod shows it.
    #[must_use]
    pub fn health(&self, driver: &str) -> Vec<ClaimHealth> {
        let release = self.shared.release();
        let health = |(report, at): &(Report, Instant)| {
            let is_late = at.elapsed() > release.health_timeout(report.timeout_seconds);
            ClaimHealth {
                name: report.name.clone(),
                is_healthy: report.is_healthy.filter(|_| !is_late),
                message: if release.reads_messages() {
                    report.message.clone()
                } else {
                    String::new()
                },
            }
        };
        self.shared.read(|state| {
            let reports = state.health.get(driver).into_iter().flat_map(BTreeMap::values);
            reports.map(health).collect()
        })
    }

    /// The errors that ended health streams since the last start; empty texts for ends without one.
    #[must_use]
    pub fn health_ends(&self) -> Vec<String> {
        self.shared.read(|state| state.health_ends.clone())
    }

    /// The errors of registrations since the last start.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        self.shared.read(|state| state.failures.clone())
    }

    /// Waits until `seen` returns a value, without polling. `None` if it takes too long.
    pub async fn wait_for<T>(
        &self,
        within: Duration,
        seen: impl Fn(&Self) -> Option<T>,
    ) -> Option<T> {
        let mut changes = self.shared.changed.subscribe();
        let waiting = async {
            loop {
                changes.borrow_and_update();
                if let Some(value) = seen(self) {
                    return value;
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::time::timeout(within, waiting).await.ok()
    }
}
