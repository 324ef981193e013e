//! The control socket `<run-dir>/control.sock`: HTTP and JSON by which the other verbs query the
//! daemon.
//!
//! A request that reads more than memory runs on a thread of its own and does not hold the store's
//! lock. An Allocate needs the gRPC thread and the store at the same time.

mod client;
mod document;
mod ledger;

pub use client::{
    ControlError, get, hand_over as ask_to_hand_over, order, read_ledger, release as release_claim,
    verify,
};
pub use document::{Installed, LedgerEnd, Order, ReleaseOrder, Upgrade};

use self::ledger::{stream, verify as verify_ledger};
use super::apis::ApisReport;
use super::devices;
use super::processors;
use super::status::pending_reports;
use super::{Status, Views};
use crate::domain::{DRA_DRIVER, Grant, NotReleased, OperatorRequest};
use crate::hook::Outputs;
use crate::host::peer::KeptListener;
use crate::kubelet::dra::state::read_record;
use crate::messages::{
    ApplyOperatorRequest, CallError, FindPending, Mailbox, OperatorRequestError, Publish,
    ReleaseStuck,
};
use crate::store::Store;
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
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::Instant;

/// How long a request waits until the ledger has published its grants.
const PUBLISH_DEADLINE: Duration = Duration::from_secs(1);

/// How long an operator's order may take to become durable: longer than the ledger's own limit.
const OPERATOR_DEADLINE: Duration = Duration::from_secs(8);

/// How many clients may read the ledger at the same time: people and their scripts. Each takes a
/// thread.
const READERS_MAX: usize = 4;
/// Bytes of a request body: an order, or the path of a binary with its arguments.
const BODY_BYTES_MAX: usize = 256 * 1024;
/// How long the head of a request may take. A verb sends it as soon as it has connected.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// The lifetime of a connection. It is longer than every wait of a verb (`client.rs`), and a
/// history of hundreds of megabytes takes less time to read.
const LIFETIME: Duration = Duration::from_secs(15 * 60);
pub(crate) fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

/// The actors that orders go to.
#[derive(Debug, Clone)]
pub(crate) struct Mailboxes {
    pub(crate) publish: Mailbox<Publish>,
    pub(crate) pending: Mailbox<FindPending>,
    pub(crate) operator: Mailbox<ApplyOperatorRequest>,
    pub(crate) release: Mailbox<ReleaseStuck>,
}

/// The state that the routes answer from.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    views: Views,
    /// Weak: a long request must not keep the ledger from an instance that takes it over.
    store: Weak<Mutex<Store>>,
    started: Instant,
    mailboxes: Mailboxes,
    /// The kubelet's `--root-dir`.
    kubelet_root: PathBuf,
    processors: processors::CpuQuery,
    upgrade: mpsc::Sender<UpgradeOrder>,
    /// The output of hooks and checks. Only the control socket shows it.
    outputs: Outputs,
    readers: Arc<Semaphore>,
}

impl Source {
    pub(crate) fn new(
        views: Views,
        store: &Arc<Mutex<Store>>,
        mailboxes: Mailboxes,
        kubelet_root: PathBuf,
        processors: processors::CpuQuery,
        upgrade: mpsc::Sender<UpgradeOrder>,
        outputs: Outputs,
    ) -> Self {
        let readers = Arc::new(Semaphore::new(READERS_MAX));
        let store = Arc::downgrade(store);
        Source {
            views,
            store,
            started: Instant::now(),
            mailboxes,
            kubelet_root,
            processors,
            upgrade,
            outputs,
            readers,
        }
    }

    /// The views, with every grant that was answered so far.
    async fn views(&self) -> &Views {
        drop(self.refresh().await);
        &self.views
    }

    /// Refreshes the views. After an error they may be slightly out of date.
    async fn refresh(&self) -> Result<(), CallError> {
        let answer = self.mailboxes.publish.call(Publish, PUBLISH_DEADLINE).await;
        answer.inspect_err(|error| tracing::debug!(%error, "cannot refresh the grants"))
    }

