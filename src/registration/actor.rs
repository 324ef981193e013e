//! The shell: performs what the machines decide, and reports to them what came of it.

use super::attempt::{Attempted, Outcome, attempt};
use super::audit::{Audit, Healthy};
use super::core::{Event, Machine, State};
use super::sighting::{Looked, Looker};
use crate::domain::{Gather, Inventory, KubeletGeneration, ResourceName};
use crate::host;
use crate::kubelet::api::negotiation::Spoken;
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use crate::messages::{Bind, CheckpointWritten, Crash, KubeletSeen, Mailbox, RegistrationNumber, Retire};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, Context, Handler, SpawnHandle};
use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{RwLock, watch};
use tokio_stream::wrappers::WatchStream;

/// One resource's place in the kubelet, for `status` and readiness.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourceStatus {
    /// Whether the kubelet has opened our stream.
    pub registered: bool,
    /// Whether there is no kubelet to register with.
    pub awaiting_kubelet: bool,
    /// Why the last registration failed, until one succeeds.
    pub problem: Option<String>,
    /// Whether another plugin seems to take the resource again and again.
    pub contested: bool,
    /// What the kubelet has otherwise than we do, although our stream is open.
    pub disagreement: Option<String>,
    /// From the begin of the last registration to its stream, in microseconds.
    pub last_registration_us: Option<u64>,
    /// The version of the device-plugin API that the kubelet took last.
    pub api_version: Option<&'static str>,
}

impl ResourceStatus {
    /// Whether the kubelet has it from here, or there is no kubelet that could.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.registered || self.awaiting_kubelet
    }
}

/// What the actor needs; the same for every life.
#[derive(Debug, Clone)]
pub struct RegistrationConfig {
    /// `<kubelet-dir>/device-plugins/kubelet.sock`.
    pub kubelet_socket: PathBuf,
    /// `<kubelet-dir>/device-plugins`.
    pub device_plugins: PathBuf,
    /// The kubelet's checkpoint.
    pub checkpoint: CheckpointReader,
    /// The pod-resources API.
    pub pod_resources: PodResources,
    /// What the kubelet is told, and so what is to be registered.
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// Makes sockets.
    pub bind: Mailbox<Bind>,
    /// Closes superseded sockets.
    pub retire: Mailbox<Retire>,
    /// The kubelet's socket as last seen by the host watch.
    pub kubelet: watch::Receiver<Option<KubeletGeneration>>,
    /// Where the state of every resource is published.
    pub status: Arc<watch::Sender<BTreeMap<ResourceName, ResourceStatus>>>,
    /// Read while a Register is under way. Written while another instance has been offered what the kubelet has open here.
    pub registering: Arc<RwLock<()>>,
    /// Whether this instance ends, or hands over: it registers nothing more.
    pub leaving: watch::Receiver<bool>,
}

pub(super) struct Resource {
    pub(super) machine: Machine,
    /// The Register under way: at most one, so that two never race in the kubelet.
    pub(super) under_way: Option<tokio::task::JoinHandle<()>>,
    begun_at: Duration,
    took: Option<Duration>,
    retired: RegistrationNumber,
    /// What the last Register told of PreStartContainer.
    pub(super) pre_start: bool,
    /// The last failure that was logged: the same one again is no news.
    said: Option<String>,
    /// The version of the API that worked last.
    spoken: Option<Spoken>,
}

impl Resource {
    /// One that has not been registered yet.
    pub(super) fn new(machine: Machine, now: Duration) -> Self {
        Resource { machine, under_way: None, begun_at: now, took: None, retired: 0, pre_start: false, said: None, spoken: None }
    }

    /// Whether the end of this registration's stream is the kubelet's way of making place for a newer one.
    pub(super) fn has_superseded(&self, number: RegistrationNumber) -> bool {
        number < self.machine.latest() && self.spoken.is_some_and(|spoken| spoken.version.dialect().closes_the_former())
    }
}

/// The actor.
pub struct Registration {
    pub(super) config: RegistrationConfig,
    /// The highest number of a registration of a resource that has ended: one that comes again goes on from there.
    pub(super) base: RegistrationNumber,
    pub(super) resources: BTreeMap<ResourceName, Resource>,
    audit: Audit,
    looker: Looker,
    timer: Option<SpawnHandle>,
    /// Whether it has been said that there is no kubelet: once, not for every resource.
    said_absent: bool,
    _life: Box<dyn Any + Send>,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration").field("resources", &self.resources.keys()).finish_non_exhaustive()
    }
}

