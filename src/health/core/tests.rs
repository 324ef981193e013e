//! The rules of the judge as examples.

use super::*;
use crate::domain::{
    Attributes, ContainerEdits, Contract, DeviceClass, DeviceNode, GpuInstance, GrantState,
    GrantedDevice, Health, HookState, MpsControl, MpsState, NvidiaOptions, PendingHook,
    PendingHooks, Sharing, Timestamp, note_hook,
};

fn at(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn spec(replicas: u32) -> Arc<ResourceSpec> {
    shared(Sharing::replicas(replicas))
}

fn shared(sharing: Sharing) -> Arc<ResourceSpec> {
    Arc::new(ResourceSpec {
        sharing,
        ..ResourceSpec::new("example.com/device".parse().unwrap(), DeviceClass::Char)
    })
}

fn device(id: &str) -> Arc<Device> {
    Arc::new(Device {
        id: DeviceId::new(id),
        key: format!("dev:/dev/{id}"),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: vec![1],
        nodes: vec![
            DeviceNode::at(format!("/dev/{id}")),
            DeviceNode::at("/dev/optional").optional(),
        ],
        attributes: Attributes::default(),
    })
}

fn evidence(secs: u64, found: &[&str], selected: &[&str], missing: &[&str]) -> Arc<Evidence> {
    Arc::new(Evidence {
        began: Moment { boot: at(secs), wall: Timestamp(0) },
        devices: found.iter().map(|id| (DeviceId::new(*id), device(id))).collect(),
        selected: BTreeMap::from([(
            spec(1).name.clone(),
            selected.iter().map(|id| DeviceId::new(*id)).collect(),
        )]),
        missing_nodes: missing.iter().map(|path| (*path).to_owned()).collect(),
        unfulfilled: Default::default(),
        unread: crate::domain::Unread::default(),
    })
}

/// A device as recorded in the ledger.
fn known(id: &str) -> GrantedDevice {
    GrantedDevice {
        id: DeviceId::new(id),
        key: format!("dev:/dev/{id}"),
        numa_nodes: vec![1],
        nodes: Vec::new(),
        objects: Vec::new(),
    }
}

fn holding(ids: &[&str]) -> Held {
    let entry = |id: &&str| (DeviceId::new(*id), known(id));
    Held::from([(spec(1).name.clone(), ids.iter().map(entry).collect())])
}

fn grant(ids: &[&str]) -> Grant {
    Grant {
        alloc_id: AllocId::new("a-1"),
        resource: spec(1).name.clone(),
        devices: ids.iter().map(|id| known(id)).collect(),
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(0),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }
}

fn rules() -> Rules {
    Rules { boot_id: "boot".into(), has_probes: true, fatal_xids: [79].into(), ..Rules::default() }
}

fn new_judge(spec: Arc<ResourceSpec>, published: Arc<Inventory>, earlier: &Listed) -> Judge {
    Judge::new(Arc::from([spec]), published, earlier, rules(), &Verdicts::new())
}

fn judge(replicas: u32) -> Judge {
    new_judge(spec(replicas), Arc::default(), &Listed::new())
}

/// The list as `id=health`, in order.
fn list(inventory: Option<Arc<Inventory>>) -> Vec<String> {
    let inventory = inventory.unwrap();
    let offering = inventory.resources.values().next().unwrap();
    let word = |health: Health| health.reason().map_or("ok", Reason::as_str);
    offering.devices.iter().map(|(id, offered)| format!("{id}={}", word(offered.health))).collect()
}

#[test]
fn nothing_is_published_before_the_first_evidence() {
    assert_eq!(judge(1).judge(&Held::default(), &PendingHooks::new(), at(0)), None);
}

#[test]
fn a_resource_without_devices_is_offered_empty() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &[], &[], &[]));
    assert!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(0))).is_empty());
}

#[test]
fn an_unchanged_list_is_not_copied() {
    let mut judge = judge(1);
    let mut listed = |secs, missing: &[&str]| {
        judge.discovered(evidence(secs, &["a"], &["a"], missing));
        let inventory = judge.judge(&Held::default(), &PendingHooks::new(), at(secs)).unwrap();
        Arc::clone(&inventory.resources[&spec(1).name])
    };
    let first = listed(0, &[]);
    assert!(Arc::ptr_eq(&first, &listed(1, &[])), "ten thousand devices would be in memory twice");
    assert!(!Arc::ptr_eq(&first, &listed(2, &["/dev/a"])));
}

#[test]
fn every_replica_follows_its_device() {
    let mut judge = judge(2);
    judge.discovered(evidence(0, &["a"], &["a"], &["/dev/a"]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(0))),
        ["a::0=node_missing", "a::1=node_missing"]
    );
    judge.discovered(evidence(1, &["a"], &["a"], &["/dev/optional"]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(1))),
        ["a::0=node_missing", "a::1=node_missing"],
        "it must be absent for the hold time"
    );
    assert_eq!(judge.next_probe(), Some(at(2)));
    judge.probe_requested(at(40));
    assert_eq!(judge.next_probe(), Some(at(41)), "the scan takes long");
    judge.discovered(evidence(2, &["a"], &["a"], &["/dev/optional"]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(2))),
        ["a::0=ok", "a::1=ok"]
    );
    assert_eq!(judge.next_probe(), None);
}

#[test]
fn an_unusable_device_stays_unhealthy_until_newer_evidence_clears_it() {
    let mut judge = judge(2);
    judge.discovered(evidence(0, &["a"], &["a"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(0));
    judge.report_unusable(&spec(1).name, &DeviceId::new("a::1"), Reason::NodeMissing, at(5));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(5))),
        ["a::0=node_missing", "a::1=node_missing"]
    );
    // A scan that had begun before the failure proves nothing.
    judge.discovered(evidence(4, &["a"], &["a"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(6))),
        ["a::0=node_missing", "a::1=node_missing"]
    );
    judge.discovered(evidence(6, &["a"], &["a"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(6));
    judge.discovered(evidence(7, &["a"], &["a"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(7))),
        ["a::0=ok", "a::1=ok"]
    );
}

#[test]
fn a_free_device_that_vanished_is_unhealthy_for_a_minute_and_then_leaves() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a", "b"], &["a", "b"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(0));
    judge.discovered(evidence(10, &["b"], &["b"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(10))),
        ["a=device_gone", "b=ok"]
    );
    assert_eq!(judge.next_deadline(at(10)), Some(at(70)));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(69))),
        ["a=device_gone", "b=ok"]
    );
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(70))), ["b=ok"]);
    assert_eq!(judge.next_deadline(at(0)), None);
}

