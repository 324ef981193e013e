//! `kubectl holdfast` over many nodes through the API server: the objects of the nodes and of the
//! daemon's pods are there, and one program answers for all their kubelets.

use crate::api::NODES;
use crate::cluster::Cluster;
use crate::exec::{Behaviour, PATHS, Request, answer};
use crate::node::ADDRESS;
use crate::real::binary::is_named;
use crate::recording::tasks::Loop;
use crate::{pki, say};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

/// Simulated nodes, and the devices that each has.
const COUNT: usize = 200;
const GPUS: usize = 8;
/// An API server that passes WebSocket on to a kubelet does so for nodes with this feature.
const FEATURE: &str = "ExtendWebSocketsToKubelet";
const PODS: &str = "/api/v1/namespaces/kube-system/pods";
/// The rights that the document asks for, bound to a service account.
const DOCUMENT: &str = include_str!("../../docs/kubectl.md");
const OPERATOR: &str = "operator";
/// How long `who` may take, when all nodes answer and when some are away.
const LIMITS: (Duration, Duration) = (Duration::from_secs(3), Duration::from_secs(8));

fn node(index: usize) -> String {
    format!("many-{index:03}")
}

/// Every tenth node does not answer: its kubelet hangs, is not there, does not know the pod, or
/// ends the connection.
fn is_away(index: usize) -> bool {
    index.is_multiple_of(10)
}

/// What a node answers to `who`.
fn who(index: usize) -> Behaviour {
    let grant = |gpu: usize| {
        json!({
            "alloc_id": format!("a-{index}-{gpu}"), "resource": "nvidia.com/gpu", "state": "bound",
            "devices": [format!("GPU-{index:03}{gpu:x}-6f1c-4a55-9c3e-2b7d1f0a8e{gpu:02}")],
            "pod": {"namespace": "ml", "name": format!("train-{index}-{gpu}"), "uid": "u"},
            "container": "main", "granted_at": "2026-11-21T03:12:00.000Z",
        })
    };
    let grants: Vec<Value> = (0..GPUS).map(grant).collect();
    Behaviour::Print(0, json!({"schema": 1, "grants": grants}).to_string(), String::new())
}

/// The kubelets of all nodes; they end with this value.
struct Kubelets {
    _tasks: Loop,
    port: u16,
}

impl Kubelets {
    fn start(dir: &Path, has_away: bool) -> Self {
        let certificates = CertificateDer::pem_file_iter(dir.join("server.crt")).unwrap();
        let key = PrivateKeyDer::from_pem_file(dir.join("server.key")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(certificates.map(Result::unwrap).collect(), key)
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let tasks = Loop::start();
        let listener = tasks.run(async { TcpListener::bind((ADDRESS, 0)).await }).unwrap();
        let port = listener.local_addr().unwrap().port();
        tasks.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // A client that leaves ends its connection only.
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let Some(request) = Request::read(&mut stream).await else { return };
                    let parts: Vec<&str> = request.path.split('/').collect();
                    let ["", "exec", "kube-system", pod, "holdfast"] = parts[..] else {
                        return answer(&mut stream, 404, &json!({"message": request.path})).await;
                    };
                    let index: usize = pod.strip_prefix("holdfast-").unwrap().parse().unwrap();
                    let behaviour = match index % 40 {
                        0 if has_away => Behaviour::Hang,
                        20 if has_away => Behaviour::Refuse(404, "pod does not exist"),
                        30 if has_away => Behaviour::Cut,
                        _ => {
                            assert_eq!(request.command()[4], "who");
                            who(index)
                        }
                    };
                    request.end(&mut stream, behaviour).await;
                });
            }
        });
        Kubelets { _tasks: tasks, port }
    }
}

