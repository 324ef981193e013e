//! `v1beta1`: the API of kubelet 1.10 and newer.

use super::{
    ApiPackage, ListStream, Plugin, REQUEST_BYTES_MAX, RegisterRequest, ids, list_stream,
    on_one_line, with_timeout,
};
use crate::domain::{
    ApiCapabilities, ContainerEdits, DeviceId, EditDevice, EditMount, Offered, Offering,
};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::kubelet::proto::v1beta1::registration_client::RegistrationClient;
use crate::kubelet::services::Services;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

/// An answer can carry every field. Kubelets before 1.28 drop CDI names silently, and the API does
/// not show a kubelet's version.
const WIRE: ApiCapabilities =
    ApiCapabilities { api: "v1beta1", has_cdi: true, has_pre_start: true };

/// The package.
#[derive(Debug)]
pub struct V1Beta1;

#[tonic::async_trait]
impl ApiPackage for V1Beta1 {
    fn versions(&self) -> &'static [&'static str] {
        &["v1beta1"]
    }

    /// Kubelets up to 1.24 leave the former connection open. Up to 1.36 the end of an older stream
    /// disconnects the newer client.
    fn replaces_connection_on_register(&self) -> bool {
        false
    }

    fn keeps_annotations(&self) -> bool {
        true
    }

    async fn register(
        &self,
        channel: Channel,
        request: RegisterRequest,
        time: Duration,
    ) -> Result<(), Status> {
        let RegisterRequest { version, resource, endpoint, pre_start } = request;
        let (version, resource_name) = (version.name().to_owned(), resource.to_string());
        let request = api::RegisterRequest {
            version,
            endpoint,
            resource_name,
            options: Some(options(pre_start)),
        };
        RegistrationClient::new(channel).register(with_timeout(time, request)).await.map(drop)
    }

    fn serve(&self, plugin: Arc<dyn Plugin>, services: Services) -> Services {
        services.and(
            DevicePluginServer::new(Service(plugin)).max_decoding_message_size(REQUEST_BYTES_MAX),
        )
    }
}

/// The options of every resource of Holdfast.
fn options(pre_start: bool) -> api::DevicePluginOptions {
    api::DevicePluginOptions {
        pre_start_required: pre_start,
        get_preferred_allocation_available: true,
    }
}

pub(crate) struct Service(pub(crate) Arc<dyn Plugin>);

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ListStream<api::ListAndWatchResponse>;

    /// Answered without waiting for an actor: the kubelet calls this while our own Register call is
    /// open.
    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(options(self.0.needs_pre_start())))
    }

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        Ok(Response::new(list_stream(self.0.as_ref(), list)?))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let containers = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(|container| ids(container.devices_ids))
            .collect();
        let answers = self.0.allocate(containers, WIRE).await.map_err(on_one_line)?;
        Ok(Response::new(api::AllocateResponse {
            container_responses: answers.into_iter().map(response).collect(),
        }))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let choose = |request: api::ContainerPreferredAllocationRequest| {
            let size = usize::try_from(request.allocation_size).unwrap_or_default();
            let chosen = self.0.preferred(
                ids(request.available_device_i_ds),
                ids(request.must_include_device_i_ds),
                size,
            )?;
            Ok(api::ContainerPreferredAllocationResponse {
                device_i_ds: chosen.iter().map(ToString::to_string).collect(),
            })
        };
        let container_responses = request
            .into_inner()
            .container_requests
            .into_iter()
            .map(choose)
            .collect::<Result<_, Status>>()
            .map_err(on_one_line)?;
        Ok(Response::new(api::PreferredAllocationResponse { container_responses }))
    }

    /// Does nothing for a kubelet that calls without having been requested to.
    async fn pre_start_container(
        &self,
        request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        self.0.pre_start(ids(request.into_inner().devices_ids)).await.map_err(on_one_line)?;
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

/// One resource as a ListAndWatch message: the complete list, in the order of the ids.
#[must_use]
pub fn list(offering: &Offering) -> api::ListAndWatchResponse {
    let device = |(id, offered): (&DeviceId, &Offered)| api::Device {
        id: id.to_string(),
        health: offered.health.as_str().to_owned(),
        topology: topology(&offered.device.numa_nodes).filter(|_| offering.spec.topology),
    };
    api::ListAndWatchResponse { devices: offering.devices.iter().map(device).collect() }
}

/// NUMA nodes in the kubelet's form: unset if none is known, and without nodes beyond its 64-bit
/// mask.
fn topology(numa_nodes: &[u32]) -> Option<api::TopologyInfo> {
    let nodes: Vec<_> = numa_nodes
        .iter()
        .filter(|node| **node < 64)
        .map(|node| api::NumaNode { id: i64::from(*node) })
        .collect();
    (!nodes.is_empty()).then_some(api::TopologyInfo { nodes })
}

/// The edits of a container as the API's response.
#[must_use]
pub fn response(edits: ContainerEdits) -> api::ContainerAllocateResponse {
    let mount = |mount: EditMount| api::Mount {
        container_path: mount.container,
        host_path: mount.host,
        read_only: mount.read_only,
    };
    let device = |device: EditDevice| api::DeviceSpec {
        container_path: device.container,
        host_path: device.host,
        permissions: device.permissions,
    };
    api::ContainerAllocateResponse {
        envs: edits.envs,
        mounts: edits.mounts.into_iter().map(mount).collect(),
        devices: edits.devices.into_iter().map(device).collect(),
        annotations: edits.annotations,
        cdi_devices: edits.cdi_devices.into_iter().map(|name| api::CdiDevice { name }).collect(),
    }
}

/// The API's response as the edits of a container.
#[must_use]
pub fn edits(response: api::ContainerAllocateResponse) -> ContainerEdits {
    let mount = |mount: api::Mount| EditMount {
        host: mount.host_path,
        container: mount.container_path,
        read_only: mount.read_only,
    };
    let device = |device: api::DeviceSpec| EditDevice {
        host: device.host_path,
        container: device.container_path,
        permissions: device.permissions,
    };
    ContainerEdits {
        envs: response.envs,
        mounts: response.mounts.into_iter().map(mount).collect(),
        devices: response.devices.into_iter().map(device).collect(),
        annotations: response.annotations,
        cdi_devices: response.cdi_devices.into_iter().map(|device| device.name).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_topology_has_every_numa_node_and_is_absent_without_one() {
        assert_eq!(topology(&[]), None);
        assert_eq!(topology(&[64, 250]), None);
        let nodes: Vec<i64> =
            topology(&[0, 8, 64]).unwrap().nodes.iter().map(|node| node.id).collect();
        assert_eq!(nodes, [0, 8]);
        let mut offering = super::super::tests::offering(&["a"], &[]);
        let offered = offering.devices.values_mut().next().unwrap();
        Arc::make_mut(&mut offered.device).numa_nodes = vec![1];
        assert!(list(&offering).devices[0].topology.is_some());
        Arc::make_mut(&mut offering.spec).topology = false;
        assert_eq!(list(&offering).devices[0].topology, None, "the resource keeps it back");
    }
}
