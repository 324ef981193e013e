//! The agenda of reconciliation: what the next pass checks, and when.

use super::Ledger;
use super::evidence::ABSENCE_MIN;
use super::watchlist::{SOON_FOR, Watchlist};
use crate::domain::{
    AllocId, CgroupState, ClaimEvidence, Grant, GrantState, Moment, Observation, PodName, PodRef,
    PodReport, Timestamp, is_of_static_pod,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The time until the next pass while a move waits for proof, or a grant for its container.
const LOOK_SOON: Duration = Duration::from_millis(1500);
/// The time between checks of the pods' cgroups while any device is held. A check costs one `stat`
/// for each pod. With the wait and the two listings that follow, it keeps "released within 30 s".
pub const LOOK_HELD: Duration = Duration::from_secs(15);

/// How long a pod has ended before the kubelet is asked to list all pods for its sake.
///
/// Before the kubelet answers List, it frees the devices of pods that have ended, and forgets the
/// reservation of an Allocate in flight with them (`UpdateAllocatedDevices`). An Allocate of
/// another plugin cannot be seen, so a pod that was removed is asked for by its name, which frees
/// nothing. Only a pod that has ended and was not removed, such as that of a Job, needs a listing.
/// Until then the kubelet may free its devices without it, for the next pod.
const LIST_AFTER: Duration = Duration::from_secs(5);

/// The most pods that are asked for one by one; for more, all are listed. The kubelet answers 100
/// calls a second, of all clients together.
const NAMED_MAX: usize = 32;

/// The questions of the next pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Agenda {
    /// The UIDs of the pods that hold a device by an Allocate.
    pub pods: BTreeSet<String>,
    /// The UIDs of the pods that use a claim.
    pub claim_pods: BTreeSet<String>,
    /// The UIDs of the claims.
    pub claims: BTreeSet<String>,
    /// Whether a grant may have been given to no container: only all pods show that.
    has_unbound: bool,
    /// Pods that had time to get a folder for logs, and have no known name.
    unnamed: BTreeSet<String>,
    /// The grants that the kubelet's checkpoint should have, with the pods' UIDs.
    placed: BTreeMap<AllocId, String>,
    /// The known names of pods.
    names: BTreeMap<String, PodName>,
    /// The pods of suspect grants.
    suspect: BTreeSet<String>,
    /// Pods whose absence was first seen less than [`ABSENCE_MIN`] ago: another observation of it
    /// would prove nothing yet.
    early: BTreeSet<String>,
    /// Pods without a running process for [`LIST_AFTER`].
    ended: BTreeSet<String>,
    /// Pods that two reports of the kubelet lacked and that may return, unless they are of this
    /// boot. With the boot of their grants; a static pod may return in any boot.
    absent: BTreeMap<String, Option<String>>,
}

/// What the kubelet's pod-resources API is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodQuery {
    /// These pods (`Get`).
    Named(BTreeSet<PodName>),
    /// All pods (`List`).
    All,
}

impl Agenda {
    /// The agenda for the current grants.
    #[must_use]
    pub fn of(ledger: &Ledger, watchlist: &Watchlist, now: Moment) -> Self {
        let mut agenda = Agenda {
            pods: ledger.pods().into_iter().map(str::to_owned).collect(),
            claim_pods: ledger.claim_pods().into_iter().map(str::to_owned).collect(),
            ..Agenda::default()
        };
        for grant in ledger.grants() {
            agenda.claims.extend(grant.claim.as_ref().map(|hold| hold.claim.uid.clone()));
            match &grant.state {
                // The kubelet is asked when it can be decided.
                GrantState::Granted => {
                    agenda.has_unbound |= watchlist.has_waited(&grant.alloc_id, now.boot);
                }
                GrantState::Bound { pod, bound_at, .. }
                | GrantState::Suspect { pod, bound_at, .. } => {
                    let age = Duration::from_millis(now.wall.0.saturating_sub(bound_at.0));
                    agenda.note(grant, pod, age, watchlist, now.boot);
                }
                GrantState::Prepared { .. } | GrantState::Released { .. } => {}
            }
        }
        agenda
    }

    /// Notes a grant with a container.
    fn note(
        &mut self,
        grant: &Grant,
        pod: &PodRef,
        age: Duration,
        watchlist: &Watchlist,
        now: Duration,
    ) {
        let (id, uid) = (&grant.alloc_id, &pod.uid);
        self.placed.insert(id.clone(), uid.clone());
        match pod.full_name() {
            Some(name) => {
                self.names.insert(uid.clone(), name);
            }
            // By the wall clock, or the other one if that was set back.
            _ if age >= SOON_FOR || watchlist.ended_for(id, now) >= SOON_FOR => {
                self.unnamed.insert(uid.clone());
            }
            _ => {}
        }
        let (absences, absent_for) = watchlist.absence(id, now);
        let noted = [
            (&mut self.suspect, matches!(grant.state, GrantState::Suspect { .. })),
            (&mut self.early, absences > 0 && absent_for < ABSENCE_MIN),
            (&mut self.ended, watchlist.ended_for(id, now) >= LIST_AFTER),
        ];
        for (pods, is_one) in noted {
            pods.extend(is_one.then(|| uid.clone()));
        }
        let is_static = is_of_static_pod(uid);
        if absences >= 2 && absent_for >= ABSENCE_MIN && (is_static || !watchlist.was_alive(uid)) {
            let boot_id = (!is_static).then(|| grant.boot_id.clone());
            self.absent.insert(uid.clone(), boot_id);
        }
    }

