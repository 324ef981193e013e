//! The oracles: conditions O1 to O12 of the simulator's contract.
//!
//! | oracle | checked | condition |
//! | --- | --- | --- |
//! | O1 | always | an exclusive id is never in running containers of two pods, if provable |
//! | O2 | always | a running container's ids are those of a live grant in the ledger (below) |
//! | O3 | at the end | every grant without a holder is released; earlier, O2 would miss it |
//! | O4 | always | no list of ours crashes the kubelet |
//! | O5 | when idle | the resource is served (below); no truce without another plugin |
//! | O6 | when idle | no pod is rejected because of us, and no running pod is lost to a restart |
//! | O7 | always | no id leaves the list while a container has it |
//! | O8 | when idle | Allocate is answered in less than 100 ms, including with a slow disk |
//! | O9 | — | CDI names that resolve: empty, because no contract of Holdfast gives any |
//! | O10 | at the end | Registers and lists stay in limits (below); no Register when idle |
//! | O11 | always | no listing of ours between an Allocate and its record in the kubelet |
//! | O12 | always | no hook runs while a container has its device; at the end none is pending |
//!
//! O5: the client is tracked, not stopped and streaming, and the kubelet's list is the inventory.
//! O10: at most 20 Registers of a resource with one kubelet in any second, and 20 lists on any one
//! stream.
//!
//! Effects of a foreign plugin of the resource are excused, but only these:
//!
//! - a container that got exactly the ids of the plugin's answer, once for each of its answers,
//!   until the ledger has taken over the grant: that is checked when idle;
//! - a device that disappears while such a container has it, and the ledger has no grant of it;
//! - a resource that was stopped or forgotten while the plugin's goroutines were active in the
//!   kubelet, if a stream of ours was open throughout. Nothing reports that to Holdfast until the
//!   kubelet restarts; from then on there is no excuse.

mod holders;
mod phases;
mod rival;

use super::daemon::Daemon;
use super::durable::Disk;
use super::hardware::{Hardware, gpu};
use super::rival_plugin::Answers;
use super::service::list;
use crate::domain::{AllocId, DeviceId, ResourceName};
use crate::lab::sim::kubelet::{EventKind, Holder, Interleaving, Profile, View};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::time::Duration;

/// A younger kubelet proves nothing. The limit is a minute after the daemon's next pass over the
/// kubelet, which comes a quarter of a minute later at most.
const SETTLED: Duration = Duration::from_secs(76);

/// A violated oracle.
#[derive(Debug, Clone)]
pub(super) struct Violation {
    pub(super) oracle: &'static str,
    pub(super) at: Duration,
    pub(super) what: String,
}

/// The state of the oracles.
#[derive(Debug)]
pub(super) struct Oracles {
    hardware: Hardware,
    /// Whether a new registration closes the connection of the former one.
    closes_previous_connection: bool,
    /// Whether the kubelet lacks GetAllocatableResources and so does not report its list.
    lacks_allocatable: bool,
    /// The client that sent the last list.
    last_list: BTreeMap<ResourceName, u64>,
    /// The clients of the present kubelet whose streams have ended.
    ended_streams: BTreeSet<(ResourceName, u64)>,
    /// The number of events that were checked.
    seen: u64,
    /// The time when the newest kubelet created its socket.
    kubelet_since: Duration,
    /// The time when each grant was first seen bound.
    bound: BTreeMap<AllocId, Duration>,
    /// The time when a pod last got an id, and whether the kubelet had settled by then.
    given: BTreeMap<(String, DeviceId), (Duration, bool)>,
    /// The foreign plugin's answers. `rival_containers` has the containers that were matched with
    /// one: pod UID, container, ids.
    pub(super) rival_answers: Answers,
    rival_containers: BTreeSet<(String, String, BTreeSet<DeviceId>)>,
    /// The period when the kubelet may show effects of the foreign plugin.
    pub(super) rival_effects: Option<RangeInclusive<Duration>>,
    /// The time when its resource was last stopped or forgotten.
    disrupted_at: Duration,
    /// Checks in the idle phase that found such a broken state.
    pub(super) taken: u64,
    /// Containers of the foreign plugin whose grants the ledger had when idle.
    pub(super) taken_over: u64,
    /// The grants that the present start of the kubelet has had in its memory.
    remembered: BTreeSet<AllocId>,
    /// Whether the kubelet was made to lose its record of grants.
    pub(super) has_lost_record: bool,
    /// Whether faults have ended.
    pub(super) is_idle: bool,
    pub(super) refusals: u64,
    pub(super) excused: u64,
    pub(super) violation: Option<Violation>,
}

impl Oracles {
    pub(super) fn new(hardware: Hardware, profile: Profile) -> Self {
        Oracles {
            hardware,
            closes_previous_connection: profile.is_alpha(),
            lacks_allocatable: !profile.has_allocatable(),
            last_list: BTreeMap::new(),
            ended_streams: BTreeSet::new(),
            seen: 0,
            kubelet_since: Duration::ZERO,
            bound: BTreeMap::new(),
            given: BTreeMap::new(),
            rival_answers: Answers::default(),
            rival_containers: BTreeSet::new(),
            rival_effects: None,
            disrupted_at: Duration::ZERO,
            taken: 0,
            taken_over: 0,
            remembered: BTreeSet::new(),
            has_lost_record: false,
            is_idle: false,
            refusals: 0,
            excused: 0,
            violation: None,
        }
    }

    fn violated(&mut self, oracle: &'static str, at: Duration, what: String) {
        self.violation.get_or_insert(Violation { oracle, at, what });
    }

