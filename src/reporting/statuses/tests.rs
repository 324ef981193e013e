//! The decisions against a model of the API server: by tables, and by random histories.

use super::super::claims::{self, Content, Network, Networks, SeenEntry};
use super::super::objects::Status;
use super::*;
use crate::domain::{
    AllocId, Allocated, ClaimHold, ClaimedDevice, ContainerEdits, DeviceId, DraName, Grant,
    GrantState, Health, Reason, Verdicts,
};
use crate::reporting::tests::inventory;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

const NODE: &str = "gpu-7";
/// Requests in a minute: eight at once, and one a second.
const REQUESTS_A_MINUTE: usize = 68;

fn key(device: &str) -> EntryKey {
    let name = DraName { pool: format!("{NODE}/char"), device: device.into() };
    EntryKey { name, share_id: None }
}

fn content(status: Status, reason: &str) -> Content {
    Content { status, reason: reason.into(), message: String::new() }
}

/// A claim in the API server, with a device of its own name.
#[derive(Debug, Clone)]
struct Object {
    is_allocated: bool,
    entries: Stored,
}

/// The truth, and the API server.
struct World {
    now: Duration,
    /// The prepared claims: the number of the allocation, the status of the device, its interface.
    prepared: BTreeMap<String, (u32, Status, Option<Network>)>,
    /// The reading in the message about each device.
    reading: u32,
    objects: BTreeMap<String, Object>,
    answers: bool,
    allocations: u32,
    requests: Vec<Duration>,
    writes: usize,
    reads: usize,
}

impl World {
    fn new() -> Self {
        World {
            now: Duration::from_secs(1000),
            prepared: BTreeMap::new(),
            reading: 0,
            objects: BTreeMap::new(),
            answers: true,
            allocations: 0,
            requests: Vec::new(),
            writes: 0,
            reads: 0,
        }
    }

    fn moment(&self) -> Moment {
        let wall = Timestamp(u64::try_from(self.now.as_millis()).unwrap());
        Moment { boot: self.now, wall }
    }

    /// The control plane allocates the claim again, and the kubelet has it prepared.
    fn prepare(&mut self, claim: &str) {
        self.allocations += 1;
        let object = Object { is_allocated: true, entries: Stored::new() };
        self.objects.insert(claim.into(), object);
        self.prepared.insert(claim.into(), (self.allocations, Status::True, None));
    }

    fn deallocate(&mut self, claim: &str) {
        if let Some(object) = self.objects.get_mut(claim) {
            (object.is_allocated, object.entries) = (false, Stored::new());
        }
    }

    fn seen(&self) -> BTreeMap<String, SeenClaim> {
        let seen = self.prepared.iter().map(|(name, (allocation, status, network))| {
            let claim = ClaimRef { uid: name.clone(), namespace: "ml".into(), name: name.clone() };
            let healthy =
                Content { message: self.reading.to_string(), ..content(*status, status.as_str()) };
            let conditions = [content(Status::True, "Prepared"), healthy];
            let entry = SeenEntry { conditions, network: network.clone() };
            let seen = SeenClaim {
                claim,
                grants: BTreeSet::from([AllocId::new(allocation.to_string())]),
                is_older: false,
                entries: BTreeMap::from([(key(name), entry)]),
            };
            (name.clone(), seen)
        });
        seen.collect()
    }

    fn answer(&mut self, request: &Request, sent: Option<Stored>) -> Outcome<Stored> {
        self.requests.push(self.now);
        if !self.answers {
            return Outcome::Failed(None);
        }
        match request {
            Request::Read(of) => {
                self.reads += 1;
                let found = self.objects.get(&of.uid);
                found.map_or(Outcome::Absent, |it| Outcome::Accepted(it.entries.clone()))
            }
            Request::Write(of, _) => {
                let sent = sent.unwrap();
                let Some(object) = self.objects.get_mut(&of.uid) else { return Outcome::Absent };
                if !object.is_allocated && !sent.is_empty() {
                    return Outcome::Refused;
                }
                self.writes += usize::from(object.entries != sent);
                object.entries = sent;
                Outcome::Accepted(Stored::new())
            }
        }
    }

    /// Lets time pass until this time, with all that is due.
    fn pass(&mut self, statuses: &mut Statuses, until: Duration) {
        statuses.observe(self.seen(), self.moment());
        loop {
            match statuses.next(self.moment()) {
                Step::Write(request) => {
                    let sent = statuses.in_flight.as_ref().and_then(|(_, sent)| sent.clone());
                    let outcome = self.answer(&request, sent);
                    statuses.done(outcome, self.moment());
                }
                Step::Wait(Some(at)) if at <= until => {
                    assert!(at > self.now, "a wait of no time");
                    self.now = at;
                }
                Step::Wait(_) => break,
            }
        }
        self.now = until;
    }

