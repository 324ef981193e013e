//! The services over real unix sockets, with a driver in memory.

use super::answers::{CLAIMS_MAX, REQUEST_BYTES_MAX};
use super::*;
use crate::domain::{DRA_DRIVER, DraName};
use crate::kubelet::proto::dra_health_v1::dra_resource_health_client::DraResourceHealthClient as HealthV1;
use crate::kubelet::proto::dra_health_v1alpha1::dra_resource_health_client::DraResourceHealthClient as HealthV1Alpha1;
use crate::kubelet::proto::dra_v1::dra_plugin_client::DraPluginClient as PluginV1;
use crate::kubelet::proto::dra_v1beta1::dra_plugin_client::DraPluginClient as PluginV1Beta1;
use crate::kubelet::proto::pluginregistration::registration_client::RegistrationClient;
use crate::kubelet::proto::{
    dra_health_v1, dra_health_v1alpha1, dra_v1, dra_v1beta1, pluginregistration,
};
use crate::kubelet::uds;
use std::path::Path;
use std::sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tonic::Code;
use tonic::transport::Channel;

/// A driver in memory: prepares one device for each claim, except for claims named `bad`.
#[derive(Clone)]
struct InMemory {
    prepared: Arc<Mutex<Vec<ClaimRef>>>,
    health: watch::Sender<Arc<[ClaimHealth]>>,
    /// Gets a permit at the beginning of each Prepare.
    asked: Arc<Semaphore>,
    /// Each Prepare needs a permit.
    permits: Arc<Semaphore>,
}

impl InMemory {
    fn new() -> Self {
        InMemory {
            prepared: Arc::default(),
            health: watch::Sender::new(Arc::new([health("gpu-1", Some(true), "")])),
            asked: Arc::new(Semaphore::new(0)),
            permits: Arc::new(Semaphore::new(100)),
        }
    }

    fn uids(&self) -> Vec<String> {
        self.prepared.lock().unwrap().iter().map(|claim| claim.uid.clone()).collect()
    }
}

impl Claims for InMemory {
    async fn prepare(&self, claims: Vec<ClaimRef>) -> Answers<Vec<PreparedDevice>> {
        self.asked.add_permits(1);
        self.permits.acquire().await.unwrap().forget();
        let prepare = |claim: ClaimRef| {
            if claim.name == "bad" {
                return (claim, Err("no such\ndevice".to_owned()));
            }
            let device = PreparedDevice {
                request: "gpu".into(),
                name: DraName { pool: "n1/gpu".into(), device: "gpu-1".into() },
                cdi_devices: vec![format!("k8s.holdfast.dev/claim={}", claim.uid)],
                share_id: Some("share".into()),
            };
            self.prepared.lock().unwrap().push(claim.clone());
            (claim, Ok(vec![device]))
        };
        claims.into_iter().map(prepare).collect()
    }

    async fn unprepare(&self, claims: Vec<ClaimRef>) -> Answers<()> {
        self.prepared.lock().unwrap().retain(|prepared| !claims.contains(prepared));
        claims.into_iter().map(|claim| (claim, Ok(()))).collect()
    }

    fn health(&self) -> watch::Receiver<Arc<[ClaimHealth]>> {
        self.health.subscribe()
    }
}

fn health(device: &str, is_healthy: Option<bool>, message: &str) -> ClaimHealth {
    let name = DraName { pool: "n1/gpu".into(), device: device.into() };
    ClaimHealth { name, is_healthy, message: message.into() }
}

/// A served driver below a directory of its own.
fn served(driver: &InMemory) -> (tempfile::TempDir, Server) {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(Listeners::open(dir.path()).unwrap(), driver, &Tracking::none());
    (dir, server)
}

async fn service(root: &Path) -> Channel {
    uds::connect(service_socket(root).unwrap()).await.unwrap()
}

fn claim(uid: &str, name: &str) -> dra_v1::Claim {
    dra_v1::Claim { namespace: "team".into(), uid: uid.into(), name: name.into() }
}

