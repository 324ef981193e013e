//! The holders of devices, as the judge needs them.

use crate::domain::{AllocId, Device, DeviceId, Grant, GrantedDevice, Object, ResourceName, share};
use std::collections::{BTreeMap, BTreeSet};
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

    /// The ids that containers hold through the device plugin.
    pub(super) fn of_plugin(&self, resource: &ResourceName) -> BTreeSet<&DeviceId> {
        self.by(resource, false)
    }

    /// The ids that claims hold.
    pub(super) fn of_claims(&self, resource: &ResourceName) -> BTreeSet<&DeviceId> {
        self.by(resource, true)
    }

    fn by(&self, resource: &ResourceName, claims: bool) -> BTreeSet<&DeviceId> {
        let is_it = |grant: &&IdsInUse| grant.resource == *resource && grant.is_of_claim == claims;
        self.grants.iter().filter(is_it).flat_map(|grant| &grant.ids).collect()
    }
}

#[cfg(test)]
impl<const N: usize> From<[(ResourceName, BTreeMap<DeviceId, GrantedDevice>); N]> for Held {
    fn from(ids: [(ResourceName, BTreeMap<DeviceId, GrantedDevice>); N]) -> Self {
        Held { ids: ids.into(), grants: Vec::new() }
    }
}

/// Ids that are held, or that may be in use because they are about to leave their list. With the
/// objects that are held with them.
#[derive(Debug)]
pub(super) struct IdsInUse {
    pub(super) resource: ResourceName,
    pub(super) ids: Vec<DeviceId>,
    pub(super) objects: Vec<Object>,
    /// Whether they are held, or have a pending hook. For the others an Allocate may be in flight.
    pub(super) is_held: bool,
    /// Whether a claim holds them.
    pub(super) is_of_claim: bool,
}

impl IdsInUse {
    pub(super) fn of(
        resource: &ResourceName,
        id: &DeviceId,
        device: &Device,
        is_held: bool,
    ) -> Self {
        IdsInUse {
            resource: resource.clone(),
            ids: vec![id.clone()],
            objects: device.objects(),
            is_held,
            is_of_claim: false,
        }
    }

    /// Whether an id may be granted at the same time.
    pub(super) fn may_coexist_with(&self, resource: &ResourceName, id: &DeviceId) -> bool {
        // Within one resource an id that leaves blocks nothing: the ledger refuses the later one of
        // two Allocates.
        let is_same_kind = |other: &DeviceId| other.shared().is_some() == id.shared().is_some();
        let may_coexist = |other: &DeviceId| {
            if self.is_held {
                share((&self.resource, other), (resource, id))
            } else {
                is_same_kind(other)
            }
        };
        self.resource == *resource && self.ids.iter().any(may_coexist)
    }
}

/// The held ids of the live grants.
pub(crate) fn held<'a>(grants: impl Iterator<Item = &'a Grant>) -> Held {
    let mut held = Held::default();
    for grant in grants.filter(|grant| grant.is_live()) {
        let ids = held.ids.entry(grant.resource.clone()).or_default();
        ids.extend(grant.held_devices().map(|device| (device.id.clone(), device.clone())));
        let ids = grant.held_devices().map(|device| device.id.clone()).collect();
        held.grants.push(IdsInUse {
            resource: grant.resource.clone(),
            ids,
            objects: grant.objects(),
            is_held: true,
            is_of_claim: grant.claim.is_some(),
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
