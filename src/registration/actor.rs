//! The actor: carries out what the state machines decide, and reports the results to them.

use super::attempt::{Attempted, Outcome, attempt};
use super::audit::{Audit, Healthy};
use super::config::{RegistrationConfig, ResourceStatus};
use super::core::{Event, Machine, State};
use super::observe::{KubeletObserver, Observed};
use crate::domain::ResourceName;
use crate::host;
use crate::kubelet::api::negotiation::NegotiatedVersion;
use crate::messages::{CheckpointWritten, Crash, KubeletSeen, RegistrationNumber, Retire};
use crate::telemetry::metrics;
use actix::{Actor, AsyncContext, Context, Handler, Recipient, SpawnHandle};
use std::any::Any;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio_stream::wrappers::WatchStream;

pub(super) struct Resource {
    pub(super) machine: Machine,
    /// The Register in progress: at most one per resource, so that two never race in the kubelet.
    pub(super) under_way: Option<tokio::task::JoinHandle<()>>,
    begun_at: Duration,
    took: Option<Duration>,
    retired: RegistrationNumber,
    /// Whether the last Register announced PreStartContainer.
    pub(super) pre_start: bool,
    /// The last problem that was logged. It is not logged twice in a row.
    logged: Option<String>,
    /// The API version that worked last.
    negotiated: Option<NegotiatedVersion>,
}

impl Resource {
    /// A resource that has not been registered yet.
    pub(super) fn new(machine: Machine, now: Duration) -> Self {
        Resource {
            machine,
            under_way: None,
            begun_at: now,
            took: None,
            retired: 0,
            pre_start: false,
            logged: None,
            negotiated: None,
        }
    }

    /// Begins this registration, instead of one in progress.
    fn begin(
        &mut self,
        config: &RegistrationConfig,
        name: &ResourceName,
        number: RegistrationNumber,
        now: Duration,
        attempted: Recipient<Attempted>,
    ) {
        if let Some(superseded) = self.under_way.take() {
            superseded.abort();
        }
        self.begun_at = now;
        let lists = config.lists.borrow().clone();
        let offering = lists.resources.get(name);
        self.pre_start = offering.is_some_and(|offering| offering.spec.needs_pre_start());
        let (config, name) = (config.clone(), name.clone());
        let attempt = attempt(config, name, number, self.pre_start, self.negotiated, attempted);
        self.under_way = Some(tokio::spawn(attempt));
    }

    /// Whether the end of this registration's stream is expected: this kubelet closes the former
    /// connection at a newer Register.
    pub(super) fn has_superseded(&self, number: RegistrationNumber) -> bool {
        number < self.machine.latest()
            && self.negotiated.is_some_and(|negotiated| {
                negotiated.version.package().replaces_connection_on_register()
            })
    }
}

/// The actor.
pub struct Registration {
    pub(super) config: RegistrationConfig,
    /// The highest registration number of an ended resource. A resource that returns continues from
    /// it.
    pub(super) base: RegistrationNumber,
    pub(super) resources: BTreeMap<ResourceName, Resource>,
    audit: Audit,
    observer: KubeletObserver,
    timer: Option<SpawnHandle>,
    /// Whether the absence of the kubelet was logged: once, not for every resource.
    absence_logged: bool,
    _life: Box<dyn Any + Send>,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration")
            .field("resources", &self.resources.keys())
            .finish_non_exhaustive()
    }
}

impl Registration {
    /// Builds one life of the actor. A life does not know the streams of the former one, and
    /// registers again; the kubelet loses no device by that. `number` counts the lives, so that
    /// registrations never share a number.
    pub fn new(config: RegistrationConfig, number: u64, life: impl Any + Send) -> Self {
        let (audit, observer) = (Audit::new(host::now().boot), KubeletObserver::new(&config));
        let base = number << 20;
        Registration {
            config,
            base,
            resources: BTreeMap::new(),
            audit,
            observer,
            timer: None,
            absence_logged: false,
            _life: Box::new(life),
        }
    }

    /// Handles one event of a resource: decides, carries the decision out, and publishes the state.
    pub(super) fn on(&mut self, name: &ResourceName, event: Event, context: &mut Context<Self>) {
        if *self.config.leaving.borrow() {
            return;
        }
        let now = host::now().boot;
        let Some(resource) = self.resources.get_mut(name) else { return };
        let (was_registered, was_contested) =
            (resource.machine.is_registered(), resource.machine.is_contested());
        if let Some(number) = resource.machine.on(event, now) {
            self.audit.registered(now, resource.machine.doubt_until());
            resource.begin(&self.config, name, number, now, context.address().recipient());
        }
        let contested = resource.machine.is_contested();
        if !was_registered && resource.machine.is_registered() {
            let took = now.saturating_sub(resource.begun_at);
            resource.took = Some(took);
            metrics::registration_took(name.as_str(), took);
            // A contested resource stays a problem until a stream of it has lived long enough.
            if !contested {
                resource.logged = None;
            }
            self.absence_logged = false;
            tracing::info!(resource = %name, took = ?took, "registered with the kubelet");
        }
        let settled = matches!(resource.machine.state(), State::Steady | State::Settling { .. });
        if settled && resource.retired != resource.machine.latest() {
            resource.retired = resource.machine.latest();
            self.config.retire.send(Retire { resource: name.clone(), newest: resource.retired });
        }
        if contested && !was_contested {
            let problem = "the kubelet ends one stream after the other; another plugin seems to serve this resource too. Stop that \
                           plugin, or rename one of the two resources. Registering again every 30 s";
            self.log_problem(name, problem.to_owned());
        }
        self.publish();
        self.arm(context);
    }