fn claim_v1beta1(uid: &str, name: &str) -> dra_v1beta1::Claim {
    dra_v1beta1::Claim { namespace: "team".into(), uid: uid.into(), name: name.into() }
}

/// Appends an HPACK text (RFC 7541, 5.2): its length in 7 bits and more, and its bytes.
fn push_text(block: &mut Vec<u8>, text: &str) {
    match text.len() {
        short @ 0..127 => block.push(u8::try_from(short).unwrap()),
        long => {
            let rest = long - 127;
            assert!(rest < 1 << 14);
            block.extend([127, (rest & 127) as u8 | 128, (rest >> 7) as u8]);
        }
    }
    block.extend(text.bytes());
}

/// Makes one call with frames of HTTP/2 as gRPC for Go sends them: its authority may be any text.
/// Returns the message, or the code of the reset.
async fn call_with_authority(socket: &Path, authority: &str, method: &str) -> Result<Vec<u8>, u32> {
    // POST, http; then literals with the names 1 (:authority), 4 (:path) and 31 (content-type).
    let mut block = vec![0x83, 0x86, 0x01];
    push_text(&mut block, authority);
    block.push(0x04);
    push_text(&mut block, method);
    block.extend([0x0f, 31 - 15]);
    push_text(&mut block, "application/grpc");
    block.push(0);
    push_text(&mut block, "te");
    push_text(&mut block, "trailers");
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let mut connection = UnixStream::connect(socket).await.unwrap();
    let bytes = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &block),
        // An empty message.
        frame(0, 1, 1, &[0; 5]),
    ];
    connection.write_all(&bytes.concat()).await.unwrap();
    let mut message = Vec::new();
    loop {
        let mut head = [0; 9];
        connection.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        connection.read_exact(&mut payload).await.unwrap();
        match (head[3], head[4] & 1, head[8]) {
            (0, _, 1) => message.extend(payload),
            // The trailers.
            (1, 1, 1) => return Ok(message),
            (3, _, 1) => return Err(u32::from_be_bytes(payload.try_into().unwrap())),
            _ => {}
        }
    }
}

/// The authority that the kubelet sends for a socket.
fn authority(socket: &Path) -> String {
    socket.to_str().unwrap().replace('/', "%2F")
}

#[tokio::test]
async fn the_kubelets_authority_is_accepted_because_of_the_at_in_the_sockets_name() {
    let (dir, _server) = served(&InMemory::new());
    let socket = registration_socket(dir.path()).unwrap();
    let get_info = "/pluginregistration.Registration/GetInfo";
    let message = call_with_authority(&socket, &authority(&socket), get_info).await.unwrap();
    let info: pluginregistration::PluginInfo = prost::Message::decode(&message[5..]).unwrap();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRA_DRIVER));
    assert_eq!(info.endpoint, service_socket(dir.path()).unwrap().to_str().unwrap());
    assert_eq!(
        info.supported_versions,
        ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
    );
    // 1 is PROTOCOL_ERROR. If this call succeeds, sockets need no `@` any longer.
    let without_at = authority(&socket).replace('@', "-");
    assert_eq!(call_with_authority(&socket, &without_at, get_info).await, Err(1));
}

#[tokio::test]
async fn the_kubelets_reports_about_the_registration_are_passed_on() {
    let (dir, server) = served(&InMemory::new());
    let mut notices = server.notices();
    assert_eq!(*notices.borrow(), None);
    let channel = uds::connect(registration_socket(dir.path()).unwrap()).await.unwrap();
    let mut kubelet = RegistrationClient::new(channel);
    let status = |plugin_registered, error: &str| pluginregistration::RegistrationStatus {
        plugin_registered,
        error: error.to_owned(),
    };
    kubelet.notify_registration_status(status(false, "already\nregistered")).await.unwrap();
    let notice = notices.borrow_and_update().clone().unwrap();
    assert_eq!(notice, Notice { number: 1, result: Err("already\\nregistered".into()) });
    kubelet.notify_registration_status(status(true, "")).await.unwrap();
    let notice = notices.borrow_and_update().clone().unwrap();
    assert_eq!(notice, Notice { number: 2, result: Ok(()) });
}

