//! The node in memory with a simple plugin, which registers again each time a stream ends and never
//! sends a settling Register.

use super::*;
use crate::domain::{CgroupState, ContainerEdits, DeviceId, ResourceName};
use crate::lab::sim::kubelet::core::{ListedDevice, Options};
use crate::lab::sim::kubelet::{
    Behaviour, Capacity, EventKind, Hook, Interleaving, PodPhase, PodSpec, Profile, Start, Verdict,
    View,
};
use futures_util::StreamExt as _;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tonic::Status;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn gpu() -> ResourceName {
    "example.com/gpu".parse().unwrap()
}

fn healthy(ids: &[&str]) -> Vec<ListedDevice> {
    ids.iter()
        .map(|id| ListedDevice { id: DeviceId::new(*id), healthy: true, numa_nodes: Vec::new() })
        .collect()
}

/// The service; it keeps no grants.
#[derive(Clone)]
struct SimplePlugin {
    lists: watch::Sender<Vec<ListedDevice>>,
    ended: mpsc::UnboundedSender<()>,
    allocated: Arc<AtomicU64>,
    options: Options,
    /// Whether PreStartContainer hangs; otherwise it fails.
    hangs: bool,
}

struct Ended(mpsc::UnboundedSender<()>);

impl Drop for Ended {
    fn drop(&mut self) {
        // The daemon may have ended too.
        let _ = self.0.send(());
    }
}

#[tonic::async_trait]
impl Plugin for SimplePlugin {
    async fn options(&self) -> Result<Options, Status> {
        Ok(self.options)
    }

    async fn list_and_watch(&self, _: ConnectionId) -> Result<ListStream, Status> {
        let state = (self.lists.subscribe(), true, Ended(self.ended.clone()));
        let lists = futures_util::stream::unfold(state, |(mut lists, first, ended)| async move {
            if !first {
                lists.changed().await.ok()?;
            }
            let list = lists.borrow_and_update().clone();
            Some((list, (lists, false, ended)))
        });
        Ok(lists.boxed())
    }

    async fn preferred(
        &self,
        available: Vec<DeviceId>,
        _: Vec<DeviceId>,
        size: usize,
    ) -> Result<BTreeSet<DeviceId>, Status> {
        Ok(available.into_iter().collect::<BTreeSet<_>>().into_iter().take(size).collect())
    }

    async fn allocate(&self, ids: Vec<DeviceId>) -> Result<Option<ContainerEdits>, Status> {
        let number = self.allocated.fetch_add(1, Ordering::Relaxed);
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        let annotations = BTreeMap::from([(
            "holdfast.dev/alloc-id".to_owned(),
            format!("alloc-{number}-{}", ids.join("+")),
        )]);
        Ok(Some(ContainerEdits { annotations, ..ContainerEdits::default() }))
    }

    async fn pre_start(&self, _: Vec<DeviceId>) -> Result<(), Status> {
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Err(Status::failed_precondition("not ready"))
    }
}

/// A daemon of one resource, with its sockets in a directory of its own.
struct Daemon {
    process: Process,
    lists: watch::Sender<Vec<ListedDevice>>,
}

impl Daemon {
    fn start(node: &Node, name: &str) -> Self {
        Self::with(node, name, Options { preferred_allocation: false, pre_start: false }, false)
    }

