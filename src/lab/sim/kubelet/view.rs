//! A consistent view of the node and its kubelet at one time.

use super::core::Capacity;
use super::event::{Event, EventKind, EventLog};
use super::hook::Hook;
use super::instance::Instance;
use super::interleaving::Interleaving;
use super::pod::Pod;
use super::state::State;
use super::status::Readings;
use crate::domain::{AllocId, DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A running container with devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container.
    pub container: String,
    /// The ids that it was started with, by resource.
    pub devices: BTreeMap<ResourceName, BTreeSet<DeviceId>>,
    /// Holdfast's annotation that the container itself got: that of one resource, where it has
    /// several.
    pub alloc_id: Option<AllocId>,
    /// Holdfast's annotations by resource.
    pub alloc_ids: BTreeMap<ResourceName, AllocId>,
    /// Whether its pod was deleted by force: the kubelet does not know it.
    pub is_orphan: bool,
}

/// The kubelet's state of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndpointState {
    /// The client that the kubelet believes to be connected, by its number: its end will be
    /// noticed.
    pub tracked: Option<u64>,
    /// The client that Allocate calls go to.
    pub serving: Option<u64>,
    /// Its socket, relative to the device-plugin directory.
    pub socket: Option<String>,
    /// Whether the endpoint is stopped or missing: every Allocate fails.
    pub is_stopped: bool,
    /// Whether the serving client is known to be connected.
    pub is_tracked: bool,
    /// Whether its stream is open.
    pub is_streaming: bool,
    /// Streams that feed the list.
    pub streams: usize,
    /// The healthy ids.
    pub healthy: BTreeSet<DeviceId>,
}

/// A consistent view of the whole state.
#[derive(Debug)]
pub struct View<'a> {
    pub(super) state: &'a State,
    pub(super) now: Duration,
}

