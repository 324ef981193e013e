//! The cores against histories: by tables, and by random ones.

use super::condition::Stored;
use super::objects::{EventWrite, StatusPatch};
use super::*;
use crate::domain::{
    AllocId, Attributes, ContainerEdits, Device, DeviceClass, DeviceId, Grant, GrantState,
    GrantedDevice, Health, Incident, Inventory, Moment, Offered, Offering, PodRef, Reason,
    ResourceSpec, Timestamp, Verdict, Verdicts,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NODE: &str = "gpu-7";
/// Events of all targets in a minute: ten at once, and one each 6 s.
const EVENTS_A_MINUTE: usize = 20;

/// A simulated node: the health and the holder of each device, and a clock.
struct World {
    healths: Vec<Health>,
    holders: Vec<Option<u32>>,
    now: Duration,
    pods: u32,
    verdicts: Verdicts,
}

fn id(device: usize) -> String {
    format!("dev-{device:03}")
}

/// An inventory of one resource with these devices.
pub(super) fn inventory(healths: impl IntoIterator<Item = (String, Health)>) -> Inventory {
    let spec = Arc::new(ResourceSpec::new("a.b/c".parse().unwrap(), DeviceClass::Char));
    let offered = healths.into_iter().map(|(id, health)| {
        let device = Arc::new(Device {
            id: DeviceId::new(id),
            key: String::new(),
            class: DeviceClass::Char,
            pci: None,
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            attributes: Attributes::default(),
        });
        (device.id.clone(), Offered { device, health })
    });
    let offering = Offering { devices: offered.collect(), spec: Arc::clone(&spec) };
    Inventory { resources: BTreeMap::from([(spec.name.clone(), Arc::new(offering))]) }
}

impl World {
    fn new(devices: usize) -> Self {
        World {
            healths: vec![Health::Healthy; devices],
            holders: vec![None; devices],
            now: Duration::from_secs(1000),
            pods: 0,
            verdicts: Verdicts::new(),
        }
    }

    fn moment(&self) -> Moment {
        let wall = Timestamp(u64::try_from(self.now.as_millis()).unwrap());
        Moment { boot: self.now, wall }
    }

    /// Another pod gets this device.
    fn hold(&mut self, device: usize) {
        self.pods += 1;
        self.holders[device] = Some(self.pods);
    }

    fn fail(&mut self, device: usize, reason: Reason) {
        self.healths[device] = Health::Unhealthy(reason);
    }

    fn inventory(&self) -> Inventory {
        inventory(self.healths.iter().enumerate().map(|(n, health)| (id(n), *health)))
    }

    fn grants(&self) -> Vec<Arc<Grant>> {
        let held = self.holders.iter().enumerate();
        held.filter_map(|(n, pod)| Some(grant(&id(n), bound(Some(&format!("pod-{}", (*pod)?))))))
            .collect()
    }

    fn seen(&self, also: &BTreeSet<seen::DeviceName>) -> Seen {
        Seen::of(&self.inventory(), &self.verdicts, &self.grants(), also)
    }

    fn observe(&self, announcer: &mut Announcer) {
        announcer.observe(&self.seen(&announcer.announced()), self.now);
    }

    /// Lets time pass until the next write. `None` if there is none.
    fn until_write(&mut self, announcer: &mut Announcer) -> Option<EventWrite> {
        loop {
            match announcer.next(self.moment()) {
                Step::Write(write) => return Some(write),
                Step::Wait(None) => return None,
                Step::Wait(Some(until)) => {
                    assert!(until > self.now, "a wait of no time");
                    self.now = until;
                }
            }
        }
    }

    /// All Events until nothing is due, accepted.
    fn all(&mut self, announcer: &mut Announcer) -> Vec<Value> {
        self.observe(announcer);
        let mut all = Vec::new();
        while let Some(write) = self.until_write(announcer) {
            all.push(as_json(&write));
            announcer.done(&Outcome::Accepted(()), self.now);
        }
        all
    }
}

fn bound(pod: Option<&str>) -> GrantState {
    GrantState::Bound {
        pod: PodRef {
            uid: format!("uid-{}", pod.unwrap_or("x")),
            namespace: Some("team".into()),
            name: pod.map(str::to_owned),
        },
        container: "main".into(),
        bound_at: Timestamp(1),
    }
}

fn grant(device: &str, state: GrantState) -> Arc<Grant> {
    Arc::new(Grant {
        alloc_id: AllocId::new("a"),
        resource: "a.b/c".parse().unwrap(),
        devices: vec![GrantedDevice {
            id: DeviceId::new(device),
            key: String::new(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state,
    })
}

fn as_json(write: &EventWrite) -> Value {
    match write {
        EventWrite::Create(event) => serde_json::to_value(event).unwrap(),
        EventWrite::Patch(of, patch) => {
            let mut patch = serde_json::to_value(patch).unwrap();
            patch["of"] = of.name.clone().into();
            patch
        }
    }
}

/// What an Event is about, and its message.
fn brief(event: &Value) -> String {
    let of = &event["involvedObject"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!(
        "{}/{} {} {}",
        text(&of["kind"]),
        text(&of["name"]),
        text(&event["reason"]),
        text(&event["message"])
    )
}

fn announcer() -> Announcer {
    Announcer::new(NODE, Timestamp(0))
}

fn begun(world: &World) -> Announcer {
    let mut announcer = announcer();
    world.observe(&mut announcer);
    announcer
}

#[test]
fn a_failure_and_its_end_are_events_of_the_pod_and_of_the_node() {
    let mut world = World::new(2);
    world.hold(0);
    let mut announcer = begun(&world);
    world.fail(0, Reason::Xid);
    world.fail(1, Reason::Xid);
    let detail = "79, fallen off the bus".to_owned();
    let verdict = Verdict { faults: [(Reason::Xid, detail)].into(), ..Verdict::default() };
    world.verdicts.insert(DeviceId::new(id(0)), verdict);
    let events = world.all(&mut announcer);
    let xid = "is unhealthy: xid: 79, fallen off the bus";
    assert_eq!(
        events.iter().map(brief).collect::<Vec<_>>(),
        [
            format!("Node/gpu-7 DeviceUnhealthy a.b/c dev-000 of pod team/pod-1 {xid}"),
            format!("Pod/pod-1 DeviceUnhealthy a.b/c dev-000 {xid}"),
        ],
        "the free device is in the condition only"
    );
    let pod = &events[1];
    let name = pod["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("pod-1.") && name.len() == "pod-1.".len() + 16, "{name}");
    let at = "1970-01-01T00:16:42Z";
    let expected = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": name, "namespace": "team" },
        "involvedObject": { "apiVersion": "v1", "kind": "Pod", "namespace": "team",
                            "name": "pod-1", "uid": "uid-pod-1" },
        "reason": "DeviceUnhealthy", "message": format!("a.b/c dev-000 {xid}"),
        "source": { "component": "holdfast.dev", "host": NODE }, "type": "Warning",
        "firstTimestamp": at, "lastTimestamp": at, "count": 1, "action": "CheckHealth",
        "reportingComponent": "holdfast.dev", "reportingInstance": NODE,
    });
    assert_eq!(pod, &expected);
    let node = &events[0];
    assert_eq!(node["metadata"]["namespace"], "default");
    let of = json!({ "apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE });
    assert_eq!(node["involvedObject"], of);

    world.healths[0] = Health::Healthy;
    let events = world.all(&mut announcer);
    let messages: Vec<String> = events.iter().map(brief).collect();
    assert_eq!(
        messages,
        [
            "Node/gpu-7 DeviceRecovered a.b/c dev-000 is healthy again",
            "Pod/pod-1 DeviceRecovered a.b/c dev-000 is healthy again",
        ]
    );
    assert!(events.iter().all(|event| event["type"] == "Normal"));
    assert!(world.now < Duration::from_secs(1040), "{:?}", world.now);
    assert_eq!(world.all(&mut announcer), [] as [Value; 0]);
}

#[test]
fn a_storm_is_one_event_of_the_node() {
    let mut world = World::new(512);
    // One pod holds all of them.
    world.holders = vec![Some(1); 512];
    let mut announcer = begun(&world);
    (0..512).for_each(|device| world.fail(device, Reason::PortDown));
    let events: Vec<String> = world.all(&mut announcer).iter().map(brief).collect();
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(
        events[0]
            .starts_with("Node/gpu-7 DeviceUnhealthy 512 devices are unhealthy: a.b/c dev-000")
    );
    assert!(events[0].ends_with("(port_down) and 508 more"), "{}", events[0]);
    assert!(events[1].starts_with("Pod/pod-1 DeviceUnhealthy 512 devices"), "{}", events[1]);
}

#[test]
fn what_happens_again_is_counted_in_the_same_event_and_seldom_written() {
    let mut world = World::new(1);
    world.hold(0);
    let mut announcer = begun(&world);
    let (began, mut writes) = (world.now, Vec::new());
    // A device that fails and recovers every twenty seconds.
    while world.now < began + Duration::from_secs(800) {
        let is_sick = (world.now.as_secs() / 20).is_multiple_of(2);
        world.healths[0] = if is_sick { Health::Unhealthy(Reason::Xid) } else { Health::Healthy };
        world.observe(&mut announcer);
        while let Step::Write(write) = announcer.next(world.moment()) {
            writes.push(as_json(&write));
            announcer.done(&Outcome::Accepted(()), world.now);
        }
        world.now += Duration::from_secs(1);
    }
    let created = writes.iter().filter(|write| write["kind"] == "Event").count();
    assert_eq!(created, 4, "two kinds for two targets");
    assert!((20..=53).contains(&writes.len()), "{} writes", writes.len());
    let last = writes.last().unwrap();
    assert!(last["of"].is_string() && last["count"].as_u64() > Some(5), "{last}");
    // The API server has deleted the Event: another one, with a count of its own.
    world.healths[0] = Health::Healthy;
    world.all(&mut announcer);
    world.fail(0, Reason::Xid);
    world.observe(&mut announcer);
    let write = world.until_write(&mut announcer).unwrap();
    assert!(matches!(write, EventWrite::Patch(..)), "{write:?}");
    announcer.done(&Outcome::Absent, world.now);
    let again = world.until_write(&mut announcer).unwrap();
    assert_eq!(as_json(&again)["count"], 1);
    // Long after the last time it is another Event too.
    announcer.done(&Outcome::Accepted(()), world.now);
    world.all(&mut announcer);
    world.healths[0] = Health::Healthy;
    world.all(&mut announcer);
    world.now += Duration::from_secs(1800);
    world.fail(0, Reason::Xid);
    let created = world.all(&mut announcer);
    assert!(created.iter().all(|event| event["kind"] == "Event" && event["count"] == 1));
}

#[test]
fn an_earlier_processs_failures_are_not_announced_again() {
    let failed_at = |at: u64| {
        let incident = Incident {
            reason: Reason::Xid,
            detail: String::new(),
            at: Timestamp(at),
            until: None,
            held_by: Vec::new(),
        };
        Verdict { incidents: vec![incident], ..Verdict::default() }
    };
    for (at, count) in [(499, 0), (500, 2)] {
        let mut world = World::new(1);
        world.hold(0);
        world.fail(0, Reason::Xid);
        world.verdicts.insert(DeviceId::new(id(0)), failed_at(at));
        let mut announcer = Announcer::new(NODE, Timestamp(500));
        assert_eq!(world.all(&mut announcer).len(), count, "{at}");
        // Its recovery is.
        world.healths[0] = Health::Healthy;
        assert_eq!(world.all(&mut announcer).len(), 2, "{at}");
    }
}

#[test]
fn a_cordon_the_configuration_a_hook_and_an_unread_device_are_no_event() {
    for reason in [
        Reason::Cordoned,
        Reason::HookPending,
        Reason::Deselected,
        Reason::HeldAsOther,
        Reason::Unread,
    ] {
        let mut world = World::new(1);
        world.hold(0);
        let mut announcer = begun(&world);
        world.fail(0, reason);
        assert_eq!(world.all(&mut announcer), [] as [Value; 0], "{reason}");
        // It may hide a failure: no recovery is announced.
        world.fail(0, Reason::Xid);
        assert_eq!(world.all(&mut announcer).len(), 2, "{reason}");
        world.fail(0, reason);
        assert_eq!(world.all(&mut announcer), [] as [Value; 0], "{reason}");
    }
}

#[test]
fn only_a_pod_that_is_fully_known_and_holds_the_device_gets_an_event() {
    let pods = |state: GrantState| {
        let mut world = World::new(1);
        world.fail(0, Reason::Xid);
        let seen =
            Seen::of(&world.inventory(), &Verdicts::new(), &[grant("dev-000", state)], &[].into());
        let device = seen.devices.values().next().unwrap();
        assert!(device.is_held || device.pods.is_empty());
        device.pods.len()
    };
    let pod = |uid: &str, name: Option<&str>| PodRef {
        uid: uid.into(),
        namespace: Some("team".into()),
        name: name.map(str::to_owned),
    };
    let prepared = |unprepared_at| GrantState::Prepared {
        pods: vec![pod("u1", Some("a")), pod("u2", Some("b")), pod("u3", None)],
        prepared_at: Timestamp(1),
        unprepared_at,
    };
    let suspect = GrantState::Suspect {
        pod: pod("u1", Some("a")),
        container: "main".into(),
        bound_at: Timestamp(1),
        suspect_at: Timestamp(2),
    };
    for (state, count) in [
        (GrantState::Granted, 0),
        (bound(Some("a")), 1),
        (bound(None), 0),
        (prepared(None), 2),
        (prepared(Some(Timestamp(2))), 0),
        (suspect, 0),
    ] {
        assert_eq!(pods(state.clone()), count, "{state:?}");
    }
    let nameless = GrantState::Bound {
        pod: pod("", Some("a")),
        container: "main".into(),
        bound_at: Timestamp(1),
    };
    assert_eq!(pods(nameless), 0, "without a UID");
}

#[test]
fn a_missing_right_is_tried_each_five_minutes_and_a_refusal_is_not_repeated() {
    let mut world = World::new(1);
    world.hold(0);
    let mut announcer = begun(&world);
    world.fail(0, Reason::Xid);
    world.observe(&mut announcer);
    world.until_write(&mut announcer).unwrap();
    announcer.done(&Outcome::Forbidden, world.now);
    let before = world.now;
    world.until_write(&mut announcer).unwrap();
    let pause = (world.now - before).as_secs();
    assert!((300..=600).contains(&pause), "{pause}");
    // A namespace that is being deleted.
    announcer.done(&Outcome::Refused, world.now);
    let next = world.until_write(&mut announcer).unwrap();
    assert_eq!(as_json(&next)["involvedObject"]["kind"], "Pod");
    announcer.done(&Outcome::Refused, world.now);
    assert_eq!(world.until_write(&mut announcer), None);
}

#[test]
fn a_message_is_one_line_within_the_limit() {
    let mut world = World::new(1);
    world.hold(0);
    let mut announcer = begun(&world);
    world.fail(0, Reason::CheckFailed);
    let detail = "é\n\u{1b}[2J".repeat(400);
    let verdict = Verdict { faults: [(Reason::CheckFailed, detail)].into(), ..Verdict::default() };
    world.verdicts.insert(DeviceId::new(id(0)), verdict);
    for event in world.all(&mut announcer) {
        let message = event["message"].as_str().unwrap();
        assert!(message.len() <= 1024 && !message.contains(['\n', '\u{1b}']), "{message}");
        assert!(message.len() > 200 && message.contains("check_failed: é\\n"), "{message}");
    }
}

/// The condition in a patch.
fn condition(patch: &StatusPatch) -> Value {
    serde_json::to_value(patch).unwrap()["status"]["conditions"][0].clone()
}

impl World {
    fn patch(&mut self, keeper: &mut Keeper) -> StatusPatch {
        loop {
            match keeper.next(self.moment()) {
                Step::Write(patch) => return patch,
                Step::Wait(None) => panic!("a condition has a heartbeat"),
                Step::Wait(Some(until)) => {
                    assert!(until > self.now, "a wait of no time");
                    self.now = until;
                }
            }
        }
    }

    /// The next condition that is written. Reads have this answer.
    fn condition(&mut self, keeper: &mut Keeper, stored: Option<&Stored>) -> Value {
        keeper.observe(&self.seen(&[].into()), self.moment());
        loop {
            let patch = self.patch(keeper);
            keeper.done(Outcome::Accepted(stored.cloned()), self.moment());
            if patch.status.is_some() {
                return condition(&patch);
            }
        }
    }
}

#[test]
fn the_condition_names_the_count_and_the_first_devices() {
    let table: &[(&[Reason], usize, &str, &str, &str)] = &[
        (&[], 0, "True", "NoDevices", "no device is offered"),
        (&[], 8, "True", "DevicesHealthy", "8 of 8 devices are healthy"),
        (
            &[Reason::Cordoned],
            8,
            "True",
            "DevicesHealthy",
            "7 of 8 devices are healthy, and 1 withheld by a cordon, the configuration or a hook",
        ),
        (
            &[Reason::Xid],
            8,
            "False",
            "DevicesUnhealthy",
            "1 of 8 devices is unhealthy: a.b/c dev-000 (xid)",
        ),
        (
            &[Reason::Unread],
            2,
            "Unknown",
            "DevicesUnread",
            "1 of 2 devices could not be read: a.b/c dev-000 (unread)",
        ),
        (
            &[Reason::Unread, Reason::HookFailed],
            2,
            "False",
            "DevicesUnhealthy",
            "1 of 2 devices is unhealthy: a.b/c dev-001 (hook_failed)",
        ),
        (
            &[Reason::Xid; 6],
            6,
            "False",
            "DevicesUnhealthy",
            "6 of 6 devices are unhealthy: a.b/c dev-000 (xid), a.b/c dev-001 (xid), a.b/c dev-002 (xid), a.b/c dev-003 (xid) and 2 more",
        ),
    ];
    for (reasons, devices, status, reason, message) in table {
        let mut world = World::new(*devices);
        reasons.iter().enumerate().for_each(|(device, reason)| world.fail(device, *reason));
        let written = world.condition(&mut Keeper::new(NODE), None);
        let found = ["type", "status", "reason", "message"].map(|key| &written[key]);
        assert_eq!(found, ["HoldfastDevicesHealthy", status, reason, message]);
    }
}

#[test]
fn an_unchanged_condition_is_written_seldom_and_its_transition_stays() {
    let mut world = World::new(2);
    let stored = Stored {
        status: "True".into(),
        reason: "DevicesHealthy".into(),
        message: "2 of 2 devices are healthy".into(),
        transition: Timestamp(7000),
    };
    let mut keeper = Keeper::new(NODE);
    let began = world.now;
    let written = world.condition(&mut keeper, Some(&stored));
    assert_eq!(written["lastTransitionTime"], "1970-01-01T00:00:07Z");
    assert!(world.now - began < Duration::from_secs(160), "{:?}", world.now);
    let mut last = world.now;
    for _ in 0..3 {
        let written = world.condition(&mut keeper, None);
        assert_eq!(written["lastTransitionTime"], "1970-01-01T00:00:07Z");
        assert!((300..=450).contains(&(world.now - last).as_secs()), "{:?}", world.now - last);
        last = world.now;
    }
    // A change comes soon.
    world.now += Duration::from_secs(60);
    world.fail(1, Reason::Xid);
    let changed = world.now;
    let written = world.condition(&mut keeper, None);
    assert_eq!(written["status"], "False");
    assert!(world.now - changed <= Duration::from_secs(5), "{:?}", world.now - changed);
    let transition = Timestamp(u64::try_from(changed.as_millis()).unwrap()).to_seconds();
    assert_eq!(written["lastTransitionTime"], transition);
}

#[test]
fn the_nodes_of_a_cluster_write_apart() {
    let times: BTreeSet<Duration> = (0..100)
        .map(|node| {
            let mut world = World::new(1);
            let mut keeper = Keeper::new(&format!("node-{node}"));
            world.condition(&mut keeper, None);
            world.condition(&mut keeper, None);
            world.now
        })
        .collect();
    assert!(times.len() > 80, "{} heartbeats at different times", times.len());
}

/// A step of a history.
#[derive(Debug, Clone)]
enum Op {
    Health(usize, u8),
    Hold(usize),
    Free(usize),
    /// Milliseconds.
    Pass(u64),
    /// Whether the API server answers.
    Answers(bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        4 => (0..4_usize, 0..4_u8).prop_map(|(device, health)| Op::Health(device, health)),
        1 => (0..4_usize).prop_map(Op::Hold),
        1 => (0..4_usize).prop_map(Op::Free),
        4 => (1..40_000_u64).prop_map(Op::Pass),
        1 => any::<bool>().prop_map(Op::Answers),
    ];
    proptest::collection::vec(op, 1..120)
}

fn health(number: u8) -> Health {
    match number {
        0 => Health::Healthy,
        1 => Health::Unhealthy(Reason::Xid),
        2 => Health::Unhealthy(Reason::PortDown),
        _ => Health::Unhealthy(Reason::Cordoned),
    }
}

/// A reader of the Events: what they report about each device, by target.
#[derive(Default)]
struct Reader {
    /// The target and kind of each Event, by name.
    names: BTreeMap<String, (String, String)>,
    /// The reason of the last failure; none after a recovery.
    shown: BTreeMap<(String, usize), Option<Reason>>,
    attempts: Vec<Duration>,
    accepted: BTreeMap<String, Vec<Duration>>,
}

impl Reader {
    /// Reads an Event, and checks it against the node at the time of its write.
    fn read(&mut self, write: &EventWrite, world: &World) {
        let event = as_json(write);
        let (name, message) = match write {
            EventWrite::Create(new) => (new.metadata.name.clone(), new.message.clone()),
            EventWrite::Patch(of, patch) => (of.name.clone(), patch.message.clone()),
        };
        if event["kind"] == "Event" {
            let uid = event["involvedObject"]["uid"].as_str().unwrap().to_owned();
            let reason = event["reason"].as_str().unwrap().to_owned();
            assert!(self.names.insert(name.clone(), (uid, reason)).is_none(), "names are unique");
        }
        let (target, reason) = self.names[&name].clone();
        for device in (0..4).filter(|device| message.contains(&id(*device))) {
            if let Some(pod) = target.strip_prefix("uid-pod-") {
                let holder = world.holders[device].map(|pod| pod.to_string());
                assert_eq!(holder.as_deref(), Some(pod), "the pod holds {device}: {message}");
            }
            let found = match reason.as_str() {
                "DeviceUnhealthy" => world.healths[device].reason(),
                _ => None,
            };
            self.shown.insert((target.clone(), device), found);
        }
        self.accepted.entry(target).or_default().push(world.now);
    }
}

proptest! {
    /// Random failures, holders, and outages of the API server.
    #[test]
    fn events_are_bounded_name_holders_and_end_with_the_truth(history in ops()) {
        let mut world = World::new(4);
        let mut announcer = begun(&world);
        let mut reader = Reader::default();
        let mut answers = true;
        let end = [Op::Answers(true), Op::Pass(3_600_000)];
        for op in history.into_iter().chain(end) {
            match op {
                Op::Health(device, number) => world.healths[device] = health(number),
                Op::Hold(device) => world.hold(device),
                Op::Free(device) => world.holders[device] = None,
                Op::Answers(now) => answers = now,
                Op::Pass(_) => {}
            }
            world.observe(&mut announcer);
            let Op::Pass(time) = op else { continue };
            let until = world.now + Duration::from_millis(time);
            loop {
                match announcer.next(world.moment()) {
                    Step::Write(write) => {
                        reader.attempts.push(world.now);
                        if answers {
                            reader.read(&write, &world);
                        }
                        let outcome =
                            if answers { Outcome::Accepted(()) } else { Outcome::Failed(None) };
                        announcer.done(&outcome, world.now);
                    }
                    Step::Wait(Some(at)) if at <= until => world.now = at,
                    Step::Wait(_) => break,
                }
            }
            world.now = until;
        }
        let minute = Duration::from_secs(60);
        for (first, at) in reader.attempts.iter().enumerate() {
            let within = reader.attempts[first..].iter().filter(|it| **it < *at + minute);
            prop_assert!(within.count() <= EVENTS_A_MINUTE);
        }
        for (target, times) in &reader.accepted {
            for pair in times.windows(2) {
                prop_assert!(pair[1] - pair[0] >= minute / 2, "{target}: {pair:?}");
            }
        }
        for device in 0..4 {
            let shown = |target: &str| reader.shown.get(&(target.to_owned(), device)).copied().flatten();
            let is = world.healths[device];
            if is == Health::Unhealthy(Reason::Cordoned) {
                continue;
            }
            let holder = world.holders[device];
            if let Some(pod) = holder {
                prop_assert_eq!(shown(&format!("uid-pod-{pod}")), is.reason());
            }
            if holder.is_some() || is.is_healthy() {
                prop_assert_eq!(shown(NODE), is.reason());
            }
        }
    }

    /// The same for the condition.
    #[test]
    fn the_condition_is_bounded_and_ends_with_the_truth(history in ops()) {
        let mut world = World::new(4);
        let mut keeper = Keeper::new(NODE);
        let (mut server, mut answers) = (None::<Stored>, true);
        let mut writes: Vec<(Duration, Stored)> = Vec::new();
        let end = [Op::Answers(true), Op::Pass(3_600_000)];
        for op in history.into_iter().chain(end) {
            match op {
                Op::Health(device, number) => world.healths[device] = health(number),
                Op::Answers(now) => answers = now,
                _ => {}
            }
            keeper.observe(&world.seen(&[].into()), world.moment());
            let Op::Pass(time) = op else { continue };
            let until = world.now + Duration::from_millis(time);
            loop {
                match keeper.next(world.moment()) {
                    Step::Write(_) if !answers => {
                        keeper.done(Outcome::Failed(None), world.moment());
                    }
                    Step::Write(patch) => {
                        if patch.status.is_some() {
                            let written = condition(&patch);
                            let text = |key: &str| written[key].as_str().unwrap().to_owned();
                            let transition = written["lastTransitionTime"].clone();
                            let stored = Stored {
                                status: text("status"),
                                reason: text("reason"),
                                message: text("message"),
                                transition: serde_json::from_value(transition).unwrap(),
                            };
                            writes.push((world.now, stored.clone()));
                            server = Some(stored);
                        }
                        keeper.done(Outcome::Accepted(server.clone()), world.moment());
                    }
                    Step::Wait(Some(at)) if at <= until => world.now = at,
                    Step::Wait(_) => break,
                }
            }
            world.now = until;
        }
        for pair in writes.windows(2) {
            let ((first, was), (next, is)) = (&pair[0], &pair[1]);
            let least = if (&was.status, &was.message) == (&is.status, &is.message) { 300 } else { 30 };
            prop_assert!(*next - *first >= Duration::from_secs(least), "{pair:?}");
            prop_assert!(was.status != is.status || was.transition == is.transition, "{pair:?}");
        }
        let failed = world.healths.iter().filter(|health| {
            matches!(health, Health::Unhealthy(Reason::Xid | Reason::PortDown))
        });
        let failed = failed.count();
        let server = server.unwrap();
        prop_assert_eq!(server.status == "False", failed > 0);
        if failed > 0 {
            let begins = format!("{failed} of 4 devices");
            prop_assert!(server.message.starts_with(&begins), "{}", server.message);
        }
    }
}
