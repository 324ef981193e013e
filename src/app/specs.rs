//! Which resources a daemon offers.

use crate::config::Config;
use crate::domain::{Gather, Grant, ResourceName, ResourceSpec};
use crate::hardware;
use crate::host::HostRoot;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

/// The resources: those of the configuration, else the known hardware under its usual names; and in any case those
/// that somebody holds a device of (I3), else a container could not start again.
pub(super) fn specs(config: &Config, host_root: &HostRoot, grants: &[Grant]) -> Arc<[Arc<ResourceSpec>]> {
    let mut specs = each(config, host_root).unwrap_or_else(|error| {
        tracing::warn!(%error, "/dev cannot be looked at; resources for each node wait for the next look");
        config.resources.iter().filter(|spec| !spec.name.is_for_each_node()).cloned().collect()
    });
    if config.resources.is_empty() {
        specs = hardware::defaults::specs(&hardware::scan(host_root)).into_iter().map(Arc::new).collect();
    }
    let known: BTreeSet<ResourceName> = specs.iter().map(|spec| spec.name.clone()).gather();
    let held: BTreeSet<&ResourceName> = grants.iter().map(|grant| &grant.resource).gather();
    for name in held.into_iter().filter(|name| !known.contains(*name)) {
        if let Some(spec) = config.resources.is_empty().then(|| hardware::defaults::named(name)).flatten() {
            specs.push(Arc::new(spec));
            continue;
        }
        tracing::warn!(resource = %name, "not configured, but a container holds its devices; it stays registered until they are free");
        specs.push(Arc::new(ResourceSpec::orphan(name.clone())));
    }
    specs.into()
}

/// The resources of the configuration, one for each node that is there of those that have a name for each.
pub(super) fn each(config: &Config, host_root: &HostRoot) -> io::Result<Vec<Arc<ResourceSpec>>> {
    hardware::each(host_root, &config.resources).map(|each| each.specs)
}

/// The resources as they are configured, where one of them has a name for each node; else none.
pub(super) fn patterns(config: &Config) -> Arc<[Arc<ResourceSpec>]> {
    let has_pattern = config.resources.iter().any(|spec| spec.name.is_for_each_node());
    config.resources.iter().filter(|_| has_pattern).cloned().collect()
}
