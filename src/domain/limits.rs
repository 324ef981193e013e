//! Limits of open connections at each socket (I14), and the rule of eviction.
//!
//! A peer decides how many connections arrive. Without a limit one socket could take every
//! descriptor of the process. Then no registration, no file of the ledger and no scan could open
//! one. The arithmetic of descriptors is here and nowhere else. With L descriptors
//! (`RLIMIT_NOFILE`, 16,384 where the system allows it: `host::raise_open_files`) the sockets have
//! at most:
//!
//! | socket | connections | descriptors of each | at most | of L, at most |
//! | --- | --- | --- | --- | --- |
//! | telemetry | [`TELEMETRY_MAX`] | 1, plus [`BATCH`] being closed | 144 | L/16, plus [`BATCH`] |
//! | plugin and DRA sockets, together | [`PLUGIN_MAX`] | 2: to serve, and to pass on | 512 | L/4 |
//! | control | [`CONTROL_MAX`] | 1 | 32 | L/32 |
//! | handover | [`HANDOVER_MAX`] | 1; files of a message are closed | 8 | L/64 |
//! | earlier instances' connections | [`HELD_MAX`] | 1, and a copy while passed on | 4,096 | L/4 |
//!
//! The sum is less than 5/8 of L. At least 3/8 is reserved for the daemon itself: about thirty
//! descriptors, among them the files of the ledger and one directory of a scan at a time. Each
//! resource adds its socket, and the connections of the kubelet's streams. These are not in the
//! table: each has two descriptors, and a socket has [`LISTS_MAX`] of them.

use std::cmp::Reverse;

/// Connections of telemetry. A node has one or two scrapers, probes of the kubelet, and sometimes a
/// browser.
pub const TELEMETRY_MAX: usize = 128;

/// Connections of the plugin sockets and of the DRA driver without a stream. The kubelet opens its
/// stream within milliseconds.
pub const PLUGIN_MAX: usize = 256;

/// Streams at one plugin socket. Each may keep one unread list in memory. The kubelet opens one,
/// since each Register names a new socket. The others are for debugging by a person.
pub const LISTS_MAX: usize = 4;

/// Connections that are passed on from one instance to the next. The kubelet keeps two or three for
/// each resource and instance until it is restarted. systemd's fd store has space for them and
/// their sockets (`FileDescriptorStoreMax=`).
pub const HELD_MAX: usize = 2048;

/// Connections of the control socket. Each verb opens one.
pub const CONTROL_MAX: usize = 32;

/// Connections of the handover socket. One instance sends requests, and a second one may wait.
pub const HANDOVER_MAX: usize = 8;

/// The number of connections that telemetry accepts before it closes the evicted ones.
pub const BATCH: usize = 16;

/// The minimum for each socket, even with very few descriptors.
const MIN: usize = 4;

/// The limit of open connections for each socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Telemetry.
    pub telemetry: usize,
    /// All plugin sockets together.
    pub plugin: usize,
    /// The control socket.
    pub control: usize,
    /// The handover socket.
    pub handover: usize,
    /// Those of earlier instances.
    pub held: usize,
}

impl ConnectionLimits {
    /// The limits for a process with at most `descriptors` open files; `None` means unlimited.
    #[must_use]
    pub fn of(descriptors: Option<u64>) -> Self {
        let descriptors =
            descriptors.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let share = |max: usize, divisor: usize| (descriptors / divisor).clamp(MIN, max);
        ConnectionLimits {
            telemetry: share(TELEMETRY_MAX, 16),
            // Two descriptors each.
            plugin: share(PLUGIN_MAX, 8),
            control: share(CONTROL_MAX, 32),
            handover: share(HANDOVER_MAX, 64),
            // A copy of each while they are passed on.
            held: share(HELD_MAX, 8),
        }
    }
}

/// The use of a connection, the least important first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// No request is in flight.
    Idle,
    /// A request is in flight.
    Request,
    /// The peer reads lists. Closing this connection would remove the devices from the node for a
    /// short time. So it is never evicted, and does not count; [`LISTS_MAX`] limits the number.
    Lists,
}

