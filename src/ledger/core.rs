//! The live grants as a value: the fold of the durable entries.
//!
//! ```text
//!            Allocate is answered
//!                    │
//!                    ▼        alloc-id in the kubelet's checkpoint
//!                 Granted ───────────────────────────────────────▶ Bound ◀───────┐
//!     (container is not known)                       (pod and container)         │ listed again
//!                    │                                               │           │
//!                    │ never in a checkpoint                         ▼ not listed│
//!                    │ that was written after it                  Suspect ───────┘
//!                    ▼                                               │
//!          Released(never_started)                                   ▼ one of
//!                     Released(pod_gone): absent twice, kubelet settled, cgroup dead
//!                     Released(handed_on): given to another pod, cgroup dead, at the gate
//!                     Released(superseded): its container came back with another grant
//! ```
//!
//! A release removes the grant from this value; the store keeps it as history. [`reconcile()`]
//! decides every move after `Granted`, from observations of the kubelet. Several grants may have
//! the same ids: an init container and the app container after it get the same ids by two
//! Allocates, and each has its own record.
//!
//! A claim of DRA has states of its own: `Prepared`, and `Released` by one of `unprepared`,
//! `reallocated` ([`record_claim()`]), `claim_gone` and `never_prepared` ([`reconcile()`]), and
//! `operator` ([`release_stuck()`]). No evidence about device plugins moves it.

mod agenda;
mod claim_end;
mod claims;
mod evidence;
mod forgetting;
mod hooks;
mod passage;
mod pending;
mod prepared;
mod rebuild;
mod reconcile;
mod refusal;
mod restore;
mod state;
mod stuck;

#[cfg(test)]
mod tests;
mod watchlist;

pub use self::agenda::{Agenda, LOOK_HELD, PodQuery, is_calm, next_look};
pub use self::claim_end::UNPREPARED;
pub use self::claims::{REALLOCATED, Recording, is_one_claim, record_claim, release_claim};
pub use self::evidence::ABSENCE_MIN;
pub use self::forgetting::{FORGOTTEN_AFTER, forget};
pub use self::hooks::{HeldBack, ReleaseHooks, ended, owing, undue};
pub use self::passage::{Passage, View, passage};
pub use self::pending::pending_releases;
pub use self::prepared::{CLAIM_GONE, NEVER_PREPARED, NEVER_PREPARED_MIN};
pub use self::rebuild::{rebuild, unheard_of};
pub use self::reconcile::{
    HANDED_ON, NEVER_STARTED, POD_GONE, SUPERSEDED, never_started, reconcile,
};
pub use self::refusal::{Doubt, HOLDERS_MAX, Proof, Sight, doubt, held_by_another};
pub use self::restore::{Restored, restore_claims};
pub use self::state::{LedgerState, Observed, StartDecision, Waiting};
pub use self::stuck::{OPERATOR, Vouched, release_stuck, stuck_claim};
pub use self::watchlist::{NEVER_STARTED_MIN, Watchlist};

use crate::domain::{
    AllocId, Checkpoint, DeviceId, Entry, Gone, Grant, GrantedDevice, HookState, Inventory, Listed,
    Objects, PendingHooks, ResourceName, Verdicts, note_gone, note_hook, note_list, note_verdict,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The live grants, the ids of devices, and the lists that the kubelet got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    grants: BTreeMap<AllocId, Arc<Grant>>,
    /// The grants that hold an id: more than one after an init container.
    holders: BTreeMap<ResourceName, BTreeMap<DeviceId, BTreeSet<AllocId>>>,
    /// The grants that hold an object, by any id.
    objects: Objects<AllocId>,
    /// Shared with the subscribers that these names were published to.
    names: Arc<BTreeMap<String, DeviceId>>,
    listed: Listed,
    verdicts: Verdicts,
    owed: PendingHooks,
    gone: Gone,
}

/// The effect of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A new grant.
    Granted,
    /// A grant has another state and still holds its devices.
    Moved,
    /// A grant was released.
    Released,
    /// A device got its id.
    Named,
    /// A resource's list has other ids.
    Listed,
    /// The verdict of a device has changed.
    Judged,
    /// A hook is pending, has failed or is no longer pending.
    Hook,
    /// Devices are absent, or present again.
    Gone,
    /// The records of devices were dropped.
    Forgotten,
    /// No effect: already known, or the grant is not live.
    Nothing,
}

