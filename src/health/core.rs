//! The judge: evidence in, inventory out. Pure.
//!
//! Each device has a case ([`cases`], [`case`]). The health of an id in a list follows from the
//! case of its device and from the cases of the devices above. It also depends on whether the id is
//! offered or only held.

mod case;
mod cases;
mod departures;
mod held;
mod observations;
mod pool;
#[cfg(test)]
mod tests;

pub(crate) use self::cases::Rules;
pub(crate) use self::held::{Held, held, holders};

use self::cases::{Cases, Verdicts, is_instance, parents};
use self::departures::{
    ALLOCATE_IN_FLIGHT_MAX, EMPTY_LIST_FOR, IdsInUse, overlaps, resolve_conflicts,
};
use self::observations::{absent_health, placeholder_device};
use crate::domain::{
    AllocId, CheckResult, Device, DeviceEvent, DeviceId, EventKind, Evidence, Grant, GrantedDevice,
    Health, Inventory, Listed, Moment, Offered, Offering, OperatorRequest, PciAddress, PciFunction,
    PendingHooks, Reason, ResourceName, ResourceSpec, Safeguard, Sharing, Signals, Symptom,
    Verdict,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long a free id that is no longer found stays in the list, unhealthy. The kubelet gives out
/// only healthy ids, and our Allocate ends within two seconds. So after this time no Allocate for
/// the id can be in flight, and a kubelet of 1.35 or newer does not panic when the id leaves.
pub(crate) const LEAVE_AFTER: Duration = Duration::from_secs(60);

/// Events kept for the first scan after a start. A failing machine has a few per device.
const EARLY_EVENTS_MAX: usize = 256;

/// The minimum pause before another probe and rescan are requested, if the last did not end a wait.
const PROBE_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The judge's state.
#[derive(Debug)]
pub(crate) struct Judge {
    specs: Arc<[Arc<ResourceSpec>]>,
    /// The lists of an earlier process, until the first pass.
    earlier: Listed,
    evidence: Option<Arc<Evidence>>,
    /// Events from before the first evidence, which shows their devices.
    early_events: Vec<(DeviceEvent, Moment)>,
    /// Devices that an Allocate found broken, until there is newer evidence.
    unusable: BTreeMap<DeviceId, (Reason, Duration)>,
    cases: Cases,
    /// The devices of the evidence by their functions, without parts of functions.
    by_address: BTreeMap<PciAddress, DeviceId>,
    /// Until this time the lists hide failures from a kubelet that has just started.
    withheld_until: Duration,
    /// Ids in the list that are no longer offered, and since when.
    leaving: BTreeMap<(ResourceName, DeviceId), Duration>,
    /// Resources that the plan no longer has and whose list is empty, and since when.
    emptied: BTreeMap<ResourceName, Duration>,
    /// Whether a device may be in use under another id.
    has_conflicts: bool,
    /// Whether two offered devices lead to one object. Then their holders matter.
    overlaps: bool,
    inventory: Arc<Inventory>,
    /// Whether the list has only offered ids. Then their holders do not matter.
    only_offered: bool,
}

impl Judge {
    /// Starts with the last published lists, so that a rebuilt actor drops no id. If there are
    /// none, it starts with the lists of an earlier process.
    pub(crate) fn new(
        specs: Arc<[Arc<ResourceSpec>]>,
        published: Arc<Inventory>,
        earlier: &Listed,
        rules: Rules,
        remembered: &Verdicts,
    ) -> Self {
        let earlier = if published.resources.is_empty() { earlier.clone() } else { Listed::new() };
        Judge {
            specs,
            earlier,
            evidence: None,
            early_events: Vec::new(),
            unusable: BTreeMap::new(),
            cases: Cases::new(rules, remembered),
            by_address: BTreeMap::new(),
            withheld_until: Duration::ZERO,
            leaving: BTreeMap::new(),
            emptied: BTreeMap::new(),
            has_conflicts: false,
            overlaps: false,
            inventory: published,
            only_offered: false,
        }
    }

    /// Takes the result of a scan, which overrules broken devices that were found before the scan
    /// began. Returns true for the first one.
    pub(crate) fn discovered(&mut self, evidence: Arc<Evidence>) -> bool {
        if self.evidence.as_ref().is_some_and(|known| known.began.boot > evidence.began.boot) {
            return false;
        }
        let is_unread = |id: &DeviceId| {
            evidence.devices.get(id).is_some_and(|device| evidence.unread.why_of(device).is_some())
        };
        self.unusable.retain(|id, (_, at)| *at >= evidence.began.boot || is_unread(id));
        self.overlaps = overlaps(&evidence);
        let wholes = evidence.devices.values().filter(|device| device.attribute("part").is_none());
        self.by_address = wholes
            .filter_map(|device| Some((device.pci.as_ref()?.address, device.id.clone())))
            .collect();
        self.evidence.replace(evidence).is_none()
    }

    /// The devices to probe: all that are offered, held or still in the list, and those that they
    /// depend on. Only a probe shows why a disk without its controller is no longer offered.
    pub(crate) fn probed_devices(&self, held: &Held) -> Vec<Arc<Device>> {
        let Some(evidence) = &self.evidence else { return Vec::new() };
        let selected = evidence.selected.values().flatten().cloned();
        let held = held.ids.values().flat_map(BTreeMap::keys);
        let leaving = self.leaving.keys().map(|(_, id)| id);
        let absent = held.chain(leaving).map(|id| id.shared().unwrap_or_else(|| id.clone()));
        let mut ids: BTreeSet<DeviceId> = selected.chain(absent).collect();
        let above: Vec<DeviceId> = ids.iter().flat_map(|id| self.parents(id)).collect();
        ids.extend(above);
        // To a scan, an adapter without its RDMA device is of another class: probe it as it was.
        let is_other = |was: &&Arc<Device>| {
            was.pci.is_some()
                && evidence.devices.get(&was.id).is_some_and(|found| found.class != was.class)
        };
        let listed = self
            .inventory
            .resources
            .values()
            .flat_map(|offering| offering.devices.values().map(|offered| &offered.device));
        let former: BTreeMap<&DeviceId, &Arc<Device>> =
            listed.filter(is_other).map(|was| (&was.id, was)).collect();
        let devices = ids
            .iter()
            .filter_map(|id| former.get(id).copied().or_else(|| evidence.devices.get(id)));
        devices.filter(|device| device.pci.is_some()).cloned().collect()
    }

    /// A probe has ended.
    pub(crate) fn probed(&mut self, device: &Device, at: Moment, signals: &Signals) {
        self.cases.probed(&device.id, device.pci.as_ref().map(|pci| pci.address), at, signals);
    }

    /// The health check of a device's resource has ended. If it could not be run, nothing changes.
    pub(crate) fn checked(&mut self, id: &DeviceId, at: Moment, result: CheckResult) {
        self.cases.checked(id, at, result);
    }

    /// A probe does not return, which is a symptom too.
    pub(crate) fn probe_stuck(&mut self, id: &DeviceId, at: Moment) {
        let detail = "a read of its sysfs files does not return".to_owned();
        let symptoms = BTreeSet::from([Symptom { reason: Reason::ProbeStuck, detail }]);
        self.cases.probed(id, None, at, &Signals { symptoms, ..Signals::default() });
    }

    /// Takes an event of a function and of all functions below it. Returns whether it matters.
    pub(crate) fn apply_event(&mut self, event: &DeviceEvent, at: Moment, held: &Held) -> bool {
        let Some(evidence) = self.evidence.clone() else {
            if self.early_events.len() < EARLY_EVENTS_MAX {
                self.early_events.push((event.clone(), at));
            }
            return false;
        };
        let is_at = |pci: &PciFunction| {
            pci.address == event.at
                || (event.whole_slot
                    && PciAddress { function: event.at.function, ..pci.address } == event.at)
        };
        // An instance that no scan has found yet stands for the whole GPU.
        let instance = event.instance.filter(|instance| {
            evidence.devices.values().any(|device| {
                is_instance(device, *instance) && device.pci.as_deref().is_some_and(is_at)
            })
        });
        // A bridge's driver binds and unbinds without a reset of the devices below.
        let spreads = !matches!(event.kind, EventKind::Bound | EventKind::Unbound);
        let mut matters = false;
        let probed: BTreeSet<DeviceId> =
            self.probed_devices(held).iter().map(|device| device.id.clone()).collect();
        for device in evidence.devices.values() {
            let Some(pci) = &device.pci else { continue };
            let is_it = is_at(pci)
                && match (instance, device.attribute("part")) {
                    (Some(instance), Some(_)) => is_instance(device, instance),
                    (Some(_), None) => false,
                    // A part follows its whole, except that only a reset ends its own faults.
                    (None, Some(_)) => event.kind.is_reset() && self.cases.has_faults(&device.id),
                    (None, None) => true,
                };
            let is_meant = is_it || (spreads && pci.bridges.contains(&event.at));
            if is_meant
                && (probed.contains(&device.id)
                    || self.cases.must_record(device, &event.kind, is_it))
            {
                self.cases.apply_event(&device.id, event, at);
                matters = true;
            }
        }
        matters
    }

    /// Takes an operator's order. Returns false if the device is unknown.
    pub(crate) fn apply_instruction(
        &mut self,
        id: &DeviceId,
        instruction: &OperatorRequest,
        at: Moment,
    ) -> bool {
        let is_found =
            self.evidence.as_ref().is_some_and(|evidence| evidence.devices.contains_key(id));
        let is_known = is_found || self.cases.verdicts().contains_key(id);
        if is_known {
            self.cases.apply_instruction(id, instruction, at);
        }
        is_known
    }

    /// A kubelet has started: it rejects a pod if a container that is not running holds an
    /// unhealthy device. Until this time its lists do not show soft failures of held devices.
    pub(crate) fn withhold_until(&mut self, until: Duration) {
        self.withheld_until = until;
    }

    /// The verdicts, for status output.
    pub(crate) fn verdicts(&self) -> &BTreeMap<DeviceId, Verdict> {
        self.cases.verdicts()
    }

    /// The verdicts to record: see [`Cases::take_changed`]. A holder of a part of a device is a
    /// holder of the device.
    pub(crate) fn take_changed(
        &mut self,
        holders: impl Fn(&DeviceId) -> Vec<AllocId>,
    ) -> Vec<(DeviceId, Option<Verdict>)> {
        let Judge { cases, evidence, by_address, .. } = self;
        cases.take_changed(|id| {
            let devices = evidence.iter().flat_map(|evidence| evidence.devices.values());
            let below = devices
                .filter(|device| parents(device, by_address).contains(id))
                .flat_map(|device| holders(&device.id));
            holders(id).into_iter().chain(below).collect()
        })
    }

    /// When a scan and a probe are wanted because they may end a wait.
    pub(crate) fn next_probe(&self) -> Option<Duration> {
        let soonest = self.evidence.as_ref()?.began.boot + PROBE_INTERVAL_MIN;
        self.cases.next_observation().map(|wanted| wanted.max(soonest))
    }

    fn parents(&self, id: &DeviceId) -> Vec<DeviceId> {
        let device = self.evidence.as_ref().and_then(|evidence| evidence.devices.get(id));
        device.map(|device| parents(device, &self.by_address)).unwrap_or_default()
    }

    /// An Allocate found the device behind this id unusable.
    pub(crate) fn report_unusable(
        &mut self,
        resource: &ResourceName,
        id: &DeviceId,
        reason: Reason,
        now: Duration,
    ) {
        let offered =
            self.inventory.resources.get(resource).and_then(|offering| offering.devices.get(id));
        if let Some(offered) = offered {
            self.unusable.insert(offered.device.id.clone(), (reason, now));
        }
    }

    /// When the inventory may change without an event: an id leaves, or a hidden failure shows.
    pub(crate) fn next_deadline(&self, now: Duration) -> Option<Duration> {
        let leaving = self.leaving.values().min().map(|since| *since + self.cases.leave_after());
        let in_flight = self
            .leaving
            .values()
            .map(|since| *since + ALLOCATE_IN_FLIGHT_MAX)
            .filter(|until| self.has_conflicts && *until > now)
            .min();
        let withheld = Some(self.withheld_until).filter(|until| *until > now);
        [leaving, in_flight, self.next_removal(), withheld].into_iter().flatten().min()
    }

    /// Whether the list would stay the same with these grants. If no device is lost, an Allocate
    /// never leads to a pass of the judge.
    pub(crate) fn is_unchanged_by<'a>(&self, mut grants: impl Iterator<Item = &'a Grant>) -> bool {
        let is_listed = |grant: &Grant| {
            let listed =
                self.inventory.resources.get(&grant.resource).map(|offering| &offering.devices);
            listed.is_some_and(|listed| {
                grant.devices.iter().all(|device| listed.contains_key(&device.id))
            })
        };
        self.only_offered && !self.overlaps && grants.all(is_listed)
    }

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
        let withholds = now < self.withheld_until;
        let is_selected =
            |device: &Device| evidence.selected.values().any(|ids| ids.contains(&device.id));
        let mut resources = BTreeMap::new();
        let mut leaving = BTreeMap::new();
        let mut emptied = BTreeMap::new();
        let mut in_use = Vec::new();
        let mut only_offered = true;
        let (specs, planned) = self.judged();
        for (index, spec) in specs.iter().enumerate() {
            let mut devices = self.offered(spec, &evidence);
            // An id that a smaller pool no longer offers still has the pool as its device.
            let is_removed = index >= planned;
            let before = self
                .inventory
                .resources
                .get(&spec.name)
                .filter(|_| is_removed)
                .and_then(|before| before.devices.values().next());
            let pool = devices
                .values()
                .next()
                .or(before)
                .filter(|_| matches!(spec.sharing, Sharing::Pool(_)));
            let pool = pool.map(|any| Arc::clone(&any.device));
            let empty = BTreeMap::new();
            let held = held.of(&spec.name).unwrap_or(&empty);
            for (id, remembered) in self.absent(spec, &devices, held) {
                only_offered = false;
                // A share's device is found by its id. Its place may have another card.
                let found =
                    evidence.devices.get(&id).or_else(|| evidence.devices.get(&id.shared()?));
                let found = found.or_else(|| pool.as_ref().filter(|_| id.is_number()));
                let is_held = held.contains_key(&id);
                if found.is_none() && evidence.unread.why(&spec.name, &remembered.key).is_some() {
                    // The scan could not read it, so its health stays as it was.
                    let health = self.unread_health(&spec.name, &id, is_held);
                    devices.insert(id, Offered { device: remembered, health });
                    continue;
                }
                let key = (spec.name.clone(), id.clone());
                let since = self.leaving.get(&key).copied().unwrap_or(now);
                // A device that is present stays in the list until its hook has run.
                let is_due = |due: &BTreeMap<DeviceId, _>| {
                    found.is_some() && due.contains_key(&spec.sharing.whole(&spec.name, &id))
                };
                let is_in_use = is_held || due.get(&spec.name).is_some_and(is_due);
                if Safeguard::HeldIds.is_on()
                    && (is_in_use || now.saturating_sub(since) < self.cases.leave_after())
                {
                    let health = absent_health(spec, found.map(AsRef::as_ref), is_held, &evidence);
                    let health =
                        self.observe_absent(&id, found.map(AsRef::as_ref), health, &evidence);
                    // A node that no resource selects is found by its path alone; its other facts
                    // are remembered.
                    let is_remembered = |found: &&Arc<Device>| {
                        found.pci.is_none()
                            && found.key == remembered.key
                            && !remembered.nodes.is_empty()
                            && !is_selected(found)
                    };
                    let device =
                        found.filter(|found| !is_remembered(found)).cloned().unwrap_or(remembered);
                    if is_in_use || now.saturating_sub(since) < ALLOCATE_IN_FLIGHT_MAX {
                        in_use.push(IdsInUse::of(&spec.name, &id, &device, is_in_use));
                    }
                    // The wait begins when the last holder has released it.
                    leaving.extend((!is_held).then_some((key, since)));
                    devices.insert(id, Offered { device, health });
                }
            }
            for (_, offered) in
                devices.iter_mut().filter(|(id, _)| withholds && held.contains_key(*id))
            {
                if offered
                    .health
                    .reason()
                    .is_some_and(|reason| !reason.timings().fail_after.is_zero())
                {
                    offered.health = Health::Healthy;
                }
            }
            if let Some(due) = due.get(&spec.name) {
                for offered in devices.values_mut().filter(|offered| offered.health.is_healthy()) {
                    offered.health = due
                        .get(&offered.device.id)
                        .map_or(Health::Healthy, |hook| Health::Unhealthy(hook.reason()));
                }
            }
            if is_removed && devices.is_empty() {
                only_offered = false;
                let since = self.emptied.get(&spec.name).copied().unwrap_or(now);
                if now.saturating_sub(since) >= EMPTY_LIST_FOR {
                    continue;
                }
                emptied.insert(spec.name.clone(), since);
            }
            resources.insert(spec.name.clone(), Offering { spec: Arc::clone(spec), devices });
        }
        self.has_conflicts = resolve_conflicts(&mut resources, in_use, held, due);
        (self.leaving, self.emptied, self.only_offered) = (leaving, emptied, only_offered);
        self.earlier.clear();
        self.inventory = self.inventory.followed_by(resources);
        Some(Arc::clone(&self.inventory))
    }

    /// The ids of the devices that the resource selects now.
    fn offered(&self, spec: &ResourceSpec, evidence: &Evidence) -> BTreeMap<DeviceId, Offered> {
        let selected = evidence.selected.get(&spec.name).into_iter().flatten();
        let devices = selected.filter_map(|id| evidence.devices.get(id));
        let mut offered: Vec<Offered> = devices
            .map(|device| Offered { device: Arc::clone(device), health: self.health(&device.id) })
            .collect();
        if let Sharing::Pool(_) = spec.sharing {
            offered = pool::pool(spec, &offered).into_iter().collect();
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
    fn health(&self, id: &DeviceId) -> Health {
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
