//! What users of the cluster see of a failed device, with the kubelet's credentials and with those
//! of the service account.

use crate::cluster::Cluster;
use crate::daemon::{CLAIMED, Daemon};
use crate::node::{DEVICES, NODE, device};
use crate::objects::{LISTS, text_of};
use crate::rights::OF_POD;
use crate::{SOON, pki, say, wait_for};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

pub(crate) const EVENTS: &str =
    include_str!("../../packaging/kustomize/components/events/rbac.yaml");
pub(crate) const RBAC: &str =
    include_str!("../../packaging/kustomize/components/node-condition/rbac.yaml");
pub(crate) const POLICY: &str =
    include_str!("../../packaging/kustomize/components/node-condition/policy.yaml");
const CONDITION: &str = "HoldfastDevicesHealthy";
const KEYS: &str = "events = true\nnode_condition = true\n";

impl Cluster {
    /// The output of `kubectl` that must succeed.
    pub(crate) fn shown(&self, client: &str, arguments: &[&str]) -> String {
        let output = self.api.kubectl(client, arguments, "");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn conditions(&self) -> Vec<Value> {
        let node = self.shown("admin", &["get", "node", NODE, "-o", "json"]);
        let node: Value = serde_json::from_str(&node).unwrap();
        node["status"]["conditions"].as_array().cloned().unwrap_or_default()
    }

    fn until_condition(&self, status: &str) -> Value {
        wait_for(status, SOON, || {
            let found = self.conditions().into_iter().find(|it| it["type"] == CONDITION)?;
            (found["status"] == status).then_some(found)
        })
    }

    fn until_described(&self, kind: &str, name: &str, text: &str) -> String {
        wait_for(text, SOON, || {
            let shown = self.shown("admin", &["describe", kind, name]);
            shown.contains(text).then_some(shown)
        })
    }

    /// A device fails while a pod has it, and recovers.
    fn check_reports(&mut self, client: &str) {
        let credentials = pki::kubeconfig(&self.dir, client);
        let daemon = Daemon::launch_with(self, Path::new("/"), &credentials, KEYS, CLAIMED);
        daemon.wait_until_registered(self);
        self.published(DEVICES);
        let healthy = self.until_condition("True");
        let others = |cluster: &Cluster| {
            let mut types: Vec<String> =
                cluster.conditions().iter().map(|it| it["type"].to_string()).collect();
            types.retain(|of| !of.contains(CONDITION));
            types
        };
        let before = others(self);
        assert!(before.iter().any(|of| of.contains("Ready")), "{before:?}");
        let pod = format!("sick-{client}");
        self.create_holder(&pod, &[0], LISTS);
        let holder = self.running(&pod);

        let (node, hidden) = (device(0), "/dev/hidden-by-the-test");
        fs::rename(&node, hidden).unwrap();
        let shown = self.until_described("pod", &pod, "DeviceUnhealthy");
        assert!(shown.contains("holdfast.dev") && shown.contains("is unhealthy: "), "{shown}");
        let of_pod = format!("of pod default/{pod} is unhealthy");
        self.until_described("node", NODE, &of_pod);
        let sick = self.until_condition("False");
        assert_eq!(sick["reason"], "DevicesUnhealthy");
        assert_ne!(sick["lastTransitionTime"], Value::Null);
        let uid = format!("--field-selector=involvedObject.uid={}", text_of(&holder, "uid"));
        let listed = self.shown("admin", &["get", "events", &uid]);
        assert!(listed.contains("DeviceUnhealthy"), "{listed}");

        fs::rename(hidden, &node).unwrap();
        self.until_described("pod", &pod, "DeviceRecovered");
        let again = self.until_condition("True");
        assert_ne!(again["lastHeartbeatTime"], healthy["lastHeartbeatTime"]);
        assert_eq!(others(self), before, "no other condition was added or removed");
        assert_eq!(daemon.not_reported(), Value::Null);
        self.end(&pod);
        daemon.wait_until_released(&pod);
        drop(daemon);
        // As docs/operate.md has it.
        let patch =
            json!({ "status": { "conditions": [{ "type": CONDITION, "$patch": "delete" }] } });
        let patch = format!("--patch={patch}");
        let delete = ["patch", "node", NODE, "--subresource=status", "--type=strategic", &patch];
        self.shown("admin", &delete);
        assert_eq!(self.conditions().len(), before.len());
    }
}

pub(crate) fn kubelet(cluster: &mut Cluster) {
    cluster.check_reports("kubelet");
    say("a failed device is shown on its pod and on its node, with the kubelet's credentials");
}

pub(crate) fn service_account(cluster: &mut Cluster) {
    let pod = cluster.create_account();
    let patch = |of: &str, node: &'static str| {
        let condition = json!({ "type": of, "status": "True", "reason": "Test", "message": "",
            "lastHeartbeatTime": "2026-01-02T03:04:05Z",
            "lastTransitionTime": "2026-01-02T03:04:05Z" });
        let patch = json!({ "status": { "conditions": [condition] } });
        let patch = format!("--patch={patch}");
        (patch, node)
    };
    let write = |cluster: &Cluster, (patch, node): (String, &'static str)| {
        let kind = ["patch", "node", node, "--subresource=status", "--type=strategic", &patch];
        let output = cluster.api.kubectl(OF_POD, &kind, "");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(error) }
    };
    for text in [crate::rights::RBAC, crate::rights::POLICY, EVENTS] {
        cluster.api.apply(text);
    }
    // `kubectl patch` reads what it patches; the daemon does not.
    let reader = RBAC.replace("verbs: [patch]", "verbs: [get]");
    cluster.api.apply(&reader.replace("holdfast-node-condition", "test-reads-status"));
    wait_for("the missing right", SOON, || {
        let error = write(cluster, patch(CONDITION, NODE)).unwrap_err();
        error.contains("cannot patch resource \"nodes/status\"").then_some(())
    });
    cluster.api.apply(RBAC);
    cluster.api.apply(POLICY);
    // A condition that was written before the policy was in force stays: the next one is another.
    let mut attempts = 0;
    wait_for("the policy is in force", SOON, || {
        attempts += 1;
        let refused = write(cluster, patch(&format!("Other{attempts}"), NODE)).err();
        refused.filter(|it| it.contains("may be changed"))
    });
    // A label of the node attracts pods.
    let label = json!({ "metadata": { "labels": { "attracts": "pods" } } });
    let refused = write(cluster, (format!("--patch={label}"), NODE)).unwrap_err();
    assert!(refused.contains("only conditions may be changed"), "{refused}");
    cluster.check_reports(OF_POD);
    cluster.api.delete(&pod, Some(0));
    say("the policy limits the service account to one condition of its node");
}
