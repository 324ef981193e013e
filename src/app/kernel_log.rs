//! Reads the kernel's log for what drivers tell there and nowhere else: NVIDIA's Xid errors.

use crate::domain::{Moment, Source, Timestamp};
use crate::hardware;
use crate::health::Judgement;
use crate::host::{self, HostRoot, KernelLog, KernelRecord};
use crate::messages::{Happened, Mailbox};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Tells health of every error in the log, those of before the daemon's start too, until the log fails.
pub(super) async fn follow(host_root: HostRoot, happened: Mailbox<Happened>, judgement: Arc<watch::Sender<Judgement>>) {
    let failed = match KernelLog::open(&host_root) {
        Ok(log) => read(&log, &happened).await,
        Err(error) => error,
    };
    tracing::info!(error = %failed, "the kernel's log cannot be read: NVIDIA's Xid errors are not seen");
    let why =
        format!("the kernel's log cannot be read ({failed}): give the daemon /dev/kmsg, and CAP_SYSLOG where kernel.dmesg_restrict is 1");
    judgement.send_modify(|judgement| drop(judgement.off.insert(Source::KernelLog, why)));
}

/// Reads until the log fails.
async fn read(log: &KernelLog, happened: &Mailbox<Happened>) -> io::Error {
    let tell = |record: &KernelRecord, at: Moment| {
        if let Some(event) = hardware::xid(&record.text) {
            happened.tell(Happened { event, at });
        }
    };
    loop {
        match log.waiting() {
            Ok(Some(record)) => tell(&record, moment(record.since_boot)),
            Ok(None) => break,
            Err(error) => return error,
        }
        // A ring of megabytes is nobody's reason to wait.
        tokio::task::yield_now().await;
    }
    loop {
        match log.next().await {
            Ok(record) => tell(&record, host::now()),
            Err(error) => return error,
        }
    }
}

/// The moment of a record that was there already. Its clock and the boot's differ by the time for which the machine was
/// suspended, which is none on a node, and by what the machine's oscillator is wrong: seconds in a month. So what is told while
/// the daemon listens gets the moment at which it was heard.
fn moment(since_boot: Duration) -> Moment {
    let now = host::now();
    let age = u64::try_from(now.boot.saturating_sub(since_boot).as_millis()).unwrap_or(u64::MAX);
    Moment { boot: since_boot, wall: Timestamp(now.wall.0.saturating_sub(age)) }
}
