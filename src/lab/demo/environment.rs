//! The setup of the demo: a node, a kubelet and a daemon in a temporary directory, and functions to
//! observe them.
//!
//! Observations are texts. A claim's expectation is a text in the same words, and waiting means
//! waiting until the two are equal.

use super::daemon::Daemon;
use super::{Options, Step, Stop};
use crate::app::Settings;
use crate::config::{self, Roots};
use crate::domain::{Grant, Inventory, ResourceName};
use crate::kubelet::checkpoint;
use crate::lab::sim::hardware::SimNode;
use crate::lab::sim::kubelet::{EventKind, Kubelet, KubeletConfig, PodPhase, PodSpec, View};
use crate::store::{self, StoreError};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::watch;

/// The timeout of steps that take milliseconds, or seconds in an emulated machine.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// The timeout if a step is broken: most likely it never succeeds. A device that has
/// returned is healthy after up to 2 s, since only the second rescan after its return may find it
/// healthy.
const STEP_TIMEOUT_IF_BROKEN: Duration = Duration::from_secs(4);

/// The configuration of the demo's daemon.
const CONFIG: &str = r#"[telemetry]
listen = "off"

[[resource]]
name = "nvidia.com/gpu"
class = "gpu"
select = { vendor = ["10de"] }

[[resource]]
name = "example.com/rdma"
class = "rdma"
select = { vendor = ["15b3"], vf = true }

[[resource]]
name = "intel.com/fpga"
class = "fpga"
"#;

/// A socket's path has at most 107 bytes, and the part after the temporary directory needs the
/// rest.
const TEMP_DIR_MAX: usize = 22;

/// All participants. They are dropped in the order of the fields: the directory comes last.
#[derive(Debug)]
pub(super) struct Environment {
    daemon: Option<Daemon>,
    pub(super) kubelet: Kubelet,
    pub(super) node: SimNode,
    pub(super) settings: Settings,
    pub(super) gpu: ResourceName,
    pub(super) rdma: ResourceName,
    pub(super) fpga: ResourceName,
    break_step: Option<Step>,
    /// The time from the kubelet's socket to its pods.
    pub(super) first_batch_after: Duration,
    _dir: TempDir,
}

impl Environment {
    /// Makes the node and starts its kubelet; the daemon starts in the first step.
    pub(super) async fn set(options: &Options) -> Result<Environment, Stop> {
        let first_batch_after = Duration::from_millis(options.admit_after.into());
        let temp = std::env::temp_dir();
        let temp = if temp.as_os_str().len() > TEMP_DIR_MAX { PathBuf::from("/tmp") } else { temp };
        let cannot = |error: std::io::Error| {
            Stop::Aborted(format!(
                "cannot create a temporary directory in `{}`: {error}",
                temp.display()
            ))
        };
        let dir = tempfile::Builder::new().prefix("hf-").tempdir_in(&temp).map_err(cannot)?;
        let at = |name: &str| dir.path().join(name);

        let file = at("config.toml");
        std::fs::write(&file, CONFIG)?;
        let config = config::load(Some(&file), &config::Node::default())
            .map_err(|error| Stop::Aborted(error.to_string()))?;
        let [gpu, rdma, fpga] = config.resources.as_slice() else {
            return Err(Stop::Aborted("the demo's configuration lacks a resource".to_owned()));
        };
        let (gpu, rdma, fpga) = (gpu.name.clone(), rdma.name.clone(), fpga.name.clone());

        let node = SimNode::create(at("host"))?;
        let kubelet = Kubelet::start(KubeletConfig {
            first_batch_after,
            ..KubeletConfig::new(at("kubelet"), at("host"))
        })
        .await?;
        let roots =
            Roots { host: at("host"), kubelet: at("kubelet"), state: at("state"), run: at("run") };
        let settings = Settings::new(roots, config);
        Ok(Environment {
            daemon: None,
            kubelet,
            node,
            settings,
            gpu,
            rdma,
            fpga,
            break_step: options.break_step,
            first_batch_after,
            _dir: dir,
        })
    }

