//! Claims for parts of a device's capacity: the scheduler counts them, and each takes a share of
//! the device.

use crate::api::{CLAIMS, PODS, SLICES};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node;
use crate::objects::{LISTS, claim_of, main_started, pod};
use crate::pki::kubeconfig;
use crate::{SOON, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

const RESOURCE: &str = r#"
[[resource]]
name = "example.com/divided"
class = "char"
paths = [{ host = "/dev/claimed0", container = "/dev/claimed/" }]
api = "dra"
replicas = 4
"#;

/// A pod and its claim for a part of a device: this number of its shares, or the usual one.
fn create(cluster: &Cluster, name: &str, shares: Option<u32>) {
    let mut exactly = json!({"deviceClassName": "char.holdfast.dev"});
    if let Some(shares) = shares {
        exactly["capacity"] = json!({"requests": {"shares": shares.to_string()}});
    }
    let requests = json!({"requests": [{"name": "part", "exactly": exactly}]});
    cluster.api.create(CLAIMS, &claim_of(name, requests));
    cluster.api.create(PODS, &pod(name, &[name], LISTS));
}

/// The published devices: the name, the taints, and the shares that claims may have parts of.
fn published(cluster: &Cluster) -> BTreeSet<(String, usize, Option<String>)> {
    let slices = cluster.api.list(SLICES);
    let devices = slices.iter().filter_map(|slice| slice["spec"]["devices"].as_array()).flatten();
    let shown = devices.map(|device| {
        let shares = device["capacity"]["shares"]["value"].as_str().map(str::to_owned);
        assert_eq!(device["allowMultipleAllocations"] == true, shares.is_some(), "{device}");
        let taints = device["taints"].as_array().map_or(0, Vec::len);
        (device["name"].as_str().unwrap().to_owned(), taints, shares)
    });
    shown.collect()
}

/// Waits until the device has this number of shares for parts, and `others` stay by their names.
fn until_divided(cluster: &Cluster, shares: &str, others: usize) {
    wait_for(&format!("{shares} shares for parts, and {others} by name"), SOON, || {
        let published = published(cluster);
        let (divided, by_name): (Vec<_>, Vec<_>) =
            published.iter().partition(|(.., shares)| shares.is_some());
        let is_divided = divided.len() == 1 && divided[0].2.as_deref() == Some(shares);
        let are_tainted = by_name.iter().all(|(_, taints, _)| *taints == 1);
        (is_divided && are_tainted && by_name.len() == others).then_some(())
    });
}

/// The share that a claim holds, which its container has opened.
fn share_of(cluster: &mut Cluster, daemon: &Daemon, name: &str) -> String {
    let running = cluster.running(name);
    let log = cluster.printed(&running, 0, "done");
    assert!(log.contains("opened /dev/claimed/claimed0: "), "{log}");
    let holders = daemon.holders(name);
    let [grant] = &holders[..] else { panic!("{name}: {holders:?}") };
    let devices = grant["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 1, "{grant}");
    devices[0].as_str().unwrap().to_owned()
}

pub(crate) fn parts_of_a_device(cluster: &mut Cluster) {
    if cluster.lacks("DRAConsumableCapacity") {
        return;
    }
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, RESOURCE);
    daemon.wait_until_registered(cluster);
    wait_for("4 shares by name", SOON, || (published(cluster).len() == 4).then_some(()));
    create(cluster, "by-name", None);
    let mut held = BTreeSet::from([share_of(cluster, &daemon, "by-name")]);
    let started = main_started(&cluster.running("by-name"));

    // A claim keeps its share by name, and the rest is for parts.
    daemon.configure("replicas = 4", "replicas = 4\ncapacity = true");
    until_divided(cluster, "3", 1);
    create(cluster, "two", Some(2));
    held.insert(share_of(cluster, &daemon, "two"));
    create(cluster, "one", None);
    held.insert(share_of(cluster, &daemon, "one"));
    assert_eq!(held.len(), 3, "each holder has a share of its own: {held:?}");
    create(cluster, "more", Some(2));
    cluster.unschedulable("more");

    // A start of the daemon changes nothing.
    let who = |daemon: &Daemon| -> Vec<Value> {
        ["by-name", "two", "one"].iter().flat_map(|name| daemon.holders(name)).collect()
    };
    let before = who(&daemon);
    daemon.kill_and_start(|| ());
    daemon.wait_until_registered(cluster);
    assert_eq!(who(&daemon), before);
    until_divided(cluster, "3", 1);
    let claim = cluster.api.get(&format!("{CLAIMS}/two")).unwrap();
    let result = &claim["status"]["allocation"]["devices"]["results"][0];
    assert_eq!(result["consumedCapacity"]["shares"], "2", "{claim}");
    assert!(result["shareID"].is_string(), "{claim}");
    let file =
        format!("{}/holdfast-claim-{}.json", node::CDI, claim["metadata"]["uid"].as_str().unwrap());
    let text = std::fs::read_to_string(&file).unwrap();
    let name = result["device"].as_str().unwrap();
    assert!(text.contains(&format!("-{name}-s")), "the file names the share: {text}");

    // The end of a part makes space for another one, and the share by name returns too.
    cluster.end("two");
    let more = share_of(cluster, &daemon, "more");
    for name in ["by-name", "one"] {
        assert_ne!(share_of(cluster, &daemon, name), more, "{name} and `more` have one share");
    }
    assert_eq!(main_started(&cluster.running("by-name")), started);
    cluster.end("by-name");
    daemon.wait_until_released("by-name");
    until_divided(cluster, "4", 0);
    for name in ["one", "more"] {
        cluster.end(name);
        daemon.wait_until_released(name);
        assert!(daemon.history(name).contains("unprepared"));
    }
}
