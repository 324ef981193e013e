//! What a container gets: the pure form of an Allocate response.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A device node put into a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditDevice {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Any of `r`, `w` and `m` (mknod).
    pub permissions: String,
}

/// A bind mount put into a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditMount {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Whether the container may not write to it.
    pub read_only: bool,
}

/// Everything one container gets for one resource (`ContainerAllocateResponse` of the API).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerEdits {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Bind mounts.
    pub mounts: Vec<EditMount>,
    /// Device nodes.
    pub devices: Vec<EditDevice>,
    /// Annotations of the container, handed to the container runtime.
    pub annotations: BTreeMap<String, String>,
    /// Qualified CDI names, `vendor/class=name`.
    pub cdi_devices: Vec<String>,
}

/// What an answer in one version of the kubelet's API has room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wire {
    /// The version, as an error names it.
    pub api: &'static str,
    /// Whether CDI names can be told.
    pub has_cdi: bool,
    /// Whether its kubelets call before a container starts.
    pub has_pre_start: bool,
}
