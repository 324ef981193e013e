//! The handover socket of the serving instance.

use super::PassedFds;
use super::wire::{Message, PROTOCOL, Peer, socket_path};
use crate::host::peer::KeptListener;
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

/// How long the offer waits for a Register in progress, and how long a peer may take to answer it
/// while no Register is made. Both take milliseconds.
const QUIET_WITHIN: Duration = Duration::from_secs(1);
/// How long a peer may take to send its first message.
const FIRST_MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// A request of another instance to take over.
#[derive(Debug)]
pub struct Asked {
    /// The connection to it.
    pub peer: Peer,
    /// Its version.
    pub version: String,
    /// While this lock is held, no Register makes the kubelet open a connection that is not in the
    /// offer.
    pub quiet: Option<OwnedRwLockWriteGuard<()>>,
}

/// The sources of an offer.
#[derive(Clone)]
pub struct Offer {
    /// Returns copies of the kubelet's connections and of our sockets.
    pub fds: Arc<dyn Fn() -> PassedFds + Send + Sync>,
    /// Why this instance must not hand over now.
    pub refusal: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    /// Locked for reading by each Register.
    pub registering: Arc<RwLock<()>>,
}

impl fmt::Debug for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Offer").field("registering", &self.registering).finish_non_exhaustive()
    }
}

/// Listens for instances that request a handover, with at most `max` connections at a time. If the
/// socket cannot be made, the daemon runs without it and logs a warning.
#[must_use]
pub fn listen(
    run_dir: &Path,
    offer: Offer,
    asked: mpsc::Sender<Asked>,
    max: usize,
) -> Option<JoinHandle<()>> {
    let path = socket_path(run_dir);
    match KeptListener::bind(&path, || metrics::refused("handover")) {
        Ok(listener) => Some(tokio::spawn(accept(listener, offer, asked, max))),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot create the handover socket; another instance cannot take over from this one");
            None
        }
    }
}

async fn accept(mut listener: KeptListener, offer: Offer, asked: mpsc::Sender<Asked>, max: usize) {
    // The peers' tasks end with this task.
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

/// Sends the offer. If the peer answers with `Take`, the peer is passed on to the daemon.
async fn serve_peer(
    stream: UnixStream,
    Offer { fds, refusal, registering }: Offer,
    asked: mpsc::Sender<Asked>,
) {
    let mut peer = Peer::new(stream);
    if let Some(why) = refusal() {
        tracing::warn!(pid = peer.pid, why, "handover request rejected");
        // A peer that has disconnected needs no answer.
        drop(peer.send(&Message::Refused { why }, &[]).await);
        return;
    }
    let mut quiet = timeout(QUIET_WITHIN, registering.write_owned()).await.ok();
    let passed = fds();
    let fds = passed.labels();
    let offer = Message::Offer {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").into(),
        records: store::RECORDS,
        fds,
    };
    if let Err(error) = peer.send(&offer, &passed.fds()).await {
        return tracing::warn!(%error, "cannot send the kubelet's connections to another instance");
    }
    drop(passed);
    let mut taken = timeout(QUIET_WITHIN, peer.recv()).await;
    if taken.is_err() {
        quiet = None;
        taken = timeout(FIRST_MESSAGE_WITHIN, peer.recv()).await;
    }
    if let Ok(Some(Message::Take { version })) = taken {
        // This side needs no descriptors from the peer.
        drop(peer.fds());
        // Peers are served one after the other. The handover notices a peer that has disconnected
        // while it waited.
        drop(asked.send(Asked { peer, version, quiet }).await);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_instance_that_must_not_hand_over_says_why() {
        for refusal in [None, Some("a scan has not ended")] {
            let (old, new) = UnixStream::pair().unwrap();
            let offer = Offer {
                fds: Arc::new(PassedFds::default),
                refusal: Arc::new(move || refusal.map(str::to_owned)),
                registering: Arc::default(),
            };
            let served = tokio::spawn(serve_peer(old, offer, mpsc::channel(1).0));
            let mut peer = Peer::new(new);
            match (peer.recv().await, refusal) {
                (Some(Message::Offer { .. }), None) => {}
                (Some(Message::Refused { why }), Some(wanted)) => assert_eq!(why, wanted),
                (other, _) => panic!("{other:?}"),
            }
            drop(peer);
            served.await.unwrap();
        }
    }
}
