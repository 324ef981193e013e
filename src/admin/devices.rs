//! Reports of each device's health: for `device show`, `status` and other clients of the daemon.

use super::Views;
use crate::domain::{
    Device, DeviceClass, DeviceId, Health, Incident, Inventory, Offered, PciAddress, Reason,
    Timestamp, Verdict, VerdictState, Verdicts,
};
use crate::hook::{HookOutput, Outputs};
use crate::host;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One device, with all that is known of its health.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its own id. A share has the id `id::n`.
    pub id: String,
    /// The name that the ledger uses, which stays while the device stays at its place. Empty where
    /// only a verdict is left of the device.
    pub key: String,
    /// The resources that list it.
    pub resources: BTreeSet<String>,
    /// `Healthy` or `Unhealthy`, as in the kubelet's list; `null` for a device that no resource
    /// lists.
    pub health: Option<String>,
    /// Why it is unhealthy.
    pub reason: Option<String>,
    /// Its health in the list of each resource, where they differ. `health` and `reason` are of an
    /// unhealthy one then.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_resource: BTreeMap<String, ListedHealth>,
    /// The evidence: the value that was read, or the event.
    pub detail: Option<String>,
    /// The state that its evidence has led to: `healthy`, `suspect`, `unhealthy` or `recovering`.
    pub state: String,
    /// While it recovers: how many seconds without new evidence against it are still needed.
    pub healthy_in_seconds: Option<u64>,
    /// An operator's reason why it must not be granted. Only the control socket shows it.
    pub cordoned: Option<String>,
    /// When the operator cordoned it.
    pub cordoned_at: Option<Timestamp>,
    /// Whether the operator also wants the pods of its claims to be deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evicts: bool,
    /// How many times it failed, each time soon after the last.
    pub flaps: u32,
    /// Its last failures, oldest first.
    pub incidents: Vec<Incident>,
    /// The output of its failed hooks and of its failed check. Only the control socket shows it.
    #[serde(rename = "said")]
    pub outputs: Vec<HookOutput>,
    /// Its class; `null` where no resource lists it. The class and the place are also known of a
    /// device that was removed.
    pub class: Option<DeviceClass>,
    /// The NUMA nodes that it is near.
    pub numa_nodes: Vec<u32>,
    /// Bridges from the root port down.
    pub bridges: Vec<PciAddress>,
    /// The host's names for it: interfaces, RDMA devices, NVMe controllers, and its nodes.
    pub names: Vec<String>,
}

/// The health of a device in the list of one resource.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedHealth {
    /// `Healthy` or `Unhealthy`.
    pub health: String,
    /// Why it is unhealthy.
    pub reason: Option<String>,
}

/// Every device that is listed or that has a verdict. Any peer that reaches the page can read this,
/// so the words of operators and the output of commands are left out.
pub(super) fn reports(views: &Views) -> Vec<DeviceReport> {
    let verdicts = views.judgement.borrow().verdicts.clone();
    let inventory = Arc::clone(&views.inventory.borrow());
    all(&verdicts, &inventory, host::now().boot)
}

fn all(verdicts: &Verdicts, inventory: &Inventory, now: Duration) -> Vec<DeviceReport> {
    let mut devices: BTreeMap<DeviceId, DeviceReport> =
        verdicts.iter().map(|(id, verdict)| (id.clone(), report(id, Some(verdict), now))).collect();
    for (resource, offering) in &inventory.resources {
        let is_leaving =
            |offered: &&Offered| offered.health == Health::Unhealthy(Reason::Deselected);
        let (leaving, staying): (Vec<&Offered>, Vec<&Offered>) =
            offering.devices.values().partition(is_leaving);
        for offered in staying.into_iter().chain(leaving) {
            let id = &offered.device.id;
            let device = devices.entry(id.clone()).or_insert_with(|| report(id, None, now));
            device.key.clone_from(&offered.device.key);
            device.class = Some(offered.device.class);
            device.names = names(&offered.device);
            device.numa_nodes.clone_from(&offered.device.numa_nodes);
            device.bridges =
                offered.device.pci.as_ref().map(|pci| pci.bridges.clone()).unwrap_or_default();
            let is_first = device.resources.insert(resource.to_string());
            if !is_first && is_leaving(&offered) {
                // A share that was removed has no bearing on a device that has other shares.
                continue;
            }
            let listed = ListedHealth {
                health: offered.health.as_str().to_owned(),
                reason: offered.health.reason().map(|reason| reason.to_string()),
            };
            // Of shares with different health, and of different resources (one of them has a check
            // that fails), an unhealthy one counts.
            let counts = |is_first: bool| is_first || !offered.health.is_healthy();
            if counts(is_first) {
                device.by_resource.insert(resource.to_string(), listed.clone());
            }
            if counts(device.health.is_none()) {
                device.health = Some(listed.health);
                device.reason = listed.reason;
                let detail = offered
                    .health
                    .reason()
                    .zip(verdicts.get(id))
                    .map(|(reason, verdict)| verdict.detail(reason));
                device.detail = detail.filter(|detail| !detail.is_empty()).map(str::to_owned);
            }
        }
    }
    for device in devices.values_mut() {
        let mut all = device.by_resource.values();
        let first = all.next();
        if all.all(|listed| Some(listed) == first) {
            device.by_resource.clear();
        }
    }
    devices.into_values().collect()
}

