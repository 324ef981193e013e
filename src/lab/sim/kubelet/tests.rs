//! Tests the simulated kubelet with a tiny plugin over real sockets. Every test waits for values,
//! none sleeps.

use super::core::{DeviceManager, ListedDevice, Options, Step};
use super::held::PodDevices;
use super::*;
use crate::kubelet::pod_resources::{PodResources, PodResourcesError};
use crate::kubelet::proto::podresources_v1 as resources;
use crate::kubelet::proto::podresources_v1::pod_resources_lister_client::PodResourcesListerClient;
use crate::kubelet::proto::v1beta1 as api;
use crate::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::kubelet::proto::v1beta1::registration_client::RegistrationClient;
use crate::kubelet::uds;
use std::pin::Pin;
use std::sync::Mutex;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

mod environments;
mod interleavings;
mod versions;

const SOON: Duration = Duration::from_secs(5);

fn gpu() -> ResourceName {
    "example.com/gpu".parse().unwrap()
}

fn ids(ids: &[&str]) -> BTreeSet<DeviceId> {
    ids.iter().map(|id| DeviceId::new(*id)).collect()
}

fn device(id: &str, health: &str) -> api::Device {
    api::Device { id: id.to_owned(), health: health.to_owned(), topology: None }
}

fn healthy(ids: &[&str]) -> Vec<api::Device> {
    ids.iter().map(|id| device(id, "Healthy")).collect()
}

/// A plugin of one resource: serves a list and records the allocated ids.
struct TestPlugin {
    endpoint: String,
    lists: watch::Sender<Option<Vec<api::Device>>>,
    allocated: Arc<Mutex<Vec<BTreeSet<DeviceId>>>>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for TestPlugin {
    fn drop(&mut self) {
        self.server.abort();
    }
}

#[derive(Clone)]
struct Service {
    lists: watch::Sender<Option<Vec<api::Device>>>,
    allocated: Arc<Mutex<Vec<BTreeSet<DeviceId>>>>,
    behaviour: Behaviour,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Behaviour {
    #[default]
    Usual,
    /// It prefers the last ids.
    Prefers,
    /// Allocate fails.
    Refuses,
    /// Its list loses the device while Allocate is under way.
    Vanishes,
    /// It requests PreStartContainer, and fails it.
    PreStarts,
    /// It does not answer GetDevicePluginOptions.
    NoOptions,
}

type Lists = Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = Lists;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        if self.behaviour == Behaviour::NoOptions {
            return Err(Status::failed_precondition("not ready"));
        }
        let get_preferred_allocation_available = self.behaviour == Behaviour::Prefers;
        Ok(Response::new(api::DevicePluginOptions {
            pre_start_required: self.behaviour == Behaviour::PreStarts,
            get_preferred_allocation_available,
        }))
    }

