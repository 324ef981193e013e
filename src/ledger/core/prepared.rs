//! Ends of claims without an Unprepare, or after one that came too early, from observations.
//!
//! A claim is never released by the evidence about device plugins: neither their checkpoint nor
//! their listings know it. Its proofs are:
//!
//! - `unprepared`: the kubelet has unprepared it, and no process of its pods runs.
//! - `claim_gone`: the API server has answered twice, [`ABSENCE_MIN`] apart, that nothing is
//!   allocated to it any longer. The kubelet's file, read after the last Prepare, lacks it; where
//!   the file cannot be seen, as in a DaemonSet, the listing of a settled kubelet lacks all of its
//!   pods. The cgroups of its pods are absent.
//! - `never_prepared`: nothing was answered for it since the start of this process. The file of a
//!   settled kubelet has lacked it for [`NEVER_PREPARED_MIN`]. The cgroups of its pods are absent.
//!
//! `reallocated` is decided at the next Prepare ([`super::claims`]). What cannot be read proves
//! nothing, and starts a proof again. A reboot proves nothing: the kubelet prepares the claim again
//! for the pod's new sandbox.
//!
//! The kubelet writes its entry before it asks to prepare a claim, and keeps it until the claim is
//! unprepared. It starts no container of a claim without an entry. So an entry is missing after a
//! Prepare only if the kubelet lost its file, if the ledger lost an Unprepare, or if the kubelet
//! has cancelled the Prepare and unprepared the claim before the record was written. The file
//! itself may be older than the record: the kubelet writes it again only for another claim.

use super::Ledger;
use super::claim_end::{UNPREPARED, has_ended, lacking, limit, nameless, released};
use super::evidence::{ABSENCE_MIN, Evidence};
use crate::domain::{
    CgroupState, ClaimEvidence, Entry, Grant, GrantState, KubeletClaims, Moment, Observation,
    PodName, PodRef, Safeguard, Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// `released_by` of a claim that the API server and the kubelet no longer have.
pub const CLAIM_GONE: &str = "claim_gone";
/// `released_by` of a claim whose Prepare was never answered.
pub const NEVER_PREPARED: &str = "never_prepared";
/// How long the kubelet's file must lack a claim that was never answered.
pub const NEVER_PREPARED_MIN: Duration = Duration::from_secs(60);

/// Observations about claims. Not durable: after a restart a proof starts again.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ClaimWatch {
    /// When a claim was last in an answer, since the boot. Claims are named by their UIDs.
    answered: BTreeMap<String, Duration>,
    /// When the API server first answered that it has no such allocation, since the boot.
    gone: BTreeMap<String, Duration>,
    /// Since when the kubelet's file has lacked a claim that was never answered.
    lacking: BTreeMap<String, Duration>,
}

impl ClaimWatch {
    /// When each wait began, since the boot.
    pub(super) fn waiting_since(&self) -> impl Iterator<Item = Duration> {
        self.gone.values().chain(self.lacking.values()).copied()
    }

    pub(super) fn note_answered(&mut self, uid: &str, now: Duration) {
        self.answered.insert(uid.to_owned(), now);
        self.gone.remove(uid);
        self.lacking.remove(uid);
    }

    pub(super) fn retain_live(&mut self, ledger: &Ledger) {
        let live: BTreeSet<&str> = ledger
            .grants()
            .filter_map(|grant| Some(grant.claim.as_ref()?.claim.uid.as_str()))
            .collect();
        for times in [&mut self.answered, &mut self.gone, &mut self.lacking] {
            times.retain(|uid, _| live.contains(uid.as_str()));
        }
    }

    /// Whether the API server has answered twice that it has no such allocation. `may_be` is
    /// whether all other evidence agrees.
    fn is_gone(&mut self, uid: &str, claims: &ClaimEvidence, may_be: bool) -> bool {
        let answered = self.answered.get(uid);
        let look = claims.api.get(uid).filter(|look| {
            may_be && look.is_gone && answered.is_none_or(|answered| *answered < look.at)
        });
        let Some(look) = look else {
            self.gone.remove(uid);
            return false;
        };
        let since = *self.gone.entry(uid.to_owned()).or_insert(look.at);
        look.at.saturating_sub(since) >= ABSENCE_MIN
    }

    /// Whether the kubelet's file lacks a claim, and was read after the last Prepare of it began.
    /// Times of another process, and of an actor that has failed, are in the records.
    fn is_lacking(&self, uid: &str, file: &KubeletClaims, recorded_at: Timestamp) -> bool {
        let answered = self.answered.get(uid);
        let is_newer = answered.is_none_or(|answered| *answered < file.read_at.boot);
        is_newer && file.read_at.wall > recorded_at && !file.claims.contains_key(uid)
    }

    /// Whether the kubelet's file has lacked an unanswered claim for long enough.
    fn was_never_prepared(&mut self, uid: &str, now: Duration, may_be: bool) -> bool {
        if !may_be || self.answered.contains_key(uid) {
            self.lacking.remove(uid);
            return false;
        }
        let since = *self.lacking.entry(uid.to_owned()).or_insert(now);
        now.saturating_sub(since) >= NEVER_PREPARED_MIN
    }
}

