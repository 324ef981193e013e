//! The kubelet's device manager as pure state and decisions: no clock, no socket, no file.
//!
//! It follows kubelet 1.36 step by step, including the places where the kubelet forgets a
//! reservation or dereferences a device that has left the list. A plugin that works with this
//! kubelet works with the real one. Where the kubelet walks a Go map in random order, this code
//! walks an ordered map. Where the order decides which device is given out, the caller supplies the
//! order.

mod affinity;
mod allocate;
mod values;

pub use self::values::{Capacity, Choice, Endpoint, Listed, ListedDevice, Options, PreStart, Step};

use super::error::{AllocateError, NilDereference};
use super::held::{Held, PodDevices};
use crate::domain::{DeviceId, ResourceName};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long the devices of a stopped endpoint still count as capacity.
pub const ENDPOINT_GRACE: Duration = Duration::from_secs(5 * 60);

type Sets = BTreeMap<ResourceName, BTreeSet<DeviceId>>;

/// Everything that the kubelet knows about devices.
#[derive(Debug)]
pub struct DeviceManager<C> {
    endpoints: BTreeMap<ResourceName, Endpoint<C>>,
    all: BTreeMap<ResourceName, BTreeMap<DeviceId, Vec<i64>>>,
    healthy: Sets,
    unhealthy: Sets,
    /// Reserved ids. They can differ from those of `held`: the kubelet reserves before a call and
    /// records after it.
    allocated: Sets,
    held: PodDevices,
    /// Devices that finished init containers of the pod under admission leave to its next
    /// containers.
    reuse: BTreeMap<String, Sets>,
    sources_ready: bool,
    /// Whether a device that has left the list crashes the kubelet. Older kubelets treat it as a
    /// device without topology.
    panics: bool,
    /// Whether a topology policy is active: devices of the same NUMA nodes are given out together.
    aligns: bool,
    /// Containers that ran when this kubelet started: (pod UID, container).
    initially_running: BTreeSet<(String, String)>,
}

impl<C: Clone> DeviceManager<C> {
    /// Starts from a checkpoint. The held ids are known at once; known resources have no devices
    /// until the first list.
    pub fn start(
        held: PodDevices,
        known: BTreeSet<ResourceName>,
        initially_running: BTreeSet<(String, String)>,
        now: Duration,
    ) -> Self {
        let empty: Sets =
            known.iter().map(|resource| (resource.clone(), BTreeSet::new())).collect();
        let stopped =
            |resource| (resource, Endpoint { client: None, options: None, stopped_at: Some(now) });
        DeviceManager {
            endpoints: known.into_iter().map(stopped).collect(),
            all: BTreeMap::new(),
            healthy: empty.clone(),
            unhealthy: empty,
            allocated: held.ids(),
            held,
            reuse: BTreeMap::new(),
            sources_ready: false,
            panics: true,
            aligns: false,
            initially_running,
        }
    }

    /// Sets whether it crashes where it uses a device that has left the list.
    #[must_use]
    pub fn panics(mut self, panics: bool) -> Self {
        self.panics = panics;
        self
    }

    /// Sets whether a topology policy is active.
    #[must_use]
    pub fn aligns(mut self, aligns: bool) -> Self {
        self.aligns = aligns;
        self
    }

    /// A plugin was dialled and returned its options: it serves the resource from now on. Devices
    /// stay as they are.
    pub fn connected(&mut self, resource: &ResourceName, client: C, options: Options) {
        self.endpoints.insert(
            resource.clone(),
            Endpoint { client: Some(client), options: Some(options), stopped_at: None },
        );
    }

    /// Some client of the resource was disconnected: the current endpoint stops, even if it belongs
    /// to another client.
    pub fn disconnected(&mut self, resource: &ResourceName, now: Duration) {
        if let Some(endpoint) = self.endpoints.get_mut(resource) {
            endpoint.stopped_at = Some(now);
            let healthy = self.healthy.get_mut(resource).map(std::mem::take).unwrap_or_default();
            self.unhealthy.entry(resource.clone()).or_default().extend(healthy);
        }
    }

