//! The control socket: how the other verbs ask the running daemon. HTTP and JSON on `<run-dir>/control.sock`.
//!
//! What reads more than is in memory runs on a thread of its own, without the store: Allocate needs both meanwhile.

mod client;

pub use client::{ControlError, get, hand_over as ask_to_hand_over, order, read_ledger, verify};

use super::devices;
use super::processors;
use super::{Status, Views};
use crate::domain::{DeviceId, Grant, Instruction, Timestamp};
use crate::hook::Outputs;
use crate::host::peer::TrustedListener;
use crate::messages::{Instruct, InstructError, Mailbox, Publish};
use crate::store::{Export, Store, StoreError, Told, Verification};
use crate::telemetry::metrics;
use crate::telemetry::server::{self, Limits, Listener};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderName};
use axum::response::IntoResponse;
use axum::routing::{get as route, post};
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// How long the ledger is waited for.
const PUBLISH_DEADLINE: Duration = Duration::from_secs(1);

/// How long an operator's word may take to be durable: longer than the ledger is given for it.
const INSTRUCT_DEADLINE: Duration = Duration::from_secs(8);

/// What is told of the ledger at a time: the history is ten times as large as the whole daemon, and goes through it in pieces.
const CHUNK_BYTES: usize = 64 * 1024;
/// Pieces that may wait for the reader.
const CHUNKS_MAX: usize = 2;
/// How long a reader may take for one piece.
const READER_PATIENCE: Duration = Duration::from_secs(30);
/// How many may read the ledger at the same time. They are people and their scripts; each has a thread.
const READERS_MAX: usize = 4;
/// Bytes of the body of a request: an order, or the path of a binary and its arguments.
const BODY_BYTES_MAX: usize = 256 * 1024;
/// How long the head of a request may take. A verb sends it as soon as it has connected.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// The lifetime of a connection: longer than each wait of a verb (`client.rs`), and a history of hundreds of megabytes is read in less.
const LIFETIME: Duration = Duration::from_secs(15 * 60);
/// How often a ledger in use is looked at again that seems to be wrong.
const VERIFY_TRIES: usize = 2;

pub(super) fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

/// What the daemon answers from.
#[derive(Debug, Clone)]
pub(super) struct Source {
    views: Views,
    /// Not held: a question that takes long must not keep the ledger from whoever takes it over.
    store: Weak<Mutex<Store>>,
    started: Instant,
    publish: Mailbox<Publish>,
    instruct: Mailbox<Instruct>,
    processors: processors::Asker,
    upgrade: mpsc::Sender<UpgradeOrder>,
    /// What hooks and checks have written: only here it is told.
    outputs: Outputs,
    readers: Arc<Semaphore>,
}

impl Source {
    pub(super) fn new(
        views: Views,
        store: &Arc<Mutex<Store>>,
        publish: Mailbox<Publish>,
        instruct: Mailbox<Instruct>,
        processors: processors::Asker,
        upgrade: mpsc::Sender<UpgradeOrder>,
        outputs: Outputs,
    ) -> Self {
        let readers = Arc::new(Semaphore::new(READERS_MAX));
        let store = Arc::downgrade(store);
        Source { views, store, started: Instant::now(), publish, instruct, processors, upgrade, outputs, readers }
    }

    /// The views with everything that has been answered. A ledger that is stuck is not waited for long.
    async fn views(&self) -> &Views {
        if let Err(error) = self.publish.call(Publish, PUBLISH_DEADLINE).await {
            tracing::debug!(%error, "the grants may be a little old");
        }
        &self.views
    }

    fn store(&self) -> Result<Arc<Mutex<Store>>, Failure> {
        let given = || (StatusCode::SERVICE_UNAVAILABLE, "this instance has given its ledger to another one; ask again".to_owned());
        self.store.upgrade().ok_or_else(given)
    }

