//! The kubelet's side of a measurement: takes Register, keeps every stream open, and calls.

use super::super::exit::{FAILURE, Failed};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::kubelet::proto::v1beta1::registration_server::{Registration, RegistrationServer};
use crate::kubelet::services::Services;
use crate::kubelet::tracked_stream::TrackedStream;
use crate::kubelet::uds;
use futures_util::{StreamExt, TryStreamExt, stream};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

pub(super) fn failed(error: impl std::fmt::Display) -> Failed {
    Failed::new(FAILURE, error)
}

/// The first list of a registration.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) resource: String,
    /// When Register came.
    pub(super) registered: Instant,
    /// When the list came.
    pub(super) listed: Instant,
    pub(super) devices: Vec<api::Device>,
    plugin: DevicePluginClient<Channel>,
}

struct Registrations {
    device_plugins: PathBuf,
    heard: mpsc::UnboundedSender<Heard>,
}

#[tonic::async_trait]
impl Registration for Registrations {
    /// Dials the plugin and asks for its options before it answers, as kubelets since 1.25 do.
    async fn register(&self, request: Request<api::RegisterRequest>) -> Result<Response<api::Empty>, Status> {
        let registered = Instant::now();
        let api::RegisterRequest { endpoint, resource_name, .. } = request.into_inner();
        let channel = uds::connect(self.device_plugins.join(endpoint)).await;
        let mut plugin = DevicePluginClient::new(channel.map_err(|error| Status::unavailable(error.to_string()))?);
        plugin.get_device_plugin_options(api::Empty {}).await?;
        tokio::spawn(watch(plugin, resource_name, registered, self.heard.clone()));
        Ok(Response::new(api::Empty {}))
    }
}

/// Keeps the stream of one registration open, since its end would make the daemon register again, and tells of its first list.
async fn watch(mut plugin: DevicePluginClient<Channel>, resource: String, registered: Instant, heard: mpsc::UnboundedSender<Heard>) {
    let Ok(lists) = plugin.list_and_watch(api::Empty {}).await else { return };
    let mut lists = lists.into_inner();
    let Ok(Some(api::ListAndWatchResponse { devices })) = lists.message().await else { return };
    // Nobody listens any more when everything was heard.
    drop(heard.send(Heard { resource, registered, listed: Instant::now(), devices, plugin }));
    while let Ok(Some(_)) = lists.message().await {}
}

/// Listens for registrations, in the place of a kubelet. The socket is there when it returns, and the present runtime serves it.
pub(super) fn serve(device_plugins: &Path) -> Result<mpsc::UnboundedReceiver<Heard>, Failed> {
    let listener = UnixListener::bind(device_plugins.join("kubelet.sock"))?;
    let (heard, receiver) = mpsc::unbounded_channel();
    let service = RegistrationServer::new(Registrations { device_plugins: device_plugins.to_owned(), heard });
    let incoming = UnixListenerStream::new(listener).map_ok(TrackedStream::from);
    tokio::spawn(Server::builder().serve_with_incoming(Services::default().and(service), incoming));
    Ok(receiver)
}

/// A plugin that has sent its list.
#[derive(Debug)]
pub(super) struct Caller {
    plugin: DevicePluginClient<Channel>,
    ids: Vec<String>,
    next: Cell<usize>,
}

impl Caller {
    /// The plugin of a registration.
    pub(super) fn new(heard: Heard) -> Result<Caller, Failed> {
        let healthy = heard.devices.into_iter().filter(|device| device.health == "Healthy");
        let ids: Vec<String> = healthy.map(|device| device.id).collect();
        if ids.is_empty() {
            return Err(failed("the plugin lists no healthy device that could be asked for"));
        }
        Ok(Caller { plugin: heard.plugin, ids, next: Cell::new(0) })
    }

    /// Whoever serves this socket, whether it is registered or not.
    pub(super) async fn dial(socket: &Path, patience: Duration) -> Result<Caller, Failed> {
        let reached = uds::connect(socket).await;
        let reached = reached.map_err(|error| failed(format_args!("nobody serves `{}`: {}", socket.display(), root(&error))))?;
        let (plugin, (heard, mut first)) = (DevicePluginClient::new(reached), mpsc::unbounded_channel());
        tokio::spawn(watch(plugin, String::new(), Instant::now(), heard));
        match tokio::time::timeout(patience, first.recv()).await {
            Ok(Some(heard)) => Caller::new(heard),
            _ => Err(failed(format_args!("`{}` sends no list: it is no device plugin of v1beta1", socket.display()))),
        }
    }

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
                let answer = plugin.allocate(api::AllocateRequest { container_requests }).await;
                let took = began.elapsed();
                let answer = answer.map_err(|status| failed(format_args!("an Allocate was refused: {}", status.message())))?;
                match answer.into_inner().container_responses.len() {
                    1 => Ok(took),
                    answers => Err(failed(format_args!("an Allocate for one container was answered for {answers}"))),
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

/// What is at the bottom of an error.
fn root(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), root)
}