    fn pass_for(&mut self, statuses: &mut Statuses, seconds: u64) {
        let until = self.now + Duration::from_secs(seconds);
        self.pass(statuses, until);
    }

    fn stored(&self, claim: &str) -> Option<(Status, Timestamp)> {
        let entry = self.objects.get(claim)?.entries.get(&key(claim))?;
        let (content, time) = entry.conditions[1].as_ref()?;
        Some((content.status, *time))
    }
}

#[test]
fn a_prepared_claim_is_written_once_and_its_failure_and_recovery_are() {
    let mut world = World::new();
    let mut statuses = Statuses::new(NODE);
    world.pass_for(&mut statuses, 60);
    assert!(world.requests.is_empty());
    world.prepare("a");
    world.pass_for(&mut statuses, 3);
    let (status, first) = world.stored("a").unwrap();
    assert_eq!((status, world.reads, world.writes), (Status::True, 0, 1));
    world.pass_for(&mut statuses, 3600);
    assert_eq!(world.requests.len(), 1, "nothing has changed");
    let failed = world.moment().wall;
    world.prepared.get_mut("a").unwrap().1 = Status::False;
    world.pass_for(&mut statuses, 3);
    assert_eq!(world.stored("a"), Some((Status::False, failed)));
    let ready = world.objects["a"].entries[&key("a")].conditions[0].clone().unwrap();
    assert_eq!(ready.1, first, "the time of a condition that did not change stays");
    // It flaps: the next write is 10 s later, and has the newest state.
    for status in [Status::True, Status::False, Status::True] {
        world.prepared.get_mut("a").unwrap().1 = status;
        world.pass_for(&mut statuses, 1);
    }
    assert_eq!(world.writes, 2);
    world.pass_for(&mut statuses, 10);
    assert_eq!((world.stored("a").unwrap().0, world.writes), (Status::True, 3));
}

#[test]
fn a_reading_that_changes_all_the_time_is_written_once_a_minute() {
    let mut world = World::new();
    let mut statuses = Statuses::new(NODE);
    statuses.observe(BTreeMap::new(), world.moment());
    world.prepare("a");
    for reading in 0..600 {
        world.reading = reading;
        world.pass_for(&mut statuses, 1);
    }
    assert!((10..=11).contains(&world.writes), "{}", world.writes);
    // A failure does not wait for that.
    world.prepared.get_mut("a").unwrap().1 = Status::False;
    world.pass_for(&mut statuses, 12);
    assert_eq!(world.stored("a").unwrap().0, Status::False);
    world.pass_for(&mut statuses, 3600);
    let entry = &world.objects["a"].entries[&key("a")];
    assert_eq!(entry.conditions[1].as_ref().unwrap().0.message, "599");
}

#[test]
fn a_restart_reads_each_claim_and_writes_nothing_and_an_unseen_interface_stays() {
    let mut world = World::new();
    let mut statuses = Statuses::new(NODE);
    statuses.observe(BTreeMap::new(), world.moment());
    let network = Network { interface_name: "ens1".into(), hardware_address: "02:00".into() };
    for claim in ["a", "b"] {
        world.prepare(claim);
        world.prepared.get_mut(claim).unwrap().2 = Some(network.clone());
    }
    world.pass_for(&mut statuses, 60);
    let before = world.objects["a"].entries.clone();
    assert_eq!(before[&key("a")].network, Some(network.clone()));
    // The interfaces are in the pods by now.
    world.prepared.values_mut().for_each(|it| it.2 = None);
    let mut statuses = Statuses::new(NODE);
    world.pass_for(&mut statuses, 60);
    assert_eq!((world.reads, world.writes), (2, 2));
    // A failure during the next restart is written, and the rest stays.
    world.prepared.get_mut("a").unwrap().1 = Status::False;
    let mut statuses = Statuses::new(NODE);
    world.pass_for(&mut statuses, 60);
    assert_eq!((world.reads, world.writes), (4, 3));
    let entry = &world.objects["a"].entries[&key("a")];
    assert_eq!(entry.network, Some(network));
    assert_eq!(entry.conditions[0], before[&key("a")].conditions[0]);
}

