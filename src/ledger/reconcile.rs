//! Reconciliation: passes over the kubelet's files that move grants to their next state.

use super::actor::LedgerActor;
use super::core::{LOOK_HELD, Observed, is_calm, next_look};
use super::report;
use crate::domain::{Observation, PodReport, ResourceName};
use crate::host;
use crate::messages::{FindPending, Reconcile, TakeOver};
use actix::{AsyncContext, Context, Handler, Message, MessageResult};
use std::sync::Arc;
use std::time::Instant;

/// A pass has observed the kubelet.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Seen(Observation);

impl LedgerActor {
    /// Begins a pass. The kubelet's files and the pods are read off this thread; `Seen` brings
    /// the result.
    pub(super) fn reconcile(&mut self, context: &mut Context<Self>) {
        if self.ledger().grants().len() == 0 {
            return;
        }
        let resting = self.reconciler.timer.under_way.is_none();
        if !self.reconciler.timer.begin(Instant::now()) {
            if resting {
                self.schedule(context);
            }
            return;
        }
        let now = host::now();
        let wants = self.reconciler.wants(&self.state, &self.config, now);
        let (observer, me) = (self.reconciler.observer.clone(), context.address());
        actix::spawn(async move {
            let observation = observer.look(wants).await;
            // If the actor has failed in the meantime, its successor observes again.
            let _ = me.send(Seen(observation)).await;
        });
    }

    /// The timer's pass: it does nothing while every grant is bound to a pod whose processes run.
    fn quick_check(&mut self, context: &mut Context<Self>) {
        if is_calm(self.ledger(), self.state.watchlist(), |uid| self.reconciler.observer.lives(uid))
        {
            self.schedule(context);
        } else {
            self.reconcile(context);
        }
    }

    /// Schedules the next pass, or the one that was requested.
    fn schedule(&mut self, context: &mut Context<Self>) {
        if let Some(timer) = self.reconciler.timer.timer.take() {
            context.cancel_future(timer);
        }
        if self.ledger().grants().len() == 0 {
            return;
        }
        let look = || next_look(self.ledger(), self.state.watchlist(), host::now());
        // A pass that nothing calls for is made when the machine wakes up for the other polls.
        let usual = || match look() {
            LOOK_HELD => host::until_tick(LOOK_HELD),
            soon => soon,
        };
        let wait = self.reconciler.timer.wait(Instant::now(), usual);
        self.reconciler.timer.timer = Some(context.run_later(wait, |this, context| {
            this.reconciler.timer.timer = None;
            if this.reconciler.timer.again {
                this.reconcile(context);
            } else {
                this.quick_check(context);
            }
        }));
    }

    /// Schedules the next pass, unless one is scheduled.
    pub(super) fn ensure_scheduled(&mut self, context: &mut Context<Self>) {
        if self.reconciler.timer.timer.is_none() && self.reconciler.timer.under_way.is_none() {
            self.schedule(context);
        }
    }
}

impl Handler<Reconcile> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Reconcile, context: &mut Self::Context) {
        if self.ledger().grants().len() == 0 {
            self.look_for_others(context);
        }
        self.reconcile(context);
    }
}

impl Handler<FindPending> for LedgerActor {
    type Result = MessageResult<FindPending>;

    fn handle(&mut self, _: FindPending, context: &mut Self::Context) -> Self::Result {
        let pending = self.reconciler.pending(&self.state, &self.config, host::now());
        if !pending.is_empty() {
            self.reconcile(context);
        }
        MessageResult(pending)
    }
}

impl Handler<Seen> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Seen(observation): Seen, context: &mut Self::Context) {
        let plan = Arc::clone(&self.config.plan.borrow());
        let is_ours = |resource: &ResourceName| plan.has(resource);
        let (entries, is_outdated) = match self.state.observe(&observation, is_ours, host::now()) {
            Observed::Decided(entries, is_outdated) => (entries, is_outdated),
            Observed::TakeOver(resources) => {
                context.notify(TakeOver(resources.into_iter().collect()));
                self.reconciler.timer.end(Instant::now());
                return self.schedule(context);
            }
        };
        report::reconciled(&observation, &entries);
        if !entries.is_empty() {
            // No caller waits for this answer. A failed write is logged, and the next pass decides
            // the same again.
            drop(self.submit(entries, context));
        }
        if (matches!(observation.pods, PodReport::All(_)) || !is_outdated)
            && self.reconciler.resend.is_due(is_outdated, Instant::now())
        {
            // The kubelet writes its checkpoint for every list.
            self.config.resend.send_replace(());
        }
        self.reconciler.timer.end(Instant::now());
        self.schedule(context);
    }
}
