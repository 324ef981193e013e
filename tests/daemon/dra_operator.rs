//! What an operator sees and does with claims: the eviction of pods, other drivers, metrics,
//! refusals of the API server, and `doctor`.

use crate::common::{Daemon, Node, http_get, pause, resource, run, soon, telemetry, until};
use crate::dra::{NODE, World, stop};
use holdfast::domain::DRA_DRIVER;
use holdfast::lab::sim::api_server::{ApiServer, Kind, Profile, User};
use holdfast::lab::sim::hardware::SimNode;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::{Command, Output};

/// The taints of the published devices: `device key:effect`.
fn taints(world: &World) -> BTreeSet<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut taints = BTreeSet::new();
    for slice in world.server.objects(Kind::ResourceSlice) {
        for device in list(&slice["spec"]["devices"]) {
            for taint in list(&device["taints"]) {
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                let (device, key) = (text(&device["name"]), text(&taint["key"]));
                taints.insert(format!("{device} {key}:{}", text(&taint["effect"])));
            }
        }
    }
    taints
}

/// Runs a verb while the API server of this thread answers.
async fn output(mut command: Command) -> Output {
    let ran = tokio::task::spawn_blocking(move || command.output());
    ran.await.unwrap().unwrap()
}

/// The problems in `status`; empty while the daemon does not answer yet.
async fn problems(node: &Node) -> String {
    let output = output(node.command(&["status", "-o", "json"])).await;
    let status: Option<Value> = serde_json::from_slice(&output.stdout).ok();
    status.map(|status| status["dra_problems"].to_string()).unwrap_or_default()
}

/// Waits until the problems have this text.
async fn until_problem(node: &Node, text: &str) -> String {
    let seen = async {
        loop {
            let now = problems(node).await;
            if now.contains(text) {
                return now;
            }
            pause().await;
        }
    };
    soon(text, seen).await
}

