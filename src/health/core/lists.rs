//! The lists: a pass of the judge over every resource, with the ids that it selects and those that
//! stay because they are held or about to leave.

use super::departures::{ALLOCATE_IN_FLIGHT_MAX, EMPTY_LIST_FOR, resolve_conflicts};
use super::held::{Held, IdsInUse};
use super::observations::{absent_health, placeholder_device};
use super::{Judge, pool};
use crate::domain::{
    Device, DeviceId, Evidence, GrantedDevice, Health, Inventory, MpsState, Offered, Offering,
    PendingHook, PendingHooks, Reason, ResourceName, ResourceSpec, Safeguard, Sharing,
    mps_run_here,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One pass over all resources: its inputs, and the results that the next pass needs.
struct Pass<'a> {
    evidence: &'a Evidence,
    held: &'a Held,
    due: &'a PendingHooks,
    now: Duration,
    /// See the fields of the same names of [`Judge`].
    leaving: BTreeMap<(ResourceName, DeviceId), Duration>,
    emptied: BTreeMap<ResourceName, Duration>,
    only_offered: bool,
    in_use: Vec<IdsInUse>,
}

impl Judge {
    /// Judges everything. `None` before the first evidence: nothing is known yet.
    ///
    /// `due` are the pending hooks of free devices by the ledger: `held` may be older than that.
    pub(crate) fn judge(
        &mut self,
        held: &Held,
        due: &PendingHooks,
        now: Duration,
    ) -> Option<Arc<Inventory>> {
        let evidence = Arc::clone(self.evidence.as_ref()?);
        for (event, at) in std::mem::take(&mut self.early_events) {
            self.apply_event(&event, at, held);
        }
        self.cases.begin_pass();
        self.observe_selected(&evidence);
        let mut pass = Pass {
            evidence: &evidence,
            held,
            due,
            now,
            leaving: BTreeMap::new(),
            emptied: BTreeMap::new(),
            in_use: Vec::new(),
            only_offered: true,
        };
        let mut resources = BTreeMap::new();
        let (specs, planned) = self.judged();
        for (index, spec) in specs.iter().enumerate() {
            let is_removed = index >= planned;
            let mut devices = self.offered(spec, &evidence);
            self.keep_absent(spec, is_removed, &mut devices, &mut pass);
            if let Some(held) = held.of(&spec.name).filter(|_| now < self.withheld_until) {
                withhold_soft_failures(&mut devices, held);
            }
            if let Some(due) = due.get(&spec.name) {
                mark_due(&mut devices, due);
            }
            if mps_run_here(spec).is_some() {
                let state = self.mps.get(&spec.name).unwrap_or(&MpsState::Starting);
                let is_settled = now >= self.withheld_until;
                mark_without_mps(&mut devices, state, is_settled, held.of(&spec.name));
            }
            if is_removed && devices.is_empty() {
                pass.only_offered = false;
                let since = self.emptied.get(&spec.name).copied().unwrap_or(now);
                if now.saturating_sub(since) >= EMPTY_LIST_FOR {
                    continue;
                }
                pass.emptied.insert(spec.name.clone(), since);
            }
            resources.insert(spec.name.clone(), Offering { spec: Arc::clone(spec), devices });
        }
        let Pass { leaving, emptied, in_use, only_offered, .. } = pass;
        self.has_conflicts = resolve_conflicts(&mut resources, in_use, held, due);
        (self.leaving, self.emptied, self.only_offered) = (leaving, emptied, only_offered);
        self.earlier.clear();
        self.inventory = self.inventory.followed_by(resources);
        Some(Arc::clone(&self.inventory))
    }

