//! Decides the moves of grants after Allocate, from observations (I4).
//!
//! There is no Deallocate. A pod that is not listed may still exist. The kubelet lists nothing
//! until its first pods have come. The containers of a force-deleted pod keep running. A pod whose
//! containers died with the machine is started again from the kubelet's cached response, without
//! another Allocate. So `pod_gone` needs all of this proof:
//!
//! - The pod is absent from two listings, [`ABSENCE_MIN`] apart on a clock that does not jump.
//!   Rules out: a listing between two states of the kubelet.
//! - The kubelet has settled. Rules out: a kubelet that does not know its pods yet.
//! - The pod's cgroup is absent; `Unknown` proves nothing. Rules out: force-deleted pods.
//! - It is absent, not just empty, even if other pods are listed. Rules out: a runtime that died
//!   under a kubelet whose API server is away. Such a kubelet lists its static pods at most, and
//!   starts the others again without an Allocate. It deletes cgroups only when it knows all its
//!   pods.
//! - After a reboot: the pod was seen to run again, or the checkpoint has no entry of it either.
//!   Rules out: a pod that will be started again, while no cgroup exists yet.
//!
//! `handed_on` is decided when the next pod's container is about to start ([`super::passage()`]).
//! The kubelet's checkpoint has the device for that pod and no entry of the former pod. So the
//! kubelet has forgotten the former pod for good, and starts none of its containers without another
//! Allocate. None of its processes runs. No listing proves more, and the kubelet need not have
//! settled.
//!
//! `superseded` ends a grant whose pod came back with its UID, as static pods do. The checkpoint
//! holds another grant for the same container, so the kubelet starts the container with that grant
//! from now on. In addition, no process of the pod ran in the latest observation, or in the pass
//! before, or while the checkpoint lacked the grant: a power cut may take the kubelet's newest
//! checkpoint, and then no container is started with the grant. Without that it is not proven: a
//! kubelet that lost its checkpoint asks again for a container that still runs with its old
//! devices. Then the pod's end releases both.
//!
//! Claims have proofs of their own ([`super::prepared`]).
//!
//! `never_started` needs a checkpoint that was written after the grant and does not contain it. The
//! kubelet writes the checkpoint right after Allocate, before it admits the pod, so no container
//! can have started without an entry.

use super::Ledger;
use super::evidence::{ABSENCE_MIN, Evidence, Listing};
use super::prepared::{ClaimWatch, prepared};
use crate::domain::{
    AllocId, CgroupState, Entry, Grant, GrantState, KubeletGeneration, Moment, Observation, PodRef,
    Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The time that a grant has to appear in a checkpoint. The kubelet takes milliseconds.
pub const NEVER_STARTED_MIN: Duration = Duration::from_secs(60);
/// How long the passes come at the shorter interval after a wait began; then they come as usual. A
/// proof may take long: the kubelet may list a pod for minutes after its last process, and a
/// container may ignore its end. The name of a pod may never be seen: its log folder, which has the
/// name, comes with its sandbox, after the checkpoint that binds the grant.
pub(super) const SOON_FOR: Duration = Duration::from_secs(30);
/// `released_by` of a pod that was removed.
pub const POD_GONE: &str = "pod_gone";
/// `released_by` of a grant whose device the kubelet has given to another pod.
pub const HANDED_ON: &str = "handed_on";
/// `released_by` of a grant whose container came back and got another one.
pub const SUPERSEDED: &str = "superseded";
/// `released_by` of a grant that no container ever got.
pub const NEVER_STARTED: &str = "never_started";

/// Observations about grants that may be released. Not durable: after a restart the proof starts
/// again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watchlist {
    /// UIDs of pods that were seen to run in this boot.
    alive: BTreeSet<String>,
    /// UIDs of pods that had a folder for logs and no cgroup: they have started and are gone. Only
    /// for what is shown, since a folder may be that of the former boot.
    gone: BTreeSet<String>,
    /// The newest kubelet that wrote a checkpoint with the grant. A kubelet that restarts may have
    /// lost the grant; one that keeps running has not.
    known: BTreeMap<AllocId, KubeletGeneration>,
    /// Bound grants that the kubelet's checkpoint lacks.
    forgotten: BTreeSet<AllocId>,
    /// Grants of pods without a running process at the last pass, under the same kubelet; with the
    /// time since the boot when that was first seen.
    ended: BTreeMap<AllocId, Duration>,
    /// Grants that the kubelet's checkpoint lacked while no process of their pod ran: none runs
    /// with them since, whichever kubelet starts the pod.
    lacked: BTreeSet<AllocId>,
    absent: BTreeMap<AllocId, Absence>,
    unbound: BTreeMap<AllocId, Unbound>,
    claims: ClaimWatch,
}