    async fn list_and_watch(&self, _: Request<api::Empty>) -> Result<Response<Lists>, Status> {
        let lists = WatchStream::new(self.lists.subscribe());
        let responses = lists
            .map_while(|devices| devices.map(|devices| Ok(api::ListAndWatchResponse { devices })));
        Ok(Response::new(Box::pin(responses)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let request = request.into_inner().container_requests.remove(0);
        let mut ids = request.available_device_i_ds;
        ids.sort();
        let first = ids.len() - usize::try_from(request.allocation_size).unwrap();
        let response =
            api::ContainerPreferredAllocationResponse { device_i_ds: ids.split_off(first) };
        Ok(Response::new(api::PreferredAllocationResponse { container_responses: vec![response] }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        if self.behaviour == Behaviour::Refuses {
            return Err(Status::resource_exhausted("device is busy"));
        }
        let requested = request.into_inner().container_requests.remove(0).devices_ids;
        if self.behaviour == Behaviour::Vanishes {
            let mut acted_on = self.lists.subscribe();
            self.lists.send_replace(Some(healthy(&["other"])));
            acted_on.borrow_and_update();
            // The test sends the next value once the kubelet has the shorter list.
            acted_on.changed().await.unwrap();
        }
        self.allocated.lock().unwrap().push(requested.iter().map(DeviceId::new).collect());
        let response = api::ContainerAllocateResponse {
            envs: [("VISIBLE".to_owned(), requested.join(","))].into(),
            mounts: Vec::new(),
            devices: requested
                .iter()
                .map(|id| api::DeviceSpec {
                    container_path: format!("/dev/{id}"),
                    host_path: format!("/dev/{id}"),
                    permissions: "rw".to_owned(),
                })
                .collect(),
            annotations: [("example.com/alloc-id".to_owned(), requested.join("+"))].into(),
            cdi_devices: Vec::new(),
        };
        Ok(Response::new(api::AllocateResponse { container_responses: vec![response] }))
    }

    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Err(Status::unimplemented("not offered"))
    }
}

impl TestPlugin {
    fn serve(node: &Node, endpoint: &str, devices: Vec<api::Device>, behaviour: Behaviour) -> Self {
        let (lists, _) = watch::channel(Some(devices));
        let allocated = Arc::default();
        let service =
            Service { lists: lists.clone(), allocated: Arc::clone(&allocated), behaviour };
        let path = node.plugins_dir().join(endpoint);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let incoming = UnixListenerStream::new(UnixListener::bind(path).unwrap());
        let server = tokio::spawn(async move {
            Server::builder()
                .serve_with_incoming(DevicePluginServer::new(service), incoming)
                .await
                .unwrap();
        });
        TestPlugin { endpoint: endpoint.to_owned(), lists, allocated, server }
    }

    async fn registered(
        node: &Node,
        endpoint: &str,
        devices: Vec<api::Device>,
        behaviour: Behaviour,
    ) -> Self {
        let plugin = Self::serve(node, endpoint, devices, behaviour);
        plugin.register(node).await;
        plugin
    }

    /// Registers and waits until the list has arrived.
    async fn register(&self, node: &Node) {
        let lists = |view: &View<'_>| {
            view.events()
                .iter()
                .filter(|event| matches!(event.kind, EventKind::Listed { .. }))
                .count()
        };
        let before = node.kubelet.view(lists);
        node.register(&gpu(), &self.endpoint).await.unwrap();
        node.kubelet.wait_for(|view| lists(view) > before, SOON).await.unwrap();
    }

    fn list(&self, devices: Vec<api::Device>) {
        self.lists.send_replace(Some(devices));
    }

    fn end_streams(&self) {
        self.lists.send_replace(None);
    }
}

/// A node in a temporary directory, with its kubelet.
struct Node {
    dir: TempDir,
    kubelet: Kubelet,
}

impl Node {
    async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    async fn start_with(adapt: impl FnOnce(&mut KubeletConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = KubeletConfig::new(dir.path().join("kubelet"), dir.path().join("host"));
        config.first_batch_after = Duration::from_millis(1);
        adapt(&mut config);
        let kubelet = Kubelet::start(config).await.unwrap();
        Node { dir, kubelet }
    }

    fn plugins_dir(&self) -> PathBuf {
        self.dir.path().join("kubelet/device-plugins")
    }

    async fn register_request(&self, request: api::RegisterRequest) -> Result<(), Status> {
        let channel = uds::connect(self.plugins_dir().join("kubelet.sock")).await.unwrap();
        RegistrationClient::new(channel).register(request).await.map(drop)
    }

    async fn register(&self, resource: &ResourceName, endpoint: &str) -> Result<(), Status> {
        self.register_request(request("v1beta1", endpoint, resource.as_str())).await
    }

    async fn pod_resources(&self) -> PodResourcesListerClient<tonic::transport::Channel> {
        let socket = self.dir.path().join("kubelet/pod-resources/kubelet.sock");
        PodResourcesListerClient::new(uds::connect(socket).await.unwrap())
    }

    fn allocatable(&self) -> (usize, usize) {
        let Capacity { capacity, allocatable } = self.kubelet.capacity(&gpu());
        (capacity, allocatable)
    }

    async fn wait_for_capacity(&self, capacity: usize, allocatable: usize) {
        self.kubelet
            .wait_for(|view| view.capacity(&gpu()) == Capacity { capacity, allocatable }, SOON)
            .await
            .unwrap();
    }

    async fn wait_for_event(&self, fits: impl Fn(&EventKind) -> bool) {
        self.kubelet.wait_for(|view| view.last(&fits).is_some(), SOON).await.unwrap();
    }

    async fn settled(&self) {
        self.kubelet.wait_for(|view| view.is_settled(), SOON).await.unwrap();
    }

    fn checkpoint(&self) -> serde_json::Value {
        serde_json::from_slice(
            &std::fs::read(self.plugins_dir().join(sockets::checkpoint::FILE_NAME)).unwrap(),
        )
        .unwrap()
    }
}

fn request(version: &str, endpoint: &str, resource: &str) -> api::RegisterRequest {
    api::RegisterRequest {
        version: version.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    }
}

fn failure(phase: &PodPhase) -> &str {
    match phase {
        PodPhase::Failed { reason, message } => {
            assert_eq!(reason, "UnexpectedAdmissionError");
            message
        }
        other => panic!("the pod should have failed: {other:?}"),
    }
}

#[tokio::test]
async fn a_wrong_version_or_name_is_refused_in_the_kubelets_words() {
    let node = Node::start().await;
    let refused =
        node.register_request(request("v1alpha1", "x.sock", "example.com/gpu")).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unknown);
    let text = "requested API version \"v1alpha1\" is not supported by kubelet. Supported version is [\"v1beta1\"]";
    assert_eq!(refused.message(), text);
    let refused = node.register_request(request("v1beta1", "x.sock", "gpu")).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::Unknown, "the ResourceName \"gpu\" is invalid")
    );
}