    pub(super) fn publish(&self) {
        let status = |name: &ResourceName, resource: &Resource| ResourceStatus {
            registered: resource.machine.is_registered(),
            awaiting_kubelet: resource.machine.is_kubelet_absent(),
            problem: resource.logged.clone(),
            contested: resource.machine.is_contested(),
            disagreement: self.audit.disagreement(name).map(|it| it.to_string()),
            last_registration_us: resource
                .took
                .and_then(|took| u64::try_from(took.as_micros()).ok()),
            api_version: resource.negotiated.map(|negotiated| negotiated.version.name()),
        };
        let all = self
            .resources
            .iter()
            .map(|(name, resource)| (name.clone(), status(name, resource)))
            .collect();
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
        let machines =
            self.resources.values().filter_map(|resource| resource.machine.next_deadline());
        let audit = self.registered().next().is_some().then(|| self.audit.next_deadline());
        if let Some(deadline) = machines.chain(audit).min() {
            let wait = deadline.saturating_sub(host::now().boot);
            self.timer = Some(context.run_later(wait, |this, context| {
                this.timer = None;
                this.observe_if_due(context);
                this.on_all(Event::Tick, context);
            }));
        }
    }

    /// The resources that the kubelet has from us, as far as the streams show.
    fn registered(&self) -> impl Iterator<Item = &ResourceName> {
        self.resources
            .iter()
            .filter(|(_, resource)| resource.machine.is_registered())
            .map(|(name, _)| name)
    }

    /// The lists that the kubelet should have.
    fn ours(&self) -> Healthy {
        let lists = self.config.lists.borrow();
        let offered = self
            .registered()
            .filter_map(|name| Some((name.clone(), lists.resources.get(name)?.healthy())));
        offered.collect()
    }

    /// Begins a pass of the audit, if one is due.
    fn observe_if_due(&mut self, context: &mut Context<Self>) {
        let now = host::now().boot;
        if self.audit.next_deadline() <= now {
            self.audit.begin(now);
            let (observer, me) = (self.observer.clone(), context.address());
            actix::spawn(async move {
                let seen = observer.observe().await;
                // The actor may have died. Its next life begins its own pass.
                let _ = me.send(Observed(seen)).await;
            });
        }
    }

    /// Records the API version that worked, and logs a change.
    fn note_version(&mut self, name: &ResourceName, negotiated: NegotiatedVersion) {
        if let Some(resource) = self.resources.get_mut(name) {
            let before = resource.negotiated.replace(negotiated).map(|before| before.version);
            if before != Some(negotiated.version) {
                tracing::info!(resource = %name, version = negotiated.version.name(), "the kubelet accepts this version of the device-plugin API");
            }
        }
    }

    /// Logs a problem, unless it is the last one that was logged.
    fn log_problem(&mut self, name: &ResourceName, problem: String) {
        if let Some(resource) = self.resources.get_mut(name)
            && resource.logged.as_ref() != Some(&problem)
        {
            tracing::warn!(resource = %name, "{problem}");
            resource.logged = Some(problem);
        }
    }
}

impl Actor for Registration {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        self.follow(context);
        context.add_stream(WatchStream::from_changes(self.config.lists.clone()));
    }
}

impl Handler<Attempted> for Registration {
    type Result = ();

    fn handle(
        &mut self,
        Attempted { resource, number, outcome }: Attempted,
        context: &mut Self::Context,
    ) {
        match outcome {
            Outcome::Registered(negotiated) => {
                self.note_version(&resource, negotiated);
                self.on(&resource, Event::Registered(number), context);
                // The options of the resource may have changed since.
                self.follow(context);
            }
            Outcome::Absent(problem) => {
                if !std::mem::replace(&mut self.absence_logged, true) {
                    tracing::warn!("waiting for the kubelet: {problem}");
                }
                // The socket of this registration will not be used.
                self.config.retire.send(Retire { resource: resource.clone(), newest: number });
                self.on(&resource, Event::Absent(number), context);
            }
            Outcome::Failed(problem) => {
                self.log_problem(&resource, problem);
                // The sockets of earlier failures will not be used.
                self.config.retire.send(Retire { resource: resource.clone(), newest: number });
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
        self.audit.checkpoint_written(host::now().boot);
        self.arm(context);
    }
}

impl Handler<Observed> for Registration {
    type Result = ();

    fn handle(&mut self, Observed(seen): Observed, context: &mut Self::Context) {
        let keeps_alloc_id = |name: &ResourceName| {
            self.resources
                .get(name)
                .and_then(|resource| resource.negotiated)
                .is_some_and(|negotiated| negotiated.version.package().keeps_annotations())
        };
        let ours = self.ours();
        let found = self.audit.compare(&ours, seen, keeps_alloc_id, host::now().boot);
        for (name, disagreement) in found {
            tracing::warn!(resource = %name, "{disagreement}; registering again");
            metrics::disagreed(name.as_str(), disagreement.kind());
            self.on(&name, Event::Mismatch, context);
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
