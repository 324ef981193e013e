//! The client and its watches against a simulated API server, with and without TLS.

use super::client::Limits;
use super::watch::Times;
use super::{Client, ClusterError, Credentials, ObjectWatch, Report};
use crate::domain::ApiCredentials;
use crate::lab::sim::api_server::{ApiServer, Fault, Served};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use serde_json::{Value, json};
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};

mod client;
mod collections;
mod rotation;

/// A test that takes longer than this hangs.
const HANG: Duration = Duration::from_secs(60);

async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(HANG, future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

/// A watch of `gpu-7` with the credentials of a kubeconfig.
fn watch(kubeconfig: &Path, silence: Duration) -> ObjectWatch {
    let times = Times { answer: HANG, quiet: HANG, silence, watch: HANG };
    ObjectWatch::with_times(credentials(kubeconfig), "gpu-7", times)
}

fn credentials(kubeconfig: &Path) -> Credentials {
    let configured = ApiCredentials::Kubeconfig(kubeconfig.to_owned());
    let nowhere = Path::new("/nonexistent");
    Credentials::new(&configured, nowhere, nowhere)
}

/// A client that never closes a connection because of its age or idleness.
fn client(kubeconfig: &Path) -> Client {
    client_within(kubeconfig, HANG)
}

fn client_within(kubeconfig: &Path, answer: Duration) -> Client {
    Client::with_limits(credentials(kubeconfig), Limits { answer, idle: HANG, age: HANG })
}

/// A slice of `gpu-7` with one device that has this model.
fn slice(name: &str, model: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": name },
        "spec": {
            "driver": "holdfast.dev", "nodeName": "gpu-7",
            "pool": { "name": "gpu-7/gpu", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0", "attributes": { "model": { "string": model } } }],
        },
    })
}

/// The next report, which must be these labels: `a=1 b=2`.
async fn labels(watch: &mut ObjectWatch) -> String {
    match soon("a report", watch.next()).await {
        Report::Present(meta) => {
            let pair = |(key, value)| format!("{key}={value}");
            meta.labels.iter().map(pair).collect::<Vec<_>>().join(" ")
        }
        other => panic!("{other:?}"),
    }
}

async fn failure(watch: &mut ObjectWatch) -> ClusterError {
    match soon("a failure", watch.next()).await {
        Report::Failed { error, .. } => error,
        other => panic!("{other:?}"),
    }
}

/// Waits for the counts of the API server.
async fn served(server: &ApiServer, fits: impl FnMut(&Served) -> bool) -> Served {
    *soon("requests", server.served().wait_for(fits)).await.unwrap()
}

struct Scene {
    folder: tempfile::TempDir,
    server: ApiServer,
    watch: ObjectWatch,
}

/// An API server with the node `gpu-7` and the label `a=1`, and a watch of it.
async fn scene(silence: Duration) -> Scene {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[("a", "1")]).await.unwrap();
    let kubeconfig = server.kubeconfig(folder.path(), "first").unwrap();
    Scene { watch: watch(&kubeconfig, silence), folder, server }
}

#[tokio::test]
async fn changes_arrive_and_bookmarks_are_no_changes() {
    let Scene { server, mut watch, folder: _folder } = scene(HANG).await;
    assert_eq!(labels(&mut watch).await, "a=1");
    server.bookmark();
    server.set_labels(&[("a", "2"), ("b", "3")]);
    assert_eq!(labels(&mut watch).await, "a=2 b=3");
    server.delete_node();
    assert_eq!(soon("the removal", watch.next()).await, Report::Absent);
    server.set_labels(&[]);
    assert_eq!(labels(&mut watch).await, "");
    assert_eq!(*server.served().borrow(), Served { lists: 1, watches: 1, writes: 0, refused: 0 });
}

#[tokio::test]
async fn a_node_of_another_name_is_absent() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-8", &[]).await.unwrap();
    let mut watch = watch(&server.kubeconfig(folder.path(), "t").unwrap(), HANG);
    assert_eq!(soon("a list", watch.next()).await, Report::Absent);
}

#[tokio::test]
async fn a_watch_that_is_too_old_begins_with_another_list() {
    let Scene { server, mut watch, folder: _folder } = scene(HANG).await;
    assert_eq!(labels(&mut watch).await, "a=1");
    served(&server, |served| served.watches == 1).await;
    server.silence(true);
    server.set_labels(&[("a", "2")]);
    server.silence(false);
    server.expire();
    assert_eq!(labels(&mut watch).await, "a=2");
    let served = served(&server, |served| served.watches == 2).await;
    assert_eq!(served, Served { lists: 2, watches: 2, writes: 0, refused: 0 });
}

