//! When the records of a device are dropped: its id, and its verdict.
//!
//! A device is *absent* when the latest scan could search for it and did not find it, no list
//! contains it, and no grant holds it, suspect ones included. It is still remembered for a time: an
//! operator may put it back, and then it has its id (I6) and its verdict (I5) again. But devices
//! that come under ever new names, such as mediated devices or nodes with a serial number, would
//! fill the memory without an end.
//!
//! The limits, by kind of absent device:
//!
//! | kind | kept for | at most |
//! | --- | --- | --- |
//! | healthy, or only absent | 30 days | 256 |
//! | with a fault that a return does not clear | 30 days | 256 |
//! | with a pending after-release hook; both are dropped together and logged | 30 days | 1000 |
//! | with a cordon, or waiting for a person after repeated failures | until cleared | 1000 |
//!
//! Beyond its limit the device that has been absent longest is dropped. For the last two kinds that
//! is logged, with its name.

use super::{Change, Ledger};
use crate::domain::{DeviceId, Entry, HookState, Inventory, PendingHook, Timestamp, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// How long an absent device is remembered: a card that is sent in for repair is back within this
/// time.
pub const FORGOTTEN_AFTER: Duration = Duration::from_secs(30 * 24 * 3600);
/// The number of absent devices of one kind that are remembered. A verdict takes one or two
/// kilobytes, in a few places.
const GONE_MAX: usize = 256;
/// The same for those that need a person's attention.
const GONE_MAX_NOTED: usize = 1000;
/// A clock before this time has not been set yet: a machine without a battery begins in 1970. An
/// absence with such a time, or with a future time, counts from the next check.
const CLOCK_IS_SET: Timestamp = Timestamp(1_704_067_200_000);
/// Devices in one entry: a fraction of the limit of a record.
const BATCH: usize = 1000;

/// Why an absent device is remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Plain,
    Faulty,
    Owed,
    Noted,
}

impl Kind {
    fn most(self) -> usize {
        match self {
            Kind::Plain | Kind::Faulty => GONE_MAX,
            Kind::Owed | Kind::Noted => GONE_MAX_NOTED,
        }
    }
}

impl Ledger {
    /// Drops the records of devices.
    pub(super) fn forget(&mut self, devices: &[DeviceId]) -> Change {
        let devices: BTreeSet<&DeviceId> = devices.iter().collect();
        let is_named = self.names.values().any(|id| devices.contains(id));
        let is_known = |id: &DeviceId| devices.contains(id);
        if !is_named && !self.verdicts.keys().any(is_known) && !self.gone.keys().any(is_known) {
            return Change::Nothing;
        }
        if is_named {
            Arc::make_mut(&mut self.names).retain(|_, id| !devices.contains(id));
        }
        self.verdicts.retain(|id, _| !devices.contains(id));
        self.gone.retain(|id, _| !devices.contains(id));
        Change::Forgotten
    }

    /// The devices with any record, with the keys of those that have an id.
    fn remembered(&self) -> BTreeMap<&DeviceId, Vec<&str>> {
        let owed = self.owed.values().flat_map(BTreeMap::keys);
        let mut devices: BTreeMap<&DeviceId, Vec<&str>> = BTreeMap::new();
        for device in self.verdicts.keys().chain(owed).chain(self.gone.keys()) {
            devices.entry(device).or_default();
        }
        for (key, device) in &*self.names {
            devices.entry(device).or_default().push(key);
        }
        devices
    }

    /// The devices that a grant or a list contains.
    fn in_use(&self, inventory: &Inventory) -> BTreeSet<DeviceId> {
        let held = self
            .grants
            .values()
            .flat_map(|grant| &grant.devices)
            .flat_map(|device| [Some(device.id.clone()), device.id.shared()]);
        let listed = inventory.resources.values().flat_map(|offering| &offering.devices);
        let listed =
            listed.flat_map(|(id, offered)| [Some(id.clone()), Some(offered.device.id.clone())]);
        let offered = self
            .listed
            .values()
            .flat_map(|devices| devices.iter())
            .flat_map(|device| [Some(device.id.clone()), device.id.shared()]);
        held.chain(listed).chain(offered).flatten().collect()
    }

