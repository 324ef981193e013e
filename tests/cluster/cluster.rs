//! The control plane with its node, which the tests of a process share.

use crate::api::{ALL_PODS, Api, CLAIMS, NODES, PODS, SLICES};
use crate::node::{self, NO_POLICY, NODE, Node};
use crate::objects::text_of;
use crate::plane::Plane;
use crate::{SOON, pki, sandbox, say, wait_for};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The classes that are shipped.
const CLASSES: &str = include_str!("../../packaging/kustomize/components/dra/classes.yaml");

const VENDOR_CLASSES: &str =
    include_str!("../../packaging/kustomize/components/dra-vendor-classes/classes.yaml");

#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) dir: PathBuf,
    pub(crate) api: Api,
    pub(crate) plane: Plane,
    pub(crate) node: Node,
    /// Daemons so far: each has directories of its own.
    pub(crate) daemons: usize,
}

impl Cluster {
    /// The control plane of this process, without pods and claims. It starts with the first test.
    pub(crate) fn lend(dir: &Path) -> MutexGuard<'static, Cluster> {
        static CLUSTER: LazyLock<Mutex<Cluster>> = LazyLock::new(|| {
            Mutex::new(Cluster::start(&sandbox::work_dir().expect("it runs inside")))
        });
        let _once = fs::create_dir(dir.join("passed"));
        // A test that failed leaves the cluster in some state, which `clear` ends.
        let mut cluster = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
        cluster.clear();
        cluster
    }

    fn start(dir: &Path) -> Self {
        sandbox::furnish(dir);
        node::furnish(dir);
        pki::make(dir);
        let (plane, api) = Plane::start(dir);
        let node = Node::start(dir);
        let mut cluster = Cluster { dir: dir.to_owned(), api, plane, node, daemons: 0 };
        wait_for("the node is ready", SOON, || cluster.is_ready().then_some(()));
        wait_for("pods may be created", SOON, || {
            cluster.api.get("/api/v1/namespaces/default/serviceaccounts/default")
        });
        cluster.api.apply(CLASSES);
        cluster.api.apply(VENDOR_CLASSES);
        cluster
    }

    /// Whether a feature gate of Kubernetes is off. A gate that the API server does not know any
    /// more is on.
    pub(crate) fn is_off(&self, gate: &str) -> bool {
        let name = format!("kubernetes_feature_enabled{{name=\"{gate}\",");
        let metrics = self.api.text("/metrics");
        metrics.lines().any(|line| line.starts_with(&name) && line.ends_with(" 0"))
    }

    /// As [`Cluster::is_off`]. It prints that the test is skipped.
    pub(crate) fn lacks(&self, gate: &str) -> bool {
        let is_off = self.is_off(gate);
        if is_off {
            say(format_args!("SKIPPED: the feature gate `{gate}` of Kubernetes is off"));
        }
        is_off
    }

    /// Restarts the API server, and waits until it is ready.
    pub(crate) fn restart_api_server(&mut self) {
        self.plane.restart_api_server(&self.dir);
        wait_for("the API server is ready", SOON, || {
            self.plane.check();
            self.api.is_ready().then_some(())
        });
    }

    /// Whether the scheduler may use the node.
    fn is_ready(&mut self) -> bool {
        self.plane.check();
        self.node.check();
        let Some(node) = self.api.get(&format!("{NODES}/{NODE}")) else { return false };
        let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_ready = |each: &Value| each["type"] == "Ready" && each["status"] == "True";
        conditions.iter().any(is_ready) && node["spec"]["taints"].is_null()
    }

    /// Ends what a former test left.
    fn clear(&mut self) {
        self.plane.api_server.signal(Signal::SIGCONT);
        if !self.node.is_up() {
            self.node.start_kubelet();
        }
        self.node.restart_with_policy(NO_POLICY);
        self.api.delete_rights();
        self.api.delete_controllers();
        for (path, grace) in [(ALL_PODS, Some(0)), (CLAIMS, None), (SLICES, None)] {
            for object in self.api.list(path) {
                let name = text_of(&object, "name");
                let collection = match object["metadata"]["namespace"].as_str() {
                    Some(namespace) if path == ALL_PODS => PODS.replace("default", namespace),
                    _ => path.to_owned(),
                };
                self.api.delete(&format!("{collection}/{name}"), grace);
            }
        }
        wait_for("no pod and no claim is left", SOON, || {
            let is_empty = |path| self.api.list(path).is_empty();
            (is_empty(ALL_PODS) && is_empty(CLAIMS)).then_some(())
        });
        wait_for("no process of a pod runs", SOON, || {
            node::pod_processes().is_empty().then_some(())
        });
        self.node.forget_devices();
        wait_for("the node is ready", SOON, || self.is_ready().then_some(()));
    }
}
