//! Every device's case: which looks go into it, what is read from it, and what is to be remembered of it.

use super::LEAVE_AFTER;
use super::case::{Case, FatalXids, Look, Sighting};
use crate::domain::{
    AllocId, CheckResult, Complaint, Device, DeviceClass, DeviceEvent, DeviceId, EventKind, Health, Instruction, Moment, PciAddress,
    Reason, Signals, State, Timestamp, Verdict,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The verdict of each device that has one.
pub(crate) type Verdicts = BTreeMap<DeviceId, Verdict>;

/// What the judge goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rules {
    /// This boot.
    pub(crate) boot_id: String,
    /// Whether somebody probes PCI functions: then none of them recovers before it was probed.
    pub(crate) has_probes: bool,
    /// Numbers of NVIDIA's driver after which a GPU needs a reset.
    pub(crate) fatal_xids: FatalXids,
    /// What is not held against a device.
    pub(crate) ignored: BTreeSet<Reason>,
    /// How often devices are probed.
    pub(crate) poll: Duration,
    /// How long a free id that is no longer found stays in the list: [`LEAVE_AFTER`], where nobody is in a hurry.
    pub(crate) leave_after: Duration,
}

impl Default for Rules {
    fn default() -> Self {
        Rules {
            boot_id: String::new(),
            has_probes: false,
            fatal_xids: FatalXids::default(),
            ignored: BTreeSet::new(),
            poll: Duration::ZERO,
            leave_after: LEAVE_AFTER,
        }
    }
}

/// What the last probe of a device has shown.
#[derive(Debug)]
struct Probe {
    at: Moment,
    /// Of this probe; of an earlier one what this one could not look for, and of a counter that rose there and has had no poll to rise
    /// again.
    sightings: Vec<Sighting>,
    /// What it could not look for.
    unread: BTreeSet<Reason>,
}

/// The verdicts, and the newest probes.
#[derive(Debug)]
pub(super) struct Cases {
    rules: Rules,
    verdicts: Verdicts,
    probes: BTreeMap<DeviceId, Probe>,
    /// What the check of its resource has said last.
    checks: BTreeMap<DeviceId, Probe>,
    changed: BTreeSet<DeviceId>,
    /// The devices with a verdict that were looked at in the last judgement; others wait for nothing.
    looked_at: BTreeSet<DeviceId>,
    /// Those among them that nothing speaks against any more, and that nobody has probed since: one that has come back need not
    /// wait for the poll.
    unprobed: BTreeSet<DeviceId>,
}

impl Cases {
    /// Goes on with what an earlier life, process or boot has remembered.
    pub(super) fn new(rules: Rules, remembered: &Verdicts) -> Self {
        let mut cases = Cases {
            rules,
            verdicts: remembered.clone(),
            probes: BTreeMap::new(),
            checks: BTreeMap::new(),
            changed: BTreeSet::new(),
            looked_at: BTreeSet::new(),
            unprobed: BTreeSet::new(),
        };
        for (id, verdict) in &mut cases.verdicts {
            let before = verdict.clone();
            verdict.continue_in(&cases.rules.boot_id);
            // Its end may have been told while nobody listened; and what is ignored now may not have been then.
            verdict.faults.retain(|reason, _| *reason != Reason::ErrorRecovery && !cases.rules.ignored.contains(reason));
            if *verdict != before {
                cases.changed.insert(id.clone());
            }
        }
        cases
    }

    /// How long a free id that is no longer found stays in the list.
    pub(super) fn leave_after(&self) -> Duration {
        self.rules.leave_after
    }

    /// Goes by other rules from now on.
    pub(super) fn follow(&mut self, rules: Rules) {
        if rules == self.rules {
            return;
        }
        self.rules = rules;
        let ignored = &self.rules.ignored;
        for probe in self.probes.values_mut().chain(self.checks.values_mut()) {
            probe.sightings.retain(|sighting| !ignored.contains(&sighting.complaint.reason));
        }
        for (id, verdict) in &mut self.verdicts {
            let before = verdict.faults.len();
            verdict.faults.retain(|reason, _| !ignored.contains(reason));
            if verdict.faults.len() != before {
                self.changed.insert(id.clone());
            }
        }
    }

    /// No check will say anything of these devices any more.
    pub(super) fn forget_checks(&mut self, devices: &BTreeSet<DeviceId>) {
        self.checks.retain(|id, _| !devices.contains(id));
    }

    /// Nothing is known any more of these devices, which have gone.
    pub(super) fn forget(&mut self, devices: &[DeviceId]) {
        for device in devices {
            self.verdicts.remove(device);
            self.probes.remove(device);
            self.checks.remove(device);
            self.changed.remove(device);
        }
    }

    /// A judgement begins: [`Cases::scanned`] follows for every device that matters.
    pub(super) fn begin_looks(&mut self) {
        self.looked_at.clear();
        self.unprobed.clear();
    }

