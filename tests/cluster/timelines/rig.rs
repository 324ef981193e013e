//! The two kubelets that run the scripts: a real one with a control plane, and the simulated DRA
//! manager.

use super::driver::{DEVICE, DRIVER, POOL};
use crate::api::{CLAIMS, PODS, SLICES};
use crate::cluster::Cluster;
use crate::node::NODE;
use crate::objects::{claim_of, main_started, pod, text_of};
use crate::recording::tasks::Loop;
use crate::upgrades::EVENTS;
use holdfast::domain::ClaimRef;
use holdfast::lab::sim::kubelet::claims::{Claim, ClaimManager, ClaimsConfig, Release, Times};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::watch;

/// The progress of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    /// No pod has this name.
    Absent,
    /// It has not started yet.
    Open,
    /// The container runs. The value identifies its start.
    Runs(String),
}

/// A kubelet and its node.
pub(crate) trait Rig {
    /// The directory in place of `/var/lib/kubelet`.
    fn kubelet_dir(&self) -> PathBuf;
    /// Creates a pod with these claims, and those of them that do not exist.
    fn create(&mut self, pod: &str, claims: &[&str]);
    /// Deletes a pod; by force at once, without the kubelet.
    fn delete(&mut self, pod: &str, by_force: bool);
    fn state(&self, pod: &str) -> State;
    /// The error of the last failed Prepare or Unprepare of a pod, in the kubelet's words.
    fn error(&self, pod: &str) -> Option<String>;
    /// The name of the pod with this UID.
    fn name(&self, uid: &str) -> String;
    /// Kills the kubelet.
    fn stop(&mut self);
    fn start(&mut self);
    /// Deletes the claims of a script.
    fn clear(&mut self);
}

const DEVICES: usize = 4;
const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
/// It ends at SIGTERM.
const SCRIPT: &str = "trap 'exit 0' TERM; sleep 1000000 & wait";

/// The real kubelet.
#[derive(Debug)]
pub(crate) struct Real<'a> {
    cluster: &'a mut Cluster,
    names: BTreeMap<String, String>,
}

impl<'a> Real<'a> {
    /// A cluster with a class for the devices of the driver.
    pub(crate) fn new(cluster: &'a mut Cluster) -> Self {
        let expression = format!("device.driver == \"{DRIVER}\"");
        let class = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": DRIVER},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        });
        if cluster.api.get(&format!("{CLASSES}/{DRIVER}")).is_none() {
            cluster.api.create(CLASSES, &class);
        }
        Real { cluster, names: BTreeMap::new() }
    }

    /// A kubelet deletes the slices of its node when it starts.
    fn publish(&self) {
        let slices = self.cluster.api.list(SLICES);
        if slices.iter().any(|slice| slice["spec"]["driver"] == DRIVER) {
            return;
        }
        let devices: Vec<Value> =
            (0..DEVICES).map(|n| json!({"name": format!("{DEVICE}-{n}")})).collect();
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"generateName": "timeline-"},
            "spec": {
                "driver": DRIVER,
                "nodeName": NODE,
                "pool": {"name": POOL, "generation": 1, "resourceSliceCount": 1},
                "devices": devices,
            },
        });
        self.cluster.api.create(SLICES, &slice);
    }
}

impl Rig for Real<'_> {
    fn kubelet_dir(&self) -> PathBuf {
        PathBuf::from("/var/lib/kubelet")
    }

    fn create(&mut self, name: &str, claims: &[&str]) {
        self.publish();
        for claim in claims {
            let request = json!({"name": "request", "exactly": {"deviceClassName": DRIVER}});
            if self.cluster.api.get(&format!("{CLAIMS}/{claim}")).is_none() {
                let claim = claim_of(claim, json!({"requests": [request]}));
                self.cluster.api.create(CLAIMS, &claim);
            }
        }
        let pod = self.cluster.api.create(PODS, &pod(name, claims, SCRIPT));
        self.names.insert(text_of(&pod, "uid"), name.to_owned());
    }

    fn delete(&mut self, pod: &str, by_force: bool) {
        self.cluster.api.delete(&format!("{PODS}/{pod}"), by_force.then_some(0));
    }

    fn state(&self, pod: &str) -> State {
        let Some(pod) = self.cluster.pod(pod) else { return State::Absent };
        let main = &pod["status"]["containerStatuses"][0]["state"]["running"];
        if main.is_null() { State::Open } else { State::Runs(main_started(&pod)) }
    }

    fn error(&self, pod: &str) -> Option<String> {
        let events = self.cluster.api.list(EVENTS);
        let is_of_pod = |event: &&Value| {
            let uid = event["involvedObject"]["uid"].as_str().unwrap_or_default();
            self.names.get(uid).is_some_and(|name| name == pod)
                && event["reason"] == "FailedPrepareDynamicResources"
        };
        let event = events.iter().find(is_of_pod)?;
        let text = event["message"].as_str().unwrap();
        let prefix = "Failed to prepare dynamic resources: prepare dynamic resources: ";
        Some(text.strip_prefix(prefix).unwrap_or(text).to_owned())
    }

    fn name(&self, uid: &str) -> String {
        self.names.get(uid).cloned().unwrap_or_else(|| "unknown".to_owned())
    }

    fn stop(&mut self) {
        self.cluster.node.kill_kubelet();
    }

    fn start(&mut self) {
        self.cluster.node.start_kubelet();
    }

    fn clear(&mut self) {
        for claim in self.cluster.api.list(CLAIMS) {
            self.cluster.api.delete(&format!("{CLAIMS}/{}", text_of(&claim, "name")), None);
        }
        crate::wait_for("no claim is left", crate::SOON, || {
            self.cluster.api.list(CLAIMS).is_empty().then_some(())
        });
    }
}