impl Cluster {
    /// Creates the node and the daemon's pod on it. Returns whether the API server passes WebSocket
    /// on to its kubelet.
    fn create_simulated(&self, index: usize, port: u16) -> bool {
        let name = node(index);
        let labels = json!({"parity": if index.is_multiple_of(2) { "even" } else { "odd" }});
        let node = self.api.create(
            NODES,
            &json!({
                "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
                "spec": {"unschedulable": true},
                "status": {
                    "addresses": [{"type": "InternalIP", "address": ADDRESS}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
                    "declaredFeatures": [FEATURE],
                },
            }),
        );
        let args: Vec<&str> = ["run"].into_iter().chain(PATHS).collect();
        let pod_name = format!("holdfast-{index:03}");
        let mut pod = self.api.create(
            PODS,
            &json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": pod_name, "labels": {"app.kubernetes.io/name": "holdfast"}},
                "spec": {
                    "nodeName": name, "automountServiceAccountToken": false,
                    "containers": [{"name": "holdfast", "image": "holdfast", "args": args}],
                },
            }),
        );
        pod["status"] = json!({
            "phase": "Running",
            "containerStatuses": [{
                "name": "holdfast", "ready": true, "restartCount": 0, "image": "holdfast", "imageID": "",
                "state": {"running": {"startedAt": "2026-11-21T03:12:00Z"}},
            }],
        });
        self.api.replace(&format!("{PODS}/{pod_name}/status"), &pod);
        node["status"]["declaredFeatures"] == json!([FEATURE])
    }

    fn delete_simulated(&self) {
        for index in 0..COUNT {
            self.api.delete(&format!("{PODS}/holdfast-{index:03}"), Some(0));
            self.api.delete(&format!("{NODES}/{}", node(index)), None);
        }
    }

    /// The kubeconfig of an operator with the rights of the document and no others.
    pub(crate) fn create_operator(&self) {
        let (_, rights) = DOCUMENT.split_once("```yaml\n").unwrap();
        let (rights, _) = rights.split_once("```").unwrap();
        self.api.apply(rights);
        let account = format!("--serviceaccount=kube-system:{OPERATOR}");
        for words in [
            &["create", "serviceaccount", OPERATOR][..],
            &[
                "create",
                "clusterrolebinding",
                OPERATOR,
                "--clusterrole=holdfast-operator-nodes",
                &account,
            ],
            &["create", "rolebinding", OPERATOR, "--role=holdfast-operator", &account],
        ] {
            self.shown("admin", &[words, &["-n", "kube-system"]].concat());
        }
        let token = self.shown("admin", &["create", "token", OPERATOR, "-n", "kube-system"]);
        pki::write_kubeconfig(&self.dir, OPERATOR, &json!({"token": token.trim()}));
    }

    pub(crate) fn delete_operator(&self) {
        let bindings = ["clusterrolebinding/operator", "clusterrole/holdfast-operator-nodes"];
        self.shown("admin", &[&["delete"][..], &bindings].concat());
        let others = ["rolebinding/operator", "role/holdfast-operator", "serviceaccount/operator"];
        self.shown("admin", &[&["delete", "-n", "kube-system"][..], &others].concat());
    }

    /// What the plugin prints, which kubectl finds in `PATH`: exit code, document, standard error,
    /// and how long it took.
    pub(crate) fn plugin(&self, words: &[&str]) -> (i32, Value, String, Duration) {
        let folder = self.dir.join("plugins");
        let plugin = folder.join("kubectl-holdfast");
        if !plugin.exists() {
            std::fs::create_dir_all(&folder).unwrap();
            std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_holdfast"), plugin).unwrap();
        }
        let usual = std::env::var_os("PATH").unwrap();
        let path = std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&usual)));
        let began = Instant::now();
        let output = Command::new("kubectl")
            .arg("holdfast")
            .args(words)
            .env("PATH", path.unwrap())
            .env("KUBECONFIG", pki::kubeconfig(&self.dir, OPERATOR))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let took = began.elapsed();
        let stderr = String::from_utf8(output.stderr).unwrap();
        let document = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{words:?}: {error}: {stderr}"));
        (output.status.code().unwrap(), document, stderr, took)
    }
}

/// The nodes of the rows, and the number of rows.
fn nodes_of(document: &Value) -> (BTreeSet<&str>, usize) {
    let grants = document["grants"].as_array().unwrap();
    (grants.iter().map(|grant| grant["node"].as_str().unwrap()).collect(), grants.len())
}

pub(crate) fn of_the_plugin(cluster: &mut Cluster) {
    cluster.create_operator();
    let mut took = Vec::new();
    for has_away in [false, true] {
        let kubelets = Kubelets::start(&cluster.dir, has_away);
        // A port at which no kubelet listens.
        let port = |index: usize| if has_away && index % 40 == 10 { 1 } else { kubelets.port };
        let passes: Vec<bool> =
            (0..COUNT).map(|index| cluster.create_simulated(index, port(index))).collect();
        if passes.contains(&false) {
            cluster.delete_simulated();
            cluster.delete_operator();
            return say(format_args!(
                "SKIPPED: this API server translates WebSocket for its kubelets (Kubernetes before 1.36), so no \
                 simulated kubelet was asked"
            ));
        }
        // The node of the cluster has no daemon.
        let (code, document, stderr, time) = cluster.plugin(&["who", "-o", "json"]);
        say(format_args!(
            "`kubectl holdfast who`, {COUNT} nodes, some away: {has_away}: {time:.2?}\n{stderr}"
        ));
        took.push(time);
        let wanted: Vec<String> =
            (0..COUNT).filter(|it| !(has_away && is_away(*it))).map(node).collect();
        let (found, rows) = nodes_of(&document);
        assert_eq!(found, wanted.iter().map(String::as_str).collect(), "{stderr}");
        assert_eq!(rows, wanted.len() * GPUS);
        assert_eq!(document["without_daemon"], json!([crate::node::NODE]));
        assert_eq!(code, if has_away { 12 } else { 0 }, "{stderr}");
        let failed = document["failed"].as_array().unwrap();
        assert_eq!(failed.len(), COUNT - wanted.len(), "{failed:?}");
        let reason = |index: usize| {
            let is_it = |failed: &&Value| failed["node"] == json!(node(index));
            failed.iter().find(is_it).unwrap()["reason"].as_str().unwrap().to_owned()
        };
        if has_away {
            for (index, wanted) in [
                (40, "no answer within 5s"),
                (50, "connection refused"),
                (60, "pod does not exist"),
                (70, "the connection "),
            ] {
                assert!(reason(index).contains(wanted), "{index}: {}", reason(index));
            }
            assert!(stderr.contains("holdfast: 20 of 200 nodes did not answer:"), "{stderr}");
        } else {
            let selected = cluster.plugin(&["who", "-l", "parity=odd", "-o", "json"]);
            assert_eq!(nodes_of(&selected.1).0.len(), COUNT / 2, "{}", selected.2);
        }
        cluster.delete_simulated();
    }
    cluster.delete_operator();
    if is_named() {
        assert!(took[0] <= LIMITS.0 && took[1] <= LIMITS.1, "{took:?}");
    }
}
