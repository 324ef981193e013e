//! What earlier passes of reconciliation have seen.

use super::Ledger;
use super::prepared::ClaimWatch;
use crate::domain::{AllocId, GrantState, KubeletGeneration, Observation, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The time that a grant has to appear in a checkpoint. The kubelet takes milliseconds.
pub const NEVER_STARTED_MIN: Duration = Duration::from_secs(60);
/// How long the passes come at the shorter interval after a wait began; then they come as usual. A
/// proof may take long: the kubelet may list a pod for minutes after its last process, and a
/// container may ignore its end. The name of a pod may never be seen: its log folder, which has the
/// name, comes with its sandbox, after the checkpoint that binds the grant.
pub(super) const SOON_FOR: Duration = Duration::from_secs(30);

/// Observations about grants that may be released. Not durable: after a restart the proof starts
/// again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Watchlist {
    /// UIDs of pods that were seen to run in this boot.
    pub(super) alive: BTreeSet<String>,
    /// UIDs of pods that had a folder for logs and no cgroup: they have started and are gone. Only
    /// for what is shown, since a folder may be that of the former boot.
    pub(super) gone: BTreeSet<String>,
    /// The newest kubelet that wrote a checkpoint with the grant. A kubelet that restarts may have
    /// lost the grant; one that keeps running has not.
    pub(super) known: BTreeMap<AllocId, KubeletGeneration>,
    /// Bound grants that the kubelet's checkpoint lacks.
    pub(super) forgotten: BTreeSet<AllocId>,
    /// Grants of pods without a running process at the last pass, under the same kubelet; with the
    /// time since the boot when that was first seen.
    pub(super) ended: BTreeMap<AllocId, Duration>,
    /// Grants that the kubelet's checkpoint lacked while no process of their pod ran: none runs
    /// with them since, whichever kubelet starts the pod.
    pub(super) lacked: BTreeSet<AllocId>,
    pub(super) absent: BTreeMap<AllocId, Absence>,
    pub(super) unbound: BTreeMap<AllocId, Unbound>,
    pub(super) claims: ClaimWatch,
}

/// A pod that is missing in the kubelet's reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Absence {
    pub(super) since: Duration,
    pub(super) reports: u32,
}

/// A grant that is in no checkpoint yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unbound {
    pub(super) since: Duration,
    /// The time of the latest checkpoint at that moment. A later one has another time, even if the
    /// wall clock jumps.
    pub(super) checkpoint: Option<Timestamp>,
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

    /// How long no process of a grant's pod has run. `now` is the time since the boot.
    pub(super) fn ended_for(&self, alloc_id: &AllocId, now: Duration) -> Duration {
        self.ended.get(alloc_id).map(|since| now.saturating_sub(*since)).unwrap_or_default()
    }

    /// How many reports in succession lacked the pod of a grant, and for how long.
    pub(super) fn absence(&self, alloc_id: &AllocId, now: Duration) -> (u32, Duration) {
        self.absent
            .get(alloc_id)
            .map(|absence| (absence.reports, now.saturating_sub(absence.since)))
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
    pub(super) fn note_known(&mut self, observation: &Observation) {
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

    pub(super) fn retain_live(&mut self, ledger: &Ledger) {
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