#[tokio::test]
async fn a_missing_socket_fails_the_register_after_the_time_to_dial() {
    let node = Node::start_with(|config| config.dial_within = Duration::from_millis(20)).await;
    let failed = node.register(&gpu(), "missing.sock").await.unwrap_err();
    assert_eq!(
        (failed.code(), failed.message()),
        (Code::Unknown, "failed to dial device plugin: context deadline exceeded")
    );
}

#[tokio::test]
async fn failing_options_fail_the_register_and_the_kubelet_forgets_the_live_plugin() {
    let node = Node::start().await;
    let live = TestPlugin::registered(&node, "live.sock", healthy(&["a"]), Behaviour::Usual).await;
    let _broken = TestPlugin::serve(&node, "broken.sock", Vec::new(), Behaviour::NoOptions);
    let failed = node.register(&gpu(), "broken.sock").await.unwrap_err();
    assert_eq!(failed.code(), Code::Unknown);
    let text = "failed to get device plugin options: rpc error: code = FailedPrecondition desc = not ready";
    assert_eq!(failed.message(), text);

    live.end_streams();
    node.wait_for_event(|kind| matches!(kind, EventKind::StreamEnded { .. })).await;
    assert_eq!(node.allocatable(), (1, 1), "the end of an untracked stream goes unnoticed");
}

#[tokio::test]
async fn a_cancelled_register_forgets_the_client() {
    let node = Node::start().await;
    let mut late = Request::new(request("v1beta1", "missing.sock", "example.com/gpu"));
    late.set_timeout(Duration::from_millis(20));
    let channel = uds::connect(node.plugins_dir().join("kubelet.sock")).await.unwrap();
    RegistrationClient::new(channel).register(late).await.unwrap_err();
    let forgotten = |view: &View<'_>| {
        view.state.instance.as_ref().is_some_and(|instance| instance.clients.is_empty())
    };
    node.kubelet.wait_for(forgotten, SOON).await.unwrap();
}

#[tokio::test]
async fn a_pod_gets_devices_and_its_files_on_disk() {
    let node = Node::start().await;
    let plugin =
        TestPlugin::registered(&node, "sub/gpu.sock", healthy(&["a", "b", "c"]), Behaviour::Usual)
            .await;
    let spec = PodSpec::new("default", "train").app("main", &gpu(), 2);
    let uid = spec.uid.clone();
    assert_eq!(node.kubelet.add_pod(spec).await.phase, PodPhase::Running);

    let held = ids(&["a", "b"]);
    assert_eq!(plugin.allocated.lock().unwrap().as_slice(), std::slice::from_ref(&held));
    assert_eq!(node.kubelet.devices(&uid, "main"), BTreeMap::from([(gpu(), held)]));
    let pod = node.kubelet.pods().remove(0);
    assert_eq!(pod.containers["main"].edits.envs["VISIBLE"], "a,b");
    assert_eq!(pod.containers["main"].edits.devices.len(), 2);
    assert!(pod.is_alive());

    let logs = node.dir.path().join(format!("host/var/log/pods/default_train_{uid}"));
    let cgroup = node.dir.path().join(format!("host/sys/fs/cgroup/kubepods/pod{uid}"));
    assert!(logs.join("main").is_dir());
    assert_eq!(
        std::fs::read_to_string(cgroup.join("cgroup.events")).unwrap(),
        "populated 1\nfrozen 0\n"
    );
    assert!(cgroup.join("cgroup.procs").exists());

    assert!(node.kubelet.delete_pod(&uid).unwrap());
    assert!(!node.kubelet.delete_pod(&uid).unwrap());
    assert!(!logs.exists() && !cgroup.exists());
}

