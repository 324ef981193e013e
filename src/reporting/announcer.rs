//! Which Event is written next, and when.
//!
//! The announcer remembers what it has announced about each device, on the node and on each pod
//! that holds it. What differs from the present state is due. One Event has all such devices of its
//! target, so a storm of failures is one Event of the node.

use super::objects::{Event, EventPatch, EventWrite, Kind, Metadata, Target, Times};
use super::seen::{DeviceName, Failure, Seen, SeenDevice, Standing};
use super::{FORBIDDEN_FOR, Outcome, Step, words};
use crate::domain::{Moment, Pace, Reason, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

/// How long changes of one target are collected. The functions of one adapter fail within a second.
const COLLECTED_FOR: Duration = Duration::from_secs(2);
/// The time between two Events of one target: a flapping device writes two a minute to its pod, and
/// two to the node.
const TARGET_EVERY: Duration = Duration::from_secs(30);
/// Events at once after a pause, of all targets: the node and the pods that hold its devices.
const BURST: u32 = 10;
/// One Event in this time, for as long as there are changes.
const EVENT_EVERY: Duration = Duration::from_secs(6);
/// Something that happens again within this time is counted in the same Event. The API server
/// deletes an Event an hour after its last change (`--event-ttl`).
const COUNTED_FOR: Duration = Duration::from_secs(1800);
/// Events that can be counted on. The oldest is forgotten for a new one.
const SERIES_MAX: usize = 256;

/// What differs from what was announced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Changes {
    failed: BTreeMap<DeviceName, Failure>,
    recovered: BTreeSet<DeviceName>,
}

/// An Event that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Series {
    metadata: Metadata,
    times: Times,
    at: Duration,
}

type SeriesKey = (Target, Kind, u64);

/// The Event that is being written.
#[derive(Debug)]
struct InFlight {
    target: Target,
    kind: Kind,
    key: SeriesKey,
    metadata: Metadata,
    times: Times,
    changes: Changes,
}

/// Decides the Events of one node.
#[derive(Debug)]
pub struct Announcer {
    node: String,
    /// The start of the process. A failure before it was announced by an earlier one.
    started: Timestamp,
    pace: Pace,
    is_begun: bool,
    devices: BTreeMap<DeviceName, SeenDevice>,
    /// The failures that were announced and have not ended.
    shown: BTreeMap<Target, BTreeMap<DeviceName, Reason>>,
    due: BTreeMap<Target, (Duration, Changes)>,
    last: BTreeMap<Target, (Duration, Kind)>,
    series: BTreeMap<SeriesKey, Series>,
    number: u64,
    in_flight: Option<InFlight>,
}

impl Announcer {
    /// The announcer of a node, in a process that started at this time.
    #[must_use]
    pub fn new(node: &str, started: Timestamp) -> Self {
        let mut hasher = DefaultHasher::new();
        (node, started).hash(&mut hasher);
        Announcer {
            node: node.to_owned(),
            started,
            pace: Pace::new(node, BURST, EVENT_EVERY),
            is_begun: false,
            devices: BTreeMap::new(),
            shown: BTreeMap::new(),
            due: BTreeMap::new(),
            last: BTreeMap::new(),
            series: BTreeMap::new(),
            number: hasher.finish(),
            in_flight: None,
        }
    }