    /// A scan has shown of a device's presence what it could.
    pub(super) fn scanned(&mut self, id: &DeviceId, is_probed: bool, at: Moment, complaints: BTreeSet<Complaint>) {
        let is_away = complaints.iter().any(|complaint| matches!(complaint.reason, Reason::DeviceGone | Reason::DriverLost));
        // What was probed of a device that is away is no news, nor is it evidence when the device is back.
        if is_away {
            self.probes.remove(id);
        }
        let probe = self.probes.get(id);
        let check = self.checks.get(id).filter(|_| !is_away);
        let complains = [probe, check].into_iter().flatten().any(|probe| !probe.sightings.is_empty());
        if complaints.is_empty() && !complains && !self.verdicts.contains_key(id) {
            return;
        }
        let mut sightings: Vec<Sighting> = complaints.into_iter().map(|complaint| Sighting { at, complaint }).collect();
        sightings.extend([probe, check].into_iter().flatten().flat_map(|probe| probe.sightings.iter().cloned()));
        // Whether it passes its check matters to a device that has failed it. Others need not wait for the next one.
        let check = check.filter(|_| self.waits_for_check(id));
        let mut complete_at = [probe, check].into_iter().flatten().fold(at.boot, |oldest, probe| oldest.min(probe.at.boot));
        let is_unread = |probe: &Probe| self.ails_of(id).is_some_and(|reason| probe.unread.contains(&reason));
        if is_probed && self.rules.has_probes && probe.is_none_or(is_unread) {
            complete_at = Duration::ZERO;
        }
        let look = Look { at, complete_at, is_away, sightings: &sightings };
        self.change(id, |verdict| verdict.look(&look));
        self.looked_at.insert(id.clone());
        let is_unprobed = self.verdicts.get(id).is_some_and(|verdict| {
            let is_over = sightings.iter().all(|sighting| sighting.at.boot < verdict.reset_at);
            is_over && verdict.faults.is_empty() && matches!(verdict.state, State::Unhealthy { seen, .. } if complete_at <= seen)
        });
        if is_unprobed && is_probed && !self.waits_for_check(id) {
            self.unprobed.insert(id.clone());
        }
    }

    /// A probe has ended; what it says counts with the next [`Cases::scanned`].
    pub(super) fn probed(&mut self, id: &DeviceId, own: Option<PciAddress>, at: Moment, signals: &Signals) {
        let mut complaints = signals.complaints.clone();
        if let Some(own) = own.filter(|_| !signals.counters.is_empty()) {
            self.change(id, |verdict| complaints.extend(verdict.count(&signals.counters, own, at)));
        }
        complaints.retain(|complaint| !self.rules.ignored.contains(&complaint.reason));
        let has_risen = complaints.iter().any(|complaint| complaint.reason == Reason::AerNonfatal);
        let mut sightings: Vec<Sighting> = complaints.into_iter().map(|complaint| Sighting { at, complaint }).collect();
        // Looks are not only the poll's, and between two that follow closely nothing is counted.
        let rose_lately = |before: &&Sighting| {
            let age = at.boot.saturating_sub(before.at.boot);
            before.complaint.reason == Reason::AerNonfatal && !has_risen && age < self.rules.poll * 3 / 2
        };
        let before = self.probes.get(id).into_iter().flat_map(|probe| &probe.sightings);
        let could_not_look = |before: &&Sighting| signals.unread.contains(&before.complaint.reason);
        sightings.extend(before.filter(|before| rose_lately(before) || could_not_look(before)).cloned());
        self.probes.insert(id.clone(), Probe { at, sightings, unread: signals.unread.clone() });
    }

    /// The check of its resource has ended. After one that could not be run, what the last one said stays; where none has been since the start, a
    /// device that had failed its check waits for one: this probe is older than every failure.
    pub(super) fn checked(&mut self, id: &DeviceId, at: Moment, result: CheckResult) {
        let complaint = match result {
            CheckResult::Passed => None,
            CheckResult::Failed(detail) => Some(Complaint { reason: Reason::CheckFailed, detail }),
            CheckResult::NotRun => {
                let never = Moment { boot: Duration::ZERO, wall: Timestamp(0) };
                self.checks.entry(id.clone()).or_insert(Probe { at: never, sightings: Vec::new(), unread: BTreeSet::new() });
                return;
            }
        };
        let complaint = complaint.filter(|complaint| !self.rules.ignored.contains(&complaint.reason));
        self.checks.insert(
            id.clone(),
            Probe { at, sightings: complaint.into_iter().map(|complaint| Sighting { at, complaint }).collect(), unread: BTreeSet::new() },
        );
    }

    /// Whether what happens to a device counts although no list has it. One that may be offered later is not offered then as if nothing
    /// had been; a recovery that begins ends well as a rule, and a part follows its whole.
    pub(super) fn notes(&self, device: &Device, kind: &EventKind) -> bool {
        let may_be_offered = device.class != DeviceClass::Other && device.attribute("part").is_none();
        let stays =
            matches!(kind, EventKind::RecoveryFailed | EventKind::Wedged(_) | EventKind::Xid(_) | EventKind::RecoveryAction(Some(_)));
        may_be_offered && (stays || self.verdicts.contains_key(&device.id))
    }

