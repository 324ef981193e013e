//! What must hold: O1 to O11 of the simulator's contract.
//!
//! | oracle | looked at | what it says |
//! | --- | --- | --- |
//! | O1 | always | an exclusive id is never in two running containers of different pods, where that could be known |
//! | O2 | always | what a running container holds is a live grant of the ledger, with the same ids |
//! | O3 | at the end | what nobody holds is released; before, O2 would miss it |
//! | O4 | always | the kubelet does not crash by a list of ours |
//! | O5 | when it is quiet | tracked, not stopped, streaming, and the kubelet's list is the inventory |
//! | O6 | when it is quiet | no pod is rejected because of us, and none that runs is lost to a restart |
//! | O7 | always | no id leaves the list while somebody has it |
//! | O8 | when it is quiet | Allocate is answered in less than 100 ms, a slow disk included |
//! | O9 | — | CDI names that resolve: no contract of Holdfast has any yet |
//! | O10 | at the end | at most 20 Registers in any second, and 20 lists for each stream |
//! | O11 | always | no listing of ours while an Allocate is under way |

use super::daemon::{Daemon, gpu};
use super::durable::Disk;
use super::service::list;
use crate::domain::{AllocId, DeviceId, Entry, GrantState};
use crate::ledger::core::NEVER_STARTED;
use crate::sim::kubelet::{EventKind, Holder, PodPhase, View};
use std::collections::{BTreeMap, BTreeSet};
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
#[derive(Debug, Default)]
pub(super) struct Oracles {
    /// Events that were looked at.
    seen: u64,
    /// When the newest kubelet made its socket.
    kubelet_since: Duration,
    /// When each grant was first seen bound.
    bound: BTreeMap<AllocId, Duration>,
    /// When a pod was last given an id, and whether the kubelet had settled by then.
    given: BTreeMap<(String, DeviceId), (Duration, bool)>,
    /// Whether the kubelet was made to forget what it gave.
    pub(super) amnesia: bool,
    /// Whether nothing goes wrong any more.
    pub(super) quiet: bool,
    pub(super) refusals: u64,
    pub(super) excused: u64,
    pub(super) violation: Option<Violation>,
}

