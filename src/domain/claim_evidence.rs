//! The evidence about claims outside of the ledger. All of it may be missing, and what is missing
//! proves nothing.

use super::checkpoint_claim::CheckpointClaim;
use super::claim::{ClaimRef, DraName, PreparedDevice};
use super::edits::ContainerEdits;
use super::grant::GrantedDevice;
use super::pod::PodRef;
use super::resource_name::ResourceName;
use super::time::Moment;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The pods of a claim that are remembered. The API reserves a claim for at most 256 pods at a time
/// (`resourceclaim.status.reservedFor`).
pub const CLAIM_PODS_MAX: usize = 256;

/// What the API server and the kubelet last showed of claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimEvidence {
    /// The last answer of the API server about a claim, by the claim's UID. Only claims that may
    /// have ended are asked about.
    pub api: BTreeMap<String, ClaimLook>,
    /// The kubelet's file of claims; `None` if it is missing or cannot be read.
    pub kubelet: Option<KubeletClaims>,
}

/// An answer of the API server about one claim. An error is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimLook {
    /// Whether nothing on this node is allocated to the claim any longer: the server has no such
    /// claim, or one with another UID, or its allocation has no device of this driver and node. A
    /// kubelet's credentials get no answer about a deleted claim. For them: none of the pods that
    /// the claim was prepared for is bound to this node.
    pub is_gone: bool,
    /// When the server was asked (`CLOCK_BOOTTIME`). Its answer is no older.
    pub at: Duration,
    /// The pods that the claim is reserved for (`status.reservedFor`), of all nodes.
    pub pods: Vec<PodRef>,
}

/// The kubelet's own record of claims (`dra_manager_state`), with the devices of this driver.
///
/// The kubelet writes an entry before it asks to prepare the claim, and removes the entry after the
/// claim was unprepared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletClaims {
    /// Its entries, by the claim's UID.
    pub claims: BTreeMap<String, KubeletClaim>,
    /// When it was read. Its content is no older.
    pub read_at: Moment,
}

impl KubeletClaims {
    /// Adds the pods that an earlier content has for the same claims, except those that are
    /// recorded: the kubelet drops a pod that was deleted by force while its containers run.
    /// `is_recorded` gets the UIDs of a claim and of a pod. At most [`CLAIM_PODS_MAX`] pods of a
    /// claim are kept.
    pub fn keep_pods_of(
        &mut self,
        earlier: &KubeletClaims,
        is_recorded: impl Fn(&str, &str) -> bool,
    ) {
        for (uid, claim) in &mut self.claims {
            let former = earlier.claims.get(uid).map(|claim| &claim.pods).into_iter().flatten();
            let missing = former.filter(|pod| !is_recorded(uid, pod));
            let free = CLAIM_PODS_MAX.saturating_sub(claim.pods.len());
            claim.pods.extend(missing.take(free).cloned().collect::<Vec<_>>());
        }
    }
}

/// One entry of the kubelet's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeletClaim {
    /// The claim.
    pub claim: ClaimRef,
    /// The UIDs of the pods on this node that use it.
    pub pods: BTreeSet<String>,
    /// The devices in the answer of this driver; empty if there was no answer yet.
    pub devices: Vec<PreparedDevice>,
}

impl From<CheckpointClaim> for KubeletClaim {
    /// A device that was answered for several requests is one device of each.
    fn from(CheckpointClaim { claim, pods, devices }: CheckpointClaim) -> Self {
        let devices = devices.into_iter().flat_map(|device| {
            let requests = device.requests.into_iter();
            requests.map(move |request| PreparedDevice {
                request,
                name: device.name.clone(),
                cdi_devices: device.cdi_devices.clone(),
                share_id: device.share_id.clone(),
            })
        });
        KubeletClaim { claim, pods, devices: devices.collect() }
    }
}

/// A device of this node, found by its name in the DRA API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedDevice {
    /// Its resource.
    pub resource: ResourceName,
    /// Its id, with its objects.
    pub device: GrantedDevice,
    /// What its CDI device contains.
    pub edits: ContainerEdits,
}

/// The devices of this node by their names in the DRA API.
pub type NamedDevices = BTreeMap<DraName, NamedDevice>;