/// Identifies a connection in one table.
pub type ConnectionId = u64;

#[derive(Debug)]
struct Entry<P, D> {
    id: ConnectionId,
    peer: P,
    /// The number of its last event: its arrival, or a request.
    last: u64,
    usage: Use,
    data: D,
}

/// The connections of one socket. A new connection is always accepted; when the table is full,
/// another one is evicted. If new ones were refused, the first peers could keep out all others, and
/// the kubelet's probes too.
///
/// The evicted connection has the least important [`Use`], belongs to the peer with the most
/// connections, and has been without a request for the longest time, in this order. So a peer with
/// many connections loses one of its own.
#[derive(Debug)]
pub struct ConnectionTable<P, D> {
    max: usize,
    events: u64,
    entries: Vec<Entry<P, D>>,
}

impl<P: PartialEq, D> ConnectionTable<P, D> {
    /// A table for `max` connections.
    #[must_use]
    pub fn new(max: usize) -> Self {
        ConnectionTable { max: max.max(1), events: 0, entries: Vec::new() }
    }

    /// Adds a connection. Returns its id, and the data of the evicted connection, which the caller
    /// must close.
    pub fn add(&mut self, peer: P, data: D) -> (ConnectionId, Option<D>) {
        let counted = self.entries.iter().filter(|entry| entry.usage < Use::Lists).count();
        let evicted = if counted >= self.max { self.evict() } else { None };
        let id = self.event();
        self.entries.push(Entry { id, peer, last: id, usage: Use::Idle, data });
        (id, evicted)
    }

