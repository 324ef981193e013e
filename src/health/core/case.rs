//! The state machine of one device's verdict, driven by observations and events. It is pure: the
//! same events give the same verdict, with or without a restart of the daemon between them.

use crate::domain::{
    Cordon, Counter, EventKind, Incident, Moment, OperatorRequest, PciAddress, Reason, Symptom,
    Verdict, VerdictState,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The maximum hold time. The hold time doubles with each failure of a device that keeps failing.
const HOLD_MAX: Duration = Duration::from_secs(600);
/// The same for failures of presence: an operator who reloads a driver ten times must not wait for
/// minutes.
const PRESENCE_HOLD_MAX: Duration = Duration::from_secs(4);
/// The maximum number of doublings of the hold time.
const HOLD_DOUBLINGS_MAX: u32 = 6;
/// The number of failures, each within [`STEADY`] of the last recovery, after which an operator
/// must decide.
const FLAPS_MAX: usize = 5;
/// After this time in health, the next failure counts as the first one again.
const STEADY: Duration = Duration::from_secs(3600);
/// The number of remembered failures of a device.
const INCIDENTS_MAX: usize = 8;

/// A symptom, and the time of the scan or probe that found it. A later one of the other kind does
/// not renew it: a scan is no evidence about a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SymptomSeen {
    pub(super) at: Moment,
    pub(super) symptom: Symptom,
}

/// One observation of a device: the latest scan for its presence and the latest probe for its
/// signals.
#[derive(Debug)]
pub(super) struct Observation<'a> {
    /// The time of the scan.
    pub(super) at: Moment,
    /// The time of the older of the two. If there are no symptoms, this is proven only from then
    /// on.
    pub(super) complete_at: Duration,
    /// Whether the device was absent, or without the driver that it needs.
    pub(super) is_away: bool,
    /// The symptoms.
    pub(super) symptoms_seen: &'a [SymptomSeen],
}

/// The numbers of Xid errors after which a GPU needs a reset.
pub(super) type FatalXids = BTreeSet<u32>;

/// The transitions of a verdict: see [`Verdict`].
pub(super) trait Case {
    /// Continues in this boot: failures of another boot are over, except those that wait for an
    /// operator.
    fn continue_in(&mut self, boot_id: &str);
    /// Takes the device's counters. A rise is a symptom of this probe, and of no later one.
    fn count(
        &mut self,
        counters: &BTreeMap<Counter, u64>,
        own: PciAddress,
        at: Moment,
    ) -> BTreeSet<Symptom>;
    /// Takes an observation.
    fn observe(&mut self, observation: &Observation<'_>);
    /// Takes an event.
    fn apply_event(&mut self, kind: &EventKind, at: Moment, fatal: &FatalXids);
    /// Executes an operator's order.
    fn apply_request(&mut self, request: &OperatorRequest, at: Moment);
    /// When an observation is wanted that may change the verdict.
    fn next_observation_at(&self) -> Option<Duration>;
}

impl Case for Verdict {
    fn continue_in(&mut self, boot_id: &str) {
        if self.boot_id == boot_id {
            return;
        }
        boot_id.clone_into(&mut self.boot_id);
        self.faults.clear();
        self.baselines.clear();
        (self.reset_at, self.healthy_since, self.is_away) = (Duration::ZERO, Duration::ZERO, false);
        self.state = match self.state {
            VerdictState::Healthy | VerdictState::Suspect { .. } => {
                // It was healthy when the machine went down: a failure in this boot is not a
                // repetition.
                self.flaps = if self.is_latched { self.flaps } else { 0 };
                VerdictState::Healthy
            }
            // The failure is older by a whole boot, so the first observation without symptoms
            // ends it.
            VerdictState::Unhealthy { reason, .. } | VerdictState::Recovering { reason, .. } => {
                VerdictState::Recovering { reason, since: Duration::ZERO, hold: Duration::ZERO }
            }
        };
    }

    fn count(
        &mut self,
        counters: &BTreeMap<Counter, u64>,
        own: PciAddress,
        at: Moment,
    ) -> BTreeSet<Symptom> {
        let mut risen = BTreeSet::new();
        for (counter, &value) in counters {
            let known = self.baselines.insert(counter.clone(), value);
            match known {
                Some(known) if value > known => {
                    let detail = format!("{} more at {}", value - known, counter.at);
                    risen.insert(Symptom { reason: counter.reason, detail });
                }
                // A lower own counter shows a reset. Counters of bridges in the same probe are
                // still news.
                Some(known) if value < known && counter.at == own => clear_failures(self, at),
                _ => {}
            }
        }
        risen
    }

