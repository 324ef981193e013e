//! The agenda of reconciliation: what the next pass checks, and when.

use super::reconcile::SOON_FOR;
use super::{Ledger, Watchlist};
use crate::domain::{
    AllocId, CgroupState, ClaimEvidence, Grant, GrantState, Moment, Observation, Timestamp,
};
use std::collections::BTreeSet;
use std::time::Duration;

/// The time until the next pass while a move waits for proof, or a grant for its container.
const LOOK_SOON: Duration = Duration::from_millis(1500);
/// The time between checks of the pods' cgroups while any device is held. A check costs one `stat`
/// for each pod. With the two listings that follow, it keeps "released within 30 s".
pub const LOOK_HELD: Duration = Duration::from_secs(15);

/// The questions of the next pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Agenda {
    /// The UIDs of the pods that hold a device by an Allocate.
    pub pods: BTreeSet<String>,
    /// The UIDs of the pods that use a claim.
    pub claim_pods: BTreeSet<String>,
    /// The UIDs of the claims.
    pub claims: BTreeSet<String>,
    /// Whether the kubelet's listing is needed in any case.
    pub list: bool,
    /// The grants that the kubelet's checkpoint should have.
    pub placed: BTreeSet<AllocId>,
}

impl Agenda {
    /// The agenda for the current grants, at a time since the boot.
    #[must_use]
    pub fn of(ledger: &Ledger, watchlist: &Watchlist, now: Duration) -> Self {
        let pods = ledger.pods().into_iter().map(str::to_owned).collect();
        let claim_pods = ledger.claim_pods().into_iter().map(str::to_owned).collect();
        let unnamed = |grant: &Grant| grant.pod().is_some_and(|pod| pod.name.is_none());
        let list = ledger.grants().any(|grant| match grant.state {
            // Only a listing shows that no container has it, and the kubelet is asked when that can
            // be decided.
            GrantState::Granted => watchlist.has_waited(&grant.alloc_id, now),
            GrantState::Suspect { .. } => true,
            GrantState::Bound { .. } | GrantState::Released { .. } => unnamed(grant),
            GrantState::Prepared { .. } => false,
        });
        let placed = ledger
            .grants()
            .filter(|grant| grant.is_placed())
            .map(|grant| grant.alloc_id.clone())
            .collect();
        let claims = ledger.grants().filter_map(|grant| grant.claim.as_ref());
        let claims = claims.map(|hold| hold.claim.uid.clone()).collect();
        Agenda { pods, claim_pods, claims, list, placed }
    }

    /// Whether the kubelet must be asked for its pods, after its files and the cgroups were read.
    /// Those show that a pod lives; they do not show that it was removed or forgotten.
    #[must_use]
    pub fn needs_listing(&self, files: &Observation) -> bool {
        let lives = |uid: &String| files.cgroups.get(uid) == Some(&CgroupState::Populated);
        let is_known = |id: &AllocId| {
            files.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.answered(id).is_some())
        };
        // The kubelet's file of claims comes first. A listing replaces it where it cannot be seen.
        let ClaimEvidence { api, kubelet } = &*files.claims;
        let may_be_gone = |uid: &String| api.get(uid).is_some_and(|look| look.is_gone);
        self.list
            || !self.pods.iter().all(lives)
            || !self.placed.iter().all(is_known)
            || (kubelet.is_none() && self.claims.iter().any(may_be_gone))
    }
}

/// Whether a pass would find nothing: every grant is bound to a named pod whose processes run, and
/// the kubelet knows the grants. A claim is in use while one of its pods runs.
pub fn is_calm(ledger: &Ledger, watchlist: &Watchlist, lives: impl Fn(&str) -> bool) -> bool {
    let is_in_order = |grant: &Grant| match &grant.state {
        GrantState::Bound { pod, .. } => pod.name.is_some() && lives(&pod.uid),
        GrantState::Prepared { pods, unprepared_at: None, .. } => {
            pods.iter().all(|pod| pod.name.is_some()) && pods.iter().any(|pod| lives(&pod.uid))
        }
        _ => false,
    };
    !watchlist.has_forgotten() && ledger.grants().all(|grant| is_in_order(grant))
}

/// The wait until the next pass, unless an event triggers one earlier.
#[must_use]
pub fn next_look(ledger: &Ledger, watchlist: &Watchlist, now: Moment) -> Duration {
    let is_recent =
        |at: Timestamp| u128::from(now.wall.0.saturating_sub(at.0)) < SOON_FOR.as_millis();
    let is_open = |grant: &Grant| match &grant.state {
        // From the first pass on the watchlist has it.
        GrantState::Granted => !watchlist.is_unbound(&grant.alloc_id),
        GrantState::Bound { pod, bound_at, .. } => pod.name.is_none() && is_recent(*bound_at),
        // The last process of its pods may end at any time.
        GrantState::Prepared { unprepared_at, .. } => unprepared_at.is_some_and(is_recent),
        GrantState::Suspect { .. } | GrantState::Released { .. } => false,
    };
    let open = ledger.grants().any(|grant| is_open(grant));
    if open || watchlist.is_waiting(now.boot) { LOOK_SOON } else { LOOK_HELD }
}
