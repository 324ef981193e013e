//! The registration of one resource, as a pure machine: events and the time in, Register out.
//!
//! ```text
//!                    kubelet seen                       ok
//!   AwaitingKubelet ─────────────▶ Registering ──────────────────▶ AwaitingStream(250 ms)
//!        ▲  nobody listens │         ▲   ▲ │ refused                   │ opened      │ none came
//!        └─────────────────┘         │   │ ▼                           ▼             ▼
//!                          due ──────┘   BackingOff ◀── stream ended ─ Settling ──▶ (BackingOff)
//!                                                                      │ due: Register once more
//!                                        stream ended, socket lost ─── Steady
//!   stream ended, once too often ─▶ Truce(30 s) ── due ─▶ Registering
//!   hung up, or come and gone before the answer, in AwaitingStream ─▶ BackingOff, without the rest of the 250 ms
//!   disowned, or changed, in Settling or Steady ─▶ Registering
//!   kubelet seen with another generation, from any state ─▶ Registering
//! ```
//!
//! `AwaitingKubelet` also tries again on its own, slowly: a missed inotify event must not strand a resource.
//!
//! **The truce** (I7). When another plugin serves the same resource and registers whenever it loses it, as this one does,
//! the two take it from each other for ever, and every change of hands is a moment without devices. The kubelet does not
//! tell who cut a stream. But its own races end after a few rounds: so when stream after stream is lost and none of them
//! lived for a minute, the machine holds back, says so, and tries every half minute until one lives.

use crate::domain::{KubeletGeneration, Safeguard};
use std::collections::BTreeMap;
use std::time::Duration;

/// The kubelet opens ListAndWatch right after Register, usually before its answer arrives.
pub(crate) const STREAM_DEADLINE: Duration = Duration::from_millis(250);
/// After a recovery the kubelet may have stopped the new endpoint without closing its stream; one more Register
/// gives it a fresh one. Later than the goroutine that does the stopping could still run.
pub(crate) const SETTLE_AFTER: Duration = Duration::from_millis(700);
/// A goroutine of the kubelet that clears up after a stream, or after a Register that failed, may be stuck for longer than
/// that, and then stop or forget whoever stands there by then; one that still dials a registration whose stream was waited
/// for in vain may put that one in the place of its successors. So long after the last of these, one more Register; it is
/// as long as a kubelet dials at most.
const DOUBT_FOR: Duration = Duration::from_secs(12);
/// Waits between tries, in milliseconds. The first try after a loss does not wait, and the next ones hardly: a socket is seen a
/// moment before anybody listens on it, and two goroutines of the kubelet clear up after a handover, each of which may drop who
/// registered before it was done. The last one repeats.
const BACKOFF_MS: [u64; 12] = [0, 1, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
/// How often an absent kubelet is tried without being told that it is back.
const ABSENT_RETRY: Duration = Duration::from_secs(10);
/// A stream that lived this long ends a series of failures.
const PROVEN_AFTER: Duration = Duration::from_secs(1);
/// Streams that may be lost in a row. The simulated nights with nobody else after the resource never come to a truce.
const LOSSES_MAX: u32 = 30;
/// A stream that lived this long is no longer contested.
const PEACE_AFTER: Duration = Duration::from_secs(60);
/// How long a contested resource is left alone: what the other plugin gets in peace of each minute is half.
const TRUCE: Duration = Duration::from_secs(30);

/// What the machine is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// The kubelet's socket is there (with this identity), or is not.
    Kubelet(Option<KubeletGeneration>),
    /// Register succeeded.
    Registered(u64),
    /// Register failed: the kubelet answered with an error, or our own socket could not be made.
    Refused(u64),
    /// Register failed: nobody listens on the kubelet's socket.
    Absent(u64),
    /// A stream opened on the socket of this registration.
    StreamOpened(u64),
    /// A stream on the socket of this registration ended.
    StreamEnded(u64),
    /// The kubelet has hung up on the socket of this registration before it asked for the lists.
    HungUp(u64),
    /// The file of this registration's socket is gone.
    SocketLost(u64),
    /// The kubelet has the resource from somebody else, or not at all, although a stream is open (`audit.rs`).
    Disowned,
    /// What the kubelet was told at Register is no longer so.
    Changed,
    /// Time has passed.
    Tick,
}

/// What is known of the resource's place in the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// No kubelet to register with.
    AwaitingKubelet { retry_at: Duration },
    /// A Register is under way; whether it will succeed is not known.
    Registering,
    /// The last try failed or its stream ended; the next one is due.
    BackingOff { until: Duration },
    /// Registered; whether the kubelet will open the stream is not known.
    AwaitingStream { until: Duration },
    /// The stream is open, after a loss; whether the kubelet has really kept the endpoint is not known.
    Settling { until: Duration },
    /// Registered, the stream is open, nothing is due.
    Steady,
    /// Lost too often: somebody else wants the resource as much, and is left alone for a while.
    Truce { until: Duration },
}

