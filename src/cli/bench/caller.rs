//! The kubelet's side of a measurement: takes Register, keeps every stream open, and calls.

use super::super::exit::{FAILURE, Failed};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::kubelet::proto::v1beta1::registration_server::{Registration, RegistrationServer};
use crate::kubelet::uds;
use futures_util::{StreamExt, TryStreamExt, stream};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio::sync::{Mutex, mpsc};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

fn failed(error: impl std::fmt::Display) -> Failed {
    Failed::new(FAILURE, error)
}

/// A kubelet that only registers.
#[derive(Debug)]
pub(super) struct Kubelet {
    plugins: Mutex<mpsc::UnboundedReceiver<Caller>>,
}

/// A registered plugin, with the ids of its first list.
#[derive(Debug)]
pub(super) struct Caller {
    plugin: DevicePluginClient<Channel>,
    ids: Vec<String>,
    next: Cell<usize>,
}

struct Registrations {
    device_plugins: PathBuf,
    plugins: mpsc::UnboundedSender<Caller>,
}

#[tonic::async_trait]
impl Registration for Registrations {
    async fn register(&self, request: Request<api::RegisterRequest>) -> Result<Response<api::Empty>, Status> {
        let socket = self.device_plugins.join(request.into_inner().endpoint);
        let channel = uds::connect(socket).await.map_err(|error| Status::unavailable(error.to_string()))?;
        let (plugin, plugins) = (DevicePluginClient::new(channel), self.plugins.clone());
        tokio::spawn(watch(plugin, plugins));
        Ok(Response::new(api::Empty {}))
    }
}

/// Keeps the stream of one registration open; its end would make the daemon register again.
async fn watch(mut plugin: DevicePluginClient<Channel>, plugins: mpsc::UnboundedSender<Caller>) {
    let Ok(lists) = plugin.list_and_watch(api::Empty {}).await else { return };
    let mut lists = lists.into_inner();
    while let Ok(Some(list)) = lists.message().await {
        let ids = list.devices.into_iter().map(|device| device.id).collect();
        // Only the first is waited for.
        drop(plugins.send(Caller { plugin: plugin.clone(), ids, next: Cell::new(0) }));
    }
}

impl Kubelet {
    /// Listens for registrations. Must be called on the runtime that is to serve them.
    pub(super) fn start(kubelet_dir: &Path) -> Result<Self, Failed> {
        let device_plugins = kubelet_dir.join("device-plugins");
        let listener = UnixListener::bind(device_plugins.join("kubelet.sock"))?;
        let (plugins, receiver) = mpsc::unbounded_channel();
        let service = RegistrationServer::new(Registrations { device_plugins, plugins });
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(UnixListenerStream::new(listener)));
        Ok(Kubelet { plugins: Mutex::new(receiver) })
    }

    /// The first plugin that has registered and sent its list.
    pub(super) async fn plugin(&self) -> Result<Caller, Failed> {
        self.plugins.lock().await.recv().await.ok_or_else(|| failed("the private kubelet has ended"))
    }
}

impl Caller {
    /// The next ids of the list, round and round.
    fn take(&self, devices: u64) -> Vec<String> {
        (0..devices)
            .map(|_| {
                let next = self.next.get();
                self.next.set((next + 1) % self.ids.len());
                self.ids[next].clone()
            })
            .collect()
    }

    /// Makes `calls` Allocates, `concurrency` of them at a time, and tells how long each took.
    pub(super) async fn allocate(&self, calls: u64, concurrency: u64, devices: u64, mut tell: impl FnMut(Duration)) -> Result<(), Failed> {
        let call = |_| {
            let container_requests = vec![api::ContainerAllocateRequest { devices_ids: self.take(devices) }];
            let mut plugin = self.plugin.clone();
            async move {
                let began = Instant::now();
                let answer = plugin.allocate(api::AllocateRequest { container_requests }).await.map_err(failed)?;
                let took = began.elapsed();
                match answer.into_inner().container_responses.as_slice() {
                    [response] if !response.devices.is_empty() => Ok(took),
                    _ => Err(failed("an Allocate was answered without devices")),
                }
            }
        };
        let concurrency = usize::try_from(concurrency).unwrap_or(1);
        let mut answers = stream::iter(0..calls).map(call).buffer_unordered(concurrency);
        while let Some(took) = answers.try_next().await? {
            tell(took);
        }
        Ok(())
    }

    /// Makes `calls` calls that ask nobody, `concurrency` of them at a time.
    pub(super) async fn empties(&self, calls: u64, concurrency: u64) -> Result<(), Failed> {
        let concurrency = usize::try_from(concurrency).unwrap_or(1);
        stream::iter(0..calls).map(|_| self.empty()).buffer_unordered(concurrency).try_for_each(|_| async { Ok(()) }).await
    }

    /// One call that asks nobody: what gRPC on this socket costs.
    pub(super) async fn empty(&self) -> Result<Duration, Failed> {
        let mut plugin = self.plugin.clone();
        let began = Instant::now();
        plugin.get_device_plugin_options(api::Empty {}).await.map_err(failed)?;
        Ok(began.elapsed())
    }
}
