//! HTTP/1 with limits (I14): on the address of telemetry, where it may have TLS, and on the control
//! socket.
//!
//! ```text
//!   accept ─▶ Connections, which may evict another one ─▶ a task, until the first of these:
//!               the peer closes it · no handshake, or no whole head, in time · the last allowed
//!               request
//!               · the end of its lifetime · eviction
//! ```
//!
//! Every wait for a peer has a bound. A TCP connection that is not shut down cleanly is reset, so
//! the kernel keeps no unsent answer for a peer that does not read.

use super::connections::{Connection, Connections, Peer, ResponseBody};
use super::rate::RateLimit;
use super::tls::{Secured, Tls};
use crate::domain::limits::BATCH;
use crate::host::peer::KeptListener;
use axum::Router;
use axum::body::Body;
use axum::http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use axum::response::IntoResponse as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt::set_socket_linger;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::either::Either;
use tower::ServiceExt as _;

/// Bytes of the head of a request. A long token fits, and the cookies that a browser has of other
/// services on this host. A connection keeps at most this much unread input in memory.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Headers of a request. A browser sends about twenty, and a proxy adds some.
const HEADERS_MAX: usize = 64;
/// Requests on one connection. A scraper sends fewer in the lifetime of a connection, and a flood
/// has to connect again.
const REQUESTS_MAX: u32 = 32;
/// At the end of its lifetime a connection may still finish its answer, for this long.
const SHUTDOWN_WITHIN: Duration = Duration::from_secs(5);
/// Accepted connections per second, and the burst. Scrapers make a hundredth of that. A peer that
/// connects faster has to wait, and does not keep the processors busy.
const ACCEPT_RATE: (u32, u32) = (2000, 32);
/// The same with TLS. The key signs in each handshake, which takes about a millisecond with RSA of
/// 2048 bits. A probe behind a full queue waits for a second.
const HANDSHAKE_RATE: (u32, u32) = (250, 32);
/// Answered requests per second, and the burst, without the first request of each connection.
const REQUEST_RATE: (u32, u32) = (2000, 32);
/// The accept queue of the kernel. When it is full, the kernel drops the first packet of a
/// connection, and the peer sends it again after a second. This stops a peer that connects faster
/// than the accept rate. A probe behind a full queue waits for an eighth of a second.
const BACKLOG: u32 = 256;
/// Bytes of an unread answer that the kernel keeps. Without this they may be megabytes, and they
/// count as memory of the container.
const SEND_BUFFER: u32 = 64 << 10;
/// Bytes of an unread request that the kernel keeps.
const RECEIVE_BUFFER: u32 = 16 << 10;
/// The pause after a system error of accept.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The limits that differ between servers.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The name of the socket in the metrics.
    pub socket: &'static str,
    /// Connections that are open at a time.
    pub connections: usize,
    /// How long a handshake of TLS may take, and then the head of a request, from the connection's
    /// start or from the last answer.
    pub head_within: Duration,
    /// The lifetime of a connection.
    pub lifetime: Duration,
    /// Whether requests may have a body.
    pub bodies: bool,
}

/// The server's listener. One type for both kinds, so that the server's code is in the binary once.
#[derive(Debug)]
pub enum Listener {
    /// On an address, for every peer that reaches it.
    Tcp(TcpListener),
    /// On a socket, for root.
    Unix(KeptListener),
}

impl Listener {
    /// Listens on an address. Must be called in the runtime that will serve it.
    ///
    /// # Errors
    /// As binding and listening: another process may have the address.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        // Connections inherit these.
        socket.set_send_buffer_size(SEND_BUFFER)?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
        socket.bind(address)?;
        Ok(Listener::Tcp(socket.listen(BACKLOG)?))
    }

    /// The address, with the port that the system chose for port 0.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix(_) => None,
        }
    }

    async fn accept(&mut self) -> io::Result<(Stream, Peer)> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Resets the connection at its end, unless it is shut down cleanly. Setting the
                // option fails on a connection that has ended.
                let _ended = set_socket_linger(&stream, Some(Duration::ZERO));
                Ok((Stream(Either::Left(stream)), Peer::from(address.ip())))
            }
            Listener::Unix(listener) => {
                Ok((Stream(Either::Right(listener.accept().await)), Peer::Root))
            }
        }
    }
}

