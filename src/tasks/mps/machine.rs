//! The state machine of one control daemon. Pure: time and the results of its steps come in, and
//! the next step goes out.
//!
//! ```text
//!              Look ── it answers ─────────────▶ ready ─▶ BringUp, if not done by this process
//!   Starting ─▶  │                                 │  ▲
//!                └─ no answer ───▶ BringUp ────────┼──┘ its commands were accepted
//!                                   ▲   │          │
//!                   with a backoff  └───┘ failed   └─ Look, every 10 s: no answer ─▶ down, BringUp
//! ```
//!
//! No step ends a control daemon whose resource is shared by MPS: its clients may run, and would
//! lose their GPU. NVIDIA's program refuses to start a second one for the same pipes, so a start is
//! tried also where one may hang. One step runs at a time. If it does not end, no other begins.

use crate::domain::{MpsSetup, MpsState};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;

/// The wait after the first failure. It doubles with each further one.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// The longest wait.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// A control daemon that answered for this time has started well: its end is no repeated failure.
const STEADY: Duration = Duration::from_secs(60);
/// After this time a step is reported as hanging. Each program in it has a limit of its own; only
/// one that cannot be killed takes longer.
const LOOK_MAX: Duration = Duration::from_secs(15);
const STEP_MAX: Duration = Duration::from_secs(300);

/// What a resource has left behind that is no longer shared by MPS.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Left {
    /// The folder of its control daemon.
    pub(super) root: String,
    /// Its GPUs, whose compute mode was set.
    pub(super) gpus: BTreeSet<String>,
}

/// What a resource is to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Want {
    Run(MpsSetup),
    /// No control daemon, and the GPUs in the default mode.
    Stop(Left),
    /// Nothing: it is still held, it has no usable GPU, or another program runs its control daemon.
    Nothing,
}

/// A step for the shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// Asks the control daemon.
    Look,
    /// Starts the control daemon if none answers, and sets the compute mode and the limits.
    BringUp(MpsSetup),
    Stop(Left),
}

impl Step {
    fn max(&self) -> Duration {
        if *self == Step::Look { LOOK_MAX } else { STEP_MAX }
    }
}

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It answers, and has what the step sets up.
    Ready,
    /// No control daemon answers.
    Absent(String),
    /// It does not answer in time.
    Silent(String),
    /// A part of the step failed.
    Failed(String),
    /// The step could not be made, which is no evidence.
    Unknown(String),
    /// It has ended, and the GPUs are in the default mode.
    Stopped,
}

#[derive(Debug)]
struct Running {
    step: Step,
    since: Duration,
    /// Whether it was reported as hanging.
    hangs: bool,
}

#[derive(Debug)]
pub(super) struct Machine {
    want: Want,
    state: MpsState,
    /// The setup that the control daemon has.
    applied: Option<MpsSetup>,
    /// Whether it was asked since the start.
    is_known: bool,
    running: Option<Running>,
    due: Duration,
    /// Failures since it was last steady.
    failures: u32,
    ready_since: Option<Duration>,
    is_stopped: bool,
}

impl Machine {
    pub(super) fn new(now: Duration) -> Self {
        Machine {
            want: Want::Nothing,
            state: MpsState::Starting,
            applied: None,
            is_known: false,
            running: None,
            due: now,
            failures: 0,
            ready_since: None,
            is_stopped: false,
        }
    }

    pub(super) fn state(&self) -> &MpsState {
        &self.state
    }

    pub(super) fn want(&self) -> &Want {
        &self.want
    }

