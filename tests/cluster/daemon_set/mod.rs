//! The DaemonSet of this repository's manifests, with the image of this repository, on the node:
//! how it is installed, what it reports, and what the containers have.

pub(crate) mod chart;
pub(crate) mod lifecycle;
pub(crate) mod reboots;
pub(crate) mod rollouts;
pub(crate) mod security;
pub(crate) mod workload;

use crate::cluster::Cluster;
use crate::real::sandbox::output;
use crate::real::{containerd, shipped};
use crate::{IMAGE, SOON, node, say, wait_for};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Instant;

pub(crate) const NAMESPACE: &str = "kube-system";
const SET: &str = "/apis/apps/v1/namespaces/kube-system/daemonsets/holdfast";
const PODS: &str =
    "/api/v1/namespaces/kube-system/pods?labelSelector=app.kubernetes.io%2Fname%3Dholdfast";

/// The devices of a race, for pods with a number.
pub(crate) const CONFIG: &str = r#"
[[resource]]
name = "example.com/raced"
class = "char"
paths = [{ host = "/dev/raced*", container = "/dev/raced/" }]
"#;

/// Why the DaemonSet cannot be tested, if so. Otherwise its image is in the runtime.
fn is_missing(cluster: &Cluster) -> bool {
    static IMPORTED: OnceLock<bool> = OnceLock::new();
    !IMPORTED.get_or_init(|| {
        let Some(archive) = std::env::var_os(IMAGE) else {
            let what = shipped::missing().unwrap_or_else(|| "there is no image".into());
            say(format_args!("SKIPPED: the DaemonSet was not tested: {what}"));
            return false;
        };
        containerd::import(&cluster.dir, Path::new(&archive));
        true
    })
}

/// The node as before its first DaemonSet: no ledger, no socket, no device in use.
fn prepare(cluster: &Cluster) -> Option<()> {
    if is_missing(cluster) {
        return None;
    }
    crate::racing::make_devices();
    for folder in ["/var/lib/holdfast", "/run/holdfast"] {
        node::empty(Path::new(folder));
    }
    Some(())
}

/// The DaemonSet, installed by kustomize.
#[derive(Debug)]
pub(crate) struct DaemonSet {
    /// A kustomization of a user: the base with an image, a configuration and components.
    overlay: PathBuf,
}

impl DaemonSet {
    /// Installs the base with these components and this configuration, and waits until its pod is
    /// ready. `None` with a message if something is missing for it.
    pub(crate) fn install(
        cluster: &mut Cluster,
        components: &[&str],
        config: &str,
    ) -> Option<DaemonSet> {
        prepare(cluster)?;
        cluster.daemons += 1;
        let dir = cluster.dir.join(format!("kustomize-{}", cluster.daemons));
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/kustomize");
        output(Command::new("cp").arg("-r").arg(shipped).arg(&dir));
        let set = DaemonSet { overlay: dir.join("overlay") };
        fs::create_dir(&set.overlay).unwrap();
        let components: Vec<String> =
            components.iter().map(|name| format!("../components/{name}")).collect();
        let kustomization = json!({
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": ["../base"],
            "components": components,
            "configMapGenerator": [
                {"name": "holdfast", "namespace": NAMESPACE, "behavior": "merge", "files": ["config.toml"]},
            ],
            "images": [{
                "name": "registry.example.com/holdfast",
                "newName": "docker.io/library/holdfast",
                "newTag": shipped::VERSION,
            }],
        });
        fs::write(set.overlay.join("kustomization.yaml"), kustomization.to_string()).unwrap();
        fs::write(set.overlay.join("config.toml"), config).unwrap();
        set.apply(cluster);
        until_settled(cluster);
        Some(set)
    }

    /// Creates or changes its objects.
    pub(crate) fn apply(&self, cluster: &Cluster) {
        self.kubectl(cluster, "apply");
    }

    /// Deletes its objects.
    pub(crate) fn delete(&self, cluster: &Cluster) {
        self.kubectl(cluster, "delete");
        wait_for("no pod of the DaemonSet is left", SOON, || {
            cluster.api.list(PODS).is_empty().then_some(())
        });
    }

    /// Runs `kubectl apply -k` or `kubectl delete -k`.
    fn kubectl(&self, cluster: &Cluster, verb: &str) {
        cluster.shown("admin", &[verb, "-k", self.overlay.to_str().unwrap()]);
    }
}

/// The DaemonSet's pod, if the node has only one, made by the newest template, and it is ready.
pub(crate) fn settled(cluster: &mut Cluster) -> Option<Value> {
    cluster.plane.check();
    cluster.node.check();
    let set = cluster.api.get(SET)?;
    let status = &set["status"];
    let is_one = |key: &str| status[key] == 1;
    let is_observed = status["observedGeneration"] == set["metadata"]["generation"];
    let is_ready = is_observed && is_one("updatedNumberScheduled") && is_one("numberAvailable");
    let mut pods = cluster.api.list(PODS);
    (is_ready && pods.len() == 1).then(|| pods.remove(0))
}

/// Waits until that is so.
pub(crate) fn until_settled(cluster: &mut Cluster) {
    let began = Instant::now();
    wait_for("the DaemonSet's only pod is ready", 2 * SOON, || {
        let pod = settled(cluster);
        if pod.is_none() && began.elapsed() > SOON {
            panic!("the DaemonSet is not ready: {:#?}\n{}", cluster.api.list(PODS), log(cluster));
        }
        pod
    });
}

/// The only pod of the DaemonSet.
pub(crate) fn pod(cluster: &Cluster) -> Value {
    let mut pods = cluster.api.list(PODS);
    assert_eq!(pods.len(), 1, "{pods:#?}");
    pods.remove(0)
}

/// The log of the daemon in the DaemonSet's only pod.
pub(crate) fn log(cluster: &Cluster) -> String {
    let pods = cluster.api.list(PODS);
    let file = |pod: &Value| {
        let (name, uid) = (&pod["metadata"]["name"], &pod["metadata"]["uid"]);
        let (name, uid) = (name.as_str().unwrap(), uid.as_str().unwrap());
        let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0);
        format!("/var/log/pods/{NAMESPACE}_{name}_{uid}/holdfast/{restarts}.log")
    };
    let files = pods.iter().map(file);
    files.map(|file| fs::read_to_string(file).unwrap_or_default()).collect()
}

/// The answer of a verb, called in the container as `kubectl exec` does.
pub(crate) fn ask(cluster: &Cluster, verb: &[&str]) -> Value {
    let pod = pod(cluster);
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
    let id = id.strip_prefix("containerd://").unwrap();
    let command = [&["holdfast"][..], verb, &["-o", "json"]].concat();
    serde_json::from_str(&containerd::exec(&cluster.dir, id, &command)).unwrap()
}
