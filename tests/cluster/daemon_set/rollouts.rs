//! The DaemonSet installed, and rolled out under pod churn.

use super::workload::{Holding, holder};
use super::{CONFIG, DaemonSet, NAMESPACE, settled};
use crate::api::{Event, NODES, PODS};
use crate::cluster::Cluster;
use crate::node::NODE;
use crate::racing::{DEVICES, NAME, Race};
use crate::real::timeline::dips_ms;
use crate::{SOON, number, say, wait_for};
use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// `HOLDFAST_ROLLOUTS` is another number.
const ROLLOUTS: usize = 3;
/// Pods that hold a device all the time. The others of [`DEVICES`] are for the churn.
pub(crate) const STAY: usize = 3;

impl Cluster {
    /// Creates pods that stay, and returns what they have.
    pub(crate) fn create_stays(&mut self, name: &str) -> BTreeMap<String, Holding> {
        (0..STAY).for_each(|n| _ = self.api.create(PODS, &holder(&format!("{name}-{n}"))));
        self.holdings(STAY)
    }
}

/// Every number of allocatable devices that the watch has shown.
pub(crate) fn allocatable(events: &Receiver<Event>) -> BTreeMap<String, usize> {
    let mut seen = BTreeMap::new();
    for event in events.try_iter() {
        assert_eq!(event.object["metadata"]["name"], NODE);
        let count = &event.object["status"]["allocatable"][NAME];
        *seen.entry(count.as_str().unwrap_or("none").to_owned()).or_default() += 1;
    }
    seen
}

/// Installed by kustomize: pods get devices, each its own.
pub(crate) fn installed(cluster: &mut Cluster) {
    let began = Instant::now();
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    let ready = began.elapsed();
    cluster.until_allocatable(NAME, DEVICES);
    (0..DEVICES).for_each(|n| _ = cluster.api.create(PODS, &holder(&format!("holds-{n}"))));
    let found = cluster.holdings(DEVICES);
    cluster.api.create(PODS, &holder("one-too-many"));
    cluster.unschedulable("one-too-many");
    let devices: Vec<&String> = found.values().map(|it| &it.device).collect();
    say(format_args!(
        "the DaemonSet of the base is ready after {ready:.1?}; {DEVICES} pods have {devices:?}, each may open its \
         device and no other, and one more pod waits"
    ));
    set.delete(cluster);
}

/// Rollouts of the DaemonSet while pods with devices come and go.
pub(crate) fn under_churn(cluster: &mut Cluster) {
    let rounds = number("HOLDFAST_ROLLOUTS", ROLLOUTS);
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    cluster.until_allocatable(NAME, DEVICES);
    let stays = cluster.create_stays("stays");
    let mut race = Race::of_numbers(cluster, "rolls");
    let events = cluster.api.watch(NODES);
    let log = cluster.node.kubelet_log().len();
    let mut times = Vec::new();
    for round in 0..rounds {
        let began = Instant::now();
        cluster.shown("admin", &["rollout", "restart", "daemonset/holdfast", "-n", NAMESPACE]);
        wait_for(&format!("rollout {round} is complete"), SOON, || {
            race.step(cluster);
            assert_eq!(race.violations(), Vec::<String>::new());
            settled(cluster)
        });
        times.push(began.elapsed());
    }
    race.end(cluster);
    assert_eq!(race.violations(), Vec::<String>::new());
    assert_eq!(cluster.holdings(STAY), stays, "a pod was restarted, or has another device");
    let shown = allocatable(&events);
    let log = &cluster.node.kubelet_log()[log..];
    let dips = dips_ms(log, NAME);
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or(Duration::ZERO);
    say(format_args!(
        "{rounds} rollouts (median {median:.1?}) while {} pods got a device and ended: {:?}; allocatable devices by \
         updates of the node: {shown:?}; periods without devices: {dips:?} ms",
        race.ends.by_number, race.ends
    ));
    assert!(shown.keys().all(|count| *count == DEVICES.to_string()), "{shown:?}");
    assert_eq!(dips, [0.0; 0], "the kubelet was without devices for these milliseconds");
    assert_eq!(race.ends.rejected, 0, "{:?}", race.ends);
    assert!(race.ends.by_number > rounds, "no churn: {:?}", race.ends);
    set.delete(cluster);
}
