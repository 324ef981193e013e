//! Runs many seeds, and checks the coverage.

use super::daemon::Daemon;
use super::durable::Disk;
use super::hardware::Hardware;
use super::scenario::{Outcome, run};
use crate::domain::Safeguard;
use crate::lab::sim::kubelet::{Behaviour, Hook, Interleaving, Start};
use crate::lab::sim::memory::{Faults, Simulation};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

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

#[test]
fn no_oracle_is_violated() {
    if let Some(seed) = number("HOLDFAST_SEED") {
        let outcome = run(seed);
        outcome.events.iter().for_each(|line| println!("{line}"));
        assert!(outcome.violation.is_none(), "{}", explain(seed, &outcome));
        return;
    }
    let seeds = number("HOLDFAST_SEEDS").unwrap_or(200);
    let (mut interleavings, mut hooks) =
        (BTreeMap::<Interleaving, u64>::new(), BTreeMap::<Hook, u64>::new());
    let (mut refusals, mut excused, mut contested, mut taken, mut grants, mut failures) =
        (0, 0, 0, 0, 0, Vec::new());
    for seed in 0..seeds {
        let outcome = run(seed);
        outcome
            .interleavings
            .iter()
            .for_each(|(which, count)| *interleavings.entry(*which).or_default() += count);
        outcome.hooks.iter().for_each(|(hook, count)| *hooks.entry(*hook).or_default() += count);
        refusals += outcome.refusals;
        excused += outcome.excused;
        contested += outcome.contested;
        taken += outcome.taken;
        grants += outcome.grants;
        if outcome.violation.is_some() {
            failures.push((seed, outcome));
        }
    }
    println!(
        "{seeds} runs: {grants} grants, {refusals} refused with proof, {excused} violations excused, {contested} truces, \
         {taken} taken by the rival plugin"
    );
    println!("interleavings: {interleavings:?}\nhooks: {hooks:?}");
    // 100 of each in 10,000 runs.
    let seldom = |count: Option<&u64>| count.copied().unwrap_or_default() < seeds / 100;
    let seldom_seen: Vec<_> =
        Interleaving::ALL.iter().filter(|which| seldom(interleavings.get(which))).collect();
    let seldom_reached: Vec<_> = Hook::ALL.iter().filter(|hook| seldom(hooks.get(hook))).collect();
    let summary: Vec<_> = failures
        .iter()
        .map(|(seed, outcome)| (*seed, outcome.violation.as_ref().unwrap().oracle))
        .collect();
    assert!(failures.is_empty(), "{summary:?}\n{}", explain(failures[0].0, &failures[0].1));
    assert!(
        seldom_seen.is_empty() && seldom_reached.is_empty(),
        "covered too seldom: {seldom_seen:?} {seldom_reached:?}"
    );
}

#[test]
fn without_any_one_safeguard_an_oracle_is_violated() {
    use Safeguard::{
        Audit, Broadcast, HeldIds, ReRegister, RefusalOnProof, SettlingRegister, StreamDeadline,
        UniqueSockets,
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
        RefusalOnProof,
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
    let (node, hardware) = (simulation.node(), Hardware::new(false));
    node.start_kubelet(Start::default());
    let daemon = Daemon::start(&node, &Disk::default(), &hardware);
    let inner = Arc::downgrade(&daemon.inner);
    simulation.run_for(Duration::from_secs(5));
    assert!(node.view(|view| view.events().iter().count() > 1), "it is registered");
    drop((simulation, node, daemon));
    assert!(inner.upgrade().is_none(), "something on the node holds itself");
}
