//! The kubelet's side of a measurement: accepts Register, keeps every stream open, and calls the
//! plugin.

use crate::console::exit::{FAILURE, Failed};
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
pub(super) struct FirstList {
    pub(super) resource: String,
    /// Time of the Register call.
    pub(super) registered: Instant,
    /// Time of the list.
    pub(super) listed: Instant,
    pub(super) devices: Vec<api::Device>,
    plugin: DevicePluginClient<Channel>,
}

struct Registrations {
    device_plugins: PathBuf,
    first_lists: mpsc::UnboundedSender<FirstList>,
}

#[tonic::async_trait]
impl Registration for Registrations {
    /// Connects to the plugin and calls GetDevicePluginOptions before it answers, as kubelets since
    /// 1.25 do.
    async fn register(
        &self,
        request: Request<api::RegisterRequest>,
    ) -> Result<Response<api::Empty>, Status> {
        let registered = Instant::now();
        let api::RegisterRequest { endpoint, resource_name, .. } = request.into_inner();
        let channel = uds::connect(self.device_plugins.join(endpoint)).await;
        let mut plugin = DevicePluginClient::new(
            channel.map_err(|error| Status::unavailable(error.to_string()))?,
        );
        plugin.get_device_plugin_options(api::Empty {}).await?;
        tokio::spawn(watch(plugin, resource_name, registered, self.first_lists.clone()));
        Ok(Response::new(api::Empty {}))
    }
}

/// Keeps the stream of one registration open, since its end would cause another Register, and sends
/// its first list to `first_lists`.
async fn watch(
    mut plugin: DevicePluginClient<Channel>,
    resource: String,
    registered: Instant,
    first_lists: mpsc::UnboundedSender<FirstList>,
) {
    let Ok(lists) = plugin.list_and_watch(api::Empty {}).await else { return };
    let mut lists = lists.into_inner();
    let Ok(Some(api::ListAndWatchResponse { devices })) = lists.message().await else { return };
    // The send fails when the measurement has all its lists and dropped the receiver.
    drop(first_lists.send(FirstList {
        resource,
        registered,
        listed: Instant::now(),
        devices,
        plugin,
    }));
    while let Ok(Some(_)) = lists.message().await {}
}

/// Listens for registrations in place of a kubelet. The socket exists when the function returns;
/// the current runtime serves it.
pub(super) fn serve(device_plugins: &Path) -> Result<mpsc::UnboundedReceiver<FirstList>, Failed> {
    let listener = UnixListener::bind(device_plugins.join("kubelet.sock"))?;
    let (first_lists, receiver) = mpsc::unbounded_channel();
    let service = RegistrationServer::new(Registrations {
        device_plugins: device_plugins.to_owned(),
        first_lists,
    });
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
    pub(super) fn new(first_list: FirstList) -> Result<Caller, Failed> {
        let healthy = first_list.devices.into_iter().filter(|device| device.health == "Healthy");
        let ids: Vec<String> = healthy.map(|device| device.id).collect();
        if ids.is_empty() {
            return Err(failed("the plugin lists no healthy device to allocate"));
        }
        Ok(Caller { plugin: first_list.plugin, ids, next: Cell::new(0) })
    }

    /// The plugin behind this socket; it need not be registered.
    pub(super) async fn dial(socket: &Path, deadline: Duration) -> Result<Caller, Failed> {
        let reached = uds::connect(socket).await;
        let reached = reached.map_err(|error| {
            failed(format_args!("no process serves `{}`: {}", socket.display(), root(&error)))
        })?;
        let (plugin, (first_lists, mut first)) =
            (DevicePluginClient::new(reached), mpsc::unbounded_channel());
        tokio::spawn(watch(plugin, String::new(), Instant::now(), first_lists));
        match tokio::time::timeout(deadline, first.recv()).await {
            Ok(Some(first_list)) => Caller::new(first_list),
            _ => Err(failed(format_args!(
                "`{}` sends no list; it is not a device plugin of v1beta1",
                socket.display()
            ))),
        }
    }

    /// The next ids of the list, cyclically.
    fn take(&self, devices: u64) -> Vec<String> {
        (0..devices)
            .map(|_| {
                let next = self.next.get();
                self.next.set((next + 1) % self.ids.len());
                self.ids[next].clone()
            })
            .collect()
    }

    /// Makes `calls` Allocates, `concurrency` at a time, and passes the duration of each to
    /// `record`.
    pub(super) async fn allocate(
        &self,
        calls: u64,
        concurrency: u64,
        devices: u64,
        mut record: impl FnMut(Duration),
    ) -> Result<(), Failed> {
        let call = |_| {
            let container_requests =
                vec![api::ContainerAllocateRequest { devices_ids: self.take(devices) }];
            let mut plugin = self.plugin.clone();
            async move {
                let began = Instant::now();
                let answer = plugin.allocate(api::AllocateRequest { container_requests }).await;
                let took = began.elapsed();
                let answer = answer.map_err(|status| {
                    failed(format_args!("an Allocate was refused: {}", status.message()))
                })?;
                match answer.into_inner().container_responses.len() {
                    1 => Ok(took),
                    answers => Err(failed(format_args!(
                        "an Allocate for 1 container got {answers} answers"
                    ))),
                }
            }
        };
        let concurrency = usize::try_from(concurrency).unwrap_or(1);
        let mut answers = stream::iter(0..calls).map(call).buffer_unordered(concurrency);
        while let Some(took) = answers.try_next().await? {
            record(took);
        }
        Ok(())
    }

    /// Makes `calls` empty calls (GetDevicePluginOptions), `concurrency` at a time.
    pub(super) async fn empties(&self, calls: u64, concurrency: u64) -> Result<(), Failed> {
        let concurrency = usize::try_from(concurrency).unwrap_or(1);
        stream::iter(0..calls)
            .map(|_| self.empty())
            .buffer_unordered(concurrency)
            .try_for_each(|_| async { Ok(()) })
            .await
    }

    /// One empty call: the cost of gRPC on this socket.
    pub(super) async fn empty(&self) -> Result<Duration, Failed> {
        let mut plugin = self.plugin.clone();
        let began = Instant::now();
        plugin.get_device_plugin_options(api::Empty {}).await.map_err(failed)?;
        Ok(began.elapsed())
    }
}

/// The innermost cause of an error.
fn root(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), root)
}
