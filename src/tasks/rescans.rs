//! The schedule of hardware scans: one scan at a time, a debounce before it and a pause after it.

use crate::domain::Unread;
use crate::host::{self, HostRoot};
use crate::messages::{CallError, Mailbox, Rescan};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Udev creates the node some milliseconds after the kernel's event.
const DEBOUNCE: Duration = Duration::from_millis(10);
/// The shortest pause between two scans. Hardware events come in bursts and in any order: a virtual
/// function comes before the link to its physical function. The later scan sees the final state.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The pause after a scan, as a multiple of its processor time. So scans use at most a tenth of one
/// processor, however many events come. A `/dev` with a hundred thousand entries takes 80 ms to
/// list. On a busy machine a scan takes longer without more processor time, and a device failure
/// must not wait for that nine times.
const PAUSE_FACTOR: u32 = 9;

/// What a scan took.
#[derive(Debug, Clone, Copy)]
struct Cost {
    processor: Duration,
    elapsed: Duration,
}

/// The scans that events and the poll request.
pub(super) struct Rescans {
    rescan: Mailbox<Rescan>,
    host_root: HostRoot,
    /// What the last scan could not read.
    unread: Arc<watch::Sender<Unread>>,
    /// The interval of the poll. No pause, and no wait for a scan, is longer.
    poll: Duration,
    poll_at: Instant,
    due: Option<Instant>,
    earliest: Instant,
    running: Option<Pin<Box<dyn Future<Output = Cost> + Send>>>,
}

impl Rescans {
    pub(super) fn new(
        rescan: Mailbox<Rescan>,
        host_root: HostRoot,
        unread: Arc<watch::Sender<Unread>>,
        poll: Duration,
    ) -> Self {
        let (earliest, poll_at) = (Instant::now(), Instant::now() + host::until_tick(poll));
        Rescans { rescan, host_root, unread, poll, poll_at, due: None, earliest, running: None }
    }

    /// Requests a scan: it begins after the debounce or after the pause, the later of the two.
    pub(super) fn request(&mut self) {
        let due = self.earliest.max(Instant::now() + DEBOUNCE);
        self.due.get_or_insert(due);
    }

    /// Requests the scan of the poll, if its time has come. It follows no event, so it needs no
    /// debounce.
    pub(super) fn poll(&mut self) {
        if self.poll_at <= Instant::now() {
            self.poll_at = Instant::now() + host::until_tick(self.poll);
            self.due.get_or_insert(self.earliest);
        }
    }

    /// Waits until a scan begins, or until the running scan has ended. It may be dropped without
    /// loss.
    pub(super) async fn step(&mut self) {
        if let Some(running) = &mut self.running {
            let cost = running.await;
            self.running = None;
            self.earliest = Instant::now() + pause_after(cost, self.poll);
            self.due = self.due.map(|due| due.max(self.earliest));
            return;
        }
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
        self.due = None;
        let (rescan, longest) = (self.rescan.clone(), self.poll);
        let (host_root, unread) = (self.host_root.clone(), Arc::clone(&self.unread));
        self.running = Some(Box::pin(async move {
            let began = Instant::now();
            let scan = rescan.call(Rescan { asked_at: host::now().boot }, longest).await;
            let processor = scan.unwrap_or_else(|error| {
                if matches!(error, CallError::TimedOut(..)) {
                    report_late(&host_root, &unread, longest);
                } else {
                    tracing::warn!(%error, "hardware scan failed; the next event or poll requests another one");
                }
                Duration::ZERO
            });
            Cost { processor, elapsed: began.elapsed() }
        }));
    }
}

/// Reports a scan that does not end. The next one that ends replaces the report.
fn report_late(host_root: &HostRoot, unread: &watch::Sender<Unread>, after: Duration) {
    let mut why = format!("a scan of the hardware has not ended after {after:?}");
    if let Some(file) = host::awaited_file(&host_root.path("sys")) {
        why += &format!(
            "; it waits for a read of `{}`, where a driver does not answer",
            file.display()
        );
    }
    tracing::warn!(%why, "devices keep their last state until the scan ends");
    unread.send_modify(|unread| unread.late = Some(why));
}

/// The pause is also as long as the scan: a driver that answers slowly is asked half of the time.
fn pause_after(cost: Cost, longest: Duration) -> Duration {
    cost.processor.saturating_mul(PAUSE_FACTOR).max(cost.elapsed).clamp(PAUSE_MIN, longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::Deliver;
    use futures_util::future::BoxFuture;

    /// A discovery whose scan does not end.
    struct Hanging;

    impl Deliver<Rescan> for Hanging {
        fn call(
            &self,
            _: Rescan,
            deadline: Duration,
        ) -> BoxFuture<'static, Result<Duration, CallError>> {
            Box::pin(std::future::ready(Err(CallError::TimedOut("discovery", deadline))))
        }

        fn send(&self, _: Rescan) {}
    }

    #[tokio::test]
    async fn a_scan_that_does_not_end_is_reported() {
        let unread = Arc::new(watch::Sender::<Unread>::default());
        let (mailbox, root) = (Mailbox::new(Hanging), HostRoot::new("/nonexistent"));
        let longest = Duration::from_secs(30);
        let mut rescans = Rescans::new(mailbox, root, Arc::clone(&unread), longest);
        rescans.request();
        rescans.step().await;
        assert!(unread.borrow().is_empty());
        rescans.step().await;
        let expected = ["a scan of the hardware has not ended after 30s"];
        assert_eq!(unread.borrow().reasons(), expected.into());
    }

    #[test]
    fn scanning_costs_at_most_a_tenth_of_a_processor() {
        let ms = Duration::from_millis;
        for (processor, elapsed, pause) in [
            (0, 0, 50),
            (1, 1, 50),
            (80, 80, 720),
            (2_000, 2_000, 18_000),
            (60_000, 60_000, 30_000),
            // A busy machine, a slow driver, a driver that hangs.
            (20, 400, 400),
            (1, 3_000, 3_000),
            (0, 60_000, 30_000),
        ] {
            let cost = Cost { processor: ms(processor), elapsed: ms(elapsed) };
            assert_eq!(pause_after(cost, Duration::from_secs(30)), ms(pause), "{cost:?}");
        }
    }
}
