//! What two instances say to each other: one JSON document a line, over a unix socket whose end tells each of them that
//! the other is gone.

use crate::domain::ResourceName;
use crate::host::{descriptors, peer};
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;

/// The version of this conversation. An instance that knows a later one speaks the earlier ones too.
///
/// From 2 on the kubelet's connections come along, and may be kept open.
pub(super) const PROTOCOL: u32 = 2;
/// The oldest one that is still spoken.
pub(super) const PROTOCOL_MIN: u32 = 1;

/// What one line may have, at most: a name and a path for each of thousands of resources.
const LINE_MAX: usize = 1 << 20;
/// How long the other side may take to read a line.
const TELL_WITHIN: Duration = Duration::from_secs(5);

/// Where the instance that serves can be asked.
pub(in super::super) fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("handover.sock")
}

/// One line. OLD is the instance that serves, NEW the one that asks it to hand over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "word", rename_all = "snake_case")]
pub(super) enum Word {
    /// OLD: this is what you would take over.
    Offer {
        /// The newest version of this conversation that it knows.
        protocol: u32,
        /// Its own version.
        version: String,
        /// The version of its ledger's records.
        records: u32,
        /// Whose sockets come along, as open files.
        #[serde(default)]
        sockets: Vec<ResourceName>,
        /// The kubelet's connections, which come after them: the HTTP/2 stream of the lists of each.
        #[serde(default)]
        lists: Vec<u32>,
    },
    /// NEW: give it to me.
    Take {
        /// Its own version.
        version: String,
    },
    /// OLD: the ledger is free. What comes along takes the place of what came with the offer: the kubelet may have connected since.
    Yours {
        /// As above.
        #[serde(default)]
        sockets: Vec<ResourceName>,
        /// As above.
        #[serde(default)]
        lists: Vec<u32>,
    },
    /// NEW: I serve, on these sockets of the common directory.
    Serving {
        /// The names of their files.
        sockets: BTreeMap<ResourceName, String>,
    },
    /// NEW: end your streams.
    Leave,
    /// OLD: they have ended.
    Left,
    /// NEW: I hold your streams open; end without ending them.
    Keep,
    /// NEW: the kubelet has everything from me. The handover is complete.
    Confirmed,
}

/// The other instance.
#[derive(Debug)]
pub(super) struct Peer {
    stream: UnixStream,
    /// What has been read and not understood yet.
    read: Vec<u8>,
    /// What has come with it.
    files: Vec<OwnedFd>,
    /// Its process, where the kernel tells.
    pub(super) pid: Option<u32>,
}

impl Peer {
    pub(super) fn new(stream: UnixStream) -> Self {
        let pid = peer::pid(&stream);
        Peer { stream, read: Vec::new(), files: Vec::new(), pid }
    }

    pub(super) async fn tell(&mut self, word: &Word) -> io::Result<()> {
        self.tell_with(word, &[]).await
    }

    /// The same, and hands files on with it.
    pub(super) async fn tell_with(&mut self, word: &Word, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut line = serde_json::to_vec(word)?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        let told = tokio::time::timeout(TELL_WITHIN, descriptors::send(&self.stream, &mut rest, files)).await;
        let told = told.unwrap_or_else(|late| Err(late.into()));
        if told.is_err() && rest.len() < line.len() {
            // Half a line is not understood with another one behind it: both hear that this is the end.
            drop(shutdown(&self.stream, Shutdown::Both).map_err(io::Error::from));
        }
        told
    }

    /// The files that have come with the words so far, and were not taken yet.
    pub(super) fn files(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.files)
    }

    /// The next word; `None` when the other side is gone, or says what cannot be understood. May be given up and begun again.
    pub(super) async fn hear(&mut self) -> Option<Word> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return understood(&line);
            }
            let room = LINE_MAX.checked_sub(self.read.len()).filter(|room| *room > 0)?;
            if descriptors::receive(&self.stream, room, &mut self.read, &mut self.files).await.ok()? == 0 {
                return None;
            }
        }
    }

    pub(super) async fn hear_within(&mut self, time: Duration) -> Heard {
        match tokio::time::timeout(time, self.hear()).await {
            Ok(Some(word)) => Heard::Word(word),
            Ok(None) => Heard::Gone,
            Err(_) => Heard::Nothing,
        }
    }
}

fn understood(line: &[u8]) -> Option<Word> {
    let told = |error: &serde_json::Error| {
        tracing::warn!(%error, line = %String::from_utf8_lossy(line), "the other instance is not understood");
    };
    serde_json::from_slice(line).inspect_err(told).ok()
}

/// What came of listening.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// This.
    Word(Word),
    /// The other instance is gone.
    Gone,
    /// Nothing in time.
    Nothing,
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
    async fn words_are_heard_one_by_one_however_they_come_and_files_come_with_them() {
        let (mut peer, mut theirs) = pair();
        let early = tokio::time::timeout(Duration::from_millis(1), peer.hear());
        theirs.write_all(b"{\"word\":\"le").await.unwrap();
        assert!(early.await.is_err(), "half a word is none");
        theirs.write_all(b"ave\"}\n{\"word\":\"yours\"}\n{\"word\":\"keep\"}\n").await.unwrap();
        assert_eq!(peer.hear().await, Some(Word::Leave));
        assert_eq!(peer.hear().await, Some(Word::Yours { sockets: vec![], lists: vec![] }), "as older versions say it");
        assert_eq!(peer.hear().await, Some(Word::Keep));
        let mut theirs = Peer::new(theirs);
        let word = Word::Yours { sockets: vec![], lists: vec![3] };
        theirs.tell_with(&word, &[peer.stream.as_fd()]).await.unwrap();
        assert_eq!(peer.hear().await, Some(word));
        assert_eq!((peer.files().len(), peer.files().len()), (1, 0));
        drop(theirs);
        assert_eq!(peer.hear().await, None);
    }

    #[tokio::test]
    async fn what_is_no_word_is_the_end() {
        for said in [&b"nonsense\n"[..], b"{\"word\":\"leave\"}"] {
            let (mut peer, mut theirs) = pair();
            theirs.write_all(said).await.unwrap();
            drop(theirs);
            assert_eq!(peer.hear().await, None);
        }
        let (mut peer, mut theirs) = pair();
        let endless = tokio::spawn(async move { theirs.write_all(&vec![b'x'; 2 * LINE_MAX]).await });
        assert_eq!(peer.hear().await, None);
        drop(peer);
        assert!(endless.await.unwrap().is_err(), "the rest is not read");
    }

    /// The socket takes a part of it only, and nobody reads.
    #[tokio::test]
    async fn nothing_follows_half_a_line() {
        let (mut peer, theirs) = pair();
        let resource = format!("example.com/{}", "x".repeat(60)).parse::<ResourceName>().unwrap();
        let long = Word::Yours { sockets: vec![resource; 10_000], lists: vec![] };
        assert_eq!(peer.tell(&long).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(peer.tell(&Word::Left).await.is_err());
        let mut theirs = Peer::new(theirs);
        assert_eq!(theirs.hear().await, None);
    }
}
