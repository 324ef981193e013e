//! One node's night, by its seed: what is done to it, in three acts.
//!
//! 1. Ten seconds in which everything happens: pods come and go, the kubelet and the daemon die, devices vanish, and
//!    every step of the kubelet may wait, fail or be its last.
//! 2. Quiet. Within a second and a half everything is served again (O5), and stays so; the kubelet is restarted once more
//!    without costing a pod (O6).
//! 3. The kubelet has settled: pods are deleted by force while their containers run, others come (O1). In the end all are
//!    gone, and a while later nothing is held (O3).

use super::daemon::{Daemon, gpu};
use super::durable::{Disk, Hardware};
use super::oracles::{Oracles, Violation};
use crate::sim::kubelet::{Behaviour, Gaps, Hook, Interleaving, PodPhase, PodSpec, Profile, Start};
use crate::sim::memory::{Faults, Node, Odds, Simulation};
use crate::sim::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// The storm's end.
const STORM: Duration = Duration::from_secs(10);
/// The longest stall.
const STALL: Duration = Duration::from_secs(5);
/// When every stall of the storm is over, and what it led to is answered.
const STALLED: Duration = Duration::from_millis(16_500);
/// When the last flow that the storm held has gone on, by a stall of five seconds, and the daemon has had its last doubt.
const CALM: Duration = Duration::from_secs(28);
const DEVICES: usize = 4;

/// What a seed came through.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) violation: Option<Violation>,
    pub(super) events: Vec<String>,
    pub(super) interleavings: BTreeMap<Interleaving, u64>,
    pub(super) hooks: BTreeMap<Hook, u64>,
    pub(super) refusals: u64,
    pub(super) excused: u64,
    pub(super) contested: u64,
    pub(super) grants: u64,
}

struct Night {
    simulation: Simulation,
    node: Node,
    disk: Disk,
    hardware: Hardware,
    daemon: Daemon,
    oracles: Oracles,
    random: Random,
    pods: u64,
}

pub(super) fn run(seed: u64) -> Outcome {
    // Apart from the node's own chance, so that one more draw there does not make another story.
    let mut random = Random::new(seed ^ 0x5eed_0f5c_e7a1_0000);
    let profile = match random.below(8) {
        0 => Profile::K110,
        1 => Profile::K137,
        2 => Profile::K137Dedupe,
        _ => Profile::K125,
    };
    // A real kubelet was seen to admit sooner than its code suggests.
    let gaps = Gaps { to_first_batch: random.between(64 * MS, 150 * MS), ..Behaviour::default().gaps };
    let behaviour = Behaviour { profile, topology_manager: random.chance(0.3), gaps, ..Behaviour::default() };
    let slow = Odds { delays: 0.6, ..Odds::default() };
    let faults = match random.below(5) {
        0 => Faults::none(),
        // Registers that take their time at every step, so that old streams end in the midst of them.
        4 => [Hook::AfterRegisterClient, Hook::AfterDial, Hook::AfterOptions, Hook::AfterEndpointSet, Hook::BeforeListAndWatch]
            .into_iter()
            .fold(Faults::schedules(STORM), |faults, hook| faults.with(hook, slow)),
        1 => Faults::schedules(STORM),
        // Lists that are looked at late, one after the other.
        2 => Faults::schedules(STORM).with(Hook::OnList, Odds { stalls: 0.3, fails: 0.05, ..Odds::default() }),
        _ => Faults::storm(STORM),
    };
    let simulation = Simulation::new(seed, behaviour, faults);
    let node = simulation.node();
    let (disk, hardware) = (Disk::default(), Hardware::new(DEVICES));
    node.start_kubelet(Start::default());
    node.supervise_kubelet(200 * MS);
    let daemon = Daemon::start(&node, &disk, &hardware);
    let mut night = Night { simulation, node, disk, hardware, daemon, oracles: Oracles::default(), random, pods: 0 };
    night.storm();
    night.calm();
    night.settled();
    night.end();
    night.outcome()
}

impl Night {
    fn now(&self) -> Duration {
        self.node.handle().now()
    }

    /// Goes on until a time, or to the first oracle that does not hold.
    fn run_to(&mut self, time: Duration) {
        let (node, disk, daemon, oracles) = (self.node.clone(), self.disk.clone(), self.daemon.clone(), &mut self.oracles);
        let left = time.saturating_sub(node.handle().now());
        self.simulation.run_until(left, |view| {
            oracles.look(view, &disk, &daemon, node.handle().now());
            oracles.violation.is_some()
        });
    }

    fn is_over(&self) -> bool {
        self.oracles.violation.is_some()
    }

    fn storm(&mut self) {
        let acts = 8 + self.random.below(16);
        let mut times: Vec<Duration> = (0..acts).map(|_| self.random.between(Duration::ZERO, STORM)).collect();
        times.sort();
        for time in times {
            self.run_to(time);
            if self.is_over() {
                return;
            }
            self.act();
        }
        self.run_to(STORM);
        (0..DEVICES).for_each(|n| self.hardware.find(n));
        if self.daemon.process.is_dead() {
            self.start_daemon();
        }
    }

