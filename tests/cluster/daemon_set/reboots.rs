//! Reboots of the node: with the DaemonSet, and with the service, which starts before the kubelet.

use super::workload::{REPLICA_SETS, holder, replica_set};
use super::{CONFIG, DaemonSet, ask, until_settled};
use crate::api::{ALL_PODS, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::objects::text_of;
use crate::pki::kubeconfig;
use crate::racing::{DEVICES, NAME, make_devices};
use crate::{SOON, number, say, wait_for};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// `HOLDFAST_REBOOTS` is another number.
const REBOOTS: usize = 2;
const REPLICAS: usize = 6;

/// The runtime's ids of the containers that the API server shows, and whether all of them run.
fn containers(cluster: &Cluster) -> (BTreeSet<String>, bool) {
    let mut pods = cluster.api.list(ALL_PODS);
    pods.retain(|pod| pod["status"]["phase"] != "Failed");
    let main = |pod: &Value| pod["status"]["containerStatuses"][0].clone();
    let run = pods.iter().all(|pod| main(pod)["state"]["running"].is_object());
    (pods.iter().map(|pod| main(pod)["containerID"].to_string()).collect(), run)
}

/// Starts the kubelet after a reboot, and waits until as many pods as before run in this boot. The
/// API server shows the containers of the former boot for a while.
fn until_started(cluster: &mut Cluster, former: &BTreeSet<String>) -> Duration {
    let began = Instant::now();
    cluster.node.start_kubelet();
    wait_for("every pod runs in this boot", 2 * SOON, || {
        cluster.node.check();
        let (now, run) = containers(cluster);
        (run && now.len() == former.len() && now.is_disjoint(former)).then(|| began.elapsed())
    })
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// Pods of a controller, since the kubelet rejects some of them while it starts the DaemonSet's own
/// pod (docs/install.md).
pub(crate) fn of_daemon_set(cluster: &mut Cluster) {
    let rounds = number("HOLDFAST_REBOOTS", REBOOTS);
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    cluster.until_allocatable(NAME, DEVICES);
    cluster.api.create(REPLICA_SETS, &replica_set("reboots", REPLICAS));
    cluster.holdings(REPLICAS);
    let (mut rejected, mut checked, mut times) = (0, 0, Vec::new());
    for _ in 0..rounds {
        let (former, _) = containers(cluster);
        cluster.node.reboot();
        times.push(until_started(cluster, &former));
        until_settled(cluster);
        // The grants of rejected pods are released after a minute.
        checked += cluster.holdings_by(REPLICAS, |cluster| ask(cluster, &["who"])).len();
        for pod in cluster.api.list(PODS).iter().filter(|it| it["status"]["phase"] == "Failed") {
            assert_eq!(pod["status"]["reason"], "UnexpectedAdmissionError", "{pod}");
            rejected += 1;
            cluster.api.delete(&format!("{PODS}/{}", text_of(pod, "name")), Some(0));
        }
    }
    cluster.holdings(REPLICAS);
    let median = median(times);
    say(format_args!(
        "{rounds} reboots with the DaemonSet: after them {checked} pods had one device each, the one that `who` names; \
         all ran {median:.1?} after the kubelet's start (median); {rejected} pods were rejected before the daemon had \
         registered, and replaced by their controller"
    ));
    cluster.end_replica_set("reboots");
    set.delete(cluster);
}

/// Pods without a controller: as a service, the daemon starts before the kubelet, so none is lost,
/// and each has the device that it had before.
pub(crate) fn of_service(cluster: &mut Cluster) {
    let rounds = number("HOLDFAST_REBOOTS", REBOOTS);
    make_devices();
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, CONFIG);
    daemon.wait_until_registered(cluster);
    cluster.until_allocatable(NAME, DEVICES);
    (0..REPLICAS).for_each(|n| _ = cluster.api.create(PODS, &holder(&format!("boots-{n}"))));
    let devices = |cluster: &mut Cluster, daemon: &Daemon| -> Vec<(String, String)> {
        let found = cluster.holdings_by(REPLICAS, |_| daemon.who());
        found.into_iter().map(|(name, it)| (name, it.device)).collect()
    };
    let before = devices(cluster, &daemon);
    let mut times = Vec::new();
    for _ in 0..rounds {
        let (former, _) = containers(cluster);
        daemon.reboot(cluster);
        times.push(until_started(cluster, &former));
        assert_eq!(cluster.rejected(), Vec::<String>::new());
        assert_eq!(devices(cluster, &daemon), before, "another device after a reboot");
    }
    say(format_args!(
        "{rounds} reboots with the service: {REPLICAS} pods without a controller had the same devices after each, {:.1?} \
         after the kubelet's start (median)",
        median(times)
    ));
}
