//! A device plugin that records every action of the kubelet.

use super::tap::{Lane, Tapped};
use crate::recording::tasks::Loop;
use crate::recording::timeline::Recorder;
use crate::{SOON, wait_for};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use holdfast::kubelet::proto::v1beta1::registration_client::RegistrationClient;
use holdfast::kubelet::uds;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// The resource of every script.
pub(crate) const RESOURCE: &str = "example.com/timeline";
/// The devices that a plugin offers.
pub(crate) const DEVICES: [&str; 4] = ["d0", "d1", "d2", "d3"];
/// The folder of the plugins' sockets, below the kubelet's directory. The kubelet's clean-up does
/// not touch it.
pub(crate) const SOCKETS: &str = ".recorded";

/// A plugin with a socket and a thread of its own. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Plugin {
    name: &'static str,
    recorder: Recorder,
    registration: PathBuf,
    /// `None` ends every stream.
    lists: watch::Sender<Option<Vec<&'static str>>>,
    /// The number of open streams.
    streams: Arc<AtomicUsize>,
    dies: Arc<AtomicBool>,
    tasks: Loop,
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.dies.store(true, Ordering::SeqCst);
    }
}

impl Plugin {
    /// Serves the devices without a Register. With an error instead of options, a Register fails.
    pub(crate) fn serve(
        device_plugins: &Path,
        recorder: &Recorder,
        name: &'static str,
        options: Result<(), &'static str>,
    ) -> Self {
        let sockets = device_plugins.join(SOCKETS);
        fs::create_dir_all(&sockets).unwrap();
        let socket = sockets.join(name);
        drop(fs::remove_file(&socket));
        let (tasks, lists) = (Loop::start(), watch::Sender::new(Some(DEVICES.to_vec())));
        let (streams, dies) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let service = Service {
            recorder: recorder.clone(),
            lists: lists.clone(),
            streams: Arc::clone(&streams),
            dies: Arc::clone(&dies),
            options,
        };
        let (taps, dead) = (recorder.clone(), Arc::clone(&dies));
        let mut connections = 0;
        let listener = tasks.run(async { UnixListener::bind(&socket) }).unwrap();
        let incoming = UnixListenerStream::new(listener).map(move |stream| {
            connections += 1;
            Ok::<_, std::io::Error>(Tapped::new(
                stream?,
                Lane(format!("{name}#{connections}")),
                taps.clone(),
                Arc::clone(&dead),
            ))
        });
        tasks.spawn(async move {
            Server::builder()
                .serve_with_incoming(DevicePluginServer::new(service), incoming)
                .await
                .unwrap();
        });
        let registration = device_plugins.join("kubelet.sock");
        Plugin { name, recorder: recorder.clone(), registration, lists, streams, dies, tasks }
    }

    fn request(&self) -> api::RegisterRequest {
        let endpoint = format!("{SOCKETS}/{}", self.name);
        api::RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint,
            resource_name: RESOURCE.to_owned(),
            options: None,
        }
    }

    /// Registers, and records the result.
    pub(crate) fn register(&self) {
        self.register_as(self.request());
    }

    /// Registers with another version or resource name.
    pub(crate) fn register_with(&self, version: &str, resource: &str) {
        self.register_as(api::RegisterRequest {
            version: version.to_owned(),
            resource_name: resource.to_owned(),
            ..self.request()
        });
    }

    fn register_as(&self, request: api::RegisterRequest) {
        self.tasks.run(register(
            self.recorder.clone(),
            self.registration.clone(),
            self.name,
            request,
        ));
    }

    /// From now on, registers each time a kubelet starts.
    pub(crate) fn follow(&self) {
        let (recorder, registration, name, request) =
            (self.recorder.clone(), self.registration.clone(), self.name, self.request());
        let mut made = recorder.kubelet_made();
        self.tasks.spawn(async move {
            while made.changed().await.is_ok() {
                register(recorder.clone(), registration.clone(), name, request.clone()).await;
            }
        });
    }

    /// Sends another list on every stream.
    pub(crate) fn list(&self, devices: &[&'static str]) {
        self.lists.send_replace(Some(devices.to_vec()));
    }

    /// Ends the streams only; [`Plugin::list`] lets it serve new ones.
    pub(crate) fn end_streams(&self) {
        self.lists.send_replace(None);
        wait_for("the streams end", SOON, || {
            (self.streams.load(Ordering::SeqCst) == 0).then_some(())
        });
    }
}

