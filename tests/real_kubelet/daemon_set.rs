//! The DaemonSet's pod serves the kubelet that runs it. The pod of the next version starts before
//! the former one ends and takes over, as with `maxSurge: 1`.

use crate::checks::running;
use crate::daemon::{Held, grants};
use crate::handover::has_taken_over;
use crate::node::Node;
use crate::pods;
use crate::shipped;
use crate::timeline::{dips_ms, first_list_ms};
use crate::view;
use crate::{EXCLUSIVE, SHARED, SOON, say, wait_for};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The pods of successive versions. The last rollout is undone.
const FORMER: &str = "holdfast-former";
const NEXT: &str = "holdfast-next";
const LATER: &str = "holdfast-later";
const TAKEN_BACK: &str = "holdfast-taken-back";
/// The number of probes of each kind that the former instance must answer on standby.
const PROBES: u64 = 3;

/// `config` is the folder of the configuration.
pub(crate) fn all(node: &Node, config: &Path) {
    it_serves_the_kubelet_that_runs_it(node, config);
    the_next_one_takes_over(node, config);
    the_former_one_goes(node);
    a_rollout_ends_the_former_one_at_once(node, config);
    a_rollout_is_taken_back(node, config);
}

fn it_serves_the_kubelet_that_runs_it(node: &Node, config: &Path) {
    let began = Instant::now();
    node.pods.put(FORMER, &shipped::pod(FORMER, config));
    ready(node, FORMER);
    say(format_args!(
        "the DaemonSet's pod is ready {} ms after its manifest was there",
        began.elapsed().as_millis()
    ));
    wait_for("both lists arrive", SOON, || {
        first_list_ms(&node.kubelet_log(), SHARED)
            .and(first_list_ms(&node.kubelet_log(), EXCLUSIVE))
    });
    node.pods.create("first", EXCLUSIVE, 1, false);
    let pod = running(node, "first");
    let is_device =
        |line: &str| line.contains(" crw") && (line.ends_with(" full") || line.ends_with(" zero"));
    wait_for("its container sees the device", SOON, || {
        pods::log("first", &pod.uid).lines().any(is_device).then_some(())
    });
    let held = named(node, FORMER, 1);
    say(format_args!("`holdfast who`, called in the pod: {held:?}"));
    assert_eq!(held[0].holder.as_deref(), Some(&*format!("default/first-node {} main", pod.uid)));
}

fn the_next_one_takes_over(node: &Node, config: &Path) {
    let (first, former) = (running(node, "first"), running(node, FORMER));
    node.pods.put(NEXT, &shipped::pod(NEXT, config));
    // During the handover.
    node.pods.create("second", SHARED, 1, false);
    ready(node, NEXT);
    let log = log_file(node, NEXT);
    wait_for("the next one has taken over", SOON, || has_taken_over(&log).then_some(()));
    running(node, "second");

    let before = node.pods.good_probes(FORMER);
    let probes = wait_for("the former one answers its probes", SOON, || {
        let more = |kind: &str| {
            node.pods.good_probes(FORMER).get(kind).unwrap_or(&0) - before.get(kind).unwrap_or(&0)
        };
        let more = BTreeMap::from(["Liveness", "Readiness"].map(|kind| (kind, more(kind))));
        more.values().all(|count| *count >= PROBES).then_some(more)
    });
    assert_eq!(
        bad_probes(node, FORMER),
        [""; 0],
        "the former one is on standby and reports that it is healthy"
    );
    assert_eq!(
        (running(node, "first"), running(node, FORMER)),
        (first, former),
        "nothing was restarted"
    );
    assert!(is_ready(node, FORMER), "the former one stands by");
    say(format_args!(
        "the next one took over; the former one stands by, and its probes went well: {probes:?}"
    ));
    no_period_without_devices(node);
}

fn the_former_one_goes(node: &Node) {
    let (first, second) = (running(node, "first"), running(node, "second"));
    end(node, FORMER);
    node.pods.create("third", EXCLUSIVE, 1, false);
    running(node, "third");
    let held = named(node, NEXT, 3);
    let agreed = wait_for("the ledger and the kubelet agree", SOON, || {
        view::agreement(node, &who(node, NEXT)).ok()
    });
    assert_eq!(agreed.len(), 3, "{agreed:?}");
    assert_eq!(
        (running(node, "first"), running(node, "second")),
        (first, second),
        "a pod was harmed"
    );
    no_period_without_devices(node);
    say(format_args!(
        "the former one has ended; the next one has the same grants as the kubelet: {held:?}"
    ));
}

