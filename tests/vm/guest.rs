//! The side in the guest: an agent that runs scripts and simulated kubelets for the host. Requests
//! and answers are JSON, one a line, on a serial port that the machine has for them.

use futures_util::future::join_all;
use holdfast::domain::ResourceName;
use holdfast::lab::sim::kubelet::{Kubelet, KubeletConfig, PodOutcome, PodPhase, PodSpec};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::rc::Rc;
use std::thread;
use std::time::Duration;
use tokio::process::Command;
use tokio::sync::mpsc;

/// The agent's port, by its name in QEMU.
pub(crate) const PORT: &str = "holdfast.agent";
/// Set in the guest.
pub(crate) const VARIABLE: &str = "HOLDFAST_VM_AGENT";
const NAMESPACE: &str = "default";
const CONTAINER: &str = "main";
/// The part of the host that a kubelet writes for its containers: its cgroups and log folders.
pub(crate) fn host_root(kubelet: &str) -> String {
    format!("/run/hosts{kubelet}")
}

/// From a start of the kubelet to the admission of the pods that the node has. The emulated
/// processor needs longer than another to answer the kubelet's first calls.
const FIRST_PODS_AFTER: Duration = Duration::from_secs(2);

/// What the host requests. A kubelet is named by its directory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Runs a script of the shell.
    Run(String),
    /// Starts a kubelet on a node that has these pods already, and waits for the kubelet's decision
    /// on them.
    StartKubelet { kubelet: String, pods: Vec<Pod> },
    /// Ends a kubelet, as at a shutdown.
    StopKubelet(String),
    /// Adds a pod with one container that requests devices, and waits for the kubelet's decision.
    AddPod { kubelet: String, name: String, resource: ResourceName, count: u32 },
    /// Deletes a pod.
    DeletePod { kubelet: String, uid: String },
    /// The ids that the kubelet may give to a pod.
    Healthy { kubelet: String, resource: ResourceName },
    /// Adds pods with one device to all these kubelets at the same time, without an end, and
    /// deletes the oldest one of a kubelet when it has more than `pods`. Reports each step.
    Churn { kubelets: Vec<String>, name: String, resource: ResourceName, pods: usize },
}

/// A pod that the kubelet has decided on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pod {
    pub(crate) kubelet: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) resource: ResourceName,
    /// The ids of its devices.
    pub(crate) devices: Vec<String>,
    /// The nodes on the host that a runtime opens at each start of its container.
    pub(crate) nodes: Vec<String>,
    pub(crate) alloc_id: Option<String>,
    /// Why it does not run.
    pub(crate) rejected: Option<String>,
}

impl Pod {
    pub(crate) fn alloc_id(&self) -> &str {
        self.alloc_id.as_deref().unwrap_or_else(|| panic!("no grant: {self:?}"))
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The agent serves.
    Ready,
    Done,
    Ran {
        code: Option<i32>,
        output: String,
        errors: String,
    },
    Decided(Pod),
    /// Of the pods that a started kubelet has.
    AllDecided(Vec<Pod>),
    /// The pod with this UID will be deleted.
    Deletes(String),
    Ids(Vec<String>),
    /// The request failed.
    Failed(String),
}

/// Serves the host until it closes the port.
pub(crate) fn serve() {
    let port = port();
    let requests = BufReader::new(port.try_clone().unwrap());
    let (sender, mut received) = mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in requests.lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    actix::System::new().block_on(async {
        let mut agent = Agent { kubelets: BTreeMap::new(), port };
        say(&agent.port, &Answer::Ready);
        while let Some(line) = received.recv().await {
            let answer = agent.answer(serde_json::from_str(&line).unwrap()).await;
            say(&agent.port, &answer);
        }
    });
}

fn say(mut port: &File, answer: &Answer) {
    port.write_all((serde_json::to_string(answer).unwrap() + "\n").as_bytes()).unwrap();
}

fn port() -> File {
    let ports = fs::read_dir("/sys/class/virtio-ports").unwrap().flatten();
    let port = ports
        .map(|entry| entry.path())
        .find(|path| fs::read_to_string(path.join("name")).is_ok_and(|name| name.trim() == PORT))
        .expect("the machine has a port for the agent");
    let node = std::path::Path::new("/dev").join(port.file_name().unwrap());
    File::options().read(true).write(true).open(node).unwrap()
}

struct Agent {
    kubelets: BTreeMap<String, Rc<Kubelet>>,
    port: File,
}

impl Agent {
    async fn answer(&mut self, request: Request) -> Answer {
        match request {
            Request::Run(script) => run(&script).await,
            Request::StartKubelet { kubelet, pods } => self.start_kubelet(kubelet, pods).await,
            Request::StopKubelet(dir) => {
                self.kubelets.remove(&dir);
                Answer::Done
            }
            Request::AddPod { kubelet: dir, name, resource, count } => {
                let spec = PodSpec::new(NAMESPACE, name).app(CONTAINER, &resource, count);
                Answer::Decided(add(&dir, &self.kubelets[&dir], spec, &resource).await)
            }
            Request::DeletePod { kubelet, uid } => match self.kubelets[&kubelet].delete_pod(&uid) {
                Ok(true) => Answer::Done,
                Ok(false) => Answer::Failed(format!("there is no pod {uid}")),
                Err(error) => Answer::Failed(error.to_string()),
            },
            Request::Healthy { kubelet, resource } => {
                let state = self.kubelets[&kubelet].view(|view| view.endpoint_state(&resource));
                Answer::Ids(state.healthy.iter().map(ToString::to_string).collect())
            }
            Request::Churn { kubelets, name, resource, pods } => {
                for dir in kubelets {
                    let kubelet = Rc::clone(&self.kubelets[&dir]);
                    let (port, resource) = (self.port.try_clone().unwrap(), resource.clone());
                    actix::spawn(churn(port, dir, kubelet, name.clone(), resource, pods));
                }
                Answer::Done
            }
        }
    }

