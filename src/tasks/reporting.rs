//! Writes Events and the condition of the node. [`Announcer`] and [`Keeper`] decide each write;
//! here it is sent.

use crate::cluster::{Client, ClusterError, Node};
use crate::domain::{Grant, Inventory, Timestamp};
use crate::health::Judgement;
use crate::host;
use crate::reporting::condition::Stored;
use crate::reporting::objects::{CONDITION, EventWrite, StatusPatch};
use crate::reporting::{Announcer, Keeper, Outcome, Seen, Step};
use crate::telemetry::metrics;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// After a change the snapshots are read once in this time: each Allocate publishes one.
const READ_EVERY: Duration = Duration::from_millis(500);

/// The task.
pub(crate) struct ReportingTask {
    /// The node's name in the API server.
    pub(crate) node: String,
    pub(crate) client: Client,
    pub(crate) inventory: watch::Receiver<Arc<Inventory>>,
    pub(crate) grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
    pub(crate) judgement: watch::Receiver<Judgement>,
    /// `None` if Events are switched off.
    pub(crate) events: Option<Announcer>,
    /// `None` if the condition is switched off.
    pub(crate) condition: Option<Keeper>,
    /// Why something cannot be written at present, one sentence each.
    pub(crate) problems: watch::Sender<Vec<String>>,
}

/// What is written, and why it cannot be.
#[derive(Debug)]
pub(super) struct Part {
    what: &'static str,
    pub(super) kind: &'static str,
    pub(super) problem: Option<String>,
    /// Whether the problem stays although nothing has to be written.
    pub(super) is_lasting: bool,
}

impl Part {
    pub(super) fn new(what: &'static str, kind: &'static str) -> Self {
        Part { what, kind, problem: None, is_lasting: false }
    }

    /// Counts the answer, and logs the first failure of several.
    pub(super) fn answered<T>(&mut self, answer: &Result<T, ClusterError>, is_refused: bool) {
        let result = answer.as_ref().err().map_or("ok", ClusterError::result);
        metrics::reported(self.kind, result);
        match answer {
            Ok(_) => self.ends(),
            Err(error) if is_refused => {
                tracing::warn!(what = self.what, %error, "the API server refuses a write");
            }
            Err(error) => {
                let why = format!("cannot write {}: {error}", self.what);
                if self.problem.replace(why).is_none() {
                    tracing::warn!(what = self.what, %error, "cannot write to the API server");
                }
            }
        }
    }

    /// There is no problem any more, or nothing to write.
    pub(super) fn ends(&mut self) {
        if self.problem.take().is_some() {
            tracing::info!(what = self.what, "the API server is up to date again");
        }
    }

    /// Shows the problem in `status`.
    pub(super) fn show_in(&self, shown: &watch::Sender<Option<String>>) {
        shown.send_if_modified(|shown| {
            let is_other = *shown != self.problem;
            if is_other {
                shown.clone_from(&self.problem);
            }
            is_other
        });
    }
}

impl ReportingTask {
    /// Reports, for ever.
    pub(crate) async fn run(mut self) {
        let mut events = Part::new("Events", "event");
        let mut condition =
            Part::new("the condition HoldfastDevicesHealthy of the node", "condition");
        let switched_on = [self.events.is_some(), self.condition.is_some()];
        for (part, _) in [&events, &condition].into_iter().zip(switched_on).filter(|(_, on)| *on) {
            metrics::reporting_begins(part.kind);
        }
        self.observe();
        loop {
            self.show(&events, &condition);
            if self.has_changed() {
                self.observe();
            }
            let step = self.events.as_mut().map(|it| it.next(host::now()));
            let for_events = match step {
                Some(Step::Write(write)) => {
                    self.announce(&write, &mut events).await;
                    continue;
                }
                Some(Step::Wait(until)) => until,
                None => None,
            };
            if for_events.is_none() {
                events.ends();
            }
            let step = self.condition.as_mut().map(|it| it.next(host::now()));
            let for_condition = match step {
                Some(Step::Write(patch)) => {
                    self.patch(&patch, &mut condition).await;
                    continue;
                }
                Some(Step::Wait(until)) => until,
                None => None,
            };
            self.show(&events, &condition);
            let until = [for_events, for_condition].into_iter().flatten().min();
            if self.wait(until).await.is_err() {
                // The daemon ends.
                return;
            }
        }
    }

