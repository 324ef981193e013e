//! The kubelet's errors with its exact texts: tests and plugins match on them.

use crate::domain::{DeviceId, ResourceName};
use tonic::{Code, Status};

/// Why a container gets no devices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocateError {
    /// The container requests another number than it holds.
    #[error("pod {pod:?} container {container:?} changed request for resource {resource:?} from {held} to {required}", resource = resource.as_str())]
    RequestChanged {
        /// The pod's UID.
        pod: String,
        /// The container.
        container: String,
        /// The resource.
        resource: ResourceName,
        /// Devices that it holds.
        held: usize,
        /// Devices that it requests.
        required: usize,
    },
    /// No list was ever received, and the checkpoint does not know the resource.
    #[error("cannot allocate unregistered device {0}")]
    Unregistered(ResourceName),
    /// No healthy device, as after a restart before the first list.
    #[error("no healthy devices present; cannot allocate unhealthy devices {0}")]
    NoHealthyDevice(ResourceName),
    /// The container holds a device that is not healthy now.
    #[error(
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices {0}"
    )]
    NoLongerHealthy(ResourceName),
    /// Too few free healthy devices.
    #[error(
        "requested number of devices unavailable for {resource}. Requested: {requested}, Available: {available}"
    )]
    Unavailable {
        /// The resource.
        resource: ResourceName,
        /// Devices that are needed in addition to the reused ones.
        requested: usize,
        /// Devices that are available.
        available: usize,
    },
    /// The sets changed while GetPreferredAllocation was under way.
    #[error(
        "unexpectedly allocated less resources than required. Requested: {required}, Got: {got}"
    )]
    Fewer {
        /// Devices that were requested.
        required: usize,
        /// Devices that were found.
        got: usize,
    },
    /// The resource has a list but no endpoint when GetPreferredAllocation is due.
    #[error("endpoint not found in cache for a registered resource: {0}")]
    EndpointNotFound(ResourceName),
    /// The resource has a list but no endpoint when Allocate is due.
    #[error("unknown Device Plugin {0}")]
    UnknownPlugin(ResourceName),
    /// The endpoint's stream has ended.
    #[error("endpoint {0} has been stopped")]
    EndpointStopped(ResourceName),
    /// A container is about to start with devices that are not recorded.
    #[error(
        "no devices found allocated in local cache for pod {pod}, container {container}, resource {resource}"
    )]
    NothingHeld {
        /// The pod's UID.
        pod: String,
        /// The container.
        container: String,
        /// The resource.
        resource: ResourceName,
    },
    /// The pod's devices were allocated, but a later handler of its admission finds too little CPU.
    #[error("Node didn't have enough resource: cpu")]
    NoCpu,
    /// `GetPreferredAllocation` failed.
    #[error("device plugin GetPreferredAllocation rpc failed with err: {0}")]
    Preferred(String),
    /// `Allocate` failed.
    #[error("{0}")]
    Rpc(String),
    /// `Allocate` was answered without any container.
    #[error("no containers return in allocation response")]
    NoContainers,
    /// The checkpoint could not be written.
    #[error("failed to write checkpoint file \"kubelet_internal_checkpoint\": {0}")]
    Checkpoint(String),
}

/// The real kubelet would have crashed here: it used a device that its list no longer has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{site}: device `{device}` of `{resource}` is not in the plugin's list")]
pub struct NilDereference {
    /// The place in the kubelet.
    pub site: &'static str,
    /// The resource.
    pub resource: ResourceName,
    /// The missing id.
    pub device: DeviceId,
}

/// A failed call as the kubelet's log and the pod's status print it.
#[must_use]
pub fn rpc_error(status: &Status) -> String {
    // grpc-go spells this one code with a single `l`.
    let code = match status.code() {
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    };
    format!("rpc error: code = {code} desc = {}", status.message())
}