    async fn start_kubelet(&mut self, dir: String, pods: Vec<Pod>) -> Answer {
        let mut config = KubeletConfig::new(&dir, host_root(&dir));
        config.sync_checkpoint = true;
        config.first_batch_after = FIRST_PODS_AFTER;
        // The former one ends first, if there is one.
        self.kubelets.remove(&dir);
        let kubelet = match Kubelet::start(config).await {
            Ok(kubelet) => Rc::new(kubelet),
            Err(error) => return Answer::Failed(error.to_string()),
        };
        let decided = pods.into_iter().map(|pod| {
            let spec = PodSpec::with_uid(pod.uid, NAMESPACE, pod.name);
            let count = u32::try_from(pod.devices.len()).unwrap();
            let spec = spec.app(CONTAINER, &pod.resource, count);
            let (dir, kubelet) = (&dir, &kubelet);
            async move { add(dir, kubelet, spec, &pod.resource).await }
        });
        let decided = join_all(decided).await;
        self.kubelets.insert(dir, kubelet);
        Answer::AllDecided(decided)
    }
}

async fn churn(
    port: File,
    dir: String,
    kubelet: Rc<Kubelet>,
    name: String,
    resource: ResourceName,
    pods: usize,
) {
    let mut running: VecDeque<String> =
        kubelet.pods().into_iter().map(|pod| pod.spec.uid).collect();
    for number in 0_u64.. {
        let spec = PodSpec::new(NAMESPACE, format!("{name}-{number}"));
        let pod = add(&dir, &kubelet, spec.app(CONTAINER, &resource, 1), &resource).await;
        running.push_back(pod.uid.clone());
        say(&port, &Answer::Decided(pod));
        if running.len() > pods {
            let uid = running.pop_front().unwrap();
            say(&port, &Answer::Deletes(uid.clone()));
            kubelet.delete_pod(&uid).unwrap();
        }
    }
}

async fn add(dir: &str, kubelet: &Kubelet, spec: PodSpec, resource: &ResourceName) -> Pod {
    let name = spec.name.clone();
    let PodOutcome { uid, phase } = kubelet.add_pod(spec).await;
    let rejected = match phase {
        PodPhase::Failed { reason, message } => Some(format!("{reason}: {message}")),
        _ => None,
    };
    let (held, nodes) = kubelet.view(|view| {
        let mut holders = view.holders().into_iter().filter(|holder| holder.pod_uid == uid);
        let containers = view.pod(&uid).map(|pod| &pod.containers);
        let nodes = containers.and_then(|of| Some(of.get(CONTAINER)?.edits.devices.clone()));
        (holders.next(), nodes.unwrap_or_default())
    });
    let devices = held.iter().flat_map(|holder| holder.devices.get(resource)).flatten();
    Pod {
        kubelet: dir.to_owned(),
        name,
        resource: resource.clone(),
        devices: devices.map(ToString::to_string).collect(),
        nodes: nodes.into_iter().map(|node| node.host).collect(),
        alloc_id: held
            .as_ref()
            .and_then(|holder| holder.alloc_id.as_ref())
            .map(ToString::to_string),
        uid,
        rejected,
    }
}

async fn run(script: &str) -> Answer {
    match Command::new("sh").args(["-c", script]).output().await {
        Err(error) => Answer::Failed(error.to_string()),
        Ok(output) => Answer::Ran {
            code: output.status.code(),
            output: String::from_utf8_lossy(&output.stdout).into_owned(),
            errors: String::from_utf8_lossy(&output.stderr).into_owned(),
        },
    }
}