    fn store(&self) -> Result<Arc<Mutex<Store>>, Failure> {
        let passed_on = || {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                "this instance has passed its ledger to another one; try again".to_owned(),
            )
        };
        self.store.upgrade().ok_or_else(passed_on)
    }

    /// Runs a short function on the store. Its lock is held while a slow disk writes, so no thread
    /// that answers the kubelet may wait for it.
    async fn with_store<T: Send + 'static>(
        &self,
        run: impl FnOnce(&Store) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let store = self.store()?;
        let run = move || run(&store.lock().unwrap_or_else(PoisonError::into_inner));
        tokio::task::spawn_blocking(run).await.map_err(failure)
    }

    /// Runs a function that reads the disk on a thread of low priority.
    fn on_a_thread(&self, run: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
        let busy = |_| {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                "too many clients are reading the ledger; try again".to_owned(),
            )
        };
        let leave = Arc::clone(&self.readers).try_acquire_owned().map_err(busy)?;
        let run = || {
            crate::host::lower_thread_priority();
            run();
            drop(leave);
        };
        let none = |error| {
            (
                StatusCode::SERVICE_UNAVAILABLE,
                format!("cannot start a thread to read the ledger: {error}; try again"),
            )
        };
        thread::Builder::new().name("reader".into()).spawn(run).map(drop).map_err(none)
    }
}

async fn grants(State(source): State<Source>) -> Reply {
    let grants: Vec<Arc<Grant>> =
        source.views().await.grants.borrow().iter().map(Arc::clone).collect();
    reply(&grants)
}

async fn releases(State(source): State<Source>) -> Reply {
    let asked = source.mailboxes.pending.call(FindPending, PUBLISH_DEADLINE).await;
    reply(&asked.map_err(failure)?)
}

type Failure = (StatusCode, String);

