//! The publisher against a small API server in memory, with faults.

use super::super::DRIVER;
use super::super::api::{
    Attribute, Capacity, Device, NO_SCHEDULE, RequestPolicy, ResourceSlice, Taint,
};
use super::super::attributes::{PCI_BUS_ID, SHARES};
use super::*;
use crate::domain::DraName;
use proptest::prelude::*;
use std::collections::VecDeque;

const POOL: &str = "n1/gpu";

fn node() -> NodeName {
    NodeName::new("n1").unwrap()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn name(number: usize) -> String {
    format!("d{number:03}")
}

fn claim(number: usize) -> DraName {
    DraName { pool: POOL.into(), device: name(number) }
}

fn device(number: usize, is_tainted: bool) -> Device {
    let taint = Taint {
        key: format!("{DRIVER}/xid"),
        value: "79".into(),
        effect: NO_SCHEDULE.into(),
        time_added: None,
    };
    Device {
        name: name(number),
        attributes: [("id".to_owned(), Attribute::text(name(number)))].into(),
        taints: if is_tainted { vec![taint] } else { Vec::new() },
        ..Device::default()
    }
}

/// Devices by number, those with a taint, and those that claims hold.
fn wanted(numbers: &[usize], tainted: &[usize], claimed: &[usize]) -> WantedDevices {
    let devices = numbers.iter().map(|it| (name(*it), device(*it, tainted.contains(it))));
    let pools = if numbers.is_empty() {
        BTreeMap::new()
    } else {
        BTreeMap::from([(POOL.to_owned(), devices.collect())])
    };
    WantedDevices {
        node: node(),
        pools,
        claimed: claimed.iter().map(|it| claim(*it)).collect(),
        dropped: BTreeSet::new(),
    }
}

/// How the server answers the next write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// With this status, and without an effect.
    Status(u16),
    /// Not at all, without an effect.
    LostRequest,
    /// Not at all, although it was carried out.
    LostAnswer,
}

/// An API server with the slices of one node.
#[derive(Debug, Default)]
struct Server {
    slices: BTreeMap<String, ResourceSlice>,
    last: u64,
    /// Events of the watch that are not delivered yet.
    events: VecDeque<Event>,
    faults: VecDeque<Fault>,
    drops_taints: bool,
    drops_counters: bool,
    drops_parts: bool,
    /// It wants counters in the slices of their devices (Kubernetes 1.34).
    wants_counters_together: bool,
    /// Devices that it refuses, and whether it names them.
    refuses: BTreeSet<String>,
    names_refused: bool,
    /// A pool that a policy refuses.
    refuses_pool: &'static str,
    writes: Vec<Duration>,
    lists: usize,
}

impl Server {
    fn stamp(&mut self) -> String {
        self.last += 1;
        self.last.to_string()
    }

    fn put(&mut self, mut slice: ResourceSlice) -> ResourceSlice {
        slice.metadata.resource_version = self.stamp();
        if slice.metadata.uid.is_empty() {
            slice.metadata.uid = format!("u{}", self.last);
        }
        if slice.metadata.name.is_empty() {
            slice.metadata.name = format!("{}{:05}", slice.metadata.generate_name, self.last);
        }
        for device in &mut slice.spec.devices {
            for taint in &mut device.taints {
                taint.time_added.get_or_insert_with(|| format!("t{}", self.last));
            }
            if self.drops_taints {
                device.taints.clear();
            }
            if self.drops_parts {
                device.undivide();
            }
            if self.drops_counters {
                device.consumes_counters.clear();
            }
        }
        if self.drops_counters {
            slice.spec.shared_counters.clear();
        }
        self.slices.insert(slice.metadata.name.clone(), slice.clone());
        self.events.push_back(Event::Changed(slice.clone()));
        slice
    }

    fn delete(&mut self, name: &str) {
        let mut slice = self.slices.remove(name).unwrap();
        slice.metadata.resource_version = self.stamp();
        self.events.push_back(Event::Deleted(slice));
    }

    fn wipe(&mut self) {
        for name in self.slices.keys().cloned().collect::<Vec<_>>() {
            self.delete(&name);
        }
    }

    fn status(status: u16) -> Event {
        Event::Failed(Failure { status: Some(status), ..Failure::default() })
    }

    fn refusal(&self, slice: &ResourceSlice) -> Option<Event> {
        let consumes = |it: &Device| !it.consumes_counters.is_empty();
        let consumer = slice.spec.devices.iter().position(consumes);
        if let Some(at) = consumer.filter(|_| self.wants_counters_together) {
            let field = format!("spec.devices[{at}].consumesCounters[0].counterSet");
            let causes = vec![Cause { field, message: "must exist".into() }];
            return Some(Event::Failed(Failure {
                status: Some(422),
                causes,
                ..Failure::default()
            }));
        }
        if slice.spec.pool.name == self.refuses_pool {
            return Some(Server::status(403));
        }
        let at = slice.spec.devices.iter().position(|it| self.refuses.contains(&it.name))?;
        let cause =
            Cause { field: format!("spec.devices[{at}].attributes[x]"), message: "bad".into() };
        let causes = if self.names_refused { vec![cause] } else { Vec::new() };
        Some(Event::Failed(Failure { status: Some(422), causes, ..Failure::default() }))
    }

