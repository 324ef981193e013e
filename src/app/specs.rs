//! The resources that a daemon offers.

use crate::config::Config;
use crate::domain::{Grant, MigStrategy, NvmlSnapshot, Plan, ResourceName, ResourceSpec};
use crate::hardware;
use crate::host::{HostRoot, ReadFailure};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The resources of a plan.
#[derive(Debug)]
pub(super) struct Specs {
    /// The resources, without patterns.
    pub(super) specs: Arc<[Arc<ResourceSpec>]>,
    /// The resources with patterns among them, if there is one; else none.
    pub(super) patterns: Arc<[Arc<ResourceSpec>]>,
}

/// The resources of the configuration, else the known hardware under its usual names. A resource
/// with a held device is always added (I3), else its container could not start again.
pub(super) fn specs(config: &Config, host_root: &HostRoot, grants: &[Grant]) -> Specs {
    let is_usual = config.resources.is_empty();
    let configured =
        if is_usual { usual(host_root, config.mig_strategy) } else { config.resources.clone() };
    let mut specs = each(&configured, host_root).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read /dev; resources for each node wait for the next scan");
        configured.iter().filter(|spec| !spec.name.is_pattern()).cloned().collect()
    });
    let known: BTreeSet<ResourceName> = specs.iter().map(|spec| spec.name.clone()).collect();
    let held: BTreeSet<&ResourceName> = grants.iter().map(|grant| &grant.resource).collect();
    for name in held.into_iter().filter(|name| !known.contains(*name)) {
        let usual =
            || is_usual.then(|| hardware::defaults::named(name, config.mig_strategy)).flatten();
        if let Some(spec) = hardware::spec_named(&configured, name).or_else(usual) {
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
    Specs { specs: specs.into(), patterns: Plan::patterns_of(&configured) }
}

/// The known hardware under its usual names. Discovery adds what this scan could not read.
pub(super) fn usual(host_root: &HostRoot, mig: MigStrategy) -> Vec<Arc<ResourceSpec>> {
    let scan = hardware::scan(host_root);
    hardware::defaults::specs(&scan, mig).into_iter().map(Arc::new).collect()
}

/// The resources without patterns: one with a name for each node becomes one for each present node.
/// Those for each MIG profile wait for NVML.
pub(super) fn each(
    configured: &[Arc<ResourceSpec>],
    host_root: &HostRoot,
) -> Result<Vec<Arc<ResourceSpec>>, ReadFailure> {
    let nothing = NvmlSnapshot::empty();
    hardware::expand_patterns(host_root, configured, &nothing).map(|each| each.specs)
}

/// The plan of a start. A reload changes it.
pub(super) fn first_plan(config: &Config, Specs { specs, patterns }: Specs) -> Plan {
    let (usual, health) = (usual_of(config), config.health.clone());
    Plan { number: 1, specs, patterns, usual, health, ledger: config.policy }
}

/// How the known hardware is offered, if no resource is configured.
pub(super) fn usual_of(config: &Config) -> Option<MigStrategy> {
    config.resources.is_empty().then_some(config.mig_strategy)
}