#[tokio::test]
async fn claims_are_prepared_and_unprepared_in_v1_with_the_share() {
    let driver = InMemory::new();
    let (dir, _server) = served(&driver);
    let mut kubelet = PluginV1::new(service(dir.path()).await);
    let request = dra_v1::NodePrepareResourcesRequest {
        claims: vec![claim("u-1", "gpu"), claim("u-2", "bad")],
    };
    let answer = kubelet.node_prepare_resources(request.clone()).await.unwrap().into_inner();
    let device = dra_v1::Device {
        request_names: vec!["gpu".into()],
        pool_name: "n1/gpu".into(),
        device_name: "gpu-1".into(),
        cdi_device_ids: vec!["k8s.holdfast.dev/claim=u-1".into()],
        share_id: Some("share".into()),
    };
    assert_eq!(answer.claims["u-1"].devices, [device]);
    assert_eq!(answer.claims["u-1"].error, "");
    assert_eq!(answer.claims["u-2"].error, "no such\\ndevice");
    assert_eq!((answer.claims.len(), driver.uids()), (2, vec!["u-1".to_owned()]));

    let request = dra_v1::NodeUnprepareResourcesRequest {
        claims: vec![claim("u-1", "gpu"), claim("unknown", "gpu")],
    };
    let answer = kubelet.node_unprepare_resources(request).await.unwrap().into_inner();
    let errors: Vec<(&str, &str)> =
        answer.claims.iter().map(|(uid, answer)| (uid.as_str(), answer.error.as_str())).collect();
    assert_eq!((errors, driver.uids().len()), (vec![("u-1", ""), ("unknown", "")], 0));
}

#[tokio::test]
async fn claims_are_prepared_and_unprepared_in_v1beta1() {
    let driver = InMemory::new();
    let (dir, _server) = served(&driver);
    let mut kubelet = PluginV1Beta1::new(service(dir.path()).await);
    let claims = vec![claim_v1beta1("u-1", "gpu"), claim_v1beta1("u-2", "bad")];
    let request = dra_v1beta1::NodePrepareResourcesRequest { claims: claims.clone() };
    let answer = kubelet.node_prepare_resources(request).await.unwrap().into_inner();
    let device = dra_v1beta1::Device {
        request_names: vec!["gpu".into()],
        pool_name: "n1/gpu".into(),
        device_name: "gpu-1".into(),
        cdi_device_ids: vec!["k8s.holdfast.dev/claim=u-1".into()],
    };
    assert_eq!(answer.claims["u-1"].devices, [device]);
    assert_eq!(answer.claims["u-2"].error, "no such\\ndevice");
    let request = dra_v1beta1::NodeUnprepareResourcesRequest { claims };
    let answer = kubelet.node_unprepare_resources(request).await.unwrap().into_inner();
    assert_eq!((answer.claims.len(), driver.uids().len()), (2, 0));
}

#[tokio::test]
async fn a_hostile_request_gets_errors_and_reaches_no_driver() {
    let driver = InMemory::new();
    let (dir, _server) = served(&driver);
    let mut kubelet = PluginV1::new(service(dir.path()).await);
    let prepare = |claims| dra_v1::NodePrepareResourcesRequest { claims };
    let hostile =
        vec![claim("", "gpu"), claim("twice", "gpu"), claim("../x", "gpu"), claim("twice", "b")];
    let answer = kubelet.node_prepare_resources(prepare(hostile.clone())).await.unwrap();
    let answer = answer.into_inner().claims;
    assert_eq!(answer.keys().collect::<Vec<_>>(), ["", "../x", "twice"]);
    assert!(answer.values().all(|answer| !answer.error.is_empty() && answer.devices.is_empty()));
    let request = dra_v1::NodeUnprepareResourcesRequest { claims: hostile };
    let answer = kubelet.node_unprepare_resources(request).await.unwrap().into_inner().claims;
    assert!(answer.len() == 3 && answer.values().all(|answer| !answer.error.is_empty()));

    let many = vec![claim("u", "gpu"); CLAIMS_MAX + 1];
    let error = kubelet.node_prepare_resources(prepare(many)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let large = vec![claim(&"u".repeat(REQUEST_BYTES_MAX), "gpu")];
    let error = kubelet.node_prepare_resources(prepare(large)).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange);
    // An empty request is no mistake.
    let answer = kubelet.node_prepare_resources(prepare(vec![])).await.unwrap();
    assert!(answer.into_inner().claims.is_empty() && driver.uids().is_empty());
}

