//! The gate in sentences, and a kubelet, a runner of hooks and crashes played against it.

use super::*;
use crate::domain::{
    AllocId, CheckpointEntry, ContainerEdits, GrantedDevice, HookState, PendingHook,
};
use crate::ledger::core::{HeldBack, POD_GONE, ended, owing};
use proptest::prelude::*;

fn resource() -> ResourceName {
    "example.com/gpu".parse().unwrap()
}

fn hooks() -> ReleaseHooks {
    ReleaseHooks::of([(resource(), Some(Sharing::Exclusive))])
}

fn pod(n: usize) -> PodRef {
    PodRef { uid: format!("u{n}"), namespace: Some("ml".into()), name: Some(format!("pod-{n}")) }
}

/// As it is bound before the pod's log folder is there.
fn bound(n: usize) -> GrantState {
    GrantState::Bound {
        pod: PodRef { namespace: None, name: None, ..pod(n) },
        container: "main".into(),
        bound_at: Timestamp(1),
    }
}

fn grant(n: usize, ids: &[&str], state: GrantState) -> Grant {
    let device = |id: &&str| GrantedDevice {
        id: DeviceId::new(*id),
        key: String::new(),
        numa_nodes: Vec::new(),
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Grant {
        alloc_id: AllocId::new(format!("a-{n:04}")),
        resource: resource(),
        devices: ids.iter().map(device).collect(),
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "boot".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state,
    }
}

fn entry(pod: usize, grant: &Grant) -> CheckpointEntry {
    CheckpointEntry {
        pod_uid: format!("u{pod}"),
        container: "main".into(),
        resource: resource(),
        device_ids: grant.devices.iter().map(|device| device.id.clone()).collect(),
        alloc_id: Some(grant.alloc_id.clone()),
    }
}

/// The observations: the kubelet's checkpoint, and pods' cgroups. A pod that is not named is
/// absent.
#[derive(Default)]
struct Seen {
    checkpoint: Option<Checkpoint>,
    cgroups: BTreeMap<String, CgroupState>,
}

impl Seen {
    fn checkpoint(entries: impl IntoIterator<Item = CheckpointEntry>) -> Seen {
        let checkpoint = Checkpoint::new(entries.into_iter().collect(), Timestamp(1));
        Seen { checkpoint: Some(checkpoint), cgroups: BTreeMap::new() }
    }

    fn with(mut self, pod: usize, state: CgroupState) -> Seen {
        self.cgroups.insert(format!("u{pod}"), state);
        self
    }
}

impl View for Seen {
    fn cgroup(&self, uid: &str) -> CgroupState {
        self.cgroups.get(uid).copied().unwrap_or(CgroupState::Absent)
    }

    fn name(&self, uid: &str) -> Option<PodName> {
        Some(PodName { namespace: "ml".into(), name: uid.replace('u', "pod-") })
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_ref()
    }
}

fn apply<'a>(ledger: &mut Ledger, entries: impl IntoIterator<Item = &'a Entry>) {
    for entry in entries {
        ledger.evolve(entry);
    }
}

fn ledger(grants: &[&Grant]) -> Ledger {
    let mut ledger = Ledger::default();
    for grant in grants {
        ledger.evolve(&Entry::Grant(Arc::new((*grant).clone())));
    }
    ledger
}

fn ask(ledger: &Ledger, ids: &[&str], seen: &Seen) -> Passage {
    let ids: Vec<DeviceId> = ids.iter().map(|id| DeviceId::new(*id)).collect();
    passage(ledger, &hooks(), &resource(), &ids, seen, Timestamp(9))
}

fn why(passage: &Passage) -> String {
    if let Passage::Barred(id, barred) = passage {
        format!("{id}: {barred}")
    } else {
        format!("{passage:?}")
    }
}

#[test]
fn a_pod_goes_on_with_its_own_devices_whatever_is_known() {
    let (init, app) =
        (grant(1, &["a"], GrantState::Granted), grant(2, &["a"], GrantState::Granted));
    assert_eq!(ask(&ledger(&[&init]), &["a"], &Seen::default()), Passage::Open);
    let seen = Seen::checkpoint([entry(1, &init), entry(1, &app)]);
    assert_eq!(
        ask(&ledger(&[&init, &app]), &["a"], &seen),
        Passage::Open,
        "the checkpoint knows it before the ledger"
    );
    let (init, app) = (grant(1, &["a"], bound(1)), grant(2, &["a"], bound(1)));
    assert_eq!(ask(&ledger(&[&init, &app]), &["a"], &Seen::default()), Passage::Open);
    let others = passage(
        &ledger(&[&init]),
        &ReleaseHooks::default(),
        &resource(),
        &[DeviceId::new("a")],
        &Seen::default(),
        Timestamp(9),
    );
    assert_eq!(others, Passage::Open, "a resource without the hook has no gate");
}

