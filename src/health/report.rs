//! The log lines and metrics of health.

use crate::domain::{
    DeviceId, Health, Inventory, Offered, Offering, Reason, ResourceName, Verdicts,
};
use crate::telemetry::metrics;
use std::collections::{BTreeMap, BTreeSet};

/// Logs one line for each id whose health changed, and one for each new resource; counts failures.
pub(super) fn changes(before: &Inventory, after: &Inventory, verdicts: &Verdicts) {
    for (name, offering) in &after.resources {
        let healthy =
            offering.devices.values().filter(|offered| offered.health.is_healthy()).count();
        let Some(before) = before.resources.get(name) else {
            metrics::offered(name.as_str());
            tracing::info!(resource = %name, devices = offering.devices.len(), healthy, "resource offered");
            for (id, offered) in
                offering.devices.iter().filter(|(_, offered)| !offered.health.is_healthy())
            {
                log_change(name, id, None, offered, verdicts);
            }
            continue;
        };
        let was: BTreeMap<_, Health> =
            before.devices.iter().map(|(id, offered)| (id, offered.health)).collect();
        for (id, offered) in &offering.devices {
            log_change(name, id, was.get(id).copied(), offered, verdicts);
        }
        for (_, reason) in failures(&was, offering) {
            metrics::failed(name.as_str(), reason.as_str());
        }
        for id in before.devices.keys().filter(|id| !offering.devices.contains_key(*id)) {
            tracing::info!(resource = %name, device = %id, "the device was removed from the list");
        }
    }
}

/// The devices that were healthy and no longer are. A device that only waits for its hook has not
/// failed.
fn failures<'a>(
    was: &BTreeMap<&DeviceId, Health>,
    offering: &'a Offering,
) -> BTreeSet<(&'a DeviceId, Reason)> {
    let had = |id| was.get(id).is_some_and(|health| health.is_healthy());
    let failed = offering.devices.iter().filter(|(id, _)| had(*id));
    let reasons =
        failed.filter_map(|(_, offered)| Some((&offered.device.id, offered.health.reason()?)));
    reasons.filter(|(_, reason)| !reason.is_of_hook()).collect()
}

fn log_change(
    resource: &ResourceName,
    id: &DeviceId,
    was: Option<Health>,
    offered: &Offered,
    verdicts: &Verdicts,
) {
    match (was, offered.health) {
        (Some(was), is) if was == is => {}
        (_, Health::Unhealthy(reason)) => {
            let detail = verdicts
                .get(&offered.device.id)
                .map(|verdict| verdict.detail(reason))
                .unwrap_or_default();
            tracing::warn!(%resource, device = %id, %reason, detail, "the device is unhealthy");
        }
        (Some(_), Health::Healthy) => {
            tracing::info!(%resource, device = %id, "the device is healthy again");
        }
        (None, Health::Healthy) => {
            tracing::info!(%resource, device = %id, "the device was added to the list");
        }
    }
}
