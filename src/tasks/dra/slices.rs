//! Publishes the devices for claims as `ResourceSlice` objects. [`Publisher`] decides each request;
//! here it is sent.

use crate::cluster::{
    Client, ClusterError, Collection, Credentials, RESOURCE_SLICES, Watch, WatchEvent,
};
use crate::domain::{Api, Grant, Inventory, NvmlSnapshot};
use crate::hardware;
use crate::health::Judgement;
use crate::host::HostRoot;
use crate::kubelet::dra::Notice;
use crate::slices::api::{OwnerReference, ResourceSlice};
use crate::slices::attributes::{Dropped, Facts};
use crate::slices::holders::Holders;
use crate::slices::names::NodeName;
use crate::slices::publisher::{Action, Cause, Event, Failure, Publisher, Report};
use crate::slices::wanted::{Inputs, Offer, offer};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Between two attempts to read the node's object at the start.
const READ_NODE_AGAIN: Duration = Duration::from_secs(5);
/// Attempts to read it. Without it the slices have no owner: the kubelet deletes them as well.
const READ_NODE_ATTEMPTS: u32 = 3;

/// The task.
pub(crate) struct SlicesTask {
    pub(crate) node: NodeName,
    pub(crate) credentials: Credentials,
    pub(crate) client: Client,
    pub(crate) host_root: HostRoot,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) judgement: watch::Receiver<Judgement>,
    pub(crate) nvml: watch::Receiver<Arc<NvmlSnapshot>>,
    /// The kubelet's reports. At its start it deletes all slices of the node.
    pub(crate) notices: watch::Receiver<Option<Notice>>,
    /// Why the slices are not published at present.
    pub(crate) problem: watch::Sender<Option<String>>,
}

/// The next thing that happened.
enum Wakeup {
    Watch(Box<WatchEvent<ResourceSlice>>),
    Devices,
    Kubelet,
    Due,
}

impl SlicesTask {
    /// Publishes, for ever.
    pub(crate) async fn run(mut self) {
        let began = Instant::now();
        let owner = self.owner().await;
        let mut publisher = Publisher::new(self.node.clone(), owner);
        let collection =
            Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", self.node.as_str());
        let mut slices = Watch::new(self.credentials.clone(), collection);
        let mut known = BTreeSet::new();
        publisher.on(Event::Offered(self.offer(&mut known)), began.elapsed());
        let mut is_listing = false;
        loop {
            self.report(publisher.take_reports());
            let until = match publisher.next(began.elapsed()) {
                Action::Wait(until) => until.map(|until| began + until),
                Action::List => {
                    is_listing = true;
                    slices.list_again();
                    None
                }
                write => {
                    let event = self.write(write).await;
                    publisher.on(event, began.elapsed());
                    continue;
                }
            };
            let events = match self.wait(&mut slices, until).await {
                Some(Wakeup::Watch(event)) => {
                    let is_end =
                        matches!(*event, WatchEvent::Listed(..) | WatchEvent::Failed { .. });
                    let is_answer = is_end && std::mem::take(&mut is_listing);
                    self.noticed(*event, is_answer)
                }
                Some(Wakeup::Devices) => vec![Event::Offered(self.offer(&mut known))],
                Some(Wakeup::Kubelet) => vec![Event::KubeletRegistered],
                Some(Wakeup::Due) => Vec::new(),
                // The daemon ends.
                None => return,
            };
            events.into_iter().for_each(|event| publisher.on(event, began.elapsed()));
        }
    }

    /// The object of the node, with which its slices are deleted.
    async fn owner(&self) -> Option<OwnerReference> {
        for attempt in 1..=READ_NODE_ATTEMPTS {
            match self.client.node(self.node.as_str()).await {
                Ok(Some(node)) => {
                    return Some(OwnerReference {
                        api_version: "v1".into(),
                        kind: "Node".into(),
                        name: self.node.as_str().to_owned(),
                        uid: node.metadata.uid,
                        controller: Some(true),
                    });
                }
                Ok(None) => {
                    tracing::warn!(node = self.node.as_str(), "the API server has no such node");
                }
                Err(error) => {
                    tracing::warn!(node = self.node.as_str(), %error, "cannot read this node's object");
                    self.problem.send_replace(Some(format!("cannot publish the devices: {error}")));
                }
            }
            if attempt < READ_NODE_ATTEMPTS {
                tokio::time::sleep(READ_NODE_AGAIN).await;
            }
        }
        None
    }

    /// Waits for an event, or until this time.
    async fn wait(
        &mut self,
        slices: &mut Watch<ResourceSlice>,
        until: Option<Instant>,
    ) -> Option<Wakeup> {
        let due = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        let is_open = |changed: Result<(), _>| changed.is_ok().then_some(Wakeup::Devices);
        tokio::select! {
            event = slices.next() => Some(Wakeup::Watch(Box::new(event))),
            changed = self.inventory.changed() => is_open(changed),
            changed = self.grants.changed() => is_open(changed),
            changed = self.nvml.changed() => is_open(changed),
            changed = self.notices.changed() => changed.is_ok().then_some(Wakeup::Kubelet),
            () = due => Some(Wakeup::Due),
        }
    }

