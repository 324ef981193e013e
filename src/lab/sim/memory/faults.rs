//! The faults of a simulation and their probabilities.

use crate::lab::sim::kubelet::{Hook, Verdict};
use crate::lab::sim::random::Random;
use std::collections::BTreeMap;
use std::time::Duration;

/// The usual waits at a hook: from a busy processor to a slow disk.
const DELAY: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(50));
/// The rare waits: a node that swaps, or a goroutine that waits for a lock.
const STALL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// The probabilities of the outcomes at one hook, each time that a flow reaches it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Probabilities {
    /// Other tasks may run first, if the seed picks them.
    pub yields: f64,
    /// It waits for 0.1 to 50 ms.
    pub delays: f64,
    /// It waits for 50 ms to 5 s.
    pub stalls: f64,
    /// The step that follows fails, where it can.
    pub fails: f64,
    /// The plugin cancels its Register, where it waits for one.
    pub cancels: f64,
    /// The kubelet dies. The scenario restarts it.
    pub crashes: f64,
}

/// A plan of faults. It ends, so that the final conditions have time to become true.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Faults {
    /// From this time on every hook lets everything pass.
    pub until: Duration,
    /// The probabilities at a hook.
    pub probabilities: Probabilities,
    /// Hooks with other probabilities.
    pub at: BTreeMap<Hook, Probabilities>,
    /// The outcome for the flow that is the n-th one to reach any hook, counted from 1. With it a
    /// test tries every place, or every pair of places, one after the other. [`Faults::until`] does
    /// not apply.
    pub steps: BTreeMap<u64, (Duration, Verdict)>,
}

impl Faults {
    /// No faults and no waits.
    #[must_use]
    pub fn none() -> Self {
        Faults::default()
    }

    /// Nothing fails, but times and orders vary.
    #[must_use]
    pub fn schedules(until: Duration) -> Self {
        Faults {
            until,
            probabilities: Probabilities {
                yields: 0.3,
                delays: 0.1,
                stalls: 0.005,
                ..Probabilities::default()
            },
            ..Faults::default()
        }
    }

    /// Varied times and orders; steps fail and the kubelet dies too.
    #[must_use]
    pub fn all(until: Duration) -> Self {
        Faults {
            probabilities: Probabilities {
                fails: 0.02,
                cancels: 0.02,
                crashes: 0.005,
                ..Self::schedules(until).probabilities
            },
            ..Self::schedules(until)
        }
    }

    /// The plan with other probabilities at one hook.
    #[must_use]
    pub fn with(mut self, hook: Hook, probabilities: Probabilities) -> Self {
        self.at.insert(hook, probabilities);
        self
    }

    /// The plan with a fixed outcome at the n-th step.
    #[must_use]
    pub fn step(mut self, nth: u64, wait: Duration, verdict: Verdict) -> Self {
        self.steps.insert(nth, (wait, verdict));
        self
    }

    /// The outcome for the flow that is the `nth` one to reach a hook: its wait, and how it
    /// continues.
    pub(super) fn decide(
        &self,
        nth: u64,
        hook: Hook,
        now: Duration,
        random: &mut Random,
    ) -> Option<Decision> {
        if let Some((wait, verdict)) = self.steps.get(&nth) {
            return Some(Decision { wait: *wait, verdict: *verdict });
        }
        if now >= self.until {
            return None;
        }
        let probabilities = self.at.get(&hook).unwrap_or(&self.probabilities);
        let wait = if random.chance(probabilities.stalls) {
            random.between(STALL.0, STALL.1)
        } else if random.chance(probabilities.delays) {
            random.between(DELAY.0, DELAY.1)
        } else {
            Duration::ZERO
        };
        let verdict = if random.chance(probabilities.crashes) {
            Verdict::Crash
        } else if random.chance(probabilities.fails) {
            Verdict::Fail
        } else if random.chance(probabilities.cancels) {
            Verdict::Cancel
        } else {
            Verdict::Pass
        };
        let yields = random.chance(probabilities.yields);
        (yields || !wait.is_zero() || verdict != Verdict::Pass)
            .then_some(Decision { wait, verdict })
    }
}

/// The outcome for one flow at one hook.
#[derive(Debug, Clone, Copy)]
pub(super) struct Decision {
    pub(super) wait: Duration,
    pub(super) verdict: Verdict,
}
