//! The simulated DRA manager with a driver in memory, over real sockets.

use super::registry::authority;
use super::*;
use crate::domain::{CheckpointClaim, DRA_DRIVER, PreparedDevice};
use crate::kubelet::dra::state::read_claims;
use crate::kubelet::dra::{
    Answers, Claims, Listeners, Server, Tracking, registration_socket, service_socket,
};
use crate::kubelet::proto::pluginregistration as api;
use crate::kubelet::proto::pluginregistration::registration_server::{
    Registration, RegistrationServer,
};
use crate::kubelet::services::Services;
use std::path::Path;
use std::slice::from_ref;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

const SOON: Duration = Duration::from_secs(20);

/// A driver in memory.
#[derive(Clone)]
struct Driver {
    root: PathBuf,
    /// In the CDI names of its answers.
    name: &'static str,
    /// The kubelet's record at each call.
    recorded: Arc<Mutex<Vec<Vec<CheckpointClaim>>>>,
    /// Each Prepare needs a permit.
    permits: Arc<Semaphore>,
    /// Gets a permit when a Prepare is cancelled.
    cancelled: Arc<Semaphore>,
    health: watch::Sender<Arc<[ClaimHealth]>>,
}

/// Reports its end, if it was not taken away before.
struct OnCancel(Option<Arc<Semaphore>>);

impl Drop for OnCancel {
    fn drop(&mut self) {
        self.0.iter().for_each(|cancelled| cancelled.add_permits(1));
    }
}

impl Driver {
    fn new(root: &Path) -> Self {
        let health = ClaimHealth {
            name: name(),
            is_healthy: Some(false),
            message: format!("x{}", "ü".repeat(600)),
        };
        Driver {
            root: root.to_owned(),
            name: "first",
            recorded: Arc::default(),
            permits: Arc::new(Semaphore::new(1000)),
            cancelled: Arc::new(Semaphore::new(0)),
            health: watch::Sender::new(Arc::new([health])),
        }
    }

    fn serve(&self) -> Server {
        Server::start(Listeners::open(&self.root).unwrap(), self, &Tracking::none())
    }

    fn record(&self) {
        self.recorded.lock().unwrap().push(read_claims(&self.root, DRA_DRIVER).unwrap());
    }

    /// The devices in the kubelet's record at each call.
    fn devices_at_calls(&self) -> Vec<usize> {
        let recorded = self.recorded.lock().unwrap();
        recorded.iter().map(|claims| claims[0].devices.len()).collect()
    }
}

impl Claims for Driver {
    async fn prepare(&self, claims: Vec<ClaimRef>) -> Answers<Vec<PreparedDevice>> {
        self.record();
        let mut on_cancel = OnCancel(Some(Arc::clone(&self.cancelled)));
        self.permits.acquire().await.unwrap().forget();
        on_cancel.0 = None;
        let prepare = |claim: ClaimRef| {
            let device = PreparedDevice {
                request: "gpu".into(),
                name: name(),
                cdi_devices: vec![format!("k8s.holdfast.dev/{}={}", self.name, claim.uid)],
                share_id: Some("share".into()),
            };
            let result = if claim.name == "bad" { Err("is held".into()) } else { Ok(vec![device]) };
            (claim, result)
        };
        claims.into_iter().map(prepare).collect()
    }

    async fn unprepare(&self, claims: Vec<ClaimRef>) -> Answers<()> {
        self.record();
        claims.into_iter().map(|claim| (claim, Ok(()))).collect()
    }

    fn health(&self) -> watch::Receiver<Arc<[ClaimHealth]>> {
        self.health.subscribe()
    }
}

fn name() -> DraName {
    DraName { pool: "n1/gpu".into(), device: "gpu-1".into() }
}

fn claim(uid: &str, name: &str, pods: &[&str]) -> Claim {
    Claim {
        claim: ClaimRef { uid: uid.into(), namespace: "team".into(), name: name.into() },
        pods: pods.iter().map(ToString::to_string).collect(),
        drivers: [DRA_DRIVER.to_owned()].into(),
    }
}

