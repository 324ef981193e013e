//! Signals to processes that were started here.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io;

/// Asks a process to read its configuration again (SIGHUP).
///
/// # Errors
/// When there is no such process, or it is somebody else's.
pub fn hang_up(pid: u32) -> io::Result<()> {
    send(pid, Signal::SIGHUP)
}

/// Asks a process to end in order (SIGTERM).
///
/// # Errors
/// As [`hang_up`].
pub fn terminate(pid: u32) -> io::Result<()> {
    send(pid, Signal::SIGTERM)
}

fn send(pid: u32, signal: Signal) -> io::Result<()> {
    // 0 and less would be groups of processes.
    let pid = i32::try_from(pid).ok().filter(|pid| *pid > 0).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill(Pid::from_raw(pid), signal)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn a_signal_reaches_its_process_and_no_group() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        terminate(child.id()).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
        assert_eq!(terminate(0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(hang_up(u32::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
