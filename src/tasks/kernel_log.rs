//! Reads the kernel log for errors that drivers report only there: NVIDIA's Xid errors.

use crate::domain::{Moment, Timestamp};
use crate::hardware;
use crate::host::{self, HostRoot, KernelLog, KernelRecord};
use crate::messages::{DeviceEventSeen, Mailbox};
use std::io;
use std::time::Duration;
use tokio::sync::watch;

/// Whether the log is read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum LogState {
    /// Not yet known.
    #[default]
    Opening,
    /// It is.
    Read,
    /// It is not, for this reason.
    Unreadable(String),
}

/// How long after a log could not be opened the next try comes. It may have been a limit.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Sends every error in the log to the health actor, errors before the daemon's start included,
/// until reading the log fails.
pub(super) async fn follow(
    host_root: HostRoot,
    device_events: Mailbox<DeviceEventSeen>,
    state: watch::Sender<LogState>,
) {
    let log = loop {
        match KernelLog::open(&host_root) {
            Ok(log) => break log,
            Err(error) => unreadable(&state, &error),
        }
        tokio::time::sleep(RETRY_AFTER).await;
    };
    state.send_replace(LogState::Read);
    let failed = read(&log, &device_events).await;
    unreadable(&state, &failed);
    // The last value counts as long as it has a sender.
    std::future::pending::<()>().await;
}

/// Publishes why the log cannot be read.
fn unreadable(state: &watch::Sender<LogState>, error: &io::Error) {
    let todo = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
            "; give the daemon /dev/kmsg, and CAP_SYSLOG if kernel.dmesg_restrict is 1"
        }
        _ => "",
    };
    let unreadable = LogState::Unreadable(format!("the kernel log cannot be read ({error}){todo}"));
    state.send_if_modified(|state| {
        let is_news = *state != unreadable;
        *state = unreadable;
        is_news
    });
}

/// Reads until the log fails.
async fn read(log: &KernelLog, device_events: &Mailbox<DeviceEventSeen>) -> io::Error {
    let mut former = Vec::new();
    loop {
        match log.waiting() {
            Ok(Some(record)) => note(&record, moment(record.since_boot), &mut former),
            Ok(None) => break,
            Err(error) => return error,
        }
        // A ring buffer of megabytes must not block the other tasks of this thread.
        tokio::task::yield_now().await;
    }
    former.into_iter().for_each(|event| device_events.send(event));
    loop {
        match log.next().await {
            Ok(record) => {
                if let Some(event) = error(&record, host::now()) {
                    device_events.send(event);
                }
            }
            Err(failure) => return failure,
        }
    }
}

/// The error in a record.
fn error(record: &KernelRecord, at: Moment) -> Option<DeviceEventSeen> {
    hardware::xid(&record.text).map(|event| DeviceEventSeen { event, at })
}

/// Adds the error of a record from before the daemon's start. A start of the driver ends the errors
/// before it. While the daemon runs, the kernel's event of the driver does that.
fn note(record: &KernelRecord, at: Moment, events: &mut Vec<DeviceEventSeen>) {
    if hardware::is_driver_start(&record.text) {
        events.clear();
    }
    events.extend(error(record, at));
}

/// The moment of a record that was in the log before the daemon's start. The log's clock and the
/// boot clock differ in two ways. One is the time that the machine was suspended, which is zero on
/// a node. The other is the drift of the machine's oscillator: seconds in a month. So a record that
/// arrives while the daemon listens gets the moment of its arrival.
fn moment(since_boot: Duration) -> Moment {
    let now = host::now();
    let age = u64::try_from(now.boot.saturating_sub(since_boot).as_millis()).unwrap_or(u64::MAX);
    Moment { boot: since_boot, wall: Timestamp(now.wall.0.saturating_sub(age)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_before_the_start_of_the_driver_is_over() {
        let (xid, start) = (
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.",
            "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build",
        );
        for (lines, errors) in [
            (&[xid][..], 1),
            (&[xid, start], 0),
            (&[start, xid], 1),
            (&[xid, start, xid], 1),
            (&[xid, "usb 1-1: NVRM: loading NVIDIA UNIX "], 1),
        ] {
            let mut events = Vec::new();
            for text in lines {
                let text = (*text).to_owned();
                let record = KernelRecord { sequence: 1, since_boot: Duration::ZERO, text };
                note(&record, host::now(), &mut events);
            }
            assert_eq!(events.len(), errors, "{lines:?}");
        }
    }
}