/// The real order with short waits.
fn config(root: &Path, release: Release) -> ClaimsConfig {
    let short = Duration::from_millis(5);
    let times = Times {
        turn: short,
        dial_again: short,
        again: short,
        again_max: short * 4,
        health_again: short,
        ..Times::default()
    };
    ClaimsConfig { kubelet_dir: root.to_owned(), release, appends: None, times }
}

fn start(root: &Path, release: Release) -> ClaimManager {
    ClaimManager::start(config(root, release)).unwrap()
}

/// Waits until the driver has this number of connected instances and no other.
async fn connected(kubelet: &ClaimManager, count: usize) -> Vec<InstanceView> {
    let seen = |kubelet: &ClaimManager| {
        let instances = kubelet.instances(DRA_DRIVER);
        let is_seen = instances.len() == count && instances.iter().all(|of| of.is_connected);
        is_seen.then_some(instances)
    };
    let instances = kubelet.wait_for(SOON, seen).await;
    instances.unwrap_or_else(|| panic!("{:?}", kubelet.failures()))
}

/// A registration server for another socket of a driver.
#[derive(Clone)]
struct OtherInfo(api::PluginInfo);

#[tonic::async_trait]
impl Registration for OtherInfo {
    async fn get_info(
        &self,
        _: Request<api::InfoRequest>,
    ) -> Result<Response<api::PluginInfo>, Status> {
        Ok(Response::new(self.0.clone()))
    }

    async fn notify_registration_status(
        &self,
        _: Request<api::RegistrationStatus>,
    ) -> Result<Response<api::RegistrationStatusResponse>, Status> {
        Ok(Response::new(api::RegistrationStatusResponse {}))
    }
}

/// Serves a registration at this name in `plugins_registry`.
fn register_at(root: &Path, name: &str, endpoint: &Path, versions: &[&str]) {
    let info = api::PluginInfo {
        r#type: "DRAPlugin".into(),
        name: DRA_DRIVER.into(),
        endpoint: endpoint.to_str().unwrap().into(),
        supported_versions: versions.iter().map(ToString::to_string).collect(),
    };
    let directory = root.join("plugins_registry");
    fs::create_dir_all(&directory).unwrap();
    let incoming = UnixListenerStream::new(UnixListener::bind(directory.join(name)).unwrap());
    let services = Services::default().and(RegistrationServer::new(OtherInfo(info)));
    tokio::spawn(tonic::transport::Server::builder().serve_with_incoming(services, incoming));
}

#[tokio::test]
async fn a_driver_is_registered_and_a_claim_prepared_and_unprepared_with_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let driver = Driver::new(dir.path());
    let kubelet = start(dir.path(), Release::V1_36);
    let gpu = claim("u-1", "gpu", &["p-1", "p-2"]);
    let error = kubelet.prepare("p-1", from_ref(&gpu)).await.unwrap_err();
    assert_eq!(error, "DRA driver holdfast.dev is not registered");
    assert!(read_claims(dir.path(), DRA_DRIVER).is_err_and(|error| error.is_absent()));

    let server = driver.serve();
    let instances = connected(&kubelet, 1).await;
    assert_eq!(instances[0].endpoint, service_socket(dir.path()).unwrap().to_str().unwrap());
    assert_eq!(instances[0].version, Version::V1);
    let mut notices = server.notices();
    let notice = notices.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert_eq!((notice.number, notice.result), (1, Ok(())));

    kubelet.prepare("p-1", from_ref(&gpu)).await.unwrap();
    assert_eq!(driver.devices_at_calls(), [0], "recorded before Prepare");
    kubelet.prepare("p-2", from_ref(&gpu)).await.unwrap();
    assert_eq!(driver.devices_at_calls(), [0], "it is prepared already");
    let recorded = read_claims(dir.path(), DRA_DRIVER).unwrap();
    let device = CheckpointClaimDevice {
        name: name(),
        share_id: Some("share".into()),
        requests: vec!["gpu".into()],
        cdi_devices: vec!["k8s.holdfast.dev/first=u-1".into()],
    };
    assert_eq!(
        recorded,
        [CheckpointClaim {
            claim: gpu.claim.clone(),
            pods: gpu.pods.clone(),
            devices: vec![device]
        }]
    );

    kubelet.unprepare("p-1").await.unwrap();
    assert_eq!(driver.devices_at_calls(), [0], "the other pod uses it");
    kubelet.unprepare("p-2").await.unwrap();
    assert_eq!(driver.devices_at_calls(), [0, 1], "recorded until Unprepare has succeeded");
    assert_eq!(read_claims(dir.path(), DRA_DRIVER).unwrap(), []);
}

