//! What must hold: O1 to O11 of the simulator's contract.
//!
//! | oracle | looked at | what it says |
//! | --- | --- | --- |
//! | O1 | always | an exclusive id is never in two running containers of different pods, where that could be known |
//! | O2 | always | what a running container holds is a live grant of the ledger, with the same ids |
//! | O3 | at the end | what nobody holds is released; before, O2 would miss it |
//! | O4 | always | the kubelet does not crash by a list of ours |
//! | O5 | when it is quiet | tracked, not stopped, streaming, and the kubelet's list is the inventory; no truce with nobody |
//! | O6 | when it is quiet | no pod is rejected because of us, and none that runs is lost to a restart |
//! | O7 | always | no id leaves the list while somebody has it |
//! | O8 | when it is quiet | Allocate is answered in less than 100 ms, a slow disk included |
//! | O9 | — | CDI names that resolve: empty, since no contract of Holdfast gives any |
//! | O10 | at the end | at most 20 Registers of a resource with one kubelet in any second, and 20 lists on any one stream; no Register in quiet times |
//! | O11 | always | no listing of ours while an Allocate is under way |
//!
//! What another plugin of the resource does is not ours, and excused as narrowly as that: a container that got exactly
//! what the stranger answered, once for each of its answers; a device that goes while such a container has it; and a
//! resource that was stopped or lost sight of while the stranger's goroutines were about in the kubelet, with a stream of
//! ours open all the time. Nothing tells Holdfast of that, until the kubelet restarts: then there is no excuse any more.

mod quiet;

use super::daemon::Daemon;
use super::durable::Disk;
use super::hardware::{Hardware, gpu};
use super::service::list;
use super::stranger::Answers;
use crate::domain::{AllocId, DeviceId, Entry, GrantState, ResourceName};
use crate::lab::sim::kubelet::{EventKind, Holder, Interleaving, Profile, View};
use crate::ledger::core::NEVER_STARTED;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

/// A kubelet younger than this proves nothing: a minute after the daemon's next look, which takes a quarter at most.
const SETTLED: Duration = Duration::from_secs(76);

/// An oracle that does not hold.
#[derive(Debug, Clone)]
pub(super) struct Violation {
    pub(super) oracle: &'static str,
    pub(super) at: Duration,
    pub(super) what: String,
}

/// What the oracles remember.
#[derive(Debug)]
pub(super) struct Oracles {
    hardware: Hardware,
    /// Whether a new registration closes the connection of the former one.
    closes_the_former: bool,
    /// Whether the kubelet does not tell which list it has.
    is_mute: bool,
    /// Whose list came last.
    last_list: BTreeMap<ResourceName, u64>,
    /// Events that were looked at.
    seen: u64,
    /// When the newest kubelet made its socket.
    kubelet_since: Duration,
    /// When each grant was first seen bound.
    bound: BTreeMap<AllocId, Duration>,
    /// When a pod was last given an id, and whether the kubelet had settled by then.
    given: BTreeMap<(String, DeviceId), (Duration, bool)>,
    /// What the stranger answered, and the containers that were found to have it: pod UID, container, ids.
    pub(super) strange: Answers,
    theirs: BTreeSet<(String, String, BTreeSet<DeviceId>)>,
    /// When the stranger's doings may show in the kubelet.
    pub(super) visit: Option<RangeInclusive<Duration>>,
    /// When its resource was last stopped or lost sight of.
    harmed_at: Duration,
    /// Looks that found that nobody repairs it, in quiet times.
    pub(super) taken: u64,
    /// The grants that this start of the kubelet has had in its memory.
    remembered: BTreeSet<AllocId>,
    /// Whether the kubelet was made to forget what it gave.
    pub(super) amnesia: bool,
    /// Whether nothing goes wrong any more.
    pub(super) quiet: bool,
    pub(super) refusals: u64,
    pub(super) excused: u64,
    pub(super) violation: Option<Violation>,
}

