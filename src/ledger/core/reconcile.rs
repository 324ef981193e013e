//! From what can be seen to what is decided: the moves of grants after Allocate (I4).
//!
//! There is no Deallocate. A pod that is not listed may be there all the same: the kubelet lists nothing until its first
//! pods have come, a force-deleted pod's containers run on, and one whose containers died with the machine is started
//! again from the kubelet's cached response without another Allocate. So a release needs every one of:
//!
//! | proof of `pod_gone` | against |
//! | --- | --- |
//! | absent from two listings, [`ABSENCE_MIN`] apart on a clock that does not jump | a listing between two states of the kubelet |
//! | by a kubelet that has settled | a kubelet that has not heard of its pods yet |
//! | the pod's cgroup gone; `Unknown` proves nothing | force-deleted pods |
//! | gone, not just empty, whatever else is listed | a runtime that died under a kubelet whose API server is away: it lists its static pods at most, and starts the others again without an Allocate. It deletes cgroups only when it knows all its pods |
//! | after a reboot: it was seen to run again, or the checkpoint has no entry either | a pod that will be started again; every cgroup is gone then |
//!
//! `handed_on` is found out when the next pod's container is about to start ([`super::passage()`]): the kubelet's checkpoint has
//! the device for that pod and nothing at all of the former one, so it has forgotten it for good and starts nothing of it
//! without another Allocate; and nothing of it runs. No listing says more, and nobody has to have settled.
//!
//! `superseded` is the end of a grant whose pod has come back with its UID, as static pods do: the checkpoint holds another
//! grant for the same container, so the kubelet starts it with that one for good; and nothing of the pod ran when it was seen
//! last, or at the look before. Without that look it is not proven: a kubelet that lost its checkpoint asks again for a container
//! that runs on with what it has. Then the pod's end releases both.
//!
//! `never_started` needs a checkpoint that was written after the grant and does not have it: the kubelet writes it right
//! after Allocate, before the pod is admitted, so no container can have started without.

use super::Ledger;
use super::evidence::{Evidence, Listing};
use crate::domain::{AllocId, CgroupState, Entry, Grant, GrantState, KubeletGeneration, Moment, Observation, PodRef, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How far apart the first and the last listing are that together prove a pod's absence.
pub const ABSENCE_MIN: Duration = Duration::from_secs(5);
/// How long a grant is given to appear in a checkpoint. The kubelet takes milliseconds.
pub const NEVER_STARTED_MIN: Duration = Duration::from_secs(60);
/// `released_by` of a pod that has gone.
pub const POD_GONE: &str = "pod_gone";
/// `released_by` of a grant whose device the kubelet has given to another pod.
pub const HANDED_ON: &str = "handed_on";
/// `released_by` of a grant whose container came back and was given another one.
pub const SUPERSEDED: &str = "superseded";
/// `released_by` of a grant that no container ever got.
pub const NEVER_STARTED: &str = "never_started";

/// What was seen of grants that may be released. Not durable: after a restart the proof begins anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watchlist {
    /// UIDs of pods that were seen to run in this boot.
    alive: BTreeSet<String>,
    /// The newest kubelet that wrote a checkpoint with the grant: a kubelet that restarts may have lost it, one that goes on
    /// has not.
    known: BTreeMap<AllocId, KubeletGeneration>,
    /// Bound grants that the kubelet's checkpoint lacks.
    forgotten: BTreeSet<AllocId>,
    /// Grants of whose pods nothing ran at the last look, while the kubelet goes on.
    ended: BTreeSet<AllocId>,
    absent: BTreeMap<AllocId, Absence>,
    unbound: BTreeMap<AllocId, Unbound>,
}

/// A pod that listings lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Absence {
    since: Duration,
    listings: u32,
}

/// A grant that is in no checkpoint yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unbound {
    since: Duration,
    /// When the checkpoint was written that was the latest then. Another one was written later, whatever the wall clock does.
    checkpoint: Option<Timestamp>,
}

impl Watchlist {
    /// Whether a release waits for another look: then look again soon.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        !self.absent.is_empty() || !self.unbound.is_empty()
    }

    /// Whether a grant has been without a container for so long that it may be one that never started.
    pub(super) fn has_waited(&self, alloc_id: &AllocId, now: Duration) -> bool {
        self.unbound.get(alloc_id).is_some_and(|watch| now.saturating_sub(watch.since) >= NEVER_STARTED_MIN)
    }

    /// Whether this very kubelet has had a grant in its memory.
    #[must_use]
    pub fn was_known_to(&self, kubelet: KubeletGeneration, alloc_id: &AllocId) -> bool {
        self.known.get(alloc_id) == Some(&kubelet)
    }

    /// What a kubelet writes after its start is what it remembers; before its first write the file is its predecessor's.
    fn note_known(&mut self, observation: &Observation) {
        let (Some(kubelet), Some(checkpoint)) = (observation.kubelet, &observation.checkpoint) else { return };
        if checkpoint.written_at() > kubelet.made_at().unwrap_or(Timestamp(0)) {
            let ids = checkpoint.grant_ids().cloned();
            self.known.extend(ids.map(|id| (id, kubelet)));
        }
    }

    /// Whether the kubelet has forgotten a grant whose pod may run: by a deletion by force, or with a checkpoint that was
    /// lost. Its listing tells which.
    #[must_use]
    pub fn has_forgotten(&self) -> bool {
        !self.forgotten.is_empty()
    }

    fn retain_live(&mut self, ledger: &Ledger) {
        self.forgotten.retain(|id| ledger.grant(id).is_some());
        self.known.retain(|id, _| ledger.grant(id).is_some());
        let holders = ledger.pods();
        self.alive.retain(|uid| holders.contains(uid.as_str()));
        self.ended.retain(|id| ledger.grant(id).is_some());
        self.absent.retain(|id, _| ledger.grant(id).is_some());
        self.unbound.retain(|id, _| ledger.grant(id).is_some_and(|grant| grant.state == GrantState::Granted));
    }
}

