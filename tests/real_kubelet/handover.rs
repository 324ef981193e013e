//! Upgrades beside a real kubelet while pods come and go. `HOLDFAST_ROUNDS`: how many of each kind, 3 in every run.

use crate::checks::running;
use crate::daemon::Daemon;
use crate::node::Node;
use crate::timeline::{counts, dips_ms, first_list_ms};
use crate::view;
use crate::{EXCLUSIVE, SHARED, SOON, say, wait_for};
use nix::sys::signal::{Signal, kill};
use std::collections::VecDeque;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;
use std::{fmt, fs};

/// Pods that are there at a time. Each has one of sixteen.
const PODS: usize = 6;

/// How the older instance leaves.
#[derive(Debug, Clone, Copy)]
enum Leaves {
    /// When it is told to, after everything.
    Politely,
    /// Killed, so long after the new one was started.
    Killed(Duration),
    /// Stopped as soon as the new one has come, and killed when the kubelet has asked it something.
    Asked,
    /// Before the new one is started: no handover at all.
    First,
    /// The same as a process of systemd's, which keeps what the kubelet has open meanwhile.
    Restarted,
}

/// Says that the new instance has come, and holds the kubelet's connections open too.
fn has_come(log: &Path) -> bool {
    fs::read_to_string(log).unwrap().contains("requesting a handover from another instance")
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
    let polite = rounds_of(node, daemon, rounds, &mut there, &mut numbers, |_| Leaves::Politely);
    say(format_args!("{rounds} upgrades, the older instance leaving politely: {polite}"));
    // Also in the midst of everything: from before it was asked for its ledger until it stands by.
    let killed = |round: usize| {
        Leaves::Killed(Duration::from_millis(1300).mul_f64(round as f64 / rounds as f64))
    };
    let killed = rounds_of(node, daemon, rounds, &mut there, &mut numbers, killed);
    say(format_args!("{rounds} upgrades, the older instance killed: {killed}"));
    let asked = rounds_of(node, daemon, rounds, &mut there, &mut numbers, |_| Leaves::Asked);
    say(format_args!(
        "{rounds} upgrades, the older instance killed with what it was asked: {asked}"
    ));
    for seen in [&polite, &killed, &asked] {
        assert!(seen.dips.len() <= seen.crashes, "{seen:?}");
    }
    // No instance was there for long enough to see that a pod is gone: the next ones would start with the grants of all of them.
    wait_for("the ledger and the kubelet agree", SOON, || {
        view::agreement(node, &daemon.who()).ok()
    });
    let restarted = rounds_of(node, daemon, rounds, &mut there, &mut numbers, |_| Leaves::First);
    say(format_args!("{rounds} restarts in place, without systemd: {restarted}"));
    daemon.put_into_unit();
    wait_for("the next one has everything", SOON, || daemon.has_succeeded().then_some(()));
    let restarted =
        rounds_of(node, daemon, rounds, &mut there, &mut numbers, |_| Leaves::Restarted);
    say(format_args!("{rounds} restarts by systemd: {restarted}"));
    assert!(restarted.dips.is_empty(), "{restarted:?}");

    assert_eq!(running(node, "exclusive"), before, "a pod was harmed");
    let agreed = wait_for("the ledger and the kubelet agree", SOON, || {
        view::agreement(node, &daemon.who()).ok()
    });
    say(format_args!(
        "after all upgrades the ledger and the kubelet agree on {} grants",
        agreed.len()
    ));
}

/// What the kubelet saw in some rounds.
#[derive(Debug)]
struct Seen {
    rounds: usize,
    /// Moments without devices, in milliseconds.
    dips: Vec<f64>,
    /// Rounds in which there was nobody to hand over to when the older instance ended.
    crashes: usize,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen { rounds, dips, crashes } = self;
        if *crashes > 0 {
            write!(f, "{crashes} ended before the new one had come; ")?;
        }
        if dips.is_empty() {
            return write!(f, "no moment without devices");
        }
        let of = |mut dips: Vec<f64>| {
            dips.sort_by(f64::total_cmp);
            let at = |share: usize| dips[(dips.len() * share).div_ceil(100).saturating_sub(1)];
            format!("p50 {:.2}, p99 {:.2}, max {:.2}", at(50), at(99), at(100))
        };
        let without = std::iter::repeat_n(0.0, rounds.saturating_sub(dips.len()));
        write!(
            f,
            "{} moments without devices, ms: {}; over all rounds {}",
            dips.len(),
            of(dips.clone()),
            of(dips.iter().copied().chain(without).collect())
        )
    }
}

/// Makes so many upgrades, with a pod admitted in the midst of each.
fn rounds_of(
    node: &Node,
    daemon: &mut Daemon,
    rounds: usize,
    there: &mut VecDeque<String>,
    numbers: &mut impl Iterator<Item = usize>,
    leaves: impl Fn(usize) -> Leaves,
) -> Seen {
    let before = dips_ms(&node.kubelet_log(), SHARED).len();
    let mut crashes = 0;
    for round in 0..rounds {
        let name = format!("pod-{}", numbers.next().unwrap());
        let position = node.kubelet_log_length();
        let mut is_created = false;
        let mut create = || {
            if !std::mem::replace(&mut is_created, true) {
                node.pods.create(&name, SHARED, 1, false);
            }
        };
        let leaves = leaves(round);
        match leaves {
            Leaves::First => daemon.restart(Signal::SIGTERM),
            Leaves::Restarted => {
                daemon.restart(Signal::SIGTERM);
                // The kubelet's connections end, or do not, by then.
                wait_for("the next one has everything", SOON, || {
                    daemon.has_succeeded().then_some(())
                });
            }
            // The kubelet looks at its folder once in a while, so it is asked for before.
            Leaves::Politely => daemon.hand_over(|_, log| {
                create();
                wait_for("the other one has taken over", SOON, || {
                    has_taken_over(log).then_some(())
                });
                Signal::SIGTERM
            }),
            Leaves::Killed(after) => daemon.hand_over(|_, log| {
                sleep(after);
                match has_come(log) {
                    true => create(),
                    // As any crash: what is asked for before there is somebody is rejected.
                    false => crashes += 1,
                }
                Signal::SIGKILL
            }),
            Leaves::Asked => daemon.hand_over(|old, log| {
                wait_for("the other one has come", SOON, || has_come(log).then_some(()));
                kill(old, Signal::SIGSTOP).unwrap();
                create();
                let adds = |line: &str| line.contains("\"SyncLoop ADD\"") && line.contains(&name);
                wait_for("the kubelet looks at the pod", SOON, || {
                    node.kubelet_log_since(position).lines().any(adds).then_some(())
                });
                Signal::SIGKILL
            }),
        }
        // Read, and not asked of the daemon: a verb would take from it the processor that it starts on, and the kubelet takes a moment
        // to count what it was sent.
        wait_for("the handover is complete", SOON, || daemon.is_alone().then_some(()));
        wait_for("every list counts", SOON, || {
            let log = node.kubelet_log_since(position);
            let has_to_end = matches!(leaves, Leaves::First);
            [SHARED, EXCLUSIVE]
                .iter()
                .all(|resource| counts(&log, resource, has_to_end))
                .then_some(())
        });
        wait_for("every resource is registered", SOON, || daemon.is_registered().then_some(()));
        create();
        running(node, &name);
        there.push_back(name);
        if there.len() > PODS {
            node.pods.delete(&there.pop_front().unwrap());
        }
    }
    Seen { rounds, dips: dips_ms(&node.kubelet_log(), SHARED).split_off(before), crashes }
}
