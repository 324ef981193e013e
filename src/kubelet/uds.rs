//! gRPC over unix sockets.

use hyper_util::rt::TokioIo;
use std::io;
use std::path::{Path, PathBuf};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Error, Uri};

/// The authority of every call. A path as authority, which some clients send, is refused by h2.
const AUTHORITY: &str = "http://localhost";

/// A path of a unix socket has at most this many bytes (`sun_path`, less the NUL).
pub const SOCKET_PATH_MAX: usize = 107;

/// Connects to the gRPC server at `path`. A connection that dies is opened again by the next call.
pub async fn connect(path: impl Into<PathBuf>) -> Result<Channel, Error> {
    connect_through(path, Ok).await
}

/// Like [`connect`], with every connection passed through `wrap`.
pub async fn connect_through<T, W>(path: impl Into<PathBuf>, wrap: W) -> Result<Channel, Error>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    W: Fn(UnixStream) -> io::Result<T> + Clone + Send + 'static,
{
    connect_with(Endpoint::from_static(AUTHORITY), path, wrap).await
}

/// Like [`connect_through`], with the authority of `endpoint` in each call.
pub async fn connect_with<T, W>(
    endpoint: Endpoint,
    path: impl Into<PathBuf>,
    wrap: W,
) -> Result<Channel, Error>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    W: Fn(UnixStream) -> io::Result<T> + Clone + Send + 'static,
{
    endpoint.connect_with_connector(connector(path.into(), wrap)).await
}

/// A channel that connects with its first call.
#[must_use]
pub fn connect_lazy(path: impl Into<PathBuf>) -> Channel {
    Endpoint::from_static(AUTHORITY).connect_with_connector_lazy(connector(path.into(), Ok))
}

fn connector<T, W>(
    path: PathBuf,
    wrap: W,
) -> impl tower::Service<Uri, Response = TokioIo<T>, Error = io::Error, Future: Send> + Send + 'static
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    W: Fn(UnixStream) -> io::Result<T> + Clone + Send + 'static,
{
    tower::service_fn(move |_: Uri| {
        let (path, wrap) = (path.clone(), wrap.clone());
        async move { open(&path).await.and_then(wrap).map(TokioIo::new) }
    })
}

async fn open(path: &Path) -> io::Result<UnixStream> {
    let with_path = |error: io::Error| {
        io::Error::new(error.kind(), format!("cannot connect to `{}`: {error}", path.display()))
    };
    UnixStream::connect(path).await.map_err(with_path)
}
