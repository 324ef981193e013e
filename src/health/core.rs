//! The judge: evidence in, inventory out. Pure.

use crate::domain::{
    Device, DeviceClass, DeviceId, Evidence, Grant, GrantedDevice, Health, Inventory, Listed, Offered, Offering, Owed, Reason,
    ResourceName, ResourceSpec, Safeguard, Sharing,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long a free id that is no longer found stays in the list, unhealthy. The kubelet gives out healthy ids only
/// and our Allocate ends within two seconds: after this long no Allocate for the id can be under way, and a kubelet
/// of 1.35 or newer cannot stumble over its absence.
pub(crate) const LEAVE_AFTER: Duration = Duration::from_secs(60);

/// Which ids are held, with what is needed to offer them on.
pub(crate) type Held = BTreeMap<ResourceName, BTreeMap<DeviceId, GrantedDevice>>;

/// The held ids of the live grants.
pub(crate) fn held<'a>(grants: impl Iterator<Item = &'a Grant>) -> Held {
    let mut held = Held::new();
    for grant in grants.filter(|grant| grant.is_live()) {
        let ids = held.entry(grant.resource.clone()).or_default();
        ids.extend(grant.devices.iter().map(|device| (device.id.clone(), device.clone())));
    }
    held
}

/// The judge's memory.
#[derive(Debug)]
pub(crate) struct Judge {
    specs: Arc<[Arc<ResourceSpec>]>,
    /// What an earlier process had in its lists, until the first judgement.
    earlier: Listed,
    evidence: Option<Arc<Evidence>>,
    /// Devices that an Allocate found broken, until newer evidence speaks.
    broken: BTreeMap<DeviceId, (Reason, Duration)>,
    /// Ids that are in the list although they are not offered any more, and since when.
    leaving: BTreeMap<(ResourceName, DeviceId), Duration>,
    inventory: Arc<Inventory>,
    /// Whether the list has only ids that are offered: then it does not matter who holds them.
    complete: bool,
}

impl Judge {
    /// Begins with what was published last, so that a rebuilt actor drops nothing from the list; and where nothing was,
    /// with what an earlier process had in it.
    pub(crate) fn new(specs: Arc<[Arc<ResourceSpec>]>, published: Arc<Inventory>, earlier: &Listed) -> Self {
        let earlier = if published.resources.is_empty() { earlier.clone() } else { Listed::new() };
        Judge { specs, earlier, evidence: None, broken: BTreeMap::new(), leaving: BTreeMap::new(), inventory: published, complete: false }
    }

    /// Takes the result of a scan. It overrules what was found broken before it began.
    pub(crate) fn discovered(&mut self, evidence: Arc<Evidence>) {
        if self.evidence.as_ref().is_some_and(|known| known.began.boot > evidence.began.boot) {
            return;
        }
        self.broken.retain(|_, (_, at)| *at >= evidence.began.boot);
        self.evidence = Some(evidence);
    }

    /// An Allocate found the device behind this id unusable.
    pub(crate) fn broken(&mut self, resource: &ResourceName, id: &DeviceId, reason: Reason, now: Duration) {
        let offered = self.inventory.resources.get(resource).and_then(|offering| offering.devices.get(id));
        if let Some(offered) = offered {
            self.broken.insert(offered.device.id.clone(), (reason, now));
        }
    }

