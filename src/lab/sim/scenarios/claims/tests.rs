//! Runs many seeds, and checks the coverage.

use super::super::seeds::{Seeds, number};
use super::oracles::{Covered, Violation};
use super::run::{Outcome, run};
use super::world::{Crash, Step};
use crate::domain::Safeguard;
use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

fn explain(seed: u64, outcome: &Outcome) -> String {
    let Some(violation) = &outcome.violation else { return String::new() };
    let tail: Vec<&str> = outcome.log.iter().rev().take(60).rev().map(String::as_str).collect();
    format!(
        "seed {seed}: {} at {:?}: {}\n  {}\nHOLDFAST_SEED={seed} repeats it",
        violation.oracle,
        violation.at,
        violation.what,
        tail.join("\n  ")
    )
}

#[derive(Debug, Default)]
struct Sum {
    crashes: BTreeMap<(Step, Crash), u64>,
    covered: Covered,
    failures: Vec<(u64, Outcome)>,
}

impl Sum {
    fn add(&mut self, seed: u64, outcome: Outcome) {
        outcome
            .crashes
            .iter()
            .for_each(|(at, count)| *self.crashes.entry(*at).or_default() += count);
        self.covered = self.covered.plus(outcome.covered);
        if outcome.violation.is_some() {
            self.failures.push((seed, outcome));
        }
    }

    fn merge(&mut self, other: Sum) {
        let crashes = other.crashes.into_iter();
        crashes.for_each(|(at, count)| *self.crashes.entry(at).or_default() += count);
        self.covered = self.covered.plus(other.covered);
        self.failures.extend(other.failures);
    }
}

#[test]
fn no_claim_is_lost_and_no_device_has_two_holders() {
    if let Some(seed) = number("HOLDFAST_SEED") {
        let outcome = run(seed);
        outcome.log.iter().for_each(|line| println!("{line}"));
        assert!(outcome.violation.is_none(), "{}", explain(seed, &outcome));
        return;
    }
    let (runs, sums) = Seeds::wanted().run(|sum: &mut Sum, seed| sum.add(seed, run(seed)));
    let mut sum = Sum::default();
    sums.into_iter().for_each(|part| sum.merge(part));
    let Sum { crashes, covered, mut failures } = sum;
    failures.sort_by_key(|(seed, _)| *seed);
    println!("{covered:?}\ncrashes: {crashes:?}");
    let summary: Vec<_> = failures
        .iter()
        .map(|(seed, outcome)| (*seed, outcome.violation.as_ref().unwrap().oracle))
        .collect();
    assert!(failures.is_empty(), "{summary:?}\n{}", explain(failures[0].0, &failures[0].1));
    let every = Step::ALL.iter().flat_map(|step| [(*step, Crash::Kill), (*step, Crash::PowerCut)]);
    let seldom: Vec<_> =
        every.filter(|at| crashes.get(at).copied().unwrap_or_default() < runs / 50).collect();
    assert!(seldom.is_empty(), "covered too seldom: {seldom:?}");
    let Covered { answers, repeated, starts } = covered;
    assert!(answers > 5 * runs && repeated > runs && starts > 4 * runs, "{covered:?}");
}

#[test]
fn without_any_one_safeguard_of_claims_an_oracle_is_violated() {
    // The seeds before the one that detects it need not run every time.
    let from = |safeguard| match safeguard {
        Safeguard::ClaimEnd => 60,
        Safeguard::ClaimAllocation => 80,
        Safeguard::DurableRecord => 140,
        Safeguard::ClaimStep | Safeguard::ClaimChanges => 170,
        Safeguard::ClaimInUseAgain | Safeguard::ClaimWhole => 470,
        _ => 0,
    };
    let found = |safeguard: Safeguard| {
        let runs = from(safeguard)..1000;
        safeguard.without(|| {
            runs.into_iter().find_map(|seed| run(seed).violation.map(|violation| (seed, violation)))
        })
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let next = AtomicUsize::new(0);
    let missed: Vec<Safeguard> = thread::scope(|scope| {
        let search = || {
            let mut missed = Vec::new();
            while let Some(safeguard) =
                Safeguard::OF_CLAIMS.get(next.fetch_add(1, Ordering::Relaxed)).copied()
            {
                match found(safeguard) {
                    Some((seed, Violation { oracle, what, .. })) => {
                        println!("without {safeguard:?}: {oracle} in run {seed}: {what}");
                    }
                    None => missed.push(safeguard),
                }
            }
            missed
        };
        let searches: Vec<_> = (0..threads).map(|_| scope.spawn(search)).collect();
        searches.into_iter().flat_map(|search| search.join().unwrap()).collect()
    });
    assert!(missed.is_empty(), "no oracle was violated in 1000 runs without {missed:?}");
}

#[test]
fn a_run_with_claims_is_the_same_at_every_repetition() {
    for seed in 0..5 {
        assert_eq!(run(seed).log, run(seed).log);
    }
}
