//! `holdfast migrate check`: checkpoints of a kubelet with another plugin, each with the pods that
//! need a drain.

use crate::common::{Node, name, offered, run};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::lab::sim::hardware::SimNode;
use holdfast::lab::sim::kubelet::PodSpec;
use prost::Message;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

const GPU: &str = "nvidia.com/gpu";

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A node with eight GPUs, under this configuration.
fn machine(config: &str) -> (Node, SimNode) {
    let node = Node::new();
    let sim = SimNode::create(node.path("host")).unwrap();
    node.write_config(config);
    fs::create_dir_all(node.path("kubelet/device-plugins")).unwrap();
    (node, sim)
}

/// The configuration of one resource for all GPUs.
fn gpus(resource: &str, more: &str) -> String {
    format!(
        "[[resource]]\nname = \"{resource}\"\nclass = \"gpu\"\nselect = {{ vendor = [\"10de\"] }}\n{more}\n"
    )
}

/// A stored answer with these variables.
fn answer(envs: &[(&str, &str)]) -> String {
    let envs = envs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let response =
        api::ContainerAllocateResponse { envs, ..api::ContainerAllocateResponse::default() };
    STANDARD.encode(response.encode_to_vec())
}

fn entry(pod: &str, resource: &str, ids: &[&str], response: &str) -> Value {
    json!({
        "PodUID": pod, "ContainerName": "main", "ResourceName": resource,
        "DeviceIDs": {"-1": ids}, "AllocResp": response,
    })
}

fn checkpoint(node: &Node) -> PathBuf {
    node.path("kubelet/device-plugins/kubelet_internal_checkpoint")
}

/// Writes a checkpoint with these entries, and with their ids as the registered ones.
fn held(node: &Node, entries: &[Value]) {
    let mut registered = serde_json::Map::new();
    for entry in entries {
        let ids = registered.entry(entry["ResourceName"].as_str().unwrap()).or_insert(json!([]));
        let more = entry["DeviceIDs"]["-1"].as_array().unwrap();
        ids.as_array_mut().unwrap().extend(more.iter().cloned());
    }
    let document = json!({
        "Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 7
    });
    write(&checkpoint(node), &document.to_string());
}

/// The exit code, and the document.
fn check_with(node: &Node, options: &[&str]) -> (i32, Value) {
    let verb = [&["migrate", "check", "-o", "json"], options].concat();
    let output = node.output(&verb);
    let (text, errors) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    let document = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {errors}"));
    (output.status.code().unwrap(), document)
}

fn check(node: &Node) -> (i32, Value) {
    check_with(node, &[])
}

/// The pod's ids with their fates.
fn fates(document: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let entries = |value: &Value, key: &str| value[key].as_array().cloned().unwrap_or_default();
    let holders = entries(document, "resources").into_iter().flat_map(|r| entries(&r, "holders"));
    let ids = holders.flat_map(|holder| entries(&holder, "ids"));
    ids.map(|id| (text(&id["id"]), text(&id["then"]))).collect()
}

fn then(document: &Value) -> Vec<String> {
    fates(document).into_iter().map(|(_, then)| then).collect()
}

#[test]
fn the_ids_of_nvidias_plugin_stay_and_nothing_is_changed() {
    let (node, sim) = machine(&gpus(GPU, ""));
    let (first, last) = (sim.gpu_uuid(0), sim.gpu_uuid(7));
    let response = answer(&[("NVIDIA_VISIBLE_DEVICES", &first)]);
    held(&node, &[entry("u1", GPU, &[&first, &last], &response)]);
    write(&node.path("host/var/log/pods/ml_train-0_u1/main/0.log"), "");
    let kept = fs::read(checkpoint(&node)).unwrap();
    let _plugin = UnixListener::bind(node.path("kubelet/device-plugins/nvidia-gpu.sock")).unwrap();
    let (code, document) = check(&node);
    assert_eq!((code, document["verdict"].as_str()), (0, Some("no-drain")), "{document:#}");
    assert_eq!(then(&document), ["same", "same"]);
    let of_gpus = &document["resources"][0];
    assert_eq!(
        (&of_gpus["ids"], &of_gpus["stay"], &of_gpus["new_pods"]),
        (&json!(2), &json!(2), &json!([]))
    );
    let holder = &of_gpus["holders"][0];
    assert_eq!((&holder["namespace"], &holder["pod"]), (&json!("ml"), &json!("train-0")));
    let plugins = json!([{"socket": "nvidia-gpu.sock", "resource": GPU}]);
    assert_eq!(document["plugins"], plugins);
    assert_eq!(fs::read(checkpoint(&node)).unwrap(), kept);
    assert!(!node.state().exists() && !node.path("run").exists(), "nothing is created");
    let text = String::from_utf8(node.output(&["migrate", "check"]).stdout).unwrap();
    assert!(text.contains("ml/train-0") && text.ends_with("no pod needs a drain\n"), "{text}");
}

