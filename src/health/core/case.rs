//! One device's verdict, moved on by what is seen of it. Pure, and the same for the same events, whenever the daemon was
//! started between them.

use crate::domain::{Complaint, Counter, EventKind, Incident, Instruction, Moment, PciAddress, Reason, State, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A device that keeps failing is believed later each time, but not later than this.
const HOLD_MAX: Duration = Duration::from_secs(600);
/// The same of one that is plugged in and out: whoever reloads a driver ten times does not wait for minutes.
const HOLD_OF_PRESENCE_MAX: Duration = Duration::from_secs(4);
/// The hold time doubles so many times at most.
const HOLD_DOUBLINGS_MAX: u32 = 6;
/// So many failures, each within [`STEADY`] of the last recovery, and an operator has to look.
const FLAPS_MAX: usize = 5;
/// Healthy for so long, and the next failure is the first one again.
const STEADY: Duration = Duration::from_secs(3600);
/// Failures that are remembered of a device.
const INCIDENTS_MAX: usize = 8;

/// A complaint, and the look that found it. A later look of another kind makes it no younger: a scan says nothing of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sighting {
    pub(super) at: Moment,
    pub(super) complaint: Complaint,
}

/// What is known of a device from its looks together: what a scan says of its presence, and a probe of its signals.
#[derive(Debug)]
pub(super) struct Look<'a> {
    /// When the scan was made.
    pub(super) at: Moment,
    /// When the oldest of them was made: only since then nothing speaks against it, if nothing does.
    pub(super) complete_at: Duration,
    /// Whether it was not there, or without the driver that it needs.
    pub(super) is_away: bool,
    /// What speaks against it.
    pub(super) sightings: &'a [Sighting],
}

/// Which of the numbers of NVIDIA's driver mean that the GPU needs a reset.
pub(super) type FatalXids = BTreeSet<u32>;

/// The rest of a verdict's story: see [`Verdict`].
pub(super) trait Case {
    /// Goes on in this boot: what happened in another one is over, but for what waits for an operator.
    fn continue_in(&mut self, boot_id: &str);
    /// Takes the device's counters: what has risen is a complaint at this look, and no more.
    fn count(&mut self, counters: &BTreeMap<Counter, u64>, own: PciAddress, at: Moment) -> BTreeSet<Complaint>;
    /// Takes what looks have shown.
    fn look(&mut self, look: &Look<'_>);
    /// Takes what has happened.
    fn happened(&mut self, kind: &EventKind, at: Moment, fatal: &FatalXids);
    /// Does what an operator asks for.
    fn instructed(&mut self, instruction: &Instruction, at: Moment);
    /// When a look is wanted that may change it.
    fn wants_look_at(&self) -> Option<Duration>;
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
            State::Healthy | State::Suspect { .. } => {
                // It was in order when the machine went down: what it fails of in this boot is no sequel.
                self.flaps = if self.is_latched { self.flaps } else { 0 };
                State::Healthy
            }
            // The first look that finds nothing is newer than the failure by a whole boot.
            State::Unhealthy { reason, .. } | State::Recovering { reason, .. } => {
                State::Recovering { reason, since: Duration::ZERO, hold: Duration::ZERO }
            }
        };
    }

    fn count(&mut self, counters: &BTreeMap<Counter, u64>, own: PciAddress, at: Moment) -> BTreeSet<Complaint> {
        let mut risen = BTreeSet::new();
        for (counter, &value) in counters {
            let known = self.baselines.insert(counter.clone(), value);
            match known {
                Some(known) if value > known => {
                    let detail = format!("{} more at {}", value - known, counter.at);
                    risen.insert(Complaint { reason: counter.reason, detail });
                }
                // What the bridges count in the same look is news all the same.
                Some(known) if value < known && counter.at == own => forgive(self, at),
                _ => {}
            }
        }
        risen
    }

    fn look(&mut self, look: &Look<'_>) {
        if self.is_away && !look.is_away {
            reset(self, look.at);
        }
        self.is_away = look.is_away;
        // A probe of before a reset speaks of what the reset has ended.
        let reset_at = self.reset_at;
        let is_over = |sighting: &Sighting| sighting.at.boot < reset_at && !sighting.complaint.reason.weight().is_presence();
        let sightings: Vec<&Sighting> = look.sightings.iter().filter(|sighting| !is_over(sighting)).collect();
        for Sighting { complaint, .. } in sightings.iter().filter(|sighting| sighting.complaint.reason.weight().is_sticky) {
            self.faults.entry(complaint.reason).or_insert_with(|| complaint.detail.clone());
        }
        let fault = self.faults.iter().next().map(|(reason, detail)| (*reason, detail.clone(), look.at));
        let weight = |sighting: &&&Sighting| (sighting.complaint.reason.weight().patience, sighting.complaint.reason);
        let worst = sightings.iter().min_by_key(weight);
        let worst = fault.or_else(|| worst.map(|worst| (worst.complaint.reason, worst.complaint.detail.clone(), worst.at)));
        match worst {
            Some((reason, detail, at)) if is_believed(&self.state, reason, at.boot) => fail(self, reason, detail, at),
            Some((reason, _, at)) => {
                let since = if let State::Suspect { since, .. } = self.state { since } else { at.boot };
                self.state = State::Suspect { reason, since };
            }
            None => self.state = better(self, look),
        }
    }

    fn happened(&mut self, kind: &EventKind, at: Moment, fatal: &FatalXids) {
        // The kernel's log tells old stories to a daemon that has just been started.
        if at.boot <= self.reset_at {
            return;
        }
        let fault = match kind {
            // That the driver asks for nothing any more is the end of a reset.
            EventKind::Recovered | EventKind::WasReset | EventKind::Bound | EventKind::RecoveryAction(None) => {
                reset(self, at);
                return is_to_be_seen_after(self, at);
            }
            EventKind::RecoveryBegan => (Reason::ErrorRecovery, String::new()),
            EventKind::Unbound => return,
            EventKind::RecoveryFailed => {
                self.faults.remove(&Reason::ErrorRecovery);
                (Reason::RecoveryFailed, String::new())
            }
            EventKind::Wedged(ways) => (Reason::Wedged, format!("its driver wants: {ways}")),
            EventKind::Xid(code) if fatal.contains(code) => (Reason::Xid, format!("Xid {code}")),
            EventKind::Xid(_) => return,
            // Whatever error led to it: the driver's own verdict.
            EventKind::RecoveryAction(Some(needs)) => (Reason::Xid, format!("Xid 154: {needs}")),
        };
        let (reason, detail) = fault;
        self.faults.entry(reason).or_insert_with(|| detail.clone());
        fail(self, reason, detail, at);
    }

    fn instructed(&mut self, instruction: &Instruction, at: Moment) {
        match instruction {
            Instruction::Cordon { reason } => self.cordon = Some(crate::domain::Cordon { reason: reason.clone(), at: at.wall }),
            Instruction::Uncordon => {
                (self.cordon, self.is_latched, self.flaps) = (None, false, 0);
                reset(self, at);
                is_to_be_seen_after(self, at);
            }
        }
    }

    fn wants_look_at(&self) -> Option<Duration> {
        match self.state {
            // Whether it counts on, the next poll tells: a look just after another one sees nothing new.
            State::Healthy | State::Unhealthy { .. } | State::Suspect { reason: Reason::AerNonfatal, .. } => None,
            State::Suspect { reason, since } => Some(since + reason.weight().patience),
            State::Recovering { since, hold, .. } => Some(since + hold),
        }
    }
}

