//! Handles a Register: dial, options, ListAndWatch, and the end of the stream.
//!
//! Between 1.25 and 1.36 clients are kept by the resource's name alone. A failing Register makes
//! the kubelet forget the connected client, and the end of an old stream disconnects the new
//! client. [`super::profile`] has the other versions.

use super::client::Client;
use super::core::{ListedDevice, Options};
use super::event::EventKind;
use super::hook::{Hook, Verdict};
use super::interleaving::{self, Interleaving};
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
        *present.registers.entry(resource.clone()).or_default() += 1
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

/// Runs a client after its Register: its stream, and the client that the stream's end disconnects.
async fn run_client(shared: &Arc<Shared>, instance: u64, client: Arc<Client>) {
    let resource = client.resource.clone();
    let fails = shared.hook(instance, Hook::BeforeListAndWatch).await == Verdict::Fail;
    if client.is_cut() {
        shared.record_interleaving(&resource, Some(Interleaving::CutBeforeListAndWatch));
    }
    if !fails {
        watch_lists(shared, instance, &client).await;
    }
    shared.log(EventKind::StreamEnded { resource: resource.clone(), client: client.number });
    shared.hook(instance, Hook::OnStreamEnd).await;

    // Up to 1.36 by name: the present client is cut, even if the stream of another one ended.
    let cut = shared.with_instance(instance, |present| {
        let cut = present.clients.ended(&client);
        if cut.as_ref().is_none_or(|cut| cut.number != client.number) {
            present.leak(Arc::clone(&client));
        }
        cut
    });
    let Some(cut) = cut.flatten() else { return };
    shared.record_interleaving(&resource, interleaving::on_end(&client, &cut));
    shared.hook(instance, Hook::AfterDeregister).await;
    shared.hook(instance, Hook::BeforeConnectionClose).await;
    cut.close();
    shared.hook(instance, Hook::BeforePluginDisconnected).await;
    let now = shared.environment.now();
    let stopped = shared.with_instance(instance, |present| {
        let endpoint = present.manager.endpoint(&resource)?;
        let serving = endpoint.client.clone();
        // From 1.37 on only the endpoint of that socket stops.
        if shared.profile().knows_sockets()
            && serving.as_ref().is_some_and(|serving| serving.socket != cut.socket)
        {
            return None;
        }
        let stopped = serving.filter(|_| endpoint.stopped_at.is_none());
        shared.record_interleaving(
            &resource,
            stopped.and_then(|serving| interleaving::on_stop(&present.clients, &cut, &serving)),
        );
        present.manager.disconnected(&resource, now);
        Some(())
    });
    if stopped.flatten().is_some() {
        shared.note_capacity(&resource);
        shared.log(EventKind::Disconnected { resource, client: cut.number });
    }
}

/// Reads the client's lists until its stream ends or cannot be opened.
async fn watch_lists(shared: &Arc<Shared>, instance: u64, client: &Arc<Client>) {
    let Ok(mut lists) = client.list_and_watch().await else { return };
    shared.with_instance(instance, |present| {
        present.streams.insert(client.number, Arc::clone(client))
    });
    while let Some(devices) = lists.next().await {
        // A message that cannot be decoded ends the stream.
        if shared.hook(instance, Hook::OnList).await == Verdict::Fail {
            break;
        }
        receive(shared, instance, client, devices).await;
    }
    shared.with_instance(instance, |present| present.streams.remove(&client.number));
}

/// A list replaces the known devices of the resource, no matter which client sent it. Then the
/// checkpoint is written.
async fn receive(shared: &Shared, instance: u64, client: &Client, devices: Vec<ListedDevice>) {
    let resource = client.resource.clone();
    let at = shared.environment.now();
    shared.in_instance(instance, |state| {
        if let Some(present) = &mut state.instance {
            *present.lists.entry(resource.clone()).or_default() += 1;
            let listed = present.manager.listed(&resource, devices);
            let kind = EventKind::Listed {
                resource: resource.clone(),
                client: client.number,
                healthy: listed.healthy,
                unhealthy: listed.unhealthy,
            };
            state.events.push(at, kind);
            if !listed.vanished.is_empty() {
                state.events.push(
                    at,
                    EventKind::Vanished { resource: resource.clone(), devices: listed.vanished },
                );
            }
        }
    });
    shared.note_capacity(&resource);
    // A failure is in the event log; the kubelet continues as well.
    let _ = shared.write_checkpoint(instance).await;
}

/// Up to 1.24: the plugin has its answer already, and a failure appears only in the log.
async fn add_endpoint(
    shared: &Arc<Shared>,
    instance: u64,
    resource: ResourceName,
    request: Register,
) {
    shared.hook(instance, Hook::BeforeRegisterClient).await;
    let Some(number) = shared.with_instance(instance, super::state::Instance::number_client) else {
        return;
    };
    let client = Arc::new(Client::new(number, resource.clone(), request.endpoint.clone()));
    let fails = shared.hook(instance, Hook::AfterRegisterClient).await == Verdict::Fail;
    let within = if fails { Duration::ZERO } else { shared.behaviour.dial_within };
    let connection = match dial(shared, &client, within).await {
        Ok(connection) => connection,
        Err(error) => {
            return shared
                .log(EventKind::RegisterFailed { resource: resource.as_str().to_owned(), error });
        }
    };
    client.connect(connection);
    shared.hook(instance, Hook::AfterDial).await;
    let options =
        request.options.unwrap_or(Options { preferred_allocation: false, pre_start: false });
    let former = shared.with_instance(instance, |present| {
        present.manager.endpoint(&resource).and_then(|endpoint| endpoint.client.clone())
    });
    if serve(shared, instance, &client, options).is_err() {
        return;
    }
    if let Some(former) = former.flatten().filter(|_| shared.profile().closes_previous_connection())
    {
        former.close();
    }
    shared.log(EventKind::Registered {
        resource: resource.clone(),
        client: number,
        endpoint: request.endpoint,
    });
    shared.hook(instance, Hook::AfterEndpointSet).await;
    if shared.hook(instance, Hook::BeforeListAndWatch).await != Verdict::Fail {
        watch_lists(shared, instance, &client).await;
    }
    shared.log(EventKind::StreamEnded { resource: resource.clone(), client: number });
    shared.hook(instance, Hook::OnStreamEnd).await;
    client.close();
    shared.hook(instance, Hook::BeforePluginDisconnected).await;
    let now = shared.environment.now();
    let stopped = shared.with_instance(instance, |present| {
        // By identity: the end of an old stream does not affect the new endpoint.
        let serving = present.manager.endpoint(&resource)?.client.as_ref()?;
        (serving.number == number).then(|| present.manager.disconnected(&resource, now))
    });
    if stopped.flatten().is_some() {
        shared.note_capacity(&resource);
        shared.log(EventKind::Disconnected { resource, client: number });
    }
}
