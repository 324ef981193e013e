//! The holders of devices, as the judge needs them.

use super::departures::IdsInUse;
use crate::domain::{AllocId, DeviceId, Grant, GrantedDevice, ResourceName};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The held ids, with the facts to keep them in a list, and the objects of their containers.
#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(super) ids: BTreeMap<ResourceName, BTreeMap<DeviceId, GrantedDevice>>,
    /// The objects of each grant, with its ids.
    pub(super) grants: Vec<IdsInUse>,
}

impl Held {
    pub(super) fn of(&self, resource: &ResourceName) -> Option<&BTreeMap<DeviceId, GrantedDevice>> {
        self.ids.get(resource)
    }
}

#[cfg(test)]
impl<const N: usize> From<[(ResourceName, BTreeMap<DeviceId, GrantedDevice>); N]> for Held {
    fn from(ids: [(ResourceName, BTreeMap<DeviceId, GrantedDevice>); N]) -> Self {
        Held { ids: ids.into(), grants: Vec::new() }
    }
}

/// The held ids of the live grants.
pub(crate) fn held<'a>(grants: impl Iterator<Item = &'a Grant>) -> Held {
    let mut held = Held::default();
    for grant in grants.filter(|grant| grant.is_live()) {
        let ids = held.ids.entry(grant.resource.clone()).or_default();
        ids.extend(grant.devices.iter().map(|device| (device.id.clone(), device.clone())));
        let ids = grant.devices.iter().map(|device| device.id.clone()).collect();
        held.grants.push(IdsInUse {
            resource: grant.resource.clone(),
            ids,
            objects: grant.objects(),
            is_held: true,
        });
    }
    held
}

/// The grants that hold a device, or shares of it.
pub(crate) fn holders(grants: &[Arc<Grant>], device: &DeviceId) -> Vec<AllocId> {
    let is_it = |id: &DeviceId| id == device || id.shared().as_ref() == Some(device);
    let holding = grants.iter().filter(|grant| grant.devices.iter().any(|held| is_it(&held.id)));
    holding.map(|grant| grant.alloc_id.clone()).collect()
}
