//! A rate limit (GCRA): so many in a second, of which some may come at once.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// How fast something may happen. What comes faster waits for its turn.
#[derive(Debug)]
pub(super) struct Pace {
    every: Duration,
    /// What is behind by as much makes up for it.
    slack: Duration,
    next: Mutex<Option<Instant>>,
}

impl Pace {
    /// So many a second, `at_once` of them without a pause.
    pub(super) fn new(per_second: u32, at_once: u32) -> Self {
        let every = Duration::from_secs(1) / per_second;
        Pace { every, slack: every * at_once, next: Mutex::new(None) }
    }

    /// Waits for the next turn. Whoever gives up waiting has had it.
    pub(super) async fn turn(&self) {
        let now = Instant::now();
        let at = self.at(now);
        if at > now {
            sleep_until(at).await;
        }
    }

    /// When it is the next one's turn.
    fn at(&self, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let at = next.map_or(now, |next| next.max(now.checked_sub(self.slack).unwrap_or(now)));
        *next = Some(at + self.every);
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_may_come_at_once_do_not_wait_and_the_rest_has_its_pace() {
        let (pace, began) = (Pace::new(1000, 10), Instant::now());
        // Nothing is behind at first.
        assert_eq!(pace.at(began), began);
        let later = began + Duration::from_secs(60);
        let waits: Vec<Duration> = (0..20).map(|_| pace.at(later).saturating_duration_since(later)).collect();
        assert_eq!(waits.iter().filter(|wait| wait.is_zero()).count(), 11);
        assert_eq!(waits[19], Duration::from_millis(9));
        // A second takes a thousand, however they come.
        let end = (0..1000).map(|_| pace.at(later)).last().unwrap();
        assert_eq!(end - later, Duration::from_millis(1009));
    }
}
