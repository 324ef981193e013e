//! The oracles that are checked at certain times: after the fault phase, in the idle phase, at the
//! end.

use super::super::daemon::Daemon;
use super::super::durable::Disk;
use super::super::hardware::gpu;
use super::Oracles;
use crate::domain::{DeviceId, ResourceName};
use crate::lab::sim::kubelet::{PodPhase, View};
use crate::registration::core::State;
use std::collections::BTreeSet;
use std::time::Duration;

/// The most Registers of a resource, and lists on a stream, within a second.
const MOST_PER_SECOND: usize = 20;

impl Oracles {
    /// Checked when no fault can happen any longer: the end of a stream, which the daemon sees, was
    /// answered. These recover later:
    ///
    /// - the work of a stuck goroutine that the kubelet does not report. It may have forgotten the
    ///   client, which matters when the stream ends. It may have stopped the endpoint, which an old
    ///   kubelet does not report, nor any kubelet after a later list;
    /// - the work of another plugin's stuck goroutine, which the next pass of the audit finds;
    /// - a list that was stuck in a stream that has ended since: the pending Register corrects it;
    /// - a truce, which lasts for its full time.
    pub(in super::super) fn answered(&mut self, view: &View<'_>, daemon: &Daemon, now: Duration) {
        for resource in self.resources() {
            let endpoint = view.endpoint_state(&resource);
            let silent = endpoint.streams > 0
                && (endpoint.is_stopped && !self.reports_loss(view, daemon, &resource)
                    || !endpoint.is_tracked)
                || resource == gpu() && self.is_taken_by_rival(view);
            let waits = match daemon.state(&resource) {
                State::Contested { .. } => true,
                State::Settling { .. } => {
                    !endpoint.is_stopped && endpoint.is_tracked && endpoint.is_streaming
                }
                _ => false,
            };
            let recovers_later = silent || waits || self.has_late_list(view, &resource);
            if let (true, Err(what), false) =
                (view.is_running(), is_served(view, daemon, &resource), recovers_later)
            {
                self.violated("O5", now, what);
            }
        }
    }

    /// Checked throughout the idle phase. Another plugin may have left a broken state that the
    /// kubelet does not report.
    pub(in super::super) fn served_or_taken_by_rival(
        &mut self,
        view: &View<'_>,
        daemon: &Daemon,
        now: Duration,
    ) {
        for resource in self.resources() {
            if resource == gpu()
                && self.is_taken_by_rival(view)
                && !self.reports_loss(view, daemon, &resource)
            {
                self.taken += 1;
            } else if self.has_late_list(view, &resource) {
                self.excused += 1;
            } else if let Err(what) = is_served(view, daemon, &resource) {
                self.violated("O5", now, what);
            }
        }
    }

    /// Checked in the idle phase after a restart of the kubelet.
    pub(in super::super) fn served(&mut self, view: &View<'_>, daemon: &Daemon, now: Duration) {
        for resource in self.resources() {
            if let Err(what) = is_served(view, daemon, &resource) {
                self.violated("O5", now, what);
            }
        }
    }

    /// Whether the kubelet reports that a resource is not ours: by its list, if it has the call,
    /// and if no later list of ours came through the stream of a stopped endpoint.
    fn reports_loss(&self, view: &View<'_>, daemon: &Daemon, resource: &ResourceName) -> bool {
        !self.lacks_allocatable
            && view.endpoint_state(resource).healthy != healthy(daemon, resource)
    }

    /// Whether the newest list was stuck in a connection that the kubelet has closed for a newer
    /// one, as 1.9 does, or in that of a dead daemon, where the kubelet does not report its list.
    /// The daemon does not see the end of these streams, so nothing triggers another list; the next
    /// list corrects it.
    pub(super) fn has_late_list(&self, view: &View<'_>, resource: &ResourceName) -> bool {
        let endpoint = view.endpoint_state(resource);
        let sound = !endpoint.is_stopped && endpoint.is_streaming;
        let last = self.last_list.get(resource).copied();
        let has_ended = |client| self.ended_streams.contains(&(resource.clone(), client));
        let is_unseen = self.closes_previous_connection
            || self.lacks_allocatable && last.is_some_and(has_ended);
        is_unseen && sound && last != endpoint.serving
    }

