//! The actor's part of probing: starts rounds, takes their results, and logs stuck probes.

use super::actor::HealthActor;
use super::prober::PROBE_DEADLINE;
use crate::domain::{DeviceId, Source};
use crate::host;
use actix::{AsyncContext, Context};
use std::collections::{BTreeMap, BTreeSet};

impl HealthActor {
    /// Probes all devices that matter.
    pub(super) fn probe(&mut self, context: &mut Context<Self>) {
        let devices = self.judge.probed_devices(&self.held());
        let Some(prober) = &self.prober else { return };
        if devices.is_empty() {
            return;
        }
        prober.enqueue(devices);
        context.run_later(PROBE_DEADLINE, Self::check_probes);
    }

    /// Takes the results, and gives up on probes beyond the deadline.
    fn check_probes(&mut self, context: &mut Context<Self>) {
        let Some(prober) = &self.prober else { return };
        let stuck: BTreeSet<DeviceId> = prober.check_deadlines().into_iter().collect();
        let is_busy = prober.is_busy();
        for device in stuck.difference(&self.stuck) {
            tracing::warn!(%device, deadline = ?PROBE_DEADLINE, "device probe timed out; continuing with other devices");
        }
        let has_new = !stuck.is_subset(&self.stuck);
        self.stuck = stuck;
        if has_new && prober.is_exhausted() {
            tracing::error!(
                stuck = self.stuck.len(),
                "all probe threads are stuck; device probing has stopped"
            );
        }
        if is_busy {
            context.run_later(PROBE_DEADLINE, Self::check_probes);
        }
        self.take_probes(context);
    }

    pub(super) fn take_probes(&mut self, context: &mut Context<Self>) {
        let Some(prober) = &self.prober else { return };
        let probed = prober.take_results();
        let now = host::now();
        let mut off = BTreeSet::new();
        for probed in &probed {
            self.stuck.remove(&probed.device.id);
            self.judge.probed(&probed.device, probed.at, &probed.signals);
            off.extend(probed.signals.off.iter().copied());
        }
        for id in &self.stuck {
            self.judge.probe_stuck(id, now);
        }
        self.has_counters |= probed.iter().any(|probed| !probed.signals.counters.is_empty());
        if !probed.is_empty() {
            self.publish_unavailable(off);
        }
        if !probed.is_empty() || !self.stuck.is_empty() {
            self.publish(context);
        }
    }

    /// Publishes which signals are unavailable to probes.
    fn publish_unavailable(&self, off: BTreeSet<Source>) {
        let no_privilege =
            |source| (source, "the daemon lacks the privilege to read it".to_owned());
        let no_counters =
            (Source::Aer, "neither the devices nor the bridges above them expose error counters: the firmware controls AER".to_owned());
        let off: BTreeMap<Source, String> = off
            .into_iter()
            .map(no_privilege)
            .chain((!self.has_counters).then_some(no_counters))
            .collect();
        self.config.judgement.send_if_modified(|judgement| {
            let before = judgement.off.clone();
            judgement.off.retain(|source, _| !matches!(source, Source::Aer | Source::ConfigSpace));
            judgement.off.extend(off);
            judgement.off != before
        });
    }

    /// The poll, at the same ticks as all other pollers.
    pub(super) fn schedule_poll(&self, context: &mut Context<Self>) {
        context.run_later(host::until_tick(self.plan.health.poll), |this, context| {
            this.probe(context);
            this.schedule_poll(context);
        });
    }
}
