//! The other side of the control socket: how a verb asks the running daemon.

use super::{Installed, Line, Order, Upgrade, socket_path};
use crate::store::{Told, Verification};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long a verb waits for the daemon, or for its next words.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How long another instance may take to start and to take over: it takes two seconds, most of them to be sure.
const HANDOVER_DEADLINE: Duration = Duration::from_secs(180);
/// How long it may take to read both copies of the ledger.
const VERIFY_DEADLINE: Duration = Duration::from_secs(300);

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
    get_within(run_dir, resource, ANSWER_DEADLINE).await
}

/// Has the daemon of `run_dir` check both copies of its ledger.
///
/// # Errors
/// As [`get`].
pub async fn verify(run_dir: &Path) -> Result<Verification, ControlError> {
    get_within(run_dir, "/v1/verify", VERIFY_DEADLINE).await
}

/// Has the daemon of `run_dir` do what an operator asks for; returns when it is durable.
///
/// # Errors
/// As [`get`].
pub async fn order(run_dir: &Path, order: &Order) -> Result<(), ControlError> {
    let ask = async |stream| {
        let order = serde_json::to_vec(order).map_err(|error| error.to_string())?;
        let request = hyper::Request::post("/v1/devices").header("content-type", "application/json");
        in_time(ANSWER_DEADLINE, send(stream, "/v1/devices", request, order)).await?.map(drop)
    };
    with(run_dir, ask).await
}

/// Has the daemon of `run_dir` hand over to another binary; returns when that one serves.
///
/// # Errors
/// As [`get`]; the former daemon then goes on, unless it says otherwise.
pub async fn hand_over(run_dir: &Path, upgrade: &Upgrade) -> Result<Installed, ControlError> {
    let ask = async |stream| {
        let upgrade = serde_json::to_vec(upgrade).map_err(|error| error.to_string())?;
        let request = hyper::Request::post("/v1/handover").header("content-type", "application/json");
        let body = in_time(HANDOVER_DEADLINE, send(stream, "/v1/handover", request, upgrade)).await??;
        let body = in_time(ANSWER_DEADLINE, body.collect()).await?.map_err(|error| error.to_string())?.to_bytes();
        serde_json::from_slice(&body).map_err(not_understood)
    };
    with(run_dir, ask).await
}

async fn get_within<T: DeserializeOwned>(run_dir: &Path, resource: &str, deadline: Duration) -> Result<T, ControlError> {
    let ask = async |stream| {
        let body = in_time(deadline, ask(stream, resource)).await??;
        let body = in_time(deadline, body.collect()).await?.map_err(|error| error.to_string())?.to_bytes();
        serde_json::from_slice(&body).map_err(not_understood)
    };
    with(run_dir, ask).await
}

/// Has the daemon of `run_dir` tell its ledger, until `take` says no more. Returns why the history is not whole, if it is not.
///
/// # Errors
/// As [`get`].
pub async fn read_ledger(run_dir: &Path, mut take: impl FnMut(Told) -> bool) -> Result<Option<String>, ControlError> {
    let ask = async |stream| {
        let mut body = in_time(ANSWER_DEADLINE, ask(stream, "/v1/ledger")).await??;
        let mut unread: Vec<u8> = Vec::new();
        while let Some(frame) = in_time(ANSWER_DEADLINE, body.frame()).await? {
            let frame = frame.map_err(|error| error.to_string())?.into_data().unwrap_or_default();
            unread.extend_from_slice(&frame);
            let whole = unread.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
            for line in unread[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                match serde_json::from_slice(line).map_err(not_understood)? {
                    Line::Told(told) => {
                        if !take(told) {
                            return Ok(None);
                        }
                    }
                    Line::End { problem } => return Ok(problem),
                }
            }
            unread.drain(..whole);
        }
        Err("it ended before everything was told".to_owned())
    };
    with(run_dir, ask).await
}

/// Connects, and says of whom it was that could not answer.
async fn with<T>(run_dir: &Path, ask: impl AsyncFnOnce(UnixStream) -> Result<T, String>) -> Result<T, ControlError> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(source) if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Err(ControlError::Absent { path, source });
        }
        Err(error) => {
            return Err(ControlError::Failed {
                path,
                why: format!("{error}; only root and whoever runs the daemon may ask: try it with `sudo`"),
            });
        }
    };
    ask(stream).await.map_err(|why| ControlError::Failed { path, why })
}

/// Asks for a resource. The body of the answer.
async fn ask(stream: UnixStream, resource: &str) -> Result<Incoming, String> {
    send(stream, resource, hyper::Request::get(resource), Vec::new()).await
}

/// Sends the request. The body of the answer.
async fn send(stream: UnixStream, resource: &str, request: hyper::http::request::Builder, body: Vec<u8>) -> Result<Incoming, String> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    tokio::spawn(connection);
    let request = request.header("host", "localhost").body(Full::new(Bytes::from(body)));
    let answer = sender.send_request(request.map_err(|e| e.to_string())?).await.map_err(|e| e.to_string())?;
    let status = answer.status();
    if status.is_success() {
        return Ok(answer.into_body());
    }
    let body = answer.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
    if status == hyper::StatusCode::NOT_FOUND {
        return Err(format!("it does not know `{resource}`: it is of another version than this `holdfast`"));
    }
    Err(String::from_utf8_lossy(&body).into_owned())
}

async fn in_time<T>(deadline: Duration, answer: impl Future<Output = T>) -> Result<T, String> {
    timeout(deadline, answer).await.map_err(|_| "no answer in time".into())
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn not_understood(error: serde_json::Error) -> String {
    format!("its answer is not understood: {error}")
}