#[test]
fn the_entries_of_an_ended_claim_are_removed_if_the_control_plane_has_not_done_it() {
    let mut world = World::new();
    let mut statuses = Statuses::new(NODE);
    statuses.observe(BTreeMap::new(), world.moment());
    for claim in ["kept", "deallocated", "deleted", "again"] {
        world.prepare(claim);
    }
    world.pass_for(&mut statuses, 10);
    assert_eq!(world.writes, 4);
    world.prepared.clear();
    world.pass_for(&mut statuses, 5);
    world.deallocate("deallocated");
    world.objects.remove("deleted");
    world.prepare("again");
    world.pass_for(&mut statuses, 60);
    assert_eq!(world.stored("kept"), None);
    assert_eq!(world.stored("again").map(|(status, _)| status), Some(Status::True));
    assert_eq!(world.writes, 6, "one removal, and one entry again");
    let requests = world.requests.len();
    world.pass_for(&mut statuses, 3600);
    assert_eq!((world.requests.len(), statuses.claims.len()), (requests, 1));
}

#[test]
fn a_refused_write_does_not_delay_other_claims_and_a_missing_right_is_tried_seldom() {
    let mut world = World::new();
    let mut statuses = Statuses::new(NODE);
    statuses.observe(BTreeMap::new(), world.moment());
    world.prepare("a");
    world.deallocate("a");
    world.prepare("b");
    world.pass_for(&mut statuses, 5);
    assert_eq!(world.stored("b").unwrap().0, Status::True);
    world.pass_for(&mut statuses, 290);
    assert_eq!(world.requests.len(), 2, "one of each");
    world.pass_for(&mut statuses, 600);
    assert_eq!(world.requests.len(), 3, "again after five to ten minutes");

    world.prepare("c");
    statuses.observe(world.seen(), world.moment());
    world.now += Duration::from_secs(5);
    assert!(matches!(statuses.next(world.moment()), Step::Write(Request::Write(..))));
    statuses.done(Outcome::Forbidden, world.moment());
    let Step::Wait(Some(until)) = statuses.next(world.moment()) else { panic!("a request") };
    assert!(until - world.now >= FORBIDDEN_FOR, "{until:?}");
}

#[test]
fn ended_claims_are_bounded_during_an_outage() {
    let mut world = World::new();
    let mut statuses = Statuses::new(NODE);
    statuses.observe(BTreeMap::new(), world.moment());
    for claim in 0..ENDED_MAX + 100 {
        world.prepare(&format!("c-{claim}"));
    }
    world.pass_for(&mut statuses, 600);
    assert_eq!((world.writes, statuses.is_complete()), (ENDED_MAX + 100, true));
    world.answers = false;
    world.prepared.clear();
    world.pass_for(&mut statuses, 60);
    assert_eq!(statuses.claims.len(), ENDED_MAX);
}

fn claimed(device: &str, share_id: Option<&str>) -> ClaimedDevice {
    let name = DraName { pool: format!("{NODE}/char"), device: device.into() };
    let share_id = share_id.map(str::to_owned);
    ClaimedDevice {
        allocated: Allocated { request: "r".into(), name, share_id, admin: false },
        id: DeviceId::new(device),
        cdi_devices: Vec::new(),
        edits: ContainerEdits::default(),
        metadata: String::new(),
    }
}

/// A grant of a claim with these devices.
fn grant(claim: &str, devices: Vec<ClaimedDevice>, is_unprepared: bool) -> Arc<Grant> {
    let of = ClaimRef { uid: format!("uid-{claim}"), namespace: "ml".into(), name: claim.into() };
    let hold = ClaimHold { claim: of, allocation: "x".into(), devices };
    Arc::new(Grant {
        alloc_id: AllocId::new("a1"),
        resource: "a.b/c".parse().unwrap(),
        devices: Vec::new(),
        edits: ContainerEdits::default(),
        claim: Some(Arc::new(hold)),
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state: GrantState::Prepared {
            pods: Vec::new(),
            prepared_at: Timestamp(1),
            unprepared_at: is_unprepared.then_some(Timestamp(2)),
        },
    })
}

