//! The configuration of the health actor, and its output for `status`.

use super::prober::ProbeDevice;
use crate::domain::{
    DueHooks, Grant, Inventory, KubeletGeneration, Listed, MpsStates, Plan, Source, Verdicts,
};
use crate::messages::{Mailbox, RecordVerdicts, Rescan};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The health of the devices, for status output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Judgement {
    /// The recorded verdict of each device that has one.
    pub verdicts: Arc<Verdicts>,
    /// Signals that are unavailable, each with the reason.
    pub off: BTreeMap<Source, String>,
}

/// The configuration of the actor, the same after every restart.
#[derive(Clone)]
pub struct HealthConfig {
    /// The resources and the rules at the actor's start. Later it takes them with the evidence.
    pub plan: watch::Receiver<Arc<Plan>>,
    /// This boot.
    pub boot_id: String,
    /// How long a free id that is no longer found stays in the list, unhealthy.
    pub leave_after: Duration,
    /// The lists of an earlier process.
    pub listed: Arc<Listed>,
    /// The grants.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// The pending hooks of free devices.
    pub due: watch::Receiver<Arc<DueHooks>>,
    /// The control daemons of MPS.
    pub mps: watch::Receiver<Arc<MpsStates>>,
    /// The kubelet's socket.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// The channel of the inventory. The channel and its last value outlive the actor.
    pub inventory: Arc<watch::Sender<Arc<Inventory>>>,
    /// The channel of the lists for the kubelet's device-plugin API: the inventory without the
    /// resources whose devices are given to claims.
    pub lists: Arc<watch::Sender<Arc<Inventory>>>,
    /// The channel of the verdicts. The actor starts with its last value, which is from the ledger
    /// at first.
    pub judgement: Arc<watch::Sender<Judgement>>,
    /// Probes one device; may block.
    pub probe_device: ProbeDevice,
    /// Discovery: requests a rescan when the actor starts, and when a device was found broken.
    pub rescan: Mailbox<Rescan>,
    /// The ledger.
    pub ledger: Mailbox<RecordVerdicts>,
}

impl fmt::Debug for HealthConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HealthConfig").field("boot_id", &self.boot_id).finish_non_exhaustive()
    }
}
