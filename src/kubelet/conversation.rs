//! How far the kubelet came on a connection.
//!
//! A kubelet from 1.25 on dials at Register, asks for the options and then for the lists. But when it has just lost another
//! connection of the resource, it may take this one for that, and hang up in between: it says nothing of it, and would never
//! come again.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::Request;
use tonic::transport::server::Connected;

/// What was asked on one connection; in every request that came on it.
#[derive(Debug, Clone, Default)]
pub struct Conversation(Arc<Asked>);

#[derive(Debug, Default)]
struct Asked {
    options: AtomicBool,
    lists: AtomicBool,
}

impl Conversation {
    /// The plugin's options are asked for: with this the kubelet begins.
    pub(super) fn asks_for_options<T>(request: &Request<T>) {
        if let Some(Conversation(asked)) = request.extensions().get() {
            asked.options.store(true, Ordering::Relaxed);
        }
    }

    /// The lists are asked for.
    pub(super) fn asks_for_lists<T>(request: &Request<T>) {
        if let Some(Conversation(asked)) = request.extensions().get() {
            asked.lists.store(true, Ordering::Relaxed);
        }
    }

    /// Whether it began, and never came to the lists.
    fn broke_off(&self) -> bool {
        self.0.options.load(Ordering::Relaxed) && !self.0.lists.load(Ordering::Relaxed)
    }
}

/// A connection that tells when it ends before the lists were asked for.
pub struct Followed {
    stream: UnixStream,
    conversation: Conversation,
    broke_off: Arc<dyn Fn() + Send + Sync>,
}

impl Followed {
    /// Follows it; `broke_off` is called at most once.
    pub fn new(stream: UnixStream, broke_off: Arc<dyn Fn() + Send + Sync>) -> Self {
        Followed { stream, conversation: Conversation::default(), broke_off }
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
