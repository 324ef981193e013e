//! Pods that hold devices, and what their containers have.

use super::ask;
use crate::api::PODS;
use crate::cluster::Cluster;
use crate::node::MAJOR;
use crate::objects::{LISTS, main_started, pod, text_of};
use crate::racing::{self, NAME};
use crate::{SOON, wait_for};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const REPLICA_SETS: &str = "/apis/apps/v1/namespaces/default/replicasets";

/// Prints its devices and the result of opening them, and of opening those of others.
fn lists() -> String {
    let own = LISTS.replace("/dev/claimed", "/dev/raced");
    let (before, after) = own.split_once("echo done").unwrap();
    let others = "for n in 0 1 2 3 4 5 6 7; do busybox mknod /other$n c 240 $((100 + n)); \
         [ -e /dev/raced/raced$n ] || echo \"other $n: $( (: < /other$n) 2>&1)\"; done; echo done";
    format!("{before}{others}{after}")
}

/// A pod with one device, which lists it and runs on.
pub(crate) fn holder(name: &str) -> Value {
    let mut pod = pod(name, &[], &lists());
    pod["spec"]["containers"][0]["resources"] = json!({"limits": {NAME: "1"}});
    pod
}

/// Holders that are replaced by their controller.
pub(crate) fn replica_set(name: &str, replicas: usize) -> Value {
    let labels = json!({"holders": name});
    let spec = holder(name)["spec"].take();
    json!({
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    })
}

/// What a pod has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holding {
    /// The name of its device in the container.
    pub(crate) device: String,
    /// Its process, which is another one after a restart.
    pub(crate) started: String,
}

impl Cluster {
    /// The pods that hold a device and run, once there are `count` of them.
    fn until_holding(&mut self, count: usize) -> Vec<Value> {
        wait_for(&format!("{count} pods with a device run"), SOON, || {
            self.plane.check();
            self.node.check();
            let mut pods = self.api.list(PODS);
            pods.retain(|pod| {
                let asks = &pod["spec"]["containers"][0]["resources"]["limits"][NAME];
                let main = &pod["status"]["containerStatuses"][0];
                let runs = main["state"]["running"].is_object();
                asks == "1" && runs && pod["metadata"]["deletionTimestamp"].is_null()
            });
            (pods.len() == count).then_some(pods)
        })
    }

    /// What each of `count` pods has, by its name. It is what `who` answers, no two have the same
    /// device, and none may open another device.
    pub(crate) fn holdings(&mut self, count: usize) -> BTreeMap<String, Holding> {
        let who = |cluster: &Cluster| ask(cluster, &["who"]);
        let found = self.holdings_by(count, who);
        wait_for("`who` names no other pod", SOON, || {
            (holders(&who(self)).len() == count).then_some(())
        });
        found
    }

    /// The same with this answer of `who`, which may name pods in addition that have ended.
    pub(crate) fn holdings_by(
        &mut self,
        count: usize,
        who: impl Fn(&Cluster) -> Value,
    ) -> BTreeMap<String, Holding> {
        let pods = self.until_holding(count);
        let found: BTreeMap<String, Holding> = pods
            .iter()
            .map(|pod| {
                let device = self.device_in(pod);
                (text_of(pod, "name"), Holding { device, started: main_started(pod) })
            })
            .collect();
        let devices: BTreeSet<&String> = found.values().map(|it| &it.device).collect();
        assert_eq!(devices.len(), count, "two containers have the same device: {found:#?}");
        let expected: BTreeMap<String, String> =
            found.iter().map(|(name, it)| (name.clone(), format!("dev:{}", it.device))).collect();
        wait_for("`who` names what the containers have", SOON, || {
            let who = holders(&who(self));
            // Another pod than the one that has the device is never named.
            for (name, id) in who.iter().filter(|(name, _)| expected.contains_key(*name)) {
                assert_eq!(*id, expected[name], "{name}: {found:#?}");
            }
            expected.keys().all(|name| who.contains_key(name)).then_some(())
        });
        found
    }

    /// The device that the container of a pod sees. It may open this one and no other.
    fn device_in(&self, pod: &Value) -> String {
        let restarts = pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap();
        let log = self.printed(pod, usize::try_from(restarts).unwrap(), "done");
        let opened: Vec<&str> =
            log.lines().filter_map(|line| Some(line.split_once("opened /dev/raced/")?.1)).collect();
        let [opened] = opened[..] else { panic!("other than one device: {log}") };
        let (device, answer) = opened.split_once(": ").unwrap();
        // No driver answers; without the right to open the node the error would be another one.
        assert!(answer.contains("No such device or address"), "{log}");
        let n: usize = device.strip_prefix("raced").unwrap().parse().unwrap();
        let numbers = format!("{MAJOR}, {:3}", 100 + n);
        let is_it = |line: &str| line.contains(&numbers) && line.ends_with(device);
        assert!(log.lines().any(is_it), "{device} is another node: {log}");
        let others = log.lines().filter(|line| line.contains(" other "));
        let refused = others.filter(|line| line.contains("Operation not permitted")).count();
        assert_eq!(refused, racing::DEVICES - 1, "{log}");
        device.to_owned()
    }

    /// Pods that the kubelet has rejected, with its words.
    pub(crate) fn rejected(&self) -> Vec<String> {
        let mut pods = self.api.list(PODS);
        pods.retain(|pod| pod["status"]["phase"] == "Failed");
        pods.iter()
            .map(|pod| format!("{}: {}", text_of(pod, "name"), pod["status"]["message"]))
            .collect()
    }

    /// Removes the objects of a controller and its pods.
    pub(crate) fn end_replica_set(&self, name: &str) {
        self.api.delete(&format!("{REPLICA_SETS}/{name}"), None);
        wait_for("its pods end", SOON, || self.api.list(PODS).is_empty().then_some(()));
    }
}

/// The ids by pod in an answer of `who`. A grant without a pod is not bound yet.
pub(crate) fn holders(who: &Value) -> BTreeMap<String, String> {
    let grants = who["grants"].as_array().unwrap().iter();
    let grants = grants.filter(|grant| grant["resource"] == NAME);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    grants.map(|grant| (text(&grant["pod"]["name"]), text(&grant["devices"][0]))).collect()
}
