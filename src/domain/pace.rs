//! The pace of a node's writes to the API server.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

/// The first pause after a request that failed, doubled with each further failure.
const BACKOFF: Duration = Duration::from_millis(500);
/// The longest such pause.
const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// A pause after a failure is longer by at most half of it, and by at most this time, for each node
/// by another part. So the nodes of a cluster do not come back in the same second.
const SPREAD_MAX: Duration = Duration::from_secs(5);

/// When the next write of a node may be sent: some at once, then one in a time, and none for a
/// while after a failure.
#[derive(Debug)]
pub struct Pace {
    /// Writes at once after a pause.
    burst: u32,
    /// One write in this time, for as long as there are changes.
    every: Duration,
    /// The part of the spread that this node waits, in thousandths.
    spread: u32,
    /// The time until which the writes so far use the sustained rate.
    used_until: Duration,
    /// The end of the pause after a failure.
    paused_until: Duration,
    failures: u32,
}

impl Pace {
    /// The pace of a node: `burst` writes at once, at least one, then one in each `every`.
    #[must_use]
    pub fn new(node: &str, burst: u32, every: Duration) -> Self {
        let mut hasher = DefaultHasher::new();
        node.hash(&mut hasher);
        let spread = u32::try_from(hasher.finish() % 1000).unwrap_or_default();
        let (used_until, paused_until) = (Duration::ZERO, Duration::ZERO);
        Pace { burst, every, spread, used_until, paused_until, failures: 0 }
    }

    /// The earliest time of the next write.
    #[must_use]
    pub fn ready_at(&self) -> Duration {
        let ahead = self.every * self.burst.saturating_sub(1);
        self.used_until.saturating_sub(ahead).max(self.paused_until)
    }

    /// The end of the pause after a failure, also for reads.
    #[must_use]
    pub fn paused_until(&self) -> Duration {
        self.paused_until
    }

    /// A write is sent.
    pub fn spend(&mut self, now: Duration) {
        self.used_until = self.used_until.max(now) + self.every;
    }

    /// A request succeeded.
    pub fn succeed(&mut self) {
        self.failures = 0;
    }

    /// A request failed: the next one waits. Returns the pause.
    pub fn fail(&mut self, now: Duration) -> Duration {
        let pause = (BACKOFF * (1 << self.failures.min(10))).min(BACKOFF_MAX);
        self.failures += 1;
        let pause = pause + self.part(pause / 2);
        self.pause(now, pause);
        pause
    }

    /// The API server asks for this pause (`Retry-After`), and many nodes get the same answer.
    pub fn pause_as_asked(&mut self, now: Duration, pause: Duration) {
        self.pause(now, pause + self.part(pause));
    }

    /// The part of a spread that this node waits.
    fn part(&self, whole: Duration) -> Duration {
        self.share(whole.min(SPREAD_MAX))
    }

    /// This node's share of a time over which the nodes of a cluster are spread.
    #[must_use]
    pub fn share(&self, whole: Duration) -> Duration {
        whole * self.spread / 1000
    }

    /// No request for this time.
    pub fn pause(&mut self, now: Duration, pause: Duration) {
        self.paused_until = self.paused_until.max(now + pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn of(node: &str) -> Pace {
        Pace::new(node, 8, seconds(1))
    }

    #[test]
    fn failures_double_the_pause_up_to_its_limit() {
        let mut pace = Pace { spread: 0, ..of("n1") };
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
            let mut pace = of(&format!("gpu-{node}.example.com"));
            pace.pause_as_asked(Duration::ZERO, seconds(10));
            let ready = pace.ready_at();
            assert!(seconds(10) <= ready && ready < seconds(15), "{ready:?}");
            *seconds_used.entry(ready.as_secs()).or_default() += 1;
            let pauses: Vec<Duration> = (0..9).map(|_| pace.fail(Duration::ZERO)).collect();
            assert!(pauses[0] >= BACKOFF && pauses[0] < BACKOFF * 3 / 2, "{pauses:?}");
            assert!(pauses[8] >= BACKOFF_MAX && pauses[8] < BACKOFF_MAX + SPREAD_MAX);
        }
        assert!(seconds_used.values().all(|nodes| (50..150).contains(nodes)), "{seconds_used:?}");
        let again = || of("n1").part(seconds(4));
        assert_eq!(again(), again());
    }
}
