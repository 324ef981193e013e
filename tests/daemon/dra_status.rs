//! The status of claims, in a simulated API server with the rights of the service account.

use crate::common::{Daemon, HANG, http_get, run, telemetry, until};
use crate::dra::{NODE, World, stop};
use holdfast::lab::sim::api_server::{Fault, Kind, Profile, User};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A node whose daemon writes the status of claims, as this user.
async fn world(gpus: usize, user: User) -> World {
    let world = World::with_telemetry(gpus, "127.0.0.1:0").await;
    let text = std::fs::read_to_string(world.node.config_file()).unwrap();
    let on = text.replace("[dra]\n", "[dra]\nclaim_status = true\n");
    world.node.write_config(&on);
    world.server.add_user(Some("token"), user);
    world
}

fn pod() -> User {
    User::Pod(Some(NODE.into()))
}

/// The status of the devices of a claim.
fn devices(world: &World, claim: &str) -> Vec<Value> {
    let claim = world.server.object(Kind::ResourceClaim, "ml", claim).unwrap_or_default();
    claim["status"]["devices"].as_array().cloned().unwrap_or_default()
}

/// `<device> <type>=<status> <reason>` of each condition.
fn conditions(world: &World, claim: &str) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |entry: &Value| {
        let conditions = entry["conditions"].as_array().unwrap().iter();
        let shown = conditions.map(|it| {
            let (of, status, reason) =
                (text(&it["type"]), text(&it["status"]), text(&it["reason"]));
            format!("{} {of}={status} {reason}", text(&entry["device"]))
        });
        shown.collect::<Vec<_>>()
    };
    devices(world, claim).iter().flat_map(of).collect()
}

/// Waits, from write to write of the daemon, until the claim has these conditions.
async fn until_conditions(world: &World, claim: &str, wanted: &[String]) {
    let mut served = world.server.served();
    let seen = async {
        loop {
            served.borrow_and_update();
            if conditions(world, claim) == wanted {
                return;
            }
            served.changed().await.unwrap();
        }
    };
    let now = || conditions(world, claim);
    let seen = tokio::time::timeout(HANG, seen).await;
    seen.unwrap_or_else(|_| panic!("{wanted:?}, but the claim has {:?}", now()));
}

fn healthy(device: &str) -> [String; 2] {
    [format!("{device} Ready=True Prepared"), format!("{device} Healthy=True Healthy")]
}

fn gone(device: &str) -> [String; 2] {
    [format!("{device} Ready=True Prepared"), format!("{device} Healthy=False DeviceGone")]
}

fn patches(world: &World) -> usize {
    world.server.requests().iter().filter(|it| it.starts_with("PATCH")).count()
}

async fn started(world: &World, gpus: usize) -> (Daemon, Vec<String>) {
    let daemon = world.start();
    let names = world.until_published(gpus).await;
    world.until_registered().await;
    (daemon, names)
}

#[test]
fn the_status_of_a_claim_follows_its_devices_until_it_is_unprepared() {
    run(async {
        let world = world(2, pod()).await;
        let _kubelet = world.node.start_kubelet().await;
        let (mut daemon, names) = started(&world, 2).await;
        let claim = world.allocate("train", "pod-1", &names);
        world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
        let all = [healthy(&names[0]), healthy(&names[1])].concat();
        until_conditions(&world, "train", &all).await;
        let before = devices(&world, "train");
        assert_eq!(before[0]["conditions"][0]["message"], "example.com/gpu dev:gpu0");

        // A start of the daemon reads the claim, and writes nothing.
        daemon.kill();
        let writes = patches(&world);
        let is_read = "GET /apis/resource.k8s.io/v1/namespaces/ml/resourceclaims/train";
        let reads = || world.server.requests().iter().filter(|it| *it == is_read).count();
        let reads_before = reads();
        let daemon = world.start();
        until("the claim is read", reads, |reads| *reads > reads_before).await;

        world.node.remove_device("gpu", 1);
        let one = [healthy(&names[0]), gone(&names[1])].concat();
        until_conditions(&world, "train", &one).await;
        let after = devices(&world, "train");
        assert_eq!(patches(&world), writes + 1);
        assert_eq!(after[0], before[0]);
        assert_eq!(after[1]["conditions"][0], before[1]["conditions"][0]);
        assert_ne!(after[1]["conditions"][1], before[1]["conditions"][1]);
        world.node.create_device("gpu", 1);
        until_conditions(&world, "train", &all).await;

        // The control plane leaves the claim allocated: the entries are removed.
        world.manager.unprepare("pod-1").await.unwrap();
        until_conditions(&world, "train", &[]).await;
        let page = http_get(telemetry(&daemon).await, "/metrics").1;
        let line = "holdfast_report_writes_total{kind=\"claim\",result=\"ok\"} 3\n";
        assert!(page.contains(line), "{page}");
        assert_eq!(world.node.json(&["status"])["dra_problems"], Value::Null);
        stop(daemon).await;
    });
}

