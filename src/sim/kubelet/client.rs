//! The kubelet's connection to one plugin, made by one Register.

use super::core::Options;
use super::error::rpc_error;
use super::link::Links;
use super::wire;
use crate::domain::{ContainerEdits, DeviceId, ResourceName};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::kubelet::uds;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tonic::Streaming;
use tonic::transport::Channel;

#[derive(Debug)]
pub(super) struct Client {
    /// Counts the Register calls, from 1.
    pub(super) number: u64,
    pub(super) resource: ResourceName,
    socket: PathBuf,
    links: Links,
    closed: Arc<AtomicBool>,
    api: OnceLock<DevicePluginClient<Channel>>,
}

impl Client {
    pub(super) fn new(number: u64, resource: ResourceName, socket: PathBuf, links: Links) -> Self {
        Client { number, resource, socket, links, closed: Arc::new(AtomicBool::new(false)), api: OnceLock::new() }
    }

    /// Dials until it works, as grpc-go does: at once, then after 1 s, 1.6 s, 2.56 s and so on.
    pub(super) async fn dial(&self, within: Duration) -> Result<(), String> {
        let attempts = async {
            let mut pause = Duration::from_secs(1);
            loop {
                let (number, links, closed) = (self.number, self.links.clone(), Arc::clone(&self.closed));
                let wrap = move |stream| {
                    if closed.load(Ordering::Acquire) {
                        return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "grpc: the client connection is closing"));
                    }
                    links.add(number, stream)
                };
                if let Ok(channel) = uds::connect_through(&self.socket, wrap).await {
                    return channel;
                }
                tokio::time::sleep(pause).await;
                pause = pause.mul_f64(1.6);
            }
        };
        let channel = tokio::time::timeout(within, attempts)
            .await
            .map_err(|_elapsed| "failed to dial device plugin: context deadline exceeded".to_owned())?;
        self.api.get_or_init(|| DevicePluginClient::new(channel));
        Ok(())
    }

    fn api(&self) -> Result<DevicePluginClient<Channel>, String> {
        match self.api.get() {
            Some(api) if !self.closed.load(Ordering::Acquire) => Ok(api.clone()),
            _ => Err("rpc error: code = Canceled desc = grpc: the client connection is closing".to_owned()),
        }
    }

    /// A failed call's text; one that was cut by [`Client::close`] is cancelled, whatever the transport says.
    fn error(&self, status: &tonic::Status) -> String {
        if self.closed.load(Ordering::Acquire) {
            return "rpc error: code = Canceled desc = grpc: the client connection is closing".to_owned();
        }
        rpc_error(status)
    }

    pub(super) async fn options(&self) -> Result<Options, String> {
        let options = async {
            let response = self.api()?.get_device_plugin_options(api::Empty {}).await.map_err(|status| self.error(&status))?;
            Ok(wire::options(response.get_ref()))
        };
        options.await.map_err(|error: String| format!("failed to get device plugin options: {error}"))
    }

    pub(super) async fn list_and_watch(&self) -> Result<Streaming<api::ListAndWatchResponse>, String> {
        let stream = self.api()?.list_and_watch(api::Empty {}).await;
        stream.map(tonic::Response::into_inner).map_err(|status| self.error(&status))
    }

    pub(super) async fn preferred(
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
        let response = self.api()?.get_preferred_allocation(request).await.map_err(|status| self.error(&status))?;
        let first = response.into_inner().container_responses.into_iter().next().unwrap_or_default();
        Ok(first.device_i_ds.into_iter().map(DeviceId::new).collect())
    }

    /// One Allocate for one container, without a deadline; `None` when the answer is empty.
    pub(super) async fn allocate(&self, ids: &BTreeSet<DeviceId>) -> Result<Option<ContainerEdits>, String> {
        let request = api::ContainerAllocateRequest { devices_ids: texts(ids) };
        let request = api::AllocateRequest { container_requests: vec![request] };
        let response = self.api()?.allocate(request).await.map_err(|status| self.error(&status))?;
        Ok(response.into_inner().container_responses.into_iter().next().map(wire::edits))
    }

    /// Closes the connection: calls under way fail, its stream ends.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.links.cut(self.number);
    }
}

fn texts(ids: &BTreeSet<DeviceId>) -> Vec<String> {
    ids.iter().map(|id| id.as_str().to_owned()).collect()
}
