//! The node: its network, its `/dev`, containerd and the kubelet.

use crate::SOON;
use crate::pki::kubeconfig;
use crate::plane;
use crate::real::process::Process;
use crate::real::sandbox::output;
use crate::real::{containerd, gpus, network};
use crate::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) const NODE: &str = "node-1";
/// An address that no network uses: it is reserved for documentation.
pub(crate) const ADDRESS: &str = "192.0.2.1";
/// Devices for claims are `/dev/claimed0` and so on; one is for the device plugin.
pub(crate) const DEVICES: usize = 4;
pub(crate) const PLUGIN_DEVICE: &str = "/dev/counted";
/// A major number for local use, without a driver (`Documentation/admin-guide/devices.txt`): a
/// container that may open such a node gets ENXIO, and another one EPERM.
pub(crate) const MAJOR: u64 = 240;
const CHECKPOINT: &str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
pub(crate) const CDI: &str = "/var/run/cdi";

/// A shorter `syncFrequency` than the usual minute repeats a failed Prepare sooner.
const KUBELET: &str = r"
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: ADDRESS
healthzBindAddress: ADDRESS
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://SOCKET
volumePluginDir: DIR/volume-plugins
syncFrequency: 5s
nodeStatusUpdateFrequency: 5s
cgroupDriver: cgroupfs
topologyManagerPolicy: POLICY
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
localStorageCapacityIsolation: false
evictionHard: {}
imageGCHighThresholdPercent: 100
makeIPTablesUtilChains: false
resolvConf: ''
logging: {verbosity: 3}
";

/// Without plugins: the pods of most tests have the network of the node, so none is called. Without
/// a network the node would not be ready.
const NETWORK: &str =
    r#"{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}"#;

#[derive(Debug)]
pub(crate) struct Node {
    dir: PathBuf,
    containerd: Process,
    kubelet: Option<Process>,
    starts: usize,
    /// The policy of the kubelet's Topology Manager.
    policy: &'static str,
}

/// The policy of most tests: the kubelet considers no NUMA node.
pub(crate) const NO_POLICY: &str = "none";
/// The kubelet's entries of the NUMA nodes.
const NUMA: &str = "/sys/devices/system/node";