    fn observe(&mut self, observation: &Observation<'_>) {
        if self.is_away && !observation.is_away {
            reset(self, observation.at);
        }
        self.is_away = observation.is_away;
        // A probe from before a reset shows a failure that the reset has ended.
        let reset_at = self.reset_at;
        let is_over = |seen: &SymptomSeen| {
            seen.at.boot < reset_at && !seen.symptom.reason.timings().is_presence()
        };
        let symptoms_seen: Vec<&SymptomSeen> =
            observation.symptoms_seen.iter().filter(|seen| !is_over(seen)).collect();
        for SymptomSeen { symptom, .. } in
            symptoms_seen.iter().filter(|seen| seen.symptom.reason.timings().is_sticky)
        {
            self.faults.entry(symptom.reason).or_insert_with(|| symptom.detail.clone());
        }
        let fault = self
            .faults
            .iter()
            .next()
            .map(|(reason, detail)| (*reason, detail.clone(), observation.at));
        let severity =
            |seen: &&&SymptomSeen| (seen.symptom.reason.timings().fail_after, seen.symptom.reason);
        let worst = symptoms_seen.iter().min_by_key(severity);
        let worst = fault.or_else(|| {
            worst.map(|worst| (worst.symptom.reason, worst.symptom.detail.clone(), worst.at))
        });
        match worst {
            Some((reason, detail, at)) if counts_now(&self.state, reason, at.boot) => {
                fail(self, reason, detail, at);
            }
            Some((reason, _, at)) => {
                let since = if let VerdictState::Suspect { since, .. } = self.state {
                    since
                } else {
                    at.boot
                };
                self.state = VerdictState::Suspect { reason, since };
            }
            None => self.state = recover(self, observation),
        }
    }

    fn apply_event(&mut self, kind: &EventKind, at: Moment, fatal: &FatalXids) {
        // A daemon that was just started reads old events from the kernel's log.
        if at.boot <= self.reset_at {
            return;
        }
        let fault = match kind {
            // If the driver no longer needs an action, a reset has ended.
            EventKind::Recovered
            | EventKind::WasReset
            | EventKind::Bound
            | EventKind::RecoveryAction(None) => {
                reset(self, at);
                return require_newer_observation(self, at);
            }
            EventKind::RecoveryBegan => (Reason::ErrorRecovery, String::new()),
            EventKind::Unbound => return,
            EventKind::RecoveryFailed => {
                self.faults.remove(&Reason::ErrorRecovery);
                (Reason::RecoveryFailed, String::new())
            }
            EventKind::Wedged(methods) => {
                (Reason::Wedged, format!("recovery methods of its driver: {methods}"))
            }
            EventKind::Xid(code) if fatal.contains(code) => (Reason::Xid, format!("Xid {code}")),
            EventKind::Xid(_) => return,
            // The driver's own verdict, after any error.
            EventKind::RecoveryAction(Some(needs)) => (Reason::Xid, format!("Xid 154: {needs}")),
        };
        let (reason, detail) = fault;
        if matches!(kind, EventKind::RecoveryAction(_)) {
            // An operator needs it more than the error that led to it.
            self.faults.insert(reason, detail.clone());
        } else {
            self.faults.entry(reason).or_insert_with(|| detail.clone());
        }
        fail(self, reason, detail, at);
    }

    fn apply_request(&mut self, request: &OperatorRequest, at: Moment) {
        match request {
            OperatorRequest::Cordon { reason } | OperatorRequest::CordonAndEvict { reason } => {
                let evicts = matches!(request, OperatorRequest::CordonAndEvict { .. });
                self.cordon = Some(Cordon { reason: reason.clone(), at: at.wall, evicts });
            }
            OperatorRequest::Uncordon => {
                (self.cordon, self.is_latched, self.flaps) = (None, false, 0);
                reset(self, at);
                require_newer_observation(self, at);
            }
        }
    }