    /// Something has happened to a device.
    pub(super) fn happened(&mut self, id: &DeviceId, event: &DeviceEvent, at: Moment) {
        if event.kind.reason().is_some_and(|reason| self.rules.ignored.contains(&reason)) {
            return;
        }
        let fatal = std::mem::take(&mut self.rules.fatal_xids);
        self.change(id, |verdict| verdict.happened(&event.kind, at, &fatal));
        self.rules.fatal_xids = fatal;
    }

    /// An operator has said something.
    pub(super) fn instructed(&mut self, id: &DeviceId, instruction: &Instruction, at: Moment) {
        self.change(id, |verdict| verdict.instructed(instruction, at));
    }

    /// Whether a device is in order by itself; what is above it is not asked.
    pub(super) fn health(&self, id: &DeviceId) -> Health {
        self.verdicts.get(id).map_or(Health::Healthy, Verdict::health)
    }

    pub(super) fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// The next time at which a look may change something.
    pub(super) fn next_look(&self) -> Option<Duration> {
        let wanted = |id: &DeviceId| {
            if self.unprobed.contains(id) {
                return Some(Duration::ZERO);
            }
            let wanted = self.verdicts.get(id)?.wants_look_at()?;
            // A check comes by itself, and is not hurried.
            let waits_for_check = self.waits_for_check(id) && self.checks.get(id).is_some_and(|check| check.at.boot < wanted);
            (!waits_for_check).then_some(wanted)
        };
        self.looked_at.iter().filter_map(wanted).min()
    }

    /// What is to be made durable since the last time: `None` where nothing is worth remembering any more. `holders` tells who
    /// holds a device now.
    pub(super) fn take_changed(&mut self, mut holders: impl FnMut(&DeviceId) -> Vec<AllocId>) -> Vec<(DeviceId, Option<Verdict>)> {
        let changed = std::mem::take(&mut self.changed);
        let mut notes = Vec::with_capacity(changed.len());
        for id in changed {
            let Some(verdict) = self.verdicts.get_mut(&id) else { continue };
            if let (State::Unhealthy { .. }, Some(incident)) = (verdict.state, verdict.incidents.last_mut())
                && incident.until.is_none()
                && incident.held_by.is_empty()
            {
                incident.held_by = holders(&id);
            }
            if verdict.is_blank() {
                self.verdicts.remove(&id);
                notes.push((id, None));
            } else {
                notes.push((id, Some(verdict.clone())));
            }
        }
        notes
    }

    /// What a device suffers from, or may.
    fn ails_of(&self, id: &DeviceId) -> Option<Reason> {
        match self.verdicts.get(id)?.state {
            State::Healthy => None,
            State::Suspect { reason, .. } | State::Unhealthy { reason, .. } | State::Recovering { reason, .. } => Some(reason),
        }
    }

    /// Whether it was the check that has failed.
    fn waits_for_check(&self, id: &DeviceId) -> bool {
        let state = self.verdicts.get(id).map(|verdict| verdict.state);
        matches!(state, Some(State::Unhealthy { reason: Reason::CheckFailed, .. } | State::Recovering { reason: Reason::CheckFailed, .. }))
    }

    fn change(&mut self, id: &DeviceId, act: impl FnOnce(&mut Verdict)) {
        let known = self.verdicts.get(id);
        let mut verdict = known.cloned().unwrap_or_else(|| Verdict { boot_id: self.rules.boot_id.clone(), ..Verdict::default() });
        act(&mut verdict);
        let is_news = match known {
            Some(known) => is_news(known, &verdict),
            None => !verdict.is_blank(),
        };
        if is_news {
            self.changed.insert(id.clone());
        }
        if known.is_some() || is_news {
            self.verdicts.insert(id.clone(), verdict);
        }
    }
}

/// Whether a change is to be made durable. That the same still speaks against a device is none: a sick one would write at
/// every look.
fn is_news(before: &Verdict, after: &Verdict) -> bool {
    let timeless = |verdict: &Verdict| match verdict.state {
        State::Unhealthy { reason, .. } => Verdict { state: State::Unhealthy { reason, seen: Duration::ZERO }, ..verdict.clone() },
        _ => verdict.clone(),
    };
    before != after && timeless(before) != timeless(after)
}

/// Which devices a device depends on: the whole of which it is a part, the physical function of a virtual one.
pub(super) fn parents(device: &Device, by_address: &BTreeMap<PciAddress, DeviceId>) -> Vec<DeviceId> {
    let whole = device.attribute("parent").map(DeviceId::new);
    let physical = device.pci.as_ref().and_then(|pci| pci.physfn).and_then(|physical| by_address.get(&physical).cloned());
    whole.into_iter().chain(physical).collect()
}
