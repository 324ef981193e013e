//! The handover socket of the instance that serves.

use super::PassedFds;
use super::wire::{Message, PROTOCOL, Peer, socket_path};
use crate::host::peer::TrustedListener;
use crate::store;
use crate::telemetry::metrics;
use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{OwnedRwLockWriteGuard, RwLock, mpsc};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::timeout;

/// How long a Register may take to end before an offer, and a peer to take it, while the kubelet is not registered with: both take milliseconds.
const QUIET_WITHIN: Duration = Duration::from_secs(1);
/// How long a peer may take for its first message.
const FIRST_MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// Another instance wants to take over.
#[derive(Debug)]
pub struct Asked {
    /// It.
    pub peer: Peer,
    /// Its version.
    pub version: String,
    /// While this is held, no Register has the kubelet make a connection that was not offered.
    pub quiet: Option<OwnedRwLockWriteGuard<()>>,
}

/// What an offer is made of.
#[derive(Clone)]
pub struct Offer {
    /// Reads what the kubelet has open here.
    pub fds: Arc<dyn Fn() -> PassedFds + Send + Sync>,
    /// Read by each Register.
    pub registering: Arc<RwLock<()>>,
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offer").field("registering", &self.registering).finish_non_exhaustive()
    }
}

/// Listens for instances that want to take over, with at most `max` connections at a time. Without that the daemon works on, and logs it.
#[must_use]
pub fn listen(run_dir: &Path, offer: Offer, asked: mpsc::Sender<Asked>, max: usize) -> Option<JoinHandle<()>> {
    let path = socket_path(run_dir);
    match TrustedListener::bind(&path, || metrics::refused("handover")) {
        Ok(listener) => Some(tokio::spawn(accept(listener, offer, asked, max))),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "no handover socket: another instance cannot take over from this one");
            None
        }
    }
}

async fn accept(listener: TrustedListener, offer: Offer, asked: mpsc::Sender<Asked>, max: usize) {
    // They end with this task.
    let mut peers = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = tokio::select! {
            stream = listener.accept() => stream,
            Some(_ended) = peers.join_next() => continue,
        };
        oldest.retain(|peer| !peer.is_finished());
        if oldest.len() >= max
            && let Some(peer) = oldest.pop_front()
        {
            metrics::connection_evicted("handover");
            peer.abort();
        }
        oldest.push_back(peers.spawn(serve_peer(stream, offer.clone(), asked.clone())));
    }
}

/// Sends the offer, and hands the peer on when it takes.
async fn serve_peer(stream: UnixStream, Offer { fds, registering }: Offer, asked: mpsc::Sender<Asked>) {
    let mut peer = Peer::new(stream);
    let mut quiet = timeout(QUIET_WITHIN, registering.write_owned()).await.ok();
    let passed = fds();
    let fds = passed.labels();
    let offer = Message::Offer { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").into(), records: store::RECORDS, fds };
    if let Err(error) = peer.send(&offer, &passed.fds()).await {
        return tracing::warn!(%error, "the kubelet's connections cannot be passed to another instance");
    }
    drop(passed);
    let mut taken = timeout(QUIET_WITHIN, peer.recv()).await;
    if taken.is_err() {
        quiet = None;
        taken = timeout(FIRST_MESSAGE_WITHIN, peer.recv()).await;
    }
    if let Ok(Some(Message::Take { version })) = taken {
        // This side takes no descriptors.
        drop(peer.fds());
        // One after the other. A peer that has given up waiting is gone, which its handover notices.
        drop(asked.send(Asked { peer, version, quiet }).await);
    }
}
