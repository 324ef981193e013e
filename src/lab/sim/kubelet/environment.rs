//! The interface between the kubelet's flows and their environment: time, tasks, random choices,
//! plugin connections, files.
//!
//! The flows are written once. On [`super::sockets`] they speak gRPC over real sockets on tokio,
//! for the demo and for tests of the real daemon. On [`crate::lab::sim::memory`] everything is in
//! memory and a seed decides the order of events.

use super::core::{ListedDevice, Options};
use super::held::PodDevices;
use super::hook::{Hook, Verdict};
use super::pod::PodSpec;
use super::state::Shared;
use crate::domain::{ContainerEdits, DeviceId, ResourceName};
use futures_util::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The content of the checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::lab::sim) struct Snapshot {
    /// The devices that each container holds.
    pub(in crate::lab::sim) held: PodDevices,
    /// The healthy ids of every resource; after a restart only the names count.
    pub(in crate::lab::sim) healthy: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
}

/// A task that can be stopped from outside.
pub(in crate::lab::sim) trait Stop: fmt::Debug + Send + Sync {
    fn stop(&self);
    fn is_over(&self) -> bool;
}

/// The environment of one kubelet.
pub(in crate::lab::sim) trait Environment: fmt::Debug + Send + Sync {
    /// The time since the simulator was created.
    fn now(&self) -> Duration;
    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()>;
    fn spawn(&self, task: BoxFuture<'static, ()>) -> Box<dyn Stop>;
    /// Chooses a number below `count`: where Go walks a map, and where the kubelet waits for a
    /// random time.
    fn below(&self, count: usize) -> usize;
    /// A flow reaches a hook; `None` lets it continue at once.
    fn hook(&self, hook: Hook) -> Option<BoxFuture<'static, Verdict>>;
    /// Dials a plugin's socket, a path below the device-plugin directory, without a time limit.
    fn dial(&self, client: u64, socket: &str) -> BoxFuture<'static, Arc<dyn Connection>>;

    /// Creates the node's directories.
    fn prepare(&self) -> io::Result<()>;
    /// The pod-resources API answers from now on.
    fn serve_pod_resources(&self, shared: &Arc<Shared>, instance: u64) -> io::Result<()>;
    /// The sockets directly in the device-plugin directory, in the order of their removal.
    fn stale_sockets(&self) -> io::Result<Vec<String>>;
    fn remove_socket(&self, name: &str) -> BoxFuture<'static, io::Result<()>>;
    /// Creates `kubelet.sock`, which answers from now on.
    fn serve_registration(&self, shared: &Arc<Shared>, instance: u64) -> io::Result<()>;
    /// The kubelet dies: every connection is cut, nothing is unlinked.
    fn cut(&self);

    /// `None` where there is no checkpoint.
    fn read_checkpoint(&self) -> Result<Option<Snapshot>, String>;
    fn write_checkpoint(&self, snapshot: Snapshot) -> Result<(), String>;
    /// Creates the pod's cgroup.
    fn create_pod(&self, spec: &PodSpec) -> io::Result<()>;
    /// Creates the container's log folder, in that of the pod.
    fn create_logs(&self, spec: &PodSpec, container: &str) -> io::Result<()>;
    /// Removes the pod's cgroup: its processes have exited.
    fn remove_cgroup(&self, uid: &str) -> io::Result<()>;
    /// Removes the pod's log folder: its object was deleted.
    fn remove_logs(&self, spec: &PodSpec) -> io::Result<()>;
    /// Whether the container runtime finds a CDI device.
    fn resolves(&self, cdi_name: &str) -> bool;
}

/// The kubelet's end of a connection to a plugin. Errors are the kubelet's texts.
#[tonic::async_trait]
pub(in crate::lab::sim) trait Connection: fmt::Debug + Send + Sync {
    async fn options(&self) -> Result<Options, String>;
    async fn list_and_watch(&self) -> Result<Box<dyn Lists>, String>;
    async fn preferred(
        &self,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, String>;
    /// One Allocate for one container, without a deadline; `None` when the answer is empty.
    async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Option<ContainerEdits>, String>;
    async fn pre_start(&self, ids: &BTreeSet<DeviceId>) -> Result<(), String>;
    /// Fails the calls under way and ends the stream.
    fn close(&self);
    /// Whether the plugin is still connected.
    fn is_open(&self) -> bool;
}

/// A ListAndWatch stream.
#[tonic::async_trait]
pub(in crate::lab::sim) trait Lists: Send {
    /// The next list; `None` at the end, for any cause.
    async fn next(&mut self) -> Option<Vec<ListedDevice>>;
}

/// The error of a call on a closed connection, as grpc-go words it.
pub(in crate::lab::sim) const CLOSING: &str =
    "rpc error: code = Canceled desc = grpc: the client connection is closing";