impl Registration {
    /// Builds one life of the actor. A life knows nothing of the streams of the one before it and registers anew,
    /// which the kubelet takes without a dip. `number` counts the lives: registrations never share a number.
    pub fn new(config: RegistrationConfig, number: u64, life: impl Any + Send) -> Self {
        let (audit, looker) = (Audit::new(host::now().boot), Looker::new(&config));
        let base = number << 20;
        Registration { config, base, resources: BTreeMap::new(), audit, looker, timer: None, said_absent: false, _life: Box::new(life) }
    }

    pub(super) fn on(&mut self, name: &ResourceName, event: Event, context: &mut Context<Self>) {
        if *self.config.leaving.borrow() {
            return;
        }
        let now = host::now().boot;
        let Some(resource) = self.resources.get_mut(name) else { return };
        let (was_registered, was_contested) = (resource.machine.is_registered(), resource.machine.is_contested());
        let begin = resource.machine.on(event, now);
        if let Some(number) = begin {
            self.audit.registered(now, resource.machine.doubt_until());
            if let Some(superseded) = resource.under_way.take() {
                superseded.abort();
            }
            resource.begun_at = now;
            resource.pre_start = self.config.inventory.borrow().resources.get(name).is_some_and(|offering| offering.spec.needs_pre_start());
            let Resource { pre_start, spoken, .. } = *resource;
            let attempt = attempt(self.config.clone(), name.clone(), number, pre_start, spoken, context.address().recipient());
            resource.under_way = Some(tokio::spawn(attempt));
        }
        let contested = resource.machine.is_contested();
        if !was_registered && resource.machine.is_registered() {
            let took = now.saturating_sub(resource.begun_at);
            resource.took = Some(took);
            metrics::registration_took(name.as_str(), took);
            // A contested resource stays a problem until a stream of it has lived in peace.
            if !contested {
                resource.said = None;
            }
            self.said_absent = false;
            tracing::info!(resource = %name, took = ?took, "registered with the kubelet");
        }
        let settled = matches!(resource.machine.state(), State::Steady | State::Settling { .. });
        if settled && resource.retired != resource.machine.latest() {
            resource.retired = resource.machine.latest();
            self.config.retire.tell(Retire { resource: name.clone(), newest: resource.retired });
        }
        if contested && !was_contested {
            let problem = "the kubelet ends one stream after the other; another plugin seems to serve this resource too: stop that one, or \
                           give one of them another resource name. Trying again every 30 s";
            self.say(name, problem.to_owned());
        }
        self.publish();
        self.arm(context);
    }

    pub(super) fn publish(&self) {
        let status = |name: &ResourceName, resource: &Resource| ResourceStatus {
            registered: resource.machine.is_registered(),
            awaiting_kubelet: resource.machine.is_kubelet_absent(),
            problem: resource.said.clone(),
            contested: resource.machine.is_contested(),
            disagreement: self.audit.disagreement(name).map(ToString::to_string),
            last_registration_us: resource.took.and_then(|took| u64::try_from(took.as_micros()).ok()),
            api_version: resource.spoken.map(|spoken| spoken.version.name()),
        };
        let all = self.resources.iter().map(|(name, resource)| (name.clone(), status(name, resource))).gather();
        self.config.status.send_if_modified(|published| {
            let changed = *published != all;
            *published = all;
            changed
        });
    }

