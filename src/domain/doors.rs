//! The limits of the doors (I13): how many connections each door has open at a time, and which one is closed to make room.
//!
//! A door is a socket where somebody else decides how much comes in. Without a limit one of them takes every descriptor of the
//! process, and then no registration, no ledger file and no scan can open any. The arithmetic of descriptors is here and nowhere else.
//! With L descriptors (`RLIMIT_NOFILE`, 16,384 where the system allows it: `host::raise_open_files`) the doors have at most:
//!
//! | door | connections | descriptors of each | descriptors, at most | of L, at most |
//! | --- | --- | --- | --- | --- |
//! | telemetry | [`TELEMETRY_MAX`] | 1, and [`BATCH`] that are being closed | 144 | L/16, and [`BATCH`] |
//! | plugin sockets, together | [`PLUGIN_MAX`] | 2: one to serve it, one to hand it on | 512 | L/4 |
//! | control socket | [`CONTROL_MAX`] | 1 | 32 | L/32 |
//! | handover socket | [`HANDOVER_MAX`] | 1; what comes with a message is closed | 8 | L/64 |
//!
//! That is less than 3/8 of L. At least 5/8 is kept back for what the daemon needs itself: some thirty descriptors of its own, the
//! ledger's files and one directory after the other in a scan among them; and for each resource its socket, and the connections on which the
//! kubelet reads its lists, which do not count above: two descriptors each, [`LISTS_MAX`] at a socket.

use std::cmp::Reverse;

/// Connections of telemetry: a scraper or two, a browser, the kubelet's probes, and room for many times as many.
pub const TELEMETRY_MAX: usize = 128;

/// Connections of the plugin sockets beside those on which lists are read: the kubelet's have come that far within milliseconds, and an
/// instance that hands over passes each request on by one.
pub const PLUGIN_MAX: usize = 256;

/// Streams of lists at one socket: each has a list in memory that is not read yet. The kubelet opens one, since each Register names a socket
/// of its own; the rest are for a person who looks.
pub const LISTS_MAX: usize = 4;

/// Connections of the control socket: people and their scripts, one for each verb.
pub const CONTROL_MAX: usize = 32;

/// Connections of the handover socket: one instance asks, and one more may wait.
pub const HANDOVER_MAX: usize = 8;

/// Connections that are taken in one turn of telemetry's thread. What they push out is closed in the turn after it.
pub const BATCH: usize = 16;

/// However few descriptors there are, a door has this many.
const MIN: usize = 4;

/// How many connections each door has open at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doors {
    /// Of telemetry.
    pub telemetry: usize,
    /// Of all plugin sockets together.
    pub plugin: usize,
    /// Of the control socket.
    pub control: usize,
    /// Of the handover socket.
    pub handover: usize,
}

impl Doors {
    /// With so many descriptors; `None` is no limit.
    #[must_use]
    pub fn of(descriptors: Option<u64>) -> Self {
        let descriptors = descriptors.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
        let share = |most: usize, of: usize| (descriptors / of).clamp(MIN, most);
        Doors {
            telemetry: share(TELEMETRY_MAX, 16),
            // Two descriptors each.
            plugin: share(PLUGIN_MAX, 8),
            control: share(CONTROL_MAX, 32),
            handover: share(HANDOVER_MAX, 64),
        }
    }
}

/// How much a connection is worth when one has to go, the least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Claim {
    /// Nothing is asked on it.
    Idle,
    /// It is being answered.
    Busy,
    /// Lists are read on it: its end takes the devices from the node for a moment. It is not closed for another one, and does not count;
    /// how many there are of these is bounded by [`LISTS_MAX`].
    Kept,
}

/// Names a connection of one door.
pub type GuestId = u64;

#[derive(Debug)]
struct Guest<P, D> {
    id: GuestId,
    peer: P,
    /// When it came, or asked for something the last time, in the order of such events.
    since: u64,
    claim: Claim,
    data: D,
}

/// The connections of one door, each with a peer and what its door knows of it. Whoever comes is let in, and when the door is full
/// another one goes for it: refusing newcomers would let those who came first keep everybody out, the kubelet's probes too.
///
/// Of those with the least [`Claim`] one goes of the peer that has most connections, so a peer with many pushes out its own; of these
/// the one that has asked for nothing for longest.
#[derive(Debug)]
pub struct Guests<P, D> {
    max: usize,
    events: u64,
    here: Vec<Guest<P, D>>,
}

