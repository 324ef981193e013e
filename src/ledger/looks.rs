//! The looks at the kubelet that move grants on.

use super::actor::LedgerActor;
use super::core::{Agenda, has_dead_holder, is_calm, next_look, owing, reconcile};
use super::observe::Wants;
use super::report;
use crate::domain::Observation;
use crate::host;
use crate::messages::Reconcile;
use actix::{AsyncContext, Context, Handler, Message, SpawnHandle};
use std::time::{Duration, Instant};

/// After a look there is none for so many times as long as it took: it costs the more, the more is held, and a busy kubelet asks
/// for one all the time.
const REST: u32 = 4;
/// But a kubelet that answers late is no reason to know little.
const REST_MAX: Duration = Duration::from_secs(1);

/// What is under way, and what comes next.
#[derive(Debug)]
pub(super) struct Looks {
    /// Since when a look is under way.
    under_way: Option<Instant>,
    /// Whether another one was asked for meanwhile, or before it is time for it.
    again: bool,
    rest_until: Instant,
    timer: Option<SpawnHandle>,
}

impl Looks {
    pub(super) fn new() -> Self {
        Looks { under_way: None, again: false, rest_until: Instant::now(), timer: None }
    }

    /// Begins one if it is time for it. Otherwise it comes later.
    fn begin(&mut self, now: Instant) -> bool {
        self.again = self.under_way.is_some() || self.rest_until > now;
        if !self.again {
            self.under_way = Some(now);
        }
        !self.again
    }

    fn end(&mut self, now: Instant) {
        let took = self.under_way.take().map_or(Duration::ZERO, |began| now.saturating_duration_since(began));
        self.rest_until = now + took.saturating_mul(REST).min(REST_MAX);
    }

    /// The wait for the next one: as `usual`, unless one was called for.
    fn wait(&self, now: Instant, usual: impl FnOnce() -> Duration) -> Duration {
        if self.again { self.rest_until.saturating_duration_since(now) } else { usual() }
    }
}

/// A look at the kubelet is done.
#[derive(Debug, Message)]
#[rtype(result = "()")]
struct Observed(Observation);

impl LedgerActor {
    /// Looks at the kubelet's files and at the pods, away from this thread; `Observed` brings the result.
    pub(super) fn look(&mut self, context: &mut Context<Self>) {
        if self.ledger.grants().len() == 0 {
            return;
        }
        let resting = self.looks.under_way.is_none();
        if !self.looks.begin(Instant::now()) {
            if resting {
                self.schedule(false, context);
            }
            return;
        }
        let now = host::now();
        let agenda = Agenda::of(&self.ledger, &self.watchlist, now.boot);
        let kubelet = *self.config.kubelet.borrow();
        let kubelet_settled = self.kubelet_age.is_settled(kubelet, now);
        let wants = Wants { agenda, kubelet, kubelet_settled };
        let (looker, me) = (self.looker.clone(), context.address());
        actix::spawn(async move {
            let observation = looker.look(wants).await;
            // The actor may have died meanwhile; its next life looks for itself.
            let _ = me.send(Observed(observation)).await;
        });
    }

    /// The look of the timer: while every grant is bound to a pod whose processes run there is nothing to be found out.
    fn glance(&mut self, context: &mut Context<Self>) {
        if is_calm(&self.ledger, &self.watchlist, |uid| self.looker.lives(uid)) {
            self.schedule(false, context);
        } else {
            self.look(context);
        }
    }

    /// The next look, if nothing calls for one before; or the one that was called for, when it is time.
    fn schedule(&mut self, dead: bool, context: &mut Context<Self>) {
        if let Some(timer) = self.looks.timer.take() {
            context.cancel_future(timer);
        }
        if self.ledger.grants().len() == 0 {
            return;
        }
        let usual = || next_look(&self.ledger, &self.watchlist, dead, host::now().wall);
        let wait = self.looks.wait(Instant::now(), usual);
        self.looks.timer = Some(context.run_later(wait, |this, context| {
            this.looks.timer = None;
            if this.looks.again { this.look(context) } else { this.glance(context) }
        }));
    }

    /// Has one come at its time, where none is to come yet.
    pub(super) fn look_some_time(&mut self, context: &mut Context<Self>) {
        if self.looks.timer.is_none() && self.looks.under_way.is_none() {
            self.schedule(false, context);
        }
    }
}

impl Handler<Reconcile> for LedgerActor {
    type Result = ();

    fn handle(&mut self, _: Reconcile, context: &mut Self::Context) {
        self.look(context);
    }
}

impl Handler<Observed> for LedgerActor {
    type Result = ();

    fn handle(&mut self, Observed(observation): Observed, context: &mut Self::Context) {
        let mut entries = reconcile(&mut self.watchlist, &self.ledger, &observation, host::now());
        // In front, and in one commit with the releases that owe them.
        entries.splice(0..0, owing(&self.ledger, &self.hooks, &entries, self.committer.entries()));
        report::reconciled(&observation, &entries);
        let dead = has_dead_holder(&self.ledger, &observation);
        if !entries.is_empty() {
            // Nobody waits for this answer; a failed write is logged, and the next look decides the same again.
            drop(self.submit(entries, context));
        }
        self.looks.end(Instant::now());
        self.schedule(dead, context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_is_called_for_comes_after_a_rest_four_times_as_long_as_the_last_one() {
        let mut looks = Looks::new();
        let ms = Duration::from_millis;
        let begin = Instant::now();
        let usual = || Duration::from_secs(15);
        assert!(looks.begin(begin));
        assert!(!looks.begin(begin + ms(5)), "one at a time");
        looks.end(begin + ms(20));
        assert_eq!(looks.wait(begin + ms(20), usual), ms(80), "it was called for");
        assert!(!looks.begin(begin + ms(99)));
        assert_eq!(looks.wait(begin + ms(99), usual), ms(1));
        assert!(looks.begin(begin + ms(100)));
        assert_eq!(looks.wait(begin + ms(100), usual), usual(), "nobody has called for another one");
        looks.end(begin + Duration::from_secs(60));
        assert!(!looks.begin(begin + Duration::from_secs(60)));
        assert_eq!(looks.wait(begin + Duration::from_secs(60), usual), REST_MAX);
    }
}