    /// With a new socket for every registration, or one for all.
    fn with(node: &Node, name: &str, options: Options, always_new: bool) -> Self {
        let process = node.process();
        let (ended, mut ends) = mpsc::unbounded_channel();
        let (lists, _) = watch::channel(healthy(&["a", "b"]));
        let plugin = SimplePlugin {
            lists: lists.clone(),
            ended,
            allocated: Arc::default(),
            options,
            hangs: name == "hangs",
        };
        let plugin: Arc<dyn Plugin> = Arc::new(plugin);
        let mut endpoint = format!("simple/{name}.sock");
        process.bind(&endpoint, Arc::clone(&plugin)).unwrap();
        let (node, name, binder) = (node.clone(), name.to_owned(), process.clone());
        process.spawn(async move {
            let mut kubelet = node.kubelet_socket();
            for number in 0.. {
                if always_new {
                    endpoint = format!("simple/{name}-{number}.sock");
                    binder.bind(&endpoint, Arc::clone(&plugin)).unwrap();
                }
                let request = RegisterRequest {
                    version: "v1beta1".to_owned(),
                    resource: gpu().to_string(),
                    endpoint: endpoint.clone(),
                    options: Some(options),
                };
                let registered = node.handle().timeout(2 * SECOND, node.register(request)).await;
                let again = if matches!(registered, Some(Ok(()))) { MINUTE } else { 20 * MS };
                tokio::select! {
                    biased;
                    _ = ends.recv() => {}
                    _ = kubelet.changed() => {}
                    () = node.handle().sleep(again) => {}
                }
            }
        });
        Daemon { process, lists }
    }
}

fn simulation(seed: u64, faults: Faults) -> Simulation {
    Simulation::new(seed, Behaviour::default(), faults)
}

fn is_served(view: &View<'_>) -> bool {
    let endpoint = view.endpoint_state(&gpu());
    !endpoint.is_stopped
        && endpoint.is_tracked
        && endpoint.is_streaming
        && endpoint.healthy.len() == 2
}

fn pod(uid: &str) -> PodSpec {
    PodSpec::with_uid(uid, "default", format!("pod-{uid}"))
}

fn phase(node: &Node, uid: &str) -> PodPhase {
    node.view(|view| view.pod(uid).map(|pod| pod.phase.clone())).unwrap()
}

/// An upgrade with overlap, two restarts of the kubelet, some pods. Returns the events, one a line,
/// and the counters.
fn scenario(
    seed: u64,
    profile: Profile,
    faults: Faults,
) -> (Vec<String>, BTreeSet<Interleaving>, BTreeMap<Hook, u64>) {
    let mut simulation =
        Simulation::new(seed, Behaviour { profile, ..Behaviour::default() }, faults);
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let options = Options { preferred_allocation: seed.is_multiple_of(3), pre_start: false };
    let always_new = profile != Profile::K125;
    let old = Daemon::with(&node, "old", options, always_new);
    simulation.run_for(2 * SECOND);
    node.add_pod(pod("1").init("warm", &gpu(), 1).app("main", &gpu(), 1));
    simulation.run_for(SECOND);
    let _new = Daemon::with(&node, "new", options, always_new);
    let overlap = node.handle().random(|random| random.between(Duration::ZERO, 3 * MS));
    simulation.run_for(overlap);
    old.process.kill();
    node.add_pod(pod("2").app("main", &gpu(), 1));
    simulation.run_for(SECOND);
    node.restart_kubelet(100 * MS, Start::default());
    simulation.run_for(3 * SECOND);
    node.delete_pod("1");
    simulation.run_for(3 * SECOND);
    node.add_pod(pod("3").app("main", &gpu(), 1));
    node.restart_kubelet(10 * MS, Start::default());
    simulation.run_for(30 * SECOND);
    node.view(|view| {
        let events = view.events().iter().map(ToString::to_string).collect();
        (events, view.interleavings().keys().copied().collect(), view.hooks().clone())
    })
}

#[test]
fn the_same_seed_gives_the_same_events_and_another_one_does_not() {
    let run = |seed| scenario(seed, Profile::K125, Faults::all(MINUTE)).0;
    for seed in 0..20 {
        let first = run(seed);
        assert_eq!(first, run(seed));
        assert_ne!(first, run(seed + 1));
    }
}

