//! The parts of a running daemon that are visible to others: its actors and its snapshots.

use super::reload::ConfigReport;
use super::supervisor::Handle;
use crate::discovery::DiscoveryActor;
use crate::domain::{
    DueHooks, Grant, Inventory, KubeletGeneration, LedgerHealth, Plan, ResourceName, Unread,
};
use crate::health::{HealthActor, Judgement};
use crate::hook::Shortages;
use crate::host;
use crate::kubelet::checkpoint::{CheckpointReader, CheckpointUnread};
use crate::ledger::LedgerActor;
use crate::registration::{Registration, ResourceStatus};
use crate::serving::Refusals;
use crate::serving::Serving;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// The kubelet writes an allocation into its checkpoint within this time.
const WRITTEN_WITHIN_MS: u64 = 60_000;

/// The handles of the five actors, for tests and the demo, which make actors panic.
#[derive(Debug, Clone)]
pub struct Actors {
    /// Finds devices and watches the host.
    pub discovery: Handle<DiscoveryActor>,
    /// Judges the devices.
    pub health: Handle<HealthActor>,
    /// Records the grants.
    pub ledger: Handle<LedgerActor>,
    /// Serves the device-plugin API.
    pub serving: Handle<Serving>,
    /// Keeps the resources registered.
    pub registration: Handle<Registration>,
}

/// The snapshots that others may read. Each one outlives the actor that published it.
#[derive(Debug, Clone)]
pub struct Views {
    /// The devices and their health, as in the kubelet's lists.
    pub inventory: watch::Receiver<Arc<Inventory>>,
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
    /// Why `/metrics` is not served although it is configured.
    pub not_served: watch::Receiver<Option<String>>,
    /// Whether all conditions of READY hold (I11).
    pub ready: watch::Receiver<bool>,
}

impl Views {
    /// Whether the kubelet left its socket behind: no process listened on it at the last try.
    #[must_use]
    pub fn socket_left_behind(&self) -> bool {
        let registrations = self.registrations.borrow();
        let finds_nobody = !registrations.is_empty()
            && registrations.values().all(|status| status.awaiting_kubelet);
        finds_nobody && self.kubelet.borrow().is_some()
    }

    /// Why no new grant can be bound to its pod: the kubelet's checkpoint cannot be read, or it is
    /// missing although devices are held. The kubelet writes it with each allocation, so a young
    /// grant may exist before the first checkpoint.
    #[must_use]
    pub fn checkpoint_unread(&self) -> Option<CheckpointUnread> {
        let now = host::now().wall;
        let is_old = |grant: &Arc<Grant>| {
            grant.is_live() && now.0.saturating_sub(grant.granted_at.0) > WRITTEN_WITHIN_MS
        };
        self.checkpoint
            .unread()
            .filter(|unread| !unread.missing || self.grants.borrow().iter().any(is_old))
    }
}
