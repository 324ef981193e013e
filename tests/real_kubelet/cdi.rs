//! A pod gets its GPU by its CDI name alone: the answer has no variable, no mount and no node, and
//! containerd reads the rest from the daemon's CDI file. The node is made: plain files are the
//! driver's libraries, and the device nodes have numbers of NVIDIA's driver, which is not loaded.
//! As with the driver container of NVIDIA's operator, all of them are below `/run/nvidia/driver`.

use crate::daemon::Daemon;
use crate::node::Node;
use crate::pods::{self, Pod};
use crate::sandbox::output;
use crate::{SOON, checks, say, wait_for};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::fs;
use std::path::Path;
use std::process::Command;

const GPU: &str = "nvidia.com/gpu";
/// The driver's major number (`Documentation/admin-guide/devices.txt`).
const MAJOR: u64 = 195;
const RELEASE: &str = "580.95.05";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The nodes of the driver as a whole, with their minor numbers.
const SHARED_NODES: [(&str, u64); 3] =
    [("nvidiactl", 255), ("nvidia-uvm", 254), ("nvidia-uvm-tools", 253)];
/// The first release of containerd that knows the CDI field of the CRI.
const CONTAINERD_MIN: (u32, u32) = (1, 7);

const CONFIG: &str = r#"
[telemetry]
listen = "off"

[[resource]]
name = "nvidia.com/gpu"
class = "gpu"
select = { vendor = ["10de"] }
nvidia = { device_list_strategy = ["cdi-cri"] }
"#;

/// Why the test cannot run here.
pub(crate) fn missing() -> Option<String> {
    let text = output(Command::new("containerd").arg("--version"));
    let release = text.split_whitespace().nth(2).unwrap_or_default().trim_start_matches('v');
    let mut numbers = release.split('.').map_while(|number| number.parse().ok());
    let release_is_new = numbers.next().zip(numbers.next()) >= Some(CONTAINERD_MIN);
    (!release_is_new).then(|| format!("containerd {release} has no CDI; 1.7 and newer have it"))
}

/// Makes the node's files below `root`, and the driver's files where the runtime finds them.
fn make(root: &Path) {
    SimNode::create(root).unwrap();
    let driver = root.join("run/nvidia/driver");
    fs::create_dir_all(driver.join("dev")).unwrap();
    fs::create_dir_all(driver.join(LIBRARIES)).unwrap();
    let gpus = (0..GPUS).map(|gpu| (format!("nvidia{gpu}"), gpu as u64));
    let shared = SHARED_NODES.map(|(name, minor)| (name.to_owned(), minor));
    for (name, minor) in gpus.chain(shared) {
        fs::remove_file(root.join("dev").join(&name)).unwrap();
        let (mode, number) = (Mode::from_bits_truncate(0o666), makedev(MAJOR, minor));
        mknod(&driver.join("dev").join(name), SFlag::S_IFCHR, mode, number).unwrap();
    }
    for library in ["libcuda.so", "libnvidia-ml.so"] {
        fs::write(driver.join(LIBRARIES).join(format!("{library}.{RELEASE}")), "").unwrap();
        std::os::unix::fs::symlink(
            format!("{library}.{RELEASE}"),
            driver.join(LIBRARIES).join(format!("{library}.1")),
        )
        .unwrap();
    }
    output(Command::new("mount").arg("--bind").arg(root.join("run/nvidia")).arg("/run/nvidia"));
}

pub(crate) fn all(dir: &Path, kubelet: &Path) {
    let root = dir.join("host");
    make(&root);
    let mut node = Node::start(dir, kubelet);
    let daemon = Daemon::start_below(dir, &root, CONFIG);
    wait_for("the GPUs are registered", SOON, || daemon.is_registered().then_some(()));
    node.pods.create("cuda", GPU, 2, false);
    let pod = checks::running(&node, "cuda");
    let granted = has_only_its_gpus(&daemon, &pod);
    // The definitions of held devices are there before the kubelet starts its pods again.
    node.restart_kubelet(Signal::SIGKILL);
    assert_eq!(checks::running(&node, "cuda"), pod, "a restart of the kubelet harmed the pod");
    say(format_args!("a pod with {granted:?} by CDI names alone has these GPUs and no other"));
}

/// Checks what the container sees. Returns the nodes of its GPUs.
fn has_only_its_gpus(daemon: &Daemon, pod: &Pod) -> Vec<String> {
    let log = wait_for("the container has printed", SOON, || {
        Some(pods::log("cuda", &pod.uid)).filter(|log| log.contains("opened"))
    });
    let devices: Vec<String> = daemon.who().into_iter().flat_map(|held| held.devices).collect();
    let of = |id: &String| (0..GPUS).find(|gpu| id.ends_with(&format!("{gpu:012x}")));
    let held: Vec<usize> = devices.iter().filter_map(of).collect();
    assert_eq!(held.len(), 2, "{devices:?}");
    let seen: Vec<usize> =
        (0..GPUS).filter(|gpu| log.contains(&format!("/dev/nvidia{gpu}\n"))).collect();
    let mut sorted = held.clone();
    sorted.sort_unstable();
    assert_eq!(seen, sorted, "{log}");
    for (name, _) in SHARED_NODES {
        assert!(log.contains(&format!("/dev/{name}\n")), "{name} is missing: {log}");
    }
    for library in ["libcuda.so.1", &format!("libcuda.so.{RELEASE}")] {
        assert!(log.contains(&format!("/{LIBRARIES}/{library}\n")), "{library}: {log}");
    }
    // The file's own: with `void`, a hook of NVIDIA's runtime does nothing more.
    assert_eq!(log.matches("VISIBLE_DEVICES").count(), 1, "the answer has a variable too: {log}");
    assert!(log.contains("NVIDIA_VISIBLE_DEVICES=void\n"), "{log}");
    // No driver answers; without the right to open the node the error would be another one.
    assert!(log.contains("No such device or address") && !log.contains("not permitted"), "{log}");
    sorted.iter().map(|gpu| format!("/dev/nvidia{gpu}")).collect()
}
