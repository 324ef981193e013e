//! The phases after the faults: idle, settled, and the end with no pods.

use super::super::rival_plugin;
use super::{MS, Run, SECOND, STALL};
use crate::lab::sim::kubelet::Start;
use crate::registration::core::State;
use std::time::Duration;

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

impl Run {
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

    pub(super) fn idle(&mut self) {
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
            let at = self.now() + SILENT;
            self.run_to(at);
            // An earlier plugin may have left a state that nothing reports.
            self.served_or_taken_by_rival();
        }
        self.restart_daemon(Duration::ZERO);
        self.served_after(SIGNALLED);
        let at = self.now() + SECOND;
        self.run_to(at);
        // A kubelet that starts rejects a pod whose device is unhealthy, as one that has come and
        // gone too often.
        let ailing = self.pods_with_unhealthy_devices();
        let running = self.running().difference(&ailing).cloned().collect();
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
        let (disk, oracles) = (&self.disk, &mut self.oracles);
        self.node.view(|view| {
            oracles.no_pod_lost(view, &running, now);
            oracles.taken_over(view, disk, now);
        });
    }

    pub(super) fn settled(&mut self) {
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

    pub(super) fn end(&mut self) {
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
}
