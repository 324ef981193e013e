//! The service behind a socket: one for each registration of each resource, the same for every
//! version of the API.

use super::before_start;
use super::core;
use super::hold_until_recorded;
use super::placement;
use super::prepare::{Prepared, Request};
use super::shared::Shared;
use crate::domain::limits::LISTS_MAX;
use crate::domain::{
    AllocId, ApiCapabilities, ContainerEdits, Device, DeviceId, Health, Inventory, Offering,
    Reason, Refusal, ResourceName,
};
use crate::kubelet::api;
use crate::messages::{
    CallError, ClosedEarly, RecordError, RegistrationNumber, ReportUnusable, StreamEnded,
    StreamOpened,
};
use crate::telemetry::metrics;
use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Status;

/// Deadline of the ledger's answer in an Allocate. The kubelet has no deadline of its own, and its
/// whole sync loop waits.
const RECORD_DEADLINE: Duration = Duration::from_millis(1800);
/// How long a refused Allocate waits until health has published the unusable device.
const UNUSABLE_DEADLINE: Duration = Duration::from_millis(200);

/// The shortest time between two lists of a stream; changes in between are merged. The kubelet
/// writes and syncs its checkpoint for every list. If it reads several streams of a resource, the
/// interval grows with their number.
const LIST_INTERVAL: Duration = Duration::from_millis(50);
/// Beyond this number of streams the interval does not grow, so a change is sent within a second.
const STREAMS_MAX: u32 = 20;

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
        let mut resend = self.shared.resend.clone();
        // The first list of a stream answers every earlier order to send it again.
        resend.mark_unchanged();
        let lists = Lists {
            lists: self.shared.lists.clone(),
            sent: None,
            resend,
            again: false,
            guard: StreamGuard::new(self.clone())?,
        };
        Ok(futures_util::stream::unfold(lists, Lists::next).boxed())
    }

    async fn allocate(
        &self,
        containers: Vec<Vec<DeviceId>>,
        capabilities: ApiCapabilities,
    ) -> Result<Vec<ContainerEdits>, Status> {
        let began = Instant::now();
        let gate = Arc::clone(&self.shared.gate).read_owned().await;
        let answer = self.allocate_all(containers, capabilities).await;
        metrics::allocated(self.resource.as_str(), answer.is_ok(), began.elapsed());
        let answers = answer?;
        let ids = answers.iter().filter_map(|edits| edits.annotations.get(AllocId::ANNOTATION));
        let ids = ids.map(AllocId::new).collect();
        hold_until_recorded(gate, ids, self.shared.grants.clone());
        Ok(answers)
    }

    fn preferred(
        &self,
        available: Vec<DeviceId>,
        must_include: Vec<DeviceId>,
        size: usize,
    ) -> Result<Vec<DeviceId>, Status> {
        let lists = self.shared.lists.borrow().clone();
        let nothing = || Status::not_found(Refusal::NotOffered(self.resource.clone()).to_string());
        let offering = lists.resources.get(&self.resource).ok_or_else(nothing)?;
        let neighbours = self.shared.affinity.neighbours(&self.resource);
        placement::choose_near(offering, &neighbours, &available, &must_include, size)
            .map_err(|error| Status::invalid_argument(error.to_string()))
    }

    fn needs_pre_start(&self) -> bool {
        before_start::is_needed(&self.shared.lists.borrow(), &self.resource)
    }

    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status> {
        before_start::before_start(&self.shared, &self.resource, ids).await
    }
}

impl Plugin {
    pub(super) fn new(
        resource: ResourceName,
        registration: RegistrationNumber,
        shared: Shared,
    ) -> Self {
        Plugin { resource, registration, shared, lists: Arc::default() }
    }

    /// Reports to registration that a connection ended before ListAndWatch was requested.
    pub(super) fn report_early_close(&self) {
        if !*self.shared.leaving.borrow() {
            self.shared.closed_early.send(ClosedEarly {
                resource: self.resource.clone(),
                registration: self.registration,
            });
        }
    }

