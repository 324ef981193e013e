//! The rules of claims, and the properties that hold for every sequence of requests, observations
//! and restarts.

use super::*;
use crate::domain::{
    AllocId, Allocated, CLAIM_PODS_MAX, ClaimEvidence, ClaimLook, ClaimRef, ClaimedDevice,
    ContainerEdits, DeviceId, DraName, EditDevice, GrantedDevice, HookState, KubeletClaim,
    KubeletClaims, ListedPod, Moment, NamedDevice, NotReleased, Object, Observation, PendingHook,
    PodName, PodReport, PreparedDevice, ResourceName, Sharing, Verdicts, overlap,
};
use crate::ledger::core::{
    ABSENCE_MIN, Agenda, CLAIM_GONE, NEVER_PREPARED, NEVER_PREPARED_MIN, OPERATOR, POD_GONE,
    PodQuery, Vouched, Watchlist, ended, is_calm, reconcile, release_stuck, restore_claims,
    stuck_claim,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

const BOOT: &str = "boot-1";
const WALL: u64 = 1_700_000_000_000;
const GPU: &str = "nvidia.com/gpu";

fn at(seconds: u64) -> Moment {
    Moment { boot: Duration::from_secs(1000 + seconds), wall: Timestamp(WALL + seconds * 1000) }
}

fn resource(name: &str) -> ResourceName {
    name.parse().unwrap()
}

fn pod(uid: &str) -> PodRef {
    PodRef { uid: uid.into(), namespace: Some("ml".into()), name: Some(format!("pod-{uid}")) }
}

fn claim(uid: &str) -> ClaimRef {
    ClaimRef { uid: uid.into(), namespace: "ml".into(), name: format!("claim-{uid}") }
}

/// The object behind an id: `a-1` and `b-1` are two ids of one device, and all shares are of one.
fn objects(id: &str) -> Vec<Object> {
    let whole = id.split("::").next().unwrap();
    let number = whole.rsplit('-').next().unwrap();
    vec![Object::node(&format!("/dev/x{number}"))]
}

fn granted(id: &str) -> GrantedDevice {
    GrantedDevice {
        id: DeviceId::new(id),
        key: String::new(),
        numa_nodes: Vec::new(),
        nodes: Vec::new(),
        objects: objects(id),
    }
}

fn claimed(id: &str, cdi: &str) -> ClaimedDevice {
    let name = DraName { pool: "n1/gpu".into(), device: id.to_lowercase() };
    ClaimedDevice {
        allocated: Allocated { request: "gpu".into(), name, share_id: None, admin: false },
        id: DeviceId::new(id),
        cdi_devices: vec![cdi.into()],
        edits: ContainerEdits::default(),
        metadata: String::new(),
    }
}

/// A container's grant by an Allocate.
fn allocated(n: u64, name: &str, id: &str) -> Grant {
    Grant {
        alloc_id: AllocId::new(format!("a-{n:06}")),
        resource: resource(name),
        devices: vec![granted(id)],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: BOOT.into(),
        kubelet: None,
        granted_at: Timestamp(WALL),
        version: "1".into(),
        state: GrantState::Granted,
    }
}

/// A claim's grant of devices of one resource, for one pod.
fn of_claim(n: u64, uid: &str, allocation: &str, name: &str, ids: &[&str], of: &str) -> Grant {
    let devices = ids.iter().map(|id| claimed(id, &format!("k8s.holdfast.dev/claim={n}-{id}")));
    let hold =
        ClaimHold { claim: claim(uid), allocation: allocation.into(), devices: devices.collect() };
    Grant {
        devices: ids.iter().map(|id| granted(id)).collect(),
        claim: Some(Arc::new(hold)),
        state: GrantState::Prepared {
            pods: vec![pod(of)],
            prepared_at: Timestamp(WALL),
            unprepared_at: None,
        },
        ..allocated(n, name, "-")
    }
}

fn for_admin(mut grant: Grant) -> Grant {
    let mut hold = ClaimHold::clone(grant.claim.as_ref().unwrap());
    hold.devices.iter_mut().for_each(|device| device.allocated.admin = true);
    grant.claim = Some(Arc::new(hold));
    grant
}

/// A ledger with the cgroups of its pods, and an after-release hook of the GPUs if `hooks` is.
struct World {
    ledger: Ledger,
    hooks: ReleaseHooks,
    cgroups: BTreeMap<String, CgroupState>,
    watchlist: Watchlist,
    evidence: ClaimEvidence,
    /// The pods that the kubelet lists, by name; `None` if it does not answer.
    listed: Option<Vec<&'static str>>,
    names: BTreeMap<String, PodName>,
    is_settled: bool,
}

impl World {
    fn new(live: impl IntoIterator<Item = Grant>) -> Self {
        let mut world = World {
            ledger: Ledger::default(),
            hooks: ReleaseHooks::default(),
            cgroups: BTreeMap::new(),
            watchlist: Watchlist::default(),
            evidence: ClaimEvidence::default(),
            listed: None,
            names: BTreeMap::new(),
            is_settled: true,
        };
        for grant in live {
            world.ledger.evolve(&Entry::Grant(Arc::new(grant)));
        }
        world
    }

    fn with_hook(mut self) -> Self {
        self.hooks = ReleaseHooks::of([(resource(GPU), Some(Sharing::Exclusive))]);
        self
    }

    fn sees(&mut self, uid: &str, state: CgroupState) {
        self.cgroups.insert(uid.into(), state);
    }

    fn recording(&self, wanted: &[Grant]) -> Recording {
        let wanted: Vec<_> = wanted.iter().cloned().map(Arc::new).collect();
        assert!(is_one_claim(&wanted));
        let cgroup = |uid: &str| self.cgroups.get(uid).copied().unwrap_or_default();
        record_claim(&self.ledger, &self.hooks, &[], &wanted, &cgroup, at(0).wall)
    }

    fn apply(&mut self, entries: &[Entry]) {
        for entry in entries {
            self.ledger.evolve(entry);
        }
    }

    /// Decides a Prepare and applies it, as the actor does.
    fn record(&mut self, wanted: &[Grant]) -> Result<Vec<Arc<Grant>>, Refusal> {
        let Recording { entries, answer } = self.recording(wanted);
        self.apply(&entries);
        answer
    }

    fn unprepare(&mut self, uid: &str) -> Vec<Entry> {
        let cgroup = |uid: &str| self.cgroups.get(uid).copied().unwrap_or_default();
        let listed = self.listed(uid);
        let entries =
            release_claim(&self.ledger, &self.hooks, &[], uid, &listed, &cgroup, at(1).wall);
        self.apply(&entries);
        entries
    }

    /// The pods of the claim in the kubelet's record.
    fn listed(&self, uid: &str) -> BTreeSet<String> {
        let file = self.evidence.kubelet.as_ref();
        let entry = file.and_then(|file| file.claims.get(uid));
        entry.map(|entry| entry.pods.clone()).unwrap_or_default()
    }

    fn look(&mut self, seconds: u64) -> Vec<Entry> {
        let pod = |name: &&str| ListedPod {
            namespace: "ml".into(),
            name: (*name).to_owned(),
            containers: Vec::new(),
        };
        let seen = Observation {
            boot_id: BOOT.into(),
            kubelet_settled: self.is_settled,
            pods: (self.listed.as_ref()).map_or(PodReport::Nothing, |names| {
                PodReport::All(names.iter().map(pod).collect())
            }),
            names: self.names.clone(),
            cgroups: self.cgroups.clone(),
            claims: Arc::new(self.evidence.clone()),
            ..Observation::default()
        };
        let entries = reconcile(&mut self.watchlist, &self.ledger, &seen, at(seconds));
        self.apply(&entries);
        entries
    }

    fn refused(&mut self, wanted: &[Grant]) -> String {
        self.record(wanted).unwrap_err().to_string()
    }
}

fn proofs(entries: &[Entry]) -> Vec<&str> {
    entries.iter().filter_map(proof).collect()
}

fn proof(entry: &Entry) -> Option<&str> {
    match entry {
        Entry::Moved { state: GrantState::Released { released_by, .. }, .. } => Some(released_by),
        _ => None,
    }
}

fn ids(answer: &[Arc<Grant>]) -> Vec<&str> {
    answer.iter().map(|grant| grant.alloc_id.as_str()).collect()
}

#[test]
fn a_claim_is_recorded_in_one_commit_and_its_answer_stays_the_recorded_one() {
    let wanted = |n, of| {
        [
            of_claim(n, "c1", "x", GPU, &["a-1", "a-2"], of),
            of_claim(n + 1, "c1", "x", "example.com/nic", &["a-3"], of),
        ]
    };
    let mut world = World::new([]);
    let first = world.recording(&wanted(1, "u1"));
    assert_eq!(first.entries.len(), 2);
    let recorded = world.record(&wanted(1, "u1")).unwrap();
    // Another Prepare for another pod: other ids, other CDI names.
    let again = world.recording(&wanted(3, "u2"));
    assert_eq!(again.entries.len(), 2, "the pod is added to both");
    let answer = world.record(&wanted(3, "u2")).unwrap();
    let holds = |answer: &[Arc<Grant>]| {
        answer.iter().map(|grant| grant.claim.clone().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!((ids(&answer), holds(&answer)), (ids(&recorded), holds(&recorded)));
    for grant in world.ledger.of_claim("c1") {
        assert_eq!(grant.pods().cloned().collect::<Vec<_>>(), [pod("u1"), pod("u2")]);
    }
    let third = world.recording(&wanted(5, "u1"));
    assert_eq!(third.entries, [], "nothing is new");
    assert_eq!(third.answer, Ok(world.ledger.of_claim("c1").rev_sorted()));
}

trait Sorted<'a> {
    fn rev_sorted(self) -> Vec<Arc<Grant>>;
}

impl<'a, I: Iterator<Item = &'a Arc<Grant>>> Sorted<'a> for I {
    /// In the order of an answer.
    fn rev_sorted(self) -> Vec<Arc<Grant>> {
        let mut all: Vec<_> = self.cloned().collect();
        all.sort_by_key(|grant| (grant.resource.clone(), grant.alloc_id.clone()));
        all
    }
}

#[test]
fn a_grant_that_a_torn_write_has_lost_is_recorded_by_the_next_prepare() {
    let nic = |n| of_claim(n, "c1", "x", "example.com/nic", &["a-3"], "u1");
    let gpus = |n, ids: &[&str]| of_claim(n, "c1", "x", GPU, ids, "u1");
    let mut world = World::new([gpus(1, &["a-1", "a-2"])]);
    let answer = world.record(&[gpus(2, &["a-1", "a-2"]), nic(3)]).unwrap();
    assert_eq!(ids(&answer), ["a-000003", "a-000001"], "in the order of the resources");
    // After a reload the devices may be of other resources: only the lost one is recorded.
    let mut world = World::new([gpus(1, &["a-1"])]);
    let answer = world.record(&[gpus(2, &["a-1", "a-2"])]).unwrap();
    let devices: Vec<Vec<&str>> = answer
        .iter()
        .map(|grant| grant.devices.iter().map(|device| device.id.as_str()).collect())
        .collect();
    assert_eq!(devices, [["a-1"], ["a-2"]]);
    let claimed: Vec<usize> =
        answer.iter().map(|grant| grant.claim.as_ref().unwrap().devices.len()).collect();
    assert_eq!(claimed, [1, 1]);
}

#[test]
fn another_allocation_replaces_the_former_one_when_no_process_of_its_pods_runs() {
    let former = || World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    let wanted = [of_claim(2, "c1", "y", GPU, &["a-2"], "u2")];
    for state in [CgroupState::Populated, CgroupState::Unknown] {
        let mut world = former();
        world.sees("u1", state);
        let refused = world.refused(&wanted);
        assert!(refused.contains("former allocation of claim ml/claim-c1"), "{refused}");
        assert_eq!(ids(&world.ledger.of_claim("c1").rev_sorted()), ["a-000001"]);
    }
    for state in [CgroupState::Empty, CgroupState::Absent] {
        let mut world = former();
        world.sees("u1", state);
        let recording = world.recording(&wanted);
        assert_eq!(proofs(&recording.entries), [REALLOCATED], "in the same commit");
        assert_eq!(recording.entries.len(), 2);
        assert_eq!(ids(&world.record(&wanted).unwrap()), ["a-000002"]);
        assert_eq!(ids(&world.ledger.of_claim("c1").rev_sorted()), ["a-000002"]);
    }
}

#[test]
fn a_device_of_the_former_allocation_waits_for_its_hook() {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]).with_hook();
    world.sees("u1", CgroupState::Absent);
    let wanted = [of_claim(2, "c1", "y", GPU, &["a-1"], "u2")];
    let recording = world.recording(&wanted);
    assert!(
        matches!(&recording.entries[..], [Entry::Hook(_), release] if proof(release) == Some(REALLOCATED)),
        "the release is written with its hook, and nothing else: {recording:?}"
    );
    let refused = world.refused(&wanted);
    assert!(refused.contains("hook after_release"), "{refused}");
    assert!(world.refused(&wanted).contains("hook after_release"), "also when it is written");
    run_hooks(&mut world);
    assert_eq!(ids(&world.record(&wanted).unwrap()), ["a-000002"]);
    // Another device does not wait.
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]).with_hook();
    world.sees("u1", CgroupState::Absent);
    world.record(&[of_claim(2, "c1", "y", GPU, &["a-2"], "u2")]).unwrap();
}