#[test]
fn a_pod_keeps_its_devices_over_a_restart_and_its_files_until_it_is_deleted() {
    for seed in 0..50 {
        let mut simulation = simulation(seed, Faults::none());
        let node = simulation.node();
        let _daemon = Daemon::start(&node, "one");
        node.start_kubelet(Start::default());
        assert!(simulation.run_until(10 * SECOND, is_served));
        node.add_pod(pod("1").init("warm", &gpu(), 1).app("main", &gpu(), 1));
        assert!(simulation.run_until(SECOND, |view| {
            view.holders().iter().any(|holder| holder.container == "warm")
        }));
        assert!(simulation.run_until(2 * SECOND, |view| {
            view.holders().iter().any(|holder| holder.container == "main")
        }));
        assert_eq!(node.view(|view| view.holders().len()), 1, "the init container has ended");
        let holder = node.view(|view| view.holders().remove(0));
        let id = holder.alloc_id.clone().unwrap();
        assert_eq!(holder.devices[&gpu()].len(), 1);
        let checkpoint = node.checkpoint().unwrap();
        let entry = checkpoint.entries().iter().find(|entry| entry.container == "main").unwrap();
        assert_eq!(
            (&entry.device_ids, entry.alloc_id.as_ref()),
            (&holder.devices[&gpu()], Some(&id))
        );
        assert_eq!(node.cgroup("1"), CgroupState::Populated);
        assert_eq!(node.names()["1"].name, "pod-1");
        let (asking, expected) = (node.clone(), holder.devices.clone());
        let listed =
            simulation.run(SECOND, async move { asking.list_pods().await }).unwrap().unwrap();
        assert_eq!((listed[0].containers.len(), &listed[0].containers[0].devices), (1, &expected));

        assert_eq!(node.view(|view| view.shared_devices().len()), 0);

        let first = *node.kubelet_socket().borrow();
        node.restart_kubelet(5 * MS, Start::default());
        simulation.run_for(100 * MS);
        let asking = node.clone();
        let early = simulation.run(SECOND, async move {
            (asking.list_pods().await.unwrap(), asking.allocatable().await.ok())
        });
        assert_eq!(
            early,
            Some((Vec::new(), Some(BTreeMap::new()))),
            "it answers before it has state"
        );
        assert!(simulation.run_until(10 * SECOND, |view| view.is_settled() && view.starts() == 2));
        assert_ne!(*node.kubelet_socket().borrow(), first);
        assert_eq!(phase(&node, "1"), PodPhase::Running, "the plugin was back in time");
        assert_eq!(node.view(|view| view.holders()), [holder], "and nothing was started again");

        node.delete_pod("1");
        simulation.run_for(10 * SECOND);
        assert_eq!(
            (node.cgroup("1"), node.names().len(), node.view(|view| view.holders().len())),
            (CgroupState::Absent, 0, 0)
        );
    }
}