#[test]
fn the_patch_has_what_the_api_server_accepts() {
    let inventory = inventory(
        [
            ("gpu-0", Health::Healthy),
            ("gpu-1", Health::Unhealthy(Reason::PortDown)),
            ("gpu-2", Health::Unhealthy(Reason::Unread)),
        ]
        .map(|(id, health)| (id.to_owned(), health)),
    );
    let share = "b8e3a3c0-0000-4000-8000-000000000001";
    let devices = vec![
        claimed("gpu-0", Some(share)),
        claimed("gpu-1", None),
        claimed("gpu-2", None),
        claimed("gpu-9", None),
    ];
    let grants =
        [grant("train", devices, false), grant("ended", vec![claimed("gpu-1", None)], true)];
    let network = Network { interface_name: "ens1".into(), ..Network::default() };
    let networks = Networks::from([((AllocId::new("a1"), key("gpu-1")), Some(network))]);
    let seen = claims::seen(&inventory, &Verdicts::new(), &grants, &networks);
    assert_eq!(seen.keys().collect::<Vec<_>>(), ["uid-train"], "the other one is unprepared");
    let world = World::new();
    let mut statuses = Statuses::new(NODE);
    statuses.observe(BTreeMap::new(), world.moment());
    statuses.observe(seen, world.moment());
    let later = Moment { boot: world.now + Duration::from_secs(2), ..world.moment() };
    let Step::Write(Request::Write(of, patch)) = statuses.next(later) else { panic!("no write") };
    assert_eq!(of.to_string(), "ml/train");
    let condition = |of: &str, status: &str, reason: &str, message: &str| {
        json!({ "type": of, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "1970-01-01T00:16:40Z" })
    };
    let entry = |device: &str, healthy: Value| {
        let ready = condition("Ready", "True", "Prepared", &format!("a.b/c {device}"));
        json!({ "driver": "holdfast.dev", "pool": "gpu-7/char", "device": device,
            "conditions": [ready, healthy] })
    };
    let mut first = entry("gpu-0", condition("Healthy", "True", "Healthy", ""));
    first["shareID"] = share.into();
    let mut second = entry("gpu-1", condition("Healthy", "False", "PortDown", "port_down"));
    second["networkData"] = json!({ "interfaceName": "ens1" });
    let third = entry("gpu-2", condition("Healthy", "Unknown", "Unread", "unread"));
    let why = "the device is not in the inventory of the node";
    let last = entry("gpu-9", condition("Healthy", "Unknown", "NotFound", why));
    assert_eq!(
        serde_json::to_value(patch).unwrap(),
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "name": "train", "namespace": "ml", "uid": "uid-train" },
            "status": { "devices": [first, second, third, last] },
        })
    );
}

#[derive(Debug, Clone)]
enum Op {
    Prepare(usize),
    Unprepare(usize),
    Deallocate(usize),
    Health(usize, Status),
    Pass(u64),
    Answers(bool),
    Restart,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let status = prop_oneof![Just(Status::True), Just(Status::False), Just(Status::Unknown)];
    let op = prop_oneof![
        2 => (0..4_usize).prop_map(Op::Prepare),
        2 => (0..4_usize).prop_map(Op::Unprepare),
        1 => (0..4_usize).prop_map(Op::Deallocate),
        3 => (0..4_usize, status).prop_map(|(claim, status)| Op::Health(claim, status)),
        4 => (1..40_000_u64).prop_map(Op::Pass),
        1 => any::<bool>().prop_map(Op::Answers),
        1 => Just(Op::Restart),
    ];
    proptest::collection::vec(op, 1..100)
}

proptest! {
    /// Random claims, failures, outages and restarts. The control plane deallocates ended claims.
    #[test]
    fn the_status_ends_with_the_truth_and_the_rate_is_bounded(history in ops()) {
        const NAMES: [&str; 4] = ["a", "b", "c", "d"];
        let mut world = World::new();
        let mut statuses = Statuses::new(NODE);
        for op in history.into_iter().chain([Op::Answers(true), Op::Pass(3_600_000)]) {
            match op {
                Op::Prepare(claim) => world.prepare(NAMES[claim]),
                Op::Unprepare(claim) => drop(world.prepared.remove(NAMES[claim])),
                Op::Deallocate(claim) if !world.prepared.contains_key(NAMES[claim]) => {
                    world.deallocate(NAMES[claim]);
                }
                Op::Deallocate(_) => {}
                Op::Health(claim, status) => {
                    if let Some(it) = world.prepared.get_mut(NAMES[claim]) {
                        it.1 = status;
                    }
                }
                Op::Answers(answers) => world.answers = answers,
                Op::Restart => {
                    // What ended without a removal stays until it is deallocated.
                    for name in NAMES {
                        if !world.prepared.contains_key(name) {
                            world.deallocate(name);
                        }
                    }
                    statuses = Statuses::new(NODE);
                    world.requests.clear();
                }
                Op::Pass(time) => {
                    let until = world.now + Duration::from_millis(time);
                    world.pass(&mut statuses, until);
                }
            }
            statuses.observe(world.seen(), world.moment());
        }
        let minute = Duration::from_secs(60);
        for (first, at) in world.requests.iter().enumerate() {
            let within = world.requests[first..].iter().filter(|it| **it < *at + minute);
            prop_assert!(within.count() <= REQUESTS_A_MINUTE);
        }
        for name in NAMES {
            let truth = world.prepared.get(name).map(|(_, status, _)| *status);
            prop_assert_eq!(world.stored(name).map(|(status, _)| status), truth, "{}", name);
        }
        prop_assert!(statuses.is_complete());
    }
}