    /// The step that is broken.
    pub(super) fn broken_step(&self) -> Option<Step> {
        self.break_step
    }

    /// Whether this step is broken.
    pub(super) fn breaks(&self, step: Step) -> bool {
        self.break_step == Some(step)
    }

    /// The timeout of steps that take milliseconds.
    pub(super) fn timeout(&self) -> Duration {
        if self.break_step.is_some() { STEP_TIMEOUT_IF_BROKEN } else { STEP_TIMEOUT }
    }

    /// Starts the daemon. Returns the time until its first inventory.
    pub(super) async fn start_daemon(&mut self) -> Result<Duration, Stop> {
        let began = Instant::now();
        self.daemon = Some(Daemon::start(self.settings.clone()).await?);
        Ok(began.elapsed())
    }

    /// Shuts the daemon down, if there is one.
    pub(super) async fn stop_daemon(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.stop().await;
        }
    }

    /// Takes the daemon out of the setup.
    pub(super) fn take_daemon(&mut self) -> Option<Daemon> {
        self.daemon.take()
    }

    /// Adds a pod and waits until the kubelet has decided on it. Returns its UID.
    pub(super) async fn add_pod(&self, spec: PodSpec) -> String {
        let uid = spec.uid.clone();
        // A pod without a decision stays pending, and the claims report that.
        drop(tokio::time::timeout(self.timeout(), self.kubelet.add_pod(spec)).await);
        uid
    }

    pub(super) fn daemon(&self) -> Result<&Daemon, Stop> {
        self.daemon.as_ref().ok_or_else(|| Stop::Aborted("no daemon runs".to_owned()))
    }

    /// The resources, in the order of the configuration.
    pub(super) fn resources(&self) -> [&ResourceName; 3] {
        [&self.gpu, &self.rdma, &self.fpga]
    }

    /// The live grants as a reader of the disk finds them, with or without a running daemon.
    pub(super) fn on_disk(&self) -> Result<Vec<Grant>, StoreError> {
        store::peek(self.state_dir()).map(|recovered| recovered.grants)
    }

    pub(super) fn state_dir(&self) -> &Path {
        &self.settings.roots.state
    }

    /// The path of the kubelet's checkpoint.
    pub(super) fn kubelet_checkpoint(&self) -> PathBuf {
        self.settings.roots.kubelet.join("device-plugins").join(checkpoint::FILE_NAME)
    }

    /// Waits until the kubelet shows the expected text. Returns its last text.
    pub(super) async fn kubelet_shows(
        &self,
        expected: &str,
        text_of: impl Fn(&View<'_>) -> String,
    ) -> String {
        match self.kubelet.wait_for(|view| text_of(view) == expected, self.timeout()).await {
            Ok(()) => expected.to_owned(),
            Err(_) => self.kubelet.view(text_of),
        }
    }

    /// Waits until a view of the daemon shows the expected text. Returns its last text.
    pub(super) async fn daemon_shows<T>(
        &self,
        view: &watch::Receiver<T>,
        expected: &str,
        text_of: impl Fn(&T) -> String,
    ) -> String {
        let mut view = view.clone();
        if let Ok(Ok(_)) =
            tokio::time::timeout(self.timeout(), view.wait_for(|value| text_of(value) == expected))
                .await
        {
            return expected.to_owned();
        }
        text_of(&view.borrow())
    }

    /// Allocatable and capacity of every resource, as in the node's status.
    pub(super) fn capacities(&self, view: &View<'_>) -> String {
        let of = |resource: &&ResourceName| {
            let capacity = view.capacity(resource);
            format!("{resource}: {} of {} allocatable", capacity.allocatable, capacity.capacity)
        };
        self.resources().iter().map(of).collect::<Vec<_>>().join("\n")
    }

    /// The expected text of the same.
    pub(super) fn capacities_of(&self, allocatable: [usize; 3], capacity: [usize; 3]) -> String {
        let counts = allocatable.into_iter().zip(capacity);
        let of = |(resource, (allocatable, capacity))| {
            format!("{resource}: {allocatable} of {capacity} allocatable")
        };
        self.resources().into_iter().zip(counts).map(of).collect::<Vec<_>>().join("\n")
    }
}

