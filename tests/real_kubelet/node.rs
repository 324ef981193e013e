//! containerd and the kubelet.

use crate::network;
use crate::pods::Pods;
use crate::real::containerd;
use crate::real::process::Process;
use crate::wait_for;
use nix::sys::signal::Signal;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

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
        fs::create_dir_all(dir.join("manifests")).unwrap();
        // The port is free now; another process could still take it.
        let ports =
            [TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap()];
        let [port, read_only] = ports.each_ref().map(|port| port.local_addr().unwrap().port());
        drop(ports);
        let config = KUBELET
            .replace("DIR", dir.to_str().unwrap())
            .replace("PORT_A", &port.to_string())
            .replace("PORT_B", &read_only.to_string());
        fs::write(dir.join("kubelet.yaml"), config).unwrap();
        let plugins = network::plugins().unwrap_or_else(|| "/opt/cni/bin".into());
        let containerd = containerd::start(dir, &plugins);
        containerd::import_image(dir);

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
        containerd::import(&self.dir, archive);
    }

    /// Whether a process of a container runs.
    pub(crate) fn runs(&self, container: &str) -> bool {
        containerd::runs(&self.dir, container)
    }

    /// Runs `command` in a container, as `kubectl exec` does. Returns its output.
    pub(crate) fn exec(&self, container: &str, command: &[&str]) -> String {
        containerd::exec(&self.dir, container, command)
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