#[test]
fn another_pod_is_waited_for_until_it_is_gone_in_words_that_name_it() {
    let (former, next) = (grant(1, &["a", "b"], bound(1)), grant(2, &["a"], GrantState::Granted));
    let ledger = ledger(&[&former, &next]);
    let given_on = || Seen::checkpoint([entry(2, &next)]);
    for (seen, parts) in [
        (
            given_on().with(1, CgroupState::Populated),
            [
                "a: pod ml/pod-1 (container main)",
                "processes of that pod still run",
                "end its processes",
            ],
        ),
        (
            given_on().with(1, CgroupState::Unknown),
            ["pod ml/pod-1", "unknown whether its processes run", "cgroups were not found"],
        ),
        (
            Seen::checkpoint([entry(1, &former), entry(2, &next)]),
            ["pod ml/pod-1", "checkpoint does not show", "restart the kubelet"],
        ),
        (Seen::checkpoint([]), ["grant a-0002", "not matched to a pod yet", "a minute"]),
        (Seen::default(), ["grant a-0002", "not matched to a pod yet", "a minute"]),
    ] {
        let why = why(&ask(&ledger, &["a"], &seen));
        assert!(parts.iter().all(|part| why.contains(part)) && !why.contains("  "), "{why}");
    }
    for cgroup in [CgroupState::Absent, CgroupState::Empty] {
        let Passage::HandedOn(id, who, moves) = ask(&ledger, &["a"], &given_on().with(1, cgroup))
        else {
            panic!("the former pod has ended")
        };
        assert_eq!(
            (id.as_str(), who.to_string().as_str(), moves.len()),
            ("a", "pod ml/pod-1 (container main)", 1)
        );
        let Entry::Moved { alloc_id, state: GrantState::Released { released_by, pod, .. } } =
            &moves[0]
        else {
            panic!("{moves:?}")
        };
        assert_eq!(
            (alloc_id, released_by.as_str(), pod),
            (&former.alloc_id, HANDED_ON, &Some(self::pod(1)))
        );
    }
}

#[test]
fn a_grant_of_nobody_and_a_pod_that_the_kubelet_knows_by_another_device_are_waited_for() {
    let (former, next) = (grant(1, &["a"], GrantState::Granted), grant(2, &["a"], bound(2)));
    let seen = Seen::checkpoint([entry(2, &next)]);
    assert!(why(&ask(&ledger(&[&former, &next]), &["a"], &seen)).contains("grant a-0001"));
    // Without a checkpoint it is unknown which of two pods calls.
    assert!(
        why(&ask(&ledger(&[&grant(1, &["a"], bound(1)), &next]), &["a"], &Seen::default()))
            .contains("checkpoint does not show")
    );
    let (former, other) = (grant(1, &["a"], bound(1)), grant(3, &["b"], bound(1)));
    let seen = Seen::checkpoint([entry(2, &next), entry(1, &other)]);
    assert!(
        why(&ask(&ledger(&[&former, &next]), &["a"], &seen)).contains("checkpoint does not show")
    );
}

/// A static pod's UID is a hash of its manifest.
#[test]
fn a_static_pod_that_has_come_back_with_another_device_has_handed_its_former_one_on() {
    let (former, other, next) =
        (grant(1, &["a"], bound(1)), grant(2, &["b"], bound(1)), grant(3, &["a"], bound(3)));
    let ledger = ledger(&[&former, &other, &next]);
    let back = |cgroup| Seen::checkpoint([entry(1, &other), entry(3, &next)]).with(1, cgroup);
    let Passage::HandedOn(_, _, moves) = ask(&ledger, &["a"], &back(CgroupState::Empty)) else {
        panic!("nothing of it runs")
    };
    assert!(
        matches!(&moves[..], [Entry::Moved { alloc_id, .. }] if *alloc_id == former.alloc_id),
        "{moves:?}"
    );
    let text = why(&ask(&ledger, &["a"], &back(CgroupState::Populated)));
    assert!(text.contains("processes of that pod still run"), "it may be those of before: {text}");
    let side = CheckpointEntry { container: "side".into(), ..entry(1, &other) };
    let text = why(&ask(&ledger, &["a"], &Seen::checkpoint([side, entry(3, &next)])));
    assert!(
        text.contains("checkpoint does not show"),
        "another container proves nothing about it: {text}"
    );
}

