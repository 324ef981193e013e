//! Who holds devices, by claims and by the device plugin.

use crate::domain::{DeviceId, DraName, Grant, ResourceName};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Who holds devices, as the ledger has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders {
    /// The devices of claims.
    pub claimed: BTreeSet<DraName>,
    /// The ids of containers that got them by the device plugin.
    pub held: BTreeSet<(ResourceName, DeviceId)>,
}

impl Holders {
    /// The holders of the live grants.
    #[must_use]
    pub fn of(grants: &[Arc<Grant>]) -> Self {
        let mut holders = Holders::default();
        for grant in grants.iter().filter(|grant| grant.is_live()) {
            match &grant.claim {
                Some(claim) => {
                    let names = claim.devices.iter().map(|device| &device.allocated.name);
                    holders.claimed.extend(names.cloned());
                }
                None => {
                    let ids = grant.devices.iter().map(|device| device.id.clone());
                    holders.held.extend(ids.map(|id| (grant.resource.clone(), id)));
                }
            }
        }
        holders
    }
}
