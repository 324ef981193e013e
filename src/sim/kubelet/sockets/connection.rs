//! The kubelet's connection to one plugin over gRPC, made by one Register.

use super::super::core::{ListedDevice, Options};
use super::super::error::rpc_error;
use super::super::ground::{Connection, Lists};
use super::link::Links;
use super::wire;
use crate::domain::{ContainerEdits, DeviceId};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::kubelet::uds;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tonic::Streaming;
use tonic::transport::Channel;

#[derive(Debug)]
pub(super) struct Dialled {
    client: u64,
    links: Links,
    closed: Arc<AtomicBool>,
    api: DevicePluginClient<Channel>,
}

impl Dialled {
    /// Dials until it works, as grpc-go does: at once, then after 1 s, 1.6 s, 2.56 s and so on.
    pub(super) async fn dial(client: u64, socket: PathBuf, links: Links) -> Self {
        let closed = Arc::new(AtomicBool::new(false));
        let mut pause = Duration::from_secs(1);
        loop {
            let (wrapped, over) = (links.clone(), Arc::clone(&closed));
            let wrap = move |stream| {
                if over.load(Ordering::Acquire) {
                    return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "grpc: the client connection is closing"));
                }
                wrapped.add(client, stream)
            };
            if let Ok(channel) = uds::connect_through(&socket, wrap).await {
                return Dialled { client, links, closed, api: DevicePluginClient::new(channel) };
            }
            tokio::time::sleep(pause).await;
            pause = pause.mul_f64(1.6);
        }
    }
}

fn text(status: &tonic::Status) -> String {
    rpc_error(status)
}

#[tonic::async_trait]
impl Connection for Dialled {
    async fn options(&self) -> Result<Options, String> {
        let response = self.api.clone().get_device_plugin_options(api::Empty {}).await.map_err(|status| text(&status))?;
        Ok(wire::options(response.get_ref()))
    }

    async fn list_and_watch(&self) -> Result<Box<dyn Lists>, String> {
        let stream = self.api.clone().list_and_watch(api::Empty {}).await.map_err(|status| text(&status))?;
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
        let response = self.api.clone().get_preferred_allocation(request).await.map_err(|status| text(&status))?;
        let first = response.into_inner().container_responses.into_iter().next().unwrap_or_default();
        Ok(first.device_i_ds.into_iter().map(DeviceId::new).collect())
    }

    async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Option<ContainerEdits>, String> {
        let request = api::ContainerAllocateRequest { devices_ids: texts(ids) };
        let request = api::AllocateRequest { container_requests: vec![request] };
        let response = self.api.clone().allocate(request).await.map_err(|status| text(&status))?;
        Ok(response.into_inner().container_responses.into_iter().next().map(wire::edits))
    }

    async fn pre_start(&self, ids: &BTreeSet<DeviceId>) -> Result<(), String> {
        let request = api::PreStartContainerRequest { devices_ids: texts(ids) };
        self.api.clone().pre_start_container(request).await.map(drop).map_err(|status| text(&status))
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.links.cut(self.client);
    }

    fn is_open(&self) -> bool {
        self.links.is_open(self.client)
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
