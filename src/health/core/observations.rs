//! The results of a scan for single devices: those that are offered, and those that are only held
//! or about to leave.

use super::{Judge, pool};
use crate::domain::{
    Attributes, Device, DeviceClass, DeviceId, Evidence, GrantedDevice, Health, Moment, Reason,
    ResourceSpec, Sharing, Symptom,
};
use std::collections::BTreeSet;

impl Judge {
    /// Takes the evidence about the offered devices, and about those above them.
    pub(super) fn observe_selected(&mut self, evidence: &Evidence) {
        let selected: BTreeSet<&DeviceId> = evidence.selected.values().flatten().collect();
        let above: BTreeSet<DeviceId> = selected.iter().flat_map(|id| self.parents(id)).collect();
        for id in above.iter().filter(|id| !selected.contains(*id)) {
            self.cases.scanned(id, true, evidence.began, BTreeSet::new());
        }
        for spec in self.specs.iter().filter(|spec| matches!(spec.sharing, Sharing::Pool(_))) {
            self.cases.scanned(&pool::id(spec), false, evidence.began, BTreeSet::new());
        }
        // A device that could not be read keeps its state; this is not an observation.
        let seen = selected
            .iter()
            .filter_map(|id| evidence.devices.get(*id))
            .filter(|device| evidence.unread.why_of(device).is_none());
        for device in seen {
            let found = device
                .health(evidence.missing_node(device).is_none())
                .reason()
                .map(|reason| symptom(reason, Some(device), evidence));
            let unusable = self.unusable.get(&device.id).map(|(reason, _)| Symptom {
                reason: *reason,
                detail: "found by an Allocate".into(),
            });
            let at = self
                .unusable
                .get(&device.id)
                .map_or(evidence.began, |(_, at)| Moment { boot: *at, ..evidence.began });
            self.cases.scanned(
                &device.id,
                device.pci.is_some(),
                at,
                found.into_iter().chain(unusable).collect(),
            );
        }
    }

    /// The health of an id that is not offered, from its own health and from its case.
    pub(super) fn observe_absent(
        &mut self,
        id: &DeviceId,
        found: Option<&Device>,
        health: Health,
        evidence: &Evidence,
    ) -> Health {
        // The health of a pool follows only from its members.
        let is_of_pool = id.is_number();
        let id = found
            .map_or_else(|| id.shared().unwrap_or_else(|| id.clone()), |device| device.id.clone());
        // Another resource may offer it as it is.
        let is_offered = evidence.selected.values().any(|ids| ids.contains(&id));
        if !is_of_pool && !is_offered {
            let reason = health.reason().filter(|reason| *reason != Reason::Deselected);
            let symptoms = reason.map(|reason| symptom(reason, found, evidence));
            self.cases.scanned(
                &id,
                found.is_some_and(|device| device.pci.is_some()),
                evidence.began,
                symptoms.into_iter().collect(),
            );
        }
        // A failure explains more than `Deselected`: an adapter without its RDMA device is no
        // longer selected as an adapter.
        match health {
            Health::Healthy => self.health(&id),
            Health::Unhealthy(Reason::Deselected) => {
                self.health(&id).reason().map_or(health, Health::Unhealthy)
            }
            worse @ Health::Unhealthy(_) => worse,
        }
    }
}

/// The health of an id that its resource does not select now. `found` is its device, if it is
/// present.
pub(super) fn absent_health(
    spec: &ResourceSpec,
    found: Option<&Device>,
    is_held: bool,
    evidence: &Evidence,
) -> Health {
    let Some(found) = found else { return Health::Unhealthy(Reason::DeviceGone) };
    // A device without a driver is selected by no resource.
    let is_meant = |driver: &String| {
        spec.selections().any(|select| select.driver.is_empty() || select.driver.contains(driver))
    };
    if found.pci.as_ref().is_some_and(|pci| !pci.driver.as_ref().is_some_and(is_meant)) {
        return Health::Unhealthy(Reason::DriverLost);
    }
    let health = found.health(evidence.missing_node(found).is_none());
    if !health.is_healthy() {
        return health;
    }
    // A holder keeps the device with its actual health; no new container gets it.
    if is_held { Health::Healthy } else { Health::Unhealthy(Reason::Deselected) }
}

/// The symptom for a scan's finding, in words.
fn symptom(reason: Reason, device: Option<&Device>, evidence: &Evidence) -> Symptom {
    let detail =
        match (reason, device) {
            (Reason::NodeMissing, Some(device)) => evidence.missing_node(device).map(str::to_owned),
            (Reason::GroupNotViable, Some(device)) => {
                device.attribute("group_blocked_by").map(str::to_owned)
            }
            (Reason::DriverLost, Some(device)) => {
                let driver = device.pci.as_ref().and_then(|pci| pci.driver.as_deref());
                Some(driver.map_or_else(
                    || "no driver".to_owned(),
                    |driver| format!("the driver is {driver}"),
                ))
            }
            _ => None,
        };
    Symptom { reason, detail: detail.unwrap_or_default() }
}

/// A device that is known only from the ledger.
pub(super) fn placeholder_device(class: DeviceClass, known: &GrantedDevice) -> Device {
    Device {
        id: known.id.clone(),
        key: known.key.clone(),
        class,
        pci: None,
        numa_nodes: known.numa_nodes.clone(),
        nodes: Vec::new(),
        attributes: Attributes::default(),
    }
}
