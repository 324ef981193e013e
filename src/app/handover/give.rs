//! OLD's side: gives the ledger and the kubelet away, and takes both back when the other one is gone.

use super::super::ending::Frozen;
use super::super::{App, Settings, StartError};
use super::start_when_free;
use super::wire::{Heard, PROTOCOL, Peer, Word, socket_path};
use crate::domain::ResourceName;
use crate::domain::limits::ConnectionLimits;
use crate::host;
use crate::host::peer::TrustedListener;
use crate::serving::Sockets;
use crate::store::StoreError;
use crate::telemetry::{http, metrics};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

/// How long somebody who connects may take to say what is wanted.
const FIRST_WORD_WITHIN: Duration = Duration::from_secs(10);
/// How long another process may hold the ledger before that is said.
const LOCKED_FOR: Duration = Duration::from_secs(1);
/// How long this instance may take to be registered again before the streams of its former life end.
const BACK_WITHIN: Duration = Duration::from_secs(10);
/// How long a handover that is under way may take when this instance is to end: a second and a half are usual.
const COMPLETED_WITHIN: Duration = Duration::from_secs(5);
/// How long a successor of our own making may be at one step. A start takes a tenth of a second.
const STEP_MAX: Duration = Duration::from_secs(60);

/// Another instance wants to take over.
#[derive(Debug)]
pub struct Asked {
    peer: Peer,
    version: String,
}

impl Asked {
    /// Whether it is this process.
    #[must_use]
    pub fn is_of(&self, child: &Child) -> bool {
        self.peer.pid.is_some() && child.id() == self.peer.pid
    }
}

/// How a handover ended.
#[derive(Debug)]
pub enum Given {
    /// The other instance serves, and this one is to end.
    Left {
        /// The other one's version.
        version: String,
        /// What the other one hears the end of, when this one has nothing more to say about it.
        connection: Connection,
    },
    /// This one was told to end meanwhile, and has.
    Stopped,
    /// The other one is gone, and this one serves again.
    Back(Box<App>),
}

/// The connection to the other instance; it ends when this is dropped.
#[derive(Debug)]
pub struct Connection(#[expect(dead_code, reason = "held, for the other one to hear its end")] Peer);

/// Listens for instances that want to take over, with so many connections at a time. Without that the daemon works on, and says so.
pub(in super::super) fn listen(run_dir: &Path, sockets: Arc<Sockets>, asked: mpsc::Sender<Asked>, most: usize) -> Option<JoinHandle<()>> {
    let path = socket_path(run_dir);
    match TrustedListener::bind(&path, || metrics::refused("handover")) {
        Ok(listener) => Some(tokio::spawn(accept(listener, sockets, asked, most))),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "no handover socket: another instance cannot take over from this one");
            None
        }
    }
}

async fn accept(listener: TrustedListener, sockets: Arc<Sockets>, asked: mpsc::Sender<Asked>, most: usize) {
    // They end with this task.
    let mut conversations = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = tokio::select! {
            stream = listener.accept() => stream,
            Some(_ended) = conversations.join_next() => continue,
        };
        oldest.retain(|conversation| !conversation.is_finished());
        if oldest.len() >= most
            && let Some(conversation) = oldest.pop_front()
        {
            metrics::connection_evicted("handover");
            conversation.abort();
        }
        oldest.push_back(conversations.spawn(hear_out(stream, Arc::clone(&sockets), asked.clone())));
    }
}

/// Offers, and hands on whoever takes.
async fn hear_out(stream: UnixStream, sockets: Arc<Sockets>, asked: mpsc::Sender<Asked>) {
    let mut peer = Peer::new(stream);
    if hand_on(&mut peer, &sockets, offer).await.is_err() {
        return;
    }
    drop(sockets);
    if let Heard::Word(Word::Take { version }) = peer.hear_within(FIRST_WORD_WITHIN).await {
        // This side takes no files.
        drop(peer.files());
        // One after the other; who has waited too long has gone by then, which is heard.
        drop(asked.send(Asked { peer, version }).await);
    }
}

