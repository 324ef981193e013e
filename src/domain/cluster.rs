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

/// The credentials for the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ApiCredentials {
    /// The service account of the pod. Outside of a pod the kubelet's kubeconfig.
    #[default]
    Auto,
    /// A kubeconfig.
    Kubeconfig(PathBuf),
}
