//! TLS with real clients, in memory and on loopback.

use super::*;
use crate::telemetry::server::{self, Limits, Listener};
use axum::Router;
use axum::routing::get;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::fs;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, DuplexStream, duplex};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const AUTHORITY: &str = include_str!("../cluster/testing/authority.pem");
/// A certificate for 127.0.0.1, and its key.
const SERVER: &str = include_str!("../cluster/testing/server.pem");
/// A client certificate of the authority, and its key.
const CLIENT: &str = include_str!("../cluster/testing/client.pem");
/// One of another authority.
const OTHER: &str = include_str!("../cluster/testing/other.pem");

/// A test that takes longer than this hangs.
const HANG: Duration = Duration::from_secs(60);

async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(HANG, future).await.unwrap_or_else(|_| panic!("hangs: {what}"))
}

/// The files of a server in a folder of their own, and their problem.
struct Scene {
    folder: tempfile::TempDir,
    problem: watch::Receiver<Option<String>>,
    tls: Tls,
}

impl Scene {
    fn new(cert: &str, key: &str, client_ca: Option<&str>) -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let files = TlsFiles {
            cert: write("tls.crt", cert),
            key: write("tls.key", key),
            client_ca: client_ca.map(|text| write("ca.crt", text)),
        };
        let (sender, problem) = watch::channel(None);
        let tls = Tls::reading_after(files, Duration::ZERO, sender);
        Scene { folder, problem, tls }
    }

    /// Replaces a file at once, as the kubelet does for a Secret.
    fn replace(&self, name: &str, text: &str) {
        let fresh = self.folder.path().join("fresh");
        fs::write(&fresh, text).unwrap();
        fs::rename(fresh, self.folder.path().join(name)).unwrap();
    }

    /// A handshake: the number of certificates that the client gets, and whether the server knows
    /// the client's. Both sides stay open until then: TLS 1.3 refuses a client after its own part.
    async fn handshake(&self, client: ClientConfig) -> io::Result<(usize, bool)> {
        let (theirs, ours) = duplex(64 << 10);
        let (connected, accepted) = soon("a handshake", async {
            tokio::join!(connect(client, theirs), self.tls.accept(ours))
        })
        .await;
        let (_stream, is_known) = accepted?;
        Ok((connected?.get_ref().1.peer_certificates().unwrap().len(), is_known))
    }

    /// Connects until the client gets this number of certificates: the files are read after the
    /// first connection.
    async fn until_chain(&self, wanted: usize) {
        soon("the other chain", async {
            while self.handshake(client(None)).await.unwrap().0 != wanted {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Connects until there is such a problem, or none.
    async fn until_problem(&self, expected: Option<&str>) {
        let holds = |problem: &Option<String>| match (problem, expected) {
            (Some(problem), Some(expected)) => problem.contains(expected),
            (problem, expected) => problem.is_none() && expected.is_none(),
        };
        soon(expected.unwrap_or("no problem"), async {
            while !holds(&self.problem.borrow()) {
                drop(self.handshake(client(None)).await);
            }
        })
        .await;
    }
}

/// A client that trusts the authority, with a certificate and its key.
fn client(identity: Option<&str>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(AUTHORITY.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let Some(identity) = identity else { return builder.with_no_client_auth() };
    let chain = certificates(identity.as_bytes()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(identity.as_bytes()).unwrap();
    builder.with_client_auth_cert(chain, key).unwrap()
}

async fn connect<S>(client: ClientConfig, stream: S) -> io::Result<TlsStream<S>>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(Arc::new(client)).connect(name, stream).await
}

#[tokio::test]
async fn a_renewed_certificate_is_used_without_a_restart() {
    let scene = Scene::new(SERVER, SERVER, None);
    assert_eq!(scene.handshake(client(None)).await.unwrap(), (1, false));
    scene.replace("tls.crt", &format!("{SERVER}{AUTHORITY}"));
    scene.until_chain(2).await;
    assert_eq!(*scene.problem.borrow(), None);
}

#[tokio::test]
async fn files_that_do_not_fit_keep_the_former_certificate_and_are_a_problem() {
    let scene = Scene::new(SERVER, SERVER, None);
    for (text, expected) in [
        (OTHER, "not usable with the key"),
        ("nonsense", "no usable private key"),
        (&"x".repeat(300 << 10), "it has more than"),
    ] {
        scene.replace("tls.key", text);
        scene.until_problem(Some(expected)).await;
        let problem = scene.problem.borrow().clone().unwrap();
        assert!(problem.contains("the former certificate stays in use"), "{problem}");
        assert_eq!(scene.handshake(client(None)).await.unwrap().0, 1);
    }
    fs::remove_file(scene.folder.path().join("tls.key")).unwrap();
    scene.until_problem(Some("cannot read")).await;
    assert_eq!(scene.handshake(client(None)).await.unwrap().0, 1);
    // The same content as before: it is used again, and the problem ends.
    scene.replace("tls.key", SERVER);
    scene.until_problem(None).await;
    scene.replace("tls.crt", &format!("{SERVER}{AUTHORITY}"));
    scene.until_chain(2).await;
}

#[tokio::test]
async fn without_a_usable_certificate_every_connection_is_refused_until_there_is_one() {
    let scene = Scene::new("", SERVER, None);
    let problem = scene.problem.borrow().clone().unwrap();
    let expected = ["every connection is refused", "tls.crt`: it has no certificate"];
    assert!(expected.iter().all(|part| problem.contains(part)), "{problem}");
    scene.handshake(client(None)).await.unwrap_err();
    scene.replace("tls.crt", SERVER);
    scene.until_problem(None).await;
    assert_eq!(scene.handshake(client(None)).await.unwrap(), (1, false));
}

#[tokio::test]
async fn only_a_certificate_of_the_client_authority_is_known() {
    let scene = Scene::new(SERVER, SERVER, Some(AUTHORITY));
    assert_eq!(scene.handshake(client(Some(CLIENT))).await.unwrap(), (1, true));
    assert_eq!(scene.handshake(client(None)).await.unwrap(), (1, false), "a probe has none");
    scene.handshake(client(Some(OTHER))).await.unwrap_err();
    let scene = Scene::new(SERVER, SERVER, None);
    let known = scene.handshake(client(Some(CLIENT))).await.unwrap();
    assert_eq!(known, (1, false), "none is requested");
}

#[tokio::test]
async fn another_protocol_is_refused_in_the_handshake() {
    let scene = Scene::new(SERVER, SERVER, None);
    let with = |protocols: &[&str]| {
        let mut client = client(None);
        client.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        client
    };
    scene.handshake(with(&["h2"])).await.unwrap_err();
    scene.handshake(with(&["h2", "http/1.1"])).await.unwrap();
    let (mut theirs, ours): (DuplexStream, _) = duplex(64 << 10);
    theirs.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    soon("a refusal", scene.tls.accept(ours)).await.unwrap_err();
}

/// A server with TLS whose limits are short: its address. It ends with the returned task.
fn serve(
    tls: &Tls,
    connections: usize,
    head_within: Duration,
) -> (SocketAddr, tokio::task::JoinSet<()>) {
    let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.address().unwrap();
    let limits = Limits { socket: "test", connections, head_within, lifetime: HANG, bodies: false };
    let routes = Router::new().route("/healthz", get(|| async { "ok\n" }));
    let mut serving = tokio::task::JoinSet::new();
    serving.spawn(server::serve(listener, routes, Some(tls.clone()), limits));
    (address, serving)
}

/// The answer of a server with TLS.
async fn answer(address: SocketAddr) -> io::Result<String> {
    let mut stream = connect(client(None), TcpStream::connect(address).await?).await?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Sends these bytes, and waits until the server closes the connection.
async fn closed_after(address: SocketAddr, bytes: &[u8]) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    // An alert, a reset or the end.
    drop(soon("the end of the connection", stream.read_to_end(&mut Vec::new())).await);
}

#[tokio::test]
async fn a_client_that_stalls_in_the_handshake_is_closed_in_time() {
    let scene = Scene::new(SERVER, SERVER, None);
    let (address, _serving) = serve(&scene.tls, 8, Duration::from_millis(200));
    closed_after(address, b"").await;
    // The head of a record with a ClientHello of 512 bytes that does not come.
    closed_after(address, b"\x16\x03\x01\x02\x00\x01\x00").await;
    // After a whole handshake the head of a request has the same limit.
    let stream = TcpStream::connect(address).await.unwrap();
    let mut stream = connect(client(None), stream).await.unwrap();
    drop(soon("the end after the handshake", stream.read_to_end(&mut Vec::new())).await);
    let answer = answer(address).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok\n"), "{answer}");
}

#[tokio::test]
async fn stalled_handshakes_count_as_connections_and_do_not_keep_others_out() {
    let scene = Scene::new(SERVER, SERVER, None);
    let (address, _serving) = serve(&scene.tls, 4, HANG);
    let mut stalled = Vec::new();
    for _ in 0..12 {
        stalled.push(TcpStream::connect(address).await.unwrap());
    }
    let answer = soon("an answer", answer(address)).await.unwrap();
    assert!(answer.ends_with("ok\n"), "{answer}");
    // At most four are open: the first eight were closed for the others.
    for stream in &mut stalled[..8] {
        drop(soon("an eviction", stream.read_to_end(&mut Vec::new())).await);
    }
}