    /// Runs what reads the disk, behind everything that is more important.
    fn on_a_thread(&self, run: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
        let busy = |_| (StatusCode::SERVICE_UNAVAILABLE, "too many read the ledger already; ask again".to_owned());
        let leave = Arc::clone(&self.readers).try_acquire_owned().map_err(busy)?;
        let run = || {
            crate::host::step_back();
            run();
            drop(leave);
        };
        let none = |error| (StatusCode::SERVICE_UNAVAILABLE, format!("no thread can be had to read the ledger with: {error}; ask again"));
        thread::Builder::new().name("reader".into()).spawn(run).map(drop).map_err(none)
    }
}

async fn grants(State(source): State<Source>) -> Reply {
    let grants: Vec<Arc<Grant>> = source.views().await.grants.borrow().iter().map(Arc::clone).collect();
    reply(&grants)
}

/// One line of `/v1/ledger`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// A part of the ledger.
    Told(Told),
    /// The end, without which something is missing.
    End(LedgerEnd),
}

/// What is said of a ledger when all of it was told.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerEnd {
    /// Why the history is not whole, if it is not.
    pub problem: Option<String>,
    /// The latest release that was forgotten, of age or for the number of them; after it nothing was.
    #[serde(default)]
    pub forgotten_until: Option<Timestamp>,
}

type Failure = (StatusCode, String);

fn failure(error: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// What a route answers: a JSON document.
type Reply = Result<([(HeaderName, &'static str); 1], Vec<u8>), Failure>;

/// Axum's own `Json` writes and reads by kinds of code that nothing else here has, one for each type in a document.
fn reply(document: &impl Serialize) -> Reply {
    Ok(([(CONTENT_TYPE, "application/json")], serde_json::to_vec(document).map_err(failure)?))
}

fn asked<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| (StatusCode::BAD_REQUEST, format!("the request is not understood: {error}")))
}

async fn ledger(State(source): State<Source>) -> Result<impl IntoResponse, Failure> {
    let export = source.store()?.lock().unwrap_or_else(PoisonError::into_inner).exporter().map_err(failure)?;
    let (pieces, body) = mpsc::channel(CHUNKS_MAX);
    let runtime = Handle::current();
    // A reader that has gone, or stands still, gets nothing more.
    let send = move |piece: Vec<u8>| {
        let sent = runtime.block_on(async { timeout(READER_PATIENCE, pieces.send(Bytes::from(piece))).await });
        matches!(sent, Ok(Ok(())))
    };
    source.on_a_thread(move || tell(export, send))?;
    let body = Body::from_stream(ReceiverStream::new(body).map(Ok::<_, Infallible>));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body))
}

/// Writes an export out, line by line.
fn tell(export: Export, send: impl Fn(Vec<u8>) -> bool) {
    let mut piece = Vec::with_capacity(CHUNK_BYTES);
    let mut is_heard = true;
    let read = export.read(|told| {
        write(&mut piece, &Line::Told(told));
        if piece.len() >= CHUNK_BYTES {
            is_heard = send(std::mem::replace(&mut piece, Vec::with_capacity(CHUNK_BYTES)));
        }
        is_heard
    });
    if is_heard {
        let end = match read {
            Ok(forgotten_until) => LedgerEnd { problem: None, forgotten_until },
            Err(error) => LedgerEnd { problem: Some(error.to_string()), forgotten_until: None },
        };
        write(&mut piece, &Line::End(end));
        send(piece);
    }
}

fn write(piece: &mut Vec<u8>, line: &Line) {
    // Memory takes everything, and every map of a grant has strings for keys.
    drop(serde_json::to_writer(&mut *piece, line));
    piece.push(b'\n');
}

async fn verify_ledger(State(source): State<Source>) -> Reply {
    let (answer, verified) = oneshot::channel();
    let store = source.store()?;
    source.on_a_thread(move || {
        let verify = || store.lock().unwrap_or_else(PoisonError::into_inner).verifier().verify();
        let is_in_doubt = |found: &Result<Verification, StoreError>| found.as_ref().is_ok_and(|found| !found.sound);
        // Entries, segments and a checkpoint may come between two looks. What is really wrong is wrong every time.
        let found = (0..VERIFY_TRIES).map(|_| verify()).find(|found| !is_in_doubt(found)).unwrap_or_else(verify);
        // Nobody listens any more when the verb has gone.
        drop(answer.send(found));
    })?;
    reply(&verified.await.map_err(failure)?.map_err(failure)?)
}