/// Decides which grants move on. At most one entry per grant; an observation that brings nothing new brings no entry.
pub fn reconcile(watchlist: &mut Watchlist, ledger: &Ledger, observation: &Observation, now: Moment) -> Vec<Entry> {
    let evidence = Evidence::new(ledger, observation);
    let running = observation.cgroups.iter().filter(|(_, state)| **state == CgroupState::Populated);
    watchlist.alive.extend(running.map(|(uid, _)| uid.clone()));
    watchlist.note_known(observation);
    if observation.checkpoint.is_some() {
        let placed = ledger.grants().filter(|grant| grant.pod().is_some());
        let forgotten = placed.filter(|grant| evidence.checkpointed(grant).is_none());
        watchlist.forgotten = forgotten.map(|grant| grant.alloc_id.clone()).collect();
    }
    watchlist.retain_live(ledger);
    if !observation.kubelet_settled {
        // Another kubelet, or a new start of this one: what its predecessor did not list says nothing about it.
        watchlist.absent.clear();
        // It may have started again meanwhile what its predecessor let end.
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
                let held = Held { pod, container, bound_at: *bound_at, suspect_at: Some(*suspect_at) };
                placed(watchlist, grant, &held, &evidence, observation, now)
            }
            GrantState::Released { .. } => continue,
        };
        entries.extend(state.filter(|state| *state != grant.state).map(|state| Entry::Moved { alloc_id: grant.alloc_id.clone(), state }));
    }
    entries
}

/// A grant of which nobody knows who got it.
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
        let (namespace, name) = evidence.names(grant, &uid, &container).map(|name| (name.namespace, name.name)).unzip();
        return Some(GrantState::Bound { pod: PodRef { uid, namespace, name }, container, bound_at: now.wall });
    }
    let written_at = observation.checkpoint.as_ref().map(|checkpoint| checkpoint.written_at());
    let watch = *watchlist.unbound.entry(grant.alloc_id.clone()).or_insert(Unbound { since: now.boot, checkpoint: written_at });
    let written_after = written_at.is_some_and(|at| at > grant.granted_at || watch.checkpoint.is_some_and(|first| first != at));
    let waited = watchlist.has_waited(&grant.alloc_id, now.boot);
    // Without a listing it is not known whether a container is listed with these ids.
    let asked = observation.kubelet_settled && observation.pods.is_some();
    if !(waited && written_after && asked) || evidence.may_be_in_use(grant) {
        return None;
    }
    watchlist.unbound.remove(&grant.alloc_id);
    let released_by = NEVER_STARTED.to_owned();
    Some(GrantState::Released { pod: None, container: None, bound_at: None, released_at: now.wall, released_by })
}

/// What a bound and a suspect grant have in common.
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
        let (pod, container, bound_at, released_at) = (Some(pod), Some(container), Some(bound_at), now.wall);
        Some(GrantState::Released { pod, container, bound_at, released_at, released_by: released_by.to_owned() })
    };
    if is_over(watchlist, grant, &pod.uid, evidence) {
        return released(pod, container, SUPERSEDED);
    }
    let listing = evidence.listing(grant, &pod);
    match listing {
        Listing::Present => {
            watchlist.absent.remove(&grant.alloc_id);
            return Some(GrantState::Bound { pod, container, bound_at });
        }
        Listing::Absent => {
            let absence = watchlist.absent.entry(grant.alloc_id.clone()).or_insert(Absence { since: now.boot, listings: 0 });
            absence.listings += 1;
            let absent_twice = absence.listings >= 2 && now.boot.saturating_sub(absence.since) >= ABSENCE_MIN;
            if absent_twice && is_dead(watchlist, grant, &pod.uid, evidence, observation) {
                watchlist.absent.remove(&grant.alloc_id);
                return released(pod, container, POD_GONE);
            }
        }
        Listing::Silent => {}
    }
    // A name that has become known is kept, whatever the state.
    let suspect_at = held.suspect_at.or_else(|| (listing == Listing::Absent).then_some(now.wall));
    Some(match suspect_at {
        Some(suspect_at) => GrantState::Suspect { pod, container, bound_at, suspect_at },
        None => GrantState::Bound { pod, container, bound_at },
    })
}

/// Whether the kubelet has given the container another grant, after everything had ended that ran with this one.
fn is_over(watchlist: &mut Watchlist, grant: &Grant, uid: &str, evidence: &Evidence<'_>) -> bool {
    if evidence.cgroup(uid).is_dead() {
        watchlist.ended.insert(grant.alloc_id.clone());
    } else if !evidence.is_superseded(grant) {
        watchlist.ended.remove(&grant.alloc_id);
    }
    evidence.is_superseded(grant) && watchlist.ended.contains(&grant.alloc_id)
}

/// Whether nothing of the pod runs, and nothing of it will run again.
fn is_dead(watchlist: &Watchlist, grant: &Grant, uid: &str, evidence: &Evidence<'_>, observation: &Observation) -> bool {
    let gone = evidence.cgroup(uid) == CgroupState::Absent;
    let started_again = grant.boot_id == observation.boot_id || watchlist.alive.contains(uid);
    gone && (started_again || evidence.checkpoint_lacks(uid))
}
