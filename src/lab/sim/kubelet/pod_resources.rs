//! The pod-resources API: the kubelet's listing of devices and their holders, with its quirks.

use super::held::Held;
use super::pod::{ContainerKind, Pod};
use super::state::{Shared, State};
use crate::domain::{DeviceId, ResourceName};
use tonic::Status;

/// One message of devices: always one id, and at most one NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::sim) struct DeviceMessage {
    pub(in crate::lab::sim) resource: ResourceName,
    pub(in crate::lab::sim) id: DeviceId,
    pub(in crate::lab::sim) numa_node: Option<i64>,
}

/// A pod in a listing: without its UID, and without init containers that end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::sim) struct PodMessage {
    pub(in crate::lab::sim) namespace: String,
    pub(in crate::lab::sim) name: String,
    pub(in crate::lab::sim) containers: Vec<(String, Vec<DeviceMessage>)>,
}

/// Every active pod. Right after a start there is none.
pub(in crate::lab::sim) fn list(shared: &Shared, instance: u64) -> Result<Vec<PodMessage>, Status> {
    answer(shared, instance, |state| {
        free_ended_pods(state);
        state.active().map(|pod| describe(state, pod, is_long_running)).collect()
    })
}

/// The listing of v1alpha1: every pod, including ended ones, with their application containers
/// only.
pub(in crate::lab::sim) fn list_with_ended(
    shared: &Shared,
    instance: u64,
) -> Result<Vec<PodMessage>, Status> {
    answer(shared, instance, |state| {
        free_ended_pods(state);
        let is_app = |kind| kind == ContainerKind::App;
        state.known().map(|pod| describe(state, pod, is_app)).collect()
    })
}

/// Here any client of this API makes the kubelet forget the reservation of an Allocate under way.
fn free_ended_pods(state: &mut State) {
    state.listings += 1;
    if state.instance.as_ref().is_some_and(|present| present.allocating > 0) {
        state.listings_in_allocate += 1;
    }
    state.purge();
}

fn is_long_running(kind: ContainerKind) -> bool {
    kind != ContainerKind::Init
}

/// One pod, by name, also one that has ended. Frees nothing.
pub(in crate::lab::sim) fn get(
    shared: &Shared,
    instance: u64,
    namespace: &str,
    name: &str,
) -> Result<PodMessage, Status> {
    if !shared.profile().has_allocatable() {
        return Err(Status::unknown("PodResources API Get method disabled"));
    }
    let pod = answer(shared, instance, |state| {
        let has_name = |pod: &&Pod| pod.spec.namespace == namespace && pod.spec.name == name;
        // The newest one has the name.
        let pod = state.known().filter(has_name).last();
        pod.map(|pod| describe(state, pod, is_long_running))
    })?;
    pod.ok_or_else(|| Status::unknown(format!("pod {name} in namespace {namespace} not found")))
}

/// Every healthy device, held or free. Right after a start there is none.
pub(in crate::lab::sim) fn allocatable(
    shared: &Shared,
    instance: u64,
) -> Result<Vec<DeviceMessage>, Status> {
    if !shared.profile().has_allocatable() {
        return Err(Status::unimplemented(
            "unknown method GetAllocatableResources for service v1.PodResourcesLister",
        ));
    }
    answer(shared, instance, |state| {
        let Some(present) = &state.instance else { return Vec::new() };
        let healthy = present.manager.healthy().iter();
        let ids = healthy.flat_map(|(resource, ids)| ids.iter().map(move |id| (resource, id)));
        ids.flat_map(|(resource, id)| {
            messages(resource, id, present.manager.numa_nodes(resource, id).iter().copied())
        })
        .collect()
    })
}

fn answer<R>(
    shared: &Shared,
    instance: u64,
    act: impl FnOnce(&mut State) -> R,
) -> Result<R, Status> {
    let now = shared.environment.now();
    let answer = shared.in_instance(instance, |state| {
        let allowed = state.instance.as_mut().is_some_and(|present| present.limiter.allow(now));
        allowed
            .then(|| act(state))
            .ok_or_else(|| Status::resource_exhausted("rejected by rate limit"))
    });
    answer.unwrap_or_else(|| Err(Status::unavailable("the kubelet is stopped")))
}

fn describe(state: &State, pod: &Pod, is_listed: fn(ContainerKind) -> bool) -> PodMessage {
    let containers = pod.spec.in_order().filter(|container| is_listed(container.kind));
    let containers = containers.map(|container| {
        let held = state
            .instance
            .iter()
            .flat_map(|instance| instance.manager.held().container(&pod.spec.uid, &container.name));
        (
            container.name.clone(),
            held.flat_map(|(resource, held)| held_messages(resource, held)).collect(),
        )
    });
    PodMessage {
        namespace: pod.spec.namespace.clone(),
        name: pod.spec.name.clone(),
        containers: containers.collect(),
    }
}

fn held_messages(resource: &ResourceName, held: &Held) -> Vec<DeviceMessage> {
    held.numa_nodes()
        .iter()
        .flat_map(|(id, nodes)| messages(resource, id, nodes.iter().copied()))
        .collect()
}

/// One message for each id and NUMA node; one message without a node where the id has none.
fn messages(
    resource: &ResourceName,
    id: &DeviceId,
    nodes: impl Iterator<Item = i64>,
) -> Vec<DeviceMessage> {
    let message =
        |numa_node| DeviceMessage { resource: resource.clone(), id: id.clone(), numa_node };
    let messages: Vec<_> = nodes.map(|node| message(Some(node))).collect();
    if messages.is_empty() { vec![message(None)] } else { messages }
}