    fn has_changed(&self) -> bool {
        let (inventory, grants) = (self.inventory.has_changed(), self.grants.has_changed());
        inventory.unwrap_or_default() || grants.unwrap_or_default()
    }

    /// Takes the newest snapshots.
    fn observe(&mut self) {
        let inventory = self.inventory.borrow_and_update().clone();
        let grants = self.grants.borrow_and_update().clone();
        let verdicts = self.judgement.borrow().verdicts.clone();
        let announced = self.events.as_ref().map(Announcer::announced).unwrap_or_default();
        let seen = Seen::of(&inventory, &verdicts, &grants, &announced);
        let now = host::now();
        if let Some(events) = &mut self.events {
            events.observe(&seen, now.boot);
        }
        if let Some(condition) = &mut self.condition {
            condition.observe(&seen, now);
        }
    }

    /// Waits for a change, or until this time of the boot clock. Ends early, if at all.
    async fn wait(&mut self, until: Option<Duration>) -> Result<(), watch::error::RecvError> {
        let due = async {
            match until {
                Some(until) => {
                    tokio::time::sleep(until.saturating_sub(host::now().boot)).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = self.inventory.changed() => changed?,
            changed = self.grants.changed() => changed?,
            () = due => return Ok(()),
        }
        // The mark of the change is used up.
        self.inventory.mark_changed();
        tokio::time::sleep(READ_EVERY).await;
        Ok(())
    }

    async fn announce(&mut self, write: &EventWrite, part: &mut Part) {
        let answer = match write {
            EventWrite::Create(event) => {
                self.client.create_event(&event.metadata.namespace, event).await
            }
            EventWrite::Patch(of, patch) => {
                self.client.patch_event(&of.namespace, &of.name, patch).await
            }
        };
        let outcome = match &answer {
            Ok(()) => Outcome::Accepted(()),
            // The answer to the first attempt was lost.
            Err(error) if error.code() == Some(409) && matches!(write, EventWrite::Create(_)) => {
                Outcome::Accepted(())
            }
            Err(error) => outcome_of(error),
        };
        let is_done = matches!(outcome, Outcome::Accepted(()) | Outcome::Absent | Outcome::Refused);
        part.answered(&answer, is_done);
        if let Some(events) = &mut self.events {
            events.done(&outcome, host::now().boot);
        }
    }

    async fn patch(&mut self, patch: &StatusPatch, part: &mut Part) {
        let answer = self.client.patch_node_status(&self.node, patch).await;
        part.answered(&answer, false);
        let outcome = match answer {
            Ok(node) => Outcome::Accepted(stored(&node)),
            Err(error) => outcome_of(&error),
        };
        if let Some(condition) = &mut self.condition {
            condition.done(outcome, host::now());
        }
    }

    fn show(&self, events: &Part, condition: &Part) {
        let problems = [&events.problem, &condition.problem].into_iter().flatten().cloned();
        let problems: Vec<String> = problems.collect();
        self.problems.send_if_modified(|shown| {
            let is_other = *shown != problems;
            if is_other {
                *shown = problems;
            }
            is_other
        });
    }
}

/// What a failure means for a core. An answer of a proxy has no reason, and may change soon.
pub(super) fn outcome_of<T>(error: &ClusterError) -> Outcome<T> {
    let has_reason = error.details().is_some_and(|details| !details.reason.is_empty());
    match error.code() {
        _ if error.is_absence() => Outcome::Absent,
        Some(403 | 422) if error.is_missing_right() => Outcome::Forbidden,
        Some(400 | 403 | 405 | 413 | 415 | 422) if has_reason => Outcome::Refused,
        _ => Outcome::Failed(error.retry_after()),
    }
}

/// The condition that the node has.
fn stored(node: &Node) -> Option<Stored> {
    let condition = node.status.conditions.iter().find(|it| it.r#type == CONDITION)?;
    let time = condition.last_transition_time.clone().map(serde_json::Value::String);
    Some(Stored {
        status: condition.status.clone(),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        transition: time
            .and_then(|time| serde_json::from_value::<Timestamp>(time).ok())
            .unwrap_or_else(|| host::now().wall),
    })
}