    /// Carries out a request.
    fn answer(&mut self, action: Action, now: Duration) -> Event {
        if action == Action::List {
            self.lists += 1;
            self.events.clear();
            return Event::Listed(self.slices.values().cloned().collect());
        }
        self.writes.push(now);
        let fault = self.faults.pop_front();
        match fault {
            Some(Fault::Status(status)) => return Server::status(status),
            Some(Fault::LostRequest) => return Event::Failed(Failure::default()),
            Some(Fault::LostAnswer) | None => {}
        }
        let answer = self.carry_out(action);
        if fault == Some(Fault::LostAnswer) { Event::Failed(Failure::default()) } else { answer }
    }

    fn carry_out(&mut self, action: Action) -> Event {
        match action {
            Action::Create(slice) => {
                if self.slices.contains_key(&slice.metadata.name) {
                    return Server::status(409);
                }
                self.refusal(&slice).unwrap_or_else(|| Event::Accepted(Some(self.put(slice))))
            }
            Action::Update(slice) => {
                let Some(known) = self.slices.get(&slice.metadata.name) else {
                    return Server::status(404);
                };
                if known.metadata.resource_version != slice.metadata.resource_version {
                    return Server::status(409);
                }
                self.refusal(&slice).unwrap_or_else(|| Event::Accepted(Some(self.put(slice))))
            }
            Action::Delete { name, uid, resource_version } => {
                let Some(known) = self.slices.get(&name) else { return Server::status(404) };
                if (&known.metadata.uid, &known.metadata.resource_version)
                    != (&uid, &resource_version)
                {
                    return Server::status(409);
                }
                self.delete(&name);
                Event::Accepted(None)
            }
            Action::List | Action::Wait(_) => unreachable!("no write"),
        }
    }

    /// The devices that the scheduler uses: those of the pool's newest generation. `None` if that
    /// is incomplete, if a name is there twice, or if a device consumes a set that is not there.
    fn scheduled(&self) -> Option<BTreeMap<String, Device>> {
        let of_pool = || self.slices.values().filter(|slice| slice.spec.pool.name == POOL);
        let Some(newest) = of_pool().map(|slice| slice.spec.pool.generation).max() else {
            return Some(BTreeMap::new());
        };
        let slices: Vec<_> =
            of_pool().filter(|slice| slice.spec.pool.generation == newest).collect();
        let count = i64::try_from(slices.len()).unwrap();
        let mut devices = BTreeMap::new();
        let sets = slices.iter().flat_map(|slice| &slice.spec.shared_counters);
        let sets: BTreeSet<&str> = sets.map(|set| set.name.as_str()).collect();
        for slice in slices {
            if slice.spec.pool.resource_slice_count != count {
                return None;
            }
            for device in &slice.spec.devices {
                let mut consumed = device.consumes_counters.iter();
                consumed.all(|it| sets.contains(&*it.counter_set)).then_some(())?;
                devices.insert(device.name.clone(), device.clone()).is_none().then_some(())?;
            }
        }
        Some(devices)
    }
}

fn owner(uid: &str) -> Option<OwnerReference> {
    Some(OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: "n1".into(),
        uid: uid.into(),
        controller: Some(true),
    })
}

/// The node joins after the first slices, and is deleted and created again later.
#[test]
fn the_slices_belong_to_the_present_object_of_the_node() {
    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    let owners = |world: &World| -> Vec<Vec<String>> {
        let slices = world.server.slices.values();
        let uids = |it: &ResourceSlice| {
            it.metadata.owner_references.iter().map(|owner| owner.uid.clone()).collect()
        };
        slices.map(uids).collect()
    };
    assert_eq!(owners(&world), [Vec::<String>::new()]);
    for uid in ["a", "b"] {
        world.on(Event::OwnerRead(owner(uid)));
        world.settle();
        assert_eq!(owners(&world), [[uid]]);
        let generations = world.server.slices.values().map(|it| it.spec.pool.generation);
        assert_eq!(generations.max(), Some(1));
        let writes = world.server.writes.len();
        world.on(Event::OwnerRead(owner(uid)));
        world.settle();
        assert_eq!(world.server.writes.len(), writes, "the same owner is no reason for a write");
    }
    // The object is absent for a moment: nothing is written for that.
    let writes = world.server.writes.len();
    world.on(Event::OwnerRead(None));
    world.settle();
    assert_eq!(world.server.writes.len(), writes);
}

/// A publisher, its server, and the time.
struct World {
    publisher: Publisher,
    server: Server,
    now: Duration,
    reports: Vec<Report>,
    claimed: BTreeSet<String>,
}