    /// Adds the ids that the resource does not select now, and that must stay in its list.
    fn keep_absent(
        &mut self,
        spec: &ResourceSpec,
        is_removed: bool,
        devices: &mut BTreeMap<DeviceId, Offered>,
        pass: &mut Pass<'_>,
    ) {
        let evidence = pass.evidence;
        // An id that a smaller pool no longer offers still has the pool as its device.
        let before = self
            .inventory
            .resources
            .get(&spec.name)
            .filter(|_| is_removed)
            .and_then(|before| before.devices.values().next());
        let pool =
            devices.values().next().or(before).filter(|_| matches!(spec.sharing, Sharing::Pool(_)));
        let pool = pool.map(|any| Arc::clone(&any.device));
        let empty = BTreeMap::new();
        let held = pass.held.of(&spec.name).unwrap_or(&empty);
        for (id, remembered) in self.absent(spec, devices, held) {
            pass.only_offered = false;
            // A share's device is found by its id. Its place may have another card.
            let found = evidence.devices.get(&id).or_else(|| evidence.devices.get(&id.shared()?));
            let found = found.or_else(|| pool.as_ref().filter(|_| id.is_number()));
            let is_held = held.contains_key(&id);
            if found.is_none() && evidence.unread.why(&spec.name, &remembered.key).is_some() {
                // The scan could not read it, so its health stays as it was.
                let health = self.unread_health(&spec.name, &id, is_held);
                devices.insert(id, Offered { device: remembered, health });
            } else if let Some(kept) = self.keep(spec, &id, (found, remembered), is_held, pass) {
                devices.insert(id, kept);
            }
        }
    }

    /// The entry of an id that the resource does not select now, with its device as the scan found
    /// it and as the list has it. `None` when the id leaves the list.
    fn keep(
        &mut self,
        spec: &ResourceSpec,
        id: &DeviceId,
        (found, remembered): (Option<&Arc<Device>>, Arc<Device>),
        is_held: bool,
        pass: &mut Pass<'_>,
    ) -> Option<Offered> {
        let (evidence, now) = (pass.evidence, pass.now);
        let key = (spec.name.clone(), id.clone());
        let since = self.leaving.get(&key).copied().unwrap_or(now);
        // A device that is present stays in the list until its hook has run.
        let is_due = |due: &BTreeMap<DeviceId, _>| {
            found.is_some() && due.contains_key(&spec.sharing.whole(&spec.name, id))
        };
        let is_in_use = is_held || pass.due.get(&spec.name).is_some_and(is_due);
        let stays = is_in_use || now.saturating_sub(since) < self.cases.leave_after();
        if !(Safeguard::HeldIds.is_on() && stays) {
            return None;
        }
        let health = absent_health(spec, found.map(AsRef::as_ref), is_held, evidence);
        let health = self.observe_absent(id, found.map(AsRef::as_ref), health, evidence);
        // A node that no resource selects is found by its path alone; its other facts are
        // remembered.
        let is_selected =
            |device: &Device| evidence.selected.values().any(|ids| ids.contains(&device.id));
        let is_remembered = |found: &&Arc<Device>| {
            found.pci.is_none()
                && found.key == remembered.key
                && !remembered.nodes.is_empty()
                && !is_selected(found)
        };
        let device = found.filter(|found| !is_remembered(found)).cloned().unwrap_or(remembered);
        if is_in_use || now.saturating_sub(since) < ALLOCATE_IN_FLIGHT_MAX {
            pass.in_use.push(IdsInUse::of(&spec.name, id, &device, is_in_use));
        }
        // The wait begins when the last holder has released it.
        pass.leaving.extend((!is_held).then_some((key, since)));
        Some(Offered { device, health })
    }

    /// The ids of the devices that the resource selects now.
    fn offered(&self, spec: &ResourceSpec, evidence: &Evidence) -> BTreeMap<DeviceId, Offered> {
        let selected = evidence.selected.get(&spec.name).into_iter().flatten();
        let devices = selected.filter_map(|id| evidence.devices.get(id));
        let mut offered: Vec<Offered> = devices
            .map(|device| Offered { device: Arc::clone(device), health: self.health(&device.id) })
            .collect();
        if let Sharing::Pool(_) = spec.sharing {
            offered = pool(spec, &offered).into_iter().collect();
            // An Allocate may find the pool broken as a whole; its health check is of the whole.
            for pool in offered.iter_mut().filter(|pool| pool.health.is_healthy()) {
                let unusable = self
                    .unusable
                    .get(&pool.device.id)
                    .map(|(reason, _)| Health::Unhealthy(*reason));
                pool.health = unusable.unwrap_or_else(|| self.cases.health(&pool.device.id));
            }
        }
        let shares = |one: &Offered| {
            let one = one.clone();
            spec.sharing.ids(&one.device.id).map(|id| (id, one.clone())).collect::<Vec<_>>()
        };
        offered.iter().flat_map(shares).collect()
    }

