//! One run of a node by its seed, in three phases.
//!
//! 1. A fault phase of 8 to 24 seconds (45 in some runs) with every kind of event. Pods come and
//!    go, the kubelet and the daemon die, devices vanish, another plugin takes the resource. Every
//!    step of the kubelet may wait, fail or be its last.
//! 2. Idle. Within a second and a half everything is served again (O5), and stays so. Another
//!    plugin that takes the resource silently has it for at most a second and a half. After a
//!    restart of the daemon, and of the kubelet, everything is served within 50 ms, and no restart
//!    costs a pod (O6).
//! 3. The kubelet has settled: pods are deleted by force while their containers run, others come
//!    (O1). In the end all pods are deleted, and three minutes later nothing is held (O3).

use super::daemon::Daemon;
use super::durable::Disk;
use super::hardware::{Hardware, gpu, nic};
use super::oracles::{Oracles, Violation};
use super::parameters::{Act, Parameters, RivalStay};
use super::rival_plugin;
use crate::lab::sim::kubelet::{Hook, Interleaving, PodPhase, PodSpec, Start};
use crate::lab::sim::memory::{Node, Simulation};
use crate::lab::sim::random::Random;
use crate::registration::core::State;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// The longest stall.
const STALL: Duration = Duration::from_secs(5);
/// The limit until everything is served after an event that the daemon sees: a new kubelet, a
/// stream's end, its own start.
const SIGNALLED: Duration = Duration::from_millis(50);
/// The same limit after a silent change.
const SILENT: Duration = Duration::from_millis(1500);
/// The time after the fault phase until every stall of it is over, and its effects are answered.
const STALLS_OVER_AFTER: Duration = Duration::from_millis(6500);
/// The time after the fault phase until its effects are over: the last held flow has continued (a
/// stall of five seconds), the daemon has audited the kubelet (a minute more), and its last doubt
/// is resolved.
const EFFECTS_OVER_AFTER: Duration = Duration::from_secs(80);

/// The result of a run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) violation: Option<Violation>,
    pub(super) events: Vec<String>,
    pub(super) interleavings: BTreeMap<Interleaving, u64>,
    pub(super) hooks: BTreeMap<Hook, u64>,
    pub(super) refusals: u64,
    pub(super) excused: u64,
    pub(super) contested: u64,
    pub(super) taken: u64,
    pub(super) grants: u64,
}

struct Run {
    simulation: Simulation,
    node: Node,
    disk: Disk,
    hardware: Hardware,
    daemon: Daemon,
    oracles: Oracles,
    random: Random,
    parameters: Parameters,
    pods: u64,
}

pub(super) fn run(seed: u64) -> Outcome {
    // Separate from the node's own random numbers, so that one more draw there does not change the
    // scenario.
    let mut random = Random::new(seed ^ 0x5eed_0f5c_e7a1_0000);
    let parameters = Parameters::draw(&mut random);
    let simulation = Simulation::new(seed, parameters.behaviour.clone(), parameters.faults.clone());
    let node = simulation.node();
    let (disk, hardware) = (Disk::default(), Hardware::new(parameters.has_nics));
    node.start_kubelet(Start::default());
    node.supervise_kubelet(200 * MS);
    let daemon = Daemon::start(&node, &disk, &hardware);
    let oracles = Oracles::new(hardware.clone(), parameters.behaviour.profile);
    let mut run =
        Run { simulation, node, disk, hardware, daemon, oracles, random, parameters, pods: 0 };
    run.inject_faults();
    run.idle();
    run.settled();
    run.end();
    run.outcome()
}

impl Run {
    fn now(&self) -> Duration {
        self.node.handle().now()
    }

    /// Runs until a time, or to the first violated oracle.
    fn run_to(&mut self, time: Duration) {
        let (node, disk, daemon, oracles) =
            (self.node.clone(), self.disk.clone(), self.daemon.clone(), &mut self.oracles);
        let left = time.saturating_sub(node.handle().now());
        self.simulation.run_until(left, |view| {
            oracles.check(view, &disk, &daemon, node.handle().now());
            oracles.violation.is_some()
        });
    }

    fn is_over(&self) -> bool {
        self.oracles.violation.is_some()
    }

