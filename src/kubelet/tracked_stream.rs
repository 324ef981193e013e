//! A connection of the kubelet whose calls are known, and which another process can go on with.
//!
//! A connection is idle when every call on it is answered. Then it can be released: its server no
//! longer reads or writes, and ends without closing the connection, which may be open in another
//! process.
//!
//! **A kubelet that hangs up is noticed.** Kubelets from 1.25 on dial at Register, ask for the
//! options and then for the lists. A kubelet that has just lost another connection of the resource
//! may confuse the two, and close this one before it asks for the lists. Then it would never
//! connect again.

use super::h2::Calls;
use crate::domain::limits::Use;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tonic::transport::server::Connected;

/// The state of a connection that its server does not have.
#[derive(Debug, Default)]
pub struct Tracked {
    /// The connection, open as long as this is.
    fd: Option<OwnedFd>,
    state: Mutex<State>,
    /// Woken when a call may have been answered.
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    is_released: bool,
    calls: Calls,
    server: Option<Waker>,
}

impl Tracked {
    /// Every change is a single step: a panic elsewhere cannot leave one half done.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection; `None` where the process had no room for one more descriptor.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The HTTP/2 stream of its lists, 0 where none are read.
    #[must_use]
    pub fn lists(&self) -> u32 {
        self.state().calls.lists()
    }

    /// What it is used for.
    #[must_use]
    pub fn usage(&self) -> Use {
        self.state().calls.usage()
    }

    /// Whether every call is answered, also those that still lie in the socket.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let lies_there = |fd| rustix::io::ioctl_fionread(fd).is_ok_and(|bytes| bytes > 0);
        !self.state().calls.is_pending() && !self.fd().is_some_and(lies_there)
    }

    /// Has its server read and write nothing more, and end.
    pub fn release(&self) {
        let mut state = self.state();
        state.is_released = true;
        let server = state.server.take();
        drop(state);
        server.into_iter().for_each(Waker::wake);
    }
}

/// The connection, for its server.
pub struct TrackedStream {
    stream: UnixStream,
    tracked: Arc<Tracked>,
    on_early_close: Arc<dyn Fn() + Send + Sync>,
}

impl TrackedStream {
    /// Tracks it. `on_early_close` is called at most once, when it has ended before lists were
    /// sent; `changed` is woken by a drain.
    pub fn new(stream: UnixStream, changed: Arc<Notify>, on_early_close: Arc<dyn Fn() + Send + Sync>) -> Self {
        let fd = stream.as_fd().try_clone_to_owned().ok();
        TrackedStream { stream, tracked: Arc::new(Tracked { fd, changed, state: Mutex::default() }), on_early_close }
    }

    /// What is known of it.
    #[must_use]
    pub fn tracked(&self) -> &Arc<Tracked> {
        &self.tracked
    }

    fn is_released(&self) -> bool {
        self.tracked.state().is_released
    }

    /// Writes by `write`, and counts what of these slices it has written.
    fn write(
        mut self: Pin<&mut Self>,
        slices: &[&[u8]],
        write: impl FnOnce(Pin<&mut UnixStream>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.is_released() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let written = write(Pin::new(&mut self.stream));
        if let Poll::Ready(Ok(mut rest)) = written {
            for slice in slices {
                let part = slice.get(..rest.min(slice.len())).unwrap_or_default();
                self.tracked.state().calls.sent(part);
                rest -= part.len();
            }
            self.tracked.changed.notify_one();
        }
        written
    }
}

/// A connection that is not passed on. Every server takes the same type.
impl From<UnixStream> for TrackedStream {
    fn from(stream: UnixStream) -> Self {
        TrackedStream { stream, tracked: Arc::default(), on_early_close: Arc::new(|| {}) }
    }
}

impl std::fmt::Debug for TrackedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrackedStream").field("stream", &self.stream).field("tracked", &self.tracked).finish_non_exhaustive()
    }
}

impl Drop for TrackedStream {
    fn drop(&mut self) {
        let state = self.tracked.state();
        let is_early = !state.is_released && state.calls.lacks_lists();
        drop(state);
        if is_early {
            (self.on_early_close)();
        }
        self.tracked.changed.notify_one();
    }
}

impl Connected for TrackedStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for TrackedStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.is_released() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        let mut state = self.tracked.state();
        state.calls.received(buffer.filled().get(before..).unwrap_or_default());
        state.server = Some(context.waker().clone());
        drop(state);
        self.tracked.changed.notify_one();
        polled
    }
}

impl AsyncWrite for TrackedStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write(&[bytes], |stream| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let slices: Vec<&[u8]> = bytes.iter().map(|slice| &**slice).collect();
        self.write(&slices, |stream| stream.poll_write_vectored(context, bytes))
    }

    /// So that a frame, whose head and payload lie apart, is written by one call (`h2.rs`).
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_released() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
