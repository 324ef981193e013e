//! The oracles: conditions O1 to O11 of the simulator's contract.
//!
//! | oracle | checked | condition |
//! | --- | --- | --- |
//! | O1 | always | an exclusive id is never in running containers of two pods, if provable |
//! | O2 | always | a running container's ids are those of a live grant in the ledger |
//! | O3 | at the end | every grant without a holder is released; earlier, O2 would miss it |
//! | O4 | always | no list of ours crashes the kubelet |
//! | O5 | when idle | the resource is served (below); no truce without another plugin |
//! | O6 | when idle | no pod is rejected because of us, and no running pod is lost to a restart |
//! | O7 | always | no id leaves the list while a container has it |
//! | O8 | when idle | Allocate is answered in less than 100 ms, including with a slow disk |
//! | O9 | — | CDI names that resolve: empty, because no contract of Holdfast gives any |
//! | O10 | at the end | Registers and lists stay in limits (below); no Register when idle |
//! | O11 | always | no listing of ours while an Allocate is under way |
//!
//! O5: the client is tracked, not stopped and streaming, and the kubelet's list is the inventory.
//! O10: at most 20 Registers of a resource with one kubelet in any second, and 20 lists on any one
//! stream.
//!
//! Effects of a foreign plugin of the resource are excused, but only these:
//!
//! - a container that got exactly the ids of the plugin's answer, once for each of its answers;
//! - a device that disappears while such a container has it;
//! - a resource that was stopped or forgotten while the plugin's goroutines were active in the
//!   kubelet, if a stream of ours was open throughout. Nothing reports that to Holdfast until the
//!   kubelet restarts; from then on there is no excuse.

mod phases;