    fn kind(&self, device: &DeviceId) -> Kind {
        match self.verdicts.get(device) {
            Some(Verdict { cordon: Some(_), .. } | Verdict { is_latched: true, .. }) => Kind::Noted,
            _ if self.owed_hooks(device).next().is_some() => Kind::Owed,
            Some(verdict) if !verdict.faults.is_empty() => Kind::Faulty,
            _ => Kind::Plain,
        }
    }

    fn owed_hooks<'a>(&'a self, device: &'a DeviceId) -> impl Iterator<Item = &'a PendingHook> {
        self.owed.values().filter_map(move |devices| devices.get(device))
    }
}

/// The entries to write for devices that are absent, present again, or dropped; and the dropped
/// devices that a person must learn of. `found`: whether the latest scan has found a device with
/// one of these keys, or could not read where it may be.
#[must_use]
pub fn forget(
    ledger: &Ledger,
    found: impl Fn(&DeviceId, &[&str]) -> bool,
    inventory: &Inventory,
    now: Timestamp,
) -> (Vec<Entry>, Vec<DeviceId>) {
    let in_use = ledger.in_use(inventory);
    let (mut back, mut missing) = (Vec::new(), Vec::new());
    for (device, keys) in ledger.remembered() {
        if !in_use.contains(device) && !found(device, &keys) {
            missing.push(device);
        } else if ledger.gone.contains_key(device) {
            back.push(device.clone());
        }
    }
    let mut kinds: BTreeMap<Kind, Vec<(Timestamp, &DeviceId)>> = BTreeMap::new();
    for device in missing {
        let is_true =
            |since: &Timestamp| *since <= now && (*since >= CLOCK_IS_SET || now < CLOCK_IS_SET);
        let since = ledger.gone.get(device).copied().filter(is_true).unwrap_or(now);
        kinds.entry(ledger.kind(device)).or_default().push((since, device));
    }
    let oldest =
        now.0.saturating_sub(u64::try_from(FORGOTTEN_AFTER.as_millis()).unwrap_or(u64::MAX));
    let (mut gone, mut forgotten, mut reported) = (Vec::new(), Vec::new(), Vec::new());
    for (kind, mut devices) in kinds {
        devices.sort();
        let too_many = devices.len().saturating_sub(kind.most());
        for (place, (since, device)) in devices.into_iter().enumerate() {
            if place < too_many || kind != Kind::Noted && since.0 < oldest {
                forgotten.push(device.clone());
                reported.extend((kind >= Kind::Owed).then(|| device.clone()));
            } else if ledger.gone.get(device) != Some(&since) {
                gone.push(device.clone());
            }
        }
    }
    let mut entries = Vec::new();
    let in_batches = |devices: &[DeviceId], entry: &dyn Fn(Vec<DeviceId>) -> Entry| -> Vec<Entry> {
        devices.chunks(BATCH).map(|devices| entry(devices.to_vec())).collect()
    };
    entries.extend(in_batches(&back, &|devices| Entry::Gone { devices, since: None }));
    entries.extend(in_batches(&gone, &|devices| Entry::Gone { devices, since: Some(now) }));
    let dropped = forgotten.iter().flat_map(|device| ledger.owed_hooks(device));
    entries.extend(
        dropped.map(|hook| {
            Entry::Hook(Box::new(PendingHook { state: HookState::Done, ..hook.clone() }))
        }),
    );
    entries.extend(in_batches(&forgotten, &|devices| Entry::Forgotten { devices }));
    (entries, reported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        AllocId, Attributes, ContainerEdits, Cordon, Device, DeviceClass, Grant, GrantState,
        GrantedDevice, Health, Incident, Offered, Offering, PodRef, Reason, ResourceSpec, Unread,
        VerdictState,
    };

    const DAY: u64 = 24 * 3600 * 1000;

    fn id(n: usize) -> DeviceId {
        DeviceId::new(format!("dev:sensor-{n:05}"))
    }

    fn named(n: usize) -> Entry {
        Entry::Named { key: format!("dev:/dev/sensor-{n:05}"), id: id(n) }
    }

    fn judged(n: usize, verdict: Verdict) -> Entry {
        Entry::Judged { device: id(n), verdict: Some(Box::new(verdict)) }
    }

    /// The verdict that health leaves for an absent device.
    fn went() -> Verdict {
        let incident = Incident {
            reason: Reason::DeviceGone,
            detail: String::new(),
            at: Timestamp(1),
            until: None,
            held_by: Vec::new(),
        };
        let state =
            VerdictState::Unhealthy { reason: Reason::DeviceGone, seen: Duration::from_secs(1) };
        Verdict { state, is_away: true, incidents: vec![incident], ..Verdict::default() }
    }

    fn faulty() -> Verdict {
        Verdict { faults: [(Reason::Xid, "Xid 79".to_owned())].into(), ..went() }
    }

    fn cordoned() -> Verdict {
        Verdict {
            cordon: Some(Cordon { reason: "fan".into(), at: Timestamp(1), evicts: false }),
            ..went()
        }
    }

    fn latched() -> Verdict {
        Verdict { is_latched: true, ..went() }
    }

    fn owed(n: usize) -> Entry {
        Entry::Hook(Box::new(PendingHook {
            resource: "example.com/sensor".parse().unwrap(),
            device: id(n),
            key: String::new(),
            alloc_id: AllocId::new("a"),
            pod: None,
            container: None,
            released_at: Timestamp(1),
            state: HookState::Due,
            objects: Vec::new(),
        }))
    }

    struct Stage {
        ledger: Ledger,
        found: BTreeSet<DeviceId>,
        unread: Unread,
        inventory: Inventory,
    }

    impl Stage {
        fn new(entries: impl IntoIterator<Item = Entry>) -> Self {
            let mut ledger = Ledger::default();
            for entry in entries {
                ledger.evolve(&entry);
            }
            Stage {
                ledger,
                found: BTreeSet::new(),
                unread: Unread::default(),
                inventory: Inventory::default(),
            }
        }

        fn list(&mut self, n: usize) {
            let name: crate::domain::ResourceName = "example.com/sensor".parse().unwrap();
            let device = Arc::new(Device {
                id: id(n),
                key: format!("dev:/dev/sensor-{n:05}"),
                class: DeviceClass::Char,
                pci: None,
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                attributes: Attributes::default(),
            });
            let spec = Arc::new(ResourceSpec::new(name.clone(), DeviceClass::Char));
            let devices = [(id(n), Offered { device, health: Health::Healthy })].into();
            self.inventory.resources = [(name, Arc::new(Offering { spec, devices }))].into();
        }

        /// Checks at this number of days after the clock was set. Returns the devices that a person
        /// must learn of.
        fn look(&mut self, days: u64) -> Vec<DeviceId> {
            self.look_at(Timestamp(CLOCK_IS_SET.0 + days * DAY))
        }

        fn look_at(&mut self, now: Timestamp) -> Vec<DeviceId> {
            let found = |ledger: &Ledger, inventory: &Inventory| {
                forget(
                    ledger,
                    |id, keys| {
                        self.found.contains(id) || keys.iter().any(|key| self.unread.may_hide(key))
                    },
                    inventory,
                    now,
                )
            };
            let (entries, reported) = found(&self.ledger, &self.inventory);
            for entry in &entries {
                assert_ne!(self.ledger.evolve(entry), Change::Nothing, "{entry:?}");
            }
            let again = found(&self.ledger, &self.inventory);
            assert!(again.0.is_empty(), "nothing new was seen: {:?}", again.0);
            reported
        }

        fn knows(&self, n: usize) -> bool {
            self.ledger.names().values().any(|known| *known == id(n))
        }
    }

    #[test]
    fn a_device_that_has_gone_is_remembered_for_its_time_and_then_no_more() {
        let verdicts = [(1, went()), (2, faulty()), (3, cordoned()), (4, latched())];
        let names = (0..6).map(named);
        let mut stage = Stage::new(
            names.chain(verdicts.map(|(n, verdict)| judged(n, verdict))).chain([owed(5)]),
        );
        assert!(stage.look(0).is_empty());
        assert_eq!(stage.ledger.gone.len(), 6);
        stage.look(29);
        assert!(
            (0..6).all(|n| stage.knows(n)) && stage.ledger.verdicts().len() == 4,
            "an operator may put it back"
        );
        let reported = stage.look(31);
        assert_eq!(
            (0..6).filter(|n| stage.knows(*n)).collect::<Vec<_>>(),
            [3, 4],
            "a cordon stays, and a device that waits for a person"
        );
        assert_eq!(
            (reported, stage.ledger.owed().len()),
            (vec![id(5)], 0),
            "the pending hook is dropped with its device, and that is logged"
        );
        assert_eq!(stage.ledger.verdicts().keys().cloned().collect::<Vec<_>>(), [id(3), id(4)]);
        stage.look(3650);
        assert!(stage.knows(3) && stage.knows(4));
        // Once that is cleared, it is like any other device that was removed long ago.
        stage.ledger.evolve(&judged(3, went()));
        stage.look(3650);
        assert!(!stage.knows(3) && stage.knows(4));
    }

    #[test]
    fn what_is_found_listed_or_held_has_not_gone_and_what_is_back_starts_again() {
        let mut stage = Stage::new((0..5).map(named).chain([judged(1, faulty())]));
        stage.found.insert(id(1));
        stage.list(2);
        let grant = |alloc_id: &str, device: DeviceId, state| Grant {
            alloc_id: AllocId::new(alloc_id),
            resource: "example.com/sensor".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: device,
                key: String::new(),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: String::new(),
            kubelet: None,
            granted_at: Timestamp(1),
            version: String::new(),
            state,
        };
        let (pod, container) = (
            PodRef { namespace: Some("x".into()), name: Some("p".into()), uid: "u".into() },
            "main".to_owned(),
        );
        let doubted = GrantState::Suspect {
            pod,
            container,
            bound_at: Timestamp(1),
            suspect_at: Timestamp(2),
        };
        // One is held by one of its shares, one by a grant whose pod is missing.
        let share = DeviceId::new(format!("{}::3", id(3)));
        for grant in [grant("a-1", share, GrantState::Granted), grant("a-2", id(4), doubted)] {
            stage.ledger.evolve(&Entry::Grant(Arc::new(grant)));
        }
        stage.look(0);
        assert_eq!(stage.ledger.gone.keys().cloned().collect::<Vec<_>>(), [id(0)]);
        stage.look(3650);
        assert_eq!((0..5).filter(|n| stage.knows(*n)).collect::<Vec<_>>(), [1, 2, 3, 4]);
        // It is removed, and is back on the last day.
        stage.found.clear();
        stage.look(4000);
        stage.found.insert(id(1));
        stage.look(4029);
        assert!(stage.ledger.gone.is_empty() || !stage.ledger.gone.contains_key(&id(1)));
        stage.found.clear();
        stage.look(4035);
        stage.look(4060);
        assert!(
            stage.knows(1) && stage.ledger.verdicts().contains_key(&id(1)),
            "its fault is not forgotten within the time"
        );
        stage.look(4066);
        assert!(!stage.knows(1) && stage.ledger.verdicts().is_empty());
    }

    #[test]
    fn a_flood_of_ever_new_names_is_small_at_once_and_pushes_out_no_fault_and_no_word() {
        let mut stage = Stage::new([
            named(0),
            judged(0, cordoned()),
            named(1),
            judged(1, faulty()),
            owed(2),
            named(3),
            judged(3, latched()),
        ]);
        stage.look(0);
        for n in 10..20_010 {
            stage.ledger.evolve(&named(n));
            stage.ledger.evolve(&judged(n, went()));
            if n % 500 == 9 {
                assert!(stage.look(1).is_empty(), "no person needs to know");
            }
        }
        stage.look(2);
        assert_eq!(
            (stage.ledger.gone.len(), stage.ledger.names().len(), stage.ledger.verdicts().len()),
            (260, 259, 259)
        );
        assert!([0, 1, 3].into_iter().all(|n| stage.knows(n)) && stage.ledger.owed().len() == 1);
        assert!(
            stage.knows(20_009) && !stage.knows(10),
            "those leave that have been gone for longest"
        );
        // Too many devices that need a person: that is reported, with the names.
        for n in 30_000..31_000 {
            stage.ledger.evolve(&judged(n, latched()));
        }
        let reported = stage.look(3);
        assert_eq!(reported, [id(0), id(3)]);
    }

    #[test]
    fn what_could_not_be_read_has_not_gone() {
        let gpu =
            Entry::Named { key: "pci:0000:3b:00.0/10de:2330".into(), id: DeviceId::new("GPU-1") };
        let mut stage = Stage::new((0..1000).map(named).chain([gpu]));
        stage.unread.resources.insert("example.com/sensor".parse().unwrap(), "EIO".into());
        stage.look(0);
        assert_eq!(
            stage.ledger.gone.keys().map(DeviceId::as_str).collect::<Vec<_>>(),
            ["GPU-1"],
            "all PCI functions were read"
        );
        stage.look(3650);
        assert_eq!((stage.ledger.names().len(), stage.ledger.gone.len()), (1000, 0));
        stage.unread = Unread::default();
        stage.look(3651);
        assert_eq!((stage.ledger.names().len(), stage.ledger.gone.len()), (GONE_MAX, GONE_MAX));
        // An absent device may be back where nothing can be read now.
        stage.unread.resources.insert("example.com/sensor".parse().unwrap(), "EIO".into());
        stage.look(3690);
        assert_eq!((stage.ledger.names().len(), stage.ledger.gone.len()), (GONE_MAX, 0));
    }

    #[test]
    fn a_clock_that_is_set_later_makes_nothing_old() {
        let mut stage = Stage::new([named(0)]);
        stage.look_at(Timestamp(5000));
        let writes = |stage: &Stage, now| {
            !forget(&stage.ledger, |_, _| false, &stage.inventory, Timestamp(now)).0.is_empty()
        };
        assert!(!writes(&stage, 6000), "a clock that is never set does not cause repeated writes");
        stage.look(0);
        assert!(stage.knows(0));
        stage.look(29);
        assert!(stage.knows(0));
        stage.look(31);
        assert!(!stage.knows(0));
    }

    #[test]
    fn a_clock_that_is_set_back_keeps_nothing_for_longer() {
        let mut stage = Stage::new([named(0)]);
        stage.look(3650);
        stage.look(0);
        stage.look(29);
        assert!(stage.knows(0));
        stage.look(31);
        assert!(!stage.knows(0));
    }

    #[test]
    fn without_anything_that_has_gone_nothing_is_written() {
        let mut stage = Stage::new((0..50).map(named));
        stage.found.extend((0..50).map(id));
        assert!(stage.look(0).is_empty() && stage.ledger.gone.is_empty());
        stage.look(3650);
        assert_eq!(stage.ledger.names().len(), 50);
    }
}