fn run_hooks(world: &mut World) {
    let owed: Vec<PendingHook> =
        world.ledger.owed().values().flat_map(BTreeMap::values).cloned().collect();
    let done: Vec<Entry> =
        owed.iter().filter_map(|hook| ended(&world.ledger, hook, Ok(()), at(2).wall)).collect();
    world.apply(&done);
}

#[test]
fn an_object_has_one_exclusive_holder_whichever_api_gave_it() {
    let dp = |name, id| allocated(1, name, id);
    let other_claim = |ids: &[&str]| of_claim(1, "c9", "x", GPU, ids, "u9");
    let wanted = |id| of_claim(2, "c1", "x", GPU, &[id], "u1");
    let by_dp = "grant a-000001";
    for (held, id, expected) in [
        (dp(GPU, "a-1"), "a-1", Some(by_dp)),
        (dp("example.com/other", "b-1"), "a-1", Some(by_dp)),
        (dp(GPU, "a-2"), "a-1", None),
        (other_claim(&["a-1"]), "a-1", Some("claim ml/claim-c9")),
        (other_claim(&["b-1"]), "a-1", Some("claim ml/claim-c9")),
        (other_claim(&["a-2", "a-3"]), "a-3", Some("claim ml/claim-c9")),
        (other_claim(&["a-2"]), "a-1", None),
        // Shares of one device, and ids of one pool.
        (dp(GPU, "a-1::0"), "a-1::1", None),
        (other_claim(&["a-1::0"]), "a-1::1", None),
        (dp(GPU, "a-1::0"), "a-1", Some(by_dp)),
        (dp(GPU, "a-1::1"), "a-1::1", Some(by_dp)),
        (other_claim(&["a-1::0", "a-1::1"]), "a-1::1", Some("claim ml/claim-c9")),
        (for_admin(other_claim(&["a-1::1"])), "a-1::1", None),
        (other_claim(&["1"]), "1", None),
        // Access for an administrator neither excludes nor is excluded.
        (for_admin(other_claim(&["a-1"])), "a-1", None),
    ] {
        let label = format!("{:?} then {id}", held.devices[0].id);
        let refused = World::new([held.clone()]).record(&[wanted(id)]).err();
        let refused = refused.map(|refusal| refusal.to_string());
        assert_eq!(refused.is_some(), expected.is_some(), "{label}: {refused:?}");
        if let Some((refused, expected)) = refused.zip(expected) {
            assert!(refused.contains(expected) && refused.contains(id), "{label}: {refused}");
        }
        // A grant that waits for the commit counts as if it were written.
        let wanted = wanted(id);
        let pending = held_by_another(&Ledger::default(), [&held].into_iter(), &wanted);
        assert_eq!(pending.is_some(), expected.is_some(), "{label}, pending");
        // The other way round: the claim is first.
        let mut late = held.clone();
        late.alloc_id = AllocId::new("a-000009");
        let of_first = World::new([wanted]);
        let refused = held_by_another(&of_first.ledger, std::iter::empty(), &late);
        assert_eq!(refused.is_some(), expected.is_some(), "{label}, the other way round");
        if let Some(refused) = refused {
            assert!(refused.to_string().contains("claim ml/claim-c1"), "{refused}");
        }
    }
    let mut world = World::new([dp(GPU, "a-1")]);
    let admin = for_admin(wanted("a-1"));
    assert_eq!(ids(&world.record(std::slice::from_ref(&admin)).unwrap()), ["a-000002"]);
    assert_eq!(world.ledger.holders(&resource(GPU), &DeviceId::new("a-1")).count(), 1);
    assert!(admin.objects().is_empty());
}

#[test]
fn a_claim_with_two_devices_of_one_object_is_one_holder() {
    let mut world = World::new([]);
    let wanted = [
        of_claim(1, "c1", "x", GPU, &["a-1"], "u1"),
        of_claim(2, "c1", "x", "example.com/part", &["b-1"], "u1"),
    ];
    assert_eq!(world.record(&wanted).unwrap().len(), 2);
    assert_eq!(world.record(&wanted).unwrap().len(), 2);
}

