//! The claims that may have ended without an Unprepare, and when the API server is asked about
//! each; pure.
//!
//! A claim is suspect when the cgroups of all its pods are absent. That also happens around the
//! start of a pod and after its end, so the question waits. After a start of this process or of the
//! kubelet it does not: an Unprepare may have been missed.

use crate::domain::{ClaimRef, KubeletGeneration};
use crate::ledger::core::ABSENCE_MIN;
use std::collections::BTreeMap;
use std::time::Duration;

/// How long the cgroups of a claim's pods are absent before the API server is asked. The kubelet
/// unprepares a claim within this time after the end of its last pod.
const ABSENT_MIN: Duration = Duration::from_secs(60);
/// Between two questions about a claim that is allocated, or after no answer.
const AGAIN_AFTER: Duration = Duration::from_secs(60);
/// Between two questions about any claims.
const PAUSE: Duration = Duration::from_secs(1);

/// A claim and its pods' cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) claim: ClaimRef,
    /// Whether the cgroups of all its pods are absent.
    pub(super) is_removed: bool,
}

/// The suspect claims.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    /// By UID, with the time of the next question.
    claims: BTreeMap<String, (ClaimRef, Duration)>,
    kubelet: Option<KubeletGeneration>,
    has_begun: bool,
    asked_at: Option<Duration>,
}

impl Suspects {
    /// Notes what is seen of all live claims.
    pub(super) fn observe(
        &mut self,
        seen: &[Seen],
        kubelet: Option<KubeletGeneration>,
        now: Duration,
    ) {
        let is_new_kubelet = kubelet.is_some() && kubelet != self.kubelet;
        let is_start = !std::mem::replace(&mut self.has_begun, true) || is_new_kubelet;
        self.kubelet = kubelet.or(self.kubelet);
        let mut before = std::mem::take(&mut self.claims);
        for Seen { claim, is_removed } in seen {
            if !is_removed {
                continue;
            }
            let known = before.remove(&claim.uid).map(|(_, next)| next);
            let next = known.unwrap_or(now + ABSENT_MIN);
            let next = if is_start { next.min(now) } else { next };
            self.claims.insert(claim.uid.clone(), (claim.clone(), next));
        }
    }

    /// The claim to ask about now. The API server knows claims by their names.
    pub(super) fn due(&self, now: Duration) -> Option<&ClaimRef> {
        self.next().filter(|(_, next)| *next <= now).map(|(claim, _)| claim)
    }

    /// When the next claim is due.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        self.next().map(|(_, next)| next)
    }

    /// Notes a question and its answer: whether nothing of this node is allocated to the claim;
    /// `None` without an answer.
    pub(super) fn note_answer(&mut self, uid: &str, is_gone: Option<bool>, now: Duration) {
        self.asked_at = Some(now);
        if let Some((_, next)) = self.claims.get_mut(uid) {
            *next = now + if is_gone == Some(true) { ABSENCE_MIN } else { AGAIN_AFTER };
        }
    }

    pub(super) fn has(&self, uid: &str) -> bool {
        self.claims.contains_key(uid)
    }

    fn next(&self) -> Option<(&ClaimRef, Duration)> {
        let earliest = self.asked_at.map(|at| at + PAUSE).unwrap_or_default();
        let named = self.claims.values().filter(|(claim, _)| claim.is_named());
        named.min_by_key(|(_, next)| *next).map(|(claim, next)| (claim, (*next).max(earliest)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(uid: &str, is_removed: bool) -> Seen {
        let claim = ClaimRef { uid: uid.into(), namespace: "ml".into(), name: format!("of-{uid}") };
        Seen { claim, is_removed }
    }

    fn kubelet(inode: u64) -> Option<KubeletGeneration> {
        Some(KubeletGeneration { inode, made_ns: 0 })
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(1000 + seconds)
    }

    /// The UID of the claim that is due.
    fn due(suspects: &Suspects, seconds: u64) -> Option<&str> {
        suspects.due(at(seconds)).map(|claim| claim.uid.as_str())
    }

    #[test]
    fn a_claim_without_pods_is_asked_about_after_a_minute_and_at_once_after_a_start() {
        let mut suspects = Suspects::default();
        suspects.observe(&[seen("old", true), seen("runs", false)], None, at(0));
        assert_eq!(due(&suspects, 0), Some("old"), "this process has just started");
        suspects.note_answer("old", Some(false), at(0));
        suspects.observe(&[seen("old", true), seen("runs", true)], None, at(10));
        assert_eq!((due(&suspects, 59), due(&suspects, 60)), (None, Some("old")));
        suspects.note_answer("old", Some(false), at(60));
        assert_eq!((due(&suspects, 69), due(&suspects, 70)), (None, Some("runs")));

        // A kubelet that was absent before is a new one too.
        suspects.observe(&[seen("old", true), seen("runs", true)], kubelet(1), at(61));
        assert_eq!(due(&suspects, 61), Some("old"));
        suspects.note_answer("old", Some(false), at(61));
        suspects.note_answer("runs", Some(false), at(62));
        suspects.observe(&[seen("old", true), seen("runs", true)], None, at(70));
        suspects.observe(&[seen("old", true), seen("runs", true)], kubelet(1), at(71));
        assert_eq!(due(&suspects, 71), None, "it is the same kubelet");
        suspects.observe(&[seen("old", true), seen("runs", true)], kubelet(2), at(72));
        assert_eq!(due(&suspects, 72), Some("old"));
    }

    #[test]
    fn the_answer_that_a_claim_is_gone_is_checked_again_soon() {
        let mut suspects = Suspects::default();
        suspects.observe(&[seen("a", true)], None, at(0));
        suspects.note_answer("a", Some(true), at(0));
        assert_eq!(suspects.wake_at(), Some(at(0) + ABSENCE_MIN));
        suspects.note_answer("a", None, at(5));
        assert_eq!(suspects.wake_at(), Some(at(65)), "no answer is not asked for all the time");
    }

    #[test]
    fn one_question_a_second_at_most() {
        let mut suspects = Suspects::default();
        let all: Vec<Seen> = ["a", "b", "c"].map(|uid| seen(uid, true)).to_vec();
        suspects.observe(&all, None, at(0));
        let mut asked = Vec::new();
        for tenth in 0..20 {
            let now = at(0) + Duration::from_millis(tenth * 100);
            if let Some(claim) = suspects.due(now).cloned() {
                suspects.note_answer(&claim.uid, Some(false), now);
                asked.push((claim.uid, tenth));
            }
        }
        assert_eq!(asked, [("a".to_owned(), 0), ("b".to_owned(), 10)]);
    }

    #[test]
    fn a_claim_with_a_pod_or_without_a_name_is_never_asked_about() {
        let mut suspects = Suspects::default();
        let nameless = ClaimRef { uid: "u".into(), namespace: String::new(), name: String::new() };
        let seen_nameless = Seen { claim: nameless, is_removed: true };
        suspects.observe(&[seen("a", true), seen_nameless.clone()], None, at(0));
        suspects.observe(&[seen("a", false), seen_nameless], None, at(1));
        assert_eq!((due(&suspects, 900), suspects.wake_at()), (None, None));
        assert!(suspects.has("u") && !suspects.has("a"));
        // It begins again.
        suspects.observe(&[seen("a", true)], None, at(100));
        assert_eq!((due(&suspects, 159), due(&suspects, 160)), (None, Some("a")));
    }
}