/// A pod of the simulated kubelet.
#[derive(Debug, Clone, Default)]
struct SimulatedPod {
    claims: Vec<Claim>,
    is_deleted: bool,
    runs: bool,
    error: Option<String>,
}

type Pods = Arc<Mutex<BTreeMap<String, SimulatedPod>>>;

/// The simulated kubelet. Its pods have their names as UIDs.
#[derive(Debug)]
pub(crate) struct Simulated {
    kubelet: Arc<ClaimManager>,
    pods: Pods,
    is_up: watch::Sender<bool>,
    /// A change of a pod.
    changes: watch::Sender<()>,
    claims: usize,
    dir: TempDir,
    tasks: Loop,
}

impl Simulated {
    pub(crate) fn start() -> Self {
        let (tasks, dir) = (Loop::start(), tempfile::tempdir().unwrap());
        let config = ClaimsConfig {
            kubelet_dir: dir.path().to_owned(),
            release: Release::V1_36,
            appends: None,
            times: Times::default(),
        };
        let kubelet = tasks.run(async { ClaimManager::start(config) }).unwrap();
        Simulated {
            kubelet: Arc::new(kubelet),
            pods: Pods::default(),
            is_up: watch::Sender::new(true),
            changes: watch::Sender::new(()),
            claims: 0,
            dir,
            tasks,
        }
    }
}

/// The time after a failure. The real kubelet takes seconds.
const AGAIN: Duration = Duration::from_millis(300);

/// Does for a pod what the kubelet's sync loop does: it prepares the claims before the pod starts
/// and unprepares them after it was deleted, and repeats what fails.
async fn follow(
    kubelet: Arc<ClaimManager>,
    pods: Pods,
    name: String,
    mut is_up: watch::Receiver<bool>,
    mut changes: watch::Receiver<()>,
) {
    loop {
        // They end with the test.
        if is_up.wait_for(|is_up| *is_up).await.is_err() {
            return;
        }
        changes.borrow_and_update();
        let pod = pods.lock().unwrap()[&name].clone();
        let result = match (pod.is_deleted, pod.runs) {
            (true, _) => kubelet.unprepare(&name).await,
            (false, false) => kubelet.prepare(&name, &pod.claims).await,
            (false, true) => {
                if changes.changed().await.is_err() {
                    return;
                }
                continue;
            }
        };
        {
            let mut pods = pods.lock().unwrap();
            match (result, pods.get_mut(&name).unwrap()) {
                (Ok(()), _) if pod.is_deleted => {
                    pods.remove(&name);
                    return;
                }
                (Ok(()), pod) => {
                    pod.runs = true;
                    continue;
                }
                // It ends with the kubelet, which reports no error then.
                (Err(_), _) if !*is_up.borrow() => continue,
                (Err(_), _) if pod.is_deleted => {}
                (Err(error), pod) => pod.error = Some(error),
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

impl Rig for Simulated {
    fn kubelet_dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    fn create(&mut self, pod: &str, claims: &[&str]) {
        let claim = |name: &&str| Claim {
            claim: ClaimRef {
                uid: format!("{name}-{}", self.claims),
                namespace: "default".to_owned(),
                name: (*name).to_owned(),
            },
            pods: [pod.to_owned()].into(),
            drivers: [DRIVER.to_owned()].into(),
        };
        let claims = claims.iter().map(claim).collect();
        let created = SimulatedPod { claims, ..SimulatedPod::default() };
        self.pods.lock().unwrap().insert(pod.to_owned(), created);
        let (kubelet, pods) = (Arc::clone(&self.kubelet), Arc::clone(&self.pods));
        let (is_up, changes) = (self.is_up.subscribe(), self.changes.subscribe());
        self.tasks.spawn(follow(kubelet, pods, pod.to_owned(), is_up, changes));
    }

    fn delete(&mut self, pod: &str, _by_force: bool) {
        self.pods.lock().unwrap().get_mut(pod).unwrap().is_deleted = true;
        self.changes.send_replace(());
    }

    fn state(&self, pod: &str) -> State {
        match self.pods.lock().unwrap().get(pod) {
            None => State::Absent,
            Some(pod) if pod.runs => State::Runs("its only start".to_owned()),
            Some(_) => State::Open,
        }
    }

    fn error(&self, pod: &str) -> Option<String> {
        self.pods.lock().unwrap().get(pod)?.error.clone()
    }

    fn name(&self, uid: &str) -> String {
        uid.to_owned()
    }

    fn stop(&mut self) {
        self.is_up.send_replace(false);
        self.tasks.run(self.kubelet.stop());
    }

    fn start(&mut self) {
        self.tasks.run(async { self.kubelet.start_again() }).unwrap();
        self.is_up.send_replace(true);
    }

    fn clear(&mut self) {
        self.claims += 1;
    }
}
