//! An operator's release of a claim that no proof ends.
//!
//! The operator vouches for what cannot be seen. What can be seen still counts: a claim is not
//! released while the cgroup of one of its pods exists or cannot be read, nor while the kubelet's
//! record has it, because then the kubelet unprepares it. If there is no record, the ledger may
//! lack a pod that joined the claim later.

use super::Ledger;
use super::claims::ends;
use super::hooks::ReleaseHooks;
use crate::domain::{
    CgroupState, ClaimRef, Entry, Grant, KubeletClaims, NotReleased, PodRef, Timestamp,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// `released_by` of a claim that an operator has released.
pub const OPERATOR: &str = "operator";

/// The claim with live grants that a text names: its UID, also as `uid:…`, or its namespace and
/// name.
///
/// # Errors
/// When it names no claim, or several.
pub fn stuck_claim(ledger: &Ledger, text: &str) -> Result<ClaimRef, NotReleased> {
    let uid = text.strip_prefix("uid:").unwrap_or(text);
    let claims: BTreeMap<&str, &ClaimRef> = ledger
        .grants()
        .filter_map(|grant| grant.claim.as_ref())
        .filter(|hold| hold.claim.uid == uid || hold.claim.to_string() == text)
        .map(|hold| (hold.claim.uid.as_str(), &hold.claim))
        .collect();
    match claims.values().collect::<Vec<_>>()[..] {
        [] => Err(NotReleased::Unknown(text.to_owned())),
        [claim] => Ok(ClaimRef::clone(claim)),
        _ => Err(NotReleased::Several {
            claim: text.to_owned(),
            uids: claims.keys().map(|uid| (*uid).to_owned()).collect(),
        }),
    }
}

/// What is known apart from the ledger and the cgroups.
#[derive(Debug, Clone, Copy, Default)]
pub struct Vouched<'a> {
    /// The kubelet's record, if it can be read.
    pub kept: Option<&'a KubeletClaims>,
    /// Whether the operator vouches for a claim whose pods are not all known.
    pub is_confirmed: bool,
}

/// The entries that release a claim for an operator.
///
/// # Errors
/// When it may be in use.
pub fn release_stuck(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    uncommitted: &[&Entry],
    claim: &ClaimRef,
    Vouched { kept, is_confirmed }: Vouched<'_>,
    cgroup: &impl Fn(&str) -> CgroupState,
    now: Timestamp,
) -> Result<Vec<Entry>, NotReleased> {
    if kept.is_some_and(|kept| kept.claims.contains_key(&claim.uid)) {
        return Err(NotReleased::Kept(claim.clone()));
    }
    if kept.is_none() && !is_confirmed {
        return Err(NotReleased::RecordUnread(claim.clone()));
    }
    let grants: Vec<&Arc<Grant>> = ledger.of_claim(&claim.uid).collect();
    let pods: Vec<&PodRef> = grants.iter().flat_map(|grant| grant.pods()).collect();
    if pods.is_empty() && !is_confirmed {
        return Err(NotReleased::PodsUnknown(claim.clone()));
    }
    for pod in pods {
        let (claim, state) = (claim.clone(), cgroup(&pod.uid));
        let pod = Box::new(pod.clone());
        match state {
            CgroupState::Absent => {}
            CgroupState::Populated => return Err(NotReleased::Running { claim, pod }),
            CgroupState::Empty => return Err(NotReleased::Remains { claim, pod }),
            CgroupState::Unknown => return Err(NotReleased::Unreadable { claim, pod }),
        }
    }
    Ok(ends(ledger, hooks, uncommitted, &grants, OPERATOR, now))
}