#[tokio::test]
async fn an_error_of_the_driver_has_the_kubelets_text_and_the_claim_stays_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let driver = Driver::new(dir.path());
    let _server = driver.serve();
    let kubelet = start(dir.path(), Release::V1_36);
    connected(&kubelet, 1).await;
    let error = kubelet.prepare("p-1", &[claim("u-1", "bad", &["p-1"])]).await.unwrap_err();
    assert_eq!(error, "NodePrepareResources failed for ResourceClaim bad: is held");
    let recorded = read_claims(dir.path(), DRA_DRIVER).unwrap();
    assert_eq!((recorded.len(), recorded[0].devices.len()), (1, 0));
    let error = kubelet.prepare("p-2", &[claim("u-2", "bad", &["p-2"])]).await.unwrap_err();
    assert!(
        error.starts_with("old ResourceClaim with same name bad and different UID u-1"),
        "{error}"
    );
    let error = kubelet.prepare("p-3", &[claim("u-3", "gpu", &["p-1"])]).await.unwrap_err();
    assert_eq!(error, "pod p-3 is not allowed to use ResourceClaim gpu (u-3)");
}

#[tokio::test]
async fn a_socket_without_an_at_is_refused_and_one_with_a_leading_dot_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let endpoint = service_socket(dir.path()).unwrap();
    for name in ["plain-reg.sock", ".hidden@reg.sock"] {
        register_at(dir.path(), name, &endpoint, &["v1.DRAPlugin"]);
    }
    let kubelet = start(dir.path(), Release::V1_36);
    let failures = |kubelet: &ClaimManager| Some(kubelet.failures()).filter(|all| all.len() > 1);
    let failures = kubelet.wait_for(SOON, failures).await.unwrap();
    assert!(
        failures.iter().all(|failure| failure.contains("plain-reg.sock, err: rpc error")
            && failure.ends_with("PROTOCOL_ERROR")),
        "{failures:?}"
    );
    assert_eq!(kubelet.instances(DRA_DRIVER), []);
    assert_eq!(authority(Path::new("/a b/c@d.sock")), "%2Fa%20b%2Fc@d.sock");
}

#[tokio::test]
async fn a_restart_forgets_what_is_prepared_and_dials_again() {
    for (release, appends, devices) in
        [(Release::V1_36, None, 2), (Release::V1_36, Some(false), 1), (Release::V1_37, None, 1)]
    {
        let dir = tempfile::tempdir().unwrap();
        let driver = Driver::new(dir.path());
        let server = driver.serve();
        let config = ClaimsConfig { appends, ..config(dir.path(), release) };
        let kubelet = ClaimManager::start(config).unwrap();
        connected(&kubelet, 1).await;
        let gpu = claim("u-1", "gpu", &["p-1"]);
        kubelet.prepare("p-1", from_ref(&gpu)).await.unwrap();
        kubelet.restart(release).await.unwrap();
        connected(&kubelet, 1).await;
        let mut notices = server.notices();
        let again = notices.wait_for(|notice| notice.as_ref().is_some_and(|of| of.number == 2));
        assert_eq!(again.await.unwrap().clone().unwrap().result, Ok(()));
        assert_eq!(kubelet.devices(&gpu.claim, DRA_DRIVER).len(), 1, "from its record");
        kubelet.prepare("p-1", from_ref(&gpu)).await.unwrap();
        assert_eq!(driver.devices_at_calls(), [0, 1], "it calls again");
        assert_eq!(kubelet.devices(&gpu.claim, DRA_DRIVER).len(), devices, "{release:?}");
        assert_eq!(read_claims(dir.path(), DRA_DRIVER).unwrap()[0].devices.len(), 1);
        kubelet.unprepare("p-1").await.unwrap();
        assert_eq!(read_claims(dir.path(), DRA_DRIVER).unwrap(), []);
    }
}

