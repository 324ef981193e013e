//! etcd, the API server, the controller manager, the scheduler, and a proxy with the rights of an
//! administrator, which the tests speak to without TLS.

use crate::api::Api;
use crate::node::ADDRESS;
use crate::pki::kubeconfig;
use crate::real::process::Process;
use crate::wait_for;
use nix::sys::signal::Signal;
use serde_json::json;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The binaries of the folder.
pub(crate) const BINARIES: [&str; 9] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
];

/// Those that pods, claims and nodes need. Distributions of Kubernetes have others in addition.
const CONTROLLERS: [&str; 12] = [
    "daemonset-controller",
    "device-taint-eviction-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourceclaim-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "taint-eviction-controller",
    "validatingadmissionpolicy-status-controller",
];

/// The requests of the service account of the manifests, one JSON document for each line.
pub(crate) const AUDIT: &str = "audit.log";
const AUDITED: &str = r#"
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata, users: ["system:serviceaccount:kube-system:holdfast"]}]
"#;

/// The features of Kubernetes that are switched, as the `--feature-gates` of each component.
const GATES: &str = "HOLDFAST_GATES";

const ETCD: &str = "http://127.0.0.1:2379";
const PEERS: &str = "http://127.0.0.1:2380";
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) api_server: Process,
    others: Vec<Process>,
}

impl Plane {
    /// Starts all of it, and waits until the API server is ready.
    pub(crate) fn start(dir: &Path) -> (Self, Api) {
        let start = |name: &str, arguments: &[String]| {
            let mut command = Command::new(name);
            command.args(arguments).args(gates().filter(|_| name.starts_with("kube-")));
            Process::start(&mut command, dir.join(format!("{name}.log")))
        };
        let mut etcd = start("etcd", &etcd(dir));
        wait_for("etcd answers", LIMIT, || {
            etcd.check();
            TcpStream::connect("127.0.0.1:2379").ok()
        });
        let mut api_server = start("kube-apiserver", &api_server(dir));
        let socket = dir.join("api.sock");
        let proxy = start(
            "kubectl",
            &["proxy".into(), client(dir, "admin"), format!("--unix-socket={}", socket.display())],
        );
        let api = Api::new(dir, socket);
        wait_for("the API server is ready", LIMIT, || {
            api_server.check();
            api.is_ready().then_some(())
        });
        let controllers = start("kube-controller-manager", &controllers(dir));
        let scheduler = start("kube-scheduler", &scheduler(dir));
        (Plane { api_server, others: vec![etcd, proxy, controllers, scheduler] }, api)
    }

    /// Kills the API server and starts it again, without waiting for it.
    pub(crate) fn restart_api_server(&mut self, dir: &Path) {
        self.api_server.stop(Signal::SIGKILL);
        let mut command = Command::new("kube-apiserver");
        let log = dir.join("kube-apiserver-again.log");
        self.api_server = Process::start(command.args(api_server(dir)).args(gates()), log);
    }

    /// Panics if a process has ended.
    pub(crate) fn check(&mut self) {
        self.api_server.check();
        self.others.iter_mut().for_each(Process::check);
    }
}

/// [`GATES`] as the argument of a component.
pub(crate) fn gates() -> Option<String> {
    Some(format!("--feature-gates={}", std::env::var(GATES).ok()?))
}

fn client(dir: &Path, name: &str) -> String {
    format!("--kubeconfig={}", kubeconfig(dir, name).display())
}

fn etcd(dir: &Path) -> Vec<String> {
    vec![
        "--name=test".into(),
        format!("--data-dir={}", dir.join("etcd").display()),
        format!("--listen-client-urls={ETCD}"),
        format!("--advertise-client-urls={ETCD}"),
        format!("--listen-peer-urls={PEERS}"),
        format!("--initial-advertise-peer-urls={PEERS}"),
        format!("--initial-cluster=test={PEERS}"),
        "--unsafe-no-fsync=true".into(),
        "--log-level=warn".into(),
    ]
}

fn api_server(dir: &Path) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    fs::write(dir.join("audit.yaml"), AUDITED).unwrap();
    vec![
        format!("--audit-policy-file={}", file("audit.yaml")),
        format!("--audit-log-path={}", file(AUDIT)),
        format!("--etcd-servers={ETCD}"),
        format!("--bind-address={ADDRESS}"),
        format!("--advertise-address={ADDRESS}"),
        "--secure-port=6443".into(),
        "--service-cluster-ip-range=198.51.100.0/24".into(),
        format!("--cert-dir={}", file("apiserver-certificates")),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
        format!("--client-ca-file={}", file("ca.crt")),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={}", file("sa.pub")),
        format!("--service-account-signing-key-file={}", file("sa.key")),
        "--authorization-mode=Node,RBAC".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        // No server resolves the name of the node, which comes first by default.
        "--kubelet-preferred-address-types=InternalIP".into(),
        "--allow-privileged=true".into(),
    ]
}

fn controllers(dir: &Path) -> Vec<String> {
    let file = |name: &str| dir.join(name).display().to_string();
    vec![
        client(dir, "controller-manager"),
        format!("--cert-dir={}", file("controller-certificates")),
        "--bind-address=127.0.0.1".into(),
        "--leader-elect=false".into(),
        "--use-service-account-credentials=true".into(),
        format!("--service-account-private-key-file={}", file("sa.key")),
        format!("--root-ca-file={}", file("ca.crt")),
        format!("--controllers={}", CONTROLLERS.join(",")),
    ]
}

fn scheduler(dir: &Path) -> Vec<String> {
    let config = json!({
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": false},
        "clientConnection": {"kubeconfig": kubeconfig(dir, "scheduler")},
    });
    let file = dir.join("scheduler.yaml");
    fs::write(&file, config.to_string()).unwrap();
    vec![
        format!("--config={}", file.display()),
        "--bind-address=127.0.0.1".into(),
        format!("--authentication-kubeconfig={}", kubeconfig(dir, "scheduler").display()),
        format!("--authorization-kubeconfig={}", kubeconfig(dir, "scheduler").display()),
    ]
}
