//! A rate limit (GCRA): a number of events in a second, and a burst.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Delays events that come faster than the limit.
#[derive(Debug)]
pub(super) struct RateLimit {
    interval: Duration,
    /// Unused time up to this long counts later.
    burst: Duration,
    next: Mutex<Option<Instant>>,
}

impl RateLimit {
    pub(super) fn new(per_second: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(1) / per_second;
        RateLimit { interval, burst: interval * burst, next: Mutex::new(None) }
    }

    /// Waits until the next event is allowed. An event whose wait is cancelled counts too.
    pub(super) async fn wait(&self) {
        let now = Instant::now();
        let at = self.next(now);
        if at > now {
            sleep_until(at).await;
        }
    }

    /// Whether an event is allowed now. Only an allowed one counts. The burst is available from the
    /// start.
    pub(super) fn admits(&self) -> bool {
        let now = Instant::now();
        let earliest = now.checked_sub(self.burst).unwrap_or(now);
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let at = next.map_or(earliest, |next| next.max(earliest));
        let is_allowed = at <= now;
        if is_allowed {
            *next = Some(at + self.interval);
        }
        is_allowed
    }

    /// When the next event is allowed.
    fn next(&self, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let at = next.map_or(now, |next| next.max(now.checked_sub(self.burst).unwrap_or(now)));
        *next = Some(at + self.interval);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_does_not_wait_and_later_events_have_the_rate() {
        let (limit, start) = (RateLimit::new(1000, 10), Instant::now());
        assert_eq!(limit.next(start), start);
        let later = start + Duration::from_secs(60);
        let waits: Vec<Duration> =
            (0..20).map(|_| limit.next(later).saturating_duration_since(later)).collect();
        assert_eq!(waits.iter().filter(|wait| wait.is_zero()).count(), 11);
        assert_eq!(waits[19], Duration::from_millis(9));
        let last = (0..1000).map(|_| limit.next(later)).last().unwrap();
        assert_eq!(last - later, Duration::from_millis(1009));
    }
    #[test]
    fn a_refused_event_does_not_count() {
        let limit = RateLimit::new(1, 3);
        let admitted = (0..1000).filter(|_| limit.admits()).count();
        // The burst and one more; or those that the rate adds on a slow machine.
        assert!((4..=8).contains(&admitted), "{admitted}");
        // A thousand refused events have not moved the next one.
        let next = limit.next.lock().unwrap().unwrap();
        assert!(next <= Instant::now() + limit.interval);
    }
}
