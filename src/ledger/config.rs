//! What the ledger actor is built with.

use super::core::{Ledger, ReleaseHooks};
use crate::domain::{DeviceId, DueHooks, Grant, Inventory, KubeletGeneration, LedgerHealth, Plan, ResourceName, ResourceSpec};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::messages::{Forget, Mailbox};
use crate::store::{Recovered, Store};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::{RwLock, watch};

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct LedgerConfig {
    /// The store, which outlives the actor.
    pub store: Arc<Mutex<Store>>,
    /// What the store had when it was opened, for the first life: reading it out again would be most of its start. Later
    /// lives ask the store.
    pub recovered: Arc<Mutex<Option<Ledger>>>,
    /// Whether a grant is synced after its answer instead of before.
    pub process_crash: bool,
    /// Which resources have a hook after release, and what is done where no answer is right for everybody.
    pub plan: watch::Receiver<Arc<Plan>>,
    /// Where it is published how the ledger is kept.
    pub kept: Arc<watch::Sender<LedgerHealth>>,
    /// Where the live grants are published.
    pub grants: Arc<watch::Sender<Arc<Vec<Arc<Grant>>>>>,
    /// Where the hooks are published that may run.
    pub due: Arc<watch::Sender<Arc<DueHooks>>>,
    /// Health, which forgets what the ledger does; nobody where nobody judges.
    pub forget: Option<Mailbox<Forget>>,
    /// Where the remembered ids are published.
    pub names: Arc<watch::Sender<Arc<BTreeMap<String, DeviceId>>>>,
    /// What the kubelet is told.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The kubelet's checkpoint.
    pub checkpoint: CheckpointReader,
    /// The pod-resources API.
    pub pod_resources: PodResources,
    /// Below it lie the pods' logs and cgroups.
    pub host_root: PathBuf,
    /// This boot's identity.
    pub boot_id: String,
    /// The kubelet's socket as last seen by the host watch.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// Keeps pod listings and Allocates apart.
    pub gate: Arc<RwLock<()>>,
}

impl LedgerConfig {
    /// The resources with a hook after release: those of the plan, and what is in the list without being planned any more.
    pub(super) fn release_hooks(&self) -> Arc<ReleaseHooks> {
        let (plan, inventory) = (self.plan.borrow().clone(), self.inventory.borrow().clone());
        let is_planned = |name: &ResourceName| plan.specs.iter().any(|spec| spec.name == *name);
        let parting = inventory.resources.iter().filter(|(name, _)| !is_planned(name)).map(|(_, offering)| &offering.spec);
        Arc::new(release_hooks(plan.specs.iter().chain(parting)))
    }
}

/// Those of these resources that have a hook after release.
pub fn release_hooks<'a>(specs: impl Iterator<Item = &'a Arc<ResourceSpec>>) -> ReleaseHooks {
    let with_hook = specs.filter(|spec| spec.hooks.after_release.is_some());
    with_hook.map(|spec| (spec.name.clone(), spec.sharing)).collect()
}

impl From<Recovered> for Ledger {
    fn from(Recovered { grants, names, listed, owed, verdicts, gone, report: _ }: Recovered) -> Self {
        Ledger::from_recovered(grants, names, listed, owed, verdicts).with_gone(gone)
    }
}