#[test]
fn a_claim_that_waits_holds_nothing() {
    let mut world = World::new([allocated(1, GPU, "a-2")]);
    let wanted = [
        of_claim(2, "c1", "x", "example.com/nic", &["a-1"], "u1"),
        of_claim(3, "c1", "x", GPU, &["a-2"], "u1"),
    ];
    assert!(world.record(&wanted).is_err());
    assert_eq!(world.ledger.of_claim("c1").count(), 0);
}

#[test]
fn an_unprepared_claim_is_released_when_no_process_of_any_of_its_pods_runs() {
    let held = || {
        let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]).with_hook();
        world.record(&[of_claim(2, "c1", "x", GPU, &["a-1"], "u2")]).unwrap();
        world.sees("u1", CgroupState::Empty);
        world
    };
    assert_eq!(held().unprepare("unknown"), []);
    let mut world = held();
    world.sees("u2", CgroupState::Absent);
    let entries = world.unprepare("c1");
    let [Entry::Hook(hook), Entry::Moved { state, .. }] = &entries[..] else {
        panic!("{entries:?}")
    };
    assert_eq!((hook.state.clone(), hook.pod.clone()), (HookState::Due, Some(pod("u1"))));
    assert_eq!(
        *state,
        GrantState::Released {
            pod: Some(pod("u1")),
            container: None,
            bound_at: Some(Timestamp(WALL)),
            released_at: at(1).wall,
            released_by: UNPREPARED.into(),
            other_pods: vec![pod("u2")],
        }
    );
    assert_eq!(world.unprepare("c1"), [], "a repeated Unprepare");

    for state in [CgroupState::Populated, CgroupState::Unknown] {
        let mut world = held();
        world.sees("u2", state);
        let entries = world.unprepare("c1");
        assert!(
            matches!(
                &entries[..],
                [Entry::Moved { state: GrantState::Prepared { unprepared_at: Some(_), .. }, .. }]
            ),
            "{entries:?}"
        );
        assert_eq!(world.unprepare("c1"), [], "it is recorded once");
        assert_eq!(world.look(5), [], "still held");
        let refused = world.refused(&[of_claim(9, "c9", "x", GPU, &["a-1"], "u9")]);
        assert!(refused.contains("no process of its pods runs"), "{refused}");
        assert!(!is_calm(&world.ledger, &world.watchlist, |_| true));
        world.sees("u2", CgroupState::Empty);
        assert_eq!(proofs(&world.look(6)), [UNPREPARED]);
    }
}

#[test]
fn a_prepare_of_the_same_allocation_makes_an_early_unprepare_void() {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    world.sees("u1", CgroupState::Populated);
    world.unprepare("c1");
    let answer = world.record(&[of_claim(2, "c1", "x", GPU, &["a-1"], "u2")]).unwrap();
    assert_eq!(ids(&answer), ["a-000001"]);
    world.sees("u1", CgroupState::Absent);
    world.sees("u2", CgroupState::Empty);
    assert_eq!(world.look(100), [], "the kubelet has not unprepared it since");
}

fn file(uids: &[&str], read: u64) -> Option<KubeletClaims> {
    let entry = |uid: &&str| {
        let kept = KubeletClaim { claim: claim(uid), pods: BTreeSet::new(), devices: Vec::new() };
        ((*uid).to_owned(), kept)
    };
    let claims = uids.iter().map(entry).collect();
    Some(KubeletClaims { claims, read_at: at(read) })
}

fn gone(is_gone: bool, seconds: u64) -> BTreeMap<String, ClaimLook> {
    BTreeMap::from([(
        "c1".to_owned(),
        ClaimLook { is_gone, at: at(seconds).boot, pods: Vec::new() },
    )])
}

/// The kubelet prepares a claim once for all of its pods: only its record has the later ones.
#[test]
fn a_pod_that_the_kubelet_has_added_since_the_prepare_uses_the_claim_too() {
    let held = || {
        let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
        world.sees("u1", CgroupState::Absent);
        world.sees("u2", CgroupState::Populated);
        let mut kept = file(&["c1"], 0);
        let entry = kept.as_mut().and_then(|kept| kept.claims.get_mut("c1")).unwrap();
        entry.pods = ["u2".to_owned()].into();
        world.evidence.kubelet = kept;
        world
    };
    let is_waiting = |entries: &[Entry]| {
        matches!(entries, [Entry::Moved {
            state: GrantState::Prepared { pods, unprepared_at: Some(_), .. }, ..
        }] if pods.iter().map(|pod| pod.uid.as_str()).eq(["u1", "u2"]))
    };
    // It was deleted by force, and its container runs.
    let mut world = held();
    let entries = world.unprepare("c1");
    assert!(is_waiting(&entries), "{entries:?}");
    assert_eq!(world.unprepare("c1"), [], "it is recorded once");
    world.evidence.kubelet = file(&[], 10);
    assert_eq!(world.look(10), [], "still held");
    world.sees("u2", CgroupState::Empty);
    assert_eq!(proofs(&world.look(11)), [UNPREPARED]);

    // The kubelet drops it from the record before the claim's last pod ends.
    let mut world = held();
    assert_eq!(world.look(1).len(), 1, "it is recorded when it is seen");
    world.evidence.kubelet = file(&["c1"], 10);
    let entries = world.unprepare("c1");
    assert!(is_waiting(&entries), "{entries:?}");

    // An Unprepare whose file is read before the ledger knows of the pod.
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    world.sees("u1", CgroupState::Populated);
    world.unprepare("c1");
    world.sees("u1", CgroupState::Absent);
    world.evidence.kubelet = held().evidence.kubelet;
    let entries = world.look(1);
    assert!(is_waiting(&entries), "it is added first: {entries:?}");
}

/// Where the kubelet's record cannot be seen, only the API server has the later pods.
#[test]
fn a_pod_that_the_api_server_has_reserved_a_claim_for_uses_it_too() {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    world.sees("u1", CgroupState::Absent);
    world.sees("u2", CgroupState::Populated);
    world.evidence.api = gone(false, 10);
    world.evidence.api.get_mut("c1").unwrap().pods = vec![pod("u1"), pod("u2")];
    let entries = world.look(10);
    let [Entry::Moved { state: GrantState::Prepared { pods, .. }, .. }] = &entries[..] else {
        panic!("{entries:?}");
    };
    assert_eq!(pods[1..], [pod("u2")], "with its name");
    assert_eq!(world.look(11), []);
    world.evidence.api.clear();
    world.unprepare("c1");
    world.sees("u2", CgroupState::Empty);
    assert_eq!(proofs(&world.look(12)), [UNPREPARED]);
}

#[test]
fn of_the_pods_of_a_claim_the_oldest_without_a_cgroup_are_forgotten() {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    world.sees("u1", CgroupState::Populated);
    for n in 2..CLAIM_PODS_MAX + 50 {
        world.sees(&format!("u{n}"), CgroupState::Absent);
        let mut kept = file(&["c1"], 0);
        let entry = kept.as_mut().and_then(|kept| kept.claims.get_mut("c1")).unwrap();
        entry.pods = ["u1".to_owned(), format!("u{n}")].into();
        world.evidence.kubelet = kept;
        world.look(1);
    }
    let grant = world.ledger.of_claim("c1").next().unwrap();
    let pods: Vec<&str> = grant.pods().map(|pod| pod.uid.as_str()).collect();
    assert_eq!((pods.len(), pods[0], pods[1]), (CLAIM_PODS_MAX, "u1", "u51"));
}