/// Whether a complaint counts now: a hard one does, any does while the device is unhealthy, and a soft one that has lasted.
fn is_believed(state: &State, reason: Reason, now: Duration) -> bool {
    let patience = reason.weight().patience;
    match state {
        State::Healthy => patience.is_zero(),
        State::Suspect { since, .. } => now.saturating_sub(*since) >= patience,
        State::Unhealthy { .. } | State::Recovering { .. } => true,
    }
}

fn fail(verdict: &mut Verdict, reason: Reason, detail: String, at: Moment) {
    if matches!(verdict.state, State::Healthy | State::Suspect { .. }) {
        if at.boot.saturating_sub(verdict.healthy_since) >= STEADY {
            verdict.flaps = 0;
        }
        verdict.flaps += 1;
        if verdict.incidents.len() >= INCIDENTS_MAX {
            verdict.incidents.remove(0);
        }
        verdict.incidents.push(Incident { reason, detail, at: at.wall, until: None, held_by: Vec::new() });
        // What is plugged in and out is no riddle, and neither is one failure after many of these.
        let recent = verdict.incidents.iter().rev().take(verdict.flaps as usize);
        let riddles = recent.filter(|incident| !incident.reason.weight().is_presence()).count();
        verdict.is_latched |= riddles >= FLAPS_MAX;
    }
    let before = if let State::Unhealthy { seen, .. } = verdict.state { seen } else { Duration::ZERO };
    verdict.state = State::Unhealthy { reason, seen: at.boot.max(before) };
}

/// Nothing speaks against the device.
fn better(verdict: &mut Verdict, look: &Look<'_>) -> State {
    match verdict.state {
        State::Unhealthy { reason, seen } if look.complete_at > seen => {
            let doublings = verdict.flaps.saturating_sub(1).min(HOLD_DOUBLINGS_MAX);
            let max = if reason.weight().is_presence() { HOLD_OF_PRESENCE_MAX } else { HOLD_MAX };
            let hold = (reason.weight().hold * 2_u32.pow(doublings)).min(max);
            State::Recovering { reason, since: look.complete_at, hold }
        }
        // Of a device that was not probed in this boot nothing is complete yet.
        State::Recovering { since, hold, .. } if look.complete_at > since && look.complete_at - since >= hold => {
            verdict.healthy_since = look.complete_at;
            if let Some(incident) = verdict.incidents.last_mut() {
                incident.until.get_or_insert(look.at.wall);
            }
            State::Healthy
        }
        State::Suspect { since, .. } if look.complete_at > since => State::Healthy,
        state => state,
    }
}

/// There is evidence that the device has begun anew. What was counted since the last look cannot be told from what the reset has
/// ended: counting begins anew too.
fn reset(verdict: &mut Verdict, at: Moment) {
    forgive(verdict, at);
    verdict.baselines.clear();
}

/// What happened before is over.
fn forgive(verdict: &mut Verdict, at: Moment) {
    verdict.faults.clear();
    verdict.reset_at = at.boot;
}

/// It has begun anew, and nobody has looked at it since.
fn is_to_be_seen_after(verdict: &mut Verdict, at: Moment) {
    if let State::Unhealthy { seen, .. } = &mut verdict.state {
        *seen = (*seen).max(at.boot);
    }
}

#[cfg(test)]
mod tests;