    /// Called after every step; checks only when there are new events.
    pub(super) fn check(&mut self, view: &View<'_>, disk: &Disk, daemon: &Daemon, now: Duration) {
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
        let holders = holders_of(view);
        self.remember(&holders, view);
        self.match_rival_containers(&holders);
        let resources: Vec<_> = self
            .hardware
            .specs
            .iter()
            .map(|spec| (spec.name.clone(), spec.is_exclusive()))
            .collect();
        for (resource, is_exclusive) in resources {
            if is_exclusive {
                self.held_once(&resource, &holders, disk, now);
            }
            self.in_ledger(&resource, &holders, disk, now);
        }
        if let Some(site) = view
            .panicked()
            .filter(|site| !self.is_rival_answers(|id| site.contains(&format!("`{id}`"))))
        {
            self.violated("O4", now, format!("the kubelet crashed: {site}"));
        }
        if let Some(what) = disk.hook_in_use() {
            self.violated("O12", now, what);
        }
        // The kubelet may reserve ids while a listing of ours is on its way; no process can know
        // that.
        if disk.listed_in_allocate() {
            self.violated("O11", now, "pods were listed while an Allocate was under way".into());
        }
    }

    fn event(
        &mut self,
        kind: &EventKind,
        at: Duration,
        view: &View<'_>,
        disk: &Disk,
        daemon: &Daemon,
    ) {
        match kind {
            EventKind::Started { .. } => {
                self.kubelet_since = at;
                self.remembered.clear();
                self.ended_streams.clear();
            }
            EventKind::StreamEnded { resource, client } => {
                self.ended_streams.insert((resource.clone(), *client));
            }
            EventKind::Listed { resource, client, .. } => {
                self.last_list.insert(resource.clone(), *client);
            }
            EventKind::Disconnected { resource, .. }
            | EventKind::Interleaving {
                resource,
                which: Interleaving::FailedRegisterForgetsClient,
            } if *resource == gpu() => {
                self.disrupted_at = at;
            }
            EventKind::Vanished { resource, devices } => {
                // A stuck goroutine may deliver an outdated list, without an id that was added
                // later or dropped since. The present list decides.
                let inventory = daemon.inner.inventory.borrow().clone();
                let listed: BTreeSet<DeviceId> =
                    list(&inventory, resource).into_iter().map(|device| device.id).collect();
                // A grant of the foreign plugin keeps its devices in the list once the ledger has
                // taken it over.
                let is_held = |id: &DeviceId| {
                    disk.ledger(|ledger| ledger.holders(resource, id).next().is_some())
                };
                let missing = |id: &DeviceId| {
                    !listed.contains(id)
                        && (is_held(id) || !self.is_rival_answers(|other| other == id))
                };
                if devices.iter().any(missing) {
                    self.violated(
                        "O7",
                        at,
                        format!("{devices:?} left the list while a container has them"),
                    );
                } else {
                    self.excused += 1;
                }
            }
            EventKind::Allocated { pod_uid, devices, took, .. } => {
                let settled = (at - *took).saturating_sub(self.kubelet_since) >= SETTLED;
                let given =
                    devices.iter().map(|id| ((pod_uid.clone(), id.clone()), (at - *took, settled)));
                self.given.extend(given);
                if self.is_idle && *took > Duration::from_millis(100) {
                    self.violated("O8", at, format!("an Allocate took {took:?}"));
                }
            }
            EventKind::Rejected { message, .. } if message.contains("is still in use by pod") => {
                self.refused(message, at, view);
            }
            EventKind::Rejected { pod_uid, message, .. }
                if self.is_idle
                    && !self.is_taken_by_rival(view)
                    && !self.has_any_late_list(view)
                    && message.contains("Allocate failed")
                    && !message.contains("requested number of devices unavailable") =>
            {
                // A pod that holds an unhealthy device is rejected correctly.
                let in_ledger = disk.ledger(|ledger| {
                    ledger.grants().any(|grant| grant.pod().is_some_and(|pod| pod.uid == *pod_uid))
                });
                let holds_unhealthy =
                    in_ledger || self.rival_containers.iter().any(|(uid, ..)| uid == pod_uid);
                // Devices that have come and gone too often are unhealthy for a while.
                let inventory = daemon.inner.inventory.borrow().clone();
                let has_none = inventory.resources.iter().any(|(resource, offering)| {
                    message.contains(resource.as_str())
                        && !offering.devices.values().any(|offered| offered.health.is_healthy())
                });
                let is_right = holds_unhealthy
                    && message.contains("previously allocated devices are no longer healthy")
                    || has_none && message.contains("no healthy devices present");
                if !is_right {
                    self.violated("O6", at, format!("pod {pod_uid}: {message}"));
                }
            }
            _ => {}
        }
    }

    /// A refusal needs a running container that has the device.
    fn refused(&mut self, message: &str, at: Duration, view: &View<'_>) {
        self.refusals += 1;
        // Devices of a pod's init containers are charged to the pod as long as it runs.
        let holds = |holder: &Holder| message.contains(&format!("pod {}", holder.pod_uid));
        // The pod may have ended since.
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
}

/// The containers with devices. A pod that is rejected after a restart is being killed, and its
/// devices count as free at once.
fn holders_of(view: &View<'_>) -> Vec<Holder> {
    let mut holders = view.holders();
    holders.retain(|holder| !view.pod(&holder.pod_uid).is_some_and(|pod| pod.is_failed()));
    holders
}
