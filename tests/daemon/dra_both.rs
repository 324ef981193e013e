//! One resource by both APIs: racing pods, the loser of a race, and reloads of `api` while devices
//! are held.

use crate::common::{Daemon, HANG, Random, name, offered, pause, run, until};
use crate::dra::{World, claim_ref, stop};
use futures_util::future::join_all;
use holdfast::domain::ResourceName;
use holdfast::lab::sim::api_server::{Kind, Profile};
use holdfast::lab::sim::kubelet::claims::Claim;
use holdfast::lab::sim::kubelet::{Kubelet, PodPhase, PodSpec};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub(crate) fn gpu() -> ResourceName {
    name("example.com/gpu")
}

/// Sets `api` of the GPUs.
pub(crate) fn set_api(world: &World, api: &str) {
    let text = std::fs::read_to_string(world.node.config_file()).unwrap();
    let lines = text.lines().map(|line| match line.starts_with("api = ") {
        true => format!("api = {api:?}\n"),
        false => format!("{line}\n"),
    });
    world.node.write_config(&lines.collect::<String>());
}

/// The same, for a running daemon.
pub(crate) async fn reload(world: &World, daemon: &Daemon, api: &str) {
    // Before it handles signals, SIGHUP would end it.
    daemon.logged("INFO ready").await;
    set_api(world, api);
    let before = daemon.log().iter().filter(|line| line.contains("reloaded")).count();
    daemon.signal(Signal::SIGHUP);
    daemon.logged_often("configuration reloaded", before + 1).await;
}

/// The published devices with their taints, as `key=value:effect`.
fn slice(world: &World) -> BTreeMap<String, Vec<String>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut devices = BTreeMap::new();
    for slice in world.server.objects(Kind::ResourceSlice) {
        for device in list(&slice["spec"]["devices"]) {
            let taint = |it: &Value| {
                let key = text(&it["key"]).replace("holdfast.dev/", "");
                format!("{key}={}:{}", text(&it["value"]), text(&it["effect"]))
            };
            let taints = list(&device["taints"]).iter().map(taint).collect();
            devices.insert(text(&device["name"]), taints);
        }
    }
    devices
}

/// Waits for the devices of the slices. The end of a pod is proven by two passes of the ledger.
async fn until_slice(world: &World, what: &str, expected: &BTreeMap<String, Vec<String>>) {
    let seen = async {
        while slice(world) != *expected {
            pause().await;
        }
    };
    let seen = tokio::time::timeout(4 * HANG, seen).await;
    assert!(seen.is_ok(), "{what}: {:?} instead of {expected:?}", slice(world));
}

/// The id of a device in the device plugin: `dev:gpu1` of `dev-gpu1-5a7c0123`.
pub(crate) fn id_of(device: &str) -> String {
    let (id, _hash) = device.rsplit_once('-').unwrap();
    id.replacen('-', ":", 1)
}

/// The id that a pod of the device plugin has.
pub(crate) fn id_in(kubelet: &Kubelet, pod: &str) -> String {
    let devices = kubelet.devices(pod, "main");
    devices[&gpu()].iter().next().unwrap().to_string()
}

pub(crate) async fn pod_by_number(kubelet: &Kubelet, name: &str) -> Option<String> {
    let outcome = kubelet.add_pod(PodSpec::new("ml", name).app("main", &gpu(), 1)).await;
    if outcome.phase == PodPhase::Running {
        return Some(outcome.uid);
    }
    // The controller creates another one.
    kubelet.delete_pod(&outcome.uid).unwrap();
    None
}

const HELD: &str = "held=device-plugin:NoSchedule";
const LOST: &str = "held=device-plugin:NoExecute";
const ENDING: &str = "not-for-claims=:NoSchedule";

/// The state of a race: who uses each device, by its id.
#[derive(Default)]
struct Race {
    users: RefCell<BTreeMap<String, String>>,
    /// What the scheduler has allocated to claims.
    allocated: RefCell<BTreeSet<String>>,
    done: Cell<usize>,
}

impl Race {
    /// A pod runs with a device for a while.
    async fn run(&self, id: String, pod: &str) {
        let before = self.users.borrow_mut().insert(id.clone(), pod.to_owned());
        assert_eq!(before, None, "{id} has two living holders");
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
        self.users.borrow_mut().remove(&id);
        self.done.set(self.done.get() + 1);
    }

