//! The messages about claims of DRA.

use super::RecordError;
#[cfg(doc)]
use super::WithReply;
use crate::domain::{ClaimRef, Grant, KubeletClaims, NamedDevices, NotReleased};
use crate::store::StoreError;
use actix::Message;
use std::collections::BTreeSet;
use std::sync::Arc;

/// dra → ledger, as [`WithReply`]: record the grants of a claim, one for each resource, in one
/// commit. Answered with the grants in force when they are durable (I1).
///
/// The answer for one allocation of a claim has the same devices every time, as they were recorded
/// first. A refusal records no grant, but may release the claim's former allocation. It may change
/// within seconds, when a holder or a hook ends. So the caller sends the message again as long as
/// the kubelet waits.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<Vec<Arc<Grant>>, RecordError>")]
pub struct RecordClaim {
    /// The grants. They have the same claim and allocation, are in the state
    /// [`crate::domain::GrantState::Prepared`], and name the pods of this request.
    pub grants: Vec<Arc<Grant>>,
}

/// dra → ledger, as [`WithReply`]: the kubelet unprepares this claim. Answered when that is
/// durable. An unknown claim is no error. A claim with a process that runs, or that may run, stays
/// held until that process has ended.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<(), Arc<StoreError>>")]
pub struct ReleaseClaim {
    /// The claim. Its UID identifies it.
    pub claim: ClaimRef,
    /// The UIDs of its pods in the kubelet's record, or in the last one that could be read. The
    /// kubelet prepares a claim once for all of its pods.
    pub pods: BTreeSet<String>,
}

/// dra → ledger, as [`WithReply`]: record the devices of these claims that no live grant of the
/// same claim has. Answered with the number of new grants when they are durable.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<usize, Arc<StoreError>>")]
pub struct RestoreClaims {
    /// The claims, as the kubelet has them.
    pub kept: Arc<KubeletClaims>,
    /// The devices that they name, as far as this node has them.
    pub named: Arc<NamedDevices>,
}

/// admin → ledger, as [`WithReply`]: an operator releases a claim. Answered with the claim when
/// that is durable.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<ClaimRef, NotReleased>")]
pub struct ReleaseStuck {
    /// The claim's UID, or its namespace and name.
    pub claim: String,
    /// Whether the operator vouches for a claim whose pods are not known.
    pub is_confirmed: bool,
    /// The kubelet's record; `None` if it cannot be read.
    pub kept: Option<Arc<KubeletClaims>>,
}
