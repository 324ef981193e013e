//! The snapshots of a running daemon that are visible outside its actors.

use super::config_report::ConfigReport;
use crate::domain::{
    DeviceId, DueHooks, Grant, Inventory, KubeletGeneration, LedgerHealth, MpsStates, Plan,
    ResourceName, Unread,
};
use crate::health::Judgement;
use crate::hook::Shortages;
use crate::host;
use crate::kubelet::checkpoint::{CheckpointReader, CheckpointUnread};
use crate::registration::ResourceStatus;
use crate::serving::Refusals;
use crate::slices::published::Published;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// The kubelet writes an allocation into its checkpoint within this time.
const WRITTEN_WITHIN_MS: u64 = 60_000;

/// The snapshots that others may read. Each one outlives the actor that published it.
#[derive(Debug, Clone)]
pub struct Views {
    /// The devices of every resource and their health.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// The lists for the kubelet's device-plugin API: the inventory without the resources whose
    /// devices are given to claims.
    pub lists: watch::Receiver<Arc<Inventory>>,
    /// The grants.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// The hooks that may run: those of free devices, and those of devices whose next holder waits
    /// for its start.
    pub due: watch::Receiver<Arc<DueHooks>>,
    /// The verdicts on the devices' health.
    pub judgement: watch::Receiver<Judgement>,
    /// The paths that the last scan of the host could not read.
    pub unread: watch::Receiver<Unread>,
    /// The registration state of each resource.
    pub registrations: watch::Receiver<BTreeMap<ResourceName, ResourceStatus>>,
    /// The kubelet's socket.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The kubelet's checkpoint, and since when it cannot be read.
    pub checkpoint: CheckpointReader,
    /// The report of the configuration.
    pub config: watch::Receiver<ConfigReport>,
    /// The storage state of the ledger.
    pub ledger_health: watch::Receiver<LedgerHealth>,
    /// Recent refusals.
    pub refusals: Refusals,
    /// The resources to offer, and the policies of health and ledger.
    pub plan: watch::Receiver<Arc<Plan>>,
    /// The damage that was found in the ledger at the start.
    pub recovery: Option<Arc<str>>,
    /// The hooks and checks that cannot be run.
    pub shortages: Shortages,
    /// The control daemons of MPS that Holdfast runs.
    pub mps: watch::Receiver<Arc<MpsStates>>,
    /// Why `/metrics` is not served although it is configured.
    pub not_served: watch::Receiver<Option<String>>,
    /// Why readers of `/metrics` are refused although it is served, or get a former certificate:
    /// the files of TLS, and the API server.
    pub not_readable: [watch::Receiver<Option<String>>; 2],
    /// Why the labels of the node are not followed: the API server, and the file. `None` if they
    /// are, or need not be.
    pub not_followed: [watch::Receiver<Option<String>>; 2],
    /// Why the labels for Node Feature Discovery are not written. `None` if they are, or need not
    /// be.
    pub labels_not_written: watch::Receiver<Option<String>>,
    /// Why Events and the condition of the node cannot be written, one sentence each.
    pub not_reported: watch::Receiver<Vec<String>>,
    /// Why claims do not get devices: the kubelet's sockets, the API server, and claims that the
    /// ledger has lost. Why their status is not written.
    pub dra: [watch::Receiver<Option<String>>; 4],
    /// What the API server has of this node's devices. `None` if `[dra]` is off.
    pub published: watch::Receiver<Option<Arc<Published>>>,
    /// Why containers lack a part of NVIDIA's driver.
    pub nvidia_driver: watch::Receiver<Option<String>>,
    /// Whether all conditions of READY hold (I11).
    pub ready: watch::Receiver<bool>,
}

impl Views {
    /// Why claims do not get devices, or may get wrong ones, one sentence each.
    #[must_use]
    pub fn dra_problems(&self) -> Vec<String> {
        let published = self.published.borrow().clone();
        let verdicts = self.judgement.borrow().verdicts.clone();
        let of_slices = published.map(|it| it.problems(&verdicts)).unwrap_or_default();
        self.dra.iter().filter_map(|why| why.borrow().clone()).chain(of_slices).collect()
    }

    /// Why `cordon --evict` cannot reach the pods of this device; `None` if it can.
    #[must_use]
    pub fn evicts_nothing(&self, device: &DeviceId) -> Option<String> {
        let Some(published) = self.published.borrow().clone() else {
            return Some(
                "--evict is for devices of claims, and `[dra] enabled` is false; cordon the device \
                 without --evict, and delete the pods that use it (`holdfast who`)"
                    .to_owned(),
            );
        };
        let inventory = Arc::clone(&self.inventory.borrow());
        let mut offerings = inventory.resources.values().filter(|it| {
            it.spec.api.serves_claims() && it.devices.values().any(|it| it.device.id == *device)
        });
        if offerings.next().is_none() {
            return Some(format!(
                "no resource with `api = \"dra\"` has the device {device}, and none with \"both\", and \
                 --evict is for devices of claims; cordon it without --evict, and delete the pods \
                 that use it (`holdfast who`)"
            ));
        }
        published.drops_taints.then(|| {
            "the API server drops taints of devices (feature gate DRADeviceTaints, off by default \
             before Kubernetes 1.36), so it evicts no pod; cordon the device without --evict, and \
             delete the pods that use it (`holdfast who`)"
                .to_owned()
        })
    }

    /// Whether the kubelet left its socket behind: no process listened on it at the last try.
    #[must_use]
    pub fn socket_left_behind(&self) -> bool {
        let registrations = self.registrations.borrow();
        let finds_nobody = !registrations.is_empty()
            && registrations.values().all(|status| status.awaiting_kubelet);
        finds_nobody && self.kubelet.borrow().is_some()
    }

    /// Why no new grant can be bound to its pod: the kubelet's checkpoint cannot be read, or it is
    /// missing although containers got devices by an Allocate. The kubelet writes it with each
    /// allocation, so a young grant may exist before the first checkpoint.
    #[must_use]
    pub fn checkpoint_unread(&self) -> Option<CheckpointUnread> {
        let now = host::now().wall;
        let is_old = |grant: &Arc<Grant>| {
            let is_allocated = grant.is_live() && grant.claim.is_none();
            is_allocated && now.0.saturating_sub(grant.granted_at.0) > WRITTEN_WITHIN_MS
        };
        self.checkpoint
            .unread()
            .filter(|unread| !unread.missing || self.grants.borrow().iter().any(is_old))
    }

    /// Why this instance must not hand over now. A scan that does not end here would not end in
    /// another instance either, and the kubelet would have no devices.
    #[must_use]
    pub fn refuses_handover(&self) -> Option<String> {
        self.unread.borrow().late.clone()
    }

    /// Waits until every resource is registered from here, or waits for an absent kubelet.
    pub async fn registered(&self) {
        let (mut ready, mut registrations) = (self.ready.clone(), self.registrations.clone());
        // An error means that the daemon is ending.
        drop(ready.wait_for(|ready| *ready).await);
        drop(registrations.wait_for(|all| all.values().all(ResourceStatus::is_known)).await);
    }
}
