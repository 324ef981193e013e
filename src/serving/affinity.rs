//! What a container was just given, so that what it asks for next can be near to it: a GPU, and the adapter that is to fill
//! its memory, under one switch. Pure.
//!
//! The kubelet allocates the resources of a container one after the other, in any order, and names no pod. What it asks for
//! is taken for another request of the same container while
//!
//! - the last grant is no older than [`WINDOW`], and
//! - nothing of the same resource was granted since that container began: a container has one request of each resource.
//!
//! Where that is wrong — a pod with one of the resources, right before a pod with the other — a device is chosen beside one
//! that is nobody's, and no request fails: the choice is only a preference, among devices that would all do.

use crate::domain::{Device, ResourceName};
use std::sync::Arc;
use std::time::Duration;

/// How long a grant attracts. The kubelet asks for a container's next resource within a millisecond of an answer; this
/// leaves room for a busy node, and for another plugin that answers in between.
const WINDOW: Duration = Duration::from_millis(200);

/// What was granted to the container that the kubelet is at, as far as can be told.
#[derive(Debug, Default)]
pub(super) struct Recent {
    granted: Vec<(ResourceName, Vec<Arc<Device>>)>,
    /// When the last of it was, since the boot.
    at: Duration,
}

impl Recent {
    /// Takes note of an answered Allocate.
    pub(super) fn granted(&mut self, resource: &ResourceName, devices: Vec<Arc<Device>>, now: Duration) {
        if !self.is_of_one_container(resource, now) {
            self.granted.clear();
        }
        self.granted.push((resource.clone(), devices));
        self.at = now;
    }

    /// What a request of a resource should be near to.
    pub(super) fn beside(&self, resource: &ResourceName, now: Duration) -> Vec<Arc<Device>> {
        let granted = self.granted.iter().filter(|_| self.is_of_one_container(resource, now));
        granted.flat_map(|(_, devices)| devices).cloned().collect()
    }

    fn is_of_one_container(&self, resource: &ResourceName, now: Duration) -> bool {
        now.saturating_sub(self.at) <= WINDOW && self.granted.iter().all(|(granted, _)| granted != resource)
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

    fn beside(recent: &Recent, resource: &str, ms: u64) -> String {
        recent.beside(&name(resource), at(ms)).iter().map(|device| device.id.as_str()).collect::<Vec<_>>().join(" ")
    }

    fn grant(recent: &mut Recent, resource: &str, id: &str, ms: u64) {
        recent.granted(&name(resource), vec![Arc::new(device("0000:18:00.0", id))], at(ms));
    }

    #[test]
    fn what_was_just_granted_attracts_what_is_asked_for_next_of_any_other_resource() {
        let mut recent = Recent::default();
        assert_eq!(beside(&recent, "nic", 0), "", "nothing was granted");
        grant(&mut recent, "gpu", "gpu0", 0);
        assert_eq!((beside(&recent, "nic", 1), beside(&recent, "gpu", 1)), ("gpu0".into(), String::new()));
        grant(&mut recent, "nic", "nic0", 150);
        assert_eq!(beside(&recent, "disk", 300), "gpu0 nic0", "a third one, however long the three take together");
    }

    #[test]
    fn the_next_container_begins_with_the_first_resource_that_comes_again() {
        let mut recent = Recent::default();
        grant(&mut recent, "gpu", "gpu0", 0);
        grant(&mut recent, "nic", "nic0", 1);
        assert_eq!((beside(&recent, "nic", 2), beside(&recent, "gpu", 2)), (String::new(), String::new()));
        grant(&mut recent, "nic", "nic1", 3);
        assert_eq!((beside(&recent, "gpu", 4), beside(&recent, "nic", 4)), ("nic1".into(), String::new()));
    }

    #[test]
    fn what_was_granted_long_ago_is_somebody_elses() {
        let mut recent = Recent::default();
        grant(&mut recent, "gpu", "gpu0", 0);
        assert_eq!((beside(&recent, "nic", 200), beside(&recent, "nic", 201)), ("gpu0".into(), String::new()));
        grant(&mut recent, "nic", "nic0", 201);
        assert_eq!(beside(&recent, "disk", 202), "nic0");
    }
}