/// Decides which claims end, and fills in pods and their names. All grants of a claim are one
/// holder: they end together, although a torn write may have left different pods in them.
pub(super) fn prepared(
    watch: &mut ClaimWatch,
    ledger: &Ledger,
    evidence: &Evidence<'_>,
    observation: &Observation,
    now: Moment,
) -> Vec<Entry> {
    let mut claims: BTreeMap<&str, Vec<&Grant>> = BTreeMap::new();
    for grant in ledger.grants() {
        if let (Some(hold), GrantState::Prepared { .. }) = (&grant.claim, &grant.state) {
            claims.entry(&hold.claim.uid).or_default().push(grant);
        }
    }
    let mut entries = Vec::new();
    for (uid, grants) in claims {
        let listed = listed(&observation.claims, uid);
        // The cgroups of pods that were not known are in the next observation.
        let is_known = grants.iter().all(|grant| lacking(grant, &listed).is_empty());
        let proof = is_known.then(|| proof(watch, uid, &grants, evidence, observation, now));
        let proof = proof.flatten();
        entries.extend(grants.into_iter().filter_map(|grant| {
            let state = match proof {
                Some(proof) => released(grant, proof, now.wall),
                None => completed(grant, &listed, observation)?,
            };
            Some(Entry::Moved { alloc_id: grant.alloc_id.clone(), state })
        }));
    }
    entries
}

/// The pods of a claim by all evidence, by their UIDs. The API server has the names too.
fn listed(claims: &ClaimEvidence, uid: &str) -> BTreeMap<String, PodRef> {
    let reserved = claims.api.get(uid).into_iter().flat_map(|look| &look.pods);
    let mut listed: BTreeMap<String, PodRef> =
        reserved.map(|pod| (pod.uid.clone(), pod.clone())).collect();
    let entry = claims.kubelet.as_ref().and_then(|file| file.claims.get(uid));
    for pod in entry.into_iter().flat_map(|entry| &entry.pods) {
        listed.entry(pod.clone()).or_insert_with_key(|uid| nameless(uid));
    }
    listed
}

/// The proof that a claim has ended, if it is complete.
fn proof(
    watch: &mut ClaimWatch,
    uid: &str,
    grants: &[&Grant],
    evidence: &Evidence<'_>,
    observation: &Observation,
    now: Moment,
) -> Option<&'static str> {
    let cgroup = |uid: &str| evidence.cgroup(uid);
    let is_unprepared =
        |grant: &&Grant| matches!(grant.state, GrantState::Prepared { unprepared_at: Some(_), .. });
    let is_over =
        grants.iter().all(is_unprepared) && grants.iter().all(|grant| has_ended(grant, &cgroup));
    if is_over && Safeguard::ClaimEnd.is_on() {
        return Some(UNPREPARED);
    }
    let recorded_at = grants.iter().filter_map(|grant| match grant.state {
        GrantState::Prepared { prepared_at, .. } => Some(grant.granted_at.max(prepared_at)),
        _ => None,
    });
    let file = observation.claims.kubelet.as_ref();
    let lacks = file
        .zip(recorded_at.max())
        .is_some_and(|(file, recorded_at)| watch.is_lacking(uid, file, recorded_at));
    let pods = || grants.iter().flat_map(|grant| grant.pods());
    let are_removed = pods().all(|pod| cgroup(&pod.uid) == CgroupState::Absent);
    // A grant without pods was restored. A listing shows nothing about it.
    let are_unlisted = || pods().next().is_some() && pods().all(|pod| evidence.is_unlisted(pod));
    let may_be = are_removed && if file.is_some() { lacks } else { are_unlisted() };
    if watch.is_gone(uid, &observation.claims, may_be) {
        return Some(CLAIM_GONE);
    }
    let may_be = lacks && are_removed && observation.kubelet_settled;
    watch.was_never_prepared(uid, now.boot, may_be).then_some(NEVER_PREPARED)
}

/// The state of a grant with the pods that the kubelet has added, and with the names of its pods;
/// `None` if there is nothing new.
fn completed(
    grant: &Grant,
    listed: &BTreeMap<String, PodRef>,
    observation: &Observation,
) -> Option<GrantState> {
    let mut state = grant.state.clone();
    let GrantState::Prepared { pods, .. } = &mut state else { return None };
    pods.extend(lacking(grant, listed));
    limit(pods, &|uid| observation.cgroups.get(uid).copied().unwrap_or_default());
    for pod in pods.iter_mut().filter(|pod| pod.name.is_none()) {
        if let Some(PodName { namespace, name }) = observation.names.get(&pod.uid) {
            (pod.namespace, pod.name) = (Some(namespace.clone()), Some(name.clone()));
        }
    }
    (state != grant.state).then_some(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_read_at_the_time_of_a_prepare_proves_nothing() {
        let read_at = |boot, wall| KubeletClaims {
            read_at: Moment { boot: Duration::from_secs(boot), wall: Timestamp(wall) },
            ..KubeletClaims::default()
        };
        let recorded_at = Timestamp(50);
        let mut watch = ClaimWatch::default();
        assert!(watch.is_lacking("c1", &read_at(9, 51), recorded_at));
        assert!(!watch.is_lacking("c1", &read_at(9, 50), recorded_at));
        watch.note_answered("c1", Duration::from_secs(9));
        assert!(!watch.is_lacking("c1", &read_at(9, 51), recorded_at));
        assert!(watch.is_lacking("c1", &read_at(10, 51), recorded_at));
    }
}
