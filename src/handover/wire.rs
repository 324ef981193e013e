//! The handover messages: one JSON document per line over a unix socket. Its end shows each side
//! that the other has exited.

use super::Label;
use crate::host::{descriptors, peer};
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// The version of this protocol. NEW refuses an OLD with a later one, before anything is changed.
pub const PROTOCOL: u32 = 1;

/// Longest line in bytes: enough for the labels of thousands of descriptors.
const LINE_MAX: usize = 1 << 20;
/// How long the other side may take to read a line.
const SEND_WITHIN: Duration = Duration::from_secs(5);

/// The path of the serving instance's socket.
#[must_use]
pub fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("handover.sock")
}

/// A message. OLD is the serving instance, NEW the one that requests the handover.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// OLD: what NEW would take over. It carries the descriptors, so that NEW has the kubelet's
    /// connections even if OLD dies next.
    Offer {
        /// The version of this protocol.
        protocol: u32,
        /// OLD's version.
        version: String,
        /// The version of the records in OLD's ledger.
        records: u32,
        /// The descriptors that come with this.
        fds: Vec<Label>,
    },
    /// OLD: it does not hand over now, and continues to serve.
    Refused {
        /// The reason.
        why: String,
    },
    /// NEW: requests the handover.
    Take {
        /// NEW's version.
        version: String,
    },
    /// OLD: the ledger is closed, and OLD no longer reads or writes on the connections. The
    /// descriptors replace those of the offer.
    Yours {
        /// The descriptors that come with this.
        fds: Vec<Label>,
    },
    /// NEW: the kubelet has every resource from NEW. The handover is complete.
    Confirmed,
}

/// The other instance.
#[derive(Debug)]
pub struct Peer {
    stream: UnixStream,
    /// Bytes that are not a whole line yet.
    read: Vec<u8>,
    /// Descriptors that were received and not taken yet.
    fds: Vec<OwnedFd>,
    /// Its process id, if the kernel reports it.
    pub pid: Option<u32>,
}

impl Peer {
    /// The instance at the other end of this connection.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        let pid = peer::pid(&stream);
        Peer { stream, read: Vec::new(), fds: Vec::new(), pid }
    }

    /// Sends a message, and descriptors with it.
    ///
    /// # Errors
    /// When the other side does not read it in time, or has closed the connection.
    pub async fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        let sent =
            tokio::time::timeout(SEND_WITHIN, descriptors::send(&self.stream, &mut rest, fds))
                .await;
        let sent = sent.unwrap_or_else(|late| Err(late.into()));
        if sent.is_err() && rest.len() < line.len() {
            // A line after half a line could not be parsed, so the connection is closed.
            drop(shutdown(&self.stream, Shutdown::Both).map_err(io::Error::from));
        }
        sent
    }

    /// Takes the descriptors that have been received so far.
    pub fn fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// The next message. `None` when the other side has closed the connection, or sent anything
    /// that is not a message. Cancel safe.
    pub async fn recv(&mut self) -> Option<Message> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let warn = |error: &_| tracing::warn!(%error, line = %String::from_utf8_lossy(&line), "invalid message from the other instance");
                return serde_json::from_slice(&line).inspect_err(warn).ok();
            }
            let free = LINE_MAX.checked_sub(self.read.len()).filter(|free| *free > 0)?;
            if descriptors::receive(&self.stream, free, &mut self.read, &mut self.fds).await.ok()?
                == 0
            {
                return None;
            }
        }
    }

    /// Whether the other side has closed the connection.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        peer::is_hung_up(&self.stream)
    }

    /// Waits until the other side has closed the connection.
    pub async fn gone(&mut self) {
        while self.recv().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;
    use tokio::io::AsyncWriteExt as _;

    fn pair() -> (Peer, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Peer::new(ours), theirs)
    }

    #[tokio::test]
    async fn messages_and_descriptors_arrive_in_any_split_of_the_bytes() {
        let (mut peer, mut theirs) = pair();
        let early = tokio::time::timeout(Duration::from_millis(1), peer.recv());
        theirs.write_all(b"{\"message\":\"con").await.unwrap();
        assert!(early.await.is_err(), "half a line is no message");
        theirs.write_all(b"firmed\"}\n{\"message\":\"yours\",\"fds\":[]}\n").await.unwrap();
        assert_eq!(peer.recv().await, Some(Message::Confirmed));
        assert_eq!(peer.recv().await, Some(Message::Yours { fds: vec![] }));
        let mut theirs = Peer::new(theirs);
        let resource = "example.com/gpu".parse().unwrap();
        let message = Message::Yours { fds: vec![Label::Connection { resource, lists: 3 }] };
        theirs.send(&message, &[peer.stream.as_fd()]).await.unwrap();
        assert_eq!(peer.recv().await, Some(message));
        assert_eq!((peer.fds().len(), peer.fds().len()), (1, 0));
        drop(theirs);
        assert_eq!(peer.recv().await, None);
    }

    /// A peer that is killed while it sends leaves half a message, which is discarded.
    #[tokio::test]
    async fn an_invalid_or_truncated_message_ends_the_connection() {
        for sent in [
            &b"nonsense\n"[..],
            b"{\"message\":\"confirmed\"}",
            b"{\"message\":\"yours\",\"fds\":[{\"sock",
        ] {
            let (mut peer, mut theirs) = pair();
            theirs.write_all(sent).await.unwrap();
            drop(theirs);
            assert_eq!(peer.recv().await, None);
        }
        let (mut peer, mut theirs) = pair();
        let endless =
            tokio::spawn(async move { theirs.write_all(&vec![b'x'; 2 * LINE_MAX]).await });
        assert_eq!(peer.recv().await, None);
        drop(peer);
        assert!(endless.await.unwrap().is_err(), "the rest is not read");
    }

    /// The socket accepts only a part of the line, and no process reads.
    #[tokio::test]
    async fn nothing_follows_half_a_line() {
        let (mut peer, theirs) = pair();
        let resource = format!("example.com/{}", "x".repeat(60)).parse().unwrap();
        let long = Message::Yours { fds: vec![Label::Socket(resource); 10_000] };
        assert_eq!(peer.send(&long, &[]).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(peer.send(&Message::Confirmed, &[]).await.is_err());
        let mut theirs = Peer::new(theirs);
        assert_eq!(theirs.recv().await, None);
    }
}
