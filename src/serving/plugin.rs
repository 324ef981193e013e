//! What stands behind a socket: one for each registration of each resource, the same for every version of the API.

use super::affinity::Recent;
use super::before_start;
use super::placement;
use super::prepare::{Prepared, Preparer, Request};
use super::refusals::Refusals;
use super::sockets::Sockets;
use crate::domain::limits::LISTS_MAX;
use crate::domain::{AllocId, ApiCapabilities, ContainerEdits, Device, DeviceId, Grant, Inventory, Offering, Refusal, ResourceName};
use crate::hook::HookExecutor;
use crate::host;
use crate::kubelet::api;
use crate::messages::{Broken, HungUp, Mailbox, Pass, Record, RecordError, RegistrationNumber, StreamEnded, StreamOpened};
use crate::telemetry::metrics;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{RwLock, watch};
use tokio::time::Instant;
use tonic::Status;

/// Bounds an Allocate from inside. The kubelet has no deadline of its own and its whole sync loop waits.
const RECORD_DEADLINE: Duration = Duration::from_millis(1800);
/// How long a refused one waits for health to publish a broken device.
const BROKEN_DEADLINE: Duration = Duration::from_millis(200);

/// Lists closer than this are merged: the kubelet writes and syncs its checkpoint for every one. Where it reads several
/// streams of a resource, it gets as many lists in all, and fewer on each.
const LIST_INTERVAL: Duration = Duration::from_millis(50);
/// More streams than these do not make each of them slower: a change is told within a second.
const STREAMS_MAX: u32 = 20;

/// What the kubelet was just given, over all resources and registrations, so that the next devices can be near to it.
/// It outlives the serving actor.
#[derive(Debug, Clone, Default)]
pub struct Affinity(Arc<Mutex<Recent>>);

impl Affinity {
    // Every change is a single step, so a panic elsewhere cannot leave it half done; and it is a preference only.
    fn granted(&self, resource: &ResourceName, devices: Vec<Arc<Device>>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).granted(resource, devices, host::now().boot);
    }

    fn beside(&self, resource: &ResourceName) -> Vec<Arc<Device>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).beside(resource, host::now().boot)
    }
}

/// What every service behind a socket needs, whatever life of the actor made it.
#[derive(Debug, Clone)]
pub struct Shared {
    /// What is offered.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Who holds what.
    pub grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    /// Runs the hooks before a start.
    pub performer: HookExecutor,
    /// What an Allocate comes to.
    pub preparer: Arc<Preparer>,
    /// The ledger.
    pub record: Mailbox<Record>,
    /// Health.
    pub broken: Mailbox<Broken>,
    /// The ledger.
    pub pass: Mailbox<Pass>,
    /// Registration.
    pub opened: Mailbox<StreamOpened>,
    /// Registration.
    pub ended: Mailbox<StreamEnded>,
    /// Registration.
    pub hung_up: Mailbox<HungUp>,
    /// The table of sockets.
    pub sockets: Arc<Sockets>,
    /// What was granted last.
    pub affinity: Affinity,
    /// What was refused.
    pub refusals: Refusals,
    /// Keeps Allocates and pod listings apart: read while an Allocate is under way; written while the kubelet is asked to list
    /// pods, which would make it forget what it has just reserved.
    pub gate: Arc<RwLock<()>>,
    /// Whether this instance ends, or hands over: what becomes of its connections is no loss then.
    pub leaving: watch::Receiver<bool>,
}

/// The service behind one socket.
#[derive(Debug, Clone)]
pub(super) struct Plugin {
    pub(super) resource: ResourceName,
    pub(super) registration: RegistrationNumber,
    pub(super) shared: Shared,
    /// ListAndWatch streams of this socket.
    lists: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl api::Plugin for Plugin {
    fn lists(&self) -> Result<BoxStream<'static, Arc<Offering>>, Status> {
        let lists = Lists { inventory: self.shared.inventory.clone(), sent: None, guard: StreamGuard::new(self.clone())? };
        Ok(futures_util::stream::unfold(lists, Lists::next).boxed())
    }