#[tokio::test]
async fn a_failing_pre_start_keeps_the_container_waiting() {
    let node = Node::start().await;
    let plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a"]), Behaviour::PreStarts).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Pending);
    let text = "CreateContainerConfigError: device plugin PreStartContainer rpc failed with err: \
                rpc error: code = Unimplemented desc = not offered";
    assert_eq!(node.kubelet.pods().remove(0).containers["main"].waiting.as_deref(), Some(text));
    assert_eq!(plugin.allocated.lock().unwrap().len(), 1, "its device is allocated all the same");
}

#[tokio::test]
async fn the_checkpoint_holds_the_plugins_answer() {
    use base64::Engine as _;
    use prost::Message as _;

    let node = Node::start().await;
    let _plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a", "b"]), Behaviour::Usual).await;
    let checkpoint = node.checkpoint();
    assert_eq!(checkpoint["Data"]["PodDeviceEntries"], serde_json::Value::Null);
    assert_eq!(
        checkpoint["Data"]["RegisteredDevices"]["example.com/gpu"],
        serde_json::json!(["a", "b"])
    );

    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    let entry = node.checkpoint()["Data"]["PodDeviceEntries"][0].clone();
    assert_eq!(entry["PodUID"], serde_json::json!(outcome.uid));
    assert_eq!(entry["ContainerName"], "main");
    assert_eq!(entry["ResourceName"], "example.com/gpu");
    assert_eq!(entry["DeviceIDs"], serde_json::json!({"-1": ["a"]}));
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(entry["AllocResp"].as_str().unwrap())
        .unwrap();
    let response = api::ContainerAllocateResponse::decode(&*bytes).unwrap();
    assert_eq!(response.annotations["example.com/alloc-id"], "a");
    assert!(node.checkpoint()["Checksum"].is_u64());
}

#[tokio::test]
async fn a_preferred_allocation_is_requested_and_followed() {
    let node = Node::start().await;
    let _plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a", "b", "c"]), Behaviour::Prefers)
            .await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 2)).await;
    assert_eq!(node.kubelet.devices(&outcome.uid, "main")[&gpu()], ids(&["b", "c"]));
}

#[tokio::test]
async fn containers_reuse_the_devices_of_init_containers_but_not_of_sidecars() {
    let node = Node::start().await;
    let plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a", "b"]), Behaviour::Usual).await;
    let spec = PodSpec::new("default", "train")
        .init("warm", &gpu(), 1)
        .init("check", &gpu(), 1)
        .app("main", &gpu(), 1);
    let outcome = node.kubelet.add_pod(spec).await;
    assert_eq!(outcome.phase, PodPhase::Running);
    assert_eq!(*plugin.allocated.lock().unwrap(), [ids(&["a"]), ids(&["a"]), ids(&["a"])]);
    node.kubelet.delete_pod(&outcome.uid).unwrap();

    let outcome = node
        .kubelet
        .add_pod(PodSpec::new("default", "serve").sidecar("proxy", &gpu(), 1).app(
            "main",
            &gpu(),
            1,
        ))
        .await;
    assert_eq!(outcome.phase, PodPhase::Running);
    assert_ne!(
        node.kubelet.devices(&outcome.uid, "proxy"),
        node.kubelet.devices(&outcome.uid, "main")
    );
}

#[tokio::test]
async fn a_pod_that_requests_too_much_or_is_refused_by_the_plugin_fails() {
    let node = Node::start().await;
    let _plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a"]), Behaviour::Refuses).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "large").app("main", &gpu(), 2)).await;
    let text = "Pod was rejected: Allocate failed due to requested number of devices unavailable for example.com/gpu. \
                Requested: 2, Available: 1, which is unexpected";
    assert_eq!(failure(&outcome.phase), text);
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "small").app("main", &gpu(), 1)).await;
    let text = "Pod was rejected: Allocate failed due to rpc error: code = ResourceExhausted desc = device is busy, \
                which is unexpected";
    assert_eq!(failure(&outcome.phase), text);
    assert_eq!(node.kubelet.view(|view| view.rejections()), 2);
}

#[tokio::test]
async fn the_end_of_the_stream_keeps_capacity_and_sets_allocatable_to_zero() {
    let node = Node::start().await;
    let plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a", "b"]), Behaviour::Usual).await;
    plugin.list(vec![device("a", "Healthy"), device("b", "healthy")]);
    node.wait_for_capacity(2, 1).await;
    plugin.end_streams();
    node.wait_for_capacity(2, 0).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    assert!(
        failure(&outcome.phase).contains(
            "no healthy devices present; cannot allocate unhealthy devices example.com/gpu"
        )
    );
}