#[test]
fn a_prepare_does_not_wait_for_the_status_which_is_written_after_an_outage() {
    run(async {
        let world = world(1, pod()).await;
        let _kubelet = world.node.start_kubelet().await;
        let (daemon, names) = started(&world, 1).await;
        let fails = Arc::new(AtomicBool::new(true));
        let of_writes = Arc::clone(&fails);
        world.server.on_request(move |request| {
            let fails = of_writes.load(Ordering::SeqCst) && request.method == "PATCH";
            fails.then_some(Fault::Refuse(503, None))
        });
        let claim = world.allocate("train", "pod-1", &names);
        world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
        let problems = || world.node.json(&["status"])["dra_problems"].to_string();
        until("the problem", problems, |it| it.contains("cannot write the status of claims")).await;
        world.node.remove_device("gpu", 0);
        let ailing = || world.node.json(&["status"])["ailing"].as_array().map_or(0, Vec::len);
        until("the failure", ailing, |sick| *sick == 1).await;
        assert!(devices(&world, "train").is_empty());
        fails.store(false, Ordering::SeqCst);
        until_conditions(&world, "train", &gone(&names[0])).await;
        until("no problem", problems, |problems| problems == "null").await;

        // The control plane deletes the claim with its pod: nothing is written, and nothing wrong.
        world.manager.unprepare("pod-1").await.unwrap();
        assert!(world.server.remove(Kind::ResourceClaim, "ml", "train"));
        let patched = patches(&world);
        until("the last request", || patches(&world), |now| *now > patched).await;
        assert_eq!(problems(), "null");
        stop(daemon).await;
    });
}

#[test]
fn the_interface_of_a_function_is_shown_also_after_it_was_moved() {
    run(async {
        let world = world(1, pod()).await;
        let function = "host/sys/bus/pci/devices/0000:3b:00.0";
        let write = |file: &str, text: &str| {
            let path = world.node.path(&format!("{function}/{file}"));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        for (file, text) in [("vendor", "0x15b3"), ("device", "0x101e"), ("class", "0x020000")] {
            write(file, text);
        }
        write("uevent", "DRIVER=mlx5_core\n");
        write("net/ens1/type", "1\n");
        write("net/ens1/address", "02:00:00:00:00:01\n");
        let text = std::fs::read_to_string(world.node.config_file()).unwrap();
        let resource =
            "\n[[resource]]\nname = \"example.com/net\"\nclass = \"network\"\napi = \"dra\"\n";
        world.node.write_config(&(text + resource));
        let _kubelet = world.node.start_kubelet().await;
        let (mut daemon, names) = started(&world, 2).await;
        let device = names.iter().find(|name| name.starts_with("0000-3b")).unwrap().clone();
        let claim = world.allocate_in("net", "port", "pod-1", std::slice::from_ref(&device));
        world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
        until_conditions(&world, "port", &healthy(&device)).await;
        let network = json!({ "interfaceName": "ens1", "hardwareAddress": "02:00:00:00:00:01" });
        assert_eq!(devices(&world, "port")[0]["networkData"], network);

        // A network plugin moves it into the pod; the next daemon does not see it.
        daemon.kill();
        std::fs::remove_dir_all(world.node.path(&format!("{function}/net"))).unwrap();
        let daemon = world.start();
        let cordon = ["device", "cordon", "0000:3b:00.0", "--reason", "cable"];
        until("the cordon", || world.node.output(&cordon).status.success(), |it| *it).await;
        let cordoned =
            [format!("{device} Ready=True Prepared"), format!("{device} Healthy=False Cordoned")];
        until_conditions(&world, "port", &cordoned).await;
        assert_eq!(devices(&world, "port")[0]["networkData"], network);
        stop(daemon).await;
    });
}

#[test]
fn a_missing_right_is_a_problem_and_hurts_no_claim() {
    for (user, profile, wanted) in [
        (User::Kubelet(NODE.into()), Profile::V1_36, "grant patch of resourceclaims/status"),
        (
            User::Pod(Some(NODE.into())),
            Profile { device_status: false, ..Profile::V1_36 },
            "DRAResourceClaimDeviceStatus is off",
        ),
        (
            User::Pod(Some("n2".into())),
            Profile::V1_36,
            "grant associated-node:patch of resourceclaims/driver",
        ),
    ] {
        run(async {
            let world = world(1, pod()).await;
            world.server.set_profile(profile);
            world.server.bind_claim(NODE, "ml", "train");
            let _kubelet = world.node.start_kubelet().await;
            let (daemon, names) = started(&world, 1).await;
            // Another node may not write its slices, so the user changes after that.
            world.server.add_user(Some("token"), user);
            let claim = world.allocate("train", "pod-1", &names);
            world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
            let problems = || world.node.json(&["status"])["dra_problems"].to_string();
            let problem = until("the problem", problems, |it| it.contains("claims")).await;
            assert!(problem.contains(wanted), "{problem}");
            assert_eq!(world.cdi_names(&claim).len(), 1);
            assert_eq!(patches(&world), 1);
            stop(daemon).await;
        });
    }
}

#[test]
fn without_the_key_no_status_is_written() {
    run(async {
        let world = World::with_telemetry(1, "127.0.0.1:0").await;
        let _kubelet = world.node.start_kubelet().await;
        let (daemon, names) = started(&world, 1).await;
        let claim = world.allocate("train", "pod-1", &names);
        world.manager.prepare("pod-1", std::slice::from_ref(&claim)).await.unwrap();
        world.node.remove_device("gpu", 0);
        let ailing = || world.node.json(&["status"])["ailing"].as_array().map_or(0, Vec::len);
        until("the failure", ailing, |sick| *sick == 1).await;
        world.manager.unprepare("pod-1").await.unwrap();
        let page = http_get(telemetry(&daemon).await, "/metrics").1;
        assert!(!page.contains("holdfast_report_writes_total{"), "{page}");
        stop(daemon).await;
        assert_eq!(patches(&world), 0);
    });
}