#[test]
fn a_held_device_that_vanished_stays_until_a_minute_after_its_release() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a"], &["a"], &[]));
    judge.judge(&holding(&["a"]), &PendingHooks::new(), at(0));
    judge.discovered(evidence(10, &[], &[], &[]));
    assert_eq!(
        list(judge.judge(&holding(&["a"]), &PendingHooks::new(), at(10))),
        ["a=device_gone"]
    );
    assert_eq!(
        list(judge.judge(&holding(&["a"]), &PendingHooks::new(), at(100_000))),
        ["a=device_gone"]
    );
    assert_eq!(judge.next_deadline(at(0)), None);
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(100_010))),
        ["a=device_gone"]
    );
    assert!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(100_070))).is_empty());
}

#[test]
fn a_held_device_unknown_to_a_new_daemon_is_listed_with_its_numa_node() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &[], &[], &[]));
    let inventory = judge.judge(&holding(&["a"]), &PendingHooks::new(), at(0)).unwrap();
    let offered = &inventory.resources.values().next().unwrap().devices[&DeviceId::new("a")];
    assert_eq!(offered.health, Health::Unhealthy(Reason::DeviceGone));
    assert_eq!(offered.device.numa_nodes, [1]);
}

#[test]
fn a_deselected_device_keeps_its_health_for_its_holder_only() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a"], &["a"], &[]));
    judge.judge(&holding(&["a"]), &PendingHooks::new(), at(0));
    judge.discovered(evidence(10, &["a"], &[], &[]));
    assert_eq!(list(judge.judge(&holding(&["a"]), &PendingHooks::new(), at(10))), ["a=ok"]);
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(20))), ["a=deselected"]);
}

/// As a disk whose namespace is detached, attached again, and detached.
#[test]
fn a_device_that_is_not_selected_because_it_lacks_a_node_is_unhealthy() {
    let lacks = |secs| {
        let mut seen = (*evidence(secs, &["a"], &[], &[])).clone();
        seen.unfulfilled.insert(DeviceId::new("a"), "/dev/<a>".into());
        Arc::new(seen)
    };
    let mut judge = judge(1);
    let mut judged = |evidence: Arc<Evidence>, held: &[&str]| {
        let now = evidence.began.boot;
        judge.discovered(evidence);
        let listed = list(judge.judge(&holding(held), &PendingHooks::new(), now));
        let verdict = judge.verdicts().get(&DeviceId::new("a"));
        (listed, verdict.map(|verdict| verdict.detail(Reason::NodeMissing).to_owned()))
    };
    let one = |word: &str| vec![format!("a={word}")];
    let missing = (one("node_missing"), Some("/dev/<a>".to_owned()));
    assert_eq!(judged(evidence(0, &["a"], &["a"], &[]), &["a"]), (one("ok"), None));
    assert_eq!(judged(lacks(10), &["a"]), missing);
    assert_eq!(judged(evidence(20, &["a"], &["a"], &[]), &["a"]).0, one("node_missing"));
    assert_eq!(judged(evidence(22, &["a"], &["a"], &[]), &["a"]).0, one("ok"));
    assert_eq!(judged(lacks(30), &[]), missing, "nor does a pod get it that has no holder");
    assert!(judged(lacks(90), &[]).0.is_empty());
}

#[test]
fn a_rebuilt_judge_drops_nothing_from_the_published_list() {
    let mut first = judge(1);
    first.discovered(evidence(0, &["a"], &["a"], &[]));
    let published = first.judge(&Held::default(), &PendingHooks::new(), at(0)).unwrap();
    let mut second = new_judge(spec(1), published, &Listed::new());
    second.discovered(evidence(10, &[], &[], &[]));
    assert_eq!(
        list(second.judge(&Held::default(), &PendingHooks::new(), at(10))),
        ["a=device_gone"]
    );
}

#[test]
fn an_id_listed_by_an_earlier_process_stays_for_a_minute_after_its_first_absence() {
    let earlier = Listed::from([(spec(1).name.clone(), [known("a"), known("b")].into())]);
    let mut judge = new_judge(spec(1), Arc::default(), &earlier);
    judge.discovered(evidence(5, &["b"], &["b"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(5))),
        ["a=device_gone", "b=ok"]
    );
    assert_eq!(judge.next_deadline(at(5)), Some(at(65)));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(64))),
        ["a=device_gone", "b=ok"]
    );
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(65))), ["b=ok"]);
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(66))),
        ["b=ok"],
        "it does not return"
    );
}