    fn inject_faults(&mut self) {
        self.schedule_rival();
        let (acts, faults_until) = (8 + self.random.below(16), self.parameters.faults_until);
        let mut times: Vec<Duration> =
            (0..acts).map(|_| self.random.between(Duration::ZERO, faults_until)).collect();
        times.sort();
        for time in times {
            self.run_to(time);
            if self.is_over() {
                return;
            }
            self.act();
        }
        self.run_to(faults_until);
        (0..self.hardware.len()).for_each(|n| self.hardware.find(n));
        if self.daemon.process.is_dead() {
            self.start_daemon();
        }
    }

    fn schedule_rival(&mut self) {
        let Some(RivalStay { from, until, habits }) = self.parameters.rival else { return };
        let version =
            if self.parameters.behaviour.profile.is_alpha() { "v1alpha2" } else { "v1beta1" };
        let (node, devices, answers) =
            (self.node.clone(), self.hardware.devices(&gpu()), self.oracles.rival_answers.clone());
        // A goroutine of the kubelet may be stuck beyond its end.
        self.oracles.rival_effects = Some(from..=until + STALL + SECOND);
        self.node.handle().spawn(async move {
            node.handle().sleep_until(from).await;
            rival_plugin::run_until_killed(&node, version, devices, habits, until - from, &answers);
        });
    }

