//! The service that the kubelet calls: one for each registration.

use super::daemon::{Inner, NodeEvidence, grant};
use crate::domain::{AllocId, ContainerEdits, DeviceId, Inventory, ResourceName, Safeguard};
use crate::lab::sim::kubelet::core::{ListedDevice, Options};
use crate::lab::sim::memory::{ConnectionId, ListStream, Plugin};
use crate::ledger::core::{Proof, doubt};
use crate::registration::core::Event;
use crate::serving::core::decide;
use futures_util::StreamExt as _;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tonic::Status;

/// Lists closer than this are merged, as in the daemon.
const LIST_INTERVAL: Duration = Duration::from_millis(50);

pub(super) struct Service {
    pub(super) inner: Arc<Inner>,
    pub(super) resource: ResourceName,
    pub(super) number: u64,
}

/// Counts an Allocate as long as it is under way, including one that is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Counted(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One stream; the drop reports its end in every case.
struct Lists {
    inner: Arc<Inner>,
    resource: ResourceName,
    number: u64,
    inventory: watch::Receiver<Arc<Inventory>>,
    sent: Option<(Duration, Vec<ListedDevice>)>,
}

impl Drop for Lists {
    fn drop(&mut self) {
        self.inner.registration(&self.resource).stream_ended(self.number);
    }
}

impl Lists {
    async fn next(mut self) -> Option<(Vec<ListedDevice>, Self)> {
        loop {
            let list = list(&self.inventory.borrow_and_update(), &self.resource);
            let (at, last) = match &self.sent {
                Some((at, last)) => (*at, Some(last)),
                None => (Duration::ZERO, None),
            };
            let now = self.inner.node.handle().now();
            let muted = !Safeguard::Broadcast.is_on()
                && last.is_some()
                && self.number != self.inner.registration(&self.resource).latest();
            if last != Some(&list) && !muted {
                if last.is_some() && now < at + LIST_INTERVAL {
                    self.inner.node.handle().sleep_until(at + LIST_INTERVAL).await;
                    continue;
                }
                self.sent = Some((now, list.clone()));
                let stream = (self.inner.instance, self.resource.clone(), self.number);
                self.inner.disk.lock().lists.entry(stream).or_default().push(now);
                return Some((list, self));
            }
            self.inventory.changed().await.ok()?;
        }
    }
}

/// The list of a resource.
pub(super) fn list(inventory: &Inventory, resource: &ResourceName) -> Vec<ListedDevice> {
    let devices =
        inventory.resources.get(resource).into_iter().flat_map(|offering| &offering.devices);
    let listed = devices.map(|(id, offered)| ListedDevice {
        id: id.clone(),
        healthy: offered.health.is_healthy(),
        numa_nodes: offered.device.numa_nodes.iter().map(|node| i64::from(*node)).collect(),
    });
    listed.collect()
}

#[tonic::async_trait]
impl Plugin for Service {
    async fn options(&self) -> Result<Options, Status> {
        let pre_start = self.inner.hardware.hooks.get(&self.resource).is_some();
        Ok(Options { preferred_allocation: true, pre_start })
    }

    fn hung_up(&self) {
        self.inner.registration(&self.resource).send(Event::ClosedEarly(self.number));
    }

    async fn list_and_watch(&self, _: ConnectionId) -> Result<ListStream, Status> {
        self.inner.registration(&self.resource).stream_opened(self.number);
        let inventory = self.inner.inventory.subscribe();
        let (inner, resource) = (Arc::clone(&self.inner), self.resource.clone());
        let lists = Lists { inner, resource, number: self.number, inventory, sent: None };
        Ok(futures_util::stream::unfold(lists, Lists::next).boxed())
    }

    async fn preferred(
        &self,
        available: Vec<DeviceId>,
        must_include: Vec<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, Status> {
        let available: BTreeSet<_> = available.into_iter().collect();
        let mut chosen: BTreeSet<_> = must_include.into_iter().collect();
        for id in available {
            if chosen.len() < size {
                chosen.insert(id);
            }
        }
        Ok(chosen)
    }

    async fn allocate(&self, ids: Vec<DeviceId>) -> Result<Option<ContainerEdits>, Status> {
        let inner = &self.inner;
        let _counted = Counted::new(&inner.allocates);
        let gate = Arc::clone(&inner.gate).read_owned().await;
        let inventory = inner.inventory.borrow().clone();
        let offering = inventory
            .resources
            .get(&self.resource)
            .ok_or_else(|| Status::not_found("not offered"))?;
        decide(offering, &ids)
            .map_err(|refusal| Status::failed_precondition(refusal.to_string()))?;
        let alloc_id = inner.disk.next_alloc_id();
        let mut edits = ContainerEdits::default();
        edits.annotations.insert(AllocId::ANNOTATION.into(), alloc_id.to_string());
        let grant = Arc::new(grant(inner, &self.resource, alloc_id.clone(), &ids, edits.clone()));
        // A shared device may have several holders.
        let in_use = || {
            let mut cores = inner.lock();
            let settled =
                cores.age.is_settled(*inner.node.kubelet_socket().borrow(), inner.node.moment());
            let evidence =
                NodeEvidence { node: &inner.node, settled, checkpoint: inner.node.checkpoint() };
            doubt(cores.actor.ledger(), cores.actor.state.watchlist(), &grant, &evidence)
                .filter(|doubt| doubt.proof == Proof::Complete)
                .map(|doubt| {
                    format!("device `{}` is still in use by pod {}", doubt.id, doubt.pod.uid)
                })
        };
        let is_exclusive = offering.spec.is_exclusive();
        let refusal = || if is_exclusive { in_use() } else { None };
        inner.record(Arc::clone(&grant), refusal).await.map_err(Status::failed_precondition)?;
        inner.process.spawn(Arc::clone(inner).hold_until_recorded(gate, vec![alloc_id]));
        Ok(Some(edits))
    }

    async fn pre_start(&self, ids: Vec<DeviceId>) -> Result<(), Status> {
        let gate = self.inner.wait_for_gate(&self.resource, &ids);
        gate.await.map_err(Status::failed_precondition)
    }
}