#[tokio::test]
async fn a_silent_watch_is_opened_again() {
    let Scene { server, mut watch, folder: _folder } = scene(Duration::from_millis(200)).await;
    assert_eq!(labels(&mut watch).await, "a=1");
    served(&server, |served| served.watches == 1).await;
    server.silence(true);
    server.set_labels(&[("a", "2")]);
    let error = failure(&mut watch).await;
    assert!(matches!(error, ClusterError::Silent { .. }), "{error}");
    assert_eq!(labels(&mut watch).await, "a=2");
}

/// The server accepts connections, and answers nothing.
#[tokio::test]
async fn a_server_that_hangs_is_reported_long_before_its_bookmark_is_due() {
    let Scene { server, folder, .. } = scene(HANG).await;
    let kubeconfig = server.kubeconfig(folder.path(), "first").unwrap();
    let (answer, quiet) = (Duration::from_millis(300), Duration::from_millis(100));
    let times = Times { answer, quiet, silence: HANG, watch: HANG };
    let mut watch = ObjectWatch::with_times(credentials(&kubeconfig), "gpu-7", times);
    assert_eq!(labels(&mut watch).await, "a=1");
    served(&server, |served| served.watches == 1).await;
    server.silence(true);
    server.on_request(|_| Some(Fault::Delay(HANG)));
    // The reader of the watch does other things in between.
    let error = loop {
        tokio::select! {
            report = watch.next() => match report {
                Report::Failed { error, .. } => break error,
                other => panic!("{other:?}"),
            },
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    };
    assert!(matches!(error, ClusterError::Silent { .. }), "{error}");
    server.on_request(|_| None);
    server.silence(false);
    server.set_labels(&[("a", "2")]);
    assert_eq!(labels(&mut watch).await, "a=2");
}

#[tokio::test]
async fn a_quiet_watch_of_a_server_that_answers_stays_open() {
    let Scene { server, folder, .. } = scene(HANG).await;
    let kubeconfig = server.kubeconfig(folder.path(), "first").unwrap();
    let quiet = Duration::from_millis(20);
    let times = Times { answer: HANG, quiet, silence: HANG, watch: HANG };
    let mut watch = ObjectWatch::with_times(credentials(&kubeconfig), "gpu-7", times);
    assert_eq!(labels(&mut watch).await, "a=1");
    let probes = || server.requests().iter().filter(|it| it.as_str() == "GET /version").count();
    // Refusals are answers too.
    server.on_request(|request| (request.path == "/version").then_some(Fault::Refuse(403, None)));
    let quiet_watch = async {
        while probes() < 5 {
            tokio::select! {
                report = watch.next() => panic!("{report:?}"),
                () = tokio::time::sleep(quiet) => {}
            }
        }
    };
    soon("questions", quiet_watch).await;
    server.set_labels(&[("a", "2")]);
    assert_eq!(labels(&mut watch).await, "a=2");
    assert_eq!(server.served().borrow().lists, 1, "it is the same watch");
    assert_eq!(server.connections().borrow().all, 2, "and one more connection");
}

#[tokio::test]
async fn a_lost_connection_and_the_usual_end_of_a_watch_lose_no_change() {
    let Scene { server, mut watch, folder: _folder } = scene(HANG).await;
    assert_eq!(labels(&mut watch).await, "a=1");
    served(&server, |served| served.watches == 1).await;
    server.disconnect();
    let error = failure(&mut watch).await;
    assert!(matches!(error, ClusterError::Broken { .. }), "{error}");
    server.set_labels(&[("a", "2")]);
    assert_eq!(labels(&mut watch).await, "a=2");
    served(&server, |served| served.watches == 2).await;
    server.end_watches();
    assert_eq!(labels(&mut watch).await, "a=2");
}

#[tokio::test]
async fn a_renewed_token_is_used_for_the_next_connection() {
    let Scene { folder, server, mut watch } = scene(HANG).await;
    server.require_token("first");
    assert_eq!(labels(&mut watch).await, "a=1");
    served(&server, |served| served.watches == 1).await;
    server.require_token("second");
    server.disconnect();
    assert!(matches!(failure(&mut watch).await, ClusterError::Broken { .. }));
    let error = failure(&mut watch).await;
    assert!(matches!(error, ClusterError::Refused { code: 401, .. }), "{error}");
    std::fs::write(folder.path().join("token"), "second\n").unwrap();
    assert_eq!(labels(&mut watch).await, "a=1");
}

#[tokio::test]
async fn a_refusal_is_reported_with_the_pause_that_the_server_requests() {
    let Scene { server, mut watch, folder: _folder } = scene(HANG).await;
    server.refuse(Some((429, Some(7))));
    let Report::Failed { error, pause } = soon("a refusal", watch.next()).await else {
        panic!("the server answers");
    };
    assert_eq!(error.to_string(), "the API server answered 429: refused with 429");
    assert!(pause >= Duration::from_secs(7), "{pause:?}");
    server.refuse(Some((403, None)));
    let folder = tempfile::tempdir().unwrap();
    let mut watch = self::watch(&server.kubeconfig(folder.path(), "t").unwrap(), HANG);
    let error = failure(&mut watch).await.to_string();
    assert!(error.contains("grant list and watch of nodes"), "{error}");
    server.refuse(None);
    assert_eq!(labels(&mut watch).await, "a=1");
}

#[tokio::test]
async fn an_absent_server_is_tried_until_it_is_there() {
    let Scene { folder, server, mut watch } = scene(HANG).await;
    let address = server.address();
    drop(server);
    let error = failure(&mut watch).await;
    let is_absent = matches!(error, ClusterError::Connect { .. } | ClusterError::Broken { .. });
    assert!(is_absent, "{error}");
    let server = ApiServer::start_at(address, "gpu-7", &[("a", "9")]).await.unwrap();
    assert_eq!(labels(&mut watch).await, "a=9");
    drop((server, folder));
}

const AUTHORITY: &str = include_str!("testing/authority.pem");
const SERVER: &str = include_str!("testing/server.pem");
/// A client certificate of the authority, with its key: as the kubelet has them.
const CLIENT: &str = include_str!("testing/client.pem");
/// One of another authority.
const OTHER: &str = include_str!("testing/other.pem");

/// TLS in front of a server that requires a client certificate.
async fn tls_in_front_of(target: SocketAddr) -> SocketAddr {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(AUTHORITY.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let settings = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_client_cert_verifier(clients.build().unwrap())
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(SERVER.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(SERVER.as_bytes()).unwrap(),
        )
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(settings));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                if let Ok(mut outer) = acceptor.accept(stream).await {
                    let mut inner = TcpStream::connect(target).await.unwrap();
                    drop(tokio::io::copy_bidirectional(&mut outer, &mut inner).await);
                }
            });
        }
    });
    address
}