    fn act(&mut self) {
        let down = self.random.between(Duration::ZERO, 500 * MS);
        match self.parameters.act(&mut self.random) {
            Act::AddPod => self.add_pod(),
            Act::DeletePod => self.with_pod(|node, uid| node.delete_pod(uid)),
            Act::ForceDelete => self.force_delete(),
            Act::CrashContainer => self.with_pod(|node, uid| node.crash_container(uid, "main")),
            Act::CompletePod => self.with_pod(|node, uid| node.complete_pod(uid)),
            Act::RestartKubelet => self.node.restart_kubelet(down, Start::default()),
            // An upgrade in place takes almost no time: the kubelet still processes the old
            // streams' end.
            Act::RestartDaemon if self.random.chance(0.5) => self.restart_daemon(down / 100),
            Act::RestartDaemon => self.restart_daemon(down),
            Act::Flap => {
                let n = self.random.below(self.hardware.len());
                self.hardware.lose(n);
                if self.random.chance(0.5) {
                    let now = self.now();
                    let soon = self.random.between(Duration::ZERO, 200 * MS);
                    self.run_to(now + soon);
                    self.hardware.find(n);
                }
            }
            Act::LoseCheckpoint => {
                self.oracles.has_lost_record = true;
                if self.random.chance(0.5) {
                    self.node.delete_checkpoint()
                } else {
                    self.node.corrupt_checkpoint()
                }
            }
            Act::Reboot => {
                self.node.reboot(SECOND + down);
                self.start_daemon();
            }
            Act::List => {
                let node = self.node.clone();
                // A listing by another client, such as a metrics exporter.
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
        if self.parameters.has_nics {
            let resources = &mut spec.containers.last_mut().unwrap().resources;
            match self.random.below(4) {
                0 => _ = resources.insert(nic(), 1),
                // Only shared devices.
                1 => *resources = [(nic(), 2)].into(),
                _ => {}
            }
        }
        if self.random.chance(0.05) {
            spec = spec.without_cpu();
        }
        self.node.add_pod(spec);
    }

    fn with_pod(&mut self, act: impl FnOnce(&Node, &str)) {
        let uids: Vec<String> =
            self.node.view(|view| view.pods().iter().map(|pod| pod.spec.uid.clone()).collect());
        if let Some(uid) = uids.get(self.random.below(uids.len().max(1))) {
            act(&self.node, uid);
        }
    }

    /// Of running pods only: a rejected pod is being killed, and has no device that could be given
    /// twice.
    fn force_delete(&mut self) {
        let running: Vec<String> = self.running().into_iter().collect();
        if let Some(uid) = running.get(self.random.below(running.len().max(1))) {
            self.node.force_delete_pod(uid);
        }
    }

    fn running(&self) -> BTreeSet<String> {
        let running = |view: &crate::lab::sim::kubelet::View<'_>| {
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

    fn served_after(&mut self, time: Duration) {
        let at = self.now() + time;
        self.run_to(at);
        self.served();
    }

    fn served_or_taken_by_rival(&mut self) {
        if !self.is_over() {
            let (now, daemon, oracles) = (self.now(), &self.daemon, &mut self.oracles);
            self.node.view(|view| oracles.served_or_taken_by_rival(view, daemon, now));
        }
    }

    fn idle(&mut self) {
        let faults_until = self.parameters.faults_until;
        self.run_to(faults_until + STALLS_OVER_AFTER);
        // A list of a dead daemon may arrive after those of the next one, unnoticed; that recovers
        // later.
        if !self.is_over() && self.daemon.since + STALL < faults_until {
            let (now, daemon, oracles) = (self.now(), &self.daemon, &mut self.oracles);
            self.node.view(|view| oracles.answered(view, daemon, now));
        }
        // Two plugins that compete for a resource leave it to each other for half a minute each.
        let until = |resource| {
            if let State::Contested { until } = self.daemon.state(resource) {
                Some(until)
            } else {
                None
            }
        };
        let truce = self.hardware.resources().filter_map(until).max();
        let idle_from = truce.map_or(faults_until + EFFECTS_OVER_AFTER, |until| {
            until.max(faults_until + EFFECTS_OVER_AFTER) + SECOND
        });
        self.run_to(idle_from);
        self.oracles.is_idle = true;
        self.run_to(idle_from + 1500 * MS);
        self.served_or_taken_by_rival();
        if self.is_over() {
            return;
        }
        self.oracles.no_registers_since(&self.disk, idle_from, self.node.handle().now());
        self.add_pod();
        let at = self.now() + 5 * SECOND;
        self.run_to(at);
        if self.parameters.has_permanent_rival
            && self.parameters.behaviour.profile.has_allocatable()
        {
            rival_plugin::run_forever(&self.node, "v1beta1", &self.oracles.rival_answers);
            self.served_after(SILENT);
        }
        self.restart_daemon(Duration::ZERO);
        self.served_after(SIGNALLED);
        let at = self.now() + SECOND;
        self.run_to(at);
        let running = self.running();
        let down = self.random.between(Duration::ZERO, 2 * SECOND);
        let before = *self.node.kubelet_socket().borrow();
        self.node.restart_kubelet(down, Start::default());
        let node = self.node.clone();
        self.simulation
            .run_until(6 * SECOND, |_| !matches!(*node.kubelet_socket().borrow(), kubelet if kubelet == before || kubelet.is_none()));
        self.served_after(SIGNALLED);
        let at = self.now() + 6 * SECOND;
        self.run_to(at);
        self.served();
        let now = self.now();
        let oracles = &mut self.oracles;
        self.node.view(|view| oracles.no_pod_lost(view, &running, now));
    }

    fn settled(&mut self) {
        // A minute after the last restart the kubelet no longer loses any of its grants.
        let at = self.now() + 80 * SECOND;
        self.run_to(at);
        self.oracles.is_idle = false;
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
        let at = self.now() + 5 * SECOND;
        self.run_to(at);
        // A list makes the kubelet write its checkpoint, which proves the grants that reached no
        // container.
        self.hardware.lose(0);
        let at = self.now() + SECOND;
        self.run_to(at);
        self.hardware.find(0);
        let at = self.now() + 180 * SECOND;
        self.run_to(at);
        if !self.is_over() {
            let now = self.now();
            self.oracles.released(&self.disk, now);
        }
    }

    fn outcome(self) -> Outcome {
        let Oracles { violation, refusals, excused, taken, .. } = self.oracles;
        let contested = self.disk.lock().truces;
        let grants = self
            .disk
            .entries()
            .iter()
            .filter(|entry| matches!(entry, crate::domain::Entry::Grant(_)))
            .count() as u64;
        self.node.view(|view| Outcome {
            violation,
            events: view.events().iter().map(ToString::to_string).collect(),
            interleavings: view.interleavings().clone(),
            hooks: view.hooks().clone(),
            refusals,
            excused,
            contested,
            taken,
            grants,
        })
    }
}
