//! The daemon and the kubelet: waiting for one, following its restarts, losing a socket, ending
//! cleanly.

use crate::common::{
    Daemon, HANG, Node, Unpolled, allocate, count, dial, http_get, name, notified, offered,
    percentiles, resource, run, soon, telemetry,
};
use holdfast::domain::ResourceName;
use holdfast::kubelet::proto::v1beta1 as api;
use holdfast::lab::sim::kubelet::{EventKind, Kubelet, KubeletConfig, PodPhase, PodSpec, View};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::net::UnixDatagram;

#[test]
fn an_absent_kubelet_is_logged_once_and_does_not_prevent_readiness() {
    run(async {
        let node = Node::with(&[("gpu", 4), ("nic", 2)]);
        node.write_config(&format!(
            "[telemetry]\nlisten = \"127.0.0.1:0\"\n{}{}",
            resource("gpu"),
            resource("nic")
        ));
        let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
        let began = Instant::now();
        let mut daemon =
            Daemon::spawn(node.command(&["run"]).env("NOTIFY_SOCKET", node.path("notify")));
        notified(&systemd, "READY=1").await;
        println!("ready without a kubelet after {:?}", began.elapsed());
        let address = telemetry(&daemon).await;
        assert_eq!(http_get(address, "/readyz"), (200, "ready\n".to_owned()));
        assert_eq!(http_get(address, "/healthz").0, 200);
        assert!(!node.path("kubelet").exists(), "the kubelet's directory is the kubelet's to make");

        let kubelet = node.start_kubelet().await;
        offered(&kubelet, &name("example.com/gpu"), 4).await;
        offered(&kubelet, &name("example.com/nic"), 2).await;
        let waiting = daemon
            .log()
            .into_iter()
            .filter(|line| line.contains("waiting for the kubelet"))
            .collect::<Vec<_>>();
        assert_eq!(waiting.len(), 1, "{waiting:#?}");

        daemon.signal(Signal::SIGTERM);
        notified(&systemd, "STOPPING=1").await;
        assert_eq!(daemon.ended().await.code(), Some(0));
    });
}

/// Another program has the address: everything else works, the operator is informed, and the
/// address is served as soon as possible.
#[test]
fn an_address_in_use_is_reported_and_bound_when_it_is_free() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        node.write_config(&format!("[telemetry]\nlisten = \"{address}\"\n{}", resource("gpu")));
        let daemon = node.start_daemon();
        daemon.logged("are not served").await;
        daemon.logged("INFO ready").await;
        let said = String::from_utf8(node.output(&["status"]).stdout).unwrap();
        assert!(
            said.contains(&format!("/metrics, /healthz and /readyz are not served on {address}: ")),
            "{said}"
        );
        drop(other);
        assert_eq!(telemetry(&daemon).await, address);
        assert_eq!(http_get(address, "/healthz").0, 200);
        assert_eq!(node.json(&["status"])["not_served"], Value::Null);
    });
}

#[test]
fn systemd_gets_watchdog_pings_and_sighup_does_not_stop_the_daemon() {
    run(async {
        let node = Node::with(&[("gpu", 1)]);
        let systemd = UnixDatagram::bind(node.path("notify")).unwrap();
        let mut command = node.command(&["run"]);
        // No $WATCHDOG_PID: the variable is valid for any process that has it.
        let mut daemon = Daemon::spawn(
            command.env("NOTIFY_SOCKET", node.path("notify")).env("WATCHDOG_USEC", "30000"),
        );
        notified(&systemd, "READY=1").await;
        daemon.signal(Signal::SIGHUP);
        // A heartbeat that is not read blocks its sender: the socket has space for ten.
        let mut buffer = [0; 256];
        let heard = async { while systemd.recv(&mut buffer).await.is_ok() {} };
        tokio::select! {
            _ = daemon.logged("SIGHUP") => {}
            () = heard => {}
        }
        notified(&systemd, "WATCHDOG=1").await;
        notified(&systemd, "WATCHDOG=1").await;
        daemon.signal(Signal::SIGTERM);
        let heard = async { while systemd.recv(&mut buffer).await.is_ok() {} };
        let ended = tokio::select! {
            ended = daemon.ended() => ended,
            () = heard => panic!("the socket is closed"),
        };
        assert_eq!(ended.code(), Some(0));
    });
}

