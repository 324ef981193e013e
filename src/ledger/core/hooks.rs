//! After-release hooks: when one becomes pending, when it may run, and what its end means.
//!
//! Only the ledger knows that the last holder of a device was released. The release and its pending
//! hook are written in one commit, hook first. A torn write may leave a pending hook while the
//! device is still held, and that hook waits. It never leaves a release without its hook. From that
//! decision until the hook is done the device is not granted, even if the kubelet still lists it.
//!
//! An exclusive device may already belong to another pod: the kubelet gives it away before its
//! release is proven. Then the last holder of *its pod* causes the hook. The hook is due when the
//! next pod's container waits at the gate ([`super::passage()`]), which lets no container start
//! while a hook of its device is pending. So a due hook is for a device that no container runs
//! with.

use super::Ledger;
use crate::domain::{
    AllocId, DeviceId, DueHooks, Entry, Grant, GrantState, GrantedDevice, HookState, PendingHook,
    PendingHooks, Refusal, ResourceName, Sharing, Timestamp, note_hook, overlap,
};
use std::collections::{BTreeMap, BTreeSet};

/// The after-release hooks of the configuration.
///
/// A resource may be renamed while its devices are held, and then the daemon starts without its
/// former configuration. So the devices of a resource that is not configured have the hook of the
/// resource that offers them now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReleaseHooks {
    /// The resources with a hook, and the sharing of their devices.
    with_hook: BTreeMap<ResourceName, Sharing>,
    /// The configured resources without one.
    without: BTreeSet<ResourceName>,
    /// The devices of configured resources by their keys, and whether the resource has a hook.
    devices: BTreeMap<String, bool>,
    /// The healthy devices, by their keys, that a resource which is not configured still lists.
    former: BTreeSet<String>,
}

impl ReleaseHooks {
    /// The hooks of these configured resources.
    #[must_use]
    pub fn of(resources: impl IntoIterator<Item = (ResourceName, Option<Sharing>)>) -> Self {
        let mut hooks = ReleaseHooks::default();
        for (resource, sharing) in resources {
            match sharing {
                Some(sharing) => drop(hooks.with_hook.insert(resource, sharing)),
                None => drop(hooks.without.insert(resource)),
            }
        }
        hooks
    }

    /// Notes that a resource lists a device with this key, and whether that is healthy.
    pub fn note_device(&mut self, resource: &ResourceName, key: &str, is_healthy: bool) {
        let has_hook = self.with_hook.contains_key(resource);
        if has_hook || self.without.contains(resource) {
            *self.devices.entry(key.to_owned()).or_default() |= has_hook;
        } else if is_healthy {
            self.former.insert(key.to_owned());
        }
    }

    /// The sharing of a configured resource, if it has a hook.
    #[must_use]
    pub fn get(&self, resource: &ResourceName) -> Option<&Sharing> {
        self.with_hook.get(resource)
    }

    /// Whether no resource has a hook.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.with_hook.is_empty()
    }

    /// The sharing of a resource that releases this device, if there is a hook for it. A device
    /// that is absent, or has failed, may return to a resource with a hook.
    fn of_release(&self, resource: &ResourceName, key: &str) -> Option<Sharing> {
        let is_offered = || self.devices.contains_key(key) || !self.former.contains(key);
        self.of_pending(resource, key).filter(|_| self.get(resource).is_some() || is_offered())
    }

    /// The sharing of the resource of a pending hook, unless there is no hook for its device any
    /// longer: a resource without a hook offers it.
    fn of_pending(&self, resource: &ResourceName, key: &str) -> Option<Sharing> {
        let is_former = || !self.without.contains(resource) && !self.is_empty() && !key.is_empty();
        let may_have_hook = || self.devices.get(key).is_none_or(|has_hook| *has_hook);
        let inherited = || (is_former() && may_have_hook()).then_some(Sharing::Exclusive);
        self.get(resource).copied().or_else(inherited)
    }

    /// Whether the objects of a device count for its hook. Those of an absent device of a former
    /// resource may be another device's by now.
    fn has_objects(&self, resource: &ResourceName, key: &str) -> bool {
        self.get(resource).is_some() || self.devices.contains_key(key)
    }
}

