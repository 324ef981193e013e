//! Which device of the node each result of an allocation is, and for a part of a device's capacity
//! which share.
//!
//! The scheduler gives parts of a device's capacity, and knows no shares. Each part takes one share
//! of the device in the ledger, which records which one. So a device has at most as many holders as
//! shares, even if the scheduler gives more parts.
//!
//! The share is chosen from the last published snapshot of the ledger. Two claims may choose the
//! same one at the same time: the ledger refuses the second, and its next try chooses another.

use super::{ClaimDevices, DecidedClaim, DecidedHold};
use crate::domain::{
    Allocated, AllocatedClaim, DeviceClass, DeviceId, DraName, Grant, Inventory, Offered, Offering,
    Reason, is_driver_wide, overlap,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A device of the node, in a list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) offering: &'a Offering,
    pub(super) id: &'a DeviceId,
    pub(super) offered: &'a Offered,
}

impl Found<'_> {
    /// A device may be in two lists while it moves from one resource to another.
    fn rank(self) -> (bool, bool) {
        (self.offering.spec.api.serves_claims(), self.offered.health.is_healthy())
    }
}

/// The wanted devices among those of the node. A device whose capacity claims divide is one of its
/// shares.
pub(super) fn find<'a>(
    inventory: &'a Inventory,
    is_wanted: impl Fn(&DraName) -> bool,
    name_of: &dyn Fn(&DeviceId, DeviceClass) -> DraName,
) -> BTreeMap<DraName, Found<'a>> {
    let mut by_name: BTreeMap<DraName, Found<'a>> = BTreeMap::new();
    for offering in inventory.resources.values() {
        for (id, offered) in &offering.devices {
            let whole = offering.spec.divided(id);
            let found = Found { offering, id, offered };
            for id in whole.iter().chain([id]) {
                let name = name_of(id, offered.device.class);
                if !is_wanted(&name) {
                    continue;
                }
                let best = by_name.entry(name).or_insert(found);
                if found.rank() > best.rank() {
                    *best = found;
                }
            }
        }
    }
    by_name
}

/// What the claim gets for each result, or `None` if the node has no such device. `allocated` is
/// sorted.
pub(super) fn allocations<'a>(
    claim: &AllocatedClaim,
    allocated: &[&Allocated],
    inventory: &'a Inventory,
    grants: &[Arc<Grant>],
    name_of: &dyn Fn(&DeviceId, DeviceClass) -> DraName,
) -> Vec<Option<Found<'a>>> {
    let is_allocated = |name: &DraName| allocated.iter().any(|of| of.name == *name);
    let by_name = find(inventory, is_allocated, name_of);
    let mut shares: BTreeMap<&DraName, Vec<Found<'a>>> = BTreeMap::new();
    for offering in inventory.resources.values() {
        for (id, offered) in &offering.devices {
            let Some(whole) = id.shared() else { continue };
            let name = name_of(&whole, offered.device.class);
            // A claim may have got a part just before the key `capacity` was removed.
            let is_part = |of: &&&Allocated| {
                of.name == name && (of.share_id.is_some() || offering.spec.divided(id).is_some())
            };
            if let Some(of) = allocated.iter().find(is_part) {
                shares.entry(&of.name).or_default().push(Found { offering, id, offered });
            }
        }
    }
    let held = Held::of(&claim.claim.uid, grants);
    let mut found: Vec<Option<Found<'a>>> = vec![None; allocated.len()];
    let mut chosen: Vec<&DeviceId> = Vec::new();
    // What the claim holds already stays: it may be restored, or a torn write may have left a part
    // of it. A result without a share must not get that of another one.
    for is_own in [true, false] {
        for (of, found) in allocated.iter().zip(&mut found).filter(|(_, found)| found.is_none()) {
            let shares = shares.get(&of.name).into_iter().flatten();
            let shares = shares.filter(|share| !is_own || held.has(share.id, of)).rev();
            *found = shares.max_by_key(|share| held.rank(**share, &chosen)).copied();
            chosen.extend(found.iter().map(|found| found.id));
        }
    }
    let by_name = |of: &&Allocated| by_name.get(&of.name).copied();
    found.into_iter().zip(allocated).map(|(share, of)| share.or_else(|| by_name(of))).collect()
}

/// Whether the content of a recorded device is right, although no configured resource has the
/// device. `former` is the device as a removed resource still lists it.
pub(super) fn is_unchanged(
    recorded: &DecidedClaim,
    of: &Allocated,
    former: Option<Found<'_>>,
    devices: &dyn ClaimDevices,
) -> bool {
    let device_of = |hold: &DecidedHold| {
        let claimed = hold.hold.devices.iter().find(|device| device.allocated.is_for(of))?;
        let granted = hold.devices.iter().find(|device| device.id == claimed.id)?;
        let nodes = claimed.edits.devices.iter().map(|node| node.host.clone());
        let own: Vec<String> = nodes.filter(|node| !is_driver_wide(node)).collect();
        Some((own, granted.objects.clone()))
    };
    let Some((own, objects)) = recorded.holds.iter().find_map(device_of) else { return false };
    match former.map(|Found { offered, .. }| offered) {
        Some(offered) if offered.health.reason().is_some_and(Reason::is_of_presence) => false,
        Some(offered) => {
            let is_its = |path: &String| {
                offered
                    .device
                    .nodes
                    .iter()
                    .any(|node| node.host == *path || node.lasting_path() == path)
            };
            own.iter().all(is_its)
        }
        None => {
            let leads_to_it = |node: &String| overlap(&devices.objects_of_node(node), &objects);
            !own.is_empty() && own.iter().all(leads_to_it)
        }
    }
}

/// Who holds shares.
struct Held<'a> {
    /// What the claim itself holds, with what it is allocated for.
    own: BTreeMap<&'a DeviceId, &'a Allocated>,
    /// What others hold, and whether that is a container.
    others: BTreeMap<&'a DeviceId, bool>,
}

impl<'a> Held<'a> {
    fn of(uid: &str, grants: &'a [Arc<Grant>]) -> Self {
        let mut held = Held { own: BTreeMap::new(), others: BTreeMap::new() };
        for grant in grants.iter().filter(|grant| grant.is_live()) {
            match grant.claim.as_deref().filter(|hold| hold.claim.uid == uid) {
                Some(hold) => {
                    held.own.extend(hold.devices.iter().map(|it| (&it.id, &it.allocated)));
                }
                None => {
                    let by_number = grant.claim.is_none();
                    held.others.extend(grant.held_devices().map(|it| (&it.id, by_number)));
                }
            }
        }
        held
    }

    /// Whether the claim holds the share for this result.
    fn has(&self, share: &DeviceId, of: &Allocated) -> bool {
        self.own.get(share).is_some_and(|known| known.is_for(of))
    }

    /// The order of shares; the greatest is the best. If every share has another holder, the claim
    /// waits for a claim rather than for a container.
    fn rank(&self, share: Found<'_>, chosen: &[&DeviceId]) -> [bool; 5] {
        let by = self.others.get(share.id);
        [
            share.offering.spec.api.serves_claims(),
            !chosen.contains(&share.id),
            by.is_none(),
            by != Some(&true),
            share.offered.health.is_healthy(),
        ]
    }
}