    async fn allocate(&self, containers: Vec<Vec<DeviceId>>, wire: ApiCapabilities) -> Result<Vec<ContainerEdits>, Status> {
        let began = Instant::now();
        let answer = {
            let _gate = self.shared.gate.read().await;
            self.allocate_all(containers, wire).await
        };
        metrics::allocated(self.resource.as_str(), answer.is_ok(), began.elapsed());
        answer
    }

    fn preferred(&self, available: Vec<DeviceId>, must_include: Vec<DeviceId>, size: usize) -> Result<Vec<DeviceId>, Status> {
        let inventory = self.shared.inventory.borrow().clone();
        let nothing = || Status::not_found(Refusal::NotOffered(self.resource.clone()).to_string());
        let offering = inventory.resources.get(&self.resource).ok_or_else(nothing)?;
        let company = self.shared.affinity.beside(&self.resource);
        placement::choose_beside(offering, &company, &available, &must_include, size)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }

    fn needs_pre_start(&self) -> bool {
        before_start::is_needed(&self.shared.inventory.borrow(), &self.resource)
    }

    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status> {
        before_start::before_start(&self.shared, &self.resource, ids).await
    }
}

impl Plugin {
    pub(super) fn new(resource: ResourceName, registration: RegistrationNumber, shared: Shared) -> Self {
        Plugin { resource, registration, shared, lists: Arc::default() }
    }

    /// Tells registration of a connection that ended before the lists were asked for.
    pub(super) fn tell_of_hang_up(&self) {
        if !*self.shared.leaving.borrow() {
            self.shared.hung_up.tell(HungUp { resource: self.resource.clone(), registration: self.registration });
        }
    }

    async fn allocate_all(&self, containers: Vec<Vec<DeviceId>>, wire: ApiCapabilities) -> Result<Vec<ContainerEdits>, Status> {
        let mut answers = Vec::with_capacity(containers.len());
        for ids in containers {
            let alloc_id = AllocId::new(uuid::Uuid::now_v7().to_string());
            let devices = self.devices(&ids);
            let request = Request { alloc_id, resource: &self.resource, ids: &ids, wire };
            let answer = self.allocate_one(request).await;
            let edits = answer.map_err(|error| {
                match self.shared.refusals.refused(&self.resource, Instant::now()) {
                    Some(untold) => tracing::warn!(resource = %self.resource, %error, untold, "an Allocate was refused"),
                    None => tracing::debug!(resource = %self.resource, %error, "an Allocate was refused"),
                }
                status(&error)
            })?;
            self.shared.affinity.granted(&self.resource, devices);
            answers.push(edits);
        }
        Ok(answers)
    }

    /// In one order: decided, looked at, recorded, answered.
    async fn allocate_one(&self, request: Request<'_>) -> Result<ContainerEdits, AllocateError> {
        let Prepared { edits, record } = match self.shared.preparer.prepare(request) {
            Ok(prepared) => prepared,
            Err(refusal) => {
                self.tell_of_broken(&refusal).await;
                return Err(refusal.into());
            }
        };
        let not_recorded = |why: String| {
            self.shared.refusals.not_recorded(&why);
            AllocateError::NotRecorded { resource: self.resource.clone(), why }
        };
        match self.shared.record.call(record, RECORD_DEADLINE).await {
            Ok(Ok(())) => {
                self.shared.refusals.recorded();
                Ok(edits)
            }
            Ok(Err(RecordError::Refused(refusal))) => Err(refusal.into()),
            Ok(Err(RecordError::Store(error))) => Err(not_recorded(error.to_string())),
            Err(error) => Err(not_recorded(error.to_string())),
        }
    }

    /// The kubelet should learn of a broken device before it tries again; the error does not wait for long.
    async fn tell_of_broken(&self, refusal: &Refusal) {
        // A hook that is due is no news, and no scan would find its end.
        if let Refusal::Unhealthy { resource, id, reason } = refusal
            && !reason.is_of_hook()
        {
            let news = Broken { resource: resource.clone(), id: id.clone(), reason: *reason };
            drop(self.shared.broken.call(news, BROKEN_DEADLINE).await);
        }
    }

    /// What is behind these ids.
    fn devices(&self, ids: &[DeviceId]) -> Vec<Arc<Device>> {
        let inventory = self.shared.inventory.borrow();
        let offering = inventory.resources.get(&self.resource);
        ids.iter().filter_map(|id| Some(Arc::clone(&offering?.devices.get(id)?.device))).collect()
    }
}

