//! Tests of the comparison: the ids of one node with what its kubelet has of another plugin.

use super::answers::Answer;
use super::compare::{Comparison, Holder, Resource, Theirs, Verdict, compare};
use super::fate::{Fate, Host, How, Offer, Plan, offers};
use super::report::{Document, Facts};
use super::{Options, why_unknown};
use crate::domain::{
    Attributes, ContainerEdits, Device, DeviceClass, DeviceId, DeviceNode, EditDevice, Health,
    PodRef, Reason, ResourceName, ResourceSpec, Sharing,
};
use crate::kubelet::checkpoint::CheckpointError;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

const GPU: &str = "nvidia.com/gpu";

fn name(text: &str) -> ResourceName {
    text.parse().unwrap()
}

fn device(id: &str, nodes: &[&str], attributes: &[(&'static str, &str)]) -> Arc<Device> {
    Arc::new(Device {
        id: DeviceId::new(id),
        key: format!("pci:{id}"),
        class: DeviceClass::Gpu,
        pci: None,
        numa_nodes: Vec::new(),
        nodes: nodes.iter().map(|node| DeviceNode::at(*node)).collect(),
        attributes: attributes.iter().copied().collect::<Attributes>(),
    })
}

fn gpu(n: u32) -> Arc<Device> {
    device(&format!("GPU-{n}"), &[&format!("/dev/nvidia{n}"), "/dev/nvidiactl"], &[])
}

/// The MIG instance `gi` of a GPU, as NVML names it.
fn instance(n: u32, gi: u32) -> Arc<Device> {
    let nodes = [format!("/dev/nvidia{n}"), format!("/dev/nvidia-caps/nvidia-cap{n}{gi}")];
    let (uuid, parent, gi) = (format!("MIG-{n}{gi}"), format!("GPU-{n}"), gi.to_string());
    device(
        &format!("0000:0{n}:00.0-gi{gi}-ci0"),
        &nodes.each_ref().map(String::as_str),
        &[("part", "mig"), ("uuid", &uuid), ("parent", &parent), ("gi", &gi)],
    )
}

/// What Holdfast offers: a name, its sharing, its devices.
fn plan(resources: &[(&str, Sharing, &[Arc<Device>])]) -> Plan {
    let resource = |(text, sharing, devices): &(&str, Sharing, &[Arc<Device>])| {
        let spec =
            ResourceSpec { sharing: *sharing, ..ResourceSpec::new(name(text), DeviceClass::Gpu) };
        let healthy =
            |device: &Arc<Device>| Offer { device: device.clone(), health: Some(Health::Healthy) };
        (name(text), offers(&spec, &devices.iter().map(healthy).collect::<Vec<_>>()))
    };
    resources.iter().map(resource).collect()
}

fn host<'a>(plan: &'a Plan, devices: &'a [Arc<Device>]) -> Host<'a> {
    Host { plan, devices, is_unread: false }
}

fn fate(host: &Host<'_>, id: &str) -> Fate {
    host.fate(&name(GPU), &DeviceId::new(id), None)
}

fn otherwise(how: How, resource: &str, ids: &[&str]) -> Fate {
    let ids = ids.iter().map(|id| DeviceId::new(*id)).collect();
    Fate::Otherwise { how, resource: name(resource), ids }
}

fn holder(pod: &str, ids: &[&str]) -> Holder {
    Holder {
        pod: PodRef { uid: pod.into(), namespace: Some("ml".into()), name: Some(pod.into()) },
        container: "main".into(),
        ids: ids.iter().map(|id| DeviceId::new(*id)).collect(),
        edits: ContainerEdits::default(),
        has_ended: false,
    }
}

/// What the kubelet has of one resource: its free ids, and its holders.
fn theirs(resource: &str, free: &[&str], holders: &[Holder]) -> BTreeMap<ResourceName, Theirs> {
    let held = holders.iter().flat_map(|holder| holder.ids.iter().cloned());
    let theirs = Theirs {
        listed: free.iter().map(|id| DeviceId::new(*id)).chain(held).collect(),
        holders: holders.to_vec(),
        of_ours: 0,
    };
    [(name(resource), theirs)].into()
}

fn compared(theirs: &BTreeMap<ResourceName, Theirs>, host: &Host<'_>) -> Comparison {
    compare(theirs, host, &BTreeMap::new(), |_| false)
}

#[test]
fn the_same_ids_stay_and_need_no_drain() {
    let devices = [gpu(0), gpu(1), gpu(2)];
    let plan = plan(&[(GPU, Sharing::Exclusive, &devices)]);
    let found = compared(
        &theirs(GPU, &["GPU-1"], &[holder("a", &["GPU-0", "GPU-2"])]),
        &host(&plan, &devices),
    );
    let [Resource { listed, same, free, .. }] = &found.resources[..] else { panic!("{found:?}") };
    assert_eq!((*listed, *same, free.len()), (3, 3, 0));
    assert_eq!(found.verdict(true), Verdict::NoDrain);
    assert!(found.appearing.is_empty() && found.to_drain().is_empty());
    assert_eq!(found.verdict(false), Verdict::Unknown, "the holders are not known");
}

#[test]
fn time_slices_stay_while_their_number_does() {
    let devices = [gpu(0)];
    let shared = plan(&[(GPU, Sharing::Replicas(2), &devices)]);
    let shared = host(&shared, &devices);
    assert_eq!([fate(&shared, "GPU-0::0"), fate(&shared, "GPU-0::1")], [Fate::Same, Fate::Same]);
    let both = &["GPU-0::0", "GPU-0::1"][..];
    assert_eq!(fate(&shared, "GPU-0::2"), otherwise(How::FewerShares, GPU, both));
    assert_eq!(fate(&shared, "GPU-0"), otherwise(How::AsShares, GPU, both));
    let whole = plan(&[(GPU, Sharing::Exclusive, &devices)]);
    assert_eq!(fate(&host(&whole, &devices), "GPU-0::1"), otherwise(How::AsWhole, GPU, &["GPU-0"]));
}

#[test]
fn another_name_is_another_resource_to_the_kubelet() {
    let devices = [gpu(0)];
    let renamed = plan(&[("nvidia.com/gpu.shared", Sharing::Exclusive, &devices)]);
    let host = host(&renamed, &devices);
    assert_eq!(
        fate(&host, "GPU-0"),
        otherwise(How::OtherName, "nvidia.com/gpu.shared", &["GPU-0"])
    );
    let found = compared(&theirs(GPU, &[], &[holder("a", &["GPU-0"])]), &host);
    assert!(!found.resources[0].is_offered);
    assert_eq!(found.appearing, [(name("nvidia.com/gpu.shared"), 1)].into());
    assert_eq!((found.verdict(true), found.to_drain()), (Verdict::Drain, ["ml/a".into()].into()));
}

#[test]
fn a_mig_instance_has_another_id_and_a_gpu_is_not_its_instances() {
    let (whole, part) = (gpu(0), instance(0, 1));
    let devices = [Arc::clone(&whole), Arc::clone(&part)];
    let by_profile = plan(&[("nvidia.com/mig-1g.10gb", Sharing::Exclusive, &[Arc::clone(&part)])]);
    let by_profile = host(&by_profile, &devices);
    let place = "0000:00:00.0-gi1-ci0";
    let of_part = |how| otherwise(how, "nvidia.com/mig-1g.10gb", &[place]);
    assert_eq!(fate(&by_profile, "MIG-01"), of_part(How::OtherId));
    assert_eq!(fate(&by_profile, "GPU-0"), of_part(How::AsParts));
    let whole_only = plan(&[(GPU, Sharing::Exclusive, &[whole])]);
    let whole_only = host(&whole_only, &devices);
    assert_eq!(fate(&whole_only, "MIG-01"), otherwise(How::WithinWhole, GPU, &["GPU-0"]));
}

#[test]
fn ids_of_gkes_plugin_are_those_of_nodes() {
    let devices = [gpu(0), gpu(1), instance(1, 7)];
    let exclusive = plan(&[(GPU, Sharing::Exclusive, &devices)]);
    let exclusive = host(&exclusive, &devices);
    assert_eq!(fate(&exclusive, "nvidia1"), otherwise(How::OtherId, GPU, &["GPU-1"]));
    assert_eq!(fate(&exclusive, "nvidia0/vgpu4"), otherwise(How::OtherId, GPU, &["GPU-0"]));
    let part = otherwise(How::OtherId, GPU, &["0000:01:00.0-gi7-ci0"]);
    assert_eq!(
        [fate(&exclusive, "nvidia1/gi7"), fate(&exclusive, "nvidia1/gi7/vgpu0")],
        [part.clone(), part]
    );
    assert_eq!(fate(&exclusive, "nvidia0/gi7"), Fate::NoDevice);
    assert_eq!(fate(&exclusive, "nvidiactl"), Fate::NoDevice, "a node of the driver is no GPU");
}

#[test]
fn the_stored_answer_finds_the_device_of_an_id_without_a_meaning() {
    let devices = [gpu(0), gpu(1), instance(1, 7)];
    let plan = plan(&[("example.com/gpu", Sharing::Exclusive, &devices)]);
    let host = host(&plan, &devices);
    let of_nodes = |nodes: &[&str]| {
        let node = |path: &&str| EditDevice {
            host: (*path).into(),
            container: "/dev/any".into(),
            permissions: "rw".into(),
        };
        let edits = ContainerEdits {
            devices: nodes.iter().map(node).collect(),
            ..ContainerEdits::default()
        };
        host.fate(&name("a.b/c"), &DeviceId::new("8d2f"), Some(&edits))
    };
    let is = |id| otherwise(How::OtherId, "example.com/gpu", &[id]);
    assert_eq!(of_nodes(&["/dev/nvidia0", "/dev/nvidiactl"]), is("GPU-0"));
    let of_instance = ["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap17"];
    assert_eq!(of_nodes(&of_instance), is("0000:01:00.0-gi7-ci0"), "not its GPU");
    assert_eq!([of_nodes(&["/dev/nvidiactl"]), of_nodes(&[])], [Fate::NoDevice, Fate::NoDevice]);
}

#[test]
fn a_pool_has_numbers_and_a_device_without_a_resource_is_named() {
    let devices = [gpu(0), gpu(1)];
    let pool = plan(&[("rdma/hca", Sharing::Pool(2), &devices[..1])]);
    let host = host(&pool, &devices);
    let of_pool = |id: &str| host.fate(&name("rdma/hca"), &DeviceId::new(id), None);
    assert_eq!(
        [of_pool("0"), of_pool("1"), of_pool("2")],
        [Fate::Same, Fate::Same, Fate::NoDevice]
    );
    assert_eq!(fate(&host, "GPU-1"), Fate::NotOffered(DeviceId::new("GPU-1")));
}

#[test]
fn an_id_that_is_not_found_on_an_unread_host_is_unknown_and_a_found_one_is_not() {
    let devices = [gpu(0)];
    let plan = plan(&[(GPU, Sharing::Exclusive, &devices)]);
    let host = Host { is_unread: true, ..host(&plan, &devices) };
    assert_eq!([fate(&host, "GPU-0"), fate(&host, "GPU-9")], [Fate::Same, Fate::Unread]);
    let verdict =
        |ids: &[&str]| compared(&theirs(GPU, &[], &[holder("a", ids)]), &host).verdict(true);
    assert_eq!(verdict(&["GPU-0"]), Verdict::NoDrain);
    assert_eq!(verdict(&["GPU-9"]), Verdict::Unknown);
    assert_eq!(verdict(&["GPU-9", "GPU-0::1"]), Verdict::Drain, "one id certainly needs it");
}

#[test]
fn an_unhealthy_device_keeps_its_id_and_its_pod_needs_a_drain() {
    let devices = [gpu(0)];
    let mut plan = plan(&[(GPU, Sharing::Exclusive, &devices)]);
    for offer in plan.values_mut().flat_map(BTreeMap::values_mut) {
        offer.health = Some(Health::Unhealthy(Reason::NodeMissing));
    }
    let host = host(&plan, &devices);
    assert_eq!(fate(&host, "GPU-0"), Fate::Unhealthy(Reason::NodeMissing));
    let found = compared(&theirs(GPU, &[], &[holder("a", &["GPU-0"])]), &host);
    assert_eq!(found.verdict(true), Verdict::Drain);
}

#[test]
fn a_kept_resource_and_a_pod_that_has_ended_need_no_drain() {
    let (plan, devices) = (Plan::new(), [gpu(0)]);
    let host = host(&plan, &devices);
    let kubelets = theirs(GPU, &["GPU-1"], &[holder("a", &["GPU-0"])]);
    assert_eq!(compared(&kubelets, &host).verdict(true), Verdict::Drain);
    let kept = compare(&kubelets, &host, &BTreeMap::new(), |resource| resource.as_str() == GPU);
    assert_eq!((kept.verdict(true), kept.resources[0].free.len()), (Verdict::NoDrain, 0));
    let ended = Holder { has_ended: true, ..holder("a", &["GPU-0"]) };
    let ended = compared(&theirs(GPU, &[], &[ended]), &host);
    assert_eq!((ended.verdict(true), ended.to_drain().len()), (Verdict::NoDrain, 0));
}

#[test]
fn keep_names_a_resource_or_its_domain() {
    let keeps =
        |kept: &str, resource: &str| Options { keep: vec![kept.to_owned()] }.keeps(&name(resource));
    assert!(keeps("rdma/hca", "rdma/hca") && keeps("intel.com/*", "intel.com/sriov"));
    assert!(!keeps("rdma/hca", "rdma/hca2") && !keeps("intel.com/*", "gpu.intel.com/i915"));
}

#[test]
fn answers_are_compared_if_a_container_has_one() {
    let devices = [gpu(0)];
    let plan = plan(&[(GPU, Sharing::Exclusive, &devices)]);
    let edits = ContainerEdits {
        envs: [("NVIDIA_VISIBLE_DEVICES".to_owned(), "GPU-0".to_owned())].into(),
        ..ContainerEdits::default()
    };
    let then = BTreeMap::from([(name(GPU), Answer::of(&edits))]);
    let changes = |kubelets: &BTreeMap<ResourceName, Theirs>| {
        compare(kubelets, &host(&plan, &devices), &then, |_| false).resources[0].changes.clone()
    };
    assert_eq!(changes(&theirs(GPU, &["GPU-0"], &[])), None);
    let same = Holder { edits, ..holder("a", &["GPU-0"]) };
    assert_eq!(changes(&theirs(GPU, &[], &[same])), Some(Vec::new()));
    let nothing = changes(&theirs(GPU, &[], &[holder("a", &["GPU-0"])])).unwrap();
    assert!(nothing[0].contains("instead of nothing"), "{nothing:?}");
}

#[test]
fn a_missing_checkpoint_is_known_to_be_empty_only_if_the_kubelet_has_no_device() {
    let missing =
        |kind: io::ErrorKind| CheckpointError::Io { path: "c".into(), source: kind.into() };
    let ids = |ids: &[&str]| -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        ids.iter().map(|id| (name(GPU), [DeviceId::new(*id)].into())).collect()
    };
    let absent = missing(io::ErrorKind::NotFound);
    assert_eq!(why_unknown(&absent, &Ok(ids(&[]))), None);
    assert!(why_unknown(&absent, &Ok(ids(&["GPU-0"]))).is_some());
    assert!(why_unknown(&absent, &Err("late".into())).unwrap().contains("late"));
    let denied = missing(io::ErrorKind::PermissionDenied);
    assert!(why_unknown(&denied, &Ok(ids(&[]))).is_some(), "it may have holders");
}

/// The document is an interface: a change here affects every program that reads it.
#[test]
fn the_document_and_the_text_are_what_is_promised() {
    let devices = [gpu(0), gpu(1)];
    let plan = plan(&[(GPU, Sharing::Replicas(2), &devices)]);
    let kubelets = theirs(GPU, &["GPU-1"], &[holder("a", &["GPU-0"])]);
    let found = compared(&kubelets, &host(&plan, &devices));
    let facts = Facts {
        verdict: found.verdict(true),
        plugins: vec![("nvidia-gpu.sock".into(), Some(GPU.into())), ("x.sock".into(), None)],
        ..Facts::default()
    };
    let document = Document::of(&found, facts);
    let expected = serde_json::json!({
        "schema": 1, "verdict": "drain", "drain": ["ml/a"], "unknown": [],
        "resources": [{
            "name": GPU, "offered": true, "kept": false, "ids": 2, "stay": 0, "from_holdfast": 0,
            "free": [{
                "id": "GPU-1", "then": "as-shares", "drain": true, "resource": GPU,
                "ids": ["GPU-1::0", "GPU-1::1"], "text": "2 shares: GPU-1::0 of nvidia.com/gpu"
            }],
            "holders": [{
                "pod_uid": "a", "namespace": "ml", "pod": "a", "container": "main", "ended": false,
                "ids": [{
                    "id": "GPU-0", "then": "as-shares", "drain": true, "resource": GPU,
                    "ids": ["GPU-0::0", "GPU-0::1"], "text": "2 shares: GPU-0::0 of nvidia.com/gpu"
                }]
            }],
            "new_pods": null
        }],
        "appearing": {},
        "plugins": [
            {"socket": "nvidia-gpu.sock", "resource": GPU}, {"socket": "x.sock", "resource": null}
        ],
        "notes": []
    });
    assert_eq!(serde_json::to_value(&document).unwrap(), expected);
    let text = document.text().to_string();
    let expected = "\
DRAIN  POD   CONTAINER  RESOURCE        ID     AFTER THE SWITCH
yes    ml/a  main       nvidia.com/gpu  GPU-0  2 shares: GPU-0::0 of nvidia.com/gpu

nvidia.com/gpu: 0 of 2 ids stay
  GPU-1 (free): 2 shares: GPU-1::0 of nvidia.com/gpu
  new pods: not compared, since no container shows the present plugin's answer
plugin: `nvidia-gpu.sock` has a listener and may serve nvidia.com/gpu; remove its plugin before Holdfast starts
drain first: ml/a
";
    assert_eq!(text, expected);
}
