//! The limits of the sockets (I14). Under any load on telemetry's address and on the sockets, the
//! kubelet and the probes get answers, and the daemon's memory stays small.
//!
//! `HOLDFAST_CONNECTIONS` is the number of connections of each attack, `HOLDFAST_BIN` another
//! binary, such as the release build. With `--nocapture` the test prints its figures. Times are
//! printed but not asserted, since the machine may be busy.

mod attack;
mod sockets;

use crate::common::{
    Daemon, HANG, Node, allocate, dial, http_get, name, offered, percentiles, resource, run,
    telemetry, until,
};
use attack::{Attack, Kind, is_closed, is_hung_up};
use holdfast::domain::ResourceName;
use holdfast::domain::limits::{BATCH, ConnectionLimits};
use holdfast::lab::sim::kubelet::Kubelet;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Instant;

/// The devices: many, so that few of the Allocates are for the same one.
const DEVICES: usize = 500;
/// The most that the daemon's memory may grow under an attack, in KiB.
const GROWTH_MAX: u64 = 16 << 10;
/// The daemon's own open descriptors, without connections: less than forty when idle, and some more
/// while it scans.
const OWN_DESCRIPTORS: usize = 80;

/// The number of Allocates in one measurement.
fn calls() -> usize {
    if std::env::var_os("HOLDFAST_CONNECTIONS").is_some() { 2000 } else { 100 }
}

/// The number of connections of an attack, from the environment; raises this process's limit of
/// open files if necessary.
fn connections(usual: usize) -> usize {
    let wanted = std::env::var("HOLDFAST_CONNECTIONS").map_or(usual, |text| text.parse().unwrap());
    let (limit, needed) = (getrlimit(Resource::Nofile), Some(wanted as u64 + 500));
    if limit.current < needed {
        let raised = Rlimit { current: needed, maximum: limit.maximum.max(needed) };
        setrlimit(Resource::Nofile, raised).expect("only root may have as many files open");
    }
    wanted
}

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

/// A daemon and its kubelet.
struct Stage {
    node: Node,
    kubelet: Kubelet,
    daemon: Daemon,
    address: SocketAddr,
    limits: ConnectionLimits,
}

impl Stage {
    /// `descriptors` is the daemon's limit of open files.
    async fn new(descriptors: u64) -> Stage {
        let node = Node::with(&[("gpu", DEVICES)]);
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
        let kubelet = node.start_kubelet().await;
        let daemon = Daemon::spawn(&mut limited(&node.command(&["run"]), descriptors));
        offered(&kubelet, &gpu(), DEVICES).await;
        let address = telemetry(&daemon).await;
        Stage { node, kubelet, daemon, address, limits: ConnectionLimits::of(Some(descriptors)) }
    }

    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.daemon.pid())).unwrap().count()
    }

    /// The resident memory, in KiB.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// The latencies of Allocates and of probes, as text.
    async fn measured(&self) -> String {
        let mut plugin = dial(&self.kubelet, &self.node, &gpu()).await;
        let (mut calls, mut probes) = (Vec::new(), Vec::new());
        for call in 0..self::calls() {
            let began = Instant::now();
            allocate(&mut plugin, &[&format!("dev:gpu{}", call % DEVICES)]).await.unwrap();
            calls.push(began.elapsed());
            if call % 20 == 0 {
                let began = Instant::now();
                let address = self.address;
                let answer = tokio::task::spawn_blocking(move || http_get(address, "/healthz"))
                    .await
                    .unwrap();
                assert_eq!(answer, (200, "ok\n".to_owned()));
                probes.push(began.elapsed());
            }
        }
        format!("Allocate {}; /healthz {}", percentiles(calls), percentiles(probes))
    }

    /// Whether a series is above 0. A page may be refused at first.
    async fn counted(&self, series: &str) -> bool {
        let page = until(
            "the metrics",
            || http_get(self.address, "/metrics"),
            |(status, _)| *status == 200,
        )
        .await
        .1;
        page.lines().any(|line| line.strip_prefix(series).is_some_and(|count| count != " 0"))
    }

    /// Checks that the daemon has only its own descriptors open, and those that telemetry's limit
    /// allows.
    fn check_descriptors(&self) {
        let (open, most) = (self.descriptors(), OWN_DESCRIPTORS + self.limits.telemetry + BATCH);
        assert!(
            open <= most,
            "{open} descriptors; the limit of telemetry is {}",
            self.limits.telemetry
        );
    }
}

