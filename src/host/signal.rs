//! Signals to other processes.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io;

/// Asks a process to end in order, as service managers do: SIGTERM.
///
/// # Errors
/// When there is none of this id, or it is somebody else's.
pub fn terminate(process: u32) -> io::Result<()> {
    let process = i32::try_from(process).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    Ok(kill(Pid::from_raw(process), Signal::SIGTERM)?)
}
