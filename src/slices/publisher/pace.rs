//! The pace of writes, and the truce with another program that writes the same slices.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Writes at once after a pause: a node's slices after the kubelet has deleted them.
const BURST: u32 = 8;
/// One write in this time, for as long as there are changes.
const WRITE_EVERY: Duration = Duration::from_secs(1);
/// The first pause after a request that failed, doubled with each further failure.
const BACKOFF: Duration = Duration::from_millis(500);
/// The longest such pause.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// When the next write may be sent.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The time until which the writes so far use the sustained rate.
    used_until: Duration,
    /// The end of the pause after a failure.
    paused_until: Duration,
    failures: u32,
}

impl Pace {
    /// The earliest time of the next write.
    pub(super) fn ready_at(&self) -> Duration {
        self.used_until.saturating_sub(WRITE_EVERY * (BURST - 1)).max(self.paused_until)
    }

    /// The end of the pause after a failure, also for reads.
    pub(super) fn paused_until(&self) -> Duration {
        self.paused_until
    }

    /// A write is sent.
    pub(super) fn spend(&mut self, now: Duration) {
        self.used_until = self.used_until.max(now) + WRITE_EVERY;
    }

    /// A request succeeded.
    pub(super) fn succeed(&mut self) {
        self.failures = 0;
    }

    /// A request failed: the next one waits. Returns the pause.
    pub(super) fn fail(&mut self, now: Duration) -> Duration {
        let pause = (BACKOFF * (1 << self.failures.min(10))).min(BACKOFF_MAX);
        self.failures += 1;
        self.pause(now, pause);
        pause
    }

    /// No request for this time.
    pub(super) fn pause(&mut self, now: Duration, pause: Duration) {
        self.paused_until = self.paused_until.max(now + pause);
    }
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
        let mut pace = Pace::default();
        let (mut now, mut times) = (seconds(100), Vec::new());
        for _ in 0..11 {
            now = now.max(pace.ready_at());
            pace.spend(now);
            times.push(now.as_secs());
        }
        assert_eq!(times, [100, 100, 100, 100, 100, 100, 100, 100, 101, 102, 103]);
    }

    #[test]
    fn failures_double_the_pause_up_to_its_limit() {
        let mut pace = Pace::default();
        let pauses: Vec<u128> = (0..9).map(|_| pace.fail(seconds(1)).as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]);
        pace.succeed();
        assert_eq!(pace.fail(seconds(100)).as_millis(), 500);
        assert_eq!(pace.ready_at(), Duration::from_millis(100_500));
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
        assert_eq!(truce.ready_at(), seconds(437));
        assert!(!truce.ends(seconds(465)) && truce.ends(seconds(466)) && !truce.ends(seconds(467)));
        assert_eq!(truce.ready_at(), Duration::ZERO);
    }
}