impl Oracles {
    pub(super) fn new(hardware: Hardware, profile: Profile) -> Self {
        Oracles {
            hardware,
            closes_the_former: profile.is_alpha(),
            is_mute: !profile.has_allocatable(),
            last_list: BTreeMap::new(),
            seen: 0,
            kubelet_since: Duration::ZERO,
            bound: BTreeMap::new(),
            given: BTreeMap::new(),
            strange: Answers::default(),
            theirs: BTreeSet::new(),
            visit: None,
            harmed_at: Duration::ZERO,
            taken: 0,
            remembered: BTreeSet::new(),
            amnesia: false,
            quiet: false,
            refusals: 0,
            excused: 0,
            violation: None,
        }
    }

    fn violated(&mut self, oracle: &'static str, at: Duration, what: String) {
        self.violation.get_or_insert(Violation { oracle, at, what });
    }

    /// Looks after every step; at everything only when something has happened.
    pub(super) fn look(&mut self, view: &View<'_>, disk: &Disk, daemon: &Daemon, now: Duration) {
        let total = view.events().total();
        if self.seen == total || self.violation.is_some() {
            return;
        }
        let new = usize::try_from(total - self.seen).unwrap();
        self.seen = total;
        let events: Vec<_> = view.events().iter().rev().take(new).cloned().collect();
        for event in events.into_iter().rev() {
            self.event(&event.kind, event.at, view, disk, daemon);
        }
        self.bound(disk, now);
        let mut holders = view.holders();
        // A pod that is rejected after a restart is being killed, and what it has counts as free at once.
        holders.retain(|holder| !view.pod(&holder.pod_uid).is_some_and(|pod| pod.is_failed()));
        self.remember(&holders, view);
        self.find_theirs(&holders);
        let resources: Vec<_> = self.hardware.specs.iter().map(|spec| (spec.name.clone(), spec.is_exclusive())).collect();
        for (resource, is_exclusive) in resources {
            if is_exclusive {
                self.held_once(&resource, &holders, disk, now);
            }
            self.in_ledger(&resource, &holders, disk, now);
        }
        if let Some(site) = view.panicked().filter(|site| !self.is_strange(|id| site.contains(&format!("`{id}`")))) {
            self.violated("O4", now, format!("the kubelet crashed: {site}"));
        }
        // The kubelet may reserve ids while a listing of ours is on its way, which nobody can know.
        if disk.listed_in_allocate() {
            self.violated("O11", now, "pods were listed while an Allocate was under way".into());
        }
    }

    fn event(&mut self, kind: &EventKind, at: Duration, view: &View<'_>, disk: &Disk, daemon: &Daemon) {
        match kind {
            EventKind::Started { .. } => {
                self.kubelet_since = at;
                self.remembered.clear();
            }
            EventKind::Listed { resource, client, .. } => {
                self.last_list.insert(resource.clone(), *client);
            }
            EventKind::Disconnected { resource, .. } | EventKind::Interleaving { resource, which: Interleaving::C }
                if *resource == gpu() =>
            {
                self.harmed_at = at;
            }
            EventKind::Vanished { resource, devices } => {
                // What an earlier list did not have yet, or no longer, may come late out of a stuck goroutine: what counts is
                // the list of now.
                let inventory = daemon.inner.inventory.borrow().clone();
                let listed: BTreeSet<DeviceId> = list(&inventory, resource).into_iter().map(|device| device.id).collect();
                let missing = |id: &DeviceId| !listed.contains(id) && !self.is_strange(|other| other == id);
                if devices.iter().any(missing) {
                    self.violated("O7", at, format!("{devices:?} left the list while somebody has them"));
                } else {
                    self.excused += 1;
                }
            }
            EventKind::Allocated { pod_uid, devices, took, .. } => {
                let settled = (at - *took).saturating_sub(self.kubelet_since) >= SETTLED;
                let given = devices.iter().map(|id| ((pod_uid.clone(), id.clone()), (at - *took, settled)));
                self.given.extend(given);
                if self.quiet && *took > Duration::from_millis(100) {
                    self.violated("O8", at, format!("an Allocate took {took:?}"));
                }
            }
            EventKind::Rejected { message, .. } if message.contains("is still in use by pod") => self.refused(message, at, view),
            EventKind::Rejected { pod_uid, message, .. }
                if self.quiet
                    && !self.is_taken(view)
                    && !self.has_late_list(view, &gpu())
                    && message.contains("Allocate failed")
                    && !message.contains("requested number of devices unavailable") =>
            {
                // A pod that holds a sick device is rejected rightly.
                let sick = disk.ledger(|ledger| ledger.grants().any(|grant| grant.pod().is_some_and(|pod| pod.uid == *pod_uid)));
                if !(sick && message.contains("previously allocated devices are no longer healthy")) {
                    self.violated("O6", at, format!("pod {pod_uid}: {message}"));
                }
            }
            _ => {}
        }
    }

