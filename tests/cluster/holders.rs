//! Pods with claims: what they get, when they share, and when a former holder still runs.

use crate::api::{CLAIMS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::objects::{LISTS, claim, main_started, pod, text_of};
use crate::{SOON, node, say, wait_for};
use std::path::Path;
use std::time::Instant;

/// Holds a port of the node, which no second process can have, and ignores SIGTERM.
pub(crate) const STUBBORN: &str = "trap : TERM; nc -l -p 7070 & sleep 1; kill -0 $! && echo holds; \
     while :; do sleep 1; done";
/// Prints whether the port is free: the former holder runs no longer.
pub(crate) const NEXT: &str = "nc -l -p 7070 & sleep 1; if kill -0 $!; then echo alone; \
     else echo together; fi; echo checked; exec sleep 1000000";

pub(crate) fn a_pod_sees_its_devices(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    cluster.create_holder("sees", &[0, 2], LISTS);
    let pod = cluster.running("sees");
    let log = cluster.printed(&pod, 0, "done");
    for n in 0..node::DEVICES {
        // No driver answers; without the right to open the node the error would be another one.
        let opened = format!("opened /dev/claimed/claimed{n}: ");
        let line = log.lines().find(|line| line.contains(&opened));
        assert_eq!(line.is_some(), [0, 2].contains(&n), "{log}");
        let is_allowed = |line: &str| line.contains("No such device or address");
        assert!(line.is_none_or(is_allowed), "{log}");
    }
    let holders = daemon.holders("sees");
    let devices: Vec<&str> = holders
        .iter()
        .flat_map(|grant| grant["devices"].as_array().unwrap())
        .map(|id| id.as_str().unwrap())
        .collect();
    assert_eq!(devices.len(), 2, "{holders:?}");
    assert_eq!(holders[0]["claim"]["namespace"], "default", "{holders:?}");
    assert_eq!(holders[0]["state"], "prepared", "{holders:?}");
    let claim = cluster.api.get(&format!("{CLAIMS}/sees")).unwrap();
    let file = format!("{}/holdfast-claim-{}.json", node::CDI, text_of(&claim, "uid"));
    assert!(Path::new(&file).is_file(), "{file} is missing");
    cluster.end("sees");
    daemon.wait_until_released("sees");
    let history = daemon.history("sees");
    assert!(history.contains("unprepared"), "{history}");
    assert!(!Path::new(&file).exists(), "{file} is still there");
}

pub(crate) fn two_pods_share_a_claim(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    cluster.api.create(CLAIMS, &claim("shared", &[1]));
    for name in ["shares-1", "shares-2"] {
        cluster.api.create(PODS, &pod(name, &["shared"], LISTS));
        let pod = cluster.running(name);
        let log = cluster.printed(&pod, 0, "done");
        assert!(log.contains("opened /dev/claimed/claimed1: "), "{log}");
    }
    assert_eq!(daemon.holders("shared").len(), 1, "one grant for both pods");
    let second = cluster.running("shares-2");
    // The kubelet keeps the claim for the second pod. Its container starts again with the device.
    cluster.end("shares-1");
    assert_eq!(daemon.holders("shared").len(), 1, "the second pod has lost its claim");
    assert_eq!(main_started(&cluster.running("shares-2")), main_started(&second));
    cluster.end("shares-2");
    daemon.wait_until_released("shared");
}

pub(crate) fn force_delete(cluster: &mut Cluster) {
    let daemon = Daemon::start(cluster);
    cluster.create_holder("former", &[0], STUBBORN);
    let former = cluster.running("former");
    cluster.printed(&former, 0, "holds");
    cluster.api.delete(&format!("{PODS}/former"), Some(0));
    let began = Instant::now();
    cluster.create_holder("next", &[0], NEXT);
    let uid = text_of(&former, "uid");
    let allocated = wait_for("the scheduler gives the device to the next pod", SOON, || {
        let claim = cluster.api.get(&format!("{CLAIMS}/next")).unwrap();
        (!claim["status"]["allocation"].is_null()).then(|| began.elapsed())
    });
    let runs_on = !node::processes_of_pod(&uid).is_empty();
    assert!(runs_on, "the former container has ended before the next pod was there: no test");
    let next = cluster.running("next");
    let took = began.elapsed();
    let log = cluster.printed(&next, 0, "checked");
    assert!(log.contains("alone"), "two containers had the device: {log}\n{}", daemon.log());
    assert!(node::processes_of_pod(&uid).is_empty());
    let history = daemon.history("former");
    say(format_args!(
        "a pod that ignores TERM is deleted by force: the device is allocated again after {allocated:.1?}, \
         and the next container starts after {took:.1?}"
    ));
    assert!(daemon.holders("former").is_empty(), "{history}");
    assert_eq!(daemon.holders("next").len(), 1);
    cluster.end("next");
    daemon.wait_until_released("next");
}