    fn next_observation_at(&self) -> Option<Duration> {
        match self.state {
            // Only the next poll shows whether the counter still rises: directly after a probe,
            // another one shows nothing new.
            VerdictState::Healthy
            | VerdictState::Unhealthy { .. }
            | VerdictState::Suspect { reason: Reason::AerNonfatal, .. } => None,
            VerdictState::Suspect { reason, since } => Some(since + reason.timings().fail_after),
            VerdictState::Recovering { since, hold, .. } => Some(since + hold),
        }
    }
}

/// Whether a symptom counts now: a hard one does, any one does while the device is unhealthy, and
/// a soft one does if it has lasted.
fn counts_now(state: &VerdictState, reason: Reason, now: Duration) -> bool {
    let fail_after = reason.timings().fail_after;
    match state {
        VerdictState::Healthy => fail_after.is_zero(),
        VerdictState::Suspect { since, .. } => now.saturating_sub(*since) >= fail_after,
        VerdictState::Unhealthy { .. } | VerdictState::Recovering { .. } => true,
    }
}

fn fail(verdict: &mut Verdict, reason: Reason, detail: String, at: Moment) {
    if matches!(verdict.state, VerdictState::Healthy | VerdictState::Suspect { .. }) {
        if at.boot.saturating_sub(verdict.healthy_since) >= STEADY {
            verdict.flaps = 0;
        }
        verdict.flaps += 1;
        if verdict.incidents.len() >= INCIDENTS_MAX {
            verdict.incidents.remove(0);
        }
        verdict.incidents.push(Incident {
            reason,
            detail,
            at: at.wall,
            until: None,
            held_by: Vec::new(),
        });
        // Failures of presence do not latch, and neither does one other failure after many of
        // these.
        let recent = verdict.incidents.iter().rev().take(verdict.flaps as usize);
        let unexplained =
            recent.filter(|incident| !incident.reason.timings().is_presence()).count();
        verdict.is_latched |= unexplained >= FLAPS_MAX;
    } else if reason == Reason::DeviceGone
        && let Some(incident) = verdict.incidents.last_mut()
        && incident.reason == Reason::DriverLost
    {
        // The kernel takes a device from its driver before it removes the device.
        (incident.reason, incident.detail) = (reason, detail);
    }
    let before = if let VerdictState::Unhealthy { seen, .. } = verdict.state {
        seen
    } else {
        Duration::ZERO
    };
    verdict.state = VerdictState::Unhealthy { reason, seen: at.boot.max(before) };
}

/// The next state of a device without symptoms.
fn recover(verdict: &mut Verdict, observation: &Observation<'_>) -> VerdictState {
    match verdict.state {
        VerdictState::Unhealthy { reason, seen } if observation.complete_at > seen => {
            let doublings = verdict.flaps.saturating_sub(1).min(HOLD_DOUBLINGS_MAX);
            let max = if reason.timings().is_presence() { PRESENCE_HOLD_MAX } else { HOLD_MAX };
            let hold = (reason.timings().recover_after * 2_u32.pow(doublings)).min(max);
            VerdictState::Recovering { reason, since: observation.complete_at, hold }
        }
        // `complete_at` is zero for a device that was not probed in this boot, so it stays
        // unhealthy.
        VerdictState::Recovering { since, hold, .. }
            if observation.complete_at > since && observation.complete_at - since >= hold =>
        {
            verdict.healthy_since = observation.complete_at;
            if let Some(incident) = verdict.incidents.last_mut() {
                incident.until.get_or_insert(observation.at.wall);
            }
            VerdictState::Healthy
        }
        VerdictState::Suspect { since, .. } if observation.complete_at > since => {
            VerdictState::Healthy
        }
        state => state,
    }
}

/// Records evidence of a reset. Errors since the last probe may be from before the reset, so the
/// counters' baselines are cleared too.
fn reset(verdict: &mut Verdict, at: Moment) {
    clear_failures(verdict, at);
    verdict.baselines.clear();
}

/// Ends all earlier failures.
fn clear_failures(verdict: &mut Verdict, at: Moment) {
    verdict.faults.clear();
    verdict.reset_at = at.boot;
}

/// After a reset only an observation newer than the reset counts.
fn require_newer_observation(verdict: &mut Verdict, at: Moment) {
    if let VerdictState::Unhealthy { seen, .. } = &mut verdict.state {
        *seen = (*seen).max(at.boot);
    }
}

#[cfg(test)]
mod tests;
