//! Which devices are published: an id of a resource, or a device of whose capacity claims have
//! parts.

use super::super::names::{Family, device_name, pooled_name};
use super::Inputs;
use crate::domain::{
    DeviceId, DraName, Health, HeldBy, InSlice, Offered, Offering, Reason, ResourceName, Sharing,
};
use std::collections::BTreeMap;

impl Inputs<'_> {
    /// Who holds an id, which has this name in a slice. A container comes first: a claim of
    /// the same device has another share.
    fn held_by(
        &self,
        resource: &ResourceName,
        id: &DeviceId,
        name: &str,
        family: Family,
    ) -> HeldBy {
        if self.held.contains(&(resource.clone(), id.clone())) {
            return HeldBy::Container;
        }
        let name = DraName { pool: self.node.pool(family), device: name.to_owned() };
        if self.claimed.contains(&name) { HeldBy::Claim } else { HeldBy::Nothing }
    }

    /// Whether a claim has this share under another name than this one.
    fn is_held_otherwise(&self, resource: &ResourceName, id: &DeviceId, name: &str) -> bool {
        // Most nodes have no shares, and no copy of the names is needed for them.
        !self.shares.is_empty()
            && self
                .shares
                .get(&(resource.clone(), id.clone()))
                .is_some_and(|known| known.device != name)
    }
}

/// One device of one resource, or one share of a device.
#[derive(Clone)]
pub(super) struct Candidate<'a> {
    pub(super) offering: &'a Offering,
    pub(super) id: DeviceId,
    pub(super) offered: &'a Offered,
    pub(super) family: Family,
    pub(super) place: InSlice,
    /// How many of its shares are held otherwise than under its name.
    pub(super) taken: u32,
    /// Whether claims hold it, all of it, and under another name.
    pub(super) is_held_otherwise: bool,
}

/// Every device to publish, by its name. Two resources have the same id while a device moves from
/// one to the other, and a name must not be twice in a pool.
pub(super) fn candidates<'a>(inputs: &Inputs<'a>) -> BTreeMap<String, Candidate<'a>> {
    let mut found: BTreeMap<String, Candidate<'a>> = BTreeMap::new();
    // The better one has the smaller rank.
    let rank = |it: &Candidate<'_>| {
        let is_ending = it.place == InSlice::Ending;
        (is_ending, !it.offered.health.is_healthy(), it.offering.spec.is_orphan())
    };
    let counts = counts(inputs);
    for (resource, offering) in inputs.resources {
        for (id, offered) in &offering.devices {
            let Some(family) = Family::of(offered.device.class) else { continue };
            let name = match offering.spec.sharing {
                Sharing::Pool(_) => pooled_name(resource, id),
                Sharing::Exclusive | Sharing::Replicas(_) => device_name(id),
            };
            let held = inputs.held_by(resource, id, &name, family);
            let place = offering.spec.api.in_slice(held);
            let (taken, is_held_otherwise) = (0, inputs.is_held_otherwise(resource, id, &name));
            let id = id.clone();
            let one = Candidate { offering, id, offered, family, place, taken, is_held_otherwise };
            let divided = one.divided(&counts);
            let of_shares = match divided {
                None => Some((name, one)),
                // A claim has it from the time when claims had shares by their names.
                Some(_) if held == HeldBy::Claim => {
                    Some((name, Candidate { place: InSlice::Ending, ..one }))
                }
                Some(_) => None,
            };
            for (name, candidate) in of_shares.into_iter().chain(divided) {
                if candidate.place != InSlice::Absent
                    && found.get(&name).is_none_or(|known| rank(&candidate) < rank(known))
                {
                    found.insert(name, candidate);
                }
            }
        }
    }
    found
}

impl<'a> Candidate<'a> {
    /// The device of this share, if claims ask for parts of its capacity.
    fn divided(&self, counts: &Counts) -> Option<(String, Candidate<'a>)> {
        let id = self.offering.spec.divided(&self.id)?;
        let Sharing::Replicas(shares) = self.offering.spec.sharing else { return None };
        let key = (self.offering.spec.name.clone(), id);
        let Count { by_number, by_name, selected } = counts.get(&key).copied().unwrap_or_default();
        let (taken, id) = (by_number + by_name, key.1);
        let is_taken = taken >= shares;
        let place = if selected < shares {
            // The resource does not select the device any more, and claims have parts of it still.
            InSlice::Ending
        } else if is_taken && by_number > 0 {
            InSlice::Held
        } else {
            InSlice::Offered
        };
        let is_held_otherwise = is_taken && by_number == 0;
        Some((device_name(&id), Candidate { id, place, taken, is_held_otherwise, ..self.clone() }))
    }
}

/// The shares of one device.
#[derive(Default, Clone, Copy)]
struct Count {
    /// How many containers hold.
    by_number: u32,
    /// How many claims hold under the names of shares.
    by_name: u32,
    /// How many the list of a resource with parts has, without those of a device that the resource
    /// does not select any more.
    selected: u32,
}

type Counts = BTreeMap<(ResourceName, DeviceId), Count>;

fn counts(inputs: &Inputs<'_>) -> Counts {
    let mut counts = Counts::new();
    for (resource, id) in inputs.held {
        if let Some(whole) = id.shared() {
            counts.entry((resource.clone(), whole)).or_default().by_number += 1;
        }
    }
    for ((resource, id), name) in inputs.shares {
        if let Some(whole) = id.shared().filter(|whole| name.device != device_name(whole)) {
            counts.entry((resource.clone(), whole)).or_default().by_name += 1;
        }
    }
    for (resource, offering) in inputs.resources.iter().filter(|(_, it)| it.spec.capacity) {
        for (id, offered) in &offering.devices {
            let is_selected = offered.health != Health::Unhealthy(Reason::Deselected);
            if let Some(whole) = offering.spec.divided(id).filter(|_| is_selected) {
                counts.entry((resource.clone(), whole)).or_default().selected += 1;
            }
        }
    }
    counts
}
