//! Register as in kubelets up to 1.24: the answer comes first, the dial follows.

use super::super::client::Client;
use super::super::core::Options;
use super::super::event::EventKind;
use super::super::hook::{Hook, Verdict};
use super::super::instance::Instance;
use super::super::state::Shared;
use super::list_stream::watch_lists;
use super::{Register, dial, serve};
use crate::domain::ResourceName;
use std::sync::Arc;
use std::time::Duration;

/// Up to 1.24: the plugin has its answer already, and a failure appears only in the log.
pub(super) async fn add_endpoint(
    shared: &Arc<Shared>,
    instance: u64,
    resource: ResourceName,
    request: Register,
) {
    shared.hook(instance, Hook::BeforeRegisterClient).await;
    let Some(number) = shared.with_instance(instance, Instance::number_client) else {
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
