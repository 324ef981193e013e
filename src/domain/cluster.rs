//! How the daemon uses the Kubernetes API server.

use std::path::PathBuf;

/// Where the labels of this node come from, for `match.label`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeLabels {
    /// A file on this node, as this process sees it.
    File(PathBuf),
    /// The node's object in the API server.
    Api,
}

/// The file with the node's labels if the configuration names none: a volume, or an administrator's
/// file.
const LABELS: &str = "/etc/holdfast-node/labels";

impl Default for NodeLabels {
    fn default() -> Self {
        NodeLabels::File(LABELS.into())
    }
}

/// What is reported to the API server about the devices (`[cluster] events` and `node_condition`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reported {
    /// Events of the node and of the pods that hold devices.
    pub events: bool,
    /// The condition `HoldfastDevicesHealthy` of the node.
    pub condition: bool,
}

/// The credentials for the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ApiCredentials {
    /// The service account of the pod. Outside of a pod the kubelet's kubeconfig.
    #[default]
    Auto,
    /// A kubeconfig.
    Kubeconfig(PathBuf),
}
