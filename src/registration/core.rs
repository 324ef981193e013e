//! The registration of one resource, as a pure state machine: events and the time in, Register out.
//!
//! | in | at | to |
//! | --- | --- | --- |
//! | any state | a kubelet of another generation is seen | Registering |
//! | AwaitingKubelet | 10 s have passed | Registering |
//! | Registering | Register succeeded | AwaitingStream, for 250 ms |
//! | Registering | Register was refused | BackingOff |
//! | Registering | no process listens: eleven tries, then more | BackingOff, then AwaitingKubelet |
//! | AwaitingStream | the stream is open | Settling after a loss or failure, else Steady |
//! | AwaitingStream | no stream came, or its connection closed early | BackingOff |
//! | AwaitingStream, Settling, Steady | a stream ended, the socket was lost | BackingOff |
//! | the same | the same, more than 30 times in a row | Contested, for 30 s |
//! | Settling | 0.7 s after the stream opened, then 12 s after the loss | Registering |
//! | Settling, Steady | mismatch (`audit.rs`), or the options changed | Registering |
//! | BackingOff, Contested | the pause is over | Registering |
//!
//! A stream that opened, or ended, before Register was answered counts when the answer comes.
//! `AwaitingKubelet` tries again without an event, because a missed inotify event must not strand a
//! resource.
//!
//! **A contested resource** (I7). Another plugin may serve the same resource, and register whenever
//! it loses it, as this one does. Then the two take it from each other without end, and at every
//! change the kubelet has no devices for a short time. The kubelet does not report who ended a
//! stream. But its own races end after a few rounds. So when stream after stream is lost and none
//! of them lived for a minute, the machine waits, reports the resource as contested, and tries
//! every half minute until a stream lives that long.

mod state;

pub(crate) use self::state::{Event, State};

use crate::domain::{KubeletGeneration, Safeguard};
use std::collections::BTreeMap;
use std::time::Duration;

