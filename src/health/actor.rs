//! The health actor's shell: passes evidence to the judge, publishes the lists, has verdicts
//! recorded, and logs changes.

use super::config::HealthConfig;
use super::core::{self, Judge, Rules};
use super::prober::Prober;
use super::report;
use super::since::new_since;
use crate::domain::{
    AtKubeletStart, DeviceId, DueHooks, Grant, HealthPolicy, KubeletGeneration, MpsStates,
    OperatorRequest, Plan, Verdict,
};
use crate::host;
use crate::messages::{
    ApplyOperatorRequest, Checked, Crash, DeviceEventSeen, Discovered, Forget,
    OperatorRequestError, RecordVerdicts, ReportUnusable, Rescan,
};
use actix::{
    Actor, ActorFutureExt, AsyncContext, Context, Handler, Message, ResponseActFuture, SpawnHandle,
    StreamHandler, fut,
};
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio_stream::wrappers::WatchStream;

/// The deadline for the ledger to make verdicts durable.
const RECORD_DEADLINE: Duration = Duration::from_secs(5);
/// A kubelet that has started admits its pods within some seconds. After this time it counts as
/// settled.
const ADMISSION_PERIOD: Duration = Duration::from_secs(60);

/// The actor.
#[derive(Debug)]
pub struct HealthActor {
    pub(super) config: HealthConfig,
    /// The plan of the last evidence.
    pub(super) plan: Arc<Plan>,
    pub(super) judge: Judge,
    /// The grants that the list was last compared with.
    judged_grants: Arc<Vec<Arc<Grant>>>,
    pub(super) prober: Option<Prober>,
    /// Devices with a probe that does not return.
    pub(super) stuck: BTreeSet<DeviceId>,
    /// Whether any device or bridge counts errors.
    pub(super) has_counters: bool,
    timer: Option<SpawnHandle>,
    probe_timer: Option<SpawnHandle>,
    _drop_guard: Box<dyn Any + Send>,
}

/// The answer of the ledger to verdicts.
type Recorded = ResponseActFuture<HealthActor, Result<(), OperatorRequestError>>;

/// Probing has made progress.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct ProbesReady;

impl HealthActor {
    /// Builds the actor, which starts with the last published values.
    pub fn new(config: HealthConfig, drop_guard: impl Any + Send) -> Self {
        let plan = config.plan.borrow().clone();
        let rules = rules(&config, &plan);
        let remembered = Arc::clone(&config.judgement.borrow().verdicts);
        let judge = Judge::new(
            Arc::clone(&plan.specs),
            config.inventory.borrow().clone(),
            &config.listed,
            rules,
            &remembered,
        );
        HealthActor {
            config,
            plan,
            judge,
            judged_grants: Arc::default(),
            prober: None,
            stuck: BTreeSet::new(),
            has_counters: false,
            timer: None,
            probe_timer: None,
            _drop_guard: Box::new(drop_guard),
        }
    }

    /// Judges by another plan from now on.
    fn apply_plan(&mut self, plan: Arc<Plan>) {
        self.judge.apply_plan(Arc::clone(&plan.specs), rules(&self.config, &plan));
        if plan.health.at_kubelet_start == AtKubeletStart::Report {
            self.judge.withhold_until(Duration::ZERO);
        }
        self.plan = plan;
    }

    pub(super) fn held(&self) -> core::Held {
        core::held(self.config.grants.borrow().iter().map(AsRef::as_ref))
    }

    /// Judges, publishes, and has the changed verdicts recorded.
    pub(super) fn publish(&mut self, context: &mut Context<Self>) {
        let verdicts = self.judge_all(context);
        if !verdicts.is_empty() {
            // The list does not wait for the ledger.
            context.spawn(self.record(verdicts).map(|_, _, _| ()));
        }
    }

