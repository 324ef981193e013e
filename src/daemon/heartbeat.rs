//! The heartbeat for systemd's watchdog, which shows that the thread that answers the kubelet runs.
//!
//! It is sent by that thread alone. The ledger's thread waits for the disk, and discovery's for the
//! kernel. A call that hangs there would hang in a new process too, and until then this process
//! still answers the kubelet.

use crate::host;
use sd_notify::NotifyState;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Notifications within systemd's time limit: one may be late, and one lost.
/// (`sd_watchdog_enabled(3)` advises half of the limit.)
const BEATS: u32 = 3;

/// Starts the heartbeat if systemd has a watchdog: `$WATCHDOG_USEC` is set, and `$WATCHDOG_PID` is
/// this process or not set. Must be called on the thread that answers the kubelet. The heartbeat
/// ends with the runtime of that thread.
pub(super) fn begin() -> Option<JoinHandle<()>> {
    let period = period(sd_notify::watchdog_enabled()?)?;
    Some(tokio::spawn(async move {
        loop {
            if let Err(error) = sd_notify::notify(&[NotifyState::Watchdog]) {
                tracing::warn!(%error, "cannot send the watchdog notification; systemd ends the daemon if none \
                     arrives in time");
            }
            tokio::time::sleep(host::until_tick(period)).await;
        }
    }))
}

/// The time between two notifications for systemd's limit; `None` if the limit is zero, which means
/// no watchdog. Periods of a second or more are whole seconds, so that they fall on the ticks of
/// other polls.
fn period(limit: Duration) -> Option<Duration> {
    let period = limit / BEATS;
    let period = if period.as_secs() > 0 { Duration::from_secs(period.as_secs()) } else { period };
    (!period.is_zero()).then_some(period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_notifications_may_be_missed_before_the_limit() {
        let beats = |limit| period(Duration::from_micros(limit)).map(|period| period.as_micros());
        assert_eq!(
            beats(30_000_000),
            Some(10_000_000),
            "the unit's own: a tick of the polls of health"
        );
        assert_eq!(beats(10_000_000), Some(3_000_000), "whole seconds");
        assert_eq!(beats(600_000), Some(200_000));
        assert_eq!(beats(3), Some(1));
        assert_eq!(beats(0), None, "a limit of zero means no watchdog");
    }
}
