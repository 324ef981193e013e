//! A door where HTTP/1 is spoken, with its limits (I13): telemetry's address, and the control socket.
//!
//! ```text
//!   accept ─▶ Room, which may close another one for it ─▶ a task, until the first of these:
//!               the other side closes it · no whole head in time · enough requests · the end of its time · closed for another
//! ```
//!
//! Nothing waits for the other side without a bound. A connection that does not end in order is reset: nothing of it stays in the kernel
//! for somebody who does not read.

use super::pace::Pace;
use super::visit::{Peer, Room, Sending, Visit};
use crate::domain::doors::BATCH;
use crate::host::peer::TrustedListener;
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
use tokio::time::{sleep, timeout};
use tokio_util::either::Either;
use tower::ServiceExt as _;

/// The head of a request, in bytes: a long token fits, and a browser's cookies of other services on this host. A connection keeps no
/// more than this in memory of what is sent to it.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Headers of a request: a browser sends twenty, and a proxy adds some.
const HEADERS_MAX: usize = 64;
/// Requests on one connection: no scraper asks as often in the time of a connection, and what floods has to connect again.
const REQUESTS_MAX: u32 = 32;
/// How long an answer may take still when the time of its connection is over.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// Connections that are taken in a second, and of these at once. No scraper makes a hundredth of these. Whoever makes more has to wait, and
/// does not keep the processors busy meanwhile.
const TAKES: (u32, u32) = (2000, 32);
/// Requests that are answered in a second beside the first of each connection, and of these at once.
const FOLLOWS: (u32, u32) = (2000, 32);
/// The kernel's queue of connections that were not taken yet. When it is full the first packet of a connection is lost, and sent again after
/// a second: so whoever connects faster than it is let in stands still for that time. It is short, so that a probe behind a full
/// one is let in within a tenth of a second.
const BACKLOG: u32 = 256;
/// What the kernel keeps of an answer that is not read, in bytes: up to megabytes otherwise, which count for the container.
const SEND_BYTES: u32 = 64 << 10;
/// What the kernel keeps of a request that is not taken yet, in bytes.
const RECEIVE_BYTES: u32 = 16 << 10;
/// After an error of the system the next connection is taken so much later.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What a door allows beside what holds for each of them.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The door's name in the metrics.
    pub door: &'static str,
    /// Connections at a time.
    pub connections: usize,
    /// How long the whole head of a request may take, from the begin of the connection, and from the last answer.
    pub head_within: Duration,
    /// How long a connection may last.
    pub lasts: Duration,
    /// Whether a request may have a body.
    pub takes_bodies: bool,
}

/// Where HTTP is spoken. One type for both, so that what serves a connection is in the binary once.
#[derive(Debug)]
pub enum Door {
    /// To anybody who reaches an address: Prometheus, the kubelet's probes.
    Tcp(TcpListener),
    /// To root, at a socket: the verbs of `holdfast`.
    Unix(TrustedListener),
}

impl Door {
    /// Listens at an address. Must be called in the runtime that is to serve it.
    ///
    /// # Errors
    /// As binding and listening: another process may have the address.
    pub fn at(address: SocketAddr) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        // Its connections inherit them.
        socket.set_send_buffer_size(SEND_BYTES)?;
        socket.set_recv_buffer_size(RECEIVE_BYTES)?;
        socket.bind(address)?;
        Ok(Door::Tcp(socket.listen(BACKLOG)?))
    }

    /// The address; port 0 has asked for any.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Door::Tcp(listener) => listener.local_addr().ok(),
            Door::Unix(_) => None,
        }
    }

    async fn accept(&self) -> io::Result<(Wire, Peer)> {
        match self {
            Door::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Until it ends in order. One that has ended already has no options any more.
                let _ended = set_socket_linger(&stream, Some(Duration::ZERO));
                Ok((Wire(Either::Left(stream)), Peer::from(address.ip())))
            }
            Door::Unix(listener) => Ok((Wire(Either::Right(listener.accept().await)), Peer::Root)),
        }
    }
}

/// Serves `routes` at the door until this is dropped; what has begun by then is answered.
pub async fn serve(door: Door, routes: Router, limits: Limits) {
    let room = Arc::new(Room::new(limits.door, limits.connections));
    let (takes, follows) = (Pace::new(TAKES.0, TAKES.1), Arc::new(Pace::new(FOLLOWS.0, FOLLOWS.1)));
    for taken in 1_usize.. {
        takes.turn().await;
        match door.accept().await {
            Ok((wire, peer)) => {
                let visit = room.enter(peer);
                let id = visit.id;
                let answerer = Answerer { routes: routes.clone(), follows: Arc::clone(&follows), visit: Arc::new(visit), limits };
                room.began(id, tokio::spawn(connection(wire, answerer)).abort_handle());
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(door = limits.door, %error, "no connection can be taken");
                room.evict();
                sleep(ACCEPT_AGAIN).await;
            }
        }
        if taken % BATCH == 0 {
            // What has come is looked at, and what was closed for it is gone, before more is taken.
            tokio::task::yield_now().await;
        }
    }
}

/// Whether only this connection failed: it ended before it was taken.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// One connection, from its begin to its end.
async fn connection(wire: Wire, answerer: Answerer) {
    let (visit, limits) = (Arc::clone(&answerer.visit), answerer.limits);
    let service = service_fn(move |request| answerer.clone().answer(request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_within)
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(wire), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = sleep(limits.lasts) => {
            connection.as_mut().graceful_shutdown();
            match timeout(ENDS_WITHIN, connection).await {
                Ok(ended) => ended,
                Err(_) => return visit.refused("not_read"),
            }
        }
    };
    match ended {
        // One that was answered before was kept open for its next request, which need not come.
        Err(error) if error.is_timeout() && visit.requests() == 0 => visit.refused("head_late"),
        Err(error) if error.is_parse_too_large() => visit.refused("head_too_large"),
        Err(error) if error.is_parse() => visit.refused("not_understood"),
        _ => {}
    }
}

/// Answers the requests of one connection.
#[derive(Clone)]
struct Answerer {
    routes: Router,
    follows: Arc<Pace>,
    visit: Arc<Visit>,
    limits: Limits,
}

impl Answerer {
    async fn answer(self, mut request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        let Answerer { routes, follows, visit, limits } = self;
        let answering = visit.asks();
        let number = visit.requests();
        if number > 1 {
            follows.turn().await;
        }
        let mut response = if !limits.takes_bodies && has_body(request.headers()) {
            visit.refused("body");
            (StatusCode::PAYLOAD_TOO_LARGE, "no request has a body here\n").into_response()
        } else {
            request.extensions_mut().insert(visit);
            routes.oneshot(request.map(Body::new)).await?
        };
        // Whoever was refused connects again, behind others.
        if number >= REQUESTS_MAX || !response.status().is_success() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response.map(|body| Body::new(Sending::new(body, answering))))
    }
}

fn has_body(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) || headers.get(CONTENT_LENGTH).is_some_and(|length| length != "0")
}

/// A connection. One of TCP is reset when it is dropped before it was shut down.
struct Wire(Either<TcpStream, UnixStream>);

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
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
            // The end in order: the kernel sends what was written.
            let _ended = set_socket_linger(stream, None);
        }
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
