//! A DRA driver that records every action of the kubelet.

use crate::recording::tasks::Loop;
use crate::recording::timeline::Recorder;
use holdfast::kubelet::proto::dra_health_v1alpha1::dra_resource_health_server::{
    DraResourceHealth, DraResourceHealthServer,
};
use holdfast::kubelet::proto::dra_v1::dra_plugin_server::DraPluginServer as V1;
use holdfast::kubelet::proto::dra_v1beta1::dra_plugin_server::DraPluginServer as V1Beta1;
use holdfast::kubelet::proto::pluginregistration as registration;
use holdfast::kubelet::proto::pluginregistration::registration_server::{
    Registration, RegistrationServer,
};
use holdfast::kubelet::proto::{dra_health_v1alpha1 as health, dra_v1, dra_v1beta1};
use holdfast::kubelet::services::Services;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// The driver of every script.
pub(crate) const DRIVER: &str = "timeline.example.com";
/// Its pool, and the only device in it.
pub(crate) const POOL: &str = "pool";
pub(crate) const DEVICE: &str = "device";
/// The gRPC services that it offers, unless a script names others.
pub(crate) const USUAL: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];

/// One process of the driver, with sockets and a thread of its own. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Driver {
    registration: PathBuf,
    answers: Answers,
    _tasks: Loop,
}

/// What the next calls are answered.
#[derive(Debug, Clone)]
struct Answers {
    /// The number of next Prepares and Unprepares that fail.
    failures: [Arc<AtomicUsize>; 2],
    /// Whether Prepares wait.
    holds: watch::Sender<bool>,
    dies: Arc<AtomicBool>,
}

impl Answers {
    fn fails(&self, call: usize) -> bool {
        let take = |left: usize| left.checked_sub(1);
        self.failures[call].fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }
}

impl Driver {
    /// Serves and lets the kubelet register it. `name` is that of the process.
    pub(crate) fn start(
        kubelet_dir: &Path,
        recorder: &Recorder,
        name: &'static str,
        versions: &[&str],
    ) -> Self {
        let tasks = Loop::start();
        let answers = Answers {
            failures: [Arc::default(), Arc::default()],
            holds: watch::Sender::new(false),
            dies: Arc::default(),
        };
        let service = Service { name, recorder: recorder.clone(), answers: answers.clone() };
        let bind = |socket: &Path| {
            fs::create_dir_all(socket.parent().unwrap()).unwrap();
            drop(fs::remove_file(socket));
            let listener = tasks.run(async { UnixListener::bind(socket) }).unwrap();
            UnixListenerStream::new(listener)
        };
        let endpoint = kubelet_dir.join("plugins").join(DRIVER).join(format!("{name}.sock"));
        let plugin = Services::default()
            .and(V1::new(service.clone()))
            .and(V1Beta1::new(service.clone()))
            .and(DraResourceHealthServer::new(service.clone()));
        let incoming = bind(&endpoint);
        tasks.spawn(async move {
            Server::builder().serve_with_incoming(plugin, incoming).await.unwrap();
        });
        let info = registration::PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: DRIVER.to_owned(),
            endpoint: endpoint.to_str().unwrap().to_owned(),
            supported_versions: versions.iter().map(ToString::to_string).collect(),
        };
        let registry = kubelet_dir.join("plugins_registry");
        let kubelet_dir = kubelet_dir.to_str().unwrap().to_owned();
        // The kubelet sends the path as the authority, which needs an `@` here.
        let registration = registry.join(format!("{DRIVER}-{name}@reg.sock"));
        let services = Services::default().and(RegistrationServer::new(Registrar {
            info,
            kubelet_dir,
            service,
        }));
        let incoming = bind(&registration);
        tasks.spawn(async move {
            Server::builder().serve_with_incoming(services, incoming).await.unwrap();
        });
        Driver { registration, answers, _tasks: tasks }
    }

    /// Removes the registration socket: the kubelet forgets this process.
    pub(crate) fn leave(&self) {
        fs::remove_file(&self.registration).unwrap();
    }

    pub(crate) fn fail_prepare(&self) {
        self.answers.failures[0].store(1, Ordering::SeqCst);
    }

    pub(crate) fn fail_unprepare(&self) {
        self.answers.failures[1].store(1, Ordering::SeqCst);
    }

    /// Lets each Prepare wait until it is called with `false`.
    pub(crate) fn hold(&self, holds: bool) {
        self.answers.holds.send_replace(holds);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.answers.dies.store(true, Ordering::SeqCst);
    }
}

