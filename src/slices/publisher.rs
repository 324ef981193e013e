//! The core of the publisher: events in, the next request out. Pure: time is an argument, on a
//! clock that never jumps.
//!
//! The caller sends one request at a time: it asks for the [`Publisher::next`] action, carries it
//! out, and reports the result as an [`Event`]. A watch that begins at the version of the latest
//! list reports changes in the meantime.
//!
//! What the API server has and what it should have are compared before each write, so any failure
//! and any change by another program is corrected in the same way.

mod event;
mod failures;
mod mirror;
mod pace;
mod refusals;
#[cfg(test)]
mod tests;
mod write;

pub use event::{Action, Cause, Event, Failure, Report};

use super::api::{self, OwnerReference, ResourceSlice};
use super::attributes::SHARES;
use super::names::NodeName;
use super::published::Published;
use super::wanted::{Layout, WantedDevices, counters};
use crate::domain::Pace;
use failures::dropped;
pub use failures::{COUNTERS, PARTS, TAINTS};
use mirror::{Foreign, Mirror};
use pace::Truce;
use refusals::Refusals;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use write::{Answer, Contents, Observed, Write};

/// Until bad news is written: several changes in quick succession are one write.
const BAD_NEWS_AFTER: Duration = Duration::from_millis(100);
/// Until good news is written. It is not urgent.
const GOOD_NEWS_AFTER: Duration = Duration::from_secs(1);
/// Until a deleted slice is created again. The kubelet deletes all slices of the node at its start,
/// one after the other.
const CREATE_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How long after its start the kubelet may delete slices: it repeats a failed request for 5
/// minutes.
const KUBELET_DELETES_FOR: Duration = Duration::from_secs(300);
/// The time between two lists, in addition to the watch.
const LIST_EVERY: Duration = Duration::from_secs(600);

/// The publisher of one node.
#[derive(Debug)]
pub struct Publisher {
    node: NodeName,
    owner: Option<OwnerReference>,
    /// `None` until the devices are known.
    wanted: Option<WantedDevices>,
    /// `None` until the first list: the slices of an earlier instance decide it.
    layout: Option<Layout>,
    mirror: Mirror,
    answers: BTreeMap<String, Answer>,
    generations: BTreeMap<String, i64>,
    taken: BTreeSet<String>,
    refusals: Refusals,
    /// Until when the pools are left as they are, since a slice was refused for no device.
    pauses: BTreeMap<String, Duration>,
    /// The kinds of fields that the API server drops.
    dropped: BTreeSet<&'static str>,
    pace: Pace,
    truce: Truce,
    is_listed: bool,
    list_at: Duration,
    in_flight: Option<Request>,
    /// The time of the next write, while one is due.
    due: Option<Duration>,
    kubelet_since: Option<Duration>,
    /// The name of a create that was refused since the object exists.
    conflict: Option<String>,
    /// Conflicts since the last accepted write.
    conflicts: u32,
    reports: Vec<Report>,
}

/// The request that is sent.
#[derive(Debug)]
enum Request {
    List,
    Write(Box<Write>),
}

impl Publisher {
    /// A publisher that knows nothing of the API server. `owner` is the object of the node, with
    /// which its slices are deleted.
    #[must_use]
    pub fn new(node: NodeName, owner: Option<OwnerReference>) -> Self {
        Publisher {
            mirror: Mirror::new(node.clone()),
            pace: pace::of(node.as_str()),
            node,
            owner,
            wanted: None,
            layout: None,
            answers: BTreeMap::new(),
            generations: BTreeMap::new(),
            taken: BTreeSet::new(),
            refusals: Refusals::default(),
            pauses: BTreeMap::new(),
            dropped: BTreeSet::new(),
            truce: Truce::default(),
            is_listed: false,
            list_at: Duration::ZERO,
            in_flight: None,
            due: None,
            kubelet_since: None,
            conflict: None,
            conflicts: 0,
            reports: Vec::new(),
        }
    }

    /// Takes an event.
    pub fn on(&mut self, event: Event, now: Duration) {
        match event {
            Event::DevicesChanged(wanted) => self.devices_changed(wanted, now),
            Event::Listed(slices) => self.listed(slices, now),
            Event::Changed(slice) => {
                if self.is_own_write(&slice) {
                    self.mirror.wrote(slice);
                } else {
                    let foreign = self.mirror.change(slice);
                    self.foreign(foreign, now);
                }
            }
            Event::Deleted(slice) => {
                let foreign = self.mirror.delete(&slice);
                self.foreign(foreign, now);
            }
            Event::WatchLost => self.list_at = now,
            Event::Accepted(slice) => self.accepted(slice, now),
            Event::Failed(failure) => self.failed(&failure, now),
            Event::KubeletRegistered => (self.kubelet_since, self.list_at) = (Some(now), now),
            Event::OwnerRead(owner) if owner != self.owner => {
                self.owner = owner;
                self.write_after(GOOD_NEWS_AFTER, now);
            }
            Event::OwnerRead(_) => {}
            Event::ServerChanged => {
                self.dropped.clear();
                self.answers.clear();
                self.refusals.forget();
                self.pauses.clear();
            }
        }
        self.remember_generations();
        self.adopt(None);
    }

