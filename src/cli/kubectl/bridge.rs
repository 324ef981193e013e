//! The way to the API server: a `kubectl proxy` on a private unix socket. kubectl reads the
//! operator's kubeconfig and knows every way to log in (certificates, tokens, credential plugins,
//! HTTP proxies), and the requests here are plain HTTP.
//!
//! One process serves all requests. `kubectl exec` for each node would take about 0.1 s of
//! processor time for each. By default `kubectl proxy` refuses exec; this one accepts exactly the
//! paths that are used here.

use super::options::Access;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, HOST};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::Value;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

/// Time until kubectl has read the kubeconfig and listens.
const START_DEADLINE: Duration = Duration::from_secs(10);
/// Time for a list of pods or nodes. The first request may wait for an interactive login of a
/// credential plugin.
const LIST_DEADLINE: Duration = Duration::from_secs(120);
/// The limit of a list. A pod of the daemon has about 15 KB.
const LIST_BYTES_MAX: usize = 256 << 20;
/// The limit of the text of an error.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// The paths that `kubectl proxy` accepts.
const PATHS: &str = "^/api/v1/nodes$,^/api/v1/namespaces/[^/]+/pods$,\
                     ^/api/v1/namespaces/[^/]+/pods/[^/]+/exec$";
/// The methods that it rejects: all but GET.
const METHODS: &str = "^(POST|PUT|PATCH|DELETE|OPTIONS)$";
/// A pattern that rejects no path.
const NO_PATH: &str = "^$";

/// A running `kubectl proxy`. It ends with this value.
#[derive(Debug)]
pub(super) struct Bridge {
    socket: PathBuf,
    /// kubectl keeps its standard output.
    _stdout: BufReader<ChildStdout>,
    _child: Child,
    /// Removed last.
    _dir: TempDir,
}

/// A `Status` of the API server (API `meta/v1`).
#[derive(Debug, Deserialize)]
struct Refusal {
    message: String,
}

impl Bridge {
    /// Starts `kubectl proxy` and waits until it listens.
    ///
    /// # Errors
    /// One sentence, when kubectl is not installed or does not start. Its own message is on
    /// standard error.
    pub(super) async fn start(access: &Access) -> Result<Bridge, String> {
        let cannot = |error: io::Error| format!("cannot start `kubectl proxy`: {error}");
        let dir = tempfile::Builder::new().prefix("holdfast-").tempdir().map_err(cannot)?;
        let socket = dir.path().join("api");
        let mut child = Command::new("kubectl")
            .arg("proxy")
            .arg(format!("--unix-socket={}", socket.display()))
            .arg(format!("--accept-paths={PATHS}"))
            .arg(format!("--reject-paths={NO_PATH}"))
            .arg(format!("--reject-methods={METHODS}"))
            .args(access.arguments())
            // A login of a credential plugin may ask on the terminal.
            .stdin(Stdio::inherit())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    "`kubectl` is not in PATH; install it, since it logs in to the cluster".into()
                }
                _ => cannot(error),
            })?;
        let mut stdout = BufReader::new(child.stdout.take().ok_or("no pipe from kubectl")?);
        let mut line = String::new();
        match timeout(START_DEADLINE, stdout.read_line(&mut line)).await {
            Ok(Ok(1..)) => Ok(Bridge { socket, _stdout: stdout, _child: child, _dir: dir }),
            Ok(Ok(0)) => {
                let ended = child.wait().await.map_err(cannot)?;
                Err(format!("`kubectl proxy` has ended ({ended}); check the kubeconfig"))
            }
            Ok(Err(error)) => Err(cannot(error)),
            Err(_) => Err(format!(
                "`kubectl proxy` does not listen after {}",
                humantime::format_duration(START_DEADLINE)
            )),
        }
    }

    /// Reads a list of objects.
    ///
    /// # Errors
    /// The API server's reason, or why it cannot be asked.
    pub(super) async fn list(&self, path: &str, accept: &'static str) -> Result<Value, String> {
        let asked = async {
            let answer = self.send(Request::get(path).header(ACCEPT, accept)).await?;
            let answer = accepted(answer, StatusCode::OK).await?;
            let body = Limited::new(answer.into_body(), LIST_BYTES_MAX).collect().await;
            let body = body.map_err(|error| format!("the answer cannot be read: {error}"))?;
            serde_json::from_slice(&body.to_bytes())
                .map_err(|error| format!("the answer is no JSON: {error}"))
        };
        let late = || format!("no answer within {}", humantime::format_duration(LIST_DEADLINE));
        timeout(LIST_DEADLINE, asked).await.unwrap_or_else(|_| Err(late()))
    }

    /// Sends a request on a connection of its own.
    pub(super) async fn send(
        &self,
        request: hyper::http::request::Builder,
    ) -> Result<Response<Incoming>, String> {
        let request = request.header(HOST, "localhost").body(Empty::<Bytes>::new());
        let request = request.map_err(|error| error.to_string())?;
        let lost =
            |error: &dyn std::error::Error| format!("kubectl proxy does not answer: {error}");
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| lost(&error))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| lost(&error))?;
        // The task ends with the connection: with the answer, or with its upgrade.
        tokio::spawn(connection.with_upgrades());
        sender.send_request(request).await.map_err(|error| lost(&error))
    }
}

/// The answer, if it has this code.
///
/// # Errors
/// The API server's reason.
pub(super) async fn accepted(
    answer: Response<Incoming>,
    wanted: StatusCode,
) -> Result<Response<Incoming>, String> {
    let code = answer.status();
    if code == wanted {
        return Ok(answer);
    }
    let body = Limited::new(answer.into_body(), ERROR_BYTES_MAX).collect().await;
    let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let reason = serde_json::from_slice::<Refusal>(&body).map_or_else(
        |_| String::from_utf8_lossy(&body).trim().to_owned(),
        |refusal| refusal.message,
    );
    Err(if reason.is_empty() { format!("the API server answers {code}") } else { reason })
}

/// A value for a path or a query of a URL (RFC 3986, section 2.1).
pub(super) fn encoded(value: &str) -> String {
    let mut text = String::new();
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text += &format!("%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_does_not_change_the_url() {
        assert_eq!(encoded("a/b?c=d&e é"), "a%2Fb%3Fc%3Dd%26e%20%C3%A9");
        assert_eq!(encoded("holdfast-x_1.2~"), "holdfast-x_1.2~");
    }
}
