//! The thread of telemetry.
//!
//! Any peer that reaches its address causes work. So it is not the thread that answers the kubelet,
//! and it has a lower priority.

use crate::host;
use std::future::pending;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;
use tokio::runtime::{Builder, Handle};

/// Tasks that run between two polls of the sockets. A connection that is evicted was open for
/// several of these polls.
const EVENT_INTERVAL: u32 = 16;
/// Under contention the thread gets a third of the processor time of the kubelet's thread. With
/// less, probes would be late on a node without spare processors.
const NICENESS: i32 = 5;

/// The runtime of the thread. The first call starts it, and it lasts as long as the process.
///
/// # Errors
/// When no thread can be started; the next call tries again.
pub(super) fn handle() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);
    let mut running = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*running {
        return Ok(handle.clone());
    }
    let runtime = host::runtime_of(Builder::new_current_thread().event_interval(EVENT_INTERVAL))?;
    let handle = runtime.handle().clone();
    thread::Builder::new().name("telemetry".into()).spawn(move || {
        host::lower_thread_priority_by(NICENESS);
        runtime.block_on(pending::<()>());
    })?;
    Ok(running.insert(handle).clone())
}
