//! The releases that wait for proof, and what each of them waits for.
//!
//! This decides nothing: it states which of the proofs that [`super::reconcile()`] demands are
//! missing. It is computed when an operator asks, from the watchlist and from the pods' cgroups at
//! that moment, so a removed pod is seen at once and not only at the next pass.

use super::evidence::ABSENCE_MIN;
use super::{Ledger, Watchlist};
use crate::domain::{
    CgroupState, Grant, GrantState, MissingProof, Moment, PendingRelease, PendingReleases, PodRef,
    PodSight, Timestamp, is_of_static_pod,
};

/// Milliseconds after the binding of its grant in which a pod without a process counts as starting,
/// unless its cgroup was removed: the kubelet creates the cgroup after the checkpoint.
const STARTED_WITHIN_MS: u64 = 60_000;

/// What is known apart from the ledger and the watchlist.
struct Now<'a> {
    boot_id: &'a str,
    kubelet_settled: bool,
    cgroup: &'a dyn Fn(&str) -> CgroupState,
    has_logs: &'a dyn Fn(&str) -> bool,
    moment: Moment,
}

impl Now<'_> {
    fn has_had_time(&self, since: Timestamp) -> bool {
        self.moment.wall.0.saturating_sub(since.0) > STARTED_WITHIN_MS
    }

    /// Whether the pod had a cgroup, and has none now. The kubelet creates the folder for the logs
    /// of a pod after its cgroup, and removes it later (`syncPod` and `createPodSandbox` there).
    fn has_gone(&self, uid: &str, cgroup: CgroupState) -> bool {
        cgroup == CgroupState::Absent && (self.has_logs)(uid)
    }
}

/// The live grants whose pods have ended, or that the kubelet no longer lists. `boot_id` is that of
/// the present boot; `cgroup` reads the state of a pod's cgroup, and `has_logs` whether it has a
/// folder for logs.
#[must_use]
pub fn pending_releases(
    ledger: &Ledger,
    watchlist: &Watchlist,
    boot_id: &str,
    kubelet_settled: bool,
    cgroup: &dyn Fn(&str) -> CgroupState,
    has_logs: &dyn Fn(&str) -> bool,
    moment: Moment,
) -> PendingReleases {
    let now = &Now { boot_id, kubelet_settled, cgroup, has_logs, moment };
    let pending = |grant: &Grant| match &grant.state {
        GrantState::Bound { pod, bound_at, .. } => {
            of_container(watchlist, grant, pod, *bound_at, None, now)
        }
        GrantState::Suspect { pod, bound_at, suspect_at, .. } => {
            of_container(watchlist, grant, pod, *bound_at, Some(*suspect_at), now)
        }
        GrantState::Prepared { pods, prepared_at, unprepared_at } => {
            of_claim(grant, pods, *prepared_at, *unprepared_at, now)
        }
        GrantState::Granted | GrantState::Released { .. } => None,
    };
    let grants = ledger.grants();
    grants.filter_map(|grant| Some((grant.alloc_id.clone(), pending(grant)?))).collect()
}

fn of_container(
    watchlist: &Watchlist,
    grant: &Grant,
    holder: &PodRef,
    bound_at: Timestamp,
    suspect_at: Option<Timestamp>,
    now: &Now<'_>,
) -> Option<PendingRelease> {
    let cgroup = (now.cgroup)(&holder.uid);
    let was_seen = watchlist.was_alive(&holder.uid);
    let may_come_back = grant.boot_id != now.boot_id && !was_seen;
    let has_had_time = suspect_at.is_some() || now.has_had_time(bound_at);
    let was_there = watchlist.was_there(&holder.uid) || now.has_gone(&holder.uid, cgroup);
    let has_started = has_had_time || was_there;
    let pod = match cgroup {
        CgroupState::Populated | CgroupState::Unknown if suspect_at.is_none() => return None,
        CgroupState::Populated => PodSight::Running,
        CgroupState::Unknown => PodSight::Unlisted,
        CgroupState::Empty | CgroupState::Absent if may_come_back => PodSight::NotStarted,
        CgroupState::Empty | CgroupState::Absent if !has_started => return None,
        CgroupState::Empty => PodSight::Ended,
        CgroupState::Absent => PodSight::Gone,
    };
    let (lists, absent_for) = watchlist.absence(&grant.alloc_id, now.moment.boot);
    let mut waits_for = Vec::new();
    if !now.kubelet_settled {
        waits_for.push(MissingProof::KubeletSettled);
    }
    if lists < 2 || absent_for < ABSENCE_MIN {
        waits_for.push(MissingProof::Lists);
    }
    waits_for.extend(of_cgroup(cgroup));
    if (may_come_back || is_of_static_pod(&holder.uid)) && !watchlist.is_forgotten(&grant.alloc_id)
    {
        waits_for.push(MissingProof::Checkpoint);
    }
    Some(PendingRelease { pod, since: suspect_at, lists, waits_for })
}