impl Oracles {
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
        self.held_once(&holders, disk, now);
        self.in_ledger(&holders, disk, now);
        if let Some(site) = view.panicked() {
            self.violated("O4", now, format!("the kubelet crashed: {site}"));
        }
        // The kubelet may reserve ids while a listing of ours is on its way, which nobody can know.
        if disk.listed_in_allocate() {
            self.violated("O11", now, "pods were listed while an Allocate was under way".into());
        }
    }

    fn event(&mut self, kind: &EventKind, at: Duration, view: &View<'_>, disk: &Disk, daemon: &Daemon) {
        match kind {
            EventKind::Started { .. } => self.kubelet_since = at,
            EventKind::Vanished { devices, .. } => {
                // What an earlier list did not have yet, or no longer, may come late out of a stuck goroutine: what counts is
                // the list of now. And a daemon that has just started does not know which free id was listed before it.
                let listed: BTreeSet<DeviceId> = list(&daemon.inner.inventory.borrow()).into_iter().map(|device| device.id).collect();
                let is_held = |id: &DeviceId| disk.ledger(|ledger| ledger.holders(&gpu(), id).next().is_some());
                let young = daemon.since + Duration::from_secs(60) > at;
                if devices.iter().any(|id| !listed.contains(id) && (is_held(id) || !young)) {
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
                if self.quiet && message.contains("Allocate failed") && !message.contains("requested number of devices unavailable") =>
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

    fn held_once(&mut self, holders: &[Holder], disk: &Disk, now: Duration) {
        let mut by_id: BTreeMap<&DeviceId, BTreeMap<&str, &Holder>> = BTreeMap::new();
        for holder in holders {
            for id in holder.devices.get(&gpu()).into_iter().flatten() {
                by_id.entry(id).or_default().insert(&holder.pod_uid, holder);
            }
        }
        for (id, holders) in by_id.into_iter().filter(|(_, holders)| holders.len() > 1) {
            let given = |uid: &str| self.given.get(&(uid.to_owned(), (*id).clone())).copied().unwrap_or_default();
            let (newest, settled) = holders.keys().map(|uid| given(uid)).max().unwrap_or_default();
            // Who had it when it was given again: could that be known?
            let known = holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                let alloc_id = holder.alloc_ids.get(&gpu());
                alloc_id.and_then(|id| self.bound.get(id)).is_some_and(|bound| *bound < newest)
            });
            // Before, nothing is proven: the kubelet may have lost what it knew, by a crash between two writes.
            if self.amnesia || !(settled && known) {
                self.excused += 1;
            } else {
                let pods: Vec<_> = holders.keys().copied().collect();
                let since = self.kubelet_since;
                let states: Vec<String> =
                    disk.ledger(|ledger| ledger.holders(&gpu(), id).map(|grant| format!("{} {:?}", grant.alloc_id, grant.state)).collect());
                let what = format!("{id} is held by the pods {pods:?}, given at {newest:?}; kubelet since {since:?}; {states:?}");
                return self.violated("O1", now, what);
            }
        }
    }

    fn in_ledger(&mut self, holders: &[Holder], disk: &Disk, now: Duration) {
        for holder in holders {
            let Some(devices) = holder.devices.get(&gpu()) else { continue };
            let granted = holder.alloc_ids.get(&gpu()).and_then(|id| {
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

    /// When no fault can happen any more: the end of a stream, which the daemon sees, has been answered. What a stuck
    /// goroutine of the kubelet does later, nothing tells of.
    pub(super) fn answered(&mut self, view: &View<'_>, daemon: &Daemon, now: Duration) {
        let standing = view.standing(&gpu());
        let silent = standing.streams > 0 && (standing.is_stopped || !standing.is_tracked);
        if let (true, Err(what), false) = (view.is_running(), Self::is_served(view, daemon), silent) {
            self.violated("O5", now, what);
        }
    }

    /// Once it is quiet, and for as long as it is.
    pub(super) fn is_served(view: &View<'_>, daemon: &Daemon) -> Result<(), String> {
        let standing = view.standing(&gpu());
        let wanted: BTreeSet<DeviceId> =
            list(&daemon.inner.inventory.borrow()).into_iter().filter(|device| device.healthy).map(|device| device.id).collect();
        let sound = view.is_running() && !standing.is_stopped && standing.is_tracked && standing.is_streaming && standing.healthy == wanted;
        if sound { Ok(()) } else { Err(format!("{standing:?}, wanted {wanted:?}; {:?}", daemon.inner.lock().machine)) }
    }

    pub(super) fn served(&mut self, view: &View<'_>, daemon: &Daemon, now: Duration) {
        if let Err(what) = Self::is_served(view, daemon) {
            self.violated("O5", now, what);
        }
    }

    /// After a restart of the kubelet in quiet times every pod runs that ran.
    pub(super) fn kept(&mut self, view: &View<'_>, running: &BTreeSet<String>, now: Duration) {
        for pod in view.pods().iter().filter(|pod| running.contains(&pod.spec.uid)) {
            // Its entry was lost: with the checkpoint, or since of two writes the older one came last.
            let waits = |message: &str| message.contains("requested number of devices unavailable");
            if let PodPhase::Failed { message, .. } = &pod.phase
                && !waits(message)
            {
                self.violated("O6", now, format!("pod {} was lost to a restart: {message}", pod.spec.uid));
            }
        }
    }

    /// When every pod has been gone for long.
    pub(super) fn released(&mut self, view: &View<'_>, disk: &Disk, now: Duration) {
        let left: Vec<String> =
            disk.ledger(|ledger| ledger.grants().map(|grant| format!("{} {:?}", grant.alloc_id, grant.state)).collect());
        // Without a checkpoint nothing tells that a grant reached no container; with its next one the kubelet tells.
        if !left.is_empty() && !self.amnesia {
            self.violated("O3", now, format!("not released: {left:?}"));
        }
        let (registers, lists) = view.busiest_second(&gpu());
        if registers > 20 || lists > 100 {
            self.violated("O10", now, format!("{registers} Registers and {lists} lists in one second"));
        }
    }
}
