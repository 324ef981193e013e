//! Decides the moves of grants after Allocate, from observations (I4).
//!
//! There is no Deallocate. A pod that is not listed may still exist. The kubelet lists nothing
//! until its first pods have come. The containers of a force-deleted pod keep running. A pod whose
//! containers died with the machine is started again from the kubelet's cached response, without
//! another Allocate. So `pod_gone` needs all of this proof:
//!
//! - The pod is absent from two reports of the kubelet, [`ABSENCE_MIN`] apart on a clock that does
//!   not jump. Rules out: a report between two states of the kubelet.
//! - The kubelet has settled. Rules out: a kubelet that does not know its pods yet.
//! - The pod's cgroup is absent; `Unknown` proves nothing. Rules out: force-deleted pods.
//! - It is absent, not just empty, even if other pods are listed. Rules out: a runtime that died
//!   under a kubelet whose API server is away. Such a kubelet lists its static pods at most, and
//!   starts the others again without an Allocate. It deletes cgroups only when it knows all its
//!   pods.
//! - After a reboot: the pod was seen to run again, or the checkpoint has no entry of it either.
//!   Rules out: a pod that will be started again, while no cgroup exists yet.
//! - Of a static pod: the checkpoint has no entry of it. Rules out: a pod whose manifest returns.
//!   It has its UID again, and the kubelet starts it with the remembered devices.
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
//! can have started without an entry. A grant whose Allocate failed before
//! the write ended, as on a disk that hangs, needs no such proof: its reply was not delivered.

use super::Ledger;
use super::evidence::{ABSENCE_MIN, Evidence, Listing};
use super::prepared::prepared;
use super::watchlist::{Absence, Unbound, Watchlist};
use crate::domain::{
    CgroupState, Entry, Grant, GrantState, Moment, Observation, PodRef, PodReport, Timestamp,
    is_of_static_pod,
};

/// `released_by` of a pod that was removed.
pub const POD_GONE: &str = "pod_gone";
/// `released_by` of a grant whose device the kubelet has given to another pod.
pub const HANDED_ON: &str = "handed_on";
/// `released_by` of a grant whose container came back and got another one.
pub const SUPERSEDED: &str = "superseded";
/// `released_by` of a grant that no container ever got.
pub const NEVER_STARTED: &str = "never_started";

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
    let asked = observation.kubelet_settled && matches!(observation.pods, PodReport::All(_));
    if !(waited && written_after && asked) || evidence.may_be_in_use(grant) {
        return None;
    }
    watchlist.unbound.remove(&grant.alloc_id);
    Some(never_started(now.wall))
}

/// The state of a grant that no container ever got, from the time of its release on.
pub fn never_started(released_at: Timestamp) -> GrantState {
    GrantState::Released {
        pod: None,
        container: None,
        bound_at: None,
        released_at,
        other_pods: Vec::new(),
        released_by: NEVER_STARTED.to_owned(),
    }
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
                .or_insert(Absence { since: now.boot, reports: 0 });
            absence.reports += 1;
            let absent_twice =
                absence.reports >= 2 && now.boot.saturating_sub(absence.since) >= ABSENCE_MIN;
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

/// Whether no process of the pod runs, and none will run again with this grant. While the kubelet
/// remembers the grant, a pod that returns gets it without another Allocate: after a boot, or a
/// static pod whose manifest returns.
fn is_dead(
    watchlist: &Watchlist,
    grant: &Grant,
    uid: &str,
    evidence: &Evidence<'_>,
    observation: &Observation,
) -> bool {
    let gone = evidence.cgroup(uid) == CgroupState::Absent;
    let started_again = grant.boot_id == observation.boot_id || watchlist.alive.contains(uid);
    gone && (started_again && !is_of_static_pod(uid) || evidence.checkpoint_lacks(uid))
}
