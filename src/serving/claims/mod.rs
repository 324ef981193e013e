//! Claims of Dynamic Resource Allocation: what Prepare and Unprepare answer to the kubelet.
//!
//! The scheduler has chosen the devices. Prepare reads the allocation from the API server
//! ([`ClaimSource`]), checks it (`decide`), has it recorded ([`ClaimLedger`]), writes the claim's
//! CDI file (`files`), and answers from the record, in this order. A claim that is prepared already
//! gets the same answer again: the kubelet repeats Prepare, and may append a second answer to the
//! first. A call may be dropped at any step. The next one completes what it began.
//!
//! After a reboot the kubelet prepares each claim again before its containers start. The kernel may
//! have given the nodes of a device to another one. So the first Prepare in a boot finds the
//! recorded devices again, and records their present nodes.
//!
//! A container may have got an allocated device through the device plugin. The claim waits for it
//! too. When the time is over, its pods are evicted ([`ClaimLedger::evict`]): a new pod gets
//! another device.
//!
//! The kubelet waits for 45 s, and tries a failed call again after a minute only. So Prepare waits
//! for what is temporary, such as the end of the devices' former pod, within one budget.

mod decide;
mod digest;
mod files;
mod flow;
mod found;
mod metadata;
mod named;

pub use decide::NotPrepared;
pub use digest::digest;
pub use files::ClaimFiles;
pub use flow::{ClaimPreparer, Clock, PREPARE_BUDGET};
pub use named::named_devices;

use crate::domain::{
    AllocId, AllocatedClaim, ClaimHold, ClaimRef, ContainerEdits, Device, DeviceClass, DeviceId,
    DraName, Grant, GrantedDevice, Inventory, Object, Offered, Offering, PodRef, ResourceName,
};
use crate::slices::api::Attribute;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The name of a device in the DRA API: a pure function of its id and class, and of the node.
pub type NameOf = Arc<dyn Fn(&DeviceId, DeviceClass) -> DraName + Send + Sync>;

/// The API server.
#[tonic::async_trait]
pub trait ClaimSource: Send + Sync {
    /// The claim of this namespace and name, with any UID. `None` if there is none.
    ///
    /// # Errors
    /// One sentence, when the API server does not answer.
    async fn get(&self, claim: &ClaimRef) -> Result<Option<AllocatedClaim>, String>;
}

/// The devices of one resource in a decided claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecidedHold {
    /// The resource.
    pub resource: ResourceName,
    /// The devices as a grant records them, in the order of the hold, each once.
    pub devices: Vec<GrantedDevice>,
    /// The claim with the same devices.
    pub hold: ClaimHold,
}

/// A claim that may be prepared, for the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecidedClaim {
    /// The claim.
    pub claim: ClaimRef,
    /// The pods that it is reserved for.
    pub reserved_for: Vec<PodRef>,
    /// The devices by resource, sorted by resource.
    pub holds: Vec<DecidedHold>,
}

/// A claim as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedClaim {
    /// Its devices.
    pub claim: DecidedClaim,
    /// Whether it was recorded in this boot. The nodes of another boot may be those of other
    /// devices now.
    pub is_of_boot: bool,
}

/// A device of a claim that a container has got through the device plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldByNumber {
    /// The resource of the claim's device.
    pub resource: ResourceName,
    /// The claim's device.
    pub id: DeviceId,
    /// The grant of the container. Its device may have another id: the whole of a part.
    pub container: AllocId,
    /// The sentence, which names the container's pod.
    pub why: String,
}

/// Why a claim was not recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotRecorded {
    /// A device has another holder, or waits for its hook. The text names it and what is waited
    /// for. It may be free at the next try.
    Blocked(String),
    /// A container has a device of the claim. It may be free at the next try.
    HeldByNumber(HeldByNumber),
    /// The ledger cannot record it.
    Failed(String),
}

/// The ledger.
#[tonic::async_trait]
pub trait ClaimLedger: Send + Sync {
    /// The claim as it is recorded, by the last published snapshot; `None` if it is not, or not
    /// yet.
    fn recorded(&self, claim: &ClaimRef) -> Option<RecordedClaim>;

    /// Records all devices of a claim, or none, durably. Returns what is recorded. That is the
    /// earlier record if the claim is recorded with the same allocation in the same boot.
    ///
    /// # Errors
    /// When a device is not free, or the record cannot be made durable.
    async fn record(&self, decided: DecidedClaim) -> Result<Vec<ClaimHold>, NotRecorded>;

    /// Releases all devices of a claim. An unknown claim is released.
    ///
    /// # Errors
    /// One sentence, when that cannot be made durable.
    async fn release(&self, claim: &ClaimRef) -> Result<(), String>;

    /// The grants, by the last published snapshot. They show which shares of a device are free.
    fn grants(&self) -> Arc<Vec<Arc<Grant>>> {
        Arc::default()
    }

    /// Has the control plane evict the pods whose claims have these devices, for as long as this
    /// container has them. Returns whether it does that: a ledger without a control plane does not.
    fn evict(&self, _lost: &BTreeSet<DraName>, _container: &AllocId) -> bool {
        false
    }
}

/// The devices of the node.
pub trait ClaimDevices: Send + Sync {
    /// Every resource with its devices.
    fn inventory(&self) -> Arc<Inventory>;

    /// What the containers of a claim get of a device, and the device as a grant records it. The
    /// files of other programs that the edits name exist afterwards. `together` are the devices
    /// that a container gets for a number of this resource, if this one is the first of them; none
    /// of another claim.
    ///
    /// # Errors
    /// One sentence, when a container would lack a part of the device, or when the host uses it.
    fn claimed(
        &self,
        offering: &Offering,
        id: &DeviceId,
        offered: &Offered,
        together: &[&Device],
    ) -> Result<(ContainerEdits, GrantedDevice), String>;

    /// The objects behind a node now; none if there is no such node, or if that cannot be read.
    fn objects_of_node(&self, _node: &str) -> Vec<Object> {
        Vec::new()
    }

    /// The path of a file with metadata that a container mounts. `None` if containers get none.
    fn metadata_path(&self, _file: &str) -> Option<String> {
        None
    }

    /// The attributes of a device as its slice has them.
    fn attributes(
        &self,
        _offering: &Offering,
        _id: &DeviceId,
        _offered: &Offered,
    ) -> BTreeMap<String, Attribute> {
        BTreeMap::new()
    }
}

// On the simulation's time.
#[cfg(feature = "lab")]
#[cfg(test)]
mod tests;
