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

mod fault_phase;
mod later_phases;

use super::daemon::Daemon;
use super::durable::{Disk, Journal};
use super::hardware::{Hardware, gpu, nic};
use super::oracles::{Oracles, Violation};
use super::parameters::Parameters;
use crate::domain::{DeviceId, ResourceName};
use crate::lab::sim::kubelet::{Hook, Interleaving, Pod, PodPhase, PodSpec, Start, View};
use crate::lab::sim::memory::{Node, Simulation};
use crate::lab::sim::random::Random;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::AddAssign;
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// The longest stall.
const STALL: Duration = Duration::from_secs(5);

/// The result of a run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) violation: Option<Violation>,
    pub(super) events: Vec<String>,
    pub(super) interleavings: BTreeMap<Interleaving, u64>,
    pub(super) hooks: BTreeMap<Hook, u64>,
    pub(super) counts: Counts,
}

/// What happened in one run, or in several.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) grants: u64,
    pub(super) refusals: u64,
    pub(super) excused: u64,
    pub(super) truces: u64,
    pub(super) taken: u64,
    pub(super) taken_over: u64,
    /// Hooks that ran on a free device, and for a container that waited.
    pub(super) free_hooks: u64,
    pub(super) gated_hooks: u64,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.grants += other.grants;
        self.refusals += other.refusals;
        self.excused += other.excused;
        self.truces += other.truces;
        self.taken += other.taken;
        self.taken_over += other.taken_over;
        self.free_hooks += other.free_hooks;
        self.gated_hooks += other.gated_hooks;
    }
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
    let (disk, hardware) =
        (Disk::default(), Hardware::new(parameters.has_nics, parameters.has_hook));
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

    /// By the kubelet's record, which also has the devices that another plugin gave.
    fn pods_with_unhealthy_devices(&self) -> BTreeSet<String> {
        let inventory = self.daemon.inner.inventory.borrow().clone();
        let is_healthy = |resource: &ResourceName, id: &DeviceId| {
            let offering = inventory.resources.get(resource);
            let offered = offering.and_then(|offering| offering.devices.get(id));
            offered.is_some_and(|offered| offered.health.is_healthy())
        };
        self.node.view(|view| {
            let has_unhealthy = |pod: &&Pod| {
                pod.spec.containers.iter().any(|container| {
                    let devices = view.devices(&pod.spec.uid, &container.name);
                    devices
                        .iter()
                        .any(|(resource, ids)| ids.iter().any(|id| !is_healthy(resource, id)))
                })
            };
            view.pods().iter().filter(has_unhealthy).map(|pod| pod.spec.uid.clone()).collect()
        })
    }

    fn running(&self) -> BTreeSet<String> {
        let running = |view: &View<'_>| {
            let pods = view.pods().iter().filter(|pod| pod.phase == PodPhase::Running);
            pods.map(|pod| pod.spec.uid.clone()).collect()
        };
        self.node.view(running)
    }

    fn outcome(self) -> Outcome {
        let Oracles { violation, refusals, excused, taken, taken_over, .. } = self.oracles;
        let grants = self
            .disk
            .entries()
            .iter()
            .filter(|entry| matches!(entry, crate::domain::Entry::Grant(_)))
            .count() as u64;
        let Journal { truces, free_hooks, gated_hooks, .. } = *self.disk.lock();
        let counts = Counts {
            grants,
            refusals,
            excused,
            truces,
            taken,
            taken_over,
            free_hooks,
            gated_hooks,
        };
        self.node.view(|view| Outcome {
            violation,
            events: view.events().iter().map(ToString::to_string).collect(),
            interleavings: view.interleavings().clone(),
            hooks: view.hooks().clone(),
            counts,
        })
    }
}
