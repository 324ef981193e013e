//! Runs many seeds, and checks the coverage.

use super::daemon::Daemon;
use super::durable::Disk;
use super::hardware::Hardware;
use super::scenario::{Counts, Outcome, run};
use super::seeds::{Seeds, number};
use crate::domain::Safeguard;
use crate::lab::sim::kubelet::{Behaviour, Hook, Interleaving, Start};
use crate::lab::sim::memory::{Faults, Simulation};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

fn explain(seed: u64, outcome: &Outcome) -> String {
    let Some(violation) = &outcome.violation else { return String::new() };
    let tail = outcome
        .events
        .iter()
        .rev()
        .take(60)
        .rev()
        .map(|line| format!("  {line}\n"))
        .collect::<String>();
    format!(
        "seed {seed}: {} at {:?}: {}\n{tail}HOLDFAST_SEED={seed} repeats it",
        violation.oracle, violation.at, violation.what
    )
}

/// The results of many runs.
#[derive(Debug, Default)]
struct Sum {
    interleavings: BTreeMap<Interleaving, u64>,
    hooks: BTreeMap<Hook, u64>,
    counts: Counts,
    failures: Vec<(u64, Outcome)>,
}

fn add_all<K: Ord>(sums: &mut BTreeMap<K, u64>, counts: BTreeMap<K, u64>) {
    counts.into_iter().for_each(|(key, count)| *sums.entry(key).or_default() += count);
}

impl Sum {
    fn of(seed: u64, mut outcome: Outcome) -> Self {
        Sum {
            interleavings: std::mem::take(&mut outcome.interleavings),
            hooks: std::mem::take(&mut outcome.hooks),
            counts: std::mem::take(&mut outcome.counts),
            failures: Vec::from_iter(outcome.violation.is_some().then_some((seed, outcome))),
        }
    }

    fn add(&mut self, other: Sum) {
        add_all(&mut self.interleavings, other.interleavings);
        add_all(&mut self.hooks, other.hooks);
        self.counts += other.counts;
        self.failures.extend(other.failures);
    }
}

#[test]
fn no_oracle_is_violated() {
    if let Some(seed) = number("HOLDFAST_SEED") {
        let outcome = run(seed);
        outcome.events.iter().for_each(|line| println!("{line}"));
        assert!(outcome.violation.is_none(), "{}", explain(seed, &outcome));
        return;
    }
    let (runs, sums) = Seeds::wanted().run(|sum: &mut Sum, seed| sum.add(Sum::of(seed, run(seed))));
    let mut sum = Sum::default();
    sums.into_iter().for_each(|part| sum.add(part));
    let Sum { interleavings, hooks, counts, mut failures } = sum;
    let Counts { grants, refusals, excused, truces, taken, taken_over, free_hooks, gated_hooks } =
        counts;
    println!(
        "{grants} grants, {refusals} refused with proof, {excused} violations excused, {truces} \
         truces, {taken} taken by the rival plugin, {taken_over} of its containers taken over"
    );
    println!("{free_hooks} hooks ran on a free device, {gated_hooks} for a container that waited");
    println!("interleavings: {interleavings:?}\nhooks: {hooks:?}");
    failures.sort_by_key(|(seed, _)| *seed);
    let summary: Vec<_> = failures
        .iter()
        .map(|(seed, outcome)| (*seed, outcome.violation.as_ref().unwrap().oracle))
        .collect();
    assert!(failures.is_empty(), "{summary:?}\n{}", explain(failures[0].0, &failures[0].1));
    // 100 of each in 10,000 runs.
    let seldom = |count: Option<&u64>| count.copied().unwrap_or_default() < runs / 100;
    let seldom_seen: Vec<_> =
        Interleaving::ALL.iter().filter(|which| seldom(interleavings.get(which))).collect();
    let seldom_reached: Vec<_> = Hook::ALL.iter().filter(|hook| seldom(hooks.get(hook))).collect();
    assert!(
        seldom_seen.is_empty() && seldom_reached.is_empty(),
        "covered too seldom: {seldom_seen:?} {seldom_reached:?}"
    );
    assert!(free_hooks >= runs / 10 && gated_hooks >= runs / 100, "hooks run too seldom");
}

#[test]
fn without_any_one_safeguard_an_oracle_is_violated() {
    use Safeguard::{
        Audit, Broadcast, HeldIds, ListAfterRecord, ReRegister, RefusalOnProof, SettlingRegister,
        StreamDeadline, TakeOver, UniqueSockets,
    };
    // Most missing safeguards are detected within a hundred seeds.
    for safeguard in [
        SettlingRegister,
        Audit,
        StreamDeadline,
        ReRegister,
        HeldIds,
        UniqueSockets,
        Broadcast,
        ListAfterRecord,
        RefusalOnProof,
        TakeOver,
    ] {
        let found = safeguard.without(|| {
            (0..1000).find_map(|seed| run(seed).violation.map(|violation| (seed, violation)))
        });
        let Some((seed, violation)) = found else {
            panic!("no oracle was violated in 1000 runs without {safeguard:?}")
        };
        println!("without {safeguard:?}: {} in run {seed}: {}", violation.oracle, violation.what);
    }
}

#[test]
fn a_run_is_the_same_at_every_repetition() {
    for seed in 0..10 {
        assert_eq!(run(seed).events, run(seed).events);
    }
}

/// Otherwise a million runs do not fit into memory.
#[test]
fn the_end_of_a_run_frees_its_daemons() {
    let mut simulation = Simulation::new(0, Behaviour::default(), Faults::none());
    let (node, hardware) = (simulation.node(), Hardware::new(false, false));
    node.start_kubelet(Start::default());
    let daemon = Daemon::start(&node, &Disk::default(), &hardware);
    let inner = Arc::downgrade(&daemon.inner);
    simulation.run_for(Duration::from_secs(5));
    assert!(node.view(|view| view.events().iter().count() > 1), "it is registered");
    drop((simulation, node, daemon));
    assert!(inner.upgrade().is_none(), "something on the node holds itself");
}
