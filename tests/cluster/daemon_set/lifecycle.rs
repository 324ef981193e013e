//! What administrators do: the DaemonSet deleted and made again, its ConfigMap edited in place, the
//! node drained, and pods evicted.

use super::rollouts::{STAY, allocatable};
use super::workload::{REPLICA_SETS, holder, holders, replica_set};
use super::{CONFIG, DaemonSet, NAMESPACE, ask, log, pod, settled, until_settled};
use crate::api::{NODES, PODS};
use crate::cluster::Cluster;
use crate::node::NODE;
use crate::objects::text_of;
use crate::racing::{DEVICES, NAME};
use crate::real::timeline::dips_ms;
use crate::{SOON, say, wait_for};
use serde_json::{Value, json};
use std::time::Instant;

/// A resource that an edit of the configuration adds.
const ADDED: &str = "example.com/added";
/// Pods of a controller.
const REPLICAS: usize = 4;

pub(crate) fn made_again(cluster: &mut Cluster) {
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    cluster.until_allocatable(NAME, DEVICES);
    let stays = cluster.create_stays("outlive");
    let began = Instant::now();
    set.delete(cluster);
    cluster.until_allocatable(NAME, 0);
    let gone = began.elapsed();
    cluster.api.create(PODS, &holder("waits"));
    cluster.unschedulable("waits");
    let began = Instant::now();
    set.apply(cluster);
    until_settled(cluster);
    cluster.until_allocatable(NAME, DEVICES);
    let back = began.elapsed();
    cluster.running("waits");
    let mut found = cluster.holdings(STAY + 1);
    found.remove("waits").unwrap();
    assert_eq!(found, stays, "a pod was restarted, or has another device");
    assert_eq!(cluster.rejected(), Vec::<String>::new());
    say(format_args!(
        "the DaemonSet is deleted: the node has no device {gone:.1?} later, and {STAY} pods keep theirs; it is made \
         again: {DEVICES} devices {back:.1?} later, and a pod that waited runs"
    ));
    set.delete(cluster);
}

/// Changes the configuration in the ConfigMap that the pod has, as `kubectl edit` does.
fn edit(cluster: &Cluster, config: &str) {
    let pod = pod(cluster);
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let map = volumes.iter().find_map(|each| each["configMap"]["name"].as_str()).unwrap();
    let patch = format!("--patch={}", json!({"data": {"config.toml": config}}));
    cluster.shown("admin", &["patch", "configmap", map, "-n", NAMESPACE, "--type=merge", &patch]);
}

pub(crate) fn edited(cluster: &mut Cluster) {
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    cluster.until_allocatable(NAME, DEVICES);
    let stays = cluster.create_stays("unmoved");
    let before = pod(cluster);
    let added = format!(
        "{CONFIG}[[resource]]\nname = \"{ADDED}\"\nclass = \"char\"\npaths = [\"/dev/counted\"]\n"
    );
    let began = Instant::now();
    edit(cluster, &added);
    cluster.until_allocatable(ADDED, 1);
    let took = began.elapsed();

    // An error in the file changes nothing, and the pod reports it.
    let began = Instant::now();
    edit(cluster, &format!("{added}nonsense = 1\n"));
    let error = |cluster: &Cluster| ask(cluster, &["status"])["config"]["error"].clone();
    let reported = wait_for("the error is reported", SOON, || {
        error(cluster).to_string().contains("nonsense").then(|| began.elapsed())
    });
    assert!(settled(cluster).is_some(), "the pod is not ready: {}", log(cluster));
    let allocatable = cluster.node_object()["status"]["allocatable"].clone();
    assert_eq!([&allocatable[NAME], &allocatable[ADDED]], ["8", "1"]);

    let began = Instant::now();
    edit(cluster, CONFIG);
    wait_for("the added resource is gone", SOON, || {
        let count = &cluster.node_object()["status"]["allocatable"][ADDED];
        (count.is_null() || count == "0").then_some(())
    });
    let removed = began.elapsed();
    assert_eq!(error(cluster), Value::Null);
    let after = pod(cluster);
    assert_eq!(text_of(&after, "uid"), text_of(&before, "uid"), "the pod was replaced");
    assert_eq!(after["status"]["containerStatuses"][0]["restartCount"], 0);
    assert_eq!(cluster.holdings(STAY), stays, "a pod was restarted, or has another device");
    say(format_args!(
        "a ConfigMap edited in place: its new resource is allocatable {took:.1?} later, an error in it is in `status` \
         {reported:.1?} later and changes nothing, the resource is gone {removed:.1?} after the next edit"
    ));
    set.delete(cluster);
}