/// The kubelet cancels a Prepare that waits, unprepares the claim, and writes its file, all before
/// the claim is recorded. Nothing else makes it write the file again.
#[test]
fn a_claim_that_was_recorded_after_the_kubelet_gave_it_up_is_released() {
    let mut grant = of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
    grant.granted_at = at(20).wall;
    if let GrantState::Prepared { prepared_at, .. } = &mut grant.state {
        *prepared_at = at(20).wall;
    }
    let mut world = World::new([grant]);
    world.watchlist.note_answered("c1", at(20).boot);
    world.sees("u1", CgroupState::Absent);
    let mut look = |read: u64, asked: u64| {
        world.evidence.kubelet = file(&[], read);
        world.evidence.api = gone(true, asked);
        proofs(&world.look(asked)).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    for asked in [21, 26, 31] {
        assert!(look(20, asked).is_empty(), "the file may be from before the call");
    }
    assert!(look(21, 32).is_empty());
    assert_eq!(look(21, 37), [CLAIM_GONE]);
}

/// A claim that was answered in this process's life, and that has ended by every evidence.
fn gone_claim() -> World {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    world.watchlist.note_answered("c1", at(0).boot);
    world.sees("u1", CgroupState::Absent);
    world.evidence.kubelet = file(&["c2"], 10);
    world.evidence.api = gone(true, 10);
    world
}

#[test]
fn a_claim_is_gone_after_two_answers_five_seconds_apart_with_all_other_evidence() {
    let mut world = gone_claim();
    assert_eq!(world.look(10), []);
    assert!(world.watchlist.is_waiting(at(10).boot));
    assert_eq!(world.look(100), [], "the same answer of the server is one answer");
    world.evidence.api = gone(true, 14);
    assert_eq!(world.look(101), [], "4 s are not 5");
    world.evidence.api = gone(true, 15);
    assert_eq!(proofs(&world.look(102)), [CLAIM_GONE]);
    assert_eq!(ABSENCE_MIN, Duration::from_secs(5));
}

/// A Prepare for another pod voids the Unprepare in one grant only: the write was torn.
#[test]
fn the_grants_of_a_claim_end_together() {
    let both = [
        of_claim(1, "c1", "x", GPU, &["a-1"], "u1"),
        of_claim(2, "c1", "x", "example.com/nic", &["a-2"], "u1"),
    ];
    let mut world = World::new(both.clone());
    world.sees("u1", CgroupState::Populated);
    world.unprepare("c1");
    let torn = world.recording(&both).entries;
    world.apply(&torn[..1]);
    world.sees("u1", CgroupState::Absent);
    assert_eq!(world.look(5), []);
    world.apply(&torn);
    world.unprepare("c1");
    assert_eq!(world.ledger.of_claim("c1").count(), 0);
}

#[test]
fn any_missing_evidence_keeps_a_claim() {
    type Change = fn(&mut World);
    let changes: [(&str, Change); 9] = [
        ("no answer", |world| world.evidence.api.clear()),
        ("it is allocated", |world| world.evidence.api = gone(false, 20)),
        ("an answer from before the Prepare", |world| world.evidence.api = gone(true, 0)),
        ("no file", |world| world.evidence.kubelet = None),
        ("the kubelet has it", |world| world.evidence.kubelet = file(&["c1"], 10)),
        ("a file from before the Prepare", |world| world.evidence.kubelet = file(&[], 0)),
        ("it runs", |world| world.sees("u1", CgroupState::Populated)),
        ("its cgroup remains", |world| world.sees("u1", CgroupState::Empty)),
        ("its cgroup cannot be read", |world| world.sees("u1", CgroupState::Unknown)),
    ];
    for (what, change) in changes {
        // From the beginning, and between the two answers: then the proof starts again.
        let mut world = gone_claim();
        change(&mut world);
        for seconds in 0..100 {
            for look in world.evidence.api.values_mut().filter(|look| look.at > at(0).boot) {
                look.at = at(20 + seconds).boot;
            }
            assert_eq!(world.look(20 + seconds), [], "{what}");
        }
        let mut world = gone_claim();
        world.look(10);
        let before = (world.evidence.clone(), world.cgroups.clone());
        change(&mut world);
        world.look(12);
        (world.evidence, world.cgroups) = before;
        world.evidence.api = gone(true, 20);
        assert_eq!(world.look(20), [], "{what}: the proof starts again");
        world.evidence.api = gone(true, 25);
        assert_eq!(proofs(&world.look(25)), [CLAIM_GONE]);
    }
}

/// The same where the kubelet's file cannot be seen, as in a DaemonSet.
fn unlisted_claim() -> World {
    let mut world = gone_claim();
    world.evidence.kubelet = None;
    world.listed = Some(vec!["another"]);
    world
}

#[test]
fn a_listing_without_the_pods_replaces_a_file_that_cannot_be_seen() {
    let mut world = unlisted_claim();
    assert_eq!(world.look(10), []);
    world.evidence.api = gone(true, 15);
    assert_eq!(proofs(&world.look(16)), [CLAIM_GONE]);

    // Another pod has the name now, and runs.
    let mut world = unlisted_claim();
    world.listed = Some(vec!["pod-u1"]);
    world.sees("u2", CgroupState::Populated);
    world.names.insert("u2".into(), PodName { namespace: "ml".into(), name: "pod-u1".into() });
    assert_eq!(world.look(10), []);
    world.evidence.api = gone(true, 15);
    assert_eq!(proofs(&world.look(16)), [CLAIM_GONE]);
}

#[test]
fn an_incomplete_listing_keeps_a_claim() {
    type Change = fn(&mut World);
    let nameless = |world: &mut World| {
        let mut grant = Grant::clone(world.ledger.grants().next().unwrap());
        let GrantState::Prepared { pods, .. } = &mut grant.state else { panic!("{grant:?}") };
        pods[0].name = None;
        world.ledger.evolve(&Entry::Grant(Arc::new(grant)));
    };
    let podless = |world: &mut World| {
        let mut grant = Grant::clone(world.ledger.grants().next().unwrap());
        let GrantState::Prepared { pods, .. } = &mut grant.state else { panic!("{grant:?}") };
        pods.clear();
        world.ledger.evolve(&Entry::Grant(Arc::new(grant)));
    };
    let changes: [(&str, Change); 8] = [
        ("no listing", |world| world.listed = None),
        ("a young kubelet", |world| world.is_settled = false),
        ("the pod is listed", |world| world.listed = Some(vec!["another", "pod-u1"])),
        ("two pods of its name are listed", |world| {
            world.listed = Some(vec!["pod-u1", "pod-u1"]);
            world.sees("u2", CgroupState::Populated);
            let name = PodName { namespace: "ml".into(), name: "pod-u1".into() };
            world.names.insert("u2".into(), name);
        }),
        ("its cgroup remains", |world| world.sees("u1", CgroupState::Empty)),
        ("it is allocated", |world| world.evidence.api = gone(false, 20)),
        ("its pod has no name", nameless),
        ("its pods are not known", podless),
    ];
    for (what, change) in changes {
        let mut world = unlisted_claim();
        change(&mut world);
        for seconds in 0..100 {
            for look in world.evidence.api.values_mut() {
                look.at = at(20 + seconds).boot;
            }
            assert_eq!(world.look(20 + seconds), [], "{what}");
        }
    }
}

#[test]
fn the_kubelet_is_asked_for_its_pods_only_if_a_claim_may_be_gone_and_the_file_is_missing() {
    let needs = |world: &World| {
        let agenda = Agenda::of(&world.ledger, &world.watchlist, at(0));
        let claims = Arc::new(world.evidence.clone());
        let seen = Observation { claims, kubelet_settled: true, ..Observation::default() };
        agenda.query(&seen) == Some(PodQuery::All)
    };
    let mut world = unlisted_claim();
    assert!(needs(&world));
    world.evidence.api = gone(false, 10);
    assert!(!needs(&world));
    assert!(!needs(&gone_claim()), "the file decides");
}

#[test]
fn an_operator_releases_a_claim_whose_pods_are_removed_and_whose_hook_runs() {
    let release = |world: &World, kept: Option<&KubeletClaims>, is_confirmed| {
        let claim = stuck_claim(&world.ledger, "ml/claim-c1").unwrap();
        let cgroup = |uid: &str| world.cgroups.get(uid).copied().unwrap_or_default();
        let vouched = Vouched { kept, is_confirmed };
        release_stuck(&world.ledger, &world.hooks, &[], &claim, vouched, &cgroup, at(1).wall)
    };
    let of = |n, uid: &str| of_claim(n, uid, "x", GPU, &[&format!("a-{n}")], "u1");
    let mut world = World::new([of(1, "c1"), of(2, "c2")]).with_hook();
    for (state, why) in [
        (CgroupState::Populated, "a process of pod ml/pod-u1 runs"),
        (CgroupState::Empty, "exists"),
        (CgroupState::Unknown, "cannot be read"),
    ] {
        world.sees("u1", state);
        // A confirmation does not replace what is seen.
        let refused = release(&world, None, true).unwrap_err().to_string();
        assert!(refused.contains(why), "{state:?}: {refused}");
    }
    world.sees("u1", CgroupState::Absent);
    let kept = file(&["c1"], 10);
    let refused = release(&world, kept.as_ref(), true).unwrap_err();
    assert_eq!(refused, NotReleased::Kept(claim("c1")));
    let entries = release(&world, file(&["c2"], 10).as_ref(), false).unwrap();
    assert!(matches!(entries[0], Entry::Hook(_)), "{entries:?}");
    assert_eq!(proofs(&entries), [OPERATOR]);
    world.apply(&entries);
    assert_eq!(world.ledger.of_claim("c1").count(), 0);
    assert_eq!(world.ledger.of_claim("c2").count(), 1);
    for text in ["c1", "ml/claim-c1", "ml/claim", "", "claim-c2"] {
        let unknown = stuck_claim(&world.ledger, text).unwrap_err();
        assert_eq!(unknown, NotReleased::Unknown(text.into()));
    }
    for text in ["c2", "uid:c2", "ml/claim-c2"] {
        assert_eq!(stuck_claim(&world.ledger, text), Ok(claim("c2")));
    }
}

#[test]
fn a_claim_with_unknown_pods_needs_a_confirmation_and_an_ambiguous_name_a_uid() {
    let mut podless = of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
    let GrantState::Prepared { pods, .. } = &mut podless.state else { panic!("{podless:?}") };
    pods.clear();
    let mut later = of_claim(2, "c2", "x", GPU, &["a-2"], "u2");
    let mut hold = ClaimHold::clone(later.claim.as_ref().unwrap());
    hold.claim.name = claim("c1").name;
    later.claim = Some(Arc::new(hold));
    let world = World::new([podless, later]);
    let several = stuck_claim(&world.ledger, "ml/claim-c1").unwrap_err().to_string();
    assert!(several.contains("c1, c2"), "{several}");
    let kept = KubeletClaims { claims: BTreeMap::new(), read_at: at(1) };
    let release = |kept, is_confirmed| {
        let vouched = Vouched { kept, is_confirmed };
        let absent = |_: &str| CgroupState::Absent;
        release_stuck(&world.ledger, &world.hooks, &[], &claim("c1"), vouched, &absent, at(1).wall)
    };
    assert_eq!(release(Some(&kept), false), Err(NotReleased::PodsUnknown(claim("c1"))));
    assert_eq!(release(None, false), Err(NotReleased::RecordUnread(claim("c1"))));
    for kept in [Some(&kept), None] {
        assert_eq!(proofs(&release(kept, true).unwrap()), [OPERATOR]);
    }
}

/// A claim that was restored from its CDI file has neither requests nor pods.
#[test]
fn a_claim_without_pods_continues_with_its_next_prepare_and_blocks_all_others() {
    let mut restored = of_claim(1, "c1", "", GPU, &["a-1"], "u1");
    let mut hold = ClaimHold::clone(restored.claim.as_ref().unwrap());
    hold.claim = ClaimRef { uid: "c1".into(), namespace: String::new(), name: String::new() };
    hold.devices[0].allocated.request = String::new();
    restored.claim = Some(Arc::new(hold));
    let GrantState::Prepared { pods, .. } = &mut restored.state else { panic!("{restored:?}") };
    pods.clear();
    let mut world = World::new([restored]);
    let refused = world.refused(&[of_claim(2, "c2", "x", GPU, &["a-1"], "u2")]);
    assert!(refused.contains("claim c1"), "{refused}");
    // Another pod may use it already, so that it is not released, and no hook runs.
    world.hooks = ReleaseHooks::of([(resource(GPU), Some(Sharing::Exclusive))]);
    let wanted = of_claim(3, "c1", "x", GPU, &["a-1"], "u1");
    let answer = world.record(std::slice::from_ref(&wanted)).unwrap();
    assert_eq!(ids(&answer), ["a-000001"]);
    assert_eq!(world.ledger.of_claim("c1").collect::<Vec<_>>(), [&answer[0]]);
    let (hold, wanted) = (answer[0].claim.as_ref().unwrap(), wanted.claim.as_ref().unwrap());
    assert_eq!((&hold.claim, &hold.allocation), (&wanted.claim, &wanted.allocation));
    assert_eq!(hold.devices[0].allocated, wanted.devices[0].allocated);
    assert_eq!(answer[0].pods().count(), 1);
    assert!(world.ledger.owed().is_empty());
}

#[test]
fn a_claim_that_was_never_answered_is_released_when_the_kubelet_lacks_it_for_a_minute() {
    let unanswered = || {
        let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
        world.sees("u1", CgroupState::Absent);
        world.evidence.kubelet = file(&[], 10);
        world
    };
    let mut world = unanswered();
    assert_eq!(world.look(10), []);
    assert_eq!(world.look(69), []);
    assert_eq!(proofs(&world.look(70)), [NEVER_PREPARED]);
    assert_eq!(NEVER_PREPARED_MIN, Duration::from_secs(60));
    let mut world = unanswered();
    world.look(10);
    world.evidence.kubelet = None;
    world.look(40);
    world.evidence.kubelet = file(&[], 10);
    assert_eq!(world.look(70), [], "the file could not be read in between");
    assert_eq!(proofs(&world.look(130)), [NEVER_PREPARED]);
    let mut world = gone_claim();
    world.evidence.api.clear();
    for seconds in 0..50 {
        assert_eq!(world.look(10 * seconds), [], "it was answered");
    }
}

#[test]
fn a_young_kubelet_proves_no_claim_unprepared() {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    world.sees("u1", CgroupState::Absent);
    world.evidence.kubelet = file(&[], 10);
    world.is_settled = false;
    for seconds in 1..20 {
        assert_eq!(world.look(seconds * 10), []);
    }
    world.is_settled = true;
    assert_eq!(world.look(200), [], "the proof begins now");
    assert_eq!(proofs(&world.look(260)), [NEVER_PREPARED]);
}

#[test]
fn another_prepare_or_another_grant_of_the_claim_starts_its_proofs_again() {
    let mut world = gone_claim();
    assert_eq!(world.look(10), []);
    world.watchlist.note_answered("c1", at(12).boot);
    world.evidence.api = gone(true, 17);
    assert_eq!(world.look(17), [], "one answer since the Prepare");
    world.evidence.api = gone(true, 22);
    assert_eq!(world.look(22), [], "the file was read before the Prepare");
    world.evidence.kubelet = file(&["c2"], 23);
    assert_eq!(world.look(23), []);
    world.evidence.api = gone(true, 27);
    assert_eq!(proofs(&world.look(27)), [CLAIM_GONE]);

    let unanswered = || of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
    let mut world = World::new([unanswered()]);
    world.sees("u1", CgroupState::Absent);
    world.evidence.kubelet = file(&[], 10);
    assert_eq!(world.look(10), []);
    let released = world.unprepare("c1");
    assert_eq!(proofs(&released), [UNPREPARED]);
    assert_eq!(world.look(20), []);
    let again = Grant { alloc_id: AllocId::new("a-000009"), ..unanswered() };
    world.apply(&[Entry::Grant(Arc::new(again))]);
    assert_eq!(world.look(75), [], "it has been lacking for an earlier grant only");
    assert_eq!(proofs(&world.look(135)), [NEVER_PREPARED]);
}

#[test]
fn a_claim_without_a_running_pod_is_looked_at() {
    let world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    assert!(is_calm(&world.ledger, &world.watchlist, |uid| uid == "u1"));
    assert!(!is_calm(&world.ledger, &world.watchlist, |_| false));
}

#[test]
fn the_evidence_about_device_plugins_and_a_reboot_release_no_claim() {
    let mut world = World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]);
    for seconds in 0..50 {
        let seen = Observation {
            boot_id: "another boot".into(),
            kubelet_settled: true,
            checkpoint: Some(Arc::default()),
            pods: PodReport::All(Vec::new()),
            cgroups: BTreeMap::from([("u1".into(), CgroupState::Absent)]),
            ..Observation::default()
        };
        let entries = reconcile(&mut world.watchlist, &world.ledger, &seen, at(seconds * 30));
        assert_eq!(entries, []);
    }
    assert!(!world.watchlist.has_forgotten());
}