#[test]
fn holders_matter_only_where_an_id_is_not_offered() {
    let mut judge = judge(1);
    let holds = |judge: &Judge, ids: &[&str]| judge.is_unchanged_by([grant(ids)].iter());
    assert!(!holds(&judge, &["a"]), "nothing has been judged yet");
    judge.discovered(evidence(0, &["a", "b"], &["a", "b"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(0));
    assert!(holds(&judge, &["a", "b"]));
    assert!(!holds(&judge, &["unlisted"]), "it has to be listed");
    judge.discovered(evidence(10, &["b"], &["b"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(10));
    assert!(!holds(&judge, &["b"]), "an id is about to leave");
}

#[test]
fn a_held_share_that_is_deselected_keeps_the_nodes_of_its_device() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a"], &[], &[]));
    let inventory = judge.judge(&holding(&["a::3"]), &PendingHooks::new(), at(0)).unwrap();
    let offered = &inventory.resources.values().next().unwrap().devices[&DeviceId::new("a::3")];
    assert!(offered.health.is_healthy() && offered.device.nodes[0].host == "/dev/a");
}

#[test]
fn another_card_in_the_same_slot_does_not_make_the_old_one_healthy() {
    let mut judge = judge(1);
    let mut replaced = (*device("new")).clone();
    replaced.key = "dev:/dev/a".into();
    let mut seen = (*evidence(0, &[], &["new"], &[])).clone();
    seen.devices.insert(DeviceId::new("new"), Arc::new(replaced));
    judge.discovered(Arc::new(seen));
    assert_eq!(
        list(judge.judge(&holding(&["a"]), &PendingHooks::new(), at(0))),
        ["a=device_gone", "new=ok"]
    );
}

#[test]
fn a_node_held_under_an_older_name_is_not_given_under_its_new_one() {
    let mut judge = judge(1);
    let mut renamed = (*device("by-id")).clone();
    renamed.nodes = vec![DeviceNode::at("/dev/a")];
    let mut seen = (*evidence(0, &["a"], &["by-id"], &[])).clone();
    seen.devices.insert(DeviceId::new("by-id"), Arc::new(renamed));
    judge.discovered(Arc::new(seen));
    assert_eq!(
        list(judge.judge(&holding(&["a"]), &PendingHooks::new(), at(0))),
        ["a=ok", "by-id=held_as_other"]
    );
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(10))),
        ["a=deselected", "by-id=ok"]
    );
}

#[test]
fn an_older_scan_does_not_overrule_a_newer_one() {
    let mut judge = judge(1);
    judge.discovered(evidence(10, &["a"], &["a"], &["/dev/a"]));
    judge.discovered(evidence(9, &["a"], &["a"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(11))),
        ["a=node_missing"]
    );
}

#[test]
fn a_held_disk_is_not_given_again_by_its_second_path() {
    let disk = |id: &str| {
        let function = PciFunction::at("0000:01:00.0".parse().unwrap());
        let nodes = vec![DeviceNode::at("/dev/nvme1n1")];
        Arc::new(Device {
            class: DeviceClass::Nvme,
            pci: Some(Box::new(function)),
            nodes,
            ..(*device(id)).clone()
        })
    };
    let observe = |secs: u64, id: &str| {
        let mut evidence = (*evidence(secs, &[], &[id], &[])).clone();
        evidence.devices.insert(DeviceId::new(id), disk(id));
        Arc::new(evidence)
    };
    let mut judge = judge(1);
    judge.discovered(observe(1, "first"));
    assert_eq!(list(judge.judge(&holding(&["first"]), &PendingHooks::new(), at(1))), ["first=ok"]);
    judge.discovered(observe(2, "second"));
    assert_eq!(
        list(judge.judge(&holding(&["first"]), &PendingHooks::new(), at(2))),
        ["first=device_gone", "second=held_as_other"]
    );
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(3))),
        ["first=device_gone", "second=ok"]
    );
}

#[test]
fn a_blocked_iommu_group_is_unhealthy_until_its_sibling_is_released() {
    let mut judge = judge(1);
    let observe = |secs: u64, blocked: bool| {
        let mut device = (*device("gpu")).clone();
        device
            .attributes
            .extend(blocked.then_some(("group_blocked_by", "0000:01:00.1 (snd_hda_intel)")));
        let mut evidence = (*evidence(secs, &[], &["gpu"], &[])).clone();
        evidence.devices.insert(device.id.clone(), Arc::new(device));
        Arc::new(evidence)
    };
    judge.discovered(observe(1, true));
    assert_eq!(
        list(judge.judge(&holding(&["gpu"]), &PendingHooks::new(), at(1))),
        ["gpu=iommu_group_not_viable"]
    );
    judge.discovered(observe(2, false));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(2))),
        ["gpu=iommu_group_not_viable"]
    );
    judge.discovered(observe(3, false));
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(3))), ["gpu=ok"]);
}

/// A judge of a pool for this many containers.
fn pool_of(containers: u32) -> Judge {
    new_judge(shared(Sharing::Pool(containers)), Arc::default(), &Listed::new())
}

/// The nodes for a container of the pool.
fn pool_nodes(judge: &Judge) -> Vec<String> {
    let offering = &judge.inventory.resources[&spec(1).name];
    offering.devices[&DeviceId::new("0")]
        .device
        .nodes
        .iter()
        .map(|node| node.host.clone())
        .collect()
}

#[test]
fn a_pool_offers_the_nodes_of_its_healthy_members_under_numbers() {
    let mut judge = pool_of(2);
    judge.discovered(evidence(1, &["a", "b"], &["a", "b"], &[]));
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(1))), ["0=ok", "1=ok"]);
    assert_eq!(pool_nodes(&judge), ["/dev/a", "/dev/optional", "/dev/b"]);
    judge.discovered(evidence(2, &["a", "b"], &["a", "b"], &["/dev/a"]));
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(2))), ["0=ok", "1=ok"]);
    assert_eq!(pool_nodes(&judge), ["/dev/b", "/dev/optional"]);
    judge.discovered(evidence(3, &["a", "b"], &["a", "b"], &["/dev/a", "/dev/b"]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(3))),
        ["0=node_missing", "1=node_missing"]
    );
}

#[test]
fn a_pool_that_an_allocate_found_unusable_is_unhealthy_until_the_next_scan() {
    let mut judge = pool_of(1);
    judge.discovered(evidence(1, &["a"], &["a"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(1));
    judge.report_unusable(&spec(1).name, &DeviceId::new("0"), Reason::NodeMissing, at(2));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(2))),
        ["0=node_missing"]
    );
    judge.discovered(evidence(3, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(3))), ["0=ok"]);
}

