//! Pods and claims, and what becomes of them.

use crate::api::{CLAIMS, NODES, PODS};
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::node::NODE;
use crate::real::image::BUSYBOX;
use crate::{SOON, node, wait_for};
use serde_json::{Value, json};
use std::fs;

/// Prints the nodes of its claims and the result of opening them, then runs on.
pub(crate) const LISTS: &str = "ls -l /dev/claimed; for node in /dev/claimed/*; do \
     echo \"opened $node: $( (: < $node) 2>&1)\"; done; echo done; exec sleep 1000000";

/// A claim that asks for the device with this node, for each of `devices`.
pub(crate) fn claim(name: &str, devices: &[usize]) -> Value {
    let request = |n: &usize| {
        let path = node::device(*n);
        let expression = format!("device.attributes[\"holdfast.dev\"].path == \"{path}\"");
        json!({
            "name": format!("device-{n}"),
            "exactly": {
                "deviceClassName": "char.holdfast.dev",
                "selectors": [{"cel": {"expression": expression}}],
            },
        })
    };
    claim_of(name, json!({"requests": devices.iter().map(request).collect::<Vec<_>>()}))
}

pub(crate) fn claim_of(name: &str, devices: Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": devices},
    })
}

/// A pod whose container has these claims. It gets ten seconds to end.
pub(crate) fn pod(name: &str, claims: &[&str], script: &str) -> Value {
    let of = |claim: &&str| json!({"name": claim, "resourceClaimName": claim});
    let named = |claim: &&str| json!({"name": claim});
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "hostNetwork": true,
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 10,
            "resourceClaims": claims.iter().map(of).collect::<Vec<_>>(),
            "containers": [{
                "name": "main",
                "image": BUSYBOX,
                "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", script],
                "resources": {"claims": claims.iter().map(named).collect::<Vec<_>>()},
            }],
        },
    })
}

impl Cluster {
    /// Creates a claim for these devices, and a pod with it and the same name.
    pub(crate) fn create_holder(&self, name: &str, devices: &[usize], script: &str) {
        self.api.create(CLAIMS, &claim(name, devices));
        self.api.create(PODS, &pod(name, &[name], script));
    }

    pub(crate) fn pod(&self, name: &str) -> Option<Value> {
        self.api.get(&format!("{PODS}/{name}"))
    }

    /// The pod, once its container runs.
    pub(crate) fn running(&mut self, name: &str) -> Value {
        wait_for(&format!("the pod {name} runs"), SOON, || {
            self.plane.check();
            self.node.check();
            let pod = self.pod(name)?;
            assert_ne!(pod["status"]["phase"], "Failed", "{pod}");
            let main = &pod["status"]["containerStatuses"][0];
            (!main["state"]["running"].is_null()).then_some(pod)
        })
    }

    /// The output of the container of a pod, once it contains `text`. A container that was started
    /// `restarts` times before has a file of its own.
    pub(crate) fn printed(&self, pod: &Value, restarts: usize, text: &str) -> String {
        let (name, uid) = (text_of(pod, "name"), text_of(pod, "uid"));
        let file = format!("/var/log/pods/default_{name}_{uid}/main/{restarts}.log");
        wait_for(&format!("{name} prints {text}"), SOON, || {
            fs::read_to_string(&file).ok().filter(|log| log.contains(text))
        })
    }

    /// Deletes a pod as a user does, and waits until its object is deleted.
    pub(crate) fn end(&self, name: &str) {
        self.api.delete(&format!("{PODS}/{name}"), None);
        wait_for(&format!("{name} ends"), SOON, || self.pod(name).is_none().then_some(()));
    }

    /// The node's object.
    pub(crate) fn node_object(&self) -> Value {
        self.api.get(&format!("{NODES}/{NODE}")).unwrap()
    }

    /// Waits until the node has this number of allocatable devices of a resource.
    pub(crate) fn until_allocatable(&self, resource: &str, count: usize) {
        let count = count.to_string();
        wait_for(&format!("{count} {resource} are allocatable"), SOON, || {
            (self.node_object()["status"]["allocatable"][resource] == count.as_str()).then_some(())
        });
    }

    /// Waits until the scheduler has found no device for a pod.
    pub(crate) fn unschedulable(&self, name: &str) {
        wait_for(&format!("{name} finds no device"), SOON, || {
            let pod = self.pod(name).unwrap();
            let conditions = pod["status"]["conditions"].as_array()?.clone();
            conditions.iter().any(|each| each["reason"] == "Unschedulable").then_some(())
        });
    }
}

impl Daemon {
    /// Waits until a claim holds no device any longer.
    pub(crate) fn wait_until_released(&self, claim: &str) {
        wait_for(&format!("{claim} is released"), SOON, || {
            self.holders(claim).is_empty().then_some(())
        });
    }
}

/// A field of the metadata of an object.
pub(crate) fn text_of(object: &Value, field: &str) -> String {
    object["metadata"][field].as_str().unwrap().to_owned()
}

/// The process of a pod's container, and the time of its start: another process, another pair.
pub(crate) fn main_started(pod: &Value) -> String {
    let main = &pod["status"]["containerStatuses"][0];
    format!("{} {}", main["containerID"], main["state"]["running"]["startedAt"])
}
