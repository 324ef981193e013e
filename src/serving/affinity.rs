//! The devices that the current container was just given, so that its next devices are near them:
//! for example a GPU and the network adapter that fills its memory, under one switch.
//!
//! The kubelet allocates the resources of a container one after the other, in any order, and names
//! no pod. A request is treated as another one of the same container while
//!
//! - the last grant is no older than [`WINDOW`], and
//! - no grant of the same resource was made since that container's first one: a container has one
//!   request for each resource.
//!
//! This may be wrong: a pod with one of the resources, right before a pod with the other. Then a
//! device is chosen near one that is not the pod's, and no request fails. The choice is only a
//! preference among devices that all satisfy the request.

use crate::domain::{Device, ResourceName};
use crate::host;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a grant attracts the next one. The kubelet requests a container's next resource within
/// a millisecond of an answer. This leaves time for a busy node, and for another plugin that
/// answers in between.
const WINDOW: Duration = Duration::from_millis(200);

/// The grants of the container that the kubelet is allocating for, as far as can be known.
#[derive(Debug, Default)]
pub(super) struct RecentGrants {
    granted: Vec<(ResourceName, Vec<Arc<Device>>)>,
    /// When the last of them was made, since the boot.
    at: Duration,
}

impl RecentGrants {
    /// Records an answered Allocate.
    pub(super) fn granted(
        &mut self,
        resource: &ResourceName,
        devices: Vec<Arc<Device>>,
        now: Duration,
    ) {
        if !self.is_of_one_container(resource, now) {
            self.granted.clear();
        }
        self.granted.push((resource.clone(), devices));
        self.at = now;
    }

    /// The devices that a request for this resource should be near to.
    pub(super) fn neighbours(&self, resource: &ResourceName, now: Duration) -> Vec<Arc<Device>> {
        let granted = self.granted.iter().filter(|_| self.is_of_one_container(resource, now));
        granted.flat_map(|(_, devices)| devices).cloned().collect()
    }

    fn is_of_one_container(&self, resource: &ResourceName, now: Duration) -> bool {
        now.saturating_sub(self.at) <= WINDOW
            && self.granted.iter().all(|(granted, _)| granted != resource)
    }
}

/// The latest grants over all resources and registrations, so that the next devices can be near
/// them. It outlives the serving actor.
#[derive(Debug, Clone, Default)]
pub struct Affinity(Arc<Mutex<RecentGrants>>);

impl Affinity {
    // Every change is a single step, so a panic elsewhere cannot leave it half done.
    pub(super) fn granted(&self, resource: &ResourceName, devices: Vec<Arc<Device>>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).granted(
            resource,
            devices,
            host::now().boot,
        );
    }

    pub(super) fn neighbours(&self, resource: &ResourceName) -> Vec<Arc<Device>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).neighbours(resource, host::now().boot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::testing::device;

    fn name(text: &str) -> ResourceName {
        format!("example.com/{text}").parse().unwrap()
    }

    fn at(ms: u64) -> Duration {
        Duration::from_secs(100) + Duration::from_millis(ms)
    }

    fn neighbours(recent: &RecentGrants, resource: &str, ms: u64) -> String {
        recent
            .neighbours(&name(resource), at(ms))
            .iter()
            .map(|device| device.id.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn grant(recent: &mut RecentGrants, resource: &str, id: &str, ms: u64) {
        recent.granted(&name(resource), vec![Arc::new(device("0000:18:00.0", id))], at(ms));
    }

    #[test]
    fn a_grant_attracts_the_next_request_for_any_other_resource() {
        let mut recent = RecentGrants::default();
        assert_eq!(neighbours(&recent, "nic", 0), "", "no grant yet");
        grant(&mut recent, "gpu", "gpu0", 0);
        assert_eq!(
            (neighbours(&recent, "nic", 1), neighbours(&recent, "gpu", 1)),
            ("gpu0".into(), String::new())
        );
        grant(&mut recent, "nic", "nic0", 150);
        assert_eq!(
            neighbours(&recent, "disk", 300),
            "gpu0 nic0",
            "a third one, however long the three take together"
        );
    }

    #[test]
    fn a_repeated_resource_begins_the_next_container() {
        let mut recent = RecentGrants::default();
        grant(&mut recent, "gpu", "gpu0", 0);
        grant(&mut recent, "nic", "nic0", 1);
        assert_eq!(
            (neighbours(&recent, "nic", 2), neighbours(&recent, "gpu", 2)),
            (String::new(), String::new())
        );
        grant(&mut recent, "nic", "nic1", 3);
        assert_eq!(
            (neighbours(&recent, "gpu", 4), neighbours(&recent, "nic", 4)),
            ("nic1".into(), String::new())
        );
    }

    #[test]
    fn an_old_grant_is_of_another_container() {
        let mut recent = RecentGrants::default();
        grant(&mut recent, "gpu", "gpu0", 0);
        assert_eq!(
            (neighbours(&recent, "nic", 200), neighbours(&recent, "nic", 201)),
            ("gpu0".into(), String::new())
        );
        grant(&mut recent, "nic", "nic0", 201);
        assert_eq!(neighbours(&recent, "disk", 202), "nic0");
    }
}