/// A pod that is missing in listings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Absence {
    since: Duration,
    listings: u32,
}

/// A grant that is in no checkpoint yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unbound {
    since: Duration,
    /// The time of the latest checkpoint at that moment. A later one has another time, even if the
    /// wall clock jumps.
    checkpoint: Option<Timestamp>,
}

impl Watchlist {
    /// Whether something has waited for another pass for less than 30 s: then the next one is soon.
    /// `now` is the time since the boot.
    #[must_use]
    pub fn is_waiting(&self, now: Duration) -> bool {
        let absent = self.absent.values().map(|absence| absence.since);
        let unbound = self.unbound.values().map(|watch| watch.since);
        let ended = self.ended.values().copied();
        let mut all = absent.chain(unbound).chain(ended).chain(self.claims.waiting_since());
        all.any(|since| now.saturating_sub(since) < SOON_FOR)
    }

    /// Whether a pass has seen the grant without a container.
    pub(super) fn is_unbound(&self, alloc_id: &AllocId) -> bool {
        self.unbound.contains_key(alloc_id)
    }

    /// Records that a claim is in an answer to the kubelet, at a time since the boot.
    pub fn note_answered(&mut self, uid: &str, now: Duration) {
        self.claims.note_answered(uid, now);
    }

    /// Whether a grant has been without a container long enough to count as never started.
    pub(super) fn has_waited(&self, alloc_id: &AllocId, now: Duration) -> bool {
        self.unbound
            .get(alloc_id)
            .is_some_and(|watch| now.saturating_sub(watch.since) >= NEVER_STARTED_MIN)
    }

    /// Whether the pod was seen to run in this boot.
    pub(super) fn was_alive(&self, uid: &str) -> bool {
        self.alive.contains(uid)
    }

    /// Whether the pod was seen to run, or to have gone.
    pub(super) fn was_there(&self, uid: &str) -> bool {
        self.alive.contains(uid) || self.gone.contains(uid)
    }

    /// How many listings in succession lacked the pod of a grant, and for how long.
    pub(super) fn absence(&self, alloc_id: &AllocId, now: Duration) -> (u32, Duration) {
        self.absent
            .get(alloc_id)
            .map(|absence| (absence.listings, now.saturating_sub(absence.since)))
            .unwrap_or_default()
    }

    /// Whether the kubelet's checkpoint lacks a bound grant.
    pub(super) fn is_forgotten(&self, alloc_id: &AllocId) -> bool {
        self.forgotten.contains(alloc_id)
    }

    /// Whether the running kubelet has had a grant in its memory.
    #[must_use]
    pub fn was_known_to(&self, kubelet: KubeletGeneration, alloc_id: &AllocId) -> bool {
        self.known.get(alloc_id) == Some(&kubelet)
    }

    /// A kubelet writes what it remembers. Before its first write the file is its predecessor's.
    fn note_known(&mut self, observation: &Observation) {
        let (Some(kubelet), Some(checkpoint)) = (observation.kubelet, &observation.checkpoint)
        else {
            return;
        };
        if checkpoint.written_at() > kubelet.made_at().unwrap_or(Timestamp(0)) {
            let ids = checkpoint.grant_ids().cloned();
            self.known.extend(ids.map(|id| (id, kubelet)));
        }
    }

    /// Whether the kubelet has forgotten a grant whose pod may run: by a forced deletion, or
    /// because it lost its checkpoint. Its listing shows which.
    #[must_use]
    pub fn has_forgotten(&self) -> bool {
        !self.forgotten.is_empty()
    }

