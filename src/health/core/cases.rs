//! The cases of all devices: their observations, their health and the changes to record.

mod probes;

use self::probes::Probe;
use super::case::Case;
use super::rules::Rules;
use crate::domain::{
    AllocId, Device, DeviceClass, DeviceEvent, DeviceId, EventKind, GpuInstance, Health, Moment,
    OperatorRequest, PciAddress, Reason, Verdict, VerdictState, Verdicts,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The verdicts, and the newest probes.
#[derive(Debug)]
pub(super) struct Cases {
    rules: Rules,
    verdicts: Verdicts,
    probes: BTreeMap<DeviceId, Probe>,
    /// The last result of each device's health check.
    checks: BTreeMap<DeviceId, Probe>,
    changed: BTreeSet<DeviceId>,
    /// The devices with a verdict that were observed in the last pass; others wait for nothing.
    observed: BTreeSet<DeviceId>,
    /// Those of them without symptoms that were not probed since their failure. A device that has
    /// returned need not wait for the poll.
    unprobed: BTreeSet<DeviceId>,
}

impl Cases {
    /// Continues with the verdicts of an earlier actor, process or boot.
    pub(super) fn new(rules: Rules, remembered: &Verdicts) -> Self {
        let mut cases = Cases {
            rules,
            verdicts: remembered.clone(),
            probes: BTreeMap::new(),
            checks: BTreeMap::new(),
            changed: BTreeSet::new(),
            observed: BTreeSet::new(),
            unprobed: BTreeSet::new(),
        };
        for (id, verdict) in &mut cases.verdicts {
            let before = verdict.clone();
            verdict.continue_in(&cases.rules.boot_id);
            // The end of a recovery may have been reported while no daemon ran. And a reason that
            // is ignored now may not have been ignored then.
            verdict.faults.retain(|reason, _| {
                *reason != Reason::ErrorRecovery && !cases.rules.ignored.contains(reason)
            });
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

    /// Uses other rules from now on.
    pub(super) fn apply_rules(&mut self, rules: Rules) {
        if rules == self.rules {
            return;
        }
        self.rules = rules;
        let ignored = &self.rules.ignored;
        for probe in self.probes.values_mut().chain(self.checks.values_mut()) {
            probe.symptoms_seen.retain(|seen| !ignored.contains(&seen.symptom.reason));
        }
        for (id, verdict) in &mut self.verdicts {
            let before = verdict.faults.len();
            verdict.faults.retain(|reason, _| !ignored.contains(reason));
            if verdict.faults.len() != before {
                self.changed.insert(id.clone());
            }
        }
    }

    /// Forgets the check results of devices whose resource no longer has a check.
    pub(super) fn forget_checks(&mut self, devices: &BTreeSet<DeviceId>) {
        self.checks.retain(|id, _| !devices.contains(id));
    }

    /// Forgets devices that were removed.
    pub(super) fn forget(&mut self, devices: &[DeviceId]) {
        for device in devices {
            self.verdicts.remove(device);
            self.probes.remove(device);
            self.checks.remove(device);
            self.changed.remove(device);
        }
    }

    /// A pass begins: [`Cases::scanned`] follows for every device that matters.
    pub(super) fn begin_pass(&mut self) {
        self.observed.clear();
        self.unprobed.clear();
    }

    /// Whether an event counts for a device that is in no list. Such a device may be offered later,
    /// and its failure must then count. A recovery that begins usually succeeds, and a part follows
    /// its whole, unless the event is its own.
    pub(super) fn must_record(&self, device: &Device, kind: &EventKind, is_own: bool) -> bool {
        let may_be_offered =
            device.class != DeviceClass::Other && (is_own || device.attribute("part").is_none());
        let stays = matches!(
            kind,
            EventKind::RecoveryFailed
                | EventKind::Wedged(_)
                | EventKind::Xid(_)
                | EventKind::RecoveryAction(Some(_))
        );
        may_be_offered && (stays || self.verdicts.contains_key(&device.id))
    }

    /// Whether the device has failures that stay until a reset.
    pub(super) fn has_faults(&self, id: &DeviceId) -> bool {
        self.verdicts.get(id).is_some_and(|verdict| !verdict.faults.is_empty())
    }

    /// Takes an event of a device.
    pub(super) fn apply_event(&mut self, id: &DeviceId, event: &DeviceEvent, at: Moment) {
        if event.kind.reason().is_some_and(|reason| self.rules.ignored.contains(&reason)) {
            return;
        }
        let fatal = std::mem::take(&mut self.rules.fatal_xids);
        self.change(id, |verdict| verdict.apply_event(&event.kind, at, &fatal));
        self.rules.fatal_xids = fatal;
    }

    /// Takes an operator's order.
    pub(super) fn apply_request(&mut self, id: &DeviceId, request: &OperatorRequest, at: Moment) {
        self.change(id, |verdict| verdict.apply_request(request, at));
    }

    /// The health by the device's own verdict, without the devices above it.
    pub(super) fn health(&self, id: &DeviceId) -> Health {
        self.verdicts.get(id).map_or(Health::Healthy, Verdict::health)
    }

    pub(super) fn verdicts(&self) -> &Verdicts {
        &self.verdicts
    }

    /// The next time at which an observation may change a verdict.
    pub(super) fn next_observation(&self) -> Option<Duration> {
        let wanted = |id: &DeviceId| {
            if self.unprobed.contains(id) {
                return Some(Duration::ZERO);
            }
            let wanted = self.verdicts.get(id)?.next_observation_at()?;
            // Health checks have their own schedule, and are not requested here.
            let waits_for_check = self.waits_for_check(id)
                && self.checks.get(id).is_some_and(|check| check.at.boot < wanted);
            (!waits_for_check).then_some(wanted)
        };
        self.observed.iter().filter_map(wanted).min()
    }

    /// The verdicts to record since the last call; `None` if a verdict is no longer worth
    /// recording. `holders` returns the present holders of a device.
    pub(super) fn take_changed(
        &mut self,
        mut holders: impl FnMut(&DeviceId) -> Vec<AllocId>,
    ) -> Vec<(DeviceId, Option<Verdict>)> {
        let changed = std::mem::take(&mut self.changed);
        let mut recorded = Vec::with_capacity(changed.len());
        for id in changed {
            let Some(verdict) = self.verdicts.get_mut(&id) else {
                recorded.push((id, None));
                continue;
            };
            if let (VerdictState::Unhealthy { .. }, Some(incident)) =
                (verdict.state, verdict.incidents.last_mut())
                && incident.until.is_none()
                && incident.held_by.is_empty()
            {
                incident.held_by = holders(&id);
            }
            if verdict.is_blank() {
                self.verdicts.remove(&id);
                recorded.push((id, None));
            } else {
                recorded.push((id, Some(verdict.clone())));
            }
        }
        recorded
    }

    /// The verdicts of these devices were not recorded: [`Cases::take_changed`] returns them again.
    pub(super) fn not_recorded(&mut self, devices: Vec<DeviceId>) {
        self.changed.extend(devices);
    }

    /// The reason of a device's present state.
    fn present_reason(&self, id: &DeviceId) -> Option<Reason> {
        match self.verdicts.get(id)?.state {
            VerdictState::Healthy => None,
            VerdictState::Suspect { reason, .. }
            | VerdictState::Unhealthy { reason, .. }
            | VerdictState::Recovering { reason, .. } => Some(reason),
        }
    }

    /// Whether the device has failed its health check.
    fn waits_for_check(&self, id: &DeviceId) -> bool {
        let state = self.verdicts.get(id).map(|verdict| verdict.state);
        matches!(
            state,
            Some(
                VerdictState::Unhealthy { reason: Reason::CheckFailed, .. }
                    | VerdictState::Recovering { reason: Reason::CheckFailed, .. }
            )
        )
    }

    fn change(&mut self, id: &DeviceId, change: impl FnOnce(&mut Verdict)) {
        let known = self.verdicts.get(id);
        let mut verdict = known.cloned().unwrap_or_else(|| Verdict {
            boot_id: self.rules.boot_id.clone(),
            ..Verdict::default()
        });
        change(&mut verdict);
        let is_new = match known {
            Some(known) => must_be_recorded(known, &verdict),
            None => !verdict.is_blank(),
        };
        if is_new {
            self.changed.insert(id.clone());
        }
        if known.is_some() || is_new {
            self.verdicts.insert(id.clone(), verdict);
        }
    }
}

/// Whether a change must be recorded. A repeated symptom need not be: otherwise an unhealthy
/// device would cause a write at every probe.
fn must_be_recorded(before: &Verdict, after: &Verdict) -> bool {
    let timeless = |verdict: &Verdict| match verdict.state {
        VerdictState::Unhealthy { reason, .. } => Verdict {
            state: VerdictState::Unhealthy { reason, seen: Duration::ZERO },
            ..verdict.clone()
        },
        _ => verdict.clone(),
    };
    before != after && timeless(before) != timeless(after)
}

/// The devices that a device depends on: the whole of a part, the physical function of a virtual
/// one.
pub(super) fn parents(
    device: &Device,
    by_address: &BTreeMap<PciAddress, DeviceId>,
) -> Vec<DeviceId> {
    let whole = device.attribute("parent").map(DeviceId::new);
    let physical = device
        .pci
        .as_ref()
        .and_then(|pci| pci.physfn)
        .and_then(|physical| by_address.get(&physical).cloned());
    whole.into_iter().chain(physical).collect()
}

/// Whether a device is the MIG instance of an event, or one of them.
pub(super) fn is_instance(device: &Device, instance: GpuInstance) -> bool {
    let number = |name| device.attribute(name).and_then(|number| number.parse::<u32>().ok());
    number("gi") == Some(instance.gi) && instance.ci.is_none_or(|ci| number("ci") == Some(ci))
}
