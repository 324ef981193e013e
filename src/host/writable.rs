//! Whether a pipe, a socket or a terminal accepts more data.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io;
use std::os::fd::AsFd;

/// Whether a page can be written within `patience_ms` without blocking for longer (`POLLOUT`,
/// poll(2)). True if the reader has closed: the write fails at once.
///
/// # Errors
/// The errors of poll(2), except an interrupt by a signal.
pub fn is_writable_within(to: &impl AsFd, patience_ms: u8) -> io::Result<bool> {
    loop {
        match poll(
            &mut [PollFd::new(to.as_fd(), PollFlags::POLLOUT)],
            PollTimeout::from(patience_ms),
        ) {
            Err(Errno::EINTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}