/// The devices of exactly one pod whose container has asked to start and waits for hooks. Not
/// durable: the container asks again.
pub type HeldBack = BTreeSet<(ResourceName, DeviceId)>;

impl Ledger {
    /// Every pending hook, including those that wait for a holder.
    #[must_use]
    pub fn owed(&self) -> &PendingHooks {
        &self.owed
    }

    /// The hooks that may run: those of devices without a holder, or whose holder is held back.
    #[must_use]
    pub fn due(&self, hooks: &ReleaseHooks, held_back: &HeldBack) -> DueHooks {
        let mut due = DueHooks::default();
        for hook in self.owed.values().flat_map(BTreeMap::values) {
            let Some(sharing) = hooks.of_pending(&hook.resource, &hook.key) else { continue };
            let mut holders =
                self.grants.values().filter(|grant| holds(grant, sharing, hook)).peekable();
            let is_held_back = || held_back.contains(&(hook.resource.clone(), hook.device.clone()));
            if holders.peek().is_none() {
                note_hook(&mut due.free, hook);
            } else if sharing == Sharing::Exclusive
                && is_held_back()
                && holders.all(|grant| comes_after(grant, hook))
            {
                note_hook(&mut due.gated, hook);
            }
        }
        due
    }

    /// Why a grant has to wait: one of its devices has a pending hook, or will have one by the
    /// entries that wait for the commit. That counts for every id of the device: the last holder's
    /// data is still on it.
    pub fn waits<'a>(
        &'a self,
        hooks: &ReleaseHooks,
        uncommitted: impl Iterator<Item = &'a Entry>,
        wanted: &'a Grant,
    ) -> Option<Refusal> {
        let (id, hook) = self.pending_hook(hooks, uncommitted, wanted)?;
        Some(Refusal::Unhealthy {
            resource: wanted.resource.clone(),
            id: id.clone(),
            reason: hook.reason(),
        })
    }

    /// The first device of a grant with a pending hook, and the hook.
    pub(super) fn pending_hook<'a>(
        &'a self,
        hooks: &ReleaseHooks,
        uncommitted: impl Iterator<Item = &'a Entry>,
        wanted: &'a Grant,
    ) -> Option<(&'a DeviceId, &'a PendingHook)> {
        if hooks.is_empty() {
            return None;
        }
        // If another pod already has the device, only that pod waits.
        let is_free = |hook: &PendingHook| {
            hooks.of_pending(&hook.resource, &hook.key).is_some_and(|sharing| {
                let mut holders = self.grants.values().filter(|grant| holds(grant, sharing, hook));
                holders.all(|grant| goes_on(grant, sharing, hook))
            })
        };
        let about = |entry: &'a Entry| match entry {
            Entry::Hook(hook) if hook.state != HookState::Done && is_free(hook) => Some(&**hook),
            _ => None,
        };
        let about: Vec<&PendingHook> = uncommitted.filter_map(about).collect();
        // The same rule as `due`, for the wanted devices alone: an Allocate waits for this.
        let is_due = |hook: &PendingHook| {
            hooks.of_pending(&hook.resource, &hook.key).is_some_and(|sharing| {
                !self.grants.values().any(|grant| holds(grant, sharing, hook))
            })
        };
        let is_its = |device: &GrantedDevice, hook: &PendingHook| {
            let sharing = hooks.get(&wanted.resource).filter(|_| hook.resource == wanted.resource);
            let by_id = sharing
                .is_some_and(|sharing| sharing.whole(&wanted.resource, &device.id) == hook.device);
            let by_key = !hook.key.is_empty() && device.key == hook.key;
            by_id || by_key || overlap(&device.objects, &hook.objects)
        };
        wanted.held_devices().find_map(|device| {
            let mut known = self.owed.values().flat_map(BTreeMap::values);
            let due = known.find(|hook| is_its(device, hook) && is_due(hook));
            let hook = due.or_else(|| about.iter().copied().find(|hook| is_its(device, hook)))?;
            Some((&device.id, hook))
        })
    }
}

