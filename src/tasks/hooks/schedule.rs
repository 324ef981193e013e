//! When a due hook runs: at once, after a failure with growing pauses, or on new evidence. Pure.

use crate::domain::{
    Device, DeviceId, DueHooks, Hook, Inventory, Offered, Offering, PendingHook, Reason,
    ResourceName,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The wait after the first failure. It doubles with each further one.
const RETRY_MIN: Duration = Duration::from_secs(2);
/// The longest wait.
const RETRY_MAX: Duration = Duration::from_secs(600);

/// A resource and one of its devices.
pub(super) type Key = (ResourceName, DeviceId);

/// A run to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) key: Key,
    pub(super) pending: PendingHook,
    pub(super) hook: Hook,
    pub(super) device: Arc<Device>,
}

/// The runs of this process. A new process begins every due run at once: its start is new evidence.
#[derive(Debug, Default)]
pub(super) struct Schedule(BTreeMap<Key, Known>);

#[derive(Debug)]
struct Known {
    /// The due hook, with its release.
    pending: PendingHook,
    runs: u32,
    state: State,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The device is absent.
    Absent,
    Running,
    /// The last run ended at this time. If the hook is still due, the run failed.
    Ended(Duration),
}

impl Schedule {
    /// The runs that begin now.
    pub(super) fn start(
        &mut self,
        due: &DueHooks,
        inventory: &Inventory,
        now: Duration,
    ) -> Vec<Run> {
        let is_due = |(resource, device): &Key| due.get(resource, device).is_some();
        self.0.retain(|key, known| known.state == State::Running || is_due(key));
        let mut runs = Vec::new();
        for pending in due.all() {
            let key = (pending.resource.clone(), pending.device.clone());
            let found = found(inventory, pending);
            let known = self.0.get(&key).filter(|known| {
                known.state == State::Running || known.pending.alloc_id == pending.alloc_id
            });
            let begins = match known.map(|known| (&known.state, known.runs)) {
                Some((State::Running, _)) => continue,
                Some((State::Ended(at), runs)) => now >= *at + wait(runs),
                // Due for the first time, or its device has returned.
                Some((State::Absent, _)) | None => true,
            };
            let runs_before = known.map_or(0, |known| known.runs);
            match found {
                None => drop(self.0.insert(
                    key,
                    Known { pending: pending.clone(), runs: runs_before, state: State::Absent },
                )),
                Some((hook, device)) if begins => {
                    let known = Known {
                        pending: pending.clone(),
                        runs: runs_before.saturating_add(1),
                        state: State::Running,
                    };
                    self.0.insert(key.clone(), known);
                    runs.push(Run { key, pending: pending.clone(), hook, device });
                }
                Some(_) => {}
            }
        }
        runs
    }

    /// A run has ended.
    pub(super) fn ended(&mut self, key: &Key, now: Duration) {
        if let Some(known) = self.0.get_mut(key) {
            known.state = State::Ended(now);
        }
    }

    /// When the next run begins without any event.
    pub(super) fn next_deadline(&self) -> Option<Duration> {
        let deadline = |known: &Known| {
            if let State::Ended(at) = known.state { Some(at + wait(known.runs)) } else { None }
        };
        self.0.values().filter_map(deadline).min()
    }
}

/// The wait after this number of runs.
fn wait(runs: u32) -> Duration {
    RETRY_MIN.saturating_mul(2_u32.saturating_pow(runs.saturating_sub(1))).min(RETRY_MAX)
}

