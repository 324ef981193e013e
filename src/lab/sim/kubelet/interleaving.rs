//! The event orders that make a re-registration fail, by name, so that a test can count which of
//! them occurred.

use super::client::Client;
use super::profile::Clients;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What happens in a kubelet of 1.25 to 1.36 when an old and a new client of one resource meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Interleaving {
    /// The new client registers while the old one's stream is open, on another socket: both feed
    /// the same list.
    BothClientsFeedList,
    /// The late end of the old stream disconnects the new client.
    OldStreamEndsLate,
    /// A failing Register makes the kubelet forget a connected client; it will not notice that
    /// client's end.
    FailedRegisterForgetsClient,
    /// The new client is disconnected before ListAndWatch is called: Register succeeded, and no
    /// stream ever comes.
    CutBeforeListAndWatch,
    /// The end of a stream that the kubelet itself has cut disconnects the client that registered
    /// later.
    CutStreamEndsLate,
    /// The stopped endpoint is newer than the disconnected client: its stream stays open and
    /// nothing notifies its plugin.
    StoppedWhileStreaming,
    /// One socket is registered twice: two streams of one plugin.
    SocketRegisteredTwice,
    /// Two Registers overtake each other: the recorded client and the serving endpoint are
    /// different.
    RegisterOvertaken,
}

impl Interleaving {
    /// All interleavings.
    pub const ALL: [Interleaving; 8] = [
        Interleaving::BothClientsFeedList,
        Interleaving::OldStreamEndsLate,
        Interleaving::FailedRegisterForgetsClient,
        Interleaving::CutBeforeListAndWatch,
        Interleaving::CutStreamEndsLate,
        Interleaving::StoppedWhileStreaming,
        Interleaving::SocketRegisteredTwice,
        Interleaving::RegisterOvertaken,
    ];
}

impl fmt::Display for Interleaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The open streams, by the client's number.
pub(super) type Streams = BTreeMap<u64, Arc<Client>>;

/// The endpoint of `new` was set.
pub(super) fn on_endpoint(streams: &Streams, clients: &Clients, new: &Client) -> Vec<Interleaving> {
    let mut seen = Vec::new();
    let mut others = streams
        .values()
        .filter(|other| other.resource == new.resource && other.number != new.number)
        .peekable();
    if others.peek().is_some() {
        seen.push(if others.any(|other| other.socket == new.socket) {
            Interleaving::SocketRegisteredTwice
        } else {
            Interleaving::BothClientsFeedList
        });
    }
    // The other client has overtaken: its endpoint was set before, and it is recorded under the
    // name.
    if clients
        .newest(&new.resource)
        .is_some_and(|known| known.number > new.number && known.served.load(Ordering::Acquire))
    {
        seen.push(Interleaving::RegisterOvertaken);
    }
    seen
}

/// A Register failed, and the kubelet forgot its client and the earlier ones.
pub(super) fn on_failure(
    streams: &Streams,
    clients: &Clients,
    failed: &Client,
) -> Option<Interleaving> {
    let mut others = streams
        .values()
        .filter(|other| other.resource == failed.resource && other.number != failed.number);
    others
        .any(|other| other.is_open() && !clients.has(other))
        .then_some(Interleaving::FailedRegisterForgetsClient)
}

/// The end of the stream of `ended` disconnects `cut`.
pub(super) fn on_end(ended: &Client, cut: &Client) -> Option<Interleaving> {
    let other = ended.number != cut.number;
    other.then(|| {
        if ended.is_cut() {
            Interleaving::CutStreamEndsLate
        } else {
            Interleaving::OldStreamEndsLate
        }
    })
}

/// The endpoint of `stopped` is stopped because `cut` was disconnected.
pub(super) fn on_stop(clients: &Clients, cut: &Client, stopped: &Client) -> Option<Interleaving> {
    let is_other = stopped.number != cut.number && !stopped.is_cut() && clients.has(stopped);
    is_other.then_some(Interleaving::StoppedWhileStreaming)
}