/// The kubelet opens ListAndWatch right after Register, usually before its answer arrives.
pub(crate) const STREAM_DEADLINE: Duration = Duration::from_millis(250);
/// After a recovery the kubelet may have stopped the new endpoint without closing its stream. One
/// more Register gives it a new endpoint. By this time the goroutine that stops endpoints has
/// usually ended.
pub(crate) const SETTLE_AFTER: Duration = Duration::from_millis(700);
/// How long after a loss or a failure one more Register follows. The kubelet's goroutine that
/// cleans up after a stream or a failed Register may be stuck for longer than `SETTLE_AFTER`, and
/// then stop or forget the endpoint that is current by then. A goroutine that still dials a
/// registration whose stream did not come may replace its successors. This is the longest time for
/// which a kubelet dials.
const DOUBT_FOR: Duration = Duration::from_secs(12);
/// Pauses between tries, in milliseconds. The first try after a loss does not wait, and the next
/// ones hardly: a socket file exists shortly before the kubelet listens on it, and two goroutines
/// of the kubelet clean up after a handover. Each may drop a plugin that registered before the
/// goroutine ended. The last pause repeats.
const BACKOFF_MS: [u64; 12] = [0, 1, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
/// How often an absent kubelet is tried without an event.
const ABSENT_RETRY: Duration = Duration::from_secs(10);
/// A stream that lived this long ends a series of failures.
const PROVEN_AFTER: Duration = Duration::from_secs(1);
/// Streams that may be lost in a row. Simulated runs without another plugin never lose more.
const LOSSES_MAX: u32 = 30;
/// A stream that lived this long shows that the resource is no longer contested.
const UNCONTESTED_AFTER: Duration = Duration::from_secs(60);
/// The pause between tries of a contested resource. The other plugin has it undisturbed for half of
/// each minute.
const CONTESTED_RETRY: Duration = Duration::from_secs(30);

/// The machine of one resource.
#[derive(Debug)]
pub(crate) struct Machine {
    state: State,
    kubelet: Option<KubeletGeneration>,
    /// Whether a kubelet was seen before the present one.
    had_kubelet: bool,
    /// The latest registration that was begun.
    latest: u64,
    /// Open streams of each registration.
    streams: BTreeMap<u64, u32>,
    /// Tries since the last proven stream.
    tries: usize,
    /// When the stream of the latest registration opened.
    opened_at: Option<Duration>,
    /// Whether the kubelet closed its connection to the latest registration early: no stream will
    /// come.
    closed_early: bool,
    /// Whether the next stream to open has to be settled by one more Register.
    unsettled: bool,
    /// Until when a loss or a failure may have consequences in the kubelet.
    doubt_until: Option<Duration>,
    /// Whether no process listened at the last try.
    absent: bool,
    /// Streams lost in a row. One that lived for [`UNCONTESTED_AFTER`] starts the count again.
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
            closed_early: false,
            // The kubelet may still clean up after a stream that an earlier life or process lost.
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
        let settling =
            self.state == State::Registering && self.is_open(self.latest.wrapping_sub(1));
        settling || matches!(self.state, State::Settling { .. } | State::Steady)
    }

    /// Whether the last try found no kubelet. Tries continue, at first quickly, then slowly.
    pub(crate) fn is_kubelet_absent(&self) -> bool {
        self.absent
    }

    /// Whether streams are lost so often that another plugin must be taking the resource.
    pub(crate) fn is_contested(&self) -> bool {
        self.losses > LOSSES_MAX
    }

    /// Until when the kubelet may still react to a loss.
    pub(crate) fn doubt_until(&self) -> Option<Duration> {
        self.doubt_until
    }

    /// The latest registration. Its socket may still be used.
    pub(crate) fn latest(&self) -> u64 {
        self.latest
    }

    /// When `Tick` is due.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        match self.state {
            State::AwaitingKubelet { retry_at: until }
            | State::BackingOff { until }
            | State::Settling { until }
            | State::Contested { until } => Some(until),
            State::AwaitingStream { until } => Safeguard::StreamDeadline.is_on().then_some(until),
            // A Register in progress has its own deadline and always ends in an event.
            State::Registering | State::Steady => None,
        }
    }

    /// Handles one event. `Some` is the number of the registration to begin now.
    pub(crate) fn on(&mut self, event: Event, now: Duration) -> Option<u64> {
        match event {
            Event::Kubelet(None) => {
                self.kubelet = None;
                None
            }
            Event::Kubelet(Some(generation)) => {
                let before = self.kubelet.replace(generation);
                // A new kubelet knows no plugin. A Register in progress with the old one no longer
                // matters.
                (before != Some(generation)).then(|| {
                    // The old kubelet's streams end with it. Their ends may be seen late, or never.
                    self.streams.clear();
                    // Its losses ended with it too, except those of an earlier life of this actor.
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
            Event::ClosedEarly(number) if number == self.latest => {
                self.closed_early = true;
                self.due(now)
            }
            Event::SocketLost(number) if number == self.latest => self.lost(now),
            Event::Mismatch if matches!(self.state, State::Settling { .. } | State::Steady) => {
                self.unsettled = true;
                self.doubt_until = Some(now + DOUBT_FOR);
                Some(self.register())
            }
            Event::Changed if matches!(self.state, State::Settling { .. } | State::Steady) => {
                Some(self.register())
            }
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
                // Between its bind and its listen a new kubelet refuses connections, so the first
                // tries are quick.
                if self.tries < BACKOFF_MS.len() {
                    self.back_off(now);
                } else {
                    self.state = State::AwaitingKubelet { retry_at: now + ABSENT_RETRY };
                }
                self.due(now)
            }
            Event::Tick => self.due(now),
            // An event of a superseded registration.
            Event::ClosedEarly(_)
            | Event::SocketLost(_)
            | Event::Registered(_)
            | Event::Refused(_)
            | Event::Absent(_) => None,
            // No registration could be lost, or a new one is in progress.
            Event::Mismatch | Event::Changed => None,
        }
    }

    fn is_under_way(&self, number: u64) -> bool {
        self.state == State::Registering && number == self.latest
    }

    fn is_open(&self, number: u64) -> bool {
        self.streams.contains_key(&number)
    }

    /// The kubelet has accepted the Register in progress.
    fn answered(&mut self, now: Duration) -> Option<u64> {
        self.absent = false;
        self.state = State::AwaitingStream { until: now + STREAM_DEADLINE };
        if self.is_open(self.latest) {
            self.arrive(now);
        } else if self.opened_at.is_some() && Safeguard::ReRegister.is_on() {
            // Its stream opened and ended before the answer: no other one will come.
            return self.lost(now);
        }
        self.due(now)
    }

    /// The stream of the latest registration is open.
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

    /// A stream or a socket of any registration was lost: the kubelet may have dropped the
    /// resource.
    fn lost(&mut self, now: Duration) -> Option<u64> {
        self.unsettled = true;
        self.doubt_until = Some(now + DOUBT_FOR);
        match self.state {
            // The Register in progress may be affected too: it can still succeed, with its stream
            // lost. Its result, or its missing stream, leads to the next try.
            State::Registering
            | State::AwaitingKubelet { .. }
            | State::BackingOff { .. }
            | State::Contested { .. } => None,
            State::AwaitingStream { .. } | State::Settling { .. } | State::Steady => {
                let lived =
                    self.opened_at.map(|opened| now.saturating_sub(opened)).unwrap_or_default();
                if lived >= PROVEN_AFTER {
                    self.tries = 0;
                }
                self.losses =
                    if lived >= UNCONTESTED_AFTER { 1 } else { self.losses.saturating_add(1) };
                if self.is_contested() {
                    self.state = State::Contested { until: now + CONTESTED_RETRY };
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

    /// Carries out the step that is due at `now`.
    fn due(&mut self, now: Duration) -> Option<u64> {
        match self.state {
            State::AwaitingKubelet { retry_at } if retry_at <= now => Some(self.register()),
            State::BackingOff { until }
            | State::Settling { until }
            | State::Contested { until }
                if until <= now =>
            {
                Some(self.register())
            }
            State::AwaitingStream { until }
                if (until <= now || self.closed_early) && Safeguard::StreamDeadline.is_on() =>
            {
                // A kubelet of 1.24 or older dials after its answer. So this registration may still
                // come, and replace its successors, on a socket that is no longer served.
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
        (self.opened_at, self.closed_early) = (None, false);
        self.state = State::Registering;
        self.latest
    }
}

#[cfg(test)]
mod tests;
