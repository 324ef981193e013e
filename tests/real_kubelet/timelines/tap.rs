//! A connection that records its begin and its end, and gives its identity to every call on it.

use crate::recording::timeline::Recorder;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// The identity of a connection: the plugin's name and a number.
#[derive(Debug, Clone)]
pub(crate) struct Lane(pub(crate) String);

/// The plugin's end of a connection.
#[derive(Debug)]
pub(crate) struct Tapped {
    stream: UnixStream,
    lane: Lane,
    recorder: Recorder,
    /// Whether the plugin ends it itself.
    dies: Arc<AtomicBool>,
    is_closed: bool,
}

impl Tapped {
    pub(crate) fn new(
        stream: UnixStream,
        lane: Lane,
        recorder: Recorder,
        dies: Arc<AtomicBool>,
    ) -> Self {
        recorder.note(format!("{} connection", lane.0), "opened");
        Tapped { stream, lane, recorder, dies, is_closed: false }
    }

    fn closed(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true) && !self.dies.load(Ordering::SeqCst) {
            self.recorder.note(format!("{} connection", self.lane.0), "closed");
        }
    }
}

impl Drop for Tapped {
    fn drop(&mut self) {
        // The kubelet sends GOAWAY before it closes; then the server may close first.
        self.closed();
    }
}

impl Connected for Tapped {
    type ConnectInfo = Lane;

    fn connect_info(&self) -> Lane {
        self.lane.clone()
    }
}

impl AsyncRead for Tapped {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        if read.is_err() || buffer.filled().len() == before {
            self.closed();
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Tapped {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
