//! A connection of the kubelet whose calls are tracked, and which another process can continue.
//!
//! It is idle when every call that was sent is answered. Then it can be released: its server stops
//! reading and writing, and ends without closing the connection, which may be open in another
//! process.
//!
//! **An early close is reported.** A kubelet of 1.25 or newer dials at Register, requests the
//! options and then the lists. If it has just lost another connection of the resource, it may
//! confuse this one with the lost one, and close it before it requests the lists. It would not dial
//! again without another Register.

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

/// The state of a connection, shared with its server.
#[derive(Debug, Default)]
pub struct Tracked {
    /// A duplicate of the connection's descriptor, open as long as this value is.
    fd: Option<OwnedFd>,
    state: Mutex<State>,
    /// Notified when a call may have been answered.
    changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    is_released: bool,
    calls: Calls,
    server: Option<Waker>,
}

impl Tracked {
    /// Every change is a single step, so a panic elsewhere cannot leave one half done.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection. `None` if the process could not open one more descriptor.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// The HTTP/2 stream id of ListAndWatch, 0 if there is none.
    #[must_use]
    pub fn lists(&self) -> u32 {
        self.state().calls.lists()
    }

    /// The calls that it is used for.
    #[must_use]
    pub fn usage(&self) -> Use {
        self.state().calls.usage()
    }

    /// Whether every call is answered, including calls that are still in the socket's buffer.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let has_input = |fd| rustix::io::ioctl_fionread(fd).is_ok_and(|bytes| bytes > 0);
        !self.state().calls.is_pending() && !self.fd().is_some_and(has_input)
    }

    /// Makes its server stop reading and writing, and end.
    pub fn release(&self) {
        let mut state = self.state();
        state.is_released = true;
        let server = state.server.take();
        drop(state);
        server.into_iter().for_each(Waker::wake);
    }
}

/// The connection, as its server reads and writes it.
pub struct TrackedStream {
    stream: UnixStream,
    tracked: Arc<Tracked>,
    on_early_close: Arc<dyn Fn() + Send + Sync>,
}

impl TrackedStream {
    /// Tracks a connection. `on_early_close` is called at most once, when the connection ends
    /// before ListAndWatch was requested. A drain waits on `changed`.
    pub fn new(
        stream: UnixStream,
        changed: Arc<Notify>,
        on_early_close: Arc<dyn Fn() + Send + Sync>,
    ) -> Self {
        let fd = stream.as_fd().try_clone_to_owned().ok();
        TrackedStream {
            stream,
            tracked: Arc::new(Tracked { fd, changed, state: Mutex::default() }),
            on_early_close,
        }
    }

    /// Its shared state.
    #[must_use]
    pub fn tracked(&self) -> &Arc<Tracked> {
        &self.tracked
    }

    fn is_released(&self) -> bool {
        self.tracked.state().is_released
    }

    /// Writes with `write`, and passes the written part of these slices to the call tracker.
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

/// A connection that is not tracked. Every server uses the same type.
impl From<UnixStream> for TrackedStream {
    fn from(stream: UnixStream) -> Self {
        TrackedStream { stream, tracked: Arc::default(), on_early_close: Arc::new(|| {}) }
    }
}

impl std::fmt::Debug for TrackedStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrackedStream")
            .field("stream", &self.stream)
            .field("tracked", &self.tracked)
            .finish_non_exhaustive()
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
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(&[bytes], |stream| stream.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let slices: Vec<&[u8]> = bytes.iter().map(|slice| &**slice).collect();
        self.write(&slices, |stream| stream.poll_write_vectored(context, bytes))
    }

    /// A frame's header and payload are separate slices, so that one call writes both (`h2.rs`).
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
