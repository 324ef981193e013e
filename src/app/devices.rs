//! What is told of each device's health: for `device show`, `status` and whoever else asks the running daemon.

use super::Views;
use crate::domain::{Device, DeviceClass, DeviceId, Health, Incident, Offered, PciAddress, Reason, State, Timestamp, Verdict};
use crate::hook::{Outputs, Said};
use crate::host;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One device, with everything that is known of its health.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceReport {
    /// Its own id; shares are `id::n`.
    pub id: String,
    /// Names it while it stays where it is, as the ledger has it; empty where only a verdict is left of it.
    pub key: String,
    /// The resources that list it.
    pub resources: BTreeSet<String>,
    /// `Healthy` or `Unhealthy`, as the kubelet is told; `null` for a device that no resource lists.
    pub health: Option<String>,
    /// Why it is unhealthy.
    pub reason: Option<String>,
    /// What was read or told.
    pub detail: Option<String>,
    /// How far it has come by itself: `healthy`, `suspect`, `unhealthy` or `recovering`.
    pub state: String,
    /// While it recovers: for how long nothing may speak against it still.
    pub healthy_in_seconds: Option<u64>,
    /// In an operator's words, why it is not to be given out. Only the control socket tells the words.
    pub cordoned: Option<String>,
    /// When the operator said so.
    #[serde(default)]
    pub cordoned_at: Option<Timestamp>,
    /// How many times it has failed, each soon after the other.
    pub flaps: u32,
    /// Its last failures, oldest first.
    pub incidents: Vec<Incident>,
    /// What its hooks and its check have written that have failed. Only the control socket tells it.
    #[serde(default)]
    pub said: Vec<Said>,
    /// What it is; `null` where no resource lists it. This and where it was are told of a device that has gone too.
    #[serde(default)]
    pub class: Option<DeviceClass>,
    /// The NUMA nodes that it is near.
    #[serde(default)]
    pub numa_nodes: Vec<u32>,
    /// Bridges from the root port down.
    #[serde(default)]
    pub bridges: Vec<PciAddress>,
    /// What the host calls it: interfaces, RDMA devices, NVMe controllers, and its nodes.
    #[serde(default)]
    pub names: Vec<String>,
}

/// Every device that is listed, or of which there is something to be said. Whoever reaches the page reads it: what people and commands have
/// written is not in it.
pub(super) fn reports(views: &Views) -> Vec<DeviceReport> {
    let now = host::now().boot;
    let verdicts = views.judgement.borrow().verdicts.clone();
    let mut devices: BTreeMap<DeviceId, DeviceReport> =
        verdicts.iter().map(|(id, verdict)| (id.clone(), report(id, Some(verdict), now))).collect();
    let inventory = Arc::clone(&views.inventory.borrow());
    for (resource, offering) in &inventory.resources {
        let is_leaving = |offered: &&Offered| offered.health == Health::Unhealthy(Reason::Deselected);
        let (leaving, staying): (Vec<&Offered>, Vec<&Offered>) = offering.devices.values().partition(is_leaving);
        for offered in staying.into_iter().chain(leaving) {
            let id = &offered.device.id;
            let device = devices.entry(id.clone()).or_insert_with(|| report(id, None, now));
            device.key.clone_from(&offered.device.key);
            device.class = Some(offered.device.class);
            device.names = names(&offered.device);
            device.numa_nodes.clone_from(&offered.device.numa_nodes);
            device.bridges = offered.device.pci.as_ref().map(|pci| pci.bridges.clone()).unwrap_or_default();
            let is_first = device.resources.insert(resource.to_string());
            if !is_first && is_leaving(&offered) {
                // A share that is no more says nothing of a device that has others.
                continue;
            }
            // A resource that has it otherwise (held, and not selected) has another word for it.
            if device.health.is_none() || !offered.health.is_healthy() {
                device.health = Some(offered.health.as_str().to_owned());
                device.reason = offered.health.reason().map(|reason| reason.to_string());
                let detail = offered.health.reason().zip(verdicts.get(id)).map(|(reason, verdict)| verdict.detail(reason));
                device.detail = detail.filter(|detail| !detail.is_empty()).map(str::to_owned);
            }
        }
    }
    devices.into_values().collect()
}

/// Adds what only root is told: the words of an operator, and what commands have written.
pub(super) fn add_words(reports: &mut [DeviceReport], views: &Views, outputs: &Outputs) {
    let verdicts = views.judgement.borrow().verdicts.clone();
    for report in reports {
        let id = DeviceId::new(&report.id);
        report.cordoned = verdicts.get(&id).and_then(|verdict| Some(verdict.cordon.as_ref()?.reason.clone()));
        report.said = outputs.of(&id);
    }
}

fn names(device: &Device) -> Vec<String> {
    let function = device.pci.iter().flat_map(|pci| [&pci.net, &pci.rdma, &pci.nvme]).flatten().cloned();
    function.chain(device.nodes.iter().map(|node| node.host.clone())).collect()
}

fn report(id: &DeviceId, verdict: Option<&Verdict>, now: Duration) -> DeviceReport {
    let nothing = Verdict::default();
    let verdict = verdict.unwrap_or(&nothing);
    let healthy_in_seconds = match verdict.state {
        State::Recovering { since, hold, .. } => Some((since + hold).saturating_sub(now).as_secs()),
        _ => None,
    };
    let reason = Health::reason(verdict.health());
    DeviceReport {
        id: id.to_string(),
        key: String::new(),
        resources: BTreeSet::new(),
        health: None,
        reason: reason.map(|reason| reason.to_string()),
        detail: reason.map(|reason| verdict.detail(reason).to_owned()).filter(|detail| !detail.is_empty()),
        state: verdict.state.as_str().to_owned(),
        healthy_in_seconds,
        cordoned: verdict.cordon.as_ref().map(|_| String::new()),
        cordoned_at: verdict.cordon.as_ref().map(|cordon| cordon.at),
        flaps: verdict.flaps,
        incidents: verdict.incidents.clone(),
        said: Vec::new(),
        class: None,
        numa_nodes: Vec::new(),
        bridges: Vec::new(),
        names: Vec::new(),
    }
}

impl DeviceReport {
    /// What is known of the reason: what was read or told, else an operator's words, where they are known.
    #[must_use]
    pub fn explanation(&self) -> Option<&str> {
        let words = self.cordoned.as_deref().filter(|words| !words.is_empty());
        self.detail.as_deref().or(words)
    }

    /// Since when it is not given out: an operator's word, which counts before everything else, or the last failure, unless that is over.
    #[must_use]
    pub fn since(&self) -> Option<Timestamp> {
        let failed = self.incidents.last().filter(|incident| incident.until.is_none()).map(|incident| incident.at);
        self.cordoned_at.or(failed)
    }
}
