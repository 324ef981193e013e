//! The APIs of kubelets before v1beta1 and v1: `deviceplugin` with the plugins,
//! `v1alpha1.PodResourcesLister`.

use super::super::core::{ListedDevice, Options};
use super::super::environment::{Connection, Lists};
use super::super::error::rpc_error;
use super::super::pod_resources::{self, DeviceMessage, PodMessage};
use super::super::registration::{self, Register};
use super::super::state::Shared;
use super::channel::PluginChannel;
use super::link::Links;
use crate::domain::{ContainerEdits, DeviceId, EditDevice, EditMount};
use crate::kubelet::proto::podresources_v1alpha1 as resources;
use crate::kubelet::proto::podresources_v1alpha1::pod_resources_lister_server::PodResourcesLister;
use crate::kubelet::proto::v1alpha as api;
use crate::kubelet::proto::v1alpha::device_plugin_client::DevicePluginClient;
use crate::kubelet::proto::v1alpha::registration_server::Registration;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

/// `deviceplugin.Registration` of one instance of the kubelet.
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
        let api::RegisterRequest { version, endpoint, resource_name: resource } =
            request.into_inner();
        let result = registration::register(
            &self.shared,
            self.instance,
            Register { version, resource, endpoint, options: None },
        )
        .await;
        // grpc-go's code for an error without one.
        result.map(|()| Response::new(api::Empty {})).map_err(Status::unknown)
    }
}

/// A connection to a plugin.
#[derive(Debug)]
pub(super) struct Dialled {
    plugin: PluginChannel,
    api: DevicePluginClient<Channel>,
}

impl Dialled {
    pub(super) async fn dial(client: u64, socket: PathBuf, links: Links) -> Self {
        let (plugin, channel) = PluginChannel::dial(client, socket, links).await;
        Dialled { plugin, api: DevicePluginClient::new(channel) }
    }
}

/// A call that these kubelets never make.
fn unknown<T>(method: &str) -> Result<T, String> {
    Err(rpc_error(&Status::unimplemented(format!(
        "method {method} does not exist in this version"
    ))))
}

#[tonic::async_trait]
impl Connection for Dialled {
    async fn options(&self) -> Result<Options, String> {
        unknown("GetDevicePluginOptions")
    }

    async fn list_and_watch(&self) -> Result<Box<dyn Lists>, String> {
        let stream = self
            .api
            .clone()
            .list_and_watch(api::Empty {})
            .await
            .map_err(|status| rpc_error(&status))?;
        Ok(Box::new(Listing(stream.into_inner())))
    }

    async fn preferred(
        &self,
        _: &BTreeSet<DeviceId>,
        _: &BTreeSet<DeviceId>,
        _: usize,
    ) -> Result<BTreeSet<DeviceId>, String> {
        unknown("GetPreferredAllocation")
    }

    async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Option<ContainerEdits>, String> {
        let request = api::AllocateRequest {
            devices_i_ds: ids.iter().map(|id| id.as_str().to_owned()).collect(),
        };
        let response =
            self.api.clone().allocate(request).await.map_err(|status| rpc_error(&status))?;
        Ok(Some(edits(response.into_inner())))
    }

    async fn pre_start(&self, _: &BTreeSet<DeviceId>) -> Result<(), String> {
        unknown("PreStartContainer")
    }

    fn close(&self) {
        self.plugin.close();
    }

    fn is_open(&self) -> bool {
        self.plugin.is_open()
    }
}

#[derive(Debug)]
struct Listing(Streaming<api::ListAndWatchResponse>);

#[tonic::async_trait]
impl Lists for Listing {
    async fn next(&mut self) -> Option<Vec<ListedDevice>> {
        let device = |device: api::Device| ListedDevice {
            id: DeviceId::new(device.id),
            healthy: device.health == "Healthy",
            numa_nodes: Vec::new(),
        };
        let list = self.0.message().await.ok().flatten()?;
        Some(list.devices.into_iter().map(device).collect())
    }
}

fn edits(response: api::AllocateResponse) -> ContainerEdits {
    let mount = |mount: api::Mount| EditMount {
        host: mount.host_path,
        container: mount.container_path,
        read_only: mount.read_only,
    };
    let device = |spec: api::DeviceSpec| EditDevice {
        host: spec.host_path,
        container: spec.container_path,
        permissions: spec.permissions,
    };
    ContainerEdits {
        envs: response.envs,
        mounts: response.mounts.into_iter().map(mount).collect(),
        devices: response.devices.into_iter().map(device).collect(),
        annotations: response.annotations,
        cdi_devices: Vec::new(),
    }
}

/// `v1alpha1.PodResourcesLister` of one instance of the kubelet.
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
        let pods = pod_resources::list_with_ended(&self.shared, self.instance)?;
        Ok(Response::new(resources::ListPodResourcesResponse {
            pod_resources: pods.into_iter().map(pod).collect(),
        }))
    }
}

/// Without NUMA nodes. A device with two NUMA nodes is still listed twice.
fn pod(pod: PodMessage) -> resources::PodResources {
    let devices = |message: DeviceMessage| resources::ContainerDevices {
        resource_name: message.resource.as_str().to_owned(),
        device_ids: vec![message.id.as_str().to_owned()],
    };
    let container = |(name, messages): (String, Vec<DeviceMessage>)| {
        resources::ContainerResources { name, devices: messages.into_iter().map(devices).collect() }
    };
    resources::PodResources {
        name: pod.name,
        namespace: pod.namespace,
        containers: pod.containers.into_iter().map(container).collect(),
    }
}
