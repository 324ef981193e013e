//! Pods that request a number, on nodes that have the devices by the device plugin or by claims: a
//! class with `extendedResourceName` lets the scheduler make the claims.

use crate::api::{CLAIMS, NODES, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::moving::POLICIES;
use crate::node::{NODE, processes_of_pod};
use crate::objects::{claim, main_started, pod, text_of};
use crate::pki::kubeconfig;
use crate::racing::DEVICES as GPUS;
use crate::{SOON, hardware, say, wait_for};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
const NAME: &str = "example.com/numbered";
/// A name that each class has, without `extendedResourceName`.
const OF_CLASS: &str = "deviceclass.resource.kubernetes.io/char.holdfast.dev";
const NUMBERED: &str = r#"
[[resource]]
name = "example.com/numbered"
class = "char"
paths = [{ host = "/dev/claimed*", container = "/dev/claimed/" }]
api = "plugin"
"#;
/// The resource as GPUs, which have NUMA nodes.
const ALIGNED: &str = r#"
[[resource]]
name = "example.com/numbered"
class = "gpu"
contract = "generic"
select = { vendor = ["10de"] }
api = "plugin"
"#;
const DEVICES: usize = crate::node::DEVICES;
/// Ends at once on SIGTERM.
const SCRIPT: &str = "trap 'exit 0' TERM; echo has $(ls /dev/claimed); echo done; \
     while :; do sleep 1; done";

fn class() -> Value {
    let expression = format!(
        "device.driver == \"holdfast.dev\" && device.attributes[\"holdfast.dev\"].resource == \"{NAME}\""
    );
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "numbered"},
        "spec": {
            "selectors": [{"cel": {"expression": expression}}],
            "extendedResourceName": NAME,
        },
    })
}

/// A pod with a container for each of these numbers.
fn numbered(name: &str, resource: &str, numbers: &[usize]) -> Value {
    let mut pod = pod(name, &[], SCRIPT);
    let main = pod["spec"]["containers"][0].take();
    let container = |(n, number): (usize, &usize)| {
        let mut container = main.clone();
        if n > 0 {
            container["name"] = format!("other-{n}").into();
        }
        container["resources"] = json!({"limits": {resource: number.to_string()}});
        container
    };
    pod["spec"]["containers"] = numbers.iter().enumerate().map(container).collect();
    pod
}

/// The claim that the scheduler has made for a pod.
fn special_claim(pod: &Value) -> Option<&str> {
    pod["status"]["extendedResourceClaimStatus"]["resourceClaimName"].as_str()
}

/// The nodes that a container sees.
fn seen(cluster: &Cluster, pod: &Value) -> BTreeSet<String> {
    let log = cluster.printed(pod, 0, "done");
    let line = log.lines().find_map(|line| line.split_once(" has ")).unwrap().1;
    line.split_whitespace().map(str::to_owned).collect()
}