fn failure(error: impl std::fmt::Display) -> Failure {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// The answer of a route: a JSON document.
type Reply = Result<([(HeaderName, &'static str); 1], Vec<u8>), Failure>;

/// Replaces axum's `Json`, whose generic code is compiled once for each type in a document and is
/// used by nothing else here.
fn reply(document: &impl Serialize) -> Reply {
    Ok(([(CONTENT_TYPE, "application/json")], serde_json::to_vec(document).map_err(failure)?))
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Result<T, Failure> {
    serde_json::from_slice(body)
        .map_err(|error| (StatusCode::BAD_REQUEST, format!("the request is invalid: {error}")))
}

async fn processors(State(source): State<Source>) -> Reply {
    // `who` has just refreshed them.
    let grants = Arc::clone(&source.views.grants.borrow());
    reply(&source.processors.run(&grants).await)
}

async fn devices(State(source): State<Source>) -> Reply {
    let mut reports = devices::reports(&source.views);
    devices::add_restricted(&mut reports, &source.views, &source.outputs);
    reply(&reports)
}

async fn apis(State(source): State<Source>) -> Reply {
    reply(&ApisReport::of(source.views().await))
}

async fn instruct(State(source): State<Source>, body: Bytes) -> Reply {
    let Order { device, instruction } = parsed(&body)?;
    let evicts = matches!(instruction, OperatorRequest::CordonAndEvict { .. });
    if let Some(why) = evicts.then(|| source.views.evicts_nothing(&device)).flatten() {
        return Err((StatusCode::CONFLICT, why));
    }
    let request = ApplyOperatorRequest { device, request: instruction };
    match source.mailboxes.operator.call(request, OPERATOR_DEADLINE).await {
        Ok(Ok(())) => reply(&()),
        Ok(Err(error @ OperatorRequestError::Unknown(_))) => {
            Err((StatusCode::BAD_REQUEST, error.to_string()))
        }
        Ok(Err(error)) => Err(failure(error)),
        Err(error) => Err(failure(error)),
    }
}

async fn release(State(source): State<Source>, body: Bytes) -> Reply {
    let ReleaseOrder { claim, force } = parsed(&body)?;
    let root = source.kubelet_root.clone();
    let kept = tokio::task::spawn_blocking(move || read_record(&root, DRA_DRIVER)).await;
    // What cannot be read is not known. The operator vouches for the claim.
    let kept = kept.ok().and_then(Result::ok).map(Arc::new);
    let request = ReleaseStuck { claim, is_confirmed: force, kept };
    match source.mailboxes.release.call(request, OPERATOR_DEADLINE).await {
        Ok(Ok(claim)) => reply(&claim),
        Ok(Err(error @ NotReleased::NotRecorded(_))) => Err(failure(error)),
        Ok(Err(error)) => Err((StatusCode::CONFLICT, error.to_string())),
        Err(error) => Err(failure(error)),
    }
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

/// Answers when another instance serves, or when this one serves again.
async fn hand_over(
    State(source): State<Source>,
    body: Bytes,
) -> Result<impl IntoResponse, Failure> {
    let upgrade: Upgrade = parsed(&body)?;
    let (answer, installed) = oneshot::channel();
    let (writing, written) = oneshot::channel::<()>();
    source.upgrade.send(UpgradeOrder { upgrade, answer, written }).await.map_err(failure)?;
    let answer = serde_json::to_vec(&installed.await.map_err(failure)?.map_err(failure)?)
        .map_err(failure)?;
    // The connection drops a body in the same step in which it writes the end of it.
    let body = futures_util::stream::once(async move {
        drop(writing);
        Ok::<_, Infallible>(answer)
    });
    Ok(([(CONTENT_TYPE, "application/json")], Body::from_stream(body)))
}

async fn status(State(source): State<Source>) -> Reply {
    let ledger_hangs = matches!(source.refresh().await, Err(CallError::TimedOut(..)));
    let status = Status::of(&source.views, source.started.elapsed());
    let mut status = Status { ledger_hangs, ..status };
    devices::add_restricted(&mut status.ailing, &source.views, &source.outputs);
    // Without an answer, the states of the grants show what is known.
    let asked = source.mailboxes.pending.call(FindPending, PUBLISH_DEADLINE).await;
    status.pending_releases = pending_reports(&source.views, &asked.unwrap_or_default());
    reply(&status)
}

/// Serves the socket, with at most `connections` connections at a time. If the socket cannot be
/// bound, the daemon logs a warning and continues without it.
pub(crate) fn serve(
    path: &Path,
    source: Source,
    connections: usize,
) -> Option<tokio::task::JoinHandle<()>> {
    let routes = Router::new()
        .route("/v1/grants", route(grants))
        .route("/v1/releases", route(releases))
        .route("/v1/ledger", route(stream))
        .route("/v1/verify", route(verify_ledger))
        .route("/v1/processors", route(processors))
        .route("/v1/devices", route(devices).post(instruct))
        .route("/v1/claims", post(release))
        .route("/v1/status", route(status))
        .route("/v1/apis", route(apis))
        .route("/v1/handover", post(hand_over))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(source);
    let limits = Limits {
        socket: "control",
        connections,
        head_within: HEAD_WITHIN,
        lifetime: LIFETIME,
        bodies: true,
    };
    // Grants contain pod names, so access is restricted. The socket file of an earlier daemon is
    // replaced: the ledger's lock guarantees that no other daemon runs.
    match KeptListener::bind(path, || metrics::refused("control")) {
        Ok(listener) => {
            Some(tokio::spawn(server::serve(Listener::Unix(listener), routes, None, limits)))
        }
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "cannot open the control socket; `who` and `status` cannot query this daemon");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_request_is_the_clients_error() {
        for body in ["", "{", "[]", r#"{"device":"a"}"#] {
            let (status, why) = parsed::<Order>(&Bytes::from(body)).unwrap_err();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
            assert!(why.starts_with("the request is invalid: "), "{why}");
        }
    }
}
