//! Inputs and outputs of the device manager.

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

/// A plugin's answer to `GetDevicePluginOptions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The plugin wants `GetPreferredAllocation` calls.
    pub preferred_allocation: bool,
    /// The plugin wants `PreStartContainer` before every container start.
    pub pre_start: bool,
}

/// The plugin behind a resource. `C` is the connection; after a restart there is none until the
/// plugin registers.
#[derive(Debug, Clone)]
pub struct Endpoint<C> {
    /// The connection; `None` for an endpoint known from the checkpoint only.
    pub client: Option<C>,
    /// Its options; `None` for an endpoint known from the checkpoint only.
    pub options: Option<Options>,
    /// The time when it stopped; every call to it fails from then on.
    pub stopped_at: Option<Duration>,
}

/// Capacity and allocatable of a resource, as in the node's status.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Capacity {
    /// Every device.
    pub capacity: usize,
    /// The healthy ones, held or not.
    pub allocatable: usize,
}

/// The changes that a list made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Devices that are healthy now.
    pub healthy: usize,
    /// Devices that are not healthy now.
    pub unhealthy: usize,
    /// Ids that are held or reserved and that the list no longer has.
    pub vanished: BTreeSet<DeviceId>,
}

/// The kubelet's call to a plugin at the start of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreStart<C> {
    /// No call: the plugin did not request it, or has not registered since a restart.
    Skip,
    /// `PreStartContainer` with these ids.
    Call(C, BTreeSet<DeviceId>),
}

/// The next step of an allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do: no call is made.
    Nothing,
    /// Call `GetPreferredAllocation` if the plugin offers it, then continue with
    /// [`super::DeviceManager::choose`].
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
    /// The ids that are taken after the preferred ones: first from the first set, then from the
    /// second.
    pub(super) rest: [BTreeSet<DeviceId>; 2],
    /// Ids that the container requests in all.
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
