//! Handles a Register: dial, options, ListAndWatch, and the end of the stream.
//!
//! Between 1.25 and 1.36 clients are kept by the resource's name alone. A failing Register makes
//! the kubelet forget the connected client, and the end of an old stream disconnects the new
//! client. [`super::profile`] has the other versions.

mod before_125;
mod list_stream;

use self::before_125::add_endpoint;
use self::list_stream::run_client;
use super::client::Client;
use super::core::Options;
use super::event::EventKind;
use super::hook::{Hook, Verdict};
use super::interleaving;
use super::profile::Profile;
use super::state::Shared;
use crate::domain::ResourceName;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// The request of a plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::lab::sim) struct Register {
    pub(in crate::lab::sim) version: String,
    pub(in crate::lab::sim) resource: String,
    pub(in crate::lab::sim) endpoint: String,
    /// Read by kubelets before 1.25 only.
    pub(in crate::lab::sim) options: Option<Options>,
}

/// Closed when the plugin has stopped waiting.
type Waiting = watch::Receiver<()>;

/// Answers a Register. When the plugin stops waiting and drops this future, the steps are cancelled
/// cleanly.
pub(in crate::lab::sim) async fn register(
    shared: &Arc<Shared>,
    instance: u64,
    request: Register,
) -> Result<(), String> {
    let resource = request.resource.clone();
    shared.with_instance(instance, |present| {
        *present.registers.entry(resource.clone()).or_default() += 1;
    });
    let result = match check(&request, shared.profile()) {
        Ok(name) => connect(shared, instance, name, request).await,
        Err(error) => Err(error),
    };
    if let Err(error) = &result {
        shared.log(EventKind::RegisterFailed { resource, error: error.clone() });
    }
    result
}

/// The kubelet's checks, in its order.
fn check(request: &Register, profile: Profile) -> Result<ResourceName, String> {
    let (version, written) = profile.version();
    if request.version != version {
        return Err(format!(
            "requested API version {:?} is not supported by kubelet. Supported version is {written}",
            request.version
        ));
    }
    request
        .resource
        .parse()
        .map_err(|_invalid| format!("the ResourceName {:?} is invalid", request.resource))
}

/// Connects in a separate task, which continues when the plugin no longer waits.
async fn connect(
    shared: &Arc<Shared>,
    instance: u64,
    resource: ResourceName,
    request: Register,
) -> Result<(), String> {
    let (_waiting, mut waiting) = watch::channel(());
    let (answer, answered) = oneshot::channel();
    let flow = Arc::clone(shared);
    shared.spawn(instance, async move {
        if flow.profile().answers_first() {
            // The plugin does not learn the result.
            let _ = answer.send(Ok(()));
            add_endpoint(&flow, instance, resource, request).await;
        } else {
            let result =
                connect_client(&flow, instance, resource, request.endpoint, &mut waiting).await;
            // The plugin may have stopped waiting; then the answer is dropped.
            let _ = answer.send(result);
        }
    });
    answered.await.unwrap_or_else(|_stopped| Err("the kubelet is stopped".to_owned()))
}

/// 1.25 and newer.
async fn connect_client(
    shared: &Arc<Shared>,
    instance: u64,
    resource: ResourceName,
    endpoint: String,
    waiting: &mut Waiting,
) -> Result<(), String> {
    let mut cancelled = shared.hook(instance, Hook::BeforeRegisterClient).await == Verdict::Cancel;
    let registered = shared.with_instance(instance, |present| {
        let client =
            Arc::new(Client::new(present.number_client(), resource.clone(), endpoint.clone()));
        let forgotten = present.clients.add(Arc::clone(&client));
        forgotten.into_iter().for_each(|former| present.leak(former));
        client
    });
    let client = registered.ok_or("the kubelet is stopped")?;
    let opened = open(shared, instance, &client, waiting, &mut cancelled).await;
    let error = match opened {
        Ok(true) => {
            shared.log(EventKind::Registered { resource, client: client.number, endpoint });
            let watcher = Arc::clone(shared);
            shared.spawn(instance, async move { run_client(&watcher, instance, client).await });
            return Ok(());
        }
        // A duplicate that counts as registered: the former client stays, this one is not used.
        Ok(false) => None,
        Err(error) => Some(error),
    };
    shared.with_instance(instance, |present| {
        // Up to 1.36 by name: this forgets the client under the name, which can be another client.
        let forgotten = present.clients.failed(&client);
        forgotten.into_iter().for_each(|forgotten| present.leak(forgotten));
        let seen = error
            .as_ref()
            .and_then(|_| interleaving::on_failure(&present.streams, &present.clients, &client));
        shared.record_interleaving(&resource, seen);
    });
    error.map_or(Ok(()), Err)
}