    fn retain_live(&mut self, ledger: &Ledger) {
        self.forgotten.retain(|id| ledger.grant(id).is_some());
        self.known.retain(|id, _| ledger.grant(id).is_some());
        self.claims.retain_live(ledger);
        let holders = ledger.pods();
        self.alive.retain(|uid| holders.contains(uid.as_str()));
        self.gone.retain(|uid| holders.contains(uid.as_str()));
        self.ended.retain(|id, _| ledger.grant(id).is_some());
        self.lacked.retain(|id| ledger.grant(id).is_some());
        self.absent.retain(|id, _| ledger.grant(id).is_some());
        self.unbound.retain(|id, _| {
            ledger.grant(id).is_some_and(|grant| grant.state == GrantState::Granted)
        });
    }
}

/// Decides which grants change their state. At most one entry per grant; an observation without
/// news gives no entry.
pub fn reconcile(
    watchlist: &mut Watchlist,
    ledger: &Ledger,
    observation: &Observation,
    now: Moment,
) -> Vec<Entry> {
    let evidence = Evidence::new(ledger, observation);
    let running = observation.cgroups.iter().filter(|(_, state)| **state == CgroupState::Populated);
    watchlist.alive.extend(running.map(|(uid, _)| uid.clone()));
    let absent = observation.cgroups.iter().filter(|(_, state)| **state == CgroupState::Absent);
    let gone = absent.filter(|(uid, _)| observation.names.contains_key(*uid));
    watchlist.gone.extend(gone.map(|(uid, _)| uid.clone()));
    watchlist.note_known(observation);
    if observation.checkpoint.is_some() {
        let placed = ledger.grants().filter(|grant| grant.is_placed());
        let forgotten = placed.filter(|grant| evidence.checkpointed(grant).is_none());
        watchlist.forgotten = forgotten.map(|grant| grant.alloc_id.clone()).collect();
    }
    watchlist.retain_live(ledger);
    if !observation.kubelet_settled {
        // Another kubelet, or a restarted one: an absence from its predecessor's list proves
        // nothing about it.
        watchlist.absent.clear();
        // The new kubelet may have restarted pods that ended under its predecessor.
        watchlist.ended.clear();
    }
    let mut entries = Vec::new();
    for grant in ledger.grants() {
        let state = match &grant.state {
            GrantState::Granted => unbound(watchlist, grant, &evidence, observation, now),
            GrantState::Bound { pod, container, bound_at } => {
                let held = Held { pod, container, bound_at: *bound_at, suspect_at: None };
                placed(watchlist, grant, &held, &evidence, observation, now)
            }
            GrantState::Suspect { pod, container, bound_at, suspect_at } => {
                let held =
                    Held { pod, container, bound_at: *bound_at, suspect_at: Some(*suspect_at) };
                placed(watchlist, grant, &held, &evidence, observation, now)
            }
            GrantState::Prepared { .. } | GrantState::Released { .. } => continue,
        };
        entries.extend(
            state
                .filter(|state| *state != grant.state)
                .map(|state| Entry::Moved { alloc_id: grant.alloc_id.clone(), state }),
        );
    }
    entries.extend(prepared(&mut watchlist.claims, ledger, &evidence, observation, now));
    entries
}

/// A grant whose container is not known.
fn unbound(
    watchlist: &mut Watchlist,
    grant: &Grant,
    evidence: &Evidence<'_>,
    observation: &Observation,
    now: Moment,
) -> Option<GrantState> {
    if let Some(entry) = evidence.checkpointed(grant) {
        watchlist.unbound.remove(&grant.alloc_id);
        let (uid, container) = (entry.pod_uid.clone(), entry.container.clone());
        let (namespace, name) =
            evidence.names(grant, &uid, &container).map(|name| (name.namespace, name.name)).unzip();
        return Some(GrantState::Bound {
            pod: PodRef { uid, namespace, name },
            container,
            bound_at: now.wall,
        });
    }
    let written_at = observation.checkpoint.as_ref().map(|checkpoint| checkpoint.written_at());
    let watch = *watchlist
        .unbound
        .entry(grant.alloc_id.clone())
        .or_insert(Unbound { since: now.boot, checkpoint: written_at });
    let written_after = written_at.is_some_and(|at| {
        at > grant.granted_at || watch.checkpoint.is_some_and(|first| first != at)
    });
    let waited = watchlist.has_waited(&grant.alloc_id, now.boot);
    // Without a listing it is not known whether a container is listed with these ids.
    let asked = observation.kubelet_settled && observation.pods.is_some();
    if !(waited && written_after && asked) || evidence.may_be_in_use(grant) {
        return None;
    }
    watchlist.unbound.remove(&grant.alloc_id);
    let released_by = NEVER_STARTED.to_owned();
    Some(GrantState::Released {
        pod: None,
        container: None,
        bound_at: None,
        released_at: now.wall,
        other_pods: Vec::new(),
        released_by,
    })
}

