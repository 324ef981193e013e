//! What two instances say to each other: one JSON document a line, over a unix socket whose end tells each of them that
//! the other is gone.

use crate::domain::ResourceName;
use crate::host::{descriptors, peer};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines, Take};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// The version of this conversation. An instance that knows a later one speaks the earlier ones too.
///
/// From 2 on the kubelet's connections come with the offer, and may be kept open.
pub(super) const PROTOCOL: u32 = 2;
/// The oldest one that is still spoken.
pub(super) const PROTOCOL_MIN: u32 = 1;

/// What one conversation may have, at most: a name and a path for each of thousands of resources.
const BYTES_MAX: u64 = 1 << 20;
/// What its first line may have.
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
    /// OLD: the ledger is free.
    Yours,
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
    lines: Lines<BufReader<Take<OwnedReadHalf>>>,
    write: OwnedWriteHalf,
    /// Its process, where the kernel tells.
    pub(super) pid: Option<u32>,
}

impl Peer {
    pub(super) fn new(stream: UnixStream) -> Self {
        let pid = peer::pid(&stream);
        let (read, write) = stream.into_split();
        Peer { lines: BufReader::new(read.take(BYTES_MAX)).lines(), write, pid }
    }

    /// Reads the first word, and the files that come with it.
    pub(super) async fn meet(stream: UnixStream, files: &mut Vec<OwnedFd>) -> io::Result<(Self, Option<Word>)> {
        let line = descriptors::receive_line(&stream, LINE_MAX, files).await?;
        Ok((Peer::new(stream), understood(&line)))
    }

    /// As [`Peer::tell`], and hands files on with it.
    pub(super) async fn tell_with(&mut self, word: &Word, files: &[impl AsFd]) -> io::Result<()> {
        tokio::time::timeout(TELL_WITHIN, descriptors::send(self.write.as_ref(), &line(word)?, files)).await?
    }

    pub(super) async fn tell(&mut self, word: &Word) -> io::Result<()> {
        tokio::time::timeout(TELL_WITHIN, self.write.write_all(&line(word)?)).await?
    }

    /// The next word; `None` when the other side is gone, or says what cannot be understood. May be given up and begun again.
    pub(super) async fn hear(&mut self) -> Option<Word> {
        understood(self.lines.next_line().await.ok()??.as_bytes())
    }

    pub(super) async fn hear_within(&mut self, time: Duration) -> Heard {
        match tokio::time::timeout(time, self.hear()).await {
            Ok(Some(word)) => Heard::Word(word),
            Ok(None) => Heard::Gone,
            Err(_) => Heard::Nothing,
        }
    }
}

fn line(word: &Word) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(word)?;
    line.push(b'\n');
    Ok(line)
}

/// `None` also for the nothing that one says who has gone.
fn understood(line: &[u8]) -> Option<Word> {
    let word = serde_json::from_slice(line);
    let told = |error: &serde_json::Error| {
        if !line.is_empty() {
            tracing::warn!(%error, line = %String::from_utf8_lossy(line), "the other instance is not understood");
        }
    };
    word.inspect_err(told).ok()
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
