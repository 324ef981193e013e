//! Who may read `/metrics`, by the decisions of the API server.

use crate::api::PODS;
use crate::cluster::Cluster;
use crate::daemon::Daemon;
use crate::objects::pod;
use crate::rights::OF_POD;
use crate::{SOON, pki, say, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// The rights of the daemon, and the role of those who may read.
pub(crate) const AUTHORIZE: &str =
    include_str!("../../packaging/kustomize/components/metrics-authorize/rbac.yaml");
/// Where the daemon serves.
pub(crate) const ADDRESS: &str = "127.0.0.1:9477";
/// A service account for each outcome.
const READER: &str = "reads-metrics";
const STRANGER: &str = "reads-nothing";
const ACCOUNTS: &str = "/api/v1/namespaces/default/serviceaccounts";
/// How long the daemon waits for the API server (`telemetry/reviews.rs`), with the time to answer.
const WITHIN: Duration = Duration::from_secs(8);

/// Between two requests with one token: the daemon asks twice a second for each peer.
const PAUSE: Duration = Duration::from_millis(600);

/// The status code of a page for a client with this token.
pub(crate) fn code(page: &str, token: Option<&str>) -> Option<u16> {
    let mut stream = TcpStream::connect(ADDRESS).ok()?;
    stream.set_read_timeout(Some(SOON)).unwrap();
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    let head = format!("Host: {ADDRESS}\r\n{}", token.unwrap_or_default());
    stream.write_all(format!("GET {page} HTTP/1.1\r\n{head}\r\n").as_bytes()).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.split(' ').nth(1)?.parse().ok()
}

/// Waits until a client with this token gets this code.
fn until(what: &str, token: &str, wanted: u16) -> Duration {
    let began = Instant::now();
    let mut asked: Option<Instant> = None;
    wait_for(what, SOON, || {
        if asked.is_some_and(|asked| asked.elapsed() < PAUSE) {
            return None;
        }
        asked = Some(Instant::now());
        let found = code("/metrics", Some(token));
        (found == Some(wanted)).then(|| began.elapsed())
    })
}

/// The two numbers of a signature with P-256, 32 bytes each, from their DER form
/// (RFC 7518, 3.4): `30 LENGTH 02 LENGTH NUMBER 02 LENGTH NUMBER`.
fn plain(der: &[u8]) -> Vec<u8> {
    let (mut rest, mut numbers) = (&der[2..], Vec::new());
    while let [2, length, more @ ..] = rest {
        let (number, after) = more.split_at(usize::from(*length));
        let digits = &number[number.len().saturating_sub(32)..];
        numbers.extend(std::iter::repeat_n(0, 32 - digits.len()).chain(digits.iter().copied()));
        rest = after;
    }
    numbers
}

impl Cluster {
    fn token_of(&self, account: &str, more: &[&str]) -> String {
        let token = self.shown("admin", &[&["create", "token", account][..], more].concat());
        token.trim().to_owned()
    }

    /// The token of a pod of the reader that was deleted.
    fn token_of_former_pod(&mut self) -> String {
        let mut pod = pod("former-scraper", &[], "exec sleep 1000000");
        pod["spec"]["serviceAccountName"] = READER.into();
        self.api.create(PODS, &pod);
        self.running("former-scraper");
        let bound = ["--bound-object-kind=Pod", "--bound-object-name=former-scraper"];
        let token = self.token_of(READER, &bound);
        self.end("former-scraper");
        token
    }

    /// The same token as the API server's, but it has expired: signed with the key of service
    /// accounts, because the API server issues none for less than ten minutes.
    fn expired(&self, token: &str) -> String {
        let parts: Vec<&str> = token.split('.').collect();
        let payload = URL_SAFE_NO_PAD.decode(parts[1]).unwrap();
        let mut payload: Value = serde_json::from_slice(&payload).unwrap();
        for key in ["exp", "iat", "nbf"] {
            payload[key] = json!(payload[key].as_u64().unwrap() - 7200);
        }
        let text = format!("{}.{}", parts[0], URL_SAFE_NO_PAD.encode(payload.to_string()));
        let (file, key) = (self.dir.join("to-be-signed"), self.dir.join("sa.key"));
        fs::write(&file, &text).unwrap();
        let signed = Command::new("openssl")
            .args(["dgst", "-sha256", "-sign"])
            .args([key, file])
            .output()
            .unwrap();
        assert!(signed.status.success(), "{}", String::from_utf8_lossy(&signed.stderr));
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(plain(&signed.stdout)))
    }
}