#[test]
fn a_held_id_of_a_pool_stays_when_the_pool_shrinks_or_disappears() {
    let mut judge = pool_of(1);
    let held = holding(&["7"]);
    judge.discovered(evidence(1, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&held, &PendingHooks::new(), at(1))), ["0=ok", "7=ok"]);
    judge.discovered(evidence(2, &[], &[], &[]));
    assert_eq!(
        list(judge.judge(&held, &PendingHooks::new(), at(2))),
        ["0=device_gone", "7=device_gone"]
    );
    judge.judge(&Held::default(), &PendingHooks::new(), at(3));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(3 + 60))),
        Vec::<String>::new()
    );
}

#[test]
fn a_device_that_waits_for_its_hook_is_unhealthy_with_all_its_shares() {
    let due = |state: HookState| {
        let hook = PendingHook {
            resource: spec(1).name.clone(),
            device: DeviceId::new("a"),
            key: "pci:a".into(),
            objects: Vec::new(),
            alloc_id: AllocId::new("1"),
            pod: None,
            container: None,
            released_at: Timestamp(1),
            state,
        };
        let mut due = PendingHooks::new();
        note_hook(&mut due, &hook);
        due
    };
    let mut judge = judge(2);
    judge.discovered(evidence(0, &["a", "b"], &["a", "b"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &due(HookState::Due), at(1))),
        ["a::0=hook_pending", "a::1=hook_pending", "b::0=ok", "b::1=ok"]
    );
    let failed = HookState::Failed { tries: 1, failed_at: Timestamp(2), why: "no key".into() };
    assert_eq!(list(judge.judge(&Held::default(), &due(failed), at(2)))[0], "a::0=hook_failed");
    // The ledger reports a free device; the holders here may be of an earlier time.
    assert_eq!(
        list(judge.judge(&holding(&["a::0"]), &due(HookState::Due), at(3)))[0],
        "a::0=hook_pending"
    );
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(4)))[0], "a::0=ok");
    // A failure of the device itself comes first.
    judge.discovered(evidence(5, &[], &[], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &due(HookState::Due), at(5)))[0],
        "a::0=device_gone"
    );
}

#[test]
fn shares_by_mps_are_healthy_only_while_their_control_daemon_answers() {
    let options = NvidiaOptions { mps_root: Some("/run/mps".into()), ..NvidiaOptions::default() };
    let resource = |control| {
        let options = NvidiaOptions { mps_control: control, ..options.clone() };
        let spec = ResourceSpec { contract: Contract::Nvidia(options), ..(*spec(2)).clone() };
        let mut judge = new_judge(Arc::new(spec), Arc::default(), &Listed::new());
        judge.discovered(evidence(0, &["a"], &["a"], &[]));
        judge
    };
    let states = |state| Arc::new(MpsStates::from([(spec(1).name.clone(), state)]));
    let held = || holding(&["a::0"]);
    let none = PendingHooks::new();
    let mut judge = resource(MpsControl::Run);
    // Not known yet: the container that holds a share may run.
    assert_eq!(list(judge.judge(&held(), &none, at(1))), ["a::0=ok", "a::1=mps_down"]);
    judge.set_mps(states(MpsState::Ready));
    assert_eq!(list(judge.judge(&held(), &none, at(2))), ["a::0=ok", "a::1=ok"]);
    judge.set_mps(states(MpsState::Down { why: "it has ended".into() }));
    assert_eq!(list(judge.judge(&held(), &none, at(3))), ["a::0=mps_down", "a::1=mps_down"]);
    // A kubelet that has just started would reject the pod.
    judge.withhold_until(at(60));
    assert_eq!(list(judge.judge(&held(), &none, at(4))), ["a::0=ok", "a::1=mps_down"]);
    assert_eq!(list(judge.judge(&held(), &none, at(60)))[0], "a::0=mps_down");
    // It is no verdict on the device, and a failure of the device comes first.
    assert!(judge.verdicts().is_empty());
    judge.discovered(evidence(61, &[], &[], &[]));
    assert_eq!(list(judge.judge(&held(), &none, at(62)))[0], "a::0=device_gone");

    let mut external = resource(MpsControl::External);
    assert_eq!(list(external.judge(&held(), &none, at(1))), ["a::0=ok", "a::1=ok"]);
}

/// A function of a card: the card's own, or the virtual one of `physical`.
fn function(id: &str, address: &str, physical: Option<&str>) -> Arc<Device> {
    let mut pci = PciFunction::at(address.parse().unwrap());
    pci.physfn = physical.map(|address| address.parse().unwrap());
    pci.bridges = vec!["0000:00:01.0".parse().unwrap()];
    Arc::new(Device {
        class: DeviceClass::Gpu,
        pci: Some(Box::new(pci)),
        nodes: Vec::new(),
        ..(*device(id)).clone()
    })
}

const CARD: &str = "0000:01:00.0";

/// A card that is not offered, with its virtual function `vf`, and a part of another card, `mig`.
fn cards(secs: u64) -> Arc<Evidence> {
    let mut evidence = (*evidence(secs, &[], &["vf", "mig"], &[])).clone();
    let mut mig = (*function("mig", "0000:02:00.0", None)).clone();
    mig.attributes = [("part", "mig"), ("parent", "whole")].into_iter().collect();
    let cards = [
        function("card", CARD, None),
        function("vf", "0000:01:00.4", Some(CARD)),
        function("whole", "0000:02:00.0", None),
    ];
    evidence
        .devices
        .extend(cards.into_iter().chain([Arc::new(mig)]).map(|device| (device.id.clone(), device)));
    Arc::new(evidence)
}

fn moment(secs: u64) -> Moment {
    Moment { boot: at(secs), wall: Timestamp(secs * 1000) }
}

/// Scans and probes all devices that matter, with these symptoms of `of`.
fn observe(judge: &mut Judge, secs: u64, of: &str, symptoms: &[Reason]) -> Vec<String> {
    let evidence = cards(secs);
    judge.discovered(Arc::clone(&evidence));
    for device in judge.probed_devices(&Held::default()) {
        let symptoms: &[Reason] = if device.id.as_str() == of { symptoms } else { &[] };
        let symptoms = symptoms
            .iter()
            .map(|reason| Symptom { reason: *reason, detail: String::new() })
            .collect();
        judge.probed(&device, moment(secs), &Signals { symptoms, ..Signals::default() });
    }
    list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))
}

