//! Compares the kubelet's list and answers with ours. Pure.
//!
//! The end of a stream shows that the kubelet has dropped a resource. In two cases the kubelet
//! drops it while our streams stay open: a late goroutine stops the endpoint that came after it,
//! and another plugin registers the resource after us. Both can be read:
//!
//! | where | what it shows |
//! | --- | --- |
//! | `GetAllocatableResources`: healthy ids | another list than ours: see (1) |
//! | `kubelet_internal_checkpoint`: containers' answers | an answer without an alloc-id: see (2) |
//!
//! (1) The endpoint was stopped (then the list is empty), or another plugin's list came after ours.
//! (2) Another plugin gave the answer, with any list.
//!
//! A list takes time to arrive. So a difference is read again, and counts only if it is still
//! there. An empty list in the kubelet also counts when the lists agree now, if ours has changed
//! since: any stream of ours carries a new list to the kubelet, even that of a stopped endpoint. An
//! answer counts only if it was not there at the first pass: a node that comes from another plugin
//! has many of them.
//!
//! The passes: every second while a lost stream may have consequences, right after the kubelet
//! wrote its checkpoint (as it does for every list and every allocation), and once a minute
//! otherwise. The last one finds another plugin with the same ids that leaves: the kubelet then
//! stops the resource, and writes nothing.

use crate::domain::{Checkpoint, CheckpointEntry, DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// The interval of passes while there is a reason.
pub(crate) const EVERY: Duration = Duration::from_secs(1);
/// The delay of the second pass, which confirms a difference.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);
/// The shortest time between two passes: the kubelet writes its checkpoint several times for each
/// pod.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// The interval of passes without a reason.
const IDLE_EVERY: Duration = Duration::from_secs(60);
/// How often a difference leads to a Register that does not help. Each Register leaves a stream
/// open in the kubelet, and some differences are permanent, such as a list that is too long for the
/// kubelet.
const TIMES_MAX: u32 = 6;

/// The healthy ids of each resource.
pub(crate) type Healthy = BTreeMap<ResourceName, BTreeSet<DeviceId>>;

/// An answer of another plugin, from the kubelet's checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Foreign {
    pub(crate) resource: ResourceName,
    pub(crate) pod_uid: String,
    pub(crate) container: String,
}

impl Foreign {
    /// The answers of other plugins in a checkpoint.
    pub(crate) fn of(checkpoint: &Checkpoint) -> BTreeSet<Foreign> {
        let foreign = checkpoint.entries().iter().filter(|entry| entry.alloc_id.is_none());
        let of_entry = |entry: &CheckpointEntry| Foreign {
            resource: entry.resource.clone(),
            pod_uid: entry.pod_uid.clone(),
            container: entry.container.clone(),
        };
        foreign.map(of_entry).collect()
    }
}

/// The result of one pass. A part that could not be read is `None`, and has no consequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) healthy: Option<Healthy>,
    pub(crate) foreign: Option<BTreeSet<Foreign>>,
}

/// Why the kubelet does not have the resource from us, although a stream is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Disagreement {
    /// The kubelet has another list.
    List {
        /// Healthy ids of ours that the kubelet does not have.
        missing: usize,
        /// Healthy ids of the kubelet that are not ours.
        unknown: usize,
    },
    /// Another plugin answered for a container.
    Answer(Foreign),
}

impl Disagreement {
    /// The value of the metric's label.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Disagreement::List { .. } => "list",
            Disagreement::Answer(_) => "answer",
        }
    }
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Disagreement::List { missing: 0, unknown: 0 } => {
                write!(f, "the kubelet briefly had another list than ours")
            }
            Disagreement::List { missing, unknown: 0 } => {
                write!(
                    f,
                    "the kubelet's list lacks {missing} of our healthy devices, although it has opened our stream"
                )
            }
            Disagreement::List { missing, unknown } => write!(
                f,
                "the kubelet's list differs from ours ({missing} of our healthy devices are missing, {unknown} are not ours): \
                 another plugin seems to serve this resource; stop that plugin, or rename one of the two resources"
            ),
            Disagreement::Answer(Foreign { pod_uid, container, .. }) => write!(
                f,
                "another plugin has answered for container `{container}` of the pod with UID {pod_uid}; stop that plugin, or \
                 rename one of the two resources; this is shown until the kubelet has forgotten the pod"
            ),
        }
    }
}