/// What there is to take over.
fn offer(sockets: Vec<ResourceName>, lists: Vec<u32>) -> Word {
    Word::Offer { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").into(), records: crate::store::RECORDS, sockets, lists }
}

/// Says something, and has the other one hold open what the kubelet has open here.
async fn hand_on(peer: &mut Peer, sockets: &Sockets, word: fn(Vec<ResourceName>, Vec<u32>) -> Word) -> io::Result<()> {
    let open = sockets.open();
    let resources = open.listening.iter().map(|(resource, _)| resource.clone()).collect();
    let whole = word(resources, open.connections.iter().map(|connection| connection.lists).collect());
    let Err(error) = peer.tell_with(&whole, &open.files()).await else { return Ok(()) };
    tracing::warn!(%error, "the kubelet's connections cannot be handed on; it will notice the end of this instance");
    peer.tell(&word(Vec::new(), Vec::new())).await
}

/// Hands over to the one that asked. `own` is its process if this one has started it: it is killed when it does not get on,
/// and this instance ends when it is done. Otherwise this one stands by until `stop`, or until the other one is gone.
///
/// # Errors
/// When the other one is gone and this one cannot start again.
pub async fn give(
    app: App,
    asked: Asked,
    settings: &Settings,
    own: Option<&mut Child>,
    stop: impl Future<Output = ()>,
) -> Result<Given, StartError> {
    let Asked { mut peer, version } = asked;
    tracing::info!(version, pid = peer.pid, "handing over to another instance");
    let sockets = Arc::clone(&app.sockets);
    let frozen = app.freeze().await;
    let confirmed = Notify::new();
    let handed_over = async {
        // Where this fails the other one is gone, which is heard next.
        drop(hand_on(&mut peer, &sockets, |sockets, lists| Word::Yours { sockets, lists }).await);
        if converse(&mut peer, &frozen, sockets.directory(), settings, own, &confirmed).await {
            frozen.leave().await;
            return Ok(Given::Left { version, connection: Connection(peer) });
        }
        drop(peer);
        Ok(Given::Back(Box::new(take_back(&frozen, settings).await?)))
    };
    tokio::pin!(handed_over);
    tokio::select! {
        given = &mut handed_over => return given,
        () = stop => {}
    }
    // Whoever ends this one because the other one is ready may be a moment early.
    let over = async {
        tokio::select! {
            given = &mut handed_over => Some(given),
            () = confirmed.notified() => None,
        }
    };
    match tokio::time::timeout(COMPLETED_WITHIN, over).await {
        Ok(Some(Ok(Given::Back(app)))) => app.shut_down().await,
        Ok(Some(given)) => return given,
        Ok(None) | Err(_) => frozen.leave().await,
    }
    Ok(Given::Stopped)
}

/// Does what the other one says. Whether this instance is to end; otherwise the other one is gone.
async fn converse(
    peer: &mut Peer,
    frozen: &Frozen,
    sockets: &Path,
    settings: &Settings,
    mut own: Option<&mut Child>,
    confirmed: &Notify,
) -> bool {
    let mut standby = JoinSet::new();
    loop {
        let heard = match own {
            Some(_) => peer.hear_within(STEP_MAX).await,
            // Whoever started it watches it.
            None => peer.hear().await.map_or(Heard::Gone, Heard::Word),
        };
        match heard {
            Heard::Word(Word::Serving { sockets: names }) => {
                frozen.pass_on(Arc::new(below(sockets, names)));
                // Whoever probes this instance still finds it alive, where the other one has not the same address.
                if let Some(address) = settings.config.listen {
                    standby.spawn(http::stand_by(address, ConnectionLimits::of(host::open_files()).telemetry));
                }
            }
            Heard::Word(Word::Leave) => {
                frozen.end_streams().await;
                drop(peer.tell(&Word::Left).await);
            }
            Heard::Word(Word::Keep) => frozen.stay_open(),
            Heard::Word(Word::Confirmed) => {
                tracing::info!("handed over: the other instance has the ledger and the kubelet");
                confirmed.notify_one();
                if own.is_some() {
                    return true;
                }
                tracing::info!("standing by until SIGTERM, to serve again if the other instance ends");
            }
            Heard::Word(word) => tracing::warn!(?word, "this is not the other instance's to say"),
            Heard::Gone => {
                tracing::warn!("the instance that took over is gone; serving again");
                return false;
            }
            Heard::Nothing => {
                tracing::error!("the instance that takes over does not get on and is killed; serving again");
                if let Some(child) = own.as_mut() {
                    // One that is gone already is as good.
                    drop(child.kill().await);
                }
                return false;
            }
        }
    }
}

/// Where the names of files lead, in our own directory only.
fn below(directory: &Path, names: BTreeMap<ResourceName, String>) -> BTreeMap<ResourceName, PathBuf> {
    let is_plain = |name: &str| Path::new(name).file_name().is_some_and(|file| file == name);
    names.into_iter().filter(|(_, name)| is_plain(name)).map(|(resource, name)| (resource, directory.join(name))).collect()
}

/// Starts anew in this process; what still waits, and the kubelet, go to the new start.
async fn take_back(frozen: &Frozen, settings: &Settings) -> Result<App, StartError> {
    let mut said = false;
    let app = loop {
        match start_when_free(settings, LOCKED_FOR).await {
            Err(StartError::Store(StoreError::InUse { .. })) => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!("another process has the ledger; standing by until it lets go of it");
                }
                tokio::time::sleep(LOCKED_FOR).await;
            }
            done => break done?,
        }
    };
    let mut ready = app.views.ready.clone();
    if !matches!(tokio::time::timeout(BACK_WITHIN, ready.wait_for(|ready| *ready)).await, Ok(Ok(_))) {
        tracing::warn!("not every resource is registered again yet");
    }
    frozen.pass_on(Arc::new(below(app.sockets.directory(), app.sockets.newest())));
    frozen.end_streams().await;
    Ok(app)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_of_the_other_instance_lies_in_the_common_directory() {
        let resource = |name: &str| name.parse::<ResourceName>().unwrap();
        let named = |name: &str| BTreeMap::from([(resource("example.com/gpu"), name.to_owned())]);
        let dir = Path::new("/var/lib/kubelet/device-plugins/.holdfast");
        assert_eq!(below(dir, named("gpu-1.sock"))[&resource("example.com/gpu")], dir.join("gpu-1.sock"));
        for elsewhere in ["../kubelet.sock", "/run/other.sock", "", "..", "a/b"] {
            assert!(below(dir, named(elsewhere)).is_empty(), "{elsewhere}");
        }
    }
}