    async fn allocate_all(
        &self,
        containers: Vec<Vec<DeviceId>>,
        capabilities: ApiCapabilities,
    ) -> Result<Vec<ContainerEdits>, Status> {
        let mut answers = Vec::with_capacity(containers.len());
        for ids in containers {
            let alloc_id = AllocId::new(uuid::Uuid::now_v7().to_string());
            let devices = self.devices(&ids);
            let request = Request { alloc_id, resource: &self.resource, ids: &ids, capabilities };
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

    /// Decides, checks the nodes, records and answers, in this order.
    async fn allocate_one(&self, request: Request<'_>) -> Result<ContainerEdits, AllocateError> {
        let Prepared { edits, record } = match self.shared.preparer.prepare(request) {
            Ok(prepared) => prepared,
            Err(refusal) => {
                let refusal = core::with_holder(refusal, &self.shared.grants.borrow());
                self.report_unusable(&refusal).await;
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
            Ok(Err(error)) => Err(not_recorded(error.to_string())),
            Err(error @ CallError::TimedOut(..)) => {
                Err(not_recorded(format!("{error}; a write to its disk may hang")))
            }
            Err(error) => Err(not_recorded(error.to_string())),
        }
    }

    /// Reports an unusable device to health, so that the kubelet sees it before it tries again. The
    /// error waits at most [`UNUSABLE_DEADLINE`] for that.
    async fn report_unusable(&self, refusal: &Refusal) {
        // Health knows a due hook already, and no scan would find its end.
        if let Refusal::Unhealthy { resource, id, reason } = refusal
            && !reason.is_of_the_list()
        {
            let news =
                ReportUnusable { resource: resource.clone(), id: id.clone(), reason: *reason };
            drop(self.shared.unusable.call(news, UNUSABLE_DEADLINE).await);
        }
    }

    /// The devices of these ids.
    fn devices(&self, ids: &[DeviceId]) -> Vec<Arc<Device>> {
        let lists = self.shared.lists.borrow();
        let offering = lists.resources.get(&self.resource);
        ids.iter().filter_map(|id| Some(Arc::clone(&offering?.devices.get(id)?.device))).collect()
    }
}

/// Why an Allocate fails.
#[derive(Debug, thiserror::Error)]
enum AllocateError {
    /// The request cannot be granted.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The grant could not be made durable, so the device was not granted.
    #[error("the grant of {resource} could not be recorded, so no device was granted: {why}")]
    NotRecorded { resource: ResourceName, why: String },
}

fn status(error: &AllocateError) -> Status {
    let text = error.to_string();
    match error {
        AllocateError::Refused(Refusal::Unknown { .. } | Refusal::NotOffered(_)) => {
            Status::not_found(text)
        }
        AllocateError::Refused(
            Refusal::Duplicate { .. } | Refusal::Empty(_) | Refusal::TooMany { .. },
        ) => Status::invalid_argument(text),
        AllocateError::Refused(
            Refusal::Unhealthy { .. }
            | Refusal::Unanswerable { .. }
            | Refusal::HeldAsOther { .. }
            | Refusal::InUse { .. }
            | Refusal::Held { .. }
            | Refusal::NotReady { .. }
            | Refusal::SameDevice { .. }
            | Refusal::CdiUnsupported { .. }
            | Refusal::HooksUnsupported { .. },
        ) => Status::failed_precondition(text),
        AllocateError::Refused(Refusal::FileNotWritten { .. } | Refusal::Unreadable { .. })
        | AllocateError::NotRecorded { .. } => Status::unavailable(text),
    }
}

/// Reports the start and the end of a stream to registration and to the table of sockets, also if
/// the stream is dropped.
struct StreamGuard(Plugin);

impl StreamGuard {
    fn new(plugin: Plugin) -> Result<Self, Status> {
        let Plugin { resource, registration, shared, lists } = &plugin;
        if lists.fetch_add(1, Ordering::Relaxed) >= LISTS_MAX {
            lists.fetch_sub(1, Ordering::Relaxed);
            metrics::request_refused("plugin", "lists");
            return Err(Status::resource_exhausted(format!(
                "this socket already has {LISTS_MAX} open ListAndWatch streams of {resource}"
            )));
        }
        shared.sockets.stream_opened(resource, *registration);
        shared
            .opened
            .send(StreamOpened { resource: resource.clone(), registration: *registration });
        Ok(StreamGuard(plugin))
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        let Plugin { resource, registration, shared, lists } = &self.0;
        lists.fetch_sub(1, Ordering::Relaxed);
        shared.sockets.stream_ended(resource, *registration);
        if !*shared.leaving.borrow() {
            shared
                .ended
                .send(StreamEnded { resource: resource.clone(), registration: *registration });
        }
    }
}

/// The list after which a resource ends: no device is for containers, or near a NUMA node. `None`
/// if `sent` is such a list.
///
/// The kubelet remembers the devices for five minutes, and its Topology Manager would reject a pod
/// that gets them by a claim for the same number, for the lack of a healthy one near a NUMA node
/// (`devicemanager/topology_hints.go`). The ids stay: an Allocate may be in flight, and the kubelet
/// crashes if its answer is for an id that is not in the list.
fn last(sent: &Offering) -> Option<Offering> {
    let mut last = sent.clone();
    Arc::make_mut(&mut last.spec).topology = false;
    for offered in last.devices.values_mut().filter(|it| it.health.is_healthy()) {
        offered.health = Health::Unhealthy(Reason::Deselected);
    }
    (!last.devices.is_empty() && last != *sent).then_some(last)
}

/// One ListAndWatch stream: the whole list at once, then again after every change of this resource.
struct Lists {
    lists: watch::Receiver<Arc<Inventory>>,
    sent: Option<(Instant, Arc<Offering>)>,
    resend: watch::Receiver<()>,
    /// Whether the list is sent again although it is the same.
    again: bool,
    guard: StreamGuard,
}

impl Lists {
    async fn next(mut self) -> Option<(Arc<Offering>, Self)> {
        loop {
            let lists = Arc::clone(&self.lists.borrow_and_update());
            let current = lists.resources.get(&self.guard.0.resource);
            // A resource that is not in the lists has no further list, and registration ends
            // it. Its last one is sent at once. An empty list is sent only when the resource has no
            // devices.
            if let (None, Some((_, sent))) = (current, &self.sent) {
                let last = Arc::new(last(sent)?);
                self.sent = Some((Instant::now(), Arc::clone(&last)));
                return Some((last, self));
            }
            // Only changes that the kubelet sees are sent: not what a container gets.
            let is_news = |offering: &&Arc<Offering>| {
                self.again
                    || self.sent.as_ref().is_none_or(|(_, sent)| {
                        sent.devices != offering.devices
                            || sent.spec.topology != offering.spec.topology
                    })
            };
            if let Some(offering) = current.filter(is_news) {
                if let Some((at, _)) = &self.sent {
                    let streams = self.guard.0.shared.sockets.streams(&self.guard.0.resource);
                    let due = *at
                        + LIST_INTERVAL
                            * u32::try_from(streams).unwrap_or(u32::MAX).clamp(1, STREAMS_MAX);
                    if Instant::now() < due {
                        tokio::time::sleep_until(due).await;
                        continue;
                    }
                }
                let offering = Arc::clone(offering);
                self.sent = Some((Instant::now(), Arc::clone(&offering)));
                self.again = false;
                return Some((offering, self));
            }
            tokio::select! {
                Ok(()) = self.lists.changed() => {}
                Ok(()) = self.resend.changed() => self.again = true,
                // The daemon is ending, and its connections end with it.
                else => std::future::pending::<()>().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::core::tests::offering;
    use super::*;
    use crate::kubelet::api::v1beta1::list;

    #[test]
    fn the_last_list_has_all_ids_and_leaves_the_kubelet_nothing_to_align() {
        let mut sent = offering(&[("a", "a", Some(0)), ("b", "b", Some(1))]);
        let away = Health::Unhealthy(Reason::DeviceGone);
        sent.devices.get_mut(&DeviceId::new("b")).unwrap().health = away;
        let last = last(&sent).unwrap();
        assert_eq!(list(&sent).devices.iter().filter(|it| it.topology.is_some()).count(), 2);
        let shown = list(&last).devices;
        assert!(shown.iter().all(|it| it.topology.is_none() && it.health == "Unhealthy"));
        assert!(last.devices.keys().eq(sent.devices.keys()), "the kubelet would crash");
        assert_eq!(last.devices[&DeviceId::new("b")].health, away);
        assert_eq!(super::last(&last), None, "one is enough");
        assert_eq!(super::last(&offering(&[])), None);
    }
}