#[test]
fn the_names_of_restored_pods_are_filled_in() {
    let mut grant = of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
    let (prepared_at, unprepared_at) = (Timestamp(WALL), None);
    let pods = vec![PodRef { uid: "u1".into(), namespace: None, name: None }];
    grant.state = GrantState::Prepared { pods, prepared_at, unprepared_at };
    let mut world = World::new([grant]);
    let name = PodName { namespace: "ml".into(), name: "pod-u1".into() };
    let seen =
        Observation { names: BTreeMap::from([("u1".into(), name)]), ..Observation::default() };
    let entries = reconcile(&mut world.watchlist, &world.ledger, &seen, at(0));
    world.apply(&entries);
    assert_eq!(world.ledger.grants().next().unwrap().pod(), Some(&pod("u1")));
}

#[test]
fn the_pods_of_a_claim_are_bounded_and_running_ones_are_never_forgotten() {
    let mut grant = of_claim(1, "c1", "x", GPU, &["a-1"], "u0");
    let (prepared_at, unprepared_at) = (Timestamp(WALL), None);
    let pods: Vec<PodRef> = (0..CLAIM_PODS_MAX).map(|n| pod(&format!("u{n}"))).collect();
    grant.state = GrantState::Prepared { pods, prepared_at, unprepared_at };
    let mut world = World::new([grant]);
    world.sees("u0", CgroupState::Populated);
    world.sees("u1", CgroupState::Absent);
    world.sees("u2", CgroupState::Absent);
    let answer = world.record(&[of_claim(2, "c1", "x", GPU, &["a-1"], "new")]).unwrap();
    let known: Vec<&str> = answer[0].pods().map(|pod| pod.uid.as_str()).collect();
    assert_eq!(known.len(), CLAIM_PODS_MAX);
    assert!(known[..2] == ["u0", "u2"] && known.ends_with(&["new"]), "{known:?}");
}

