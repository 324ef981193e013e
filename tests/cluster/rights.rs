//! What the credentials permit: a node writes its own slices and no others.

use crate::api::{PODS, SLICES};
use crate::cluster::Cluster;
use crate::daemon::{CLAIMED, Daemon};
use crate::node::{DEVICES, NODE};
use crate::objects::{LISTS, claim, text_of};
use crate::real::image::BUSYBOX;
use crate::{SOON, pki, say, wait_for};
use serde_json::{Value, json};
use std::path::Path;

pub(crate) const RBAC: &str = include_str!("../../packaging/kustomize/components/dra/rbac.yaml");
pub(crate) const POLICY: &str =
    include_str!("../../packaging/kustomize/components/dra/policy.yaml");
const ACCOUNT: &str = include_str!("../../packaging/kustomize/base/serviceaccount.yaml");
const NAMESPACE: &str = "kube-system";
/// The kubeconfig with the token of a pod, and the one with a token of no pod.
pub(crate) const OF_POD: &str = "pod-token";
const OF_NO_POD: &str = "plain-token";

/// A slice with one device.
pub(crate) fn slice(name: &str, node: &str, driver: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": format!("{node}/test"), "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "device-1"}],
        },
    })
}

impl Cluster {
    /// The error of a write of `slice` as this client, or its success.
    fn write(&self, client: &str, verb: &str, slice: &Value) -> Result<(), String> {
        let output = self.api.kubectl(client, &[verb, "-f", "-"], &slice.to_string());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success().then_some(()).ok_or(error)
    }

    /// This client may create, change and delete slices of its own node, and not those of another.
    fn check_writes(&self, client: &str) {
        let own = slice("own", NODE, "holdfast.dev");
        let mut changed = own.clone();
        changed["spec"]["devices"][0]["name"] = json!("device-2");
        for (verb, slice) in [("create", &own), ("replace", &changed), ("delete", &changed)] {
            assert_eq!(self.write(client, verb, slice), Ok(()), "{client}: {verb}");
        }
        let mut other = slice("other", "node-2", "holdfast.dev");
        self.refuses(client, "create", &other);
        self.api.create(SLICES, &other);
        other["spec"]["devices"][0]["name"] = json!("device-2");
        for verb in ["replace", "delete"] {
            self.refuses(client, verb, &other);
        }
        self.api.delete(&format!("{SLICES}/other"), None);
    }

    fn refuses(&self, client: &str, verb: &str, slice: &Value) {
        let error = self.write(client, verb, slice).expect_err(&format!("{client}: {verb}"));
        assert!(error.to_lowercase().contains("forbidden"), "{client}: {verb}: {error}");
    }

    fn kubeconfig_with(&self, client: &str, token: &[&str]) {
        let create = [&["create", "token", "holdfast", "--namespace", NAMESPACE], token].concat();
        let output = self.api.kubectl("admin", &create, "");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let token = String::from_utf8(output.stdout).unwrap();
        pki::write_kubeconfig(&self.dir, client, &json!({"token": token.trim()}));
    }
}

pub(crate) fn kubelet(cluster: &mut Cluster) {
    cluster.check_writes("kubelet");
    // The claims of its pods only. The daemon reads these with the same credentials.
    cluster.api.create(crate::api::CLAIMS, &claim("not-ours", &[0]));
    let output = cluster.api.kubectl("kubelet", &["get", "resourceclaims", "not-ours"], "");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("orbidden"), "the claim of no pod of this node: {error}");
    let _daemon = Daemon::start(cluster);
    cluster.published(DEVICES);
    cluster.create_holder("ours", &[1], LISTS);
    cluster.running("ours");
    let output = cluster.api.kubectl("kubelet", &["get", "resourceclaims", "ours"], "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    cluster.end("ours");
}

/// A pod of the service account on the node, which a token is bound to.
fn account_pod() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "account", "namespace": NAMESPACE},
        "spec": {
            "serviceAccountName": "holdfast",
            "nodeName": NODE,
            "hostNetwork": true,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never"}],
        },
    })
}

impl Cluster {
    /// Creates the service account, a pod of it, and the kubeconfigs. Returns the path of the pod.
    pub(crate) fn create_account(&self) -> String {
        let account = self.api.kubectl("admin", &["apply", "-n", NAMESPACE, "-f", "-"], ACCOUNT);
        assert!(account.status.success(), "{}", String::from_utf8_lossy(&account.stderr));
        let pods = PODS.replace("default", NAMESPACE);
        let pod = format!("{pods}/account");
        self.api.delete(&pod, Some(0));
        let created = self.api.create(&pods, &account_pod());
        let uid = text_of(&created, "uid");
        let bound = ["--bound-object-kind=Pod", "--bound-object-name=account"];
        let uid = format!("--bound-object-uid={uid}");
        self.kubeconfig_with(OF_POD, &[&bound[..], &[&uid]].concat());
        self.kubeconfig_with(OF_NO_POD, &[]);
        pod
    }
}

pub(crate) fn service_account(cluster: &mut Cluster) {
    let pod = cluster.create_account();
    // Without the ClusterRole nothing may be written, and without the policy everything. The roles
    // of a former test may hold for a moment after their deletion.
    let own = slice("own", NODE, "holdfast.dev");
    wait_for("no right is left", SOON, || match cluster.write(OF_POD, "create", &own) {
        Ok(()) => {
            cluster.api.delete(&format!("{SLICES}/own"), None);
            None
        }
        Err(error) => error.contains("cannot create resource").then_some(()),
    });
    cluster.api.apply(RBAC);
    cluster.api.apply(POLICY);
    let other = slice("other", "node-2", "holdfast.dev");
    wait_for("the policy is in force", SOON, || {
        match cluster.write(OF_POD, "create", &other) {
            Ok(()) => cluster.api.delete(&format!("{SLICES}/other"), None),
            Err(error) => return error.contains("ValidatingAdmissionPolicy").then_some(()),
        }
        None
    });
    cluster.check_writes(OF_POD);
    cluster.refuses(OF_POD, "create", &slice("own", NODE, "gpu.example.com"));
    cluster.refuses(OF_NO_POD, "create", &slice("own", NODE, "holdfast.dev"));
    let credentials = pki::kubeconfig(&cluster.dir, OF_POD);
    let daemon = Daemon::launch(cluster, Path::new("/"), &credentials, CLAIMED);
    daemon.wait_until_registered(cluster);
    cluster.published(DEVICES);
    cluster.create_holder("by-account", &[0], LISTS);
    cluster.running("by-account");
    cluster.end("by-account");
    daemon.wait_until_released("by-account");
    cluster.api.delete(&pod, Some(0));
    say(format_args!("the policy limits the service account to the slices of its node"));
}
