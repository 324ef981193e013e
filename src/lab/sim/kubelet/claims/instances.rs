//! The registered instances of a driver: their connections, the calls on them, their health
//! streams.

use super::Shared;
use super::release::{HealthVersion, Version};
use crate::domain::{CheckpointClaimDevice, ClaimRef, DraName};
use crate::kubelet::proto::dra_health_v1::dra_resource_health_client::DraResourceHealthClient as HealthV1;
use crate::kubelet::proto::dra_health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as HealthV1Alpha1;
use crate::kubelet::proto::dra_v1::dra_plugin_client::DraPluginClient as PluginV1;
use crate::kubelet::proto::dra_v1beta1::dra_plugin_client::DraPluginClient as PluginV1Beta1;
use crate::kubelet::proto::{dra_health_v1, dra_health_v1alpha1, dra_v1, dra_v1beta1};
use crate::kubelet::uds;
use crate::lab::sim::kubelet::error::rpc_error;
use crate::lab::sim::kubelet::sockets::channel::call;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Request, Status};

/// Bytes of a health message; a longer one is cut to this length with its dots.
const MESSAGE_BYTES_MAX: usize = 1024;

/// One process of a driver, by its socket.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) number: u64,
    pub(super) endpoint: String,
    pub(super) version: Version,
    /// `None` while it is not connected.
    pub(super) channel: Option<Channel>,
    /// The tasks of its connection and its health stream.
    pub(super) tasks: Vec<AbortHandle>,
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// The newest connected instance, else the newest.
pub(super) fn chosen(instances: &[Instance]) -> Option<&Instance> {
    instances.iter().rev().find(|instance| instance.channel.is_some()).or(instances.last())
}

/// What a health stream reports about one device.
#[derive(Debug, Clone)]
pub(super) struct Report {
    pub(super) name: DraName,
    pub(super) is_healthy: Option<bool>,
    pub(super) timeout_seconds: i64,
    pub(super) message: String,
}

/// Keeps an instance connected: a connection that is lost is dialled again at once.
pub(super) async fn keep_connected(shared: Arc<Shared>, number: u64, endpoint: String) {
    loop {
        let links = shared.links();
        let adding = links.clone();
        let connected = uds::connect_through(&endpoint, move |stream| adding.add(number, stream));
        match connected.await {
            Ok(channel) => {
                shared.set_channel(number, Some(channel));
                links.ended(number).await;
                shared.set_channel(number, None);
            }
            Err(_) => tokio::time::sleep(shared.config.times.dial_again).await,
        }
    }
}

/// Reads an instance's health for ever. The end of a stream clears the health of the driver.
pub(super) async fn watch_health(
    shared: Arc<Shared>,
    number: u64,
    driver: String,
    version: HealthVersion,
) {
    loop {
        let channel = shared.wait_for_channel(number).await;
        let error = read_health(&shared, channel, &driver, version).await;
        shared.with(|state| {
            state.health.remove(&driver);
            state.health_ends.push(error.map_or_else(String::new, |status| rpc_error(&status)));
        });
        tokio::time::sleep(shared.config.times.health_again).await;
    }
}

async fn read_health(
    shared: &Shared,
    channel: Channel,
    driver: &str,
    version: HealthVersion,
) -> Option<Status> {
    macro_rules! read {
        ($api:ident, $client:ident) => {{
            let request = $api::NodeWatchResourcesRequest {};
            let mut stream = match $client::new(channel).node_watch_resources(request).await {
                Ok(stream) => stream.into_inner(),
                Err(status) => return Some(status),
            };
            loop {
                let list = match stream.message().await {
                    Ok(Some(list)) => list.devices,
                    Ok(None) => return None,
                    Err(status) => return Some(status),
                };
                let report = |device: $api::DeviceHealth| {
                    let health = device.health();
                    let name = device.device.unwrap_or_default();
                    Report {
                        name: DraName { pool: name.pool_name, device: name.device_name },
                        is_healthy: match health {
                            $api::HealthStatus::Healthy => Some(true),
                            $api::HealthStatus::Unhealthy => Some(false),
                            $api::HealthStatus::Unknown => None,
                        },
                        timeout_seconds: device.health_check_timeout_seconds,
                        message: cut(device.message),
                    }
                };
                shared.report(driver, list.into_iter().map(report));
            }
        }};
    }
    match version {
        HealthVersion::V1 => read!(dra_health_v1, HealthV1),
        HealthVersion::V1Alpha1 => read!(dra_health_v1alpha1, HealthV1Alpha1),
    }
}

