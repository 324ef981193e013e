//! The pace of writes, and the truce with another program that writes the same slices.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

/// Writes at once after a pause: a node's slices after the kubelet has deleted them.
const BURST: u32 = 8;
/// One write in this time, for as long as there are changes.
const WRITE_EVERY: Duration = Duration::from_secs(1);
/// The first pause after a request that failed, doubled with each further failure.
const BACKOFF: Duration = Duration::from_millis(500);
/// The longest such pause.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A pause after a failure is longer by at most half of it, and by at most this time, for each node
/// by another part. So the nodes of a cluster do not come back in the same second.
const SPREAD_MAX: Duration = Duration::from_secs(5);

/// When the next write may be sent.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The part of the spread that this node waits, in thousandths.
    spread: u32,
    /// The time until which the writes so far use the sustained rate.
    used_until: Duration,
    /// The end of the pause after a failure.
    paused_until: Duration,
    failures: u32,
}

impl Pace {
    /// The pace of a node.
    pub(super) fn of(node: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let spread = u32::try_from(hasher.finish() % 1000).unwrap_or_default();
        Pace { spread, ..Pace::default() }
    }

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
        let pause = pause + self.part(pause / 2);
        self.pause(now, pause);
        pause
    }

    /// The API server asks for this pause (`Retry-After`), and many nodes get the same answer.
    pub(super) fn pause_as_asked(&mut self, now: Duration, pause: Duration) {
        self.pause(now, pause + self.part(pause));
    }

    /// The part of a spread that this node waits.
    fn part(&self, whole: Duration) -> Duration {
        whole.min(SPREAD_MAX) * self.spread / 1000
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

    /// An API server that was away, or that asks all nodes for the same pause, does not get all of
    /// them back at once.
    #[test]
    fn the_nodes_of_a_cluster_come_back_one_after_the_other() {
        let mut seconds_used = BTreeMap::<u64, usize>::new();
        for node in 0..500 {
            let mut pace = Pace::of(&format!("gpu-{node}.example.com"));
            pace.pause_as_asked(Duration::ZERO, seconds(10));
            let ready = pace.ready_at();
            assert!(seconds(10) <= ready && ready < seconds(15), "{ready:?}");
            *seconds_used.entry(ready.as_secs()).or_default() += 1;
            let pauses: Vec<Duration> = (0..9).map(|_| pace.fail(Duration::ZERO)).collect();
            assert!(pauses[0] >= BACKOFF && pauses[0] < BACKOFF * 3 / 2, "{pauses:?}");
            assert!(pauses[8] >= BACKOFF_MAX && pauses[8] < BACKOFF_MAX + SPREAD_MAX);
        }
        assert!(seconds_used.values().all(|nodes| (50..150).contains(nodes)), "{seconds_used:?}");
        let again = || Pace::of("n1").part(seconds(4));
        assert_eq!(again(), again());
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
