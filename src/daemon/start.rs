//! How an instance begins to serve: the only one for a first start, a handover, a restart by systemd, and an instance that serves again.

use crate::app::{App, Settings, StartError};
use crate::handover::PassedFds;
use std::time::Duration;
use tokio::time::Instant;

/// How long what the kubelet has asked the earlier instance may wait for this start: its node stands still meanwhile.
pub(super) const START_WITHIN: Duration = Duration::from_secs(10);

/// Between tries at a ledger that another process has not let go of yet: at first, and at last. One that was just killed lets
/// go of it within a millisecond or two, and until then the node has no devices.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The pauses between tries at a ledger that another process has, each twice as long as the one before, up to a bound.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Backoff(RETRY_AFTER.0)
    }
}

impl Backoff {
    /// How long to wait for the next try.
    pub(super) fn next(&mut self) -> Duration {
        let longer = self.0.saturating_mul(2).min(RETRY_AFTER.1);
        std::mem::replace(&mut self.0, longer)
    }
}

/// Starts, and goes on with what was passed on. When that has not succeeded by `until`, the kubelet is to see that the earlier instance is
/// gone.
///
/// # Errors
/// As [`App::start`].
pub(super) async fn start(settings: &Settings, passed: &mut PassedFds, until: Instant) -> Result<App, StartError> {
    let starting = App::start(settings.clone());
    tokio::pin!(starting);
    let mut app = tokio::select! {
        started = &mut starting => started?,
        () = tokio::time::sleep_until(until), if passed.connections() > 0 => {
            tracing::warn!("this instance does not start in time; the kubelet sees that the earlier one is gone");
            std::mem::take(passed).end();
            starting.await?
        }
    };
    app.receive(std::mem::take(passed));
    Ok(app)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_that_was_just_let_go_of_is_tried_again_within_milliseconds_and_one_that_is_kept_seldom() {
        let mut backoff = Backoff::default();
        let ms: Vec<u128> = std::iter::repeat_with(|| backoff.next().as_millis()).take(9).collect();
        assert_eq!(ms, [1, 2, 4, 8, 16, 32, 50, 50, 50]);
    }
}
