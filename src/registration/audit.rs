//! Holding what the kubelet has against what is ours: pure.
//!
//! The end of a stream tells that the kubelet has let go of a resource. Two things it does without a word, and our streams
//! stay open: a goroutine that is late stops the endpoint that came after it, and another plugin registers the resource
//! after us. Both can be read:
//!
//! | where | what it tells |
//! | --- | --- |
//! | `GetAllocatableResources` of the pod-resources API: the healthy ids of each resource | another list than ours: the endpoint was stopped (then nothing is healthy), or somebody else's list came after ours |
//! | `kubelet_internal_checkpoint`: the ids of each container, with the plugin's answer | an answer without an alloc-id: somebody else gave it, whatever he lists |
//!
//! A list needs a moment to arrive: what differs is looked at again, and counts if it still does. That the kubelet had
//! nothing at all also counts when it agrees now, if ours has changed meanwhile: any stream of ours brings a new list to the
//! kubelet, that of a stopped endpoint too. And an answer counts only when it was not there at the first look: a node that
//! comes from another plugin has many of them.
//!
//! It is looked at every second while something may follow from a lost stream, right after the kubelet wrote its checkpoint
//! (as it does for every list and every allocation), and once a minute in any case: another plugin with the same ids that
//! leaves makes it stop the resource, and write nothing.

use crate::domain::{Checkpoint, CheckpointEntry, DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// How often it is looked while there is a reason.
pub(crate) const EVERY: Duration = Duration::from_secs(1);
/// How long after a difference was seen it is looked at again.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);
/// The shortest time between two looks: the kubelet writes its checkpoint several times for each pod.
const APART: Duration = Duration::from_millis(250);
/// How often it is looked without a reason.
const CALM: Duration = Duration::from_secs(60);
/// How often a difference leads to a Register that does not help. Each leaves a stream open in the kubelet, and a list that
/// is too long for it, for one, differs for ever.
const TIMES_MAX: u32 = 6;

/// The healthy ids of each resource.
pub(crate) type Healthy = BTreeMap<ResourceName, BTreeSet<DeviceId>>;

/// An answer of somebody else, as the kubelet keeps it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Foreign {
    pub(crate) resource: ResourceName,
    pub(crate) pod_uid: String,
    pub(crate) container: String,
}

impl Foreign {
    /// Those of a checkpoint.
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

/// One look at the kubelet. What could not be read is `None`, and nothing follows from it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) healthy: Option<Healthy>,
    pub(crate) foreign: Option<BTreeSet<Foreign>>,
}

/// Why a resource is not ours in the kubelet, although a stream is open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Disagreement {
    /// The kubelet has another list.
    List {
        /// Healthy ids of ours that the kubelet does not have.
        missing: usize,
        /// Healthy ids of the kubelet that are not ours.
        strange: usize,
    },
    /// Somebody else answered for a container.
    Answer(Foreign),
}

impl Disagreement {
    /// As the metric's label.
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
            Disagreement::List { missing: 0, strange: 0 } => write!(f, "the kubelet had another list than ours for a moment"),
            Disagreement::List { missing, strange: 0 } => {
                write!(f, "the kubelet lacks {missing} of the healthy devices, although it has opened our stream")
            }
            Disagreement::List { missing, strange } => write!(
                f,
                "the kubelet has another list than ours ({missing} of our healthy devices missing, {strange} unknown to us): another plugin \
                 seems to serve this resource too; stop that one, or give one of them another resource name"
            ),
            Disagreement::Answer(Foreign { pod_uid, container, .. }) => write!(
                f,
                "another plugin has answered for container `{container}` of the pod with UID {pod_uid}; stop that plugin, or give one of them \
                 another resource name"
            ),
        }
    }
}

