//! The judge's rules as sentences.

use super::*;
use crate::domain::{AllocId, ContainerEdits, DeviceNode, GrantState, GrantedDevice, Moment, Timestamp};

fn at(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn spec(replicas: u32) -> Arc<ResourceSpec> {
    shared(Sharing::replicas(replicas))
}

fn shared(sharing: Sharing) -> Arc<ResourceSpec> {
    Arc::new(ResourceSpec { sharing, ..ResourceSpec::new("example.com/device".parse().unwrap(), DeviceClass::Char) })
}

fn device(id: &str) -> Arc<Device> {
    Arc::new(Device {
        id: DeviceId::new(id),
        key: format!("dev:/dev/{id}"),
        class: DeviceClass::Char,
        pci: None,
        numa_nodes: vec![1],
        nodes: vec![DeviceNode::at(format!("/dev/{id}")), DeviceNode::at("/dev/optional").optional()],
        attributes: BTreeMap::new(),
    })
}

fn evidence(secs: u64, found: &[&str], selected: &[&str], missing: &[&str]) -> Arc<Evidence> {
    Arc::new(Evidence {
        began: Moment { boot: at(secs), wall: Timestamp(0) },
        devices: found.iter().map(|id| (DeviceId::new(*id), device(id))).collect(),
        selected: BTreeMap::from([(spec(1).name.clone(), selected.iter().map(|id| DeviceId::new(*id)).collect())]),
        missing_nodes: missing.iter().map(|path| (*path).to_owned()).collect(),
    })
}

/// What the ledger remembers of a device.
fn known(id: &str) -> GrantedDevice {
    GrantedDevice { id: DeviceId::new(id), key: format!("dev:/dev/{id}"), numa_nodes: vec![1], nodes: Vec::new() }
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
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(0),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }
}

fn judge(replicas: u32) -> Judge {
    Judge::new(Arc::from([spec(replicas)]), Arc::default(), &Listed::new())
}

/// The list as `id=health`, in order.
fn list(inventory: Option<Arc<Inventory>>) -> Vec<String> {
    let inventory = inventory.unwrap();
    let offering = inventory.resources.values().next().unwrap();
    let word = |health: Health| health.reason().map_or("ok", Reason::as_str);
    offering.devices.iter().map(|(id, offered)| format!("{id}={}", word(offered.health))).collect()
}

#[test]
fn nothing_is_said_before_the_first_evidence() {
    assert_eq!(judge(1).judge(&Held::new(), at(0)), None);
}

#[test]
fn a_resource_without_devices_is_offered_empty() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &[], &[], &[]));
    assert!(list(judge.judge(&Held::new(), at(0))).is_empty());
}

#[test]
fn every_replica_follows_its_device() {
    let mut judge = judge(2);
    judge.discovered(evidence(0, &["a"], &["a"], &["/dev/a"]));
    assert_eq!(list(judge.judge(&Held::new(), at(0))), ["a::0=node_missing", "a::1=node_missing"]);
    judge.discovered(evidence(1, &["a"], &["a"], &["/dev/optional"]));
    assert_eq!(list(judge.judge(&Held::new(), at(1))), ["a::0=ok", "a::1=ok"]);
}

#[test]
fn a_broken_device_stays_unhealthy_until_newer_evidence_clears_it() {
    let mut judge = judge(2);
    judge.discovered(evidence(0, &["a"], &["a"], &[]));
    judge.judge(&Held::new(), at(0));
    judge.broken(&spec(1).name, &DeviceId::new("a::1"), Reason::NodeMissing, at(5));
    assert_eq!(list(judge.judge(&Held::new(), at(5))), ["a::0=node_missing", "a::1=node_missing"]);
    // A scan that had begun before the failure proves nothing.
    judge.discovered(evidence(4, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(6))), ["a::0=node_missing", "a::1=node_missing"]);
    judge.discovered(evidence(6, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(7))), ["a::0=ok", "a::1=ok"]);
}

#[test]
fn a_free_device_that_vanished_is_unhealthy_for_a_minute_and_then_leaves() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a", "b"], &["a", "b"], &[]));
    judge.judge(&Held::new(), at(0));
    judge.discovered(evidence(10, &["b"], &["b"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(10))), ["a=device_gone", "b=ok"]);
    assert_eq!(judge.next_deadline(), Some(at(70)));
    assert_eq!(list(judge.judge(&Held::new(), at(69))), ["a=device_gone", "b=ok"]);
    assert_eq!(list(judge.judge(&Held::new(), at(70))), ["b=ok"]);
    assert_eq!(judge.next_deadline(), None);
}

#[test]
fn a_held_device_that_vanished_stays_until_a_minute_after_its_release() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a"], &["a"], &[]));
    judge.judge(&holding(&["a"]), at(0));
    judge.discovered(evidence(10, &[], &[], &[]));
    assert_eq!(list(judge.judge(&holding(&["a"]), at(10))), ["a=device_gone"]);
    assert_eq!(list(judge.judge(&holding(&["a"]), at(100_000))), ["a=device_gone"]);
    assert_eq!(judge.next_deadline(), None);
    assert_eq!(list(judge.judge(&Held::new(), at(100_010))), ["a=device_gone"]);
    assert!(list(judge.judge(&Held::new(), at(100_070))).is_empty());
}

