//! Reads the kernel's log for what drivers tell there and nowhere else: NVIDIA's Xid errors.

use crate::domain::{Moment, Source, Timestamp};
use crate::hardware;
use crate::health::Judgement;
use crate::host::{self, HostRoot, KernelLog};
use crate::messages::{Happened, Mailbox};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Tells health of every error in the log, those of before the daemon's start too, until the log fails.
pub(super) async fn follow(host_root: HostRoot, happened: Mailbox<Happened>, judgement: Arc<watch::Sender<Judgement>>) {
    let failed = match KernelLog::open(&host_root) {
        Ok(log) => loop {
            match log.next().await {
                Ok(record) => {
                    if let Some(event) = hardware::xid(&record.text) {
                        happened.tell(Happened { event, at: moment(record.since_boot) });
                    }
                }
                Err(error) => break error,
            }
        },
        Err(error) => error,
    };
    tracing::info!(error = %failed, "the kernel's log cannot be read: NVIDIA's Xid errors are not seen");
    let why =
        format!("the kernel's log cannot be read ({failed}): give the daemon /dev/kmsg, and CAP_SYSLOG where kernel.dmesg_restrict is 1");
    judgement.send_modify(|judgement| drop(judgement.off.insert(Source::KernelLog, why)));
}

/// The moment of a record. Its clock and the boot's differ by the time for which the machine was suspended, which is none on
/// a node.
fn moment(since_boot: Duration) -> Moment {
    let now = host::now();
    let age = u64::try_from(now.boot.saturating_sub(since_boot).as_millis()).unwrap_or(u64::MAX);
    Moment { boot: since_boot, wall: Timestamp(now.wall.0.saturating_sub(age)) }
}