/// The common part of a bound and a suspect grant.
struct Held<'a> {
    pod: &'a PodRef,
    container: &'a str,
    bound_at: Timestamp,
    suspect_at: Option<Timestamp>,
}

/// A grant whose container is known.
fn placed(
    watchlist: &mut Watchlist,
    grant: &Grant,
    held: &Held<'_>,
    evidence: &Evidence<'_>,
    observation: &Observation,
    now: Moment,
) -> Option<GrantState> {
    let mut pod = held.pod.clone();
    if (pod.namespace.is_none() || pod.name.is_none())
        && let Some(name) = evidence.names(grant, &pod.uid, held.container)
    {
        (pod.namespace, pod.name) = (Some(name.namespace), Some(name.name));
    }
    let (container, bound_at) = (held.container.to_owned(), held.bound_at);
    let released = |pod, container, released_by: &str| {
        let (pod, container, bound_at, released_at) =
            (Some(pod), Some(container), Some(bound_at), now.wall);
        Some(GrantState::Released {
            pod,
            container,
            bound_at,
            released_at,
            other_pods: Vec::new(),
            released_by: released_by.to_owned(),
        })
    };
    if is_over(watchlist, grant, &pod.uid, evidence, now) {
        return released(pod, container, SUPERSEDED);
    }
    let listing = evidence.listing(grant, &pod);
    match listing {
        Listing::Present => {
            watchlist.absent.remove(&grant.alloc_id);
            return Some(GrantState::Bound { pod, container, bound_at });
        }
        Listing::Absent => {
            let absence = watchlist
                .absent
                .entry(grant.alloc_id.clone())
                .or_insert(Absence { since: now.boot, listings: 0 });
            absence.listings += 1;
            let absent_twice =
                absence.listings >= 2 && now.boot.saturating_sub(absence.since) >= ABSENCE_MIN;
            if absent_twice && is_dead(watchlist, grant, &pod.uid, evidence, observation) {
                watchlist.absent.remove(&grant.alloc_id);
                watchlist.ended.remove(&grant.alloc_id);
                return released(pod, container, POD_GONE);
            }
        }
        Listing::Silent => {}
    }
    // A name that has become known is kept in every state.
    let suspect_at = held.suspect_at.or_else(|| (listing == Listing::Absent).then_some(now.wall));
    Some(match suspect_at {
        Some(suspect_at) => GrantState::Suspect { pod, container, bound_at, suspect_at },
        None => GrantState::Bound { pod, container, bound_at },
    })
}

/// Whether the kubelet has given the container another grant, after all processes of this grant had
/// ended.
fn is_over(
    watchlist: &mut Watchlist,
    grant: &Grant,
    uid: &str,
    evidence: &Evidence<'_>,
    now: Moment,
) -> bool {
    let (id, is_superseded) = (&grant.alloc_id, evidence.is_superseded(grant));
    if evidence.checkpointed(grant).is_some() {
        watchlist.lacked.remove(id);
    }
    if evidence.cgroup(uid).is_dead() {
        watchlist.ended.entry(id.clone()).or_insert(now.boot);
        watchlist.lacked.extend(evidence.checkpoint_lacks_grant(grant).then(|| id.clone()));
    } else if !is_superseded {
        watchlist.ended.remove(id);
    }
    is_superseded && (watchlist.ended.contains_key(id) || watchlist.lacked.contains(id))
}

/// Whether no process of the pod runs, and none will run again.
fn is_dead(
    watchlist: &Watchlist,
    grant: &Grant,
    uid: &str,
    evidence: &Evidence<'_>,
    observation: &Observation,
) -> bool {
    let gone = evidence.cgroup(uid) == CgroupState::Absent;
    let started_again = grant.boot_id == observation.boot_id || watchlist.alive.contains(uid);
    gone && (started_again || evidence.checkpoint_lacks(uid))
}
