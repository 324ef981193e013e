//! The device-plugin API as the kubelet calls it: one service for each registration of each resource.

use super::preferred;
use super::sockets::{Sockets, ids};
use crate::domain::{AllocId, Inventory, Offering, Refusal, ResourceName};
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_server::DevicePlugin;
use crate::kubelet::{convert, register};
use crate::messages::{Allocate, AllocateError, Mailbox, RegistrationNumber, StreamEnded, StreamOpened};
use crate::telemetry::metrics;
use futures_util::Stream;
use prost::Message;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{RwLock, watch};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

/// Bounds an Allocate from inside. The kubelet has no deadline of its own and its whole sync loop waits.
const ALLOCATE_DEADLINE: Duration = Duration::from_secs(2);

/// Lists closer than this are merged: the kubelet writes and syncs its checkpoint for every one.
const LIST_INTERVAL: Duration = Duration::from_millis(50);

/// The kubelet takes 4 MiB in one message, and ends the stream at more: an endless loop of registrations.
const LIST_BYTES_MAX: usize = 3_500_000;

/// What every service needs; shared.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) inventory: watch::Receiver<Arc<Inventory>>,
    pub(super) allocate: Mailbox<Allocate>,
    pub(super) opened: Mailbox<StreamOpened>,
    pub(super) ended: Mailbox<StreamEnded>,
    pub(super) sockets: Arc<Sockets>,
    /// Read while an Allocate is under way; written while the kubelet is asked to list pods, which would make it
    /// forget what it has just reserved.
    pub(super) gate: Arc<RwLock<()>>,
    /// Becomes true when streams should end: the last step of the daemon's shutdown.
    pub(super) drain: watch::Receiver<bool>,
}

/// The service behind one socket.
#[derive(Debug, Clone)]
pub(super) struct Plugin {
    pub(super) resource: ResourceName,
    pub(super) registration: RegistrationNumber,
    pub(super) shared: Shared,
}

type ListStream = Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = ListStream;

    /// Answered without asking anybody: the kubelet calls this while our own Register call is still open.
    async fn get_device_plugin_options(&self, _: Request<api::Empty>) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(register::options()))
    }

    async fn list_and_watch(&self, _: Request<api::Empty>) -> Result<Response<ListStream>, Status> {
        let lists = Lists {
            inventory: self.shared.inventory.clone(),
            drain: self.shared.drain.clone(),
            sent: None,
            guard: StreamGuard::new(self.clone()),
        };
        Ok(Response::new(Box::pin(futures_util::stream::unfold(lists, Lists::next))))
    }

    async fn allocate(&self, request: Request<api::AllocateRequest>) -> Result<Response<api::AllocateResponse>, Status> {
        let began = Instant::now();
        let answer = self.allocate_all(request.into_inner()).await;
        metrics::allocated(self.resource.as_str(), answer.is_ok(), began.elapsed());
        answer.map(Response::new)
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let inventory = self.shared.inventory.borrow().clone();
        let nothing = || Status::not_found(Refusal::NotOffered(self.resource.clone()).to_string());
        let offering = inventory.resources.get(&self.resource).ok_or_else(nothing)?;
        let choose = |request: api::ContainerPreferredAllocationRequest| {
            let size = usize::try_from(request.allocation_size).unwrap_or_default();
            let (available, must) = (ids(request.available_device_i_ds), ids(request.must_include_device_i_ds));
            let chosen = preferred::choose(offering, &available, &must, size).map_err(|e| Status::invalid_argument(e.to_string()))?;
            Ok(api::ContainerPreferredAllocationResponse { device_i_ds: chosen.iter().map(ToString::to_string).collect() })
        };
        let container_responses = request.into_inner().container_requests.into_iter().map(choose).collect::<Result<_, Status>>()?;
        Ok(Response::new(api::PreferredAllocationResponse { container_responses }))
    }

    /// Not asked for by our options; a kubelet that calls it anyway finds nothing to be done.
    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}

