//! The actor's part of probing: starts rounds, takes their results, and logs stuck probes.

use super::actor::HealthActor;
use super::prober::LOOK_DEADLINE;
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
        prober.begin(devices);
        context.run_later(LOOK_DEADLINE, Self::check_probes);
    }

    /// Takes the results, and gives up on probes beyond the deadline.
    fn check_probes(&mut self, context: &mut Context<Self>) {
        let Some(prober) = &self.prober else { return };
        let stuck: BTreeSet<DeviceId> = prober.check().into_iter().collect();
        let is_busy = prober.is_busy();
        for device in stuck.difference(&self.stuck) {
            tracing::warn!(%device, deadline = ?LOOK_DEADLINE, "looking at the device does not end; others are looked at");
        }
        let is_news = !stuck.is_subset(&self.stuck);
        self.stuck = stuck;
        if is_news && prober.is_exhausted() {
            tracing::error!(stuck = self.stuck.len(), "so many looks at devices do not end that none is looked at any more");
        }
        if is_busy {
            context.run_later(LOOK_DEADLINE, Self::check_probes);
        }
        self.take_probes(context);
    }

    pub(super) fn take_probes(&mut self, context: &mut Context<Self>) {
        let Some(prober) = &self.prober else { return };
        let probed = prober.take();
        let now = host::now();
        let mut off = BTreeSet::new();
        for probed in &probed {
            self.stuck.remove(&probed.device.id);
            self.judge.probed(&probed.device, probed.at, &probed.signals);
            off.extend(probed.signals.off.iter().copied());
        }
        for id in &self.stuck {
            self.judge.stuck(id, now);
        }
        self.has_counters |= probed.iter().any(|probed| !probed.signals.counters.is_empty());
        if !probed.is_empty() {
            self.note_off(off);
        }
        if !probed.is_empty() || !self.stuck.is_empty() {
            self.publish(context);
        }
    }

    /// Publishes which signals are unavailable to probes.
    fn note_off(&self, off: BTreeSet<Source>) {
        let no_privilege = |source| (source, "reading it needs a privilege that the daemon does not have".to_owned());
        let no_counters =
            (Source::Aer, "neither the devices nor the bridges above them count errors: the firmware keeps AER to itself".to_owned());
        let off: BTreeMap<Source, String> = off.into_iter().map(no_privilege).chain((!self.has_counters).then_some(no_counters)).collect();
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
