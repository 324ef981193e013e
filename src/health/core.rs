//! The judge: evidence in, inventory out. Pure.
//!
//! Each device has a case ([`cases`], [`case`]). The health of an id in a list follows from the
//! case of its device and from the cases of the devices above. It also depends on whether the id is
//! offered or only held.

mod case;
mod cases;
mod departures;
mod held;
mod lists;
mod observations;
mod plugin_lists;
mod pool;
mod rules;
#[cfg(test)]
mod tests;

pub(crate) use self::held::{Held, held, holders};
pub(crate) use self::plugin_lists::{depend_on_holders, plugin_lists};
pub(crate) use self::pool::pool;
pub(crate) use self::rules::{LEAVE_AFTER, Rules};

use self::cases::{Cases, is_instance, parents};
use self::departures::{ALLOCATE_IN_FLIGHT_MAX, overlaps};
use crate::domain::{
    AllocId, CheckResult, Device, DeviceEvent, DeviceId, EventKind, Evidence, Grant, Inventory,
    Listed, Moment, MpsStates, OperatorRequest, PciAddress, PciFunction, Reason, ResourceName,
    ResourceSpec, Signals, Symptom, Verdict, Verdicts,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

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
    /// The control daemons of MPS.
    mps: Arc<MpsStates>,
    /// Until this time the lists hide failures from a kubelet that has just started.
    withheld_until: Duration,
    /// When a scan and a probe were last requested.
    probed_at: Duration,
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
            mps: Arc::default(),
            withheld_until: Duration::ZERO,
            probed_at: Duration::ZERO,
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
    pub(crate) fn apply_request(
        &mut self,
        id: &DeviceId,
        request: &OperatorRequest,
        at: Moment,
    ) -> bool {
        let is_found =
            self.evidence.as_ref().is_some_and(|evidence| evidence.devices.contains_key(id));
        let is_known = is_found || self.cases.verdicts().contains_key(id);
        if is_known {
            self.cases.apply_request(id, request, at);
        }
        is_known
    }

    /// A kubelet has started: it rejects a pod if a container that is not running holds an
    /// unhealthy device. Until this time its lists do not show soft failures of held devices.
    pub(crate) fn withhold_until(&mut self, until: Duration) {
        self.withheld_until = until;
    }

    /// Takes the states of the control daemons of MPS.
    pub(crate) fn set_mps(&mut self, states: Arc<MpsStates>) {
        self.mps = states;
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

    /// The verdicts of these devices were not recorded: [`Judge::take_changed`] returns them again.
    pub(crate) fn not_recorded(&mut self, devices: Vec<DeviceId>) {
        self.cases.not_recorded(devices);
    }

    /// When a scan and a probe are wanted because they may end a wait.
    pub(crate) fn next_probe(&self) -> Option<Duration> {
        let began = self.evidence.as_ref()?.began.boot;
        let soonest = began.max(self.probed_at) + PROBE_INTERVAL_MIN;
        self.cases.next_observation().map(|wanted| wanted.max(soonest))
    }

    /// A scan and a probe were requested. The scan may take long.
    pub(crate) fn probe_requested(&mut self, now: Duration) {
        self.probed_at = now;
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

    /// Whether the inventory would stay the same with these grants. If no device is lost, an
    /// Allocate never leads to a pass of the judge.
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
}
