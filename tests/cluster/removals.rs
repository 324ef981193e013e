//! What an operator is shown of a pod that is removed, until its device is released.

use crate::api::PODS;
use crate::cluster::Cluster;
use crate::daemon::{CLAIMED, Daemon};
use crate::daemon_set::CONFIG;
use crate::daemon_set::workload::holder;
use crate::holders::STUBBORN;
use crate::node::{has_cgroup, processes_of_pod};
use crate::objects::{LISTS, text_of};
use crate::pki::kubeconfig;
use crate::racing::{DEVICES, NAME, make_devices};
use crate::{SOON, say, wait_for};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

/// The grant of a pod in an answer of `who`.
fn grant_of(who: &Value, pod: &str) -> Option<Value> {
    let of_pod = |grant: &&Value| {
        let claimed = grant["claim"]["pods"].as_array().into_iter().flatten();
        claimed.chain([&grant["pod"]]).any(|it| it["name"] == pod)
    };
    who["grants"].as_array().unwrap().iter().find(of_pod).cloned()
}

impl Daemon {
    /// What a verb prints for people.
    fn printed_by(&self, verb: &[&str]) -> String {
        let output = self.verb(verb);
        let texts = [output.stdout, output.stderr].concat();
        String::from_utf8(texts).unwrap()
    }

    /// Watches `who` from now until the pod's device is released. Once the pod has no cgroup, each
    /// answer has what the release waits for. Returns the states of the pod, as far as they
    /// were seen, in their order.
    fn states_until_released(&self, cluster: &Cluster, pod: &str, uid: &str) -> Vec<String> {
        let began = Instant::now();
        let (mut states, mut explained) = (Vec::new(), BTreeSet::new());
        wait_for(&format!("the device of {pod} is released"), SOON, || {
            let has_gone = !has_cgroup(uid);
            let Some(grant) = grant_of(&self.who(), pod) else { return Some(()) };
            let pending = &grant["pending_release"];
            if pending.is_null() {
                assert!(!has_gone, "{pod} has no cgroup: {grant}\n{}", self.log());
                return None;
            }
            let state = pending["pod"].as_str().unwrap().to_owned();
            if explained.insert((state.clone(), pending["waits_for"].to_string())) {
                let is_listed = cluster.pod(pod).is_some();
                say(format_args!(
                    "{pod}, {:.1?}, the API server has it: {is_listed}\n{}{}",
                    began.elapsed(),
                    self.printed_by(&["who", "--pod", &format!("default/{pod}")]),
                    self.printed_by(&["explain", &format!("default/{pod}")]),
                ));
            }
            if states.last() != Some(&state) {
                states.push(state);
            }
            None
        });
        say(format_args!("{pod}: {states:?}, released after {:.1?}", began.elapsed()));
        states
    }

    /// What is shown after the release.
    fn check_release(&self, pod: &str, proof: &str) {
        let name = format!("default/{pod}");
        let (who, explained) =
            (self.printed_by(&["who", "--pod", &name]), self.printed_by(&["explain", &name]));
        say(format_args!("{who}{explained}"));
        assert!(explained.contains("it holds no device"), "{explained}");
        assert!(explained.contains(proof) && who.contains(pod), "{who}{explained}");
    }
}

/// Deletes a pod as a user does.
fn delete(cluster: &Cluster, pod: &str, grace: Option<u32>) {
    cluster.api.delete(&format!("{PODS}/{pod}"), grace);
}

/// A daemon with devices for pods with a number and for claims, and a pod of each.
fn with_holders(cluster: &mut Cluster) -> Daemon {
    make_devices();
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let resources = format!("{CLAIMED}{CONFIG}");
    let daemon = Daemon::launch(cluster, Path::new("/"), &credentials, &resources);
    daemon.wait_until_registered(cluster);
    cluster.until_allocatable(NAME, DEVICES);
    cluster.published(crate::node::DEVICES);
    daemon
}

/// Waits until `who` names the pod, and the kubelet's lists have it.
fn until_held(daemon: &Daemon, pod: &str) {
    wait_for(&format!("`who` names {pod}"), SOON, || {
        let grant = grant_of(&daemon.who(), pod)?;
        assert_eq!(grant["pending_release"], Value::Null, "{pod} runs");
        ["bound", "prepared"].contains(&grant["state"].as_str()?).then_some(())
    });
}

pub(crate) fn of_both_apis(cluster: &mut Cluster) {
    let daemon = with_holders(cluster);
    cluster.api.create(PODS, &holder("counted"));
    cluster.create_holder("claimed", &[0], LISTS);
    for (pod, proof) in [("counted", "pod_gone"), ("claimed", "unprepared")] {
        let uid = text_of(&cluster.running(pod), "uid");
        until_held(&daemon, pod);
        delete(cluster, pod, None);
        let states = daemon.states_until_released(cluster, pod, &uid);
        // A short state may lie between two answers.
        assert!(
            states.iter().all(|it| ["ended", "gone", "running"].contains(&&**it)),
            "{states:?}"
        );
        if pod == "counted" {
            assert_eq!(states.last().map(String::as_str), Some("gone"), "{states:?}");
        }
        daemon.check_release(pod, proof);
    }
}

/// A pod that ignores TERM is deleted by force: its object is removed while its container runs.
pub(crate) fn by_force(cluster: &mut Cluster) {
    let daemon = with_holders(cluster);
    let mut pod = holder("stubborn");
    pod["spec"]["containers"][0]["command"] = json!(["/bin/sh", "-c", STUBBORN]);
    cluster.api.create(PODS, &pod);
    let uid = text_of(&cluster.running("stubborn"), "uid");
    until_held(&daemon, "stubborn");
    delete(cluster, "stubborn", Some(0));
    assert!(cluster.pod("stubborn").is_none() && !processes_of_pod(&uid).is_empty());
    say(daemon.printed_by(&["explain", "default/stubborn"]));
    let states = daemon.states_until_released(cluster, "stubborn", &uid);
    assert_eq!(states.last().map(String::as_str), Some("gone"), "{states:?}");
    daemon.check_release("stubborn", "pod_gone");
}