    /// Has verdicts recorded. Those that are not, such as on a full disk, are sent again with the
    /// next pass: an event of the kernel comes only once.
    fn record(&self, verdicts: Vec<(DeviceId, Option<Verdict>)>) -> Recorded {
        let devices: Vec<DeviceId> = verdicts.iter().map(|(device, _)| device.clone()).collect();
        let ledger = self.config.ledger.clone();
        let call = async move { ledger.call(RecordVerdicts(verdicts), RECORD_DEADLINE).await };
        let answered = fut::wrap_future(call).map(|answered, this: &mut Self, _| {
            let error = match answered {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            this.judge.not_recorded(devices);
            Err(OperatorRequestError::NotRecorded(error))
        });
        Box::pin(answered)
    }

    /// Judges, publishes and sets the timers. Returns the changed verdicts, which the caller has
    /// recorded.
    fn judge_all(&mut self, context: &mut Context<Self>) -> Vec<(DeviceId, Option<Verdict>)> {
        let grants = self.config.grants.borrow().clone();
        self.judged_grants = Arc::clone(&grants);
        let held = core::held(grants.iter().map(AsRef::as_ref));
        let now = host::now().boot;
        // Read after the grants: the ledger publishes a hook before the release that makes the hook
        // due.
        let due = self.config.due.borrow().clone();
        self.judge.set_mps(self.config.mps.borrow().clone());
        let Some(inventory) = self.judge.judge(&held, &due.free, now) else { return Vec::new() };
        let lists = core::plugin_lists(&inventory, &held, &self.config.lists.borrow());
        let before = self.config.inventory.borrow().clone();
        if before != inventory {
            report::changes(&before, &inventory, self.judge.verdicts());
            self.config.inventory.send_replace(inventory);
        }
        self.config.lists.send_if_modified(|known| {
            let is_news = *known != lists;
            *known = lists;
            is_news
        });
        let changed = self.judge.take_changed(|device| core::holders(&grants, device));
        if !changed.is_empty() {
            let verdicts = Arc::new(self.judge.verdicts().clone());
            self.config.judgement.send_modify(|judgement| judgement.verdicts = verdicts);
        }
        self.arm(now, context);
        changed
    }

    /// Sets the timers to the next change of a list and to the next probe.
    fn arm(&mut self, now: Duration, context: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            context.cancel_future(timer);
        }
        if let Some(deadline) = self.judge.next_deadline(now) {
            self.timer = Some(context.run_later(deadline.saturating_sub(now), |this, context| {
                this.timer = None;
                this.publish(context);
            }));
        }
        if let Some(timer) = self.probe_timer.take() {
            context.cancel_future(timer);
        }
        if let Some(wanted) = self.judge.next_probe() {
            self.probe_timer =
                Some(context.run_later(wanted.saturating_sub(now), |this, context| {
                    this.probe_timer = None;
                    let now = host::now().boot;
                    this.judge.probe_requested(now);
                    this.config.rescan.send(Rescan { asked_at: now });
                    this.probe(context);
                }));
        }
    }

    /// A kubelet that has just started must not reject pods for a failure that may end soon.
    fn note_kubelet_start(&mut self, generation: Option<KubeletGeneration>) {
        if self.plan.health.at_kubelet_start == AtKubeletStart::Report {
            return;
        }
        let now = host::now();
        let Some(started) = generation.and_then(|generation| generation.made_at()) else { return };
        let age = Duration::from_millis(now.wall.0.saturating_sub(started.0));
        self.judge.withhold_until(now.boot + ADMISSION_PERIOD.saturating_sub(age));
    }
}

fn rules(config: &HealthConfig, plan: &Plan) -> Rules {
    let HealthPolicy { poll, fatal_xids, ignored, at_kubelet_start: _, nvml_events: _ } =
        plan.health.clone();
    Rules {
        boot_id: config.boot_id.clone(),
        has_probes: true,
        fatal_xids,
        ignored,
        poll,
        leave_after: config.leave_after,
    }
}

impl Actor for HealthActor {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        // A change of the grants can change the list: an id that is no longer held may leave it.
        context.add_stream(WatchStream::from_changes(self.config.grants.clone()));
        context.add_stream(WatchStream::from_changes(self.config.due.clone()));
        context.add_stream(WatchStream::from_changes(self.config.mps.clone()));
        context.add_stream(WatchStream::new(self.config.kubelet.clone()));
        let me = context.address();
        // A full mailbox already has one of these messages.
        self.prober = Some(Prober::new(Arc::clone(&self.config.probe_device), move || {
            drop(me.try_send(ProbesReady));
        }));
        self.schedule_poll(context);
        // At the daemon's start the first scan comes anyway. A rebuilt actor has lost the evidence.
        if !self.config.inventory.borrow().resources.is_empty() {
            self.config.rescan.send(Rescan { asked_at: host::now().boot });
        }
    }
}

impl StreamHandler<Arc<Vec<Arc<Grant>>>> for HealthActor {
    fn handle(&mut self, grants: Arc<Vec<Arc<Grant>>>, context: &mut Self::Context) {
        // Every Allocate adds one new grant to many known ones.
        let both = self.judged_grants.iter().chain(grants.iter()).map(AsRef::as_ref);
        if core::depend_on_holders(&self.config.inventory.borrow(), both)
            || !self.judge.is_unchanged_by(new_since(&self.judged_grants, &grants))
        {
            self.publish(context);
        } else {
            self.judged_grants = grants;
        }
    }