impl View<'_> {
    /// Whether the kubelet runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state.instance.is_some()
    }

    /// Whether the first batch of pods after the newest start is complete.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.state.instance.as_ref().is_some_and(|instance| instance.manager.sources_ready())
    }

    /// Capacity and allocatable of a resource as in the node's status; 0 while the kubelet is down.
    #[must_use]
    pub fn capacity(&self, resource: &ResourceName) -> Capacity {
        self.state
            .instance
            .as_ref()
            .map(|instance| instance.manager.capacity(resource, self.now))
            .unwrap_or_default()
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

    /// The devices that the kubelet has recorded for a container.
    #[must_use]
    pub fn devices(
        &self,
        pod_uid: &str,
        container: &str,
    ) -> BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        let held = self
            .state
            .instance
            .iter()
            .flat_map(|instance| instance.manager.held().container(pod_uid, container));
        held.map(|(resource, held)| (resource.clone(), held.ids())).collect()
    }

    /// Whether the kubelet has recorded this answer of Holdfast in its memory.
    #[must_use]
    pub fn has_recorded(&self, answer: &AllocId) -> bool {
        let instance = self.state.instance.iter();
        let mut held = instance.flat_map(|instance| instance.manager.held().iter());
        held.any(|(.., held)| held.alloc_id().as_ref() == Some(answer))
    }

    /// Pods that were rejected so far.
    #[must_use]
    pub fn rejections(&self) -> u64 {
        self.state.rejections.values().sum()
    }

    /// The first place where the real kubelet would have crashed, if any.
    #[must_use]
    pub fn panicked(&self) -> Option<&str> {
        self.state.panicked.as_deref()
    }

    /// Every running container with devices, including those of pods that were deleted by force.
    #[must_use]
    pub fn holders(&self) -> Vec<Holder> {
        let pods = self.state.pods.iter().chain(self.state.orphans.values());
        let containers = pods.flat_map(|pod| {
            pod.containers.iter().map(move |(name, container)| (pod, name, container))
        });
        let running = containers
            .filter(|(_, _, container)| container.runs(self.now) && !container.devices.is_empty());
        let holder = |(pod, name, container): (&Pod, &String, &super::pod::Container)| Holder {
            pod_uid: pod.spec.uid.clone(),
            container: name.clone(),
            devices: container.devices.clone(),
            alloc_id: container
                .edits
                .annotations
                .get(AllocId::ANNOTATION)
                .map(|id| AllocId::new(id.as_str())),
            alloc_ids: container.alloc_ids.clone(),
            is_orphan: self.state.orphans.contains_key(&pod.spec.uid),
        };
        running.map(holder).collect()
    }

    /// Ids that run in containers of more than one pod, which must not happen.
    #[must_use]
    pub fn shared_devices(&self) -> BTreeMap<(ResourceName, DeviceId), BTreeSet<String>> {
        let mut pods: BTreeMap<(ResourceName, DeviceId), BTreeSet<String>> = BTreeMap::new();
        for holder in self.holders() {
            for (resource, ids) in &holder.devices {
                for id in ids {
                    pods.entry((resource.clone(), id.clone()))
                        .or_default()
                        .insert(holder.pod_uid.clone());
                }
            }
        }
        pods.retain(|_, pods| pods.len() > 1);
        pods
    }

    /// The kubelet's state of a resource.
    #[must_use]
    pub fn endpoint_state(&self, resource: &ResourceName) -> EndpointState {
        let Some(instance) = &self.state.instance else { return EndpointState::default() };
        let endpoint = instance.manager.endpoint(resource);
        let serving = endpoint.and_then(|endpoint| endpoint.client.as_ref());
        EndpointState {
            tracked: instance.clients.newest(resource).map(|client| client.number),
            serving: serving.map(|client| client.number),
            socket: serving.map(|client| client.socket.clone()),
            is_stopped: endpoint.is_none_or(|endpoint| endpoint.stopped_at.is_some()),
            is_tracked: serving.is_some_and(|client| instance.clients.tracks(client)),
            is_streaming: serving
                .is_some_and(|client| instance.streams.contains_key(&client.number)),
            streams: instance
                .streams
                .values()
                .filter(|client| client.resource == *resource)
                .count(),
            healthy: instance.manager.healthy().get(resource).cloned().unwrap_or_default(),
        }
    }

    /// Register calls for a resource in this instance of the kubelet, with or without success.
    #[must_use]
    pub fn registers(&self, resource: &ResourceName) -> u64 {
        self.in_instance(|instance| instance.registers.get(resource.as_str()).copied())
    }

    /// Lists of a resource that arrived in this instance of the kubelet.
    #[must_use]
    pub fn lists(&self, resource: &ResourceName) -> u64 {
        self.in_instance(|instance| instance.lists.get(resource).copied())
    }

    /// The most answered Register calls, and the most lists, within any one second.
    #[must_use]
    pub fn busiest_second(&self, resource: &ResourceName) -> (usize, usize) {
        let (second, events) = (Duration::from_secs(1), &self.state.events);
        let registers = events.busiest(second, |kind| match kind {
            EventKind::Registered { resource: of, .. } => of == resource,
            EventKind::RegisterFailed { resource: of, .. } => of == resource.as_str(),
            _ => false,
        });
        let lists = events.busiest(
            second,
            |kind| matches!(kind, EventKind::Listed { resource: of, .. } if of == resource),
        );
        (registers, lists)
    }

    fn in_instance(&self, count: impl FnOnce(&Instance) -> Option<u64>) -> u64 {
        self.state.instance.as_ref().and_then(count).unwrap_or_default()
    }

    /// Listings of the pods.
    #[must_use]
    pub fn listings(&self) -> u64 {
        self.state.listings
    }

    /// Listings of the pods while an Allocate was under way: each may cost a reservation.
    #[must_use]
    pub fn listings_in_allocate(&self) -> u64 {
        self.state.listings_in_allocate
    }

    /// A resource's numbers over time.
    #[must_use]
    pub fn readings(&self, resource: &ResourceName) -> Option<&Readings> {
        self.state.readings.get(resource)
    }

    /// How often each interleaving occurred.
    #[must_use]
    pub fn interleavings(&self) -> &BTreeMap<Interleaving, u64> {
        &self.state.interleavings
    }

    /// How often each hook was reached.
    #[must_use]
    pub fn hooks(&self) -> &BTreeMap<Hook, u64> {
        &self.state.hooks
    }

    /// Starts of the kubelet.
    #[must_use]
    pub fn starts(&self) -> u64 {
        self.state.starts
    }

    /// The events so far.
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
        self.state.events.since_start(|kind| {
            matches!(kind, EventKind::Listed { .. }) && kind.resource() == Some(resource)
        })
    }
}