#[tokio::test]
async fn the_health_of_all_devices_is_sent_at_once_and_after_a_change_in_both_versions() {
    let driver = InMemory::new();
    let (dir, _server) = served(&driver);
    let channel = service(dir.path()).await;
    let v1 = dra_health_v1::NodeWatchResourcesRequest {};
    let v1 = HealthV1::new(channel.clone()).node_watch_resources(v1).await.unwrap();
    let alpha = dra_health_v1alpha1::NodeWatchResourcesRequest {};
    let alpha = HealthV1Alpha1::new(channel).node_watch_resources(alpha).await.unwrap();
    let (mut v1, mut alpha) = (v1.into_inner(), alpha.into_inner());
    for (changed, expected) in [
        (None, vec![("gpu-1", 1, "")]),
        (
            Some([health("gpu-1", Some(false), "xid 79"), health("gpu-2", None, "")]),
            vec![("gpu-1", 2, "xid 79"), ("gpu-2", 0, "")],
        ),
    ] {
        if let Some(changed) = changed {
            driver.health.send_replace(Arc::new(changed));
        }
        let list = v1.message().await.unwrap().unwrap();
        let device = list.devices[0].device.as_ref().unwrap();
        let found: Vec<_> = list
            .devices
            .iter()
            .map(|of| (of.device.as_ref().unwrap().device_name.as_str(), of.health, &*of.message))
            .collect();
        assert_eq!((found, device.pool_name.as_str()), (expected.clone(), "n1/gpu"));
        assert!(list.devices.iter().all(|of| of.health_check_timeout_seconds == 60));
        assert!(list.devices[0].last_updated_time > 1_700_000_000);
        let list = alpha.message().await.unwrap().unwrap();
        let found: Vec<_> = list
            .devices
            .iter()
            .map(|of| (of.device.as_ref().unwrap().device_name.as_str(), of.health, &*of.message))
            .collect();
        assert_eq!(found, expected);
        assert!(list.devices.iter().all(|of| of.health_check_timeout_seconds == 60));
    }
}

#[tokio::test]
async fn a_stop_answers_the_calls_in_flight_and_ends_the_health_streams() {
    let driver = InMemory { permits: Arc::new(Semaphore::new(0)), ..InMemory::new() };
    let (dir, server) = served(&driver);
    let sockets = [service_socket(dir.path()).unwrap(), registration_socket(dir.path()).unwrap()];
    let channel = service(dir.path()).await;
    let request = dra_health_v1::NodeWatchResourcesRequest {};
    let health = HealthV1::new(channel.clone()).node_watch_resources(request).await.unwrap();
    let mut health = health.into_inner();
    health.message().await.unwrap().unwrap();
    let mut kubelet = PluginV1::new(channel);
    let request = dra_v1::NodePrepareResourcesRequest { claims: vec![claim("u-1", "gpu")] };
    let prepared = tokio::spawn(async move { kubelet.node_prepare_resources(request).await });
    let stopped = async {
        driver.asked.acquire().await.unwrap().forget();
        let stopping = server.release(false);
        while health.message().await.is_ok_and(|list| list.is_some()) {}
        assert!(sockets.iter().all(|socket| !socket.exists()), "the files go first");
        driver.permits.add_permits(1);
        for server in stopping {
            server.closed().await;
        }
    };
    let (prepared, ()) = tokio::join!(prepared, stopped);
    let answer = prepared.unwrap().unwrap().into_inner();
    assert_eq!(answer.claims["u-1"].devices.len(), 1);
}

