//! Many daemons on one API server: how many requests they make, how much memory they need, and how
//! they come back after the server's restart.

use crate::api::{Event, NODES, SLICES};
use crate::cluster::Cluster;
use crate::daemon::resident_kib;
use crate::real::binary::as_in_unit;
use crate::real::process::Process;
use crate::{SOON, number, pki, say};
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// `HOLDFAST_FLEET` is another number of nodes, and `HOLDFAST_QUIET_SECONDS` another time in which
/// nothing changes.
const FLEET: usize = 10;
const QUIET_SECONDS: usize = 10;
/// The longest pause of a daemon after a failure, with the node's own part (docs/dra.md).
const PAUSE_MAX: Duration = Duration::from_secs(35);

#[derive(Debug)]
struct Member {
    node: String,
    hardware: SimNode,
    process: Process,
}

impl Member {
    /// Creates the node, and starts its daemon with the credentials of its kubelet.
    fn start(cluster: &Cluster, n: usize) -> Self {
        let node = format!("fleet-{n}");
        let metadata = json!({"name": node});
        cluster
            .api
            .create(NODES, &json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}));
        let subject = format!("/O=system:nodes/CN=system:node:{node}");
        pki::make_client(&cluster.dir, &node, &subject);
        let dir = cluster.dir.join(&node);
        fs::create_dir(&dir).unwrap();
        let hardware = SimNode::create(dir.join("host")).unwrap();
        let credentials = pki::kubeconfig(&cluster.dir, &node);
        let config = format!(
            r#"
[telemetry]
listen = "off"
[cluster]
credentials = "{}"
[dra]
enabled = true
[cdi]
directory = "{}/cdi"
[[resource]]
name = "nvidia.com/gpu"
class = "gpu"
api = "dra"
"#,
            credentials.display(),
            dir.display()
        );
        fs::write(dir.join("config.toml"), config).unwrap();
        let mut command = as_in_unit();
        for (option, path) in [
            ("--config", "config.toml"),
            ("--host-root", "host"),
            ("--kubelet-dir", "kubelet"),
            ("--state-dir", "state"),
            ("--run-dir", "run"),
        ] {
            command.arg(option).arg(dir.join(path));
        }
        fs::create_dir(dir.join("kubelet")).unwrap();
        let process = Process::start(command.arg("run").env("NODE_NAME", &node), dir.join("log"));
        Member { node, hardware, process }
    }
}

/// Waits until each of `count` nodes has had an event that `is_awaited`. Returns how long the last
/// one took.
fn until_each(
    events: &Receiver<Event>,
    count: usize,
    limit: Duration,
    is_awaited: impl Fn(&Value) -> bool,
) -> Duration {
    let (began, mut seen) = (Instant::now(), BTreeSet::new());
    while seen.len() < count {
        let left = limit.saturating_sub(began.elapsed());
        let event = events.recv_timeout(left).unwrap_or_else(|error| {
            panic!("{} of {count} nodes within {limit:?}: {error}", seen.len())
        });
        let node = event.object["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
        if event.kind != "DELETED" && node.starts_with("fleet-") && is_awaited(&event.object) {
            seen.insert(node);
        }
    }
    began.elapsed()
}

fn tainted(slice: &Value) -> usize {
    let devices = slice["spec"]["devices"].as_array().unwrap().iter();
    devices.filter(|device| !device["taints"].is_null()).count()
}

/// Requests so far by verb, for slices, as the API server counts them.
fn requests(cluster: &Cluster) -> Vec<(String, u64)> {
    let text = cluster.api.text("/metrics");
    let mut sums = std::collections::BTreeMap::<String, u64>::new();
    for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let label = |name: &str| {
            let rest = line.split_once(&format!("{name}=\""))?.1;
            Some(rest.split_once('"')?.0.to_owned())
        };
        if label("resource").as_deref() == Some("resourceslices") {
            let count: f64 = line.rsplit_once(' ').unwrap().1.parse().unwrap();
            *sums.entry(label("verb").unwrap()).or_default() += count as u64;
        }
    }
    sums.into_iter().collect()
}