/// Serves `routes` until this is dropped. Requests that have begun are still answered.
pub async fn serve(mut listener: Listener, routes: Router, tls: Option<Tls>, limits: Limits) {
    let connections = Arc::new(Connections::new(limits.socket, limits.connections));
    let accept_rate = if tls.is_some() { HANDSHAKE_RATE } else { ACCEPT_RATE };
    let accept_rate = RateLimit::new(accept_rate.0, accept_rate.1);
    let request_rate = Arc::new(RateLimit::new(REQUEST_RATE.0, REQUEST_RATE.1));
    for accepted in 1_usize.. {
        accept_rate.wait().await;
        match listener.accept().await {
            Ok((stream, peer)) => {
                let connection = Arc::new(connections.add(peer));
                let id = connection.id;
                let service = Service {
                    routes: routes.clone(),
                    request_rate: Arc::clone(&request_rate),
                    connection,
                    limits,
                };
                let task = tokio::spawn(serve_connection(stream, tls.clone(), service));
                connections.set_task(id, task.abort_handle());
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(socket = limits.socket, %error, "cannot accept a connection");
                connections.evict();
                sleep(ACCEPT_AGAIN).await;
            }
        }
        if accepted % BATCH == 0 {
            // New connections are read, and evicted ones are closed, before the next batch.
            tokio::task::yield_now().await;
        }
    }
}

/// Whether only this connection failed: it ended before it was accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

async fn serve_connection(stream: Stream, tls: Option<Tls>, service: Service) {
    let (connection, limits) = (Arc::clone(&service.connection), service.limits);
    let end = Instant::now() + limits.lifetime;
    let stream = match tls {
        None => Either::Left(stream),
        Some(tls) => match timeout(limits.head_within, tls.accept(stream)).await {
            Ok(Ok((stream, is_certified))) => {
                if is_certified {
                    connection.certify();
                }
                Either::<Stream, Secured<Stream>>::Right(stream)
            }
            _ => return connection.refused("handshake"),
        },
    };
    let service = service_fn(move |request| service.clone().answer(request));
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_within)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), service);
    let mut serving = pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = sleep_until(end) => {
            serving.as_mut().graceful_shutdown();
            match timeout(SHUTDOWN_WITHIN, serving).await {
                Ok(ended) => ended,
                Err(_) => return connection.refused("not_read"),
            }
        }
    };
    match ended {
        // After an answer the connection was only kept open; another request is not required.
        Err(error) if error.is_timeout() && connection.requests() == 0 => {
            connection.refused("head_late");
        }
        Err(error) if error.is_parse_too_large() => connection.refused("head_too_large"),
        Err(error) if error.is_parse() => connection.refused("not_understood"),
        _ => {}
    }
}

/// Answers the requests of one connection.
#[derive(Clone)]
struct Service {
    routes: Router,
    request_rate: Arc<RateLimit>,
    connection: Arc<Connection>,
    limits: Limits,
}

impl Service {
    async fn answer(self, mut request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let Service { routes, request_rate, connection, limits } = self;
        let in_flight = connection.request();
        let number = connection.requests();
        if number > 1 {
            request_rate.wait().await;
        }
        let mut response = if !limits.bodies && has_body(request.headers()) {
            connection.refused("body");
            (StatusCode::PAYLOAD_TOO_LARGE, "requests have no body here\n").into_response()
        } else {
            request.extensions_mut().insert(connection);
            routes.oneshot(request.map(Body::new)).await?
        };
        // After an error the peer has to connect again, behind the others.
        if number >= REQUESTS_MAX || !response.status().is_success() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| Body::new(ResponseBody::new(body, in_flight))))
    }
}

fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING)
        || headers.get(CONTENT_LENGTH).is_some_and(|length| length != "0")
}

/// A connection. A TCP connection is reset if it is dropped before it was shut down.
struct Stream(Either<TcpStream, UnixStream>);

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Either::Left(stream) = &self.0 {
            // A clean shutdown: the kernel still sends the bytes that were written.
            let _ended = set_socket_linger(stream, None);
        }
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
