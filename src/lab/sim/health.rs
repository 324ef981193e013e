//! Runs the judge of health over a host's files on virtual time: the verdicts of a daemon, second
//! by second.
//!
//! Scans, probes and the judge are the daemon's own code; the timers of its actors are replaced by
//! virtual time. A probe takes no time and runs exactly at its poll. A probe that hangs is given up
//! when the daemon would give it up.

use crate::discovery;
use crate::domain::{
    Device, DeviceEvent, DeviceId, Grant, Health, HealthPolicy, Inventory, Listed, Moment,
    NvmlSnapshot, PendingHooks, Reason, ResourceSpec, Timestamp, Verdict, Verdicts,
};
use crate::hardware;
use crate::health::PROBE_DEADLINE;
use crate::health::core::{self, Judge, Rules};
use crate::host::HostRoot;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The period of discovery's regular scans.
const SCAN: Duration = Duration::from_secs(30);

/// The judge, and the files that it reads.
#[derive(Debug)]
pub struct HealthSimulation {
    root: HostRoot,
    specs: Arc<[Arc<ResourceSpec>]>,
    policy: HealthPolicy,
    names: BTreeMap<String, DeviceId>,
    former: Option<hardware::Discovery>,
    grants: Vec<Arc<Grant>>,
    judge: Judge,
    inventory: Arc<Inventory>,
    remembered: Verdicts,
    /// Devices whose probes hang, with the hanging probe and its start.
    hanging: BTreeMap<DeviceId, Option<(Arc<Device>, Moment)>>,
    now: Duration,
}

impl HealthSimulation {
    /// A daemon that has just been started, `now` after the boot.
    #[must_use]
    pub fn start(
        root: HostRoot,
        specs: Vec<Arc<ResourceSpec>>,
        policy: HealthPolicy,
        now: Duration,
    ) -> Self {
        let specs: Arc<[_]> = specs.into();
        let judge = judge(&specs, &policy, "first", &Verdicts::new());
        let (names, remembered, inventory, hanging) = Default::default();
        let grants = Vec::new();
        let mut simulation = HealthSimulation {
            root,
            specs,
            policy,
            names,
            former: None,
            grants,
            judge,
            inventory,
            remembered,
            hanging,
            now,
        };
        simulation.scan_and_probe();
        simulation
    }

    /// Starts another process, in the same boot or another one, with the remembered verdicts.
    pub fn restart(&mut self, boot_id: &str, now: Duration) {
        self.judge = judge(&self.specs, &self.policy, boot_id, &self.remembered);
        self.former = None;
        self.now = now;
        self.scan_and_probe();
    }

    /// Sets the grants of containers.
    pub fn hold(&mut self, grants: Vec<Arc<Grant>>) {
        self.grants = grants;
        self.judge_all();
    }

    /// Scans, as the daemon does after an event.
    pub fn scan(&mut self) {
        let began = self.moment();
        let scan = hardware::scan_after(
            &self.root,
            self.former.as_ref().map_or(&[], |former| &former.devices),
        );
        let held = discovery::held_nodes(&self.grants);
        let nvml = NvmlSnapshot::default();
        let known = hardware::DiscoverInput {
            names: &self.names,
            nvml: &nvml,
            held: &held,
            former: self.former.as_ref(),
        };
        let mut found = hardware::discover_with(&self.root, scan, &self.specs, &known);
        let evidence = discovery::evidence(
            &self.root,
            began,
            &mut found,
            discovery::held_devices(&self.grants),
            std::iter::empty(),
        );
        self.names.extend(found.named.clone());
        self.former = Some(found);
        self.judge.discovered(Arc::new(evidence));
        self.judge_all();
    }

    /// Delivers an event of the kernel.
    pub fn deliver_event(&mut self, event: &DeviceEvent) {
        let held = self.held();
        self.judge.apply_event(event, self.moment(), &held);
        self.judge_all();
    }

    /// From now on every probe of this device hangs.
    pub fn hang_probes(&mut self, device: &DeviceId) {
        self.hanging.entry(device.clone()).or_default();
    }

    /// Probes of the device end again, including the one that hangs.
    pub fn release_probes(&mut self, device: &DeviceId) {
        if let Some(Some((device, began))) = self.hanging.remove(device) {
            let signals = hardware::signals(&self.root, &device);
            self.judge.probed(&device, began, &signals);
            self.judge_all();
        }
    }