/// As when a journal or a container runtime hangs: the daemon's log is a pipe that is full from the
/// beginning.
#[test]
fn an_unread_log_pipe_blocks_nothing() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let (mut reader, mut writer) = std::io::pipe().unwrap();
        let room = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
        writer.write_all(&vec![b'x'; usize::try_from(room).unwrap()]).unwrap();
        let mut command = node.command(&["run"]);
        command.env("HOLDFAST_LOG", "debug").stderr(writer);
        let mut daemon = tokio::process::Command::from(command).kill_on_drop(true).spawn().unwrap();
        let gpu = name("example.com/gpu");
        offered(&kubelet, &gpu, 2).await;
        for device in ["dev:gpu0", "dev:gpu1"] {
            soon("an answer", async {
                allocate(&mut dial(&kubelet, &node, &gpu).await, &[device]).await.unwrap()
            })
            .await;
        }
        assert_eq!(node.grants().len(), 2);
        // The pipe is read again: from here on it has space for every line.
        reader.read_exact(&mut vec![0; usize::try_from(room).unwrap()]).unwrap();
        nix::sys::signal::kill(Pid::from_raw(daemon.id().unwrap().cast_signed()), Signal::SIGTERM)
            .unwrap();
        assert_eq!(soon("the end of the daemon", daemon.wait()).await.unwrap().code(), Some(0));
        let mut log = String::new();
        reader.read_to_string(&mut log).unwrap();
        assert!(log.contains("the log was not read in time, and lines were lost lines="), "{log}");
        assert!(log.trim_end().ends_with("INFO ended"), "{log}");
    });
}

/// The first list of a resource since the kubelet's start: healthy and other devices.
fn first_list(kubelet: &Kubelet, resource: &ResourceName) -> Option<(usize, usize)> {
    kubelet.view(|view| {
        let events: Vec<_> = view.events().iter().collect();
        let start =
            events.iter().rposition(|event| matches!(event.kind, EventKind::Started { .. }))?;
        events[start..].iter().find_map(|event| match &event.kind {
            EventKind::Listed { resource: listed, healthy, unhealthy, .. }
                if listed == resource =>
            {
                Some((*healthy, *unhealthy))
            }
            _ => None,
        })
    })
}

#[test]
fn after_a_kubelet_restart_all_devices_are_listed_before_pods_are_admitted() {
    run(async {
        let node = Node::with(&[("gpu", 8), ("nic", 3)]);
        // A real one takes 64 ms or more; a busy machine that runs tests is given more.
        let config = KubeletConfig {
            first_batch_after: Duration::from_millis(500),
            ..node.kubelet_config()
        };
        let kubelet = Kubelet::start(config).await.unwrap();
        let daemon = node.start_daemon();
        let resources = [(name("example.com/gpu"), 8), (name("example.com/nic"), 3)];
        for (resource, devices) in &resources {
            offered(&kubelet, resource, *devices).await;
        }
        let [(gpu, _), (nic, _)] = &resources;
        for pod in [
            PodSpec::new("default", "init").init("prepare", gpu, 2).app("main", gpu, 2),
            PodSpec::new("default", "sidecar")
                .init("prepare", nic, 1)
                .sidecar("proxy", nic, 1)
                .app("main", gpu, 1),
            PodSpec::new("default", "crashing").app("main", gpu, 1),
        ] {
            let outcome = soon("an admission", kubelet.add_pod(pod)).await;
            assert_eq!(outcome.phase, PodPhase::Running);
        }
        kubelet.crash_container(&kubelet.pods()[2].spec.uid, "main");

        let mut took = Vec::new();
        for round in 0..20 {
            match round % 4 {
                0 => kubelet.restart().await.unwrap(),
                // Twice, before any instance can have registered.
                1 => {
                    kubelet.restart().await.unwrap();
                    kubelet.restart().await.unwrap();
                }
                // Away long enough to be missed.
                2 => {
                    let ends =
                        daemon.log().iter().filter(|line| line.contains("stream ended")).count();
                    kubelet.stop();
                    daemon.logged_often("stream ended", ends + resources.len()).await;
                    kubelet.start_again().await.unwrap();
                }
                // Another way to be absent: the socket's file is removed too, and the pods' plugin
                // directory with it.
                _ => {
                    kubelet.stop();
                    std::fs::remove_file(node.path("kubelet/device-plugins/kubelet.sock")).unwrap();
                    kubelet.start_again().await.unwrap();
                }
            }
            kubelet.wait_for(|view| view.is_settled(), HANG).await.unwrap();
            for (resource, devices) in &resources {
                kubelet.wait_for(|view| view.first_list(resource).is_some(), HANG).await.unwrap();
                assert_eq!(
                    first_list(&kubelet, resource),
                    Some((*devices, 0)),
                    "{resource} in round {round}"
                );
                took.extend(kubelet.view(|view| view.first_list(resource)));
            }
            let failed: Vec<_> =
                kubelet.pods().into_iter().filter(|pod| pod.phase != PodPhase::Running).collect();
            assert!(failed.is_empty(), "round {round}: {failed:#?}");
        }
        assert_eq!(kubelet.view(|view| view.rejections()), 0);
        assert_eq!(kubelet.panicked(), None);
        println!(
            "from the kubelet's socket to the first list, 2 resources, 20 restarts: {}",
            percentiles(took)
        );
    });
}