    /// The devices whose failure was announced: [`Seen`] lists them until they leave the list.
    #[must_use]
    pub fn announced(&self) -> BTreeSet<DeviceName> {
        self.shown.values().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Takes what is true now.
    pub fn observe(&mut self, seen: &Seen, now: Duration) {
        self.devices.clone_from(&seen.devices);
        if !std::mem::replace(&mut self.is_begun, true) {
            self.take_as_announced();
        }
        let devices = &self.devices;
        self.shown.retain(|target, shown| {
            shown.retain(|name, _| match (devices.get(name), target) {
                (Some(device), Target::Pod(pod)) => device.pods.contains(pod),
                (found, Target::Node) => found.is_some(),
                (None, Target::Pod(_)) => false,
            });
            !shown.is_empty()
        });
        self.update_due(now);
    }

    /// The failures of an earlier process.
    fn take_as_announced(&mut self) {
        for (name, device) in &self.devices {
            let Standing::Failed(failure) = &device.standing else { continue };
            if failure.since.is_some_and(|since| since >= self.started) {
                continue;
            }
            for target in targets(device) {
                self.shown.entry(target).or_default().insert(name.clone(), failure.reason);
            }
        }
    }

    fn update_due(&mut self, now: Duration) {
        let mut pending: BTreeMap<Target, Changes> = BTreeMap::new();
        for (name, device) in &self.devices {
            match &device.standing {
                Standing::Failed(failure) => {
                    for target in targets(device) {
                        let shown = self.shown.get(&target).and_then(|shown| shown.get(name));
                        if shown != Some(&failure.reason) {
                            let changes = pending.entry(target).or_default();
                            changes.failed.insert(name.clone(), failure.clone());
                        }
                    }
                }
                Standing::Healthy => {
                    for (target, _) in
                        self.shown.iter().filter(|(_, shown)| shown.contains_key(name))
                    {
                        let changes = pending.entry(target.clone()).or_default();
                        changes.recovered.insert(name.clone());
                    }
                }
                Standing::Unread | Standing::Withheld => {}
            }
        }
        let known = std::mem::take(&mut self.due);
        self.last.retain(|target, (at, _)| {
            pending.contains_key(target) || now.saturating_sub(*at) < TARGET_EVERY
        });
        let at = |target: &Target| {
            let since_last = self.last.get(target).map(|(at, _)| *at + TARGET_EVERY);
            (now + COLLECTED_FOR).max(since_last.unwrap_or_default())
        };
        let due = pending.into_iter().map(|(target, changes)| {
            let at = known.get(&target).map_or_else(|| at(&target), |(at, _)| *at);
            (target, (at, changes))
        });
        self.due = due.collect();
    }

    /// The next step.
    pub fn next(&mut self, now: Moment) -> Step<EventWrite> {
        let next = self.due.iter().min_by_key(|(target, (at, _))| (*at, *target));
        let Some((target, (at, changes))) = next else { return Step::Wait(None) };
        let ready = self.pace.ready_at().max(*at);
        if now.boot < ready {
            return Step::Wait(Some(ready));
        }
        let (target, changes) = (target.clone(), changes.clone());
        self.pace.spend(now.boot);
        Step::Write(self.write(target, changes, now))
    }

    fn write(&mut self, target: Target, mut changes: Changes, now: Moment) -> EventWrite {
        // Both kinds in turn: one device that fails again and again must not hide a recovery.
        let had_failures = self.last.get(&target).is_some_and(|(_, kind)| *kind == Kind::Unhealthy);
        let kind = match (changes.failed.is_empty(), changes.recovered.is_empty()) {
            (false, true) => Kind::Unhealthy,
            (true, _) => Kind::Recovered,
            (false, false) if had_failures => Kind::Recovered,
            (false, false) => Kind::Unhealthy,
        };
        match kind {
            Kind::Unhealthy => changes.recovered.clear(),
            Kind::Recovered => changes.failed.clear(),
        }
        let message = self.message(&target, &changes);
        let key = (target.clone(), kind, subject(&changes));
        let known = self.series.get(&key);
        let known = known.filter(|known| now.boot.saturating_sub(known.at) < COUNTED_FOR);
        let (write, metadata, times) = match known {
            Some(Series { metadata, times, .. }) => {
                let times = Times { count: times.count + 1, last: now.wall, ..*times };
                let patch = EventPatch::new(message, times);
                (EventWrite::Patch(metadata.clone(), patch), metadata.clone(), times)
            }
            None => {
                let times = Times { count: 1, first: now.wall, last: now.wall };
                self.number = self.number.wrapping_add(1);
                let event = Event::new(&self.node, &target, kind, message, times, self.number);
                let metadata = event.metadata.clone();
                (EventWrite::Create(Box::new(event)), metadata, times)
            }
        };
        self.in_flight = Some(InFlight { target, kind, key, metadata, times, changes });
        write
    }

    fn message(&self, target: &Target, changes: &Changes) -> String {
        if changes.failed.is_empty() {
            return words::recovered(&changes.recovered.iter().collect::<Vec<_>>());
        }
        // The pod's own Event need not name it.
        let pods = |name: &DeviceName| {
            let device = self.devices.get(name).filter(|_| *target == Target::Node)?;
            Some(&device.pods)
        };
        let failed = changes.failed.iter().map(|(name, failure)| (name, failure, pods(name)));
        words::unhealthy(&failed.collect::<Vec<_>>())
    }

    /// The answer to the last write.
    pub fn done(&mut self, outcome: &Outcome<()>, now: Duration) {
        let Some(sent) = self.in_flight.take() else { return };
        match outcome {
            Outcome::Accepted(()) => {
                self.pace.succeed();
                let series = Series { metadata: sent.metadata, times: sent.times, at: now };
                self.series.insert(sent.key, series);
                if self.series.len() > SERIES_MAX {
                    let oldest = self.series.iter().min_by_key(|(_, series)| series.at);
                    let oldest = oldest.map(|(key, _)| key.clone());
                    oldest.and_then(|oldest| self.series.remove(&oldest));
                }
                self.settle(sent.target, sent.kind, sent.changes, now);
            }
            Outcome::Refused => {
                self.pace.succeed();
                self.settle(sent.target, sent.kind, sent.changes, now);
            }
            // The API server has deleted it. A new one is due at once. For a new one this is the
            // namespace.
            Outcome::Absent => {
                self.pace.succeed();
                if self.series.remove(&sent.key).is_none() {
                    self.settle(sent.target, sent.kind, sent.changes, now);
                }
            }
            Outcome::Forbidden => {
                let spread = self.pace.share(FORBIDDEN_FOR);
                self.pace.pause(now, FORBIDDEN_FOR + spread);
            }
            Outcome::Failed(retry_after) => {
                self.pace.fail(now);
                self.pace.pause_as_asked(now, retry_after.unwrap_or_default());
            }
        }
    }

    /// These changes were announced, or cannot be.
    fn settle(&mut self, target: Target, kind: Kind, changes: Changes, now: Duration) {
        let shown = self.shown.entry(target.clone()).or_default();
        shown.extend(changes.failed.into_iter().map(|(name, failure)| (name, failure.reason)));
        shown.retain(|name, _| !changes.recovered.contains(name));
        if shown.is_empty() {
            self.shown.remove(&target);
        }
        self.due.remove(&target);
        self.last.insert(target, (now, kind));
        self.update_due(now);
    }
}

/// The node and the pods of a held device.
fn targets(device: &SeenDevice) -> impl Iterator<Item = Target> {
    let node = device.is_held.then_some(Target::Node);
    node.into_iter().chain(device.pods.iter().cloned().map(Target::Pod))
}

/// Identifies what an Event is about: the devices and the reasons, without readings.
fn subject(changes: &Changes) -> u64 {
    let mut hasher = DefaultHasher::new();
    for (name, failure) in &changes.failed {
        (name, failure.reason).hash(&mut hasher);
    }
    changes.recovered.hash(&mut hasher);
    hasher.finish()
}
