//! The kubelet's connection to one plugin in v1beta1, made by one Register.

use super::super::core::{ListedDevice, Options};
use super::super::environment::{Connection, Lists};
use super::super::error::rpc_error;
use super::channel::{PluginChannel, call};
use super::link::Links;
use super::wire;
use crate::domain::{ContainerEdits, DeviceId};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use std::collections::BTreeSet;
use std::path::PathBuf;
use tonic::Streaming;
use tonic::transport::Channel;

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

fn text(status: &tonic::Status) -> String {
    rpc_error(status)
}

#[tonic::async_trait]
impl Connection for Dialled {
    async fn options(&self) -> Result<Options, String> {
        let response = call(&self.api, api::Empty {}, |mut api, empty| async move {
            api.get_device_plugin_options(empty).await
        })
        .await
        .map_err(|status| text(&status))?;
        Ok(wire::options(response.get_ref()))
    }

    async fn list_and_watch(&self) -> Result<Box<dyn Lists>, String> {
        let stream = call(&self.api, api::Empty {}, |mut api, empty| async move {
            api.list_and_watch(empty).await
        })
        .await
        .map_err(|status| text(&status))?;
        Ok(Box::new(Listing(stream.into_inner())))
    }

    async fn preferred(
        &self,
        available: &BTreeSet<DeviceId>,
        must_include: &BTreeSet<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, String> {
        let request = api::ContainerPreferredAllocationRequest {
            available_device_i_ds: texts(available),
            must_include_device_i_ds: texts(must_include),
            allocation_size: i32::try_from(size).unwrap_or(i32::MAX),
        };
        let request = api::PreferredAllocationRequest { container_requests: vec![request] };
        let response = call(&self.api, request, |mut api, request| async move {
            api.get_preferred_allocation(request).await
        })
        .await
        .map_err(|status| text(&status))?;
        let first =
            response.into_inner().container_responses.into_iter().next().unwrap_or_default();
        Ok(first.device_i_ds.into_iter().map(DeviceId::new).collect())
    }

    async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Option<ContainerEdits>, String> {
        let request = api::ContainerAllocateRequest { devices_ids: texts(ids) };
        let request = api::AllocateRequest { container_requests: vec![request] };
        let response =
            call(&self.api, request, |mut api, request| async move { api.allocate(request).await })
                .await
                .map_err(|status| text(&status))?;
        Ok(response.into_inner().container_responses.into_iter().next().map(wire::edits))
    }

    async fn pre_start(&self, ids: &BTreeSet<DeviceId>) -> Result<(), String> {
        let request = api::PreStartContainerRequest { devices_ids: texts(ids) };
        call(&self.api, request, |mut api, request| async move {
            api.pre_start_container(request).await
        })
        .await
        .map(drop)
        .map_err(|status| text(&status))
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
        self.0.message().await.ok().flatten().map(wire::listed)
    }
}

fn texts(ids: &BTreeSet<DeviceId>) -> Vec<String> {
    ids.iter().map(|id| id.as_str().to_owned()).collect()
}
