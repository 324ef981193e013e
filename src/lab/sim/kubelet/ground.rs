//! What the kubelet's flows stand on: time, tasks, chance, connections to plugins, and the node's files.
//!
//! The flows are written once. On [`super::sockets`] they speak gRPC over real sockets on tokio, for the demo and for
//! tests of the real daemon. On [`crate::lab::sim::memory`] everything is in memory and a seed decides what happens when.

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

/// What the checkpoint says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::lab::sim) struct Snapshot {
    /// Who holds what.
    pub(in crate::lab::sim) held: PodDevices,
    /// The healthy ids of every resource; after a restart only the names count.
    pub(in crate::lab::sim) healthy: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
}

/// A task that can be ended from outside.
pub(in crate::lab::sim) trait Stop: fmt::Debug + Send + Sync {
    fn stop(&self);
    fn is_over(&self) -> bool;
}

/// The outside of one kubelet.
pub(in crate::lab::sim) trait Ground: fmt::Debug + Send + Sync {
    /// Since the simulator was made.
    fn now(&self) -> Duration;
    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()>;
    fn spawn(&self, task: BoxFuture<'static, ()>) -> Box<dyn Stop>;
    /// Chooses one of `count`: where Go walks a map, and where the kubelet waits for a random time.
    fn below(&self, count: usize) -> usize;
    /// A flow comes to a hook; `None` lets it go on at once.
    fn hook(&self, hook: Hook) -> Option<BoxFuture<'static, Verdict>>;
    /// Dials a plugin's socket, a path below the device-plugin directory, for as long as it takes.
    fn dial(&self, client: u64, socket: &str) -> BoxFuture<'static, Arc<dyn Connection>>;

    /// Makes the node's directories.
    fn prepare(&self) -> io::Result<()>;
    /// The pod-resources API answers from now on.
    fn serve_pod_resources(&self, shared: &Arc<Shared>, life: u64) -> io::Result<()>;
    /// The sockets directly in the device-plugin directory, in the order in which they are removed.
    fn stale_sockets(&self) -> io::Result<Vec<String>>;
    fn remove_socket(&self, name: &str) -> BoxFuture<'static, io::Result<()>>;
    /// `kubelet.sock` is made and answers from now on.
    fn serve_registration(&self, shared: &Arc<Shared>, life: u64) -> io::Result<()>;
    /// The kubelet dies: every connection is cut, nothing is unlinked.
    fn cut(&self);

    /// `None` where there is no checkpoint.
    fn read_checkpoint(&self) -> Result<Option<Snapshot>, String>;
    fn write_checkpoint(&self, snapshot: Snapshot) -> Result<(), String>;
    /// The pod's cgroup appears.
    fn create_pod(&self, spec: &PodSpec) -> io::Result<()>;
    /// The container's log folder appears.
    fn create_container(&self, spec: &PodSpec, container: &str) -> io::Result<()>;
    /// The pod's processes are gone.
    fn remove_cgroup(&self, uid: &str) -> io::Result<()>;
    /// The pod's object is gone.
    fn remove_logs(&self, spec: &PodSpec) -> io::Result<()>;
    /// Whether the container runtime finds a CDI device.
    fn resolves(&self, cdi_name: &str) -> bool;
}

/// The kubelet's end of a connection to a plugin. Errors are the kubelet's texts of them.
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
    /// Calls under way fail, its stream ends.
    fn close(&self);
    /// Whether the plugin is still there.
    fn is_open(&self) -> bool;
}

/// A ListAndWatch stream.
#[tonic::async_trait]
pub(in crate::lab::sim) trait Lists: Send {
    /// The next list; `None` at the end, whatever ended it.
    async fn next(&mut self) -> Option<Vec<ListedDevice>>;
}

/// What a call on a closed connection fails with, in grpc-go's words.
pub(in crate::lab::sim) const CLOSING: &str = "rpc error: code = Canceled desc = grpc: the client connection is closing";