/// Another plugin gave the device to pod 3, whose container asks.
#[test]
fn a_pod_that_the_ledger_does_not_know_waits_for_the_holder_of_its_device() {
    let (former, unknown) = (grant(1, &["a"], bound(1)), grant(3, &["a"], bound(3)));
    let ledger = ledger(&[&former]);
    let seen = || Seen::checkpoint([entry(3, &unknown)]);
    let text = why(&ask(&ledger, &["a"], &seen().with(1, CgroupState::Populated)));
    assert!(text.contains("ml/pod-1") && text.contains("still run"), "{text}");
    let text = why(&ask(&ledger, &["a"], &seen().with(1, CgroupState::Absent)));
    assert!(text.contains("checkpoint does not show"), "it may be the one that asks: {text}");
    let own = ask(&ledger, &["a"], &Seen::checkpoint([entry(1, &former)]));
    assert_eq!(own, Passage::Open);
}

/// The kubelet had given the device to pod 2, and wrote the state before that last.
#[test]
fn an_older_checkpoint_takes_no_grant_from_the_pod_that_asks() {
    let (former, next) = (grant(1, &["a"], bound(1)), grant(2, &["a"], bound(2)));
    let ledger = ledger(&[&former, &next]);
    let text = why(&ask(&ledger, &["a"], &Seen::checkpoint([entry(1, &former)])));
    assert!(text.contains("checkpoint does not show"), "{text}");
}

#[test]
fn a_hook_that_is_owed_shuts_the_gate_but_not_one_that_a_cut_off_write_has_left() {
    let (former, next) = (grant(1, &["a"], bound(1)), grant(2, &["a"], bound(2)));
    let mut ledger = ledger(&[&former, &next]);
    let Passage::HandedOn(_, _, moves) = ask(&ledger, &["a"], &Seen::checkpoint([entry(2, &next)]))
    else {
        panic!("the former pod has ended")
    };
    let hook = owing(&ledger, &hooks(), &moves, [].iter());
    let mut cut_off = self::ledger(&[&former]);
    apply(&mut cut_off, &hook);
    assert_eq!(
        ask(&cut_off, &["a"], &Seen::default()),
        Passage::Open,
        "the former one is still there"
    );
    apply(&mut ledger, hook.iter().chain(&moves));
    assert!(
        why(&ask(&ledger, &["a"], &Seen::default()))
            .contains("the hook after_release of pod ml/pod-1 (container main)")
    );
    let run = |ledger: &Ledger| {
        ledger.owed().values().flat_map(BTreeMap::values).next().cloned().unwrap()
    };
    let failed = ended(&ledger, &run(&ledger), Err("no key".into()), Timestamp(3)).unwrap();
    ledger.evolve(&failed);
    let text = why(&ask(&ledger, &["a"], &Seen::default()));
    assert!(
        text.contains("has failed once: no key")
            && text.contains("systemctl reload")
            && text.contains("ml/pod-1"),
        "{text}"
    );
    let done = ended(&ledger, &run(&ledger), Ok(()), Timestamp(4)).unwrap();
    ledger.evolve(&done);
    assert_eq!(ask(&ledger, &["a"], &Seen::default()), Passage::Open);
}

/// One pod of the model.
#[derive(Debug)]
struct Model {
    n: usize,
    ids: Vec<&'static str>,
    grants: Vec<Grant>,
    /// The kubelet has its devices for it.
    remembered: bool,
    /// Something of it runs: its sandbox, or a container that has the devices.
    alive: bool,
    running: bool,
}

/// A kubelet that gives away devices that it believes to be free, pods that end at any time, a
/// ledger, and a hook runner.
#[derive(Debug, Default)]
struct World {
    ledger: Ledger,
    log: Vec<Entry>,
    held_back: HeldBack,
    pods: Vec<Model>,
    /// Who ran with a device since its last hook.
    dirty: BTreeMap<&'static str, usize>,
    /// Hooks that run.
    runs: BTreeMap<DeviceId, PendingHook>,
    made: usize,
}

const IDS: [&str; 2] = ["a", "b"];