impl Daemon {
    /// What `doctor` and `status` have about the API server's decisions.
    fn undecided(&self) -> (Vec<String>, String) {
        let doctor = self.verb(&["doctor", "-o", "json"]);
        let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let about = findings.filter(|it| it["code"] == "metrics-undecided");
        let found = about.map(|it| it["found"].as_str().unwrap().to_owned()).collect();
        let status = String::from_utf8(self.verb(&["status"]).stdout).unwrap();
        let line = status.lines().find(|line| line.contains("who may read /metrics"));
        (found, line.unwrap_or_default().to_owned())
    }
}

pub(crate) fn decided(cluster: &mut Cluster) {
    let account_pod = cluster.create_account();
    for account in [READER, STRANGER] {
        cluster.api.delete(&format!("{ACCOUNTS}/{account}"), None);
        cluster.api.create(
            ACCOUNTS,
            &json!({
                "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account},
            }),
        );
    }
    let (reader, stranger) = (cluster.token_of(READER, &[]), cluster.token_of(STRANGER, &[]));
    let credentials = pki::kubeconfig(&cluster.dir, OF_POD);
    let mut daemon = Daemon::launch(cluster, Path::new("/"), &credentials, "");
    daemon.wait_until_registered(cluster);
    let metrics = format!("listen = \"{ADDRESS}\"\nauthorize = \"kubernetes\"");
    daemon.configure("listen = \"off\"", &metrics);
    daemon.kill_and_start(|| ());

    // Without the rights of the component no client is let in, and the daemon names the right.
    until("the daemon may not ask", &reader, 503);
    let (found, problem) = daemon.undecided();
    say(format_args!("without the rights: doctor: {found:?}; status: {problem}"));
    let names_the_right = |text: &String| text.contains("tokenreviews");
    assert!(found.len() == 1 && found.iter().all(names_the_right), "{found:?}");
    assert!(problem.contains("tokenreviews"), "{problem}");

    // With them the API server decides.
    cluster.api.apply(AUTHORIZE);
    let asked = until("the reader has no role", &reader, 403);
    assert_eq!(code("/metrics", Some(&stranger)), Some(403));
    let bind = format!("--serviceaccount=default:{READER}");
    let role = "--clusterrole=holdfast-metrics-reader";
    cluster.shown("admin", &["create", "clusterrolebinding", READER, role, &bind]);
    cluster.shown(
        "admin",
        &["label", "clusterrolebinding", READER, "app.kubernetes.io/name=holdfast"],
    );
    let permitted = until("the reader has the role", &reader, 200);
    assert_eq!(daemon.undecided(), (Vec::new(), String::new()), "nothing is wrong any longer");
    let of_pod = cluster.token_of_former_pod();
    let expired = cluster.expired(&reader);
    for (what, token, wanted) in [
        ("no token", None, 401),
        ("not a token", Some("nonsense"), 401),
        ("an expired token", Some(&*expired), 401),
        ("the token of a pod that was deleted", Some(&*of_pod), 401),
        ("no right", Some(&*stranger), 403),
        ("permitted", Some(&*reader), 200),
    ] {
        assert_eq!(code("/metrics", token), Some(wanted), "{what}");
        assert_eq!(code("/", token), Some(wanted), "{what}: the page");
    }

    // Without an answer of the API server only a kept decision holds, and probes need none.
    let unknown = cluster.token_of(READER, &["--duration=20m"]);
    cluster.plane.api_server.signal(Signal::SIGSTOP);
    let began = Instant::now();
    assert_eq!(code("/metrics", Some(&unknown)), Some(503), "no answer");
    let took = began.elapsed();
    assert!(took < WITHIN, "{took:?}");
    assert_eq!(code("/metrics", Some(&reader)), Some(200), "decided less than two minutes ago");
    assert_eq!([code("/healthz", None), code("/readyz", None)], [Some(200); 2]);
    let (found, problem) = daemon.undecided();
    assert!(found.len() == 1 && !problem.is_empty(), "{found:?} {problem}");
    cluster.plane.api_server.signal(Signal::SIGCONT);
    let back = until("the API server decides again", &unknown, 200);
    say(format_args!(
        "the API server decides who reads /metrics: 403 {asked:.1?} after the daemon got its right, 200 {permitted:.1?} \
         after the client got its role; without an answer 503 after {took:.1?}, and 200 {back:.1?} after the server goes \
         on; meanwhile doctor: {found:?}, status: {problem}"
    ));
    drop(daemon);
    cluster.api.delete(&account_pod, Some(0));
}