/// Why an Allocate is answered with an error.
#[derive(Debug, thiserror::Error)]
enum AllocateError {
    /// The request cannot be granted.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The grant could not be made durable, so it was not given.
    #[error("the grant of {resource} could not be recorded, so it was not given: {why}")]
    NotRecorded { resource: ResourceName, why: String },
}

fn status(error: &AllocateError) -> Status {
    let text = error.to_string();
    match error {
        AllocateError::Refused(Refusal::Unknown { .. } | Refusal::NotOffered(_)) => Status::not_found(text),
        AllocateError::Refused(Refusal::Duplicate { .. } | Refusal::Empty(_) | Refusal::TooMany { .. }) => Status::invalid_argument(text),
        AllocateError::Refused(
            Refusal::Unhealthy { .. }
            | Refusal::Unanswerable { .. }
            | Refusal::HeldAsOther { .. }
            | Refusal::InUse { .. }
            | Refusal::SameDevice { .. }
            | Refusal::CdiUnsupported { .. }
            | Refusal::HooksUnsupported { .. },
        ) => Status::failed_precondition(text),
        AllocateError::Refused(Refusal::FileNotWritten { .. } | Refusal::Unreadable { .. }) | AllocateError::NotRecorded { .. } => {
            Status::unavailable(text)
        }
    }
}

/// Tells registration and the table of sockets of a stream's begin and of its end, however it ends.
struct StreamGuard(Plugin);

impl StreamGuard {
    fn new(plugin: Plugin) -> Result<Self, Status> {
        let Plugin { resource, registration, shared, lists } = &plugin;
        if lists.fetch_add(1, Ordering::Relaxed) >= LISTS_MAX {
            lists.fetch_sub(1, Ordering::Relaxed);
            metrics::request_refused("plugin", "lists");
            return Err(Status::resource_exhausted(format!("{LISTS_MAX} streams of {resource} are open on this socket already")));
        }
        shared.sockets.stream_opened(resource, *registration);
        shared.opened.tell(StreamOpened { resource: resource.clone(), registration: *registration });
        Ok(StreamGuard(plugin))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let Plugin { resource, registration, shared, lists } = &self.0;
        lists.fetch_sub(1, Ordering::Relaxed);
        shared.sockets.stream_ended(resource, *registration);
        if !*shared.leaving.borrow() {
            shared.ended.tell(StreamEnded { resource: resource.clone(), registration: *registration });
        }
    }
}

/// One ListAndWatch stream: the whole list at once, then again after every change of this resource.
struct Lists {
    inventory: watch::Receiver<Arc<Inventory>>,
    sent: Option<(Instant, Arc<Offering>)>,
    guard: StreamGuard,
}

impl Lists {
    async fn next(mut self) -> Option<(Arc<Offering>, Self)> {
        loop {
            let inventory = Arc::clone(&self.inventory.borrow_and_update());
            let current = inventory.resources.get(&self.guard.0.resource);
            // A resource that is not in the inventory has no list; an empty one is sent only when it has no devices.
            if self.sent.is_some() && current.is_none() {
                // Its last list was sent before, and registration knows.
                return None;
            }
            // What a container gets may have changed; the kubelet is told of devices only.
            let is_news = |offering: &&Arc<Offering>| self.sent.as_ref().is_none_or(|(_, sent)| sent.devices != offering.devices);
            if let Some(offering) = current.filter(is_news) {
                if let Some((at, _)) = &self.sent {
                    let streams = self.guard.0.shared.sockets.streams(&self.guard.0.resource);
                    let due = *at + LIST_INTERVAL * u32::try_from(streams).unwrap_or(u32::MAX).clamp(1, STREAMS_MAX);
                    if Instant::now() < due {
                        tokio::time::sleep_until(due).await;
                        continue;
                    }
                }
                let offering = Arc::clone(offering);
                self.sent = Some((Instant::now(), Arc::clone(&offering)));
                return Some((offering, self));
            }
            if self.inventory.changed().await.is_err() {
                // The daemon is ending, and its connections with it.
                std::future::pending::<()>().await;
            }
        }
    }
}
