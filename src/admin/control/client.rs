//! The client side of the control socket: how a verb queries the running daemon.

use super::document::{Installed, LedgerEnd, Line, Order, ReleaseOrder, Upgrade};
use super::socket_path;
use crate::domain::ClaimRef;
use crate::store::{ExportLine, Verification};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// How long a verb waits for the daemon, or for the next bytes of an answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How long a handover may take. It takes two seconds, most of them to make sure that the new
/// instance serves.
const HANDOVER_DEADLINE: Duration = Duration::from_secs(180);
/// How long reading both copies of the ledger may take.
const VERIFY_DEADLINE: Duration = Duration::from_secs(300);

/// The error when the daemon ends while it sends its ledger.
const INCOMPLETE: &str = "the answer was incomplete";

/// Why the daemon could not be queried.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No daemon runs.
    #[error("no holdfast daemon answers on `{}`: {source}", path.display())]
    Absent {
        /// The control socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The daemon answered with an error, or with an answer that does not fit the request.
    #[error("the holdfast daemon on `{}`: {why}", path.display())]
    Failed {
        /// The control socket.
        path: PathBuf,
        /// The daemon's error.
        why: String,
    },
}

/// Queries the daemon of `run_dir` for `resource`, such as `/v1/status`.
///
/// # Errors
/// [`ControlError::Absent`] when no daemon listens.
pub async fn get<T: DeserializeOwned>(run_dir: &Path, resource: &str) -> Result<T, ControlError> {
    get_within(run_dir, resource, ANSWER_DEADLINE).await
}

/// Makes the daemon of `run_dir` verify both copies of its ledger.
///
/// # Errors
/// As [`get`].
pub async fn verify(run_dir: &Path) -> Result<Verification, ControlError> {
    get_within(run_dir, "/v1/verify", VERIFY_DEADLINE).await
}

/// Makes the daemon of `run_dir` carry out an operator's order. Returns when the order is durable.
///
/// # Errors
/// As [`get`].
pub async fn order(run_dir: &Path, order: &Order) -> Result<(), ControlError> {
    post(run_dir, "/v1/devices", order, ANSWER_DEADLINE).await
}

/// Makes the daemon of `run_dir` release a claim. Returns the claim when that is durable.
///
/// # Errors
/// As [`get`], and when the claim may be in use.
pub async fn release(run_dir: &Path, order: &ReleaseOrder) -> Result<ClaimRef, ControlError> {
    post(run_dir, "/v1/claims", order, ANSWER_DEADLINE).await
}

/// Makes the daemon of `run_dir` hand over to another binary. Returns when that instance serves.
///
/// # Errors
/// As [`get`]. The former daemon then continues to serve, unless its error states otherwise.
pub async fn hand_over(run_dir: &Path, upgrade: &Upgrade) -> Result<Installed, ControlError> {
    post(run_dir, "/v1/handover", upgrade, HANDOVER_DEADLINE).await
}

/// Sends a document, and reads the answer. The daemon may take until `deadline` to carry it out.
async fn post<T: DeserializeOwned>(
    run_dir: &Path,
    resource: &str,
    document: &impl Serialize,
    deadline: Duration,
) -> Result<T, ControlError> {
    let query = async |stream| {
        let document = serde_json::to_vec(document).map_err(|error| error.to_string())?;
        let request = hyper::Request::post(resource).header("content-type", "application/json");
        let body = in_time(deadline, send(stream, resource, request, document)).await??;
        parsed(body, ANSWER_DEADLINE).await
    };
    with(run_dir, query).await
}

/// The document of an answer.
async fn parsed<T: DeserializeOwned>(body: Incoming, deadline: Duration) -> Result<T, String> {
    let body = in_time(deadline, body.collect()).await?.map_err(|error| error.to_string())?;
    serde_json::from_slice(&body.to_bytes()).map_err(invalid_answer)
}

async fn get_within<T: DeserializeOwned>(
    run_dir: &Path,
    resource: &str,
    deadline: Duration,
) -> Result<T, ControlError> {
    let query = async |stream| {
        let body = in_time(deadline, query(stream, resource)).await??;
        parsed(body, deadline).await
    };
    with(run_dir, query).await
}