/// The network and the files of the node, before anything starts.
pub(crate) fn furnish(dir: &Path) {
    output(Command::new("ip").args(["link", "set", "lo", "up"]));
    output(Command::new("ip").args(["address", "add", &format!("{ADDRESS}/32"), "dev", "lo"]));
    // A copy of /dev: what a test creates in it does not appear on the machine.
    let own = dir.join("dev");
    fs::create_dir(&own).unwrap();
    output(Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755", "tmpfs"]).arg(&own));
    // Without what is mounted below, where others create and remove files meanwhile.
    output(Command::new("cp").args(["-a", "--one-file-system", "/dev/."]).arg(&own));
    for below in ["pts", "shm", "mqueue"].map(|name| Path::new("/dev").join(name)) {
        let target = own.join(below.file_name().unwrap());
        if below.is_dir() && target.is_dir() {
            output(Command::new("mount").arg("--rbind").arg(&below).arg(target));
        }
    }
    output(Command::new("mount").args(["--move"]).arg(&own).arg("/dev"));
    if Path::new(NUMA).is_dir() {
        make_numa_nodes(dir);
    }
    (0..DEVICES).for_each(|n| gpus::make_node(Path::new(&device(n)), MAJOR, n as u64));
    gpus::make_node(Path::new(PLUGIN_DEVICE), MAJOR, DEVICES as u64);
    // Another one after each simulated reboot.
    fs::write(dir.join("boot_id"), fs::read(BOOT_ID).unwrap()).unwrap();
    output(Command::new("mount").arg("--bind").arg(dir.join("boot_id")).arg(BOOT_ID));
}

/// Gives the kubelet two NUMA nodes, as the made machine has (`lab::sim::hardware`): each is a copy
/// of the real node 0, with every second processor of it.
fn make_numa_nodes(dir: &Path) {
    let (real, own) = (Path::new(NUMA).join("node0"), dir.join("numa"));
    for (node, distance) in [(0, "10 20"), (1, "20 10")] {
        let copy = own.join(format!("node{node}"));
        fs::create_dir_all(&copy).unwrap();
        let meminfo = fs::read_to_string(real.join("meminfo")).unwrap();
        let meminfo = meminfo.replace("Node 0", &format!("Node {node}"));
        fs::write(copy.join("meminfo"), meminfo).unwrap();
        fs::write(copy.join("distance"), distance).unwrap();
        for processor in (0..).step_by(2).map(|n| n + node) {
            let name = format!("cpu{processor}");
            if !real.join(&name).exists() {
                break;
            }
            symlink(format!("../../cpu/{name}"), copy.join(name)).unwrap();
        }
    }
    output(Command::new("mount").arg("--bind").arg(own).arg(NUMA));
}

/// The node of a device for claims.
pub(crate) fn device(n: usize) -> String {
    format!("/dev/claimed{n}")
}

impl Node {
    pub(crate) fn start(dir: &Path) -> Self {
        fs::create_dir_all(dir.join("cni")).unwrap();
        match network::plugins() {
            Some(_) => network::write(dir),
            None => fs::write(dir.join("cni/none.conflist"), NETWORK).unwrap(),
        }
        let containerd = start_containerd(dir);
        containerd::import_image(dir);
        let (kubelet, policy) = (None, NO_POLICY);
        let mut node = Node { dir: dir.to_owned(), containerd, kubelet, starts: 0, policy };
        node.start_kubelet();
        node
    }

    /// Restarts the kubelet with this policy of its Topology Manager, if it has another one.
    pub(crate) fn restart_with_policy(&mut self, policy: &'static str) {
        if self.policy != policy {
            self.policy = policy;
            self.kill_kubelet();
            self.start_kubelet();
        }
    }

    /// Makes the kubelet forget the devices of pods that are gone. Its checkpoint has them until
    /// its next Allocate, and the next daemon would list them.
    pub(crate) fn forget_devices(&mut self) {
        let entries = |text: &str| {
            let checkpoint: Value = serde_json::from_str(text).unwrap();
            checkpoint["Data"]["PodDeviceEntries"].as_array().map_or(0, Vec::len)
        };
        if fs::read_to_string(CHECKPOINT).is_ok_and(|text| entries(&text) > 0) {
            self.kill_kubelet();
            fs::remove_file(CHECKPOINT).unwrap();
            self.start_kubelet();
        }
    }

    /// Panics if a process has ended.
    pub(crate) fn check(&mut self) {
        self.containerd.check();
        self.kubelet.iter_mut().for_each(Process::check);
    }

    pub(crate) fn is_up(&self) -> bool {
        self.kubelet.is_some()
    }

    /// What the kubelet has logged since its start.
    pub(crate) fn kubelet_log(&self) -> String {
        self.kubelet.as_ref().map(Process::log_text).unwrap_or_default()
    }

    /// Starts the kubelet without waiting for it.
    pub(crate) fn launch_kubelet(&mut self) {
        self.starts += 1;
        let config = KUBELET
            .replace("ADDRESS", ADDRESS)
            .replace("SOCKET", containerd::socket(&self.dir).to_str().unwrap())
            .replace("DIR", self.dir.to_str().unwrap())
            .replace("POLICY", self.policy);
        fs::write(self.dir.join("kubelet.yaml"), config).unwrap();
        let mut command = Command::new("kubelet");
        command
            .arg(format!("--config={}", self.dir.join("kubelet.yaml").display()))
            .arg(format!("--kubeconfig={}", kubeconfig(&self.dir, "kubelet").display()))
            .arg(format!("--cert-dir={}", self.dir.join("kubelet-certificates").display()))
            .arg(format!("--hostname-override={NODE}"))
            .arg(format!("--node-ip={ADDRESS}"))
            .args(plane::gates());
        let log = self.dir.join(format!("kubelet-{}.log", self.starts));
        self.kubelet = Some(Process::start(&mut command, log));
    }

    /// Starts the kubelet and waits until it answers.
    pub(crate) fn start_kubelet(&mut self) {
        self.launch_kubelet();
        wait_for("the kubelet answers", SOON, || {
            self.check();
            TcpStream::connect((ADDRESS, 10248)).ok()
        });
    }

    /// Kills the kubelet; its containers continue to run.
    pub(crate) fn kill_kubelet(&mut self) {
        self.kubelet.take().unwrap().stop(Signal::SIGKILL);
    }

    /// What a reboot does to the runtime: no process and no file in memory stays, and the boot has
    /// another id. The kubelet is down afterwards.
    pub(crate) fn reboot(&mut self) {
        self.kill_kubelet();
        self.containerd.stop(Signal::SIGKILL);
        // The shims do not start a container again, and end with it.
        let processes = pod_processes().into_iter().chain(processes_of("containerd-shim"));
        for pid in processes {
            // It may have ended with another one.
            let _ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        wait_for("no process of a pod runs", SOON, || pod_processes().is_empty().then_some(()));
        let state = self.dir.join("containerd-state");
        let in_memory = [CDI, "/run/containerd", "/run/netns", "/run/holdfast"].map(Path::new);
        in_memory.into_iter().chain([&*state]).for_each(empty);
        // The volumes in memory of the pods, and what they mount.
        unmount_below(Path::new("/var/lib/kubelet"));
        let id = uuid::Uuid::now_v7().to_string();
        fs::write(self.dir.join("boot_id"), format!("{id}\n")).unwrap();
        self.containerd = start_containerd(&self.dir);
    }
}

fn start_containerd(dir: &Path) -> Process {
    containerd::start(dir, &network::plugins().unwrap_or_else(|| "/opt/cni/bin".into()))
}

/// Removes everything in a folder, and what is mounted there.
pub(crate) fn empty(folder: &Path) {
    unmount_below(folder);
    for entry in fs::read_dir(folder).into_iter().flatten().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            fs::remove_dir_all(entry.path()).unwrap();
        } else {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

fn unmount_below(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    let below = points.map(Path::new).filter(|point| point.starts_with(folder) && *point != folder);
    for point in below.collect::<Vec<_>>().into_iter().rev() {
        output(Command::new("umount").arg("--lazy").arg(point));
    }
}

/// The processes in the cgroups of all pods.
pub(crate) fn pod_processes() -> Vec<i32> {
    let mount = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_dir(mount).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found = Vec::new();
    for root in controllers.chain([mount.to_owned()]) {
        collect_processes(&root.join("kubepods"), &mut found);
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// The processes in the cgroup of one pod.
pub(crate) fn processes_of_pod(uid: &str) -> Vec<i32> {
    let of_pod = |pid: &i32| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        groups.contains(&format!("pod{uid}"))
    };
    pod_processes().into_iter().filter(of_pod).collect()
}

/// Whether one of the hierarchies has a cgroup of the pod.
pub(crate) fn has_cgroup(uid: &str) -> bool {
    let mut folders = vec![Path::new("/sys/fs/cgroup").to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if entry.file_name().to_string_lossy().contains(uid) {
                return true;
            }
            folders.push(entry.path());
        }
    }
    false
}

fn collect_processes(group: &Path, found: &mut Vec<i32>) {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    found.extend(text.lines().filter_map(|pid| pid.parse::<i32>().ok()));
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect_processes(&entry.path(), found);
        }
    }
}

/// The processes of this namespace with this in the name of their program.
fn processes_of(program: &str) -> Vec<i32> {
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let named = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // The kernel cuts a name to 15 characters.
        name.trim().starts_with(&program[..program.len().min(15)])
    };
    pids.filter(named).collect()
}