    /// What a report of the watch means. `is_answer` is true if it ends a list.
    fn noticed(&self, event: WatchEvent<ResourceSlice>, is_answer: bool) -> Vec<Event> {
        match event {
            WatchEvent::Listed(slices, _) => {
                if self.problem.send_replace(None).is_some() {
                    tracing::info!("the devices are published again");
                }
                vec![Event::Listed(slices)]
            }
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => vec![Event::Changed(slice)],
            WatchEvent::Deleted(slice) => vec![Event::Deleted(slice)],
            WatchEvent::Failed { error, pause } => {
                let why = format!("cannot publish the devices: {error}");
                if self.problem.send_replace(Some(why)).is_none() {
                    tracing::warn!(%error, ?pause, "cannot watch the slices of this node");
                }
                let failed = is_answer.then(|| Event::Failed(failure(&error)));
                failed.into_iter().chain([Event::WatchLost]).collect()
            }
        }
    }

    /// Sends a write.
    async fn write(&self, action: Action) -> Event {
        let collection = Collection::at(RESOURCE_SLICES);
        let done = match action {
            Action::Create(slice) => self.client.create(collection.path(), &slice).await.map(Some),
            Action::Update(slice) => {
                let path = collection.object(&slice.metadata.name);
                self.client.replace(&path, &slice).await.map(Some)
            }
            Action::Delete { name, uid, resource_version } => {
                let path = collection.object(&name);
                self.client.delete(&path, &uid, Some(&resource_version)).await.map(|_| None)
            }
            Action::List | Action::Wait(_) => Ok(None),
        };
        match done {
            Ok(slice) => Event::Accepted(slice),
            Err(error) => Event::Failed(failure(&error)),
        }
    }

    /// The devices to publish. Logs what is left out for the first time.
    fn offer(&mut self, known: &mut BTreeSet<Dropped>) -> Offer {
        let inventory = self.inventory.borrow_and_update().clone();
        let grants = self.grants.borrow_and_update().clone();
        let nvml = self.nvml.borrow_and_update().clone();
        let resources = inventory.resources.iter();
        let resources = resources
            .filter(|(_, offering)| offering.spec.api == Api::Dra)
            .map(|(name, offering)| (name.clone(), Arc::clone(offering)))
            .collect();
        let Holders { claimed, held } = Holders::of(&grants);
        let judgement = self.judgement.borrow().clone();
        let driver = hardware::nvidia_driver_version(&self.host_root);
        let offer = offer(&Inputs {
            node: &self.node,
            resources: &resources,
            claimed: &claimed,
            held: &held,
            evicted: &BTreeSet::new(),
            verdicts: &judgement.verdicts,
            facts: Facts { nvidia_driver: driver.as_deref(), nvml: Some(&nvml) },
        });
        for dropped in offer.dropped.difference(known) {
            tracing::warn!(%dropped, "a part of a device is not published");
        }
        known.clone_from(&offer.dropped);
        offer
    }

    /// Logs what the publisher reports.
    fn report(&self, reports: Vec<Report>) {
        for report in reports {
            match report {
                Report::Uncontended => {
                    self.problem.send_replace(None);
                    tracing::info!("no other program writes the slices of this node any more");
                }
                Report::Contended(slice) => {
                    tracing::warn!(slice, "another program writes the slices of this node");
                    self.problem.send_replace(Some(format!(
                        "another program writes the ResourceSlice `{slice}` of this node; one try \
                         is made every 30 s"
                    )));
                }
                Report::Refused { slice, status, why, retry_after } => {
                    tracing::warn!(slice, status, why, ?retry_after, "cannot publish the devices");
                    self.problem.send_replace(Some(format!("cannot publish the devices: {why}")));
                }
                Report::FieldsDropped(fields) => {
                    tracing::warn!(
                        fields,
                        "the API server drops fields of devices: a feature gate is off"
                    );
                }
                Report::DeviceRefused { pool, device, why } => {
                    tracing::warn!(pool, device, why, "the API server refuses a device");
                }
            }
        }
    }
}

fn failure(error: &ClusterError) -> Failure {
    let causes = error.details().map(|details| details.causes.as_slice()).unwrap_or_default();
    let cause = |cause: &crate::cluster::Cause| Cause {
        field: cause.field.clone(),
        message: cause.message.clone(),
    };
    Failure {
        status: error.code(),
        message: error.to_string(),
        causes: causes.iter().map(cause).collect(),
        retry_after: error.retry_after(),
    }
}