/// Whether a live grant has the device of a hook, by its id or by another one.
fn holds(grant: &Grant, sharing: Sharing, hook: &PendingHook) -> bool {
    let is_same = |id: &DeviceId| {
        grant.resource == hook.resource && sharing.whole(&hook.resource, id) == hook.device
    };
    let is_its = |device: &GrantedDevice| {
        !hook.key.is_empty() && device.key == hook.key || overlap(&device.objects, &hook.objects)
    };
    grant.held_devices().any(|device| is_same(&device.id) || is_its(device))
}

/// Whether the hook is for a holder before this grant. A torn write may leave a hook for a holder
/// that still holds the device.
pub(super) fn comes_after(grant: &Grant, hook: &PendingHook) -> bool {
    grant.resource == hook.resource && grant.alloc_id != hook.alloc_id
}

/// Whether no hook is needed yet after a pod's grant, because this grant continues it. A grant of
/// an exclusive device by another pod does not continue it: that pod waits at the gate. The next
/// pod also waits after a grant whose pod was never known, because an earlier holder may still run.
fn goes_on(grant: &Grant, sharing: Sharing, hook: &PendingHook) -> bool {
    let is_gated = sharing == Sharing::Exclusive && grant.resource == hook.resource;
    let is_same = || match &hook.pod {
        Some(pod) => grant.pods().any(|other| other.uid == pod.uid),
        None => grant.alloc_id < hook.alloc_id,
    };
    holds(grant, sharing, hook) && (!is_gated || is_same())
}

/// The hooks that these moves make pending, to be written before them. `uncommitted` are entries
/// that wait for the commit: a grant among them already holds its devices.
pub fn owing<'a>(
    ledger: &Ledger,
    hooks: &ReleaseHooks,
    moves: &[Entry],
    uncommitted: impl Iterator<Item = &'a Entry>,
) -> Vec<Entry> {
    let released: Vec<(&AllocId, &GrantState)> = moves
        .iter()
        .filter_map(|entry| match entry {
            Entry::Moved { alloc_id, state: state @ GrantState::Released { .. } } => {
                Some((alloc_id, state))
            }
            _ => None,
        })
        .collect();
    if hooks.is_empty() || released.is_empty() {
        return Vec::new();
    }
    let gone: BTreeSet<&AllocId> = released.iter().map(|(alloc_id, _)| *alloc_id).collect();
    let staying =
        ledger.grants().map(AsRef::as_ref).filter(|grant| !gone.contains(&grant.alloc_id));
    let coming = uncommitted
        .filter_map(|entry| if let Entry::Grant(grant) = entry { Some(&**grant) } else { None });
    let holders: Vec<&Grant> = staying.chain(coming).collect();
    // If several holders end at once, the last one is named.
    let mut owed: BTreeMap<(ResourceName, DeviceId), PendingHook> = BTreeMap::new();
    for (alloc_id, state) in released {
        let GrantState::Released { pod, container, released_at, .. } = state else { continue };
        let Some(grant) = ledger.grant(alloc_id) else { continue };
        for device in grant.held_devices() {
            let Some(sharing) = hooks.of_release(&grant.resource, &device.key) else { continue };
            let hook = PendingHook {
                resource: grant.resource.clone(),
                device: sharing.whole(&grant.resource, &device.id),
                key: device.key.clone(),
                objects: if hooks.has_objects(&grant.resource, &device.key) {
                    device.objects.clone()
                } else {
                    Vec::new()
                },
                alloc_id: alloc_id.clone(),
                pod: pod.clone(),
                container: container.clone(),
                released_at: *released_at,
                state: HookState::Due,
            };
            if !holders.iter().any(|holder| goes_on(holder, sharing, &hook)) {
                owed.insert((hook.resource.clone(), hook.device.clone()), hook);
            }
        }
    }
    owed.into_values().map(|hook| Entry::Hook(Box::new(hook))).collect()
}