async fn register(
    recorder: Recorder,
    registration: PathBuf,
    name: &str,
    request: api::RegisterRequest,
) {
    // The kubelet's socket exists before the kubelet listens on it.
    let channel = loop {
        match uds::connect(&registration).await {
            Ok(channel) => break channel,
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    };
    let answer = RegistrationClient::new(channel).register(request).await;
    let said = answer.map_or_else(
        |status| format!("{:?}: {}", status.code(), status.message()),
        |_| "ok".to_owned(),
    );
    recorder.note(format!("Register({name})"), said);
}

struct Service {
    recorder: Recorder,
    lists: watch::Sender<Option<Vec<&'static str>>>,
    streams: Arc<AtomicUsize>,
    dies: Arc<AtomicBool>,
    options: Result<(), &'static str>,
}

impl Service {
    fn called<T>(&self, request: &Request<T>, what: impl Into<String>) -> Lane {
        let lane = request.extensions().get::<Lane>().unwrap().clone();
        self.recorder.note(&lane.0, what);
        lane
    }
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Watched;

    async fn get_device_plugin_options(
        &self,
        request: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        self.called(&request, "GetDevicePluginOptions");
        self.options.map_err(Status::failed_precondition)?;
        Ok(Response::new(api::DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    async fn list_and_watch(
        &self,
        request: Request<api::Empty>,
    ) -> Result<Response<Watched>, Status> {
        let lane = self.called(&request, "ListAndWatch");
        let lists = WatchStream::new(self.lists.subscribe());
        self.streams.fetch_add(1, Ordering::SeqCst);
        let (streams, dies) = (Arc::clone(&self.streams), Arc::clone(&self.dies));
        Ok(Response::new(Watched {
            lists,
            lane,
            recorder: self.recorder.clone(),
            streams,
            dies,
            is_ended: false,
        }))
    }

    /// The first ones in the order of their names, so that every kubelet allocates the same.
    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let asked = request.get_ref().container_requests[0].clone();
        let (mut available, mut required) =
            (asked.available_device_i_ds, asked.must_include_device_i_ds);
        available.sort();
        required.sort();
        let size = asked.allocation_size;
        self.called(
            &request,
            format!(
                "GetPreferredAllocation {size} of [{}] with [{}]",
                available.join(" "),
                required.join(" ")
            ),
        );
        available.retain(|id| !required.contains(id));
        required.extend(available);
        required.truncate(usize::try_from(size).unwrap());
        let response = api::ContainerPreferredAllocationResponse { device_i_ds: required };
        Ok(Response::new(api::PreferredAllocationResponse { container_responses: vec![response] }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let containers = request
            .get_ref()
            .container_requests
            .iter()
            .map(|container| sorted(&container.devices_ids));
        let containers: Vec<String> = containers.collect();
        self.called(&request, format!("Allocate {}", containers.join(", ")));
        let response = |ids: String| api::ContainerAllocateResponse {
            envs: [("DEVICES".to_owned(), ids)].into(),
            ..Default::default()
        };
        Ok(Response::new(api::AllocateResponse {
            container_responses: containers.into_iter().map(response).collect(),
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        let ids = sorted(&request.get_ref().devices_ids);
        self.called(&request, format!("PreStartContainer {ids}"));
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

fn sorted(ids: &[String]) -> String {
    let mut ids = ids.to_vec();
    ids.sort();
    ids.join(" ")
}

/// A stream of lists that records when the kubelet ends it.
struct Watched {
    lists: WatchStream<Option<Vec<&'static str>>>,
    lane: Lane,
    recorder: Recorder,
    streams: Arc<AtomicUsize>,
    dies: Arc<AtomicBool>,
    is_ended: bool,
}

impl Stream for Watched {
    type Item = Result<api::ListAndWatchResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let device = |id: &str| api::Device {
            id: id.to_owned(),
            health: "Healthy".to_owned(),
            topology: None,
        };
        Pin::new(&mut self.lists).poll_next(context).map(|list| match list.flatten() {
            Some(ids) => Some(Ok(api::ListAndWatchResponse {
                devices: ids.into_iter().map(device).collect(),
            })),
            None => {
                self.is_ended = true;
                None
            }
        })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.streams.fetch_sub(1, Ordering::SeqCst);
        if !self.is_ended && !self.dies.load(Ordering::SeqCst) {
            self.recorder.note(format!("{} stream", self.lane.0), "cut");
        }
    }
}
