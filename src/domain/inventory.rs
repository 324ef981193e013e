//! The inventory: the devices published to the kubelet, by resource.

use super::device::Device;
use super::device_id::DeviceId;
use super::health::Health;
use super::resource::ResourceSpec;
use super::resource_name::ResourceName;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One id of the kubelet's list: a device, or one share of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offered {
    /// The device behind the id.
    pub device: Arc<Device>,
    /// The health in the list.
    pub health: Health,
}

/// One resource and its offered ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offering {
    /// Its configuration.
    pub spec: Arc<ResourceSpec>,
    /// Every id in the kubelet's list, including the unhealthy ones.
    pub devices: BTreeMap<DeviceId, Offered>,
}

/// A snapshot of everything that is offered. It is published as a whole and never changed in place.
///
/// Unchanged lists are shared with the previous snapshot and with every stream that has sent them:
/// a list of ten thousand devices takes megabytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The resources. A resource without devices is offered with an empty list.
    pub resources: BTreeMap<ResourceName, Arc<Offering>>,
}

impl Inventory {
    /// The next snapshot. An unchanged list is reused, and so is the whole snapshot if no list
    /// changed.
    #[must_use]
    pub fn followed_by(self: &Arc<Self>, resources: BTreeMap<ResourceName, Offering>) -> Arc<Self> {
        let share = |(name, offering)| match self.resources.get(&name) {
            Some(before) if **before == offering => (name, Arc::clone(before)),
            _ => (name, Arc::new(offering)),
        };
        let next = Inventory { resources: resources.into_iter().map(share).collect() };
        if next == **self { Arc::clone(self) } else { Arc::new(next) }
    }
}

impl Offering {
    /// The ids that the kubelet may give to containers.
    #[must_use]
    pub fn healthy(&self) -> BTreeSet<DeviceId> {
        let healthy = self.devices.iter().filter(|(_, offered)| offered.health.is_healthy());
        healthy.map(|(id, _)| id.clone()).collect()
    }
}