/// Reads the ledger of the daemon of `run_dir`, until the end or until `take` returns false.
/// Returns the last line of the ledger.
///
/// # Errors
/// As [`get`]; [`ControlError::Absent`] only before the first line was read.
pub async fn read_ledger(
    run_dir: &Path,
    mut take: impl FnMut(ExportLine) -> bool,
) -> Result<LedgerEnd, ControlError> {
    let mut has_read = false;
    let query = async |stream| {
        let mut body = in_time(ANSWER_DEADLINE, query(stream, "/v1/ledger")).await??;
        let mut unread: Vec<u8> = Vec::new();
        while let Some(frame) = in_time(ANSWER_DEADLINE, body.frame()).await? {
            let frame = frame.map_err(|error| error.to_string())?.into_data().unwrap_or_default();
            unread.extend_from_slice(&frame);
            let whole = unread.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
            for line in unread[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty())
            {
                match serde_json::from_slice(line).map_err(invalid_answer)? {
                    Line::Part(part) => {
                        has_read = true;
                        if !take(part) {
                            return Ok(LedgerEnd::default());
                        }
                    }
                    Line::End(end) => return Ok(end),
                }
            }
            unread.drain(..whole);
        }
        Err(INCOMPLETE.to_owned())
    };
    with(run_dir, query).await.map_err(|error| match error {
        ControlError::Absent { path, .. } if has_read => {
            ControlError::Failed { path, why: INCOMPLETE.to_owned() }
        }
        error => error,
    })
}

/// Connects and runs `query`. An error names the socket that could not answer.
async fn with<T>(
    run_dir: &Path,
    query: impl AsyncFnOnce(UnixStream) -> Result<T, String>,
) -> Result<T, ControlError> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(source) if is_absence(&source) => return Err(ControlError::Absent { path, source }),
        Err(error) => {
            let todo = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "; only root and the user of the daemon have access, so use `sudo`"
                }
                io::ErrorKind::NotADirectory => "; name the daemon's directory with `--run-dir`",
                _ => "",
            };
            return Err(ControlError::Failed { path, why: format!("{error}{todo}") });
        }
    };
    match query(stream).await {
        Ok(answer) => Ok(answer),
        // The daemon may have died while it answered, and then no daemon is left.
        Err(why) => match UnixStream::connect(&path).await {
            Err(source) if is_absence(&source) => Err(ControlError::Absent { path, source }),
            Ok(_) | Err(_) => Err(ControlError::Failed { path, why }),
        },
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Sends a GET request for a resource. Returns the body of the answer.
async fn query(stream: UnixStream, resource: &str) -> Result<Incoming, String> {
    send(stream, resource, hyper::Request::get(resource), Vec::new()).await
}

/// Sends a request. Returns the body of the answer.
async fn send(
    stream: UnixStream,
    resource: &str,
    request: hyper::http::request::Builder,
    body: Vec<u8>,
) -> Result<Incoming, String> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| e.to_string())?;
    tokio::spawn(connection);
    let request = request.header("host", "localhost").body(Full::new(Bytes::from(body)));
    let answer = sender
        .send_request(request.map_err(|e| e.to_string())?)
        .await
        .map_err(|e| e.to_string())?;
    let status = answer.status();
    if status.is_success() {
        return Ok(answer.into_body());
    }
    let body = answer.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes();
    if status == hyper::StatusCode::NOT_FOUND {
        return Err(format!(
            "it does not support `{resource}`; use a `holdfast` of the same version as the \
             daemon"
        ));
    }
    Err(String::from_utf8_lossy(&body).into_owned())
}

async fn in_time<T>(deadline: Duration, answer: impl Future<Output = T>) -> Result<T, String> {
    timeout(deadline, answer).await.map_err(|_| "no answer in time".into())
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn invalid_answer(error: serde_json::Error) -> String {
    format!("its answer is invalid: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixListener;

    /// The result of a request to a daemon that sends this answer and then dies.
    async fn answered(answer: &str) -> Result<LedgerEnd, ControlError> {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(socket_path(dir.path())).unwrap();
        let daemon = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 16]).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
            drop(listener);
        };
        tokio::join!(read_ledger(dir.path(), |_| true), daemon).0
    }

    #[tokio::test]
    async fn a_daemon_that_dies_before_its_first_line_is_absent() {
        let error = answered("").await.unwrap_err();
        assert!(matches!(error, ControlError::Absent { .. }), "{error}");
        let line = serde_json::to_string(&Line::Part(ExportLine::Notes {
            names: std::collections::BTreeMap::new(),
            listed: crate::domain::Listed::default(),
            owed: crate::domain::PendingHooks::default(),
            verdicts: crate::domain::Verdicts::default(),
        }));
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{}\n", line.unwrap());
        let error = answered(&answer).await.unwrap_err();
        assert!(matches!(error, ControlError::Failed { .. }), "{error}");
    }

    #[tokio::test]
    async fn only_a_missing_permission_leads_to_sudo() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = read_ledger(file.path(), |_| true).await.unwrap_err().to_string();
        assert!(error.contains("--run-dir") && !error.contains("sudo"), "{error}");
        // The path of a socket is at most 107 bytes long.
        let long = PathBuf::from(format!("/{}", "a".repeat(200)));
        let error = read_ledger(&long, |_| true).await.unwrap_err().to_string();
        assert!(!error.contains("--run-dir") && !error.contains("sudo"), "{error}");
    }
}
