//! Publishes the devices for claims as `ResourceSlice` objects. [`Publisher`] decides each request;
//! here it is sent.

use super::known::{Known, Problems, failure, not_published, result_of};
use super::owner::Owner;
use crate::cluster::{Client, Collection, Credentials, RESOURCE_SLICES, Watch, WatchEvent};
use crate::domain::{Grant, Inventory, NvmlSnapshot};
use crate::hardware;
use crate::health::Judgement;
use crate::host::HostRoot;
use crate::kubelet::dra::Notice;
use crate::slices::api::ResourceSlice;
use crate::slices::attributes::Facts;
use crate::slices::holders::{Holders, Lost, still_lost};
use crate::slices::names::NodeName;
use crate::slices::others::OtherDriver;
use crate::slices::published::Published;
use crate::slices::publisher::{Action, Event, Publisher};
use crate::slices::wanted::{Inputs, WantedDevices, wanted_devices};
use crate::telemetry::metrics;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long the first slices wait for NVML. Without a program that keeps the driver initialized, a
/// call initializes each GPU, which takes seconds.
const NVML_WITHIN: Duration = Duration::from_secs(10);

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
    /// Whether `nvml` has what NVML reports for now.
    pub(crate) nvml_called: watch::Receiver<bool>,
    /// Whether the attributes of vendors' drivers are published too.
    pub(crate) vendors: bool,
    /// The devices that claims have lost to containers.
    pub(crate) lost: watch::Receiver<Arc<Lost>>,
    /// The kubelet's reports. At its start it deletes all slices of the node.
    pub(crate) notices: watch::Receiver<Option<Notice>>,
    /// Why the slices are not published at present.
    pub(crate) problem: watch::Sender<Option<String>>,
    /// What the API server has, for `status` and the metrics.
    pub(crate) published: watch::Sender<Option<Arc<Published>>>,
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
        let mut known = Known::default();
        let mut owner = Owner::new(self.node.clone(), began);
        self.read(&mut owner).await;
        self.until_described().await;
        let mut publisher = Publisher::new(self.node.clone(), owner.reference());
        let collection =
            Collection::at(RESOURCE_SLICES).with_field("spec.nodeName", self.node.as_str());
        let mut slices = Watch::new(self.credentials.clone(), collection);
        publisher.on(Event::DevicesChanged(self.wanted(&mut known)), began.elapsed());
        let mut is_listing = false;
        loop {
            if owner.read_at().is_some_and(|at| at <= Instant::now()) {
                self.read(&mut owner).await;
                publisher.on(Event::OwnerRead(owner.reference()), began.elapsed());
            }
            let action = publisher.next(began.elapsed());
            known.report(publisher.take_reports());
            self.show(&mut known, &mut publisher, began.elapsed());
            let until = match action {
                Action::Wait(until) => until.map(|until| began + until),
                Action::List => {
                    is_listing = true;
                    slices.list_again();
                    None
                }
                write => {
                    let event = self.write(write, &mut known.problems).await;
                    publisher.on(event, began.elapsed());
                    continue;
                }
            };
            let until = until.into_iter().chain(owner.read_at()).min();
            let events = match self.wait(&mut slices, until).await {
                Some(Wakeup::Watch(event)) => {
                    if matches!(*event, WatchEvent::Deleted(..)) {
                        owner.may_be_another(Instant::now());
                    }
                    let is_end =
                        matches!(*event, WatchEvent::Listed(..) | WatchEvent::Failed { .. });
                    let is_answer = is_end && std::mem::take(&mut is_listing);
                    known.noticed(*event, is_answer)
                }
                Some(Wakeup::Devices) => vec![Event::DevicesChanged(self.wanted(&mut known))],
                Some(Wakeup::Kubelet) => {
                    owner.may_be_another(Instant::now());
                    vec![Event::KubeletRegistered]
                }
                Some(Wakeup::Due) => Vec::new(),
                // The daemon ends.
                None => return,
            };
            events.into_iter().for_each(|event| publisher.on(event, began.elapsed()));
        }
    }

    /// Waits for what NVML reports of GPUs. Otherwise each start of the daemon would remove it from
    /// the slices of the former one, and add it again.
    async fn until_described(&mut self) {
        let has_gpus = {
            let inventory = self.inventory.borrow();
            let mut listed = inventory.resources.values().flat_map(|it| it.devices.values());
            listed.any(|listed| hardware::nvidia_gpu(&listed.device).is_some())
        };
        if has_gpus {
            let called = self.nvml_called.wait_for(|called| *called);
            drop(tokio::time::timeout(NVML_WITHIN, called).await);
        }
    }

    /// Shows the state in `status` and in the metrics.
    fn show(&self, known: &mut Known, publisher: &mut Publisher, now: Duration) {
        // A write that is no longer needed cannot fail.
        if known.problems.write.is_some() && publisher.is_complete(now) {
            known.problems.write = None;
        }
        let problem = known.problems.worst();
        self.problem.send_if_modified(|shown| {
            let is_other = shown.as_ref() != problem;
            if is_other && problem.is_none() {
                tracing::info!("the devices are published again");
            }
            if is_other {
                *shown = problem.cloned();
            }
            is_other
        });
        let mut published = publisher.summary();
        published.others =
            known.wanted.as_ref().map(|it| known.others.drivers(it)).unwrap_or_default();
        self.published.send_if_modified(|shown| {
            let is_other = shown.as_deref() != Some(&published);
            if is_other {
                let former = shown.as_ref().map(|it| it.others.clone()).unwrap_or_default();
                let is_known = |other: &&OtherDriver| {
                    former.iter().any(|it| (&it.driver, &it.same) == (&other.driver, &other.same))
                };
                for other in published.others.iter().filter(|other| !is_known(other)) {
                    let (driver, devices, same) = (&other.driver, other.devices, other.same.len());
                    tracing::info!(driver, devices, same, "another DRA driver publishes devices");
                }
                *shown = Some(Arc::new(published));
            }
            is_other
        });
    }

    async fn read(&self, owner: &mut Owner) {
        let found = self.client.node(self.node.as_str()).await;
        let found = found.map(|node| node.map(|node| node.metadata.uid));
        owner.answered(found.map_err(|error| error.to_string()), Instant::now());
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
            changed = self.lost.changed() => is_open(changed),
            changed = self.notices.changed() => changed.is_ok().then_some(Wakeup::Kubelet),
            () = due => Some(Wakeup::Due),
        }
    }

    /// Sends a write.
    async fn write(&self, action: Action, problems: &mut Problems) -> Event {
        let collection = Collection::at(RESOURCE_SLICES);
        let verb = match action {
            Action::Create(_) => "create",
            Action::Update(_) => "update",
            _ => "delete",
        };
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
        metrics::slice_written(verb, result_of(done.as_ref().err()));
        match done {
            Ok(slice) => {
                problems.write = None;
                Event::Accepted(slice)
            }
            Err(error) => {
                // The publisher corrects the others, or reports them.
                if error.code().is_none_or(|code| code == 429 || code >= 500) {
                    problems.write = Some(not_published(&error));
                }
                Event::Failed(failure(&error))
            }
        }
    }

    /// The devices to publish. Logs what is left out for the first time.
    fn wanted(&mut self, known: &mut Known) -> WantedDevices {
        let inventory = self.inventory.borrow_and_update().clone();
        let grants = self.grants.borrow_and_update().clone();
        let nvml = self.nvml.borrow_and_update().clone();
        let Holders { claimed, shares, held } = &Holders::of(&grants);
        let judgement = self.judgement.borrow().clone();
        let driver = hardware::nvidia_driver_version(&self.host_root);
        let mut wanted = wanted_devices(&Inputs {
            node: &self.node,
            resources: &inventory.resources,
            claimed,
            held,
            shares,
            verdicts: &judgement.verdicts,
            facts: Facts {
                nvidia_driver: driver.as_deref(),
                nvml: Some(&nvml),
                vendors: self.vendors,
                taken: 0,
            },
        });
        let lost = still_lost(&self.lost.borrow_and_update().clone(), &grants);
        wanted.evict(&lost.into_keys().collect());
        for dropped in wanted.dropped.difference(&known.dropped) {
            tracing::warn!(%dropped, "a part of a device is not published");
        }
        known.dropped.clone_from(&wanted.dropped);
        known.wanted = Some(wanted.clone());
        wanted
    }
}