#[test]
fn only_the_grants_of_one_allocation_for_a_pod_are_a_claim() {
    let good = of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
    let is_claim = |grants: &[&Grant]| {
        is_one_claim(&grants.iter().map(|grant| Arc::new(Grant::clone(grant))).collect::<Vec<_>>())
    };
    assert!(is_claim(&[&good]));
    assert!(is_claim(&[&good, &of_claim(2, "c1", "x", "a.com/b", &["a-2"], "u1")]));
    let no_pod =
        GrantState::Prepared { pods: Vec::new(), prepared_at: Timestamp(1), unprepared_at: None };
    for bad in [
        vec![],
        vec![&allocated(1, GPU, "a-1")],
        vec![&good, &of_claim(2, "c1", "y", GPU, &["a-2"], "u1")],
        vec![&good, &of_claim(2, "c2", "x", GPU, &["a-2"], "u1")],
        vec![&of_claim(2, "c1", "", GPU, &["a-2"], "u1")],
        vec![&of_claim(2, "c1", "x", GPU, &[], "u1")],
        vec![&Grant { state: GrantState::Granted, ..good.clone() }],
        vec![&Grant { state: no_pod, ..good.clone() }],
        vec![&Grant { devices: vec![granted("a-9")], ..good.clone() }],
    ] {
        assert!(!is_claim(&bad), "{bad:?}");
    }
}

#[test]
fn a_lost_claim_comes_back_from_the_kubelets_record_and_the_next_prepare_finds_it() {
    let answered = |id: &str| PreparedDevice {
        request: "gpu".into(),
        name: claimed(id, "").allocated.name,
        cdi_devices: vec![format!("k8s.holdfast.dev/claim=old-{id}")],
        share_id: None,
    };
    let kept = KubeletClaim {
        claim: claim("c1"),
        pods: BTreeSet::from(["u1".to_owned()]),
        devices: ["a-2", "a-1", "a-9"].map(answered).into(),
    };
    let kept = KubeletClaims { claims: BTreeMap::from([("c1".to_owned(), kept)]), read_at: at(0) };
    let node = EditDevice {
        host: "/dev/x1".into(),
        container: "/dev/x1".into(),
        permissions: "rw".into(),
    };
    let edits = ContainerEdits { devices: vec![node], ..ContainerEdits::default() };
    let named = |name: &DraName| {
        (name.device != "a-9").then(|| NamedDevice {
            resource: resource(GPU),
            device: granted(&name.device),
            edits: edits.clone(),
        })
    };
    let restore = |ledger: &Ledger| {
        let mut n = 70;
        let new_id = || {
            n += 1;
            AllocId::new(format!("r-{n}"))
        };
        restore_claims(&kept, ledger, named, new_id, BOOT, at(5).wall)
    };
    let restored = restore(&Ledger::default());
    let [grant] = &restored.grants[..] else { panic!("{restored:?}") };
    assert_eq!(restored.unknown, [claimed("a-9", "").allocated.name]);
    assert_eq!((grant.state_name(), grant.pod().unwrap().uid.as_str()), ("prepared", "u1"));
    let hold = grant.claim.as_ref().unwrap();
    assert_eq!(hold.devices[0].cdi_devices, ["k8s.holdfast.dev/claim=old-a-1"]);
    assert_eq!(hold.devices[0].edits, edits);

    let mut world = World::new([grant.clone()]);
    assert_eq!(restore(&world.ledger).grants, [], "it is no longer lacking");
    let refused = world.refused(&[of_claim(9, "c9", "x", GPU, &["a-1"], "u9")]);
    assert!(refused.contains("claim ml/claim-c1"), "{refused}");
    let answer = world.record(&[of_claim(1, "c1", "x", GPU, &["a-1", "a-2"], "u1")]).unwrap();
    assert_eq!(ids(&answer), ["r-71"], "the answer that the kubelet already has");
    // Other devices are another allocation.
    let mut world = World::new([grant.clone()]);
    world.sees("u1", CgroupState::Populated);
    assert!(world.record(&[of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]).is_err());
    // A part of a claim that the ledger has.
    let part = restore(&World::new([of_claim(1, "c1", "x", GPU, &["a-1"], "u1")]).ledger);
    let [grant] = &part.grants[..] else { panic!("{part:?}") };
    let hold = grant.claim.as_ref().unwrap();
    assert_eq!((hold.allocation.as_str(), hold.devices[0].id.as_str()), ("", "a-2"));
    // The next Prepare shows whether it is of the same allocation or of a former one.
    for allocated in [&["a-1", "a-2"][..], &["a-1"]] {
        let known = of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
        let mut world = World::new([known, grant.clone()]);
        world.sees("u1", CgroupState::Absent);
        let answer = world.record(&[of_claim(2, "c1", "x", GPU, allocated, "u1")]).unwrap();
        let devices = answer.iter().flat_map(|grant| &grant.devices);
        let answered: BTreeSet<&str> = devices.map(|device| device.id.as_str()).collect();
        assert_eq!(answered, allocated.iter().copied().collect());
    }
}

#[test]
fn a_device_that_a_lost_claim_has_for_two_requests_is_restored_once() {
    let prepared = |(request, id): (&str, &str)| PreparedDevice {
        request: request.into(),
        name: claimed(id, "").allocated.name,
        cdi_devices: Vec::new(),
        share_id: None,
    };
    let devices = [("one", "a-1"), ("one", "a-2"), ("two", "a-1")].map(prepared).into();
    let kept = KubeletClaim { claim: claim("c1"), pods: BTreeSet::new(), devices };
    let kept = KubeletClaims { claims: BTreeMap::from([("c1".to_owned(), kept)]), read_at: at(0) };
    let named = |name: &DraName| {
        Some(NamedDevice {
            resource: resource(GPU),
            device: granted(&name.device),
            edits: ContainerEdits::default(),
        })
    };
    let new_id = || AllocId::new("r-1");
    let restored = restore_claims(&kept, &Ledger::default(), named, new_id, BOOT, at(5).wall);
    let [grant] = &restored.grants[..] else { panic!("{restored:?}") };
    assert_eq!(grant.devices, ["a-1", "a-2"].map(granted));
    assert_eq!(grant.claim.as_ref().unwrap().devices.len(), 3);
}

#[test]
fn a_claim_restored_from_an_old_record_waits_for_the_holder_of_its_device() {
    // The kubelet died before it removed a claim that was unprepared. Another claim got its device.
    let restored = of_claim(1, "c1", "", GPU, &["a-1", "a-2"], "u1");
    let mut world = World::new([restored, of_claim(2, "c2", "y", GPU, &["a-1"], "u2")]);
    let again = || [of_claim(9, "c1", "x", GPU, &["a-1", "a-2"], "u9")];
    let refused = world.refused(&again());
    assert!(refused.contains("claim ml/claim-c2"), "{refused}");
    let other = world.record(&[of_claim(3, "c2", "y", GPU, &["a-1"], "u2")]);
    assert_eq!(ids(&other.unwrap()), ["a-000002"], "a grant that was recorded is repeated");
    world.sees("u2", CgroupState::Absent);
    world.unprepare("c2");
    assert_eq!(ids(&world.record(&again()).unwrap()), ["a-000001"]);
    // The kubelet's record has both. One of them may be an administrator's.
    let restored = |n, uid, of| of_claim(n, uid, "", GPU, &["a-1"], of);
    let mut world = World::new([restored(1, "c1", "u1"), restored(2, "c2", "u2")]);
    let answer = world.record(&[of_claim(9, "c1", "x", GPU, &["a-1"], "u1")]);
    assert_eq!(ids(&answer.unwrap()), ["a-000001"]);
}

