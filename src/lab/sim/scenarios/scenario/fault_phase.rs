//! The fault phase of a run: what happens to the node, at random times.

use super::super::hardware::gpu;
use super::super::parameters::{Act, RivalStay};
use super::super::rival_plugin;
use super::{MS, Run, SECOND, STALL};
use crate::lab::sim::kubelet::Start;
use std::time::Duration;

impl Run {
    pub(super) fn inject_faults(&mut self) {
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
                    self.node.delete_checkpoint();
                } else {
                    self.node.corrupt_checkpoint();
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
}
