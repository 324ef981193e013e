//! The heartbeat for systemd's watchdog: while it beats, the thread that answers the kubelet turns.
//!
//! It beats on that thread and nowhere else. The ledger's waits for the disk and discovery's for the kernel: what hangs there
//! would hang in a new process too, and meanwhile this one still serves what it knows.

use crate::host;
use sd_notify::NotifyState;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Beats within the time that systemd allows: one may be late, and one lost. (Half of it is what `sd_watchdog_enabled(3)` advises.)
const BEATS: u32 = 3;

/// Begins to beat, if systemd listens: where `$WATCHDOG_USEC` is set, and `$WATCHDOG_PID` is this process or not set at all.
/// Must be called on the thread that answers the kubelet; it beats until the runtime of that thread ends.
pub(super) fn begin() -> Option<JoinHandle<()>> {
    let period = period(sd_notify::watchdog_enabled()?)?;
    Some(tokio::spawn(async move {
        loop {
            if let Err(error) = sd_notify::notify(&[NotifyState::Watchdog]) {
                tracing::warn!(%error, "systemd could not be told that the daemon lives; it ends the daemon when it hears nothing for long");
            }
            tokio::time::sleep(host::until_tick(period)).await;
        }
    }))
}

/// The time from one beat to the next, for the time that systemd allows; `None` where it allows none, which is no watchdog. Whole
/// seconds where it is that long: the beats fall on the ticks of other polls then.
fn period(limit: Duration) -> Option<Duration> {
    let period = limit / BEATS;
    let period = if period.as_secs() > 0 { Duration::from_secs(period.as_secs()) } else { period };
    (!period.is_zero()).then_some(period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_beats_may_be_missed_before_systemd_loses_patience() {
        let beats = |limit| period(Duration::from_micros(limit)).map(|period| period.as_micros());
        assert_eq!(beats(30_000_000), Some(10_000_000), "the unit's own: a tick of the polls of health");
        assert_eq!(beats(10_000_000), Some(3_000_000), "whole seconds");
        assert_eq!(beats(600_000), Some(200_000));
        assert_eq!(beats(3), Some(1));
        assert_eq!(beats(0), None, "systemd says so where there is no watchdog");
    }
}