/// A list that differs.
#[derive(Debug)]
struct Differing {
    /// Ours, when it was seen to differ.
    ours: BTreeSet<DeviceId>,
    /// Whether the kubelet had nothing then.
    was_empty: bool,
    /// When it counts, if it still does.
    due: Duration,
    /// How often it has counted, without an end.
    times: u32,
}

/// Decides when to look, and what follows.
#[derive(Debug)]
pub(crate) struct Audit {
    due: Duration,
    begun_at: Duration,
    doubt_until: Duration,
    differing: BTreeMap<ResourceName, Differing>,
    /// The answers of others that are known.
    known: Option<BTreeSet<Foreign>>,
    /// What was found last of each resource: a list until it agrees, an answer for as long as the kubelet lives.
    found: BTreeMap<ResourceName, Disagreement>,
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
        }
    }

    /// When to look next.
    pub(crate) fn next_deadline(&self) -> Duration {
        self.due
    }

    /// What the kubelet has otherwise than we do, as far as is known.
    pub(crate) fn disagreement(&self, resource: &ResourceName) -> Option<&Disagreement> {
        self.found.get(resource)
    }

    /// Another kubelet, which has everything anew.
    pub(crate) fn new_kubelet(&mut self) {
        self.differing.clear();
        self.found.clear();
        // What was lost was lost in another one.
        self.doubt_until = Duration::ZERO;
    }

    /// The kubelet has written its checkpoint, as it does for every list.
    pub(crate) fn stir(&mut self, now: Duration) {
        self.due = self.due.min(now.max(self.begun_at + APART));
    }

    /// A Register was begun; until a certain time something may follow from what was lost before.
    pub(crate) fn registered(&mut self, now: Duration, doubt_until: Option<Duration>) {
        self.doubt_until = self.doubt_until.max(doubt_until.unwrap_or_default());
        self.due = self.due.min(now + EVERY);
    }

    /// A look has begun; what it sees comes later, or never.
    pub(crate) fn begin(&mut self, now: Duration) {
        self.begun_at = now;
        self.due = now + if now < self.doubt_until { EVERY } else { CALM };
    }

    /// What follows from a look: the resources of `ours`, which are those whose stream is open, that are not ours in the
    /// kubelet. Of a resource that is not told whose an answer is, none is called somebody else's; it is known all the same.
    pub(crate) fn compare(
        &mut self,
        ours: &Healthy,
        seen: Seen,
        is_told: impl Fn(&ResourceName) -> bool,
        now: Duration,
    ) -> BTreeMap<ResourceName, Disagreement> {
        let mut disagreements = BTreeMap::new();
        match seen.healthy {
            Some(theirs) => self.compare_lists(ours, &theirs, now, &mut disagreements),
            None => self.differing.clear(),
        }
        if let Some(foreign) = seen.foreign {
            if let Some(known) = &self.known {
                let new = foreign.difference(known).filter(|foreign| ours.contains_key(&foreign.resource) && is_told(&foreign.resource));
                disagreements.extend(new.map(|foreign| (foreign.resource.clone(), Disagreement::Answer(foreign.clone()))));
            }
            self.known = Some(foreign);
        }
        self.found.extend(disagreements.clone());
        disagreements
    }

    fn compare_lists(&mut self, ours: &Healthy, theirs: &Healthy, now: Duration, counted: &mut BTreeMap<ResourceName, Disagreement>) {
        let none = BTreeSet::new();
        self.differing.retain(|resource, _| ours.contains_key(resource));
        for (resource, ours) in ours {
            let theirs = theirs.get(resource).unwrap_or(&none);
            let hides =
                |differing: &Differing| differing.times < TIMES_MAX && differing.was_empty && !ours.is_empty() && differing.ours != *ours;
            if ours == theirs && !self.differing.get(resource).is_some_and(hides) {
                self.differing.remove(resource);
                self.found.retain(|found, what| found != resource || matches!(what, Disagreement::Answer(_)));
                continue;
            }
            let was_empty = theirs.is_empty();
            let first = || Differing { ours: ours.clone(), was_empty, due: now + CONFIRM_AFTER, times: 0 };
            let differing = self.differing.entry(resource.clone()).or_insert_with(first);
            if ours != theirs && differing.ours != *ours && !differing.was_empty {
                // That of a device that comes and goes is always on its way.
                *differing = Differing { times: differing.times, ..first() };
            } else if differing.due <= now && differing.times < TIMES_MAX {
                // The first Register should have helped; the next ones come ever more seldom.
                differing.due = now + EVERY * 2_u32.saturating_pow(differing.times);
                differing.times += 1;
                let missing = ours.difference(theirs).count();
                counted.insert(resource.clone(), Disagreement::List { missing, strange: theirs.difference(ours).count() });
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
    use proptest::prelude::*;

    const LIST: Disagreement = Disagreement::List { missing: 1, strange: 0 };

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
        let foreign = |uid: &&str| Foreign { resource: gpu(), pod_uid: (*uid).into(), container: "main".into() };
        Seen { healthy: None, foreign: Some(uids.iter().map(foreign).collect()) }
    }

    /// What was found wrong with the resource.
    fn found(audit: &mut Audit, ours: &[&str], seen: Seen, at: Duration) -> Option<Disagreement> {
        audit.begin(at);
        audit.compare(&healthy(ours), seen, |_| true, at).remove(&gpu())
    }

    #[test]
    fn a_list_that_differs_twice_counts() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a", "b"], lists(&["a"]), ms(1_000)), None, "it may be on its way");
        assert_eq!(audit.next_deadline(), ms(1_200));
        assert_eq!(found(&mut audit, &["a", "b"], lists(&["a"]), ms(1_200)), Some(LIST));
        assert_eq!(found(&mut audit, &["a", "b"], lists(&["a"]), ms(1_700)), None, "the Register that followed is under way");
        assert_eq!(audit.next_deadline(), ms(2_200));
    }

    #[test]
    fn a_resource_that_the_kubelet_does_not_know_differs() {
        let mut audit = Audit::new(ms(0));
        let nothing = || Seen { healthy: Some(Healthy::new()), foreign: None };
        assert_eq!(found(&mut audit, &["a"], nothing(), ms(1_000)), None);
        assert_eq!(found(&mut audit, &["a"], nothing(), ms(1_200)), Some(LIST));
        assert_eq!(found(&mut audit, &[], nothing(), ms(1_300)), None, "nothing is healthy, here and there");
    }

    #[test]
    fn a_list_that_was_empty_and_agrees_only_with_another_one_of_ours_counts_too() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a", "b"], lists(&[]), ms(1_000)), None);
        assert_eq!(found(&mut audit, &["a", "b"], lists(&["a", "b"]), ms(1_200)), None, "it was on its way");
        assert_eq!(found(&mut audit, &["a", "b"], lists(&[]), ms(1_400)), None);
        let counted = Disagreement::List { missing: 0, strange: 0 };
        assert_eq!(found(&mut audit, &["a"], lists(&["a"]), ms(1_600)), Some(counted), "it came through a stream of a stopped endpoint");
        assert_eq!(found(&mut audit, &["a"], lists(&["a"]), ms(1_800)), None);
        assert!(audit.differing.is_empty());
    }

    #[test]
    fn a_device_that_comes_and_goes_is_no_disagreement() {
        let mut audit = Audit::new(ms(0));
        for n in 0..100_u64 {
            let (ours, theirs) = if n % 2 == 0 { (&["a", "b"][..], &["a"][..]) } else { (&["a"][..], &["a", "b"][..]) };
            assert_eq!(found(&mut audit, ours, lists(theirs), ms(1_000 + 250 * n)), None);
        }
    }

    #[test]
    fn what_does_not_help_is_tried_ever_more_seldom() {
        let mut audit = Audit::new(ms(0));
        let mut counted = Vec::new();
        let mut now = ms(1_000);
        while now < ms(600_000) {
            counted.extend(found(&mut audit, &["a"], lists(&["b"]), now).map(|_| now));
            now = audit.next_deadline();
        }
        let waits: Vec<u64> = counted.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16]);
        assert!(audit.disagreement(&gpu()).is_some(), "it is told for as long as it is");
        assert_eq!(found(&mut audit, &["a"], lists(&["a"]), now), None);
        assert!(audit.disagreement(&gpu()).is_none() && audit.differing.is_empty(), "the next difference is a new one");
    }

    #[test]
    fn a_kubelet_that_tells_nothing_is_believed() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a"], lists(&["b"]), ms(1_000)), None);
        assert_eq!(found(&mut audit, &["a"], Seen::default(), ms(1_200)), None);
        assert_eq!(found(&mut audit, &["a"], lists(&["b"]), ms(1_400)), None, "twice in a row");
    }

    #[test]
    fn an_answer_of_somebody_else_counts_once_and_not_when_it_was_there_before_us() {
        let mut audit = Audit::new(ms(0));
        assert_eq!(found(&mut audit, &["a"], answered(&["old"]), ms(1_000)), None);
        let new = found(&mut audit, &["a"], answered(&["old", "new"]), ms(2_000));
        assert!(matches!(&new, Some(Disagreement::Answer(foreign)) if foreign.pod_uid == "new"), "{new:?}");
        assert!(new.unwrap().to_string().contains("container `main` of the pod with UID new"));
        assert_eq!(found(&mut audit, &["a"], answered(&["old", "new"]), ms(3_000)), None);
        assert_eq!(found(&mut audit, &["a"], Seen::default(), ms(4_000)), None, "a checkpoint that cannot be read forgets nothing");
        assert_eq!(found(&mut audit, &["a"], answered(&["new"]), ms(5_000)), None);
    }

    #[test]
    fn an_answer_that_was_there_before_its_resource_was_ours_is_known() {
        let mut audit = Audit::new(ms(0));
        assert!(audit.compare(&Healthy::new(), answered(&["old"]), |_| false, ms(1_000)).is_empty(), "not registered yet");
        assert_eq!(found(&mut audit, &["a"], answered(&["old"]), ms(2_000)), None);
        assert!(audit.compare(&healthy(&["a"]), answered(&["old", "new"]), |_| false, ms(3_000)).is_empty(), "whose is it?");
    }

    #[test]
    fn it_looks_often_only_for_a_reason() {
        let mut audit = Audit::new(ms(0));
        let looks = |audit: &mut Audit, until: Duration| {
            let mut looks = 0;
            while audit.next_deadline() <= until {
                let now = audit.next_deadline();
                assert_eq!(found(audit, &["a"], lists(&["a"]), now), None);
                looks += 1;
            }
            looks
        };
        assert_eq!(looks(&mut audit, ms(60_999)), 1, "a start is a reason");
        assert_eq!(looks(&mut audit, ms(61_000)), 1);
        audit.stir(ms(65_000));
        audit.stir(ms(65_001));
        assert_eq!(looks(&mut audit, ms(65_000)), 1);
        (1..=1000).for_each(|n| audit.stir(ms(65_000 + n)));
        assert_eq!(looks(&mut audit, ms(65_300)), 1, "not for every write");
        audit.registered(ms(70_000), None);
        assert_eq!(looks(&mut audit, ms(79_000)), 1, "a Register may have failed in silence");
        audit.registered(ms(79_000), Some(ms(91_000)));
        assert_eq!(looks(&mut audit, ms(100_000)), 12);
        audit.registered(ms(100_000), Some(ms(112_000)));
        audit.new_kubelet();
        assert_eq!(looks(&mut audit, ms(110_000)), 1, "its streams ended with another kubelet");
    }

    proptest! {
        /// Whatever was seen, a list that agrees from now on leads to nothing, and one that differs leads to a Register in time.
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
