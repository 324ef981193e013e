//! When the hardware is scanned: one scan at a time, a debounce before it and a pause after it.

use crate::host;
use crate::messages::{Mailbox, Rescan};
use std::pin::Pin;
use std::time::Duration;
use tokio::time::Instant;

/// Udev makes the node some milliseconds after the kernel's event.
const DEBOUNCE: Duration = Duration::from_millis(10);
/// Hardware events come in swarms, and not in the order that one would wish (a virtual function comes before the link to its
/// physical one): this is the shortest pause between two scans, the later of which sees how it ended.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The pause after a scan, as a multiple of the time that the scan took: whatever changes, scans use at most a tenth of one
/// processor. A `/dev` with a hundred thousand entries takes 80 ms to list.
const PAUSE_FACTOR: u32 = 9;

/// The scans that hints ask for.
pub(super) struct Rescans {
    rescan: Mailbox<Rescan>,
    /// The poll scans too: no pause, and no wait for a scan, is longer than its interval.
    longest: Duration,
    due: Option<Instant>,
    earliest: Instant,
    running: Option<Pin<Box<dyn Future<Output = Duration> + Send>>>,
}

impl Rescans {
    pub(super) fn new(rescan: Mailbox<Rescan>, longest: Duration) -> Self {
        Rescans { rescan, longest, due: None, earliest: Instant::now(), running: None }
    }

    /// Asks for a scan: there is one after the debounce, or after the pause.
    pub(super) fn ask(&mut self) {
        let due = self.earliest.max(Instant::now() + DEBOUNCE);
        self.due.get_or_insert(due);
    }

    /// Waits until a scan begins, or until the running one has ended. Nothing is lost when it is dropped before.
    pub(super) async fn step(&mut self) {
        if let Some(running) = &mut self.running {
            let took = running.await;
            self.running = None;
            self.earliest = Instant::now() + pause_after(took, self.longest);
            self.due = self.due.map(|due| due.max(self.earliest));
            return;
        }
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
        self.due = None;
        let (rescan, longest) = (self.rescan.clone(), self.longest);
        self.running = Some(Box::pin(async move {
            let began = Instant::now();
            if let Err(error) = rescan.call(Rescan { asked_at: host::now().boot }, longest).await {
                tracing::warn!(%error, "the hardware was not scanned; the next hint or the poll asks again");
            }
            began.elapsed()
        }));
    }
}

fn pause_after(took: Duration, longest: Duration) -> Duration {
    took.saturating_mul(PAUSE_FACTOR).clamp(PAUSE_MIN, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scanning_costs_at_most_a_tenth_of_a_processor() {
        for (took, pause) in [(0, 50), (1, 50), (80, 720), (2_000, 18_000), (60_000, 30_000)] {
            assert_eq!(pause_after(Duration::from_millis(took), Duration::from_secs(30)), Duration::from_millis(pause));
        }
    }
}
