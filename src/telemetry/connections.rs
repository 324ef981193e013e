//! The connections of one HTTP server, with their use and the number of pages that they get.

use super::metrics;
use crate::domain::limits::{ConnectionId, ConnectionTable};
use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::task::AbortHandle;

/// Pages that are rendered or sent at a time: this limits the memory that slow readers keep.
const PAGES_MAX: usize = 16;
/// Pages of one peer at a time: half of them, so that one peer cannot take all.
const PAGES_OF_PEER_MAX: usize = PAGES_MAX / 2;

/// Connections of the same network count together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// A process that may open the control socket.
    Root,
    V4(Ipv4Addr),
    V6(Ipv6Addr),
}

impl Peer {
    /// An IPv6 address stands for its network of 64 bits: a host may use any address of its own.
    pub(super) fn network(self) -> Peer {
        match self {
            Peer::V6(address) => {
                Peer::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)))
            }
            Peer::Root | Peer::V4(_) => self,
        }
    }
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            // Every loopback address is this host.
            IpAddr::V6(Ipv6Addr::LOCALHOST) => Peer::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V4(address) if address.is_loopback() => Peer::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V4(address) => Peer::V4(address),
            IpAddr::V6(address) => Peer::V6(address),
        }
    }
}

/// The connections of one server.
#[derive(Debug)]
pub(super) struct Connections {
    /// The name of the socket in the metrics.
    socket: &'static str,
    table: Mutex<ConnectionTable<Peer, State>>,
}

#[derive(Debug, Default)]
struct State {
    task: Option<AbortHandle>,
    pages: usize,
}

impl Connections {
    pub(super) fn new(socket: &'static str, max: usize) -> Self {
        Connections { socket, table: Mutex::new(ConnectionTable::new(max)) }
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable<Peer, State>> {
        // Every change is a single step: a panic elsewhere cannot leave it half done.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection, and closes another one when the table is full. The caller must then call
    /// [`Connections::set_task`].
    pub(super) fn add(self: &Arc<Self>, peer: Peer) -> Connection {
        let (id, evicted) = self.table().add(peer.network(), State::default());
        self.close(evicted);
        let (requests, is_certified) = (AtomicU32::new(0), AtomicBool::new(false));
        Connection { all: Arc::clone(self), id, peer, requests, is_certified }
    }

    /// The task of a connection, which is aborted when the connection is evicted.
    pub(super) fn set_task(&self, id: ConnectionId, task: AbortHandle) {
        if let Some(state) = self.table().data(id) {
            state.task = Some(task);
        }
    }

    /// Closes one connection, to free a descriptor.
    pub(super) fn evict(&self) {
        let evicted = self.table().evict();
        self.close(evicted);
    }

    fn close(&self, evicted: Option<State>) {
        if let Some(state) = evicted {
            metrics::connection_evicted(self.socket);
            if let Some(task) = state.task {
                task.abort();
            }
        }
    }
}

/// A connection in the table, until this is dropped. Each of its requests has it as an extension.
#[derive(Debug)]
pub struct Connection {
    all: Arc<Connections>,
    pub(super) id: ConnectionId,
    peer: Peer,
    requests: AtomicU32,
    is_certified: AtomicBool,
}

impl Connection {
    /// The number of requests on this connection.
    pub(super) fn requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Its peer.
    pub(super) fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether its client has shown a certificate of the client authorities.
    pub(super) fn is_certified(&self) -> bool {
        self.is_certified.load(Ordering::Relaxed)
    }

    /// Keeps that its client has shown a certificate of the client authorities.
    pub(super) fn certify(&self) {
        self.is_certified.store(true, Ordering::Relaxed);
    }

    /// Counts a request. It is in flight until the returned value is dropped.
    pub(super) fn request(self: &Arc<Self>) -> InFlight {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.all.table().request(self.id);
        InFlight(Arc::clone(self))
    }

    /// A slot for a page, until it is dropped. `None` when all slots are taken, or all slots of
    /// this peer.
    pub(super) fn page_slot(self: &Arc<Self>) -> Option<PageSlot> {
        let mut table = self.all.table();
        let pages =
            |of: &mut dyn Iterator<Item = &State>| of.map(|state| state.pages).sum::<usize>();
        if pages(&mut table.all()) >= PAGES_MAX
            || pages(&mut table.of_peer(&self.peer.network())) >= PAGES_OF_PEER_MAX
        {
            return None;
        }
        table.data(self.id)?.pages += 1;
        drop(table);
        Some(PageSlot(Arc::clone(self)))
    }

    /// Counts a refused request.
    pub(super) fn refused(&self, reason: &'static str) {
        metrics::request_refused(self.all.socket, reason);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.all.table().remove(self.id);
    }
}

/// A request that is in flight.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Connection>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.all.table().answered(self.0.id);
    }
}

/// A page that is being rendered or sent.
#[derive(Debug)]
pub(super) struct PageSlot(Arc<Connection>);

impl Drop for PageSlot {
    fn drop(&mut self) {
        if let Some(state) = self.0.all.table().data(self.0.id) {
            state.pages = state.pages.saturating_sub(1);
        }
    }
}

/// The body of a response. Its request is in flight until the body was read.
#[derive(Debug)]
pub(super) struct ResponseBody<B> {
    body: B,
    _request: InFlight,
}

impl<B> ResponseBody<B> {
    pub(super) fn new(body: B, request: InFlight) -> Self {
        ResponseBody { body, _request: request }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(address: &str) -> Peer {
        Peer::from(address.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn all_addresses_of_a_host_are_one_peer() {
        for (one, other, same) in [
            ("127.0.0.1", "127.9.8.7", true),
            ("127.0.0.1", "::1", true),
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("2001:db8::1", "2001:db8::ffff:2", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
        ] {
            assert_eq!(peer(one).network() == peer(other).network(), same, "{one} {other}");
        }
    }

    #[test]
    fn one_peer_gets_half_of_the_page_slots() {
        let connections = Arc::new(Connections::new("test", 100));
        let addresses = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"];
        let open: Vec<_> =
            addresses.iter().map(|address| Arc::new(connections.add(peer(address)))).collect();
        let mut pages: Vec<_> =
            (0..PAGES_OF_PEER_MAX).map(|_| open[0].page_slot().unwrap()).collect();
        assert!(open[0].page_slot().is_none() && open[1].page_slot().is_none());
        pages.extend((0..PAGES_MAX - PAGES_OF_PEER_MAX).map(|_| open[2].page_slot().unwrap()));
        assert!(open[3].page_slot().is_none(), "all slots are taken");
        drop(pages.remove(0));
        assert!(open[3].page_slot().is_some());
    }

    #[test]
    fn a_connection_with_a_request_in_flight_is_not_evicted_while_another_one_is_idle() {
        let connections = Arc::new(Connections::new("test", 2));
        let is_open = |connection: &Connection| connections.table().data(connection.id).is_some();
        let [first, second] = [0, 1].map(|_| Arc::new(connections.add(peer("10.0.0.1"))));
        let in_flight = first.request();
        let third = connections.add(peer("10.0.0.1"));
        assert!(is_open(&first) && !is_open(&second) && is_open(&third));
        drop(second);
        drop(third);
        let fourth = connections.add(peer("10.0.0.2"));
        assert!(is_open(&first) && is_open(&fourth));
        drop(in_flight);
        let fifth = connections.add(peer("10.0.0.2"));
        assert!(
            !is_open(&first) && is_open(&fourth) && is_open(&fifth),
            "it is idle now, and the oldest"
        );
        assert_eq!(first.requests(), 1);
    }
}
