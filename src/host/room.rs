//! Whether a pipe, a socket or a terminal takes more.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io;
use std::os::fd::AsFd;

/// Whether a page can be written within so many milliseconds without waiting for longer (`POLLOUT`, poll(2)). A reader that is
/// gone is no reason to wait: there, writing fails.
///
/// # Errors
/// What poll(2) refuses; a signal is none.
pub fn has_room(to: &impl AsFd, patience_ms: u8) -> io::Result<bool> {
    loop {
        match poll(&mut [PollFd::new(to.as_fd(), PollFlags::POLLOUT)], PollTimeout::from(patience_ms)) {
            Err(Errno::EINTR) => {}
            ready => return Ok(ready? > 0),
        }
    }
}
