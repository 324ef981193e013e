//! The slices of the node: the daemon's publisher, and the API server's side of its requests.

use super::cluster::Cluster;
use super::daemon::inventory;
use super::world::{MS, SECOND, World, node_name};
use crate::domain::{Grant, Verdicts};
use crate::slices::api::ResourceSlice;
use crate::slices::attributes::Facts;
use crate::slices::holders::Holders;
use crate::slices::publisher::{Action, Event, Failure, Publisher};
use crate::slices::wanted::{Inputs, WantedDevices, wanted_devices};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The devices to publish.
pub(super) fn wanted(grants: &[Arc<Grant>]) -> WantedDevices {
    let Holders { claimed, shares, held } = &Holders::of(grants);
    let resources = inventory().resources;
    wanted_devices(&Inputs {
        node: &node_name(),
        resources: &resources,
        claimed,
        held,
        shares,
        verdicts: &Verdicts::default(),
        facts: Facts::default(),
    })
}

/// Publishes, for ever.
pub(super) async fn publish(world: Arc<World>, mut grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>) {
    let mut publisher = Publisher::new(node_name(), None);
    let mut kubelets = world.kubelets.subscribe();
    let mut changes = world.slices.subscribe();
    let first = wanted(&grants.borrow_and_update());
    publisher.on(Event::DevicesChanged(first), world.handle.now());
    loop {
        drop(publisher.take_reports());
        let until = match publisher.next(world.handle.now()) {
            Action::Wait(until) => until.unwrap_or(Duration::MAX),
            request => {
                let event = send(&world, request).await;
                publisher.on(event, world.handle.now());
                continue;
            }
        };
        let events = tokio::select! {
            biased;
            _ = grants.changed() => vec![Event::DevicesChanged(wanted(&grants.borrow_and_update()))],
            _ = kubelets.changed() => vec![Event::KubeletRegistered],
            _ = changes.changed() => {
                world.pause(MS, 20 * MS).await;
                changes.borrow_and_update();
                world.cluster().take_changes()
            }
            () = world.handle.sleep_until(until) => Vec::new(),
        };
        events.into_iter().for_each(|event| publisher.on(event, world.handle.now()));
    }
}

/// Sends a request of the publisher.
async fn send(world: &World, request: Action) -> Event {
    world.pause(MS, 10 * MS).await;
    if world.cluster().is_away {
        world.pause(MS, 2 * SECOND).await;
        return Event::Failed(Failure::default());
    }
    let event = world.cluster().answer(request);
    world.slices.send_modify(|changes| *changes += 1);
    world.pause(MS, 10 * MS).await;
    event
}

/// The kubelet deletes all slices of the node after its start, perhaps late.
pub(super) async fn wipe(world: Arc<World>) {
    world.pause(Duration::ZERO, 5 * SECOND).await;
    world.cluster().wipe();
    world.slices.send_modify(|changes| *changes += 1);
    world.kubelets.send_modify(|kubelets| *kubelets += 1);
}

fn status(status: u16) -> Event {
    Event::Failed(Failure { status: Some(status), ..Failure::default() })
}

impl Cluster {
    /// What the watch reports next.
    fn take_changes(&mut self) -> Vec<Event> {
        let changes = std::mem::take(&mut self.changed_slices);
        let event = |(is_removal, slice)| {
            if is_removal { Event::Deleted(slice) } else { Event::Changed(slice) }
        };
        changes.into_iter().map(event).collect()
    }

    fn stamp(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    fn put(&mut self, mut slice: ResourceSlice) -> Event {
        slice.metadata.resource_version = self.stamp();
        if slice.metadata.uid.is_empty() {
            slice.metadata.uid = format!("u{}", self.version);
        }
        self.slices.insert(slice.metadata.name.clone(), slice.clone());
        self.changed_slices.push((false, slice.clone()));
        Event::Accepted(Some(slice))
    }

    fn remove(&mut self, name: &str) {
        if let Some(mut slice) = self.slices.remove(name) {
            slice.metadata.resource_version = self.stamp();
            self.changed_slices.push((true, slice));
        }
    }

    fn wipe(&mut self) {
        for name in self.slices.keys().cloned().collect::<Vec<_>>() {
            self.remove(&name);
        }
    }

    fn answer(&mut self, request: Action) -> Event {
        let version = |cluster: &Cluster, name: &str| {
            cluster.slices.get(name).map(|slice| slice.metadata.resource_version.clone())
        };
        match request {
            Action::List => {
                self.changed_slices.clear();
                Event::Listed(self.slices.values().cloned().collect())
            }
            Action::Create(slice) if version(self, &slice.metadata.name).is_some() => status(409),
            Action::Create(slice) => self.put(slice),
            Action::Update(slice) => match version(self, &slice.metadata.name) {
                None => status(404),
                Some(known) if known != slice.metadata.resource_version => status(409),
                Some(_) => self.put(slice),
            },
            Action::Delete { name, resource_version, .. } => match version(self, &name) {
                None => status(404),
                Some(known) if known != resource_version => status(409),
                Some(_) => {
                    self.remove(&name);
                    Event::Accepted(None)
                }
            },
            Action::Wait(_) => Event::Accepted(None),
        }
    }

    /// The published devices of each pool, and whether each has a taint; `None` if a pool is not
    /// complete.
    pub(super) fn published(&self) -> Option<BTreeMap<(String, String), bool>> {
        let mut devices = BTreeMap::new();
        for slice in self.slices.values() {
            let pool = &slice.spec.pool;
            let same = self.slices.values().filter(|other| other.spec.pool.name == pool.name);
            let is_whole = same.clone().all(|other| other.spec.pool.generation == pool.generation)
                && i64::try_from(same.count()).unwrap() == pool.resource_slice_count;
            if !is_whole {
                return None;
            }
            let of_slice = slice.spec.devices.iter();
            devices.extend(of_slice.map(|device| {
                ((pool.name.clone(), device.name.clone()), !device.taints.is_empty())
            }));
        }
        Some(devices)
    }
}
