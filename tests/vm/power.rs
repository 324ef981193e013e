//! The power fails while pods get devices and end, and the node boots again.
//!
//! The cut ends QEMU with SIGKILL. What the guest had not written to its disk is lost, as in a real
//! power cut: the guest's page cache, and requests under way. What the disk had taken is kept, with
//! or without a flush, because QEMU had given it to the host. So this is a disk without a volatile
//! cache: `tests/storage/power_cut` has one that loses its cache, on ext4. Here the file systems
//! are those of a real kernel, and so are their orders of writing and their recoveries.
//!
//! `HOLDFAST_SEED` repeats a run's choices. When the guest writes differs from run to run.

use crate::guest::{Answer, Pod, Request};
use crate::machine::Machine;
use crate::node::{Node, name};
use crate::say;
use crate::storage::{self, TERMINAL, TERMINALS};
use holdfast::lab::sim::random::Random;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const FILE_SYSTEMS: [&str; 3] = ["ext4", "xfs", "btrfs"];
const CUTS: usize = 3;
/// Pods that each kubelet starts before the power may fail.
const PODS: usize = 8;
/// Pods that a kubelet runs at the same time.
const RUNNING: usize = 4;

/// What left the machine about one file system's node before the cuts.
#[derive(Debug, Default)]
struct Known {
    /// The devices of every answered Allocate, by its id.
    answered: BTreeMap<String, Vec<String>>,
    /// The pods that the API server has.
    pods: Vec<Pod>,
}

impl Known {
    fn decided(&mut self, pod: &Pod) {
        assert_eq!(pod.rejected, None, "{pod:?}");
        self.answered.insert(pod.alloc_id().to_owned(), pod.devices.clone());
        self.pods.push(pod.clone());
    }
}

/// A node with its ledger and its kubelet on this file system.
fn node_on<'m>(machine: &'m Machine, kind: &str) -> Node<'m> {
    let dir = storage::mount(machine, kind, &format!("-t {kind}"));
    Node::at(machine, kind, &format!("{dir}/node"), &format!("{dir}/node"), TERMINALS)
}

/// The devices of every grant that the ledger has or had, by its id.
fn recorded(node: &Node<'_>) -> BTreeMap<String, Vec<String>> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let grants = node.history();
    grants
        .iter()
        .map(|grant| {
            let devices = grant["devices"].as_array().unwrap().iter().map(text).collect();
            (text(&grant["alloc_id"]), devices)
        })
        .collect()
}

/// Starts the node as a boot does, with the pods that remain, and compares it with what is known.
fn check(node: &Node<'_>, known: &mut Known) {
    assert_eq!(node.json("ledger verify")["sound"], true);
    node.launch();
    node.wait_until_ready();
    let pods = node.start_kubelet_with(&known.pods);
    node.wait_until_registered();
    let recorded = recorded(node);
    for (id, devices) in &known.answered {
        assert_eq!(recorded.get(id), Some(devices), "{id} was answered");
    }
    assert_eq!(node.quarantined(), "");
    let mut given = BTreeSet::new();
    for (pod, before) in pods.iter().zip(&known.pods) {
        assert_eq!(pod.rejected, None, "{pod:?}");
        if pod.devices != before.devices {
            // The kubelet does not sync the directory of its checkpoint: the newest file may be
            // lost.
            say(format_args!("the kubelet had forgotten {before:?}"));
        }
        assert!(given.insert(pod.devices.clone()), "{pod:?} has what another pod has");
        assert!(node.holders(&pod.devices[0]).contains(&pod.name), "{pod:?}");
    }
    known.pods = pods;
}

/// Has all kubelets start and end pods, and cuts the power.
fn churn_until_cut(
    machine: &Machine,
    name_of_pods: &str,
    known: &mut BTreeMap<String, Known>,
    random: &mut Random,
) {
    let request = Request::Churn {
        kubelets: known.keys().cloned().collect(),
        name: name_of_pods.to_owned(),
        resource: name(TERMINAL),
        pods: RUNNING,
    };
    let mut starts: BTreeMap<String, usize> = BTreeMap::new();
    let mut left = random.below(2 * PODS);
    let reports = machine.cut_power_during(&request, |report| {
        if let Answer::Decided(pod) = report {
            *starts.entry(pod.kubelet.clone()).or_default() += 1;
        }
        let is_enough = starts.len() == known.len() && starts.values().all(|count| *count >= PODS);
        left = left.saturating_sub(usize::from(is_enough));
        is_enough && left == 0
    });
    for report in reports {
        match report {
            Answer::Decided(pod) => known.get_mut(&pod.kubelet).unwrap().decided(&pod),
            Answer::Deletes(uid) => {
                known.values_mut().for_each(|known| known.pods.retain(|pod| pod.uid != uid));
            }
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) fn cuts(machine: &Machine) {
    let mut random = seeded();
    let mut known = BTreeMap::new();
    for kind in FILE_SYSTEMS {
        let node = node_on(machine, kind);
        machine.run(&format!("rm -rf /mnt/{kind}/node && mkdir /mnt/{kind}/node"));
        node.start_kubelet();
        node.start_daemon();
        known.insert(node.kubelet(), Known::default());
    }
    let mut nodes = Vec::new();
    for cut in 1..=CUTS {
        let boot = machine.boot_id();
        churn_until_cut(machine, &format!("cut-{cut}"), &mut known, &mut random);
        machine.boot();
        assert_ne!(machine.boot_id(), boot);
        nodes.clear();
        for kind in FILE_SYSTEMS {
            let node = node_on(machine, kind);
            let known = known.get_mut(&node.kubelet()).unwrap();
            check(&node, known);
            let Known { answered, pods } = &known;
            say(format_args!("cut {cut}, {kind}: {} grants, {} pods", answered.len(), pods.len()));
            nodes.push(node);
        }
    }
    for (node, kind) in nodes.iter().zip(FILE_SYSTEMS) {
        let known = &known[&node.kubelet()];
        // The kubelet writes its checkpoint, and forgets in it what did not return.
        let next = node.pod("next", TERMINAL);
        node.wait("only the pods that remain hold devices", |node| {
            let grants = node.grants();
            let uid = |grant: &Value| grant["pod"]["uid"].as_str().map(str::to_owned);
            let holders: BTreeSet<_> = grants.iter().filter_map(uid).collect();
            let pods = known.pods.iter().chain([&next]).map(|pod| pod.uid.clone()).collect();
            (holders == pods && grants.len() == pods.len()).then_some(())
        });
        node.end();
        storage::unmount(machine, &format!("/mnt/{kind}"));
    }
}

fn seeded() -> Random {
    let seed = std::env::var("HOLDFAST_SEED").ok().map(|seed| seed.parse().unwrap());
    let seed = seed.unwrap_or_else(|| uuid::Uuid::now_v7().as_u64_pair().1);
    say(format_args!("HOLDFAST_SEED={seed}"));
    Random::new(seed)
}