/// A list that differs.
#[derive(Debug)]
struct Differing {
    /// Our list when the difference was seen.
    ours: BTreeSet<DeviceId>,
    /// Whether the kubelet's list was empty then.
    was_empty: bool,
    /// When the difference counts, if it is still there.
    due: Duration,
    /// How often it has counted without an agreement in between.
    times: u32,
}

/// Decides when to read the kubelet's state, and what follows from it.
#[derive(Debug)]
pub(crate) struct Audit {
    due: Duration,
    begun_at: Duration,
    doubt_until: Duration,
    differing: BTreeMap<ResourceName, Differing>,
    /// The other plugins' answers of the last pass.
    known: Option<BTreeSet<Foreign>>,
    /// The last difference of each resource's list, until the lists agree.
    found: BTreeMap<ResourceName, Disagreement>,
    /// The answers that have counted, until the kubelet no longer has them.
    answers: BTreeSet<Foreign>,
}

impl Audit {
    pub(crate) fn new(now: Duration) -> Self {
        Audit {
            due: now + EVERY,
            begun_at: now,
            doubt_until: Duration::ZERO,
            differing: BTreeMap::new(),
            known: None,
            found: BTreeMap::new(),
            answers: BTreeSet::new(),
        }
    }

    /// When the next pass is due.
    pub(crate) fn next_deadline(&self) -> Duration {
        self.due
    }

    /// The present disagreement with the kubelet about this resource. An answer of another plugin
    /// explains a list of another plugin, and names the pod.
    pub(crate) fn disagreement(&self, resource: &ResourceName) -> Option<Disagreement> {
        let answer = self.answers.iter().find(|foreign| foreign.resource == *resource);
        answer.cloned().map(Disagreement::Answer).or_else(|| self.found.get(resource).cloned())
    }

    /// The kubelet was restarted, and has no state of before.
    pub(crate) fn new_kubelet(&mut self) {
        self.differing.clear();
        self.found.clear();
        self.answers.clear();
        // The former losses concerned the former kubelet.
        self.doubt_until = Duration::ZERO;
    }

    /// The kubelet has written its checkpoint, as it does for every list.
    pub(crate) fn checkpoint_written(&mut self, now: Duration) {
        self.due = self.due.min(now.max(self.begun_at + PAUSE_MIN));
    }

    /// A Register was begun. Until `doubt_until` a former loss may have consequences.
    pub(crate) fn registered(&mut self, now: Duration, doubt_until: Option<Duration>) {
        self.doubt_until = self.doubt_until.max(doubt_until.unwrap_or_default());
        self.due = self.due.min(now + EVERY);
    }

    /// A pass has begun. Its result comes later, or never.
    pub(crate) fn begin(&mut self, now: Duration) {
        self.begun_at = now;
        self.due = now + if now < self.doubt_until { EVERY } else { IDLE_EVERY };
    }

    /// Evaluates a pass. `ours` has the resources whose stream is open; the result has those among
    /// them that the kubelet does not have from us. An answer without an alloc-id counts only for a
    /// resource with `keeps_annotations`; for others it is only remembered.
    pub(crate) fn compare(
        &mut self,
        ours: &Healthy,
        seen: Seen,
        keeps_alloc_id: impl Fn(&ResourceName) -> bool,
        now: Duration,
    ) -> BTreeMap<ResourceName, Disagreement> {
        let mut disagreements = BTreeMap::new();
        match seen.healthy {
            Some(theirs) => self.compare_lists(ours, &theirs, now, &mut disagreements),
            None => self.differing.clear(),
        }
        self.found.extend(disagreements.clone());
        if let Some(foreign) = seen.foreign {
            self.answers.retain(|answer| foreign.contains(answer));
            if let Some(known) = &self.known {
                let new = foreign.difference(known).filter(|foreign| {
                    ours.contains_key(&foreign.resource) && keeps_alloc_id(&foreign.resource)
                });
                for foreign in new {
                    self.answers.insert(foreign.clone());
                    let answer = Disagreement::Answer(foreign.clone());
                    disagreements.insert(foreign.resource.clone(), answer);
                }
            }
            self.known = Some(foreign);
        }
        disagreements
    }

