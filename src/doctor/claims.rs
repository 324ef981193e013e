//! The facts about the driver for claims (Dynamic Resource Allocation).

use std::path::PathBuf;

/// What the driver for claims needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Dra {
    /// The directories of its sockets that cannot be used, each with the reason.
    pub unusable: Vec<(PathBuf, String)>,
    /// The API server, or why it cannot be used. `None` if that is unknown.
    pub api: Option<Result<DraApi, String>>,
}

/// The API server, with the daemon's credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DraApi {
    /// The name of this node in the configuration.
    pub node: String,
    /// Whether the API server has a node of this name.
    pub has_node: Option<bool>,
    /// The node that the credentials are for: of a kubelet, or of the pod whose token is used.
    pub node_of_credentials: Option<String>,
    /// The served versions of `resource.k8s.io`.
    pub versions: Option<Vec<String>>,
    /// The requests that the API server refuses.
    pub refused: Vec<RefusedRequest>,
}

/// A request that the API server refuses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RefusedRequest {
    /// The request: `create resourceslices`.
    pub request: String,
    /// The server's text; empty if it only reports that a right is missing.
    pub why: String,
    /// Whether an admission policy denies it. The right is there then.
    pub is_of_policy: bool,
}
