//! Reads a client's ListAndWatch stream, and disconnects a client at the stream's end.

use super::super::client::Client;
use super::super::core::ListedDevice;
use super::super::event::EventKind;
use super::super::hook::{Hook, Verdict};
use super::super::interleaving::{self, Interleaving};
use super::super::state::Shared;
use std::sync::Arc;

/// Runs a client after its Register: its stream, and the client that the stream's end disconnects.
pub(super) async fn run_client(shared: &Arc<Shared>, instance: u64, client: Arc<Client>) {
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
pub(super) async fn watch_lists(shared: &Arc<Shared>, instance: u64, client: &Arc<Client>) {
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
