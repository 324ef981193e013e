//! The decisions that a seed makes before a run: the kubelet's version, its faults and their
//! duration, the run's most frequent act, and the visits of another plugin.
//!
//! Runs have different biases, because an event that is rare in every run is never tested. Some
//! runs restart the daemon again and again, in others devices come and go, or Registers take long
//! at every step.

use super::stranger::Habits;
use crate::lab::sim::kubelet::{Behaviour, Gaps, Hook, Profile};
use crate::lab::sim::memory::{Faults, Odds};
use crate::lab::sim::random::Random;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Long enough for a truce.
const FIGHT: Duration = Duration::from_secs(45);

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
pub(super) struct World {
    pub(super) behaviour: Behaviour,
    pub(super) faults: Faults,
    /// The time when the faults end.
    pub(super) storm: Duration,
    /// The act that is drawn in half of all cases.
    temper: Option<Act>,
    /// Whether there is a second resource.
    pub(super) has_nics: bool,
    pub(super) stranger: Option<Visit>,
    /// Whether another plugin comes in the idle phase, and stays.
    pub(super) has_guest: bool,
}

/// The stay of another plugin.
#[derive(Debug, Clone, Copy)]
pub(super) struct Visit {
    pub(super) from: Duration,
    pub(super) until: Duration,
    pub(super) habits: Habits,
}

impl World {
    pub(super) fn draw(random: &mut Random) -> Self {
        let profile = match random.below(9) {
            0 => Profile::K19,
            1 => Profile::K110,
            2 => Profile::K137,
            3 => Profile::K137Dedupe,
            _ => Profile::K125,
        };
        // The rest of the kubelet's sleep. It is at least 15 ms: with less, no plugin could be back
        // in time, and a pod would be lost by chance alone.
        let gaps = Gaps { to_first_batch: random.between(15 * MS, 200 * MS), ..Behaviour::default().gaps };
        let behaviour = Behaviour { profile, topology_manager: random.chance(0.3), gaps, ..Behaviour::default() };
        // May exceed the time that the daemon stays in doubt after a loss, so that some losses
        // happen when the doubt has ended.
        let mut storm = random.between(8 * SECOND, 24 * SECOND);
        let mut temper = match random.below(6) {
            0 | 1 => Some(Act::RestartDaemon),
            2 => Some(Act::Flap),
            3 => Some(Act::RestartKubelet),
            _ => None,
        };
        let trouble = Trouble::draw(random);
        if trouble == Trouble::StuckLists {
            // The last change of the list coincides with the daemon's last Register; the stuck
            // lists arrive after both.
            storm = random.between(12 * SECOND, 15 * SECOND);
            temper = Some(Act::Flap);
        }
        let mut stranger = random.chance(0.25).then(|| {
            let from = random.between(Duration::ZERO, storm - SECOND);
            Visit { from, until: random.between(from, storm), habits: Habits::draw(random) }
        });
        // A kubelet that closes the former connection at every Register, and two plugins that want
        // the resource: they compete until one of them holds a truce.
        if let Some(visit) = stranger.as_mut().filter(|visit| profile.is_alpha() && visit.habits.insists) {
            storm = FIGHT;
            temper = Some(Act::AddPod);
            (visit.from, visit.until) = (SECOND, FIGHT);
        }
        World {
            behaviour,
            faults: trouble.faults(storm),
            storm,
            temper,
            has_nics: random.chance(0.3),
            stranger,
            has_guest: random.chance(0.1),
        }
    }

    /// The next act.
    pub(super) fn act(&self, random: &mut Random) -> Act {
        if let Some(act) = self.temper.filter(|_| random.chance(0.5)) {
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
enum Trouble {
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
    Storm,
}

impl Trouble {
    fn draw(random: &mut Random) -> Self {
        use Trouble::{BadLists, Nothing, Schedules, SlowEnds, SlowRegisters, Storm, StuckLists};
        [Nothing, Schedules, StuckLists, BadLists, SlowRegisters, SlowEnds, Storm][random.below(7)]
    }

    fn faults(self, until: Duration) -> Faults {
        let slow = Odds { delays: 0.6, ..Odds::default() };
        let all = |hooks: &[Hook], odds: Odds| hooks.iter().fold(Faults::schedules(until), |faults, hook| faults.with(*hook, odds));
        match self {
            Trouble::Nothing => Faults::none(),
            Trouble::Schedules => Faults::schedules(until),
            Trouble::StuckLists => all(&[Hook::OnList], Odds { stalls: 0.5, ..Odds::default() }),
            Trouble::BadLists => all(&[Hook::OnList], Odds { fails: 0.3, ..Odds::default() }),
            Trouble::SlowRegisters => {
                let steps =
                    [Hook::AfterRegisterClient, Hook::AfterDial, Hook::AfterOptions, Hook::AfterEndpointSet, Hook::BeforeListAndWatch];
                all(&steps, slow)
            }
            Trouble::SlowEnds => {
                let steps = [Hook::OnStreamEnd, Hook::AfterDeregister, Hook::AfterOptions, Hook::BeforePluginDisconnected];
                all(&steps, slow).with(Hook::OnList, Odds { fails: 0.2, ..Odds::default() })
            }
            Trouble::Storm => Faults::storm(until),
        }
    }
}