impl World {
    fn new() -> Self {
        let publisher = Publisher::new(node(), None);
        World {
            publisher,
            server: Server::default(),
            now: Duration::from_secs(1000),
            reports: Vec::new(),
            claimed: BTreeSet::new(),
        }
    }

    /// A world that has published these.
    fn with(wanted: WantedDevices) -> Self {
        let mut world = World::new();
        world.on(Event::DevicesChanged(wanted));
        world.settle();
        world
    }

    fn on(&mut self, event: Event) {
        if let Event::DevicesChanged(wanted) = &event {
            self.claimed = wanted.claimed.iter().map(|claim| claim.device.clone()).collect();
        }
        self.publisher.on(event, self.now);
        self.reports.extend(self.publisher.take_reports());
    }

    fn deliver(&mut self) {
        while let Some(event) = self.server.events.pop_front() {
            self.on(event);
        }
    }

    /// The devices of claims in all slices.
    fn held(&self) -> BTreeSet<String> {
        let slices = self.server.slices.values();
        let names = slices.flat_map(|slice| &slice.spec.devices).map(|it| it.name.clone());
        names.filter(|name| self.claimed.contains(name)).collect()
    }

    /// Sends the next request, if there is one now. Returns until when there is none.
    fn step(&mut self) -> Result<(), Option<Duration>> {
        let action = self.publisher.next(self.now);
        self.reports.extend(self.publisher.take_reports());
        match action {
            Action::Wait(until) => Err(until),
            action => {
                let held = self.held();
                let answer = self.server.answer(action, self.now);
                assert!(held.is_subset(&self.held()), "{held:?} became {:?}", self.held());
                self.on(answer);
                Ok(())
            }
        }
    }

    /// Runs for this time. The watch is as late as the steps.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        loop {
            match self.step() {
                Ok(()) => continue,
                Err(_) if !self.server.events.is_empty() => self.deliver(),
                Err(Some(until)) if until <= end => self.now = until.max(self.now + ms(1)),
                Err(_) => break,
            }
        }
        self.now = end;
    }

    /// Runs until nothing is left to do. Returns the time that it took.
    fn settle(&mut self) -> Duration {
        let start = self.now;
        for _ in 0..10_000 {
            self.deliver();
            if self.publisher.is_complete(self.now) && self.server.events.is_empty() {
                return self.now - start;
            }
            match self.step() {
                Ok(()) => {}
                Err(until) => self.now = self.now.max(until.unwrap()).max(self.now + ms(1)),
            }
        }
        panic!("never settles: {:#?}", self.server.slices);
    }

    fn names(&self) -> Vec<String> {
        self.server.scheduled().unwrap().into_keys().collect()
    }

    fn generations(&self) -> BTreeSet<(i64, i64)> {
        let pools = self.server.slices.values().map(|slice| &slice.spec.pool);
        pools.map(|pool| (pool.generation, pool.resource_slice_count)).collect()
    }
}

#[test]
fn the_first_slices_are_created_and_a_change_is_an_update_of_one() {
    let all: Vec<usize> = (0..100).collect();
    let mut world = World::with(wanted(&all, &[], &[]));
    assert_eq!(world.names().len(), 100);
    assert_eq!(world.generations(), [(1, 2)].into());
    let before = world.server.slices.clone();
    world.on(Event::DevicesChanged(wanted(&all, &[3], &[])));
    assert_eq!(world.publisher.next(world.now), Action::Wait(Some(world.now + ms(100))));
    world.settle();
    assert_eq!(world.generations(), [(1, 2)].into());
    let changed: Vec<&String> = before
        .iter()
        .filter(|(name, slice)| world.server.slices[*name] != **slice)
        .map(|(name, _)| name)
        .collect();
    assert_eq!(changed, ["n1-holdfast.dev-gpu-0"]);
    assert_eq!(world.server.lists, 1);
}

#[test]
fn good_news_waits_for_a_second_and_bad_news_does_not() {
    let mut world = World::with(wanted(&[1, 2], &[2], &[]));
    world.on(Event::DevicesChanged(wanted(&[1, 2], &[], &[])));
    assert_eq!(world.publisher.next(world.now), Action::Wait(Some(world.now + ms(1000))));
    world.on(Event::DevicesChanged(wanted(&[1, 2], &[1], &[])));
    assert_eq!(world.publisher.next(world.now), Action::Wait(Some(world.now + ms(100))));
    let writes = world.server.writes.len();
    world.settle();
    assert_eq!(world.server.writes.len(), writes + 1, "both are one write");
}

#[test]
fn the_time_of_a_taint_stays() {
    let mut world = World::with(wanted(&[1, 2], &[2], &[]));
    let time = |world: &World| {
        let devices = world.server.scheduled().unwrap();
        devices[&name(2)].taints[0].time_added.clone()
    };
    let before = time(&world);
    world.on(Event::DevicesChanged(wanted(&[1, 2], &[1, 2], &[])));
    world.settle();
    assert!(before.is_some() && time(&world) == before);
}