fn deliver_event(
    judge: &mut Judge,
    secs: u64,
    to: &str,
    kind: EventKind,
    whole_slot: bool,
) -> Vec<String> {
    let event = DeviceEvent { at: to.parse().unwrap(), whole_slot, instance: None, kind };
    judge.apply_event(&event, moment(secs), &Held::default());
    list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))
}

#[test]
fn devices_below_an_unhealthy_device_are_unhealthy_too() {
    use EventKind::{Bound, RecoveryFailed, Xid};
    let mut judge = judge(1);
    assert_eq!(observe(&mut judge, 1, "", &[]), ["mig=ok", "vf=ok"]);
    assert_eq!(observe(&mut judge, 2, "card", &[Reason::OffTheBus]), ["mig=ok", "vf=off_the_bus"]);
    assert_eq!(observe(&mut judge, 3, "", &[]), ["mig=ok", "vf=off_the_bus"]);
    assert_eq!(observe(&mut judge, 33, "", &[]), ["mig=ok", "vf=ok"]);
    assert_eq!(deliver_event(&mut judge, 40, "0000:02:00.0", Xid(79), true), ["mig=xid", "vf=ok"]);
    assert_eq!(
        deliver_event(&mut judge, 41, "0000:02:00.0", Bound, false),
        ["mig=xid", "vf=ok"],
        "there has been no probe since"
    );
    assert_eq!(observe(&mut judge, 42, "", &[]), ["mig=xid", "vf=ok"]);
    assert_eq!(observe(&mut judge, 72, "", &[]), ["mig=ok", "vf=ok"]);
    assert_eq!(
        deliver_event(&mut judge, 80, "0000:00:01.0", RecoveryFailed, false),
        ["mig=recovery_failed", "vf=recovery_failed"]
    );
    assert_eq!(
        deliver_event(&mut judge, 81, "0000:07:00.0", Xid(79), true),
        ["mig=recovery_failed", "vf=recovery_failed"]
    );
}

#[test]
fn a_function_does_not_recover_before_it_was_probed() {
    let mut first = judge(1);
    observe(&mut first, 1, "vf", &[Reason::OffTheBus]);
    let remembered: Verdicts = first
        .take_changed(|_| Vec::new())
        .into_iter()
        .map(|(id, verdict)| (id, verdict.unwrap()))
        .collect();
    let mut second =
        Judge::new(Arc::from([spec(1)]), Arc::default(), &Listed::new(), rules(), &remembered);
    for secs in [100, 200, 300] {
        second.discovered(cards(secs));
        assert_eq!(
            list(second.judge(&Held::default(), &PendingHooks::new(), at(secs))),
            ["mig=ok", "vf=off_the_bus"],
            "there was no probe"
        );
    }
    assert_eq!(observe(&mut second, 301, "", &[]), ["mig=ok", "vf=off_the_bus"]);
    assert_eq!(second.next_probe(), Some(at(331)));
    assert_eq!(observe(&mut second, 331, "", &[]), ["mig=ok", "vf=ok"]);
}

#[test]
fn a_cordon_survives_restarts_and_reboots_until_the_uncordon() {
    let mut first = judge(2);
    let (id, cordon) = (DeviceId::new("a"), OperatorRequest::Cordon { reason: "fan".into() });
    assert!(!first.apply_request(&id, &cordon, moment(0)), "the device is unknown");
    first.discovered(evidence(1, &["a"], &["a"], &[]));
    assert!(first.apply_request(&id, &cordon, moment(1)));
    assert_eq!(
        list(first.judge(&Held::default(), &PendingHooks::new(), at(1))),
        ["a::0=cordoned", "a::1=cordoned"]
    );
    let remembered: Verdicts = first
        .take_changed(|_| Vec::new())
        .into_iter()
        .map(|(id, verdict)| (id, verdict.unwrap()))
        .collect();
    let rules = Rules { boot_id: "next".into(), ..rules() };
    let mut second =
        Judge::new(Arc::from([spec(2)]), Arc::default(), &Listed::new(), rules, &remembered);
    second.discovered(evidence(1, &["a"], &["a"], &[]));
    assert_eq!(
        list(second.judge(&Held::default(), &PendingHooks::new(), at(1))),
        ["a::0=cordoned", "a::1=cordoned"]
    );
    assert!(second.apply_request(&id, &OperatorRequest::Uncordon, moment(2)));
    assert_eq!(
        list(second.judge(&Held::default(), &PendingHooks::new(), at(2))),
        ["a::0=ok", "a::1=ok"]
    );
    assert_eq!(second.take_changed(|_| Vec::new()), [(id, None)], "nothing is left to record");
}

#[test]
fn soft_failures_of_held_devices_are_hidden_from_a_kubelet_that_just_started() {
    let mut judge = judge(1);
    let held = Held::from([(spec(1).name.clone(), [(DeviceId::new("mig"), known("mig"))].into())]);
    for secs in [1, 40] {
        observe(&mut judge, secs, "mig", &[Reason::PortDown]);
    }
    assert_eq!(list(judge.judge(&held, &PendingHooks::new(), at(41))), ["mig=port_down", "vf=ok"]);
    judge.withhold_until(at(100));
    assert_eq!(list(judge.judge(&held, &PendingHooks::new(), at(50))), ["mig=ok", "vf=ok"]);
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(50))),
        ["mig=port_down", "vf=ok"],
        "no new container gets it"
    );
    assert_eq!(judge.next_deadline(at(50)), Some(at(100)));
    assert_eq!(list(judge.judge(&held, &PendingHooks::new(), at(100))), ["mig=port_down", "vf=ok"]);
    judge.withhold_until(at(200));
    observe(&mut judge, 110, "mig", &[Reason::OffTheBus]);
    assert_eq!(
        list(judge.judge(&held, &PendingHooks::new(), at(110))),
        ["mig=off_the_bus", "vf=ok"],
        "a hard failure is shown"
    );
}

