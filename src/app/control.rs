//! The control socket: how the other verbs ask the running daemon. HTTP and JSON on `<run-dir>/control.sock`.

use super::{Status, Views};
use crate::domain::Grant;
use crate::messages::{Mailbox, Publish};
use crate::store::Store;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get as route;
use axum::{Json, Router};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;

/// How long a verb waits for the daemon.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

/// How long the ledger is waited for.
const PUBLISH_DEADLINE: Duration = Duration::from_secs(1);

pub(super) fn socket_path(run_dir: &Path) -> PathBuf {
    run_dir.join("control.sock")
}

/// What the daemon answers from.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) views: Views,
    pub(super) store: Arc<Mutex<Store>>,
    pub(super) started: Instant,
    pub(super) publish: Mailbox<Publish>,
}

impl Source {
    /// The views with everything that has been answered. A ledger that is stuck is not waited for long.
    async fn views(&self) -> &Views {
        if let Err(error) = self.publish.call(Publish, PUBLISH_DEADLINE).await {
            tracing::debug!(%error, "the grants may be a little old");
        }
        &self.views
    }
}

async fn grants(State(source): State<Source>) -> Json<Vec<Arc<Grant>>> {
    Json(source.views().await.grants.borrow().iter().map(Arc::clone).collect())
}

/// The history is read and written out on a thread that may wait, and without the store: Allocate needs both meanwhile.
async fn export(State(source): State<Source>) -> Result<impl IntoResponse, (StatusCode, String)> {
    let store = source.store;
    let failed = |error: String| (StatusCode::INTERNAL_SERVER_ERROR, error);
    let read = tokio::task::spawn_blocking(move || {
        let export = store.lock().unwrap_or_else(PoisonError::into_inner).exporter();
        let grants = export.and_then(|export| export.read()).map_err(|error| error.to_string())?;
        serde_json::to_vec(&grants).map_err(|error| error.to_string())
    });
    let body = read.await.map_err(|error| failed(error.to_string()))?.map_err(failed)?;
    Ok(([(CONTENT_TYPE, "application/json")], body))
}

async fn status(State(source): State<Source>) -> Json<Status> {
    Json(Status::of(source.views().await, source.started.elapsed()))
}

/// Serves the socket. Without it the daemon works on, and says so.
pub(super) fn serve(path: &Path, source: Source) -> Option<tokio::task::JoinHandle<()>> {
    let routes = Router::new()
        .route("/v1/grants", route(grants))
        .route("/v1/export", route(export))
        .route("/v1/status", route(status))
        .with_state(source);
    match bind(path) {
        Ok(listener) => Some(tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, routes).await {
                tracing::error!(%error, "the control socket failed");
            }
        })),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "no control socket: `who` and `status` cannot ask this daemon");
            None
        }
    }
}

/// Only root may ask: grants name pods. A file of an earlier daemon is in the way and goes; the ledger's lock has made
/// sure that this daemon is the only one.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Why the daemon could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// There is no daemon.
    #[error("no holdfast answers on `{}`: {source}", path.display())]
    Absent {
        /// The control socket.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// It answered with an error, or with something else than was asked for.
    #[error("holdfast on `{}` cannot answer: {why}", path.display())]
    Failed {
        /// The control socket.
        path: PathBuf,
        /// What came back.
        why: String,
    },
}

/// Asks the daemon of `run_dir` for `resource`, such as `/v1/status`.
///
/// # Errors
/// [`ControlError::Absent`] when no daemon listens.
pub async fn get<T: DeserializeOwned>(run_dir: &Path, resource: &str) -> Result<T, ControlError> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(source) if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Err(ControlError::Absent { path, source });
        }
        Err(error) => return Err(ControlError::Failed { path, why: format!("{error}; only root may ask") }),
    };
    let failed = |why: String| ControlError::Failed { path: path.clone(), why };
    let ask = async {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
        tokio::spawn(connection);
        let request = hyper::Request::get(resource).header("host", "localhost").body(Empty::<hyper::body::Bytes>::new());
        let answer = sender.send_request(request.map_err(|e| e.to_string())?).await.map_err(|e| e.to_string())?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
        if status.is_success() {
            serde_json::from_slice(&body).map_err(|error| format!("its answer is not understood: {error}"))
        } else {
            Err(String::from_utf8_lossy(&body).into_owned())
        }
    };
    tokio::time::timeout(ANSWER_DEADLINE, ask).await.map_err(|_| failed("no answer in time".into()))?.map_err(failed)
}