fn socket_files(node: &Node) -> BTreeSet<PathBuf> {
    std::fs::read_dir(node.sockets())
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

#[test]
fn a_removed_socket_file_is_replaced() {
    run(async {
        let node = Node::with(&[("gpu", 2)]);
        let kubelet = node.start_kubelet().await;
        let _daemon = node.start_daemon();
        let gpu = name("example.com/gpu");
        offered(&kubelet, &gpu, 2).await;
        let registered: fn(&EventKind) -> bool =
            |kind| matches!(kind, EventKind::Registered { .. });
        let listed: fn(&EventKind) -> bool = |kind| matches!(kind, EventKind::Listed { .. });
        for whole_directory in [false, true] {
            let (registrations, lists, files) =
                (count(&kubelet, registered), count(&kubelet, listed), socket_files(&node));
            let unpolled = Unpolled::begin().await;
            if whole_directory {
                std::fs::remove_dir_all(node.sockets()).unwrap();
            } else {
                files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
            }
            let again = |view: &View<'_>| {
                let more = |fits: fn(&EventKind) -> bool, before| {
                    view.events().iter().filter(|event| fits(&event.kind)).count() > before
                };
                more(registered, registrations) && more(listed, lists)
            };
            kubelet.wait_for(again, HANG).await.unwrap();
            unpolled.end("the registration");
            assert!(socket_files(&node).is_disjoint(&files), "a used name is not used again");
            allocate(&mut dial(&kubelet, &node, &gpu).await, &["dev:gpu0"]).await.unwrap();
        }
    });
}

#[test]
fn a_stopping_daemon_answers_pending_calls_and_ends_its_streams_last() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let kubelet = node.start_kubelet().await;
        let gpu = name("example.com/gpu");
        let mut answered = BTreeSet::new();
        for round in 0..8 {
            let mut daemon = node.start_daemon();
            offered(&kubelet, &gpu, 4).await;
            let mut plugin = dial(&kubelet, &node, &gpu).await;
            // The kubelet's own way: one connection for the stream and for every Allocate.
            let mut stream = plugin.list_and_watch(api::Empty {}).await.unwrap().into_inner();
            assert_eq!(stream.message().await.unwrap().unwrap().devices.len(), 4);
            allocate(&mut plugin, &["dev:gpu0"]).await.unwrap();

            // While it is stopped, both the request and the signal arrive; it finds them when it
            // continues.
            daemon.signal(Signal::SIGSTOP);
            let mut asked = plugin.clone();
            let answer = async move { allocate(&mut asked, &["dev:gpu1"]).await };
            tokio::pin!(answer);
            // Long enough for the request to leave; no process answers it.
            assert!(tokio::time::timeout(Duration::from_millis(100), &mut answer).await.is_err());
            daemon.signal(Signal::SIGTERM);
            daemon.signal(Signal::SIGCONT);

            let ended = async {
                while let Ok(Some(list)) = stream.message().await {
                    assert_eq!(list.devices.len(), 4);
                }
            };
            tokio::pin!(ended);
            tokio::select! {
                biased;
                answer = &mut answer => drop(answered.insert(answer.unwrap_or_else(|error| panic!("round {round}: {error}")))),
                () = &mut ended => panic!("round {round}: the stream ended before the answer"),
            }
            soon("the end of the stream", ended).await;
            // A process that starts now does not wait for the rest of this one.
            let lock = File::open(node.state().join("lock")).unwrap();
            assert!(
                lock.try_lock().is_ok(),
                "round {round}: the kubelet is without devices, and the ledger is still held"
            );
            drop(lock);
            let noted = std::fs::read_to_string(node.state().join("lock")).unwrap();
            assert!(
                noted.contains("closed "),
                "round {round}: the first start after a reboot would need the database: {noted}"
            );
            assert_eq!(daemon.ended().await.code(), Some(0));
            assert_eq!(socket_files(&node), BTreeSet::new());
            assert!(!node.path("run/control.sock").exists());
            // The kubelet has seen the end too, and the next round begins without the devices of
            // the last one.
            offered(&kubelet, &gpu, 0).await;
        }
        let ledger: BTreeSet<_> = node.grants().into_iter().map(|grant| grant.alloc_id).collect();
        assert!(answered.is_subset(&ledger));
        let empty = |kind: &EventKind| {
            matches!(
                kind,
                EventKind::Listed { healthy: 0, .. } | EventKind::Listed { unhealthy: 1.., .. }
            )
        };
        assert_eq!(
            count(&kubelet, empty),
            0,
            "the end of the daemon is not the end of the devices"
        );
    });
}