    /// One timer for all machines, at the earliest deadline.
    fn arm(&mut self, context: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            context.cancel_future(timer);
        }
        let machines = self.resources.values().filter_map(|resource| resource.machine.next_deadline());
        let audit = self.registered().next().is_some().then(|| self.audit.next_deadline());
        if let Some(deadline) = machines.chain(audit).min() {
            let wait = deadline.saturating_sub(host::now().boot);
            self.timer = Some(context.run_later(wait, |this, context| {
                this.timer = None;
                this.look(context);
                this.on_all(Event::Tick, context);
            }));
        }
    }

    /// The resources that the kubelet seems to have from us.
    fn registered(&self) -> impl Iterator<Item = &ResourceName> {
        self.resources.iter().filter(|(_, resource)| resource.machine.is_registered()).map(|(name, _)| name)
    }

    /// What the kubelet should have.
    fn ours(&self) -> Healthy {
        let inventory = self.config.inventory.borrow();
        let offered = self.registered().filter_map(|name| Some((name.clone(), inventory.resources.get(name)?.healthy())));
        offered.gather()
    }

    /// Looks at what the kubelet has, when that is due.
    fn look(&mut self, context: &mut Context<Self>) {
        let now = host::now().boot;
        if self.audit.next_deadline() <= now {
            self.audit.begin(now);
            let (looker, me) = (self.looker.clone(), context.address());
            actix::spawn(async move {
                let seen = looker.look().await;
                // The actor may have died meanwhile; its next life looks for itself.
                let _ = me.send(Looked(seen)).await;
            });
        }
    }

    /// Remembers the version that worked; another one than before is news.
    fn spoke(&mut self, name: &ResourceName, spoken: Spoken) {
        if let Some(resource) = self.resources.get_mut(name) {
            let before = resource.spoken.replace(spoken).map(|before| before.version);
            if before != Some(spoken.version) {
                tracing::info!(resource = %name, version = spoken.version.name(), "the kubelet takes this version of the API");
            }
        }
    }

    /// Logs a failure once, until another one takes its place.
    fn say(&mut self, name: &ResourceName, problem: String) {
        if let Some(resource) = self.resources.get_mut(name)
            && resource.said.as_ref() != Some(&problem)
        {
            tracing::warn!(resource = %name, "{problem}");
            resource.said = Some(problem);
        }
    }
}

impl Actor for Registration {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        self.follow(context);
        context.add_stream(WatchStream::from_changes(self.config.inventory.clone()));
    }
}

impl Handler<Attempted> for Registration {
    type Result = ();

    fn handle(&mut self, Attempted { resource, number, outcome }: Attempted, context: &mut Self::Context) {
        match outcome {
            Outcome::Registered(spoken) => {
                self.spoke(&resource, spoken);
                self.on(&resource, Event::Registered(number), context);
                // What it was registered with may have changed meanwhile.
                self.follow(context);
            }
            Outcome::Absent(problem) => {
                if !std::mem::replace(&mut self.said_absent, true) {
                    tracing::warn!("waiting for the kubelet: {problem}");
                }
                // A kubelet that ended in the midst of it leaves a socket without use.
                self.config.retire.tell(Retire { resource: resource.clone(), newest: number });
                self.on(&resource, Event::Absent(number), context);
            }
            Outcome::Failed(problem) => {
                self.say(&resource, problem);
                // The sockets of earlier failures are of no use to anybody.
                self.config.retire.tell(Retire { resource: resource.clone(), newest: number });
                self.on(&resource, Event::Refused(number), context);
            }
        }
    }
}

impl Handler<KubeletSeen> for Registration {
    type Result = ();

    fn handle(&mut self, KubeletSeen(kubelet): KubeletSeen, context: &mut Self::Context) {
        self.audit.new_kubelet();
        self.on_all(Event::Kubelet(kubelet), context);
    }
}

impl Handler<CheckpointWritten> for Registration {
    type Result = ();

    fn handle(&mut self, _: CheckpointWritten, context: &mut Self::Context) {
        self.audit.stir(host::now().boot);
        self.arm(context);
    }
}

impl Handler<Looked> for Registration {
    type Result = ();

    fn handle(&mut self, Looked(seen): Looked, context: &mut Self::Context) {
        let is_told = |name: &ResourceName| {
            self.resources.get(name).and_then(|resource| resource.spoken).is_some_and(|spoken| spoken.version.dialect().keeps_annotations())
        };
        let ours = self.ours();
        let found = self.audit.compare(&ours, seen, is_told, host::now().boot);
        for (name, disagreement) in found {
            tracing::warn!(resource = %name, "{disagreement}; registering again");
            metrics::disagreed(name.as_str(), disagreement.kind());
            self.on(&name, Event::Disowned, context);
        }
        self.publish();
        self.arm(context);
    }
}

impl Handler<Crash> for Registration {
    type Result = ();

    #[expect(clippy::panic, reason = "the message asks for it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
