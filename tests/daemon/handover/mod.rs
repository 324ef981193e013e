//! Two instances on one node: the ledger and the kubelet go from one to the other, and back when
//! the other one dies.
//!
//! `HOLDFAST_ROUNDS` is the number of handovers of each kind that are made under load (3 to 12 in
//! every run). `HOLDFAST_SEED` repeats a run.

mod fd_store;
mod frames;
mod load;

use crate::common::{Daemon, HANG, Node, name, notified, offered, resource, run, soon, until};
use holdfast::domain::ResourceName;
use holdfast::handover::{Message, Peer, socket_path};
use holdfast::lab::sim::kubelet::{
    Event, EventKind, Hook, HookTable, Kubelet, KubeletConfig, PodPhase, PodSpec, Verdict,
};
use holdfast::store;
use nix::sys::signal::Signal;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;
use tokio::net::{UnixDatagram, UnixStream};

const DEVICES: usize = 16;
/// Registers that the kubelet refuses on end.
const REFUSALS: usize = 3;

fn gpu() -> ResourceName {
    name("example.com/gpu")
}

fn config() -> String {
    format!("[telemetry]\nlisten = \"off\"\n{}", resource("gpu"))
}

fn take_over(node: &Node) -> Daemon {
    Daemon::spawn(&mut node.command(&["run", "--take-over"]))
}

/// The moments at which the kubelet had no device, each until its next list.
fn dips(kubelet: &Kubelet, since: Duration) -> Vec<Duration> {
    kubelet.view(|view| {
        let events: Vec<&Event> = view.events().iter().filter(|event| event.at >= since).collect();
        let cut = |event: &&Event| matches!(event.kind, EventKind::Disconnected { .. });
        let back =
            |event: &&&Event| matches!(event.kind, EventKind::Listed { healthy: DEVICES, .. });
        let mut dips = Vec::new();
        let mut rest = events.as_slice();
        while let Some(begin) = rest.iter().position(&cut) {
            let end = rest[begin..]
                .iter()
                .find(back)
                .unwrap_or_else(|| panic!("never back: {:?}", rest.last()));
            dips.push(end.at - rest[begin].at);
            let next = rest.iter().position(|event| event.at > end.at).unwrap_or(rest.len());
            rest = &rest[next..];
        }
        dips
    })
}

/// A node with a kubelet and a daemon that serves it.
async fn served() -> (Node, Kubelet, Daemon) {
    served_with(&HookTable::default()).await
}

/// The same, with hooks for the kubelet.
async fn served_with(hooks: &HookTable) -> (Node, Kubelet, Daemon) {
    let node = Node::with(&[("gpu", DEVICES)]);
    node.write_config(&config());
    let kubelet = Kubelet::start(KubeletConfig { hooks: hooks.clone(), ..node.kubelet_config() })
        .await
        .unwrap();
    let daemon = node.start_daemon();
    offered(&kubelet, &gpu(), DEVICES).await;
    daemon.logged("ready").await;
    (node, kubelet, daemon)
}

/// The number of the registration that the kubelet took last.
fn newest_client(kubelet: &Kubelet) -> u64 {
    let event = kubelet
        .view(|view| view.last(|kind| matches!(kind, EventKind::Registered { .. })).cloned());
    match event.map(|event| event.kind) {
        Some(EventKind::Registered { client, .. }) => client,
        other => panic!("no registration: {other:?}"),
    }
}

/// No process would answer for it, so its connections are not held open.
#[test]
fn a_resource_that_the_new_instance_lacks_is_removed_from_the_kubelet() {
    run(async {
        let (node, kubelet, mut old) = served().await;
        node.write_config("[telemetry]\nlisten = \"off\"\n");
        let new = take_over(&node);
        new.logged("took over from another instance").await;
        old.signal(Signal::SIGTERM);
        assert_eq!(old.ended().await.code(), Some(0));
        kubelet.wait_for(|view| view.capacity(&gpu()).allocatable == 0, HANG).await.unwrap();
    });
}

/// The kubelet connects to the second instance when the third one waits for it already.
#[test]
fn connections_made_during_a_handover_are_passed_on_too() {
    run(async {
        let hooks = HookTable::default();
        let (node, kubelet, _first) = served_with(&hooks).await;
        // The settling one is its last for a while: the next Register is another instance's.
        let is_register = |event: &&Event| matches!(event.kind, EventKind::Registered { .. });
        kubelet
            .wait_for(|view| view.events().iter().filter(is_register).count() > 1, HANG)
            .await
            .unwrap();
        kubelet.wait_for(|view| view.is_settled(), HANG).await.unwrap();

        let began = kubelet.now();
        let mut to_connect = hooks.gate(Hook::BeforeRegisterClient);
        let mut second = take_over(&node);
        soon("a Register of the second one", to_connect.reached()).await;
        let third = take_over(&node);
        third.logged("requesting a handover from another instance").await;
        to_connect.open(Verdict::Pass);
        third.logged("ledger recovered").await;
        second.kill();
        third.logged("INFO ready").await;
        offered(&kubelet, &gpu(), DEVICES).await;
        assert_eq!(dips(&kubelet, began), []);
    });
}

