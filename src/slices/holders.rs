//! Who holds devices, by claims and by the device plugin.

use crate::domain::{AllocId, DeviceId, DraName, Grant, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Who holds devices, as the ledger has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders {
    /// The devices of claims.
    pub claimed: BTreeSet<DraName>,
    /// The shares of devices that claims hold, each with the name under which a claim has it.
    pub shares: BTreeMap<(ResourceName, DeviceId), DraName>,
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
                    let shares = claim
                        .devices
                        .iter()
                        .filter(|device| device.id.shared().is_some() && !device.allocated.admin);
                    holders.shares.extend(shares.map(|device| {
                        let id = (grant.resource.clone(), device.id.clone());
                        (id, device.allocated.name.clone())
                    }));
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

/// Devices that claims have lost to containers, each with the grant of the container.
pub type Lost = BTreeMap<DraName, AllocId>;

/// Those whose containers still have them.
#[must_use]
pub fn still_lost(lost: &Lost, grants: &[Arc<Grant>]) -> Lost {
    if lost.is_empty() {
        return Lost::new();
    }
    let live = grants.iter().filter(|grant| grant.is_live() && grant.claim.is_none());
    let live: BTreeSet<&AllocId> = live.map(|grant| &grant.alloc_id).collect();
    let kept = lost.iter().filter(|(_, container)| live.contains(container));
    kept.map(|(name, container)| (name.clone(), container.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ContainerEdits, GrantState, Timestamp};

    #[test]
    fn a_device_is_lost_for_as_long_as_the_container_has_it() {
        let grant = |id: &str, state: GrantState| {
            Arc::new(Grant {
                alloc_id: AllocId::new(id),
                resource: "a.b/c".parse().unwrap(),
                devices: Vec::new(),
                edits: ContainerEdits::default(),
                claim: None,
                boot_id: "boot".into(),
                kubelet: None,
                granted_at: Timestamp(1),
                version: "1".into(),
                state,
            })
        };
        let released = GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(2),
            released_by: "pod_gone".into(),
            other_pods: Vec::new(),
        };
        let name = |device: &str| DraName { pool: "n1/gpu".into(), device: device.into() };
        let lost: Lost = [
            (name("a"), AllocId::new("live")),
            (name("b"), AllocId::new("ended")),
            (name("c"), AllocId::new("forgotten")),
        ]
        .into();
        let grants = [grant("live", GrantState::Granted), grant("ended", released)];
        assert_eq!(still_lost(&lost, &grants), [(name("a"), AllocId::new("live"))].into());
        assert_eq!(still_lost(&lost, &[]), Lost::new());
    }
}