#[test]
fn a_device_named_by_its_path_fails_like_any_other() {
    let mut judge = judge(1);
    judge.discovered(evidence(1, &["/dev/a"], &["/dev/a"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(1));
    judge.discovered(evidence(2, &[], &[], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(2))),
        ["/dev/a=device_gone"]
    );
    let recorded = judge.take_changed(|_| Vec::new());
    let reasons: Vec<_> = recorded
        .iter()
        .filter_map(|(_, verdict)| verdict.as_ref())
        .flat_map(|verdict| &verdict.incidents)
        .collect();
    assert_eq!(
        reasons.iter().map(|incident| incident.reason).collect::<Vec<_>>(),
        [Reason::DeviceGone]
    );
}

#[test]
fn an_incident_records_the_holders_of_the_device() {
    let mut judge = judge(2);
    judge.discovered(evidence(1, &["a"], &["a"], &["/dev/a"]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(1));
    let grants = [Arc::new(grant(&["a::1"])), Arc::new(grant(&["b::0"]))];
    let recorded = judge.take_changed(|id| holders(&grants, id));
    let incident = &recorded[0].1.as_ref().unwrap().incidents[0];
    assert_eq!(
        (incident.to_string().as_str(), incident.held_by.as_slice()),
        ("node_missing (/dev/a)", &[AllocId::new("a-1")][..])
    );
}

#[test]
fn an_incident_records_the_holders_of_parts_of_the_device() {
    let mut judge = judge(1);
    observe(&mut judge, 1, "", &[]);
    deliver_event(&mut judge, 2, "0000:02:00.0", EventKind::Xid(79), true);
    let grants = [Arc::new(grant(&["mig"]))];
    let recorded: BTreeMap<_, _> =
        judge.take_changed(|id| holders(&grants, id)).into_iter().collect();
    assert_eq!(
        recorded[&DeviceId::new("whole")].as_ref().unwrap().incidents[0].held_by,
        [AllocId::new("a-1")]
    );
}

#[test]
fn events_from_before_the_first_scan_are_kept() {
    let mut judge = judge(1);
    let event = DeviceEvent {
        at: "0000:02:00.0".parse().unwrap(),
        whole_slot: true,
        instance: None,
        kind: EventKind::Xid(79),
    };
    judge.apply_event(&event, moment(1), &Held::default());
    assert_eq!(observe(&mut judge, 2, "", &[]), ["mig=xid", "vf=ok"]);
}

#[test]
fn a_fault_of_an_unselected_device_counts_when_a_resource_selects_it() {
    use EventKind::{Bound, RecoveryBegan, RecoveryFailed, Xid};
    let (gpu, root_port) = ("0000:03:00.0", "0000:00:01.0");
    let scan = |judge: &mut Judge, secs, selected: &[&str]| {
        let mut evidence = (*evidence(secs, &[], selected, &[])).clone();
        let mut switch = (*function("switch", "0000:04:00.0", None)).clone();
        switch.class = DeviceClass::Other;
        let mut mig = (*function("mig", gpu, None)).clone();
        mig.attributes = [("part", "mig"), ("parent", "gpu")].into_iter().collect();
        let devices = [function("gpu", gpu, None), Arc::new(switch), Arc::new(mig)];
        evidence.devices.extend(devices.map(|device| (device.id.clone(), device)));
        judge.discovered(Arc::new(evidence));
        for device in judge.probed_devices(&Held::default()) {
            judge.probed(&device, moment(secs), &Signals::default());
        }
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))
    };
    let recorded = |judge: &mut Judge| {
        judge
            .take_changed(|_| Vec::new())
            .into_iter()
            .map(|(id, _)| id.to_string())
            .collect::<Vec<_>>()
    };
    let mut judge = judge(1);
    scan(&mut judge, 1, &[]);
    deliver_event(&mut judge, 2, gpu, RecoveryBegan, false);
    deliver_event(&mut judge, 2, gpu, Xid(13), true);
    deliver_event(&mut judge, 2, gpu, Bound, false);
    assert!(
        recorded(&mut judge).is_empty(),
        "a recovery that usually succeeds, an application's error, a bind"
    );

    deliver_event(&mut judge, 3, gpu, Xid(79), true);
    assert_eq!(scan(&mut judge, 10, &["gpu"]), ["gpu=xid"]);
    for secs in [11, 100] {
        assert_eq!(scan(&mut judge, secs, &[]).is_empty(), secs == 100, "it leaves the list");
    }
    deliver_event(&mut judge, 101, root_port, RecoveryFailed, false);
    assert_eq!(recorded(&mut judge), ["gpu"]);
    // It is reset while no container can get it.
    deliver_event(&mut judge, 102, gpu, Bound, false);
    assert_eq!(scan(&mut judge, 110, &["gpu"]), ["gpu=recovery_failed"], "the first observation");
    assert_eq!(scan(&mut judge, 140, &["gpu"]), ["gpu=ok"]);
}

#[test]
fn a_bind_of_a_bridges_driver_resets_no_device_below_it() {
    use EventKind::{Bound, Xid};
    let mut judge = judge(1);
    observe(&mut judge, 1, "", &[]);
    deliver_event(&mut judge, 2, "0000:02:00.0", Xid(79), true);
    deliver_event(&mut judge, 3, "0000:00:01.0", Bound, false);
    observe(&mut judge, 4, "", &[]);
    assert_eq!(observe(&mut judge, 100, "", &[]), ["mig=xid", "vf=ok"]);
}

