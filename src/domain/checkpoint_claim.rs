//! What the kubelet's checkpoint of its DRA manager contains of one driver. Its types are the
//! shared vocabulary of the reader and the ledger.

use super::claim::{ClaimRef, DraName};
use std::collections::BTreeSet;

/// A claim that the kubelet has recorded, with the devices of one driver. The entry exists before
/// the kubelet calls Prepare, and until Unprepare has succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointClaim {
    /// The claim.
    pub claim: ClaimRef,
    /// The UIDs of the pods on this node that refer to it.
    pub pods: BTreeSet<String>,
    /// The devices in the driver's answers, in their order, each once. Empty until the kubelet has
    /// recorded an answer.
    pub devices: Vec<CheckpointClaimDevice>,
}

/// A device in the driver's answer, as the kubelet has recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointClaimDevice {
    /// The device.
    pub name: DraName,
    /// The share of a device with consumable capacity.
    pub share_id: Option<String>,
    /// The requests in the claim, without their alternatives.
    pub requests: Vec<String>,
    /// The qualified CDI names.
    pub cdi_devices: Vec<String>,
}