use super::daemon::Daemon;
use super::durable::Disk;
use super::hardware::{Hardware, gpu};
use super::rival_plugin::Answers;
use super::service::list;
use crate::domain::{AllocId, DeviceId, Entry, GrantState, ResourceName};
use crate::lab::sim::kubelet::{EventKind, Holder, Interleaving, Profile, View};
use crate::ledger::core::NEVER_STARTED;
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
            seen: 0,
            kubelet_since: Duration::ZERO,
            bound: BTreeMap::new(),
            given: BTreeMap::new(),
            rival_answers: Answers::default(),
            rival_containers: BTreeSet::new(),
            rival_effects: None,
            disrupted_at: Duration::ZERO,
            taken: 0,
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
        let mut holders = view.holders();
        // A pod that is rejected after a restart is being killed, and its devices count as free at
        // once.
        holders.retain(|holder| !view.pod(&holder.pod_uid).is_some_and(|pod| pod.is_failed()));
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
                let missing = |id: &DeviceId| {
                    !listed.contains(id) && !self.is_rival_answers(|other| other == id)
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
                self.refused(message, at, view)
            }
            EventKind::Rejected { pod_uid, message, .. }
                if self.is_idle
                    && !self.is_taken_by_rival(view)
                    && !self.has_late_list(view, &gpu())
                    && message.contains("Allocate failed")
                    && !message.contains("requested number of devices unavailable") =>
            {
                // A pod that holds an unhealthy device is rejected correctly.
                let holds_unhealthy = disk.ledger(|ledger| {
                    ledger.grants().any(|grant| grant.pod().is_some_and(|pod| pod.uid == *pod_uid))
                });
                if !(holds_unhealthy
                    && message.contains("previously allocated devices are no longer healthy"))
                {
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

    fn bound(&mut self, disk: &Disk, now: Duration) {
        let bound: Vec<AllocId> = disk.ledger(|ledger| {
            let placed = ledger.grants().filter(|grant| grant.state != GrantState::Granted);
            placed.map(|grant| grant.alloc_id.clone()).collect()
        });
        for id in bound {
            self.bound.entry(id).or_insert(now);
        }
    }

    /// Answers of the foreign plugin have no allocation id of ours.
    fn match_rival_containers(&mut self, holders: &[Holder]) {
        for holder in holders.iter().filter(|holder| !holder.alloc_ids.contains_key(&gpu())) {
            let Some(ids) = holder.devices.get(&gpu()) else { continue };
            let container = (holder.pod_uid.clone(), holder.container.clone(), ids.clone());
            if !self.rival_containers.contains(&container) && self.rival_answers.take(ids) {
                self.rival_containers.insert(container);
            }
        }
    }

    /// Whether the foreign plugin silently made the kubelet stop or forget the resource.
    fn is_taken_by_rival(&self, view: &View<'_>) -> bool {
        let endpoint = view.endpoint_state(&gpu());
        let silent = endpoint.streams > 0 && (endpoint.is_stopped || !endpoint.is_tracked);
        silent
            && self.rival_effects.as_ref().is_some_and(|period| period.contains(&self.disrupted_at))
    }

    /// Whether the foreign plugin gave such an id to a container. The ledger does not know it, and
    /// when the device disappears, nothing keeps it in the list.
    fn is_rival_answers(&self, fits: impl Fn(&DeviceId) -> bool) -> bool {
        self.rival_answers.has(&fits)
            || self.rival_containers.iter().any(|(_, _, ids)| ids.iter().any(&fits))
    }

    fn is_of_rival(&self, resource: &ResourceName, holder: &Holder) -> bool {
        if *resource != gpu() {
            return false;
        }
        let ids = holder.devices.get(&gpu()).cloned().unwrap_or_default();
        self.rival_containers.contains(&(holder.pod_uid.clone(), holder.container.clone(), ids))
    }

    fn remember(&mut self, holders: &[Holder], view: &View<'_>) {
        for holder in holders {
            if holder.alloc_ids.values().all(|id| self.remembered.contains(id)) {
                continue;
            }
            let known = view.devices(&holder.pod_uid, &holder.container);
            let alloc_ids =
                holder.alloc_ids.iter().filter(|(resource, _)| known.contains_key(*resource));
            self.remembered.extend(alloc_ids.map(|(_, id)| id.clone()));
        }
    }

    fn held_once(
        &mut self,
        resource: &ResourceName,
        holders: &[Holder],
        disk: &Disk,
        now: Duration,
    ) {
        let mut by_id: BTreeMap<&DeviceId, BTreeMap<&str, &Holder>> = BTreeMap::new();
        for holder in holders {
            for id in holder.devices.get(resource).into_iter().flatten() {
                by_id.entry(id).or_default().insert(&holder.pod_uid, holder);
            }
        }
        for (id, holders) in by_id.into_iter().filter(|(_, holders)| holders.len() > 1) {
            let given = |uid: &str| {
                self.given.get(&(uid.to_owned(), (*id).clone())).copied().unwrap_or_default()
            };
            let (newest, settled) = holders.keys().map(|uid| given(uid)).max().unwrap_or_default();
            // Whether the previous holder could be known when the id was given again.
            let known =
                holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                    let alloc_id = holder.alloc_ids.get(resource);
                    alloc_id.and_then(|id| self.bound.get(id)).is_some_and(|bound| *bound < newest)
                });
            // The foreign plugin's grants were not requested from us.
            let ours = !holders.values().any(|holder| {
                given(&holder.pod_uid).0 == newest && self.is_of_rival(resource, holder)
            });
            // A kubelet that never loaded its predecessor's grant: of two writes of its checkpoint
            // the older one came last. Its listing may prove that, but not at once.
            let lost =
                holders.values().filter(|holder| given(&holder.pod_uid).0 < newest).any(|holder| {
                    let alloc_id = holder.alloc_ids.get(resource);
                    !alloc_id.is_some_and(|id| self.remembered.contains(id))
                });
            // Before it has settled nothing is proven: a crash between two writes may have cost the
            // kubelet its record.
            if self.has_lost_record || lost || !(settled && known && ours) {
                self.excused += 1;
            } else {
                let pods: Vec<_> = holders.keys().copied().collect();
                let since = self.kubelet_since;
                let states: Vec<String> = disk.ledger(|ledger| {
                    ledger
                        .holders(resource, id)
                        .map(|grant| format!("{} {:?}", grant.alloc_id, grant.state))
                        .collect()
                });
                let what = format!(
                    "{id} is held by the pods {pods:?}, given at {newest:?}; kubelet since {since:?}; {states:?}"
                );
                return self.violated("O1", now, what);
            }
        }
    }

    fn in_ledger(
        &mut self,
        resource: &ResourceName,
        holders: &[Holder],
        disk: &Disk,
        now: Duration,
    ) {
        for holder in holders {
            let Some(devices) =
                holder.devices.get(resource).filter(|_| !self.is_of_rival(resource, holder))
            else {
                continue;
            };
            let granted = holder.alloc_ids.get(resource).and_then(|id| {
                disk.ledger(|ledger| {
                    ledger.grant(id).map(|grant| {
                        grant
                            .devices
                            .iter()
                            .map(|device| device.id.clone())
                            .collect::<BTreeSet<_>>()
                    })
                })
            });
            if granted.as_ref() != Some(devices) {
                let Holder { pod_uid, container, alloc_ids, .. } = holder;
                let is_last = |entry: &Entry| matches!(entry, Entry::Moved { alloc_id, .. } if alloc_ids.values().any(|id| id == alloc_id));
                let last = disk.entries().into_iter().rfind(is_last);
                // The kubelet lost its checkpoint before the daemon could read there which pod the
                // grant belongs to.
                let never_seen = |entry: &Entry| matches!(entry, Entry::Moved { state: GrantState::Released { released_by, .. }, .. } if released_by == NEVER_STARTED);
                if self.has_lost_record && last.as_ref().is_some_and(never_seen) {
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