    fn compare_lists(
        &mut self,
        ours: &Healthy,
        theirs: &Healthy,
        now: Duration,
        counted: &mut BTreeMap<ResourceName, Disagreement>,
    ) {
        let none = BTreeSet::new();
        self.differing.retain(|resource, _| ours.contains_key(resource));
        for (resource, ours) in ours {
            let theirs = theirs.get(resource).unwrap_or(&none);
            let hides = |differing: &Differing| {
                differing.times < TIMES_MAX
                    && differing.was_empty
                    && !ours.is_empty()
                    && differing.ours != *ours
            };
            if ours == theirs && !self.differing.get(resource).is_some_and(hides) {
                self.differing.remove(resource);
                self.found.remove(resource);
                continue;
            }
            let was_empty = theirs.is_empty();
            let first =
                || Differing { ours: ours.clone(), was_empty, due: now + CONFIRM_AFTER, times: 0 };
            let differing = self.differing.entry(resource.clone()).or_insert_with(first);
            if ours != theirs && differing.ours != *ours && !differing.was_empty {
                // The list of a device that comes and goes is always in flight, so the wait starts
                // again.
                *differing = Differing { times: differing.times, ..first() };
            } else if differing.due <= now && differing.times < TIMES_MAX {
                // The first Register should have helped. The pauses before the next ones grow.
                differing.due = now + EVERY * 2_u32.saturating_pow(differing.times);
                differing.times += 1;
                let missing = ours.difference(theirs).count();
                counted.insert(
                    resource.clone(),
                    Disagreement::List { missing, unknown: theirs.difference(ours).count() },
                );
                (differing.ours, differing.was_empty) = (ours.clone(), was_empty);
            }
            if differing.times < TIMES_MAX {
                self.due = self.due.min(differing.due);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{AllocId, Timestamp};
    use proptest::prelude::*;

    const LIST: Disagreement = Disagreement::List { missing: 1, unknown: 0 };

    fn gpu() -> ResourceName {
        "example.com/gpu".parse().unwrap()
    }

    fn healthy(ids: &[&str]) -> Healthy {
        [(gpu(), ids.iter().map(|id| DeviceId::new(*id)).collect())].into()
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn lists(ids: &[&str]) -> Seen {
        Seen { healthy: Some(healthy(ids)), foreign: None }
    }

    fn answered(uids: &[&str]) -> Seen {
        let foreign = |uid: &&str| Foreign {
            resource: gpu(),
            pod_uid: (*uid).into(),
            container: "main".into(),
        };
        Seen { healthy: None, foreign: Some(uids.iter().map(foreign).collect()) }
    }

    /// What was found wrong with the resource.
    fn found(audit: &mut Audit, ours: &[&str], seen: Seen, at: Duration) -> Option<Disagreement> {
        audit.begin(at);
        audit.compare(&healthy(ours), seen, |_| true, at).remove(&gpu())
    }

    #[test]
    fn an_answer_without_an_alloc_id_is_another_plugins() {
        let entry = |uid: &str, alloc_id| CheckpointEntry {
            pod_uid: uid.into(),
            container: "main".into(),
            resource: gpu(),
            device_ids: BTreeSet::from([DeviceId::new("GPU-0")]),
            alloc_id,
        };
        let entries = vec![entry("u1", Some(AllocId::new("a-1"))), entry("u2", None)];
        let found = Foreign::of(&Checkpoint::new(entries, Timestamp(1)));
        assert_eq!(Some(found), answered(&["u2"]).foreign);
        let answer = answered(&["u2"]).foreign.unwrap().pop_first().unwrap();
        assert_eq!([LIST.kind(), Disagreement::Answer(answer).kind()], ["list", "answer"]);
    }

    /// Each Register leaves a stream open in the kubelet.
    #[test]
    fn a_list_that_changes_and_always_differs_counts_a_few_times() {
        let mut audit = Audit::new(ms(0));
        let mut counted = 0;
        for n in 1..100 {
            let ours = if n % 2 == 0 { ["a"] } else { ["b"] };
            for at in [ms(n * 1000), ms(n * 1000 + 300)] {
                counted += u32::from(found(&mut audit, &ours, lists(&["x"]), at).is_some());
            }
        }
        assert_eq!(counted, TIMES_MAX);
    }

    #[test]
    fn a_write_of_the_checkpoint_is_read_soon_and_not_more_often_than_that() {
        let mut audit = Audit::new(ms(0));
        audit.begin(ms(10_000));
        audit.checkpoint_written(ms(10_100));
        assert_eq!(audit.next_deadline(), ms(10_250));
        audit.begin(ms(10_250));
        audit.checkpoint_written(ms(20_000));
        assert_eq!(audit.next_deadline(), ms(20_000));
    }

    #[test]
    fn a_list_that_differs_twice_counts() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(
            found(&mut audit, &["a", "b"], lists(&["a"]), ms(1_000)),
            None,
            "it may be in flight"
        );
        assert_eq!(audit.next_deadline(), ms(1_200));
        assert_eq!(found(&mut audit, &["a", "b"], lists(&["a"]), ms(1_200)), Some(LIST));
        assert_eq!(
            found(&mut audit, &["a", "b"], lists(&["a"]), ms(1_700)),
            None,
            "the Register that followed is under way"
        );
        assert_eq!(audit.next_deadline(), ms(2_200));
    }

    #[test]
    fn a_resource_that_the_kubelet_does_not_know_differs() {
        let mut audit = Audit::new(ms(0));
        let nothing = || Seen { healthy: Some(Healthy::new()), foreign: None };
        assert_eq!(found(&mut audit, &["a"], nothing(), ms(1_000)), None);
        assert_eq!(found(&mut audit, &["a"], nothing(), ms(1_200)), Some(LIST));
        assert_eq!(found(&mut audit, &[], nothing(), ms(1_300)), None, "both lists are empty");
    }

    #[test]
    fn a_list_that_was_empty_and_agrees_only_with_another_one_of_ours_counts_too() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a", "b"], lists(&[]), ms(1_000)), None);
        assert_eq!(
            found(&mut audit, &["a", "b"], lists(&["a", "b"]), ms(1_200)),
            None,
            "it was in flight"
        );
        assert_eq!(found(&mut audit, &["a", "b"], lists(&[]), ms(1_400)), None);
        let counted = Disagreement::List { missing: 0, unknown: 0 };
        assert_eq!(
            found(&mut audit, &["a"], lists(&["a"]), ms(1_600)),
            Some(counted),
            "it came over a stream of a stopped endpoint"
        );
        assert_eq!(found(&mut audit, &["a"], lists(&["a"]), ms(1_800)), None);
        assert!(audit.differing.is_empty());
    }

    #[test]
    fn a_device_that_comes_and_goes_is_no_disagreement() {
        let mut audit = Audit::new(ms(0));
        for n in 0..100_u64 {
            let (ours, theirs) = if n % 2 == 0 {
                (&["a", "b"][..], &["a"][..])
            } else {
                (&["a"][..], &["a", "b"][..])
            };
            assert_eq!(found(&mut audit, ours, lists(theirs), ms(1_000 + 250 * n)), None);
        }
    }

    #[test]
    fn the_pauses_between_registers_that_do_not_help_grow() {
        let mut audit = Audit::new(ms(0));
        let mut counted = Vec::new();
        let mut now = ms(1_000);
        while now < ms(600_000) {
            counted.extend(found(&mut audit, &["a"], lists(&["b"]), now).map(|_| now));
            now = audit.next_deadline();
        }
        let waits: Vec<u64> =
            counted.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16]);
        assert!(audit.disagreement(&gpu()).is_some(), "it is reported as long as it exists");
        assert_eq!(found(&mut audit, &["a"], lists(&["a"]), now), None);
        assert!(
            audit.disagreement(&gpu()).is_none() && audit.differing.is_empty(),
            "the next difference is a new one"
        );
    }