#[tokio::test]
async fn a_dropped_server_removes_its_sockets_and_the_next_one_opens_them() {
    let driver = InMemory::new();
    let (dir, server) = served(&driver);
    let socket = service_socket(dir.path()).unwrap();
    assert!(socket.exists());
    drop(server);
    assert!(!socket.exists() && !registration_socket(dir.path()).unwrap().exists());
    let _next = Server::start(Listeners::open(dir.path()).unwrap(), &driver, &Tracking::none());
    let mut kubelet = PluginV1::new(service(dir.path()).await);
    let request = dra_v1::NodePrepareResourcesRequest { claims: vec![claim("u-1", "gpu")] };
    assert_eq!(kubelet.node_prepare_resources(request).await.unwrap().into_inner().claims.len(), 1);
}

#[tokio::test]
async fn another_server_continues_with_the_sockets_and_the_calls_in_their_queues() {
    let (former, next) = (InMemory::new(), InMemory::new());
    let dir = tempfile::tempdir().unwrap();
    let (leave, leaving) = watch::channel(false);
    let tracking = Tracking { leaving, ..Tracking::none() };
    let server = Server::start(Listeners::open(dir.path()).unwrap(), &former, &tracking);
    let sockets = [service_socket(dir.path()).unwrap(), registration_socket(dir.path()).unwrap()];
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
    let inodes = sockets.each_ref().map(|path| inode(path));
    leave.send_replace(true);
    let passed = server.copies().unwrap();
    let mut kubelet = PluginV1::new(uds::connect_lazy(&sockets[0]));
    let request = dra_v1::NodePrepareResourcesRequest { claims: vec![claim("u-1", "gpu")] };
    let answer = tokio::spawn(async move { kubelet.node_prepare_resources(request).await });
    for server in server.release(true) {
        server.closed().await;
    }
    assert!(Listeners::adopt(&dir.path().join("other"), &passed).is_err(), "another directory");
    assert!(Listeners::adopt(dir.path(), &passed[..1]).is_err(), "one is missing");
    let listeners = Listeners::adopt(dir.path(), &passed).unwrap();
    drop(passed);
    let server = Server::start(listeners, &next, &Tracking::none());
    assert_eq!(answer.await.unwrap().unwrap().into_inner().claims.len(), 1);
    assert_eq!((former.uids().len(), next.uids().len()), (0, 1));
    assert_eq!(sockets.each_ref().map(|path| inode(path)), inodes);
    assert!(server.is_reachable());

    // No instance serves these: the kubelet forgets the driver.
    remove_passed(&server.copies().unwrap());
    assert!(sockets.iter().all(|socket| !socket.exists()) && !server.is_reachable());
}

#[tokio::test]
async fn a_connection_waits_while_there_are_too_many() {
    let (dir, _server) = served(&InMemory::new());
    let socket = service_socket(dir.path()).unwrap();
    let mut idle = Vec::new();
    for _ in 0..server::CONNECTIONS_MAX {
        let mut connection = UnixStream::connect(&socket).await.unwrap();
        connection.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        // The server's first frame: it serves this connection.
        connection.read_exact(&mut [0; 9]).await.unwrap();
        idle.push(connection);
    }
    let mut kubelet = PluginV1::new(uds::connect_lazy(&socket));
    let request = dra_v1::NodeUnprepareResourcesRequest { claims: vec![claim("u-1", "gpu")] };
    let answer = kubelet.node_unprepare_resources(request);
    tokio::pin!(answer);
    let waits = tokio::time::timeout(std::time::Duration::from_millis(100), &mut answer).await;
    assert!(waits.is_err(), "it waits in the queue");
    drop(idle);
    answer.await.unwrap();
}