#[test]
fn a_killed_daemon_leaves_its_socket_file_and_its_devices_are_not_allocatable() {
    let mut simulation = simulation(1, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    daemon.lists.send_replace(healthy(&["a"]));
    assert!(simulation.run_until(SECOND, |view| view.capacity(&gpu())
        == Capacity { capacity: 1, allocatable: 1 }));
    daemon.process.kill();
    assert!(daemon.process.is_dead());
    assert!(simulation.run_until(SECOND, |view| view.capacity(&gpu())
        == Capacity { capacity: 1, allocatable: 0 }));
    assert_eq!(node.sockets(), ["kubelet.sock", "simple/one.sock"]);
    let process = node.process();
    let plugin = SimplePlugin {
        lists: daemon.lists.clone(),
        ended: mpsc::unbounded_channel().0,
        allocated: Arc::default(),
        options: Options { preferred_allocation: false, pre_start: false },
        hangs: false,
    };
    assert!(
        process.bind("simple/one.sock", Arc::new(plugin.clone())).is_err(),
        "the file already exists"
    );
    assert!(node.unlink("simple/one.sock"));
    let flat = process.bind("flat.sock", Arc::new(plugin)).unwrap();
    assert!(flat.is_linked());
    // Five minutes later the resource is deleted.
    simulation.run_for(6 * MINUTE);
    assert_eq!(node.view(|view| view.capacity(&gpu())), Capacity::default());
    let dip = node.view(|view| view.readings(&gpu()).unwrap().dip(1, Duration::ZERO, MINUTE));
    assert!(dip > 50.0, "{dip}");

    node.restart_kubelet(MS, Start::default());
    simulation.run_for(SECOND);
    assert!(!flat.is_linked(), "the kubelet cleans its directory");
    assert_eq!(node.sockets(), ["kubelet.sock"]);
}

#[test]
fn a_register_is_answered_with_the_kubelets_texts() {
    let mut simulation = simulation(3, Faults::none());
    let node = simulation.node();
    let mut register = |version: &str, resource: &str, endpoint: &str| {
        let (node, request) = (
            node.clone(),
            RegisterRequest {
                version: version.into(),
                resource: resource.into(),
                endpoint: endpoint.into(),
                options: None,
            },
        );
        simulation
            .run(MINUTE, async move { node.register(request).await })
            .unwrap()
            .unwrap_err()
            .to_string()
    };
    assert!(
        register("v1beta1", "example.com/gpu", "x.sock").contains("does not answer: No such file")
    );
    node.start_kubelet(Start::default());
    // The start takes 300 ms, and the dial of an absent socket ten seconds.
    while register("v1beta1", "example.com/gpu", "x.sock").contains("does not answer") {}
    let text = register("v1alpha1", "example.com/gpu", "x.sock");
    assert!(text.ends_with("requested API version \"v1alpha1\" is not supported by kubelet. Supported version is [\"v1beta1\"]"), "{text}");
    assert!(register("v1beta1", "gpu", "x.sock").ends_with("the ResourceName \"gpu\" is invalid"));
    let before = node.handle().now();
    let text = register("v1beta1", "example.com/gpu", "missing.sock");
    assert!(text.ends_with("failed to dial device plugin: context deadline exceeded"), "{text}");
    assert!((10 * SECOND..10 * SECOND + MS).contains(&(node.handle().now() - before)));
    node.kill_kubelet();
    assert!(register("v1beta1", "example.com/gpu", "x.sock").contains("Connection refused"));
}

/// Two daemons that start together with a kubelet that is slow between the options and the
/// endpoint.
fn overtaking(seed: u64) -> BTreeSet<Interleaving> {
    let slow = Probabilities { delays: 0.7, ..Probabilities::default() };
    let mut simulation = simulation(seed, Faults::schedules(MINUTE).with(Hook::AfterOptions, slow));
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemons = [Daemon::start(&node, "one"), Daemon::start(&node, "two")];
    simulation.run_for(2 * SECOND);
    node.view(|view| view.interleavings().keys().copied().collect())
}

#[test]
fn every_interleaving_and_every_hook_is_reached_by_seeds() {
    let (mut seen, mut hooks) =
        (BTreeMap::<Interleaving, u64>::new(), BTreeMap::<Hook, u64>::new());
    for seed in 0_u64..400 {
        let faults =
            if seed.is_multiple_of(2) { Faults::schedules(MINUTE) } else { Faults::all(MINUTE) };
        let (_, interleavings, reached) = scenario(seed, Profile::K125, faults);
        interleavings.into_iter().for_each(|which| *seen.entry(which).or_default() += 1);
        reached.into_iter().for_each(|(hook, count)| *hooks.entry(hook).or_default() += count);
    }
    for seed in 0..50 {
        overtaking(seed).into_iter().for_each(|which| *seen.entry(which).or_default() += 1);
    }
    println!("runs with each interleaving: {seen:?}; times at each hook: {hooks:?}");
    let missing: Vec<_> =
        Interleaving::ALL.into_iter().filter(|which| !seen.contains_key(which)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let missing: Vec<_> = Hook::ALL.into_iter().filter(|hook| !hooks.contains_key(hook)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn kubelets_that_distinguish_clients_never_disconnect_a_new_one_for_an_old_one() {
    for profile in [Profile::K137, Profile::K137Dedupe, Profile::K110] {
        for seed in 0..50 {
            let (events, seen, _) = scenario(seed, profile, Faults::schedules(MINUTE));
            for which in [
                Interleaving::OldStreamEndsLate,
                Interleaving::CutBeforeListAndWatch,
                Interleaving::CutStreamEndsLate,
                Interleaving::StoppedWhileStreaming,
            ] {
                assert!(
                    !seen.contains(&which),
                    "{profile:?}, seed {seed}: {which}\n{}",
                    events.join("\n")
                );
            }
        }
    }
}

#[test]
fn a_failing_pre_start_keeps_the_container_waiting_and_is_skipped_after_a_restart() {
    let mut simulation = simulation(1, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let daemon =
        Daemon::with(&node, "one", Options { preferred_allocation: true, pre_start: true }, false);
    assert!(simulation.run_until(10 * SECOND, is_served));
    node.add_pod(pod("1").app("main", &gpu(), 1));
    simulation.run_for(SECOND);
    let waiting =
        node.view(|view| view.pod("1").unwrap().containers["main"].waiting.clone()).unwrap();
    let text = "CreateContainerConfigError: device plugin PreStartContainer rpc failed with err: \
                rpc error: code = FailedPrecondition desc = not ready";
    assert_eq!(waiting, text);
    assert_eq!(phase(&node, "1"), PodPhase::Pending);
    simulation.run_for(MINUTE);
    let tries = node.view(|view| {
        view.events()
            .iter()
            .filter(|event| matches!(event.kind, EventKind::StartFailed { .. }))
            .count()
    });
    assert!((6..=7).contains(&tries), "{tries}");

    // The plugin comes back too late: the kubelet knows only that the pod holds a device.
    daemon.process.kill();
    node.restart_kubelet(MS, Start::default());
    simulation.run_for(SECOND);
    assert!(
        matches!(phase(&node, "1"), PodPhase::Failed { .. }),
        "it does not run, so the kubelet decides on it again"
    );
}

#[test]
fn a_pre_start_without_an_answer_fails_after_thirty_seconds() {
    let mut simulation = simulation(1, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::with(
        &node,
        "hangs",
        Options { preferred_allocation: true, pre_start: true },
        false,
    );
    assert!(simulation.run_until(10 * SECOND, is_served));
    node.add_pod(pod("1").app("main", &gpu(), 1));
    let is_waiting = |view: &View<'_>| {
        view.pod("1")
            .is_some_and(|pod| pod.containers.values().any(|container| container.waiting.is_some()))
    };
    assert!(!simulation.run_until(30 * SECOND, is_waiting));
    assert!(simulation.run_until(SECOND, is_waiting));
}

#[test]
fn after_a_reboot_containers_start_with_their_recorded_devices() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    node.add_pod(pod("1").app("main", &gpu(), 2));
    assert!(simulation.run_until(SECOND, |view| view.holders().len() == 1));
    let before = node.view(|view| view.holders());
    let boot = node.boot_id();
    node.reboot(SECOND);
    assert_ne!(node.boot_id(), boot);
    assert_eq!(
        (node.cgroup("1"), node.view(|view| view.holders().len())),
        (CgroupState::Absent, 0)
    );
    let _daemon = Daemon::start(&node, "two");
    simulation.run_for(10 * SECOND);
    assert_eq!(node.view(|view| view.holders()), before);
    let allocated = node.view(|view| {
        view.events()
            .iter()
            .filter(|event| matches!(event.kind, EventKind::Allocated { .. }))
            .count()
    });
    assert_eq!(allocated, 1);
}

#[test]
fn a_force_deleted_pod_and_the_next_one_hold_the_same_device() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    node.add_pod(pod("1").app("main", &gpu(), 2));
    assert!(simulation.run_until(SECOND, |view| view.holders().len() == 1));
    node.force_delete_pod("1");
    node.add_pod(pod("2").app("main", &gpu(), 2));
    assert!(simulation.run_until(SECOND, |view| view.holders().len() == 2));
    assert_eq!(
        node.view(|view| view.holders().iter().filter(|holder| holder.is_orphan).count()),
        1
    );
    assert_eq!(node.view(|view| view.shared_devices().len()), 2);
    node.delete_pod("1");
    assert!(simulation.run_until(5 * SECOND, |view| view.holders().len() == 1));
}

#[test]
fn a_list_is_limited_and_counted_while_an_allocate_is_under_way() {
    let stall = Probabilities { stalls: 1.0, ..Probabilities::default() };
    let mut simulation = simulation(5, Faults::schedules(MINUTE).with(Hook::DuringAllocate, stall));
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    node.add_pod(pod("1").app("main", &gpu(), 1));
    assert!(
        simulation.run_until(10 * SECOND, |view| view.hooks().contains_key(&Hook::DuringAllocate))
    );
    let asking = node.clone();
    let refused = simulation.run(SECOND, async move {
        let answers = (0..30).map(|_| asking.list_pods());
        futures_util::future::join_all(answers).await.into_iter().filter(Result::is_err).count()
    });
    assert!((15..=20).contains(&refused.unwrap()), "{refused:?}");
    assert!(node.view(|view| view.listings_in_allocate()) >= 10);
}

#[test]
fn a_cancelled_register_forgets_its_client_and_the_earlier_one() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    let request = RegisterRequest {
        version: "v1beta1".to_owned(),
        resource: gpu().to_string(),
        endpoint: "simple/missing.sock".to_owned(),
        options: None,
    };
    let registering = node.clone();
    assert!(simulation.run(20 * MS, async move { registering.register(request).await }).is_none());
    simulation.run_for(MS);
    let endpoint = node.view(|view| view.endpoint_state(&gpu()));
    assert_eq!((endpoint.tracked, endpoint.is_streaming, endpoint.is_stopped), (None, true, false));
    assert_eq!(
        node.view(|view| view
            .interleavings()
            .get(&Interleaving::FailedRegisterForgetsClient)
            .copied()),
        Some(1)
    );
    daemon.process.kill();
    simulation.run_for(SECOND);
    assert!(
        !node.view(|view| view.endpoint_state(&gpu()).is_stopped),
        "the kubelet does not notice its end"
    );
}

#[test]
fn a_list_that_is_too_large_ends_the_stream() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    let device = |number: usize| ListedDevice {
        id: DeviceId::new(format!("{number:063}")),
        healthy: true,
        numa_nodes: vec![0],
    };
    daemon.lists.send_replace((0..60_000).map(device).collect());
    assert!(simulation.run_until(SECOND, |view| view.capacity(&gpu())
        == Capacity { capacity: 2, allocatable: 0 }));
}

#[test]
fn a_container_start_allocates_again_when_nothing_is_recorded() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, is_served));
    node.add_pod(pod("1").app("main", &gpu(), 1));
    assert!(simulation.run_until(SECOND, |view| view.holders().len() == 1));
    // With the checkpoint the kubelet loses the pod's devices; it does not decide again on a
    // running container.
    node.kill_kubelet();
    node.delete_checkpoint();
    node.restart_kubelet(MS, Start::default());
    assert!(simulation.run_until(10 * SECOND, |view| view.is_settled()));
    assert_eq!(node.view(|view| view.devices("1", "main").len()), 0);
    node.crash_container("1", "main");
    simulation.run_for(MINUTE);
    assert_eq!(node.view(|view| (view.devices("1", "main").len(), view.holders().len())), (1, 1));
    let allocated = node.view(|view| {
        view.events()
            .iter()
            .filter(|event| matches!(event.kind, EventKind::Allocated { .. }))
            .count()
    });
    assert_eq!(allocated, 2);
}

