//! The resources that a daemon offers.

use crate::config::Config;
use crate::domain::{Grant, Plan, ResourceName, ResourceSpec};
use crate::hardware;
use crate::host::{HostRoot, ReadFailure};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The pause before each repetition of a scan that could not read everything.
const SCAN_PAUSES: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
];

/// The resources of the configuration, else the known hardware under its usual names. A resource
/// with a held device is always added (I3), else its container could not start again.
pub(super) fn specs(
    config: &Config,
    host_root: &HostRoot,
    grants: &[Grant],
) -> Arc<[Arc<ResourceSpec>]> {
    let mut specs = each(config, host_root).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read /dev; resources for each node wait for the next scan");
        config.resources.iter().filter(|spec| !spec.name.is_for_each_node()).cloned().collect()
    });
    if config.resources.is_empty() {
        specs = usual(host_root).into_iter().map(Arc::new).collect();
    }
    let known: BTreeSet<ResourceName> = specs.iter().map(|spec| spec.name.clone()).collect();
    let held: BTreeSet<&ResourceName> = grants.iter().map(|grant| &grant.resource).collect();
    for name in held.into_iter().filter(|name| !known.contains(*name)) {
        if let Some(spec) =
            config.resources.is_empty().then(|| hardware::defaults::named(name)).flatten()
        {
            specs.push(Arc::new(spec));
            continue;
        }
        tracing::warn!(resource = %name, "resource is not configured, but a container holds its devices; it stays registered \
             until they are free");
        specs.push(Arc::new(ResourceSpec::orphan(name.clone())));
    }
    if specs.is_empty() {
        tracing::warn!(
            "no resource is configured and no known hardware is found; nothing is offered"
        );
    }
    specs.into()
}

/// The known hardware under its usual names. A scan that could not read everything is repeated,
/// because a resource that it misses is not offered before the next reload.
pub(super) fn usual(host_root: &HostRoot) -> Vec<ResourceSpec> {
    let mut scan = hardware::scan(host_root);
    for pause in SCAN_PAUSES {
        if scan.unread.is_empty() {
            break;
        }
        std::thread::sleep(pause);
        scan = hardware::scan(host_root);
    }
    if let Some(why) = scan.unread.reasons().first() {
        tracing::error!(%why, "cannot read the hardware completely; missing devices are not offered, and `systemctl \
             reload holdfast` scans again");
    }
    hardware::defaults::specs(&scan)
}

/// The resources of the configuration. One with a name for each node becomes one resource for each
/// present node.
pub(super) fn each(
    config: &Config,
    host_root: &HostRoot,
) -> Result<Vec<Arc<ResourceSpec>>, ReadFailure> {
    hardware::expand_patterns(host_root, &config.resources).map(|each| each.specs)
}

/// The resources as they are configured, if one of them has a name for each node; else none.
pub(super) fn patterns(config: &Config) -> Arc<[Arc<ResourceSpec>]> {
    let has_pattern = config.resources.iter().any(|spec| spec.name.is_for_each_node());
    config.resources.iter().filter(|_| has_pattern).cloned().collect()
}

/// The plan of a start. A reload changes it.
pub(super) fn first_plan(config: &Config, specs: Arc<[Arc<ResourceSpec>]>) -> Plan {
    Plan {
        number: 1,
        specs,
        patterns: patterns(config),
        health: config.health.clone(),
        ledger: config.policy,
    }
}
