//! What of the configuration may change while the daemon runs.

use super::policy::{HealthPolicy, Policy};
use super::resource::ResourceSpec;
use std::sync::Arc;

/// What is offered, and by which rules. Published whole; never changed in place. Whoever is built again takes the newest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Counts the plans of a process, from 1.
    pub number: u64,
    /// The resources, in the order in which they select devices. [Orphans](ResourceSpec::is_orphan) are among them at the start.
    pub specs: Arc<[Arc<ResourceSpec>]>,
    /// The same as they are configured, where one of them stands for one for each node: what is there makes `specs` of them. Else none.
    pub patterns: Arc<[Arc<ResourceSpec>]>,
    /// How devices are judged.
    pub health: HealthPolicy,
    /// What the ledger does where no answer is right for everybody.
    pub ledger: Policy,
}