#[test]
fn a_held_device_unknown_to_a_new_daemon_is_listed_with_its_numa_node() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &[], &[], &[]));
    let inventory = judge.judge(&holding(&["a"]), at(0)).unwrap();
    let offered = &inventory.resources.values().next().unwrap().devices[&DeviceId::new("a")];
    assert_eq!(offered.health, Health::Unhealthy(Reason::DeviceGone));
    assert_eq!(offered.device.numa_nodes, [1]);
}

#[test]
fn a_deselected_device_keeps_its_health_for_its_holder_only() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a"], &["a"], &[]));
    judge.judge(&holding(&["a"]), at(0));
    judge.discovered(evidence(10, &["a"], &[], &[]));
    assert_eq!(list(judge.judge(&holding(&["a"]), at(10))), ["a=ok"]);
    assert_eq!(list(judge.judge(&Held::new(), at(20))), ["a=deselected"]);
}

#[test]
fn a_rebuilt_judge_drops_nothing_from_the_published_list() {
    let mut first = judge(1);
    first.discovered(evidence(0, &["a"], &["a"], &[]));
    let published = first.judge(&Held::new(), at(0)).unwrap();
    let mut second = Judge::new(Arc::from([spec(1)]), published, &Listed::new());
    second.discovered(evidence(10, &[], &[], &[]));
    assert_eq!(list(second.judge(&Held::new(), at(10))), ["a=device_gone"]);
}

#[test]
fn what_an_earlier_process_listed_stays_for_a_minute_after_its_first_absence() {
    let earlier = Listed::from([(spec(1).name.clone(), vec![known("a"), known("b")])]);
    let mut judge = Judge::new(Arc::from([spec(1)]), Arc::default(), &earlier);
    judge.discovered(evidence(5, &["b"], &["b"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(5))), ["a=device_gone", "b=ok"]);
    assert_eq!(judge.next_deadline(), Some(at(65)));
    assert_eq!(list(judge.judge(&Held::new(), at(64))), ["a=device_gone", "b=ok"]);
    assert_eq!(list(judge.judge(&Held::new(), at(65))), ["b=ok"]);
    assert_eq!(list(judge.judge(&Held::new(), at(66))), ["b=ok"], "it does not come back");
}

#[test]
fn holders_matter_only_where_an_id_is_not_offered() {
    let mut judge = judge(1);
    let holds = |judge: &Judge, ids: &[&str]| judge.is_judged_with([grant(ids)].iter());
    assert!(!holds(&judge, &["a"]), "nothing has been judged yet");
    judge.discovered(evidence(0, &["a", "b"], &["a", "b"], &[]));
    judge.judge(&Held::new(), at(0));
    assert!(holds(&judge, &["a", "b"]));
    assert!(!holds(&judge, &["ghost"]), "it has to be listed");
    judge.discovered(evidence(10, &["b"], &["b"], &[]));
    judge.judge(&Held::new(), at(10));
    assert!(!holds(&judge, &["b"]), "an id is about to leave");
}

#[test]
fn a_held_share_that_is_not_selected_any_more_keeps_the_nodes_of_its_device() {
    let mut judge = judge(1);
    judge.discovered(evidence(0, &["a"], &[], &[]));
    let inventory = judge.judge(&holding(&["a::3"]), at(0)).unwrap();
    let offered = &inventory.resources.values().next().unwrap().devices[&DeviceId::new("a::3")];
    assert!(offered.health.is_healthy() && offered.device.nodes[0].host == "/dev/a");
}

#[test]
fn another_card_in_the_same_place_does_not_heal_the_old_one() {
    let mut judge = judge(1);
    let mut replaced = (*device("new")).clone();
    replaced.key = "dev:/dev/a".into();
    let mut seen = (*evidence(0, &[], &["new"], &[])).clone();
    seen.devices.insert(DeviceId::new("new"), Arc::new(replaced));
    judge.discovered(Arc::new(seen));
    assert_eq!(list(judge.judge(&holding(&["a"]), at(0))), ["a=device_gone", "new=ok"]);
}

#[test]
fn a_node_that_is_held_under_an_older_name_is_not_given_under_its_new_one() {
    let mut judge = judge(1);
    let mut renamed = (*device("by-id")).clone();
    renamed.nodes = vec![DeviceNode::at("/dev/a")];
    let mut seen = (*evidence(0, &["a"], &["by-id"], &[])).clone();
    seen.devices.insert(DeviceId::new("by-id"), Arc::new(renamed));
    judge.discovered(Arc::new(seen));
    assert_eq!(list(judge.judge(&holding(&["a"]), at(0))), ["a=ok", "by-id=held_as_other"]);
    assert_eq!(list(judge.judge(&Held::new(), at(10))), ["a=deselected", "by-id=ok"]);
}

