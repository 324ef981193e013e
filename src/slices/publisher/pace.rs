//! The pace of writes of slices, and the truce with another program that writes the same ones.

use crate::domain::Pace;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Writes at once after a pause: a node's slices after the kubelet has deleted them.
const BURST: u32 = 8;
/// One write in this time, for as long as there are changes.
const WRITE_EVERY: Duration = Duration::from_secs(1);

/// The pace of a node.
pub(super) fn of(node: &str) -> Pace {
    Pace::new(node, BURST, WRITE_EVERY)
}

/// Changes of one slice by other programs in [`WINDOW`] that are no reason for a truce.
const CHANGES_MAX: usize = 5;
/// The window of these changes. A truce ends after this time without one.
const WINDOW: Duration = Duration::from_secs(60);
/// One try in this time, during a truce.
const TRY_EVERY: Duration = Duration::from_secs(30);

/// The truce: two programs that correct each other's writes would load the API server for ever.
#[derive(Debug, Default)]
pub(super) struct Truce {
    /// The times of the latest changes of each slice.
    changes: BTreeMap<String, VecDeque<Duration>>,
    last_try: Duration,
    is_on: bool,
}

impl Truce {
    /// Another program has changed a slice. Returns whether the truce begins.
    pub(super) fn note(&mut self, what: &str, now: Duration) -> bool {
        let times = self.changes.entry(what.to_owned()).or_default();
        times.push_back(now);
        if times.len() > CHANGES_MAX + 1 {
            times.pop_front();
        }
        let recent = times.iter().filter(|at| now.saturating_sub(**at) < WINDOW).count();
        let begins = !self.is_on && recent > CHANGES_MAX;
        self.is_on |= begins;
        begins
    }

    /// Whether the truce ends now: no other program has written for a while.
    pub(super) fn ends(&mut self, now: Duration) -> bool {
        self.changes
            .retain(|_, times| times.back().is_some_and(|last| now.saturating_sub(*last) < WINDOW));
        let ends = self.is_on && self.changes.is_empty();
        self.is_on &= !ends;
        ends
    }

    /// When the truce ends, if no other program writes until then.
    pub(super) fn ends_at(&self) -> Option<Duration> {
        let last = self.changes.values().filter_map(VecDeque::back).max();
        last.filter(|_| self.is_on).map(|last| *last + WINDOW)
    }

    /// The earliest time of the next write.
    pub(super) fn ready_at(&self) -> Duration {
        if self.is_on { self.last_try + TRY_EVERY } else { Duration::ZERO }
    }

    /// A write is sent.
    pub(super) fn spend(&mut self, now: Duration) {
        self.last_try = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn eight_writes_at_once_then_one_a_second() {
        let mut pace = of("n1");
        let (mut now, mut times) = (seconds(100), Vec::new());
        for _ in 0..11 {
            now = now.max(pace.ready_at());
            pace.spend(now);
            times.push(now.as_secs());
        }
        assert_eq!(times, [100, 100, 100, 100, 100, 100, 100, 100, 101, 102, 103]);
    }

    #[test]
    fn a_truce_begins_with_the_sixth_change_of_a_slice_in_a_minute() {
        let mut truce = Truce::default();
        for second in 0..20 {
            assert!(!truce.note("a", seconds(second * 13)), "five a minute");
            assert!(!truce.note(&format!("another {second}"), seconds(second * 13)));
        }
        let begins: Vec<bool> = (400..407).map(|second| truce.note("a", seconds(second))).collect();
        assert_eq!(begins, [false, false, false, false, false, true, false]);
        truce.spend(seconds(407));
        assert_eq!((truce.ready_at(), truce.ends_at()), (seconds(437), Some(seconds(466))));
        assert!(!truce.ends(seconds(465)) && truce.ends(seconds(466)) && !truce.ends(seconds(467)));
        assert_eq!((truce.ready_at(), truce.ends_at()), (Duration::ZERO, None));
    }
}
