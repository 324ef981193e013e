//! One script on both environments: real sockets and memory give the same events in the same order.

use super::*;
use crate::domain::ContainerEdits;
use crate::lab::sim::memory::{
    self, ConnectionId, Faults, ListStream, RegisterRequest, Simulation,
};
use futures_util::stream;

const SECOND: Duration = Duration::from_secs(1);

/// The same plugin as [`TestPlugin`], in memory.
struct Scripted(watch::Sender<Option<Vec<ListedDevice>>>);

#[tonic::async_trait]
impl memory::Plugin for Scripted {
    async fn options(&self) -> Result<Options, Status> {
        Ok(Options { preferred_allocation: false, pre_start: false })
    }

    async fn list_and_watch(&self, _: ConnectionId) -> Result<ListStream, Status> {
        let lists = WatchStream::new(self.0.subscribe());
        Ok(Box::pin(stream::unfold(lists, |mut lists| async move {
            Some((lists.next().await??, lists))
        })))
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
        Ok(Some(ContainerEdits::default()))
    }

    async fn pre_start(&self, _: Vec<DeviceId>) -> Result<(), Status> {
        Err(Status::unimplemented("not offered"))
    }
}

fn pod(uid: &str) -> PodSpec {
    PodSpec::with_uid(uid, "default", uid)
}

/// The events, without times.
fn event_texts(view: &View<'_>) -> Vec<String> {
    let kind = |event: &Event| match &event.kind {
        EventKind::Allocated { container, devices, .. } => {
            format!("allocated {} to {container}", devices.len())
        }
        _ => event.to_string().split("ms  ").last().unwrap_or_default().to_owned(),
    };
    view.events().iter().map(kind).collect()
}

fn lists(view: &View<'_>) -> usize {
    view.events().iter().filter(|event| matches!(event.kind, EventKind::Listed { .. })).count()
}

fn ends(view: &View<'_>) -> usize {
    view.events().iter().filter(|event| matches!(event.kind, EventKind::StreamEnded { .. })).count()
}

fn is_running(view: &View<'_>, uid: &str) -> bool {
    view.pod(uid).is_some_and(|pod| pod.phase == PodPhase::Running)
}

async fn on_sockets() -> Vec<String> {
    let node = Node::start().await;
    node.settled().await;
    let old = TestPlugin::serve(&node, "sub/old.sock", healthy(&["a", "b"]), Behaviour::Usual);
    let new = TestPlugin::serve(&node, "sub/new.sock", healthy(&["a", "b"]), Behaviour::Usual);
    let broken = node.register_request(request("v1beta1", "sub/old.sock", "gpu")).await;
    assert!(broken.is_err());
    old.register(&node).await;
    node.kubelet.add_pod(pod("one").init("warm", &gpu(), 1).app("main", &gpu(), 1)).await;
    new.register(&node).await;
    old.end_streams();
    node.kubelet.wait_for(|view| ends(view) == 2, SOON).await.unwrap();
    new.register(&node).await;
    node.kubelet.add_pod(pod("two").app("main", &gpu(), 2)).await;
    node.kubelet.delete_pod("one").unwrap();
    node.kubelet.add_pod(pod("three").app("main", &gpu(), 2)).await;
    node.kubelet.restart().await.unwrap();
    node.settled().await;
    node.kubelet.view(event_texts)
}