impl Ledger {
    /// Rebuilds the ledger from the content of the store.
    pub fn from_recovered(
        grants: impl IntoIterator<Item = Grant>,
        names: BTreeMap<String, DeviceId>,
        listed: Listed,
        owed: PendingHooks,
        verdicts: Verdicts,
    ) -> Self {
        let mut ledger =
            Ledger { names: Arc::new(names), listed, owed, verdicts, ..Ledger::default() };
        grants.into_iter().filter(Grant::is_live).for_each(|grant| ledger.insert(Arc::new(grant)));
        ledger
    }

    /// Applies one durable fact. Total and idempotent.
    pub fn evolve(&mut self, entry: &Entry) -> Change {
        match entry {
            Entry::Grant(grant) => match self.grants.get(&grant.alloc_id) {
                Some(known) if **known == **grant => Change::Nothing,
                known => {
                    let (known, live) = (known.is_some(), grant.is_live());
                    self.remove(&grant.alloc_id);
                    if live {
                        self.insert(Arc::clone(grant));
                    }
                    match (known, live) {
                        (false, true) => Change::Granted,
                        (true, true) => Change::Moved,
                        (true, false) => Change::Released,
                        (false, false) => Change::Nothing,
                    }
                }
            },
            Entry::Moved { alloc_id, state } => {
                let Some(grant) =
                    self.grants.get_mut(alloc_id).filter(|grant| grant.state != *state)
                else {
                    return Change::Nothing;
                };
                Arc::make_mut(grant).state = state.clone();
                if grant.is_live() {
                    return Change::Moved;
                }
                self.remove(alloc_id);
                Change::Released
            }
            Entry::Named { key, id } => {
                if self.names.get(key) == Some(id) {
                    return Change::Nothing;
                }
                Arc::make_mut(&mut self.names).insert(key.clone(), id.clone());
                Change::Named
            }
            Entry::Listed { resource, devices } => {
                if self.is_listed(resource, devices) {
                    return Change::Nothing;
                }
                note_list(&mut self.listed, resource, Arc::clone(devices));
                Change::Listed
            }
            Entry::Judged { device, verdict } => {
                if self.verdicts.get(device) == verdict.as_deref() {
                    return Change::Nothing;
                }
                note_verdict(&mut self.verdicts, device, verdict.as_deref().cloned());
                Change::Judged
            }
            Entry::Hook(hook) => {
                let known =
                    self.owed.get(&hook.resource).and_then(|devices| devices.get(&hook.device));
                if known.map_or(hook.state == HookState::Done, |known| known == &**hook) {
                    return Change::Nothing;
                }
                note_hook(&mut self.owed, hook);
                Change::Hook
            }
            Entry::Gone { devices, since } => {
                if devices.iter().all(|device| self.gone.get(device).copied() == *since) {
                    return Change::Nothing;
                }
                note_gone(&mut self.gone, devices, *since);
                Change::Gone
            }
            Entry::Forgotten { devices } => self.forget(devices),
        }
    }

    /// Adds the times since when remembered devices have been absent.
    #[must_use]
    pub fn with_gone(self, gone: Gone) -> Self {
        Ledger { gone, ..self }
    }

    /// The live grants, oldest first.
    pub fn grants(&self) -> impl ExactSizeIterator<Item = &Arc<Grant>> {
        self.grants.values()
    }

