//! Runs a script on one kubelet: starts its steps, waits for the expected observations, and records
//! all of them.

use super::plugin::{Plugin, RESOURCE};
use super::rig::{Rig, State};
use crate::recording::steps::Steps;
use crate::recording::tasks::Loop;
use crate::recording::timeline::{Note, Recorder, Timeline, gap_ms};
use crate::{SOON, wait_for};
use base64::Engine as _;
use holdfast::host::pods::PodCgroups;
use holdfast::kubelet::proto::podresources_v1 as resources;
use holdfast::kubelet::proto::podresources_v1::pod_resources_lister_client::PodResourcesListerClient;
use holdfast::kubelet::uds;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Without a golden timeline, a step is over when nothing was observed for this time.
const QUIET: Duration = Duration::from_secs(2);

/// The times of a start that the simulator has as defaults.
pub(crate) const TO_KUBELET_SOCKET: &str = "pod-resources API to kubelet.sock";
pub(crate) const TO_FIRST_BATCH: &str = "kubelet.sock to the first pods";

/// Lanes that are read at the end of a step.
const CHECKPOINT: &str = "the checkpoint says";
const DIRECTORY: &str = "the directory has";

/// The recording of one script.
#[derive(Debug, Default)]
pub(crate) struct Played {
    pub(crate) notes: Vec<Note>,
    /// Measured times by name, in milliseconds.
    pub(crate) figures: Vec<(&'static str, f64)>,
    /// Whether the kubelet was faster than the plugin where the script needs the plugin first.
    pub(crate) is_lost: bool,
}

/// One script on one kubelet.
pub(crate) struct Player<'a> {
    pub(crate) rig: &'a mut dyn Rig,
    recorder: Recorder,
    steps: Steps<'a>,
    /// Added to the names of pods, but not to the recorded names.
    suffix: String,
    uids: BTreeMap<String, String>,
    running: BTreeMap<String, String>,
    figures: Vec<(&'static str, f64)>,
    pub(crate) is_lost: bool,
    tasks: Loop,
}

impl<'a> Player<'a> {
    /// Pods of another attempt have other names, since a static pod's UID is a hash of its
    /// manifest.
    pub(crate) fn new(
        rig: &'a mut dyn Rig,
        recorder: Recorder,
        golden: Option<&'a Timeline>,
        attempt: usize,
    ) -> Self {
        let suffix = if attempt == 0 { String::new() } else { format!("-{attempt}") };
        let (uids, running, figures) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Player {
            rig,
            steps: Steps::new(recorder.clone(), golden, QUIET),
            recorder,
            suffix,
            uids,
            running,
            figures,
            is_lost: false,
            tasks: Loop::start(),
        }
    }

    fn device_plugins(&self) -> PathBuf {
        self.rig.kubelet_dir().join("device-plugins")
    }

    pub(crate) fn plugin(&self, name: &'static str) -> Plugin {
        Plugin::serve(&self.device_plugins(), &self.recorder, name, Ok(()))
    }

    pub(crate) fn broken_plugin(&self, name: &'static str) -> Plugin {
        Plugin::serve(&self.device_plugins(), &self.recorder, name, Err("not ready"))
    }

    pub(crate) fn begin(&mut self, step: &str) {
        self.steps.begin(step);
    }

    pub(crate) fn end(&self) {
        self.steps.end();
    }

    pub(crate) fn noted(&self, lane: &str, text: &str) {
        self.steps.noted(lane, text);
    }

    pub(crate) fn finish(self) -> Played {
        Played { notes: self.steps.finish(), figures: self.figures, is_lost: self.is_lost }
    }

    /// Records the time between two observations of the present step, if both were made.
    pub(crate) fn figure(&mut self, what: &'static str, from: (&str, &str), to: (&str, &str)) {
        let ms = gap_ms(&self.recorder.notes(), &self.steps.step, from, to);
        self.figures.extend(ms.map(|ms| (what, ms)));
    }