    /// A refusal needs a container that runs.
    fn refused(&mut self, message: &str, at: Duration, view: &View<'_>) {
        self.refusals += 1;
        // What its init containers had is charged to the pod as long as it runs.
        let holds = |holder: &Holder| message.contains(&format!("pod {}", holder.pod_uid));
        // It may have ended since.
        let ended = view
            .events()
            .iter()
            .rev()
            .take(50)
            .any(|event| matches!(&event.kind, EventKind::Deleted { pod_uid } if message.contains(&format!("pod {pod_uid}"))));
        if !view.holders().iter().any(holds) && !ended {
            self.violated("O6", at, format!("refused without a holder: {message}"));
        }
    }

    fn bound(&mut self, disk: &Disk, now: Duration) {
        let bound: Vec<AllocId> = disk.ledger(|ledger| {
            let placed = ledger.grants().filter(|grant| grant.state != GrantState::Granted);
            placed.map(|grant| grant.alloc_id.clone()).collect()
        });
        for id in bound {
            self.bound.entry(id).or_insert(now);
        }
    }

    /// What the stranger gave has no id of ours.
    fn find_theirs(&mut self, holders: &[Holder]) {
        for holder in holders.iter().filter(|holder| !holder.alloc_ids.contains_key(&gpu())) {
            let Some(ids) = holder.devices.get(&gpu()) else { continue };
            let container = (holder.pod_uid.clone(), holder.container.clone(), ids.clone());
            if !self.theirs.contains(&container) && self.strange.take(ids) {
                self.theirs.insert(container);
            }
        }
    }

    /// Whether it was the stranger who made the kubelet stop the resource or lose sight of it, silently.
    fn is_taken(&self, view: &View<'_>) -> bool {
        let standing = view.standing(&gpu());
        let silent = standing.streams > 0 && (standing.is_stopped || !standing.is_tracked);
        silent && self.visit.as_ref().is_some_and(|visit| visit.contains(&self.harmed_at))
    }

    /// Whether the stranger gave such an id to anybody: the ledger knows nothing of that, and when the device goes, nothing
    /// keeps it in the list.
    fn is_strange(&self, fits: impl Fn(&DeviceId) -> bool) -> bool {
        self.strange.has(&fits) || self.theirs.iter().any(|(_, _, ids)| ids.iter().any(&fits))
    }

    fn is_theirs(&self, resource: &ResourceName, holder: &Holder) -> bool {
        if *resource != gpu() {
            return false;
        }
        let ids = holder.devices.get(&gpu()).cloned().unwrap_or_default();
        self.theirs.contains(&(holder.pod_uid.clone(), holder.container.clone(), ids))
    }