#[derive(Clone)]
struct Registrar {
    info: registration::PluginInfo,
    kubelet_dir: String,
    service: Service,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        self.service.note(" registration", "GetInfo");
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        // The two kubelets have different directories.
        let error = status.error.replace(&self.kubelet_dir, "KUBELET");
        let result = if status.plugin_registered { "registered" } else { &*error };
        self.service.note(" registration", format!("NotifyRegistrationStatus {result}"));
        Ok(Response::new(registration::RegistrationStatusResponse {}))
    }
}

#[derive(Clone)]
struct Service {
    name: &'static str,
    recorder: Recorder,
    answers: Answers,
}

impl Service {
    fn note(&self, lane: &str, text: impl Into<String>) {
        self.recorder.note(format!("{}{lane}", self.name), text);
    }

    /// Records a call for these claims. The error for all of them, if it fails.
    fn called(&self, call: usize, what: &str, claims: impl Iterator<Item = String>) -> String {
        // Their order in a call is not defined.
        let claims = claims.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" ");
        let fails = self.answers.fails(call);
        self.note("", format!("{what} {claims}{}", if fails { ": fails" } else { "" }));
        if fails { "not now".to_owned() } else { String::new() }
    }

    /// Waits while Prepares are held, and records if the kubelet cancels the call meanwhile.
    async fn wait(&self) {
        let mut cancelled = Cancelled(Some(self.clone()));
        let mut holds = self.answers.holds.subscribe();
        // It fails only with the driver.
        drop(holds.wait_for(|holds| !holds).await);
        cancelled.0 = None;
    }
}

/// Records its end, if it was not disarmed.
struct Cancelled(Option<Service>);

impl Drop for Cancelled {
    fn drop(&mut self) {
        if let Some(service) = self.0.take().filter(|of| !of.answers.dies.load(Ordering::SeqCst)) {
            service.note("", "NodePrepareResources is cancelled");
        }
    }
}

macro_rules! plugin {
    ($api:ident, $suffix:literal, $($share_id:tt)*) => {
        #[tonic::async_trait]
        impl $api::dra_plugin_server::DraPlugin for Service {
            async fn node_prepare_resources(
                &self,
                request: Request<$api::NodePrepareResourcesRequest>,
            ) -> Result<Response<$api::NodePrepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims;
                let names = claims.iter().map(|claim| claim.name.clone());
                let error = self.called(0, concat!("NodePrepareResources", $suffix), names);
                self.wait().await;
                let device = |claim: &$api::Claim| $api::Device {
                    request_names: vec!["request".to_owned()],
                    pool_name: POOL.to_owned(),
                    device_name: format!("{DEVICE}-{}", claim.name),
                    cdi_device_ids: Vec::new(),
                    $($share_id)*
                };
                let answer = |claim: $api::Claim| {
                    let devices = if error.is_empty() { vec![device(&claim)] } else { Vec::new() };
                    let error = error.clone();
                    (claim.uid, $api::NodePrepareResourceResponse { devices, error })
                };
                let claims = claims.into_iter().map(answer).collect();
                Ok(Response::new($api::NodePrepareResourcesResponse { claims }))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$api::NodeUnprepareResourcesRequest>,
            ) -> Result<Response<$api::NodeUnprepareResourcesResponse>, Status> {
                let claims = request.into_inner().claims;
                let names = claims.iter().map(|claim| claim.name.clone());
                let error = self.called(1, concat!("NodeUnprepareResources", $suffix), names);
                let answer = |claim: $api::Claim| {
                    let error = error.clone();
                    (claim.uid, $api::NodeUnprepareResourceResponse { error })
                };
                let claims = claims.into_iter().map(answer).collect();
                Ok(Response::new($api::NodeUnprepareResourcesResponse { claims }))
            }
        }
    };
}

plugin!(dra_v1, "", share_id: None,);
plugin!(dra_v1beta1, " of v1beta1",);

#[tonic::async_trait]
impl DraResourceHealth for Service {
    type NodeWatchResourcesStream = Reports;

    async fn node_watch_resources(
        &self,
        _: Request<health::NodeWatchResourcesRequest>,
    ) -> Result<Response<Reports>, Status> {
        self.note(" health", "NodeWatchResources");
        Ok(Response::new(Reports(self.clone())))
    }
}

/// A stream without reports, which records its end.
struct Reports(Service);

impl Stream for Reports {
    type Item = Result<health::NodeWatchResourcesResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Pending
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        if !self.0.answers.dies.load(Ordering::SeqCst) {
            self.0.note(" health", "cut");
        }
    }
}
