//! The checks, in the order of a node's life. Every figure is printed.

use crate::daemon::{Daemon, Held};
use crate::health;
use crate::ledger;
use crate::node::Node;
use crate::pods::{self, Pod};
use crate::real::binary::is_named;
use crate::timeline::{first_list_ms, first_pods_ms, median};
use crate::{EXCLUSIVE, SHARED, SOON, say, wait_for};
use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::{Duration, Instant};

const RESTARTS: usize = 20;
const FIRST_LIST_MS_MAX: f64 = 10.0;
/// A pod that is rejected at the kubelet's first pass has ended a second later.
const ADMITTED_AFTER: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_secs(60);

pub(crate) fn all(node: &mut Node, daemon: &mut Daemon) {
    // A pod that requests a resource unknown to the kubelet is not rejected: it runs without it.
    wait_for("every resource is registered", SOON, || {
        let listed = |resource| first_list_ms(&node.kubelet_log(), resource).is_some();
        (daemon.is_registered() && listed(SHARED) && listed(EXCLUSIVE)).then_some(())
    });
    init_and_main_get_the_device(node, daemon);
    exclusive_devices_are_not_shared(node, daemon);
    health::a_failed_device_is_reported_in_the_status_of_its_running_pod(node, daemon);
    let shared = pods_survive_every_restart_of_the_kubelet(node, daemon);
    // A pod that the kubelet has rejected may stay listed for minutes, and its release waits for
    // that.
    wait_for("the ledger has the grants of three pods", Duration::from_secs(300), || {
        (daemon.who().len() == 4).then_some(())
    });
    let idle = idle(daemon);
    ledger::pods_come_and_go_through_restarts(node, daemon, &shared, ["first", "second"]);
    a_deleted_pods_devices_are_released(node, daemon);
    ledger::a_kubelet_that_lost_its_checkpoint_is_refused(node, daemon, ["second", "fourth"]);
    ledger::the_last_pods_devices_are_released(node, daemon, ["staged", "second", "fourth"]);
    ledger::a_static_pod_that_returns_releases_its_former_device(node, daemon);
    assert_eq!(daemon.disagreements(), [""; 0], "no other plugin registers the resources");
    // Last, so that a failure here hides no other result.
    if is_named() {
        assert!(
            idle.resident_kib <= 14 * 1024,
            "{} KiB resident: more than 14 MiB",
            idle.resident_kib
        );
        assert!(
            idle.switches <= IDLE.as_secs(),
            "it woke up {} times in {IDLE:?}: more than once a second",
            idle.switches
        );
    }
}

pub(crate) fn running(node: &Node, name: &str) -> Pod {
    wait_for(&format!("the pod {name} runs"), SOON, || {
        let pod = node.pods.get(name)?;
        assert_ne!(pod.phase, "Failed", "{name}: {}: {}", pod.reason, pod.message);
        pod.runs().then_some(pod)
    })
}

pub(crate) fn of<'a>(grants: &'a [Held], resource: &'a str) -> impl Iterator<Item = &'a Held> {
    grants.iter().filter(move |held| held.resource == resource)
}

fn init_and_main_get_the_device(node: &Node, daemon: &Daemon) {
    node.pods.create("shared", SHARED, 2, true);
    let pod = running(node, "shared");
    let began = Instant::now();
    let wanted: BTreeSet<String> = ["setup", "main"]
        .iter()
        .map(|name| format!("default/shared-node {} {name}", pod.uid))
        .collect();
    let grants = wait_for("both containers are named", Duration::from_secs(2), || {
        let grants = daemon.who();
        let holders: BTreeSet<String> =
            of(&grants, SHARED).filter_map(|held| held.holder.clone()).collect();
        (holders == wanted).then_some(grants)
    });
    say(format_args!(
        "pod with an init container: both named {} ms after it was seen running",
        began.elapsed().as_millis()
    ));
    assert!(
        of(&grants, SHARED).all(|held| held.devices.len() == 2 && held.state == "bound"),
        "{grants:?}"
    );
    let log = wait_for("the container has printed", SOON, || {
        Some(pods::log("shared", &pod.uid)).filter(|log| log.contains("/dev/offered"))
    });
    assert!(log.contains(" EXAMPLE=1\n"), "{log}");
    assert!(
        log.lines().any(|line| line.contains(" crw")
            && line.contains("1,")
            && line.ends_with("/dev/offered")),
        "{log}"
    );
}

fn exclusive_devices_are_not_shared(node: &Node, daemon: &Daemon) {
    for name in ["first", "second"] {
        node.pods.create(name, EXCLUSIVE, 1, false);
        running(node, name);
    }
    let grants = wait_for("both pods are named", SOON, || {
        let grants = daemon.who();
        (of(&grants, EXCLUSIVE).filter(|held| held.holder.is_some()).count() == 2).then_some(grants)
    });
    let ids: BTreeSet<&String> = of(&grants, EXCLUSIVE).flat_map(|held| &held.devices).collect();
    assert_eq!(ids.len(), 2, "an id was given twice: {grants:?}");
    node.pods.create("third", EXCLUSIVE, 1, false);
    let third = wait_for("the third pod is rejected", SOON, || {
        node.pods.get("third").filter(|pod| pod.phase == "Failed")
    });
    say(format_args!(
        "exclusive: 2 pods hold {ids:?}; a third is rejected by the kubelet: {}",
        third.reason
    ));
    assert_eq!(of(&daemon.who(), EXCLUSIVE).count(), 2);
    node.pods.delete("third");
}

