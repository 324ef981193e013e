//! What goes into the device manager and what comes out of it.

use crate::domain::{DeviceId, ResourceName};
use std::collections::BTreeSet;
use std::time::Duration;

/// One device of a list, as the plugin sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedDevice {
    /// Its id.
    pub id: DeviceId,
    /// Whether its health was exactly `Healthy`.
    pub healthy: bool,
    /// Its NUMA nodes; none where it has no topology.
    pub numa_nodes: Vec<i64>,
}

/// What a plugin answered to `GetDevicePluginOptions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// It wants to be asked which devices it prefers.
    pub preferred_allocation: bool,
    /// It wants a call before every container start.
    pub pre_start: bool,
}

/// The plugin behind a resource. `C` is the connection; after a restart there is none until it registers.
#[derive(Debug, Clone)]
pub struct Endpoint<C> {
    /// The connection; `None` for an endpoint known from the checkpoint only.
    pub client: Option<C>,
    /// Its options; `None` for an endpoint known from the checkpoint only.
    pub options: Option<Options>,
    /// When it stopped; every call to it fails from then on.
    pub stopped_at: Option<Duration>,
}

/// Capacity and allocatable of a resource, as the node's status tells them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capacity {
    /// Every device.
    pub capacity: usize,
    /// The healthy ones, held or not.
    pub allocatable: usize,
}

/// What a list changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// How many are healthy now.
    pub healthy: usize,
    /// How many are not.
    pub unhealthy: usize,
    /// Ids that a container holds, or is just given, and that the list no longer has.
    pub vanished: BTreeSet<DeviceId>,
}

/// What the kubelet does before it calls a plugin at the start of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreStart<C> {
    /// No call: the plugin did not ask for it, or nothing is known of it since a restart.
    Skip,
    /// `PreStartContainer` with these ids.
    Call(C, BTreeSet<DeviceId>),
}

/// The next step of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do: no call is made.
    Nothing,
    /// Ask the plugin for its preference if it offers that, then go on with [`super::DeviceManager::choose`].
    Choose(Choice),
    /// Call `Allocate` with these ids.
    Allocate(BTreeSet<DeviceId>),
}

/// An allocation that waits for the plugin's preference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub(super) resource: ResourceName,
    pub(super) taken: BTreeSet<DeviceId>,
    pub(super) available: BTreeSet<DeviceId>,
    /// What is taken after the preferred ones: first from the one, then from the other.
    pub(super) rest: [BTreeSet<DeviceId>; 2],
    /// How many ids the container asks for in all.
    pub required: usize,
}

impl Choice {
    /// The ids that the plugin may choose from.
    #[must_use]
    pub fn candidates(&self) -> BTreeSet<DeviceId> {
        self.available.union(&self.taken).cloned().collect()
    }

    /// The ids that the container gets in any case.
    #[must_use]
    pub fn must_include(&self) -> &BTreeSet<DeviceId> {
        &self.taken
    }
}