impl World {
    /// Writes a commit. With `cut` only that part of it reaches the disk, and the daemon restarts
    /// afterwards.
    fn write(&mut self, entries: Vec<Entry>, cut: Option<usize>) {
        let kept = cut.map_or(entries.len(), |cut| cut % (entries.len() + 1));
        apply(&mut self.ledger, entries.iter().take(kept));
        self.log.extend(entries.into_iter().take(kept));
        if cut.is_some() {
            self.crash();
        }
    }

    fn crash(&mut self) {
        self.ledger = Ledger::default();
        apply(&mut self.ledger, &self.log);
        self.held_back.clear();
        self.runs.clear();
    }

    fn seen(&self) -> Seen {
        let remembered = self.pods.iter().filter(|pod| pod.remembered);
        let mut seen = Seen::checkpoint(
            remembered.flat_map(|pod| pod.grants.iter().map(|grant| entry(pod.n, grant))),
        );
        for pod in &self.pods {
            let dead = if pod.n % 2 == 0 { CgroupState::Absent } else { CgroupState::Empty };
            seen.cgroups.insert(
                format!("u{}", pod.n),
                if pod.alive { CgroupState::Populated } else { dead },
            );
        }
        seen
    }

    /// The kubelet admits a pod with devices that it believes to be free: an init container and
    /// another one, or one alone.
    fn add(&mut self, which: usize) {
        let ids: Vec<&'static str> = IDS
            .into_iter()
            .enumerate()
            .filter(|(bit, _)| (which + 1) >> bit & 1 == 1)
            .map(|(_, id)| id)
            .collect();
        let taken = self
            .pods
            .iter()
            .filter(|pod| pod.remembered)
            .flat_map(|pod| &pod.ids)
            .any(|id| ids.contains(id));
        if taken || ids.is_empty() {
            return;
        }
        let mut grants = Vec::new();
        for _ in 0..=which % 2 {
            self.made += 1;
            let wanted = grant(self.made, &ids, GrantState::Granted);
            if self.ledger.waits(&hooks(), [].iter(), &wanted).is_some() {
                return;
            }
            self.write(vec![Entry::Grant(Arc::new(wanted.clone()))], None);
            grants.push(wanted);
        }
        let n = self.pods.len();
        self.pods.push(Model { n, ids, grants, remembered: true, alive: true, running: false });
    }

    fn bind(&mut self, n: usize) {
        let unbound = |grant: &&Grant| {
            self.ledger
                .grant(&grant.alloc_id)
                .is_some_and(|grant| grant.state == GrantState::Granted)
        };
        let of_pod = self.pods[n].grants.iter().filter(unbound).filter(|_| self.pods[n].remembered);
        let moves = of_pod
            .map(|grant| Entry::Moved { alloc_id: grant.alloc_id.clone(), state: bound(n) })
            .collect();
        self.write(moves, None);
    }

    /// As reconciliation does: a pod that was removed, and a grant that is in no checkpoint.
    fn release(&mut self, n: usize, cut: Option<usize>) {
        if self.pods[n].remembered || self.pods[n].alive {
            return;
        }
        let moves = self.pods[n].grants.iter().filter_map(|grant| {
            let grant = self.ledger.grant(&grant.alloc_id)?;
            let (pod, container) = (grant.pod().cloned(), grant.container().map(str::to_owned));
            let (bound_at, released_at, released_by) = (None, Timestamp(5), POD_GONE.to_owned());
            Some(Entry::Moved {
                alloc_id: grant.alloc_id.clone(),
                state: GrantState::Released {
                    pod,
                    container,
                    bound_at,
                    released_at,
                    other_pods: Vec::new(),
                    released_by,
                },
            })
        });
        let moves: Vec<Entry> = moves.collect();
        let owed = owing(&self.ledger, &hooks(), &moves, [].iter());
        self.write(owed.into_iter().chain(moves).collect(), cut);
    }