    /// The UIDs of the pods that hold a device by an Allocate.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<&str> {
        self.pods_where(|grant| grant.claim.is_none())
    }

    /// The UIDs of the pods that use a claim.
    #[must_use]
    pub fn claim_pods(&self) -> BTreeSet<&str> {
        self.pods_where(|grant| grant.claim.is_some())
    }

    fn pods_where(&self, wanted: impl Fn(&Grant) -> bool) -> BTreeSet<&str> {
        let grants = self.grants().filter(|grant| wanted(grant));
        grants.flat_map(|grant| grant.pods()).map(|pod| pod.uid.as_str()).collect()
    }

    /// The live grants of a claim, by its UID, oldest first.
    pub fn of_claim<'a>(&'a self, uid: &'a str) -> impl Iterator<Item = &'a Arc<Grant>> {
        self.grants()
            .filter(move |grant| grant.claim.as_ref().is_some_and(|hold| hold.claim.uid == uid))
    }

    /// One live grant.
    #[must_use]
    pub fn grant(&self, alloc_id: &AllocId) -> Option<&Arc<Grant>> {
        self.grants.get(alloc_id)
    }

    /// The live grants that hold an id of a resource, oldest first.
    pub fn holders(
        &self,
        resource: &ResourceName,
        id: &DeviceId,
    ) -> impl DoubleEndedIterator<Item = &Arc<Grant>> {
        let ids = self.holders.get(resource).and_then(|devices| devices.get(id));
        ids.into_iter().flatten().filter_map(|alloc_id| self.grants.get(alloc_id))
    }

    /// Whether the kubelet's checkpoint holds another live grant for the same container, in place
    /// of this one.
    fn is_superseded(&self, grant: &Grant, checkpoint: Option<&Checkpoint>) -> bool {
        let present = checkpoint.and_then(|checkpoint| checkpoint.in_place_of(grant));
        present.is_some_and(|present| self.grants.contains_key(present))
    }

    /// Every held id by resource, with the facts that keep it in the list after its device was
    /// removed (I3). If several grants hold one id, the newest grant counts: the kubelet copied its
    /// NUMA nodes last.
    #[must_use]
    pub fn held(&self) -> BTreeMap<ResourceName, BTreeMap<DeviceId, GrantedDevice>> {
        let mut held: BTreeMap<ResourceName, BTreeMap<DeviceId, GrantedDevice>> = BTreeMap::new();
        for grant in self.grants.values() {
            let devices = held.entry(grant.resource.clone()).or_default();
            devices.extend(grant.devices.iter().map(|device| (device.id.clone(), device.clone())));
        }
        held
    }

    /// The id of each device that ever got one, by physical key (I6).
    #[must_use]
    pub fn names(&self) -> &Arc<BTreeMap<String, DeviceId>> {
        &self.names
    }

    /// The last list of each resource that the kubelet got, as far as it is remembered.
    #[must_use]
    pub fn listed(&self) -> &Listed {
        &self.listed
    }

    /// The remembered verdicts of devices.
    #[must_use]
    pub fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// The entries to write for an inventory: one for each resource whose list has other ids than
    /// before. An inventory without resources has not been judged yet, and gives no entry.
    #[must_use]
    pub fn unlisted(&self, inventory: &Inventory) -> Vec<Entry> {
        if inventory.resources.is_empty() {
            return Vec::new();
        }
        let mut lists: Listed =
            self.listed.keys().map(|resource| (resource.clone(), Arc::default())).collect();
        for (resource, offering) in &inventory.resources {
            let listed = offering.devices.iter().map(|(id, offered)| GrantedDevice {
                id: id.clone(),
                key: offered.device.key.clone(),
                numa_nodes: offered.device.numa_nodes.clone(),
                nodes: Vec::new(),
                objects: Vec::new(),
            });
            lists.insert(resource.clone(), listed.collect());
        }
        lists.retain(|resource, devices| !self.is_listed(resource, devices));
        lists.into_iter().map(|(resource, devices)| Entry::Listed { resource, devices }).collect()
    }

    /// Whether these are the ids of a resource's list.
    fn is_listed(&self, resource: &ResourceName, devices: &[GrantedDevice]) -> bool {
        self.listed.get(resource).map_or(devices.is_empty(), |known| **known == *devices)
    }

    /// A live grant that holds a device of `wanted`, or an object of it, and excludes `wanted`:
    /// both would have the object.
    fn other_holder<'a>(&'a self, wanted: &'a Grant) -> Option<(&'a GrantedDevice, &'a Grant)> {
        wanted.held_devices().find_map(|device| {
            let is_beside = |holder: &Grant| {
                holder.alloc_id == wanted.alloc_id || holder.is_beside(wanted, &device.id)
            };
            let is_known_beside =
                |holder: &AllocId| self.grants.get(holder).is_none_or(|holder| is_beside(holder));
            let by_object = self.objects.conflict(&device.objects, is_known_beside);
            let holder = by_object.and_then(|holder| self.grants.get(holder)).or_else(|| {
                self.holders(&wanted.resource, &device.id).find(|holder| !is_beside(holder))
            })?;
            Some((device, &**holder))
        })
    }

    fn insert(&mut self, grant: Arc<Grant>) {
        for device in grant.held_devices() {
            let devices = self.holders.entry(grant.resource.clone()).or_default();
            devices.entry(device.id.clone()).or_default().insert(grant.alloc_id.clone());
        }
        self.objects.hold(&grant.alloc_id, grant.objects());
        self.grants.insert(grant.alloc_id.clone(), grant);
    }

    fn remove(&mut self, alloc_id: &AllocId) {
        let Some(grant) = self.grants.remove(alloc_id) else {
            return;
        };
        self.objects.release(alloc_id, &grant.objects());
        let Some(devices) = self.holders.get_mut(&grant.resource) else {
            return;
        };
        for device in grant.held_devices() {
            if let Some(holders) = devices.get_mut(&device.id) {
                holders.remove(alloc_id);
                if holders.is_empty() {
                    devices.remove(&device.id);
                }
            }
        }
        if devices.is_empty() {
            self.holders.remove(&grant.resource);
        }
    }
}
