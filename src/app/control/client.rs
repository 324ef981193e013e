//! The other side of the control socket: how a verb asks the running daemon.

use super::{Installed, LedgerEnd, Line, Order, Upgrade, socket_path};
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

/// What is said of a daemon that goes away while it tells its ledger.
const CUT_SHORT: &str = "it ended before everything was told";

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

/// Has the daemon of `run_dir` tell its ledger, until `take` says no more. Returns what is said at its end.
///
/// # Errors
/// As [`get`]; [`ControlError::Absent`] only where nothing was told yet.
pub async fn read_ledger(run_dir: &Path, mut take: impl FnMut(Told) -> bool) -> Result<LedgerEnd, ControlError> {
    let mut has_told = false;
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
                        has_told = true;
                        if !take(told) {
                            return Ok(LedgerEnd::default());
                        }
                    }
                    Line::End(end) => return Ok(end),
                }
            }
            unread.drain(..whole);
        }
        Err(CUT_SHORT.to_owned())
    };
    with(run_dir, ask).await.map_err(|error| match error {
        ControlError::Absent { path, .. } if has_told => ControlError::Failed { path, why: CUT_SHORT.to_owned() },
        error => error,
    })
}

/// Connects, and says of whom it was that could not answer.
async fn with<T>(run_dir: &Path, ask: impl AsyncFnOnce(UnixStream) -> Result<T, String>) -> Result<T, ControlError> {
    let path = socket_path(run_dir);
    let stream = match UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(source) if is_absence(&source) => return Err(ControlError::Absent { path, source }),
        Err(error) => {
            return Err(ControlError::Failed {
                path,
                why: format!("{error}; only root and whoever runs the daemon may ask: try it with `sudo`"),
            });
        }
    };
    match ask(stream).await {
        Ok(answer) => Ok(answer),
        // It may have died over the question, and then nobody is there any more.
        Err(why) => match UnixStream::connect(&path).await {
            Err(source) if is_absence(&source) => Err(ControlError::Absent { path, source }),
            Ok(_) | Err(_) => Err(ControlError::Failed { path, why }),
        },
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixListener;

    /// What comes of a question to a daemon that says this and dies.
    async fn asked(says: &str) -> Result<LedgerEnd, ControlError> {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(socket_path(dir.path())).unwrap();
        let daemon = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.read_exact(&mut [0; 16]).await.unwrap();
            stream.write_all(says.as_bytes()).await.unwrap();
            drop(listener);
        };
        tokio::join!(read_ledger(dir.path(), |_| true), daemon).0
    }

    #[tokio::test]
    async fn a_daemon_that_dies_over_a_question_is_absent_unless_it_has_told_something() {
        let error = asked("").await.unwrap_err();
        assert!(matches!(error, ControlError::Absent { .. }), "{error}");
        let line = serde_json::to_string(&Line::Told(Told::Notes {
            names: std::collections::BTreeMap::new(),
            listed: crate::domain::Listed::default(),
            owed: crate::domain::Owed::default(),
            verdicts: crate::domain::Verdicts::default(),
        }));
        let told = format!("HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{}\n", line.unwrap());
        let error = asked(&told).await.unwrap_err();
        assert!(matches!(error, ControlError::Failed { .. }), "{error}");
    }
}