    /// What the kubelet must be asked next, after its files and the cgroups were read. Those show
    /// that a pod lives; they do not show that it was removed or forgotten. Before the kubelet has
    /// settled, an absence shows nothing, but a suspect pod may be back.
    #[must_use]
    pub fn query(&self, seen: &Observation) -> Option<PodQuery> {
        let PodReport::Nothing = &seen.pods else {
            let is_named = matches!(seen.pods, PodReport::Named(_));
            let needs_all = self.needs_listing_after(seen) || self.is_outdated(seen);
            return (is_named && needs_all).then_some(PodQuery::All);
        };
        let decides = self.has_unbound || self.claims_need_listing(seen);
        if (decides && seen.kubelet_settled) || self.names_need_listing(seen) {
            return Some(PodQuery::All);
        }
        let open =
            if seen.kubelet_settled { self.open(seen) } else { self.suspect.iter().collect() };
        let asked = open.into_iter().filter(|uid| !self.early.contains(*uid));
        let names: BTreeSet<PodName> =
            asked.filter_map(|uid| self.names.get(uid).cloned()).collect();
        match names.len() {
            0 => None,
            1..=NAMED_MAX => Some(PodQuery::Named(names)),
            _ => Some(PodQuery::All),
        }
    }

    /// Whether a pod that has ended was found by its name, and the kubelet has not freed its
    /// devices.
    fn needs_listing_after(&self, seen: &Observation) -> bool {
        let PodReport::Named(found) = &seen.pods else { return false };
        let is_found = |uid: &String| {
            let name = self.names.get(uid);
            name.and_then(|name| found.get(name)).is_some_and(Option::is_some)
        };
        let is_removed = |uid: &String| seen.cgroups.get(uid) == Some(&CgroupState::Absent);
        let is_freed = |uid: &String| {
            seen.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.of_pod(uid).is_empty())
        };
        self.ended.iter().any(|uid| is_found(uid) && is_removed(uid) && !is_freed(uid))
    }

    /// Whether only the kubelet's checkpoint keeps a grant of a pod that was removed: without
    /// another proof the pod may start again ([`super::reconcile()`]). A listing frees
    /// its devices in the kubelet's memory, unless it has not heard from the API server. The
    /// checkpoint follows with the next list of a device plugin, or the next Allocate.
    #[must_use]
    pub fn is_outdated(&self, seen: &Observation) -> bool {
        let is_removed = |uid: &String| seen.cgroups.get(uid) == Some(&CgroupState::Absent);
        let is_kept = |uid: &String| {
            seen.checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.of_pod(uid).is_empty())
        };
        let may_return = |boot: &Option<String>| boot.as_ref() != Some(&seen.boot_id);
        let mut absent = self.absent.iter().filter(|(_, boot)| may_return(boot));
        seen.kubelet_settled && absent.any(|(uid, _)| is_removed(uid) && is_kept(uid))
    }

    /// The pods that may have been removed or forgotten.
    fn open(&self, files: &Observation) -> BTreeSet<&String> {
        let dead = self.pods.iter().filter(|uid| !lives(files, uid));
        let is_known = |id: &AllocId| {
            files.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.answered(id).is_some())
        };
        let unknown = self.placed.iter().filter(|(id, _)| !is_known(id)).map(|(_, uid)| uid);
        dead.chain(unknown).chain(&self.suspect).collect()
    }

    /// Whether the folders for logs do not show the name of a pod either.
    fn names_need_listing(&self, files: &Observation) -> bool {
        self.unnamed.iter().any(|uid| !files.names.contains_key(uid))
    }

    /// Whether a claim may be gone, and the kubelet's file of claims, which comes first, cannot be
    /// seen.
    fn claims_need_listing(&self, files: &Observation) -> bool {
        let ClaimEvidence { api, kubelet } = &*files.claims;
        let may_be_gone = |uid: &String| api.get(uid).is_some_and(|look| look.is_gone);
        kubelet.is_none() && self.claims.iter().any(may_be_gone)
    }
}

fn lives(files: &Observation, uid: &str) -> bool {
    files.cgroups.get(uid) == Some(&CgroupState::Populated)
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