#[test]
fn slices_and_another_name_need_a_drain_while_the_config_differs() {
    let (node, sim) = machine(&gpus(GPU, "replicas = 4"));
    let id = |n: usize, share: u32| format!("{}::{share}", sim.gpu_uuid(n));
    held(&node, &[entry("u1", GPU, &[&id(0, 0)], ""), entry("u2", GPU, &[&id(1, 3)], "")]);
    assert_eq!(check(&node).0, 0, "the same number of slices");
    node.write_config(&gpus(GPU, "replicas = 2"));
    let (code, document) = check(&node);
    assert_eq!((code, then(&document)), (1, vec!["same".into(), "fewer-shares".into()]));
    assert_eq!(document["drain"], json!(["u2"]), "the pod's name is not known");
    node.write_config(&gpus(GPU, ""));
    assert_eq!(then(&check(&node).1), ["as-whole", "as-whole"]);
    node.write_config(&gpus("nvidia.com/gpu.shared", "replicas = 4"));
    let (code, document) = check(&node);
    assert_eq!((code, then(&document)), (1, vec!["other-name".into(), "other-name".into()]));
    assert_eq!(document["appearing"], json!({"nvidia.com/gpu.shared": 32}));
}

#[test]
fn an_unknown_id_and_another_plugins_resource_need_a_drain_unless_it_stays() {
    let (node, sim) = machine(&gpus(GPU, ""));
    let known = sim.gpu_uuid(2);
    let of_others = entry("u3", "vendor.example/fpga", &["card-1"], "");
    held(
        &node,
        &[
            entry("u1", GPU, &[&known], ""),
            entry("u2", GPU, &["GPU-of-another-node"], ""),
            of_others,
        ],
    );
    let (code, document) = check(&node);
    assert_eq!(
        (code, then(&document)),
        (1, vec!["same".into(), "no-device".into(), "no-device".into()])
    );
    assert_eq!(document["drain"], json!(["u2", "u3"]));
    let (code, document) = check_with(&node, &["--keep", "vendor.example/*"]);
    assert_eq!((code, &document["drain"]), (1, &json!(["u2"])));
    let (code, _) = check_with(&node, &["--keep", "vendor.example/fpga", "--keep", GPU]);
    assert_eq!(code, 0);
}

#[test]
fn gkes_ids_are_found_by_node_and_mig_instances_by_place() {
    let (node, _) = machine(&gpus(GPU, "nvidia.pass_device_specs = true"));
    held(&node, &[entry("u1", GPU, &["nvidia3/vgpu1"], "")]);
    let (code, document) = check(&node);
    assert_eq!((code, then(&document)), (1, vec!["other-id".into()]));
    let id = &document["resources"][0]["holders"][0]["ids"][0];
    assert_eq!(id["ids"], json!(["GPU-5ca1ab1e-0000-4000-8000-000000000003"]));

    // A driver before 470 names instances by their places, so NVML is not needed.
    let (node, sim) = machine("[nvidia]\nmig_strategy = \"single\"\n");
    let driver = node.path("host/proc/driver/nvidia");
    write(&driver.join("version"), "NVRM version: NVIDIA UNIX x86_64 Kernel Module  460.91.03\n");
    let mig = driver.join("capabilities/gpu0/mig");
    write(&mig.join("gi7/access"), "DeviceFileMinor: 66\n");
    write(&mig.join("gi7/ci0/access"), "DeviceFileMinor: 67\n");
    for cap in [66, 67] {
        write(&node.path(&format!("host/dev/nvidia-caps/nvidia-cap{cap}")), "");
    }
    for gpu in 1..8 {
        sim.remove_function(sim.gpu_address(gpu)).unwrap();
    }
    let by_uuid = format!("MIG-{}/7/0", sim.gpu_uuid(0));
    held(&node, &[entry("u1", GPU, &[&by_uuid], ""), entry("u2", GPU, &["nvidia0/gi7"], "")]);
    let (code, document) = check(&node);
    assert_eq!(
        (code, then(&document)),
        (1, vec!["other-id".into(), "other-id".into()]),
        "{document:#}"
    );
    let id = &document["resources"][0]["holders"][0]["ids"][0];
    assert_eq!(id["ids"], json!([format!("{}-gi7-ci0", sim.gpu_uuid(0))]));
}

#[test]
fn what_cannot_be_read_is_unknown() {
    let (node, sim) = machine(&gpus(GPU, ""));
    let id = sim.gpu_uuid(0);
    let unknown = |expected: &str| {
        let (code, document) = check(&node);
        let why = document["unknown"].to_string();
        assert!(
            code == 2 && document["verdict"] == "unknown" && why.contains(expected),
            "{code} {document:#}"
        );
    };
    unknown("No such file");
    write(&checkpoint(&node), "{\"Data\":");
    unknown("it is truncated");
    held(&node, &[entry("u1", GPU, &[&id], "")]);
    assert_eq!(check(&node).0, 0);
    let whole = fs::read_to_string(checkpoint(&node)).unwrap();
    write(&checkpoint(&node), &whole.replace("\"Checksum\":7", "\"Checksum\":\"damaged\""));
    unknown("unknown structure");
    write(&checkpoint(&node), &whole.replace("\"Checksum\":7", "\"Checksum\":8"));
    assert_eq!(check(&node).0, 0, "a reader cannot compute the checksum of Go values");
    fs::remove_file(checkpoint(&node)).unwrap();
    fs::create_dir(checkpoint(&node)).unwrap();
    unknown("kubelet_internal_checkpoint");
    fs::remove_dir(checkpoint(&node)).unwrap();
    fs::remove_dir(node.path("kubelet/device-plugins")).unwrap();
    unknown("--kubelet-dir");

    node.write_config("[ledgr]\n");
    assert_eq!(node.output(&["migrate", "check"]).status.code(), Some(3));
}

