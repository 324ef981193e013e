//! What the log and the metrics are told of health.

use crate::domain::{DeviceId, Health, Inventory, Offered, Reason, ResourceName, Verdicts};
use crate::telemetry::metrics;
use std::collections::{BTreeMap, BTreeSet};

/// The gauges that have been set: one whose devices have recovered falls to 0.
pub(super) type Measured = BTreeSet<(ResourceName, Reason)>;

/// One line for each id whose health changed, and one for each resource that is new; the metrics in any case.
pub(super) fn changes(before: &Inventory, after: &Inventory, verdicts: &Verdicts, measured: &mut Measured) {
    let mut reasons: BTreeMap<(ResourceName, Reason), usize> = measured.iter().map(|gauge| (gauge.clone(), 0)).collect();
    for (name, offering) in &after.resources {
        let healthy = offering.devices.values().filter(|offered| offered.health.is_healthy()).count();
        metrics::devices(name.as_str(), healthy, offering.devices.len() - healthy);
        for reason in offering.devices.values().filter_map(|offered| offered.health.reason()) {
            *reasons.entry((name.clone(), reason)).or_default() += 1;
        }
        let Some(before) = before.resources.get(name) else {
            tracing::info!(resource = %name, devices = offering.devices.len(), healthy, "offered");
            for (id, offered) in offering.devices.iter().filter(|(_, offered)| !offered.health.is_healthy()) {
                tell(name, id, None, offered, verdicts);
            }
            continue;
        };
        let was: BTreeMap<_, Health> = before.devices.iter().map(|(id, offered)| (id, offered.health)).collect();
        for (id, offered) in &offering.devices {
            tell(name, id, was.get(id).copied(), offered, verdicts);
        }
        for id in before.devices.keys().filter(|id| !offering.devices.contains_key(*id)) {
            tracing::info!(resource = %name, device = %id, "the device left the list");
        }
    }
    for ((resource, reason), count) in &reasons {
        metrics::unhealthy(resource.as_str(), reason.as_str(), *count);
    }
    *measured = reasons.into_keys().collect();
}

fn tell(resource: &ResourceName, id: &DeviceId, was: Option<Health>, offered: &Offered, verdicts: &Verdicts) {
    match (was, offered.health) {
        (Some(was), is) if was == is => {}
        (_, Health::Unhealthy(reason)) => {
            let detail = verdicts.get(&offered.device.id).map(|verdict| verdict.detail(reason)).unwrap_or_default();
            tracing::warn!(%resource, device = %id, %reason, detail, "the device is unhealthy");
        }
        (Some(_), Health::Healthy) => tracing::info!(%resource, device = %id, "the device is healthy again"),
        (None, Health::Healthy) => tracing::info!(%resource, device = %id, "the device is new"),
    }
}