    /// The times of a kubelet's start that are visible from outside. `calls` is its connection.
    pub(crate) fn figures_of_a_start(&mut self, calls: &str) {
        let made = ("kubelet.sock", "created");
        self.figure(TO_KUBELET_SOCKET, ("pod-resources/kubelet.sock", "replaced"), made);
        self.figure("kubelet.sock to the first call", made, (calls, "GetDevicePluginOptions"));
        self.figure("kubelet.sock to ListAndWatch", made, (calls, "ListAndWatch"));
        self.figures.extend(self.rig.first_batch().map(|batch| (TO_FIRST_BATCH, batch.after_ms)));
        self.figure("first file cleaned up to kubelet.sock", ("strange.sock", "deleted"), made);
    }

    fn named(&self, pod: &str) -> String {
        format!("{pod}{}", self.suffix)
    }

    /// Creates a pod and waits until it runs.
    pub(crate) fn run_pod(&mut self, name: &str, count: u32, init: bool) {
        self.rig.create(&self.named(name), count, init);
        self.runs(name);
    }

    /// Waits until a pod runs, and records whether its container has started again.
    pub(crate) fn runs(&mut self, name: &str) {
        let pod = self.named(name);
        let start = wait_for(&format!("{name} runs"), SOON, || match self.rig.state(&pod) {
            State::Runs(start) => Some(start),
            State::Rejected(message) => panic!("{name}: {message}"),
            State::Absent | State::Open => None,
        });
        self.uids.extend(self.rig.uid(&pod).map(|uid| (uid, name.to_owned())));
        let before = self.running.insert(name.to_owned(), start.clone());
        let text = if before.as_ref() == Some(&start) { "runs on" } else { "runs" };
        self.recorder.note(format!("pod {name}"), text);
    }

    pub(crate) fn is_rejected(&mut self, name: &str) {
        let pod = self.named(name);
        let message =
            wait_for(&format!("{name} is rejected"), SOON, || match self.rig.state(&pod) {
                State::Rejected(message) => Some(message),
                _ => None,
            });
        self.recorder.note(format!("pod {name}"), message);
    }

    /// Waits until a rejected pod has ended. At first its devices count as free although its
    /// containers run. While these are killed, the devices count as held again.
    pub(crate) fn is_over(&mut self, name: &str) {
        let pod = self.named(name);
        let uid = self.rig.uid(&pod).unwrap();
        let socket = self.rig.kubelet_dir().join("pod-resources/kubelet.sock");
        wait_for(&format!("{name} is over"), SOON, || {
            let is_dead = PodCgroups::find(&self.rig.host_root(), None).state(&uid).is_dead();
            let is_listed = |pods: &String| pods.contains(&format!("{pod}/"));
            (is_dead
                && self.tasks.run(listed(socket.clone())).is_some_and(|pods| !is_listed(&pods)))
            .then_some(())
        });
        self.recorder.note(format!("pod {name}"), "is over");
    }

    /// Deletes a pod and waits until the kubelet no longer knows it.
    pub(crate) fn delete_pod(&mut self, name: &str) {
        let pod = self.named(name);
        self.rig.delete(&pod);
        wait_for(&format!("{name} was removed"), SOON, || {
            (self.rig.state(&pod) == State::Absent).then_some(())
        });
        self.recorder.note(format!("pod {name}"), "gone");
    }

    /// Waits until the kubelet reports this number of allocatable devices.
    pub(crate) fn allocatable(&mut self, count: usize) {
        let socket = self.rig.kubelet_dir().join("pod-resources/kubelet.sock");
        wait_for(&format!("{count} devices are allocatable"), SOON, || {
            self.recorder.read_directory();
            (self.tasks.run(allocatable(socket.clone())) == Some(count)).then_some(())
        });
        self.recorder.note("allocatable", count.to_string());
    }

