//! One run of a node by its seed.
//!
//! 1. Faults: one to five minutes with pods that come and go, crashes at every step of Prepare and
//!    Unprepare, power cuts, reboots, restarts of the kubelet, an API server that is slow or does
//!    not answer, claims that are allocated again or replaced by others of the same name.
//! 2. Idle: every bound pod runs, and the slices are right.
//! 3. The end: all pods are deleted, and no claim is left.

use super::cluster::{self, Request};
use super::kubelet::Habits;
use super::oracles::{self, Covered, Violation};
use super::world::{Crash, MS, SECOND, Step, World, has_parts, with_parts};
use crate::domain::DeviceClass;
use crate::lab::sim::executor::Executor;
use crate::lab::sim::random::Random;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The time after which everything that was begun is done: calls of 45 s, repetitions after 90 s,
/// containers that take 40 s to end, and a loop of 60 s.
const SETTLED: Duration = Duration::from_secs(420);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    AddPod,
    DeletePod,
    ForceDelete,
    /// The daemon dies, or the power is cut, at a step.
    Crash,
    KillDaemon,
    CutPower,
    Reboot,
    RestartKubelet,
    /// The API server does not answer for a time, or answers late.
    Api,
    /// A standing claim is deleted, and another one of its name is created.
    ReplaceClaim,
    /// A restart or an update of the devices' driver.
    ChangeDriver,
}

/// The weights of the acts, about 100 in all.
const ACTS: [(Act, usize); 11] = [
    (Act::AddPod, 32),
    (Act::DeletePod, 12),
    (Act::ForceDelete, 9),
    (Act::Crash, 18),
    (Act::KillDaemon, 4),
    (Act::CutPower, 2),
    (Act::Reboot, 2),
    (Act::RestartKubelet, 6),
    (Act::Api, 6),
    (Act::ReplaceClaim, 4),
    (Act::ChangeDriver, 5),
];

/// The result of a run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) violation: Option<Violation>,
    pub(super) log: Vec<String>,
    pub(super) crashes: BTreeMap<(Step, Crash), u64>,
    pub(super) covered: Covered,
}

struct Run {
    executor: Executor,
    world: Arc<World>,
    random: Random,
}

pub(super) fn run(seed: u64) -> Outcome {
    // Separate from the executor's own numbers, so that one more draw there does not change the
    // acts.
    let mut random = Random::new(seed ^ 0xc1a1_0000_5eed_0f5c);
    let executor = Executor::new(seed);
    with_parts(seed % 8 == 3);
    let habits = Habits { appends: random.chance(0.5), unprepares_shared: random.chance(0.3) };
    let world = World::new(executor.handle(), habits);
    world.handle.spawn(cluster::run(Arc::clone(&world)));
    // Then only the end of its processes proves the end of a claim that was unprepared early.
    world.cluster().hides_ends = seed % 8 == 5;
    world.start_daemon();
    world.start_kubelet();
    let mut run = Run { executor, world, random };
    run.inject_faults();
    run.idle();
    run.end();
    run.outcome()
}

impl Run {
    /// Runs for a time, or to the first violated oracle.
    fn run_for(&mut self, time: Duration) {
        let world = Arc::clone(&self.world);
        let limit = world.handle.now() + time;
        self.executor.run_until(limit, || {
            let mut oracles = world.oracles();
            oracles.check(&world.machine(), world.daemon().is_some(), world.handle.now());
            oracles.violation.is_some()
        });
    }

    fn is_over(&self) -> bool {
        self.world.oracles().violation.is_some()
    }

    fn inject_faults(&mut self) {
        let length = self.random.between(60 * SECOND, 300 * SECOND);
        let acts = 12 + self.random.below(24);
        let bias = match self.random.below(4) {
            0 => Some(Act::Crash),
            1 => Some(Act::ForceDelete),
            _ => None,
        };
        let mut times: Vec<Duration> =
            (0..acts).map(|_| self.random.between(Duration::ZERO, length)).collect();
        times.sort();
        // The devices are published first.
        self.run_for(10 * SECOND);
        for count in [2, 1] {
            self.add_claim(None, count);
        }
        for time in times {
            let now = self.world.handle.now();
            self.run_for((10 * SECOND + time).saturating_sub(now));
            if self.is_over() {
                return;
            }
            let act = bias.filter(|_| self.random.chance(0.3)).unwrap_or_else(|| self.draw());
            self.act(act);
        }
    }

    fn draw(&mut self) -> Act {
        let mut nth = self.random.below(ACTS.iter().map(|(_, weight)| weight).sum());
        for (act, weight) in ACTS {
            match nth.checked_sub(weight) {
                Some(left) => nth = left,
                None => return act,
            }
        }
        Act::AddPod
    }