    /// Removes the connection that is the first to evict. `None` if every connection is exempt.
    pub fn evict(&mut self) -> Option<D> {
        let mut peers: Vec<(&P, usize)> = Vec::new();
        for entry in &self.entries {
            match peers.iter_mut().find(|(peer, _)| **peer == entry.peer) {
                Some((_, count)) => *count += 1,
                None => peers.push((&entry.peer, 1)),
            }
        }
        let count = |entry: &Entry<P, D>| {
            peers.iter().find(|(peer, _)| **peer == entry.peer).map_or(0, |(_, count)| *count)
        };
        let order =
            |(_, entry): &(usize, &Entry<P, D>)| (entry.usage, Reverse(count(entry)), entry.last);
        let (first, _) = self
            .entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.usage < Use::Lists)
            .min_by_key(order)?;
        Some(self.entries.swap_remove(first).data)
    }

    /// Records a request on the connection.
    pub fn request(&mut self, id: ConnectionId) {
        let last = self.event();
        if let Some(entry) = self.entry(id) {
            (entry.last, entry.usage) = (last, Use::Request);
        }
    }

    /// Records that the request was answered.
    pub fn answered(&mut self, id: ConnectionId) {
        if let Some(entry) = self.entry(id) {
            entry.usage = Use::Idle;
        }
    }

    /// Sets the use of every connection.
    pub fn set_use(&mut self, usage: impl Fn(&D) -> Use) {
        for entry in &mut self.entries {
            entry.usage = usage(&entry.data);
        }
    }

    /// The data of a connection.
    pub fn data(&mut self, id: ConnectionId) -> Option<&mut D> {
        self.entry(id).map(|entry| &mut entry.data)
    }

    /// The data of all connections of a peer, in any order.
    pub fn of_peer(&self, peer: &P) -> impl Iterator<Item = &D> {
        self.entries.iter().filter(move |entry| entry.peer == *peer).map(|entry| &entry.data)
    }

    /// The data of all connections, in any order.
    pub fn all(&self) -> impl Iterator<Item = &D> {
        self.entries.iter().map(|entry| &entry.data)
    }

    /// Removes the connections that `keep` rejects.
    pub fn retain(&mut self, keep: impl Fn(&D) -> bool) {
        self.entries.retain(|entry| keep(&entry.data));
    }

    /// Removes a connection that has ended.
    pub fn remove(&mut self, id: ConnectionId) -> Option<D> {
        let at = self.entries.iter().position(|entry| entry.id == id)?;
        Some(self.entries.swap_remove(at).data)
    }

    fn entry(&mut self, id: ConnectionId) -> Option<&mut Entry<P, D>> {
        self.entries.iter_mut().find(|entry| entry.id == id)
    }

    fn event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sockets_take_less_than_three_eighths_of_the_descriptors() {
        for limit in [256, 1024, 2048, 4096, 16_384, 100_000] {
            let ConnectionLimits { telemetry, plugin, control, handover, held } =
                ConnectionLimits::of(Some(limit));
            let taken = telemetry + 2 * plugin + control + handover;
            assert!(taken as u64 * 8 <= limit * 3, "{taken} of {limit}");
            assert!(held as u64 * 8 <= limit, "{held} of {limit}");
        }
        let (telemetry, plugin) = (TELEMETRY_MAX, PLUGIN_MAX);
        let all = ConnectionLimits {
            telemetry,
            plugin,
            control: CONTROL_MAX,
            handover: HANDOVER_MAX,
            held: HELD_MAX,
        };
        assert_eq!((ConnectionLimits::of(Some(16_384)), ConnectionLimits::of(None)), (all, all));
        assert_eq!(
            ConnectionLimits::of(Some(256)),
            ConnectionLimits { telemetry: 16, plugin: 32, control: 8, handover: 4, held: 32 }
        );
        assert_eq!(ConnectionLimits::of(Some(20)).telemetry, MIN);
    }

    /// The data of each connection is its number.
    fn full(max: usize) -> (ConnectionTable<&'static str, usize>, Vec<ConnectionId>) {
        let mut table = ConnectionTable::new(max);
        let ids = (0..max).map(|number| table.add("a", number).0).collect();
        (table, ids)
    }

    #[test]
    fn the_connection_that_has_been_idle_for_longest_is_evicted() {
        let (mut table, ids) = full(3);
        table.request(ids[0]);
        table.answered(ids[0]);
        assert_eq!(table.add("a", 3).1, Some(1));
        assert_eq!(table.add("a", 4).1, Some(2));
        assert_eq!(table.remove(ids[0]), Some(0));
        assert_eq!((table.remove(ids[0]), table.add("a", 5).1), (None, None));
        assert_eq!(table.all().count(), 3);
    }

    #[test]
    fn a_peer_with_many_connections_loses_its_own() {
        let mut table = ConnectionTable::new(4);
        table.add("scraper", 0);
        for number in 1..100 {
            assert_ne!(table.add("flood", number).1, Some(0));
        }
        assert_eq!(table.add("probe", 100).1, Some(97), "the oldest of the flood");
        assert_eq!((table.of_peer(&"flood").count(), table.all().count()), (2, 4));
    }

    #[test]
    fn a_request_in_flight_is_evicted_after_idle_connections_and_lists_are_never_evicted() {
        let (mut table, ids) = full(3);
        table.request(ids[0]);
        assert_eq!(table.add("a", 3).1, Some(1));
        table.set_use(|number| match number {
            0 => Use::Request,
            2 => Use::Lists,
            _ => Use::Idle,
        });
        assert_eq!(table.add("a", 4).1, None, "lists do not count");
        assert_eq!([5, 6].map(|number| table.add("a", number).1), [Some(3), Some(4)]);
        table.set_use(|_| Use::Lists);
        assert_eq!((table.add("a", 7).1, table.all().count()), (None, 5));
        assert_eq!((table.evict(), table.evict()), (Some(7), None));
    }

    #[test]
    fn the_data_of_a_connection_can_change() {
        let (mut table, ids) = full(1);
        *table.data(ids[0]).unwrap() = 7;
        assert_eq!((table.evict(), table.data(ids[0])), (Some(7), None));
    }
}
