//! A minimal device plugin: the floor of a registration. It prepares its lists, watches for the
//! kubelet's socket, registers all resources at once over one connection, and sends each stream its
//! list. Its sockets are in a directory that no kubelet cleans, so it never has to create new ones.

use crate::host::DirWatch;
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::kubelet::proto::v1beta1::registration_client::RegistrationClient;
use crate::kubelet::services::Services;
use crate::kubelet::tracked_stream::TrackedStream;
use crate::kubelet::uds;
use futures_util::future::join_all;
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt as _};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Subdirectory of the device-plugin directory.
const SOCKETS: &str = ".bare";
/// Delay before the next attempt, while the kubelet's socket exists but does not listen yet.
const RETRY_AFTER: Duration = Duration::from_millis(1);

/// The plugin, on a thread of its own. Dropping it ends it.
#[derive(Debug)]
pub(super) struct MinimalPlugin {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MinimalPlugin {
    /// Serves these lists by resource.
    pub(super) fn start(
        device_plugins: &Path,
        lists: BTreeMap<String, Vec<api::Device>>,
    ) -> io::Result<MinimalPlugin> {
        let dir = device_plugins.to_owned();
        std::fs::create_dir_all(dir.join(SOCKETS))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("minimal plugin".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    ended = run(&dir, lists) => if let Err(error) = ended { crate::console::eprintln(format_args!("the minimal plugin ended: {error}")) },
                    _ = stopped => {}
                }
            });
        })?;
        Ok(MinimalPlugin { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for MinimalPlugin {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic has been printed already.
            drop(thread.join());
        }
    }
}

async fn run(dir: &Path, lists: BTreeMap<String, Vec<api::Device>>) -> io::Result<()> {
    let mut requests = Vec::new();
    for (number, (resource_name, devices)) in lists.into_iter().enumerate() {
        let endpoint = format!("{SOCKETS}/{number}.sock");
        let listener = UnixListener::bind(dir.join(&endpoint))?;
        let service = DevicePluginServer::new(Listed(api::ListAndWatchResponse { devices }));
        let incoming = UnixListenerStream::new(listener).map_ok(TrackedStream::from);
        tokio::spawn(
            Server::builder().serve_with_incoming(Services::default().and(service), incoming),
        );
        let options = Some(api::DevicePluginOptions::default());
        requests.push(api::RegisterRequest {
            version: "v1beta1".into(),
            endpoint,
            resource_name,
            options,
        });
    }
    let mut changes = DirWatch::new([dir.to_owned()])?;
    let (socket, mut known) = (dir.join("kubelet.sock"), None);
    loop {
        while let Some(present) = identity(&socket).filter(|present| known != Some(*present)) {
            match register(&socket, &requests).await {
                Ok(()) => known = Some(present),
                Err(_) => tokio::time::sleep(RETRY_AFTER).await,
            }
        }
        changes.next().await?;
    }
}

/// Distinguishes the sockets of successive kubelets: inode and change time.
fn identity(socket: &PathBuf) -> Option<(u64, i64, i64)> {
    std::fs::metadata(socket)
        .ok()
        .map(|metadata| (metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

async fn register(socket: &Path, requests: &[api::RegisterRequest]) -> Result<(), Status> {
    let channel =
        uds::connect(socket).await.map_err(|error| Status::unavailable(error.to_string()))?;
    let calls = requests.iter().cloned().map(|request| {
        let mut client = RegistrationClient::new(channel.clone());
        async move { client.register(request).await.map(drop) }
    });
    join_all(calls).await.into_iter().collect()
}

/// Sends one list, then nothing.
struct Listed(api::ListAndWatchResponse);

#[tonic::async_trait]
impl DevicePlugin for Listed {
    type ListAndWatchStream = BoxStream<'static, Result<api::ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(api::DevicePluginOptions::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let list = self.0.clone();
        Ok(Response::new(stream::once(async { Ok(list) }).chain(stream::pending()).boxed()))
    }

    async fn allocate(
        &self,
        _: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        Err(Status::unimplemented("the minimal plugin only registers"))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("the minimal plugin only registers"))
    }

    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("the minimal plugin only registers"))
    }
}