/// A kubeconfig as the kubelet has it: the certificate and the key are in one file, which the
/// kubelet replaces.
fn kubelets_kubeconfig(folder: &Path, server: &str, authority: &str) -> std::path::PathBuf {
    let text = format!(
        "current-context: a\ncontexts: [{{ name: a, context: {{ cluster: a, user: a }} }}]\n\
         clusters: [{{ name: a, cluster: {{ server: '{server}', certificate-authority: ca.pem }} }}]\n\
         users: [{{ name: a, user: {{ client-certificate: current.pem, client-key: current.pem }} }}]\n"
    );
    std::fs::write(folder.join("ca.pem"), authority).unwrap();
    let file = folder.join("kubeconfig");
    std::fs::write(&file, text).unwrap();
    file
}

#[tokio::test]
async fn a_rotated_client_certificate_is_used_for_the_next_connection() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[("a", "1")]).await.unwrap();
    let address = tls_in_front_of(server.address()).await;
    let kubeconfig = kubelets_kubeconfig(folder.path(), &format!("https://{address}"), AUTHORITY);
    std::fs::write(folder.path().join("current.pem"), OTHER).unwrap();
    let mut watch = watch(&kubeconfig, HANG);
    // TLS 1.3: the server refuses the certificate after the client's part of the handshake.
    let error = failure(&mut watch).await;
    let is_refused = matches!(error, ClusterError::Connect { .. } | ClusterError::Broken { .. });
    assert!(is_refused, "{error}");
    std::fs::write(folder.path().join("current.pem"), CLIENT).unwrap();
    assert_eq!(labels(&mut watch).await, "a=1");
    server.set_labels(&[("a", "2")]);
    assert_eq!(labels(&mut watch).await, "a=2");
}

#[tokio::test]
async fn a_server_of_another_authority_or_name_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    let address = tls_in_front_of(server.address()).await;
    std::fs::write(folder.path().join("current.pem"), CLIENT).unwrap();
    let wrong_name = format!("https://localhost:{}", address.port());
    for (url, authority) in [(format!("https://{address}"), OTHER), (wrong_name, AUTHORITY)] {
        let kubeconfig = kubelets_kubeconfig(folder.path(), &url, authority);
        let error = failure(&mut watch(&kubeconfig, HANG)).await.to_string();
        assert!(error.contains("invalid peer certificate"), "{url}: {error}");
    }
    assert_eq!(*server.served().borrow(), Served::default());
}

#[tokio::test]
async fn a_token_is_not_sent_without_tls_to_another_machine() {
    let folder = tempfile::tempdir().unwrap();
    let server = ApiServer::start("gpu-7", &[]).await.unwrap();
    let file = server.kubeconfig(folder.path(), "t").unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    for (url, expected) in [
        ("http://192.0.2.1:6443", "has no TLS"),
        ("192.0.2.1:6443", "does not begin with https://"),
        ("https://192.0.2.1:6443", "the certificate of the authority"),
    ] {
        let own = format!("http://{}", server.address());
        std::fs::write(&file, text.replace(&own, url)).unwrap();
        let error = failure(&mut watch(&file, HANG)).await.to_string();
        assert!(error.contains(expected), "{error}");
    }
}
