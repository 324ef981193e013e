//! The condition `HoldfastDevicesHealthy` of the node: what it contains, and when it is written.

use super::objects::{CONDITION, Condition, PatchedStatus, Status, StatusPatch};
use super::seen::{DeviceName, Seen, Standing};
use super::{FORBIDDEN_FOR, Outcome, Step, words};
use crate::domain::{Moment, Pace, Reason, Timestamp};
use std::time::Duration;

/// Until a change is written: several changes in quick succession are one write.
const CHANGE_AFTER: Duration = Duration::from_secs(2);
/// A change waits longer by at most this time, for each node by another part: a switch that fails
/// changes many nodes at once.
const SPREAD: Duration = Duration::from_secs(3);
/// The time between two writes.
const WRITE_EVERY: Duration = Duration::from_secs(30);
/// Without a change the condition is written once in this time, and at most half of it later, by
/// node. A reader sees by `lastHeartbeatTime` that Holdfast still runs.
const HEARTBEAT: Duration = Duration::from_secs(300);

/// What the condition should contain.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Content {
    status: Status,
    reason: &'static str,
    message: String,
}

impl Content {
    fn of(seen: &Seen) -> Self {
        let failed: Vec<(&DeviceName, &str)> =
            seen.failed().map(|(name, failure)| (name, failure.reason.as_str())).collect();
        let unread = seen.devices.iter().filter(|(_, it)| it.standing == Standing::Unread);
        let unread: Vec<(&DeviceName, &str)> =
            unread.map(|(name, _)| (name, Reason::Unread.as_str())).collect();
        if !failed.is_empty() {
            let are = ("is unhealthy", "are unhealthy");
            let message = words::some(&failed, seen.total, are);
            return Content { status: Status::False, reason: "DevicesUnhealthy", message };
        }
        if !unread.is_empty() {
            let are = ("could not be read", "could not be read");
            let message = words::some(&unread, seen.total, are);
            return Content { status: Status::Unknown, reason: "DevicesUnread", message };
        }
        let withheld = seen.count(&Standing::Withheld);
        let (reason, message) = match (seen.total, withheld) {
            (0, _) => ("NoDevices", "no device is offered".to_owned()),
            (total, 0) => ("DevicesHealthy", format!("{total} of {total} devices are healthy")),
            (total, withheld) => (
                "DevicesHealthy",
                format!(
                    "{} of {total} devices are healthy, and {withheld} withheld by a cordon, the \
                     configuration or a hook",
                    total - withheld
                ),
            ),
        };
        Content { status: Status::True, reason, message }
    }
}

/// A condition in the API server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stored {
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// In CamelCase.
    pub reason: String,
    /// For people.
    pub message: String,
    /// When the status changed.
    pub transition: Timestamp,
}

/// What the API server has.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Known {
    /// Not read yet.
    Nothing,
    /// It has none.
    Absent,
    Stored(Stored),
}

/// Decides the writes of the condition of one node.
#[derive(Debug)]
pub struct Keeper {
    pace: Pace,
    known: Known,
    wanted: Option<Content>,
    /// Since when the wanted status is what it is.
    since: Timestamp,
    /// When the wanted content began to differ from the stored one.
    changed: Option<Duration>,
    written_at: Option<Duration>,
    heartbeat_at: Duration,
    in_flight: Option<StatusPatch>,
}

impl Keeper {
    /// The keeper of a node.
    #[must_use]
    pub fn new(node: &str) -> Self {
        Keeper {
            pace: Pace::new(node, 1, CHANGE_AFTER),
            known: Known::Nothing,
            wanted: None,
            since: Timestamp::default(),
            changed: None,
            written_at: None,
            heartbeat_at: Duration::ZERO,
            in_flight: None,
        }
    }

    /// Takes what is true now.
    pub fn observe(&mut self, seen: &Seen, now: Moment) {
        let wanted = Content::of(seen);
        if self.wanted.as_ref().is_none_or(|former| former.status != wanted.status) {
            self.since = now.wall;
        }
        self.wanted = Some(wanted);
        self.compare(now);
    }

    fn compare(&mut self, now: Moment) {
        let is_stored = self.wanted.as_ref().is_some_and(|wanted| match &self.known {
            Known::Stored(stored) => {
                stored.status == wanted.status.as_str()
                    && stored.reason == wanted.reason
                    && stored.message == wanted.message
            }
            Known::Nothing | Known::Absent => false,
        });
        self.changed = if is_stored { None } else { self.changed.or(Some(now.boot)) };
    }

    /// The next step. A patch without a condition reads the one of an earlier process: the time of
    /// its last transition stays.
    pub fn next(&mut self, now: Moment) -> Step<StatusPatch> {
        let Some(wanted) = &self.wanted else { return Step::Wait(None) };
        let spread = self.pace.share(SPREAD);
        let (at, patch) = match (&self.known, self.changed) {
            (Known::Nothing, changed) => {
                (changed.unwrap_or(now.boot) + spread, StatusPatch::default())
            }
            (_, None) => (self.heartbeat_at, self.patch(wanted, now)),
            (_, Some(changed)) => {
                let next = self.written_at.map(|at| at + WRITE_EVERY).unwrap_or_default();
                ((changed + CHANGE_AFTER + spread).max(next), self.patch(wanted, now))
            }
        };
        let ready = self.pace.ready_at().max(at);
        if now.boot < ready {
            return Step::Wait(Some(ready));
        }
        self.pace.spend(now.boot);
        self.in_flight = Some(patch.clone());
        Step::Write(patch)
    }

    fn patch(&self, wanted: &Content, now: Moment) -> StatusPatch {
        let transition = match &self.known {
            Known::Stored(stored) if stored.status == wanted.status.as_str() => stored.transition,
            _ => self.since,
        };
        let condition = Condition {
            r#type: CONDITION,
            status: wanted.status,
            reason: wanted.reason,
            message: wanted.message.clone(),
            last_heartbeat_time: now.wall,
            last_transition_time: transition,
        };
        StatusPatch { status: Some(PatchedStatus { conditions: [condition] }) }
    }

    /// The answer to the last patch: the condition that the node has now.
    pub fn done(&mut self, outcome: Outcome<Option<Stored>>, now: Moment) {
        let Some(sent) = self.in_flight.take() else { return };
        match outcome {
            Outcome::Accepted(stored) => {
                self.pace.succeed();
                let heartbeat = HEARTBEAT + self.pace.share(HEARTBEAT / 2);
                if let Some(PatchedStatus { conditions: [condition] }) = sent.status {
                    // Not the answer: a program that changes each write would cause a write each
                    // time.
                    self.known = Known::Stored(Stored {
                        status: condition.status.as_str().to_owned(),
                        reason: condition.reason.to_owned(),
                        message: condition.message,
                        transition: condition.last_transition_time,
                    });
                    self.written_at = Some(now.boot);
                    self.heartbeat_at = now.boot + heartbeat;
                } else {
                    self.known = stored.map_or(Known::Absent, Known::Stored);
                    self.heartbeat_at = now.boot + self.pace.share(HEARTBEAT / 2);
                }
                self.compare(now);
            }
            Outcome::Absent | Outcome::Refused | Outcome::Forbidden => {
                let spread = self.pace.share(FORBIDDEN_FOR);
                self.pace.pause(now.boot, FORBIDDEN_FOR + spread);
            }
            Outcome::Failed(retry_after) => {
                self.pace.fail(now.boot);
                self.pace.pause_as_asked(now.boot, retry_after.unwrap_or_default());
            }
        }
    }
}