/// The number of healthy devices of each resource.
pub(super) fn offered(inventory: &Inventory) -> String {
    let healthy = |offering: &crate::domain::Offering| {
        offering.devices.values().filter(|offered| offered.health.is_healthy()).count()
    };
    let lines = inventory
        .resources
        .iter()
        .map(|(name, offering)| format!("{name}: {} healthy", healthy(offering)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Every pod and its phase.
pub(super) fn pods(view: &View<'_>) -> String {
    let of = |pod: &crate::lab::sim::kubelet::Pod| match &pod.phase {
        PodPhase::Pending => format!("{}: pending", pod.spec.name),
        PodPhase::Running if pod.is_alive() => format!("{}: running", pod.spec.name),
        PodPhase::Running => format!("{}: admitted, but no container runs", pod.spec.name),
        PodPhase::Succeeded => format!("{}: completed", pod.spec.name),
        PodPhase::Failed { reason, message } => {
            format!("{}: killed, {reason}: {message}", pod.spec.name)
        }
    };
    view.pods().iter().map(of).collect::<Vec<_>>().join("\n")
}

/// The expected text of the same if all pods run.
pub(super) fn all_run(view: &View<'_>) -> String {
    view.pods()
        .iter()
        .map(|pod| format!("{}: running", pod.spec.name))
        .collect::<Vec<_>>()
        .join("\n")
}

/// The holders by the kubelet's own record.
pub(super) fn held_by_kubelet(view: &View<'_>) -> String {
    let mut lines = BTreeSet::new();
    for PodSpec { uid, name, containers, .. } in view.pods().iter().map(|pod| &pod.spec) {
        for container in containers.iter().map(|container| &container.name) {
            let held = view.devices(uid, container);
            lines.extend(held.values().flatten().map(|id| format!("{name}/{container}: {id}")));
        }
    }
    lines.into_iter().collect::<Vec<_>>().join("\n")
}

/// The holders by the daemon's grants.
pub(super) fn held_by_grants<'a>(grants: impl IntoIterator<Item = &'a Grant>) -> String {
    let mut lines = BTreeSet::new();
    for grant in grants.into_iter().filter(|grant| grant.is_live()) {
        let holder = holder(grant);
        lines.extend(grant.devices.iter().map(|device| format!("{holder}: {}", device.id)));
    }
    lines.into_iter().collect::<Vec<_>>().join("\n")
}

/// The pod and the container of a grant.
pub(super) fn holder(grant: &Grant) -> String {
    let pod = grant.pod().and_then(|pod| pod.name.as_deref()).unwrap_or("?");
    format!("{pod}/{}", grant.container().unwrap_or("?"))
}

/// The answers to Allocate, one line a call, from the event at `from` on.
pub(super) fn answered(view: &View<'_>, from: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for event in view.events().iter().skip(from) {
        if let EventKind::Allocated { resource, devices, .. } = &event.kind {
            lines.push(granted_line(resource, devices.iter().map(ToString::to_string)));
        }
    }
    lines.sort();
    lines.join("\n")
}

/// The same from grants.
pub(super) fn recorded<'a>(grants: impl IntoIterator<Item = &'a Grant>) -> String {
    let of = |grant: &Grant| {
        granted_line(&grant.resource, grant.devices.iter().map(|device| device.id.to_string()))
    };
    let mut lines: Vec<String> = grants.into_iter().map(of).collect();
    lines.sort();
    lines.join("\n")
}

fn granted_line(resource: &ResourceName, ids: impl Iterator<Item = String>) -> String {
    let ids: BTreeSet<String> = ids.collect();
    format!("{resource}: {}", ids.into_iter().collect::<Vec<_>>().join(" "))
}