async fn processors(State(source): State<Source>) -> Reply {
    reply(&source.processors.ask().await)
}

/// What an operator asks for, of which device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The device's own id.
    pub device: DeviceId,
    /// What.
    #[serde(flatten)]
    pub instruction: Instruction,
}

async fn devices(State(source): State<Source>) -> Reply {
    let mut reports = devices::reports(&source.views);
    devices::add_words(&mut reports, &source.views, &source.outputs);
    reply(&reports)
}

async fn instruct(State(source): State<Source>, body: Bytes) -> Reply {
    let Order { device, instruction } = asked(&body)?;
    match source.instruct.call(Instruct { device, instruction }, INSTRUCT_DEADLINE).await {
        Ok(Ok(())) => reply(&()),
        Ok(Err(error @ InstructError::Unknown(_))) => Err((StatusCode::BAD_REQUEST, error.to_string())),
        Ok(Err(error)) => Err(failure(error)),
        Err(error) => Err(failure(error)),
    }
}

/// What `holdfast handover` asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// The binary to be started: the one that asks.
    pub executable: PathBuf,
}

/// The answer to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Installed {
    /// The version that has handed over.
    pub from: String,
    /// The version that serves now.
    pub to: String,
    /// Its process.
    pub pid: u32,
}

/// A request for an upgrade.
#[derive(Debug)]
pub struct UpgradeOrder {
    /// The request.
    pub upgrade: Upgrade,
    /// For the answer, or why there is no handover.
    pub answer: oneshot::Sender<Result<Installed, String>>,
    /// Ends when the answer has been written.
    pub written: oneshot::Receiver<()>,
}

/// Answered when another instance serves, or when this one does again.
async fn hand_over(State(source): State<Source>, body: Bytes) -> Result<impl IntoResponse, Failure> {
    let upgrade: Upgrade = asked(&body)?;
    let (answer, installed) = oneshot::channel();
    let (writing, written) = oneshot::channel::<()>();
    source.upgrade.send(UpgradeOrder { upgrade, answer, written }).await.map_err(failure)?;
    let answer = serde_json::to_vec(&installed.await.map_err(failure)?.map_err(failure)?).map_err(failure)?;
    // The connection drops a body in the same step in which it writes the end of it.
    let body = futures_util::stream::once(async move {
        drop(writing);
        Ok::<_, Infallible>(answer)
    });
    Ok(([(CONTENT_TYPE, "application/json")], Body::from_stream(body)))
}

async fn status(State(source): State<Source>) -> Reply {
    let mut status = Status::of(source.views().await, source.started.elapsed());
    devices::add_words(&mut status.ailing, &source.views, &source.outputs);
    reply(&status)
}

/// Serves the socket, with so many connections at a time. Without it the daemon works on, and says so.
pub(super) fn serve(path: &Path, source: Source, connections: usize) -> Option<tokio::task::JoinHandle<()>> {
    let routes = Router::new()
        .route("/v1/grants", route(grants))
        .route("/v1/ledger", route(ledger))
        .route("/v1/verify", route(verify_ledger))
        .route("/v1/processors", route(processors))
        .route("/v1/devices", route(devices).post(instruct))
        .route("/v1/status", route(status))
        .route("/v1/handover", post(hand_over))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(source);
    let limits = Limits { socket: "control", connections, head_within: HEAD_WITHIN, lifetime: LIFETIME, bodies: true };
    // Grants name pods. A file of an earlier daemon goes: the ledger's lock has made sure that this one is the only one.
    match TrustedListener::bind(path, || metrics::refused("control")) {
        Ok(listener) => Some(tokio::spawn(server::serve(Listener::Unix(listener), routes, limits))),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "no control socket: `who` and `status` cannot ask this daemon");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_not_understood_is_the_askers_mistake() {
        for body in ["", "{", "[]", r#"{"device":"a"}"#] {
            let (status, why) = asked::<Order>(&Bytes::from(body)).unwrap_err();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
            assert!(why.starts_with("the request is not understood: "), "{why}");
        }
    }
}