#[test]
fn recorded_faults_of_ignored_reasons_do_not_count() {
    let mut first = judge(1);
    observe(&mut first, 1, "", &[]);
    deliver_event(&mut first, 2, "0000:01:00.4", EventKind::Xid(79), false);
    let remembered: Verdicts = first
        .take_changed(|_| Vec::new())
        .into_iter()
        .map(|(id, verdict)| (id, verdict.unwrap()))
        .collect();
    let rules = Rules { ignored: [Reason::Xid, Reason::CheckFailed].into(), ..rules() };
    let mut second =
        Judge::new(Arc::from([spec(1)]), Arc::default(), &Listed::new(), rules, &remembered);
    assert_eq!(observe(&mut second, 10, "", &[]), ["mig=ok", "vf=xid"]);
    assert_eq!(observe(&mut second, 40, "", &[]), ["mig=ok", "vf=ok"]);
    second.checked(&DeviceId::new("vf"), moment(41), CheckResult::Failed("no".into()));
    assert_eq!(observe(&mut second, 42, "", &[]), ["mig=ok", "vf=ok"]);
}

#[test]
fn a_device_that_returns_need_not_wait_for_its_next_check() {
    let mut judge = judge(1);
    judge.discovered(evidence(1, &["a"], &["a"], &[]));
    judge.checked(&DeviceId::new("a"), moment(1), CheckResult::Passed);
    for (secs, missing) in [(5, &["/dev/a"][..]), (6, &[]), (7, &[])] {
        judge.discovered(evidence(secs, &["a"], &["a"], missing));
        judge.judge(&Held::default(), &PendingHooks::new(), at(secs));
    }
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(7))), ["a=ok"]);
    // Recovery needs the health check itself.
    judge.checked(&DeviceId::new("a"), moment(8), CheckResult::Failed("no".into()));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(8))),
        ["a=check_failed"]
    );
    judge.discovered(evidence(100, &["a"], &["a"], &[]));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(100))),
        ["a=check_failed"]
    );
    for secs in [101, 161] {
        judge.checked(&DeviceId::new("a"), moment(secs), CheckResult::Passed);
        judge.discovered(evidence(secs, &["a"], &["a"], &[]));
        judge.judge(&Held::default(), &PendingHooks::new(), at(secs));
    }
    assert_eq!(list(judge.judge(&Held::default(), &PendingHooks::new(), at(161))), ["a=ok"]);
}

#[test]
fn a_check_that_could_not_be_run_changes_nothing() {
    let mut first = judge(1);
    let id = DeviceId::new("a");
    let observe = |judge: &mut Judge, secs: u64, result: CheckResult| {
        judge.checked(&id, moment(secs), result);
        judge.discovered(evidence(secs, &["a"], &["a"], &[]));
        judge.judge(&Held::default(), &PendingHooks::new(), at(secs));
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))
    };
    assert_eq!(observe(&mut first, 1, CheckResult::NotRun), ["a=ok"]);
    assert_eq!(observe(&mut first, 2, CheckResult::Failed("no".into())), ["a=check_failed"]);
    assert_eq!(
        observe(&mut first, 900, CheckResult::NotRun),
        ["a=check_failed"],
        "the last result stays"
    );
    // The same after a restart, without a check result of this process.
    let remembered: Verdicts = first
        .take_changed(|_| Vec::new())
        .into_iter()
        .map(|(id, verdict)| (id, verdict.unwrap()))
        .collect();
    let mut second =
        Judge::new(Arc::from([spec(1)]), Arc::default(), &Listed::new(), rules(), &remembered);
    for secs in [1000, 1100, 2000] {
        assert_eq!(observe(&mut second, secs, CheckResult::NotRun), ["a=check_failed"]);
    }
    observe(&mut second, 2001, CheckResult::Passed);
    assert_eq!(observe(&mut second, 2100, CheckResult::Passed), ["a=ok"]);
}

#[test]
fn a_pool_follows_its_check() {
    let mut judge = pool_of(2);
    judge.discovered(evidence(1, &["a"], &["a"], &[]));
    judge.judge(&Held::default(), &PendingHooks::new(), at(1));
    let pool = judge
        .inventory
        .resources
        .values()
        .next()
        .unwrap()
        .devices
        .values()
        .next()
        .unwrap()
        .device
        .id
        .clone();
    judge.checked(&pool, moment(2), CheckResult::Failed("no".into()));
    let now = list(judge.judge(&Held::default(), &PendingHooks::new(), at(2)));
    assert!(!now.is_empty() && now.iter().all(|id| id.ends_with("=check_failed")), "{now:?}");
}

#[test]
fn nonfatal_errors_count_when_they_rise_at_several_polls_in_a_row() {
    let counter =
        crate::domain::Counter { reason: Reason::AerNonfatal, at: "0000:01:00.4".parse().unwrap() };
    let lists_after = |values: &[(u64, u64)]| {
        let rules = Rules { poll: Duration::from_secs(10), ..rules() };
        let mut judge = Judge::new(
            Arc::from([spec(1)]),
            Arc::default(),
            &Listed::new(),
            rules,
            &Verdicts::new(),
        );
        let mut now = Vec::new();
        for (secs, value) in values {
            judge.discovered(cards(*secs));
            for device in judge.probed_devices(&Held::default()) {
                let counters = if device.id.as_str() == "vf" {
                    [(counter.clone(), *value)].into()
                } else {
                    BTreeMap::new()
                };
                judge.probed(&device, moment(*secs), &Signals { counters, ..Signals::default() });
            }
            now = list(judge.judge(&Held::default(), &PendingHooks::new(), at(*secs)));
        }
        now
    };
    // Probes of other causes come between the polls.
    let rising = [(0, 0), (10, 1), (11, 1), (20, 2), (21, 2), (30, 3), (39, 3), (40, 4)];
    assert_eq!(lists_after(&rising), ["mig=ok", "vf=aer_nonfatal"]);
    assert_eq!(
        lists_after(&[(0, 0), (10, 1), (20, 1), (30, 1), (40, 1), (45, 1)]),
        ["mig=ok", "vf=ok"]
    );
    assert_eq!(
        lists_after(&[(0, 0), (10, 1), (20, 2), (21, 2), (36, 2), (41, 2)]),
        ["mig=ok", "vf=ok"]
    );
}