    /// Records the kubelet's checkpoint of the resource.
    pub(crate) fn checkpoint(&mut self) {
        let text = fs::read(self.device_plugins().join("kubelet_internal_checkpoint")).unwrap();
        let document: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let texts = |value: &serde_json::Value| -> BTreeSet<String> {
            value
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|id| id.as_str().map(str::to_owned))
                .collect()
        };
        let mut entries = BTreeSet::new();
        for entry in document["Data"]["PodDeviceEntries"].as_array().into_iter().flatten() {
            let uid = entry["PodUID"].as_str().unwrap();
            let pod = self.uids.get(uid).map_or("unknown", String::as_str);
            for (node, ids) in entry["DeviceIDs"].as_object().unwrap() {
                let ids: Vec<String> = texts(ids).into_iter().collect();
                let response = base64::engine::general_purpose::STANDARD
                    .decode(entry["AllocResp"].as_str().unwrap());
                let held = if response.is_ok_and(|bytes| !bytes.is_empty()) {
                    "with its answer"
                } else {
                    "without an answer"
                };
                entries.insert(format!(
                    "{pod}/{}: {} on node {node}, {held}",
                    entry["ContainerName"].as_str().unwrap(),
                    ids.join(" ")
                ));
            }
        }
        let registered: Vec<String> =
            texts(&document["Data"]["RegisteredDevices"][RESOURCE]).into_iter().collect();
        self.recorder.note(CHECKPOINT, format!("registered: {}", registered.join(" ")));
        entries.into_iter().for_each(|entry| self.recorder.note(CHECKPOINT, entry));
    }

    /// Records the files of the directory, except those of plugins.
    pub(crate) fn directory(&mut self) {
        let names = fs::read_dir(self.device_plugins())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let names: BTreeSet<String> = names.filter(|name| !name.starts_with('.')).collect();
        self.recorder.note(DIRECTORY, names.into_iter().collect::<Vec<_>>().join(" "));
    }

    /// Calls the pod-resources API repeatedly until dropped. Records each answer that differs from
    /// the previous one.
    pub(crate) fn ask_for_pods(&self) -> Loop {
        let (socket, recorder) =
            (self.rig.kubelet_dir().join("pod-resources/kubelet.sock"), self.recorder.clone());
        let asks = Loop::start();
        asks.spawn(async move {
            let mut last = [String::new(), String::new()];
            loop {
                let listed = listed(socket.clone()).await.unwrap_or_else(|| "no answer".to_owned());
                let devices = allocatable(socket.clone())
                    .await
                    .map_or("no answer".to_owned(), |count| format!("{count} devices"));
                for (lane, (last, now)) in ["List", "GetAllocatableResources"]
                    .iter()
                    .zip(last.iter_mut().zip([listed, devices]))
                {
                    if *last != now {
                        recorder.note(*lane, now.clone());
                        *last = now;
                    }
                }
                // Twice as long as the kubelet's rate limit requires.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        asks
    }
}

async fn pod_resources(
    socket: PathBuf,
) -> Option<PodResourcesListerClient<tonic::transport::Channel>> {
    uds::connect(socket).await.ok().map(PodResourcesListerClient::new)
}

async fn allocatable(socket: PathBuf) -> Option<usize> {
    let mut client = pod_resources(socket).await?;
    let answer = client
        .get_allocatable_resources(resources::AllocatableResourcesRequest {})
        .await
        .ok()?
        .into_inner();
    let ours = answer.devices.iter().filter(|devices| devices.resource_name == RESOURCE);
    Some(ours.map(|devices| devices.device_ids.len()).sum())
}

async fn listed(socket: PathBuf) -> Option<String> {
    let answer = pod_resources(socket)
        .await?
        .list(resources::ListPodResourcesRequest {})
        .await
        .ok()?
        .into_inner();
    let mut pods = BTreeSet::new();
    for pod in answer.pod_resources {
        // The name of a static pod ends with the name of its node.
        let name = pod.name.trim_end_matches("-node");
        for container in pod.containers {
            let ids: BTreeSet<&str> = container
                .devices
                .iter()
                .flat_map(|devices| &devices.device_ids)
                .map(String::as_str)
                .collect();
            let ids: Vec<&str> = ids.into_iter().collect();
            pods.insert(format!("{name}/{}: {}", container.name, ids.join(" ")));
        }
    }
    Some(if pods.is_empty() {
        "no pods".to_owned()
    } else {
        pods.into_iter().collect::<Vec<_>>().join(", ")
    })
}
