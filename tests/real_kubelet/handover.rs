//! Upgrades under a real kubelet while pods come and go. `HOLDFAST_ROUNDS` sets the number of
//! rounds of each kind, 3 by default.

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

/// Pods that run at the same time. Each has one of sixteen shares.
const PODS: usize = 6;

/// How the older instance ends.
#[derive(Debug, Clone, Copy)]
enum Leaves {
    /// By SIGTERM, after the handover is complete.
    Politely,
    /// Killed, this long after the start of the new one.
    Killed(Duration),
    /// Stopped when the new one has connected, and killed when the kubelet has sent a call.
    Asked,
    /// Before the new one is started: no handover.
    First,
    /// The same as a process of systemd, which stores the kubelet's connections meanwhile.
    Restarted,
}

/// Whether the new instance has connected. It holds the kubelet's connections open from then on.
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
    // Kills cover the whole handover: from before the request for the ledger until standby.
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
    // No instance ran long enough to release an ended pod. The next ones would start with the
    // grants of all of them.
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

/// What the kubelet logged in some rounds.
#[derive(Debug)]
struct Seen {
    rounds: usize,
    /// Periods without devices, in milliseconds.
    dips: Vec<f64>,
    /// Rounds in which no new instance was connected when the older one ended.
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

/// Makes `rounds` upgrades, with a pod admitted during each.
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
                // By then the kubelet's connections have ended, if they end.
                wait_for("the next one has everything", SOON, || {
                    daemon.has_succeeded().then_some(())
                });
            }
            // The kubelet scans its folder only from time to time, so the pod is created earlier.
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
                    // As after a crash: a pod without a new instance would be rejected.
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
        // This reads the log. A verb would take a processor from the starting daemon. Then the
        // kubelet needs some time to process the lists.
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