#[test]
fn a_container_waits_for_its_missing_cdi_device() {
    struct Cdi;

    #[tonic::async_trait]
    impl Plugin for Cdi {
        async fn options(&self) -> Result<Options, Status> {
            Ok(Options { preferred_allocation: false, pre_start: false })
        }

        async fn list_and_watch(&self, _: ConnectionId) -> Result<ListStream, Status> {
            Ok(futures_util::stream::iter([healthy(&["a", "b"])])
                .chain(futures_util::stream::pending())
                .boxed())
        }

        async fn preferred(
            &self,
            _: Vec<DeviceId>,
            _: Vec<DeviceId>,
            _: usize,
        ) -> Result<BTreeSet<DeviceId>, Status> {
            Err(Status::unimplemented("not offered"))
        }

        async fn allocate(&self, _: Vec<DeviceId>) -> Result<Option<ContainerEdits>, Status> {
            Ok(Some(ContainerEdits {
                cdi_devices: vec!["example.com/gpu=a".to_owned()],
                ..ContainerEdits::default()
            }))
        }

        async fn pre_start(&self, _: Vec<DeviceId>) -> Result<(), Status> {
            Ok(())
        }
    }

    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    node.set_cdi(BTreeSet::new());
    let process = node.process();
    let bound = process.bind("cdi.sock", Arc::new(Cdi)).unwrap();
    simulation.run_for(SECOND);
    assert!(!bound.is_linked(), "too early: the kubelet has cleaned up");
    bound.close();
    let bound = process.bind("cdi.sock", Arc::new(Cdi)).unwrap();
    let request = RegisterRequest {
        version: "v1beta1".to_owned(),
        resource: gpu().to_string(),
        endpoint: bound.endpoint().to_owned(),
        options: None,
    };
    let registering = node.clone();
    simulation.run(SECOND, async move { registering.register(request).await }).unwrap().unwrap();
    assert!(simulation.run_until(SECOND, is_served));
    assert_eq!(bound.connections(), 1);
    node.add_pod(pod("1").app("main", &gpu(), 1));
    simulation.run_for(SECOND);
    let waiting =
        node.view(|view| view.pod("1").unwrap().containers["main"].waiting.clone()).unwrap();
    assert!(waiting.ends_with("unresolvable CDI devices example.com/gpu=a"), "{waiting}");
    node.set_cdi(BTreeSet::from(["example.com/gpu=a".to_owned()]));
    assert!(simulation.run_until(MINUTE, |view| view.holders().len() == 1));

    bound.close();
    assert!(simulation.run_until(SECOND, |view| view.endpoint_state(&gpu()).is_stopped));
}