    /// A list arrived, from any stream of the resource: it replaces the known devices.
    pub fn listed(&mut self, resource: &ResourceName, devices: Vec<ListedDevice>) -> Listed {
        let (mut healthy, mut unhealthy, mut all) =
            (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        for device in devices {
            if device.healthy { &mut healthy } else { &mut unhealthy }.insert(device.id.clone());
            all.insert(device.id, device.numa_nodes);
        }
        let in_use = self.allocated.get(resource).into_iter().flatten();
        let vanished = in_use.filter(|id| !all.contains_key(*id)).cloned().collect();
        let listed = Listed { healthy: healthy.len(), unhealthy: unhealthy.len(), vanished };
        self.healthy.insert(resource.clone(), healthy);
        self.unhealthy.insert(resource.clone(), unhealthy);
        self.all.insert(resource.clone(), all);
        listed
    }

    /// The first batch of pods is complete. Until then no device is freed and running containers
    /// are left alone.
    pub fn set_sources_ready(&mut self) {
        self.sources_ready = true;
    }

    /// Whether the first batch of pods is complete.
    #[must_use]
    pub fn sources_ready(&self) -> bool {
        self.sources_ready
    }

    /// Frees the devices of inactive pods, unless pods are still missing after a start.
    pub fn purge(&mut self, active: &BTreeSet<String>) {
        // As in the kubelet, the reservation of an Allocate under way is lost here.
        if self.sources_ready && self.held.retain(active) {
            self.allocated = self.held.ids();
        }
    }

    /// Opens the admission of a pod: the reusable devices of any other pod are forgotten.
    pub fn begin(&mut self, pod_uid: &str) {
        self.reuse.retain(|uid, _| uid == pod_uid);
        self.reuse.entry(pod_uid.to_owned()).or_default();
    }

    /// Whether the device manager handles the resource; the scheduler handles all others.
    #[must_use]
    pub fn is_plugin_resource(&self, resource: &ResourceName) -> bool {
        self.healthy.contains_key(resource) || self.allocated.contains_key(resource)
    }

    /// The devices that the topology manager dereferences before it admits a container. For a
    /// resource with any NUMA node among its devices these are all held ids, or else all free and
    /// reusable ids.
    pub fn topology_hints(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &ResourceName,
        required: usize,
    ) -> Result<(), NilDereference> {
        if !self.all.get(resource).is_some_and(|all| all.values().any(|nodes| !nodes.is_empty())) {
            return Ok(());
        }
        let ids = match self.held.get(pod_uid, container, resource).map(Held::ids) {
            Some(held) if held.len() != required => return Ok(()),
            Some(held) => held,
            None => self
                .reuse
                .get(pod_uid)
                .and_then(|reuse| reuse.get(resource))
                .cloned()
                .unwrap_or_default(),
        };
        ids.iter().try_for_each(|id| {
            self.topology(resource, id, "while topology hints are generated").map(drop)
        })
    }

    fn topology(
        &self,
        resource: &ResourceName,
        id: &DeviceId,
        site: &'static str,
    ) -> Result<&[i64], NilDereference> {
        match self.all.get(resource).and_then(|all| all.get(id)) {
            Some(nodes) => Ok(nodes),
            None if self.panics => {
                Err(NilDereference { site, resource: resource.clone(), device: id.clone() })
            }
            None => Ok(&[]),
        }
    }

    /// A container is complete: an init container that ends leaves its devices to the next ones,
    /// every other keeps them.
    pub fn finish(&mut self, pod_uid: &str, container: &str, leaves_devices: bool) {
        let Some(reuse) = self.reuse.get_mut(pod_uid) else { return };
        for (resource, held) in self.held.container(pod_uid, container) {
            let reusable = reuse.entry(resource.clone()).or_default();
            if leaves_devices {
                reusable.extend(held.ids());
            } else {
                let ids = held.ids();
                reusable.retain(|id| !ids.contains(id));
            }
        }
    }

    /// The call to make before a container starts with its devices of a resource.
    pub fn pre_start(
        &self,
        pod_uid: &str,
        container: &str,
        resource: &ResourceName,
    ) -> Result<PreStart<C>, AllocateError> {
        let endpoint = self
            .endpoints
            .get(resource)
            .ok_or_else(|| AllocateError::EndpointNotFound(resource.clone()))?;
        if !endpoint.options.is_some_and(|options| options.pre_start) {
            return Ok(PreStart::Skip);
        }
        let held = self.held.get(pod_uid, container, resource).ok_or_else(|| {
            AllocateError::NothingHeld {
                pod: pod_uid.to_owned(),
                container: container.to_owned(),
                resource: resource.clone(),
            }
        })?;
        Ok(PreStart::Call(self.callable(resource)?, held.ids()))
    }

    /// The endpoint that serves a resource.
    #[must_use]
    pub fn endpoint(&self, resource: &ResourceName) -> Option<&Endpoint<C>> {
        self.endpoints.get(resource)
    }

    /// The connection to call, unless the endpoint has stopped.
    pub fn callable(&self, resource: &ResourceName) -> Result<C, AllocateError> {
        let endpoint = self
            .endpoints
            .get(resource)
            .ok_or_else(|| AllocateError::UnknownPlugin(resource.clone()))?;
        let client = endpoint.client.clone().filter(|_| endpoint.stopped_at.is_none());
        client.ok_or_else(|| AllocateError::EndpointStopped(resource.clone()))
    }

    /// The resource's numbers in the node's status; 0 for an unknown resource or one that stopped
    /// longer ago than the grace.
    #[must_use]
    pub fn capacity(&self, resource: &ResourceName, now: Duration) -> Capacity {
        if self.is_expired(resource, now) {
            return Capacity::default();
        }
        let count = |sets: &Sets| sets.get(resource).map_or(0, BTreeSet::len);
        Capacity {
            capacity: count(&self.healthy) + count(&self.unhealthy),
            allocatable: count(&self.healthy),
        }
    }

    /// Deletes every resource whose endpoint stopped longer ago than the grace. Returns whether
    /// there was one.
    pub fn expire(&mut self, now: Duration) -> bool {
        let known = self.healthy.keys().chain(self.unhealthy.keys());
        let expired: BTreeSet<ResourceName> =
            known.filter(|resource| self.is_expired(resource, now)).cloned().collect();
        for resource in &expired {
            self.endpoints.remove(resource);
            self.healthy.remove(resource);
            self.unhealthy.remove(resource);
        }
        !expired.is_empty()
    }

    fn is_expired(&self, resource: &ResourceName, now: Duration) -> bool {
        let stopped_at = self.endpoints.get(resource).map(|endpoint| endpoint.stopped_at);
        stopped_at.is_none_or(|at| at.is_some_and(|at| now.saturating_sub(at) > ENDPOINT_GRACE))
    }

    /// The healthy ids of every resource, as the checkpoint lists them.
    #[must_use]
    pub fn healthy(&self) -> &BTreeMap<ResourceName, BTreeSet<DeviceId>> {
        &self.healthy
    }

    /// The NUMA nodes of a listed device.
    #[must_use]
    pub fn numa_nodes(&self, resource: &ResourceName, id: &DeviceId) -> &[i64] {
        self.all.get(resource).and_then(|all| all.get(id)).map_or(&[], Vec::as_slice)
    }

    /// The devices that every container holds.
    #[must_use]
    pub fn held(&self) -> &PodDevices {
        &self.held
    }
}
