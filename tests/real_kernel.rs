//! Devices that a real kernel makes and takes away, under a daemon that sees this machine: its uevents, its `/dev` and its
//! sysfs. A zram disk is the one that any test may have: the kernel makes it and its node when a file is read, and takes
//! them back when another one is written. It stays empty, of size 0, and nobody uses it.
//!
//! Only root may do that, on a kernel that has zram; elsewhere the test says that it is skipped.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod common;

use common::inside::say;
use common::{Daemon, HANG, Node, is_root, name, percentiles, resource, run};
use holdfast::domain::DeviceId;
use holdfast::sim::kubelet::Kubelet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const CONTROL: &str = "/sys/class/zram-control";

/// A disk that the kernel has made for this test.
#[derive(Debug)]
struct Zram(u32);

impl Zram {
    fn new() -> Zram {
        let number = fs::read_to_string(format!("{CONTROL}/hot_add")).unwrap();
        Zram(number.trim().parse().unwrap())
    }

    fn id(&self) -> DeviceId {
        DeviceId::new(format!("block:zram{}", self.0))
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        fs::write(format!("{CONTROL}/hot_remove"), self.0.to_string()).unwrap();
    }
}

/// The daemon of a node, but with this machine for a host. What it writes stays in the node.
fn daemon_of_this_machine(node: &Node) -> Daemon {
    let usual = node.command(&["run"]);
    let mut command = Command::new(usual.get_program());
    let host = node.path("host");
    command.args(usual.get_args().map(|arg| if Path::new(arg) == host { "/".as_ref() } else { arg }));
    command.env_remove("NOTIFY_SOCKET").env_remove("HOLDFAST_LOG");
    Daemon::spawn(&mut command)
}

/// Waits until the kubelet's list says of a device what it should, and tells how long that took.
async fn listed(kubelet: &Kubelet, id: &DeviceId, healthy: bool) -> Duration {
    let began = Instant::now();
    let zram = name("example.com/zram");
    kubelet.wait_for(|view| view.standing(&zram).healthy.contains(id) == healthy, HANG).await.unwrap();
    began.elapsed()
}

#[test]
fn what_the_kernel_makes_is_offered_and_what_it_takes_away_is_not() {
    if !is_root() || !Path::new(CONTROL).exists() {
        say(format_args!("SKIPPED: what_the_kernel_makes_is_offered_and_what_it_takes_away_is_not: it needs root and a kernel with zram"));
        return;
    }
    run(async {
        let node = Node::new();
        node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}", resource("zram")));
        let kubelet = node.start_kubelet().await;
        let first = Zram::new();
        let daemon = daemon_of_this_machine(&node);
        daemon.logged("registered").await;
        listed(&kubelet, &first.id(), true).await;
        let (mut made, mut taken) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            let second = Zram::new();
            let id = second.id();
            assert_ne!(id, first.id());
            made.push(listed(&kubelet, &id, true).await);
            drop(second);
            taken.push(listed(&kubelet, &id, false).await);
            listed(&kubelet, &first.id(), true).await;
        }
        println!("from the kernel to the kubelet's list: made {}; taken away {}", percentiles(made), percentiles(taken));
    });
}
