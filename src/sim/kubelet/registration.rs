//! `v1beta1.Registration`, and what follows from a Register: dial, options, ListAndWatch, and the end of its stream.
//!
//! Clients are kept by the resource's name alone, as in the kubelet from 1.25 to 1.36: a failing Register makes the
//! kubelet lose sight of whoever is connected, and the end of an old stream disconnects the new client.

use super::client::Client;
use super::event::EventKind;
use super::state::Shared;
use super::wire;
use crate::domain::ResourceName;
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::registration_server::Registration;
use std::sync::Arc;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

/// The one version that the kubelet supports.
const VERSION: &str = "v1beta1";

/// The service of one life of the kubelet.
#[derive(Debug)]
pub(super) struct RegistrationService {
    pub(super) shared: Arc<Shared>,
    pub(super) life: u64,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<api::RegisterRequest>) -> Result<Response<api::Empty>, Status> {
        let request = request.into_inner();
        let resource = request.resource_name.clone();
        let result = match check(&request) {
            Ok(name) => self.connect(name, request.endpoint).await,
            Err(error) => Err(error),
        };
        result.map(|()| Response::new(api::Empty {})).map_err(|error| {
            self.shared.log(EventKind::RegisterFailed { resource, error: error.clone() });
            // grpc-go's code for an error without one.
            Status::unknown(error)
        })
    }
}

/// The kubelet's checks, in its order. The request's options are not looked at.
fn check(request: &api::RegisterRequest) -> Result<ResourceName, String> {
    if request.version != VERSION {
        let version = &request.version;
        return Err(format!("requested API version {version:?} is not supported by kubelet. Supported version is [{VERSION:?}]"));
    }
    request.resource_name.parse().map_err(|_invalid| format!("the ResourceName {:?} is invalid", request.resource_name))
}

impl RegistrationService {
    /// Connects in a task of its own: when the plugin stops waiting, the steps are broken off in order, not dropped.
    async fn connect(&self, resource: ResourceName, endpoint: String) -> Result<(), String> {
        let (_waiting, gone) = oneshot::channel::<()>();
        let (answer, answered) = oneshot::channel();
        let (shared, life) = (Arc::clone(&self.shared), self.life);
        self.shared.spawn(life, async move {
            // The plugin may have stopped waiting: nobody misses the answer then.
            let _ = answer.send(connect_client(&shared, life, resource, endpoint, gone).await);
        });
        answered.await.unwrap_or_else(|_stopped| Err("the kubelet is stopped".to_owned()))
    }
}

async fn connect_client(
    shared: &Arc<Shared>,
    life: u64,
    resource: ResourceName,
    endpoint: String,
    gone: oneshot::Receiver<()>,
) -> Result<(), String> {
    let socket = shared.files.plugins_dir().join(endpoint.trim_start_matches('/'));
    let registered = shared.life(life, |present| {
        let client = Arc::new(Client::new(present.next_client, resource.clone(), socket, present.links.clone()));
        present.next_client += 1;
        let former = present.clients.insert(resource.clone(), Arc::clone(&client));
        if let Some(former) = former {
            present.lose(former);
        }
        client
    });
    let client = registered.ok_or("the kubelet is stopped")?;
    let result = tokio::select! {
        result = open(shared, life, &client) => result,
        _ = gone => Err("failed to dial device plugin: context canceled".to_owned()),
    };
    if let Err(error) = result {
        shared.life(life, |present| {
            // By name: this forgets whoever stands there, which need not be this client.
            let forgotten = present.clients.remove(&resource);
            forgotten.into_iter().for_each(|forgotten| present.lose(forgotten));
        });
        return Err(error);
    }
    shared.log(EventKind::Registered { resource, client: client.number, endpoint });
    let watcher = Arc::clone(shared);
    shared.spawn(life, async move { run_client(&watcher, life, client).await });
    Ok(())
}

/// Dials and asks for the options; then the client serves the resource.
async fn open(shared: &Shared, life: u64, client: &Arc<Client>) -> Result<(), String> {
    client.dial(shared.config.dial_within).await?;
    let options = client.options().await?;
    shared.life(life, |present| present.manager.connected(&client.resource, Arc::clone(client), options));
    shared.log(EventKind::Options { resource: client.resource.clone(), client: client.number });
    Ok(())
}

async fn run_client(shared: &Shared, life: u64, client: Arc<Client>) {
    let resource = client.resource.clone();
    let number = client.number;
    if let Ok(mut stream) = client.list_and_watch().await {
        while let Ok(Some(response)) = stream.message().await {
            receive(shared, life, &client, response);
        }
    }
    shared.log(EventKind::StreamEnded { resource: resource.clone(), client: number });

    // By name again: the client that is cut is the present one, not the one whose stream ended.
    let current = shared.life(life, |present| {
        let current = present.clients.remove(&resource);
        if current.as_ref().is_none_or(|current| current.number != number) {
            present.lose(Arc::clone(&client));
        }
        current
    });
    if let Some(current) = current.flatten() {
        current.close();
        let now = shared.now();
        shared.life(life, |present| present.manager.disconnected(&resource, now));
        shared.log(EventKind::Disconnected { resource, client: current.number });
    }
}

/// A list replaces what is known of the resource, whichever client it comes from; then the checkpoint is written.
fn receive(shared: &Shared, life: u64, client: &Client, response: api::ListAndWatchResponse) {
    let devices = wire::listed(response);
    let resource = client.resource.clone();
    let at = shared.now();
    shared.in_life(life, |state| {
        if let Some(present) = &mut state.life {
            let (healthy, unhealthy) = present.manager.listed(&resource, devices);
            state.events.push(at, EventKind::Listed { resource, client: client.number, healthy, unhealthy });
        }
    });
    // A failure is in the event log; the kubelet goes on as well.
    let _ = shared.write_checkpoint(life);
}