#[test]
fn a_resource_without_plugin_is_deleted_after_five_minutes() {
    let mut manager = DeviceManager::<()>::start(
        PodDevices::default(),
        BTreeSet::from([gpu()]),
        BTreeSet::new(),
        Duration::ZERO,
    );
    manager.connected(&gpu(), (), Options { preferred_allocation: false, pre_start: false });
    manager.listed(
        &gpu(),
        vec![ListedDevice { id: DeviceId::new("a"), healthy: true, numa_nodes: Vec::new() }],
    );
    manager.disconnected(&gpu(), Duration::from_secs(10));
    assert_eq!(
        manager.capacity(&gpu(), Duration::from_secs(10)),
        Capacity { capacity: 1, allocatable: 0 }
    );
    assert!(!manager.expire(Duration::from_secs(10) + ENDPOINT_GRACE));
    assert!(manager.expire(Duration::from_secs(11) + ENDPOINT_GRACE));
    assert!(!manager.is_plugin_resource(&gpu()));
}

#[tokio::test]
async fn the_late_end_of_the_old_stream_cuts_the_new_client() {
    let node = Node::start().await;
    let old = TestPlugin::registered(&node, "old.sock", healthy(&["a"]), Behaviour::Usual).await;
    let new = TestPlugin::registered(&node, "new.sock", healthy(&["a"]), Behaviour::Usual).await;
    assert_eq!(node.allocatable(), (1, 1), "registering again is no dip");

    old.end_streams();
    node.wait_for_event(|kind| matches!(kind, EventKind::Disconnected { client: 2, .. })).await;
    node.wait_for_event(|kind| matches!(kind, EventKind::StreamEnded { client: 2, .. })).await;
    assert_eq!(node.allocatable(), (1, 0));
    new.lists.closed().await;

    new.register(&node).await;
    assert_eq!(node.allocatable(), (1, 1));
}

#[tokio::test]
async fn a_pod_with_an_init_container_survives_a_restart_only_with_its_plugin_in_time() {
    for in_time in [true, false] {
        let gap = if in_time { Duration::from_millis(400) } else { Duration::from_millis(1) };
        let node = Node::start_with(|config| config.first_batch_after = gap).await;
        let plugin =
            TestPlugin::registered(&node, "sub/gpu.sock", healthy(&["a", "b"]), Behaviour::Usual)
                .await;
        let plain =
            node.kubelet.add_pod(PodSpec::new("default", "plain").app("main", &gpu(), 1)).await;
        let warmed = node
            .kubelet
            .add_pod(PodSpec::new("default", "warmed").init("warm", &gpu(), 1).app(
                "main",
                &gpu(),
                1,
            ))
            .await;
        assert_eq!(warmed.phase, PodPhase::Running);
        let edits = node.kubelet.pods().remove(1).containers["main"].edits.clone();

        node.kubelet.restart().await.unwrap();
        assert_eq!(node.allocatable(), (0, 0), "no device until the first list");
        assert_eq!(
            node.kubelet.devices(&warmed.uid, "main")[&gpu()],
            ids(&["b"]),
            "from the checkpoint"
        );
        if in_time {
            plugin.register(&node).await;
            assert!(node.kubelet.view(|view| view.first_list(&gpu())).unwrap() < gap);
        }
        node.settled().await;
        let phase = |uid: &str| {
            node.kubelet.view(|view| view.pod(uid).map(|pod| pod.phase.clone())).unwrap()
        };
        assert_eq!(
            phase(&plain.uid),
            PodPhase::Running,
            "a container that runs is not asked about"
        );
        let cgroup = node.dir.path().join(format!("host/sys/fs/cgroup/kubepods/pod{}", warmed.uid));
        if in_time {
            assert_eq!(phase(&warmed.uid), PodPhase::Running);
            assert_eq!(node.kubelet.pods().remove(1).containers["main"].edits, edits);
            assert_eq!(plugin.allocated.lock().unwrap().len(), 3, "nothing is allocated again");
        } else {
            assert!(failure(&phase(&warmed.uid)).contains("no healthy devices present"));
            assert!(!cgroup.exists(), "killed");
            assert_eq!(node.kubelet.view(|view| view.rejections()), 1);
        }
        assert_eq!(node.kubelet.panicked(), None);
    }
}

#[tokio::test]
async fn a_crash_looping_container_counts_as_not_running_over_a_restart() {
    let node = Node::start().await;
    let _plugin =
        TestPlugin::registered(&node, "sub/gpu.sock", healthy(&["a"]), Behaviour::Usual).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "crashes").app("main", &gpu(), 1)).await;
    node.kubelet.crash_container(&outcome.uid, "main");
    node.kubelet.restart().await.unwrap();
    node.settled().await;
    assert_eq!(node.kubelet.view(|view| view.rejections()), 1);
}

