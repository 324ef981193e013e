//! The time of a start with a long history (1000 live grants and many released ones), and after
//! damage. The recovered state is asserted; times are only printed, since the machine may be busy.
//!
//! `HOLDFAST_HISTORY` is the number of released grants, `HOLDFAST_BIN` another binary, such as the
//! release build.

use crate::common::{Daemon, Node, percentiles, resource};
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, Entry, Grant, GrantState, GrantedDevice, PodRef,
    Timestamp,
};
use holdfast::store::Store;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

const LIVE: u64 = 1000;
/// Entries of one append.
const BATCH: usize = 500;

fn pod(n: u64) -> PodRef {
    PodRef {
        uid: format!("00000000-0000-4000-8000-{n:012}"),
        namespace: Some("default".into()),
        name: Some(format!("pod-{n}")),
    }
}

/// The `n`-th grant; its device exists if `n` is small enough.
fn grant(n: u64, state: GrantState) -> Entry {
    let id = format!("gpu{}", n % LIVE);
    Entry::Grant(Arc::new(Grant {
        alloc_id: AllocId::new(format!("00000000-0000-7000-8000-{n:012}")),
        resource: "example.com/gpu".parse().unwrap(),
        devices: vec![GrantedDevice {
            id: DeviceId::new(format!("dev:{id}")),
            key: format!("dev:/dev/{id}"),
            numa_nodes: vec![0],
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits {
            envs: BTreeMap::from([("DEVICES".into(), id.repeat(20))]),
            ..ContainerEdits::default()
        },
        claim: None,
        boot_id: "unknown".into(),
        kubelet: None,
        granted_at: Timestamp(1_700_000_000_000 + n),
        version: "0.1.0".into(),
        state,
    }))
}

/// Writes a ledger in the state that a daemon of this boot leaves.
fn write(state: &Path, boot: &str, released: u64) {
    let now = Timestamp::from_system(SystemTime::now());
    let (mut store, _) = Store::open(state, Durability::ProcessCrash, Some(boot)).unwrap();
    let gone = |n| GrantState::Released {
        pod: Some(pod(n)),
        container: Some("main".into()),
        bound_at: Some(now),
        released_at: now,
        other_pods: Vec::new(),
        released_by: "pod_gone".into(),
    };
    let held = |n| GrantState::Bound { pod: pod(n), container: "main".into(), bound_at: now };
    let entries: Vec<Entry> = (LIVE..LIVE + released)
        .map(|n| grant(n, gone(n)))
        .chain((0..LIVE).map(|n| grant(n, held(n))))
        .collect();
    for batch in entries.chunks(BATCH) {
        store.append(batch).unwrap();
        store.checkpoint().unwrap();
    }
    assert_eq!(store.is_sound(), (true, true));
    store.close().unwrap();
}

/// The time from the start of the process until it notifies the service manager that it is ready,
/// without a kubelet.
fn start(node: &Node) -> (Daemon, Duration) {
    let socket = node.path("notify");
    drop(fs::remove_file(&socket));
    let systemd = UnixDatagram::bind(&socket).unwrap();
    systemd.set_read_timeout(Some(crate::common::HANG)).unwrap();
    let began = Instant::now();
    let daemon = Daemon::spawn(node.command(&["run"]).env("NOTIFY_SOCKET", &socket));
    let mut buffer = [0; 256];
    loop {
        let length = systemd.recv(&mut buffer).unwrap();
        if buffer[..length].starts_with(b"READY=1") {
            return (daemon, began.elapsed());
        }
    }
}

/// A node with a ledger of this boot.
fn node(released: u64) -> (Node, String) {
    let node = Node::new();
    (0..LIVE).for_each(|index| node.create_device("gpu", usize::try_from(index).unwrap()));
    node.write_config(&format!("[telemetry]\nlisten = \"off\"\n{}", resource("gpu")));
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let clock = Instant::now();
    write(&node.state(), boot.trim(), released);
    println!("{LIVE} live and {released} released grants, written in {:?}", clock.elapsed());
    (node, boot.trim().to_owned())
}

#[test]
fn a_long_history_does_not_slow_down_the_start() {
    let released = std::env::var("HOLDFAST_HISTORY").map_or(2000, |text| text.parse().unwrap());
    let (node, boot) = node(released);
    type Ending = fn(Store);
    let cases: [(&str, &str, Ending); 3] = [
        ("after a kill, in the same boot", boot.as_str(), drop),
        ("after a clean stop, in another boot", "the boot before", |store| store.close().unwrap()),
        ("after a power cut", "the boot before", drop),
    ];
    for (how, earlier, end) in cases {
        let (mut took, mut log) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            end(Store::open(&node.state(), Durability::PowerLoss, Some(earlier)).unwrap().0);
            let (mut daemon, ready) = start(&node);
            took.push(ready);
            log = daemon.log();
            assert!(
                !log.iter().any(|line| line.contains("damaged") || line.contains("ERROR")),
                "{log:#?}"
            );
            daemon.kill();
            assert_eq!(node.grants().len() as u64, LIVE);
        }
        println!("ready {how}: {}; the last log:\n{}", percentiles(took), log.join("\n"));
    }
    let export = node.json(&["ledger", "export"]);
    assert_eq!(export["grants"].as_array().unwrap().len() as u64, LIVE + released);
}

/// The only segment of the journal.
fn segment(node: &Node) -> PathBuf {
    let dir = node.state().join("journal");
    let segments = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    segments
        .filter(|path| path.extension().is_some_and(|extension| extension == "log"))
        .max()
        .unwrap()
}

#[test]
fn a_damaged_ledger_costs_no_grant_and_a_database_that_cannot_be_opened_no_start() {
    let (node, _) = node(500);
    let database = node.state().join("db");
    type Damage<'a> = &'a dyn Fn();
    let cut = |path: &Path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    };
    let cases: [(&str, &str, Damage<'_>); 4] = [
        // The segment ends within its head, as after a kill.
        ("half of the journal is removed", "", &|| cut(&segment(&node))),
        ("half of the database is removed", "damaged", &|| cut(&database.join("db"))),
        ("the database is gone", "the query database is missing", &|| {
            fs::remove_dir_all(&database).unwrap();
        }),
        // Its reader waits for a writer that never comes. That is no evidence against the database.
        ("the database cannot be opened", "it is a FIFO, not a regular file", &|| {
            fs::remove_file(database.join("conf")).unwrap();
            nix::unistd::mkfifo(&database.join("conf"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
    ];
    for (how, said, damage) in cases {
        let open = || {
            Store::open(&node.state(), Durability::PowerLoss, Some("the boot before")).unwrap().0
        };
        open().close().unwrap();
        // As after a power cut, so that both copies are read before anything is served.
        drop(open());
        damage();
        let (mut daemon, ready) = start(&node);
        println!("{how}: ready after {ready:?}");
        let log = daemon.log();
        assert!(said.is_empty() || log.iter().any(|line| line.contains(said)), "{how}: {log:#?}");
        let is_damaged = log.iter().any(|line| line.contains("was damaged"));
        assert_eq!(is_damaged, !said.is_empty() && !said.contains("FIFO"), "{how}: {log:#?}");
        daemon.kill();
        assert_eq!(node.grants().len() as u64, LIVE, "{how}");
    }
}
