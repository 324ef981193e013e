//! A node moves between the APIs while pods come and go, also with a policy of the kubelet's
//! Topology Manager.

use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::pki::kubeconfig;
use crate::racing::{self, BOTH, DEVICES, NAME, Race, started, until_released};
use crate::{hardware, say};
use std::path::Path;

/// The APIs of the moves. Before them the resource has both.
const MOVES: [&str; 4] = ["dra", "both", "plugin", "both"];
/// The raced resource as GPUs, which have NUMA nodes.
const GPUS: &str = r#"
[[resource]]
name = "example.com/raced"
class = "gpu"
contract = "generic"
select = { vendor = ["10de"] }
api = "both"
"#;
/// The policies with which the kubelet rejects a pod whose devices it cannot align.
pub(crate) const POLICIES: [&str; 2] = ["restricted", "single-numa-node"];

pub(crate) fn without_policy(cluster: &mut Cluster) {
    racing::make_devices();
    moves(cluster, "moves", Path::new("/"), BOTH, false);
}

pub(crate) fn with_policies(cluster: &mut Cluster) {
    let root = hardware::made(cluster);
    for policy in POLICIES {
        cluster.node.restart_with_policy(policy);
        moves(cluster, policy, &root, GPUS, true);
        say(format_args!("this was with the policy `{policy}`"));
    }
}

/// Moves the node. The kubelet restarts after each move. Two pods run all the time, one by number
/// and one with a claim. A pod that finds no device is rejected by the Topology Manager
/// (`is_aligned`) only while the list of the resource has NUMA nodes, so not with `dra`.
fn moves(cluster: &mut Cluster, name: &'static str, root: &Path, resource: &str, is_aligned: bool) {
    let wanted = racing::wanted();
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let daemon = Daemon::launch(cluster, root, &credentials, resource);
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    let mut race = Race::new(cluster, name, wanted, DEVICES);
    race.is_aligned = is_aligned;
    race.create_stays(cluster);
    let before = started(cluster);
    let mut moves =
        MOVES.iter().enumerate().map(|(n, api)| ((n + 1) * wanted / 5, *api)).peekable();
    let mut api = "both";
    race.run(cluster, |race, cluster, has_ended| {
        // Where all pods that are left need the other API, none ends before the next move.
        if let Some((_, next)) = moves.next_if(|(at, _)| race.ended() >= *at || !has_ended) {
            // What was rejected until now.
            race.step(cluster);
            race.is_aligned = is_aligned;
            daemon.configure(&format!("api = {api:?}"), &format!("api = {next:?}"));
            api = next;
            cluster.node.kill_kubelet();
            cluster.node.start_kubelet();
            assert_eq!(started(cluster), before, "a pod was hurt by the move to {next}");
            race.step(cluster);
            race.is_aligned = is_aligned && api != "dra";
        }
    });
    assert!(moves.peek().is_none(), "too few pods for the moves");
    assert_eq!(started(cluster), before);
    let Race { created, ends, .. } = &race;
    assert_eq!(race.ended(), wanted);
    say(format_args!(
        "{created} pods for {wanted} ends over the moves to {MOVES:?}, each with a restart of the kubelet: no device in \
         two containers, two pods ran all the time; {ends:?}"
    ));
    Race::end_stays(cluster);
    until_released(&daemon, &[NAME]);
}