/// As the DaemonSet's controller does: the former pod ends as soon as the next one is ready.
fn a_rollout_ends_the_former_one_at_once(node: &Node, config: &Path) {
    node.pods.put(LATER, &shipped::pod(LATER, config));
    ready(node, LATER);
    end(node, NEXT);
    let held = named(node, LATER, 3);
    no_period_without_devices(node);
    say(format_args!(
        "a rollout that waits for the readiness probe alone: no moment without devices, and {} containers are named",
        held.len()
    ));
}

/// The next pod is deleted while the former one is on standby: the former one serves again.
fn a_rollout_is_taken_back(node: &Node, config: &Path) {
    let former = running(node, LATER);
    node.pods.put(TAKEN_BACK, &shipped::pod(TAKEN_BACK, config));
    ready(node, TAKEN_BACK);
    let log = log_file(node, TAKEN_BACK);
    wait_for("it has taken over", SOON, || has_taken_over(&log).then_some(()));
    no_period_without_devices(node);
    end(node, TAKEN_BACK);
    named(node, LATER, 3);
    let dips = wait_for("the kubelet has both lists again", SOON, || {
        let dips = [SHARED, EXCLUSIVE].map(|resource| dips_ms(&node.kubelet_log(), resource));
        dips.iter().flatten().all(|dip| dip.is_finite()).then_some(dips)
    });
    node.pods.create("fourth", SHARED, 1, false);
    running(node, "fourth");
    named(node, LATER, 4);
    assert_eq!(running(node, LATER), former, "the former one was not restarted");
    say(format_args!(
        "a rollout is taken back: the former one serves again, after moments without devices of {dips:.1?} ms"
    ));
}

/// Deletes a pod and waits until its container has ended. The kubelet forgets the pod earlier.
fn end(node: &Node, name: &str) {
    let container = container(node, name);
    node.pods.delete(name);
    wait_for(&format!("{name} ends"), SOON, || (!node.runs(&container)).then_some(()));
}

fn no_period_without_devices(node: &Node) {
    let log = node.kubelet_log();
    for resource in [SHARED, EXCLUSIVE] {
        assert_eq!(
            dips_ms(&log, resource),
            [0.0; 0],
            "{resource} was without devices for this number of milliseconds"
        );
    }
}

fn is_ready(node: &Node, name: &str) -> bool {
    node.pods.told(name).is_some_and(|pod| pod["status"]["containerStatuses"][0]["ready"] == true)
}

/// Waits until the readiness probe of a pod succeeds. Its first container must live that long.
fn ready(node: &Node, name: &str) {
    wait_for(&format!("{name} is ready"), SOON, || {
        let restarts = node.pods.get(name).map_or(0, |pod| pod.restarts);
        assert_eq!(
            restarts,
            0,
            "{name} has ended: {}",
            std::fs::read_to_string(log_file(node, name)).unwrap_or_default()
        );
        is_ready(node, name).then_some(())
    });
}

/// The failed probes that the kubelet logged after the pod was ready.
fn bad_probes(node: &Node, name: &str) -> Vec<String> {
    let (log, pod) = (node.kubelet_log(), format!("kube-system/{name}-node\""));
    let of_pod =
        log.lines().filter(|line| line.contains("\"SyncLoop (probe)\"") && line.contains(&pod));
    let since_ready = of_pod.skip_while(|line| !line.contains("status=\"ready\""));
    since_ready
        .filter(|line| {
            line.contains("status=\"not ready\"") || line.contains("status=\"unhealthy\"")
        })
        .map(str::to_owned)
        .collect()
}

/// The ledger's grants, once `count` containers have names.
fn named(node: &Node, name: &str, count: usize) -> Vec<Held> {
    wait_for(&format!("{count} containers are named"), SOON, || {
        Some(who(node, name))
            .filter(|held| held.len() == count && held.iter().all(|held| held.holder.is_some()))
    })
}

/// The grants by `who`, called in the container as `kubectl exec` does.
fn who(node: &Node, name: &str) -> Vec<Held> {
    grants(
        &serde_json::from_str(
            &node.exec(&container(node, name), &["holdfast", "who", "-o", "json"]),
        )
        .unwrap(),
    )
}

/// containerd's id of a pod's container.
fn container(node: &Node, name: &str) -> String {
    let pod = node.pods.told(name).unwrap();
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
    id.strip_prefix("containerd://").unwrap().to_owned()
}

/// The log of a pod of the DaemonSet.
fn log_file(node: &Node, name: &str) -> PathBuf {
    let uid = node.pods.get(name).map(|pod| pod.uid).unwrap_or_default();
    format!("/var/log/pods/kube-system_{name}-node_{uid}/holdfast/0.log").into()
}
