//! How long to wait before the next list; pure.
//!
//! A node must not burden an API server that fails, and thousands of nodes must not return at the
//! same moment. So pauses double up to a bound, each is varied by a random part, and the server's
//! own `Retry-After` is respected.

use super::error::ClusterError;
use std::time::Duration;

/// The first and the longest pause after a failure, without the random part.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// A watch that lasted this long has worked: the next failure counts as the first one.
const HAS_WORKED: Duration = Duration::from_secs(10);
/// The pause after a watch that ended in the usual way is at most this.
const AFTER_END_MAX: Duration = Duration::from_secs(2);

/// The failures in a row.
#[derive(Debug, Clone, Default)]
pub(super) struct Pauses {
    failures: u32,
}

impl Pauses {
    /// The pause after a list and watch that lasted this long. `error` is `None` after a watch that
    /// the API server ended at its time limit. `random` is any number.
    pub(super) fn after(
        &mut self,
        error: Option<&ClusterError>,
        lasted: Duration,
        random: u64,
    ) -> Duration {
        let has_worked = lasted >= HAS_WORKED;
        if has_worked {
            self.failures = 0;
        }
        // A server that compacts its history ends a watch with 410: the next list is correct again.
        // One that ends every watch at once is a failure, for any reason.
        if has_worked && matches!(error, None | Some(ClusterError::Expired)) {
            return part(AFTER_END_MAX, random);
        }
        let doubled = PAUSES.0.saturating_mul(1 << self.failures.min(16)).min(PAUSES.1);
        self.failures = self.failures.saturating_add(1);
        // Between half of it and one and a half.
        let varied = doubled / 2 + part(doubled, random);
        let wanted = error.and_then(ClusterError::retry_after).unwrap_or_default();
        varied.max(wanted + part(PAUSES.0, random))
    }
}

/// A random part of a time, in milliseconds.
fn part(whole: Duration, random: u64) -> Duration {
    let millis = u64::try_from(whole.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(random % millis.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::super::error::RETRY_AFTER_MAX;
    use super::*;
    use proptest::prelude::*;

    fn refused(code: u16, retry_after: Option<u64>) -> ClusterError {
        let retry_after = retry_after.map(Duration::from_secs);
        let details = Box::default();
        ClusterError::Refused { code, message: String::new(), retry_after, details }
    }

    #[test]
    fn pauses_double_up_to_a_minute_and_begin_again_after_a_watch_that_worked() {
        let (mut pauses, error) = (Pauses::default(), refused(503, None));
        let seconds = |pauses: &mut Pauses, lasted| {
            pauses.after(Some(&error), Duration::from_secs(lasted), 0).as_millis()
        };
        let first: Vec<u128> = (0..9).map(|_| seconds(&mut pauses, 0)).collect();
        assert_eq!(first, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]);
        assert_eq!(seconds(&mut pauses, 300), 500, "a watch of five minutes has worked");
        assert_eq!(seconds(&mut pauses, 9), 1000);
    }

    #[test]
    fn an_api_server_that_asks_for_time_gets_it_within_bounds() {
        let mut pauses = Pauses::default();
        let after = |pauses: &mut Pauses, seconds, random| {
            pauses.after(Some(&refused(429, Some(seconds))), Duration::ZERO, random).as_secs()
        };
        assert_eq!(after(&mut pauses, 30, 0), 30);
        assert_eq!(after(&mut pauses, u64::MAX / 4, 0), 600);
    }

    #[test]
    fn the_usual_end_of_a_watch_has_a_short_pause_and_one_at_once_does_not() {
        let (mut pauses, long) = (Pauses::default(), Duration::from_secs(300));
        for error in [None, Some(&ClusterError::Expired)] {
            assert!(pauses.after(error, long, 1_234_567) <= AFTER_END_MAX);
        }
        let at_once: Vec<u64> =
            (0..8).map(|_| pauses.after(None, Duration::ZERO, 0).as_millis() as u64).collect();
        assert_eq!(at_once[..3], [500, 1000, 2000]);
        assert_eq!(at_once[7], 30_000);
    }

    proptest! {
        #[test]
        fn every_pause_is_bounded_and_varied(
            lasted in 0_u64..1000,
            failures in 0_u32..100,
            random in any::<u64>(),
            retry_after in proptest::option::of(any::<u64>()),
        ) {
            let mut pauses = Pauses { failures };
            let error = refused(429, retry_after);
            let pause = pauses.after(Some(&error), Duration::from_secs(lasted), random);
            prop_assert!(pause >= PAUSES.0 / 2 && pause <= RETRY_AFTER_MAX + PAUSES.0);
        }
    }
}