/// The same command with a limit of open files.
fn limited(command: &Command, descriptors: u64) -> Command {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n \"$0\" && exec \"$@\"", &descriptors.to_string()]);
    limited.arg(command.get_program()).args(command.get_args());
    for (variable, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(variable, value),
            None => limited.env_remove(variable),
        };
    }
    limited
}

/// Each attack runs on a separate daemon: first its effect on the daemon, then the kubelet's
/// latency during the attack.
#[test]
fn attacks_on_telemetry_affect_neither_the_kubelet_nor_probes_nor_memory() {
    let connections = connections(600);
    for kind in [
        Kind::Idle,
        Kind::Halves,
        Kind::LargeHeads,
        Kind::Http2,
        Kind::Unread,
        Kind::Flood,
        Kind::Requests,
    ] {
        run(async {
            let stage = Stage::new(2048).await;
            assert_eq!(http_get(stage.address, "/metrics").0, 200);
            let before = stage.memory();
            let attack = Attack::begin(kind, stage.address, connections, 2);
            until("the connections", || attack.made(), |made| *made >= connections).await;
            let memory = stage.memory();
            println!(
                "{kind:?}, {connections} connections: {before} KiB before, {memory} KiB under it, {} descriptors",
                stage.descriptors()
            );
            assert!(memory <= before + GROWTH_MAX, "{kind:?}: from {before} to {memory} KiB");
            stage.check_descriptors();
            attack.end();

            println!("  without load: {}", stage.measured().await);
            let attack = Attack::begin(kind, stage.address, connections, 2);
            println!("  under it: {}", stage.measured().await);
            stage.check_descriptors();
            stage.kubelet.restart().await.unwrap();
            stage.kubelet.wait_for(|view| view.first_list(&gpu()).is_some(), HANG).await.unwrap();
            let back = stage.kubelet.view(|view| view.first_list(&gpu())).unwrap();
            println!("  a kubelet that starts under it has its list after {back:?}");
            attack.end();
            if let Some(series) = kind.counted() {
                assert!(stage.counted(series).await, "{kind:?}");
            }
        });
    }
}

/// Fewer descriptors than the sockets' usual limits: each socket has its share, and the daemon has
/// the rest.
#[test]
fn with_few_descriptors_everything_but_telemetry_works() {
    run(async {
        let stage = Stage::new(256).await;
        let held = Attack::begin(Kind::Halves, stage.address, connections(600), 2).end();
        stage.check_descriptors();
        stage.node.create_device("gpu", DEVICES);
        offered(&stage.kubelet, &gpu(), DEVICES + 1).await;
        stage.kubelet.restart().await.unwrap();
        offered(&stage.kubelet, &gpu(), DEVICES + 1).await;
        let mut plugin = dial(&stage.kubelet, &stage.node, &gpu()).await;
        allocate(&mut plugin, &["dev:gpu0"]).await.unwrap();
        let status = stage.node.output(&["status"]);
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
        assert_eq!(http_get(stage.address, "/healthz").0, 200);
        let log = stage.daemon.log();
        assert!(!log.iter().any(|line| line.contains("os error 24")), "{log:#?}");
        drop(held);
    });
}