/// What the kubelet refuses from NEW it still has from OLD, which leaves only when NEW is known.
#[test]
fn a_new_instance_that_the_kubelet_refuses_at_first_loses_no_device() {
    run(async {
        let hooks = HookTable::default();
        let (node, kubelet, mut old) = served_with(&hooks).await;
        kubelet.wait_for(|view| view.is_settled(), HANG).await.unwrap();

        let began = kubelet.now();
        for _ in 0..REFUSALS {
            hooks.gate(Hook::AfterDial).open(Verdict::Fail);
        }
        let new = take_over(&node);
        new.logged("took over from another instance").await;
        let refused = |event: &&Event| {
            event.at >= began && matches!(event.kind, EventKind::RegisterFailed { .. })
        };
        assert!(
            kubelet.view(|view| view.events().iter().filter(refused).count()) >= REFUSALS,
            "refused"
        );
        old.signal(Signal::SIGTERM);
        assert_eq!(old.ended().await.code(), Some(0));
        offered(&kubelet, &gpu(), DEVICES).await;
        assert_eq!(dips(&kubelet, began), []);
    });
}

#[test]
fn an_instance_on_standby_serves_again_when_the_new_one_dies() {
    run(async {
        let (node, kubelet, old) = served().await;
        let mut new = take_over(&node);
        old.logged("on standby").await;
        let client = newest_client(&kubelet);
        new.kill();
        // Until the kubelet has seen it end, the devices that it counts are those of the dead
        // instance.
        let ended = |kind: &EventKind| matches!(kind, EventKind::StreamEnded { client: of, .. } if *of == client);
        kubelet.wait_for(|view| view.last(ended).is_some(), HANG).await.unwrap();
        old.logged("serving again").await;
        offered(&kubelet, &gpu(), DEVICES).await;
        old.logged_often("registered with the kubelet", 2).await;
        let outcome = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "pod").app("main", &gpu(), 1)),
        )
        .await;
        assert_eq!(outcome.phase, PodPhase::Running);
        until("its grant", || node.grants().len(), |grants| *grants == 1).await;
        // And it can hand over once more.
        let third = take_over(&node);
        third.logged("took over from another instance").await;
    });
}

#[test]
fn a_signal_ends_an_instance_that_waits_for_the_ledger() {
    run(async {
        let (node, _kubelet, mut old) = served().await;
        // This process takes over, locks the ledger and leaves.
        let stream = UnixStream::connect(socket_path(&node.path("run"))).await.unwrap();
        let mut peer = Peer::new(stream);
        soon("an offer", peer.recv()).await.unwrap();
        peer.send(&Message::Take { version: "test".into() }, &[]).await.unwrap();
        let given = soon("the ledger", peer.recv()).await.unwrap();
        assert!(matches!(given, Message::Yours { .. }), "{given:?}");
        let lock = std::fs::File::open(node.state().join("lock")).unwrap();
        lock.try_lock().unwrap();
        drop(peer);
        old.logged("another process has locked the ledger").await;
        old.signal(Signal::SIGTERM);
        assert_eq!(old.ended().await.code(), Some(0));
    });
}

#[test]
fn a_handover_waits_for_an_instance_that_is_starting_or_ending() {
    run(async {
        let node = Node::with(&[("gpu", DEVICES)]);
        let kubelet = node.start_kubelet().await;
        let (store, _) =
            store::Store::open(&node.state(), holdfast::domain::Durability::PowerLoss, None)
                .unwrap();
        let new = take_over(&node);
        new.logged("does not accept handover requests yet").await;
        drop(store);
        offered(&kubelet, &gpu(), DEVICES).await;
        new.logged("ready").await;
    });
}

#[test]
fn take_over_without_an_instance_is_a_start_and_a_second_instance_needs_take_over() {
    run(async {
        let node = Node::with(&[("gpu", DEVICES)]);
        let kubelet = node.start_kubelet().await;
        let first = take_over(&node);
        offered(&kubelet, &gpu(), DEVICES).await;
        first.logged("ready").await;
        let second = node.output(&["run"]);
        assert_eq!(second.status.code(), Some(6), "{}", String::from_utf8_lossy(&second.stderr));
        // What cannot be started is found before anything is asked for.
        node.write_config("[nonsense]\n");
        let third = node.output(&["run", "--take-over"]);
        assert_eq!(third.status.code(), Some(3));
        assert!(!first.log().iter().any(|line| line.contains("handing over")));
    });
}