    /// The scheduler, the kubelet and the garbage collector for the pods with claims, one by one.
    async fn by_claims(&self, world: &World, worker: usize, pods: usize) {
        let mut random = Random::of(u64::try_from(worker).unwrap());
        let mut number = 0;
        for _ in 0..pods {
            'pod: loop {
                number += 1;
                let pod = format!("c{worker}-{number}");
                let choose = || {
                    let allocated = self.allocated.borrow();
                    let free = slice(world).into_iter().filter(|(_, taints)| taints.is_empty());
                    free.map(|(name, _)| name).filter(|it| !allocated.contains(it)).collect()
                };
                let free: Vec<String> =
                    until("a free device", choose, |free: &Vec<String>| !free.is_empty()).await;
                let device = free[random.index(free.len())].clone();
                self.allocated.borrow_mut().insert(device.clone());
                let claim = world.allocate(&pod, &pod, std::slice::from_ref(&device));
                let is_prepared = loop {
                    match world.manager.prepare(&pod, std::slice::from_ref(&claim)).await {
                        Ok(()) => break true,
                        Err(why) if why.contains("has lost a device") => break false,
                        // The daemon restarts, and the kubelet tries again.
                        Err(_) => world.until_registered().await,
                    }
                };
                if is_prepared {
                    self.run(id_of(&device), &pod).await;
                }
                while world.manager.unprepare(&pod).await.is_err() {
                    world.until_registered().await;
                }
                let of = claim_ref(&pod);
                world.server.remove(Kind::ResourceClaim, &of.namespace, &of.name);
                self.allocated.borrow_mut().remove(&device);
                if is_prepared {
                    break 'pod;
                }
            }
        }
    }

    /// The pods that request a number, one by one.
    async fn by_number(&self, kubelet: &Kubelet, worker: usize, pods: usize) {
        for pod in 0..pods {
            let uid = loop {
                // The scheduler binds no pod to a node without a free device.
                let taken = || kubelet.view(|view| view.holders().len());
                let free = || kubelet.capacity(&gpu()).allocatable.saturating_sub(taken());
                until("a free device", free, |free| *free > 0).await;
                if let Some(uid) = pod_by_number(kubelet, &format!("n{worker}-{pod}")).await {
                    break uid;
                }
            };
            self.run(id_in(kubelet, &uid), &uid).await;
            kubelet.delete_pod(&uid).unwrap();
        }
    }
}

#[test]
fn racing_pods_of_both_apis_share_no_device_and_all_of_them_run() {
    const WORKERS: usize = 2;
    const PODS: usize = 8;
    run(async {
        let world = World::new(3).await;
        set_api(&world, "both");
        let kubelet = world.node.start_old_kubelet(world.node.kubelet_config()).await;
        let mut daemon = world.start();
        world.until_published(3).await;
        world.until_registered().await;
        offered(&kubelet, &gpu(), 3).await;
        let race = Race::default();
        let claims = join_all((0..WORKERS).map(|it| race.by_claims(&world, it, PODS)));
        let numbers = join_all((0..WORKERS).map(|it| race.by_number(&kubelet, it, PODS)));
        let kills = async {
            for after in [WORKERS, 2 * PODS] {
                until("some pods", || race.done.get(), |done| *done >= after).await;
                daemon.kill();
                daemon = world.start();
            }
        };
        tokio::join!(claims, numbers, kills);
        assert_eq!(race.done.get(), 2 * WORKERS * PODS);
        assert_eq!(kubelet.panicked(), None);
        let free = world.until_published(3).await.into_iter().map(|name| (name, Vec::new()));
        until_slice(&world, "no taint", &free.collect()).await;
        offered(&kubelet, &gpu(), 3).await;
        stop(daemon).await;
    });
}

/// A pod that requests a number has a device that the scheduler has allocated to a claim.
async fn loser(profile: Profile) {
    let world = World::new(2).await;
    world.server.set_profile(profile);
    set_api(&world, "both");
    let kubelet = world.node.start_old_kubelet(world.node.kubelet_config()).await;
    let daemon = world.start();
    let names = world.until_published(2).await;
    world.until_registered().await;
    offered(&kubelet, &gpu(), 2).await;
    let uid = pod_by_number(&kubelet, "web").await.unwrap();
    let id = id_in(&kubelet, &uid);
    let (lost, other): (Vec<_>, Vec<_>) = names.into_iter().partition(|name| id_of(name) == id);
    let has_taints = profile == Profile::V1_36;
    let devices = |taint: &str| {
        let other = (other[0].clone(), Vec::new());
        let lost = (lost[0].clone(), vec![taint.to_owned()]);
        [other].into_iter().chain(has_taints.then_some(lost)).collect::<BTreeMap<_, _>>()
    };
    until_slice(&world, "the holder", &devices(HELD)).await;

    let claim = world.allocate("train", "pod-1", &lost);
    // A busy disk may keep the ledger from answering in time; the kubelet tries again.
    let claims = [claim];
    let why = loop {
        let why = world.manager.prepare("pod-1", &claims).await.unwrap_err();
        if !why.contains("has not answered in time") {
            break why;
        }
    };
    assert!(why.contains(&format!("`{id}` of example.com/gpu is held by pod ml/web")), "{why}");
    assert_eq!(why.contains("a taint of the device evicts the pods"), has_taints, "{why}");
    assert_eq!(why.contains("delete pod ml/pod-1"), !has_taints, "{why}");
    until_slice(&world, "the eviction", &devices(LOST)).await;
    // The next pod of the controller.
    world.manager.unprepare("pod-1").await.unwrap();
    let claim = world.allocate("train", "pod-2", &other);
    world.manager.prepare("pod-2", &[claim]).await.unwrap();
    // The other way round: the claim has the device that a pod by number could get.
    offered(&kubelet, &gpu(), 1).await;
    let status = world.node.json(&["status"]);
    assert_eq!(status["resources"][0]["api"], "both", "{status}");

    kubelet.delete_pod(&uid).unwrap();
    let free = [&lost, &other].map(|names| (names[0].clone(), Vec::new()));
    until_slice(&world, "no taint after the release", &free.into()).await;
    stop(daemon).await;
}