    /// What an operator should know, since the last call.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    /// What the API server has of this driver, as far as is known.
    #[must_use]
    pub fn summary(&self) -> Published {
        let mut devices = self.mirror.slices().flat_map(|slice| &slice.spec.devices);
        let drops_parts =
            !self.keeps(PARTS) && devices.any(|device| device.capacity.contains_key(SHARES));
        let drops_taints = !self.keeps(TAINTS);
        Published { drops_parts, ..Published::of(self.mirror.slices(), drops_taints) }
    }

    /// The next action. A request counts as sent.
    pub fn next(&mut self, now: Duration) -> Action {
        if self.truce.ends(now) {
            self.reports.push(Report::Uncontended);
        }
        let action = self.next_action(now);
        match (self.truce.ends_at(), action) {
            (Some(end), Action::Wait(until)) => {
                Action::Wait(Some(until.map_or(end, |it| it.min(end))))
            }
            (_, action) => action,
        }
    }

    fn next_action(&mut self, now: Duration) -> Action {
        if self.in_flight.is_some() {
            return Action::Wait(None);
        }
        let list_at = self.list_at.max(self.pace.paused_until());
        if now >= list_at {
            self.in_flight = Some(Request::List);
            return Action::List;
        }
        let Some(write) = self.next_write(now) else {
            self.due = None;
            let resumed = self.pauses.values().min();
            return Action::Wait(Some(resumed.map_or(list_at, |at| list_at.min(*at))));
        };
        let write_at = self.due.unwrap_or(now).max(self.pace.ready_at()).max(self.truce.ready_at());
        if now < write_at {
            return Action::Wait(Some(write_at.min(list_at)));
        }
        self.pace.spend(now);
        self.truce.spend(now);
        let action = match &write {
            Write::Create(slice, _) => Action::Create(slice.clone()),
            Write::Update(slice, _) => Action::Update(slice.clone()),
            Write::Delete(meta) => Action::Delete {
                name: meta.name.clone(),
                uid: meta.uid.clone(),
                resource_version: meta.resource_version.clone(),
            },
        };
        self.in_flight = Some(Request::Write(Box::new(write)));
        action
    }

    /// Whether the API server has everything that it should have, as far as is known.
    #[must_use]
    pub fn is_complete(&mut self, now: Duration) -> bool {
        self.layout.is_some()
            && self.in_flight.is_none()
            && now < self.list_at
            && self.next_write(now).is_none()
            && self.pauses.is_empty()
    }

    fn devices_changed(&mut self, wanted: WantedDevices, now: Duration) {
        if let Some(layout) = &mut self.layout {
            layout.claim(&wanted.claimed);
        }
        // First of all, since a new device could take the place of a published one.
        self.adopt(Some(&wanted));
        if let Some(layout) = &self.layout {
            let next = layout.followed_by(&wanted);
            if next != *layout {
                let is_good = next.is_good_news_after(layout);
                self.write_after(if is_good { GOOD_NEWS_AFTER } else { BAD_NEWS_AFTER }, now);
            }
            self.refusals.keep(|pool, device| {
                wanted.pools.get(pool).is_some_and(|pool| pool.contains_key(device))
            });
            self.layout = Some(next);
        }
        self.wanted = Some(wanted);
        self.place_first();
    }

    /// Places the devices for the first time: where an earlier instance had them.
    fn place_first(&mut self) {
        if let (None, Some(wanted), true) = (&self.layout, &self.wanted, self.is_listed) {
            let former = Layout::of_slices(self.node.clone(), self.mirror.slices());
            self.layout = Some(former.followed_by(wanted));
        }
    }

    fn listed(&mut self, slices: Vec<ResourceSlice>, now: Duration) {
        drop(self.in_flight.take_if(|request| matches!(request, Request::List)));
        self.is_listed = true;
        self.refusals.expire(now);
        self.pace.succeed();
        self.list_at = now + LIST_EVERY;
        let foreign = self.mirror.list(slices);
        if self.layout.is_some() {
            foreign.into_iter().for_each(|it| self.foreign(Some(it), now));
        }
        if let Some(name) = self.conflict.take().filter(|name| self.mirror.get(name).is_none()) {
            self.taken.insert(name);
        }
        self.place_first();
    }

