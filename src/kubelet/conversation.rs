//! How far the kubelet came on a connection.
//!
//! A kubelet from 1.25 on dials at Register, asks for the options and then for the lists. But when it has just lost another
//! connection of the resource, it may take this one for that, and hang up in between: it says nothing of it, and would never
//! come again.
//!
//! Whoever takes a connection over has to know as much: which of its calls is that for the lists.

use crate::domain::limits::Use;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

/// What was asked on one connection; in every request that came on it.
#[derive(Debug, Clone, Default)]
pub struct Conversation(Arc<Asked>);

#[derive(Debug, Default)]
struct Asked {
    calls: AtomicU32,
    in_flight: AtomicU32,
    /// Open streams of lists.
    list_streams: AtomicU32,
    options: AtomicBool,
    /// The stream of the lists, 0 as long as they were not asked for.
    lists: AtomicU32,
}

impl Conversation {
    /// A call comes in. They have to be told in the order in which they come.
    pub fn called(&self, method: &str) {
        let Conversation(asked) = self;
        // A client's streams are 1, 3, 5 … (RFC 9113, 5.1.1), one for each call.
        let stream = asked.calls.fetch_add(1, Ordering::Relaxed).wrapping_mul(2) + 1;
        match method {
            "GetDevicePluginOptions" => asked.options.store(true, Ordering::Relaxed),
            "ListAndWatch" => asked.lists.store(stream, Ordering::Relaxed),
            _ => {}
        }
    }

    /// The HTTP/2 stream of the lists, where they were asked for.
    #[must_use]
    pub fn lists(&self) -> Option<u32> {
        Some(self.0.lists.load(Ordering::Relaxed)).filter(|stream| *stream > 0)
    }

    /// Counts a call in flight, until the returned value is dropped.
    #[must_use]
    pub fn call_in_flight(&self) -> CallInFlight {
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        CallInFlight(self.clone())
    }

    /// Counts an open stream of lists, until the returned value is dropped.
    #[must_use]
    pub fn list_stream(&self) -> ListStream {
        self.0.list_streams.fetch_add(1, Ordering::Relaxed);
        ListStream(self.clone())
    }

    /// What the connection is used for.
    #[must_use]
    pub fn usage(&self) -> Use {
        let Conversation(asked) = self;
        match (asked.list_streams.load(Ordering::Relaxed), asked.in_flight.load(Ordering::Relaxed)) {
            (0, 0) => Use::Idle,
            (0, _) => Use::Request,
            _ => Use::Lists,
        }
    }

    /// Whether it began, and never came to the lists.
    fn broke_off(&self) -> bool {
        self.0.options.load(Ordering::Relaxed) && self.lists().is_none()
    }
}

/// A call that is not answered yet.
#[derive(Debug)]
pub struct CallInFlight(Conversation);

impl Drop for CallInFlight {
    fn drop(&mut self) {
        (self.0).0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An open stream of lists.
#[derive(Debug)]
pub struct ListStream(Conversation);

impl Drop for ListStream {
    fn drop(&mut self) {
        (self.0).0.list_streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that tells when it ends before the lists were asked for.
pub struct Followed {
    stream: UnixStream,
    conversation: Conversation,
    broke_off: Arc<dyn Fn() + Send + Sync>,
    taken_down: Option<Arc<OwnedFd>>,
}

impl Followed {
    /// Follows it; `broke_off` is called at most once.
    pub fn new(stream: UnixStream, broke_off: Arc<dyn Fn() + Send + Sync>) -> Self {
        Followed { stream, conversation: Conversation::default(), broke_off, taken_down: None }
    }

    /// Its conversation, and the connection as another open file, which is closed with it.
    ///
    /// # Errors
    /// When this process has no room for one more open file.
    pub fn take_down(&mut self) -> io::Result<(Weak<OwnedFd>, Conversation)> {
        let file = self.taken_down.insert(Arc::new(self.stream.as_fd().try_clone_to_owned()?));
        Ok((Arc::downgrade(file), self.conversation.clone()))
    }
}

/// One that nobody follows: every server takes the same kind of connection, so that its code is there once.
impl From<UnixStream> for Followed {
    fn from(stream: UnixStream) -> Self {
        Followed::new(stream, Arc::new(|| {}))
    }
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Followed").field("stream", &self.stream).field("conversation", &self.conversation).finish_non_exhaustive()
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if self.conversation.broke_off() {
            (self.broke_off)();
        }
    }
}

impl Connected for Followed {
    type ConnectInfo = Conversation;

    fn connect_info(&self) -> Conversation {
        self.conversation.clone()
    }
}

impl AsyncRead for Followed {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Followed {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
