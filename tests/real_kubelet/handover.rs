//! Upgrades beside a real kubelet while pods come and go. `HOLDFAST_ROUNDS`: how many of each kind, 3 in every run.

use crate::checks::running;
use crate::daemon::Daemon;
use crate::node::Node;
use crate::timeline::{counts_again, dips_ms, first_list_ms};
use crate::view;
use crate::{EXCLUSIVE, SHARED, SOON, say, wait_for};
use nix::sys::signal::Signal;
use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// Pods that are there at a time. Each has one of sixteen.
const PODS: usize = 6;

/// How the older instance leaves.
#[derive(Debug, Clone, Copy)]
enum Leaves {
    /// When it is told to, after everything; a pod is admitted meanwhile.
    Politely,
    /// The same, without that pod: a kubelet that drops a connection fails what it has just asked on it.
    Alone,
    /// Killed, so long after the new one was started.
    Killed(Duration),
    /// Before the new one is started: no handover at all.
    First,
}

pub(crate) fn has_taken_over(log: &Path) -> bool {
    fs::read_to_string(log).unwrap().contains("took over from another instance")
}

pub(crate) fn all(node: &Node, daemon: &mut Daemon) {
    wait_for("every resource is registered", SOON, || {
        let listed = |resource| first_list_ms(&node.kubelet_log(), resource).is_some();
        (daemon.is_registered() && listed(SHARED) && listed(EXCLUSIVE)).then_some(())
    });
    node.pods.create("exclusive", EXCLUSIVE, 1, false);
    let before = running(node, "exclusive");
    let rounds: usize = std::env::var("HOLDFAST_ROUNDS").map_or(3, |text| text.parse().unwrap());
    let mut there = VecDeque::new();
    let mut numbers = 0..;
    for detaches in [true, false] {
        daemon.configure(|text| format!("{text}\n[upgrade]\ndetach = {detaches}\n"));
        let polite = rounds_of(node, daemon, rounds, &mut there, &mut numbers, |_| if detaches { Leaves::Politely } else { Leaves::Alone });
        say(format_args!("{rounds} upgrades with detach = {detaches}, the older instance leaving politely: {}", told(&polite)));
        assert!(!detaches || polite.is_empty(), "{polite:?}");
        // Also in the midst of everything: from before its ledger is given away until it stands by.
        let killed = |round: usize| Leaves::Killed(Duration::from_millis(1300).mul_f64(round as f64 / rounds as f64));
        let killed = rounds_of(node, daemon, rounds, &mut there, &mut numbers, killed);
        say(format_args!("{rounds} upgrades with detach = {detaches}, the older instance killed: {}", told(&killed)));
    }
    // No instance was there for long enough to see that a pod is gone: the next ones would start with the grants of all of them.
    wait_for("the ledger and the kubelet agree", SOON, || view::agreement(node, &daemon.who()).ok());
    let restarted = rounds_of(node, daemon, rounds, &mut there, &mut numbers, |_| Leaves::First);
    say(format_args!("{rounds} restarts in place, as systemctl restart: {}", told(&restarted)));

    assert_eq!(running(node, "exclusive"), before, "a pod was harmed");
    let agreed = wait_for("the ledger and the kubelet agree", SOON, || view::agreement(node, &daemon.who()).ok());
    say(format_args!("after all upgrades the ledger and the kubelet agree on {} grants", agreed.len()));
}

fn told(dips: &[f64]) -> String {
    let mut sorted = dips.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: usize| sorted[(sorted.len() * share / 100).min(sorted.len() - 1)];
    match sorted.len() {
        0 => "no moment without devices".into(),
        count => format!("{count} moments without devices, ms: p50 {:.2}, p99 {:.2}, max {:.2}", at(50), at(99), at(100)),
    }
}

/// Makes so many upgrades, with a pod admitted in the midst of each. The moments without devices.
fn rounds_of(
    node: &Node,
    daemon: &mut Daemon,
    rounds: usize,
    there: &mut VecDeque<String>,
    numbers: &mut impl Iterator<Item = usize>,
    leaves: impl Fn(usize) -> Leaves,
) -> Vec<f64> {
    let before = dips_ms(&node.kubelet_log(), SHARED).len();
    for round in 0..rounds {
        let name = format!("pod-{}", numbers.next().unwrap());
        let leaves = leaves(round);
        let hand_over = |daemon: &mut Daemon| {
            daemon.hand_over(|log| {
                if let Leaves::Killed(after) = leaves {
                    sleep(after);
                    return Signal::SIGKILL;
                }
                // The kubelet looks at its folder once in a while, so it is asked for before.
                if matches!(leaves, Leaves::Politely) {
                    node.pods.create(&name, SHARED, 1, false);
                }
                wait_for("the other one has taken over", SOON, || has_taken_over(log).then_some(()));
                Signal::SIGTERM
            });
        };
        let position = node.kubelet_log_length();
        match leaves {
            Leaves::First => daemon.restart(Signal::SIGTERM),
            Leaves::Politely | Leaves::Alone | Leaves::Killed(_) => hand_over(daemon),
        }
        if !matches!(leaves, Leaves::Politely) {
            // Read, and not asked of the daemon: a verb would take from it the processor that it starts on, and the kubelet takes
            // a moment to count what it was sent.
            wait_for("every list counts", SOON, || {
                let log = node.kubelet_log_since(position);
                [SHARED, EXCLUSIVE].iter().all(|resource| counts_again(&log, resource)).then_some(())
            });
        }
        wait_for("every resource is registered", SOON, || daemon.is_registered().then_some(()));
        if !matches!(leaves, Leaves::Politely) {
            // What the kubelet asks a process that is being killed nobody can answer.
            node.pods.create(&name, SHARED, 1, false);
        }
        running(node, &name);
        wait_for("the handover is complete", SOON, || daemon.is_alone().then_some(()));
        there.push_back(name);
        if there.len() > PODS {
            node.pods.delete(&there.pop_front().unwrap());
        }
    }
    dips_ms(&node.kubelet_log(), SHARED).split_off(before)
}