/// The error of a verb that must fail.
fn refusal(node: &Node, verb: &[&str]) -> String {
    let output = node.output(verb);
    assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const EVICT: [&str; 6] = ["device", "cordon", "dev:gpu0", "--evict", "--reason", "fan"];

#[test]
fn a_cordon_with_evict_reaches_the_control_plane_and_stays_until_uncordon() {
    run(async {
        let world = World::with_telemetry(2, "off").await;
        let _kubelet = world.node.start_kubelet().await;
        let mut daemon = world.start();
        let names = world.until_published(2).await;
        world.until_registered().await;
        let claim = world.allocate("train", "pod-1", &names[..1]);
        world.manager.prepare("pod-1", &[claim]).await.unwrap();

        let order = world.node.json(&EVICT);
        assert_eq!(order["instruction"], "cordon_and_evict");
        let cordoned = |effect| [format!("{} holdfast.dev/cordoned:{effect}", names[0])].into();
        let wanted: BTreeSet<String> = cordoned("NoExecute");
        until("the taint", || taints(&world), |now| *now == wanted).await;
        assert_eq!(world.node.json(&["device", "show", "dev:gpu0"])["devices"][0]["evicts"], true);
        let shown = world.node.output(&["device", "show"]).stdout;
        let shown = String::from_utf8_lossy(&shown).into_owned();
        assert!(shown.contains("cordoned --evict (fan)"), "{shown}");

        // The order is in the ledger.
        daemon.kill();
        let slices = world.node.json(&["discover", "--slices", "--node-name", NODE]);
        assert!(slices.to_string().contains("NoExecute"), "{slices}");
        world.server.wipe(NODE, None);
        let daemon = world.start();
        until("the taint after a restart", || taints(&world), |now| *now == wanted).await;
        world.until_registered().await;
        // The control plane has deleted the pod.
        world.manager.unprepare("pod-1").await.unwrap();
        assert!(world.holders("train").is_empty());

        // Another cordon replaces the order.
        let cordon = ["device", "cordon", "dev:gpu0", "--reason", "fan"];
        assert!(world.node.output(&cordon).status.success());
        let wanted: BTreeSet<String> = cordoned("NoSchedule");
        until("a cordon", || taints(&world), |now| *now == wanted).await;
        assert!(world.node.output(&["device", "uncordon", "dev:gpu0"]).status.success());
        until("no taint", || taints(&world), BTreeSet::is_empty).await;
        assert_eq!(problems(&world.node).await, "null");
        stop(daemon).await;
    });
}

#[test]
fn an_eviction_is_refused_where_no_taint_reaches_the_pods() {
    run(async {
        let world = World::with_telemetry(2, "off").await;
        world.server.set_profile(Profile::V1_35);
        let daemon = world.start();
        world.until_published(2).await;
        let of_plugin = ["device", "cordon", "dev:nic0", "--evict", "--reason", "fan"];
        let why = refusal(&world.node, &of_plugin);
        assert!(why.contains("no resource with `api = \"dra\"` has the device dev:nic0"), "{why}");
        assert_eq!(problems(&world.node).await, "null");

        // Only a dropped taint shows that the API server drops them.
        assert!(world.node.output(&EVICT).status.success());
        let why = until_problem(&world.node, "DRADeviceTaints").await;
        assert!(why.contains("dev:gpu0"), "{why}");
        world.until_published(1).await;
        let next = ["device", "cordon", "dev:gpu1", "--evict", "--reason", "fan"];
        let why = refusal(&world.node, &next);
        assert!(why.contains("DRADeviceTaints") && why.contains("delete the pods"), "{why}");
        // A newer one keeps them.
        world.server.set_profile(Profile::V1_36);
        world.server.disconnect();
        let wanted = |now: &BTreeSet<String>| now.iter().any(|it| it.ends_with(":NoExecute"));
        until("the taint", || taints(&world), wanted).await;
        until_problem(&world.node, "null").await;
        stop(daemon).await;

        let node = Node::with(&[("gpu", 1)]);
        let daemon = node.start_daemon();
        until(
            "the device",
            || node.output(&["device", "show", "dev:gpu0"]),
            |it| it.status.success(),
        )
        .await;
        let why = refusal(&node, &EVICT);
        assert!(why.contains("`[dra] enabled` is false"), "{why}");
        assert_eq!(node.json(&["device", "show", "dev:gpu0"])["devices"][0]["reason"], Value::Null);
        stop(daemon).await;
    });
}

/// A daemon whose GPUs are PCI functions of simulated hardware, for claims.
async fn gpus() -> (Node, SimNode, ApiServer, Daemon) {
    let node = Node::new();
    let hardware = SimNode::create(node.path("host")).unwrap();
    let server = ApiServer::start(NODE, &[]).await.unwrap();
    let kubeconfig = server.kubeconfig(&node.path("etc"), "token").unwrap();
    node.write_config(&format!(
        "[telemetry]\nlisten = \"127.0.0.1:0\"\n[cluster]\ncredentials = {:?}\n[dra]\nenabled = true\n\
         [[resource]]\nname = \"nvidia.com/gpu\"\nclass = \"gpu\"\napi = \"dra\"\n",
        kubeconfig.display().to_string()
    ));
    let daemon = Daemon::spawn(node.command(&["run"]).env("NODE_NAME", NODE));
    (node, hardware, server, daemon)
}

/// A slice of another driver, with devices at these PCI addresses.
fn slice_of(driver: &str, addresses: &[String]) -> Value {
    let device = |(at, address): (usize, &String)| {
        let address = json!({ "string": address });
        json!({ "name": format!("d-{at}"), "attributes": { "resource.kubernetes.io/pciBusID": address } })
    };
    json!({
        "metadata": { "name": format!("{NODE}-{driver}") },
        "spec": {
            "driver": driver, "nodeName": NODE,
            "pool": { "name": NODE, "generation": 1, "resourceSliceCount": 1 },
            "devices": addresses.iter().enumerate().map(device).collect::<Vec<_>>(),
        },
    })
}

#[test]
fn another_driver_with_the_same_hardware_is_a_problem_and_is_left_alone() {
    run(async {
        let (node, hardware, server, daemon) = gpus().await;
        let own = || {
            let slices = server.objects(Kind::ResourceSlice);
            slices.into_iter().find(|slice| slice["spec"]["driver"] == DRA_DRIVER)
        };
        let slice = until("the slices", own, Option::is_some).await.unwrap();
        let of_gpu = |device: &Value| {
            let bus = &device["attributes"]["resource.kubernetes.io/pciBusID"]["string"];
            *bus == hardware.gpu_address(1).to_string()
        };
        let devices = slice["spec"]["devices"].as_array().unwrap();
        let name = devices.iter().find(|device| of_gpu(device)).unwrap()["name"].clone();
        let address = telemetry(&daemon).await;
        let page = || http_get(address, "/metrics").1;

        // A driver of other hardware is information.
        let cpus = server.put(Kind::ResourceSlice, slice_of("dra.cpu", &["?".into()]));
        let cpu = "holdfast_dra_other_driver_devices{driver=\"dra.cpu\",same_hardware=\"no\"} 1\n";
        until("the other driver", page, |page| page.contains(cpu)).await;
        assert_eq!(problems(&node).await, "null");
        assert!(page().contains("holdfast_dra_problems{part=\"drivers\"} 0\n"));

        let addresses = [hardware.gpu_address(1).to_string(), "0000:77:00.0".into()];
        let gpus = server.put(Kind::ResourceSlice, slice_of("gpu.nvidia.com", &addresses));
        let why = until_problem(&node, "gpu.nvidia.com").await;
        assert!(why.contains(name.as_str().unwrap()) && !why.contains("dra.cpu"), "{why}");
        let shared = "holdfast_dra_other_driver_devices{driver=\"gpu.nvidia.com\",same_hardware=\"yes\"} 1\n";
        let all =
            "holdfast_dra_other_driver_devices{driver=\"gpu.nvidia.com\",same_hardware=\"no\"} 2\n";
        let page = page();
        assert!(page.contains(shared) && page.contains(all), "{page}");
        assert!(page.contains("holdfast_dra_problems{part=\"drivers\"} 1\n"), "{page}");

        let name_of = |slice: &Value| slice["metadata"]["name"].as_str().unwrap().to_owned();
        for theirs in [&cpus, &gpus] {
            let now = server.object(Kind::ResourceSlice, "", &name_of(theirs));
            assert_eq!(now.as_ref(), Some(theirs), "nothing of another driver is written");
        }
        assert!(server.remove(Kind::ResourceSlice, "", &name_of(&gpus)));
        until_problem(&node, "null").await;
        stop(daemon).await;
    });
}

#[test]
fn another_program_that_writes_these_slices_is_a_problem_until_it_stops() {
    run(async {
        let world = World::with_telemetry(2, "off").await;
        let daemon = world.start();
        world.until_published(2).await;
        for _ in 0..6 {
            world.until_published(2).await;
            let mut slice = world.server.objects(Kind::ResourceSlice).remove(0);
            slice["spec"]["devices"] = json!([]);
            world.server.put(Kind::ResourceSlice, slice);
        }
        let why = until_problem(&world.node, "another program writes").await;
        assert!(why.contains("one try is made every 30 s"), "{why}");
        // A list of the slices is no end of it.
        let lists = world.server.served().borrow().lists;
        world.server.disconnect();
        let mut served = world.server.served();
        soon("a list", served.wait_for(|now| now.lists > lists)).await.unwrap();
        until_problem(&world.node, "another program writes").await;
        stop(daemon).await;
    });
}

#[test]
fn a_restart_without_a_change_writes_nothing() {
    run(async {
        let world = World::with_telemetry(2, "off").await;
        let mut daemon = world.start();
        world.until_published(2).await;
        let slices = world.server.objects(Kind::ResourceSlice);
        for _ in 0..2 {
            daemon.kill();
            let before = world.server.requests().len();
            daemon = world.start();
            world.until_registered().await;
            // Only this change is written, as one update.
            let since = || world.server.requests()[before..].to_vec();
            let is_watched = |all: &Vec<String>| all.iter().any(|one| one.starts_with("WATCH "));
            until("the watch", since, is_watched).await;
            let cordon = ["device", "cordon", "dev:gpu1", "--reason", "fan"];
            until("the cordon", || world.node.output(&cordon), |it| it.status.success()).await;
            until("its taint", || taints(&world).len(), |count| *count == 1).await;
            let is_write = |one: &&String| {
                ["POST ", "PUT ", "DELETE "].iter().any(|verb| one.starts_with(verb))
            };
            let requests = since();
            let writes: Vec<&String> = requests.iter().filter(is_write).collect();
            assert!(writes.len() == 1 && writes[0].starts_with("PUT "), "{requests:#?}");
            assert!(world.node.output(&["device", "uncordon", "dev:gpu1"]).status.success());
            until("no taint", || taints(&world).len(), |count| *count == 0).await;
        }
        let now = world.server.objects(Kind::ResourceSlice);
        assert_eq!(now[0]["metadata"]["uid"], slices[0]["metadata"]["uid"]);
        stop(daemon).await;
    });
}

#[test]
fn the_denial_of_an_admission_policy_is_not_taken_for_a_missing_right() {
    run(async {
        let world = World::with_telemetry(1, "127.0.0.1:0").await;
        world.server.add_user(Some("token"), User::Pod(None));
        let daemon = world.start();
        let why = until_problem(&world.node, "403").await;
        assert!(why.contains("a right is not missing") && why.contains("holdfast-dra"), "{why}");
        assert!(!why.contains("grant"), "{why}");
        let address = telemetry(&daemon).await;
        let denied = "holdfast_dra_slice_writes_total{verb=\"create\",result=\"policy\"} 1\n";
        let page = http_get(address, "/metrics").1;
        assert!(page.contains(denied), "{page}");
        assert!(page.contains("holdfast_dra_problems{part=\"slices\"} 1\n"), "{page}");
        stop(daemon).await;
    });
}

#[test]
fn the_metrics_of_the_driver_count_slices_writes_and_claims() {
    run(async {
        let world = World::with_telemetry(2, "127.0.0.1:0").await;
        let _kubelet = world.node.start_kubelet().await;
        let daemon = world.start();
        let names = world.until_published(2).await;
        world.until_registered().await;
        let address = telemetry(&daemon).await;
        let page = || http_get(address, "/metrics").1;
        let first =
            until("the slice", page, |page| page.contains("holdfast_dra_published_slices{")).await;
        for line in [
            "holdfast_dra_published_slices{pool=\"n1/char\"} 1\n",
            "holdfast_dra_published_devices{pool=\"n1/char\"} 2\n",
            "holdfast_dra_slice_writes_total{verb=\"create\",result=\"ok\"} 1\n",
            "holdfast_dra_slice_writes_total{verb=\"update\",result=\"conflict\"} 0\n",
            "holdfast_dra_watch_failures_total{reason=\"silent\"} 0\n",
            "holdfast_dra_problems{part=\"sockets\"} 0\n",
            "holdfast_dra_claims 0\n",
        ] {
            assert!(first.contains(line), "`{line}` is not in:\n{first}");
        }

        let claim = world.allocate("train", "pod-1", &names[..1]);
        world.manager.prepare("pod-1", &[claim]).await.unwrap();
        let prepared = page();
        assert!(prepared.contains("holdfast_dra_claims 1\n"), "{prepared}");
        let of = |call: &str, result: &str| {
            format!("holdfast_dra_claim_calls_total{{call=\"{call}\",result=\"{result}\"}} 1\n")
        };
        let took = "holdfast_dra_claim_duration_seconds_count{call=\"prepare\",result=\"ok\"} 1\n";
        assert!(prepared.contains(took), "{prepared}");
        assert!(prepared.contains(&of("prepare", "ok")), "{prepared}");
        world.manager.unprepare("pod-1").await.unwrap();
        let gone = world.allocate("gone", "pod-2", &["no-such-device".into()]);
        world.manager.prepare("pod-2", &[gone]).await.unwrap_err();
        let cordon = ["device", "cordon", "dev:gpu1", "--reason", "fan"];
        assert!(world.node.output(&cordon).status.success());
        world.server.disconnect();
        let taint = "holdfast_dra_taints{reason=\"cordoned\",effect=\"NoSchedule\"} 1\n";
        let broken = "holdfast_dra_watch_failures_total{reason=\"broken\"} 1\n";
        let last =
            until("all of it", page, |page| page.contains(taint) && page.contains(broken)).await;
        assert!(last.contains(&of("unprepare", "ok")), "{last}");
        assert!(last.contains(&of("prepare", "refused")), "{last}");
        assert!(last.contains("holdfast_dra_claims 0\n"), "{last}");
        stop(daemon).await;
    });
}

/// The codes about claims that `doctor` finds.
async fn codes(node: &Node) -> Vec<String> {
    let mut command = node.command(&["doctor", "-o", "json"]);
    command.env("NODE_NAME", NODE);
    let output = output(command).await;
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let codes = findings.iter().filter(|finding| finding["level"] != "ok");
    let codes = codes.map(|finding| finding["code"].as_str().unwrap().to_owned());
    codes.filter(|code| code.starts_with("dra-")).collect()
}

#[test]
fn doctor_asks_the_api_server_as_the_daemon_does() {
    run(async {
        let world = World::with_telemetry(1, "off").await;
        let node = &world.node;
        std::fs::create_dir_all(node.path("kubelet/plugins_registry")).unwrap();
        assert_eq!(codes(node).await, [""; 0]);
        for (user, wanted) in [
            (User::Kubelet(NODE.into()), vec![]),
            (User::Pod(Some(NODE.into())), vec![]),
            (User::Pod(None), vec!["dra-policy-denies"]),
            (User::Kubelet("other".into()), vec!["dra-node-unknown", "dra-right-missing"]),
        ] {
            world.server.add_user(Some("token"), user.clone());
            let found: BTreeSet<String> = codes(node).await.into_iter().collect();
            assert_eq!(found, wanted.iter().map(ToString::to_string).collect(), "{user:?}");
        }
        assert!(world.server.objects(Kind::ResourceSlice).is_empty(), "nothing is stored");

        // The status of claims needs a right that a kubelet lacks.
        let text = std::fs::read_to_string(node.config_file()).unwrap();
        node.write_config(&text.replace("[dra]\n", "[dra]\nclaim_status = true\n"));
        for (user, wanted) in [
            (User::Kubelet(NODE.into()), &["dra-status-right-missing"][..]),
            (User::Pod(Some(NODE.into())), &[]),
        ] {
            world.server.add_user(Some("token"), user);
            assert_eq!(codes(node).await, wanted);
        }

        world.server.add_user(Some("token"), User::Pod(Some(NODE.into())));
        world.server.delete_node();
        assert_eq!(codes(node).await, ["dra-node-unknown"]);
        world.server.require_token("another");
        assert_eq!(codes(node).await, ["dra-api-unreachable"]);
        std::fs::remove_dir(node.path("kubelet/plugins_registry")).unwrap();
        std::fs::write(node.path("kubelet/plugins_registry"), "").unwrap();
        assert_eq!(codes(node).await, ["dra-directory-unusable", "dra-api-unreachable"]);
        node.write_config(&resource("gpu"));
        assert_eq!(codes(node).await, [""; 0], "the driver is off");
    });
}
