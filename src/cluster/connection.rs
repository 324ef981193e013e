//! One connection to the API server: HTTP/1.1, one request at a time.

use super::credentials::{Access, Credentials};
use super::error::{ClusterError, Details};
use super::metadata::Status;
use super::tls;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER, USER_AGENT,
};
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;

/// The limit of one object. It has at most 1.5 MiB in etcd.
pub(super) const OBJECT_BYTES_MAX: usize = 4 << 20;
/// The limit of a list. The slices of one driver on one node have up to half a megabyte.
pub(super) const LIST_BYTES_MAX: usize = 16 << 20;
/// The limit of the text of an error.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// The longest part of an answer in a message, in characters.
const MESSAGE_CHARS_MAX: usize = 300;

/// Whole objects, as JSON.
pub(super) const JSON: &str = "application/json";
/// A patch that merges lists by the key of their elements (`patchMergeKey` of the API's types).
pub(super) const STRATEGIC_MERGE: &str = "application/strategic-merge-patch+json";

/// A patch with all fields that its field manager wants to have (server-side apply), as JSON.
pub(super) const APPLY: &str = "application/apply-patch+yaml";

/// A request.
#[derive(Debug, Clone)]
pub(super) struct Question {
    pub(super) method: Method,
    /// The path and the query.
    pub(super) path: String,
    /// The form of the answer.
    pub(super) accept: &'static str,
    /// JSON.
    pub(super) body: Option<Bytes>,
    /// The form of the body.
    pub(super) content_type: &'static str,
    /// Whether sending it twice does the same as once.
    pub(super) may_repeat: bool,
}

impl Question {
    /// Asks for an object, a list or a watch.
    pub(super) fn get(path: String, accept: &'static str) -> Self {
        Question {
            method: Method::GET,
            path,
            accept,
            body: None,
            content_type: JSON,
            may_repeat: true,
        }
    }
}

/// Why a request failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) error: ClusterError,
    /// Whether the API server may have received it.
    pub(super) was_sent: bool,
}

impl From<Failed> for ClusterError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

impl From<ClusterError> for Failed {
    /// A failure after the request was sent.
    fn from(error: ClusterError) -> Self {
        Failed { error, was_sent: true }
    }
}

/// An open connection. It ends with this value.
#[derive(Debug)]
pub(super) struct Connection {
    requests: http1::SendRequest<Full<Bytes>>,
    task: JoinHandle<()>,
    /// The address, for messages and for the header `Host`.
    server: String,
    authority: String,
    /// The path of the server's URL, without the last slash.
    prefix: String,
    token: Option<HeaderValue>,
    within: Duration,
    opened: Instant,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    /// Reads the credentials and connects. Each step, and each answer later, may take `within`.
    ///
    /// # Errors
    /// When there are no usable credentials, or no connection.
    pub(super) async fn open(
        credentials: &Credentials,
        within: Duration,
    ) -> Result<Self, ClusterError> {
        let credentials = credentials.clone();
        // A disk that hangs must not block the thread that answers the kubelet.
        let reading = tokio::task::spawn_blocking(move || credentials.read());
        let access = timeout(within, reading)
            .await
            .map_err(|_| ClusterError::Credentials("the disk does not answer".into()))?
            .map_err(|error| ClusterError::Credentials(error.to_string()))??;
        let server = access.server.clone();
        timeout(within, Self::connect(access, within))
            .await
            .unwrap_or_else(|_| Err(ClusterError::Silent { server, after: within }))
    }

