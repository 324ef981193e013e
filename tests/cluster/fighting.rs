//! Two device plugins for one resource name: which devices pods get meanwhile, what the daemon
//! reports, and what is left of it after the other one has ended.

use crate::api::PODS;
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::daemon_set::CONFIG;
use crate::daemon_set::rollouts::STAY;
use crate::daemon_set::workload::holder;
use crate::pki::kubeconfig;
use crate::racing::{DEVICES, NAME, Race, make_devices};
use crate::recording::tasks::Loop;
use crate::{SOON, say, wait_for};
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::kubelet::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use holdfast::kubelet::proto::v1beta1::registration_client::RegistrationClient;
use holdfast::kubelet::uds;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::pin::Pin;
use std::time::{Duration, Instant};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// How long both plugins run.
const FIGHT: Duration = Duration::from_secs(60);
/// How often the other one registers.
const AGAIN: Duration = Duration::from_secs(5);

/// A plugin as others are: it has the same ids, records nothing, and registers again and again, as
/// after each end of its process. Dropping it ends it.
struct Rival(#[expect(dead_code, reason = "its end is the end of the plugin")] Loop);

impl Rival {
    fn start() -> Self {
        let (folder, tasks) = (Path::new("/var/lib/kubelet/device-plugins"), Loop::start());
        let socket = folder.join("rival.sock");
        drop(fs::remove_file(&socket));
        let listener = tasks.run(async { UnixListener::bind(&socket) }).unwrap();
        tasks.spawn(async move {
            let plugin = DevicePluginServer::new(Answers);
            let incoming = UnixListenerStream::new(listener);
            Server::builder().serve_with_incoming(plugin, incoming).await.unwrap();
        });
        tasks.spawn(async move {
            loop {
                let channel = uds::connect(folder.join("kubelet.sock")).await.unwrap();
                let request = api::RegisterRequest {
                    version: "v1beta1".to_owned(),
                    endpoint: "rival.sock".to_owned(),
                    resource_name: NAME.to_owned(),
                    options: None,
                };
                RegistrationClient::new(channel).register(request).await.unwrap();
                tokio::time::sleep(AGAIN).await;
            }
        });
        Rival(tasks)
    }
}

struct Answers;

#[tonic::async_trait]
impl DevicePlugin for Answers {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |n: usize| api::Device {
            id: format!("dev:raced{n}"),
            health: "Healthy".to_owned(),
            topology: None,
        };
        let list = api::ListAndWatchResponse { devices: (0..DEVICES).map(device).collect() };
        // The stream has one list and no end.
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(list)).chain(tokio_stream::pending()))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("no preference"))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let node = |id: &String| {
            let name = id.strip_prefix("dev:").unwrap();
            api::DeviceSpec {
                container_path: format!("/dev/raced/{name}"),
                host_path: format!("/dev/{name}"),
                permissions: "rw".to_owned(),
            }
        };
        let answer = |container: &api::ContainerAllocateRequest| api::ContainerAllocateResponse {
            devices: container.devices_ids.iter().map(node).collect(),
            ..Default::default()
        };
        let container_responses = request.get_ref().container_requests.iter().map(answer).collect();
        Ok(Response::new(api::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Ok(Response::new(Default::default()))
    }
}

/// What `status` has about the resource that an administrator would read: its problem, and the
/// difference between the kubelet and the daemon.
fn complaints(daemon: &Daemon) -> BTreeSet<String> {
    let status = daemon.status();
    let resources = status["resources"].as_array().unwrap();
    let resource = resources.iter().find(|each| each["name"] == NAME).unwrap();
    let texts = resource.as_object().unwrap().values().filter_map(Value::as_str);
    texts.filter(|text| text.contains("another plugin")).map(ToOwned::to_owned).collect()
}

/// Registrations of the resource in the kubelet's log.
fn registrations(cluster: &Cluster) -> usize {
    let log = cluster.node.kubelet_log();
    let lines = log.lines().filter(|line| line.contains("Got registration request"));
    lines.filter(|line| line.contains(NAME)).count()
}

pub(crate) fn two_plugins(cluster: &mut Cluster) {
    make_devices();
    let credentials = kubeconfig(&cluster.dir, "kubelet");
    let daemon = Daemon::launch(cluster, Path::new("/"), &credentials, CONFIG);
    daemon.wait_until_registered(cluster);
    cluster.until_allocatable(NAME, DEVICES);
    (0..STAY).for_each(|n| _ = cluster.api.create(PODS, &holder(&format!("contested-{n}"))));
    let stays = cluster.holdings_by(STAY, |_| daemon.who());
    let before = registrations(cluster);

    let began = Instant::now();
    let rival = Rival::start();
    let mut race = Race::of_numbers(cluster, "fights");
    let (mut reported, mut is_shown) = (BTreeMap::new(), false);
    let problem = format!("{NAME}: another plugin has answered for");
    wait_for("both have run for a while", 2 * FIGHT, || {
        race.step(cluster);
        assert_eq!(race.violations(), Vec::<String>::new());
        for text in complaints(&daemon) {
            // The UIDs of pods differ.
            let kind = text.split('`').next().unwrap().to_owned();
            reported.entry(kind).or_insert_with(|| began.elapsed());
            // A problem ends with the last pod that the other plugin answered for.
            is_shown = is_shown
                || String::from_utf8_lossy(&daemon.verb(&["status"]).stdout).contains(&problem);
        }
        (began.elapsed() > FIGHT).then_some(())
    });
    let fought = registrations(cluster) - before;
    assert!(is_shown, "`status` has never shown the problem: {reported:?}");
    assert!(!reported.is_empty() && race.ends.by_number > 0, "{reported:?}, {:?}", race.ends);
    drop(rival);

    // The end of any stream of a resource ends the endpoint that registered last, and closes its
    // connection (`runClient` of the kubelet's `devicemanager/plugin/v1beta1`). That may be ours,
    // so the first pods may have to wait.
    let during = race.ends.by_number;
    wait_for("pods get devices, and `status` names no other plugin", SOON, || {
        race.step(cluster);
        assert_eq!(race.violations(), Vec::<String>::new());
        let has_ended = race.ends.by_number >= during + 3 * DEVICES;
        (has_ended && complaints(&daemon).is_empty()).then_some(())
    });
    race.end(cluster);
    assert_eq!(complaints(&daemon), BTreeSet::new(), "another plugin still answers");
    cluster.until_allocatable(NAME, DEVICES);
    assert_eq!(cluster.holdings_by(STAY, |_| daemon.who()), stays, "a pod was hurt");
    say(format_args!(
        "two plugins for one resource: {fought} registrations in {FIGHT:?}, `status` has {reported:.1?}; {during} pods \
         ended well meanwhile, and all others later; no device in two containers, {:?}",
        race.ends
    ));
}