/// Why the cgroup is no proof yet.
fn of_cgroup(cgroup: CgroupState) -> Option<MissingProof> {
    match cgroup {
        CgroupState::Populated => Some(MissingProof::Processes),
        CgroupState::Empty => Some(MissingProof::Cgroup),
        CgroupState::Unknown => Some(MissingProof::CgroupUnreadable),
        CgroupState::Absent => None,
    }
}

/// A claim waits for the kubelet's unprepare, and after it for the last process of its pods.
fn of_claim(
    grant: &Grant,
    pods: &[PodRef],
    prepared_at: Timestamp,
    unprepared_at: Option<Timestamp>,
    now: &Now<'_>,
) -> Option<PendingRelease> {
    let states: Vec<CgroupState> = pods.iter().map(|pod| (now.cgroup)(&pod.uid)).collect();
    let has = |state: CgroupState| states.contains(&state);
    let have_gone = pods.iter().zip(&states).all(|(pod, state)| now.has_gone(&pod.uid, *state));
    let is_new = pods.is_empty() || !now.has_had_time(prepared_at) && !have_gone;
    let (pod, mut waits_for) = match (has(CgroupState::Populated), has(CgroupState::Unknown)) {
        (true, _) => (PodSight::Running, vec![MissingProof::Processes]),
        (false, true) => (PodSight::Unlisted, vec![MissingProof::CgroupUnreadable]),
        _ if grant.boot_id != now.boot_id => (PodSight::NotStarted, Vec::new()),
        _ if has(CgroupState::Empty) => (PodSight::Ended, Vec::new()),
        _ => (PodSight::Gone, Vec::new()),
    };
    if unprepared_at.is_none() {
        if is_new || has(CgroupState::Populated) || has(CgroupState::Unknown) {
            return None;
        }
        waits_for.push(MissingProof::Unprepare);
    }
    Some(PendingRelease { pod, since: unprepared_at, lists: 0, waits_for })
}

#[cfg(test)]
mod tests {
    use super::super::{ABSENCE_MIN as MIN, reconcile};
    use super::*;
    use crate::domain::{
        AllocId, Checkpoint, CheckpointEntry, ClaimHold, ClaimRef, ContainerEdits, DeviceId, Entry,
        ListedPod, Observation, PodName, PodReport,
    };
    use std::collections::{BTreeMap, BTreeSet};
    use std::sync::Arc;
    use std::time::Duration;

    const BOOT: &str = "boot-1";
    const WALL: u64 = 1_700_000_000_000;

    fn at(seconds: u64) -> Moment {
        let wall = Timestamp(WALL + seconds * 1000);
        Moment { boot: Duration::from_secs(1000 + seconds), wall }
    }

    fn grant(state: GrantState) -> Grant {
        Grant {
            alloc_id: AllocId::new("a-1"),
            resource: "nvidia.com/gpu".parse().unwrap(),
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: BOOT.into(),
            kubelet: None,
            granted_at: Timestamp(WALL),
            version: String::new(),
            state,
        }
    }

    fn pod() -> PodRef {
        PodRef { uid: "u1".into(), namespace: Some("ml".into()), name: Some("web".into()) }
    }

    /// A grant that is bound to a pod, and the evidence about it.
    struct World {
        ledger: Ledger,
        watchlist: Watchlist,
        seen: Observation,
        boot_id: &'static str,
        has_logs: bool,
    }