/// As the kubelet cuts a message: by bytes, so a character may be broken.
fn cut(message: String) -> String {
    if message.len() <= MESSAGE_BYTES_MAX {
        return message;
    }
    let kept = message.as_bytes().get(..MESSAGE_BYTES_MAX - 3).unwrap_or_default();
    format!("{}...", String::from_utf8_lossy(kept))
}

/// The part of an instance that a call needs.
#[derive(Debug, Clone)]
pub(super) struct Callee {
    channel: Option<Channel>,
    version: Version,
}

impl From<&Instance> for Callee {
    fn from(instance: &Instance) -> Self {
        Callee { channel: instance.channel.clone(), version: instance.version }
    }
}

/// The answers of a call by UID.
type ByUid<T> = BTreeMap<String, Result<T, String>>;

fn limited<T>(message: T, within: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(within);
    request
}

async fn in_time<T>(
    within: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, String> {
    let until = Instant::now() + within;
    match tokio::time::timeout_at(until, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        // tonic's own limit may be first; it has another code.
        Ok(Err(status)) if Instant::now() < until => Err(rpc_error(&status)),
        _ => Err(rpc_error(&Status::deadline_exceeded("context deadline exceeded"))),
    }
}

/// A claim in one package.
macro_rules! claim {
    ($api:ident, $claim:expr) => {{
        let ClaimRef { uid, namespace, name } = $claim;
        $api::Claim { uid, namespace, name }
    }};
}

impl Callee {
    fn channel(&self) -> Result<Channel, String> {
        let unavailable = || Status::unavailable("connection error: desc = \"transport: closed\"");
        self.channel.clone().ok_or_else(|| rpc_error(&unavailable()))
    }

    pub(super) async fn prepare(
        &self,
        claims: Vec<ClaimRef>,
        within: Duration,
    ) -> Result<ByUid<Vec<CheckpointClaimDevice>>, String> {
        macro_rules! prepare {
            ($api:ident, $client:ident, $share_id:expr) => {{
                let claims = claims.into_iter().map(|claim| claim!($api, claim)).collect();
                let request = $api::NodePrepareResourcesRequest { claims };
                let client = $client::new(self.channel()?);
                let answering = call(&client, request, |mut client, request| async move {
                    client.node_prepare_resources(limited(request, within)).await
                });
                let answer = in_time(within, answering).await?;
                let device = |device: $api::Device| CheckpointClaimDevice {
                    share_id: $share_id(&device),
                    name: DraName { pool: device.pool_name, device: device.device_name },
                    requests: device.request_names,
                    cdi_devices: device.cdi_device_ids,
                };
                let result = |answer: $api::NodePrepareResourceResponse| {
                    if answer.error.is_empty() {
                        Ok(answer.devices.into_iter().map(device).collect())
                    } else {
                        Err(answer.error)
                    }
                };
                Ok(answer.claims.into_iter().map(|(uid, of)| (uid, result(of))).collect())
            }};
        }
        match self.version {
            Version::V1 => {
                prepare!(dra_v1, PluginV1, |device: &dra_v1::Device| device.share_id.clone())
            }
            Version::V1Beta1 => {
                prepare!(dra_v1beta1, PluginV1Beta1, |_: &dra_v1beta1::Device| None)
            }
        }
    }

    pub(super) async fn unprepare(
        &self,
        claims: Vec<ClaimRef>,
        within: Duration,
    ) -> Result<ByUid<()>, String> {
        macro_rules! unprepare {
            ($api:ident, $client:ident) => {{
                let claims = claims.into_iter().map(|claim| claim!($api, claim)).collect();
                let request = $api::NodeUnprepareResourcesRequest { claims };
                let client = $client::new(self.channel()?);
                let answering = call(&client, request, |mut client, request| async move {
                    client.node_unprepare_resources(limited(request, within)).await
                });
                let answer = in_time(within, answering).await?;
                let result = |answer: $api::NodeUnprepareResourceResponse| {
                    if answer.error.is_empty() { Ok(()) } else { Err(answer.error) }
                };
                Ok(answer.claims.into_iter().map(|(uid, of)| (uid, result(of))).collect())
            }};
        }
        match self.version {
            Version::V1 => unprepare!(dra_v1, PluginV1),
            Version::V1Beta1 => unprepare!(dra_v1beta1, PluginV1Beta1),
        }
    }
}
