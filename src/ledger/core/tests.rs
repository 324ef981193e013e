//! The rules of the ledger, one sentence each, and the properties that hold for every observation.

use super::*;
use crate::domain::{
    Attributes, CgroupState, Checkpoint, CheckpointEntry, ClaimHold, ClaimRef, ContainerEdits,
    Device, DeviceClass, DeviceNumber, GrantState, Health, ListedContainer, ListedPod, Moment,
    Object, Observation, Offered, Offering, PendingHooks, PodName, PodRef, PodReport, Reason,
    ResourceSpec, Timestamp,
};
use proptest::prelude::*;
use std::time::Duration;

const BOOT: &str = "boot-1";
const WALL: u64 = 1_700_000_000_000;

fn at(seconds: u64) -> Moment {
    Moment { boot: Duration::from_secs(1000 + seconds), wall: Timestamp(WALL + seconds * 1000) }
}

fn resource() -> ResourceName {
    "nvidia.com/gpu".parse().unwrap()
}

fn alloc(n: u64) -> AllocId {
    AllocId::new(format!("alloc-{n}"))
}

fn grant(n: u64, device: &str, boot: &str) -> Grant {
    Grant {
        alloc_id: alloc(n),
        resource: resource(),
        devices: vec![GrantedDevice {
            id: DeviceId::new(device),
            key: format!("pci:{device}"),
            numa_nodes: vec![],
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: boot.into(),
        kubelet: None,
        granted_at: Timestamp(WALL),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }
}

fn entry(uid: &str, container: &str, device: &str, alloc_id: Option<AllocId>) -> CheckpointEntry {
    CheckpointEntry {
        pod_uid: uid.into(),
        container: container.into(),
        resource: resource(),
        device_ids: BTreeSet::from([DeviceId::new(device)]),
        alloc_id,
    }
}

fn listed(name: &str, devices: &[&str]) -> ListedPod {
    let ids: BTreeSet<_> = devices.iter().map(|id| DeviceId::new(*id)).collect();
    let devices =
        if ids.is_empty() { BTreeMap::new() } else { BTreeMap::from([(resource(), ids)]) };
    ListedPod {
        namespace: "default".into(),
        name: name.into(),
        containers: vec![ListedContainer {
            name: "main".into(),
            devices,
            ..ListedContainer::default()
        }],
    }
}

fn name(name: &str) -> PodName {
    PodName { namespace: "default".into(), name: name.into() }
}

/// A ledger, its watchlist and the world that it observes.
struct World {
    ledger: Ledger,
    watchlist: Watchlist,
    seen: Observation,
}

impl World {
    /// One pod `web` (UID `u1`), running with `gpu0`, granted as 1 and not yet bound.
    fn new() -> Self {
        let mut ledger = Ledger::default();
        ledger.evolve(&Entry::Grant(Arc::new(grant(1, "gpu0", BOOT))));
        let checkpoint = Arc::new(Checkpoint::new(
            vec![entry("u1", "main", "gpu0", Some(alloc(1)))],
            Timestamp(WALL + 1),
        ));
        let seen = Observation {
            boot_id: BOOT.into(),
            kubelet: None,
            kubelet_settled: true,
            checkpoint: Some(checkpoint),
            pods: PodReport::All(vec![listed("web", &["gpu0"])]),
            names: BTreeMap::from([("u1".into(), name("web"))]),
            cgroups: BTreeMap::from([("u1".into(), CgroupState::Populated)]),
            claims: Arc::default(),
        };
        World { ledger, watchlist: Watchlist::default(), seen }
    }

    /// The same, bound.
    fn bound() -> Self {
        let mut world = World::new();
        world.look(0);
        assert_eq!(world.state(1), "bound");
        world
    }

    /// The same, but the pod was removed; another pod keeps the list from being empty.
    fn gone() -> Self {
        let mut world = World::bound();
        world.seen.pods = PodReport::All(vec![listed("other", &[])]);
        world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
        world
    }

    fn look(&mut self, seconds: u64) -> Vec<Entry> {
        let entries = reconcile(&mut self.watchlist, &self.ledger, &self.seen, at(seconds));
        for entry in &entries {
            self.ledger.evolve(entry);
        }
        entries
    }

    fn state(&self, n: u64) -> &'static str {
        self.ledger.grant(&alloc(n)).map_or("released", |grant| grant.state_name())
    }

    /// The kubelet writes a checkpoint with these entries.
    fn write(&mut self, entries: Vec<CheckpointEntry>) {
        let written_at = self.seen.checkpoint.as_ref().unwrap().written_at();
        self.write_at(entries, written_at);
    }

    fn write_at(&mut self, entries: Vec<CheckpointEntry>, written_at: Timestamp) {
        self.seen.checkpoint = Some(Arc::new(Checkpoint::new(entries, written_at)));
    }
}

fn released_by(entries: &[Entry]) -> Option<&str> {
    match entries {
        [Entry::Moved { state: GrantState::Released { released_by, .. }, .. }] => Some(released_by),
        _ => None,
    }
}

#[test]
fn a_grant_is_bound_by_its_alloc_id_in_the_checkpoint() {
    let mut world = World::new();
    let entries = world.look(3);
    let pod =
        PodRef { uid: "u1".into(), namespace: Some("default".into()), name: Some("web".into()) };
    let state = GrantState::Bound { pod, container: "main".into(), bound_at: at(3).wall };
    assert_eq!(entries, [Entry::Moved { alloc_id: alloc(1), state }]);
    assert_eq!(world.look(4), [], "and that is reported once");
}

#[test]
fn the_same_ids_without_the_alloc_id_bind_nothing() {
    let mut world = World::new();
    world.write(vec![entry("u1", "main", "gpu0", Some(alloc(7)))]);
    assert_eq!(world.look(0), []);
}

#[test]
fn a_name_that_is_found_later_is_filled_in() {
    let mut world = World::new();
    world.seen.names.clear();
    world.seen.pods = PodReport::Nothing;
    world.look(0);
    let named = |world: &World| world.ledger.grant(&alloc(1)).unwrap().pod().unwrap().name.clone();
    assert_eq!(named(&world), None);
    world.seen.names.insert("u1".into(), name("web"));
    assert_eq!(world.look(1).len(), 1);
    assert_eq!(named(&world).as_deref(), Some("web"));
    assert_eq!(world.look(2), []);
}

#[test]
fn a_pod_without_a_name_is_looked_at_again_soon_for_a_while() {
    let mut world = World::new();
    let after = |world: &World, seconds| next_look(&world.ledger, &world.watchlist, at(seconds));
    world.seen.names.clear();
    world.seen.pods = PodReport::Nothing;
    world.look(0);
    assert_eq!(world.state(1), "bound");
    assert!(
        after(&world, 29) < Duration::from_secs(2),
        "its log folder comes later than the checkpoint"
    );
    assert!(after(&world, 30) > Duration::from_secs(10), "there is none");
    world.seen.names.insert("u1".into(), name("web"));
    world.look(1);
    assert!(after(&world, 2) > Duration::from_secs(10));
}

#[test]
fn a_name_comes_from_the_listing_when_only_one_container_can_be_meant() {
    let mut world = World::new();
    world.seen.names.clear();
    // Its init container had the same device.
    world.ledger.evolve(&Entry::Grant(Arc::new(bound_to("u1", 2))));
    world.look(0);
    assert_eq!(world.ledger.grant(&alloc(1)).unwrap().pod().unwrap().name.as_deref(), Some("web"));
}

/// Another grant of `gpu0`, with a container of this pod.
fn bound_to(uid: &str, n: u64) -> Grant {
    let pod = PodRef { uid: uid.into(), namespace: None, name: None };
    let state = GrantState::Bound { pod, container: "warm".into(), bound_at: Timestamp(WALL) };
    Grant { state, ..grant(n, "gpu0", BOOT) }
}

#[test]
fn an_ambiguous_listing_names_nothing() {
    for change in ["two pods", "another grant", "another pod's grant", "the name is another's"] {
        let mut world = World::new();
        world.seen.names.clear();
        match change {
            "two pods" => {
                world.seen.pods =
                    PodReport::All(vec![listed("web", &["gpu0"]), listed("web-2", &["gpu0"])]);
            }
            "another grant" => {
                world.ledger.evolve(&Entry::Grant(Arc::new(grant(2, "gpu0", BOOT))));
            }
            "another pod's grant" => {
                world.ledger.evolve(&Entry::Grant(Arc::new(bound_to("u2", 2))));
            }
            _ => drop(world.seen.names.insert("u9".into(), name("web"))),
        }
        world.look(0);
        assert_eq!(world.ledger.grant(&alloc(1)).unwrap().pod().unwrap().name, None, "{change}");
    }
}

#[test]
fn a_pod_that_is_gone_is_released_at_the_second_listing_five_seconds_on() {
    let mut world = World::gone();
    assert_eq!(world.look(10).len(), 1);
    assert_eq!(world.state(1), "suspect");
    assert!(world.watchlist.is_waiting(at(10).boot));
    assert_eq!(world.look(14), [], "4 s are not 5");
    assert_eq!(released_by(&world.look(15)), Some(POD_GONE));
    assert!(!world.watchlist.is_waiting(at(15).boot));
    assert!(world.ledger.held().is_empty());
}

/// The time until the pass after one at this second.
fn next_after(world: &World, seconds: u64) -> Duration {
    next_look(&world.ledger, &world.watchlist, at(seconds))
}

#[test]
fn a_pod_that_the_kubelet_lists_long_after_its_end_is_looked_at_as_usual() {
    let mut world = World::bound();
    assert_eq!(next_after(&world, 0), LOOK_HELD);
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    world.look(10);
    assert!(next_after(&world, 39) < Duration::from_secs(2), "it may be removed at any time");
    world.look(39);
    assert_eq!(next_after(&world, 40), LOOK_HELD);
    world.seen.pods = PodReport::All(Vec::new());
    world.look(55);
    assert!(next_after(&world, 55) < Duration::from_secs(2), "the second listing comes soon");
    assert_eq!(released_by(&world.look(60)), Some(POD_GONE));
}

#[test]
fn a_grant_that_no_checkpoint_has_is_looked_at_as_usual_after_a_while() {
    let mut world = World::new();
    world.write(Vec::new());
    assert!(next_after(&world, 0) < Duration::from_secs(2), "no pass has seen it");
    world.look(0);
    assert!(next_after(&world, 29) < Duration::from_secs(2));
    assert_eq!(next_after(&world, 30), LOOK_HELD);
}

#[test]
fn one_listing_is_not_two() {
    let mut world = World::gone();
    world.look(10);
    world.seen.pods = PodReport::Nothing;
    assert_eq!(world.look(60), []);
    assert_eq!(world.state(1), "suspect");
}

#[test]
fn a_pod_that_is_listed_again_is_bound_again_and_its_absence_forgotten() {
    let mut world = World::gone();
    world.look(10);
    let there = PodReport::All(vec![listed("web", &["gpu0"])]);
    let away = std::mem::replace(&mut world.seen.pods, there);
    world.look(12);
    assert_eq!(world.state(1), "bound");
    world.seen.pods = away;
    world.look(20);
    assert_eq!(world.state(1), "suspect", "the first absence does not count any more");
}

#[test]
fn a_cgroup_that_is_not_gone_holds_the_grant_for_ever() {
    for cgroup in
        [Some(CgroupState::Populated), Some(CgroupState::Empty), Some(CgroupState::Unknown), None]
    {
        let mut world = World::gone();
        world.seen.cgroups = cgroup.map(|state| ("u1".to_owned(), state)).into_iter().collect();
        for seconds in 0..50 {
            world.look(seconds * 1000);
        }
        assert_eq!(world.state(1), "suspect", "{cgroup:?}");
    }
}

#[test]
fn an_unsettled_kubelets_absences_are_not_listened_to() {
    let mut world = World::gone();
    world.seen.kubelet_settled = false;
    world.seen.pods = PodReport::All(vec![]);
    for seconds in 0..100 {
        assert_eq!(world.look(seconds), []);
    }
    world.seen.kubelet_settled = true;
    world.look(100);
    assert_eq!(world.state(1), "suspect");
}

#[test]
fn a_kubelet_restart_between_two_listings_starts_the_proof_anew() {
    let mut world = World::gone();
    world.look(10);
    world.seen.kubelet_settled = false;
    world.look(12);
    world.seen.kubelet_settled = true;
    world.look(80);
    assert_eq!(world.state(1), "suspect");
    assert_eq!(released_by(&world.look(85)), Some(POD_GONE));
}

#[test]
fn an_empty_cgroup_is_no_proof_whatever_is_listed() {
    // The API server is away, the kubelet has settled and the runtime is dead: nothing is listed,
    // or static pods alone. The kubelet will start the pod again from its cached response.
    for pods in [vec![], vec![listed("static", &[])], vec![listed("static", &["gpu1"])]] {
        let mut world = World::gone();
        world.seen.pods = PodReport::All(pods);
        world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
        for seconds in 10..100 {
            world.look(seconds);
        }
        assert_eq!(world.state(1), "suspect");
        world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
        assert_eq!(released_by(&world.look(100)), Some(POD_GONE));
    }
}

#[test]
fn a_pod_that_comes_back_from_an_empty_cgroup_has_its_grant_still() {
    let mut world = World::gone();
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    world.look(10);
    world.look(3600);
    world.seen.pods = PodReport::All(vec![listed("static", &[]), listed("web", &["gpu0"])]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Populated);
    world.look(3601);
    assert_eq!(world.state(1), "bound");
}

#[test]
fn neither_a_missing_checkpoint_nor_a_silent_kubelet_frees_anything() {
    let mut world = World::gone();
    world.seen =
        Observation { boot_id: BOOT.into(), kubelet_settled: true, ..Observation::default() };
    for seconds in 0..100 {
        assert_eq!(world.look(seconds * 100), []);
    }
    assert_eq!(world.state(1), "bound");
}

#[test]
fn a_clock_that_jumps_neither_releases_nor_delays() {
    let mut world = World::gone();
    let look = |world: &mut World, boot: u64, wall: u64| {
        let now = Moment { boot: Duration::from_secs(boot), wall: Timestamp(wall) };
        let entries = reconcile(&mut world.watchlist, &world.ledger, &world.seen, now);
        for entry in &entries {
            world.ledger.evolve(entry);
        }
    };
    look(&mut world, 5000, WALL);
    look(&mut world, 5001, WALL + 86_400_000);
    assert_eq!(world.state(1), "suspect");
    look(&mut world, 5005, 0);
    assert_eq!(world.state(1), "released");
}

#[test]
fn the_next_pod_of_the_same_name_does_not_keep_the_old_grant() {
    // The replacement has the device: the checkpoint has its UID in the old one's place.
    let mut world = World::gone();
    world.ledger.evolve(&Entry::Grant(Arc::new(grant(2, "gpu0", BOOT))));
    world.seen.pods = PodReport::All(vec![listed("web", &["gpu0"])]);
    world.seen.names.insert("u2".into(), name("web"));
    world.write(vec![entry("u2", "main", "gpu0", Some(alloc(2)))]);
    world.look(10);
    world.look(15);
    assert_eq!((world.state(1), world.state(2)), ("released", "bound"));

    // While the kubelet has the devices of both, they are not distinguished.
    let mut world = World::gone();
    world.seen.pods = PodReport::All(vec![listed("web", &["gpu1"])]);
    world.seen.names.insert("u2".into(), name("web"));
    world.write(vec![
        entry("u1", "main", "gpu0", Some(alloc(1))),
        entry("u2", "main", "gpu1", Some(alloc(2))),
    ]);
    world.look(10);
    assert_eq!(world.state(1), "bound");

    // It has none, so nothing rewrote the checkpoint: the cgroups distinguish the two.
    let mut world = World::gone();
    world.seen.pods = PodReport::All(vec![listed("web", &[])]);
    world.seen.names.insert("u2".into(), name("web"));
    world.look(10);
    assert_eq!(world.state(1), "bound", "not proven to be another pod");
    world.seen.cgroups.insert("u2".into(), CgroupState::Populated);
    world.look(20);
    world.look(25);
    assert_eq!(world.state(1), "released");
}

#[test]
fn a_pod_that_has_ended_and_is_still_listed_as_before_1_34_is_gone() {
    let mut world = World::gone();
    world.seen.pods = PodReport::All(vec![listed("web", &[])]);
    world.look(10);
    assert_eq!(world.state(1), "bound", "its checkpoint entry may be stale or not");
    world.write(vec![]);
    world.look(20);
    assert_eq!(released_by(&world.look(25)), Some(POD_GONE));
}

#[test]
fn an_init_container_and_its_app_container_hold_the_same_id_side_by_side() {
    let mut world = World::new();
    world.ledger.evolve(&Entry::Grant(Arc::new(grant(2, "gpu0", BOOT))));
    world.write(vec![
        entry("u1", "init", "gpu0", Some(alloc(1))),
        entry("u1", "main", "gpu0", Some(alloc(2))),
    ]);
    world.look(0);
    assert_eq!((world.state(1), world.state(2)), ("bound", "bound"));
    assert_eq!(world.ledger.holders(&resource(), &DeviceId::new("gpu0")).count(), 2);
    assert_eq!(world.look(100), [], "an init container is not listed, its pod is");
    world.seen.pods = PodReport::All(vec![listed("other", &[])]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    world.look(200);
    world.look(205);
    assert_eq!((world.state(1), world.state(2)), ("released", "released"));
}

#[test]
fn an_init_container_that_alone_has_the_device_holds_it_as_long_as_its_pod_is_listed() {
    let mut world = World::bound();
    world.seen.pods = PodReport::All(vec![listed("web", &[])]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    for seconds in 0..100 {
        assert_eq!(world.look(seconds), []);
    }
}

#[test]
fn a_container_that_pod_resources_v1alpha1_leaves_out_holds_its_device_as_long_as_its_pod_is_listed()
 {
    let mut world = World::bound();
    world.seen.pods =
        PodReport::All(vec![ListedPod { containers: Vec::new(), ..listed("web", &[]) }]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    for names in [world.seen.names.clone(), BTreeMap::new()] {
        world.seen.names = names;
        for seconds in [1, 10, 1000] {
            assert_eq!((world.look(seconds), world.state(1)), (vec![], "bound"));
        }
    }
}

#[test]
fn a_pod_without_a_known_name_may_be_any_listed_pod_without_a_known_uid() {
    let mut world = World::new();
    world.seen.names.clear();
    world.seen.pods = PodReport::Nothing;
    world.look(0);
    world.seen.pods = PodReport::All(vec![listed("starting", &[])]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    for seconds in 0..100 {
        assert_eq!(world.look(seconds), []);
    }
    world.seen.names.insert("u5".into(), name("starting"));
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    world.look(200);
    assert_eq!(released_by(&world.look(205)), Some(POD_GONE), "every listed pod is another");
}

/// A pod that was rejected after our Allocate has neither a sandbox nor a log folder, so its name
/// is never known.
#[test]
fn a_pod_without_a_known_name_that_the_kubelet_has_forgotten_is_not_the_one_that_has_its_device_next()
 {
    // The next pod has the device. A kubelet before 1.34 lists the rejected pod too. One pod's log
    // folder was removed.
    for others in [vec![], vec![listed("web", &[])], vec![listed("evicted", &[])]] {
        let mut world = World::new();
        world.seen.names.clear();
        world.seen.pods = PodReport::Nothing;
        world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
        world.look(0);
        world.seen.names.insert("u7".into(), name("next"));
        world.seen.pods = PodReport::All([vec![listed("next", &["gpu0"])], others].concat());
        world.look(10);
        assert_eq!((world.look(20), world.state(1)), (vec![], "bound"), "its entry may be of now");
        world.write(vec![entry("u7", "main", "gpu0", Some(alloc(7)))]);
        world.seen.cgroups.insert("u1".into(), CgroupState::Populated);
        world.look(30);
        assert_eq!(
            (world.look(40), world.state(1)),
            (vec![], "bound"),
            "one of its processes runs, even if the kubelet has forgotten it"
        );
        world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
        world.look(50);
        assert_eq!(world.state(1), "suspect", "once is not twice");
        assert_eq!(released_by(&world.look(55)), Some(POD_GONE));
    }
}

/// The static pod `u1` is removed and comes back with its UID; the kubelet gives its container
/// another device.
fn come_back(world: &mut World, cgroup: CgroupState) {
    world.ledger.evolve(&Entry::Grant(Arc::new(grant(2, "gpu1", BOOT))));
    world.seen.pods = PodReport::All(vec![listed("web", &["gpu1"])]);
    world.seen.cgroups.insert("u1".into(), cgroup);
    world.write(vec![entry("u1", "main", "gpu1", Some(alloc(2)))]);
}

#[test]
fn what_a_static_pod_had_before_it_came_back_is_released_when_all_of_it_had_ended() {
    // It was gone at the last look, or nothing of it has started again yet.
    for (looks, cgroup) in
        [(true, CgroupState::Populated), (false, CgroupState::Empty), (false, CgroupState::Absent)]
    {
        let mut world = World::gone();
        if looks {
            world.look(10);
        }
        come_back(&mut world, cgroup);
        let entries = world.look(13);
        assert!(
            matches!(&entries[..], [former, _] if released_by(std::slice::from_ref(former)) == Some(SUPERSEDED)),
            "{entries:?}"
        );
        assert_eq!((world.state(1), world.state(2)), ("released", "bound"));
        assert_eq!(world.look(14), []);
    }
}

/// A static pod whose manifest is moved away and back. The kubelet remembers the grant, and starts
/// the container with it without another Allocate.
#[test]
fn a_static_pod_holds_its_grant_until_the_kubelet_has_forgotten_it() {
    let uid = "0123456789abcdef0123456789abcdef";
    let kept = || vec![entry(uid, "main", "gpu0", Some(alloc(1)))];
    let mut world = World::new();
    world.write(kept());
    world.seen.names = BTreeMap::from([(uid.into(), name("web"))]);
    world.seen.cgroups = BTreeMap::from([(uid.into(), CgroupState::Populated)]);
    world.look(0);
    world.seen.pods = PodReport::Named(BTreeMap::from([(name("web"), None)]));
    world.seen.cgroups.insert(uid.into(), CgroupState::Absent);
    let agenda = |world: &World, seconds| Agenda::of(&world.ledger, &world.watchlist, at(seconds));
    world.look(10);
    assert_eq!(agenda(&world, 14).query(&world.seen), None);
    for seconds in 15..100 {
        world.look(seconds);
        assert_eq!(world.state(1), "suspect");
        let query = agenda(&world, seconds).query(&world.seen);
        assert_eq!(query, Some(PodQuery::All), "a listing makes the kubelet forget it");
    }
    let mut returned = World { ledger: world.ledger.clone(), ..World::new() };
    (returned.watchlist, returned.seen) = (world.watchlist.clone(), world.seen.clone());
    returned.seen.cgroups.insert(uid.into(), CgroupState::Populated);
    returned.seen.pods = PodReport::All(vec![listed("web", &["gpu0"])]);
    returned.look(100);
    assert_eq!(returned.state(1), "bound");
    world.write(Vec::new());
    assert_eq!(released_by(&world.look(100)), Some(POD_GONE));
}

/// A kubelet that has lost its checkpoint asks again for a container that runs on with what it has.
#[test]
fn what_a_container_may_run_with_is_kept_though_the_kubelet_has_given_it_another_device() {
    for another_kubelet in [false, true] {
        let mut world = World::bound();
        if another_kubelet {
            world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
            world.look(10);
            world.seen.kubelet_settled = false;
        }
        come_back(&mut world, CgroupState::Populated);
        for seconds in 11..100 {
            world.look(seconds);
        }
        assert_eq!((world.state(1), world.state(2)), ("bound", "bound"), "{another_kubelet}");
        world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
        world.look(100);
        assert_eq!((world.state(1), world.state(2)), ("released", "bound"), "{another_kubelet}");
    }
}

/// A power cut takes the kubelet's newest checkpoint, and the kubelet asks again for the container.
#[test]
fn what_no_checkpoint_had_after_a_power_cut_is_released_when_its_container_has_another_device() {
    for knew_it in [false, true] {
        let mut world = World::bound();
        world.seen.boot_id = "boot-2".into();
        world.seen.kubelet_settled = false;
        world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
        if !knew_it {
            world.write(vec![]);
        }
        world.look(1);
        come_back(&mut world, CgroupState::Populated);
        world.look(2);
        let state = if knew_it { "bound" } else { "released" };
        assert_eq!((world.state(1), world.state(2)), (state, "bound"), "{knew_it}");
    }
}

#[test]
fn after_a_reboot_a_pod_in_the_checkpoint_is_kept_for_it_will_be_started_again() {
    let mut world = World::gone();
    world.seen.boot_id = "boot-2".into();
    for seconds in 0..100 {
        world.look(seconds);
    }
    assert_eq!(world.state(1), "suspect");
    world.seen.checkpoint = None;
    world.look(150);
    assert_eq!(world.state(1), "suspect", "no checkpoint is no proof");
    world.write_at(vec![], Timestamp(WALL + 200_000));
    assert_eq!(released_by(&world.look(200)), Some(POD_GONE));
}

#[test]
fn a_grant_that_reached_no_checkpoint_was_never_started() {
    let mut world = World::new();
    world.write(vec![]);
    world.seen.pods = PodReport::All(vec![]);
    world.seen.cgroups.clear();
    world.look(0);
    assert_eq!(world.look(59), []);
    assert_eq!(released_by(&world.look(60)), Some(NEVER_STARTED));
}

#[test]
fn the_listing_that_a_release_needs_is_asked_for_whatever_the_wall_clock_says() {
    let mut world = World::new();
    world.write(vec![]);
    world.seen.pods = PodReport::Nothing;
    let asked = |world: &World, seconds| query(world, seconds) == Some(PodQuery::All);
    assert!(!asked(&world, 0));
    let day_back = Moment { wall: Timestamp(WALL - 86_400_000), ..at(0) };
    reconcile(&mut world.watchlist, &world.ledger, &world.seen, day_back);
    assert_eq!(
        [asked(&world, 59), asked(&world, 60)],
        [false, true],
        "when it can be decided, and not before"
    );
}

fn query(world: &World, seconds: u64) -> Option<PodQuery> {
    Agenda::of(&world.ledger, &world.watchlist, at(seconds)).query(&world.seen)
}

/// A listing makes the kubelet forget the reservation of an Allocate of another plugin.
#[test]
fn a_removed_pod_is_asked_for_by_its_name_and_released_without_a_listing() {
    let mut world = World::gone();
    let not_found = PodReport::Named(BTreeMap::from([(name("web"), None)]));
    for (seconds, state) in [(1, "suspect"), (7, "released")] {
        world.seen.pods = PodReport::Nothing;
        let web = BTreeSet::from([name("web")]);
        assert_eq!(query(&world, seconds), Some(PodQuery::Named(web)));
        world.seen.pods = not_found.clone();
        assert_eq!(query(&world, seconds), None, "the answer is enough");
        let entries = world.look(seconds);
        match state {
            "released" => assert_eq!(released_by(&entries), Some(POD_GONE)),
            state => assert_eq!(world.state(1), state),
        }
        world.seen.pods = PodReport::Nothing;
        assert_eq!(query(&world, seconds + 1), None, "another answer proves nothing yet");
    }
}

/// As that of a Job.
#[test]
fn only_a_pod_that_has_ended_and_was_not_removed_needs_listings_and_not_at_once() {
    let mut world = World::gone();
    let found = |ids| PodReport::Named(BTreeMap::from([(name("web"), Some(listed("web", ids)))]));
    for seconds in [1, 5] {
        world.seen.pods = found(&["gpu0"]);
        assert_eq!(query(&world, seconds), None, "the kubelet may free its devices without it");
        assert_eq!((world.look(seconds), world.state(1)), (vec![], "bound"));
    }
    assert_eq!(query(&world, 6), Some(PodQuery::All));
    world.seen.pods = PodReport::All(vec![]);
    assert_eq!(query(&world, 6), None);
    world.look(6);
    assert_eq!(world.state(1), "suspect");
    // Its devices are free, and `Get` still finds it.
    world.seen.pods = PodReport::Nothing;
    assert_eq!(query(&world, 10), None);
    assert_eq!(query(&world, 11), Some(PodQuery::Named(BTreeSet::from([name("web")]))));
    world.seen.pods = found(&[]);
    assert_eq!(query(&world, 11), Some(PodQuery::All));
    world.seen.pods = PodReport::All(vec![]);
    assert_eq!(released_by(&world.look(11)), Some(POD_GONE));
}

/// The kubelet has freed its devices for the next pod.
#[test]
fn a_pod_that_has_ended_needs_no_listing_when_the_checkpoint_lacks_it() {
    let mut world = World::gone();
    world.write(vec![entry("u2", "main", "gpu0", None)]);
    let found = BTreeMap::from([(name("web"), Some(listed("web", &[])))]);
    world.seen.pods = PodReport::Named(found);
    world.look(1);
    assert_eq!((query(&world, 6), query(&world, 60)), (None, None));
    assert_eq!(released_by(&world.look(6)), Some(POD_GONE));
}

#[test]
fn a_container_without_processes_needs_no_listing_while_its_pod_has_a_cgroup() {
    let mut world = World::gone();
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    let found = BTreeMap::from([(name("web"), Some(listed("web", &["gpu0"])))]);
    world.seen.pods = PodReport::Named(found);
    for seconds in 1..100 {
        assert_eq!(query(&world, seconds), None);
        assert_eq!((world.look(seconds), world.state(1)), (vec![], "bound"));
    }
}

/// Its grant was restored from the checkpoint, or is of the boot before, so the kubelet may start
/// the pod until its checkpoint lacks it.
#[test]
fn a_removed_pod_that_only_the_checkpoint_has_is_listed_so_that_the_kubelet_frees_its_devices() {
    let mut world = World::gone();
    let of_another_boot = bound_to("u1", 1);
    world.ledger.evolve(&Entry::Moved {
        alloc_id: alloc(1),
        state: GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(WALL),
            other_pods: Vec::new(),
            released_by: String::new(),
        },
    });
    let restored = Grant { boot_id: String::new(), alloc_id: alloc(2), ..of_another_boot };
    world.ledger.evolve(&Entry::Grant(Arc::new(restored)));
    world.watchlist = Watchlist::default();
    let outdated = |world: &World, seconds| {
        Agenda::of(&world.ledger, &world.watchlist, at(seconds)).is_outdated(&world.seen)
    };
    let not_found = PodReport::Named(BTreeMap::from([(name("web"), None)]));
    for seconds in [1, 6] {
        assert_eq!((query(&world, seconds), outdated(&world, seconds)), (None, false));
        world.seen.pods = not_found.clone();
        world.look(seconds);
        assert_eq!(world.state(2), "suspect");
    }
    assert_eq!((query(&world, 6), outdated(&world, 6)), (Some(PodQuery::All), true));
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    assert_eq!(query(&world, 6), None, "it has a cgroup still");
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    world.seen.pods = PodReport::All(vec![]);
    assert_eq!((query(&world, 6), outdated(&world, 6)), (None, true));
    world.look(6);
    assert_eq!(world.state(2), "suspect");
    world.write(vec![]);
    assert!(!outdated(&world, 7));
    assert_eq!(released_by(&world.look(7)), Some(POD_GONE));
}

/// A pod that is deleted by force ends later. Once it has, nothing else keeps its grant.
#[test]
fn a_pod_that_has_run_in_this_boot_is_not_listed_when_it_ends_after_its_removal() {
    let mut world = World::gone();
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    world.seen.pods = PodReport::Named(BTreeMap::from([(name("web"), None)]));
    for seconds in [1, 6, 11] {
        world.look(seconds);
        assert_eq!(world.state(1), "suspect");
    }
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    assert_eq!(query(&world, 12), None);
    assert_eq!(released_by(&world.look(12)), Some(POD_GONE));
}

#[test]
fn a_running_pod_is_asked_for_only_if_the_kubelet_has_forgotten_its_grant() {
    let mut world = World::bound();
    world.seen.pods = PodReport::Nothing;
    assert_eq!(query(&world, 1), None);
    world.write(vec![]);
    assert_eq!(query(&world, 1), Some(PodQuery::Named(BTreeSet::from([name("web")]))));
}

#[test]
fn a_pass_is_left_out_only_while_every_grant_has_a_running_pod_with_a_name() {
    let calm = |world: &World, lives: bool| {
        is_calm(&world.ledger, &world.watchlist, |uid| uid == "u1" && lives)
    };
    let mut world = World::new();
    assert!(!calm(&world, true), "no container is known");
    world.seen.names.clear();
    world.seen.pods = PodReport::Nothing;
    world.look(0);
    assert!(!calm(&world, true), "no name is known");
    world.seen.names.insert("u1".into(), name("web"));
    world.look(1);
    assert_eq!([calm(&world, true), calm(&world, false)], [true, false]);
    world.write(vec![]);
    world.look(2);
    assert!(!calm(&world, true), "the kubelet has forgotten it");
}

#[test]
fn a_young_kubelet_is_asked_for_suspect_pods_only() {
    let mut world = World::gone();
    world.seen.pods = PodReport::Nothing;
    world.seen.kubelet_settled = false;
    assert_eq!(query(&world, 1), None);
    world.seen.kubelet_settled = true;
    world.seen.pods = PodReport::All(vec![]);
    world.look(1);
    assert_eq!(world.state(1), "suspect");
    world.seen.pods = PodReport::Nothing;
    world.seen.kubelet_settled = false;
    world.look(2);
    assert_eq!(query(&world, 2), Some(PodQuery::Named(BTreeSet::from([name("web")]))));
}

#[test]
fn many_pods_are_listed_at_once() {
    let mut world = World::gone();
    world.seen.pods = PodReport::Nothing;
    for n in 2..=33 {
        let (namespace, name) = (Some("default".into()), Some(format!("web-{n}")));
        let pod = PodRef { uid: format!("u{n}"), namespace, name };
        assert!(matches!(query(&world, 1), Some(PodQuery::Named(names)) if names.len() == n - 1));
        let state = GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(WALL) };
        let grant = Grant { state, ..grant(n as u64, &format!("gpu{n}"), BOOT) };
        world.ledger.evolve(&Entry::Grant(Arc::new(grant)));
    }
    assert_eq!(query(&world, 1), Some(PodQuery::All));
}

#[test]
fn the_name_of_a_new_pod_is_waited_for_before_all_pods_are_listed_for_it() {
    let mut world = World::new();
    world.seen.pods = PodReport::Nothing;
    world.seen.names.clear();
    world.look(0);
    assert_eq!([query(&world, 1), query(&world, 29)], [None, None]);
    assert_eq!(query(&world, 30), Some(PodQuery::All));
    world.seen.names.insert("u1".into(), name("web"));
    assert_eq!(query(&world, 30), None, "its folder for logs has come");
    // The wall clock was set back, and the pod has ended.
    world.seen.names.clear();
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    let day_back = |seconds| Moment { wall: Timestamp(WALL - 86_400_000), ..at(seconds) };
    reconcile(&mut world.watchlist, &world.ledger, &world.seen, day_back(1));
    let agenda = |seconds| Agenda::of(&world.ledger, &world.watchlist, day_back(seconds));
    let queries = [30, 31].map(|seconds| agenda(seconds).query(&world.seen));
    assert_eq!(queries, [None, Some(PodQuery::All)], "only all pods show that it was removed");
}

/// A forced deletion removes the entry from the checkpoint, perhaps before it was read there.
#[test]
fn while_a_pod_runs_that_the_kubelet_has_forgotten_it_may_have_any_grant() {
    let mut world = World::new();
    world.write(vec![]);
    world.seen.pods = PodReport::All(vec![listed("other", &[])]);
    world.look(0);
    assert_eq!(world.look(60), [], "`web` runs and is not listed");
    world.seen.pods = PodReport::All(vec![listed("web", &[])]);
    assert_eq!(released_by(&world.look(61)), Some(NEVER_STARTED), "it is known, and has nothing");
}

#[test]
fn a_checkpoint_older_than_the_grant_says_nothing_about_it() {
    let mut world = World::new();
    world.write_at(vec![], Timestamp(WALL - 1));
    world.seen.pods = PodReport::All(vec![]);
    world.seen.cgroups.clear();
    for seconds in 0..10 {
        assert_eq!(world.look(seconds * 100), []);
    }
    // The wall clock was set back, so the next one looks older still. It is another one.
    world.write_at(vec![], Timestamp(WALL - 500));
    assert_eq!(released_by(&world.look(2000)), Some(NEVER_STARTED));
}

#[test]
fn no_checkpoint_at_all_or_an_unsettled_kubelet_never_means_never_started() {
    let mut world = World::new();
    world.write(vec![]);
    world.seen.kubelet_settled = false;
    world.look(0);
    assert_eq!(world.look(500), []);
    world.seen.kubelet_settled = true;
    world.seen.checkpoint = None;
    assert_eq!(world.look(1000), []);
    world.write_at(vec![], Timestamp(WALL + 1));
    world.seen.pods = PodReport::Nothing;
    assert_eq!(world.look(2000), [], "nor does a listing that was not seen");
}

#[test]
fn an_unbound_grant_that_a_listed_container_may_have_is_kept() {
    let mut world = World::new();
    world.write(vec![]);
    world.look(0);
    assert_eq!(world.look(100), [], "`web` is listed with gpu0, and no other grant explains that");

    let mut world = World::new();
    world.write(vec![entry("u1", "main", "gpu0", None)]);
    world.seen.pods = PodReport::All(vec![]);
    world.look(0);
    assert_eq!(world.look(100), [], "an entry without an alloc-id has gpu0");

    let mut world = World::new();
    world.ledger.evolve(&Entry::Grant(Arc::new(grant(2, "gpu0", BOOT))));
    world.write(vec![entry("u1", "main", "gpu0", Some(alloc(2)))]);
    world.look(0);
    world.seen.pods = PodReport::All(vec![listed("web-2", &["gpu0"])]);
    world.look(60);
    assert_eq!(world.state(1), "granted", "the other grant is of `web`");
}

#[test]
fn an_unbound_grant_is_released_when_another_grant_explains_the_listed_container() {
    let mut world = World::new();
    world.ledger.evolve(&Entry::Grant(Arc::new(grant(2, "gpu0", BOOT))));
    world.write(vec![entry("u1", "main", "gpu0", Some(alloc(2)))]);
    world.look(0);
    assert_eq!(world.state(2), "bound");
    assert_eq!(released_by(&world.look(60)), Some(NEVER_STARTED));
    assert_eq!((world.state(1), world.state(2)), ("released", "bound"));

    // An entry with an alloc-id is of that answer, also if the ledger does not have it.
    let mut world = World::new();
    world.write(vec![entry("u9", "main", "gpu0", Some(alloc(9)))]);
    world.seen.pods = PodReport::All(vec![]);
    world.seen.cgroups.clear();
    world.look(0);
    assert_eq!(released_by(&world.look(60)), Some(NEVER_STARTED));
}

#[test]
fn held_ids_carry_what_is_needed_to_offer_them_on() {
    let mut ledger = Ledger::default();
    ledger.evolve(&Entry::Grant(Arc::new(grant(1, "gpu0", BOOT))));
    let mut newer = grant(2, "gpu0", BOOT);
    newer.devices[0].numa_nodes = vec![1];
    ledger.evolve(&Entry::Grant(Arc::new(newer.clone())));
    assert_eq!(ledger.held()[&resource()][&DeviceId::new("gpu0")], newer.devices[0]);
}

#[test]
fn evolving_twice_changes_nothing() {
    let mut ledger = Ledger::default();
    let made = Entry::Grant(Arc::new(grant(1, "gpu0", BOOT)));
    let named = Entry::Named { key: "pci:gpu0".into(), id: DeviceId::new("gpu0") };
    let state = GrantState::Released {
        pod: None,
        container: None,
        bound_at: None,
        released_at: Timestamp(WALL),
        other_pods: Vec::new(),
        released_by: NEVER_STARTED.into(),
    };
    let released = Entry::Moved { alloc_id: alloc(1), state };
    assert_eq!(ledger.evolve(&released), Change::Nothing, "nothing to release");
    for (entry, change) in
        [(&made, Change::Granted), (&named, Change::Named), (&released, Change::Released)]
    {
        assert_eq!(ledger.evolve(entry), change);
        let once = ledger.clone();
        assert_eq!(ledger.evolve(entry), Change::Nothing);
        assert_eq!(ledger, once);
    }
    assert_eq!(
        ledger,
        Ledger::from_recovered(
            [],
            (**ledger.names()).clone(),
            ledger.listed().clone(),
            PendingHooks::new(),
            ledger.verdicts().clone()
        )
    );
}

/// Pods with one id or none. Of those that are asked for by name, one without an id is not there.
fn report(is_named: bool, pods: Vec<(u8, Option<u8>)>) -> PodReport {
    let one = |(n, d): (u8, Option<u8>)| {
        let id = d.map(|d| format!("gpu{d}"));
        listed(&format!("pod-{n}"), &id.iter().map(String::as_str).collect::<Vec<_>>())
    };
    if is_named {
        let found = |(n, d): (u8, Option<u8>)| {
            (name(&format!("pod-{n}")), d.is_some().then(|| one((n, d))))
        };
        PodReport::Named(pods.into_iter().map(found).collect())
    } else {
        PodReport::All(pods.into_iter().map(one).collect())
    }
}

/// Any view of up to three pods that hold up to three ids, as wrong as it can be.
fn observation() -> impl Strategy<Value = Observation> {
    let cgroup = prop_oneof![
        2 => Just(CgroupState::Populated), 3 => Just(CgroupState::Absent), 2 => Just(CgroupState::Empty), 1 => Just(CgroupState::Unknown),
    ];
    let checkpoint = prop::collection::vec((0..3_u8, 0..3_u8, prop::option::of(0..4_u64)), 0..4);
    let pods = prop::collection::vec((0..4_u8, prop::option::of(0..3_u8)), 0..4);
    (
        any::<[bool; 2]>(),
        prop::option::of((checkpoint, 0..200_000_u64)),
        prop::option::weighted(0.8, (any::<bool>(), pods)),
        prop::collection::btree_map(0..3_u8, 0..4_u8, 0..3),
        prop::collection::btree_map(0..3_u8, cgroup, 0..4),
    )
        .prop_map(|([settled, rebooted], checkpoint, pods, names, cgroups)| Observation {
            boot_id: if rebooted { "boot-2".into() } else { BOOT.into() },
            kubelet: None,
            kubelet_settled: settled,
            checkpoint: checkpoint.map(|(entries, written)| {
                let entries = entries.into_iter().map(|(u, d, a)| {
                    entry(&format!("u{u}"), "main", &format!("gpu{d}"), a.map(alloc))
                });
                Arc::new(Checkpoint::new(entries.collect(), Timestamp(WALL + written)))
            }),
            pods: pods.map(|(is_named, pods)| report(is_named, pods)).unwrap_or_default(),
            names: names
                .into_iter()
                .map(|(u, n)| (format!("u{u}"), name(&format!("pod-{n}"))))
                .collect(),
            cgroups: cgroups.into_iter().map(|(u, state)| (format!("u{u}"), state)).collect(),
            claims: Arc::default(),
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn nothing_is_released_without_every_proof(
        looks in prop::collection::vec((observation(), 0..40_u64, 0..3_u8), 1..25),
    ) {
        let mut ledger = Ledger::default();
        let mut watchlist = Watchlist::default();
        let mut clock = 0;
        // Per grant: when its pod was first missing, and how often, since the last observation that
        // contradicts it.
        let mut missed: BTreeMap<AllocId, (u64, u32)> = BTreeMap::new();
        let mut made = BTreeMap::new();
        let mut alive = BTreeSet::new();
        // Pods that were seen to have ended, by this kubelet's life.
        let mut dead = BTreeSet::new();
        // Grants that no checkpoint had when their pod was seen to have ended.
        let mut lacked = BTreeSet::new();
        for (n, (seen, wait, act)) in looks.into_iter().enumerate() {
            clock += wait;
            if act == 0 {
                let n = n as u64 % 4;
                if let std::collections::btree_map::Entry::Vacant(first) = made.entry(alloc(n)) {
                    first.insert(clock);
                    ledger.evolve(&Entry::Grant(Arc::new(grant(n, &format!("gpu{}", n % 3), BOOT))));
                }
            }
            let before = ledger.clone();
            alive.extend(seen.cgroups.iter().filter(|(_, state)| **state == CgroupState::Populated).map(|(uid, _)| uid.clone()));
            let entries = reconcile(&mut watchlist, &ledger, &seen, at(clock));
            if !seen.kubelet_settled { missed.clear(); dead.clear(); }
            dead.extend(seen.cgroups.iter().filter(|(_, state)| state.is_dead()).map(|(uid, _)| uid.clone()));
            for grant in before.grants() {
                let Some(checkpoint) = &seen.checkpoint else { continue };
                let uid = grant.pod().map(|pod| &pod.uid);
                if checkpoint.grant_ids().any(|id| *id == grant.alloc_id) {
                    lacked.remove(&grant.alloc_id);
                } else if uid.and_then(|uid| seen.cgroups.get(uid)).is_some_and(|state| state.is_dead()) {
                    lacked.insert(grant.alloc_id.clone());
                }
            }
            if seen.kubelet_settled {
                // A name that is learnt in a pass counts in it.
                let is_covered = |grant: &&Arc<Grant>| {
                    let named = |pod: &PodRef| match (&pod.namespace, &pod.name) {
                        (Some(namespace), Some(name)) => Some((namespace.clone(), name.clone())),
                        _ => seen.names.get(&pod.uid).map(|name| (name.namespace.clone(), name.name.clone())),
                    };
                    let pod = grant.pod().filter(|_| grant.is_placed());
                    pod.is_some_and(|pod| {
                        let name = named(pod);
                        seen.pods.covers(name.as_ref().map(|(namespace, name)| (namespace.as_str(), name.as_str())))
                    })
                };
                for grant in before.grants().filter(is_covered) {
                    let missed = missed.entry(grant.alloc_id.clone()).or_insert((clock, 0));
                    missed.1 += 1;
                }
            }
            let mut moved = BTreeSet::new();
            for entry in &entries {
                let Entry::Moved { alloc_id, state } = entry else { panic!("reconcile only moves: {entry:?}") };
                prop_assert!(moved.insert(alloc_id.clone()), "one entry per grant");
                let was = before.grant(alloc_id).expect("it moves what is live");
                prop_assert!(was.state != *state, "an entry changes something");
                let GrantState::Released { pod, released_by, .. } = state else { continue };
                if released_by == SUPERSEDED {
                    let uid = &pod.as_ref().expect("it was bound").uid;
                    prop_assert!(dead.contains(uid) || lacked.contains(alloc_id), "no observation showed that it ended");
                    let checkpoint = seen.checkpoint.as_ref().expect("the proof that its container has another one");
                    let kept: BTreeSet<_> = checkpoint.entries().iter().filter(|entry| entry.pod_uid == *uid).map(|entry| &entry.alloc_id).collect();
                    prop_assert!(!kept.contains(&Some(alloc_id.clone())) && kept.iter().any(|kept| kept.is_some()));
                    continue;
                }
                prop_assert!(seen.kubelet_settled);
                match pod {
                    Some(pod) => {
                        prop_assert_eq!(released_by, POD_GONE);
                        let cgroup = seen.cgroups.get(&pod.uid).copied().unwrap_or_default();
                        prop_assert_eq!(cgroup, CgroupState::Absent);
                        let (since, times) = missed.get(alloc_id).copied().unwrap_or((clock, 0));
                        prop_assert!(times >= 2 && clock - since >= 5, "{times} listings in {} s", clock - since);
                        prop_assert!(seen.pods != PodReport::Nothing, "no report lacks it");
                        let ours = &was.devices[0].id;
                        let has_it = |listed: &ListedPod| listed.containers.iter().any(|main| main.devices.values().any(|ids| ids.contains(ours)));
                        if pod.name.is_none() && seen.pods.found().any(has_it) {
                            let checkpoint = seen.checkpoint.as_ref().expect("the proof that it is another pod that has the device");
                            prop_assert!(checkpoint.entries().iter().all(|entry| entry.pod_uid != pod.uid));
                        }
                        if seen.boot_id != BOOT && !alive.contains(&pod.uid) {
                            let checkpoint = seen.checkpoint.as_ref().expect("the proof after a reboot");
                            prop_assert!(checkpoint.entries().iter().all(|entry| entry.pod_uid != pod.uid));
                        }
                    }
                    None => {
                        prop_assert_eq!(released_by, NEVER_STARTED);
                        prop_assert!(clock - made[alloc_id] >= 60);
                        prop_assert!(matches!(seen.pods, PodReport::All(_)), "any pod may have it");
                        let checkpoint = seen.checkpoint.as_ref().expect("a checkpoint that lacks it");
                        prop_assert!(checkpoint.entries().iter().all(|entry| entry.alloc_id.as_ref() != Some(alloc_id)));
                    }
                }
            }
            for entry in &entries {
                ledger.evolve(entry);
            }
            let again = reconcile(&mut watchlist.clone(), &ledger, &Observation { pods: PodReport::Nothing, ..seen }, at(clock));
            prop_assert_eq!(again, vec![], "what was decided stays decided");
            let rebuilt = Ledger::from_recovered(ledger.grants().map(|grant| (**grant).clone()), (**ledger.names()).clone(), ledger.listed().clone(), PendingHooks::new(), ledger.verdicts().clone());
            prop_assert_eq!(&rebuilt, &ledger, "the indexes are those of the grants");
        }
    }
}

/// What an Allocate of `gpu0` meets, and what there is to see.
/// A grant of a node by this id.
fn of_node(n: u64, resource: &str, id: &str, objects: &[Object]) -> Grant {
    let mut grant = grant(n, id, BOOT);
    grant.resource = resource.parse().unwrap();
    grant.devices[0].key = format!("dev:/dev/serial/by-id/{id}");
    grant.devices[0].objects = objects.to_vec();
    grant
}

#[test]
fn what_is_held_by_one_id_is_given_by_no_other() {
    let number = |minor| Object::number(DeviceNumber { is_block: false, major: 188, minor });
    let stick = [Object::node("/dev/ttyUSB0"), number(0)];
    let (tty, other) = ("a.com/tty", "b.com/tty");
    let held = of_node(1, tty, "usb-a", &stick);
    let ask = |held: &Grant, wanted: &Grant| {
        let mut ledger = Ledger::default();
        ledger.evolve(&Entry::Grant(Arc::new(held.clone())));
        let by_ledger = held_by_another(&ledger, std::iter::empty(), wanted);
        let by_pending = held_by_another(&Ledger::default(), [held].into_iter(), wanted);
        assert_eq!(by_ledger, by_pending, "whether it is written or about to be");
        by_ledger.map(|refusal| refusal.to_string())
    };
    let refused = ask(&held, &of_node(2, tty, "pci-1", &stick)).unwrap();
    assert!(
        refused.contains("`pci-1`")
            && refused.contains("/dev/ttyUSB0")
            && refused.contains("`usb-a` of a.com/tty"),
        "{refused}"
    );
    assert!(ask(&held, &of_node(2, other, "usb-a", &[number(0)])).is_some(), "another resource");
    assert_eq!(
        ask(&held, &of_node(2, tty, "usb-a", &stick)),
        None,
        "an init container hands it on"
    );
    assert_eq!(ask(&held, &of_node(2, tty, "usb-b", &[number(1)])), None);
    assert_eq!(ask(&held, &of_node(2, tty, "usb-b", &[])), None, "nothing is known of it");
    let disk = |partition| Object::disk("eui.1", partition);
    let partition = of_node(1, tty, "part", &[disk(Some(1))]);
    assert!(ask(&partition, &of_node(2, tty, "disk", &[disk(None)])).is_some());
    assert_eq!(ask(&partition, &of_node(2, tty, "other", &[disk(Some(2))])), None);
    // An earlier version noted no objects: the answer names the nodes, and the key the function.
    let mut earlier = of_node(1, tty, "usb-a", &[]);
    earlier.edits.devices.push(crate::domain::EditDevice {
        host: "/dev/ttyUSB0".into(),
        container: "/dev/x".into(),
        permissions: "rw".into(),
    });
    assert!(ask(&earlier, &of_node(2, tty, "pci-1", &stick)).is_some());
    let mut gpu = of_node(1, tty, "GPU-1", &[]);
    gpu.devices[0].key = "pci:0000:18:00.0/10de:2330".into();
    assert!(
        ask(
            &gpu,
            &of_node(
                2,
                other,
                "x",
                &[Object::kernel_device("pci0000:16/0000:18:00.0/drm/renderD128")]
            )
        )
        .is_some()
    );
    let released = Grant {
        state: GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(1),
            other_pods: Vec::new(),
            released_by: POD_GONE.into(),
        },
        ..held
    };
    let mut ledger = Ledger::default();
    ledger.evolve(&Entry::Grant(Arc::new(released)));
    assert_eq!(
        held_by_another(&ledger, std::iter::empty(), &of_node(2, tty, "pci-1", &stick)),
        None
    );
}

/// The kernel numbers its disks in another order. A container that returns opens its node by the
/// path.
#[test]
fn after_a_reboot_a_grant_holds_what_its_paths_lead_to_and_no_former_device_number() {
    let number = |minor| Object::number(DeviceNumber { is_block: true, major: 259, minor });
    let (disk, path) = (Object::disk("eui.1", None), Object::node("/dev/nvme0n1"));
    let grant = of_node(1, "a.com/disk", "disk-1", &[path.clone(), number(0), disk.clone()]);
    let behind = |path: &str| match path {
        "/dev/nvme0n1" => vec![Object::node(path), number(3)],
        _ => Vec::new(),
    };
    let held = |grant: Grant| grant.devices[0].objects.clone();
    let [same, unknown] =
        [BOOT, ""].map(|boot| held(grant.clone().in_boot(boot, |_| panic!("nothing is read"))));
    assert_eq!((same, unknown), (held(grant.clone()), held(grant.clone())));
    assert_eq!(
        held(grant.clone().in_boot("boot-2", behind)),
        [path.clone(), disk.clone(), number(3)]
    );
    assert_eq!(
        held(grant.clone().in_boot("boot-2", |_| Vec::new())),
        [path, disk.clone()],
        "it is not there yet"
    );
    let claim = ClaimRef { uid: "c1".into(), namespace: "ml".into(), name: "train".into() };
    let hold = ClaimHold { claim, allocation: "a".into(), devices: Vec::new() };
    let of_claim = |grant: &Grant| Grant { claim: Some(Arc::new(hold.clone())), ..grant.clone() };
    let held = held(of_claim(&grant).in_boot("boot-2", |_| panic!("it is prepared again first")));
    assert_eq!(held, [disk]);
}

#[test]
fn what_another_plugin_gave_is_held_until_its_pod_is_gone_or_has_an_answer_of_ours() {
    let other = AllocId::of_other_plugin("u1", "main", &resource());
    let kept = crate::domain::CheckpointGrant {
        alloc_id: other.clone(),
        pod_uid: "u1".into(),
        container: "main".into(),
        resource: resource(),
        devices: BTreeMap::from([(DeviceId::new("gpu0"), vec![])]),
        edits: ContainerEdits::default(),
    };
    let taken = || {
        let mut world = World { ledger: Ledger::default(), ..World::new() };
        world.write(vec![entry("u1", "main", "gpu0", None)]);
        for grant in
            rebuild(vec![kept.clone()], &BTreeSet::new(), &BTreeMap::new(), Timestamp(WALL))
        {
            world.ledger.evolve(&Entry::Grant(Arc::new(grant)));
        }
        world
    };
    let state =
        |world: &World| world.ledger.grant(&other).map_or("released", |grant| grant.state_name());
    let mut world = taken();
    world.look(0);
    let pod = world.ledger.grant(&other).unwrap().pod().unwrap().to_string();
    assert_eq!(
        (state(&world), pod.as_str(), world.watchlist.has_forgotten()),
        ("bound", "default/web", false)
    );
    for seconds in [60, 120] {
        assert_eq!(world.look(seconds), []);
    }
    world.seen.pods = PodReport::All(vec![listed("other", &[])]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Absent);
    world.write(vec![]);
    world.look(180);
    assert_eq!(released_by(&world.look(190)), Some(POD_GONE));

    // Its container was started again with an answer of ours.
    let mut world = taken();
    world.look(0);
    world.ledger.evolve(&Entry::Grant(Arc::new(grant(1, "gpu0", BOOT))));
    world.write(vec![entry("u1", "main", "gpu0", Some(alloc(1)))]);
    world.seen.cgroups.insert("u1".into(), CgroupState::Empty);
    world.look(10);
    world.look(20);
    assert_eq!((state(&world), world.state(1)), ("released", "bound"));
}

struct Seen {
    settled: bool,
    running: bool,
    listed: bool,
    /// The grant that the holder's container has in the checkpoint.
    checkpoint: Checkpoint,
}

impl Sight for Seen {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> Result<bool, String> {
        Ok(uid == "u1" && self.running)
    }

    fn is_listed(&self, alloc_id: &AllocId) -> bool {
        *alloc_id == alloc(1) && self.listed
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        Some(&self.checkpoint)
    }
}

#[test]
fn a_grant_is_refused_only_with_every_proof_that_another_pod_has_the_device() {
    use crate::domain::KubeletGeneration;
    let kubelet = |inode| Some(KubeletGeneration { inode, made_ns: 0 });
    let pod = PodRef { uid: "u1".into(), namespace: None, name: None };
    let bound =
        GrantState::Bound { pod: pod.clone(), container: "main".into(), bound_at: Timestamp(WALL) };
    let holder = |state, inode| Grant { state, kubelet: kubelet(inode), ..grant(1, "gpu0", BOOT) };
    let wanted = Grant { kubelet: kubelet(7), ..grant(2, "gpu0", BOOT) };
    let ask = |held: Grant, seen: Seen| {
        doubt(
            &Ledger::from_recovered(
                [held],
                BTreeMap::new(),
                BTreeMap::new(),
                PendingHooks::new(),
                BTreeMap::new(),
            ),
            &Watchlist::default(),
            &wanted,
            &seen,
        )
        .map(|doubt| doubt.proof == Proof::Complete)
    };
    let with = |entries| Checkpoint::new(entries, Timestamp(WALL));
    let all = || Seen {
        settled: true,
        running: true,
        listed: false,
        checkpoint: with(vec![entry("u1", "main", "gpu0", Some(alloc(1)))]),
    };
    let lost = || Seen { checkpoint: with(vec![]), ..all() };
    assert_eq!(ask(holder(bound.clone(), 7), all()), Some(true));
    assert_eq!(
        ask(holder(bound.clone(), 7), lost()),
        Some(true),
        "this kubelet gave it: a forced deletion"
    );
    assert_eq!(
        ask(holder(bound.clone(), 6), all()),
        Some(true),
        "an earlier one gave it, and this one knows"
    );
    assert_eq!(ask(holder(bound.clone(), 6), lost()), Some(false), "the checkpoint was lost");
    assert_eq!(
        ask(holder(bound.clone(), 7), Seen { settled: false, ..all() }),
        Some(false),
        "too early to decide"
    );
    assert_eq!(
        ask(holder(bound.clone(), 7), Seen { running: false, ..all() }),
        None,
        "a pod that is just admitted, or through"
    );
    let listed = || Seen { running: false, listed: true, ..lost() };
    assert_eq!(
        ask(holder(bound.clone(), 6), listed()),
        Some(true),
        "the kubelet itself lists it, where no cgroup can be seen"
    );
    assert_eq!(
        ask(holder(bound.clone(), 6), Seen { settled: false, ..listed() }),
        Some(false),
        "a young kubelet may list anything"
    );
    assert_eq!(
        ask(holder(GrantState::Granted, 7), all()),
        None,
        "the init container of the same pod"
    );
    let suspect = GrantState::Suspect {
        pod,
        container: "main".into(),
        bound_at: Timestamp(WALL),
        suspect_at: Timestamp(WALL),
    };
    assert_eq!(ask(holder(suspect, 7), all()), Some(true));
    assert_eq!(
        ask(Grant { devices: grant(1, "gpu1", BOOT).devices, ..holder(bound, 7) }, all()),
        None,
        "another device"
    );
}

#[test]
fn a_list_is_remembered_when_its_ids_change_and_forgotten_with_its_resource() {
    let resource = |text: &str| text.parse::<ResourceName>().unwrap();
    let inventory = |resources: &[(&str, &[&str], Health)]| {
        let offering = |(name, ids, health): &(&str, &[&str], Health)| {
            let device = |id: &str| Device {
                id: DeviceId::new(id),
                key: format!("pci:{id}"),
                class: DeviceClass::Gpu,
                pci: None,
                numa_nodes: vec![],
                nodes: vec![],
                attributes: Attributes::default(),
            };
            let offered = |id: &str| Offered { device: Arc::new(device(id)), health: *health };
            let devices = ids.iter().map(|id| (DeviceId::new(*id), offered(id))).collect();
            (
                resource(name),
                Arc::new(Offering {
                    spec: Arc::new(ResourceSpec::orphan(resource(name))),
                    devices,
                }),
            )
        };
        Inventory { resources: resources.iter().map(offering).collect() }
    };
    let mut ledger = Ledger::default();
    let mut listed = |inventory: Inventory| {
        let entries = ledger.unlisted(&inventory);
        let lists: Vec<String> = entries
            .iter()
            .map(|entry| match entry {
                Entry::Listed { resource, devices } => {
                    format!(
                        "{resource}: {}",
                        devices
                            .iter()
                            .map(|device| device.id.as_str())
                            .collect::<Vec<_>>()
                            .join(" ")
                    )
                }
                other => panic!("{other:?}"),
            })
            .collect();
        entries.iter().for_each(|entry| assert_eq!(ledger.evolve(entry), Change::Listed));
        assert!(ledger.unlisted(&inventory).is_empty());
        lists
    };
    let sick = Health::Unhealthy(Reason::NodeMissing);
    assert_eq!(
        listed(inventory(&[("a.com/x", &["1", "2"], Health::Healthy), ("a.com/y", &[], sick)])),
        ["a.com/x: 1 2"]
    );
    assert!(
        listed(inventory(&[("a.com/x", &["1", "2"], sick)])).is_empty(),
        "health is no part of it"
    );
    assert!(listed(Inventory::default()).is_empty(), "not judged yet");
    assert_eq!(
        listed(inventory(&[("a.com/x", &["2"], sick), ("a.com/y", &["3"], sick)])),
        ["a.com/x: 2", "a.com/y: 3"]
    );
    assert_eq!(listed(inventory(&[("a.com/y", &["3"], sick)])), ["a.com/x: "]);
}

/// Its UID is a hash of its manifest, so the pod of the grant seems to run; but the kubelet has
/// given its container another device since.
#[test]
fn what_a_static_pod_had_before_it_came_back_is_no_proof() {
    let pod = PodRef { uid: "u1".into(), namespace: None, name: None };
    let state = GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(WALL) };
    let ledger = Ledger::from_recovered(
        [Grant { state, ..grant(1, "gpu0", BOOT) }],
        BTreeMap::new(),
        BTreeMap::new(),
        PendingHooks::new(),
        BTreeMap::new(),
    );
    let kubelet = Some(crate::domain::KubeletGeneration { inode: 7, made_ns: 0 });
    let ask = |entries| {
        let seen = Seen {
            settled: true,
            running: true,
            listed: false,
            checkpoint: Checkpoint::new(entries, Timestamp(WALL)),
        };
        let held = Ledger::from_recovered(
            ledger.grants().map(|held| Grant { kubelet, ..(**held).clone() }),
            BTreeMap::new(),
            BTreeMap::new(),
            PendingHooks::new(),
            BTreeMap::new(),
        );
        doubt(&held, &Watchlist::default(), &Grant { kubelet, ..grant(9, "gpu0", BOOT) }, &seen)
            .map(|doubt| doubt.proof == Proof::Complete)
    };
    let main = |device, alloc_id| entry("u1", "main", device, alloc_id);
    assert_eq!(ask(vec![main("gpu0", Some(alloc(1)))]), Some(true));
    assert_eq!(
        ask(vec![main("gpu1", Some(alloc(2)))]),
        Some(false),
        "its container has another one"
    );
    assert_eq!(
        ask(vec![entry("u1", "side", "gpu1", Some(alloc(2)))]),
        Some(true),
        "another container proves nothing about it"
    );
    assert_eq!(
        ask(vec![entry("u2", "main", "gpu1", Some(alloc(2)))]),
        Some(true),
        "nor does another pod"
    );
    let other = CheckpointEntry {
        resource: "example.com/other".parse().unwrap(),
        ..main("x", Some(alloc(2)))
    };
    assert_eq!(ask(vec![other]), Some(true), "nor another resource");
}
