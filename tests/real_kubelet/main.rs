//! Holdfast under a real kubelet, with containerd and runc: no API server, static pods.
//!
//! `KUBELET_BIN` names the kubelet (1.28 or newer). Without it the test is skipped with a message.
//! It needs root and the Debian packages `containerd runc busybox-static`. The image in the
//! DaemonSet's pod also needs `containernetworking-plugins python3 dpkg binutils`, and the
//! requirements of `packaging/image/build`. `HOLDFAST_BIN` names another binary than the one just
//! built, such as a release build: the figures of an idle daemon are measured only then.
//! `HOLDFAST_STRICT=1` allows no slow registration.
//!
//! All processes run in mount and process namespaces of their own. The kubelet hard-codes
//! `/var/lib/kubelet/device-plugins`, and finds an empty directory there. The end of the first
//! process ends all others, including containers and shims. A lock file allows one run at a time.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod cdi;
mod checks;
mod daemon;
mod daemon_set;
mod handover;
mod health;
mod ledger;
mod node;
mod pods;
#[path = "../common/real/mod.rs"]
mod real;
#[path = "../common/recording/mod.rs"]
mod recording;
mod shipped;
#[path = "../common/systemd.rs"]
mod systemd;
mod timelines;
mod view;

use daemon::Daemon;
use node::Node;
use real::{network, sandbox, say, timeline, wait_for};
use std::path::PathBuf;
use std::time::Duration;

/// The shared resource: `/dev/urandom`, sixteen times.
const SHARED: &str = "example.com/urandom";
/// The exclusive resource, with two devices.
const EXCLUSIVE: &str = "example.com/exclusive";

const CONFIG: &str = r#"
[telemetry]
listen = "off"

[[resource]]
name = "example.com/urandom"
class = "char"
paths = [{ host = "/dev/urandom", container = "/dev/offered" }]
replicas = 16
env = { EXAMPLE = "1" }

[[resource]]
name = "example.com/exclusive"
class = "char"
paths = [{ host = "/dev/full", container = "/dev/exclusive/" }, { host = "/dev/zero", container = "/dev/exclusive/" }]
"#;

/// A limit against hanging, long enough for a busy machine.
const SOON: Duration = Duration::from_secs(90);

/// The kubelet to test with. Prints a message if there is none.
fn kubelet() -> Option<PathBuf> {
    let named = std::env::var_os("KUBELET_BIN").map(PathBuf::from);
    if named.is_none() {
        say(
            "SKIPPED: KUBELET_BIN is not set, so nothing was tested with a real kubelet; it names a kubelet binary, 1.28 or newer",
        );
    }
    named
}

#[test]
fn pods_of_a_real_kubelet_keep_their_devices() {
    let Some(kubelet) = kubelet() else { return };
    match sandbox::work_dir() {
        None => sandbox::run("pods_of_a_real_kubelet_keep_their_devices", &kubelet),
        Some(dir) => {
            sandbox::furnish(&dir);
            let mut node = Node::start(&dir, &kubelet);
            let mut daemon = Daemon::start(&dir, CONFIG);
            checks::all(&mut node, &mut daemon);
        }
    }
}

#[test]
fn a_real_kubelet_does_not_notice_an_upgrade() {
    let Some(kubelet) = kubelet() else { return };
    match sandbox::work_dir() {
        None => sandbox::run("a_real_kubelet_does_not_notice_an_upgrade", &kubelet),
        Some(dir) => {
            sandbox::furnish(&dir);
            let node = Node::start(&dir, &kubelet);
            handover::all(&node, &mut Daemon::start(&dir, CONFIG));
        }
    }
}

#[test]
fn the_image_serves_a_real_kubelet_in_the_pod_of_the_daemon_set() {
    let Some(kubelet) = kubelet() else { return };
    match sandbox::work_dir() {
        None => {
            if let Some(what) = real::shipped::missing() {
                return say(format_args!(
                    "SKIPPED: the image and the DaemonSet were not tested: {what}"
                ));
            }
            sandbox::run("the_image_serves_a_real_kubelet_in_the_pod_of_the_daemon_set", &kubelet);
        }
        Some(dir) => {
            sandbox::furnish(&dir);
            let Some(image) = real::shipped::image(&dir) else { return };
            network::write(&dir);
            let node = Node::start(&dir, &kubelet);
            node.import(&image);
            daemon_set::all(&node, &shipped::config(&dir));
        }
    }
}

#[test]
fn a_pod_gets_its_gpu_by_its_cdi_name_alone() {
    let Some(kubelet) = kubelet() else { return };
    match sandbox::work_dir() {
        None => match cdi::missing() {
            Some(what) => say(format_args!("SKIPPED: CDI was not tested: {what}")),
            None => sandbox::run("a_pod_gets_its_gpu_by_its_cdi_name_alone", &kubelet),
        },
        Some(dir) => {
            sandbox::furnish(&dir);
            cdi::all(&dir, &kubelet);
        }
    }
}

#[test]
fn a_plugin_observes_the_same_with_a_real_and_a_simulated_kubelet() {
    let Some(kubelet) = kubelet() else { return };
    match sandbox::work_dir() {
        None => {
            sandbox::run(
                "a_plugin_observes_the_same_with_a_real_and_a_simulated_kubelet",
                &kubelet,
            );
        }
        Some(dir) => {
            sandbox::furnish(&dir);
            let real = timelines::on_the_real(&mut Node::start(&dir, &kubelet));
            timelines::compare(&real, &timelines::on_ours());
        }
    }
}

#[test]
fn the_simulated_kubelet_behaves_as_recorded_from_a_real_one() {
    timelines::on_ours();
}