#[tokio::test]
async fn the_first_known_version_of_the_driver_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let driver = Driver::new(dir.path());
    let server = driver.serve();
    let endpoint = service_socket(dir.path()).unwrap();
    fs::remove_file(registration_socket(dir.path()).unwrap()).unwrap();
    let versions = ["v2.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAPlugin"];
    register_at(dir.path(), "old@reg.sock", &endpoint, &versions);
    let kubelet = start(dir.path(), Release::V1_36);
    assert_eq!(connected(&kubelet, 1).await[0].version, Version::V1Beta1);
    let gpu = claim("u-1", "gpu", &["p-1"]);
    kubelet.prepare("p-1", from_ref(&gpu)).await.unwrap();
    assert_eq!(kubelet.devices(&gpu.claim, DRA_DRIVER)[0].share_id, None);
    kubelet.unprepare("p-1").await.unwrap();
    drop(server);

    register_at(dir.path(), "none@reg.sock", Path::new("/none"), &["v1alpha3.DRAPlugin"]);
    let failures = |kubelet: &ClaimManager| kubelet.failures().first().cloned();
    let failure = kubelet.wait_for(SOON, failures).await.unwrap();
    assert!(failure.contains("plugin validation failed with err"), "{failure}");
}

#[tokio::test]
async fn the_newest_connected_instance_is_called_and_an_endpoint_is_registered_once() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let driver = Driver::new(dir.path());
    let first = driver.serve();
    let kubelet = start(dir.path(), Release::V1_36);
    connected(&kubelet, 1).await;
    // A second process with a socket of its own, registered with the same kubelet.
    let newer = Driver { name: "second", ..Driver::new(dir.path()) };
    let second = Server::start(Listeners::open(other.path()).unwrap(), &newer, &Tracking::none());
    let endpoint = service_socket(other.path()).unwrap();
    register_at(dir.path(), "second@reg.sock", &endpoint, &["v1.DRAPlugin"]);
    connected(&kubelet, 2).await;
    let cdi = |uid: &str| {
        kubelet.devices(&claim(uid, uid, &[]).claim, DRA_DRIVER)[0].cdi_devices[0].clone()
    };
    kubelet.prepare("p", &[claim("u-1", "u-1", &["p"])]).await.unwrap();
    assert_eq!(cdi("u-1"), "k8s.holdfast.dev/second=u-1");

    register_at(dir.path(), "third@reg.sock", &endpoint, &["v1.DRAPlugin"]);
    let failures = |kubelet: &ClaimManager| kubelet.failures().first().cloned();
    let failure = kubelet.wait_for(SOON, failures).await.unwrap();
    assert!(failure.contains("already registered for DRA driver plugin holdfast.dev"), "{failure}");

    // It ends, and its registration stays: the other one is connected.
    drop(second);
    let lost =
        |kubelet: &ClaimManager| (!kubelet.instances(DRA_DRIVER)[1].is_connected).then_some(());
    kubelet.wait_for(SOON, lost).await.unwrap();
    kubelet.prepare("p", &[claim("u-2", "u-2", &["p"])]).await.unwrap();
    assert_eq!(cdi("u-2"), "k8s.holdfast.dev/first=u-2");

    // The registration socket is removed: the kubelet forgets the instance.
    drop(first);
    let forgotten =
        |kubelet: &ClaimManager| (kubelet.instances(DRA_DRIVER).len() == 1).then_some(());
    kubelet.wait_for(SOON, forgotten).await.unwrap();
    let error = kubelet.prepare("p", &[claim("u-3", "u-3", &["p"])]).await.unwrap_err();
    assert!(error.starts_with("NodePrepareResources: rpc error: code = Unavailable"), "{error}");
}