    fn remember(&mut self, holders: &[Holder], view: &View<'_>) {
        for holder in holders {
            if holder.alloc_ids.values().all(|id| self.remembered.contains(id)) {
                continue;
            }
            let known = view.devices(&holder.pod_uid, &holder.container);
            let alloc_ids = holder.alloc_ids.iter().filter(|(resource, _)| known.contains_key(*resource));
            self.remembered.extend(alloc_ids.map(|(_, id)| id.clone()));
        }
    }

    fn held_once(&mut self, resource: &ResourceName, holders: &[Holder], disk: &Disk, now: Duration) {
        let mut by_id: BTreeMap<&DeviceId, BTreeMap<&str, &Holder>> = BTreeMap::new();
        for holder in holders {
            for id in holder.devices.get(resource).into_iter().flatten() {
                by_id.entry(id).or_default().insert(&holder.pod_uid, holder);
            }
        }
        for (id, holders) in by_id.into_iter().filter(|(_, holders)| holders.len() > 1) {
            let given = |uid: &str| self.given.get(&(uid.to_owned(), (*id).clone())).copied().unwrap_or_default();
            let (newest, settled) = holders.keys().map(|uid| given(uid)).max().unwrap_or_default();
            // Who had it when it was given again: could that be known?
            let known = holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                let alloc_id = holder.alloc_ids.get(resource);
                alloc_id.and_then(|id| self.bound.get(id)).is_some_and(|bound| *bound < newest)
            });
            // What the stranger gave, nobody asked us for.
            let ours = !holders.values().any(|holder| given(&holder.pod_uid).0 == newest && self.is_theirs(resource, holder));
            // A kubelet that never knew what its predecessor gave: of two writes of its checkpoint the older one came last.
            // That may be proven by its listing, but not at once.
            let lost = holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                let alloc_id = holder.alloc_ids.get(resource);
                !alloc_id.is_some_and(|id| self.remembered.contains(id))
            });
            // Before, nothing is proven: the kubelet may have lost what it knew, by a crash between two writes.
            if self.amnesia || lost || !(settled && known && ours) {
                self.excused += 1;
            } else {
                let pods: Vec<_> = holders.keys().copied().collect();
                let since = self.kubelet_since;
                let states: Vec<String> = disk
                    .ledger(|ledger| ledger.holders(resource, id).map(|grant| format!("{} {:?}", grant.alloc_id, grant.state)).collect());
                let what = format!("{id} is held by the pods {pods:?}, given at {newest:?}; kubelet since {since:?}; {states:?}");
                return self.violated("O1", now, what);
            }
        }
    }

    fn in_ledger(&mut self, resource: &ResourceName, holders: &[Holder], disk: &Disk, now: Duration) {
        for holder in holders {
            let Some(devices) = holder.devices.get(resource).filter(|_| !self.is_theirs(resource, holder)) else { continue };
            let granted = holder.alloc_ids.get(resource).and_then(|id| {
                disk.ledger(|ledger| {
                    ledger.grant(id).map(|grant| grant.devices.iter().map(|device| device.id.clone()).collect::<BTreeSet<_>>())
                })
            });
            if granted.as_ref() != Some(devices) {
                let Holder { pod_uid, container, alloc_ids, .. } = holder;
                let is_last = |entry: &Entry| matches!(entry, Entry::Moved { alloc_id, .. } if alloc_ids.values().any(|id| id == alloc_id));
                let last = disk.entries().into_iter().rfind(is_last);
                // A kubelet that lost its checkpoint before anybody has read in it whose grant this is.
                let never_seen = |entry: &Entry| matches!(entry, Entry::Moved { state: GrantState::Released { released_by, .. }, .. } if released_by == NEVER_STARTED);
                if self.amnesia && last.as_ref().is_some_and(never_seen) {
                    self.excused += 1;
                    continue;
                }
                return self.violated(
                    "O2",
                    now,
                    format!("{pod_uid}/{container} runs with {devices:?} by {alloc_ids:?}; the ledger has {granted:?}, {last:?}"),
                );
            }
        }
    }
}