#[test]
fn a_device_that_returns_is_probed_at_once() {
    let mut judge = judge(1);
    observe(&mut judge, 1, "", &[]);
    let mut away = (*cards(5)).clone();
    away.devices.remove(&DeviceId::new("vf"));
    away.selected.values_mut().for_each(|ids| ids.retain(|id| id.as_str() != "vf"));
    judge.discovered(Arc::new(away));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(5))),
        ["mig=ok", "vf=device_gone"]
    );
    assert_eq!(judge.next_probe(), None);
    judge.discovered(cards(8));
    assert_eq!(
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(8))),
        ["mig=ok", "vf=device_gone"]
    );
    assert_eq!(judge.next_probe(), Some(at(9)));
    observe(&mut judge, 9, "", &[]);
    assert_eq!(judge.next_probe(), Some(at(10)));
    assert_eq!(observe(&mut judge, 10, "", &[]), ["mig=ok", "vf=ok"]);
}

#[test]
fn a_deselected_device_is_probed_and_shows_a_lost_driver_as_its_reason() {
    let mut judge = judge(1);
    observe(&mut judge, 1, "", &[]);
    let without = |secs: u64, driver: Option<&str>| {
        let mut evidence = (*cards(secs)).clone();
        evidence.selected.values_mut().for_each(|ids| ids.retain(|id| id.as_str() != "vf"));
        let mut vf = (*evidence.devices[&DeviceId::new("vf")]).clone();
        vf.pci.as_mut().unwrap().driver = driver.map(str::to_owned);
        evidence.devices.insert(vf.id.clone(), Arc::new(vf));
        Arc::new(evidence)
    };
    let lists_after = |judge: &mut Judge, secs| {
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))[1].clone()
    };
    judge.discovered(without(5, Some("nvme")));
    assert_eq!(lists_after(&mut judge, 5), "vf=deselected");
    let vf = judge
        .probed_devices(&Held::default())
        .into_iter()
        .find(|device| device.id.as_str() == "vf")
        .unwrap();
    let symptoms = [Symptom { reason: Reason::NvmeDead, detail: String::new() }].into();
    judge.probed(&vf, moment(6), &Signals { symptoms, ..Signals::default() });
    assert_eq!(lists_after(&mut judge, 6), "vf=nvme_dead");
    judge.discovered(without(7, None));
    assert_eq!(lists_after(&mut judge, 7), "vf=driver_lost");
    // It had no symptoms while it was absent, and that is no evidence now.
    judge.probed(&vf, moment(8), &Signals::default());
    assert_eq!(lists_after(&mut judge, 8), "vf=driver_lost");
    judge.discovered(cards(9));
    assert_eq!(lists_after(&mut judge, 9), "vf=driver_lost");
    assert_eq!(judge.next_probe(), Some(at(10)), "a probe is wanted");
}

#[test]
fn an_error_of_a_mig_instance_affects_only_that_instance() {
    use EventKind::{Bound, RecoveryAction, Xid};
    const GPU: &str = "0000:02:00.0";
    let scan = |judge: &mut Judge, secs| {
        let mut evidence = (*evidence(secs, &[], &["gi1-ci0", "gi1-ci1", "gi2-ci0"], &[])).clone();
        let parts = [("gi1-ci0", "1", "0"), ("gi1-ci1", "1", "1"), ("gi2-ci0", "2", "0")];
        let parts = parts.map(|(id, gi, ci)| {
            let mut part = (*function(id, GPU, None)).clone();
            part.attributes = [("part", "mig"), ("parent", "whole"), ("gi", gi), ("ci", ci)]
                .into_iter()
                .collect();
            Arc::new(part)
        });
        let devices = parts.into_iter().chain([function("whole", GPU, None)]);
        evidence.devices.extend(devices.map(|device| (device.id.clone(), device)));
        judge.discovered(Arc::new(evidence));
        for device in judge.probed_devices(&Held::default()) {
            judge.probed(&device, moment(secs), &Signals::default());
        }
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))
    };
    let deliver = |judge: &mut Judge, secs, instance: Option<(u32, Option<u32>)>, kind| {
        let instance = instance.map(|(gi, ci)| GpuInstance { gi, ci });
        let event = DeviceEvent { at: GPU.parse().unwrap(), whole_slot: true, instance, kind };
        judge.apply_event(&event, moment(secs), &Held::default());
        list(judge.judge(&Held::default(), &PendingHooks::new(), at(secs)))
    };
    let mut judge = judge(1);
    let healthy = ["gi1-ci0=ok", "gi1-ci1=ok", "gi2-ci0=ok"];
    assert_eq!(scan(&mut judge, 1), healthy);
    assert_eq!(
        deliver(&mut judge, 2, Some((1, Some(1))), Xid(79)),
        ["gi1-ci0=ok", "gi1-ci1=xid", "gi2-ci0=ok"]
    );
    assert_eq!(
        deliver(&mut judge, 3, Some((1, None)), Xid(79)),
        ["gi1-ci0=xid", "gi1-ci1=xid", "gi2-ci0=ok"]
    );
    scan(&mut judge, 50);
    assert_eq!(scan(&mut judge, 90), ["gi1-ci0=xid", "gi1-ci1=xid", "gi2-ci0=ok"], "it stays");
    // A reset of the GPU resets its instances too.
    deliver(&mut judge, 100, None, Bound);
    scan(&mut judge, 110);
    assert_eq!(scan(&mut judge, 150), healthy);
    assert_eq!(
        deliver(&mut judge, 160, Some((7, None)), Xid(79)),
        ["gi1-ci0=xid", "gi1-ci1=xid", "gi2-ci0=xid"],
        "an unknown instance stands for the GPU"
    );
    deliver(&mut judge, 170, None, RecoveryAction(None));
    scan(&mut judge, 180);
    assert_eq!(scan(&mut judge, 220), healthy);
    assert_eq!(
        deliver(&mut judge, 230, None, Xid(79)),
        ["gi1-ci0=xid", "gi1-ci1=xid", "gi2-ci0=xid"]
    );
}
