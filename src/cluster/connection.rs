//! One connection to the API server: HTTP/1.1, one request at a time.

use super::credentials::{Access, Credentials};
use super::error::ClusterError;
use super::metadata::Status;
use super::tls;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// The limit of an answer that is not a watch. A list of the metadata of one node has kilobytes.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// The limit of the text of an error.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// The longest part of an answer in a message, in characters.
const MESSAGE_CHARS_MAX: usize = 300;

/// An open connection. It ends with this value.
#[derive(Debug)]
pub(super) struct Connection {
    requests: http1::SendRequest<Empty<Bytes>>,
    task: JoinHandle<()>,
    /// The address, for messages and for the header `Host`.
    server: String,
    authority: String,
    /// The path of the server's URL, without the last slash.
    prefix: String,
    token: Option<HeaderValue>,
    within: Duration,
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
        let failed = |error: std::io::Error| ClusterError::Connect {
            server: server.clone(),
            why: error.to_string(),
        };
        let name = tls::server_name(access.server_name.as_deref().unwrap_or(host))?;
        let connector = match is_plain {
            true => None,
            false => Some(TlsConnector::from(Arc::new(tls::settings(&access)?))),
        };
        let stream = TcpStream::connect((host, port)).await.map_err(failed)?;
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
            Ok(header)
        });
        Ok(Connection {
            requests,
            task,
            authority: authority.to_string(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            token: token.transpose()?,
            server: access.server,
            within,
        })
    }

    /// The address, for messages.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    /// Sends a GET request. Returns the answer once its head has arrived.
    ///
    /// # Errors
    /// When the connection fails, no answer comes in time, or the answer is an error.
    pub(super) async fn get(
        &mut self,
        path: &str,
        accept: &'static str,
    ) -> Result<Response<Incoming>, ClusterError> {
        let mut request = Request::get(format!("{}{path}", self.prefix))
            .header(HOST, &self.authority)
            .header(ACCEPT, accept)
            .header(USER_AGENT, concat!("holdfast/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        let request = request
            .body(Empty::new())
            .map_err(|error| ClusterError::Credentials(format!("a wrong address: {error}")))?;
        let sending = async {
            self.requests.ready().await?;
            self.requests.send_request(request).await
        };
        let answer = match timeout(self.within, sending).await {
            Ok(answer) => answer.map_err(|error| self.broken(&error))?,
            Err(_) => return Err(self.silent(self.within)),
        };
        if answer.status().is_success() { Ok(answer) } else { Err(self.refusal(answer).await) }
    }

    /// The whole answer to a GET request.
    ///
    /// # Errors
    /// As [`Connection::get`], and when the answer has another form.
    pub(super) async fn get_json<T: DeserializeOwned>(
        &mut self,
        path: &str,
        accept: &'static str,
    ) -> Result<T, ClusterError> {
        let body = self.get(path, accept).await?.into_body();
        let whole = match timeout(self.within, Limited::new(body, ANSWER_BYTES_MAX).collect()).await
        {
            Ok(Ok(whole)) => whole.to_bytes(),
            Ok(Err(error)) => {
                return Err(ClusterError::Broken {
                    server: self.server.clone(),
                    why: error.to_string(),
                });
            }
            Err(_) => return Err(self.silent(self.within)),
        };
        serde_json::from_slice(&whole).map_err(|error| ClusterError::Unreadable(error.to_string()))
    }

    async fn refusal(&self, answer: Response<Incoming>) -> ClusterError {
        let (code, header) = (answer.status().as_u16(), answer.headers().get(RETRY_AFTER).cloned());
        let body = Limited::new(answer.into_body(), ERROR_BYTES_MAX).collect();
        let text = match timeout(self.within, body).await {
            Ok(Ok(body)) => body.to_bytes(),
            _ => Bytes::new(),
        };
        let status: Status = serde_json::from_slice(&text).unwrap_or_default();
        let seconds = header.and_then(|header| header.to_str().ok()?.parse().ok());
        let retry_after = seconds.map(Duration::from_secs).or(status.retry_after());
        let message = match status.message.is_empty() {
            true => String::from_utf8_lossy(&text).into_owned(),
            false => status.message,
        };
        refused(code, &message, retry_after)
    }

    pub(super) fn silent(&self, after: Duration) -> ClusterError {
        ClusterError::Silent { server: self.server.clone(), after }
    }

    pub(super) fn broken(&self, error: &hyper::Error) -> ClusterError {
        ClusterError::Broken { server: self.server.clone(), why: chain(error) }
    }
}

/// An answer with this code. 410 means that the requested version is no longer available.
pub(super) fn refused(code: u16, message: &str, retry_after: Option<Duration>) -> ClusterError {
    if code == 410 {
        return ClusterError::Expired;
    }
    let message = message.chars().take(MESSAGE_CHARS_MAX).collect();
    ClusterError::Refused { code, message, retry_after }
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

fn is_loopback(host: &str) -> bool {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain == "localhost" || plain.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Begins HTTP on a stream.
async fn exchange<S>(
    stream: S,
) -> Result<(http1::SendRequest<Empty<Bytes>>, JoinHandle<()>), hyper::Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // The error of the connection is that of its request.
    let task = tokio::spawn(async move { drop(connection.await) });
    Ok((requests, task))
}