#[tokio::test]
async fn a_kill_cuts_all_connections_and_a_start_removes_only_top_level_sockets() {
    let node = Node::start().await;
    let plugin =
        TestPlugin::registered(&node, "sub/gpu.sock", healthy(&["a"]), Behaviour::Usual).await;
    let _flat = TestPlugin::serve(&node, "flat.sock", Vec::new(), Behaviour::Usual);
    std::fs::write(node.plugins_dir().join("file"), "").unwrap();
    node.kubelet.stop();
    assert!(node.plugins_dir().join("kubelet.sock").exists(), "a kill unlinks nothing");
    plugin.lists.closed().await;
    let refused = tokio::net::UnixStream::connect(node.plugins_dir().join("kubelet.sock"));
    node.kubelet.wait_for(|view| !view.is_running(), SOON).await.unwrap();
    assert_eq!(refused.await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);

    node.kubelet.start_again().await.unwrap();
    assert!(!node.plugins_dir().join("flat.sock").exists());
    assert!(node.plugins_dir().join("sub/gpu.sock").exists());
    assert!(node.plugins_dir().join("file").exists());
    assert_eq!(node.kubelet.start_again().await.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
}

#[tokio::test]
async fn a_pod_that_is_added_while_the_kubelet_is_down_is_admitted_by_the_next_one() {
    let node =
        Node::start_with(|config| config.first_batch_after = Duration::from_millis(400)).await;
    let plugin = TestPlugin::serve(&node, "sub/gpu.sock", healthy(&["a"]), Behaviour::Usual);
    node.kubelet.stop();
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "early").app("main", &gpu(), 1)).await;
    assert_eq!(outcome.phase, PodPhase::Pending);
    node.kubelet.start_again().await.unwrap();
    plugin.register(&node).await;
    node.settled().await;
    assert_eq!(node.kubelet.pods().remove(0).phase, PodPhase::Running);
    assert_eq!(plugin.allocated.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn pod_resources_lists_the_holders_and_frees_the_devices_of_ended_pods() {
    let node = Node::start().await;
    let mut spread = device("a", "Healthy");
    spread.topology =
        Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 0 }, api::NumaNode { id: 1 }] });
    let _plugin = TestPlugin::registered(
        &node,
        "gpu.sock",
        vec![spread, device("b", "Healthy")],
        Behaviour::Usual,
    )
    .await;
    let spec = PodSpec::new("default", "train").init("warm", &gpu(), 1).app("main", &gpu(), 2);
    let outcome = node.kubelet.add_pod(spec).await;

    let mut client = node.pod_resources().await;
    let pods = client
        .list(resources::ListPodResourcesRequest {})
        .await
        .unwrap()
        .into_inner()
        .pod_resources;
    assert_eq!(pods.len(), 1);
    assert_eq!(pods[0].containers.len(), 1, "no init containers");
    let devices: Vec<_> =
        pods[0].containers[0].devices.iter().map(|devices| devices.device_ids.join(",")).collect();
    assert_eq!(devices, ["a", "a", "b"], "one id a message, one message a NUMA node");
    assert_eq!(pods[0].containers[0].devices[2].topology, None);
    let allocatable = client
        .get_allocatable_resources(resources::AllocatableResourcesRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(allocatable.devices.len(), 3);

    let get = |name: &str| resources::GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    assert!(client.get(get("train")).await.unwrap().into_inner().pod_resources.is_some());
    node.kubelet.delete_pod(&outcome.uid).unwrap();
    let missing = client.get(get("train")).await.unwrap_err();
    assert_eq!(
        (missing.code(), missing.message()),
        (Code::Unknown, "pod train in namespace default not found")
    );
    assert!(!node.kubelet.devices(&outcome.uid, "main").is_empty(), "Get frees nothing");
    assert!(
        client
            .list(resources::ListPodResourcesRequest {})
            .await
            .unwrap()
            .into_inner()
            .pod_resources
            .is_empty()
    );
    assert!(
        node.kubelet.devices(&outcome.uid, "main").is_empty(),
        "List frees what dead pods held"
    );
}

