//! The connections that a door has open: each is a visit, which counts for as long as it lasts.

use super::metrics;
use crate::domain::doors::{Claim, GuestId, Guests};
use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::task::AbortHandle;

/// Pages that are made or sent at a time, and may be large: what is in memory for readers who are slow.
const PAGES_MAX: usize = 16;
/// Those of one peer: it leaves half of them to others.
const PAGES_OF_PEER_MAX: usize = PAGES_MAX / 2;

/// Who counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// Whoever may open the control socket.
    Root,
    V4(Ipv4Addr),
    /// A network of 64 bits: a host has as many addresses as it likes in its own.
    V6(u64),
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            // Every loopback address is this host.
            IpAddr::V6(Ipv6Addr::LOCALHOST) => Peer::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V4(address) if address.is_loopback() => Peer::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V4(address) => Peer::V4(address),
            IpAddr::V6(address) => Peer::V6(u64::try_from(address.to_bits() >> 64).unwrap_or_default()),
        }
    }
}

/// The connections of one door.
#[derive(Debug)]
pub(super) struct Room {
    /// The door's name in the metrics.
    door: &'static str,
    visits: Mutex<Guests<Peer, Present>>,
}

/// A connection, as the room knows it.
#[derive(Debug, Default)]
struct Present {
    task: Option<AbortHandle>,
    pages: usize,
}

impl Room {
    pub(super) fn new(door: &'static str, max: usize) -> Self {
        Room { door, visits: Mutex::new(Guests::new(max)) }
    }

    fn visits(&self) -> MutexGuard<'_, Guests<Peer, Present>> {
        // Every change is a single step: a panic elsewhere cannot leave it half done.
        self.visits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in, whose task is to be told with [`Room::began`]. Where there is no room, another one is closed for it.
    pub(super) fn enter(self: &Arc<Self>, peer: Peer) -> Visit {
        let (id, evicted) = self.visits().enter(peer, Present::default());
        self.close(evicted);
        Visit { room: Arc::clone(self), id, peer, requests: AtomicU32::new(0) }
    }

    /// This task ends with the visit.
    pub(super) fn began(&self, id: GuestId, task: AbortHandle) {
        if let Some(present) = self.visits().data(id) {
            present.task = Some(task);
        }
    }

    /// Closes the connection that is worth least.
    pub(super) fn evict(&self) {
        let evicted = self.visits().evict();
        self.close(evicted);
    }

    fn close(&self, evicted: Option<Present>) {
        if let Some(present) = evicted {
            metrics::connection_evicted(self.door);
            if let Some(task) = present.task {
                task.abort();
            }
        }
    }
}

/// A connection, until it is dropped. It is in the extensions of each of its requests.
#[derive(Debug)]
pub struct Visit {
    room: Arc<Room>,
    pub(super) id: GuestId,
    peer: Peer,
    requests: AtomicU32,
}

impl Visit {
    /// How many requests have come on it.
    pub(super) fn requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    /// A request has come. It is being answered until what is returned is dropped.
    pub(super) fn asks(self: &Arc<Self>) -> Answering {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.room.visits().asks(self.id, Claim::Busy);
        Answering(Arc::clone(self))
    }

    /// Room for a page, until what is returned is dropped. `None` when there is none, in all or for this peer.
    pub(super) fn page(self: &Arc<Self>) -> Option<PageRoom> {
        let mut visits = self.room.visits();
        let count = |of: &mut dyn Iterator<Item = &Present>| of.map(|present| present.pages).sum::<usize>();
        if count(&mut visits.all()) >= PAGES_MAX || count(&mut visits.of_peer(&self.peer)) >= PAGES_OF_PEER_MAX {
            return None;
        }
        visits.data(self.id)?.pages += 1;
        drop(visits);
        Some(PageRoom(Arc::clone(self)))
    }

    /// Says that a request was refused.
    pub(super) fn refused(&self, reason: &'static str) {
        metrics::request_refused(self.room.door, reason);
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.room.visits().leave(self.id);
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(super) struct Answering(Arc<Visit>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.room.visits().claims(self.0.id, Claim::Idle);
    }
}

/// A page that is being made or sent.
#[derive(Debug)]
pub(super) struct PageRoom(Arc<Visit>);

impl Drop for PageRoom {
    fn drop(&mut self) {
        if let Some(present) = self.0.room.visits().data(self.0.id) {
            present.pages = present.pages.saturating_sub(1);
        }
    }
}

/// An answer that is being sent for as long as something of it is missing.
#[derive(Debug)]
pub(super) struct Sending<B> {
    body: B,
    _answering: Answering,
}

impl<B> Sending<B> {
    pub(super) fn new(body: B, answering: Answering) -> Self {
        Sending { body, _answering: answering }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Sending<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
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
    fn a_host_is_one_peer_whichever_of_its_addresses_it_uses() {
        for (one, other, same) in [
            ("127.0.0.1", "127.9.8.7", true),
            ("127.0.0.1", "::1", true),
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("2001:db8::1", "2001:db8::ffff:2", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
        ] {
            assert_eq!(peer(one) == peer(other), same, "{one} {other}");
        }
    }

    #[test]
    fn one_peer_has_half_of_the_pages_and_all_have_so_many() {
        let room = Arc::new(Room::new("test", 100));
        let visits: Vec<_> = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.3"].iter().map(|at| Arc::new(room.enter(peer(at)))).collect();
        let mut pages: Vec<_> = (0..PAGES_OF_PEER_MAX).map(|_| visits[0].page().unwrap()).collect();
        assert!(visits[0].page().is_none() && visits[1].page().is_none());
        pages.extend((0..PAGES_MAX - PAGES_OF_PEER_MAX).map(|_| visits[2].page().unwrap()));
        assert!(visits[3].page().is_none(), "in all");
        drop(pages.remove(0));
        assert!(visits[3].page().is_some());
    }

    #[test]
    fn what_is_answered_is_not_closed_for_another_and_what_has_left_counts_no_more() {
        let room = Arc::new(Room::new("test", 2));
        let is_here = |visit: &Visit| room.visits().data(visit.id).is_some();
        let [first, second] = [0, 1].map(|_| Arc::new(room.enter(peer("10.0.0.1"))));
        let answering = first.asks();
        let third = room.enter(peer("10.0.0.1"));
        assert!(is_here(&first) && !is_here(&second) && is_here(&third));
        drop(second);
        drop(third);
        let fourth = room.enter(peer("10.0.0.2"));
        assert!(is_here(&first) && is_here(&fourth));
        drop(answering);
        let fifth = Arc::new(room.enter(peer("10.0.0.2")));
        assert!(!is_here(&first) && is_here(&fourth) && is_here(&fifth), "whose answer is over is the oldest");
        assert_eq!(first.requests(), 1);
    }
}
