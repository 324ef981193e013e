//! The decisions that a seed makes before a run: the kubelet's version, its faults and their
//! duration, the run's most frequent act, and the visits of another plugin.
//!
//! Runs have different biases, because an event that is rare in every run is never tested. Some
//! runs restart the daemon again and again, in others devices come and go, or Registers take long
//! at every step.

use super::rival_plugin::Habits;
use crate::lab::sim::kubelet::{Behaviour, Gaps, Hook, Profile};
use crate::lab::sim::memory::{Faults, Probabilities};
use crate::lab::sim::random::Random;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Long enough for a truce.
const CONTEST: Duration = Duration::from_secs(45);

/// An action on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    AddPod,
    DeletePod,
    ForceDelete,
    CrashContainer,
    CompletePod,
    RestartKubelet,
    RestartDaemon,
    /// A device disappears, and may come back.
    Flap,
    LoseCheckpoint,
    Reboot,
    /// Another client lists the kubelet's pods.
    List,
}

/// The weights of the acts, about 100 in all, in a run without a bias.
const ACTS: [(Act, usize); 11] = [
    (Act::AddPod, 30),
    (Act::DeletePod, 15),
    (Act::ForceDelete, 5),
    (Act::CrashContainer, 5),
    (Act::CompletePod, 5),
    (Act::RestartKubelet, 10),
    (Act::RestartDaemon, 10),
    (Act::Flap, 10),
    (Act::LoseCheckpoint, 2),
    (Act::Reboot, 2),
    (Act::List, 6),
];

/// The parameters of a run.
#[derive(Debug)]
pub(super) struct Parameters {
    pub(super) behaviour: Behaviour,
    pub(super) faults: Faults,
    /// The time when the faults end.
    pub(super) faults_until: Duration,
    /// The act that is drawn in half of all cases.
    bias: Option<Act>,
    /// Whether there is a second resource.
    pub(super) has_nics: bool,
    /// Whether the GPUs have a hook after their release.
    pub(super) has_hook: bool,
    pub(super) rival: Option<RivalStay>,
    /// Whether another plugin comes in the idle phase, and stays.
    pub(super) has_permanent_rival: bool,
}

/// The stay of another plugin.
#[derive(Debug, Clone, Copy)]
pub(super) struct RivalStay {
    pub(super) from: Duration,
    pub(super) until: Duration,
    pub(super) habits: Habits,
}

impl Parameters {
    pub(super) fn draw(random: &mut Random) -> Self {
        let fault_kind = FaultKind::draw(random);
        let profile = match random.below(9) {
            // Without GetAllocatableResources the audit cannot repair what a late list has changed:
            // only the streams can.
            _ if fault_kind == FaultKind::StuckLists && random.chance(0.7) => Profile::K110,
            0 => Profile::K19,
            1 => Profile::K110,
            2 => Profile::K137,
            3 => Profile::K137Dedupe,
            _ => Profile::K125,
        };
        // The rest of the kubelet's sleep. It is at least 15 ms: with less, no plugin could be back
        // in time, and a pod would be lost by chance alone.
        let gaps =
            Gaps { to_first_batch: random.between(15 * MS, 200 * MS), ..Behaviour::default().gaps };
        let behaviour = Behaviour {
            profile,
            topology_manager: random.chance(0.3),
            gaps,
            ..Behaviour::default()
        };
        // May exceed the time that the daemon stays in doubt after a loss, so that some losses
        // happen when the doubt has ended.
        let mut faults_until = random.between(8 * SECOND, 24 * SECOND);
        let mut bias = match random.below(6) {
            0 | 1 => Some(Act::RestartDaemon),
            2 => Some(Act::Flap),
            3 => Some(Act::RestartKubelet),
            _ => None,
        };
        if fault_kind == FaultKind::StuckLists {
            // The last change of the list coincides with the daemon's last Register; the stuck
            // lists arrive after both.
            faults_until = random.between(12 * SECOND, 15 * SECOND);
            bias = Some(Act::Flap);
        }
        let mut rival = random.chance(0.25).then(|| {
            let from = random.between(Duration::ZERO, faults_until - SECOND);
            RivalStay {
                from,
                until: random.between(from, faults_until),
                habits: Habits::draw(random),
            }
        });
        // A kubelet that closes the former connection at every Register, and two plugins that want
        // the resource: they compete until one of them holds a truce.
        if let Some(stay) =
            rival.as_mut().filter(|stay| profile.is_alpha() && stay.habits.registers_on_loss)
        {
            faults_until = CONTEST;
            bias = Some(Act::AddPod);
            (stay.from, stay.until) = (SECOND, CONTEST);
        }
        Parameters {
            behaviour,
            faults: fault_kind.faults(faults_until),
            faults_until,
            bias,
            has_nics: random.chance(0.3),
            rival,
            has_permanent_rival: random.chance(0.1),
            has_hook: random.chance(0.3),
        }
    }

    /// The next act.
    pub(super) fn act(&self, random: &mut Random) -> Act {
        if let Some(act) = self.bias.filter(|_| random.chance(0.5)) {
            return act;
        }
        let mut nth = random.below(ACTS.iter().map(|(_, weight)| weight).sum());
        let drawn = ACTS.iter().find(|(_, weight)| match nth.checked_sub(*weight) {
            Some(left) => {
                nth = left;
                false
            }
            None => true,
        });
        drawn.unwrap().0
    }
}

/// The kind of faults inside the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FaultKind {
    Nothing,
    /// Times and orders vary.
    Schedules,
    /// Lists that are processed late, one after the other.
    StuckLists,
    /// Lists that cannot be decoded: that ends their stream.
    BadLists,
    /// Registers that take long at every step, so that old streams end in between.
    SlowRegisters,
    /// Goroutines that clean up late, after streams that end often.
    SlowEnds,
    /// Every step fails at times, and the kubelet dies.
    All,
}

impl FaultKind {
    fn draw(random: &mut Random) -> Self {
        use FaultKind::{All, BadLists, Nothing, Schedules, SlowEnds, SlowRegisters, StuckLists};
        [Nothing, Schedules, StuckLists, BadLists, SlowRegisters, SlowEnds, All][random.below(7)]
    }

    fn faults(self, until: Duration) -> Faults {
        let slow = Probabilities { delays: 0.6, ..Probabilities::default() };
        let all = |hooks: &[Hook], probabilities: Probabilities| {
            hooks
                .iter()
                .fold(Faults::schedules(until), |faults, hook| faults.with(*hook, probabilities))
        };
        match self {
            FaultKind::Nothing => Faults::none(),
            FaultKind::Schedules => Faults::schedules(until),
            FaultKind::StuckLists => {
                all(&[Hook::OnList], Probabilities { stalls: 0.5, ..Probabilities::default() })
            }
            FaultKind::BadLists => {
                all(&[Hook::OnList], Probabilities { fails: 0.3, ..Probabilities::default() })
            }
            FaultKind::SlowRegisters => {
                let steps = [
                    Hook::AfterRegisterClient,
                    Hook::AfterDial,
                    Hook::AfterOptions,
                    Hook::AfterEndpointSet,
                    Hook::BeforeListAndWatch,
                ];
                all(&steps, slow)
            }
            FaultKind::SlowEnds => {
                let steps = [
                    Hook::OnStreamEnd,
                    Hook::AfterDeregister,
                    Hook::AfterOptions,
                    Hook::BeforePluginDisconnected,
                ];
                all(&steps, slow)
                    .with(Hook::OnList, Probabilities { fails: 0.2, ..Probabilities::default() })
            }
            FaultKind::All => Faults::all(until),
        }
    }
}
