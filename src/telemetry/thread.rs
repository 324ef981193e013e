//! Telemetry's own thread. Whoever reaches its address decides how much there is to do, so it is not the thread that answers the
//! kubelet, and it steps back behind that one.

use crate::host;
use std::future::pending;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;
use tokio::runtime::{Builder, Handle};

/// Polls between two looks at what the sockets have. What is pushed out of the room lives for several of these at least.
const LOOKS_EVERY: u32 = 16;

/// How far it steps back: a third of the processor time of the kubelet's thread where both want all of it. Further back the probes would
/// not be answered in time on a node that is short of processors.
const BEHIND: i32 = 5;

/// The runtime of that thread, which is begun when it is first asked for and lasts as long as the process.
///
/// # Errors
/// When no thread can be started; the next call tries again.
pub(super) fn handle() -> io::Result<Handle> {
    static THREAD: Mutex<Option<Handle>> = Mutex::new(None);
    let mut running = THREAD.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*running {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().event_interval(LOOKS_EVERY).build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new().name("telemetry".into()).spawn(move || {
        host::lower_priority(BEHIND);
        runtime.block_on(pending::<()>());
    })?;
    Ok(running.insert(handle).clone())
}