fn in_memory(seed: u64) -> Vec<String> {
    let mut config = KubeletConfig::new("", "");
    config.first_batch_after = Duration::from_millis(1);
    let mut simulation = Simulation::new(seed, config.behaviour(), Faults::none());
    let node = simulation.node();
    node.start_kubelet(Start::default());
    assert!(simulation.run_until(SECOND, |view| view.is_settled()));
    let process = node.process();
    let devices = || {
        ["a", "b"]
            .map(|id| ListedDevice { id: DeviceId::new(id), healthy: true, numa_nodes: Vec::new() })
            .to_vec()
    };
    let (old, new) = (watch::channel(Some(devices())).0, watch::channel(Some(devices())).0);
    process.bind("sub/old.sock", Arc::new(Scripted(old.clone()))).unwrap();
    process.bind("sub/new.sock", Arc::new(Scripted(new))).unwrap();
    let register = |simulation: &mut Simulation, endpoint: &str, resource: &str| {
        let request = RegisterRequest {
            version: "v1beta1".to_owned(),
            resource: resource.to_owned(),
            endpoint: endpoint.to_owned(),
            options: None,
        };
        let (node, before) = (simulation.node(), simulation.node().view(lists));
        let result = simulation.run(SECOND, async move { node.register(request).await }).unwrap();
        assert!(result.is_err() || simulation.run_until(SECOND, |view| lists(view) > before));
        result.is_ok()
    };
    assert!(!register(&mut simulation, "sub/old.sock", "gpu"));
    assert!(register(&mut simulation, "sub/old.sock", gpu().as_str()));
    node.add_pod(pod("one").init("warm", &gpu(), 1).app("main", &gpu(), 1));
    assert!(simulation.run_until(SECOND, |view| is_running(view, "one")));
    assert!(register(&mut simulation, "sub/new.sock", gpu().as_str()));
    old.send_replace(None);
    assert!(simulation.run_until(SECOND, |view| ends(view) == 2));
    assert!(register(&mut simulation, "sub/new.sock", gpu().as_str()));
    node.add_pod(pod("two").app("main", &gpu(), 2));
    assert!(simulation.run_until(SECOND, |view| view.pod("two").is_some_and(Pod::is_failed)));
    node.delete_pod("one");
    assert!(simulation.run_until(10 * SECOND, |view| view.pod("one").is_none()));
    node.add_pod(pod("three").app("main", &gpu(), 2));
    assert!(simulation.run_until(SECOND, |view| is_running(view, "three")));
    node.restart_kubelet(Duration::ZERO, Start::default());
    assert!(simulation.run_until(SECOND, |view| view.starts() == 2 && view.is_settled()));
    node.view(event_texts)
}

#[tokio::test]
async fn one_script_gives_the_same_events_in_both_environments() {
    let events = on_sockets().await;
    let expected = [
        "kubelet started (start 1)",
        "first pods admitted",
        "gpu: register failed: the ResourceName \"gpu\" is invalid",
        "example.com/gpu: options of client 1",
        "example.com/gpu: registered client 1 at sub/old.sock",
        "example.com/gpu: list of client 1, 2 healthy, 0 unhealthy",
        "allocated 1 to warm",
        "allocated 1 to main",
        "pod one admitted",
        "one/warm started",
        "one/main started",
        "example.com/gpu: interleaving BothClientsFeedList",
        "example.com/gpu: options of client 2",
        "example.com/gpu: registered client 2 at sub/new.sock",
        "example.com/gpu: list of client 2, 2 healthy, 0 unhealthy",
        "example.com/gpu: stream of client 1 ended",
        "example.com/gpu: interleaving OldStreamEndsLate",
        "example.com/gpu: client 2 disconnected",
        "example.com/gpu: stream of client 2 ended",
        "example.com/gpu: options of client 3",
        "example.com/gpu: registered client 3 at sub/new.sock",
        "example.com/gpu: list of client 3, 2 healthy, 0 unhealthy",
        "pod two rejected: UnexpectedAdmissionError: Pod was rejected: Allocate failed due to requested number of devices \
         unavailable for example.com/gpu. Requested: 2, Available: 1, which is unexpected",
        "pod one deleted",
        "allocated 2 to main",
        "pod three admitted",
        "three/main started",
        "kubelet stopped",
        "kubelet started (start 2)",
        "pod three admitted",
        "first pods admitted",
    ];
    assert_eq!(events, expected);
    for seed in 0..20 {
        assert_eq!(in_memory(seed), expected, "seed {seed}");
    }
}
