//! containerd and the kubelet.

use crate::image::{self, PAUSE};
use crate::network;
use crate::pods::Pods;
use crate::sandbox::output;
use crate::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uuid::Uuid;

const CONTAINERD: &str = r#"
version = 2
root = "DIR/containerd-root"
state = "DIR/containerd-state"
[grpc]
  address = "DIR/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "DIR/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "PAUSE"
  # Without CAP_SYS_RESOURCE, as in some machines of a CI, a container's score cannot be lowered.
  restrict_oom_score_adj = true
  # The default only since containerd 2.0.
  enable_cdi = true
  cdi_spec_dirs = ["/var/run/cdi"]
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "DIR/cni"
    bin_dir = "PLUGINS"
"#;

const KUBELET: &str = r"
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
port: PORT_A
readOnlyPort: PORT_B
healthzPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://DIR/containerd.sock
staticPodPath: DIR/manifests
volumePluginDir: DIR/volume-plugins
fileCheckFrequency: 1s
syncFrequency: 2s
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
evictionHard: {}
imageGCHighThresholdPercent: 100
makeIPTablesUtilChains: false
logging: {verbosity: 3}
";

/// A process with its log.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pub(crate) log: PathBuf,
}

impl Process {
    pub(crate) fn start(command: &mut Command, log: PathBuf) -> Self {
        let file = File::create(&log).unwrap();
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Process {
            child: command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")),
            log,
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn log_text(&self) -> String {
        self.log_since(0)
    }

    /// The log from this byte on, so that a long log is not read again for its last lines.
    fn log_since(&self, position: u64) -> String {
        let mut file = File::open(&self.log).unwrap();
        file.seek(SeekFrom::Start(position)).unwrap();
        let mut text = Vec::new();
        file.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Panics if the process has ended.
    pub(crate) fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            let text = self.log_text();
            let tail: Vec<&str> = text.lines().rev().take(5).collect();
            panic!("it has ended ({status}), see {}: {tail:#?}", self.log.display());
        }
    }

    /// Ends the process and waits for it.
    pub(crate) fn stop(&mut self, signal: Signal) {
        kill(Pid::from_raw(self.pid().cast_signed()), signal).unwrap();
        self.child.wait().unwrap();
    }
}

/// containerd's client `ctr`.
fn ctr(dir: &Path) -> Command {
    let mut ctr = Command::new("ctr");
    ctr.arg("--address").arg(dir.join("containerd.sock")).args(["--namespace", "k8s.io"]);
    ctr
}

fn import(dir: &Path, archive: &Path) {
    output(ctr(dir).args(["images", "import"]).arg(archive));
}

/// The machine as a Kubernetes node.
#[derive(Debug)]
pub(crate) struct Node {
    dir: PathBuf,
    binary: PathBuf,
    starts: usize,
    containerd: Process,
    kubelet: Option<Process>,
    pub(crate) pods: Pods,
}

impl Node {
    pub(crate) fn start(dir: &Path, kubelet: &Path) -> Self {
        for name in ["manifests", "cni"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        // The port is free now; another process could still take it.
        let ports =
            [TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap()];
        let [port, read_only] = ports.each_ref().map(|port| port.local_addr().unwrap().port());
        drop(ports);
        let fill = |text: &str| {
            let text = text.replace("DIR", dir.to_str().unwrap()).replace("PAUSE", PAUSE);
            let text = text.replace(
                "PLUGINS",
                network::plugins().unwrap_or_else(|| "/opt/cni/bin".into()).to_str().unwrap(),
            );
            text.replace("PORT_A", &port.to_string()).replace("PORT_B", &read_only.to_string())
        };
        fs::write(dir.join("containerd.toml"), fill(CONTAINERD)).unwrap();
        fs::write(dir.join("kubelet.yaml"), fill(KUBELET)).unwrap();

        let mut containerd = Process::start(
            Command::new("containerd").arg("--config").arg(dir.join("containerd.toml")),
            dir.join("containerd.log"),
        );
        wait_for("containerd answers", Duration::from_secs(30), || {
            containerd.check();
            ctr(dir).arg("version").output().unwrap().status.success().then_some(())
        });
        import(dir, &image::write(dir));

        let pods = Pods::new(dir.join("manifests"), read_only);
        let mut node = Node {
            dir: dir.to_owned(),
            binary: kubelet.to_owned(),
            starts: 0,
            containerd,
            kubelet: None,
            pods,
        };
        node.start_kubelet();
        node
    }

    /// Starts the kubelet again and waits until it answers.
    pub(crate) fn start_kubelet(&mut self) {
        self.starts += 1;
        let mut command = Command::new(&self.binary);
        command.arg("--config").arg(self.dir.join("kubelet.yaml")).arg("--hostname-override=node");
        let mut kubelet =
            Process::start(&mut command, self.dir.join(format!("kubelet-{}.log", self.starts)));
        wait_for("the kubelet answers", Duration::from_secs(60), || {
            self.containerd.check();
            kubelet.check();
            self.pods.list()
        });
        self.kubelet = Some(kubelet);
    }

    /// Ends the kubelet with `signal` and starts it again.
    pub(crate) fn restart_kubelet(&mut self, signal: Signal) {
        self.stop_kubelet(signal);
        self.start_kubelet();
    }

    /// Ends the kubelet with `signal`; its containers continue to run.
    pub(crate) fn stop_kubelet(&mut self, signal: Signal) {
        self.kubelet.take().unwrap().stop(signal);
    }

    /// Imports the images of an archive into containerd.
    pub(crate) fn import(&self, archive: &Path) {
        import(&self.dir, archive);
    }

    /// Whether a process of a container runs.
    pub(crate) fn runs(&self, container: &str) -> bool {
        let tasks = output(ctr(&self.dir).args(["tasks", "list"]));
        tasks.lines().any(|line| line.starts_with(container) && line.ends_with("RUNNING"))
    }

    /// Runs `command` in a container, as `kubectl exec` does. Returns its output.
    pub(crate) fn exec(&self, container: &str, command: &[&str]) -> String {
        output(
            ctr(&self.dir)
                .args(["tasks", "exec", "--exec-id", &Uuid::now_v7().to_string(), container])
                .args(command),
        )
    }

    /// The log of the present kubelet.
    pub(crate) fn kubelet_log(&self) -> String {
        self.kubelet.as_ref().unwrap().log_text()
    }

    /// The length of that log in bytes.
    pub(crate) fn kubelet_log_length(&self) -> u64 {
        fs::metadata(&self.kubelet.as_ref().unwrap().log).unwrap().len()
    }

    /// The log of the present kubelet from this byte on.
    pub(crate) fn kubelet_log_since(&self, position: u64) -> String {
        self.kubelet.as_ref().unwrap().log_since(position)
    }
}
