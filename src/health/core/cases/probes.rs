//! The results of scans, probes and health checks, until the next one of each device.

use super::Cases;
use crate::domain::{
    CheckResult, DeviceId, Moment, PciAddress, Reason, Signals, Symptom, Timestamp, VerdictState,
};
use crate::health::core::case::{Case, Observation, SymptomSeen};
use std::collections::BTreeSet;
use std::time::Duration;

/// The result of the last probe of a device.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) at: Moment,
    /// The symptoms of this probe. From an earlier probe: reasons that this one could not check,
    /// and a counter that rose then and has had no poll since to rise again.
    pub(super) symptoms_seen: Vec<SymptomSeen>,
    /// The reasons that it could not check.
    pub(super) unread: BTreeSet<Reason>,
}

impl Cases {
    /// Takes the result of a scan for a device's presence.
    pub(in crate::health::core) fn scanned(
        &mut self,
        id: &DeviceId,
        is_probed: bool,
        at: Moment,
        symptoms: BTreeSet<Symptom>,
    ) {
        let is_away = symptoms
            .iter()
            .any(|symptom| matches!(symptom.reason, Reason::DeviceGone | Reason::DriverLost));
        // An earlier probe of an absent device is neither news, nor evidence after its return.
        if is_away {
            self.probes.remove(id);
        }
        let probe = self.probes.get(id);
        let check = self.checks.get(id).filter(|_| !is_away);
        let has_symptoms =
            [probe, check].into_iter().flatten().any(|probe| !probe.symptoms_seen.is_empty());
        if symptoms.is_empty() && !has_symptoms && !self.verdicts.contains_key(id) {
            return;
        }
        let mut symptoms_seen: Vec<SymptomSeen> =
            symptoms.into_iter().map(|symptom| SymptomSeen { at, symptom }).collect();
        symptoms_seen.extend(
            [probe, check]
                .into_iter()
                .flatten()
                .flat_map(|probe| probe.symptoms_seen.iter().cloned()),
        );
        // A passed check matters only to a device that has failed it. Others need not wait for the
        // next check.
        let check = check.filter(|_| self.waits_for_check(id));
        let mut complete_at = [probe, check]
            .into_iter()
            .flatten()
            .fold(at.boot, |oldest, probe| oldest.min(probe.at.boot));
        let is_unread = |probe: &Probe| {
            self.present_reason(id).is_some_and(|reason| probe.unread.contains(&reason))
        };
        if is_probed && self.rules.has_probes && probe.is_none_or(is_unread) {
            complete_at = Duration::ZERO;
        }
        let observation = Observation { at, complete_at, is_away, symptoms_seen: &symptoms_seen };
        self.change(id, |verdict| verdict.observe(&observation));
        self.observed.insert(id.clone());
        let is_unprobed = self.verdicts.get(id).is_some_and(|verdict| {
            let is_over = symptoms_seen.iter().all(|seen| seen.at.boot < verdict.reset_at);
            is_over && verdict.faults.is_empty() && matches!(verdict.state, VerdictState::Unhealthy { seen, .. } if complete_at <= seen)
        });
        if is_unprobed && is_probed && !self.waits_for_check(id) {
            self.unprobed.insert(id.clone());
        }
    }

    /// A probe has ended; its result counts with the next [`Cases::scanned`].
    pub(in crate::health::core) fn probed(
        &mut self,
        id: &DeviceId,
        own: Option<PciAddress>,
        at: Moment,
        signals: &Signals,
    ) {
        let mut symptoms = signals.symptoms.clone();
        if let Some(own) = own.filter(|_| !signals.counters.is_empty()) {
            self.change(id, |verdict| symptoms.extend(verdict.count(&signals.counters, own, at)));
        }
        symptoms.retain(|symptom| !self.rules.ignored.contains(&symptom.reason));
        let has_risen = symptoms.iter().any(|symptom| symptom.reason == Reason::AerNonfatal);
        let mut symptoms_seen: Vec<SymptomSeen> =
            symptoms.into_iter().map(|symptom| SymptomSeen { at, symptom }).collect();
        // Not only the poll starts probes, and counters do not rise between two probes in quick
        // succession.
        let rose_lately = |before: &&SymptomSeen| {
            let age = at.boot.saturating_sub(before.at.boot);
            before.symptom.reason == Reason::AerNonfatal
                && !has_risen
                && age < self.rules.poll * 3 / 2
        };
        let before = self.probes.get(id).into_iter().flat_map(|probe| &probe.symptoms_seen);
        let could_not_check =
            |before: &&SymptomSeen| signals.unread.contains(&before.symptom.reason);
        symptoms_seen.extend(
            before.filter(|before| rose_lately(before) || could_not_check(before)).cloned(),
        );
        self.probes.insert(id.clone(), Probe { at, symptoms_seen, unread: signals.unread.clone() });
    }

    /// The health check of the device's resource has ended. If it could not be run, the last result
    /// stays. If there was none since the start, a device that had failed its check waits for one:
    /// the recorded probe is older than every failure.
    pub(in crate::health::core) fn checked(
        &mut self,
        id: &DeviceId,
        at: Moment,
        result: CheckResult,
    ) {
        let symptom = match result {
            CheckResult::Passed => None,
            CheckResult::Failed(detail) => Some(Symptom { reason: Reason::CheckFailed, detail }),
            CheckResult::NotRun => {
                let never = Moment { boot: Duration::ZERO, wall: Timestamp(0) };
                self.checks.entry(id.clone()).or_insert(Probe {
                    at: never,
                    symptoms_seen: Vec::new(),
                    unread: BTreeSet::new(),
                });
                return;
            }
        };
        let symptom = symptom.filter(|symptom| !self.rules.ignored.contains(&symptom.reason));
        self.checks.insert(
            id.clone(),
            Probe {
                at,
                symptoms_seen: symptom
                    .into_iter()
                    .map(|symptom| SymptomSeen { at, symptom })
                    .collect(),
                unread: BTreeSet::new(),
            },
        );
    }
}