/// The hook and the device, if both exist. Of a resource that is no longer configured, the hook is
/// that of the resource that offers the device now.
fn found(inventory: &Inventory, pending: &PendingHook) -> Option<(Hook, Arc<Device>)> {
    let is_present = |offered: &&Offered| offered.health.reason() != Some(Reason::DeviceGone);
    let found = |offering: &Offering, is_it: &dyn Fn(&Device) -> bool| {
        let hook = offering.spec.hooks.after_release.clone()?;
        let mut offered = offering.devices.values().filter(is_present);
        let found = offered.find(|offered| is_it(&offered.device))?;
        Some((hook, Arc::clone(&found.device)))
    };
    match inventory.resources.get(&pending.resource).filter(|it| !it.spec.is_orphan()) {
        Some(offering) => found(offering, &|device| device.id == pending.device),
        None => {
            let is_it = |device: &Device| !pending.key.is_empty() && device.key == pending.key;
            inventory.resources.values().find_map(|offering| found(offering, &is_it))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        AllocId, Attributes, DeviceClass, Health, HookState, Hooks, ResourceSpec, Timestamp,
        note_hook,
    };
    use proptest::prelude::*;

    fn resource() -> ResourceName {
        "example.com/gpu".parse().unwrap()
    }

    fn due(devices: &[(&str, &str)]) -> DueHooks {
        let mut due = DueHooks::default();
        for (device, alloc_id) in devices {
            let hook = PendingHook {
                resource: resource(),
                device: DeviceId::new(*device),
                key: String::new(),
                objects: Vec::new(),
                alloc_id: AllocId::new(*alloc_id),
                pod: None,
                container: None,
                released_at: Timestamp(0),
                state: HookState::Due,
            };
            note_hook(&mut due.free, &hook);
        }
        due
    }

    fn inventory(devices: &[(&str, Health)]) -> Inventory {
        let hooks = Hooks { after_release: Some(Hook::Reset), ..Hooks::default() };
        let spec = ResourceSpec { hooks, ..ResourceSpec::new(resource(), DeviceClass::Gpu) };
        let offered = |(id, health): &(&str, Health)| {
            let device = Device {
                id: DeviceId::new(*id),
                key: format!("pci:{id}"),
                class: DeviceClass::Gpu,
                pci: None,
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: Attributes::default(),
            };
            (DeviceId::new(*id), Offered { device: Arc::new(device), health: *health })
        };
        let offering =
            Offering { spec: Arc::new(spec), devices: devices.iter().map(offered).collect() };
        Inventory { resources: BTreeMap::from([(resource(), Arc::new(offering))]) }
    }

    #[test]
    fn the_hook_of_a_former_resource_is_that_of_the_one_that_offers_its_device() {
        let all = inventory(&[("GPU-1", PENDING), ("GPU-2", PENDING)]);
        let runs = |key: &str| {
            let mut due = due(&[("old-2", "a-1")]);
            let former: ResourceName = "example.com/former".parse().unwrap();
            let hook = due.all().next().unwrap().clone();
            due = DueHooks::default();
            note_hook(&mut due.free, &PendingHook { resource: former, key: key.into(), ..hook });
            let runs = Schedule::default().start(&due, &all, at(0));
            runs.iter().map(|run| run.device.id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(runs("pci:GPU-2"), ["GPU-2"]);
        assert_eq!([runs("pci:GPU-3"), runs("")], [Vec::<String>::new(), Vec::new()]);
    }

    const PENDING: Health = Health::Unhealthy(Reason::HookPending);
    const ABSENT: Health = Health::Unhealthy(Reason::DeviceGone);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn key(device: &str) -> Key {
        (resource(), DeviceId::new(device))
    }

    fn started(runs: &[Run]) -> Vec<&str> {
        runs.iter().map(|run| run.key.1.as_str()).collect()
    }

    #[test]
    fn a_due_hook_runs_at_once_and_after_failures_with_growing_pauses() {
        let (mut schedule, due, inventory) = (
            Schedule::default(),
            due(&[("a", "1"), ("b", "2")]),
            inventory(&[("a", PENDING), ("b", PENDING)]),
        );
        assert_eq!(started(&schedule.start(&due, &inventory, at(0))), ["a", "b"]);
        assert!(schedule.start(&due, &inventory, at(9999)).is_empty(), "both run");
        assert_eq!(schedule.next_deadline(), None);
        let mut now = at(10_000);
        for wait in [2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600] {
            schedule.ended(&key("a"), now);
            now += at(wait);
            assert_eq!(schedule.next_deadline(), Some(now));
            assert!(schedule.start(&due, &inventory, now - Duration::from_millis(1)).is_empty());
            assert_eq!(started(&schedule.start(&due, &inventory, now)), ["a"]);
        }
    }

    #[test]
    fn the_hook_of_an_absent_device_runs_at_its_return() {
        let (mut schedule, due) = (Schedule::default(), due(&[("a", "1")]));
        assert!(schedule.start(&due, &inventory(&[]), at(0)).is_empty());
        assert!(schedule.start(&due, &inventory(&[("a", ABSENT)]), at(1)).is_empty());
        assert_eq!(schedule.next_deadline(), None, "an absent device has no deadline");
        assert_eq!(started(&schedule.start(&due, &inventory(&[("a", PENDING)]), at(2))), ["a"]);
        schedule.ended(&key("a"), at(3));
        assert!(schedule.start(&due, &inventory(&[("a", PENDING)]), at(4)).is_empty());
        assert!(schedule.start(&due, &inventory(&[("a", ABSENT)]), at(4)).is_empty());
        assert_eq!(started(&schedule.start(&due, &inventory(&[("a", PENDING)]), at(4))), ["a"]);
    }

    #[test]
    fn another_release_starts_a_run_but_not_during_a_run() {
        let (mut schedule, inventory) = (Schedule::default(), inventory(&[("a", PENDING)]));
        assert_eq!(started(&schedule.start(&due(&[("a", "1")]), &inventory, at(0))), ["a"]);
        assert!(schedule.start(&due(&[("a", "2")]), &inventory, at(0)).is_empty());
        schedule.ended(&key("a"), at(1));
        assert_eq!(started(&schedule.start(&due(&[("a", "2")]), &inventory, at(1))), ["a"]);
        // A hook that is no longer due is removed from the schedule.
        schedule.ended(&key("a"), at(2));
        assert!(schedule.start(&DueHooks::default(), &inventory, at(2)).is_empty());
        assert_eq!(started(&schedule.start(&due(&[("a", "2")]), &inventory, at(2))), ["a"]);
    }

    proptest! {
        /// In any history a device has one run at a time, and a present device with a due hook gets
        /// a run within the longest wait.
        #[test]
        fn every_present_device_gets_its_run_and_one_at_a_time(steps in prop::collection::vec((0..5_u8, 0..3_u8, 1..100_u64), 0..80)) {
            let (mut schedule, mut now, mut running) = (Schedule::default(), at(0), false);
            let (mut alloc, mut is_due, mut is_present) = (0, true, true);
            let step = |schedule: &mut Schedule, now: Duration, alloc: u64, is_due: bool, is_present: bool, running: &mut bool| {
                let alloc = alloc.to_string();
                let due = if is_due { due(&[("a", &alloc)]) } else { DueHooks::default() };
                let runs = schedule.start(&due, &inventory(&[("a", if is_present { PENDING } else { ABSENT })]), now);
                if !runs.is_empty() {
                    assert!(!*running && is_due && is_present && runs.len() == 1);
                    *running = true;
                }
            };
            for (kind, flag, seconds) in steps {
                now += at(seconds);
                match kind {
                    0 => is_due = flag > 0,
                    1 => is_present = flag > 0,
                    2 => alloc += u64::from(flag),
                    3 if running => {
                        schedule.ended(&key("a"), now);
                        running = false;
                    }
                    _ => {}
                }
                step(&mut schedule, now, alloc, is_due, is_present, &mut running);
            }
            if running {
                schedule.ended(&key("a"), now);
                running = false;
            }
            step(&mut schedule, now + RETRY_MAX, alloc, true, true, &mut running);
            prop_assert!(running);
        }
    }
}