/// Each of these connections would stay open for ever without a limit.
#[test]
fn idle_and_unread_connections_are_closed() {
    run(async {
        let stage = Stage::new(2048).await;
        let sent: [(&str, &[u8]); 6] = [
            ("nothing", b""),
            ("half a head", b"GET / HTTP/1.1\r\nho"),
            ("a whole request, and it is kept open", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"),
            ("the begin of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            (
                "a body that does not come",
                b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n",
            ),
            (
                "a hundred requests, whose answers are not read",
                &b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n".repeat(100),
            ),
        ];
        let closed = sent.map(|(what, bytes)| {
            let mut stream = TcpStream::connect(stage.address).unwrap();
            stream.write_all(bytes).unwrap();
            let reads = !what.ends_with("not read");
            tokio::task::spawn_blocking(move || {
                (what, if reads { is_closed(&mut stream) } else { is_hung_up(&stream) })
            })
        });
        for closed in closed {
            let (what, is_closed) = closed.await.unwrap();
            assert!(is_closed, "{what}");
        }
    });
}

/// The answer to these bytes, until its end.
fn answered(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(HANG)).unwrap();
    // The request may be refused before all of it is sent.
    let _refused = stream.write_all(bytes);
    let mut answer = Vec::new();
    // A reset is an end too.
    let _reset = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn an_oversized_request_is_refused_with_an_http_status() {
    run(async {
        let stage = Stage::new(2048).await;
        let head = |rest: &str| format!("GET /healthz HTTP/1.1\r\nhost: x\r\n{rest}\r\n");
        let many: String = (0..65).map(|number| format!("x-{number}: y\r\n")).collect();
        for (status, request) in [
            ("200", head("connection: close\r\n")),
            ("200", head(&format!("x: {}\r\nconnection: close\r\n", "y".repeat(12_000)))),
            ("431", head(&format!("x: {}\r\n", "y".repeat(20_000)))),
            ("431", head(&many)),
            ("413", head("content-length: 1\r\n") + "y"),
            ("413", head("transfer-encoding: chunked\r\n") + "1\r\ny\r\n0\r\n\r\n"),
            ("404", head("").replace("/healthz", "/healthz2")),
            ("405", head("").replace("GET", "DELETE")),
            ("400", "nonsense\r\n\r\n".to_owned()),
        ] {
            let answer = answered(stage.address, request.as_bytes());
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{status}: {answer}");
        }
        // HTTP/2 would answer with a frame of settings: length, type 4, flags, stream 0.
        let answer =
            answered(stage.address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 "), "{answer:?}");
        let answer = answered(stage.address, head("").repeat(32).as_bytes());
        assert_eq!(answer.matches("HTTP/1.1 200").count(), 32, "requests of one connection");
        assert!(
            answer.trim_end().ends_with("ok") && answer.contains("connection: close"),
            "{answer}"
        );
    });
}

/// Clients that read nothing may have half of the pages; then new pages are refused, and probes are
/// not.
#[test]
fn a_page_without_free_capacity_is_refused_and_may_be_requested_again() {
    run(async {
        let stage = Stage::new(2048).await;
        let unread = Attack::begin(Kind::Unread, stage.address, 20, 1).end();
        let refused = until(
            "a refusal",
            || answered(stage.address, b"GET /metrics HTTP/1.0\r\n\r\n"),
            |answer| answer.contains(" 503 "),
        )
        .await;
        assert!(refused.contains("retry-after: 1\r\n"), "{refused}");
        assert_eq!(
            (http_get(stage.address, "/healthz").0, http_get(stage.address, "/readyz").0),
            (200, 200)
        );
        drop(unread);
        until("a page", || http_get(stage.address, "/metrics").0, |status| *status == 200).await;
    });
}

#[test]
fn with_a_token_only_its_owner_gets_pages_and_every_client_gets_probes() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let token = node.path("etc/token");
        let file = format!("token_file = \"{}\"", token.display());
        node.write_config(&format!(
            "[telemetry]\nlisten = \"127.0.0.1:0\"\n{file}\n{}",
            resource("gpu")
        ));
        let daemon = node.start_daemon();
        let address = telemetry(&daemon).await;
        daemon.logged("the token file cannot be read").await;
        daemon.logged("INFO ready").await;
        let ask = |path: &str, header: &str| {
            answered(address, format!("GET {path} HTTP/1.0\r\n{header}\r\n").as_bytes())
        };
        let status = |path: &str, header: &str| {
            ask(path, header).split(' ').nth(1).unwrap_or_default().to_owned()
        };
        assert_eq!(
            status("/metrics", "authorization: Bearer \r\n"),
            "503",
            "it cannot be known who may"
        );
        fs::write(&token, "s3cret\n").unwrap();
        for page in ["/metrics", "/", "/?refresh=5"] {
            assert_eq!(status(page, "authorization: Bearer s3cret\r\n"), "200", "{page}");
            for header in ["", "authorization: Bearer s3cre\r\n", "authorization: Basic s3cret\r\n"]
            {
                let answer = ask(page, header);
                assert!(
                    answer.starts_with("HTTP/1.0 401 ")
                        && answer.contains("www-authenticate: Bearer\r\n"),
                    "{answer}"
                );
            }
        }
        assert_eq!((status("/healthz", ""), status("/readyz", "")), ("200".into(), "200".into()));
    });
}
