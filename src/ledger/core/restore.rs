//! Restores claims that the ledger lacks from the kubelet's own record (`dra_manager_state`), which
//! has the claim, its pods, and our answer.
//!
//! The record has neither the allocation nor what the CDI devices contain. So a restored grant has
//! no allocation: the next Prepare is the same allocation if it has the same devices, and completes
//! the grant. The record does not show which device was allocated for an administrator either, so
//! until then each one counts as held.

use super::Ledger;
use super::claim_end::nameless;
use super::rebuild::REBUILT;
use crate::domain::{
    AllocId, Allocated, ClaimHold, ClaimedDevice, ContainerEdits, DraName, Grant, GrantState,
    GrantedDevice, KubeletClaim, KubeletClaims, NamedDevice, PreparedDevice, ResourceName,
    Timestamp,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The claims that could be restored, and those that could not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restored {
    /// The grants that the ledger lacked.
    pub grants: Vec<Grant>,
    /// Devices in the kubelet's record that this node does not know.
    pub unknown: Vec<DraName>,
}

/// Restores the devices of claims that no live grant of the same claim has. `named` finds a device
/// by its own name ([`PreparedDevice::own`]) in this boot, and `new_id` makes an id.
///
/// The kubelet's record may still have a claim whose release was recorded just before this process
/// started. Then the kubelet unprepares it again, or the record soon lacks it (`never_prepared`).
#[must_use]
pub fn restore_claims(
    kept: &KubeletClaims,
    ledger: &Ledger,
    named: impl Fn(&DraName) -> Option<NamedDevice>,
    mut new_id: impl FnMut() -> AllocId,
    boot_id: &str,
    now: Timestamp,
) -> Restored {
    let mut restored = Restored::default();
    for KubeletClaim { claim, pods, devices } in kept.claims.values() {
        let live: Vec<&ClaimHold> =
            ledger.of_claim(&claim.uid).filter_map(|grant| grant.claim.as_deref()).collect();
        let mut lost: BTreeMap<ResourceName, Vec<(GrantedDevice, ClaimedDevice)>> = BTreeMap::new();
        for device in devices {
            let allocated = allocated(device);
            if live.iter().any(|hold| hold.has(&allocated)) {
                continue;
            }
            let Some(NamedDevice { resource, device: granted, edits }) =
                named(&device.own(&claim.uid))
            else {
                restored.unknown.push(device.name.clone());
                continue;
            };
            let (id, cdi_devices) = (granted.id.clone(), device.cdi_devices.clone());
            let claimed =
                ClaimedDevice { allocated, id, cdi_devices, edits, metadata: String::new() };
            lost.entry(resource).or_default().push((granted, claimed));
        }
        for (resource, devices) in lost {
            let (mut devices, mut claimed): (Vec<_>, Vec<_>) = devices.into_iter().unzip();
            claimed.sort_by(|one: &ClaimedDevice, other| one.allocated.cmp(&other.allocated));
            let mut seen = BTreeSet::new();
            devices.retain(|device: &GrantedDevice| seen.insert(device.id.clone()));
            // That of a live grant may be a later one: the kubelet keeps the devices of a former
            // allocation in its record.
            let allocation = String::new();
            let hold = ClaimHold { claim: claim.clone(), allocation, devices: claimed };
            restored.grants.push(Grant {
                alloc_id: new_id(),
                resource,
                devices,
                edits: ContainerEdits::default(),
                claim: Some(Arc::new(hold)),
                boot_id: boot_id.to_owned(),
                kubelet: None,
                granted_at: now,
                version: REBUILT.into(),
                state: GrantState::Prepared {
                    pods: pods.iter().map(|uid| nameless(uid)).collect(),
                    prepared_at: now,
                    unprepared_at: None,
                },
            });
        }
    }
    restored
}

fn allocated(device: &PreparedDevice) -> Allocated {
    let (request, name) = (device.request.clone(), device.name.clone());
    Allocated { request, name, share_id: device.share_id.clone(), admin: false }
}