    /// Runs until that time, with every probe and scan that falls due.
    pub fn advance(&mut self, until: Duration) {
        loop {
            let wanted = self
                .judge
                .next_probe()
                .map(|wanted| wanted.max(self.now + Duration::from_millis(1)));
            let (poll, scan) = (next_tick(self.now, self.policy.poll), next_tick(self.now, SCAN));
            let given_up =
                self.hanging.values().flatten().map(|(_, began)| began.boot + PROBE_DEADLINE);
            let given_up = given_up.filter(|at| *at > self.now).min();
            let dues =
                [Some(poll), Some(scan), wanted, self.judge.next_deadline(self.now), given_up];
            let next = dues.into_iter().flatten().min().unwrap_or(poll);
            if next > until {
                self.now = until;
                return;
            }
            self.now = next;
            self.note_stuck();
            if wanted == Some(next) {
                self.scan_and_probe();
                continue;
            }
            // The judge does not wait for both of them.
            if scan == next {
                self.scan();
            }
            if poll == next {
                self.probe();
            }
            self.judge_all();
        }
    }

    /// The unhealthy devices of all lists, with their reasons.
    #[must_use]
    pub fn unhealthy(&self) -> BTreeMap<DeviceId, Reason> {
        let offered = self.inventory.resources.values().flat_map(|offering| &offering.devices);
        offered
            .filter_map(|(id, offered)| Some((id.clone(), Health::reason(offered.health)?)))
            .collect()
    }

    /// The number of ids in the lists.
    #[must_use]
    pub fn listed(&self) -> usize {
        self.inventory.resources.values().map(|offering| offering.devices.len()).sum()
    }

    /// The inventory that would be published.
    #[must_use]
    pub fn inventory(&self) -> &Inventory {
        &self.inventory
    }

    /// The remembered verdict of a device.
    #[must_use]
    pub fn verdict(&self, device: &DeviceId) -> Option<&Verdict> {
        self.remembered.get(device)
    }

    /// The time since the boot.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.now
    }

    fn scan_and_probe(&mut self) {
        self.scan();
        self.probe();
        self.judge_all();
    }

    fn probe(&mut self) {
        let (at, held) = (self.moment(), self.held());
        for device in self.judge.probed_devices(&held) {
            if let Some(probe) = self.hanging.get_mut(&device.id) {
                probe.get_or_insert((device, at));
                continue;
            }
            let signals = hardware::signals(&self.root, &device);
            self.judge.probed(&device, at, &signals);
        }
    }

    /// Reports the probes that were given up to the judge, as stuck.
    fn note_stuck(&mut self) {
        let (at, probes) = (self.moment(), self.hanging.values().flatten());
        for (device, _) in probes.filter(|(_, began)| at.boot >= began.boot + PROBE_DEADLINE) {
            self.judge.probe_stuck(&device.id, at);
        }
    }

    fn judge_all(&mut self) {
        let held = self.held();
        if let Some(inventory) = self.judge.judge(&held, &PendingHooks::new(), self.now) {
            self.inventory = inventory;
        }
        let grants = &self.grants;
        for (device, verdict) in self.judge.take_changed(|device| core::holders(grants, device)) {
            crate::domain::note_verdict(&mut self.remembered, &device, verdict);
        }
    }

    fn held(&self) -> core::Held {
        core::held(self.grants.iter().map(AsRef::as_ref))
    }

    fn moment(&self) -> Moment {
        Moment {
            boot: self.now,
            wall: Timestamp(u64::try_from(self.now.as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

fn judge(
    specs: &Arc<[Arc<ResourceSpec>]>,
    policy: &HealthPolicy,
    boot_id: &str,
    remembered: &Verdicts,
) -> Judge {
    let rules = Rules {
        boot_id: boot_id.to_owned(),
        has_probes: true,
        fatal_xids: policy.fatal_xids.clone(),
        ignored: policy.ignored.clone(),
        poll: policy.poll,
        ..Rules::default()
    };
    Judge::new(Arc::clone(specs), Arc::default(), &Listed::new(), rules, remembered)
}

/// The next multiple of the period.
fn next_tick(now: Duration, period: Duration) -> Duration {
    let (now, period) = (now.as_nanos(), period.as_nanos().max(1));
    Duration::from_nanos(u64::try_from((now / period + 1) * period).unwrap_or(u64::MAX))
}
