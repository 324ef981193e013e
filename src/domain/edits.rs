//! The content of an Allocate response for one container, as a pure value.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A device node in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditDevice {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Any of `r`, `w` and `m` (mknod).
    pub permissions: String,
}

/// A bind mount in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditMount {
    /// Path on the host.
    pub host: String,
    /// Path in the container.
    pub container: String,
    /// Whether the mount is read-only in the container.
    pub read_only: bool,
}

/// All edits of one container for one resource (`ContainerAllocateResponse` of the API).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerEdits {
    /// Environment variables.
    pub envs: BTreeMap<String, String>,
    /// Bind mounts.
    pub mounts: Vec<EditMount>,
    /// Device nodes.
    pub devices: Vec<EditDevice>,
    /// Annotations of the container, passed to the container runtime.
    pub annotations: BTreeMap<String, String>,
    /// Qualified CDI names, `vendor/class=name`.
    pub cdi_devices: Vec<String>,
}

/// The capabilities of one version of the kubelet's API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiCapabilities {
    /// The version, as shown in error messages.
    pub api: &'static str,
    /// Whether a response can carry CDI names.
    pub has_cdi: bool,
    /// Whether its kubelets call before a container starts.
    pub has_pre_start: bool,
}