/// The machine of one resource.
#[derive(Debug)]
pub(crate) struct Machine {
    state: State,
    kubelet: Option<KubeletGeneration>,
    /// Whether there has been a kubelet before the present one.
    had_kubelet: bool,
    /// The latest registration that was begun.
    latest: u64,
    /// Open streams of each registration.
    streams: BTreeMap<u64, u32>,
    /// Tries since the last proven stream.
    tries: usize,
    /// Since when the latest registration's stream has been open.
    opened_at: Option<Duration>,
    /// Whether the kubelet has hung up on the latest registration: there will be no stream.
    hung_up: bool,
    /// Whether the next open stream has to be settled.
    unsettled: bool,
    /// Until when what was lost, or failed, may have consequences.
    doubt_until: Option<Duration>,
    /// Whether the last try found nobody to register with.
    absent: bool,
    /// Streams lost since one lived in peace.
    losses: u32,
}

impl Machine {
    /// A machine that has not registered yet. Its registrations are numbered from `base` + 1.
    pub(crate) fn new(now: Duration, base: u64) -> Self {
        Machine {
            state: State::AwaitingKubelet { retry_at: now },
            kubelet: None,
            had_kubelet: false,
            latest: base,
            streams: BTreeMap::new(),
            tries: 0,
            opened_at: None,
            hung_up: false,
            // An earlier life, or an earlier process, may have lost a stream that the kubelet is just clearing up.
            unsettled: true,
            doubt_until: Some(now + DOUBT_FOR),
            absent: false,
            losses: 0,
        }
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Whether the kubelet has the resource, as far as can be known: its stream is open.
    pub(crate) fn is_registered(&self) -> bool {
        let settling = self.state == State::Registering && self.is_open(self.latest.wrapping_sub(1));
        settling || matches!(self.state, State::Settling { .. } | State::Steady)
    }

    /// Whether there is no kubelet, as far as the last try can tell. Tries go on, quick ones and slow ones.
    pub(crate) fn is_kubelet_absent(&self) -> bool {
        self.absent
    }

    /// Whether streams are lost so often that somebody else must want the resource too.
    pub(crate) fn is_contested(&self) -> bool {
        self.losses > LOSSES_MAX
    }

    /// Until when the kubelet may do something for what was lost.
    pub(crate) fn doubt_until(&self) -> Option<Duration> {
        self.doubt_until
    }

    /// The latest registration, while its socket matters.
    pub(crate) fn latest(&self) -> u64 {
        self.latest
    }

    /// When `Tick` is due.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        match self.state {
            State::AwaitingKubelet { retry_at: until }
            | State::BackingOff { until }
            | State::Settling { until }
            | State::Truce { until } => Some(until),
            State::AwaitingStream { until } => Safeguard::StreamDeadline.is_on().then_some(until),
            // A Register under way has its own deadline and always ends in an event.
            State::Registering | State::Steady => None,
        }
    }

    /// Takes one event. `Some` is the number of the registration to begin now.
    pub(crate) fn on(&mut self, event: Event, now: Duration) -> Option<u64> {
        match event {
            Event::Kubelet(None) => {
                self.kubelet = None;
                None
            }
            Event::Kubelet(Some(generation)) => {
                let before = self.kubelet.replace(generation);
                // Another kubelet knows nothing of us: what is under way with the old one no longer matters.
                (before != Some(generation)).then(|| {
                    // Its streams end with it; their ends may be seen late, or never.
                    self.streams.clear();
                    // And what was lost was lost in another one, unless in an earlier life of ours.
                    self.doubt_until.take_if(|_| self.had_kubelet);
                    self.had_kubelet = true;
                    (self.absent, self.tries, self.losses) = (false, 0, 0);
                    self.register()
                })
            }
            Event::StreamOpened(number) => {
                *self.streams.entry(number).or_default() += 1;
                if number == self.latest {
                    self.opened_at.get_or_insert(now);
                    if matches!(self.state, State::AwaitingStream { .. }) {
                        self.arrive(now);
                    }
                }
                None
            }
            Event::StreamEnded(number) => {
                if let Some(open) = self.streams.get_mut(&number) {
                    *open -= 1;
                    if *open == 0 {
                        self.streams.remove(&number);
                    }
                }
                if Safeguard::ReRegister.is_on() { self.lost(now) } else { None }
            }
            Event::HungUp(number) if number == self.latest => {
                self.hung_up = true;
                self.due(now)
            }
            Event::SocketLost(number) if number == self.latest => self.lost(now),
            Event::Disowned if matches!(self.state, State::Settling { .. } | State::Steady) => {
                self.unsettled = true;
                self.doubt_until = Some(now + DOUBT_FOR);
                Some(self.register())
            }
            Event::Changed if matches!(self.state, State::Settling { .. } | State::Steady) => Some(self.register()),
            Event::Registered(number) if self.is_under_way(number) => self.answered(now),
            Event::Refused(number) if self.is_under_way(number) => {
                self.absent = false;
                self.doubt_until = Some(now + DOUBT_FOR);
                self.back_off(now);
                self.due(now)
            }
            Event::Absent(number) if self.is_under_way(number) => {
                self.absent = true;
                self.doubt_until = Some(now + DOUBT_FOR);
                // Between its bind and its listen a new kubelet refuses for an instant: the first tries are quick.
                if self.tries < BACKOFF_MS.len() {
                    self.back_off(now);
                } else {
                    self.state = State::AwaitingKubelet { retry_at: now + ABSENT_RETRY };
                }
                self.due(now)
            }
            Event::Tick => self.due(now),
            // News of a registration that has been superseded.
            Event::HungUp(_) | Event::SocketLost(_) | Event::Registered(_) | Event::Refused(_) | Event::Absent(_) => None,
            // Nothing is registered that could be lost, or what is registered is new.
            Event::Disowned | Event::Changed => None,
        }
    }

    fn is_under_way(&self, number: u64) -> bool {
        self.state == State::Registering && number == self.latest
    }

    fn is_open(&self, number: u64) -> bool {
        self.streams.contains_key(&number)
    }

    /// The kubelet has taken the Register under way.
    fn answered(&mut self, now: Duration) -> Option<u64> {
        self.absent = false;
        self.state = State::AwaitingStream { until: now + STREAM_DEADLINE };
        if self.is_open(self.latest) {
            self.arrive(now);
        } else if self.opened_at.is_some() && Safeguard::ReRegister.is_on() {
            // Its stream came and went before the answer: no other one will come.
            return self.lost(now);
        }
        self.due(now)
    }

    /// The stream of the latest registration is there.
    fn arrive(&mut self, now: Duration) {
        let settle_at = if std::mem::take(&mut self.unsettled) {
            Some(now + SETTLE_AFTER)
        } else {
            self.doubt_until.take_if(|until| *until <= now);
            self.doubt_until
        };
        self.state = match settle_at.filter(|_| Safeguard::SettlingRegister.is_on()) {
            Some(until) => State::Settling { until },
            None => State::Steady,
        };
    }

    /// A stream or a socket was lost: the kubelet may have dropped the resource, whichever registration it was.
    fn lost(&mut self, now: Duration) -> Option<u64> {
        self.unsettled = true;
        self.doubt_until = Some(now + DOUBT_FOR);
        match self.state {
            // The Register under way may be the one that was cut off (it can still succeed, with its stream gone):
            // its own end leads on, or its missing stream.
            State::Registering | State::AwaitingKubelet { .. } | State::BackingOff { .. } | State::Truce { .. } => None,
            State::AwaitingStream { .. } | State::Settling { .. } | State::Steady => {
                let lived = self.opened_at.map(|opened| now.saturating_sub(opened)).unwrap_or_default();
                if lived >= PROVEN_AFTER {
                    self.tries = 0;
                }
                self.losses = if lived >= PEACE_AFTER { 1 } else { self.losses.saturating_add(1) };
                if self.is_contested() {
                    self.state = State::Truce { until: now + TRUCE };
                    return None;
                }
                self.back_off(now);
                self.due(now)
            }
        }
    }

    fn back_off(&mut self, now: Duration) {
        let step = BACKOFF_MS.get(self.tries).or(BACKOFF_MS.last()).copied().unwrap_or_default();
        self.state = State::BackingOff { until: now + Duration::from_millis(step) };
    }

    /// Does what is due at `now`.
    fn due(&mut self, now: Duration) -> Option<u64> {
        match self.state {
            State::AwaitingKubelet { retry_at } if retry_at <= now => Some(self.register()),
            State::BackingOff { until } | State::Settling { until } | State::Truce { until } if until <= now => Some(self.register()),
            State::AwaitingStream { until } if (until <= now || self.hung_up) && Safeguard::StreamDeadline.is_on() => {
                // A kubelet of 1.24 or older dials after its answer: this registration may still come, and overtake those
                // that follow, on a socket that nobody serves any more.
                self.doubt_until = Some(now + DOUBT_FOR);
                self.unsettled = true;
                self.back_off(now);
                self.due(now)
            }
            _ => None,
        }
    }

    fn register(&mut self) -> u64 {
        self.latest += 1;
        self.tries = self.tries.saturating_add(1);
        (self.opened_at, self.hung_up) = (None, false);
        self.state = State::Registering;
        self.latest
    }
}

#[cfg(test)]
mod tests;