    /// Whether nothing is left to do: a new resource of this name begins again.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped && self.running.is_none()
    }

    pub(super) fn set_want(&mut self, want: Want, now: Duration) {
        if want == self.want {
            return;
        }
        if !matches!(want, Want::Run(_)) {
            (self.applied, self.is_known, self.ready_since) = (None, false, None);
            self.state = MpsState::Starting;
        }
        (self.want, self.failures, self.due, self.is_stopped) = (want, 0, now, false);
    }

    /// The step to begin now.
    pub(super) fn next(&mut self, now: Duration) -> Option<Step> {
        if let Some(running) = &mut self.running {
            let max = running.step.max();
            if !running.hangs && now >= running.since + max {
                running.hangs = true;
                let long = humantime::format_duration(max);
                self.down(format!(
                    "a program of NVIDIA's driver has not ended for {long}, although it was \
                     killed: the driver hangs"
                ));
            }
            return None;
        }
        if now < self.due {
            return None;
        }
        let step = match &self.want {
            Want::Nothing => return None,
            Want::Stop(_) if self.is_stopped => return None,
            Want::Stop(left) => Step::Stop(left.clone()),
            Want::Run(setup) if self.is_known && self.applied.as_ref() != Some(setup) => {
                Step::BringUp(setup.clone())
            }
            Want::Run(_) => Step::Look,
        };
        self.running = Some(Running { step: step.clone(), since: now, hangs: false });
        Some(step)
    }

    /// When [`Machine::next`] is to be called, if nothing else happens.
    pub(super) fn wakes_at(&self) -> Option<Duration> {
        match (&self.running, &self.want) {
            // A hanging step is reported once; then only its end matters.
            (Some(running), _) => (!running.hangs).then_some(running.since + running.step.max()),
            (None, Want::Nothing) => None,
            (None, Want::Stop(_)) if self.is_stopped => None,
            (None, _) => Some(self.due),
        }
    }

    /// The running step has ended. `poll` is when a control daemon that answers is asked again.
    pub(super) fn ended(&mut self, outcome: Outcome, now: Duration, poll: Duration) {
        let Some(Running { step, .. }) = self.running.take() else { return };
        let is_for_run = matches!(self.want, Want::Run(_));
        match (step, outcome) {
            (Step::Stop(_), Outcome::Stopped) => {
                self.is_stopped = matches!(self.want, Want::Stop(_));
                return;
            }
            // Another want came during the step: its own first step follows at once.
            (Step::Stop(_), _) if is_for_run => return,
            (Step::Look | Step::BringUp(_), _) if !is_for_run => return,
            (step, Outcome::Ready) => {
                self.is_known = true;
                self.state = MpsState::Ready;
                let since = *self.ready_since.get_or_insert(now);
                if now.saturating_sub(since) >= STEADY {
                    self.failures = 0;
                }
                if let Step::BringUp(setup) = step {
                    self.applied = Some(setup);
                }
                let is_done =
                    matches!(&self.want, Want::Run(setup) if self.applied.as_ref() == Some(setup));
                self.due = if is_done { poll } else { now };
                return;
            }
            (_, Outcome::Absent(why)) => {
                (self.is_known, self.applied) = (true, None);
                // At the first time there is nothing to wait for.
                let was_steady = self
                    .ready_since
                    .take()
                    .is_some_and(|since| now.saturating_sub(since) >= STEADY);
                if was_steady {
                    self.failures = 0;
                }
                // Until a start was tried, it is only not started yet.
                if self.state != MpsState::Starting || self.failures > 0 {
                    self.down(why);
                }
                self.due = now + wait(self.failures);
                self.failures = self.failures.saturating_add(1);
                return;
            }
            (_, Outcome::Unknown(_)) if self.state == MpsState::Ready => {}
            (_, Outcome::Silent(why)) => {
                (self.is_known, self.applied, self.ready_since) = (true, None, None);
                self.down(why);
            }
            (_, Outcome::Failed(why) | Outcome::Unknown(why)) => {
                self.ready_since = None;
                self.down(why);
            }
            (_, Outcome::Stopped) => {}
        }
        self.failures = self.failures.saturating_add(1);
        self.due = now + wait(self.failures);
    }

    fn down(&mut self, why: String) {
        self.state = MpsState::Down { why };
    }
}

