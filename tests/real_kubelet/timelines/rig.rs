//! The two kubelets that run the scripts: a real one, and the simulated one on real sockets.

use super::plugin::RESOURCE;
use crate::node::Node;
use crate::recording::tasks::Loop;
use crate::timeline::{first_list_ms, first_pods_ms};
use holdfast::domain::ResourceName;
use holdfast::lab::sim::kubelet::{
    EventKind, Gate, Hook, HookTable, Kubelet, KubeletConfig, PodPhase, PodSpec,
};
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// The progress of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum State {
    /// No pod has this name.
    Absent,
    /// The kubelet has not decided yet, or does not answer.
    Open,
    /// The main container runs. The value identifies its start.
    Runs(String),
    /// The pod was rejected with this message.
    Rejected(String),
}

/// A kubelet and its node.
pub(crate) trait Rig {
    /// The directory in place of `/var/lib/kubelet`.
    fn kubelet_dir(&self) -> PathBuf;
    /// The directory in place of `/`.
    fn host_root(&self) -> PathBuf;
    /// Creates a pod that requests `count` devices. With `init`, an init container requests them
    /// too.
    fn create(&mut self, pod: &str, count: u32, init: bool);
    fn delete(&mut self, pod: &str);
    fn state(&self, pod: &str) -> State;
    /// The UID of a pod that the kubelet knows.
    fn uid(&self, pod: &str) -> Option<String>;
    fn stop(&mut self, signal: Signal);
    fn start(&mut self);
    /// If the kubelet can be held, it waits before it processes the first pods of its next start,
    /// until [`Rig::release`].
    fn hold(&mut self);
    fn release(&mut self);
    /// When the present kubelet processed its first pods, if it has.
    fn first_batch(&self) -> Option<FirstBatch>;
}

/// When a kubelet processed the pods that it found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct FirstBatch {
    /// Milliseconds after it began to accept registrations.
    pub(crate) after_ms: f64,
    /// Whether it had a list of devices by then. The kubelet does not wait for one.
    pub(crate) had_a_list: bool,
}

/// The real kubelet.
#[derive(Debug)]
pub(crate) struct Real<'a>(pub(crate) &'a mut Node);

impl Rig for Real<'_> {
    fn kubelet_dir(&self) -> PathBuf {
        PathBuf::from("/var/lib/kubelet")
    }

    fn host_root(&self) -> PathBuf {
        PathBuf::from("/")
    }

    fn create(&mut self, pod: &str, count: u32, init: bool) {
        self.0.pods.create(pod, RESOURCE, count, init);
    }

    fn delete(&mut self, pod: &str) {
        self.0.pods.delete(pod);
    }

    fn state(&self, pod: &str) -> State {
        if self.0.pods.list().is_none() {
            return State::Open;
        }
        match self.0.pods.get(pod) {
            None => State::Absent,
            Some(pod) if pod.phase == "Failed" => {
                State::Rejected(format!("{}: {}", pod.reason, pod.message))
            }
            Some(pod) if pod.runs() => State::Runs(format!("{} {}", pod.started_at, pod.restarts)),
            Some(_) => State::Open,
        }
    }

    fn uid(&self, pod: &str) -> Option<String> {
        self.0.pods.get(pod).map(|pod| pod.uid)
    }

    fn stop(&mut self, signal: Signal) {
        self.0.stop_kubelet(signal);
    }

    fn start(&mut self) {
        self.0.start_kubelet();
    }

    fn hold(&mut self) {}

    fn release(&mut self) {}

    fn first_batch(&self) -> Option<FirstBatch> {
        let log = self.0.kubelet_log();
        let after_ms = first_pods_ms(&log)?;
        Some(FirstBatch {
            after_ms,
            had_a_list: first_list_ms(&log, RESOURCE).is_some_and(|list| list < after_ms),
        })
    }
}

/// The simulated kubelet.
#[derive(Debug)]
pub(crate) struct Simulated {
    kubelet: Arc<Kubelet>,
    hooks: HookTable,
    held: Option<Gate>,
    resource: ResourceName,
    uids: BTreeMap<String, String>,
    dir: TempDir,
    tasks: Loop,
}

impl Simulated {
    pub(crate) fn start() -> Self {
        let (tasks, dir, hooks) =
            (Loop::start(), tempfile::tempdir().unwrap(), HookTable::default());
        let mut config = KubeletConfig::new(dir.path().join("kubelet"), dir.path().join("host"));
        (config.sync_checkpoint, config.hooks) = (true, hooks.clone());
        let kubelet = Arc::new(tasks.run(Kubelet::start(config)).unwrap());
        Simulated {
            kubelet,
            hooks,
            held: None,
            resource: RESOURCE.parse().unwrap(),
            uids: BTreeMap::new(),
            dir,
            tasks,
        }
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        self.kubelet.stop();
    }
}

impl Rig for Simulated {
    fn kubelet_dir(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    fn host_root(&self) -> PathBuf {
        self.dir.path().join("host")
    }

    fn create(&mut self, pod: &str, count: u32, init: bool) {
        let mut spec = PodSpec::new("default", pod);
        if init {
            spec = spec.init("setup", &self.resource, count);
        }
        let spec = spec.app("main", &self.resource, count);
        self.uids.insert(pod.to_owned(), spec.uid.clone());
        let kubelet = Arc::clone(&self.kubelet);
        self.tasks.spawn(async move { drop(kubelet.add_pod(spec).await) });
        // The socket is bound as soon as the task has begun.
        let uid = self.uids[pod].clone();
        self.tasks
            .run(self.kubelet.wait_for(|view| view.pod(&uid).is_some(), crate::SOON))
            .unwrap();
    }

    fn delete(&mut self, pod: &str) {
        assert!(self.kubelet.delete_pod(&self.uids[pod]).unwrap());
    }

    fn state(&self, pod: &str) -> State {
        self.kubelet.view(|view| {
            let Some(found) = self.uids.get(pod).and_then(|uid| view.pod(uid)) else { return State::Absent };
            let uid = &found.spec.uid;
            let is_start = |kind: &EventKind| matches!(kind, EventKind::ContainerStarted { pod_uid, container } if pod_uid == uid && container == "main");
            match &found.phase {
                PodPhase::Failed { reason, message } => State::Rejected(format!("{reason}: {message}")),
                PodPhase::Running if found.is_alive() => {
                    State::Runs(view.events().iter().filter(|event| is_start(&event.kind)).count().to_string())
                }
                _ => State::Open,
            }
        })
    }

    fn uid(&self, pod: &str) -> Option<String> {
        self.uids.get(pod).cloned()
    }

    fn stop(&mut self, _signal: Signal) {
        self.kubelet.stop();
    }

    fn start(&mut self) {
        self.tasks.run(self.kubelet.start_again()).unwrap();
    }

    fn hold(&mut self) {
        self.held = Some(self.hooks.gate(Hook::BeforeFirstBatch));
    }

    fn release(&mut self) {
        self.held = None;
    }

    fn first_batch(&self) -> Option<FirstBatch> {
        self.kubelet.view(|view| {
            let looks = |kind: &EventKind| {
                matches!(kind, EventKind::Admitted { .. } | EventKind::Rejected { .. })
            };
            let after = view.events().since_start(looks)?;
            let had_a_list = view.first_list(&self.resource).is_some_and(|list| list < after);
            Some(FirstBatch { after_ms: after.as_secs_f64() * 1000.0, had_a_list })
        })
    }
}
