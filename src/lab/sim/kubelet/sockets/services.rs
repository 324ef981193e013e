//! The two services of the kubelet over gRPC: Registration and the pod-resources API.

use super::super::core::Options;
use super::super::pod_resources::{self, DeviceMessage, PodMessage};
use super::super::registration::{self, Register};
use super::super::state::Shared;
use super::wire;
use crate::kubelet::proto::podresources_v1 as resources;
use crate::kubelet::proto::podresources_v1::pod_resources_lister_server::PodResourcesLister;
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::registration_server::Registration;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// `v1beta1.Registration` of one instance of the kubelet.
#[derive(Debug)]
pub(super) struct RegistrationService {
    pub(super) shared: Arc<Shared>,
    pub(super) instance: u64,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(
        &self,
        request: Request<api::RegisterRequest>,
    ) -> Result<Response<api::Empty>, Status> {
        let api::RegisterRequest { version, endpoint, resource_name: resource, options } =
            request.into_inner();
        let options: Option<Options> = options.as_ref().map(wire::options);
        let result = registration::register(
            &self.shared,
            self.instance,
            Register { version, resource, endpoint, options },
        )
        .await;
        // grpc-go's code for an error without one.
        result.map(|()| Response::new(api::Empty {})).map_err(Status::unknown)
    }
}

/// `v1.PodResourcesLister` of one instance of the kubelet.
#[derive(Debug)]
pub(super) struct PodResourcesService {
    pub(super) shared: Arc<Shared>,
    pub(super) instance: u64,
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<resources::ListPodResourcesRequest>,
    ) -> Result<Response<resources::ListPodResourcesResponse>, Status> {
        let pods = pod_resources::list(&self.shared, self.instance)?;
        Ok(Response::new(resources::ListPodResourcesResponse {
            pod_resources: pods.into_iter().map(pod).collect(),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<resources::AllocatableResourcesRequest>,
    ) -> Result<Response<resources::AllocatableResourcesResponse>, Status> {
        let devices = pod_resources::allocatable(&self.shared, self.instance)?
            .into_iter()
            .map(devices)
            .collect();
        Ok(Response::new(resources::AllocatableResourcesResponse {
            devices,
            cpu_ids: Vec::new(),
            memory: Vec::new(),
        }))
    }

    async fn get(
        &self,
        request: Request<resources::GetPodResourcesRequest>,
    ) -> Result<Response<resources::GetPodResourcesResponse>, Status> {
        let request = request.into_inner();
        let found = pod_resources::get(
            &self.shared,
            self.instance,
            &request.pod_namespace,
            &request.pod_name,
        )?;
        Ok(Response::new(resources::GetPodResourcesResponse { pod_resources: Some(pod(found)) }))
    }
}

fn pod(pod: PodMessage) -> resources::PodResources {
    let container =
        |(name, messages): (String, Vec<DeviceMessage>)| resources::ContainerResources {
            name,
            devices: messages.into_iter().map(devices).collect(),
            cpu_ids: Vec::new(),
            memory: Vec::new(),
        };
    resources::PodResources {
        name: pod.name,
        namespace: pod.namespace,
        containers: pod.containers.into_iter().map(container).collect(),
    }
}

fn devices(message: DeviceMessage) -> resources::ContainerDevices {
    let topology = message
        .numa_node
        .map(|id| resources::TopologyInfo { nodes: vec![resources::NumaNode { id }] });
    let resource_name = message.resource.as_str().to_owned();
    resources::ContainerDevices {
        resource_name,
        device_ids: vec![message.id.as_str().to_owned()],
        topology,
    }
}
