//! The validated configuration, as the rest of the daemon uses it.

use super::labels::ComparedLabels;
use super::node::Node;
use crate::domain::{
    ApiCredentials, Durability, HealthPolicy, MigStrategy, NodeLabels, NvidiaRoots, NvmlLibrary,
    Policy, Reported, ResourceSpec, Retention, TlsFiles,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The path of the configuration without `--config`.
pub const DEFAULT_PATH: &str = "/etc/holdfast/config.toml";

/// The socket of the pod-resources API below the kubelet's `--root-dir`.
pub(crate) const POD_RESOURCES: &str = "pod-resources/kubelet.sock";

/// The four root directories of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// The node's root: `sys`, `proc`, `dev`, `run/udev` and `var/log/pods` are below it.
    pub host: PathBuf,
    /// The kubelet's directory.
    pub kubelet: PathBuf,
    /// The ledger's directory.
    pub state: PathBuf,
    /// Sockets and other files that do not outlive the boot.
    pub run: PathBuf,
}

/// The validated configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// When a grant counts as recorded.
    pub durability: Durability,
    /// How much of the history is kept.
    pub retention: Retention,
    /// The ledger's decisions that depend on the operator's preference.
    pub policy: Policy,
    /// The address of `/metrics`, `/healthz` and `/readyz`; `None` serves none of them.
    pub listen: Option<SocketAddr>,
    /// The file with the token that readers of `/metrics` and `/` must send. `None` lets every peer
    /// read.
    pub token_file: Option<PathBuf>,
    /// The files of TLS at that address; `None` without TLS.
    pub tls: Option<TlsFiles>,
    /// Whether the API server decides about the tokens that readers of `/metrics` and `/` send.
    pub authorize: bool,
    /// The pod-resources socket, if it is not the one in the kubelet's directory.
    pub pod_resources_socket: Option<PathBuf>,
    /// The directory of CDI files, for resources that use them.
    pub cdi_directory: PathBuf,
    /// The directory of device-info files, for resources with the contract `sriov`.
    pub device_info_directory: PathBuf,
    /// The directory of the node's labels for Node Feature Discovery; `None` writes none.
    pub features_directory: Option<PathBuf>,
    /// The NVML library for facts that NVIDIA's driver files leave open.
    pub nvml: NvmlLibrary,
    /// Where NVIDIA's driver is on the host.
    pub nvidia_roots: NvidiaRoots,
    /// How GPUs are offered without configured resources where MIG splits some of them.
    pub mig_strategy: MigStrategy,
    /// The policy of device health.
    pub health: HealthPolicy,
    /// Where the labels of this node come from, for sections that match labels.
    pub node_labels: NodeLabels,
    /// The credentials for the API server, if it is used.
    pub credentials: ApiCredentials,
    /// What is reported to the API server about the devices.
    pub reported: Reported,
    /// Whether resources may be given to claims (`[dra] enabled`).
    pub dra: bool,
    /// Whether slices have the attributes of vendors' drivers too (`[dra] vendor_attributes`).
    pub vendor_attributes: bool,
    /// Whether containers of claims get files about their devices (`[dra] device_metadata`).
    pub device_metadata: bool,
    /// Whether the status of claims is written to the API server (`[dra] claim_status`).
    pub claim_status: bool,
    /// The resources in the order of the files: the first that selects a device gets it. If empty,
    /// known hardware is offered under its usual names.
    pub resources: Vec<Arc<ResourceSpec>>,
    /// The files that were read.
    pub files: Vec<PathBuf>,
    /// The file that `--config` names; `None` is the default one, which may be missing.
    pub requested_file: Option<PathBuf>,
    /// The node that the files were read for.
    pub node: Node,
    /// The labels of this node that sections have compared.
    pub compared_labels: ComparedLabels,
    /// CRC-32 of the texts of the files.
    pub hash: u32,
}

impl Config {
    /// The main file.
    #[must_use]
    pub fn source(&self) -> &Path {
        self.requested_file.as_deref().unwrap_or(Path::new(DEFAULT_PATH))
    }

    /// The socket of the pod-resources API. `kubelet` is the kubelet's directory.
    #[must_use]
    pub fn pod_resources(&self, kubelet: &Path) -> PathBuf {
        let usual = || kubelet.join(POD_RESOURCES);
        self.pod_resources_socket.clone().unwrap_or_else(usual)
    }

    /// The kubelet's `--root-dir`. It has the sockets of DRA drivers and the kubelet's record of
    /// claims, as it has the socket of the pod-resources API. `device-plugins` does not follow it.
    #[must_use]
    pub fn kubelet_root(&self, kubelet: &Path) -> PathBuf {
        let named = self.pod_resources_socket.as_deref();
        let root = named
            .filter(|socket| socket.ends_with(POD_RESOURCES))
            .and_then(|socket| socket.ancestors().nth(Path::new(POD_RESOURCES).iter().count()));
        root.unwrap_or(kubelet).to_owned()
    }

    /// Whether sections compare labels of the API server that no answer has contained yet.
    #[must_use]
    pub fn compares_unknown_labels(&self) -> bool {
        self.follows_api_labels()
            && self.compared_labels.file().is_some()
            && self.compared_labels.values().is_none()
    }

    /// Whether the API server is the source of this node's labels, since the start of the daemon.
    #[must_use]
    pub fn follows_api_labels(&self) -> bool {
        *self.node.label_source(&self.node_labels) == NodeLabels::Api
    }
}

#[cfg(test)]
mod tests {
    use super::super::merge::Examined;
    use super::*;

    #[test]
    fn the_socket_of_pod_resources_shows_the_root_of_the_kubelet() {
        let root = |socket: Option<&str>| {
            let usual = Examined::alone(b"", Path::new("f"), &Node::default()).config().unwrap();
            let config = Config { pod_resources_socket: socket.map(Into::into), ..usual };
            config.kubelet_root(Path::new("/var/lib/kubelet"))
        };
        for (socket, expected) in [
            (None, "/var/lib/kubelet"),
            (Some("/data/kubelet/pod-resources/kubelet.sock"), "/data/kubelet"),
            (Some("/run/pods.sock"), "/var/lib/kubelet"),
        ] {
            assert_eq!(root(socket), Path::new(expected), "{socket:?}");
        }
    }
}
