//! Connections that can be cut: a killed kubelet drops all of them at once, a disconnect drops
//! those of one plugin.

use crate::host::peer::is_hung_up;
use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdStream;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;

/// The group of the connections that the kubelet serves.
const SERVED: u64 = 0;

/// The connections of one kubelet, in groups: one for all served connections, and one for each
/// client by its number.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Links(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    over: bool,
    next: u64,
    /// A second descriptor of every open connection, used to shut it down.
    open: BTreeMap<(u64, u64), StdStream>,
    /// Notified when a connection of a client has ended.
    ended: Arc<Notify>,
}

impl Table {
    fn enter(&mut self, group: u64, stream: &UnixStream) -> io::Result<(u64, u64)> {
        if self.over {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the kubelet is stopped"));
        }
        let second = StdStream::from(stream.as_fd().try_clone_to_owned()?);
        self.next += 1;
        self.open.insert((group, self.next), second);
        Ok((group, self.next))
    }
}

impl Links {
    fn with<R>(&self, act: impl FnOnce(&mut Table) -> R) -> R {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a connection that a client has dialled to its group.
    pub(in super::super) fn add(&self, group: u64, stream: UnixStream) -> io::Result<Link> {
        let key = self.with(|table| table.enter(group, &stream))?;
        Ok(Link { stream, key, links: self.clone() })
    }

    /// Adds a connection that the kubelet serves. The stream stays unwrapped, so that the kubelet
    /// and plugins share the server's code. Ended connections are removed at the next call.
    pub(super) fn admit(&self, stream: UnixStream) -> io::Result<UnixStream> {
        self.with(|table| {
            table.open.retain(|(group, _), stream| *group != SERVED || !is_hung_up(stream));
            table.enter(SERVED, &stream)
        })?;
        Ok(stream)
    }

    /// Whether a group has an open connection.
    pub(super) fn is_open(&self, group: u64) -> bool {
        self.with(|table| table.open.range((group, 0)..=(group, u64::MAX)).next().is_some())
    }

    /// Waits until a group has no open connection.
    pub(in super::super) async fn ended(&self, group: u64) {
        let ended = self.with(|table| Arc::clone(&table.ended));
        loop {
            let mut notified = std::pin::pin!(ended.notified());
            notified.as_mut().enable();
            if !self.is_open(group) {
                return;
            }
            notified.await;
        }
    }

    /// Cuts every connection of a group.
    pub(super) fn cut(&self, group: u64) {
        self.with(|table| {
            table.open.range((group, 0)..=(group, u64::MAX)).for_each(|(_, stream)| shut(stream));
        });
    }

    /// Cuts every connection and refuses new ones.
    pub(in super::super) fn cut_all(&self) {
        self.with(|table| {
            table.over = true;
            table.open.values().for_each(shut);
        });
    }
}

fn shut(stream: &StdStream) {
    // It fails on a connection that the other side has closed, with the same effect.
    let _ = stream.shutdown(Shutdown::Both);
}

/// One connection of a client.
#[derive(Debug)]
pub(in super::super) struct Link {
    stream: UnixStream,
    key: (u64, u64),
    links: Links,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.links.with(|table| {
            table.open.remove(&self.key);
            table.ended.notify_waiters();
        });
    }
}

impl AsyncRead for Link {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Link {
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
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_served_connection_that_has_ended_keeps_no_descriptor() {
        let links = Links::default();
        let (ended, other) = UnixStream::pair().unwrap();
        drop((links.admit(ended).unwrap(), other));
        let (open, _other) = UnixStream::pair().unwrap();
        let (next, _another) = UnixStream::pair().unwrap();
        let _served = [links.admit(open).unwrap(), links.admit(next).unwrap()];
        assert_eq!(links.with(|table| table.open.len()), 2);
    }
}
