//! The rate limit that all clients and methods of the pod-resources API share.

use std::time::Duration;

/// Calls per second (`DefaultQPS` of the kubelet's podresources package).
const PER_SECOND: f64 = 100.0;
/// Calls that may come at once (`DefaultBurstTokens`).
const BURST: f64 = 10.0;

/// A token bucket.
#[derive(Debug)]
pub(super) struct Limiter {
    tokens: f64,
    at: Duration,
}

impl Limiter {
    pub(super) fn new(now: Duration) -> Self {
        Limiter { tokens: BURST, at: now }
    }

    /// Takes a token. Returns whether there was one.
    pub(super) fn allow(&mut self, now: Duration) -> bool {
        let earned = now.saturating_sub(self.at).as_secs_f64() * PER_SECOND;
        self.tokens = (self.tokens + earned).min(BURST);
        self.at = now;
        let allowed = self.tokens >= 1.0;
        if allowed {
            self.tokens -= 1.0;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_calls_pass_at_once_and_then_one_every_ten_milliseconds() {
        let mut limiter = Limiter::new(Duration::ZERO);
        assert_eq!((0..20).filter(|_| limiter.allow(Duration::ZERO)).count(), 10);
        assert!(!limiter.allow(Duration::from_millis(9)));
        assert!(limiter.allow(Duration::from_millis(11)));
        assert_eq!((0..200).filter(|_| limiter.allow(Duration::from_secs(60))).count(), 10);
    }
}
