//! `v1.PodResourcesLister`: who holds what, as the kubelet tells it.

use super::held::Held;
use super::pod::{ContainerKind, Pod};
use super::state::{Shared, State};
use crate::domain::{DeviceId, ResourceName};
use crate::kubelet::proto::podresources_v1 as api;
use crate::kubelet::proto::podresources_v1::pod_resources_lister_server::PodResourcesLister;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The service of one life of the kubelet.
#[derive(Debug)]
pub(super) struct PodResourcesService {
    pub(super) shared: Arc<Shared>,
    pub(super) life: u64,
}

impl PodResourcesService {
    fn read<R>(&self, act: impl FnOnce(&mut State) -> R) -> Result<R, Status> {
        self.shared.in_life(self.life, act).ok_or_else(|| Status::unavailable("the kubelet is stopped"))
    }
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(&self, _: Request<api::ListPodResourcesRequest>) -> Result<Response<api::ListPodResourcesResponse>, Status> {
        let pod_resources = self.read(|state| {
            // Here any client of this API makes the kubelet forget the reservation of an Allocate under way.
            state.purge();
            state.active().map(|pod| describe(state, pod)).collect()
        })?;
        Ok(Response::new(api::ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<api::AllocatableResourcesRequest>,
    ) -> Result<Response<api::AllocatableResourcesResponse>, Status> {
        let devices = self.read(|state| {
            let Some(life) = &state.life else { return Vec::new() };
            let healthy = life.manager.healthy().iter();
            let ids = healthy.flat_map(|(resource, ids)| ids.iter().map(move |id| (resource, id)));
            ids.flat_map(|(resource, id)| messages(resource, id, life.manager.numa_nodes(resource, id).iter().copied())).collect()
        })?;
        Ok(Response::new(api::AllocatableResourcesResponse { devices, cpu_ids: Vec::new(), memory: Vec::new() }))
    }

    async fn get(&self, request: Request<api::GetPodResourcesRequest>) -> Result<Response<api::GetPodResourcesResponse>, Status> {
        let request = request.into_inner();
        let pod = self.read(|state| {
            let mut pods = state.active();
            let pod = pods.find(|pod| pod.spec.namespace == request.pod_namespace && pod.spec.name == request.pod_name);
            pod.map(|pod| describe(state, pod))
        })?;
        let missing = || Status::unknown(format!("pod {} in namespace {} not found", request.pod_name, request.pod_namespace));
        Ok(Response::new(api::GetPodResourcesResponse { pod_resources: Some(pod.ok_or_else(missing)?) }))
    }
}

/// One pod, without the init containers that end.
fn describe(state: &State, pod: &Pod) -> api::PodResources {
    let containers = pod.spec.in_order().filter(|container| container.kind != ContainerKind::Init);
    let containers = containers.map(|container| {
        let held = state.life.iter().flat_map(|life| life.manager.held().container(&pod.spec.uid, &container.name));
        let devices = held.flat_map(|(resource, held)| held_messages(resource, held)).collect();
        api::ContainerResources { name: container.name.clone(), devices, cpu_ids: Vec::new(), memory: Vec::new() }
    });
    api::PodResources { name: pod.spec.name.clone(), namespace: pod.spec.namespace.clone(), containers: containers.collect() }
}

fn held_messages(resource: &ResourceName, held: &Held) -> Vec<api::ContainerDevices> {
    held.numa_nodes().iter().flat_map(|(id, nodes)| messages(resource, id, nodes.iter().copied())).collect()
}

/// One message for each id and NUMA node; one without topology where there is none.
fn messages(resource: &ResourceName, id: &DeviceId, nodes: impl Iterator<Item = i64>) -> Vec<api::ContainerDevices> {
    let message = |topology| api::ContainerDevices {
        resource_name: resource.as_str().to_owned(),
        device_ids: vec![id.as_str().to_owned()],
        topology,
    };
    let on_node = |node| message(Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: node }] }));
    let messages: Vec<_> = nodes.map(on_node).collect();
    if messages.is_empty() { vec![message(None)] } else { messages }
}
