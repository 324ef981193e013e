//! The ledger compared with the kubelet: after many pods and restarts, and after the kubelet has
//! lost its checkpoint.

use crate::checks::{of, running};
use crate::daemon::{Daemon, Held};
use crate::node::Node;
use crate::pods::Pod;
use crate::view::{Grants, agreement, forget_checkpoint};
use crate::{EXCLUSIVE, SHARED, SOON, say, wait_for};
use nix::sys::signal::Signal;
use std::thread::sleep;
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;
const PODS_OF_A_ROUND: usize = 10;
/// After a minute a kubelet's report that a pod has ended counts as proof.
const SETTLED: Duration = Duration::from_secs(60);
pub(crate) const RELEASED_WITHIN: Duration = Duration::from_secs(30);

/// Waits until the ledger, the checkpoint and pod-resources agree.
fn until_agreement(node: &Node, daemon: &Daemon) -> Grants {
    let began = Instant::now();
    let mut last = String::new();
    let agreed =
        wait_for("the ledger agrees with the kubelet", SETTLED + RELEASED_WITHIN + SOON, || {
            match agreement(node, &daemon.who()) {
                Ok(grants) => Some(grants),
                Err(difference) => {
                    if difference != last {
                        last.clone_from(&difference);
                        say(format_args!(
                            "not yet, after {:.0} s: {} characters of difference",
                            began.elapsed().as_secs_f64(),
                            difference.len()
                        ));
                    }
                    sleep(Duration::from_millis(500));
                    None
                }
            }
        });
    say(format_args!(
        "{:.0} s later the ledger, the checkpoint and pod-resources agree on all {} grants",
        began.elapsed().as_secs_f64(),
        agreed.len()
    ));
    agreed
}

/// Pods come and go while the daemon and the kubelet are ended and started at every stage.
pub(crate) fn pods_come_and_go_through_restarts(
    node: &mut Node,
    daemon: &mut Daemon,
    shared: &str,
    kept: [&str; 2],
) {
    // After a restart, a pod with an init container runs only if the plugin registers in time. This
    // test must not depend on that.
    node.pods.delete(shared);
    let before = kept.map(|name| running(node, name));
    let (began, mut rejected) = (Instant::now(), 0);
    for round in 0..ROUNDS {
        let signals = if round % 2 == 0 {
            [Signal::SIGKILL, Signal::SIGTERM]
        } else {
            [Signal::SIGTERM, Signal::SIGKILL]
        };
        // In turn: while pods are created, while they run, while they end.
        let restarts = |at: usize, node: &mut Node, daemon: &mut Daemon| {
            if at == round % 3 {
                node.restart_kubelet(signals[0]);
            }
            if at == (round + 1) % 3 {
                daemon.restart(signals[1]);
            }
        };
        let mut names: Vec<String> =
            (0..PODS_OF_A_ROUND).map(|index| format!("visitor-{round}-{index}")).collect();
        for (index, name) in names.iter().enumerate() {
            node.pods.create(name, SHARED, 1, index % 3 == 0);
        }
        restarts(0, node, daemon);
        let of_round = |node: &Node, names: &[String]| {
            names.iter().filter_map(|name| node.pods.get(name)).collect::<Vec<_>>()
        };
        wait_for("every pod of the round runs", SOON, || {
            // A pod that came without a daemon, or before its list, was rejected. A controller
            // would create another one.
            for name in &mut names {
                if node.pods.get(name).is_some_and(|pod| pod.phase == "Failed") {
                    node.pods.delete(name);
                    name.push_str("-again");
                    node.pods.create(name, SHARED, 1, false);
                    rejected += 1;
                }
            }
            let pods = of_round(node, &names);
            (pods.len() == names.len() && pods.iter().all(Pod::runs)).then_some(())
        });
        restarts(1, node, daemon);
        names.iter().for_each(|name| node.pods.delete(name));
        restarts(2, node, daemon);
        wait_for("every pod of the round has ended", SOON, || {
            (node.pods.list().is_some() && of_round(node, &names).is_empty()).then_some(())
        });
    }
    let after = kept.map(|name| running(node, name));
    assert_eq!(after, before, "a restart harmed a pod that stayed");
    say(format_args!(
        "{} pods came and went in {:.0} s through {ROUNDS} restarts of the kubelet and as many of the daemon; {rejected} more were rejected without a daemon, and 2 kept running",
        ROUNDS * PODS_OF_A_ROUND,
        began.elapsed().as_secs_f64()
    ));
    wait_for("the daemon is back", SOON, || daemon.is_registered().then_some(()));
    node.pods.create("staged", SHARED, 2, true);
    running(node, "staged");
    let agreed = until_agreement(node, daemon);
    assert_eq!(agreed.len(), 4, "an init container and its successor, and two: {agreed:?}");
}

