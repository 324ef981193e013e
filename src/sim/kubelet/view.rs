//! What can be seen of the node and its kubelet at one moment.

use super::core::Capacity;
use super::event::{Event, EventKind, EventLog};
use super::pod::Pod;
use super::state::State;
use crate::domain::{DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A consistent look at everything.
#[derive(Debug)]
pub struct View<'a> {
    pub(super) state: &'a State,
    pub(super) now: Duration,
}

impl View<'_> {
    /// Whether the kubelet runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state.life.is_some()
    }

    /// Whether the first pods after the newest start are through.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.state.life.as_ref().is_some_and(|life| life.manager.sources_ready())
    }

    /// Capacity and allocatable of a resource as the node's status would tell them; 0 while the kubelet is down.
    #[must_use]
    pub fn capacity(&self, resource: &ResourceName) -> Capacity {
        self.state.life.as_ref().map(|life| life.manager.capacity(resource, self.now)).unwrap_or_default()
    }

    /// Every pod, in the order of creation.
    #[must_use]
    pub fn pods(&self) -> &[Pod] {
        &self.state.pods
    }

    /// One pod.
    #[must_use]
    pub fn pod(&self, uid: &str) -> Option<&Pod> {
        self.pods().iter().find(|pod| pod.spec.uid == uid)
    }

    /// What the kubelet has recorded for a container.
    #[must_use]
    pub fn devices(&self, pod_uid: &str, container: &str) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        let held = self.state.life.iter().flat_map(|life| life.manager.held().container(pod_uid, container));
        held.map(|(resource, held)| (resource.clone(), held.ids())).collect()
    }

    /// How many pods were rejected so far.
    #[must_use]
    pub fn rejections(&self) -> u64 {
        self.state.rejections
    }

    /// Where the real kubelet would have crashed first, if it would have.
    #[must_use]
    pub fn panicked(&self) -> Option<&str> {
        self.state.panicked.as_deref()
    }

    /// What happened so far.
    #[must_use]
    pub fn events(&self) -> &EventLog {
        &self.state.events
    }

    /// The newest event that fits.
    pub fn last(&self, fits: impl Fn(&EventKind) -> bool) -> Option<&Event> {
        self.state.events.iter().rev().find(|event| fits(&event.kind))
    }

    /// From the newest start of the kubelet to the first list of a resource.
    #[must_use]
    pub fn first_list(&self, resource: &ResourceName) -> Option<Duration> {
        self.state.events.since_start(|kind| matches!(kind, EventKind::Listed { .. }) && kind.resource() == Some(resource))
    }
}