#[tokio::test]
async fn a_device_that_leaves_the_list_while_it_is_allocated_would_crash_the_kubelet() {
    let node = Node::start().await;
    let plugin =
        TestPlugin::registered(&node, "gpu.sock", healthy(&["a"]), Behaviour::Vanishes).await;
    let admission = node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1));
    let push = async {
        let lists = |view: &View<'_>| {
            view.events()
                .iter()
                .filter(|event| matches!(event.kind, EventKind::Listed { .. }))
                .count()
        };
        node.kubelet.wait_for(|view| lists(view) == 2, SOON).await.unwrap();
        plugin.list(healthy(&["other"]));
    };
    let (outcome, ()) = tokio::join!(admission, push);
    assert_eq!(outcome.phase, PodPhase::Pending);
    let text =
        "after the Allocate call: device `a` of `example.com/gpu` is not in the plugin's list";
    assert_eq!(node.kubelet.panicked().as_deref(), Some(text));
    assert!(!node.kubelet.view(|view| view.is_running()));
}

#[test]
fn with_a_topology_policy_the_plugin_chooses_among_aligned_devices() {
    let listed = |id: &str, node| ListedDevice {
        id: DeviceId::new(id),
        healthy: true,
        numa_nodes: vec![node],
    };
    let choose = |required| {
        let start = DeviceManager::<()>::start(
            PodDevices::default(),
            BTreeSet::new(),
            BTreeSet::new(),
            Duration::ZERO,
        );
        let mut manager = start.aligns(true);
        manager.listed(
            &gpu(),
            vec![listed("a", 0), listed("b", 0), listed("c", 1), listed("d", 1), listed("e", 1)],
        );
        match manager.allocate("uid", "main", &gpu(), required).unwrap() {
            Step::Choose(choice) => (
                choice.candidates(),
                manager.choose(choice, &ids(&["e", "a"]), &mut |_| 0).unwrap(),
            ),
            Step::Allocate(taken) => (BTreeSet::new(), taken),
            Step::Nothing => panic!("devices are needed"),
        }
    };
    assert_eq!(choose(1), (ids(&["a", "b"]), ids(&["a"])));
    assert_eq!(
        choose(2),
        (BTreeSet::new(), ids(&["a", "b"])),
        "all aligned devices are needed: there is no call"
    );
    assert_eq!(choose(3), (BTreeSet::new(), ids(&["c", "d", "e"])));
    assert_eq!(choose(4), (ids(&["a", "b", "c", "d", "e"]), ids(&["a", "b", "c", "e"])));
}

#[test]
fn up_to_1_34_a_device_that_left_the_list_is_one_without_topology() {
    let mut manager = DeviceManager::<()>::start(
        PodDevices::default(),
        BTreeSet::new(),
        BTreeSet::new(),
        Duration::ZERO,
    )
    .panics(false);
    manager.listed(
        &gpu(),
        vec![ListedDevice { id: DeviceId::new("other"), healthy: true, numa_nodes: vec![0] }],
    );
    manager.granted("uid", "main", &gpu(), &ids(&["a"]), Default::default()).unwrap();
    assert_eq!(manager.topology_hints("uid", "main", &gpu(), 1), Ok(()));
    assert_eq!(
        manager.held().get("uid", "main", &gpu()).unwrap().by_numa.keys().collect::<Vec<_>>(),
        [&-1]
    );
    let listed = manager.listed(&gpu(), Vec::new());
    assert_eq!(listed.vanished, BTreeSet::new(), "the reservation was never made");
}

#[tokio::test]
async fn with_a_topology_policy_a_held_device_that_left_the_list_crashes_the_next_kubelet() {
    let node = Node::start_with(|config| {
        config.topology_manager = true;
        config.first_batch_after = Duration::from_millis(400);
    })
    .await;
    let mut near = device("b", "Healthy");
    near.topology = Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 0 }] });
    let held = api::Device { id: "a".to_owned(), ..near.clone() };
    let plugin =
        TestPlugin::registered(&node, "sub/gpu.sock", vec![held, near.clone()], Behaviour::Usual)
            .await;
    node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    plugin.list(vec![near]);
    node.wait_for_capacity(1, 1).await;
    node.kubelet.restart().await.unwrap();
    plugin.register(&node).await;
    node.wait_for_event(|kind| matches!(kind, EventKind::Panicked { .. })).await;
    assert!(!node.kubelet.view(|view| view.is_running()));
}

#[tokio::test]
async fn a_corrupt_checkpoint_frees_all_devices() {
    let node = Node::start().await;
    let _plugin =
        TestPlugin::registered(&node, "sub/gpu.sock", healthy(&["a"]), Behaviour::Usual).await;
    let outcome =
        node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 1)).await;
    node.kubelet.stop();
    std::fs::write(node.plugins_dir().join(sockets::checkpoint::FILE_NAME), "{").unwrap();
    node.kubelet.start_again().await.unwrap();
    node.wait_for_event(|kind| matches!(kind, EventKind::CheckpointUnreadable { .. })).await;
    assert!(node.kubelet.devices(&outcome.uid, "main").is_empty());
}