#[test]
fn a_deleted_pod_continues_to_run_without_a_kubelet() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::start(&node, "one");
    assert!(simulation.run_until(10 * SECOND, |view| is_served(view) && view.is_settled()));
    node.add_pod(pod("1").app("main", &gpu(), 1));
    assert!(simulation.run_until(SECOND, |view| view.holders().len() == 1));
    node.kill_kubelet();
    node.delete_pod("1");
    simulation.run_for(MINUTE);
    assert_eq!(node.cgroup("1"), CgroupState::Populated);
    node.start_kubelet(Start { runtime_down: true });
    assert!(simulation.run_until(10 * SECOND, |view| view.pod("1").is_none()));
    assert_eq!(node.cgroup("1"), CgroupState::Absent);
}

#[test]
fn a_pod_rejected_for_cpu_leaves_its_devices_to_the_next_one() {
    let mut simulation = simulation(5, Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    let _daemon = Daemon::start(&node, "one");
    // During the first batch no device can be freed.
    assert!(simulation.run_until(10 * SECOND, |view| is_served(view) && view.is_settled()));
    node.add_pod(pod("1").app("main", &gpu(), 2).without_cpu());
    node.add_pod(pod("2").app("main", &gpu(), 2));
    assert!(simulation.run_until(SECOND, |view| view.holders().len() == 1));
    assert!(matches!(phase(&node, "1"), PodPhase::Failed { reason, .. } if reason == "OutOfcpu"));
    node.resize_pod("2");
    simulation.run_for(SECOND);
    assert_eq!(node.view(|view| view.holders().len()), 1, "nothing changes");
    node.complete_pod("2");
    node.add_pod(pod("3").app("main", &gpu(), 2));
    assert!(
        simulation
            .run_until(SECOND, |view| view.holders().iter().any(|holder| holder.pod_uid == "3"))
    );
    simulation.run_for(SECOND);
    assert_eq!((phase(&node, "2"), node.cgroup("2")), (PodPhase::Succeeded, CgroupState::Absent));
}

#[test]
fn a_supervised_kubelet_recovers_from_every_crash() {
    let mut starts = 0;
    for seed in 0..10 {
        let faults = Faults::schedules(MINUTE)
            .with(Hook::OnList, Probabilities { crashes: 0.7, ..Probabilities::default() });
        let mut simulation = simulation(seed, faults);
        let node = simulation.node();
        node.supervise_kubelet(100 * MS);
        let _daemon = Daemon::start(&node, "one");
        simulation.run_for(3 * MINUTE);
        assert!(node.view(is_served));
        starts += node.view(|view| view.starts());
        let (registers, lists) = node.view(|view| view.busiest_second(&gpu()));
        assert!((1..20).contains(&registers) && (1..20).contains(&lists), "{registers} {lists}");
    }
    assert!(starts > 20, "{starts}");
}

/// A daemon, a pod and a restart, with a supervised kubelet, and `time` to recover. Returns the
/// number of steps, and whether everything is served at the end.
fn supervised_run(faults: Faults, time: Duration) -> (u64, bool) {
    let mut simulation = simulation(7, faults);
    let node = simulation.node();
    node.supervise_kubelet(50 * MS);
    let _daemon = Daemon::start(&node, "one");
    simulation.run_for(SECOND);
    node.add_pod(pod("1").init("warm", &gpu(), 1).app("main", &gpu(), 1));
    simulation.run_for(2 * SECOND);
    node.kill_kubelet();
    simulation.run_for(time);
    let has_recovered = |view: &View<'_>| {
        let decided = view.pod("1").is_some_and(|pod| {
            pod.is_failed() || pod.containers.get("main").is_some_and(|main| main.running)
        });
        is_served(view) && decided && view.panicked().is_none() && view.shared_devices().is_empty()
    };
    node.view(|view| (view.hooks().values().sum(), has_recovered(view)))
}

