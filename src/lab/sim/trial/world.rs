//! What a seed decides beforehand: the kubelet's version, what goes wrong in it and for how long, what happens most often
//! in this night, and who visits.
//!
//! Nights are of different tempers, since what is rare everywhere is never seen: some have one restart of the daemon after
//! the other, others devices that come and go, or Registers that take their time at every step.

use super::stranger::Habits;
use crate::lab::sim::kubelet::{Behaviour, Gaps, Hook, Profile};
use crate::lab::sim::memory::{Faults, Odds};
use crate::lab::sim::random::Random;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Long enough for a truce.
const FIGHT: Duration = Duration::from_secs(45);

/// Something that happens to the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Act {
    AddPod,
    DeletePod,
    ForceDelete,
    CrashContainer,
    CompletePod,
    RestartKubelet,
    RestartDaemon,
    /// A device goes, and may come back.
    Flap,
    LoseCheckpoint,
    Reboot,
    /// Somebody else asks the kubelet for its pods.
    List,
}

/// How often each of them happens among 100 or so in an even-tempered night.
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

/// A night before it begins.
#[derive(Debug)]
pub(super) struct World {
    pub(super) behaviour: Behaviour,
    pub(super) faults: Faults,
    /// When nothing goes wrong any more.
    pub(super) storm: Duration,
    /// What happens in every second act.
    temper: Option<Act>,
    /// Whether there is a second resource.
    pub(super) has_nics: bool,
    pub(super) stranger: Option<Visit>,
    /// Whether another plugin comes in quiet times, and stays.
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
        // What is left of the kubelet's nap, but not so little that no plugin could be back: then a pod is lost to luck alone.
        let gaps = Gaps { to_first_batch: random.between(15 * MS, 200 * MS), ..Behaviour::default().gaps };
        let behaviour = Behaviour { profile, topology_manager: random.chance(0.3), gaps, ..Behaviour::default() };
        // Longer than the daemon doubts what it lost: some of it is lost in peace.
        let mut storm = random.between(8 * SECOND, 24 * SECOND);
        let mut temper = match random.below(6) {
            0 | 1 => Some(Act::RestartDaemon),
            2 => Some(Act::Flap),
            3 => Some(Act::RestartKubelet),
            _ => None,
        };
        let trouble = Trouble::draw(random);
        if trouble == Trouble::StuckLists {
            // The last change of the list falls in with the daemon's last Register, and what was stuck comes after both.
            storm = random.between(12 * SECOND, 15 * SECOND);
            temper = Some(Act::Flap);
        }
        let mut stranger = random.chance(0.25).then(|| {
            let from = random.between(Duration::ZERO, storm - SECOND);
            Visit { from, until: random.between(from, storm), habits: Habits::draw(random) }
        });
        // A kubelet that closes the former connection at every Register, and two who want the resource: they fight until one
        // of them gives in.
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

    /// What happens next.
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

/// What goes wrong inside the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    Nothing,
    /// Everything takes another time and comes in another order.
    Schedules,
    /// Lists that are looked at late, one after the other.
    StuckLists,
    /// Lists that cannot be read: that ends their stream.
    BadLists,
    /// Registers that take their time at every step, so that old streams end in the midst of them.
    SlowRegisters,
    /// Goroutines that clear up late, after streams of which many end.
    SlowEnds,
    /// Everything fails now and then, and the kubelet dies.
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