    /// The kubelet is about to start a container of a pod. Whether it is let.
    fn start(&mut self, n: usize, cut: Option<usize>) -> bool {
        if !self.pods[n].remembered || self.pods[n].running {
            return false;
        }
        let ids = self.pods[n].ids.clone();
        let devices = ids.iter().map(|id| (resource(), DeviceId::new(*id)));
        let passage = ask(&self.ledger, &ids, &self.seen());
        if passage.waits_for_hooks() {
            self.held_back.extend(devices);
        } else {
            self.held_back.retain(|device| !devices.clone().any(|asked| asked == *device));
        }
        match passage {
            Passage::Open => {
                for id in ids {
                    assert!(
                        !self.runs.contains_key(&DeviceId::new(id)),
                        "a hook is at {id}, with which a container starts"
                    );
                    let former = self.dirty.insert(id, n);
                    assert!(
                        former.is_none_or(|former| former == n),
                        "pod {n} starts with {id} as pod {former:?} has left it"
                    );
                }
                (self.pods[n].running, self.pods[n].alive) = (true, true);
                return true;
            }
            Passage::Barred(..) => {}
            Passage::HandedOn(_, _, moves) => {
                let owed = owing(&self.ledger, &hooks(), &moves, [].iter());
                self.write(owed.into_iter().chain(moves).collect(), cut);
            }
        }
        false
    }

    /// A kubelet that has just started makes no call. The new kubelet is seen before a hook begins.
    fn start_unasked(&mut self, n: usize) {
        self.held_back.clear();
        let is_worked_at =
            self.pods[n].ids.iter().any(|id| self.runs.contains_key(&DeviceId::new(*id)));
        if self.pods[n].remembered && !is_worked_at {
            (self.pods[n].running, self.pods[n].alive) = (true, true);
            self.dirty.extend(self.pods[n].ids.iter().map(|id| (*id, n)));
        }
    }

    fn begin_runs(&mut self) {
        for hook in self.ledger.due(&hooks(), &self.held_back).all() {
            let runs_with_it =
                |pod: &&Model| pod.running && pod.ids.contains(&hook.device.as_str());
            assert_eq!(
                self.pods.iter().find(runs_with_it).map(|pod| pod.n),
                None,
                "a hook begins at {} in use",
                hook.device
            );
            self.runs.entry(hook.device.clone()).or_insert_with(|| hook.clone());
        }
    }

    fn end_runs(&mut self, well: bool) {
        for (id, hook) in std::mem::take(&mut self.runs) {
            if well {
                self.dirty.retain(|dirty, _| *dirty != id.as_str());
            }
            let entry = ended(
                &self.ledger,
                &hook,
                if well { Ok(()) } else { Err("no".into()) },
                Timestamp(6),
            );
            self.write(entry.into_iter().collect(), None);
        }
    }

    fn step(&mut self, kind: u8, which: usize, cut: Option<usize>) {
        let n = which % self.pods.len().max(1);
        match kind {
            0 | 1 => self.add(which),
            _ if self.pods.is_empty() => {}
            2 => self.bind(n),
            // The kubelet forgets it, whether it is over or not.
            3 | 4 => self.pods[n].remembered = false,
            5 => (self.pods[n].alive, self.pods[n].running) = (false, false),
            // A container ends, and its sandbox stays.
            6 => self.pods[n].running = false,
            7 => self.release(n, cut),
            8..=11 => _ = self.start(n, cut),
            12 => self.begin_runs(),
            13 => self.end_runs(!which.is_multiple_of(3)),
            14 => self.start_unasked(n),
            _ => self.crash(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Between two pods that run with a device its hook has run, or the second has not started. No
    /// hook runs while a container runs with the device. A waiting container is let in when the
    /// others have ended. This holds for every order of ends, failures and torn writes.
    #[test]
    fn nobody_starts_with_what_another_pod_has_left_and_no_hook_meets_a_container(
        steps in prop::collection::vec((0..16_u8, 0..12_usize, prop::option::weighted(0.1, 0..4_usize)), 0..120),
    ) {
        let mut world = World::default();
        for (kind, which, cut) in steps {
            world.step(kind, which, cut);
        }
        // At the end all forgotten pods have ended, and every pod that the kubelet has a device for
        // starts.
        for n in 0..world.pods.len() {
            world.bind(n);
            if !world.pods[n].remembered {
                (world.pods[n].alive, world.pods[n].running) = (false, false);
                let unbound = world.pods[n].grants.iter().any(|grant| world.ledger.grant(&grant.alloc_id).is_some_and(|grant| grant.pod().is_none()));
                if unbound {
                    world.release(n, None);
                }
            }
        }
        for n in 0..world.pods.len() {
            world.pods[n].running = false;
            let mut tries = 0..4;
            while world.pods[n].remembered && !world.start(n, None) {
                prop_assert!(tries.next().is_some(), "pod {} never starts: {:?}", n, world);
                world.begin_runs();
                world.end_runs(true);
            }
        }
        prop_assert!(world.ledger.owed().values().flat_map(BTreeMap::values).all(|hook| hook.state != HookState::Done));
    }
}