    #[test]
    fn a_pass_without_a_list_has_no_consequence() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a"], lists(&["b"]), ms(1_000)), None);
        assert_eq!(found(&mut audit, &["a"], Seen::default(), ms(1_200)), None);
        assert_eq!(found(&mut audit, &["a"], lists(&["b"]), ms(1_400)), None, "twice in a row");
    }

    #[test]
    fn a_new_answer_of_another_plugin_counts_once_and_an_old_one_does_not() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a"], answered(&["old"]), ms(1_000)), None);
        let new = found(&mut audit, &["a"], answered(&["old", "new"]), ms(2_000));
        assert!(
            matches!(&new, Some(Disagreement::Answer(foreign)) if foreign.pod_uid == "new"),
            "{new:?}"
        );
        assert!(new.unwrap().to_string().contains("container `main` of the pod with UID new"));
        assert_eq!(found(&mut audit, &["a"], answered(&["old", "new"]), ms(3_000)), None);
        assert_eq!(
            found(&mut audit, &["a"], Seen::default(), ms(4_000)),
            None,
            "an unreadable checkpoint changes nothing"
        );
        assert!(audit.disagreement(&gpu()).is_some());
        assert_eq!(found(&mut audit, &["a"], answered(&["new"]), ms(5_000)), None);
        let newer = found(&mut audit, &["a"], answered(&["new", "newer"]), ms(6_000));
        assert!(newer.is_some());
        assert_eq!(found(&mut audit, &["a"], answered(&["new"]), ms(7_000)), None);
        let left = audit.disagreement(&gpu());
        assert!(
            matches!(&left, Some(Disagreement::Answer(foreign)) if foreign.pod_uid == "new"),
            "{left:?}"
        );
        assert_eq!(found(&mut audit, &["a"], lists(&["a"]), ms(8_000)), None);
        assert!(audit.disagreement(&gpu()).is_some(), "the checkpoint was not read");
        assert_eq!(found(&mut audit, &["a"], answered(&[]), ms(9_000)), None);
        assert_eq!(audit.disagreement(&gpu()), None, "the kubelet has none of them any longer");
    }

    #[test]
    fn an_answer_from_before_the_registration_does_not_count() {
        let mut audit = Audit::new(ms(0));
        assert!(
            audit.compare(&Healthy::new(), answered(&["old"]), |_| false, ms(1_000)).is_empty(),
            "not registered yet"
        );
        assert_eq!(found(&mut audit, &["a"], answered(&["old"]), ms(2_000)), None);
        assert!(
            audit
                .compare(&healthy(&["a"]), answered(&["old", "new"]), |_| false, ms(3_000))
                .is_empty(),
            "no alloc-ids here"
        );
    }

    #[test]
    fn passes_are_frequent_only_for_a_reason() {
        let mut audit = Audit::new(ms(0));
        let passes = |audit: &mut Audit, until: Duration| {
            let mut passes = 0;
            while audit.next_deadline() <= until {
                let now = audit.next_deadline();
                assert_eq!(found(audit, &["a"], lists(&["a"]), now), None);
                passes += 1;
            }
            passes
        };
        assert_eq!(passes(&mut audit, ms(60_999)), 1, "a start is a reason");
        assert_eq!(passes(&mut audit, ms(61_000)), 1);
        audit.checkpoint_written(ms(65_000));
        audit.checkpoint_written(ms(65_001));
        assert_eq!(passes(&mut audit, ms(65_000)), 1);
        (1..=1000).for_each(|n| audit.checkpoint_written(ms(65_000 + n)));
        assert_eq!(passes(&mut audit, ms(65_300)), 1, "not for every write");
        audit.registered(ms(70_000), None);
        assert_eq!(
            passes(&mut audit, ms(79_000)),
            1,
            "a Register may have failed without a signal"
        );
        audit.registered(ms(79_000), Some(ms(91_000)));
        assert_eq!(passes(&mut audit, ms(100_000)), 12);
        audit.registered(ms(100_000), Some(ms(112_000)));
        audit.new_kubelet();
        assert_eq!(passes(&mut audit, ms(110_000)), 1, "its streams ended with the former kubelet");
    }

    proptest! {
        /// After any history, a list that agrees has no consequence, and one that differs leads to
        /// a Register in time.
        #[test]
        fn after_any_history(history in proptest::collection::vec((0..4_usize, 0..3_usize, 0..2_000_u64), 0..40)) {
            let all = [&["a"][..], &["b"], &["a", "b"], &[]];
            let mut audit = Audit::new(ms(0));
            let mut now = ms(0);
            for (theirs, ours, wait) in history {
                now += ms(wait);
                found(&mut audit, all[ours], lists(all[theirs]), now);
            }
            for _ in 0..2 {
                now += ms(60_000);
                found(&mut audit, &["z"], lists(&["z"]), now);
            }
            prop_assert!(audit.differing.is_empty() && audit.found.is_empty());
            audit.registered(now, None);
            let from = now;
            while found(&mut audit, &["z"], lists(&["y"]), now).is_none() {
                now = audit.next_deadline();
                prop_assert!(now > from && now <= from + EVERY + CONFIRM_AFTER, "{:?} after {:?}", now, from);
            }
        }
    }
}
