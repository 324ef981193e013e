//! How an instance begins to serve. There is one way for a first start, a handover, a restart by
//! systemd, and an instance that serves again.

use crate::app::{App, Settings, StartError};
use crate::handover::PassedFds;
use std::time::Duration;
use tokio::time::Instant;

/// How long calls that the kubelet sent to the earlier instance may wait for this start. No pod
/// with a device can start on the node until then.
pub(super) const START_WITHIN: Duration = Duration::from_secs(10);

/// The first and the last pause between tries at a ledger that another process has locked. A killed
/// process releases it within a millisecond or two, and until then the node has no devices.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The pauses between tries at a locked ledger. Each is twice as long as the one before, up to a
/// bound.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Backoff(RETRY_AFTER.0)
    }
}

impl Backoff {
    /// The pause before the next try.
    pub(super) fn next(&mut self) -> Duration {
        let longer = self.0.saturating_mul(2).min(RETRY_AFTER.1);
        std::mem::replace(&mut self.0, longer)
    }
}

/// Starts, and continues with the descriptors that were passed on. If that has not succeeded by
/// `until`, the connections are ended, so that the kubelet sees that the earlier instance has
/// exited.
///
/// # Errors
/// As [`App::start_after`].
pub(super) async fn start(
    settings: &Settings,
    passed: &mut PassedFds,
    until: Instant,
) -> Result<App, StartError> {
    let starting = App::start_after(settings.clone(), passed.connections() > 0);
    tokio::pin!(starting);
    let mut app = tokio::select! {
        started = &mut starting => started?,
        () = tokio::time::sleep_until(until), if passed.connections() > 0 => {
            tracing::warn!("this instance did not start in time; ending the kubelet's connections to the earlier one");
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
    fn a_locked_ledger_is_tried_again_within_milliseconds_at_first_and_less_often_later() {
        let mut backoff = Backoff::default();
        let ms: Vec<u128> = std::iter::repeat_with(|| backoff.next().as_millis()).take(9).collect();
        assert_eq!(ms, [1, 2, 4, 8, 16, 32, 50, 50, 50]);
    }
}