/// Adds the fields that only root may read: an operator's words and the output of commands.
pub(super) fn add_restricted(reports: &mut [DeviceReport], views: &Views, outputs: &Outputs) {
    let verdicts = views.judgement.borrow().verdicts.clone();
    for report in reports {
        let id = DeviceId::new(&report.id);
        report.cordoned =
            verdicts.get(&id).and_then(|verdict| Some(verdict.cordon.as_ref()?.reason.clone()));
        report.outputs = outputs.of(&id);
    }
}

fn names(device: &Device) -> Vec<String> {
    let function =
        device.pci.iter().flat_map(|pci| [&pci.net, &pci.rdma, &pci.nvme]).flatten().cloned();
    function.chain(device.nodes.iter().map(|node| node.host.clone())).collect()
}

fn report(id: &DeviceId, verdict: Option<&Verdict>, now: Duration) -> DeviceReport {
    let nothing = Verdict::default();
    let verdict = verdict.unwrap_or(&nothing);
    let healthy_in_seconds = match verdict.state {
        VerdictState::Recovering { since, hold, .. } => {
            Some((since + hold).saturating_sub(now).as_secs())
        }
        _ => None,
    };
    let reason = Health::reason(verdict.health());
    DeviceReport {
        id: id.to_string(),
        key: String::new(),
        resources: BTreeSet::new(),
        health: None,
        reason: reason.map(|reason| reason.to_string()),
        by_resource: BTreeMap::new(),
        detail: reason
            .map(|reason| verdict.detail(reason).to_owned())
            .filter(|detail| !detail.is_empty()),
        state: verdict.state.as_str().to_owned(),
        healthy_in_seconds,
        cordoned: verdict.cordon.as_ref().map(|_| String::new()),
        cordoned_at: verdict.cordon.as_ref().map(|cordon| cordon.at),
        evicts: verdict.evicts(),
        flaps: verdict.flaps,
        incidents: verdict.incidents.clone(),
        outputs: Vec::new(),
        class: None,
        numa_nodes: Vec::new(),
        bridges: Vec::new(),
        names: Vec::new(),
    }
}

impl DeviceReport {
    /// The explanation of the reason: the evidence, else an operator's words where they are known.
    #[must_use]
    pub fn explanation(&self) -> Option<&str> {
        let words = self.cordoned.as_deref().filter(|words| !words.is_empty());
        self.detail.as_deref().or(words)
    }

    /// Since when it is not granted: since the operator's order, which comes first, or since the
    /// last failure, unless that has ended.
    #[must_use]
    pub fn since(&self) -> Option<Timestamp> {
        let failed = self
            .incidents
            .last()
            .filter(|incident| incident.until.is_none())
            .map(|incident| incident.at);
        self.cordoned_at.or(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{Attributes, Offering, ResourceSpec};

    fn offering(name: &str, devices: &[(&str, &str, Health)]) -> Offering {
        let offered = |&(id, whole, health): &(&str, &str, Health)| {
            let device = Device {
                id: DeviceId::new(whole),
                key: whole.to_owned(),
                class: DeviceClass::Gpu,
                pci: None,
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: Attributes::default(),
            };
            (DeviceId::new(id), Offered { device: Arc::new(device), health })
        };
        let spec = ResourceSpec::new(name.parse().unwrap(), DeviceClass::Gpu);
        Offering { spec: Arc::new(spec), devices: devices.iter().map(offered).collect() }
    }

    #[test]
    fn a_device_has_the_health_of_each_resource_where_they_differ() {
        let (well, sick) = (Health::Healthy, Health::Unhealthy(Reason::CheckFailed));
        let resources = [
            offering("a.com/gpu", &[("x::0", "x", well), ("x::1", "x", sick), ("y", "y", well)]),
            offering("b.com/gpu", &[("x", "x", well), ("y", "y", well), ("z", "z", sick)]),
            offering("c.com/gpu", &[("z", "z", sick)]),
        ];
        let named = resources.map(|it| (it.spec.name.clone(), Arc::new(it)));
        let reports = all(&Verdicts::new(), &Inventory { resources: named.into() }, Duration::ZERO);
        let [x, y, z] = &reports[..] else { panic!("three devices: {reports:?}") };
        let of = |health: Health| ListedHealth {
            health: health.as_str().to_owned(),
            reason: health.reason().map(|reason| reason.to_string()),
        };
        let differing = [("a.com/gpu".to_owned(), of(sick)), ("b.com/gpu".to_owned(), of(well))];
        assert_eq!(x.by_resource, differing.into(), "of two shares the unhealthy one counts");
        assert_eq!(
            (x.health.as_deref(), x.reason.as_deref()),
            (Some("Unhealthy"), Some("check_failed"))
        );
        for same in [y, z] {
            assert!(same.by_resource.is_empty(), "{same:?}");
        }
    }
}
