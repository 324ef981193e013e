//! NEW's side: asks for the ledger, serves, and has the other one leave the kubelet.

use super::super::App;
use super::wire::{Heard, PROTOCOL, Peer, Word, socket_path};
use crate::domain::ResourceName;
use crate::messages::{Detach, Mailbox, Reattach};
use crate::registration::ResourceStatus;
use crate::serving::Sockets;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;

/// How long the other one may take to say what it has. It answers at once, unless it hangs.
const OFFER_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to let go of the ledger: the deadlines of its checkpoint and of the Allocates that it answers first,
/// and those of a handover that is under way already.
const YOURS_WITHIN: Duration = Duration::from_secs(60);
/// How long the kubelet may refuse a resource, before the other one leaves and before it is told that all is done.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to end its streams.
const LEFT_WITHIN: Duration = Duration::from_secs(5);
/// How long the kubelet is asked to forget, for all resources together. More than this, and it is as any loss.
const DETACH_WITHIN: Duration = Duration::from_secs(2);
/// How long the kubelet's own clearing up after the other one's streams may take before the handover counts as complete;
/// the settling Register of every resource comes earlier.
const CLEARED_UP_AFTER: Duration = Duration::from_secs(1);

/// Why an instance that was asked does not hand over. It goes on.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// It cannot be asked.
    #[error("holdfast on `{}` cannot be asked to hand over: {source}; only root may ask", path.display())]
    Socket {
        /// Its socket.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// It says nothing.
    #[error("holdfast on `{}` does not answer; if it hangs, end it, and start again", path.display())]
    Silent {
        /// Its socket.
        path: PathBuf,
    },
    /// It knows a form of ledger that this version cannot read.
    #[error(
        "the running holdfast {theirs} keeps a ledger of version {records}, and this holdfast {ours} reads up to version {known}; \
         nothing was changed, and the running one goes on; install {theirs} or newer",
        ours = env!("CARGO_PKG_VERSION"), known = crate::store::RECORDS
    )]
    Newer {
        /// The running one's version.
        theirs: String,
        /// Its ledger's.
        records: u32,
    },
}

/// The instance that has handed its ledger over.
#[derive(Debug)]
pub struct Former {
    peer: Peer,
    version: String,
}

/// Asks a living instance to hand over. `None` when there is none, or when it ended by itself meanwhile.
///
/// # Errors
/// When there is one that does not hand over.
pub async fn ask(run_dir: &Path) -> Result<Option<Former>, TakeOverError> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        Err(source) => return Err(TakeOverError::Socket { path, source }),
    };
    let mut peer = Peer::new(stream);
    let (version, records) = match peer.hear_within(OFFER_WITHIN).await {
        Heard::Word(Word::Offer { protocol: PROTOCOL.., version, records }) => (version, records),
        Heard::Gone => return Ok(None),
        Heard::Word(_) | Heard::Nothing => return Err(TakeOverError::Silent { path }),
    };
    if records > crate::store::RECORDS {
        return Err(TakeOverError::Newer { theirs: version, records });
    }
    if peer.tell(&Word::Take { version: env!("CARGO_PKG_VERSION").into() }).await.is_err() {
        return Ok(None);
    }
    match peer.hear_within(YOURS_WITHIN).await {
        Heard::Word(Word::Yours) => Ok(Some(Former { peer, version })),
        Heard::Gone => Ok(None),
        Heard::Word(_) | Heard::Nothing => Err(TakeOverError::Silent { path }),
    }
}

/// What of this instance the rest of a handover needs.
#[derive(Debug)]
pub struct Standing {
    sockets: Arc<Sockets>,
    ready: watch::Receiver<bool>,
    registrations: watch::Receiver<BTreeMap<ResourceName, ResourceStatus>>,
    detach: Mailbox<Detach>,
    reattach: Mailbox<Reattach>,
}

impl App {
    /// For [`Former::relieve`].
    #[must_use]
    pub fn standing(&self) -> Standing {
        Standing {
            sockets: Arc::clone(&self.sockets),
            ready: self.views.ready.clone(),
            registrations: self.views.registrations.clone(),
            detach: self.actors.registration.mailbox(),
            reattach: self.actors.registration.mailbox(),
        }
    }
}

impl Former {
    /// Has it pass on what it is asked as soon as this instance is ready, and leave when the kubelet has everything from here, or
    /// has refused it for long enough; returns when the kubelet has everything again, or as late. It may end at any moment: then
    /// the kubelet clears up after it as after any other.
    pub async fn relieve(mut self, standing: Standing, detaches: bool) -> Relieved {
        let Standing { sockets, mut ready, mut registrations, detach, reattach } = standing;
        drop(ready.wait_for(|ready| *ready).await);
        drop(self.peer.tell(&Word::Serving { sockets: sockets.newest() }).await);
        // What the kubelet refuses from here it still has from there.
        known(&mut registrations).await;
        if detaches && let Err(error) = detach.call(Detach, DETACH_WITHIN).await {
            tracing::debug!(%error, "not detached");
        }
        drop(self.peer.tell(&Word::Leave).await);
        let left = self.peer.hear_within(LEFT_WITHIN).await;
        if left == Heard::Nothing {
            tracing::warn!("the former instance does not end its streams");
        }
        if detaches {
            // The kubelet sees the end of a stream a moment after it.
            tokio::time::sleep(SEEN_AFTER).await;
            reattach.tell(Reattach);
        }
        tokio::time::sleep(CLEARED_UP_AFTER).await;
        known(&mut registrations).await;
        drop(self.peer.tell(&Word::Confirmed).await);
        tracing::info!(from = self.version, "took over from another instance");
        Relieved(self.peer)
    }
}

/// Waits until the kubelet has every resource from here, or is away; not for ever, or one name that it refuses would keep the
/// other instance.
async fn known(registrations: &mut watch::Receiver<BTreeMap<ResourceName, ResourceStatus>>) {
    let all = registrations.wait_for(|all| all.values().all(ResourceStatus::is_known));
    if tokio::time::timeout(KNOWN_WITHIN, all).await.is_err() {
        tracing::warn!("the kubelet does not take every resource from this instance; the former one ends all the same");
    }
}

/// How long the kubelet may take to see the end of a stream.
const SEEN_AFTER: Duration = Duration::from_millis(20);

/// The former instance, which stands by or ends. While this is held it knows that this instance lives.
#[derive(Debug)]
pub struct Relieved(Peer);

impl Relieved {
    /// Waits for its end.
    pub async fn gone(&mut self) {
        while self.0.hear().await.is_some() {}
    }
}