/// The kubelet has lost its checkpoint and treats every device as free. The ledger refuses (I2).
pub(crate) fn a_kubelet_that_lost_its_checkpoint_is_refused(
    node: &mut Node,
    daemon: &Daemon,
    holders: [&str; 2],
) {
    let before = holders.map(|name| running(node, name));
    let held = |daemon: &Daemon| {
        of(&daemon.who(), EXCLUSIVE)
            .map(|held| (held.alloc_id.clone(), held.holder.clone()))
            .collect::<Vec<_>>()
    };
    let named = |held: &Vec<(String, Option<String>)>| {
        held.len() == 2 && held.iter().all(|(_, holder)| holder.is_some())
    };
    let recorded = wait_for("both holders are named", SOON, || Some(held(daemon)).filter(named));
    node.stop_kubelet(Signal::SIGTERM);
    forget_checkpoint();
    node.start_kubelet();
    // A kubelet that has not settled may allocate the devices of its own pods: that proves nothing.
    sleep(SETTLED);
    wait_for("the ledger misses the pods' devices in the kubelet's listing", SOON, || {
        of(&daemon.who(), EXCLUSIVE).all(|held| held.state == "suspect").then_some(())
    });
    node.pods.create("taker", EXCLUSIVE, 1, false);
    let taker = wait_for("the pod is rejected", SOON, || {
        node.pods.get("taker").filter(|pod| pod.phase == "Failed" || pod.runs())
    });
    say(format_args!(
        "a kubelet that lost its checkpoint gives a held device away: {}: {}",
        taker.phase, taker.message
    ));
    let named = holders.iter().any(|name| taker.message.contains(&format!("default/{name}-node")));
    assert!(taker.phase == "Failed" && named, "it should be refused with the holder's name");
    assert_eq!(holders.map(|name| running(node, name)), before, "a holder was harmed");
    assert_eq!(held(daemon), recorded, "the ledger lost a holder");
    node.pods.delete("taker");
}

/// When the last pod has ended, every grant is released.
pub(crate) fn the_last_pods_devices_are_released(node: &Node, daemon: &Daemon, names: [&str; 3]) {
    names.iter().for_each(|name| node.pods.delete(name));
    wait_for("the pods go", SOON, || {
        (node.pods.list().is_some() && names.iter().all(|name| node.pods.get(name).is_none()))
            .then_some(())
    });
    let began = Instant::now();
    wait_for("everything is released", 3 * RELEASED_WITHIN, || {
        daemon.who().is_empty().then_some(())
    });
    let took = began.elapsed();
    say(format_args!(
        "the last pods' devices were released {:.1} s after they were gone",
        took.as_secs_f64()
    ));
    assert!(took <= RELEASED_WITHIN, "released only after {took:?}");
}

/// A static pod that returns has its UID again, and perhaps another device. Its former device is
/// free then.
pub(crate) fn a_static_pod_that_returns_releases_its_former_device(node: &Node, daemon: &Daemon) {
    node.pods.create("back", EXCLUSIVE, 1, false);
    let first = running(node, "back");
    wait_for("its container is named", SOON, || {
        of(&daemon.who(), EXCLUSIVE).next().and_then(|held| held.holder.clone())
    });
    node.pods.delete("back");
    wait_for("it goes", SOON, || {
        (node.pods.list().is_some() && node.pods.get("back").is_none()).then_some(())
    });
    node.pods.create("back", EXCLUSIVE, 1, false);
    let second = running(node, "back");
    assert_eq!(first.uid, second.uid, "a static pod's UID is a hash of its manifest");
    let held = wait_for("the new container is named", SOON, || {
        Some(daemon.who()).filter(|held| of(held, EXCLUSIVE).all(|held| held.holder.is_some()))
    });
    let devices: Vec<_> = of(&held, EXCLUSIVE).map(|held| held.devices.clone()).collect();
    node.pods.create("next", EXCLUSIVE, 1, false);
    let next = wait_for("the next pod is decided on", SOON, || {
        node.pods.get("next").filter(|pod| pod.phase == "Failed" || pod.runs())
    });
    say(format_args!(
        "a static pod came back; the ledger has {devices:?}; the next pod: {} {}",
        next.phase, next.message
    ));
    assert!(next.runs(), "the kubelet gave it a free device: {}", next.message);
    // It returns after its release. The kubelet may start it with its former device, and without
    // another Allocate.
    node.pods.delete("back");
    let is_back = |held: &Held| {
        held.holder.as_ref().is_some_and(|holder| holder.starts_with("default/back-"))
    };
    wait_for("its device is released", SOON, || (!daemon.who().iter().any(is_back)).then_some(()));
    node.pods.create("back", EXCLUSIVE, 1, false);
    running(node, "back");
    wait_for("the ledger has the pod that returned", SOON, || {
        daemon.who().iter().any(is_back).then_some(())
    });
}
