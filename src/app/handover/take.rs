//! NEW's side: asks for the ledger, serves, and has the other one leave the kubelet.

use super::super::App;
use super::inherited::Inherited;
use super::wire::{Heard, PROTOCOL, PROTOCOL_MIN, Peer, Word, socket_path};
use crate::domain::ResourceName;
use crate::messages::{Adopt, Detach, Mailbox, Reattach};
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
    keeps_open: bool,
}

/// Asks a living instance to hand over. `None` when there is none, or when it ended by itself meanwhile; what it has sent until then is in
/// `inherited`.
///
/// # Errors
/// When there is one that does not hand over.
pub async fn ask(run_dir: &Path, inherited: &mut Inherited) -> Result<Option<Former>, TakeOverError> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => return Ok(None),
        Err(source) => return Err(TakeOverError::Socket { path, source }),
    };
    let mut peer = Peer::new(stream);
    let offer = peer.hear_within(OFFER_WITHIN).await;
    if offer == Heard::Gone {
        // It was there just now.
        return Ok(None);
    }
    let Heard::Word(Word::Offer { protocol: protocol @ PROTOCOL_MIN.., version, records, sockets, lists }) = offer else {
        return Err(TakeOverError::Silent { path });
    };
    if records > crate::store::RECORDS {
        return Err(TakeOverError::Newer { theirs: version, records });
    }
    tracing::info!(version, pid = peer.pid, connections = lists.len(), "asking another instance to hand over");
    inherited.arrived(sockets, lists, peer.files());
    if peer.tell(&Word::Take { version: env!("CARGO_PKG_VERSION").into() }).await.is_err() {
        return Ok(None);
    }
    match peer.hear_within(YOURS_WITHIN).await {
        Heard::Word(Word::Yours { sockets, lists }) => {
            let files = peer.files();
            // One that does not send them a second time says nothing of them.
            if !(sockets.is_empty() && lists.is_empty()) {
                inherited.arrived(sockets, lists, files);
            }
            Ok(Some(Former { peer, version, keeps_open: protocol >= PROTOCOL }))
        }
        Heard::Gone => Ok(None),
        Heard::Word(_) | Heard::Nothing => Err(TakeOverError::Silent { path }),
    }
}

impl Former {
    /// Waits for its end. It says nothing meanwhile.
    pub(super) async fn gone(&mut self) {
        while self.peer.hear().await.is_some() {}
    }
}

/// What of this instance the rest of a handover needs.
#[derive(Debug)]
pub struct Standing {
    sockets: Arc<Sockets>,
    ready: watch::Receiver<bool>,
    registrations: watch::Receiver<BTreeMap<ResourceName, ResourceStatus>>,
    adopt: Mailbox<Adopt>,
    detach: Mailbox<Detach>,
    reattach: Mailbox<Reattach>,
}

impl App {
    /// For [`relieve`].
    #[must_use]
    pub fn standing(&self) -> Standing {
        Standing {
            sockets: Arc::clone(&self.sockets),
            ready: self.views.ready.clone(),
            registrations: self.views.registrations.clone(),
            adopt: self.actors.serving.mailbox(),
            detach: self.actors.registration.mailbox(),
            reattach: self.actors.registration.mailbox(),
        }
    }
}

/// Whoever was there before, as long as it lives, and what the kubelet has open there.
#[derive(Debug)]
struct Heritage {
    former: Option<Former>,
    inherited: Inherited,
    adopt: Mailbox<Adopt>,
}

impl Heritage {
    /// Waits for something, and notices the former instance's end meanwhile.
    async fn until(&mut self, done: impl Future) {
        tokio::pin!(done);
        if let Some(former) = &mut self.former {
            tokio::select! {
                _ = &mut done => return,
                () = former.gone() => self.lost(),
            }
        }
        done.await;
    }

    /// The former instance is gone. It may end at any moment: what it was asked is answered here.
    fn lost(&mut self) {
        self.former = None;
        self.inherited.answer(&self.adopt);
    }

    async fn tell(&mut self, word: Word) {
        if let Some(former) = &mut self.former {
            // Where this fails it is gone, which is heard next.
            drop(former.peer.tell(&word).await);
        }
    }
}

/// Has the former instance pass on what it is asked as soon as this one is ready, and leave when the kubelet has everything from here, or
/// has refused it for long enough; returns when the kubelet has everything again, or as late. `former` is `None` when it has died before
/// this one was started.
pub async fn relieve(former: Option<Former>, inherited: Inherited, standing: Standing, detaches: bool) -> Option<Relieved> {
    let Standing { sockets, mut ready, mut registrations, adopt, detach, reattach } = standing;
    let keeps_open = !detaches && former.as_ref().is_none_or(|former| former.keeps_open);
    let mut heritage = Heritage { former, inherited, adopt };
    if heritage.former.is_none() {
        heritage.lost();
    }
    heritage.until(ready.wait_for(|ready| *ready)).await;
    heritage.tell(Word::Serving { sockets: sockets.newest() }).await;
    // What the kubelet refuses from here it still has from there.
    heritage.until(known(&mut registrations)).await;
    // What this instance does not serve the kubelet has to lose.
    let serves = |name: &ResourceName| registrations.borrow().get(name).is_some_and(ResourceStatus::is_known);
    if keeps_open && heritage.inherited.resources().all(serves) {
        heritage.tell(Word::Keep).await;
        heritage.inherited.keep(&sockets.connections);
    } else {
        if detaches {
            heritage.until(detach.call(Detach, DETACH_WITHIN)).await;
        }
        heritage.tell(Word::Leave).await;
        if let Some(former) = &mut heritage.former {
            match former.peer.hear_within(LEFT_WITHIN).await {
                Heard::Word(_) => {}
                Heard::Gone => heritage.lost(),
                Heard::Nothing => tracing::warn!("the former instance does not end its streams"),
            }
        }
        heritage.inherited.let_go();
    }
    if detaches {
        // The kubelet sees the end of a stream a moment after it.
        tokio::time::sleep(SEEN_AFTER).await;
        reattach.tell(Reattach);
    }
    heritage.until(tokio::time::sleep(CLEARED_UP_AFTER)).await;
    heritage.until(known(&mut registrations)).await;
    heritage.tell(Word::Confirmed).await;
    if let Some(former) = &heritage.former {
        tracing::info!(from = former.version, "took over from another instance");
        return Some(Relieved(heritage));
    }
    None
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
pub struct Relieved(Heritage);

impl Relieved {
    /// Waits for its end. What it was asked on connections that stay open is then answered here, however late that is.
    pub async fn gone(&mut self) {
        if let Some(former) = &mut self.0.former {
            former.gone().await;
            self.0.lost();
        }
    }

    /// Waits for its end, and until what it was asked is answered.
    pub async fn over(mut self) {
        self.gone().await;
        tokio::time::sleep(CLEARED_UP_AFTER).await;
    }
}
