//! The dependencies of the ledger actor.

use super::committer::lock;
use super::core::{Ledger, ReleaseHooks};
use crate::domain::{
    ClaimEvidence, DeviceId, DueHooks, Grant, Inventory, KubeletGeneration, LedgerHealth, Plan,
    ResourceSpec,
};
use crate::hardware;
use crate::host::HostRoot;
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::messages::{Forget, Mailbox};
use crate::store::{Recovered, Store};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::sync::{RwLock, watch};

/// The dependencies of the actor; the same after every restart of the actor.
#[derive(Debug, Clone)]
pub struct LedgerConfig {
    /// The store. It outlives the actor.
    pub store: Arc<Mutex<Store>>,
    /// The content of the store when it was opened, for the first actor: a second read would take
    /// most of the start. Restarted actors query the store.
    pub recovered: Arc<Mutex<Option<Ledger>>>,
    /// Whether a grant is synced after its answer instead of before.
    pub process_crash: bool,
    /// The plan: the resources with an after-release hook, and the policies (`when_not_durable`,
    /// `refuse`).
    pub plan: watch::Receiver<Arc<Plan>>,
    /// Publishes the state of the store.
    pub kept: Arc<watch::Sender<LedgerHealth>>,
    /// Publishes the live grants.
    pub grants: Arc<watch::Sender<Arc<Vec<Arc<Grant>>>>>,
    /// Publishes the hooks that may run.
    pub due: Arc<watch::Sender<Arc<DueHooks>>>,
    /// Health, which forgets the devices that the ledger forgets; `None` if no health actor runs.
    pub forget: Option<Mailbox<Forget>>,
    /// Publishes the remembered ids.
    pub names: Arc<watch::Sender<Arc<BTreeMap<String, DeviceId>>>>,
    /// The inventory that the kubelet's lists are made from.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The kubelet's checkpoint.
    pub checkpoint: CheckpointReader,
    /// The pod-resources API.
    pub pod_resources: PodResources,
    /// The host's root, with the pods' logs and cgroups below it.
    pub host_root: PathBuf,
    /// The id of this boot.
    pub boot_id: String,
    /// The kubelet's socket as the host watch saw it last.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The evidence about claims.
    pub claims: watch::Receiver<Arc<ClaimEvidence>>,
    /// Separates pod listings from Allocates.
    pub gate: Arc<RwLock<()>>,
    /// Makes the streams send their lists again, so that the kubelet writes its checkpoint.
    pub resend: Arc<watch::Sender<()>>,
}

impl LedgerConfig {
    /// The ledger from the content of the store.
    pub(super) fn recover(&self) -> Ledger {
        let mut recovered = lock(&self.store).load();
        let host_root = HostRoot::new(&self.host_root);
        recovered.grants = in_present_boot(recovered.grants, &self.boot_id, &host_root);
        recovered.into()
    }

    /// The resources with an after-release hook: those of the plan, and those that are still in the
    /// list but no longer planned. With the devices in the list.
    pub(super) fn release_hooks(&self) -> Arc<ReleaseHooks> {
        let (plan, inventory) = (self.plan.borrow().clone(), self.inventory.borrow().clone());
        let parting = inventory
            .resources
            .iter()
            .filter(|(name, _)| !plan.has(name))
            .map(|(_, offering)| &offering.spec);
        let mut hooks = release_hooks(plan.specs.iter().chain(parting));
        if hooks.is_empty() {
            return Arc::new(hooks);
        }
        for (name, offering) in &inventory.resources {
            for offered in offering.devices.values() {
                hooks.note_device(name, &offered.device.key, offered.health.is_healthy());
            }
        }
        Arc::new(hooks)
    }
}

/// Grants with the objects that the host shows for them now. Those from the kubelet's checkpoint
/// have none, and those of a former boot have the device numbers of then (I13).
#[must_use]
pub fn in_present_boot(grants: Vec<Grant>, boot_id: &str, host_root: &HostRoot) -> Vec<Grant> {
    let behind = |node: &str| hardware::objects_of_node(host_root, node);
    grants.into_iter().map(|grant| grant.in_boot(boot_id, behind).resolve(behind)).collect()
}

/// The after-release hooks of these resources, as far as they are configured.
pub fn release_hooks<'a>(specs: impl Iterator<Item = &'a Arc<ResourceSpec>>) -> ReleaseHooks {
    let configured = specs.filter(|spec| !spec.is_orphan());
    ReleaseHooks::of(
        configured.map(|spec| {
            (spec.name.clone(), spec.hooks.after_release.as_ref().map(|_| spec.sharing))
        }),
    )
}

impl From<Recovered> for Ledger {
    fn from(
        Recovered { grants, names, listed, owed, verdicts, gone, report: _ }: Recovered,
    ) -> Self {
        Ledger::from_recovered(grants, names, listed, owed, verdicts).with_gone(gone)
    }
}
