//! Another instance takes over while the kubelet waits for an answer of the driver, and while pods
//! come and go.

use crate::api::PODS;
use crate::cluster::Cluster;
use crate::daemon::{Daemon, REGISTERED};
use crate::holders::{NEXT, STUBBORN};
use crate::node::DEVICES;
use crate::pki::kubeconfig;
use crate::racing::{self, NAME, Race, started, until_released};
use crate::{SOON, number, say};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) const EVENTS: &str = "/api/v1/namespaces/default/events";

/// Half of the devices of a race for each API, so that no pod loses its device to another.
const CLAIMED: &str = "example.com/raced-by-claims";
const DIVIDED: &str = r#"
[[resource]]
name = "example.com/raced"
class = "char"
paths = [{ host = "/dev/raced[0-3]", container = "/dev/raced/" }]
[[resource]]
name = "example.com/raced-by-claims"
class = "char"
paths = [{ host = "/dev/raced[4-7]", container = "/dev/raced/" }]
api = "dra"
"#;
/// Upgrades under churn; `HOLDFAST_UPGRADES` is another number.
const UPGRADES: usize = 20;
/// How often the figures so far are printed.
const REPORTED: usize = 100;

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

/// Instances take over from each other, while pods of both APIs come and go on different devices.
pub(crate) fn under_churn(cluster: &mut Cluster) {
    racing::make_devices();
    let wanted = number("HOLDFAST_UPGRADES", UPGRADES);
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, DIVIDED);
    daemon.wait_until_registered(cluster);
    let half = racing::DEVICES / 2;
    let before = cluster.published(half);
    let mut race = Race::new(cluster, "upgrades", usize::MAX, half);
    race.create_stays(cluster);
    let stays = started(cluster);
    let has_health = !cluster.is_off("ResourceHealthStatus");
    let mut unseen = Duration::ZERO;
    let (began, mut longest) = (Instant::now(), Duration::ZERO);
    for upgrade in 1..=wanted {
        race.step(cluster);
        let at = Instant::now();
        daemon.hand_over();
        longest = longest.max(at.elapsed());
        let lost = race.ends.rejected + race.ends.evicted + race.ends.interrupted;
        assert_eq!((lost, race.violations()), (0, vec![]), "{:?}", race.ends);
        if upgrade % REPORTED == 0 || upgrade == wanted {
            assert_eq!(cluster.failed_prepares("upgrades-"), Vec::<String>::new());
            let slices = cluster.published(half);
            assert_eq!(versions(&slices), versions(&before), "a slice was written");
            assert_eq!(started(cluster), stays, "a pod was hurt");
            // The end of an instance ends the stream of health. The kubelet opens another one, and
            // does not know the health until then.
            while has_health && cluster.health("stays-claim") != ["Healthy"] {
                assert!(at.elapsed() < SOON, "the health: {:?}", cluster.health("stays-claim"));
                race.step(cluster);
            }
            unseen = unseen.max(at.elapsed());
            say(format_args!("{upgrade} upgrades after {:.0?}: {:?}", began.elapsed(), race.ends));
        }
    }
    let took = began.elapsed();
    race.end(cluster);
    let Race { created, ends, .. } = &race;
    assert_eq!(ends.rejected + ends.evicted + ends.interrupted, 0, "{ends:?}");
    assert_eq!(cluster.failed_prepares("upgrades-"), Vec::<String>::new());
    assert!(race.ended() > wanted / 4, "no churn: {ends:?}");
    say(format_args!(
        "{wanted} upgrades in {took:.0?} (longest {longest:.1?}) while {created} pods of both APIs came and went: no \
         Allocate and no Prepare failed, no slice was written; the kubelet shows the health at most {unseen:.1?} \
         after an upgrade; {ends:?}"
    ));
    Race::end_stays(cluster);
    until_released(&daemon, &[NAME, CLAIMED]);
}