    /// Another program has changed a slice.
    fn foreign(&mut self, foreign: Option<Foreign>, now: Duration) {
        let Some(foreign) = foreign else { return };
        let (what, after, is_deletion) = match foreign {
            Foreign::Written { what } => (what, BAD_NEWS_AFTER, false),
            Foreign::Deleted { what } => (what, CREATE_AGAIN_AFTER, true),
        };
        self.write_after(after, now);
        let is_recent = |since: Duration| now.saturating_sub(since) < KUBELET_DELETES_FOR;
        let is_kubelet = is_deletion && self.kubelet_since.is_some_and(is_recent);
        if !is_kubelet && self.truce.note(&what, now) {
            self.reports.push(Report::Contended(what));
        }
    }

    /// The next write follows after this time, or earlier if another change needs it.
    fn write_after(&mut self, after: Duration, now: Duration) {
        let at = now + after;
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    /// Whether a version from the watch is that of the write whose answer is awaited.
    fn is_own_write(&self, slice: &ResourceSlice) -> bool {
        let Some(Request::Write(write)) = &self.in_flight else { return false };
        write.sent().is_some_and(|sent| {
            slice.metadata.name.starts_with(write.name()) && sent.spec.is_like(&slice.spec)
        })
    }

    fn accepted(&mut self, answer: Option<ResourceSlice>, now: Duration) {
        let Some(Request::Write(write)) = self.in_flight.take() else { return };
        self.pace.succeed();
        self.conflicts = 0;
        let (Some(sent), Some(answer)) = (write.sent(), answer) else {
            self.mirror.remove(write.name());
            return;
        };
        dropped(&sent.spec, &answer.spec).into_iter().for_each(|fields| self.lose(fields, now));
        let (sent, returned) = (sent.spec.clone(), answer.spec.clone());
        self.answers.insert(answer.metadata.name.clone(), Answer { sent, returned });
        self.mirror.wrote(answer);
        if let Some(place) = write.place() {
            let found = self.refusals.accept(place);
            self.narrowed(&found, place, now);
        }
    }

    /// The write that is needed next.
    fn next_write(&mut self, now: Duration) -> Option<Write> {
        // Without a layout nothing is wanted or unwanted.
        self.layout.as_ref()?;
        self.pauses.retain(|_, until| *until > now);
        // A search may try what the API server has already: then no write is needed to learn it.
        loop {
            let pools = self.pools();
            let observed = Observed {
                node: &self.node,
                owner: self.owner.as_ref(),
                mirror: &self.mirror,
                answers: &self.answers,
                generations: &self.generations,
                taken: &self.taken,
                paused: &self.pauses,
            };
            let write = observed.next_write(&pools);
            let searched = self.refusals.searched().cloned();
            let is_tried =
                |(pool, _): &(String, u32)| write.is_none() && !self.pauses.contains_key(pool);
            let Some(place) = searched.filter(is_tried) else {
                return write.map(|write| write.owned_by(self.owner.as_ref()));
            };
            let found = self.refusals.accept(&place);
            self.narrowed(&found, &place, now);
        }
    }

    /// The slices as they are written: without devices that the API server refuses.
    fn pools(&self) -> BTreeMap<String, Contents> {
        let Some(layout) = &self.layout else { return BTreeMap::new() };
        let mut pools = BTreeMap::new();
        for (pool, mut slices) in layout.pools(self.keeps(TAINTS)) {
            for (index, devices) in &mut slices {
                let written = std::mem::take(devices).into_iter().filter_map(|device| {
                    if !self.refusals.leaves_out(pool, *index, &device) {
                        return Some(device);
                    }
                    // A claimed device never leaves its slice: its last accepted form stays.
                    let known = || self.published(pool, &device.name).cloned();
                    layout.is_claimed(pool, &device.name).then(known).flatten()
                });
                *devices = written.collect();
                if !self.keeps(PARTS) {
                    devices.iter_mut().for_each(api::Device::undivide);
                }
            }
            let contents = layout.contents(pool, slices, self.keeps(COUNTERS));
            pools.insert(pool.to_owned(), contents);
        }
        pools
    }

    /// Gives devices the place that they have at the API server: it may still have some that were
    /// no longer wanted, and a claim may have got one of them.
    fn adopt(&mut self, wanted: Option<&WantedDevices>) {
        let layout = self.layout.as_mut();
        let Some(layout) = layout.filter(|it| wanted.is_some() || it.has_claims()) else { return };
        for slice in self.mirror.slices() {
            let pool = &slice.spec.pool.name;
            let index = self.node.slice_index(pool, &slice.metadata.name);
            if let Some(index) = index.filter(|index| *index < counters::FIRST) {
                let wanted = wanted.and_then(|wanted| wanted.pools.get(pool));
                layout.adopt(pool, index, &slice.spec.devices, wanted);
            }
        }
    }

    /// Notes the generations, and forgets answers about objects that were deleted.
    fn remember_generations(&mut self) {
        self.answers.retain(|name, _| self.mirror.get(name).is_some());
        for slice in self.mirror.slices() {
            let pool = &slice.spec.pool;
            let known = self.generations.entry(pool.name.clone()).or_insert(pool.generation);
            *known = pool.generation.max(*known);
        }
    }
}