    /// The ledger's publisher ends only with the daemon; the actor has other sources.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl StreamHandler<Arc<DueHooks>> for HealthActor {
    fn handle(&mut self, _: Arc<DueHooks>, context: &mut Self::Context) {
        self.publish(context);
    }

    /// As for the grants.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl StreamHandler<Arc<MpsStates>> for HealthActor {
    fn handle(&mut self, _: Arc<MpsStates>, context: &mut Self::Context) {
        self.publish(context);
    }

    /// As for the grants.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl StreamHandler<Option<KubeletGeneration>> for HealthActor {
    fn handle(&mut self, generation: Option<KubeletGeneration>, context: &mut Self::Context) {
        self.note_kubelet_start(generation);
        self.publish(context);
    }

    /// As for the grants.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Handler<Discovered> for HealthActor {
    type Result = ();

    fn handle(&mut self, Discovered { evidence, plan }: Discovered, context: &mut Self::Context) {
        if plan.number > self.plan.number {
            self.apply_plan(plan);
        } else if plan.number < self.plan.number {
            // From a scan that began before the plan of this actor's start; the next scan has
            // begun.
            return;
        }
        let is_first = self.judge.discovered(evidence);
        self.publish(context);
        if is_first {
            // A device that recovers, or that failed while no daemon ran, need not wait for the
            // poll.
            self.probe(context);
        }
    }
}

impl Handler<ProbesReady> for HealthActor {
    type Result = ();

    fn handle(&mut self, _: ProbesReady, context: &mut Self::Context) {
        self.take_probes(context);
    }
}

impl Handler<ReportUnusable> for HealthActor {
    type Result = ();

    fn handle(&mut self, report: ReportUnusable, context: &mut Self::Context) {
        self.judge.report_unusable(&report.resource, &report.id, report.reason, host::now().boot);
        self.publish(context);
        self.config.rescan.send(Rescan { asked_at: host::now().boot });
    }
}

impl Handler<DeviceEventSeen> for HealthActor {
    type Result = ();

    fn handle(
        &mut self,
        DeviceEventSeen { event, at }: DeviceEventSeen,
        context: &mut Self::Context,
    ) {
        let held = self.held();
        if self.judge.apply_event(&event, at, &held) {
            tracing::debug!(at = %event.at, what = ?event.kind, "kernel event for a device");
            self.publish(context);
        }
    }
}

impl Handler<Forget> for HealthActor {
    type Result = ();

    fn handle(&mut self, Forget(devices): Forget, _: &mut Self::Context) {
        self.judge.forget(devices);
        let verdicts = Arc::new(self.judge.verdicts().clone());
        self.config.judgement.send_modify(|judgement| judgement.verdicts = verdicts);
    }
}

impl Handler<Checked> for HealthActor {
    type Result = ();

    fn handle(&mut self, Checked { device, at, result }: Checked, context: &mut Self::Context) {
        self.judge.checked(&device, at, result);
        self.publish(context);
    }
}

impl Handler<ApplyOperatorRequest> for HealthActor {
    type Result = Recorded;

    fn handle(
        &mut self,
        ApplyOperatorRequest { device, request }: ApplyOperatorRequest,
        context: &mut Self::Context,
    ) -> Self::Result {
        if !self.judge.apply_request(&device, &request, host::now()) {
            return Box::pin(fut::err(OperatorRequestError::Unknown(device)));
        }
        // The operator's words are only for `holdfast device show`: many people read a log.
        match request {
            OperatorRequest::Cordon { .. } => {
                tracing::info!(%device, "device cordoned by an operator");
            }
            OperatorRequest::CordonAndEvict { .. } => {
                tracing::info!(%device, "device cordoned by an operator, with the eviction of the pods that use it by a claim");
            }
            OperatorRequest::Uncordon => {
                tracing::info!(%device, "device uncordoned by an operator");
            }
        }
        let verdicts = self.judge_all(context);
        let recorded = self.record(verdicts);
        // An operator who uncordons a device expects it back in use soon.
        self.config.rescan.send(Rescan { asked_at: host::now().boot });
        self.probe(context);
        recorded
    }
}

impl Handler<Crash> for HealthActor {
    type Result = ();

    #[expect(clippy::panic, reason = "the message requests it")]
    fn handle(&mut self, _: Crash, _: &mut Self::Context) {
        panic!("asked to crash");
    }
}