pub(crate) fn drained(cluster: &mut Cluster) {
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    cluster.until_allocatable(NAME, DEVICES);
    cluster.api.create(REPLICA_SETS, &replica_set("drained", REPLICAS));
    let before = cluster.holdings(REPLICAS);
    let daemon = text_of(&pod(cluster), "uid");
    let events = cluster.api.watch(NODES);
    let began = Instant::now();
    cluster.shown("admin", &["drain", NODE, "--ignore-daemonsets", "--timeout=120s"]);
    let drained = began.elapsed();
    wait_for("no grant is left", SOON, || {
        holders(&ask(cluster, &["who"])).is_empty().then_some(())
    });
    let released = began.elapsed();
    assert_eq!(text_of(&pod(cluster), "uid"), daemon, "the DaemonSet's pod was drained");
    cluster.shown("admin", &["uncordon", NODE]);
    let began = Instant::now();
    let after = cluster.holdings(REPLICAS);
    let back = began.elapsed();
    assert!(after.keys().all(|name| !before.contains_key(name)), "{after:?}");
    let shown = allocatable(&events);
    assert!(shown.keys().all(|count| *count == DEVICES.to_string()), "{shown:?}");
    assert_eq!(cluster.rejected(), Vec::<String>::new());
    say(format_args!(
        "a drain of {REPLICAS} pods takes {drained:.1?}, and no grant is left {released:.1?} after its start; \
         {back:.1?} after the uncordon {REPLICAS} new pods have devices; the node's devices: {shown:?}"
    ));
    cluster.end_replica_set("drained");
    set.delete(cluster);
}

/// Evicts a pod through the API, as drains and autoscalers do.
fn evict(cluster: &Cluster, namespace: &str, name: &str) {
    let pods = PODS.replace("default", namespace);
    let eviction = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
    });
    cluster.api.create(&format!("{pods}/{name}/eviction"), &eviction);
}

pub(crate) fn evicted(cluster: &mut Cluster) {
    let Some(set) = DaemonSet::install(cluster, &[], CONFIG) else { return };
    cluster.until_allocatable(NAME, DEVICES);
    cluster.api.create(REPLICA_SETS, &replica_set("evicted", REPLICAS));
    let before = cluster.holdings(REPLICAS);
    let (victim, _) = before.first_key_value().unwrap();
    let began = Instant::now();
    evict(cluster, "default", victim);
    wait_for("the pod is evicted", SOON, || cluster.pod(victim).is_none().then_some(()));
    let mut after = cluster.holdings(REPLICAS);
    let replaced = began.elapsed();
    after.retain(|name, _| before.contains_key(name));
    assert_eq!(after.len(), REPLICAS - 1);
    assert!(after.iter().all(|(name, it)| before[name] == *it), "another pod was hurt: {after:?}");

    // The DaemonSet's own pod: its controller makes another one at once.
    let all = cluster.holdings(REPLICAS);
    let former = pod(cluster);
    let start = cluster.node.kubelet_log().len();
    let began = Instant::now();
    evict(cluster, NAMESPACE, &text_of(&former, "name"));
    wait_for("another pod is ready", SOON, || {
        settled(cluster).filter(|pod| text_of(pod, "uid") != text_of(&former, "uid"))
    });
    cluster.until_allocatable(NAME, DEVICES);
    let back = began.elapsed();
    let dips = dips_ms(&cluster.node.kubelet_log()[start..], NAME);
    assert_eq!(cluster.holdings(REPLICAS), all, "a pod was hurt by the eviction of the daemon");
    assert_eq!(cluster.rejected(), Vec::<String>::new());
    say(format_args!(
        "an evicted pod is replaced {replaced:.1?} later, and the others keep their devices; the evicted pod of the \
         DaemonSet is replaced {back:.1?} later, and the kubelet was without devices for {dips:.0?} ms"
    ));
    cluster.end_replica_set("evicted");
    set.delete(cluster);
}
