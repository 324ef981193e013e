//! What a daemon under simulation offers, and what it sends to the kubelet.

use super::super::kubelet::core::{ListedDevice, Options};
use crate::domain::{ContainerEdits, DeviceId};
use futures_util::stream::BoxStream;
use std::collections::BTreeSet;
use std::fmt;
use tonic::Status;

/// The connection that a call came over: the kubelet dials a socket anew with every Register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId(pub u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A ListAndWatch stream: complete lists, one after the other. It is polled when it is called, and dropped as soon as
/// the plugin's side knows that nobody reads it any more, as tonic does with a stream: a guard inside it learns of its
/// end. When it ends by itself, the kubelet sees the end.
pub type ListStream = BoxStream<'static, Vec<ListedDevice>>;

/// The service behind one socket: `v1beta1.DevicePlugin`.
///
/// Every call runs as a task of its own in the process that bound the socket, and is dropped where it stands when the
/// process dies or the kubelet no longer waits for it.
#[tonic::async_trait]
pub trait Plugin: Send + Sync {
    /// `GetDevicePluginOptions`. The Register that led to it is still open.
    async fn options(&self) -> Result<Options, Status>;

    /// `ListAndWatch`.
    async fn list_and_watch(&self, connection: ConnectionId) -> Result<ListStream, Status>;

    /// `GetPreferredAllocation`, for one container. The ids come in any order.
    async fn preferred(&self, available: Vec<DeviceId>, must_include: Vec<DeviceId>, size: usize) -> Result<BTreeSet<DeviceId>, Status>;

    /// `Allocate`, for one container. The ids come in any order. `None` is an answer without any container.
    async fn allocate(&self, ids: Vec<DeviceId>) -> Result<Option<ContainerEdits>, Status>;

    /// `PreStartContainer`. The ids come in any order.
    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status>;

    /// A connection on which the options were asked for ended, before the lists were.
    fn hung_up(&self) {}
}

/// `v1beta1.Registration/Register`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisterRequest {
    /// The API's version, `v1beta1`.
    pub version: String,
    /// The resource.
    pub resource: String,
    /// The socket, below the device-plugin directory.
    pub endpoint: String,
    /// Looked at by kubelets before 1.25 only.
    pub options: Option<Options>,
}