fn wait(failures: u32) -> Duration {
    match failures.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => RETRY_MIN.saturating_mul(1 << doublings.min(16)).min(RETRY_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn setup(gpu: &str) -> MpsSetup {
        MpsSetup {
            root: "/run/nvidia/mps".into(),
            gpus: BTreeSet::from([gpu.to_owned()]),
            replicas: 4,
            memory_mib: None,
            thread_percentage: None,
        }
    }

    fn wanted(gpu: &str) -> Machine {
        let mut machine = Machine::new(at(0));
        machine.set_want(Want::Run(setup(gpu)), at(0));
        machine
    }

    /// Expects this step at this time, and ends it with this outcome.
    fn step(machine: &mut Machine, now: Duration, expected: &Step, outcome: Outcome) {
        assert_eq!(machine.next(now).as_ref(), Some(expected), "at {now:?}");
        assert_eq!(machine.next(now), None, "one step at a time");
        machine.ended(outcome, now, now + POLL);
    }

    fn absent() -> Outcome {
        Outcome::Absent("no control daemon".into())
    }

    fn why(machine: &Machine) -> &str {
        match machine.state() {
            MpsState::Down { why } => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_a_control_daemon_it_is_started_and_then_asked_periodically() {
        let (mut machine, up) = (wanted("a"), Step::BringUp(setup("a")));
        assert_eq!((machine.state(), machine.wakes_at()), (&MpsState::Starting, Some(at(0))));
        step(&mut machine, at(0), &Step::Look, absent());
        assert_eq!(machine.state(), &MpsState::Starting, "nothing has failed yet");
        step(&mut machine, at(0), &up, Outcome::Ready);
        assert_eq!((machine.state(), machine.wakes_at()), (&MpsState::Ready, Some(at(10))));
        assert_eq!(machine.next(at(9)), None);
        step(&mut machine, at(10), &Step::Look, Outcome::Ready);
        assert_eq!(machine.wakes_at(), Some(at(20)));
    }

    #[test]
    fn one_that_already_answers_is_ready_at_once_and_gets_its_limits() {
        let mut machine = wanted("a");
        step(&mut machine, at(0), &Step::Look, Outcome::Ready);
        assert_eq!(machine.state(), &MpsState::Ready);
        step(&mut machine, at(0), &Step::BringUp(setup("a")), Outcome::Ready);
        assert_eq!(machine.wakes_at(), Some(at(10)));
        // Another GPU: it gets its mode and its limit. Meanwhile the shares stay.
        machine.set_want(Want::Run(setup("b")), at(3));
        step(&mut machine, at(3), &Step::BringUp(setup("b")), Outcome::Ready);
        assert_eq!((machine.state(), machine.wakes_at()), (&MpsState::Ready, Some(at(13))));
    }

    #[test]
    fn one_that_dies_is_down_until_it_answers_again_and_starts_wait_longer() {
        let (mut machine, up) = (wanted("a"), Step::BringUp(setup("a")));
        step(&mut machine, at(0), &Step::Look, Outcome::Ready);
        step(&mut machine, at(0), &up, Outcome::Ready);
        // After a steady time it is started again at once.
        step(&mut machine, at(100), &Step::Look, absent());
        assert_eq!(why(&machine), "no control daemon");
        step(&mut machine, at(100), &up, Outcome::Ready);
        assert_eq!(machine.state(), &MpsState::Ready);
        let mut now = at(100);
        let mut waits = Vec::new();
        for _ in 0..9 {
            now = machine.wakes_at().unwrap();
            step(&mut machine, now, &Step::Look, absent());
            waits.push((machine.wakes_at().unwrap() - now).as_secs());
            now = machine.wakes_at().unwrap();
            step(&mut machine, now, &up, Outcome::Ready);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        step(&mut machine, now + at(60), &Step::Look, Outcome::Ready);
        step(&mut machine, now + at(70), &Step::Look, absent());
        assert_eq!(machine.wakes_at(), Some(now + at(70)), "it was steady");
    }

    #[test]
    fn a_failed_start_is_tried_again_with_a_growing_pause() {
        let (mut machine, up) = (wanted("a"), Step::BringUp(setup("a")));
        step(&mut machine, at(0), &Step::Look, absent());
        let mut waits = Vec::new();
        for _ in 0..8 {
            let now = machine.wakes_at().unwrap();
            step(&mut machine, now, &up, Outcome::Failed("no compute mode".into()));
            assert_eq!(why(&machine), "no compute mode");
            waits.push((machine.wakes_at().unwrap() - now).as_secs());
        }
        assert_eq!(waits, [2, 4, 8, 16, 32, 60, 60, 60]);
        // A change of the configuration may have removed the cause.
        machine.set_want(Want::Run(setup("b")), at(1000));
        assert_eq!(machine.wakes_at(), Some(at(1000)));
    }

    #[test]
    fn a_silent_one_is_down_and_a_start_is_tried() {
        let (mut machine, up) = (wanted("a"), Step::BringUp(setup("a")));
        let silent = || Outcome::Silent("no answer within 5s".into());
        step(&mut machine, at(0), &Step::Look, Outcome::Ready);
        step(&mut machine, at(0), &up, Outcome::Ready);
        step(&mut machine, at(10), &Step::Look, silent());
        assert_eq!(why(&machine), "no answer within 5s");
        step(&mut machine, at(11), &up, silent());
        step(&mut machine, at(13), &up, Outcome::Ready);
        assert_eq!(machine.state(), &MpsState::Ready);
    }

    #[test]
    fn what_cannot_be_asked_keeps_its_state() {
        let unknown = || Outcome::Unknown("nvidia-cuda-mps-control was not found".into());
        let mut machine = wanted("a");
        step(&mut machine, at(0), &Step::Look, unknown());
        assert_eq!(why(&machine), "nvidia-cuda-mps-control was not found");
        assert_eq!(machine.wakes_at(), Some(at(1)));
        step(&mut machine, at(1), &Step::Look, Outcome::Ready);
        step(&mut machine, at(1), &Step::BringUp(setup("a")), Outcome::Ready);
        step(&mut machine, at(11), &Step::Look, unknown());
        assert_eq!(machine.state(), &MpsState::Ready);
    }

    #[test]
    fn a_hanging_step_is_reported_once_and_nothing_else_begins() {
        let mut machine = wanted("a");
        assert_eq!(machine.next(at(0)), Some(Step::Look));
        assert_eq!(machine.wakes_at(), Some(LOOK_MAX));
        assert_eq!(machine.next(LOOK_MAX), None);
        assert!(why(&machine).contains("the driver hangs"), "{}", why(&machine));
        assert_eq!((machine.wakes_at(), machine.next(at(5000))), (None, None));
        machine.ended(Outcome::Ready, at(6000), at(6010));
        assert_eq!(machine.state(), &MpsState::Ready);
        assert_eq!(machine.next(at(6000)), Some(Step::BringUp(setup("a"))));
    }

    #[test]
    fn a_stop_is_tried_until_it_has_succeeded_and_yields_to_a_new_want() {
        let left = Left { root: "/run/nvidia/mps".into(), gpus: setup("a").gpus };
        let mut machine = wanted("a");
        step(&mut machine, at(0), &Step::Look, Outcome::Ready);
        // The change comes during a step, whose result no longer matters.
        assert_eq!(machine.next(at(0)), Some(Step::BringUp(setup("a"))));
        machine.set_want(Want::Stop(left.clone()), at(1));
        machine.ended(Outcome::Ready, at(2), at(12));
        assert_eq!(machine.state(), &MpsState::Starting);
        step(&mut machine, at(2), &Step::Stop(left.clone()), Outcome::Failed("clients".into()));
        assert!(!machine.is_stopped());
        step(&mut machine, at(3), &Step::Stop(left.clone()), Outcome::Stopped);
        assert!(machine.is_stopped());
        assert_eq!((machine.next(at(4)), machine.wakes_at()), (None, None));

        machine.set_want(Want::Run(setup("a")), at(5));
        assert!(!machine.is_stopped());
        step(&mut machine, at(5), &Step::Look, absent());
        machine.set_want(Want::Nothing, at(6));
        assert_eq!((machine.next(at(7)), machine.wakes_at()), (None, None));
    }
}
