//! The inventory: what the kubelet is told, resource by resource.

use super::device::{Device, DeviceId};
use super::health::Health;
use super::resource::{ResourceName, ResourceSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// One id of the kubelet's list: a device, or one share of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offered {
    /// The device behind the id.
    pub device: Arc<Device>,
    /// What the kubelet is told.
    pub health: Health,
}

/// One resource with the ids that it offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offering {
    /// Its configuration.
    pub spec: Arc<ResourceSpec>,
    /// Every id that the kubelet is told, the unhealthy ones too.
    pub devices: BTreeMap<DeviceId, Offered>,
}

/// A snapshot of everything that is offered. Published whole; never changed in place.
///
/// What is as it was is shared with the one before, and with every stream that has told it: ten thousand devices are a list of megabytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The resources; one without devices is offered with an empty list.
    pub resources: BTreeMap<ResourceName, Arc<Offering>>,
}

impl Inventory {
    /// The snapshot after this one. A list that is as it was is the one that it was, and so is the whole.
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
    /// The ids that the kubelet may give away.
    #[must_use]
    pub fn healthy(&self) -> BTreeSet<DeviceId> {
        let healthy = self.devices.iter().filter(|(_, offered)| offered.health.is_healthy());
        healthy.map(|(id, _)| id.clone()).collect()
    }
}
