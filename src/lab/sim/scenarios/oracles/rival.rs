//! Effects of a foreign plugin of the resource: which containers and losses the oracles excuse.

use super::super::hardware::gpu;
use super::Oracles;
use crate::domain::{DeviceId, ResourceName};
use crate::lab::sim::kubelet::{Holder, View};

impl Oracles {
    /// Answers of the foreign plugin have no allocation id of ours.
    pub(super) fn match_rival_containers(&mut self, holders: &[Holder]) {
        for holder in holders.iter().filter(|holder| !holder.alloc_ids.contains_key(&gpu())) {
            let Some(ids) = holder.devices.get(&gpu()) else { continue };
            let container = (holder.pod_uid.clone(), holder.container.clone(), ids.clone());
            if !self.rival_containers.contains(&container) && self.rival_answers.take(ids) {
                self.rival_containers.insert(container);
            }
        }
    }

    /// Whether the foreign plugin silently made the kubelet stop or forget the resource.
    pub(super) fn is_taken_by_rival(&self, view: &View<'_>) -> bool {
        let endpoint = view.endpoint_state(&gpu());
        let silent = endpoint.streams > 0 && (endpoint.is_stopped || !endpoint.is_tracked);
        silent
            && self.rival_effects.as_ref().is_some_and(|period| period.contains(&self.disrupted_at))
    }

    /// Whether the foreign plugin gave such an id to a container. The ledger does not know it, and
    /// when the device disappears, nothing keeps it in the list.
    pub(super) fn is_rival_answers(&self, fits: impl Fn(&DeviceId) -> bool) -> bool {
        self.rival_answers.has(&fits)
            || self.rival_containers.iter().any(|(_, _, ids)| ids.iter().any(&fits))
    }

    pub(super) fn is_of_rival(&self, resource: &ResourceName, holder: &Holder) -> bool {
        if *resource != gpu() {
            return false;
        }
        let ids = holder.devices.get(&gpu()).cloned().unwrap_or_default();
        self.rival_containers.contains(&(holder.pod_uid.clone(), holder.container.clone(), ids))
    }
}