/// Returns the name of the pod with an init container, which may have changed.
fn pods_survive_every_restart_of_the_kubelet(node: &mut Node, daemon: &Daemon) -> String {
    let of_three =
        |node: &Node, shared: &str| [shared, "first", "second"].map(|name| running(node, name));
    let (mut shared, mut figures, mut batches) = ("shared".to_owned(), Vec::new(), Vec::new());
    let mut before = of_three(node, &shared);
    let mut held = held_by(daemon, &before);
    for restart in 0..RESTARTS {
        let signal = if restart % 2 == 0 { Signal::SIGKILL } else { Signal::SIGTERM };
        node.restart_kubelet(signal);
        let list = |resource| {
            wait_for("the first list arrives", SOON, || {
                first_list_ms(&node.kubelet_log(), resource)
            })
        };
        let lists = [list(SHARED), list(EXCLUSIVE)];
        let batch =
            wait_for("the kubelet comes to its pods", SOON, || first_pods_ms(&node.kubelet_log()));
        figures.extend(lists);
        batches.push(batch);
        sleep(ADMITTED_AFTER);
        if lists[0] >= batch && node.pods.get(&shared).is_some_and(|pod| pod.phase == "Failed") {
            // The kubelet does not wait. On a busy machine it may be first, and then it rejects a
            // pod with an init container.
            say(format_args!(
                "restart {restart}: the kubelet came to its pods after {batch:.1} ms, the list after {:.1} ms",
                lists[0]
            ));
            node.pods.delete(&shared);
            shared = format!("shared-{restart}");
            node.pods.create(&shared, SHARED, 2, true);
            before = of_three(node, &shared);
            held = held_by(daemon, &before);
            continue;
        }
        assert_eq!(of_three(node, &shared), before, "restart {restart} ({signal}) harmed a pod");
        assert_eq!(
            held_by(daemon, &before),
            held,
            "restart {restart} ({signal}) changed what the ledger knows"
        );
    }
    let slow = figures.iter().filter(|ms| **ms > FIRST_LIST_MS_MAX).count();
    let list =
        |figures: &[f64]| figures.iter().map(|ms| format!("{ms:.1}")).collect::<Vec<_>>().join(" ");
    say(format_args!(
        "{RESTARTS} kubelet restarts, no pod that was told in time rejected or restarted; ms from the registration server's start to the first list, \
         two resources each: {}; median {:.1}, {slow} of {} above {FIRST_LIST_MS_MAX} ms; to the kubelet's first look at its pods: {}",
        list(&figures),
        median(&figures),
        figures.len(),
        list(&batches)
    ));
    let strict = std::env::var_os("HOLDFAST_STRICT").is_some_and(|strict| strict == "1");
    assert!(
        median(&figures) <= FIRST_LIST_MS_MAX || !strict,
        "the median of the first lists is above {FIRST_LIST_MS_MAX} ms"
    );
    assert!(slow == 0 || !strict, "{slow} first lists came later than {FIRST_LIST_MS_MAX} ms");
    shared
}

/// The grants of these pods in the ledger, once their containers are known.
fn held_by(daemon: &Daemon, pods: &[Pod; 3]) -> Vec<Held> {
    let of_pod = |held: &Held, pod: &Pod| {
        held.holder.as_ref().is_some_and(|holder| holder.contains(&pod.uid))
    };
    wait_for("the containers of three pods are named", SOON, || {
        let held: Vec<Held> = daemon
            .who()
            .into_iter()
            .filter(|held| pods.iter().any(|pod| of_pod(held, pod)))
            .collect();
        (held.len() == 4).then_some(held)
    })
}

/// The cost of an idle daemon.
struct Idle {
    resident_kib: u64,
    /// Voluntary context switches of all threads.
    switches: u64,
}

fn idle(daemon: &Daemon) -> Idle {
    let before = daemon.sleeps();
    sleep(IDLE);
    let mut total = 0;
    let mut by_thread = Vec::new();
    for (thread, count) in daemon.sleeps() {
        let slept = count - before.get(&thread).copied().unwrap_or_default();
        total += slept;
        by_thread.push(format!("{thread}: {slept}"));
    }
    assert_eq!(daemon.disagreements(), [""; 0], "the kubelet has the daemon's list");
    let (resident_kib, anonymous_kib) = daemon.resident_kib();
    say(format_args!(
        "idle for {} s: {resident_kib} KiB resident ({anonymous_kib} anonymous), {total} voluntary context switches ({})",
        IDLE.as_secs(),
        by_thread.join(", ")
    ));
    Idle { resident_kib, switches: total }
}

fn a_deleted_pods_devices_are_released(node: &Node, daemon: &Daemon) {
    let pod = running(node, "first");
    node.pods.delete("first");
    wait_for("the pod goes", SOON, || node.pods.get("first").is_none().then_some(()));
    let began = Instant::now();
    let left = wait_for("its devices are released", Duration::from_secs(90), || {
        let left = daemon.who();
        left.iter()
            .all(|held| held.holder.as_ref().is_some_and(|holder| !holder.contains(&pod.uid)))
            .then_some(left)
    });
    let took = began.elapsed();
    say(format_args!(
        "a deleted pod's device was released {:.1} s after the pod was gone",
        took.as_secs_f64()
    ));
    assert!(took <= ledger::RELEASED_WITHIN, "released only after {took:?}");
    assert_eq!(
        (of(&left, SHARED).count(), of(&left, EXCLUSIVE).count()),
        (2, 1),
        "the others keep theirs: {left:?}"
    );
    // The kubelet allocates the device again.
    node.pods.create("fourth", EXCLUSIVE, 1, false);
    running(node, "fourth");
}