    fn act(&mut self, act: Act) {
        let world = Arc::clone(&self.world);
        world.log(format_args!("{act:?}"));
        match act {
            Act::AddPod => self.add_pod(),
            Act::DeletePod => {
                if let Some(uid) = self.any_pod() {
                    world.cluster().delete_pod(&uid);
                }
            }
            Act::ForceDelete => {
                if let Some(uid) = self.any_pod() {
                    let now = world.handle.now();
                    let mut cluster = world.cluster();
                    cluster.pods.remove(&uid);
                    cluster.control(now);
                    drop(cluster);
                    // Its controller makes another one, which gets the same devices.
                    self.add_pod();
                }
            }
            Act::Crash => {
                let step = Step::ALL[self.random.below(Step::ALL.len())];
                let crash = if self.random.chance(0.4) { Crash::PowerCut } else { Crash::Kill };
                world.arm(Some((step, crash)));
                if self.random.chance(0.5) {
                    self.add_pod();
                } else if let Some(uid) = self.any_pod() {
                    world.cluster().delete_pod(&uid);
                }
            }
            Act::KillDaemon => self.crash(Crash::Kill),
            Act::CutPower => self.crash(Crash::PowerCut),
            Act::Reboot => drop(self.world.handle.spawn(async move { world.boot(false).await })),
            Act::RestartKubelet => {
                self.world.handle.spawn(async move {
                    world.kill_kubelet();
                    world.pause(SECOND, 5 * SECOND).await;
                    world.start_kubelet();
                });
            }
            Act::Api => self.disturb_api(),
            Act::ReplaceClaim => {
                let standing = world.cluster().standing_claims();
                if let Some(name) = standing.get(self.random.below(standing.len().max(1))) {
                    let now = world.handle.now();
                    world.cluster().forget_claim(name, now);
                    let count = 1 + self.random.below(2);
                    self.add_claim(Some(name.clone()), count);
                }
            }
            Act::ChangeDriver => world.machine().driver += 1,
        }
    }

    fn crash(&self, crash: Crash) {
        let world = Arc::clone(&self.world);
        self.world.handle.spawn(async move { world.crash(crash).await });
    }

    fn disturb_api(&mut self) {
        let time = self.random.between(SECOND, 40 * SECOND);
        let is_away = self.random.chance(0.4);
        let slowest = self.random.between(SECOND, 20 * SECOND);
        let world = Arc::clone(&self.world);
        self.world.handle.spawn(async move {
            {
                let mut cluster = world.cluster();
                cluster.is_away |= is_away;
                cluster.slowest = slowest;
            }
            world.handle.sleep(time).await;
            let mut cluster = world.cluster();
            cluster.is_away = false;
            cluster.slowest = 5 * MS;
        });
    }

    fn any_pod(&mut self) -> Option<String> {
        let pods: Vec<String> = self.world.cluster().pods.keys().cloned().collect();
        pods.get(self.random.below(pods.len().max(1))).cloned()
    }

    /// A claim for GPUs, some with a NIC too, some with access for an administrator. Or one for
    /// parts of a device.
    fn add_claim(&mut self, name: Option<String>, count: usize) -> String {
        let mut requests = vec![Request {
            name: "gpu",
            class: DeviceClass::Gpu,
            count,
            is_admin: self.random.chance(0.05),
        }];
        if self.random.chance(0.3) {
            requests.push(Request {
                name: "nic/fast",
                class: DeviceClass::Nic,
                count: 1,
                is_admin: false,
            });
        }
        if has_parts() && self.random.chance(0.7) {
            let (name, class, is_admin) = ("part", DeviceClass::Fpga, false);
            requests = vec![Request { name, class, count, is_admin }];
        }
        let is_of_template = name.is_none() && self.random.chance(0.7);
        self.world.cluster().create_claim(name, requests, is_of_template)
    }

    fn add_pod(&mut self) {
        if self.random.chance(0.15) {
            let numbers = 1 + self.random.below(2);
            self.world.cluster().create_pod(Vec::new(), numbers);
            // By number and by name, at once.
            if self.random.chance(0.5) {
                return;
            }
        }
        let standing = self.world.cluster().standing_claims();
        let mut claims = Vec::new();
        if self.random.chance(0.45) && !standing.is_empty() {
            claims.push(standing[self.random.below(standing.len())].clone());
        }
        if claims.is_empty() || self.random.chance(0.3) {
            let count = 1 + usize::from(self.random.chance(0.3));
            claims.push(self.add_claim(None, count));
        }
        self.world.cluster().create_pod(claims, 0);
    }

    /// The end of all faults. Everything works from here.
    fn stop_faults(&mut self) {
        self.world.arm(None);
        // A crash under way, or a restart.
        self.run_for(60 * SECOND);
        self.world.arm(None);
        {
            let mut cluster = self.world.cluster();
            cluster.is_away = false;
            cluster.slowest = 5 * MS;
            let by_number: Vec<String> = cluster
                .pods
                .values()
                .filter(|pod| pod.numbers > 0)
                .map(|pod| pod.uid.clone())
                .collect();
            by_number.iter().for_each(|uid| cluster.delete_pod(uid));
        }
        self.world.start_daemon();
        self.world.start_kubelet();
    }

    fn idle(&mut self) {
        if self.is_over() {
            return;
        }
        self.stop_faults();
        let hides_ends = self.world.cluster().hides_ends;
        if hides_ends {
            self.run_for(30 * SECOND);
            let before = oracles::ended(&self.world);
            self.run_for(30 * SECOND);
            self.world.oracles().released(&self.world, &before);
            self.world.cluster().hides_ends = false;
        }
        self.run_for(SETTLED);
        if !self.is_over() {
            self.world.oracles().idle(&self.world);
        }
    }

    fn end(&mut self) {
        if self.is_over() {
            return;
        }
        {
            let mut cluster = self.world.cluster();
            let pods: Vec<String> = cluster.pods.keys().cloned().collect();
            pods.iter().for_each(|uid| cluster.delete_pod(uid));
            let now = self.world.handle.now();
            for name in cluster.standing_claims() {
                cluster.delete_claim(&name, now);
            }
        }
        self.run_for(SETTLED);
        if !self.is_over() {
            self.world.oracles().end(&self.world);
        }
    }

    fn outcome(self) -> Outcome {
        self.world.kill_daemon();
        self.world.kill_kubelet();
        let mut oracles = self.world.oracles();
        Outcome {
            violation: oracles.violation.take(),
            log: self.world.take_log(),
            crashes: std::mem::take(&mut oracles.crashes),
            covered: oracles.covered,
        }
    }
}
