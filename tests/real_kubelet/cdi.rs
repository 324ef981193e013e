//! A pod gets its GPU by its CDI name alone: the answer has no variable, no mount and no node, and
//! containerd reads the rest from the daemon's CDI file. The node is made.

use crate::daemon::Daemon;
use crate::node::Node;
use crate::pods::{self, Pod};
use crate::real::gpus::{self, LIBRARIES, RELEASE, SHARED_NODES};
use crate::sandbox::output;
use crate::{SOON, checks, say, wait_for};
use holdfast::lab::sim::hardware::GPUS;
use nix::sys::signal::Signal;
use std::path::Path;
use std::process::Command;

const GPU: &str = "nvidia.com/gpu";
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

pub(crate) fn all(dir: &Path, kubelet: &Path) {
    let root = dir.join("host");
    gpus::make(&root);
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
