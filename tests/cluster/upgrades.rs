//! Another instance takes over while the kubelet waits for an answer of the driver.

use crate::api::PODS;
use crate::cluster::Cluster;
use crate::daemon::{Daemon, REGISTERED};
use crate::holders::{NEXT, STUBBORN};
use crate::node::DEVICES;
use crate::say;
use serde_json::Value;

pub(crate) const EVENTS: &str = "/api/v1/namespaces/default/events";

/// The versions of the slices, which each write changes.
pub(crate) fn versions(slices: &[Value]) -> Vec<&Value> {
    slices.iter().map(|slice| &slice["metadata"]["resourceVersion"]).collect()
}

impl Cluster {
    /// The events of failed calls of the driver for pods whose names begin like this.
    pub(crate) fn failed_prepares(&self, pods: &str) -> Vec<String> {
        let mut events = self.api.list(EVENTS);
        events.retain(|event| {
            event["involvedObject"]["name"].as_str().unwrap().starts_with(pods)
                && event["reason"].as_str().unwrap().contains("DynamicResources")
        });
        events.iter().map(|event| event["message"].to_string()).collect()
    }
}

pub(crate) fn during_prepare(cluster: &mut Cluster) {
    let mut daemon = Daemon::start(cluster);
    let before = cluster.published(DEVICES);
    cluster.create_holder("upgrade-former", &[0], STUBBORN);
    let former = cluster.running("upgrade-former");
    cluster.printed(&former, 0, "holds");
    cluster.api.delete(&format!("{PODS}/upgrade-former"), Some(0));
    cluster.create_holder("upgrade-next", &[0], NEXT);
    daemon.wait_until_logged("claim waits for its devices");
    daemon.hand_over();
    let next = cluster.running("upgrade-next");
    let log = cluster.printed(&next, 0, "checked");
    assert!(log.contains("alone"), "two containers had the device: {log}\n{}", daemon.log());
    assert_eq!(daemon.holders("upgrade-next").len(), 1);

    // Upgrades without a call in flight, and the calls after each.
    for round in 0..3 {
        daemon.hand_over();
        let name = format!("upgraded-{round}");
        cluster.create_holder(&name, &[1], "exec sleep 1000000");
        cluster.running(&name);
        cluster.end(&name);
        daemon.wait_until_released(&name);
    }
    assert!(!daemon.log().contains(REGISTERED), "the kubelet registered the driver again");
    assert_eq!(versions(&cluster.published(DEVICES)), versions(&before), "a slice was written");
    assert_eq!(cluster.failed_prepares("upgrade"), Vec::<String>::new());
    say(format_args!("four upgrades: no Prepare failed, no slice was written"));
    cluster.end("upgrade-next");
    daemon.wait_until_released("upgrade-next");
}
