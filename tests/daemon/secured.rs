//! `/metrics` with TLS: client certificates, and tokens that the API server decides about.

use crate::common::{Daemon, Node, pause, run, soon, telemetry};
use holdfast::lab::sim::api_server::{ApiServer, User};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const AUTHORITY: &str = include_str!("../../src/cluster/testing/authority.pem");
/// A certificate for 127.0.0.1, and its key.
const SERVER: &str = include_str!("../../src/cluster/testing/server.pem");
/// A client certificate of the authority, and its key.
const CLIENT: &str = include_str!("../../src/cluster/testing/client.pem");
/// One of another authority, with its key.
const OTHER: &str = include_str!("../../src/cluster/testing/other.pem");

/// A client that trusts the authority.
fn client(identity: Option<&str>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(AUTHORITY.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots);
    let Some(identity) = identity else { return builder.with_no_client_auth() };
    let chain = CertificateDer::pem_slice_iter(identity.as_bytes()).map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_slice(identity.as_bytes()).unwrap();
    builder.with_client_auth_cert(chain, key).unwrap()
}

/// The answer to a GET, and the number of the server's certificates.
async fn ask(
    address: SocketAddr,
    client: ClientConfig,
    path: &str,
    token: Option<&str>,
) -> io::Result<(String, usize)> {
    let connector = TlsConnector::from(Arc::new(client));
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let mut stream = connector.connect(name, TcpStream::connect(address).await?).await?;
    let chain = stream.get_ref().1.peer_certificates().unwrap().len();
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n"));
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    stream.write_all(format!("{head}{}\r\n", token.unwrap_or_default()).as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok((answer, chain))
}

/// The status code of the answer to a GET.
async fn status(address: SocketAddr, path: &str, token: Option<&str>) -> String {
    let (answer, _) = soon(path, ask(address, client(None), path, token)).await.unwrap();
    answer.split(' ').nth(1).unwrap_or_default().to_owned()
}

/// A daemon with the certificate, and more keys of `[telemetry]` and of the configuration.
async fn start(node: &Node, telemetry_keys: &str, rest: &str) -> (Daemon, SocketAddr) {
    for (file, text) in [("tls.crt", SERVER), ("tls.key", SERVER), ("ca.crt", AUTHORITY)] {
        fs::write(node.path("etc").join(file), text).unwrap();
    }
    let etc = node.path("etc");
    let etc = etc.display();
    node.write_config(&format!(
        "[telemetry]\nlisten = \"127.0.0.1:0\"\ntls_cert = \"{etc}/tls.crt\"\ntls_key = \"{etc}/tls.key\"\n\
         {telemetry_keys}\n{rest}"
    ));
    let daemon = node.start_daemon();
    let address = telemetry(&daemon).await;
    daemon.logged("INFO ready").await;
    (daemon, address)
}

/// Replaces a file at once, as the kubelet does for a Secret.
fn replace(node: &Node, file: &str, text: &str) {
    let fresh = node.path("etc/fresh");
    fs::write(&fresh, text).unwrap();
    fs::rename(fresh, node.path("etc").join(file)).unwrap();
}

/// The problems of readers in `status`.
fn problems(node: &Node) -> String {
    node.json(&["status"])["not_readable"].to_string()
}

#[test]
fn every_path_has_tls_and_a_renewed_certificate_needs_no_restart() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let (daemon, address) = start(&node, "", "").await;
        for path in ["/metrics", "/", "/healthz", "/readyz"] {
            assert_eq!(status(address, path, None).await, "200", "{path}");
        }
        // Without TLS there is no answer.
        let mut plain = TcpStream::connect(address).await.unwrap();
        plain.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        drop(soon("the end", plain.read_to_end(&mut answer)).await);
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");

        replace(&node, "tls.key", OTHER);
        let wrong = async {
            while !problems(&node).contains("the former certificate stays in use") {
                assert_eq!(status(address, "/healthz", None).await, "200");
                pause().await;
            }
        };
        soon("a problem in `status`", wrong).await;
        daemon.logged("not usable with the key").await;
        let text = node.output(&["status"]);
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        assert!(text.contains("telemetry.tls_cert"), "the remedy: {text}");

        replace(&node, "tls.key", SERVER);
        replace(&node, "tls.crt", &format!("{SERVER}{AUTHORITY}"));
        let renewed = async {
            while ask(address, client(None), "/healthz", None).await.unwrap().1 != 2 {
                pause().await;
            }
        };
        soon("the renewed certificate", renewed).await;
        assert_eq!(problems(&node), "null");
    });
}

#[test]
fn with_client_certificates_only_their_owners_get_pages() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let authority = format!("tls_client_ca = \"{}\"", node.path("etc/ca.crt").display());
        let (_daemon, address) = start(&node, &authority, "").await;
        for page in ["/metrics", "/", "/?refresh=5"] {
            let (answer, _) = ask(address, client(Some(CLIENT)), page, None).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{page}: {answer}");
            assert_eq!(status(address, page, None).await, "403", "{page}");
            let other = ask(address, client(Some(OTHER)), page, None).await;
            assert!(other.is_err(), "{page}: {other:?}");
        }
        for probe in ["/healthz", "/readyz"] {
            assert_eq!(status(address, probe, None).await, "200", "{probe}");
        }
    });
}

#[test]
fn the_api_server_decides_who_gets_pages_and_without_it_only_kept_answers_count() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let server = ApiServer::start("gpu-7", &[]).await.unwrap();
        server.add_user(Some("own"), User::Pod(None));
        server.add_user(Some("scraper"), User::Scraper);
        server.add_user(Some("scraper2"), User::Scraper);
        server.add_user(Some("reader"), User::Reader);
        let kubeconfig = server.kubeconfig(&node.path("etc"), "own").unwrap();
        let cluster = format!("[cluster]\ncredentials = \"{}\"\n", kubeconfig.display());
        let (daemon, address) = start(&node, "authorize = \"kubernetes\"", &cluster).await;

        for page in ["/metrics", "/", "/?refresh=5"] {
            for (token, code) in [
                (None, "401"),
                (Some("invented"), "401"),
                (Some("reader"), "403"),
                (Some("scraper"), "200"),
            ] {
                assert_eq!(status(address, page, token).await, code, "{page} {token:?}");
            }
        }
        assert_eq!(status(address, "/healthz", None).await, "200");
        let asked = |what: &str| {
            let requests = server.requests();
            requests.iter().filter(|request| request.ends_with(what)).count()
        };
        // Each of the three tokens once, and the user of each of the two that are known.
        assert_eq!((asked("/tokenreviews"), asked("/subjectaccessreviews")), (3, 2));

        // The right to ask is removed: a kept answer counts, and no other token is accepted.
        server.add_user(Some("own"), User::Reader);
        assert_eq!(status(address, "/metrics", Some("scraper")).await, "200");
        assert_eq!(status(address, "/metrics", Some("scraper2")).await, "503");
        daemon.logged("grant create of tokenreviews and subjectaccessreviews").await;
        assert!(problems(&node).contains("the API server does not decide"), "{}", problems(&node));
        // The same without the API server.
        drop(server);
        assert_eq!(status(address, "/metrics", Some("scraper")).await, "200");
        assert_eq!(status(address, "/metrics", Some("scraper2")).await, "503");
        assert_eq!(status(address, "/metrics", None).await, "401");
        assert_eq!(status(address, "/readyz", None).await, "200");
    });
}