#[test]
fn an_unreadable_ledger_makes_unknown_only_what_was_not_found() {
    let (node, sim) = machine(&gpus(GPU, ""));
    // A device may have its id from the ledger.
    write(&node.state().join("journal"), "no folder");
    held(&node, &[entry("u1", GPU, &[&sim.gpu_uuid(7)], "")]);
    assert_eq!(check(&node).0, 0);
    held(&node, &[entry("u1", GPU, &["GPU-of-another-node"], "")]);
    let (code, document) = check(&node);
    assert_eq!((code, then(&document)), (2, vec!["unread".into()]), "{document:#}");
    assert!(document["unknown"][0].as_str().unwrap().contains("ledger"), "{document:#}");
}

/// The kubelet's own checkpoint and its pod-resources API: an answer of Holdfast, then the same as
/// that of another plugin.
#[test]
fn a_kubelet_that_runs_is_read_with_its_checkpoint() {
    run(async {
        let node = Node::with(&[("gpu", 3)]);
        let kubelet = node.start_kubelet().await;
        let _app = node.start_app().await;
        let gpu = name("example.com/gpu");
        offered(&kubelet, &gpu, 3).await;
        let pod = PodSpec::new("ml", "train-0").app("main", &gpu, 1);
        let uid = kubelet.add_pod(pod).await.uid;
        let check = async || {
            let ask = node.command(&["migrate", "check", "-o", "json"]);
            let output = tokio::process::Command::from(ask).output().await.unwrap();
            let document: Value = serde_json::from_slice(&output.stdout).unwrap();
            (output.status.code(), document["resources"][0].clone(), document)
        };
        let (code, of_gpus, document) = check().await;
        assert_eq!(code, Some(0), "{document:#}");
        let counts = [&of_gpus["ids"], &of_gpus["stay"], &of_gpus["from_holdfast"]];
        assert_eq!(counts, [&json!(3), &json!(3), &json!(1)], "{document:#}");
        assert_eq!((&of_gpus["holders"], &document["notes"]), (&json!([]), &json!([])));

        let mut kept: Value =
            serde_json::from_slice(&fs::read(checkpoint(&node)).unwrap()).unwrap();
        kept["Data"]["PodDeviceEntries"][0]["AllocResp"] = json!("");
        write(&checkpoint(&node), &kept.to_string());
        let (code, of_gpus, document) = check().await;
        assert_eq!(code, Some(0), "{document:#}");
        assert_eq!(then(&document), ["same"]);
        assert_eq!(of_gpus["holders"][0]["pod_uid"], json!(uid));
        assert!(
            of_gpus["new_pods"][0].as_str().unwrap().contains("device nodes instead of nothing")
        );
    });
}

/// The kubelet's record of claims, with one claim of each of these drivers.
fn claims_of(node: &Node, drivers: &[&str]) {
    let claim = |(at, driver): (usize, &&str)| {
        let state = json!({ *driver: { "Devices": null } });
        json!({ "ClaimUID": format!("u-{at}"), "ClaimName": "c", "Namespace": "ml", "DriverState": state })
    };
    let data = json!({
        "kind": "DRACheckpoint", "apiVersion": "checkpoint.dra.kubelet.k8s.io/v1",
        "ClaimInfoStateList": drivers.iter().enumerate().map(claim).collect::<Vec<_>>(),
    });
    let data = data.to_string();
    let file = json!({ "Data": data, "Checksum": crc32fast::hash(data.as_bytes()) });
    write(&node.path("kubelet/dra_manager_state"), &file.to_string());
}

#[test]
fn claims_of_another_dra_driver_are_noted() {
    let (node, _sim) = machine(&gpus(GPU, ""));
    let notes = || {
        let (_, document) = check_with(&node, &[]);
        let notes = document["notes"].as_array().unwrap().clone();
        let of_claims = notes.into_iter().filter(|note| note.to_string().contains("claim"));
        of_claims.map(|note| note.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(notes(), [""; 0]);
    claims_of(&node, &["gpu.nvidia.com", "holdfast.dev", "gpu.nvidia.com"]);
    let found = notes();
    assert!(found.len() == 1 && found[0].starts_with("2 claims"), "{found:?}");
    assert!(found[0].contains("`gpu.nvidia.com`"), "{found:?}");
    write(&node.path("kubelet/dra_manager_state"), "{}");
    assert!(notes()[0].starts_with("whether claims hold devices is not known"), "{:?}", notes());
}