/// Two claims of a former boot whose devices have exchanged their nodes.
#[test]
fn the_first_prepare_in_a_boot_records_the_present_nodes_of_each_device() {
    let node = |id: &str, path: &str| {
        let device = |device: GrantedDevice| GrantedDevice {
            objects: vec![Object::node(path), Object::of_text(&format!("pci:{id}"))],
            ..device
        };
        device(granted(id))
    };
    let prepared = |n, uid: &str, id: &str, path: &str, boot: &str| {
        let mut grant = of_claim(n, uid, "x", GPU, &[id], "u1");
        let mut hold = ClaimHold::clone(grant.claim.as_ref().unwrap());
        hold.devices[0].edits.devices = vec![EditDevice {
            host: path.into(),
            container: path.into(),
            permissions: "rw".into(),
        }];
        grant.devices = vec![node(id, path)];
        (grant.claim, grant.boot_id) = (Some(Arc::new(hold)), boot.into());
        grant
    };
    let former =
        [prepared(1, "c1", "a-1", "/dev/x1", BOOT), prepared(2, "c2", "a-2", "/dev/x2", BOOT)];
    let behind = |_: &str| panic!("a claim holds no node before it is prepared");
    let mut world = World::new(former.map(|grant| grant.in_boot("boot-2", behind)));
    let again = |n, uid: &str, id: &str, path: &str| [prepared(n, uid, id, path, "boot-2")];
    let one = world.record(&again(3, "c1", "a-1", "/dev/x2")).unwrap();
    assert_eq!(ids(&one), ["a-000001"], "the grant is that of before");
    let (grant, hold) = (&one[0], one[0].claim.as_ref().unwrap());
    assert_eq!(grant.boot_id, "boot-2");
    assert_eq!(grant.devices, [node("a-1", "/dev/x2")]);
    assert_eq!(hold.devices[0].edits.devices[0].host, "/dev/x2");
    let two = world.record(&again(4, "c2", "a-2", "/dev/x1")).unwrap();
    assert_eq!(two[0].devices, [node("a-2", "/dev/x1")]);
    // Another Prepare in this boot changes nothing.
    let Recording { entries, answer } = world.recording(&again(5, "c1", "a-1", "/dev/x9"));
    assert_eq!((entries, answer.unwrap()), (Vec::new(), one));
}

#[test]
fn a_restored_claim_gets_its_allocation_from_the_next_prepare() {
    let mut restored = of_claim(1, "c1", "", GPU, &["a-1"], "u1");
    let mut hold = ClaimHold::clone(restored.claim.as_ref().unwrap());
    hold.devices[0].cdi_devices = vec!["k8s.holdfast.dev/claim=old".into()];
    restored.claim = Some(Arc::new(hold.clone()));
    let mut world = World::new([restored]);
    let other = || [of_claim(5, "c5", "z", GPU, &["a-1"], "u5")];
    assert!(world.record(&other()).is_err(), "the record does not show that the device is shared");
    let mut wanted = of_claim(2, "c1", "x", GPU, &["a-1"], "u1");
    let mut admin = ClaimHold::clone(wanted.claim.as_ref().unwrap());
    (admin.devices[0].allocated.admin, admin.devices[0].allocated.request) =
        (true, "gpu/shared".into());
    wanted.claim = Some(Arc::new(admin.clone()));
    let answer = world.record(std::slice::from_ref(&wanted)).unwrap();
    hold.allocation = "x".into();
    hold.devices[0].allocated = admin.devices[0].allocated.clone();
    assert_eq!((ids(&answer), answer[0].claim.as_deref()), (vec!["a-000001"], Some(&hold)));
    assert_eq!(world.ledger.of_claim("c1").collect::<Vec<_>>(), [&answer[0]]);
    assert_eq!(world.recording(&[wanted]).entries, []);
    assert!(world.record(&other()).is_ok());
}

/// One step of a history.
#[derive(Debug, Clone)]
enum Step {
    /// A container gets the device of this number, by one of its two ids.
    Allocate(u8, bool),
    /// The end of the n-th container is proven.
    PodGone(u8),
    /// A Prepare of a claim with an allocation, for a pod; its write may be torn.
    Prepare {
        claim: u8,
        allocation: u8,
        pod: u8,
        torn: Option<u8>,
    },
    Unprepare(u8),
    Cgroup(u8, CgroupState),
    /// What the API server answers about a claim, or that it does not answer.
    Api(u8, Option<bool>),
    /// The claims in the kubelet's file, as bits; `None` if it cannot be read.
    File(Option<u8>),
    Look(u8),
    HooksRun,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let cgroup = prop_oneof![
        2 => Just(CgroupState::Populated),
        2 => Just(CgroupState::Empty),
        3 => Just(CgroupState::Absent),
        1 => Just(CgroupState::Unknown)
    ];
    let torn = prop::option::weighted(0.15, 0..4_u8);
    prop_oneof![
        2 => (0..4_u8, any::<bool>()).prop_map(|(device, other)| Step::Allocate(device, other)),
        2 => (0..4_u8).prop_map(Step::PodGone),
        6 => (0..3_u8, 0..2_u8, 0..4_u8, torn).prop_map(|(claim, allocation, pod, torn)| {
            Step::Prepare { claim, allocation, pod, torn }
        }),
        3 => (0..3_u8).prop_map(Step::Unprepare),
        4 => (0..4_u8, cgroup).prop_map(|(pod, state)| Step::Cgroup(pod, state)),
        3 => (0..3_u8, prop::option::weighted(0.9, prop::bool::weighted(0.8)))
            .prop_map(|(claim, gone)| Step::Api(claim, gone)),
        2 => prop::option::weighted(0.9, 0..8_u8).prop_map(Step::File),
        8 => (0..40_u8).prop_map(Step::Look),
        2 => Just(Step::HooksRun),
        1 => Just(Step::Restart),
    ]
}

/// What is known of the history apart from the ledger.
#[derive(Default)]
struct Facts {
    clock: u64,
    made: u64,
    /// The answered devices of each allocation that is still live.
    answers: BTreeMap<(String, String), Vec<PreparedDevice>>,
    /// When a claim was last in an answer of this process.
    answered: BTreeMap<String, u64>,
    /// Claims that were unprepared after their last Prepare.
    unprepared: BTreeSet<String>,
    /// When the API server first answered without contradiction that it has no such allocation.
    gone: BTreeMap<String, u64>,
    /// Since when each pass found that the file lacks a claim.
    lacking: BTreeMap<String, u64>,
}

/// The devices of an allocation: 0 has a GPU and a part of another device, 1 another GPU.
fn wanted(facts: &mut Facts, claim: u8, allocation: u8, pod: u8) -> Vec<Grant> {
    let (uid, of) = (format!("c{claim}"), format!("u{pod}"));
    let digest = format!("x{allocation}");
    let mut grant = |name: &str, id: String| {
        facts.made += 1;
        let mut grant = of_claim(facts.made, &uid, &digest, name, &[&id], &of);
        grant.granted_at = at(facts.clock).wall;
        if let GrantState::Prepared { prepared_at, .. } = &mut grant.state {
            *prepared_at = at(facts.clock).wall;
        }
        grant
    };
    match allocation {
        0 => vec![
            grant(GPU, format!("a-{claim}")),
            grant("example.com/other", format!("b-{}", (claim + 1) % 4)),
        ],
        _ => vec![grant(GPU, format!("a-{}", (claim + 2) % 4))],
    }
}

fn devices(answer: &[Arc<Grant>]) -> Vec<PreparedDevice> {
    let claimed = answer.iter().flat_map(|grant| &grant.claim.as_ref().unwrap().devices);
    let mut devices: Vec<PreparedDevice> = claimed.map(PreparedDevice::from).collect();
    devices.sort_by(|one, other| (&one.request, &one.name).cmp(&(&other.request, &other.name)));
    devices
}

fn no_object_has_two_holders(ledger: &Ledger) -> Result<(), TestCaseError> {
    let all: Vec<&Arc<Grant>> = ledger.grants().collect();
    for (at, one) in all.iter().enumerate() {
        for other in &all[at + 1..] {
            let (Some(a), Some(b)) = (&one.claim, &other.claim) else {
                let is_dp = one.claim.is_none() && other.claim.is_none();
                let passed_on = is_dp && one.resource == other.resource;
                prop_assert!(
                    passed_on || !overlap(&one.objects(), &other.objects()),
                    "{one:?} {other:?}"
                );
                continue;
            };
            let is_one = a.claim.uid == b.claim.uid;
            prop_assert!(is_one || !overlap(&one.objects(), &other.objects()), "{one:?} {other:?}");
            prop_assert!(!is_one || a.allocation == b.allocation, "{one:?} {other:?}");
        }
    }
    Ok(())
}

/// Checks the proof of each release.
fn every_release_is_proven(
    world: &World,
    facts: &Facts,
    entries: &[Entry],
) -> Result<(), TestCaseError> {
    for (n, entry) in entries.iter().enumerate() {
        let Some(proof) = proof(entry) else { continue };
        let Entry::Moved { alloc_id, .. } = entry else { unreachable!() };
        let grant = world.ledger.grant(alloc_id).expect("it was live");
        let uid = &grant.claim.as_ref().expect("only claims are released here").claim.uid;
        let cgroup = |pod: &PodRef| world.cgroups.get(&pod.uid).copied().unwrap_or_default();
        prop_assert!(grant.pods().all(|pod| cgroup(pod).is_dead()), "{proof}");
        let file = world.evidence.kubelet.as_ref();
        let answered = facts.answered.get(uid).map(|answered| at(*answered).boot);
        let lacks = file.is_some_and(|file| {
            let is_newer = answered.is_none_or(|answered| answered < file.read_at.boot);
            is_newer && !file.claims.contains_key(uid)
        });
        let is_removed = grant.pods().all(|pod| cgroup(pod) == CgroupState::Absent);
        match proof {
            UNPREPARED => prop_assert!(facts.unprepared.contains(uid)),
            REALLOCATED => {}
            CLAIM_GONE => {
                let look = world.evidence.api.get(uid).expect("the server's answer");
                let since = facts.gone.get(uid).expect("an earlier answer");
                prop_assert!(look.is_gone && lacks && is_removed);
                prop_assert!(look.at.as_secs() - 1000 - since >= 5);
            }
            NEVER_PREPARED => {
                let since = facts.lacking.get(uid).expect("an earlier pass");
                prop_assert!(lacks && is_removed && !facts.answered.contains_key(uid));
                prop_assert!(facts.clock - since >= 60);
            }
            other => prop_assert!(false, "{other}"),
        }
        if grant.resource == resource(GPU) {
            let has_hook = entries[..n]
                .iter()
                .any(|entry| matches!(entry, Entry::Hook(hook) if hook.alloc_id == *alloc_id));
            prop_assert!(has_hook, "the hook is written before the release");
        }
    }
    Ok(())
}