/// Each waits for the time of a Prepare.
#[test]
fn a_claim_that_loses_a_race_is_evicted_or_says_what_to_delete() {
    run(async {
        tokio::join!(loser(Profile::V1_36), loser(Profile::V1_35));
    });
}

#[test]
fn a_resource_moves_to_claims_and_back_while_devices_are_held() {
    run(async {
        let world = World::new(3).await;
        set_api(&world, "plugin");
        let kubelet = world.node.start_old_kubelet(world.node.kubelet_config()).await;
        let mut daemon = world.start();
        offered(&kubelet, &gpu(), 3).await;
        let uid = pod_by_number(&kubelet, "web").await.unwrap();
        world.until_registered().await;
        assert!(slice(&world).is_empty());

        // To claims. The container keeps its device.
        reload(&world, &daemon, "dra").await;
        let names = world.until_published(3).await;
        let id = id_in(&kubelet, &uid);
        let (by_number, free): (Vec<_>, Vec<_>) =
            names.into_iter().partition(|name| id_of(name) == id);
        let devices = |taints: [&str; 3]| -> BTreeMap<String, Vec<String>> {
            let all = by_number.iter().chain(&free).cloned();
            let taint = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            all.zip(taints.map(|text| taint(text).into_iter().collect())).collect()
        };
        until_slice(&world, "the holder by number", &devices([HELD, "", ""])).await;
        offered(&kubelet, &gpu(), 1).await;
        let first = world.allocate("first", "pod-1", &free[..1]);
        world.manager.prepare("pod-1", &[first]).await.unwrap();
        let second = world.allocate("second", "pod-2", &free[1..]);
        kubelet.delete_pod(&uid).unwrap();
        until_slice(&world, "no taint after the release", &devices(["", "", ""])).await;
        offered(&kubelet, &gpu(), 0).await;
        daemon.kill();
        daemon = world.start();
        world.until_registered().await;
        until_slice(&world, "the same after a restart", &devices(["", "", ""])).await;
        assert_eq!(world.holders("first").len(), 1);

        // And back. The schedulers learn it first, and a claim that has a device is prepared.
        reload(&world, &daemon, "plugin").await;
        until_slice(&world, "the taints", &devices([ENDING; 3])).await;
        let began = Instant::now();
        assert_eq!(kubelet.capacity(&gpu()).allocatable, 0);
        // The kubelet may still have the connection to the process that was killed.
        let second = [second];
        while let Err(why) = world.manager.prepare("pod-2", &second).await {
            assert!(why.contains("Unavailable"), "{why}");
            world.until_registered().await;
        }
        offered(&kubelet, &gpu(), 1).await;
        assert!(began.elapsed() > Duration::from_secs(5), "{:?}", began.elapsed());
        let mut of_claims = devices([ENDING; 3]);
        of_claims.remove(&by_number[0]);
        until_slice(&world, "the devices of claims", &of_claims).await;
        let again: Claim = world.allocate("first", "pod-1", &free[..1]);
        world.manager.prepare("pod-1", &[again]).await.unwrap();
        world.manager.unprepare("pod-1").await.unwrap();
        offered(&kubelet, &gpu(), 2).await;
        world.manager.unprepare("pod-2").await.unwrap();
        offered(&kubelet, &gpu(), 3).await;
        until_slice(&world, "nothing for claims", &BTreeMap::new()).await;
        let late = world.allocate("late", "pod-3", &free[..1]);
        let why = world.manager.prepare("pod-3", &[late]).await.unwrap_err();
        assert!(why.contains("whose devices are not given to claims"), "{why}");

        reload(&world, &daemon, "both").await;
        until_slice(&world, "both", &devices(["", "", ""])).await;
        assert_eq!(kubelet.capacity(&gpu()).allocatable, 3);
        stop(daemon).await;
    });
}
