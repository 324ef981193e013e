//! A real GPU of NVIDIA with its driver: what NVML reports is in the slice, and claims have parts
//! of its memory. Skipped with a message where there is none.

use crate::common::inside::{has_program, say};
use crate::common::{Daemon, HANG, Node, run, until};
use crate::dra::{NODE, claim_ref, stop};
use crate::dra_nvml::write_config;
use holdfast::domain::DRA_DRIVER;
use holdfast::lab::sim::api_server::{ApiServer, Kind};
use holdfast::lab::sim::kubelet::claims::{Claim, ClaimManager, ClaimsConfig, Release, Times};
use serde_json::{Value, json};
use std::fs;
use std::process::{Command, Stdio};

/// A GPU, as `nvidia-smi` reports it.
struct Gpu {
    uuid: String,
    memory_mib: u64,
    compute_capability: String,
    driver: String,
}

/// The GPUs of this machine, or `None` after a message.
fn gpus() -> Option<Vec<Gpu>> {
    if !has_program("nvidia-smi") {
        say("SKIPPED the tests of a real GPU: this machine has no nvidia-smi");
        return None;
    }
    let fields = "--query-gpu=uuid,memory.total,compute_cap,driver_version";
    let mut command = Command::new("nvidia-smi");
    let output = command.args([fields, "--format=csv,noheader,nounits"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    if !output.status.success() {
        say(format!("SKIPPED the tests of a real GPU: nvidia-smi failed: {text}"));
        return None;
    }
    let gpus = text.lines().map(|line| {
        let fields: Vec<&str> = line.split(", ").collect();
        let [uuid, memory, capability, driver] = fields[..] else { panic!("nvidia-smi: {line}") };
        Gpu {
            uuid: uuid.to_owned(),
            memory_mib: memory.parse().unwrap(),
            compute_capability: capability.to_owned(),
            driver: driver.to_owned(),
        }
    });
    Some(gpus.collect())
}

/// The daemon with the real `/sys`, `/proc` and `/dev`.
fn daemon(node: &Node) -> Daemon {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.args(["run", "--host-root", "/"]).env("NODE_NAME", NODE).stdin(Stdio::null());
    command.arg("--config").arg(node.config_file());
    command.arg("--kubelet-dir").arg(node.path("kubelet"));
    command.arg("--state-dir").arg(node.state());
    command.arg("--run-dir").arg(node.path("run"));
    Daemon::spawn(&mut command)
}

/// What a version of two or three numbers is in the API: three numbers without leading zeros.
fn version(text: &str) -> String {
    let mut numbers: Vec<u64> = text.split('.').map(|number| number.parse().unwrap()).collect();
    numbers.resize(3, 0);
    numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
}

/// The slice has what `nvidia-smi` reports.
fn check(gpu: &Gpu, published: &[Value]) {
    let is_it = |device: &&Value| device["attributes"]["uuid"]["string"] == gpu.uuid;
    let device = published.iter().find(is_it).unwrap();
    assert_eq!(device["capacity"]["memory"]["value"], format!("{}Mi", gpu.memory_mib));
    let attributes = &device["attributes"];
    let is = |name: &str| attributes[name]["version"].as_str().unwrap().to_owned();
    assert_eq!(is("cudaComputeCapability"), version(&gpu.compute_capability));
    assert_eq!(is("driverVersion"), version(&gpu.driver));
    say(serde_json::to_string_pretty(device).unwrap());
}

/// Makes the control plane allocate a part of a device to a claim, for a pod of its name.
fn allocate(server: &ApiServer, name: &str, number: usize, pool: &Value, device: &str) -> Claim {
    let of = claim_ref(name);
    let share = format!("00000000-0000-4000-8000-00000000000{number}");
    server.put(
        Kind::ResourceClaim,
        json!({
            "metadata": { "namespace": of.namespace, "name": of.name, "uid": of.uid },
            "status": {
                "allocation": { "devices": { "results": [{
                    "request": "gpu", "driver": DRA_DRIVER, "pool": pool, "device": device,
                    "shareID": share,
                    "consumedCapacity": { "shares": "1", "memory": "10Gi" },
                }] } },
                "reservedFor": [{ "resource": "pods", "name": name, "uid": name }],
            },
        }),
    );
    Claim { claim: of, pods: [name.to_owned()].into(), drivers: [DRA_DRIVER.to_owned()].into() }
}

#[test]
fn claims_have_parts_of_the_memory_that_nvml_reports() {
    let Some(gpus) = gpus() else { return };
    run(async {
        let node = Node::new();
        let server = ApiServer::start(NODE, &[]).await.unwrap();
        let kubeconfig = server.kubeconfig(&node.path("etc"), "token").unwrap();
        let cdi = node.path("run/cdi");
        write_config(&node, &kubeconfig, "replicas = 4\ncapacity = true\n");
        let manager = ClaimManager::start(ClaimsConfig {
            kubelet_dir: node.path("kubelet"),
            release: Release::V1_36,
            appends: Some(true),
            times: Times::default(),
        })
        .unwrap();
        let _kubelet = node.start_kubelet().await;
        let mut first = daemon(&node);
        let devices = || {
            let slices = server.objects(Kind::ResourceSlice);
            let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array());
            devices.flatten().cloned().collect::<Vec<Value>>()
        };
        let complete = |devices: &Vec<Value>| {
            devices.len() == gpus.len()
                && devices.iter().all(|device| device["capacity"]["memory"].is_object())
        };
        let published = until("the slice with the memory of each GPU", devices, complete).await;
        gpus.iter().for_each(|gpu| check(gpu, &published));

        let connected = |manager: &ClaimManager| {
            manager.instances(DRA_DRIVER).iter().any(|one| one.is_connected).then_some(())
        };
        manager.wait_for(HANG, connected).await.unwrap();
        let name = published[0]["name"].as_str().unwrap();
        let pool = server.objects(Kind::ResourceSlice)[0]["spec"]["pool"]["name"].clone();
        let uuid = published[0]["attributes"]["uuid"]["string"].as_str().unwrap();
        for (number, claim) in ["a", "b"].into_iter().enumerate() {
            let prepared = allocate(&server, claim, number, &pool, name);
            manager.prepare(claim, std::slice::from_ref(&prepared)).await.unwrap();
        }
        let text = |claim: &str| {
            let file = format!("holdfast-claim-{}.json", claim_ref(claim).uid);
            fs::read_to_string(cdi.join(file)).unwrap()
        };
        say(text("a"));
        let held = || {
            let grants = node.json(&["who"])["grants"].as_array().unwrap().clone();
            let devices = grants.iter().flat_map(|grant| grant["devices"].as_array().unwrap());
            let mut devices: Vec<String> = devices.map(Value::to_string).collect();
            devices.sort();
            devices
        };
        let both = held();
        assert_eq!(both.len(), 2, "{both:?}");
        assert!(both[0].contains(uuid) && both[1].contains(uuid) && both[0] != both[1], "{both:?}");

        // A daemon that was killed leaves the slice as it is, and both parts held.
        let before = server.objects(Kind::ResourceSlice);
        first.kill();
        let second = daemon(&node);
        manager.wait_for(HANG, connected).await.unwrap();
        second.logged("DRA").await;
        assert_eq!(held(), both);
        assert_eq!(server.objects(Kind::ResourceSlice), before);
        let status = fs::read_to_string(format!("/proc/{}/status", second.pid())).unwrap();
        say(status.lines().filter(|line| line.starts_with("VmRSS")).collect::<String>());
        for claim in ["a", "b"] {
            manager.unprepare(claim).await.unwrap();
        }
        // The release needs a proof that the pods have ended. The machine's own cgroups cannot give
        // it for pods of a simulated kubelet.
        second.logged_often("claim unprepared", 2).await;
        stop(second).await;
    });
}