#[test]
fn an_older_scan_does_not_overrule_a_newer_one() {
    let mut judge = judge(1);
    judge.discovered(evidence(10, &["a"], &["a"], &["/dev/a"]));
    judge.discovered(evidence(9, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(11))), ["a=node_missing"]);
}

#[test]
fn a_disk_that_somebody_holds_is_not_given_to_another_by_its_second_path() {
    let disk = |id: &str| {
        let function = crate::domain::PciFunction::at("0000:01:00.0".parse().unwrap());
        let nodes = vec![DeviceNode::at("/dev/nvme1n1")];
        Arc::new(Device { class: DeviceClass::Nvme, pci: Some(function), nodes, ..(*device(id)).clone() })
    };
    let look = |secs: u64, id: &str| {
        let mut evidence = (*evidence(secs, &[], &[id], &[])).clone();
        evidence.devices.insert(DeviceId::new(id), disk(id));
        Arc::new(evidence)
    };
    let mut judge = judge(1);
    judge.discovered(look(1, "first"));
    assert_eq!(list(judge.judge(&holding(&["first"]), at(1))), ["first=ok"]);
    judge.discovered(look(2, "second"));
    assert_eq!(list(judge.judge(&holding(&["first"]), at(2))), ["first=device_gone", "second=held_as_other"]);
    assert_eq!(list(judge.judge(&Held::new(), at(3))), ["first=device_gone", "second=ok"]);
}

#[test]
fn a_group_that_no_guest_can_have_is_unhealthy_until_its_sibling_is_let_go() {
    let mut judge = judge(1);
    let look = |secs: u64, blocked: bool| {
        let mut device = (*device("gpu")).clone();
        device.attributes.extend(blocked.then(|| ("group_blocked_by".to_owned(), "0000:01:00.1 (snd_hda_intel)".to_owned())));
        let mut evidence = (*evidence(secs, &[], &["gpu"], &[])).clone();
        evidence.devices.insert(device.id.clone(), Arc::new(device));
        Arc::new(evidence)
    };
    judge.discovered(look(1, true));
    assert_eq!(list(judge.judge(&holding(&["gpu"]), at(1))), ["gpu=iommu_group_not_viable"]);
    judge.discovered(look(2, false));
    assert_eq!(list(judge.judge(&Held::new(), at(2))), ["gpu=ok"]);
}

/// A judge of a pool for this many containers.
fn pool_of(containers: u32) -> Judge {
    Judge::new(Arc::from([shared(Sharing::Pool(containers))]), Arc::default(), &Listed::new())
}

/// What a container of the pool gets.
fn pool_nodes(judge: &Judge) -> Vec<String> {
    let offering = &judge.inventory.resources[&spec(1).name];
    offering.devices[&DeviceId::new("0")].device.nodes.iter().map(|node| node.host.clone()).collect()
}

#[test]
fn a_pool_is_all_devices_that_can_be_used_under_ids_that_mean_nothing() {
    let mut judge = pool_of(2);
    judge.discovered(evidence(1, &["a", "b"], &["a", "b"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(1))), ["0=ok", "1=ok"]);
    assert_eq!(pool_nodes(&judge), ["/dev/a", "/dev/optional", "/dev/b"]);
    judge.discovered(evidence(2, &["a", "b"], &["a", "b"], &["/dev/a"]));
    assert_eq!(list(judge.judge(&Held::new(), at(2))), ["0=ok", "1=ok"]);
    assert_eq!(pool_nodes(&judge), ["/dev/b", "/dev/optional"]);
    judge.discovered(evidence(3, &["a", "b"], &["a", "b"], &["/dev/a", "/dev/b"]));
    assert_eq!(list(judge.judge(&Held::new(), at(3))), ["0=node_missing", "1=node_missing"]);
}

#[test]
fn a_pool_that_an_allocate_found_broken_is_so_until_the_next_evidence() {
    let mut judge = pool_of(1);
    judge.discovered(evidence(1, &["a"], &["a"], &[]));
    judge.judge(&Held::new(), at(1));
    judge.broken(&spec(1).name, &DeviceId::new("0"), Reason::NodeMissing, at(2));
    assert_eq!(list(judge.judge(&Held::new(), at(2))), ["0=node_missing"]);
    judge.discovered(evidence(3, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&Held::new(), at(3))), ["0=ok"]);
}

#[test]
fn a_held_id_of_a_pool_stays_when_the_pool_becomes_smaller_or_is_gone() {
    let mut judge = pool_of(1);
    let held = holding(&["7"]);
    judge.discovered(evidence(1, &["a"], &["a"], &[]));
    assert_eq!(list(judge.judge(&held, at(1))), ["0=ok", "7=ok"]);
    judge.discovered(evidence(2, &[], &[], &[]));
    assert_eq!(list(judge.judge(&held, at(2))), ["0=device_gone", "7=device_gone"]);
    judge.judge(&Held::new(), at(3));
    assert_eq!(list(judge.judge(&Held::new(), at(3 + 60))), Vec::<String>::new());
}
