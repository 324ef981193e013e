//! The end of a claim's grant: what every proof of it needs, and the released state.

use crate::domain::{CLAIM_PODS_MAX, CgroupState, Grant, GrantState, PodRef, Safeguard, Timestamp};
use std::collections::BTreeMap;

/// `released_by` of a claim that the kubelet has unprepared.
pub const UNPREPARED: &str = "unprepared";

/// Whether no process of the claim's pods runs. A state that cannot be read proves nothing. Only a
/// grant that was restored from the kubelet's own list may have no pod: then the kubelet has none
/// that may run.
pub(super) fn has_ended(grant: &Grant, cgroup: &impl Fn(&str) -> CgroupState) -> bool {
    matches!(&grant.state, GrantState::Prepared { pods, .. }
        if pods.iter().all(|pod| cgroup(&pod.uid).is_dead()))
}

/// A pod without its names.
pub(super) fn nameless(uid: &str) -> PodRef {
    PodRef { uid: uid.to_owned(), namespace: None, name: None }
}

/// The pods of a claim that its grant lacks. The kubelet prepares a claim once for all of its pods:
/// a later pod is only in the kubelet's record, and in the API server.
pub(super) fn lacking(grant: &Grant, listed: &BTreeMap<String, PodRef>) -> Vec<PodRef> {
    if !Safeguard::ClaimPods.is_on() {
        return Vec::new();
    }
    let is_known = |uid: &str| grant.pods().any(|pod| pod.uid == uid);
    listed.values().filter(|pod| !is_known(&pod.uid)).cloned().collect()
}

/// Forgets the oldest pods without a cgroup if there are more than [`CLAIM_PODS_MAX`].
pub(super) fn limit(pods: &mut Vec<PodRef>, cgroup: &impl Fn(&str) -> CgroupState) {
    let mut surplus = pods.len().saturating_sub(CLAIM_PODS_MAX);
    pods.retain(|pod| {
        let is_surplus = surplus > 0 && cgroup(&pod.uid) == CgroupState::Absent;
        surplus -= usize::from(is_surplus);
        !is_surplus
    });
}

/// The released state of a claim's grant, with all its pods.
pub(super) fn released(grant: &Grant, proof: &str, now: Timestamp) -> GrantState {
    let mut pods = grant.pods().cloned();
    let bound_at = match grant.state {
        GrantState::Prepared { prepared_at, .. } => Some(prepared_at),
        _ => None,
    };
    GrantState::Released {
        pod: pods.next(),
        container: None,
        bound_at,
        released_at: now,
        released_by: proof.to_owned(),
        other_pods: pods.collect(),
    }
}
