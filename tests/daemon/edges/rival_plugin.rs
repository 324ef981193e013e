//! A foreign plugin for the same resource: an older instance during an upgrade, or another vendor's
//! plugin.

use crate::edges::stage::{GPUS, Stage, gpu};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use holdfast::kubelet::proto::v1beta1::registration_client::RegistrationClient;
use holdfast::kubelet::uds;
use holdfast::lab::sim::kubelet::{EventKind, View};
use std::pin::Pin;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

type Lists = Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

/// Its use of the resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RivalBehaviour {
    /// It offers the same devices, and gives none: it is about to exit.
    Leaves,
    /// It offers the same devices, and gives them without an alloc-id.
    Gives,
    /// It offers devices of its own.
    OffersOthers,
}

/// The plugin. It ends with this value.
#[derive(Debug)]
pub(crate) struct RivalPlugin {
    /// Whether its streams are open.
    streaming: watch::Sender<bool>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for RivalPlugin {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl RivalPlugin {
    /// Registers, and waits until its list has arrived.
    pub(crate) async fn start(stage: &Stage) -> RivalPlugin {
        RivalPlugin::with(stage, RivalBehaviour::Leaves).await
    }

    pub(crate) async fn with(stage: &Stage, behaviour: RivalBehaviour) -> RivalPlugin {
        let (streaming, _) = watch::channel(true);
        let path =
            |number: &u32| stage.node.path(&format!("kubelet/device-plugins/rival-{number}.sock"));
        let number = (1..).find(|number| !path(number).exists()).unwrap();
        let listener = UnixListener::bind(path(&number)).unwrap();
        let service = DevicePluginServer::new(Service { streaming: streaming.clone(), behaviour });
        let incoming = UnixListenerStream::new(listener);
        let server = tokio::spawn(async move {
            Server::builder().serve_with_incoming(service, incoming).await.unwrap();
        });
        register(stage, &format!("rival-{number}.sock")).await.unwrap();
        let client = stage.kubelet.view(|view| view.endpoint_state(&gpu()).serving).unwrap();
        let listed = |view: &View<'_>| {
            view.last(|kind| matches!(kind, EventKind::Listed { client: of, .. } if *of == client))
                .is_some()
        };
        stage.wait(listed).await;
        RivalPlugin { streaming, server }
    }

    /// Ends its streams, and nothing else.
    pub(crate) fn end_streams(&self) {
        self.streaming.send_replace(false);
    }
}

/// Registers `example.com/gpu` at an endpoint.
pub(crate) async fn register(stage: &Stage, endpoint: &str) -> Result<(), Status> {
    let channel =
        uds::connect(stage.node.path("kubelet/device-plugins/kubelet.sock")).await.unwrap();
    let request = api::RegisterRequest {
        version: "v1beta1".to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: gpu().to_string(),
        options: None,
    };
    RegistrationClient::new(channel).register(request).await.map(drop)
}

struct Service {
    streaming: watch::Sender<bool>,
    behaviour: RivalBehaviour,
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Lists;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(api::DevicePluginOptions::default()))
    }

    async fn list_and_watch(&self, _: Request<api::Empty>) -> Result<Response<Lists>, Status> {
        let stem =
            if self.behaviour == RivalBehaviour::OffersOthers { "vendor-" } else { "dev:gpu" };
        let device = |index| api::Device {
            id: format!("{stem}{index}"),
            health: "Healthy".to_owned(),
            topology: None,
        };
        let list = api::ListAndWatchResponse { devices: (0..GPUS).map(device).collect() };
        let lists = WatchStream::new(self.streaming.subscribe())
            .map_while(move |streaming| streaming.then(|| Ok(list.clone())));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        if self.behaviour == RivalBehaviour::Gives {
            let answers = request
                .into_inner()
                .container_requests
                .iter()
                .map(|_| api::ContainerAllocateResponse::default())
                .collect();
            return Ok(Response::new(api::AllocateResponse { container_responses: answers }));
        }
        Err(Status::unavailable("this plugin is about to leave"))
    }

    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }
}