    /// The health of an id whose device a scan could not read: as before.
    fn unread_health(&self, resource: &ResourceName, id: &DeviceId, is_held: bool) -> Health {
        let before =
            self.inventory.resources.get(resource).and_then(|offering| offering.devices.get(id));
        // The list never had the id. A holder keeps the device's health; no other gets it.
        let unknown =
            if is_held { self.cases.health(id) } else { Health::Unhealthy(Reason::Unread) };
        before.map_or(unknown, |before| before.health)
    }

    /// The health of a device, by its own case and by those of the devices above it.
    pub(super) fn health(&self, id: &DeviceId) -> Health {
        let own = self.cases.health(id);
        if !own.is_healthy() {
            return own;
        }
        let above = self
            .parents(id)
            .iter()
            .map(|parent| self.cases.health(parent))
            .find(|health| !health.is_healthy());
        above.unwrap_or(own)
    }

    /// Ids that were offered or are held, and that the resource does not select now.
    fn absent(
        &self,
        spec: &ResourceSpec,
        offered: &BTreeMap<DeviceId, Offered>,
        held: &BTreeMap<DeviceId, GrantedDevice>,
    ) -> BTreeMap<DeviceId, Arc<Device>> {
        let before = self.inventory.resources.get(&spec.name);
        let remembered = before.into_iter().flat_map(|offering| &offering.devices);
        let mut absent: BTreeMap<_, _> =
            remembered.map(|(id, offered)| (id.clone(), Arc::clone(&offered.device))).collect();
        for known in held
            .values()
            .chain(self.earlier.get(&spec.name).into_iter().flat_map(|list| list.iter()))
        {
            absent
                .entry(known.id.clone())
                .or_insert_with(|| Arc::new(placeholder_device(spec.class, known)));
        }
        let other: BTreeSet<DeviceId> = offered.keys().cloned().collect();
        absent.retain(|id, _| !other.contains(id));
        absent
    }
}

/// Hides the failures of held devices that may end soon.
fn withhold_soft_failures(
    devices: &mut BTreeMap<DeviceId, Offered>,
    held: &BTreeMap<DeviceId, GrantedDevice>,
) {
    for (_, offered) in devices.iter_mut().filter(|(id, _)| held.contains_key(*id)) {
        let reason = offered.health.reason();
        if reason.is_some_and(|reason| !reason.timings().fail_after.is_zero()) {
            offered.health = Health::Healthy;
        }
    }
}

/// Makes healthy shares unhealthy whose control daemon of MPS does not answer. While that is not
/// known, and for a kubelet that has just started, a held share keeps its health: its container may
/// run.
fn mark_without_mps(
    devices: &mut BTreeMap<DeviceId, Offered>,
    state: &MpsState,
    is_settled: bool,
    held: Option<&BTreeMap<DeviceId, GrantedDevice>>,
) {
    let counts_for_held = match state {
        MpsState::Ready => return,
        MpsState::Starting => false,
        MpsState::Down { .. } => is_settled,
    };
    let is_held = |id: &DeviceId| held.is_some_and(|held| held.contains_key(id));
    for (id, offered) in devices.iter_mut().filter(|(_, offered)| offered.health.is_healthy()) {
        if counts_for_held || !is_held(id) {
            offered.health = Health::Unhealthy(Reason::MpsDown);
        }
    }
}

/// Makes healthy devices with a pending hook unhealthy.
fn mark_due(devices: &mut BTreeMap<DeviceId, Offered>, due: &BTreeMap<DeviceId, PendingHook>) {
    for offered in devices.values_mut().filter(|offered| offered.health.is_healthy()) {
        offered.health = due
            .get(&offered.device.id)
            .map_or(Health::Healthy, |hook| Health::Unhealthy(hook.reason()));
    }
}
