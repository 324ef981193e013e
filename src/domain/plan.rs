//! The plan: the part of the configuration that may change while the daemon runs.

use super::policy::{HealthPolicy, Policy};
use super::resource::ResourceSpec;
use super::{MigStrategy, ResourceName};
use std::sync::Arc;

/// The resources and the rules that apply to them. A plan is published as a whole and never changed
/// in place. A rebuilt actor takes the newest plan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The number of the plan within the process, from 1.
    pub number: u64,
    /// The resources, in the order of selection. The plan of the daemon's start also contains
    /// [orphans](ResourceSpec::is_orphan).
    pub specs: Arc<[Arc<ResourceSpec>]>,
    /// The resources as configured, if one of them is a pattern for one resource per node:
    /// discovery expands them to `specs` by the nodes that exist. Otherwise empty.
    pub patterns: Arc<[Arc<ResourceSpec>]>,
    /// Without a configured resource, the known hardware is offered under its usual names: how
    /// NVIDIA's GPUs are then divided. Discovery adds the resources of hardware that comes later.
    pub usual: Option<MigStrategy>,
    /// The rules for verdicts.
    pub health: HealthPolicy,
    /// The rules for the ledger.
    pub ledger: Policy,
}

impl Plan {
    /// The resources as configured, with the patterns among them.
    #[must_use]
    pub fn configured(&self) -> &Arc<[Arc<ResourceSpec>]> {
        if self.patterns.is_empty() { &self.specs } else { &self.patterns }
    }

    /// These resources, if one of them is a pattern; else none.
    #[must_use]
    pub fn patterns_of(configured: &[Arc<ResourceSpec>]) -> Arc<[Arc<ResourceSpec>]> {
        let has_pattern = configured.iter().any(|spec| spec.name.is_pattern());
        configured.iter().filter(|_| has_pattern).cloned().collect()
    }

    /// Whether the node offers a resource of this name.
    #[must_use]
    pub fn has(&self, resource: &ResourceName) -> bool {
        self.specs.iter().any(|spec| spec.name == *resource)
    }
}