    impl World {
        fn new(state: GrantState) -> Self {
            let mut ledger = Ledger::default();
            ledger.evolve(&Entry::Grant(Arc::new(grant(state))));
            let entry = CheckpointEntry {
                pod_uid: "u1".into(),
                container: "main".into(),
                resource: "nvidia.com/gpu".parse().unwrap(),
                device_ids: BTreeSet::from([DeviceId::new("GPU-a")]),
                alloc_id: Some(AllocId::new("a-1")),
            };
            let name = PodName { namespace: "ml".into(), name: "web".into() };
            let listed =
                ListedPod { namespace: "ml".into(), name: "web".into(), containers: vec![] };
            let seen = Observation {
                boot_id: BOOT.into(),
                kubelet_settled: true,
                checkpoint: Some(Arc::new(Checkpoint::new(vec![entry], Timestamp(WALL + 1)))),
                pods: PodReport::All(vec![listed]),
                names: BTreeMap::from([("u1".into(), name)]),
                cgroups: BTreeMap::from([("u1".into(), CgroupState::Populated)]),
                ..Observation::default()
            };
            let watchlist = Watchlist::default();
            World { ledger, watchlist, seen, boot_id: BOOT, has_logs: false }
        }

        fn bound() -> Self {
            let (container, bound_at) = ("main".into(), Timestamp(WALL));
            World::new(GrantState::Bound { pod: pod(), container, bound_at })
        }

        /// The pod has this cgroup, and the kubelet lists it or not.
        fn with(mut self, cgroup: CgroupState, is_listed: bool) -> Self {
            self.seen.cgroups.insert("u1".into(), cgroup);
            if !is_listed {
                self.seen.pods = PodReport::All(Vec::new());
            }
            self
        }

        fn look(&mut self, seconds: u64) {
            for entry in reconcile(&mut self.watchlist, &self.ledger, &self.seen, at(seconds)) {
                self.ledger.evolve(&entry);
            }
        }

        fn pending(&self, seconds: u64) -> Option<PendingRelease> {
            let cgroup = |uid: &str| self.seen.cgroups.get(uid).copied().unwrap_or_default();
            let (ledger, watchlist, now) = (&self.ledger, &self.watchlist, at(seconds));
            let settled = self.seen.kubelet_settled;
            let has_logs = |_: &str| self.has_logs;
            pending_releases(ledger, watchlist, self.boot_id, settled, &cgroup, &has_logs, now)
                .remove(&AllocId::new("a-1"))
        }
    }

    #[test]
    fn two_lists_five_seconds_apart_are_enough_while_the_cgroup_is_waited_for() {
        let mut world = World::bound();
        world.look(0);
        world = world.with(CgroupState::Empty, false);
        world.look(1);
        let waits_for = |world: &World, seconds| world.pending(seconds).unwrap().waits_for;
        assert_eq!(waits_for(&world, 20), [MissingProof::Lists, MissingProof::Cgroup], "one list");
        world.look(6);
        assert_eq!(waits_for(&world, 6), [MissingProof::Cgroup]);
    }

    #[test]
    fn a_removed_pod_is_seen_before_any_pass_and_each_proof_is_named_until_the_release() {
        let mut world = World::bound();
        world.look(0);
        assert_eq!(world.pending(1), None, "it runs");
        world = world.with(CgroupState::Absent, true);
        let pending = world.pending(1).unwrap();
        assert_eq!((pending.pod, pending.since, pending.lists), (PodSight::Gone, None, 0));
        assert_eq!(pending.waits_for, [MissingProof::Lists]);
        assert_eq!(grant(GrantState::Granted).state_for_people(Some(&pending)), "pod gone");

        world = world.with(CgroupState::Absent, false);
        world.look(2);
        let pending = world.pending(3).unwrap();
        assert_eq!((pending.since, pending.lists), (Some(at(2).wall), 1));
        assert_eq!(pending.short(), "2 kubelet lists without it, since 2023-11-14T22:13:22Z");
        world.look(4);
        assert_eq!(world.pending(4).unwrap().waits_for, [MissingProof::Lists], "not 5 s apart");
        let enough = 2 + MIN.as_secs();
        world = world.with(CgroupState::Empty, false);
        world.look(enough);
        let pending = world.pending(enough).unwrap();
        assert_eq!((pending.pod, pending.waits_for), (PodSight::Ended, vec![MissingProof::Cgroup]));
        world = world.with(CgroupState::Absent, false);
        assert_eq!(world.pending(enough).unwrap().waits_for, [], "the next pass releases it");
        world.look(enough + 1);
        assert_eq!(world.pending(enough + 1), None);
        assert_eq!(world.ledger.grants().len(), 0, "it was released");
    }