#[test]
fn a_kubelet_that_dies_or_stalls_at_any_step_recovers() {
    let (steps, has_recovered) = supervised_run(Faults::none(), 30 * SECOND);
    assert!(steps > 30 && has_recovered, "{steps}");
    for step in 1..=steps {
        for (wait, verdict) in [
            (Duration::ZERO, Verdict::Crash),
            (20 * MS, Verdict::Pass),
            (3 * SECOND, Verdict::Pass),
        ] {
            // The simple daemon registers again every minute; this recovers it.
            let (_, has_recovered) =
                supervised_run(Faults::none().step(step, wait, verdict), 3 * MINUTE);
            assert!(has_recovered, "{verdict:?} after {wait:?} at step {step}");
        }
    }
}

#[test]
fn nothing_outlives_a_simulation() {
    let allocated = Arc::new(AtomicU64::new(0));
    {
        let mut simulation = simulation(5, Faults::all(MINUTE));
        let node = simulation.node();
        node.supervise_kubelet(100 * MS);
        let (lists, _) = watch::channel(healthy(&["a"]));
        let options = Options { preferred_allocation: true, pre_start: false };
        let plugin = SimplePlugin {
            lists,
            ended: mpsc::unbounded_channel().0,
            allocated: Arc::clone(&allocated),
            options,
            hangs: false,
        };
        let process = node.process();
        process.bind("simple/one.sock", Arc::new(plugin)).unwrap();
        let request = RegisterRequest {
            version: "v1beta1".to_owned(),
            resource: gpu().to_string(),
            endpoint: "simple/one.sock".to_owned(),
            options: None,
        };
        let registering = node.clone();
        simulation.run_for(SECOND);
        let _result =
            simulation.run(20 * SECOND, async move { registering.register(request).await });
        node.add_pod(pod("1").app("main", &gpu(), 1));
        simulation.run_for(SECOND);
    }
    assert_eq!(Arc::strong_count(&allocated), 1);
}