    async fn connect(access: Access, within: Duration) -> Result<Self, ClusterError> {
        let server = access.server.clone();
        let wrong = |why: &str| ClusterError::Credentials(format!("the address `{server}` {why}"));
        let uri: Uri = server.parse().map_err(|_| wrong("is not a URL"))?;
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?.clone();
        let is_plain = match uri.scheme_str() {
            Some("https") => false,
            // Such as that of `kubectl proxy`. A token would be readable on any other way.
            Some("http") if is_loopback(authority.host()) => true,
            Some("http") => return Err(wrong("has no TLS, and is not on this machine")),
            _ => return Err(wrong("does not begin with https://")),
        };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let port = authority.port_u16().unwrap_or(if is_plain { 80 } else { 443 });
        let failed = |error: io::Error| ClusterError::Connect {
            server: server.clone(),
            why: error.to_string(),
        };
        let name = tls::server_name(access.server_name.as_deref().unwrap_or(host))?;
        let connector = match is_plain {
            true => None,
            false => Some(TlsConnector::from(Arc::new(tls::settings(&access)?))),
        };
        let addresses = lookup_host((host, port)).await.map_err(failed)?;
        let stream =
            connect_to_any(&addresses.collect::<Vec<_>>(), within).await.map_err(failed)?;
        let (requests, task) = match connector {
            Some(connector) => {
                exchange(connector.connect(name, stream).await.map_err(failed)?).await
            }
            None => exchange(stream).await,
        }
        .map_err(|error| ClusterError::Connect { server: server.clone(), why: chain(&error) })?;
        let token = access.token.as_ref().map(|token| {
            let mut header = HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| ClusterError::Credentials("the token is not a text".into()))?;
            header.set_sensitive(true);
            Ok::<_, ClusterError>(header)
        });
        Ok(Connection {
            requests,
            task,
            authority: authority.to_string(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            token: token.transpose()?,
            server: access.server,
            within,
            opened: Instant::now(),
        })
    }

    /// The address, for messages.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    /// Whether it takes another request, as far as is known, and is not older than this.
    pub(super) fn is_usable(&self, age: Duration) -> bool {
        !self.requests.is_closed() && self.opened.elapsed() < age
    }

    /// Sends a request. Returns the answer once its head has arrived.
    ///
    /// # Errors
    /// When the connection fails, no answer comes in time, or the answer is an error.
    pub(super) async fn send(&mut self, question: &Question) -> Result<Response<Incoming>, Failed> {
        let mut request = Request::builder()
            .method(&question.method)
            .uri(format!("{}{}", self.prefix, question.path))
            .header(HOST, &self.authority)
            .header(ACCEPT, question.accept)
            .header(USER_AGENT, concat!("holdfast/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        if question.body.is_some() {
            request = request.header(CONTENT_TYPE, question.content_type);
        }
        let unsent = |error| Failed { error, was_sent: false };
        let body = Full::new(question.body.clone().unwrap_or_default());
        let request = request.body(body).map_err(|error| {
            unsent(ClusterError::Credentials(format!("a wrong address: {error}")))
        })?;
        match timeout(self.within, self.requests.ready()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(unsent(self.broken(&error))),
            Err(_) => return Err(unsent(self.silent(self.within))),
        }
        let answer = match timeout(self.within, self.requests.send_request(request)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                let was_sent = !error.is_canceled();
                return Err(Failed { error: self.broken(&error), was_sent });
            }
            Err(_) => return Err(self.silent(self.within).into()),
        };
        if answer.status().is_success() {
            Ok(answer)
        } else {
            Err(self.refusal(answer, &question.path).await.into())
        }
    }

    /// The whole answer to a request.
    ///
    /// # Errors
    /// As [`Connection::send`], and when the answer is longer than `bytes_max`.
    pub(super) async fn call(
        &mut self,
        question: &Question,
        bytes_max: usize,
    ) -> Result<Bytes, Failed> {
        let body = self.send(question).await?.into_body();
        match timeout(self.within, Limited::new(body, bytes_max).collect()).await {
            Ok(Ok(whole)) => Ok(whole.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                let why = format!("it has more than {bytes_max} bytes");
                Err(ClusterError::Unreadable(why).into())
            }
            Ok(Err(error)) => {
                let server = self.server.clone();
                Err(ClusterError::Broken { server, why: error.to_string() }.into())
            }
            Err(_) => Err(self.silent(self.within).into()),
        }
    }

