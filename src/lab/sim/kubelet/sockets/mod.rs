//! The environment of a kubelet for real plugins: gRPC over real sockets, real files, tokio's
//! clock.

mod alpha;
pub(super) mod channel;
pub(super) mod checkpoint;
mod connection;
pub(super) mod files;
pub(super) mod link;
mod services;
mod wire;

use self::connection::Dialled;
use self::files::Files;
use self::link::Links;
use self::services::{PodResourcesService, RegistrationService};
use super::environment::{Connection, Environment, Snapshot, Stop};
use super::hook::{Hook, HookTable, Verdict};
use super::pod::PodSpec;
use super::state::Shared;
use crate::kubelet::proto::podresources_v1::pod_resources_lister_server::PodResourcesListerServer;
use crate::kubelet::proto::podresources_v1alpha1::pod_resources_lister_server::PodResourcesListerServer as AlphaPodResourcesServer;
use crate::kubelet::proto::v1alpha::registration_server::RegistrationServer as AlphaRegistrationServer;
use crate::kubelet::proto::v1beta1::registration_server::RegistrationServer;
use crate::kubelet::services::Services;
use crate::kubelet::tracked_stream::TrackedStream;
use futures_util::future::BoxFuture;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

/// The shortest step of a wait.
const STEP: Duration = Duration::from_millis(5);

/// Real sockets and files.
#[derive(Debug)]
pub(super) struct Sockets {
    pub(super) files: Files,
    hooks: HookTable,
    sync_checkpoint: bool,
    created_at: Instant,
    /// Of the present instance.
    links: Mutex<Links>,
    /// Whether the present instance speaks the API before v1beta1.
    is_alpha: AtomicBool,
}

impl Sockets {
    pub(super) fn new(files: Files, hooks: HookTable, sync_checkpoint: bool) -> Self {
        Sockets {
            files,
            hooks,
            sync_checkpoint,
            created_at: Instant::now(),
            links: Mutex::default(),
            is_alpha: AtomicBool::new(false),
        }
    }

    fn links(&self) -> Links {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn spawn_server(
        &self,
        shared: &Shared,
        instance: u64,
        listener: UnixListener,
        services: Services,
    ) {
        let links = self.links();
        let incoming = UnixListenerStream::new(listener)
            .map(move |stream| links.admit(stream?).map(TrackedStream::from));
        shared.spawn(instance, async move {
            // The server ends with the instance; a failing connection ends only itself.
            let _ = Server::builder().serve_with_incoming(services, incoming).await;
        });
    }
}

impl Stop for AbortHandle {
    fn stop(&self) {
        self.abort();
    }

    fn is_over(&self) -> bool {
        self.is_finished()
    }
}

/// Sleeps in short steps, and counts each at most at its planned length. The kubelet's waits are
/// races with the plugin: on a machine that suspends this process, both have to pause.
async fn sleep_in_steps(time: Duration) {
    let step = STEP.max(time / 16);
    let mut left = time;
    while !left.is_zero() {
        let (now, began) = (left.min(step), Instant::now());
        tokio::time::sleep(now).await;
        left = left.saturating_sub(began.elapsed().min(step));
    }
}

impl Environment for Sockets {
    fn now(&self) -> Duration {
        self.created_at.elapsed()
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        // A sleep of tokio takes at least a millisecond.
        if time.is_zero() {
            Box::pin(std::future::ready(()))
        } else {
            Box::pin(sleep_in_steps(time))
        }
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Box<dyn Stop> {
        Box::new(tokio::spawn(task).abort_handle())
    }

    /// Always the first one, so that a demonstration shows the same every time.
    fn below(&self, _count: usize) -> usize {
        0
    }

    fn hook(&self, hook: Hook) -> Option<BoxFuture<'static, Verdict>> {
        self.hooks.reach(hook)
    }

