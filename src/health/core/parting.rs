//! What parts with a list: a resource that the plan has no more, a device that another resource has now.
//!
//! A resource that is removed lives on as it was, without selecting anything, while one of its ids is in its list: held, owed a
//! hook, or about to leave (I3). Then it has an empty list for a moment, which is the last that the kubelet is told of it.
//!
//! A device that moves is in two lists for a while, and healthy in one of them at most: the new one has it as held by another
//! until nobody holds it under the former id, and no Allocate for that can be under way.

use super::{Held, Judge};
use crate::domain::{Device, DeviceId, Health, Offering, Reason, ResourceName, ResourceSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long after an id became unhealthy no Allocate for it can be under way that began before: the kubelet learns of it within a
/// second, and an answer takes two seconds at most.
pub(super) const APART_FOR: Duration = Duration::from_secs(3);
/// How long a resource has an empty list before it ends. The kubelet gets a list within a second.
pub(super) const LAST_LIST_FOR: Duration = Duration::from_secs(2);

/// An id that is in a list and not selected any more, and that may be in use.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) resource: ResourceName,
    pub(super) id: DeviceId,
    pub(super) device: Arc<Device>,
}

impl Judge {
    /// The resources to judge: those of the plan, and behind them (so many are before them) those that part.
    pub(super) fn judged(&self) -> (Vec<Arc<ResourceSpec>>, usize) {
        let mut specs: Vec<Arc<ResourceSpec>> = self.specs.iter().filter(|spec| !spec.is_orphan()).cloned().collect();
        let planned = specs.len();
        let mut names: BTreeSet<ResourceName> = specs.iter().map(|spec| spec.name.clone()).collect();
        let listed = self.inventory.resources.values().map(|offering| &offering.spec);
        // As it was in the list, before what is known of it when it never was.
        for spec in listed.chain(self.specs.iter()) {
            if names.insert(spec.name.clone()) {
                specs.push(Arc::clone(spec));
            }
        }
        (specs, planned)
    }

    /// When the last list of a resource has been there for long enough.
    pub(super) fn next_end(&self) -> Option<Duration> {
        self.emptied.values().min().map(|since| *since + LAST_LIST_FOR)
    }

    /// Devices whose resource has no check any more do not wait for one.
    pub(super) fn forget_checks(&mut self) {
        let is_checked = |name: &ResourceName| self.specs.iter().any(|spec| spec.name == *name && spec.hooks.check.is_some());
        let former = self.inventory.resources.iter().filter(|(name, _)| !is_checked(name));
        let devices: BTreeSet<DeviceId> =
            former.flat_map(|(_, offering)| offering.devices.values().map(|offered| offered.device.id.clone())).collect();
        self.cases.forget_checks(&devices);
    }
}

/// Has nobody offer what may be in use under another id.
pub(super) fn keep_apart(resources: &mut BTreeMap<ResourceName, Offering>, claims: &[Claim], held: &Held) {
    if claims.is_empty() {
        return;
    }
    let mut by_device: BTreeMap<DeviceId, Vec<&Claim>> = BTreeMap::new();
    let mut by_node: BTreeMap<&str, BTreeSet<&ResourceName>> = BTreeMap::new();
    for claim in claims {
        by_device.entry(claim.id.shared().unwrap_or_else(|| claim.device.id.clone())).or_default().push(claim);
        for node in claim.device.own_nodes() {
            by_node.entry(node).or_default().insert(&claim.resource);
        }
    }
    for (name, offering) in resources {
        let held = held.get(name);
        for (id, offered) in &mut offering.devices {
            // Shares of one device are there to be held beside each other; as is what a pool has beside its other ids.
            let is_other = |claim: &&Claim| claim.resource != *name || claim.id.shared().is_some() != id.shared().is_some();
            let is_in_use = || {
                by_device.get(&offered.device.id).is_some_and(|claims| claims.iter().any(is_other))
                    || offered.device.own_nodes().filter_map(|node| by_node.get(node)).flatten().any(|by| *by != name)
            };
            let is_free = !held.is_some_and(|held| held.contains_key(id));
            if is_free && offered.health.is_healthy() && is_in_use() {
                offered.health = Health::Unhealthy(Reason::HeldAsOther);
            }
        }
    }
}
