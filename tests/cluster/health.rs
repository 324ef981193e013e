//! Devices that are not for new claims: the taint, what the kubelet shows, and the eviction.

use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node::device;
use crate::objects::{LISTS, main_started};
use crate::{SOON, say, wait_for};
use serde_json::Value;
use std::time::Instant;

const TAINT: &str = "holdfast.dev/cordoned";

impl Cluster {
    /// The effect of the taint of a cordon on a device; `None` without the taint.
    fn cordon_effect(&self, n: usize) -> Option<String> {
        let device = self.device("path", &device(n))?;
        let taints = device["taints"].as_array()?;
        let taint = taints.iter().find(|taint| taint["key"] == TAINT)?;
        Some(taint["effect"].as_str().unwrap().to_owned())
    }

    /// The health of the devices of a pod in its status (`allocatedResourcesStatus`).
    pub(crate) fn health(&self, pod: &str) -> Vec<String> {
        let pod = self.pod(pod).unwrap();
        let status = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"];
        let resources = status.as_array().into_iter().flatten();
        let devices = resources.filter_map(|resource| resource["resources"].as_array()).flatten();
        devices.map(|device| device["health"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

/// The id of the only device of a claim.
fn id_of(daemon: &Daemon, claim: &str) -> String {
    let holders: Vec<Value> = daemon.holders(claim);
    holders[0]["devices"][0].as_str().unwrap().to_owned()
}

pub(crate) fn taints(cluster: &mut Cluster) {
    if cluster.lacks("DRADeviceTaints") || cluster.lacks("ResourceHealthStatus") {
        return;
    }
    let daemon = Daemon::start(cluster);
    cluster.create_holder("cordoned", &[0], LISTS);
    let holder = cluster.running("cordoned");
    let id = id_of(&daemon, "cordoned");
    wait_for("the pod's device is healthy", SOON, || {
        (cluster.health("cordoned") == ["Healthy"]).then_some(())
    });
    daemon.instruct(&["device", "cordon", &id, "--reason", "test"]);
    let began = Instant::now();
    let effect = wait_for("the taint", SOON, || cluster.cordon_effect(0));
    let tainted = began.elapsed();
    assert_eq!(effect, "NoSchedule");
    wait_for("the pod's device is unhealthy", SOON, || {
        (cluster.health("cordoned") == ["Unhealthy"]).then_some(())
    });
    cluster.create_holder("waits", &[0], LISTS);
    cluster.unschedulable("waits");
    assert_eq!(main_started(&cluster.running("cordoned")), main_started(&holder), "it runs on");
    cluster.end("cordoned");
    daemon.wait_until_released("cordoned");
    assert_eq!(cluster.cordon_effect(0).as_deref(), Some("NoSchedule"), "a release ends no cordon");
    daemon.instruct(&["device", "uncordon", &id]);
    let began = Instant::now();
    wait_for("no taint", SOON, || cluster.cordon_effect(0).is_none().then_some(()));
    say(format_args!(
        "the taint of a cordon is there after {tainted:.0?}, and removed {:.0?} after the uncordon",
        began.elapsed()
    ));
    cluster.running("waits");
    cluster.end("waits");
    daemon.wait_until_released("waits");
}

pub(crate) fn eviction(cluster: &mut Cluster) {
    if cluster.lacks("DRADeviceTaints") {
        return;
    }
    let daemon = Daemon::start(cluster);
    let help = daemon.verb(&["device", "cordon", "--help"]).stdout;
    if !String::from_utf8_lossy(&help).contains("--evict") {
        return say("SKIPPED: this binary has no `device cordon --evict`");
    }
    cluster.create_holder("evicted", &[0], LISTS);
    cluster.create_holder("stays", &[1], LISTS);
    cluster.running("evicted");
    let stays = cluster.running("stays");
    let id = id_of(&daemon, "evicted");
    daemon.instruct(&["device", "cordon", &id, "--evict", "--reason", "test"]);
    let began = Instant::now();
    wait_for("the pod is evicted", SOON, || cluster.pod("evicted").is_none().then_some(()));
    assert_eq!(cluster.cordon_effect(0).as_deref(), Some("NoExecute"));
    say(format_args!("a cordon with --evict ends the pod in {:.1?}", began.elapsed()));
    daemon.wait_until_released("evicted");
    assert_eq!(main_started(&cluster.running("stays")), main_started(&stays), "it was evicted too");
    daemon.instruct(&["device", "uncordon", &id]);
    wait_for("no taint", SOON, || cluster.cordon_effect(0).is_none().then_some(()));
    cluster.end("stays");
}