/// Dials and requests the options; then the client serves the resource. `false` for a duplicate
/// that needs nothing.
async fn open(
    shared: &Shared,
    instance: u64,
    client: &Arc<Client>,
    waiting: &mut Waiting,
    cancelled: &mut bool,
) -> Result<bool, String> {
    let mut hook = async |hook: Hook| {
        let verdict = shared.hook(instance, hook).await;
        *cancelled |= verdict == Verdict::Cancel;
        (verdict == Verdict::Fail, *cancelled)
    };
    let (fails, gives_up) = hook(Hook::AfterRegisterClient).await;
    let within = if fails { Duration::ZERO } else { shared.behaviour.dial_within };
    let connection = tokio::select! {
        biased;
        () = given_up(waiting, gives_up) => return Err("failed to dial device plugin: context canceled".to_owned()),
        connection = dial(shared, client, within) => connection?,
    };
    client.connect(connection);
    let (fails, gives_up) = hook(Hook::AfterDial).await;
    let options = tokio::select! {
        biased;
        () = given_up(waiting, gives_up) => Err("failed to get device plugin options: rpc error: code = Canceled desc = context canceled".to_owned()),
        options = client.options() => options,
    };
    if fails {
        return Err("failed to get device plugin options: rpc error: code = Unavailable desc = error reading from server: EOF".to_owned());
    }
    let options = options?;
    hook(Hook::AfterOptions).await;
    let set = serve(shared, instance, client, options)?;
    hook(Hook::AfterEndpointSet).await;
    Ok(set)
}

/// `PluginConnected`: the endpoint serves the resource from now on.
fn serve(
    shared: &Shared,
    instance: u64,
    client: &Arc<Client>,
    options: Options,
) -> Result<bool, String> {
    let resource = &client.resource;
    let served = shared.with_instance(instance, |present| {
        let live = present
            .clients
            .duplicate(client)
            .is_some_and(|other| other.served.load(Ordering::Acquire));
        if live {
            return match shared.profile() {
                Profile::K137Dedupe => Ok(false),
                // The real text is not known.
                _ => Err(format!(
                    "device plugin {resource} is already registered with the socket {}",
                    client.socket
                )),
            };
        }
        present.manager.connected(resource, Arc::clone(client), options);
        client.served.store(true, Ordering::Release);
        for seen in interleaving::on_endpoint(&present.streams, &present.clients, client) {
            shared.record_interleaving(resource, Some(seen));
        }
        Ok(true)
    });
    let served = served.unwrap_or(Err("the kubelet is stopped".to_owned()))?;
    if served {
        shared.log(EventKind::Options { resource: resource.clone(), client: client.number });
    }
    Ok(served)
}

async fn dial(
    shared: &Shared,
    client: &Client,
    within: Duration,
) -> Result<Arc<dyn super::environment::Connection>, String> {
    tokio::select! {
        biased;
        connection = shared.environment.dial(client.number, &client.socket) => Ok(connection),
        () = shared.environment.sleep(within) => Err("failed to dial device plugin: context deadline exceeded".to_owned()),
    }
}

/// Ready when the plugin has stopped waiting for its Register.
async fn given_up(waiting: &mut Waiting, at_once: bool) {
    if !at_once {
        while waiting.changed().await.is_ok() {}
    }
}