    fn dial(&self, client: u64, socket: &str) -> BoxFuture<'static, Arc<dyn Connection>> {
        let socket = self.files.plugins_dir().join(socket.trim_start_matches('/'));
        let (links, is_alpha) = (self.links(), self.is_alpha.load(Ordering::Acquire));
        Box::pin(async move {
            let connection: Arc<dyn Connection> = match is_alpha {
                true => Arc::new(alpha::Dialled::dial(client, socket, links).await),
                false => Arc::new(Dialled::dial(client, socket, links).await),
            };
            connection
        })
    }

    fn prepare(&self) -> io::Result<()> {
        *self.links.lock().unwrap_or_else(PoisonError::into_inner) = Links::default();
        self.files.create()
    }

    fn serve_pod_resources(&self, shared: &Arc<Shared>, instance: u64) -> io::Result<()> {
        let alpha = alpha::PodResourcesService { shared: Arc::clone(shared), instance };
        let mut services = Services::default().and(AlphaPodResourcesServer::new(alpha));
        if !shared.profile().is_alpha() {
            services = services.and(PodResourcesListerServer::new(PodResourcesService {
                shared: Arc::clone(shared),
                instance,
            }));
        }
        // As in the real kubelet, the old socket is removed, the new one is bound under another
        // name and renamed. In between no socket answers.
        let socket = self.files.pod_resources_socket();
        let temporary = socket.with_file_name(format!("kubelet.sock.{instance}"));
        files::remove(&socket)?;
        files::remove(&temporary)?;
        let listener = UnixListener::bind(&temporary)?;
        std::fs::rename(&temporary, &socket)?;
        self.spawn_server(shared, instance, listener, services);
        Ok(())
    }

    fn stale_sockets(&self) -> io::Result<Vec<String>> {
        self.files.stale_sockets()
    }

    fn remove_socket(&self, name: &str) -> BoxFuture<'static, io::Result<()>> {
        Box::pin(std::future::ready(files::remove(&self.files.plugins_dir().join(name))))
    }

    fn serve_registration(&self, shared: &Arc<Shared>, instance: u64) -> io::Result<()> {
        let listener = UnixListener::bind(self.files.registration_socket())?;
        let is_alpha = shared.profile().is_alpha();
        self.is_alpha.store(is_alpha, Ordering::Release);
        let services = Services::default();
        let services = match is_alpha {
            true => services.and(AlphaRegistrationServer::new(alpha::RegistrationService {
                shared: Arc::clone(shared),
                instance,
            })),
            false => services.and(RegistrationServer::new(RegistrationService {
                shared: Arc::clone(shared),
                instance,
            })),
        };
        self.spawn_server(shared, instance, listener, services);
        Ok(())
    }

    fn cut(&self) {
        self.links().cut_all();
    }

    fn read_checkpoint(&self) -> Result<Option<Snapshot>, String> {
        match self.files.read_checkpoint() {
            Ok(bytes) => checkpoint::decode(&bytes).map(Some).map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    fn write_checkpoint(&self, snapshot: Snapshot) -> Result<(), String> {
        let bytes = checkpoint::encode(&snapshot).map_err(|error| error.to_string())?;
        self.files.write_checkpoint(&bytes, self.sync_checkpoint).map_err(|error| error.to_string())
    }

    fn create_pod(&self, spec: &PodSpec) -> io::Result<()> {
        self.files.create_pod(spec)
    }

    fn create_logs(&self, spec: &PodSpec, container: &str) -> io::Result<()> {
        self.files.create_logs(spec, container)
    }

    fn remove_cgroup(&self, uid: &str) -> io::Result<()> {
        self.files.remove_cgroup(uid)
    }

    fn remove_logs(&self, spec: &PodSpec) -> io::Result<()> {
        self.files.remove_logs(spec)
    }

    /// There is no container runtime; every CDI name resolves.
    fn resolves(&self, _cdi_name: &str) -> bool {
        true
    }
}