#[tokio::test]
async fn health_is_read_in_the_version_of_the_release_and_cleared_at_the_end_of_the_stream() {
    for release in [Release::V1_34, Release::V1_35, Release::V1_36, Release::V1_37] {
        let dir = tempfile::tempdir().unwrap();
        let driver = Driver::new(dir.path());
        let server = driver.serve();
        let kubelet = start(dir.path(), release);
        let found = |kubelet: &ClaimManager| kubelet.health(DRA_DRIVER).first().cloned();
        let health = kubelet.wait_for(SOON, found).await.unwrap();
        assert_eq!((&health.name, health.is_healthy), (&name(), Some(false)));
        let message = if release >= Release::V1_36 { 1023 } else { 0 };
        assert_eq!(health.message.len(), message, "{release:?}");
        let healthy = ClaimHealth { name: name(), is_healthy: Some(true), message: String::new() };
        driver.health.send_replace(Arc::new([healthy.clone()]));
        let changed = |kubelet: &ClaimManager| {
            (kubelet.health(DRA_DRIVER).first() == Some(&healthy)).then_some(())
        };
        kubelet.wait_for(SOON, changed).await.unwrap();
        drop(server);
        let cleared = |kubelet: &ClaimManager| kubelet.health(DRA_DRIVER).is_empty().then_some(());
        kubelet.wait_for(SOON, cleared).await.unwrap();
    }
}

#[tokio::test]
async fn health_that_is_not_offered_is_tried_up_to_1_36_only() {
    for release in [Release::V1_36, Release::V1_37] {
        let dir = tempfile::tempdir().unwrap();
        let driver = Driver::new(dir.path());
        let _server = driver.serve();
        fs::remove_file(registration_socket(dir.path()).unwrap()).unwrap();
        let endpoint = service_socket(dir.path()).unwrap();
        register_at(dir.path(), "plain@reg.sock", &endpoint, &["v1.DRAPlugin"]);
        let kubelet = start(dir.path(), release);
        connected(&kubelet, 1).await;
        // A later call on the same connection is answered after the stream was opened or not.
        kubelet.prepare("p", &[claim("u-1", "gpu", &["p"])]).await.unwrap();
        if release == Release::V1_36 {
            let found = |kubelet: &ClaimManager| kubelet.health(DRA_DRIVER).first().cloned();
            assert!(kubelet.wait_for(SOON, found).await.is_some());
        } else {
            assert!(kubelet.health(DRA_DRIVER).is_empty() && driver.health.receiver_count() == 0);
        }
    }
}

#[tokio::test]
async fn a_report_counts_for_the_drivers_own_time_from_1_35_on() {
    for (release, seconds, expected) in
        [(Release::V1_34, 60, 30), (Release::V1_35, 60, 60), (Release::V1_37, 0, 30)]
    {
        assert_eq!(release.health_timeout(seconds), Duration::from_secs(expected));
    }
}

#[tokio::test]
async fn a_slow_prepare_reaches_its_limit_and_a_restart_cancels_it() {
    let dir = tempfile::tempdir().unwrap();
    let driver = Driver { permits: Arc::new(Semaphore::new(0)), ..Driver::new(dir.path()) };
    let _server = driver.serve();
    let mut config = config(dir.path(), Release::V1_36);
    config.times.call = Duration::from_millis(50);
    let kubelet = ClaimManager::start(config.clone()).unwrap();
    connected(&kubelet, 1).await;
    let gpu = claim("u-1", "gpu", &["p-1"]);
    let error = kubelet.prepare("p-1", from_ref(&gpu)).await.unwrap_err();
    assert!(
        error.starts_with("NodePrepareResources: rpc error: code = DeadlineExceeded"),
        "{error}"
    );
    driver.cancelled.acquire().await.unwrap().forget();
    drop(kubelet);

    config.times.call = Times::default().call;
    let kubelet = ClaimManager::start(config).unwrap();
    connected(&kubelet, 1).await;
    let calls = driver.devices_at_calls().len();
    let gpus = [gpu];
    let (result, ()) = tokio::join!(kubelet.prepare("p-1", &gpus), async {
        while driver.devices_at_calls().len() == calls {
            tokio::task::yield_now().await;
        }
        kubelet.restart(Release::V1_36).await.unwrap();
    });
    assert_eq!(result.unwrap_err(), "context canceled");
    driver.cancelled.acquire().await.unwrap().forget();
    assert_eq!(read_claims(dir.path(), DRA_DRIVER).unwrap().len(), 1, "recorded, not prepared");
}

#[tokio::test]
async fn the_kubelet_does_not_start_with_a_damaged_record() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("dra_manager_state"), r#"{"Data":"{}","Checksum":1}"#).unwrap();
    let error = ClaimManager::start(config(dir.path(), Release::V1_36)).unwrap_err();
    assert_eq!(error.to_string(), "checkpoint is corrupted");
}