async fn upgraded_in_place() {
    let node = Node::with(&[("gpu", DEVICES)]);
    node.write_config(&config());
    let kubelet = node.start_kubelet().await;
    let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
    let mut old = Daemon::spawn(
        node.command(&["run"]).env("NOTIFY_SOCKET", node.path("notify")).process_group(0),
    );
    notified(&systemd, "READY=1").await;
    offered(&kubelet, &gpu(), DEVICES).await;

    let verb = |node: &Node| {
        let mut command = node.command(&["handover"]);
        tokio::task::spawn_blocking(move || command.output().unwrap())
    };
    // The next start would fail; the running one continues.
    let sound = std::fs::read_to_string(node.config_file()).unwrap();
    node.write_config("[nonsense]\n");
    let failed = soon("the verb", verb(&node)).await.unwrap();
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{said}");
    assert!(said.contains("the new instance exited before it took over"), "{said}");
    node.write_config(&sound);

    let began = kubelet.now();
    let done = soon("the verb", verb(&node)).await.unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let pid = notified(&systemd, "MAINPID=").await["MAINPID=".len()..].to_owned();
    assert!(said.contains(&format!("process {pid}")), "{said}");
    notified(&systemd, "READY=1").await;
    assert_eq!(old.exited().await.code(), Some(0));
    assert_eq!(dips(&kubelet, began), []);
    let outcome = soon(
        "an admission",
        kubelet.add_pod(PodSpec::new("default", "pod").app("main", &gpu(), 1)),
    )
    .await;
    assert_eq!(outcome.phase, PodPhase::Running);
    // It is no longer a child of this process.
    let pid = nix::unistd::Pid::from_raw(pid.parse().unwrap());
    nix::sys::signal::kill(pid, Signal::SIGTERM).unwrap();
    until("its end", || node.path("run/control.sock").exists(), |exists| !exists).await;
}

#[test]
fn an_upgrade_in_place_sends_systemd_the_new_main_pid_and_a_failed_one_changes_nothing() {
    run(upgraded_in_place());
}

/// An instance that is newer than this version: it offers a ledger that this version cannot read.
/// Returns the request that it got after that.
fn offers(node: &Node, protocol: u32, records: u32) -> std::thread::JoinHandle<String> {
    std::fs::create_dir(node.path("run")).unwrap();
    let listener = UnixListener::bind(node.path("run/handover.sock")).unwrap();
    std::thread::spawn(move || {
        let (mut asking, _) = listener.accept().unwrap();
        writeln!(asking, r#"{{"message":"offer","protocol":{protocol},"version":"7.0.0","records":{records},"fds":[],"and":"more"}}"#)
            .unwrap();
        let mut asked = String::new();
        asking.read_to_string(&mut asked).unwrap();
        asked
    })
}

#[test]
fn an_unknown_ledger_or_protocol_version_is_refused_before_any_change() {
    let (known, records) = (holdfast::handover::PROTOCOL, store::RECORDS);
    for (protocol, records, what) in [
        (7, records + 1, "a ledger"),
        (known, records + 1, "a ledger"),
        (7, records, "a handover protocol"),
    ] {
        let node = Node::with(&[("gpu", DEVICES)]);
        let newer = offers(&node, protocol, records);
        let refused = node.output(&["run", "--take-over"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(1), "{said}");
        for word in [
            "the running holdfast 7.0.0",
            what,
            "nothing was changed, and the running one continues",
            "install 7.0.0 or newer",
        ] {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert_eq!(newer.join().unwrap(), "", "it was not even asked to let go");
        assert!(!node.state().exists() && !node.path("kubelet").exists(), "no file was made");
    }
}

#[test]
fn a_process_of_another_user_is_refused_and_counted() {
    if !crate::common::is_root() {
        crate::common::inside::say("SKIPPED: only root can become another user");
        return;
    }
    run(async {
        let node = Node::with(&[("gpu", DEVICES)]);
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        offered(&kubelet, &gpu(), DEVICES).await;
        let plugin = std::fs::read_dir(node.sockets()).unwrap().next().unwrap().unwrap().path();
        let sockets = [
            ("control", node.path("run/control.sock")),
            ("handover", node.path("run/handover.sock")),
            ("plugin", plugin),
        ];
        for (socket, path) in sockets {
            // As another user who was given the file: its mode alone is no protection.
            for dir in path.ancestors().take_while(|dir| dir.starts_with(node.path(""))) {
                std::fs::set_permissions(dir, std::os::unix::fs::PermissionsExt::from_mode(0o777))
                    .unwrap();
            }
            let script = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.settimeout(30); s.connect(sys.argv[1]); \
                          s.sendall(b'GET /v1/status HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n'); sys.exit(len(s.recv(1)))";
            let mut client = Command::new("python3");
            client.args(["-c", script]).arg(&path).uid(65534).gid(65534);
            let output = soon("the stranger", tokio::task::spawn_blocking(move || client.output()))
                .await
                .unwrap();
            let Ok(output) = output else {
                crate::common::inside::say("SKIPPED: python3 is not there to be a stranger");
                return;
            };
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                output.status.success()
                    || said.contains("ConnectionResetError")
                    || said.contains("BrokenPipe"),
                "{socket}: {said}"
            );
            let address = crate::common::telemetry(&daemon).await;
            let counted = format!("holdfast_connections_refused_total{{socket=\"{socket}\"}} 1");
            let scrape = move || crate::common::http_get(address, "/metrics").1;
            let scraped = tokio::task::spawn_blocking(scrape).await.unwrap();
            assert!(scraped.contains(&counted), "{socket}: {scraped}");
        }
        drop(kubelet);
    });
}