impl<P: PartialEq, D> Guests<P, D> {
    /// A door with room for `max`.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Guests { max: max.max(1), events: 0, here: Vec::new() }
    }

    /// Lets one in. Its name, and what the door knows of the one that has to be closed for it.
    pub fn enter(&mut self, peer: P, data: D) -> (GuestId, Option<D>) {
        let counting = self.here.iter().filter(|guest| guest.claim < Claim::Kept).count();
        let evicted = if counting >= self.max { self.evict() } else { None };
        let id = self.event();
        self.here.push(Guest { id, peer, since: id, claim: Claim::Idle, data });
        (id, evicted)
    }

    /// Takes out the one that is worth least. `None` when there is none that may go.
    pub fn evict(&mut self) -> Option<D> {
        let mut peers: Vec<(&P, usize)> = Vec::new();
        for guest in &self.here {
            match peers.iter_mut().find(|(peer, _)| **peer == guest.peer) {
                Some((_, count)) => *count += 1,
                None => peers.push((&guest.peer, 1)),
            }
        }
        let count = |guest: &Guest<P, D>| peers.iter().find(|(peer, _)| **peer == guest.peer).map_or(0, |(_, count)| *count);
        let worth = |(_, guest): &(usize, &Guest<P, D>)| (guest.claim, Reverse(count(guest)), guest.since);
        let (least, _) = self.here.iter().enumerate().filter(|(_, guest)| guest.claim < Claim::Kept).min_by_key(worth)?;
        Some(self.here.swap_remove(least).data)
    }

    /// It asks for something, and is the newest again; and is worth this from now on.
    pub fn asks(&mut self, id: GuestId, claim: Claim) {
        let since = self.event();
        if let Some(guest) = self.here.iter_mut().find(|guest| guest.id == id) {
            (guest.since, guest.claim) = (since, claim);
        }
    }

    /// It is worth this from now on.
    pub fn claims(&mut self, id: GuestId, claim: Claim) {
        if let Some(guest) = self.here.iter_mut().find(|guest| guest.id == id) {
            guest.claim = claim;
        }
    }

    /// What the door knows of it.
    pub fn data(&mut self, id: GuestId) -> Option<&mut D> {
        self.here.iter_mut().find(|guest| guest.id == id).map(|guest| &mut guest.data)
    }

    /// What the door knows of those of one peer.
    pub fn of_peer(&self, peer: &P) -> impl Iterator<Item = &D> {
        self.here.iter().filter(move |guest| guest.peer == *peer).map(|guest| &guest.data)
    }

    /// Keeps those of whom this holds.
    pub fn retain(&mut self, stays: impl Fn(&D) -> bool) {
        self.here.retain(|guest| stays(&guest.data));
    }

    /// Each is worth what its data says.
    pub fn weigh(&mut self, claim: impl Fn(&D) -> Claim) {
        for guest in &mut self.here {
            guest.claim = claim(&guest.data);
        }
    }

    /// What the door knows of each, in no order.
    pub fn all(&self) -> impl Iterator<Item = &D> {
        self.here.iter().map(|guest| &guest.data)
    }

    /// It has gone.
    pub fn leave(&mut self, id: GuestId) -> Option<D> {
        let at = self.here.iter().position(|guest| guest.id == id)?;
        Some(self.here.swap_remove(at).data)
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
    fn the_doors_take_less_than_three_eighths_of_the_descriptors_and_never_more_than_their_bound() {
        for limit in [256, 1024, 2048, 4096, 16_384, 100_000] {
            let Doors { telemetry, plugin, control, handover } = Doors::of(Some(limit));
            let taken = telemetry + 2 * plugin + control + handover;
            assert!(taken as u64 * 8 <= limit * 3, "{taken} of {limit}");
        }
        let all = Doors { telemetry: TELEMETRY_MAX, plugin: PLUGIN_MAX, control: CONTROL_MAX, handover: HANDOVER_MAX };
        assert_eq!((Doors::of(Some(16_384)), Doors::of(None)), (all, all));
        assert_eq!(Doors::of(Some(256)), Doors { telemetry: 16, plugin: 32, control: 8, handover: 4 });
        assert_eq!(Doors::of(Some(20)).telemetry, MIN);
    }

    /// Each knows its number.
    fn full(max: usize) -> (Guests<&'static str, usize>, Vec<GuestId>) {
        let mut guests = Guests::new(max);
        let ids = (0..max).map(|number| guests.enter("a", number).0).collect();
        (guests, ids)
    }

    #[test]
    fn the_oldest_goes_for_a_new_one_and_whoever_asks_is_the_newest() {
        let (mut guests, ids) = full(3);
        guests.asks(ids[0], Claim::Idle);
        assert_eq!(guests.enter("a", 3).1, Some(1));
        assert_eq!(guests.enter("a", 4).1, Some(2));
        assert_eq!(guests.leave(ids[0]), Some(0));
        assert_eq!((guests.leave(ids[0]), guests.enter("a", 5).1), (None, None));
        assert_eq!(guests.all().count(), 3);
    }

    #[test]
    fn a_peer_with_many_connections_pushes_out_its_own() {
        let mut guests = Guests::new(4);
        guests.enter("scraper", 0);
        for number in 1..100 {
            assert_ne!(guests.enter("flood", number).1, Some(0));
        }
        assert_eq!(guests.enter("probe", 100).1, Some(97), "the flood's oldest");
        assert_eq!((guests.of_peer(&"flood").count(), guests.all().count()), (2, 4));
    }

    #[test]
    fn what_is_answered_stays_while_there_is_something_idle_and_what_reads_lists_stays() {
        let (mut guests, ids) = full(3);
        guests.claims(ids[0], Claim::Busy);
        assert_eq!(guests.enter("a", 3).1, Some(1));
        guests.claims(ids[2], Claim::Kept);
        assert_eq!(guests.enter("a", 4).1, None, "it does not count any more");
        assert_eq!([5, 6, 7].map(|number| guests.enter("a", number).1), [Some(3), Some(4), Some(5)]);
        guests.weigh(|_| Claim::Kept);
        assert_eq!((guests.enter("a", 8).1, guests.all().count()), (None, 5));
    }

    #[test]
    fn what_a_door_knows_of_one_can_change() {
        let (mut guests, ids) = full(1);
        *guests.data(ids[0]).unwrap() = 7;
        assert_eq!((guests.evict(), guests.evict(), guests.data(ids[0])), (Some(7), None, None));
    }
}
