//! This machine, and a daemon that has it as its host.

use crate::common::inside::say;
use crate::common::{Daemon, HANG, Node, http_get, is_root, name, telemetry};
use holdfast::domain::{DeviceId, ResourceName};
use holdfast::lab::sim::kubelet::{EventKind, Kubelet};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The shortest time between two scans, and between two lists of a resource (`tasks/watcher.rs`,
/// `serving/plugin.rs`).
pub(crate) const APART: Duration = Duration::from_millis(50);
/// Longer than all effects of one event: the next event then comes alone.
const QUIET: Duration = Duration::from_millis(150);

/// Locks this machine: every daemon sees the devices of a test, so tests run one after the other.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A failed test has cleaned up too.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a test can run here; otherwise prints that it is skipped.
pub(crate) fn can(test: &str, needs: &str, has: bool) -> bool {
    let can = is_root() && has;
    if !can {
        say(format_args!("SKIPPED: {test}: it needs root and {needs}"));
    }
    can
}

/// Runs a program to its end.
pub(crate) fn output(program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .output()
        .unwrap_or_else(|error| panic!("{program} {args:?}: {error}"))
}

/// The same; the program must succeed. Returns its output.
pub(crate) fn done(program: &str, args: &[&str]) -> String {
    let output = output(program, args);
    assert!(
        output.status.success(),
        "{program} {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A node whose daemon has this machine as its host, and one resource: the nodes that `path`
/// matches. The daemon's files stay in the node.
#[derive(Debug)]
pub(crate) struct Host {
    node: Node,
    resource: ResourceName,
}

impl Host {
    pub(crate) fn new(path: &str) -> Host {
        let node = Node::new();
        let resource = format!(
            "[[resource]]\nname = \"example.com/device\"\nclass = \"char\"\npaths = [\"{path}\"]\n"
        );
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{resource}"));
        Host { node, resource: name("example.com/device") }
    }

    pub(crate) fn path(&self, rel: &str) -> String {
        self.node.path(rel).to_str().unwrap().to_owned()
    }

    /// Starts the daemon and its kubelet, and waits for the first list.
    pub(crate) async fn start(&self) -> Running<'_> {
        let kubelet = self.node.start_kubelet().await;
        let usual = self.node.command(&["run"]);
        let mut command = Command::new(usual.get_program());
        let host = self.node.path("host");
        command.args(
            usual.get_args().map(|arg| if Path::new(arg) == host { "/".as_ref() } else { arg }),
        );
        command
            .env_remove("NOTIFY_SOCKET")
            .env("HOLDFAST_LOG", "info,holdfast::tasks::watcher=debug");
        let daemon = Daemon::spawn(&mut command);
        daemon.logged("registered").await;
        kubelet.wait_for(|view| view.lists(&self.resource) > 0, HANG).await.unwrap();
        Running { daemon, kubelet, host: self }
    }
}

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Running<'a> {
    pub(crate) daemon: Daemon,
    pub(crate) kubelet: Kubelet,
    host: &'a Host,
}

/// The daemon's work so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) scans: usize,
    /// Lists that reported a change to the kubelet.
    pub(crate) lists: usize,
    at: Instant,
}

impl Work {
    /// The work since then.
    pub(crate) fn since(self, before: Work) -> Work {
        Work { scans: self.scans - before.scans, lists: self.lists - before.lists, at: self.at }
    }

    /// The most scans or lists between two times if they are at least [`APART`] from each other.
    pub(crate) fn most(self, before: Work) -> usize {
        let between = (self.at - before.at).as_millis() / APART.as_millis();
        usize::try_from(between).unwrap() + 2
    }
}

impl Running<'_> {
    /// Waits until the kubelet's list has a device as `healthy`, or not. Returns the time that it
    /// took.
    pub(crate) async fn listed(&self, id: &str, healthy: bool) -> Duration {
        let (began, id) = (Instant::now(), DeviceId::new(id));
        let resource = &self.host.resource;
        self.kubelet
            .wait_for(|view| view.endpoint_state(resource).healthy.contains(&id) == healthy, HANG)
            .await
            .unwrap();
        began.elapsed()
    }

    /// Waits until these are the healthy ids of the kubelet's list.
    pub(crate) async fn healthy_are(&self, wanted: &BTreeSet<String>) {
        let fits = |ids: &BTreeSet<DeviceId>| {
            ids.iter().map(DeviceId::as_str).eq(wanted.iter().map(String::as_str))
        };
        self.kubelet
            .wait_for(|view| fits(&view.endpoint_state(&self.host.resource).healthy), HANG)
            .await
            .unwrap();
    }

    /// The healthy ids of the kubelet's list.
    pub(crate) fn healthy(&self) -> BTreeSet<String> {
        self.kubelet.view(|view| {
            view.endpoint_state(&self.host.resource)
                .healthy
                .iter()
                .map(ToString::to_string)
                .collect()
        })
    }

    pub(crate) async fn work(&self) -> Work {
        let (_, metrics) = http_get(telemetry(&self.daemon).await, "/metrics");
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("holdfast_scan_duration_seconds_count"));
        let scans = line.map_or(0, |count| count.trim().parse().unwrap());
        let listed = |kind: &EventKind| match kind {
            EventKind::Listed { resource, client, .. } => {
                (*resource == self.host.resource).then_some(*client)
            }
            _ => None,
        };
        let clients: Vec<u64> = self
            .kubelet
            .view(|view| view.events().iter().filter_map(|event| listed(&event.kind)).collect());
        // The first list of a stream reports no change.
        let lists = clients.len() - clients.iter().collect::<BTreeSet<_>>().len();
        Work { scans, lists, at: Instant::now() }
    }

    /// Waits until all effects of earlier events are over, so that the next event comes alone.
    pub(crate) async fn rest(&self) {
        tokio::time::sleep(QUIET).await;
    }
}

/// Where the kernel creates disks in memory.
pub(crate) const ZRAM: &str = "/sys/class/zram-control";

/// A disk that the kernel has created for this test. It stays empty, of size 0, and unused.
#[derive(Debug)]
pub(crate) struct Zram(u32);

impl Zram {
    pub(crate) fn new() -> Zram {
        Zram(fs::read_to_string(format!("{ZRAM}/hot_add")).unwrap().trim().parse().unwrap())
    }

    /// The first one, and a daemon that offers it.
    pub(crate) async fn offered(host: &Host) -> (Zram, Running<'_>) {
        let first = Zram::new();
        let running = host.start().await;
        running.listed(&first.id(), true).await;
        (first, running)
    }

    pub(crate) fn id(&self) -> String {
        format!("block:zram{}", self.0)
    }

    /// Makes the kernel send an event about it that is not true.
    pub(crate) fn say(&self, action: &str) {
        fs::write(format!("/sys/block/zram{}/uevent", self.0), action).unwrap();
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        fs::write(format!("{ZRAM}/hot_remove"), self.0.to_string()).unwrap();
    }
}