    fn act(&mut self) {
        let down = self.random.between(Duration::ZERO, 500 * MS);
        match self.random.below(20) {
            0..6 => self.add_pod(),
            6..9 => self.with_pod(|node, uid| node.delete_pod(uid)),
            9 => self.force_delete(),
            10 => self.with_pod(|node, uid| node.crash_container(uid, "main")),
            11 => self.with_pod(|node, uid| node.complete_pod(uid)),
            12 | 13 => self.node.restart_kubelet(down, Start::default()),
            14 | 15 => self.restart_daemon(down),
            16 | 17 => {
                let n = self.random.below(DEVICES);
                self.hardware.lose(n);
                if self.random.chance(0.5) {
                    let now = self.now();
                    let soon = self.random.between(Duration::ZERO, 200 * MS);
                    self.run_to(now + soon);
                    self.hardware.find(n);
                }
            }
            18 if self.random.chance(0.3) => {
                self.oracles.amnesia = true;
                if self.random.chance(0.5) { self.node.delete_checkpoint() } else { self.node.corrupt_checkpoint() }
            }
            19 if self.random.chance(0.3) => {
                self.node.reboot(SECOND + down);
                self.start_daemon();
            }
            _ => {
                let node = self.node.clone();
                // Somebody else's metrics.
                self.node.handle().spawn(async move { drop(node.list_pods().await) });
            }
        }
    }

    fn restart_daemon(&mut self, down: Duration) {
        self.daemon.process.kill();
        let now = self.now();
        self.run_to(now + down);
        self.start_daemon();
    }

    fn start_daemon(&mut self) {
        self.daemon = Daemon::start(&self.node, &self.disk, &self.hardware);
    }

    fn add_pod(&mut self) {
        self.pods += 1;
        let uid = format!("u{}", self.pods);
        let mut spec = PodSpec::with_uid(&uid, "default", format!("pod-{}", self.pods));
        if self.random.chance(0.4) {
            spec = spec.init("warm", &gpu(), 1);
        }
        if self.random.chance(0.1) {
            spec = spec.sidecar("side", &gpu(), 1);
        }
        let count = if self.random.chance(0.2) { 2 } else { 1 };
        spec = spec.app("main", &gpu(), count);
        if self.random.chance(0.05) {
            spec = spec.without_room();
        }
        self.node.add_pod(spec);
    }

    fn with_pod(&mut self, act: impl FnOnce(&Node, &str)) {
        let uids: Vec<String> = self.node.view(|view| view.pods().iter().map(|pod| pod.spec.uid.clone()).collect());
        if let Some(uid) = uids.get(self.random.below(uids.len().max(1))) {
            act(&self.node, uid);
        }
    }

    /// Of pods that run: one that was rejected is being killed, and has nothing that could be given to two.
    fn force_delete(&mut self) {
        let running: Vec<String> = self.running().into_iter().collect();
        if let Some(uid) = running.get(self.random.below(running.len().max(1))) {
            self.node.force_delete_pod(uid);
        }
    }

    fn running(&self) -> BTreeSet<String> {
        let running = |view: &crate::sim::kubelet::View<'_>| {
            let pods = view.pods().iter().filter(|pod| pod.phase == PodPhase::Running);
            pods.map(|pod| pod.spec.uid.clone()).collect()
        };
        self.node.view(running)
    }

    fn served(&mut self) {
        if self.is_over() {
            return;
        }
        let (now, daemon, oracles) = (self.now(), &self.daemon, &mut self.oracles);
        self.node.view(|view| oracles.served(view, daemon, now));
    }

    fn calm(&mut self) {
        self.run_to(STALLED);
        // A list that a dead daemon sent may arrive after those of the next one, and nothing tells; that heals later.
        if !self.is_over() && self.daemon.since + STALL < STORM {
            let (now, daemon, oracles) = (self.now(), &self.daemon, &mut self.oracles);
            self.node.view(|view| oracles.answered(view, daemon, now));
        }
        self.run_to(CALM);
        self.oracles.quiet = true;
        self.run_to(CALM + 1500 * MS);
        self.served();
        if self.is_over() {
            return;
        }
        self.add_pod();
        let at = self.now() + 5 * SECOND;
        self.run_to(at);
        let running = self.running();
        let down = self.random.between(Duration::ZERO, 2 * SECOND);
        self.node.restart_kubelet(down, Start::default());
        let at = self.now() + 6 * SECOND;
        self.run_to(at);
        self.served();
        let now = self.now();
        let oracles = &mut self.oracles;
        self.node.view(|view| oracles.kept(view, &running, now));
    }

    fn settled(&mut self) {
        // A minute after the last restart nothing has been forgotten any more that this kubelet gave.
        let at = self.now() + 80 * SECOND;
        self.run_to(at);
        self.oracles.quiet = false;
        for _ in 0..4 {
            if self.is_over() {
                return;
            }
            self.add_pod();
            let at = self.now() + 4 * SECOND;
            self.run_to(at);
            self.force_delete();
            self.add_pod();
            let at = self.now() + 2 * SECOND;
            self.run_to(at);
        }
        self.served();
    }

    fn end(&mut self) {
        if self.is_over() {
            return;
        }
        for n in 1..=self.pods {
            self.node.delete_pod(&format!("u{n}"));
        }
        let at = self.now() + 180 * SECOND;
        self.run_to(at);
        let (now, disk, oracles) = (self.now(), &self.disk, &mut self.oracles);
        if oracles.violation.is_none() {
            self.node.view(|view| oracles.released(view, disk, now));
        }
    }

    fn outcome(self) -> Outcome {
        let Oracles { violation, refusals, excused, .. } = self.oracles;
        let contested = u64::from(self.daemon.inner.lock().machine.is_contested());
        let grants = self.disk.entries().iter().filter(|entry| matches!(entry, crate::domain::Entry::Grant(_))).count() as u64;
        self.node.view(|view| Outcome {
            violation,
            events: view.events().iter().map(ToString::to_string).collect(),
            interleavings: view.interleavings().clone(),
            hooks: view.hooks().clone(),
            refusals,
            excused,
            contested,
            grants,
        })
    }
}