/// Kills the processes of a pod, and waits until its container has started again.
fn start_again(cluster: &mut Cluster, name: &str) {
    let before = cluster.running(name);
    for pid in processes_of_pod(&text_of(&before, "uid")) {
        let _ended = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    wait_for(&format!("{name} starts again"), SOON, || {
        (main_started(&cluster.running(name)) != main_started(&before)).then_some(())
    });
}

pub(crate) fn by_plugin_and_by_claim(cluster: &mut Cluster) {
    if cluster.lacks("DRAExtendedResource") {
        return;
    }
    // A test that failed leaves it.
    cluster.api.delete(&format!("{CLASSES}/numbered"), None);
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let daemon = Daemon::launch(cluster, Path::new("/"), &credentials, NUMBERED);
    daemon.wait_until_registered(cluster);
    cluster.until_allocatable(NAME, DEVICES);
    cluster.api.create(CLASSES, &class());

    // While devices are allocatable, nothing changes.
    for (name, before, now) in [("by-plugin", "plugin", "both"), ("by-both", "both", "dra")] {
        cluster.api.create(PODS, &numbered(name, NAME, &[1]));
        let pod = cluster.running(name);
        assert_eq!((special_claim(&pod), seen(cluster, &pod).len()), (None, 1), "{pod}");
        daemon.configure(&format!("api = \"{before}\""), &format!("api = \"{now}\""));
    }
    cluster.published(DEVICES);
    // Also while only the devices of containers are: a pod waits, and would get the device of a
    // container that ends. So the node is cordoned until the last one has ended.
    cluster.until_allocatable(NAME, 2);
    cluster.api.create(PODS, &numbered("by-claim", NAME, &[1]));
    cluster.unschedulable("by-claim");
    cordon(cluster, "cordon");
    let began = Instant::now();
    cluster.end("by-plugin");
    cluster.end("by-both");
    cluster.until_allocatable(NAME, 0);
    let took = began.elapsed();
    cordon(cluster, "uncordon");
    let pod = cluster.running("by-claim");
    let of_pod = special_claim(&pod).unwrap_or_else(|| panic!("{pod}")).to_owned();
    assert_eq!(seen(cluster, &pod).len(), 1);
    let holders = daemon.holders(&of_pod);
    assert_eq!(holders[0]["claim"]["pods"][0]["name"], "by-claim", "{holders:?}");
    start_again(cluster, "by-claim");

    // The devices of a pod are its containers', each by its own number.
    cluster.api.create(PODS, &numbered("by-two", NAME, &[2, 1]));
    let two = cluster.running("by-two");
    let (main, all) = (seen(cluster, &two), special_claim(&two).unwrap().to_owned());
    let held = daemon.holders(&all)[0]["devices"].as_array().unwrap().len();
    assert_eq!((main.len(), held), (2, 3), "{main:?}");
    assert!(main.is_disjoint(&seen(cluster, &pod)), "two containers have one device");
    let before = main_started(&cluster.running("by-claim"));
    cluster.node.kill_kubelet();
    cluster.node.start_kubelet();
    cluster.published(DEVICES);
    cluster.end("by-two");
    daemon.wait_until_released(&all);
    assert_eq!(main_started(&cluster.running("by-claim")), before);

    // Any class, by its own name.
    cluster.api.create(PODS, &numbered("by-class", OF_CLASS, &[1]));
    let by_class = cluster.running("by-class");
    assert!(special_claim(&by_class).is_some() && seen(cluster, &by_class).len() == 1);
    cluster.end("by-class");
    nodes_of_both_kinds(cluster);
    cluster.end("by-claim");
    cluster.api.delete(&format!("{CLASSES}/numbered"), None);
    say(format_args!(
        "a pod with a number is served by the device plugin, then by a claim; no device is allocatable {took:.1?} after \
         the deletion of the last pods with devices by number"
    ));
    files_about_devices(cluster, daemon);
}

/// A pod that gets a claim for its number is not rejected by the kubelet's Topology Manager,
/// although the device plugin has no device for it: neither while a container still has one by
/// number, nor in the minutes after the end of the plugin's last list.
pub(crate) fn with_policies(cluster: &mut Cluster) {
    if cluster.lacks("DRAExtendedResource") {
        return;
    }
    let root = hardware::made(cluster);
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    for policy in POLICIES {
        cluster.node.restart_with_policy(policy);
        let daemon = Daemon::launch(cluster, &root, &credentials, ALIGNED);
        daemon.wait_until_registered(cluster);
        cluster.until_allocatable(NAME, GPUS);
        cluster.api.create(CLASSES, &class());
        let moves = |from: &str, to: &str| {
            daemon.configure(&format!("api = \"{from}\""), &format!("api = \"{to}\""));
        };
        let by_claim = |cluster: &mut Cluster, name: &str| {
            cluster.until_allocatable(NAME, 0);
            cluster.api.create(PODS, &numbered(name, NAME, &[1]));
            let pod = cluster.running(name);
            special_claim(&pod).unwrap_or_else(|| panic!("{pod}")).to_owned()
        };

        // No container has a device by number.
        moves("plugin", "dra");
        let first = by_claim(cluster, "after-the-list");
        cluster.end("after-the-list");
        daemon.wait_until_released(&first);
        moves("dra", "plugin");
        cluster.until_allocatable(NAME, GPUS);
        // One has, and its device is not allocatable either.
        cluster.api.create(PODS, &numbered("by-plugin", NAME, &[1]));
        assert_eq!(special_claim(&cluster.running("by-plugin")), None);
        moves("plugin", "dra");
        cluster.published(GPUS);
        let who = daemon.who();
        let held = who["grants"].as_array().unwrap().iter().find(|it| it["resource"] == NAME);
        let id = held.unwrap()["devices"][0].as_str().unwrap().to_owned();
        daemon.instruct(&["device", "cordon", &id, "--reason", "test"]);
        let second = by_claim(cluster, "beside-the-list");
        daemon.instruct(&["device", "uncordon", &id]);
        cluster.end("by-plugin");
        cluster.end("beside-the-list");
        daemon.wait_until_released(&second);
        cluster.api.delete(&format!("{CLASSES}/numbered"), None);
        say(format_args!("pods with a number get a claim with the policy `{policy}`"));
    }
}

/// Runs `kubectl cordon` or `kubectl uncordon`.
fn cordon(cluster: &Cluster, verb: &str) {
    let output = cluster.api.kubectl("admin", &[verb, NODE], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A node with allocatable devices gets the pod without a claim, and one without any gets none.
fn nodes_of_both_kinds(cluster: &Cluster) {
    for (name, number) in [("has-numbers", Some("2")), ("has-nothing", None)] {
        let labels = json!({"kubernetes.io/hostname": name});
        let metadata = json!({"name": name, "labels": labels});
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata});
        let mut node = cluster.api.create(NODES, &node);
        let mut all = json!({"cpu": "4", "memory": "8Gi", "pods": "10"});
        if let Some(number) = number {
            all[NAME] = number.into();
        }
        // Another controller may have changed it.
        node["metadata"].as_object_mut().unwrap().remove("resourceVersion");
        node["status"] = json!({"capacity": all, "allocatable": all});
        cluster.api.replace(&format!("{NODES}/{name}/status"), &node);
        let mut pod = numbered(name, NAME, &[1]);
        pod["spec"]["nodeSelector"] = labels;
        pod["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        cluster.api.create(PODS, &pod);
    }
    let bound = wait_for("the pod is bound to the node with numbers", SOON, || {
        cluster.pod("has-numbers").filter(|pod| !pod["spec"]["nodeName"].is_null())
    });
    assert_eq!(special_claim(&bound), None, "{bound}");
    cluster.unschedulable("has-nothing");
    for name in ["has-numbers", "has-nothing"] {
        cluster.api.delete(&format!("{PODS}/{name}"), Some(0));
        cluster.api.delete(&format!("{NODES}/{name}"), None);
    }
}

/// With `device_metadata` a container finds the attributes of its device in a file.
fn files_about_devices(cluster: &mut Cluster, mut daemon: Daemon) {
    let on = "vendor_attributes = true\ndevice_metadata = true";
    daemon.configure("vendor_attributes = true", on);
    daemon.kill_and_start(|| ());
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    let file = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/told/device-3/\
                holdfast.dev-metadata.json";
    let script = format!("echo told $(cat {file}); echo done; exec sleep 1000000");
    cluster.api.create(CLAIMS, &claim("told", &[3]));
    cluster.api.create(PODS, &pod("told", &["told"], &script));
    let told = cluster.running("told");
    let log = cluster.printed(&told, 0, "done");
    let text = log.lines().find_map(|line| line.split_once(" told ")).unwrap().1;
    let document: Value = serde_json::from_str(text).unwrap();
    let device = &document["requests"][0]["devices"][0];
    let attributes = &device["attributes"];
    assert_eq!(attributes["path"]["string"], "/dev/claimed3", "{text}");
    let published = cluster.device("path", "/dev/claimed3").unwrap();
    assert_eq!((&device["name"], attributes), (&published["name"], &published["attributes"]));
    cluster.end("told");
    daemon.wait_until_released("told");
}