#[test]
fn a_change_of_two_slices_or_of_their_number_is_a_new_generation() {
    let all: Vec<usize> = (0..100).collect();
    let mut world = World::with(wanted(&all, &[], &[]));
    world.on(Event::DevicesChanged(wanted(&all, &[3, 90], &[])));
    world.settle();
    assert_eq!(world.generations(), [(2, 2)].into());
    world.on(Event::DevicesChanged(wanted(&all[..64], &[], &[])));
    world.settle();
    assert_eq!((world.generations(), world.names().len()), ([(3, 1)].into(), 64));
    world.on(Event::DevicesChanged(wanted(&[], &[], &[])));
    world.settle();
    assert_eq!((world.generations(), world.names().len()), ([(3, 1)].into(), 0));
}

#[test]
fn another_instance_adopts_the_slices_without_a_write() {
    let all: Vec<usize> = (0..100).collect();
    let mut world = World::with(wanted(&all, &[3], &[]));
    world.on(Event::DevicesChanged(wanted(&all[10..], &[], &[])));
    world.settle();
    let writes = world.server.writes.len();
    let mut next = World { server: world.server, ..World::new() };
    next.run(Duration::from_secs(30));
    assert_eq!(next.server.writes.len(), writes, "the devices are not known yet");
    next.on(Event::DevicesChanged(wanted(&all[10..], &[], &[])));
    next.settle();
    assert_eq!((next.server.writes.len(), next.names().len()), (writes, 90));
}

#[test]
fn deleted_slices_are_back_within_a_quarter_of_a_second() {
    let all: Vec<usize> = (0..400).collect();
    let mut world = World::with(wanted(&all, &[], &[5]));
    for wave in 1..=4 {
        world.now += Duration::from_secs(20);
        world.on(Event::KubeletRegistered);
        world.settle();
        world.server.wipe();
        let time = world.settle();
        assert!(time <= ms(250), "wave {wave}: {time:?}");
        assert_eq!((world.names().len(), world.generations()), (400, [(1, 7)].into()));
    }
    assert_eq!(world.reports, []);
}

#[test]
fn a_conflict_is_adopted_and_corrected() {
    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    let mut slice = world.server.slices["n1-holdfast.dev-gpu-0"].clone();
    slice.spec.devices.clear();
    slice.metadata.labels.insert("by".into(), "another".into());
    world.server.put(slice);
    let lost = world.server.events.pop_front();
    assert!(matches!(lost, Some(Event::Changed(_))), "this one is late");
    world.on(Event::DevicesChanged(wanted(&[1, 2, 3], &[], &[])));
    world.settle();
    assert_eq!(world.names(), ["d001", "d002", "d003"]);
    assert_eq!(world.server.slices["n1-holdfast.dev-gpu-0"].metadata.labels["by"], "another");
    world.on(lost.unwrap());
    world.settle();
    assert_eq!(world.names().len(), 3);
}

#[test]
fn the_name_of_another_drivers_slice_is_avoided() {
    let mut world = World::new();
    let other = ResourceSlice {
        metadata: api::ObjectMeta { name: "n1-holdfast.dev-gpu-0".into(), ..Default::default() },
        ..ResourceSlice::default()
    };
    world.server.put(other.clone());
    world.on(Event::DevicesChanged(wanted(&[1], &[], &[])));
    world.settle();
    assert_eq!((world.names().len(), world.server.slices.len()), (1, 2));
    assert_eq!(world.server.slices["n1-holdfast.dev-gpu-0"].spec, other.spec);
    world.on(Event::DevicesChanged(wanted(&[1, 2], &[], &[])));
    world.settle();
    assert_eq!((world.names().len(), world.server.slices.len()), (2, 2));
}

