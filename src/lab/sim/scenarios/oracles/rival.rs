//! Effects of a foreign plugin of the resource: which containers and losses the oracles excuse.

use super::super::durable::Disk;
use super::super::hardware::gpu;
use super::{Oracles, holders_of};
use crate::domain::{DeviceId, Grant, ResourceName};
use crate::lab::sim::kubelet::{Holder, View};
use std::time::Duration;

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

    /// Whether the foreign plugin gave such an id to a container.
    pub(super) fn is_rival_answers(&self, fits: impl Fn(&DeviceId) -> bool) -> bool {
        self.rival_answers.has(&fits)
            || self.rival_containers.iter().any(|(_, _, ids)| ids.iter().any(&fits))
    }

    /// Checked when nothing has changed for seconds: the ledger has taken over the plugin's grants,
    /// so that its containers hold their devices.
    pub(in super::super) fn taken_over(&mut self, view: &View<'_>, disk: &Disk, now: Duration) {
        let mut holders = holders_of(view);
        holders.retain(|holder| self.is_of_rival(&gpu(), holder));
        for holder in &holders {
            // The kubelet may have lost its record before the daemon read it.
            let recorded = view.devices(&holder.pod_uid, &holder.container);
            let (Some(ids), true) = (holder.devices.get(&gpu()), recorded.contains_key(&gpu()))
            else {
                continue;
            };
            let holds = |id: &DeviceId| {
                disk.ledger(|ledger| {
                    let is_of =
                        |grant: &Grant| grant.pod().is_some_and(|pod| pod.uid == holder.pod_uid);
                    let resource = gpu();
                    ledger.holders(&resource, id).any(|grant| is_of(grant))
                })
            };
            if !ids.iter().all(holds) {
                let what = format!(
                    "{}/{} has {ids:?} from another plugin, and no grant",
                    holder.pod_uid, holder.container
                );
                return self.violated("O2", now, what);
            }
            self.taken_over += 1;
        }
    }

    pub(super) fn is_of_rival(&self, resource: &ResourceName, holder: &Holder) -> bool {
        if *resource != gpu() {
            return false;
        }
        let ids = holder.devices.get(&gpu()).cloned().unwrap_or_default();
        self.rival_containers.contains(&(holder.pod_uid.clone(), holder.container.clone(), ids))
    }
}