    pub(super) fn has_any_late_list(&self, view: &View<'_>) -> bool {
        self.hardware.resources().any(|resource| self.has_late_list(view, resource))
    }

    fn resources(&self) -> Vec<ResourceName> {
        self.hardware.resources().cloned().collect()
    }

    /// After a restart of the kubelet in the idle phase, every pod that ran before still runs.
    pub(in super::super) fn no_pod_lost(
        &mut self,
        view: &View<'_>,
        running: &BTreeSet<String>,
        now: Duration,
    ) {
        for pod in view.pods().iter().filter(|pod| running.contains(&pod.spec.uid)) {
            // The kubelet lost its entry: with the checkpoint, or because the older of two writes
            // came last.
            let waits = |message: &str| message.contains("requested number of devices unavailable");
            if let PodPhase::Failed { message, .. } = &pod.phase
                && !waits(message)
            {
                self.violated(
                    "O6",
                    now,
                    format!("pod {} was lost to a restart: {message}", pod.spec.uid),
                );
            }
        }
    }

    /// Checked when every pod has been deleted for long.
    pub(in super::super) fn released(&mut self, disk: &Disk, now: Duration) {
        let left: Vec<String> = disk.ledger(|ledger| {
            ledger.grants().map(|grant| format!("{} {:?}", grant.alloc_id, grant.state)).collect()
        });
        if !left.is_empty() {
            self.violated("O3", now, format!("not released: {left:?}"));
        }
        let pending = disk.ledger(|ledger| format!("{:?}", ledger.owed()));
        if pending != "{}" {
            self.violated("O12", now, format!("pending: {pending}"));
        }
        let truces = disk.lock().truces;
        if truces > 0 && self.rival_effects.is_none() {
            self.violated("O5", now, format!("{truces} truces without a rival plugin"));
        }
        let registers = disk
            .lock()
            .registers
            .values()
            .map(|times| busiest_second(times))
            .max()
            .unwrap_or_default();
        let lists =
            disk.lock().lists.values().map(|times| busiest_second(times)).max().unwrap_or_default();
        if registers > MOST_PER_SECOND || lists > MOST_PER_SECOND {
            self.violated(
                "O10",
                now,
                format!("{registers} Registers, or {lists} lists on a stream, in one second"),
            );
        }
    }

    /// Nothing has happened since `since`, so there was no reason to register.
    pub(in super::super) fn no_registers_since(
        &mut self,
        disk: &Disk,
        since: Duration,
        now: Duration,
    ) {
        let registers = disk.lock().registers.values().flatten().filter(|at| **at >= since).count();
        if registers > 0 {
            self.violated("O10", now, format!("{registers} unneeded Registers"));
        }
    }
}

/// Tracked, not stopped, streaming, and the kubelet's list is the inventory.
fn is_served(view: &View<'_>, daemon: &Daemon, resource: &ResourceName) -> Result<(), String> {
    let endpoint = view.endpoint_state(resource);
    let wanted = healthy(daemon, resource);
    let sound = view.is_running()
        && !endpoint.is_stopped
        && endpoint.is_tracked
        && endpoint.is_streaming
        && endpoint.healthy == wanted;
    if sound {
        return Ok(());
    }
    Err(format!(
        "{resource}: {endpoint:?}, wanted {wanted:?}; {:?}",
        daemon.inner.registration(resource).lock().machine
    ))
}

fn healthy(daemon: &Daemon, resource: &ResourceName) -> BTreeSet<DeviceId> {
    daemon
        .inner
        .inventory
        .borrow()
        .resources
        .get(resource)
        .map(|offering| offering.healthy())
        .unwrap_or_default()
}

/// The most of these ordered times within any one second.
fn busiest_second(moments: &[Duration]) -> usize {
    let within = |(first, from): (usize, &Duration)| {
        moments.partition_point(|at| *at < *from + Duration::from_secs(1)) - first
    };
    moments.iter().enumerate().map(within).max().unwrap_or_default()
}
