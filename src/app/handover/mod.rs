//! Handover: two instances on one node, and the ledger and the kubelet go from OLD to NEW without an Allocate that fails.
//!
//! ```text
//!   NEW (run --take-over)                      OLD
//!        ── connects ──────────────────────────▶
//!        ◀── Offer: version, ledger's version ──     NEW ends here if it cannot read that ledger
//!            with the kubelet's connections
//!        ── Take ──────────────────────────────▶
//!                                                    answers what has begun, lets the rest wait,
//!        ◀── Yours ─────────────────────────────     closes the ledger
//!            with the connections once more
//!   opens it, scans, serves, registers
//!        ── Serving: its sockets ──────────────▶     passes on what waits, and what still comes
//!   waits for what the kubelet refuses, detaches (below)
//!        ── Leave ─────────────────────────────▶     ends its streams
//!        ◀── Left ──────────────────────────────
//!     or ── Keep ──────────────────────────────▶     leaves them open (without detach)
//!   registers again, until the kubelet has it, or refuses it for long
//!        ── Confirmed ─────────────────────────▶     ends, or waits to be ended
//! ```
//!
//! **Whoever is left serves.** The connection lives as long as both do. When NEW is gone OLD takes everything back, as a
//! start of its own in the same process, before it is confirmed and after; when OLD is gone NEW goes on, and registers
//! again as after any loss. When both are, the next start finds the ledger as any crash leaves it.
//!
//! **What the kubelet sees.** Its connections to OLD are open in NEW too (`inherited.rs`). It sees their end when NEW lets go of them,
//! not when OLD dies; what it has asked OLD by then it asks again, and NEW answers.
//!
//! **Detach** (`upgrade.detach`). A kubelet up to 1.36 knows connections by the name of the resource: the end of OLD's stream
//! makes it drop NEW's, and for a moment it has no device. It does not when it has forgotten whose the resource is, which a
//! Register does that fails on purpose; OLD's stream then ends unnoticed, and one more Register makes NEW known again. Without it NEW holds
//! OLD's connections open, for as long as it lives, and the stream never ends.
//!
//! **A restart by systemd** is a handover too, from a process that has ended to one that has not begun (`kept.rs`).
//!
//! **Who waits to be ended.** An instance that was asked by another pod must not end: its container would start again, and
//! take over what it has just given away. It stands by until SIGTERM. One that started its successor itself, for `holdfast
//! handover`, tells systemd who the main process is, and ends.

mod give;
mod inherited;
mod install;
mod kept;
mod take;
mod wire;

pub use give::{Asked, Given, give};
pub use inherited::Inherited;
pub use install::{Installed, Upgrade, UpgradeOrder, start_installed};
pub use kept::kept;
pub use take::{Former, Relieved, Standing, TakeOverError, ask, relieve};

pub(super) use give::listen;
pub(super) use kept::keep;
pub(super) use wire::socket_path;

use super::{App, Settings, StartError};
use crate::store::StoreError;
use std::time::Duration;
use tokio::time::Instant;

/// Between tries at a ledger that another process has not let go of yet: at first, and at last. One that was just killed lets
/// go of it within a millisecond or two, and until then the node has no devices.
const TRY_AGAIN_AFTER: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The pauses between tries at a ledger that another process has, each twice as long as the one before, up to a bound.
#[derive(Debug)]
pub struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Pauses(TRY_AGAIN_AFTER.0)
    }
}

impl Pauses {
    /// How long to wait for the next try.
    pub fn pause(&mut self) -> Duration {
        let longer = self.0.saturating_mul(2).min(TRY_AGAIN_AFTER.1);
        std::mem::replace(&mut self.0, longer)
    }
}

/// Starts as soon as the ledger is free.
///
/// # Errors
/// As [`App::start`]; that the ledger is in use only after `patience`.
pub async fn start_when_free(settings: &Settings, patience: Duration) -> Result<App, StartError> {
    let until = Instant::now() + patience;
    let mut pauses = Pauses::default();
    loop {
        match App::start(settings.clone()).await {
            Err(StartError::Store(StoreError::InUse { .. })) if Instant::now() < until => tokio::time::sleep(pauses.pause()).await,
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_that_was_just_let_go_of_is_tried_again_within_milliseconds_and_one_that_is_kept_seldom() {
        let mut pauses = Pauses::default();
        let ms: Vec<u128> = std::iter::repeat_with(|| pauses.pause().as_millis()).take(9).collect();
        assert_eq!(ms, [1, 2, 4, 8, 16, 32, 50, 50, 50]);
    }
}