#[tokio::test]
async fn the_pod_resources_client_merges_messages_and_survives_a_restart() {
    let node = Node::start().await;
    let client = PodResources::new(node.dir.path().join("kubelet/pod-resources/kubelet.sock"));
    assert_eq!(client.list().await.unwrap(), []);
    let mut spread = device("a", "Healthy");
    spread.topology =
        Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 0 }, api::NumaNode { id: 1 }] });
    let _plugin = TestPlugin::registered(
        &node,
        "sub/gpu.sock",
        vec![spread, device("b", "Healthy")],
        Behaviour::Usual,
    )
    .await;
    node.kubelet.add_pod(PodSpec::new("default", "train").app("main", &gpu(), 2)).await;

    let listed = client.list().await.unwrap();
    assert_eq!(listed[0].containers[0].devices, BTreeMap::from([(gpu(), ids(&["a", "b"]))]));
    assert_eq!(client.get("default", "train").await.unwrap().as_ref(), listed.first());
    assert_eq!(client.get("default", "other").await.unwrap(), None);

    node.kubelet.stop();
    assert!(matches!(client.list().await, Err(PodResourcesError::Refused { .. })));
    node.kubelet.start_again().await.unwrap();
    node.settled().await;
    assert_eq!(client.list().await.unwrap(), listed);
}

#[test]
fn a_purge_during_an_allocate_lets_the_device_be_given_out_twice() {
    let mut manager = DeviceManager::<()>::start(
        PodDevices::default(),
        BTreeSet::new(),
        BTreeSet::new(),
        Duration::ZERO,
    );
    manager.connected(&gpu(), (), Options { preferred_allocation: false, pre_start: false });
    let listed =
        |id: &str| ListedDevice { id: DeviceId::new(id), healthy: true, numa_nodes: Vec::new() };
    manager.listed(&gpu(), vec![listed("a"), listed("b")]);
    manager.set_sources_ready();
    let reserve = |manager: &mut DeviceManager<()>, uid: &str| match manager
        .allocate(uid, "main", &gpu(), 1)
        .unwrap()
    {
        Step::Choose(choice) => manager.choose(choice, &BTreeSet::new(), &mut |_| 0).unwrap(),
        other => panic!("a free device is to be chosen: {other:?}"),
    };
    let dead = reserve(&mut manager, "dead");
    manager.granted("dead", "main", &gpu(), &dead, Default::default()).unwrap();
    let first = reserve(&mut manager, "first");
    assert_eq!((dead, &first), (ids(&["a"]), &ids(&["b"])));

    manager.purge(&BTreeSet::from(["first".to_owned()]));
    manager.granted("first", "main", &gpu(), &first, Default::default()).unwrap();
    assert_eq!(reserve(&mut manager, "second"), ids(&["a"]));
    assert_eq!(reserve(&mut manager, "third"), first, "held, and given out again");
}

#[tokio::test]
async fn a_force_deleted_pod_frees_its_device_while_its_containers_run() {
    let node = Node::start().await;
    let plugin = TestPlugin::registered(&node, "gpu.sock", healthy(&["a"]), Behaviour::Usual).await;
    let old = node.kubelet.add_pod(PodSpec::new("default", "old").app("main", &gpu(), 1)).await;
    assert!(node.kubelet.force_delete_pod(&old.uid));
    assert!(!node.kubelet.force_delete_pod(&old.uid));
    let new = node.kubelet.add_pod(PodSpec::new("default", "new").app("main", &gpu(), 1)).await;
    assert_eq!(new.phase, PodPhase::Running);
    assert_eq!(*plugin.allocated.lock().unwrap(), [ids(&["a"]), ids(&["a"])]);

    let cgroup = node.dir.path().join(format!("host/sys/fs/cgroup/kubepods/pod{}", old.uid));
    assert!(cgroup.exists());
    assert!(node.kubelet.delete_pod(&old.uid).unwrap());
    assert!(!cgroup.exists());
}

#[tokio::test]
async fn its_futures_can_run_on_any_thread() {
    fn check(_: impl Send) {}
    let node = Node::start().await;
    check(node.kubelet.add_pod(PodSpec::new("default", "train")));
    check(node.kubelet.wait_for(|view| view.is_settled(), SOON));
    check(node.kubelet.restart());
    check(PodResources::new("/nowhere").list());
    check(PodResources::new("/nowhere").get("default", "train"));
}