    async fn refusal(&self, answer: Response<Incoming>, path: &str) -> ClusterError {
        let (code, header) = (answer.status().as_u16(), answer.headers().get(RETRY_AFTER).cloned());
        let body = Limited::new(answer.into_body(), ERROR_BYTES_MAX).collect();
        let text = match timeout(self.within, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            _ => Bytes::new(),
        };
        let mut status: Status = serde_json::from_slice(&text).unwrap_or_default();
        status.code = code;
        if status.message.is_empty() {
            status.message = String::from_utf8_lossy(&text).into_owned();
        }
        let seconds = header.and_then(|header| header.to_str().ok()?.parse().ok());
        refused(status, seconds.map(Duration::from_secs), path)
    }

    pub(super) fn silent(&self, after: Duration) -> ClusterError {
        ClusterError::Silent { server: self.server.clone(), after }
    }

    pub(super) fn broken(&self, error: &hyper::Error) -> ClusterError {
        ClusterError::Broken { server: self.server.clone(), why: chain(error) }
    }
}

/// The answer to a request that failed, or to a watch of this path that cannot continue. 410 means
/// that the requested version is no longer available.
pub(super) fn refused(status: Status, header: Option<Duration>, path: &str) -> ClusterError {
    if status.code == 410 {
        return ClusterError::Expired;
    }
    ClusterError::Refused {
        code: status.code,
        retry_after: header.or(status.retry_after()),
        message: status.message.chars().take(MESSAGE_CHARS_MAX).collect(),
        details: Box::new(Details {
            path: path.split('?').next().unwrap_or_default().to_owned(),
            reason: status.reason,
            object: status.details.name,
            causes: status.details.causes,
        }),
    }
}

/// An error with its causes. hyper's own text has none of them.
fn chain(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Connects to the first address that answers. A name may have the addresses of several control
/// plane nodes, and one that is off answers nothing. So each of several gets its part of the time,
/// and a part is left for TLS.
async fn connect_to_any(addresses: &[SocketAddr], within: Duration) -> io::Result<TcpStream> {
    let parts = if addresses.len() > 1 { addresses.len() + 1 } else { 1 };
    let share = within / u32::try_from(parts).unwrap_or(u32::MAX);
    let mut last = io::Error::new(io::ErrorKind::NotFound, "its name has no address");
    for address in addresses {
        last = match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => error,
            Err(_) => io::Error::new(
                io::ErrorKind::TimedOut,
                format!("{address} has not answered for {} s", share.as_secs_f32()),
            ),
        };
    }
    Err(last)
}

fn is_loopback(host: &str) -> bool {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain == "localhost" || plain.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Begins HTTP on a stream.
async fn exchange<S>(
    stream: S,
) -> Result<(http1::SendRequest<Full<Bytes>>, JoinHandle<()>), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The error of the connection is that of its request.
    let task = tokio::spawn(async move { drop(connection.await) });
    Ok((requests, task))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpSocket;

    #[tokio::test]
    async fn an_address_that_does_not_answer_leaves_time_for_the_next() {
        let listen = |backlog| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            socket.listen(backlog).unwrap()
        };
        let (silent, good) = (listen(0), listen(8));
        let (silent_at, good_at) = (silent.local_addr().unwrap(), good.local_addr().unwrap());
        // With a full queue the kernel answers no further SYN.
        let mut waiting = Vec::new();
        let within = Duration::from_millis(900);
        while let Ok(stream) = connect_to_any(&[silent_at], within / 3).await {
            waiting.push(stream);
        }
        let stream = connect_to_any(&[silent_at, good_at], within).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), good_at);
        let error = connect_to_any(&[silent_at, silent_at], within).await.unwrap_err();
        assert!(error.to_string().ends_with("has not answered for 0.3 s"), "{error}");
        assert!(connect_to_any(&[], within).await.is_err());
    }
}