#[test]
fn a_refused_device_is_left_out_and_the_others_are_published() {
    let all: Vec<usize> = (0..64).collect();
    for names_refused in [true, false] {
        let mut world = World::new();
        world.server.refuses = [name(17), name(40)].into();
        world.server.names_refused = names_refused;
        world.on(Event::DevicesChanged(wanted(&all, &[], &[])));
        world.settle();
        assert_eq!(world.names().len(), 62, "named: {names_refused}");
        let reported: BTreeSet<String> = world
            .reports
            .iter()
            .map(|report| match report {
                Report::DeviceRefused { device, .. } => device.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(reported, world.server.refuses);
        assert!(world.server.writes.len() < 20, "{}", world.server.writes.len());
        world.server.refuses.clear();
        world.on(Event::DevicesChanged(wanted(&all, &[17], &[])));
        world.settle();
        assert_eq!(world.names().len(), 63, "it has changed, so it is tried again");
    }
}

#[test]
fn a_refused_form_of_a_claimed_device_keeps_its_former_one() {
    for names_refused in [true, false] {
        let mut world = World::with(wanted(&[1, 2], &[], &[1]));
        world.server.names_refused = names_refused;
        world.server.refuses.insert(name(1));
        world.on(Event::DevicesChanged(wanted(&[1, 2], &[1], &[1])));
        world.run(Duration::from_secs(30));
        assert_eq!(world.names(), ["d001", "d002"]);
        world.server.refuses.clear();
        world.run(Duration::from_secs(90));
        assert_eq!(world.names(), ["d001", "d002"]);
    }
}

#[test]
fn a_refusal_that_was_temporary_is_forgotten() {
    let mut world = World::new();
    world.server.faults.push_back(Fault::Status(422));
    world.on(Event::DevicesChanged(wanted(&[1], &[], &[])));
    world.settle();
    assert_eq!(world.names(), [""; 0]);
    world.run(Duration::from_secs(3600));
    assert_eq!(world.names(), ["d001"]);
}

#[test]
fn a_slice_that_is_refused_for_no_device_waits_for_a_minute() {
    let mut world = World::new();
    let cause = Cause { field: "spec.pool.name".into(), message: "bad".into() };
    world.on(Event::DevicesChanged(wanted(&[1], &[], &[])));
    world.step().unwrap();
    assert!(matches!(world.publisher.next(world.now), Action::Create(_)));
    let status = Some(422);
    world.on(Event::Failed(Failure { status, causes: vec![cause], ..Failure::default() }));
    assert_eq!(world.publisher.next(world.now), Action::Wait(Some(world.now + ms(60_000))));
    assert!(matches!(&world.reports[..], [Report::Refused { status: 422, .. }]));
}

#[test]
fn without_permission_one_try_is_made_each_minute() {
    let mut world = World::new();
    world.server.faults = [Fault::Status(403); 3].into();
    world.on(Event::DevicesChanged(wanted(&[1], &[], &[])));
    world.run(Duration::from_secs(170));
    assert_eq!((world.server.writes.len(), world.reports.len()), (3, 3));
    world.run(Duration::from_secs(60));
    assert_eq!(world.names(), ["d001"]);
}

#[test]
fn the_pause_that_the_server_asks_for_is_kept_and_not_much_longer() {
    let mut world = World::new();
    world.on(Event::DevicesChanged(wanted(&[1], &[], &[])));
    world.step().unwrap();
    assert!(matches!(world.publisher.next(world.now), Action::Create(_)));
    let retry_after = Some(Duration::from_secs(20));
    world.on(Event::Failed(Failure { status: Some(429), retry_after, ..Failure::default() }));
    let Action::Wait(Some(until)) = world.publisher.next(world.now) else { panic!("a pause") };
    let pause = until - world.now;
    assert!((20..25).contains(&pause.as_secs()), "{pause:?}");
    world.run(pause + ms(1));
    assert_eq!(world.names(), ["d001"]);
}

#[test]
fn a_pool_that_is_refused_delays_no_other_pool() {
    let mut world = World::new();
    world.server.refuses_pool = "n1/char";
    let both = |tainted: &[usize]| {
        let mut both = wanted(&[1, 2], tainted, &[]);
        both.pools.insert("n1/char".into(), [(name(9), device(9, false))].into());
        both
    };
    assert!("n1/char" < POOL, "it is written first");
    world.on(Event::DevicesChanged(both(&[])));
    world.run(Duration::from_secs(5));
    assert_eq!(world.names(), ["d001", "d002"]);
    assert!(matches!(world.reports[..], [Report::Refused { status: 403, .. }]));
    assert!(!world.publisher.is_complete(world.now));
    for round in 0..3 {
        world.on(Event::DevicesChanged(both(if round % 2 == 0 { &[2] } else { &[] })));
        world.run(Duration::from_secs(5));
        let scheduled = world.server.scheduled().unwrap();
        assert_eq!(scheduled[&name(2)].taints.is_empty(), round % 2 == 1);
    }
    let writes = world.server.writes.len();
    world.run(Duration::from_secs(600));
    assert!((9..=11).contains(&(world.server.writes.len() - writes)), "one try in a minute");
    world.server.refuses_pool = "";
    world.run(Duration::from_secs(61));
    assert_eq!(world.server.slices.len(), 2);
    assert!(world.publisher.is_complete(world.now));
}

#[test]
fn a_server_that_drops_taints_has_no_tainted_device() {
    let mut world = World::new();
    world.server.drops_taints = true;
    world.on(Event::DevicesChanged(wanted(&[1, 2, 3], &[2, 3], &[3])));
    world.settle();
    assert_eq!(world.names(), ["d001", "d003"], "a claim holds 3");
    assert_eq!(world.reports, [Report::FieldsDropped("taints")]);
    let writes = world.server.writes.len();
    world.run(Duration::from_secs(3600));
    assert_eq!(world.server.writes.len(), writes, "no loop");
    world.server.drops_taints = false;
    world.on(Event::ServerChanged);
    world.settle();
    assert_eq!(world.names().len(), 3);
    let scheduled = world.server.scheduled().unwrap();
    assert_eq!(scheduled.values().filter(|it| !it.taints.is_empty()).count(), 2);
}

#[test]
fn a_server_that_drops_parts_of_capacities_has_devices_for_one_claim() {
    let divided = || {
        let mut wanted = wanted(&[1, 2], &[], &[]);
        let device = wanted.pools.values_mut().flat_map(|it| it.values_mut()).next().unwrap();
        device.allow_multiple_allocations = true;
        let usual = RequestPolicy { usual: "1".into(), valid_range: None };
        let shares = Capacity { value: "4".into(), request_policy: Some(usual) };
        device.capacity.insert(SHARES.to_owned(), shares);
        wanted
    };
    let is_divided = |world: &World| {
        let scheduled = world.server.scheduled().unwrap();
        let mut devices = scheduled.values().filter(|it| it.allow_multiple_allocations);
        devices.next().map(|it| it.capacity[SHARES].request_policy.is_some())
    };
    let mut world = World::new();
    world.server.drops_parts = true;
    world.on(Event::DevicesChanged(divided()));
    world.settle();
    assert_eq!((world.names().len(), is_divided(&world)), (2, None));
    assert_eq!(world.reports, [Report::FieldsDropped("parts of capacities")]);
    assert!(world.publisher.summary().drops_parts);
    let writes = world.server.writes.len();
    world.run(Duration::from_secs(3600));
    assert_eq!(world.server.writes.len(), writes, "no loop");
    world.server.drops_parts = false;
    world.on(Event::ServerChanged);
    world.settle();
    assert_eq!(is_divided(&world), Some(true));
    assert!(!world.publisher.summary().drops_parts);
    world.on(Event::DevicesChanged(wanted(&[1, 2], &[], &[])));
    world.settle();
    assert_eq!(is_divided(&world), None, "the key was removed");
}

/// Devices as adapters: each tenth is the physical function of the next nine.
fn with_parts(mut wanted: WantedDevices) -> WantedDevices {
    for (at, device) in wanted.pools.values_mut().flatten() {
        let number: usize = at[1..].parse().unwrap();
        let mut text = |key: &str, number| {
            device.attributes.insert(key.to_owned(), Attribute::text(name(number)))
        };
        text(PCI_BUS_ID, number);
        if !number.is_multiple_of(10) {
            text("pf", number - number % 10);
        }
        device.attributes.insert("shared".to_owned(), Attribute::Bool(false));
    }
    wanted
}

/// How many devices consume counters, as the scheduler sees them, and how many sets there are.
fn counted(world: &World) -> (usize, usize) {
    let scheduled = world.server.scheduled().expect("a complete pool");
    let consumers = scheduled.values().filter(|it| !it.consumes_counters.is_empty()).count();
    let sets = world.server.slices.values().map(|slice| slice.spec.shared_counters.len());
    (consumers, sets.sum())
}

#[test]
fn a_whole_that_comes_and_leaves_is_counted_with_its_parts() {
    let mut world = World::with(with_parts(wanted(&[21, 22, 30, 31], &[], &[])));
    assert_eq!(counted(&world), (2, 1), "the whole of 21 and 22 is not there");
    world.on(Event::DevicesChanged(with_parts(wanted(&[20, 21, 22, 30, 31], &[], &[]))));
    world.settle();
    assert_eq!(counted(&world), (5, 2));
    // Another instance finds it as it is.
    let mut next = World { server: world.server, ..World::new() };
    let writes = next.server.writes.len();
    next.on(Event::DevicesChanged(with_parts(wanted(&[20, 21, 22, 30, 31], &[], &[]))));
    next.settle();
    assert_eq!(next.server.writes.len(), writes, "nothing has changed");
    // A whole that a claim holds counts although it is absent.
    next.on(Event::DevicesChanged(with_parts(wanted(&[21, 22], &[], &[20]))));
    next.settle();
    assert_eq!(counted(&next), (3, 1));
    next.on(Event::DevicesChanged(with_parts(wanted(&[21, 22], &[], &[]))));
    next.settle();
    assert_eq!((counted(&next), next.server.slices.len()), ((0, 0), 1));
}

#[test]
fn a_server_without_counters_gets_the_devices_alone() {
    for is_refused in [false, true] {
        let mut world = World::new();
        world.server.drops_counters = !is_refused;
        world.server.wants_counters_together = is_refused;
        world.on(Event::DevicesChanged(with_parts(wanted(&[10, 11, 12], &[], &[]))));
        world.settle();
        assert_eq!((world.names().len(), counted(&world)), (3, (0, 0)));
        assert_eq!(world.server.slices.len(), 1, "no slice without devices is left");
        assert_eq!(world.reports, [Report::FieldsDropped("counters")]);
        let writes = world.server.writes.len();
        world.run(Duration::from_secs(3600));
        assert_eq!(world.server.writes.len(), writes, "no loop");
        world.server.drops_counters = false;
        world.server.wants_counters_together = false;
        world.on(Event::ServerChanged);
        world.settle();
        assert_eq!(counted(&world), (3, 1));
    }
}

#[test]
fn a_refused_whole_leaves_parts_without_counters() {
    for names_refused in [false, true] {
        let mut world = World::new();
        world.server.refuses = [name(10)].into();
        world.server.names_refused = names_refused;
        world.on(Event::DevicesChanged(with_parts(wanted(&[10, 11, 20, 21], &[], &[]))));
        world.settle();
        assert_eq!(world.names(), ["d011", "d020", "d021"], "{names_refused}");
        assert_eq!(counted(&world), (2, 1));
    }
}

#[test]
fn two_writers_make_a_truce() {
    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    let start = world.server.writes.len();
    let mut foreign = 0;
    let fights = |world: &mut World, foreign: &mut usize, time: Duration| {
        let end = world.now + time;
        while world.now < end {
            let slice = world.server.slices.get("n1-holdfast.dev-gpu-0").cloned();
            if let Some(mut slice) = slice.filter(|it| !it.spec.devices.is_empty()) {
                slice.spec.devices.clear();
                world.server.put(slice);
                *foreign += 1;
            }
            world.run(ms(200));
        }
    };
    fights(&mut world, &mut foreign, Duration::from_secs(600));
    let writes = world.server.writes.len() - start;
    assert!((20..40).contains(&writes), "{writes} writes, {foreign} foreign ones");
    assert_eq!(world.reports, [Report::Contended("n1-holdfast.dev-gpu-0".into())]);
    world.run(Duration::from_secs(100));
    assert_eq!(world.names().len(), 2);
    assert_eq!(world.reports.last(), Some(&Report::Uncontended), "without any event");
}

/// A second program with this driver's name deletes the slices that it does not know, and creates
/// its own. A kubelet that has just started deletes all of them too, and that is no contention.
#[test]
fn two_drivers_of_one_name_make_a_truce_and_a_starting_kubelet_does_not() {
    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    let start = world.server.writes.len();
    let theirs = {
        let mut slice = world.server.slices["n1-holdfast.dev-gpu-0"].clone();
        slice.metadata = api::ObjectMeta { name: "theirs".into(), ..Default::default() };
        slice.spec.pool.name = "n1".into();
        slice
    };
    let end = world.now + Duration::from_secs(300);
    while world.now < end {
        let own = world.server.slices.keys().find(|name| *name != "theirs").cloned();
        own.iter().for_each(|name| world.server.delete(name));
        if !world.server.slices.contains_key("theirs") {
            world.server.put(theirs.clone());
        }
        world.run(ms(500));
    }
    let writes = world.server.writes.len() - start;
    assert!((12..32).contains(&writes), "{writes} writes");
    assert!(matches!(&world.reports[..], [Report::Contended(_)]), "{:?}", world.reports);
    world.run(Duration::from_secs(100));
    assert_eq!(world.server.slices.keys().collect::<Vec<_>>(), ["n1-holdfast.dev-gpu-0"]);
    assert_eq!(world.reports.last(), Some(&Report::Uncontended));

    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    world.on(Event::KubeletRegistered);
    for wave in 0..12 {
        world.run(Duration::from_secs(5));
        world.server.wipe();
        let time = world.settle();
        assert!(time <= ms(250), "wave {wave}: {time:?}");
    }
    assert_eq!(world.reports, []);
}

#[test]
fn labels_of_another_program_are_no_reason_for_a_write_or_a_truce() {
    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    let writes = world.server.writes.len();
    for number in 0..20 {
        let mut slice = world.server.slices["n1-holdfast.dev-gpu-0"].clone();
        slice.metadata.labels.insert("seen".into(), number.to_string());
        world.server.put(slice);
        world.run(ms(100));
    }
    assert_eq!((world.server.writes.len(), world.reports.len()), (writes, 0));
    world.on(Event::DevicesChanged(wanted(&[1], &[], &[])));
    world.settle();
    assert_eq!(world.server.slices["n1-holdfast.dev-gpu-0"].metadata.labels["seen"], "19");
}

#[test]
fn a_foreign_slice_of_this_driver_is_deleted_and_the_pool_stays_complete() {
    let mut world = World::with(wanted(&[1, 2], &[], &[]));
    let mut slice = world.server.slices["n1-holdfast.dev-gpu-0"].clone();
    slice.metadata = api::ObjectMeta { name: "by-hand".into(), ..Default::default() };
    slice.spec.pool.generation = 7;
    world.server.put(slice);
    world.settle();
    assert_eq!((world.server.slices.len(), world.names().len()), (1, 2));
}

/// One step of a history.
#[derive(Debug, Clone)]
enum Step {
    /// The devices, the tainted ones, and the claims.
    Devices(BTreeSet<usize>, BTreeSet<usize>, BTreeSet<usize>),
    Wipe,
    Registered,
    WatchLost,
    Fault(Fault),
    /// Another program removes all devices of a slice.
    Emptied,
    Deliver,
    Run(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let some = |max| prop::collection::btree_set(0_usize..150, 0..max);
    let fault = prop_oneof![
        prop::sample::select(vec![403, 409, 429, 500, 503]).prop_map(Fault::Status),
        Just(Fault::LostRequest),
        Just(Fault::LostAnswer),
    ];
    let step = prop_oneof![
        3 => (some(150), some(10), some(4)).prop_map(|(all, bad, held)| Step::Devices(all, bad, held)),
        1 => Just(Step::Wipe),
        1 => Just(Step::Registered),
        1 => Just(Step::WatchLost),
        3 => fault.prop_map(Step::Fault),
        1 => Just(Step::Emptied),
        3 => Just(Step::Deliver),
        4 => (0_u64..3000).prop_map(Step::Run),
    ];
    prop::collection::vec(step, 1..30)
}

/// Carries out one step. The claims are of devices that are published and wanted.
fn carry_out(world: &mut World, step: Step, last: &mut Option<WantedDevices>, has_parts: bool) {
    match step {
        Step::Devices(all, bad, held) => {
            let all: Vec<usize> = all.into_iter().collect();
            let published = world.server.slices.values().flat_map(|it| &it.spec.devices);
            let published: BTreeSet<String> = published.map(|it| it.name.clone()).collect();
            let held = held.into_iter().filter(|it| published.contains(&name(*it)));
            let wanted =
                wanted(&all, &bad.into_iter().collect::<Vec<_>>(), &held.collect::<Vec<_>>());
            let wanted = if has_parts { with_parts(wanted) } else { wanted };
            *last = Some(wanted.clone());
            world.on(Event::DevicesChanged(wanted));
        }
        Step::Wipe => world.server.wipe(),
        Step::Registered => world.on(Event::KubeletRegistered),
        Step::WatchLost => {
            world.server.events.clear();
            world.on(Event::WatchLost);
        }
        Step::Fault(fault) => world.server.faults.push_back(fault),
        Step::Emptied => {
            let slice = world.server.slices.values().next().cloned();
            if let Some(mut slice) = slice {
                slice.spec.devices.retain(|it| world.claimed.contains(&it.name));
                world.server.put(slice);
            }
        }
        Step::Deliver => world.deliver(),
        // Requests without the events of the watch.
        Step::Run(time) => {
            let end = world.now + ms(time);
            while world.now < end {
                match world.step() {
                    Ok(()) => {}
                    Err(until) => {
                        let until = until.unwrap_or(end).min(end);
                        world.now = until.max(world.now + ms(1));
                    }
                }
            }
        }
    }
}

proptest! {
    /// After any history with faults, the server has what is wanted, and each pool is complete.
    /// No write removes a device that a claim holds, and the pace is kept.
    #[test]
    fn any_history_ends_with_the_offered_slices(
        steps in steps(),
        drops_taints: bool,
        drops_counters: bool,
        has_parts: bool,
    ) {
        let mut world = World::new();
        world.server.drops_taints = drops_taints;
        world.server.drops_counters = drops_counters;
        let mut last = None;
        for step in steps {
            carry_out(&mut world, step, &mut last, has_parts);
        }
        world.server.faults.clear();
        let Some(last) = last else { return Ok(()) };
        let time = world.settle();
        prop_assert!(time <= Duration::from_secs(130), "{time:?}");
        let mut wanted: BTreeMap<String, Device> =
            last.pools.get(POOL).cloned().unwrap_or_default();
        let scheduled = world.server.scheduled();
        prop_assert!(scheduled.is_some(), "incomplete: {:#?}", world.server.slices);
        let mut scheduled = scheduled.unwrap();
        for (name, device) in &mut scheduled {
            // A virtual function may be without its physical one.
            let is_whole = name.ends_with('0');
            let expected = usize::from(has_parts && !drops_counters && !is_whole);
            let consumed = std::mem::take(&mut device.consumes_counters).len();
            prop_assert!(is_whole || consumed <= expected, "{} consumes {}", name, consumed);
        }
        if drops_taints {
            wanted.retain(|name, it| it.taints.is_empty() || world.claimed.contains(name));
            wanted.values_mut().for_each(|it| it.taints.clear());
        }
        for (name, wanted) in &wanted {
            prop_assert!(scheduled.get(name).is_some_and(|it| it.is_like(wanted)), "{}", name);
        }
        let more = scheduled.keys().filter(|name| !wanted.contains_key(*name));
        for name in more {
            prop_assert!(world.claimed.contains(name), "{} is not wanted", name);
        }
        for (at, write) in world.server.writes.iter().enumerate() {
            let within = world.server.writes[at..].iter();
            let within = within.filter(|it| **it < *write + Duration::from_secs(10)).count();
            prop_assert!(within <= 18, "{within} writes in 10 s");
        }
        let writes = world.server.writes.len();
        world.run(Duration::from_secs(1200));
        prop_assert_eq!(world.server.writes.len(), writes);
    }
}
