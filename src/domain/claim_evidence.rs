//! The evidence about claims outside of the ledger. All of it may be missing, and what is missing
//! proves nothing.

use super::claim::{ClaimRef, PreparedDevice};
use super::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What the API server and the kubelet last showed of claims.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimEvidence {
    /// The last answer of the API server about a claim, by the claim's UID.
    pub api: BTreeMap<String, ClaimLook>,
    /// The kubelet's file of claims; `None` if it is missing or cannot be read.
    pub kubelet: Option<KubeletClaims>,
}

/// An answer of the API server about one claim. An error is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimLook {
    /// Whether nothing on this node is allocated to the claim any longer: the server has no such
    /// claim, or one with another UID, or its allocation has no device of this driver and node.
    pub is_gone: bool,
    /// When the server answered (`CLOCK_BOOTTIME`).
    pub at: Duration,
}

/// The kubelet's own record of claims (`dra_manager_state`), with the devices of this driver.
///
/// The kubelet writes an entry before it asks to prepare the claim, and removes the entry after the
/// claim was unprepared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeletClaims {
    /// Its entries, by the claim's UID.
    pub claims: BTreeMap<String, KubeletClaim>,
    /// When the file was written.
    pub written_at: Timestamp,
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
