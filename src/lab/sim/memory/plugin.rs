//! The interface of a simulated daemon: its service, and its requests to the kubelet.

use super::super::kubelet::core::{ListedDevice, Options};
use crate::domain::{ContainerEdits, DeviceId};
use futures_util::stream::BoxStream;
use std::collections::BTreeSet;
use std::fmt;
use tonic::Status;

/// The connection of a call: the kubelet dials a socket again with every Register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A ListAndWatch stream: complete lists, one after the other. It is first polled when it is
/// opened. As tonic does, the plugin's side drops the stream as soon as it knows that the reader is
/// absent. A guard inside the stream notices that. When the stream ends on its own, the kubelet
/// sees the end.
pub type ListStream = BoxStream<'static, Vec<ListedDevice>>;

/// The service behind one socket: `v1beta1.DevicePlugin`.
///
/// Every call runs as a separate task in the process that bound the socket. The task is dropped at
/// its present wait when the process dies or the kubelet stops waiting for it.
#[tonic::async_trait]
pub trait Plugin: Send + Sync {
    /// `GetDevicePluginOptions`. The Register that led to it is still open.
    async fn options(&self) -> Result<Options, Status>;

    /// `ListAndWatch`.
    async fn list_and_watch(&self, connection: ConnectionId) -> Result<ListStream, Status>;

    /// `GetPreferredAllocation`, for one container. The ids come in any order.
    async fn preferred(
        &self,
        available: Vec<DeviceId>,
        must_include: Vec<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, Status>;

    /// `Allocate`, for one container. The ids come in any order. `None` is an answer without any
    /// container.
    async fn allocate(&self, ids: Vec<DeviceId>) -> Result<Option<ContainerEdits>, Status>;

    /// `PreStartContainer`. The ids come in any order.
    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status>;

    /// A connection ended after GetDevicePluginOptions and before ListAndWatch.
    fn hung_up(&self) {}
}

/// `v1beta1.Registration/Register`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterRequest {
    /// The API's version, `v1beta1`.
    pub version: String,
    /// The resource.
    pub resource: String,
    /// The socket, relative to the device-plugin directory.
    pub endpoint: String,
    /// Read by kubelets before 1.25 only.
    pub options: Option<Options>,
}
