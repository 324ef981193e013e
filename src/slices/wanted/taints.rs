//! The taints of a device: why the scheduler must not give it to a new claim, and which pods are
//! evicted.

use super::super::DRIVER;
use super::super::api::{Device, NO_EXECUTE, NO_SCHEDULE, Taint};
use super::super::attributes::is_label_value;
use super::{Candidate, Inputs, WantedDevices};
use crate::domain::{DraName, InSlice, Reason, Verdict};
use std::collections::BTreeSet;

/// The key of the taint of a device that has a holder, without the domain.
const HELD: &str = "held";
/// Its value if a container holds the device by the device plugin.
const DEVICE_PLUGIN: &str = "device-plugin";

impl WantedDevices {
    /// Evicts the pods whose claims have one of these devices, because a container holds it by the
    /// device plugin: they could not start. That container has no claim, so it is not evicted.
    pub fn evict(&mut self, lost: &BTreeSet<DraName>) {
        for name in lost {
            let devices = self.pools.get_mut(&name.pool);
            let Some(device) = devices.and_then(|it| it.get_mut(&name.device)) else { continue };
            let evicts = taint(HELD, DEVICE_PLUGIN, NO_EXECUTE);
            device.taints.retain(|it| (&it.key, &it.value) != (&evicts.key, &evicts.value));
            device.taints.push(evicts);
        }
    }
}

/// Why the scheduler must not give the device to a new claim: at most one taint for each reason.
///
/// The operator's order to evict counts for a device with another reason too. No other reason
/// deletes pods.
pub(super) fn of(inputs: &Inputs<'_>, candidate: &Candidate<'_>) -> Vec<Taint> {
    let verdict = inputs.verdicts.get(&candidate.offered.device.id);
    let evicts = verdict.is_some_and(Verdict::evicts);
    let mut taints = Vec::new();
    let reason = candidate.offered.health.reason();
    let order = evicts.then_some(Reason::Cordoned).filter(|order| reason != Some(*order));
    for reason in reason.into_iter().chain(order) {
        let value = verdict.map(|verdict| value_of(reason, verdict)).unwrap_or_default();
        let is_order = evicts && reason == Reason::Cordoned;
        let effect = if is_order { NO_EXECUTE } else { NO_SCHEDULE };
        taints.push(taint(&reason.as_str().replace('_', "-"), &value, effect));
    }
    if candidate.is_held_otherwise {
        taints.push(held_by_claim());
    }
    match candidate.place {
        InSlice::Held => taints.push(taint(HELD, DEVICE_PLUGIN, NO_SCHEDULE)),
        InSlice::Ending => taints.push(taint("not-for-claims", "", NO_SCHEDULE)),
        InSlice::Offered | InSlice::Absent => {}
    }
    taints
}

/// Whether a container holds the device by the device plugin.
pub(super) fn is_held_by_container(device: &Device) -> bool {
    let held = taint(HELD, DEVICE_PLUGIN, "");
    device.taints.iter().any(|it| (&it.key, &it.value) == (&held.key, &held.value))
}

fn taint(reason: &str, value: &str, effect: &str) -> Taint {
    Taint {
        key: format!("{DRIVER}/{reason}"),
        value: value.to_owned(),
        effect: effect.to_owned(),
        time_added: None,
    }
}

/// The value of a taint: the number of an Xid, or the first word of a cordon's reason.
fn value_of(reason: Reason, verdict: &Verdict) -> String {
    let detail = verdict.detail(reason);
    let mut words = match (&verdict.cordon, reason) {
        (Some(cordon), Reason::Cordoned) => cordon.reason.split_whitespace(),
        (_, Reason::Xid) => detail.split_whitespace(),
        _ => return String::new(),
    };
    let is_number = |word: &&str| word.bytes().all(|b| b.is_ascii_digit());
    let word = if reason == Reason::Xid { words.find(is_number) } else { words.next() };
    let word = word.unwrap_or_default().trim_matches(|c: char| !c.is_ascii_alphanumeric());
    if is_label_value(word) { word.to_owned() } else { String::new() }
}

/// The taint of a device that a claim holds in another pool, or under another name.
pub(super) fn held_by_claim() -> Taint {
    taint(HELD, "claim", NO_SCHEDULE)
}

/// The taint of a device that a claim holds, and that is absent.
pub(super) fn absent() -> Taint {
    taint(&Reason::DeviceGone.as_str().replace('_', "-"), "", NO_SCHEDULE)
}