    #[test]
    fn a_pod_that_the_kubelet_starts_has_not_ended() {
        let world = World::bound().with(CgroupState::Absent, true);
        assert_eq!(world.pending(59), None);
        assert_eq!(world.pending(61).unwrap().pod, PodSight::Gone, "also after our own restart");
        let short = World { has_logs: true, ..world };
        assert_eq!(short.pending(2).unwrap().pod, PodSight::Gone, "it had a cgroup");
        let mut short = short.with(CgroupState::Empty, true);
        short.look(1);
        assert_eq!(short.pending(2), None, "it may start");
        let mut short = short.with(CgroupState::Absent, true);
        short.look(2);
        short.has_logs = false;
        assert_eq!(short.pending(3).unwrap().pod, PodSight::Gone, "also without its logs");
        let unseen = World::bound().with(CgroupState::Unknown, true);
        assert_eq!(unseen.pending(61), None, "what cannot be read shows nothing");
    }

    #[test]
    fn a_forced_deletion_a_young_kubelet_and_a_reboot_have_their_own_words() {
        let mut forced = World::bound().with(CgroupState::Populated, false);
        forced.look(1);
        let pending = forced.pending(2).unwrap();
        assert_eq!(pending.pod, PodSight::Running);
        assert_eq!(pending.waits_for, [MissingProof::Lists, MissingProof::Processes]);

        let mut young = World::bound();
        young.look(0);
        young.seen.kubelet_settled = false;
        let pending = young.with(CgroupState::Absent, true).pending(1).unwrap();
        assert_eq!(pending.waits_for, [MissingProof::KubeletSettled, MissingProof::Lists]);

        let mut rebooted = World::bound().with(CgroupState::Absent, false);
        (rebooted.boot_id, rebooted.seen.boot_id) = ("boot-2", "boot-2".into());
        rebooted.look(0);
        let pending = rebooted.pending(1).unwrap();
        assert_eq!(pending.pod, PodSight::NotStarted);
        assert_eq!(pending.waits_for, [MissingProof::Lists, MissingProof::Checkpoint]);
    }

    #[test]
    fn a_claim_waits_for_its_unprepare_and_then_for_its_processes() {
        let claim = |unprepared_at| {
            let (pods, prepared_at) = (vec![pod()], Timestamp(WALL));
            let mut world = World::new(GrantState::Prepared { pods, prepared_at, unprepared_at });
            let claim = ClaimRef { uid: "c".into(), namespace: "ml".into(), name: "c".into() };
            let hold = ClaimHold { claim, allocation: "x".into(), devices: Vec::new() };
            let state = world.ledger.grants().next().unwrap().state.clone();
            let grant = Grant { claim: Some(Arc::new(hold)), ..grant(state) };
            world.ledger = Ledger::default();
            world.ledger.evolve(&Entry::Grant(Arc::new(grant)));
            world
        };
        let prepared = claim(None);
        assert_eq!(prepared.pending(99), None, "its pod runs");
        let ended = prepared.with(CgroupState::Absent, true);
        assert_eq!(ended.pending(59), None, "its pod starts");
        assert_eq!(ended.pending(61).unwrap().waits_for, [MissingProof::Unprepare]);
        let short = World { has_logs: true, ..ended };
        assert_eq!(short.pending(2).unwrap().waits_for, [MissingProof::Unprepare]);
        let unprepared = claim(Some(Timestamp(WALL + 7000)));
        let pending = unprepared.pending(8).unwrap();
        assert_eq!((pending.pod, pending.since), (PodSight::Running, Some(Timestamp(WALL + 7000))));
        assert_eq!(pending.waits_for, [MissingProof::Processes]);
        let unreadable = unprepared.with(CgroupState::Unknown, true).pending(8).unwrap();
        assert_eq!(unreadable.waits_for, [MissingProof::CgroupUnreadable]);
        for (boot, cgroup, seen) in [
            (BOOT, CgroupState::Empty, PodSight::Ended),
            (BOOT, CgroupState::Absent, PodSight::Gone),
            ("boot-2", CgroupState::Empty, PodSight::NotStarted),
        ] {
            let mut world = claim(None).with(cgroup, true);
            world.boot_id = boot;
            assert_eq!(world.pending(60), None, "its pod starts");
            assert_eq!(world.pending(61).unwrap().pod, seen);
        }
    }
}