fn since(before: &[(String, u64)], after: &[(String, u64)]) -> String {
    let former =
        |verb: &String| before.iter().find(|each| each.0 == *verb).map_or(0, |each| each.1);
    let changed = after.iter().map(|(verb, count)| (verb, count.saturating_sub(former(verb))));
    let changed = changed.filter(|(_, count)| *count > 0);
    changed.map(|(verb, count)| format!("{verb} {count}")).collect::<Vec<_>>().join(", ")
}

/// Processor time of a process so far, in seconds (`proc_pid_stat(5)`, 100 ticks a second).
fn processor_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks = |nth: usize| fields[nth].parse::<f64>().unwrap();
    (ticks(11) + ticks(12)) / 100.0
}

pub(crate) fn many_nodes(cluster: &mut Cluster) {
    if cluster.lacks("DRADeviceTaints") {
        return;
    }
    let count = number("HOLDFAST_FLEET", FLEET);
    let events = cluster.api.watch(SLICES);
    let fresh = requests(cluster);
    let members: Vec<Member> = (0..count).map(|n| Member::start(cluster, n)).collect();
    let all =
        |slice: &Value| slice["spec"]["devices"].as_array().is_some_and(|it| it.len() == GPUS);
    let published = until_each(&events, count, SOON, all);
    let started = requests(cluster);
    say(format_args!(
        "{count} nodes: all slices {published:.1?} after the last start; requests for slices: {}",
        since(&fresh, &started)
    ));

    let server = cluster.plane.api_server.pid();
    let (quiet, busy) =
        (number("HOLDFAST_QUIET_SECONDS", QUIET_SECONDS), processor_seconds(server));
    let before = requests(cluster);
    assert!(events.recv_timeout(Duration::from_secs(quiet as u64)).is_err(), "a slice was changed");
    let kib: Vec<u64> = members.iter().map(|it| resident_kib(&it.process)).collect();
    say(format_args!(
        "{quiet} s without a change: requests for slices: {}; the API server used {:.1} s of processor; \
         the daemons have {} KiB at most, {} in the mean",
        since(&before, &requests(cluster)),
        processor_seconds(server) - busy,
        kib.iter().max().unwrap(),
        kib.iter().sum::<u64>() / count as u64
    ));

    let before = requests(cluster);
    members.iter().for_each(|member| member.hardware.remove_node("/dev/nvidia0").unwrap());
    let tainted_after = until_each(&events, count, SOON, |slice| tainted(slice) == 1);
    say(format_args!(
        "one device fails on each node at once: the last taint after {tainted_after:.1?}; requests: {}",
        since(&before, &requests(cluster))
    ));

    drop(events);
    cluster.restart_api_server();
    let events = cluster.api.watch(SLICES);
    members.iter().for_each(|member| member.hardware.remove_node("/dev/nvidia1").unwrap());
    let (began, mut most, mut last) = (Instant::now(), 0, 0);
    let mut seen = BTreeSet::new();
    while seen.len() < count {
        assert!(began.elapsed() < SOON, "{} of {count} nodes are back", seen.len());
        let second = Instant::now();
        while let Some(left) = Duration::from_secs(1).checked_sub(second.elapsed()) {
            let Ok(event) = events.recv_timeout(left) else { break };
            if event.kind == "MODIFIED" && tainted(&event.object) == 2 {
                seen.insert(event.object["spec"]["nodeName"].to_string());
            }
        }
        let total = requests(cluster).iter().map(|each| each.1).sum::<u64>();
        (most, last) = (most.max(total.saturating_sub(last)), total);
    }
    say(format_args!(
        "the API server restarts: the last node has written {:.1?} later; at most {most} requests for slices in a \
         second; requests: {}",
        began.elapsed(),
        since(&[], &requests(cluster))
    ));
    if count <= FLEET {
        assert!(began.elapsed() < 2 * PAUSE_MAX, "a pause is longer than documented");
    }
    for mut member in members {
        member.process.check();
        member.process.stop(Signal::SIGKILL);
        cluster.api.delete(&format!("{NODES}/{}", member.node), None);
    }
}
