//! What a running daemon shows of itself: its actors and its snapshots.

use super::reload::ConfigReport;
use super::supervisor::Handle;
use crate::discovery::DiscoveryActor;
use crate::domain::{Due, Grant, Inventory, Kept, KubeletGeneration, Plan, ResourceName, Unread};
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

/// A kubelet has written an allocation into its checkpoint after this long.
const WRITTEN_WITHIN_MS: u64 = 60_000;

/// The handles of the five actors, for tests and the demo, which let them die.
#[derive(Debug, Clone)]
pub struct Actors {
    /// Watches the host.
    pub discovery: Handle<DiscoveryActor>,
    /// Judges what was found.
    pub health: Handle<HealthActor>,
    /// Remembers who holds what.
    pub ledger: Handle<LedgerActor>,
    /// Speaks the device-plugin API.
    pub serving: Handle<Serving>,
    /// Keeps the resources registered.
    pub registration: Handle<Registration>,
}

/// What others may look at. Every value is a snapshot that outlives the actor that published it.
#[derive(Debug, Clone)]
pub struct Views {
    /// What the kubelet is told.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Who holds what.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// The hooks that may run: of free devices, and of those whose next holder waits for its start.
    pub due: watch::Receiver<Arc<Due>>,
    /// What is known of the devices' health.
    pub judgement: watch::Receiver<Judgement>,
    /// What the last scan of the host could not read.
    pub unread: watch::Receiver<Unread>,
    /// Each resource's place in the kubelet.
    pub registrations: watch::Receiver<BTreeMap<ResourceName, ResourceStatus>>,
    /// The kubelet's socket.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The kubelet's checkpoint, and since when it cannot be read.
    pub checkpoint: CheckpointReader,
    /// The configuration.
    pub config: watch::Receiver<ConfigReport>,
    /// How the ledger is kept.
    pub kept: watch::Receiver<Kept>,
    /// What was refused of late.
    pub refusals: Refusals,
    /// What is to be offered, and how the ledger decides.
    pub plan: watch::Receiver<Arc<Plan>>,
    /// What was wrong with the ledger at the start.
    pub recovery: Option<Arc<str>>,
    /// Which hooks and checks cannot be run.
    pub shortages: Shortages,
    /// Why `/metrics` is not served, where it should be.
    pub not_served: watch::Receiver<Option<String>>,
    /// Whether everything that READY promises has happened (I11).
    pub ready: watch::Receiver<bool>,
}

impl Views {
    /// Whether the kubelet's socket was left behind: nobody has listened on it when it was tried last.
    #[must_use]
    pub fn socket_left_behind(&self) -> bool {
        let registrations = self.registrations.borrow();
        let finds_nobody = !registrations.is_empty() && registrations.values().all(|status| status.awaiting_kubelet);
        finds_nobody && self.kubelet.borrow().is_some()
    }

    /// Why no new grant can be bound to its pod: the kubelet's checkpoint cannot be read, or there is none although devices are held. The
    /// kubelet writes it with each allocation, so a young grant may come before the first one.
    #[must_use]
    pub fn checkpoint_unread(&self) -> Option<CheckpointUnread> {
        let now = host::now().wall;
        let is_old = |grant: &Arc<Grant>| grant.is_live() && now.0.saturating_sub(grant.granted_at.0) > WRITTEN_WITHIN_MS;
        self.checkpoint.unread().filter(|unread| !unread.missing || self.grants.borrow().iter().any(is_old))
    }
}