    /// When the inventory may change without any event: the next id leaves the list.
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.leaving.values().min().map(|since| *since + LEAVE_AFTER)
    }

    /// Whether the list is as it would be judged with these grants. A node that loses no device never has to judge
    /// because of an Allocate.
    pub(crate) fn is_judged_with<'a>(&self, mut grants: impl Iterator<Item = &'a Grant>) -> bool {
        let is_listed = |grant: &Grant| {
            let listed = self.inventory.resources.get(&grant.resource).map(|offering| &offering.devices);
            listed.is_some_and(|listed| grant.devices.iter().all(|device| listed.contains_key(&device.id)))
        };
        self.complete && grants.all(is_listed)
    }

    /// Judges everything. `None` before the first evidence: nothing is known, so nothing is said.
    ///
    /// `due` are the hooks that devices wait for which nobody holds, as the ledger says: `held` may be older than that.
    pub(crate) fn judge(&mut self, held: &Held, due: &Owed, now: Duration) -> Option<Arc<Inventory>> {
        let evidence = Arc::clone(self.evidence.as_ref()?);
        let mut resources = BTreeMap::new();
        let mut leaving = BTreeMap::new();
        let mut complete = true;
        for spec in self.specs.iter() {
            let mut devices = self.offered(spec, &evidence);
            // A pool that has become smaller is still there.
            let pool = devices.values().next().filter(|_| matches!(spec.sharing, Sharing::Pool(_))).map(|any| Arc::clone(&any.device));
            let empty = BTreeMap::new();
            let held = held.get(&spec.name).unwrap_or(&empty);
            let mut held_nodes = BTreeSet::new();
            for (id, remembered) in self.absent(spec, &devices, held) {
                complete = false;
                // A share is found by its device. Never by its place: another card may sit there.
                let found = evidence.devices.get(&id).or_else(|| evidence.devices.get(&id.shared()?));
                let found = found.or_else(|| pool.as_ref().filter(|_| id.is_number()));
                let key = (spec.name.clone(), id.clone());
                let is_held = held.contains_key(&id);
                let since = self.leaving.get(&key).copied().unwrap_or(now);
                if Safeguard::HeldIds.is_on() && (is_held || now.saturating_sub(since) < LEAVE_AFTER) {
                    let health = absent_health(spec, found.map(AsRef::as_ref), is_held, &evidence);
                    let device = found.cloned().unwrap_or(remembered);
                    if is_held {
                        held_nodes.extend(device.own_nodes().map(str::to_owned));
                    }
                    // The wait begins when the last holder has gone.
                    leaving.extend((!is_held).then_some((key, since)));
                    devices.insert(id, Offered { device, health });
                }
            }
            // A node that got a better name while somebody holds it, or to which another way is left: one container at a time, by
            // whatever id.
            for (id, offered) in devices.iter_mut().filter(|(id, _)| !held.contains_key(*id)) {
                let is_listed = evidence.selected.get(&spec.name).is_some_and(|ids| ids.contains(id));
                if is_listed && spec.is_exclusive() && offered.device.own_nodes().any(|node| held_nodes.contains(node)) {
                    offered.health = Health::Unhealthy(Reason::HeldAsOther);
                }
            }
            if let Some(due) = due.get(&spec.name) {
                for offered in devices.values_mut().filter(|offered| offered.health.is_healthy()) {
                    offered.health = due.get(&offered.device.id).map_or(Health::Healthy, |hook| Health::Unhealthy(hook.reason()));
                }
            }
            resources.insert(spec.name.clone(), Offering { spec: Arc::clone(spec), devices });
        }
        (self.leaving, self.complete) = (leaving, complete);
        self.earlier.clear();
        self.inventory = Arc::new(Inventory { resources });
        Some(Arc::clone(&self.inventory))
    }

    /// What the resource selects now, share by share.
    fn offered(&self, spec: &ResourceSpec, evidence: &Evidence) -> BTreeMap<DeviceId, Offered> {
        let selected = evidence.selected.get(&spec.name).into_iter().flatten();
        let devices = selected.filter_map(|id| evidence.devices.get(id));
        let mut offered: Vec<Offered> =
            devices.map(|device| Offered { device: Arc::clone(device), health: self.health(device, evidence) }).collect();
        if let Sharing::Pool(_) = spec.sharing {
            offered = pool::pool(spec, &offered).into_iter().collect();
            // An Allocate may have found it broken as a whole.
            offered.iter_mut().filter(|pool| pool.health.is_healthy()).for_each(|pool| pool.health = self.health(&pool.device, evidence));
        }
        let shares = |one: &Offered| {
            let one = one.clone();
            spec.sharing.ids(&one.device.id).map(|id| (id, one.clone())).collect::<Vec<_>>()
        };
        offered.iter().flat_map(shares).collect()
    }

    /// What is said of a device that is found.
    fn health(&self, device: &Device, evidence: &Evidence) -> Health {
        match self.broken.get(&device.id) {
            Some((reason, _)) => Health::Unhealthy(*reason),
            None => device.health(evidence.has_nodes(device)),
        }
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
        let mut absent: BTreeMap<_, _> = remembered.map(|(id, offered)| (id.clone(), Arc::clone(&offered.device))).collect();
        for known in held.values().chain(self.earlier.get(&spec.name).into_iter().flatten()) {
            absent.entry(known.id.clone()).or_insert_with(|| Arc::new(ghost(spec.class, known)));
        }
        let other: BTreeSet<DeviceId> = offered.keys().cloned().collect();
        absent.retain(|id, _| !other.contains(id));
        absent
    }
}

/// The health of an id that its resource does not select now; `found` is its device, where it is there.
fn absent_health(spec: &ResourceSpec, found: Option<&Device>, is_held: bool, evidence: &Evidence) -> Health {
    let Some(found) = found else { return Health::Unhealthy(Reason::DeviceGone) };
    let has_driver = |driver: Option<&String>| driver.is_some_and(|driver| spec.select.driver.contains(driver));
    if !spec.select.driver.is_empty() && found.pci.as_ref().is_some_and(|pci| !has_driver(pci.driver.as_ref())) {
        return Health::Unhealthy(Reason::DriverLost);
    }
    let health = found.health(evidence.has_nodes(found));
    if !health.is_healthy() {
        return health;
    }
    // A holder keeps what it has with the health that the device deserves; nobody new gets it.
    if is_held { Health::Healthy } else { Health::Unhealthy(Reason::Deselected) }
}

/// A device of which only the ledger tells.
fn ghost(class: DeviceClass, known: &GrantedDevice) -> Device {
    Device {
        id: known.id.clone(),
        key: known.key.clone(),
        class,
        pci: None,
        numa_nodes: known.numa_nodes.clone(),
        nodes: Vec::new(),
        attributes: BTreeMap::new(),
    }
}

mod pool;
#[cfg(test)]
mod tests;
