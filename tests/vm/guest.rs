//! The side in the guest: an agent that runs scripts and simulated kubelets for the host. Requests
//! and answers are JSON, one a line, on a serial port that the machine has for them.

use holdfast::domain::ResourceName;
use holdfast::lab::sim::kubelet::{Kubelet, KubeletConfig, PodOutcome, PodPhase, PodSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::thread;
use tokio::process::Command;
use tokio::sync::mpsc;

/// The agent's port, by its name in QEMU.
pub(crate) const PORT: &str = "holdfast.agent";
/// Set in the guest.
pub(crate) const VARIABLE: &str = "HOLDFAST_VM_AGENT";
const NAMESPACE: &str = "default";
const CONTAINER: &str = "main";

/// What the host requests. A kubelet is named by its directory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Runs a script of the shell.
    Run(String),
    /// Starts a kubelet.
    StartKubelet(String),
    /// Adds a pod with one container that requests devices, and waits for the kubelet's decision.
    AddPod { kubelet: String, name: String, resource: ResourceName, count: u32 },
    /// Deletes a pod.
    DeletePod { kubelet: String, uid: String },
    /// The ids that the kubelet may give to a pod.
    Healthy { kubelet: String, resource: ResourceName },
}

/// A pod that the kubelet has decided on.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pod {
    pub(crate) kubelet: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    /// The ids of its devices.
    pub(crate) devices: Vec<String>,
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
    kubelets: BTreeMap<String, Kubelet>,
    port: File,
}

impl Agent {
    async fn answer(&mut self, request: Request) -> Answer {
        match request {
            Request::Run(script) => run(&script).await,
            Request::StartKubelet(dir) => {
                let mut config = KubeletConfig::new(&dir, "/");
                config.sync_checkpoint = true;
                // The former one ends first, if there is one.
                self.kubelets.remove(&dir);
                match Kubelet::start(config).await {
                    Ok(kubelet) => drop(self.kubelets.insert(dir, kubelet)),
                    Err(error) => return Answer::Failed(error.to_string()),
                }
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
    let held = kubelet.view(|view| {
        let mut holders = view.holders().into_iter().filter(|holder| holder.pod_uid == uid);
        holders.next()
    });
    let devices = held.iter().flat_map(|holder| holder.devices.get(resource)).flatten();
    Pod {
        kubelet: dir.to_owned(),
        name,
        devices: devices.map(ToString::to_string).collect(),
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