/// The entry to write when a run has ended. `None` for the run of an earlier release: the later one
/// has its own run.
#[must_use]
pub fn ended(
    ledger: &Ledger,
    ran: &PendingHook,
    result: Result<(), String>,
    now: Timestamp,
) -> Option<Entry> {
    let owed = ledger
        .owed
        .get(&ran.resource)?
        .get(&ran.device)
        .filter(|owed| owed.alloc_id == ran.alloc_id)?;
    let before = if let HookState::Failed { tries, .. } = owed.state { tries } else { 0 };
    let state = match result {
        Ok(()) => HookState::Done,
        Err(why) => HookState::Failed { tries: before.saturating_add(1), failed_at: now, why },
    };
    Some(Entry::Hook(Box::new(PendingHook { state, ..owed.clone() })))
}

/// Pending hooks of a former configuration: there is no longer a hook for their devices.
#[must_use]
pub fn undue(ledger: &Ledger, hooks: &ReleaseHooks) -> Vec<Entry> {
    let all = ledger.owed.values().flat_map(BTreeMap::values);
    let former = all.filter(|hook| hooks.of_pending(&hook.resource, &hook.key).is_none());
    let done = |hook: &PendingHook| {
        Entry::Hook(Box::new(PendingHook { state: HookState::Done, ..hook.clone() }))
    };
    former.map(done).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ContainerEdits, GrantedDevice, Listed, PodRef, Reason};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn resource() -> ResourceName {
        "example.com/gpu".parse().unwrap()
    }

    fn hooks(sharing: Sharing) -> ReleaseHooks {
        ReleaseHooks::of([(resource(), Some(sharing))])
    }

    fn grant(n: u64, id: &str) -> Grant {
        Grant {
            alloc_id: AllocId::new(format!("a-{n}")),
            resource: resource(),
            devices: vec![GrantedDevice {
                id: DeviceId::new(id),
                key: String::new(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(n),
            version: "1".into(),
            state: GrantState::Bound {
                pod: pod("u1"),
                container: "main".into(),
                bound_at: Timestamp(n),
            },
        }
    }

    fn pod(uid: &str) -> PodRef {
        PodRef { uid: uid.into(), namespace: None, name: None }
    }

    fn made(n: u64, id: &str) -> Entry {
        Entry::Grant(Arc::new(grant(n, id)))
    }

    fn released(n: u64) -> Entry {
        let state = GrantState::Released {
            pod: Some(pod("u1")),
            container: Some("main".into()),
            bound_at: None,
            released_at: Timestamp(100 + n),
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        };
        Entry::Moved { alloc_id: grant(n, "").alloc_id, state }
    }

    fn ledger(entries: &[Entry]) -> Ledger {
        let mut ledger = Ledger::default();
        apply(&mut ledger, entries);
        ledger
    }

    fn apply<'a>(ledger: &mut Ledger, entries: impl IntoIterator<Item = &'a Entry>) {
        for entry in entries {
            ledger.evolve(entry);
        }
    }

    fn devices(owed: &PendingHooks) -> Vec<String> {
        owed.values()
            .flatten()
            .map(|(device, hook)| format!("{device} after {}", hook.alloc_id))
            .collect()
    }

    /// Decides and applies, as the actor does.
    fn release(ledger: &mut Ledger, hooks: &ReleaseHooks, moves: &[Entry]) {
        let owed = owing(ledger, hooks, moves, std::iter::empty());
        apply(ledger, owed.iter().chain(moves));
    }

    fn run(ledger: &Ledger) -> PendingHook {
        ledger.owed().values().flat_map(BTreeMap::values).next().unwrap().clone()
    }

    #[test]
    fn the_last_holder_owes_the_hook() {
        let hooks = hooks(Sharing::Exclusive);
        let mut ledger = ledger(&[made(1, "a"), made(2, "a"), made(3, "b")]);
        release(&mut ledger, &hooks, &[released(1)]);
        assert!(ledger.owed().is_empty(), "the next container of the pod has it");
        release(&mut ledger, &hooks, &[released(2)]);
        assert_eq!(devices(&ledger.due(&hooks, &HeldBack::new()).free), ["a after a-2"]);
        let mut both = self::ledger(&[made(1, "a"), made(2, "a")]);
        release(&mut both, &hooks, &[released(1), released(2)]);
        assert_eq!(
            devices(&both.due(&hooks, &HeldBack::new()).free),
            ["a after a-2"],
            "once for both"
        );
    }

    /// A daemon starts with a configuration that has renamed the resource of held devices.
    #[test]
    fn a_device_of_a_former_resource_has_the_hook_of_the_one_that_offers_it_now() {
        let name = |name: &str| -> ResourceName { name.parse().unwrap() };
        let former = |n: u64, key: &str| {
            let mut grant = grant(n, &format!("GPU-{n}"));
            grant.devices[0].key = key.into();
            Arc::new(grant)
        };
        let mut ledger = Ledger::default();
        let keys_of = [(1, "with"), (2, "without"), (3, "absent"), (4, ""), (5, "not offered")];
        for (n, key) in keys_of {
            ledger.evolve(&Entry::Grant(former(n, key)));
        }
        let state = GrantState::Released {
            pod: None,
            container: None,
            bound_at: None,
            released_at: Timestamp(9),
            other_pods: Vec::new(),
            released_by: "pod_gone".into(),
        };
        let moves: Vec<Entry> = (1..=5)
            .map(|n| Entry::Moved {
                alloc_id: AllocId::new(format!("a-{n}")),
                state: state.clone(),
            })
            .collect();
        let unknown = ReleaseHooks::of([
            (name("example.com/new"), Some(Sharing::Exclusive)),
            (name("example.com/other"), None),
        ]);
        let mut hooks = unknown.clone();
        hooks.note_device(&name("example.com/new"), "with", false);
        hooks.note_device(&name("example.com/other"), "without", true);
        hooks.note_device(&resource(), "with", true);
        hooks.note_device(&resource(), "not offered", true);
        let keys = |hooks: &ReleaseHooks| -> Vec<String> {
            let owed = owing(&ledger, hooks, &moves, std::iter::empty());
            let key = |entry: &Entry| match entry {
                Entry::Hook(hook) => hook.key.clone(),
                other => panic!("{other:?}"),
            };
            owed.iter().map(key).collect()
        };
        assert_eq!(keys(&hooks), ["with", "absent"]);
        let all = ["with", "without", "absent", "not offered"];
        assert_eq!(keys(&unknown), all, "the devices are not known yet");
        for entry in owing(&ledger, &unknown, &moves, std::iter::empty()).iter().chain(&moves) {
            ledger.evolve(entry);
        }
        assert_eq!(undue(&ledger, &unknown), []);
        let dropped = undue(&ledger, &hooks);
        assert!(
            matches!(&dropped[..], [Entry::Hook(hook)] if hook.key == "without"),
            "{dropped:?}"
        );
        let due = ledger.due(&hooks, &HeldBack::new());
        assert_eq!(due.all().count(), 3, "what is pending waits for its device");
        let none = ReleaseHooks::of([(name("example.com/new"), None)]);
        assert_eq!(undue(&ledger, &none).len(), 4);
    }

    #[test]
    fn a_shared_device_and_a_pool_are_free_when_every_share_is() {
        for (sharing, ids, whole) in [
            (Sharing::Replicas(3), ["a::0", "a::2"], "a"),
            (Sharing::Pool(3), ["0", "2"], "example.com/gpu"),
        ] {
            let hooks = hooks(sharing);
            let mut ledger = ledger(&[made(1, ids[0]), made(2, ids[1])]);
            release(&mut ledger, &hooks, &[released(1)]);
            assert!(ledger.owed().is_empty());
            release(&mut ledger, &hooks, &[released(2)]);
            assert_eq!(
                devices(&ledger.due(&hooks, &HeldBack::new()).free),
                [format!("{whole} after a-2")]
            );
            assert!(
                ledger.waits(&hooks, [].iter(), &grant(3, ids[0])).is_some(),
                "no share of it is given"
            );
        }
    }

    #[test]
    fn a_grant_waits_for_the_hook_also_while_the_release_is_being_written() {
        let hooks = hooks(Sharing::Exclusive);
        let mut ledger = ledger(&[made(1, "a")]);
        let reason = |refusal: Option<Refusal>| {
            refusal.map(|refusal| {
                if let Refusal::Unhealthy { reason, .. } = refusal {
                    reason
                } else {
                    Reason::Deselected
                }
            })
        };
        let uncommitted = owing(&ledger, &hooks, &[released(1)], [].iter());
        assert_eq!(
            reason(ledger.waits(&hooks, uncommitted.iter(), &grant(2, "a"))),
            Some(Reason::HookPending)
        );
        assert_eq!(reason(ledger.waits(&hooks, uncommitted.iter(), &grant(2, "b"))), None);
        // A grant that waits for the commit already holds the device.
        assert_eq!(owing(&ledger, &hooks, &[released(1)], [made(2, "a")].iter()), []);
        release(&mut ledger, &hooks, &[released(1)]);
        assert_eq!(
            reason(ledger.waits(&hooks, [].iter(), &grant(2, "a"))),
            Some(Reason::HookPending)
        );
        let failed = ended(&ledger, &run(&ledger), Err("no".into()), Timestamp(7)).unwrap();
        ledger.evolve(&failed);
        assert_eq!(
            reason(ledger.waits(&hooks, [].iter(), &grant(2, "a"))),
            Some(Reason::HookFailed)
        );
        let done = ended(&ledger, &run(&ledger), Ok(()), Timestamp(8)).unwrap();
        ledger.evolve(&done);
        assert_eq!(reason(ledger.waits(&hooks, [].iter(), &grant(2, "a"))), None);
    }

    #[test]
    fn a_failed_run_is_counted_and_the_run_of_an_earlier_release_counts_for_nothing() {
        let hooks = hooks(Sharing::Exclusive);
        let mut ledger = ledger(&[made(1, "a")]);
        release(&mut ledger, &hooks, &[released(1)]);
        let first = run(&ledger);
        for tries in 1..=2 {
            let failed = ended(&ledger, &run(&ledger), Err("no".into()), Timestamp(7)).unwrap();
            ledger.evolve(&failed);
            assert_eq!(
                run(&ledger).state,
                HookState::Failed { tries, failed_at: Timestamp(7), why: "no".into() }
            );
        }
        ledger.evolve(&Entry::Hook(Box::new(PendingHook {
            alloc_id: AllocId::new("a-9"),
            ..first.clone()
        })));
        assert_eq!(ended(&ledger, &first, Ok(()), Timestamp(8)), None);
    }

    #[test]
    fn a_hook_that_is_owed_while_somebody_holds_the_device_waits() {
        let hooks = hooks(Sharing::Exclusive);
        let mut ledger = ledger(&[made(1, "a")]);
        // The state after a torn write: the hook without the release.
        let owed = owing(&ledger, &hooks, &[released(1)], [].iter());
        apply(&mut ledger, &owed);
        assert!(
            ledger.due(&hooks, &HeldBack::new()).free.is_empty()
                && ledger.waits(&hooks, [].iter(), &grant(2, "a")).is_none()
        );
        release(&mut ledger, &hooks, &[released(1)]);
        assert_eq!(devices(&ledger.due(&hooks, &HeldBack::new()).free), ["a after a-1"]);
    }

    #[test]
    fn a_device_that_another_resource_has_by_its_key_is_held() {
        let hooks = hooks(Sharing::Exclusive);
        let keyed = |mut grant: Grant, resource: &str| {
            grant.resource = resource.parse().unwrap();
            grant.devices[0].key = "pci:0000:18:00.0/10de:2330".into();
            Entry::Grant(Arc::new(grant))
        };
        let mut ledger = ledger(&[
            keyed(grant(1, "a"), "example.com/gpu"),
            keyed(grant(2, "other"), "example.com/other"),
        ]);
        release(&mut ledger, &hooks, &[released(1)]);
        assert!(ledger.owed().is_empty());
        // That resource has no gate: no container is held back there.
        let mut ledger = self::ledger(&[keyed(grant(1, "a"), "example.com/gpu")]);
        release(&mut ledger, &hooks, &[released(1)]);
        ledger.evolve(&keyed(grant(2, "other"), "example.com/other"));
        let held_back = HeldBack::from([(resource(), DeviceId::new("a"))]);
        assert_eq!((ledger.due(&hooks, &held_back), ledger.owed().len()), (DueHooks::default(), 1));
    }

    #[test]
    fn an_exclusive_device_that_another_pod_has_already_is_owed_its_hook_which_waits_for_that_pod_to_be_held_back()
     {
        let hooks = hooks(Sharing::Exclusive);
        let of = |uid: Option<&str>, n: u64| {
            let state = uid.map_or(GrantState::Granted, |uid| GrantState::Bound {
                pod: pod(uid),
                container: "main".into(),
                bound_at: Timestamp(n),
            });
            Entry::Grant(Arc::new(Grant { state, ..grant(n, "a") }))
        };
        for next in [Some("u2"), None] {
            let mut ledger = ledger(&[of(Some("u1"), 1), of(next, 2)]);
            let uncommitted = owing(&ledger, &hooks, &[released(1)], [].iter());
            assert_eq!(
                (uncommitted.len(), ledger.waits(&hooks, uncommitted.iter(), &grant(3, "a"))),
                (1, None),
                "nor while it is written"
            );
            release(&mut ledger, &hooks, &[released(1)]);
            assert_eq!(
                ledger.due(&hooks, &HeldBack::new()),
                DueHooks::default(),
                "a container may run with it"
            );
            assert_eq!(
                ledger.waits(&hooks, [].iter(), &grant(3, "a")),
                None,
                "the kubelet decides who has it"
            );
            let held_back = HeldBack::from([(resource(), DeviceId::new("a"))]);
            let due = ledger.due(&hooks, &held_back);
            assert_eq!((devices(&due.gated), due.free.len()), (vec!["a after a-1".to_owned()], 0));
            release(&mut ledger, &hooks, &[released(2)]);
            assert_eq!(devices(&ledger.due(&hooks, &held_back).free), ["a after a-2"]);
        }
        // Shares are never given to the next pod alone.
        let hooks = self::hooks(Sharing::Replicas(2));
        let mut ledger = ledger(&[of(Some("u1"), 1), of(Some("u2"), 2)]);
        release(&mut ledger, &hooks, &[released(1)]);
        assert!(ledger.owed().is_empty());
    }

    #[test]
    fn a_grant_that_was_never_started_owes_for_whoever_got_the_device_after_it() {
        let hooks = hooks(Sharing::Exclusive);
        let never = |n: u64| {
            let (released_at, released_by) = (Timestamp(100), "never_started".to_owned());
            Entry::Moved {
                alloc_id: grant(n, "").alloc_id,
                state: GrantState::Released {
                    pod: None,
                    container: None,
                    bound_at: None,
                    released_at,
                    other_pods: Vec::new(),
                    released_by,
                },
            }
        };
        let mut ledger = ledger(&[made(1, "a"), made(2, "a")]);
        release(&mut ledger, &hooks, &[never(1)]);
        assert_eq!(devices(ledger.owed()), ["a after a-1"]);
        let mut ledger = self::ledger(&[made(1, "a"), made(2, "a")]);
        release(&mut ledger, &hooks, &[never(2)]);
        assert!(ledger.owed().is_empty(), "the one before it may run");
    }

    #[test]
    fn what_the_configuration_has_no_more_is_owed_no_more() {
        let hooks = hooks(Sharing::Exclusive);
        let mut ledger = ledger(&[made(1, "a")]);
        release(&mut ledger, &hooks, &[released(1)]);
        assert!(undue(&ledger, &hooks).is_empty());
        let former = undue(&ledger, &ReleaseHooks::default());
        apply(&mut ledger, &former);
        assert!(ledger.owed().is_empty());
    }

    proptest! {
        /// For any order of events: a free device that was held since its last hook has a pending
        /// one, a held one has none due, and the recovered state is the known state.
        #[test]
        fn no_device_is_free_without_its_hook(steps in prop::collection::vec((0..4_u8, 0..3_usize), 0..60)) {
            let hooks = hooks(Sharing::Replicas(2));
            let (mut ledger, mut n) = (Ledger::default(), 0);
            let mut dirty: BTreeSet<&str> = BTreeSet::new();
            for (kind, which) in steps {
                let device = ["a", "b", "c"][which];
                let holders: Vec<AllocId> = ledger.grants().filter(|grant| grant.devices[0].id.as_str().starts_with(device))
                    .map(|grant| grant.alloc_id.clone()).collect();
                match kind {
                    0 => {
                        n += 1;
                        let wanted = grant(n, &format!("{device}::{}", n % 2));
                        let waits = ledger.waits(&hooks, [].iter(), &wanted).is_some();
                        prop_assert_eq!(waits, holders.is_empty() && dirty.contains(device));
                        if !waits {
                            ledger.evolve(&Entry::Grant(Arc::new(wanted)));
                            dirty.insert(device);
                        }
                    }
                    1 => {
                        let Some(alloc_id) = holders.first() else { continue };
                        let Entry::Moved { state, .. } = released(n) else { continue };
                        release(&mut ledger, &hooks, &[Entry::Moved { alloc_id: alloc_id.clone(), state }]);
                    }
                    kind => {
                        let Some(hook) = ledger.due(&hooks, &HeldBack::new()).free.get(&resource()).and_then(|devices| devices.get(&DeviceId::new(device))).cloned() else { continue };
                        let entry = ended(&ledger, &hook, if kind == 2 { Ok(()) } else { Err("no".into()) }, Timestamp(n)).unwrap();
                        ledger.evolve(&entry);
                        if kind == 2 {
                            dirty.remove(device);
                        }
                    }
                }
                let due: BTreeSet<String> = ledger.due(&hooks, &HeldBack::new()).free.values().flat_map(BTreeMap::keys).map(ToString::to_string).collect();
                let held = |device: &str| ledger.grants().any(|grant| grant.devices[0].id.as_str().starts_with(device));
                let free: BTreeSet<String> = dirty.iter().filter(|device| !held(device)).map(ToString::to_string).collect();
                prop_assert_eq!(due, free);
                let kept = ledger.grants().map(|grant| (**grant).clone()).collect::<Vec<_>>();
                prop_assert_eq!(&Ledger::from_recovered(kept, BTreeMap::new(), Listed::new(), ledger.owed().clone(), BTreeMap::new()), &ledger);
            }
        }
    }
}