/// Notes what a pass can see, before it is made.
fn note_sight(world: &World, facts: &mut Facts) {
    for n in 0..3 {
        let uid = format!("c{n}");
        let look = world.evidence.api.get(&uid).filter(|look| look.is_gone);
        match look {
            Some(look) => drop(facts.gone.entry(uid.clone()).or_insert(look.at.as_secs() - 1000)),
            None => drop(facts.gone.remove(&uid)),
        }
        let file = world.evidence.kubelet.as_ref();
        if file.is_some_and(|file| !file.claims.contains_key(&uid)) {
            facts.lacking.entry(uid).or_insert(facts.clock);
        } else {
            facts.lacking.remove(&uid);
        }
    }
}

fn allocate(world: &mut World, facts: &mut Facts, device: u8, other: bool) {
    facts.made += 1;
    let (name, id) = if other { ("example.com/other", "b") } else { (GPU, "a") };
    let grant = allocated(facts.made, name, &format!("{id}-{device}"));
    let waits = world.ledger.waits(&world.hooks, std::iter::empty(), &grant);
    let held = held_by_another(&world.ledger, std::iter::empty(), &grant);
    if waits.or(held).is_none() {
        world.apply(&[Entry::Grant(Arc::new(grant))]);
    }
}

fn end_pod(world: &mut World, facts: &Facts, n: u8) {
    let dp = world.ledger.grants().filter(|grant| grant.claim.is_none()).nth(n.into());
    let Some(grant) = dp else { return };
    let moves = [Entry::Moved {
        alloc_id: grant.alloc_id.clone(),
        state: released(grant, POD_GONE, at(facts.clock).wall),
    }];
    let hooks = owing(&world.ledger, &world.hooks, &moves, std::iter::empty());
    world.apply(&hooks);
    world.apply(&moves);
}

fn prepare(
    world: &mut World,
    facts: &mut Facts,
    (claim, allocation, pod): (u8, u8, u8),
    torn: Option<u8>,
) -> Result<(), TestCaseError> {
    let wanted = wanted(facts, claim, allocation, pod);
    let Recording { mut entries, answer } = world.recording(&wanted);
    every_release_is_proven(world, facts, &entries)?;
    let uid = format!("c{claim}");
    if let Some(torn) = torn.filter(|torn| usize::from(*torn) < entries.len()) {
        entries.truncate(torn.into());
        world.apply(&entries);
        if !proofs(&entries).is_empty() {
            // The former allocation has ended, although a part of it is live.
            facts.answers.retain(|(of, _), _| *of != uid);
        }
        return restart(world, facts);
    }
    world.apply(&entries);
    let Ok(answer) = answer else { return Ok(()) };
    world.watchlist.note_answered(&uid, at(facts.clock).boot);
    let live: Vec<Arc<Grant>> = world.ledger.of_claim(&uid).rev_sorted();
    prop_assert_eq!(&answer, &live, "the answer is in force");
    facts.unprepared.remove(&uid);
    facts.answered.insert(uid.clone(), facts.clock);
    facts.gone.remove(&uid);
    let key = (uid, format!("x{allocation}"));
    let first = facts.answers.entry(key).or_insert_with(|| devices(&answer));
    prop_assert_eq!(first, &devices(&answer), "the answer is the first one");
    Ok(())
}

fn unprepare(world: &mut World, facts: &mut Facts, claim: u8) -> Result<(), TestCaseError> {
    let uid = format!("c{claim}");
    facts.unprepared.insert(uid.clone());
    let cgroup = |uid: &str| world.cgroups.get(uid).copied().unwrap_or_default();
    let now = at(facts.clock).wall;
    let listed = world.listed(&uid);
    let entries = release_claim(&world.ledger, &world.hooks, &[], &uid, &listed, &cgroup, now);
    every_release_is_proven(world, facts, &entries)?;
    world.apply(&entries);
    Ok(())
}

fn look(world: &mut World, facts: &mut Facts) -> Result<(), TestCaseError> {
    note_sight(world, facts);
    let seen = Observation {
        boot_id: BOOT.into(),
        kubelet_settled: true,
        cgroups: world.cgroups.clone(),
        claims: Arc::new(world.evidence.clone()),
        ..Observation::default()
    };
    let mut entries = reconcile(&mut world.watchlist, &world.ledger, &seen, at(facts.clock));
    let hooks = owing(&world.ledger, &world.hooks, &entries, std::iter::empty());
    entries.splice(0..0, hooks);
    every_release_is_proven(world, facts, &entries)?;
    world.apply(&entries);
    Ok(())
}

fn restart(world: &mut World, facts: &mut Facts) -> Result<(), TestCaseError> {
    let ledger = &world.ledger;
    let rebuilt = Ledger::from_recovered(
        ledger.grants().map(|grant| Grant::clone(grant)),
        BTreeMap::new(),
        BTreeMap::new(),
        ledger.owed().clone(),
        Verdicts::new(),
    );
    prop_assert_eq!(&rebuilt, ledger, "the indexes are those of the grants");
    world.ledger = rebuilt;
    world.watchlist = Watchlist::default();
    facts.answered.clear();
    (facts.gone, facts.lacking) = Default::default();
    Ok(())
}

fn take(world: &mut World, facts: &mut Facts, step: Step) -> Result<(), TestCaseError> {
    match step {
        Step::Allocate(device, other) => allocate(world, facts, device, other),
        Step::PodGone(n) => end_pod(world, facts, n),
        Step::Prepare { claim, allocation, pod, torn } => {
            prepare(world, facts, (claim, allocation, pod), torn)?;
        }
        Step::Unprepare(claim) => unprepare(world, facts, claim)?,
        Step::Cgroup(pod, state) => world.sees(&format!("u{pod}"), state),
        Step::Api(claim, gone) => {
            let (uid, at) = (format!("c{claim}"), at(facts.clock).boot);
            match gone {
                Some(is_gone) => drop(
                    world.evidence.api.insert(uid, ClaimLook { is_gone, at, pods: Vec::new() }),
                ),
                None => drop(world.evidence.api.remove(&uid)),
            }
        }
        Step::File(bits) => {
            let has = |n: &u8| bits.is_some_and(|bits| bits >> n & 1 == 1);
            let uids: Vec<String> = (0..3).filter(has).map(|n| format!("c{n}")).collect();
            let uids: Vec<&str> = uids.iter().map(String::as_str).collect();
            world.evidence.kubelet = bits.and_then(|_| file(&uids, facts.clock));
        }
        Step::Look(wait) => {
            facts.clock += u64::from(wait);
            look(world, facts)?;
        }
        Step::HooksRun => run_hooks(world),
        Step::Restart => restart(world, facts)?,
    }
    facts.answers.retain(|(uid, allocation), _| {
        let mut live = world.ledger.of_claim(uid);
        live.any(|grant| grant.claim.as_ref().is_some_and(|of| of.allocation == *allocation))
    });
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_object_has_two_holders_no_answer_changes_and_nothing_is_released_without_proof(
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut world = World::new([]).with_hook();
        let mut facts = Facts::default();
        for step in steps {
            take(&mut world, &mut facts, step)?;
            no_object_has_two_holders(&world.ledger)?;
        }
    }
}

#[test]
fn a_pass_looks_at_the_pods_of_claims() {
    let of_claim = of_claim(1, "c1", "x", GPU, &["a-1"], "u1");
    let world = World::new([of_claim, allocated(2, GPU, "a-2")]);
    let agenda = Agenda::of(&world.ledger, &world.watchlist, at(0));
    let only = |uid: &str| BTreeSet::from([uid.to_owned()]);
    assert_eq!((agenda.claim_pods, agenda.claims), (only("u1"), only("c1")));
    assert!(agenda.pods.is_empty(), "the other grant has no container yet");
}