impl Plugin {
    async fn allocate_all(&self, request: api::AllocateRequest) -> Result<api::AllocateResponse, Status> {
        let _gate = self.shared.gate.read().await;
        let mut container_responses = Vec::with_capacity(request.container_requests.len());
        for container in request.container_requests {
            let message = Allocate {
                alloc_id: AllocId::new(uuid::Uuid::now_v7().to_string()),
                resource: self.resource.clone(),
                ids: ids(container.devices_ids),
            };
            let answer = self.shared.allocate.call(message, ALLOCATE_DEADLINE).await;
            let answer = answer.map_err(|error| Status::unavailable(error.to_string()))?;
            let edits = answer.map_err(|error| {
                tracing::warn!(resource = %self.resource, %error, "an Allocate was refused");
                status(&error)
            })?;
            container_responses.push(convert::response(edits));
        }
        Ok(api::AllocateResponse { container_responses })
    }
}

fn status(error: &AllocateError) -> Status {
    let text = error.to_string();
    match error {
        AllocateError::Refused(Refusal::Unknown { .. } | Refusal::NotOffered(_)) => Status::not_found(text),
        AllocateError::Refused(Refusal::Duplicate { .. } | Refusal::Empty(_)) => Status::invalid_argument(text),
        AllocateError::Refused(Refusal::Unhealthy { .. } | Refusal::InUse { .. }) => Status::failed_precondition(text),
        AllocateError::NotRecorded { .. } => Status::unavailable(text),
    }
}

/// Tells registration and the table of sockets of a stream's begin and of its end, however it ends.
struct StreamGuard(Plugin);

impl StreamGuard {
    fn new(plugin: Plugin) -> Self {
        let Plugin { resource, registration, shared } = &plugin;
        shared.sockets.stream_opened(resource, *registration);
        shared.opened.tell(StreamOpened { resource: resource.clone(), registration: *registration });
        StreamGuard(plugin)
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let Plugin { resource, registration, shared } = &self.0;
        shared.sockets.stream_ended(resource, *registration);
        shared.ended.tell(StreamEnded { resource: resource.clone(), registration: *registration });
    }
}

/// One ListAndWatch stream: the whole list at once, then again after every change of this resource.
struct Lists {
    inventory: watch::Receiver<Arc<Inventory>>,
    drain: watch::Receiver<bool>,
    sent: Option<(Instant, Offering)>,
    guard: StreamGuard,
}

impl Lists {
    async fn next(mut self) -> Option<(Result<api::ListAndWatchResponse, Status>, Self)> {
        loop {
            let current = self.inventory.borrow_and_update().resources.get(&self.guard.0.resource).cloned();
            // A resource that is not in the inventory has no list; an empty one is sent only when it has no devices.
            if let Some(offering) = current.filter(|offering| self.sent.as_ref().is_none_or(|(_, sent)| sent != offering)) {
                if let Some((at, _)) = &self.sent {
                    let due = *at + LIST_INTERVAL;
                    if Instant::now() < due {
                        tokio::select! {
                            () = tokio::time::sleep_until(due) => continue,
                            _ = self.drain.wait_for(|drain| *drain) => return None,
                        }
                    }
                }
                let list = convert::list(&offering);
                if list.encoded_len() > LIST_BYTES_MAX {
                    tracing::error!(
                        resource = %self.guard.0.resource, devices = offering.devices.len(),
                        "the list is larger than the kubelet takes in one message; offer fewer replicas, or split the resource"
                    );
                    // What was sent last stays true for the kubelet; the next change is tried again.
                    self.sent = Some((Instant::now(), offering));
                    continue;
                }
                self.sent = Some((Instant::now(), offering));
                return Some((Ok(list), self));
            }
            tokio::select! {
                changed = self.inventory.changed() => changed.ok()?,
                _ = self.drain.wait_for(|drain| *drain) => return None,
            }
        }
    }
}
