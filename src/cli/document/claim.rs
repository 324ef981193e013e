//! The part of a row that is about pods and claims.

use crate::domain::{ClaimedDevice, Grant, GrantState, PodRef, Timestamp};
use serde::Serialize;

/// A pod in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Pod<'a> {
    namespace: Option<&'a str>,
    name: Option<&'a str>,
    uid: &'a str,
}

/// A claim in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Claim<'a> {
    namespace: &'a str,
    name: &'a str,
    uid: &'a str,
    allocation: &'a str,
    pods: Vec<Pod<'a>>,
    /// When the kubelet unprepared it, while a process of a pod still ran or may have run.
    unprepared_at: Option<Timestamp>,
    devices: Vec<Allocation<'a>>,
}

/// One allocated device of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Allocation<'a> {
    id: &'a str,
    request: &'a str,
    pool: &'a str,
    device: &'a str,
    share_id: Option<&'a str>,
    admin: bool,
}

pub(super) fn claim(grant: &Grant) -> Option<Claim<'_>> {
    let hold = grant.claim.as_ref()?;
    let unprepared_at = match grant.state {
        GrantState::Prepared { unprepared_at, .. } => unprepared_at,
        _ => None,
    };
    Some(Claim {
        namespace: &hold.claim.namespace,
        name: &hold.claim.name,
        uid: &hold.claim.uid,
        allocation: &hold.allocation,
        pods: grant.pods().map(pod).collect(),
        unprepared_at,
        devices: hold.devices.iter().map(allocation).collect(),
    })
}

fn allocation(device: &ClaimedDevice) -> Allocation<'_> {
    let ClaimedDevice { allocated, id, .. } = device;
    Allocation {
        id: id.as_str(),
        request: &allocated.request,
        pool: &allocated.name.pool,
        device: &allocated.name.device,
        share_id: allocated.share_id.as_deref(),
        admin: allocated.admin,
    }
}

pub(super) fn pod(pod: &PodRef) -> Pod<'_> {
    Pod { namespace: pod.namespace.as_deref(), name: pod.name.as_deref(), uid: &pod.uid }
}
