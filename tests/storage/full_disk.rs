//! A file system under the ledger that is full or read-only: new grants are refused with a reason,
//! no confirmed entry is lost, and the daemon continues automatically when there is free space
//! again.
//!
//! sled may hang after a disk error. Then the journal works alone until the next start.
//!
//! A read-only file system is tested in two ways: mounted so before the start, and made read-only
//! by the kernel under the running daemon, as after a disk error.
//!
//! Each test has its own small file systems in memory. Only root can mount them; for other users
//! the tests print that they are skipped.

use crate::common::inside::{command, inside};
use crate::common::ledger::{Load, Model};
use crate::common::{
    Node, Random, allocate, dial, http_get, name, offered, percentiles, resource, run, soon,
    telemetry, until, until_blocking,
};
use crate::storage::power_cut::mounts;
use holdfast::domain::{AllocId, DeviceId, Entry};
use holdfast::lab::sim::kubelet::{PodPhase, PodSpec};
use holdfast::store::{self, Store, StoreError};
use nix::sys::signal::Signal;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const NEEDS: [&str; 1] = ["mount"];

/// A file system of a few megabytes.
#[derive(Debug)]
struct Small {
    at: PathBuf,
}

impl Small {
    fn mount(at: PathBuf) -> Small {
        Small::of("4m", at)
    }

    fn of(size: &str, at: PathBuf) -> Small {
        fs::create_dir_all(&at).unwrap();
        command(
            Command::new("mount")
                .args(["-t", "tmpfs", "-o"])
                .arg(format!("size={size}"))
                .arg("tmpfs")
                .arg(&at),
        );
        Small { at }
    }

    fn filler(&self) -> PathBuf {
        self.at.join("filler")
    }

    /// Takes all the room there is.
    fn fill(&self) {
        let mut filler = fs::File::create(self.filler()).unwrap();
        while filler.write_all(&[7; 4096]).is_ok() {}
    }

    /// The same, and gives one block back.
    fn fill_but_a_block(&self) {
        self.fill();
        let filler = fs::File::options().write(true).open(self.filler()).unwrap();
        filler.set_len(filler.metadata().unwrap().len() - 4096).unwrap();
    }

    fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    /// A thread of sled may have a file of it open for an instant after the store was closed.
    fn remount(&self, how: &str) {
        let mount = || {
            Command::new("mount")
                .arg("-o")
                .arg(format!("remount,{how}"))
                .arg(&self.at)
                .output()
                .unwrap()
        };
        let is_busy = |stderr: &[u8]| String::from_utf8_lossy(stderr).contains("busy");
        let mounted = until_blocking("the disk is let go", mount, |output| {
            output.status.success() || !is_busy(&output.stderr)
        });
        assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
    }
}

fn open(state: &Path) -> (Store, Model) {
    let (store, recovered) = crate::storage::open(state, Some("this boot"));
    assert!(recovered.report.is_clean(), "{}", recovered.report);
    (store, Model::of(recovered))
}

/// Appends something, and has the model know it.
fn append(store: &mut Store, load: &mut Load, model: &mut Model) -> Result<(), StoreError> {
    let entries: Vec<Entry> = load.entries(model);
    store.append(&entries)?;
    entries.iter().for_each(|entry| model.apply(entry));
    Ok(())
}

fn live(store: &Store) -> Model {
    Model { released: Default::default(), ..Model::of(store.load()) }
}

fn assert_knows(found: &Model, model: &Model) {
    assert_eq!((&found.live, &found.names), (&model.live, &model.names));
}

fn quarantined(state: &Path) -> Vec<String> {
    let names = fs::read_dir(state)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("quarantine")).collect()
}

/// The grants that the ledger has. On a busy machine a test lasts more than a minute, and the first
/// grants are released, since no pod has them: then they are in the history.
fn known(node: &Node) -> Vec<AllocId> {
    let released = store::peek_history(&node.state()).unwrap().released;
    node.grants().into_iter().chain(released).map(|grant| grant.alloc_id).collect()
}

#[test]
fn on_a_read_only_disk_the_ledger_starts_and_refuses_grants_until_it_is_writable() {
    let Some(dir) = inside(
        "storage::full_disk::on_a_read_only_disk_the_ledger_starts_and_refuses_grants_until_it_is_writable",
        &NEEDS,
    ) else {
        return;
    };
    let disk = Small::mount(dir.join("disk"));
    let state = disk.at.join("state");
    let (mut store, mut model) = open(&state);
    let mut load = Load::new(Random::of(9), 0);
    for boot in ["this boot", "next boot"] {
        for _ in 0..20 {
            append(&mut store, &mut load, &mut model).unwrap();
        }
        drop(store);
        disk.remount("ro");
        let (mut closed, recovered) = crate::storage::open(&state, Some(boot));
        assert!(recovered.report.is_clean(), "{}", recovered.report);
        assert_knows(&Model::of(recovered), &model);
        let error = append(&mut closed, &mut load, &mut model).unwrap_err();
        assert!(error.to_string().contains("read-only"), "{error}");
        assert!(!closed.is_sound().0);
        disk.remount("rw");
        append(&mut closed, &mut load, &mut model).unwrap();
        closed.checkpoint().unwrap();
        assert_eq!(closed.is_sound(), (true, true));
        drop(closed);
        store = open(&state).0;
        assert_knows(&live(&store), &model);
        assert_eq!(store.history(usize::MAX, |_| true).unwrap().len(), model.released.len());
    }
    assert_eq!(quarantined(&state), [""; 0], "nothing was damaged");
}

#[test]
fn entries_refused_on_a_full_disk_are_not_recovered_by_a_start_on_a_full_disk() {
    let Some(dir) = inside(
        "storage::full_disk::entries_refused_on_a_full_disk_are_not_recovered_by_a_start_on_a_full_disk",
        &NEEDS,
    ) else {
        return;
    };
    let state = dir.join("state");
    // Only the journal lacks room.
    let disk = Small::mount(state.join("journal"));
    let (mut store, mut model) = open(&state);
    let mut load = Load::new(Random::of(9), 0);
    for _ in 0..20 {
        append(&mut store, &mut load, &mut model).unwrap();
    }
    disk.fill_but_a_block();
    // The first of them finds room, and not all.
    let mut refused =
        vec![Entry::Named { key: "pci:refused".into(), id: DeviceId::new("GPU-refused") }];
    for _ in 0..20 {
        refused.extend(load.entries(&model));
    }
    let error = store.append(&refused).unwrap_err();
    assert!(error.to_string().contains("make room"), "{error}");
    drop(store);
    disk.fill();
    let (mut store, known) = open(&state);
    assert_knows(&known, &model);
    assert!(append(&mut store, &mut load, &mut model).is_err(), "there is no room");
    disk.make_room();
    append(&mut store, &mut load, &mut model).unwrap();
    drop(store);
    assert_knows(&open(&state).1, &model);
}

/// A gauge of the daemon.
fn gauge(address: std::net::SocketAddr, name: &str) -> Option<f64> {
    let metrics = http_get(address, "/metrics").1;
    metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

async fn until_gauge(address: std::net::SocketAddr, name: &str, value: f64) {
    until(name, || gauge(address, name), |found| *found == Some(value)).await;
}

/// A node that exposes its metrics, and whose ledger has its own small disk.
fn on_a_small_disk() -> (Node, Small) {
    let node = Node::with(&[("gpu", 4)]);
    node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
    let disk = Small::mount(node.state());
    (node, disk)
}

const JOURNAL: &str = "holdfast_ledger_kept{copy=\"journal\"}";
const DATABASE: &str = "holdfast_ledger_kept{copy=\"database\"}";
const NOT_DURABLE: &str = "holdfast_ledger_entries_not_durable";

#[test]
fn a_full_disk_and_its_recovery_are_logged_once_each() {
    let Some(_dir) =
        inside("storage::full_disk::a_full_disk_and_its_recovery_are_logged_once_each", &NEEDS)
    else {
        return;
    };
    run(async {
        let (node, disk) = on_a_small_disk();
        let gpu = name("example.com/gpu");
        let kubelet = node.start_kubelet().await;
        let mut answered = Vec::new();
        for start_full in [false, true] {
            if start_full {
                disk.fill();
            }
            let mut daemon = node.start_daemon();
            let metrics = telemetry(&daemon).await;
            offered(&kubelet, &gpu, 4).await;
            daemon.logged("registered").await;
            let mut api = dial(&kubelet, &node, &gpu).await;
            if !start_full {
                answered.push(allocate(&mut api, &["dev:gpu0"]).await.unwrap());
                until_gauge(metrics, JOURNAL, 1.0).await;
                disk.fill();
            }
            let mut refused = 0;
            while refused < 20 {
                match allocate(&mut api, &["dev:gpu1"]).await {
                    Ok(alloc_id) => answered.push(alloc_id),
                    Err(status) => {
                        assert!(status.message().contains("make room"), "{status}");
                        refused += 1;
                    }
                }
            }
            until_gauge(metrics, JOURNAL, 0.0).await;
            daemon.logged("an Allocate was refused").await;
            let status = String::from_utf8(node.output(&["status"]).stdout).unwrap();
            assert!(
                status.contains("new pods that request a device are refused, ")
                    && status.contains(" so far: failed to "),
                "{status}"
            );
            assert!(gauge(metrics, "holdfast_journal_sync_failures_total").unwrap() > 0.0);
            assert!(gauge(metrics, "holdfast_ledger_free_bytes").unwrap() < 1e6);
            disk.make_room();
            answered.push(allocate(&mut api, &["dev:gpu2"]).await.unwrap());
            until_gauge(metrics, JOURNAL, 1.0).await;
            daemon.logged("the ledger can be written again").await;
            let log = daemon.log();
            let refusals = ["the ledger cannot be written"];
            let told: Vec<_> = log
                .iter()
                .filter(|line| refusals.iter().any(|words| line.contains(words)))
                .collect();
            assert_eq!(told.len(), 1, "once, not for each Allocate: {told:#?}");
            daemon.kill();
            let known = known(&node);
            assert!(
                answered.iter().all(|id| known.contains(id)),
                "{answered:?} were answered, {known:?} are known"
            );
        }
    });
}

/// The daemon ends cleanly with a full disk, in every state of sled, and loses nothing.
#[test]
fn a_stop_with_a_full_disk_ends_in_time_and_the_next_start_has_every_grant() {
    let Some(_dir) = inside(
        "storage::full_disk::a_stop_with_a_full_disk_ends_in_time_and_the_next_start_has_every_grant",
        &NEEDS,
    ) else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        let disk = Small::mount(node.state());
        let gpu = name("example.com/gpu");
        let kubelet = node.start_kubelet().await;
        let (mut answered, mut took, mut left) = (Vec::new(), Vec::new(), 0);
        for round in 0..6 {
            let mut daemon = node.start_daemon();
            offered(&kubelet, &gpu, 4).await;
            daemon.logged_often("registered", 1).await;
            let mut api = dial(&kubelet, &node, &gpu).await;
            // Only an open database can hang.
            assert!(node.output(&["ledger", "export"]).status.success());
            for call in 0..20 {
                if call == round * 4 {
                    disk.fill();
                }
                answered.extend(allocate(&mut api, &[&format!("dev:gpu{}", call % 4)]).await.ok());
            }
            disk.fill();
            let clock = Instant::now();
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().await.code(), Some(0), "{:#?}", daemon.log());
            took.push(clock.elapsed());
            left += usize::from(daemon.log().iter().any(|line| line.contains("not closed")));
            disk.make_room();
        }
        println!(
            "ended after: {}; left a database that did not close: {left} of 6",
            percentiles(took)
        );
        let known = known(&node);
        assert!(
            answered.iter().all(|id| known.contains(id)),
            "{answered:?} were answered, {known:?} are known"
        );
    });
}

/// Only the database lacks room. sled would never answer again after the first write that fails.
#[test]
fn a_database_on_a_full_disk_recovers_when_space_is_free_again() {
    let Some(dir) = inside(
        "storage::full_disk::a_database_on_a_full_disk_recovers_when_space_is_free_again",
        &NEEDS,
    ) else {
        return;
    };
    let disk = Small::of("16m", dir.join("disk"));
    let state = disk.at.join("state");
    let _journal = Small::mount(state.join("journal"));
    let (mut store, mut model) = open(&state);
    let mut load = Load::new(Random::of(9), 0);
    let (mut hung, mut closed) = (0, 0);
    for round in 0..20 {
        if round % 2 == 0 {
            disk.fill();
        } else {
            disk.fill_but_a_block();
        }
        for _ in 0..round {
            append(&mut store, &mut load, &mut model).unwrap();
        }
        // This ends in every state of sled.
        hung += usize::from(store.checkpoint().is_err());
        closed += usize::from(store.is_sound() == (true, false));
        disk.make_room();
        store.checkpoint().unwrap();
        assert_eq!(store.is_sound(), (true, true), "in round {round}");
        assert_eq!(
            store.history(usize::MAX, |_| true).unwrap().len(),
            model.released.len(),
            "in round {round}"
        );
    }
    println!("20 rounds: {hung} times it did not answer, {closed} times it was not kept");
    assert!(closed > 0, "there was room for it");
    assert_knows(&live(&store), &model);
    drop(store);
    let (store, known) = open(&state);
    assert_knows(&known, &model);
    assert_eq!(store.history(usize::MAX, |_| true).unwrap().len(), model.released.len());
    assert_eq!(quarantined(&state), [""; 0], "nothing was damaged");
}

/// No Allocate comes while there is free space again.
#[test]
fn both_copies_of_a_running_daemon_recover_automatically() {
    let Some(_dir) =
        inside("storage::full_disk::both_copies_of_a_running_daemon_recover_automatically", &NEEDS)
    else {
        return;
    };
    run(async {
        let (node, disk) = on_a_small_disk();
        let gpu = name("example.com/gpu");
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        let metrics = telemetry(&daemon).await;
        offered(&kubelet, &gpu, 4).await;
        daemon.logged("registered").await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        let mut answered = vec![allocate(&mut api, &["dev:gpu0"]).await.unwrap()];
        assert!(node.output(&["ledger", "export"]).status.success());
        disk.fill();
        while let Ok(alloc_id) = allocate(&mut api, &["dev:gpu1"]).await {
            answered.push(alloc_id);
        }
        until_gauge(metrics, JOURNAL, 0.0).await;
        until_gauge(metrics, DATABASE, 0.0).await;
        let status = node.json(&["status"]);
        assert_eq!(
            status["ledger"],
            serde_json::json!({"journal": false, "database": false, "not_durable": 0}),
            "{status}"
        );
        disk.make_room();
        until_gauge(metrics, JOURNAL, 1.0).await;
        until_gauge(metrics, DATABASE, 1.0).await;
        assert_eq!(
            node.json(&["ledger", "export"])["grants"].as_array().unwrap().len(),
            answered.len()
        );
    });
}

#[test]
fn if_configured_grants_are_served_without_a_disk_and_written_later() {
    let Some(_dir) = inside(
        "storage::full_disk::if_configured_grants_are_served_without_a_disk_and_written_later",
        &NEEDS,
    ) else {
        return;
    };
    run(async {
        let node = Node::with(&[("gpu", 8)]);
        let ledger = "[ledger]\nwhen_not_durable = \"serve\"\n";
        node.write_config(&format!(
            "{ledger}[telemetry]\nlisten = \"127.0.0.1:0\"\n{}",
            resource("gpu")
        ));
        // The journal is prefilled for some hundred grants. All of them are live here and in every
        // later head.
        let disk = Small::of("16m", node.state());
        let gpu = name("example.com/gpu");
        let kubelet = node.start_kubelet().await;
        let mut daemon = node.start_daemon();
        let metrics = telemetry(&daemon).await;
        offered(&kubelet, &gpu, 8).await;
        daemon.logged("registered").await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        let mut answered = Vec::new();
        for _ in 0..2 {
            disk.fill();
            // Those for which there is room still fit.
            until_gauge(metrics, NOT_DURABLE, 0.0).await;
            while gauge(metrics, NOT_DURABLE) == Some(0.0) {
                answered.push(allocate(&mut api, &["dev:gpu0"]).await.unwrap());
            }
            let status = node.json(&["status"]);
            assert!(status["ledger"]["not_durable"].as_u64() > Some(0), "{status}");
            let text = String::from_utf8(node.output(&["status"]).stdout).unwrap();
            assert!(text.contains("exist only in memory"), "{text}");
            disk.make_room();
            // Without an Allocate: the daemon may be the only process that knows of them.
            until_gauge(metrics, NOT_DURABLE, 0.0).await;
            let known = known(&node);
            assert!(
                answered.iter().all(|id| known.contains(id)),
                "{answered:?} were answered, {known:?} are known"
            );
        }
        let log = daemon.log();
        let logged =
            log.iter().filter(|line| line.contains("grants are served, but are lost")).count();
        assert_eq!(logged, 2, "once for each time: {log:#?}");

        // What was never written comes back from what the kubelet has kept.
        disk.fill();
        while gauge(metrics, NOT_DURABLE) == Some(0.0) {
            allocate(&mut api, &["dev:gpu1"]).await.unwrap();
        }
        let pod = soon(
            "an admission",
            kubelet.add_pod(PodSpec::new("default", "late").app("main", &gpu, 2)),
        )
        .await;
        assert_eq!(pod.phase, PodPhase::Running);
        daemon.kill();
        disk.make_room();
        let daemon = node.start_daemon();
        daemon.logged("the ledger lacked grants that the kubelet's checkpoint has").await;
        daemon.logged("missing").await;
        let held: usize = node
            .grants()
            .iter()
            .filter(|grant| grant.pod().is_some_and(|of| of.uid == pod.uid))
            .map(|grant| grant.devices.len())
            .sum();
        assert_eq!(held, 2);
    });
}

/// The kernel's reaction to a failing disk: the file system accepts no writes, with every file
/// open.
#[test]
fn a_disk_that_turns_read_only_refuses_grants_and_the_daemon_still_ends_cleanly() {
    let test = "storage::full_disk::a_disk_that_turns_read_only_refuses_grants_and_the_daemon_still_ends_cleanly";
    let Some(dir) = inside(test, &mounts::NEEDS) else { return };
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
        let image = dir.join("disk");
        fs::write(&image, mounts::format(&dir)).unwrap();
        let gpu = name("example.com/gpu");
        let kubelet = node.start_kubelet().await;
        let mut answered = Vec::new();
        for life in 0..3 {
            let disk = mounts::Mounted::new(&image, &node.state());
            let mut daemon = node.start_daemon();
            let metrics = telemetry(&daemon).await;
            offered(&kubelet, &gpu, 4).await;
            daemon.logged("registered").await;
            let mut api = dial(&kubelet, &node, &gpu).await;
            assert!(node.output(&["ledger", "export"]).status.success());
            for _ in 0..1 + life {
                answered.push(allocate(&mut api, &["dev:gpu0"]).await.unwrap());
            }
            command(Command::new("mount").args(["-o", "remount,abort"]).arg(node.state()));
            let refused = allocate(&mut api, &["dev:gpu1"]).await.unwrap_err();
            assert!(refused.message().contains("read-only"), "{refused}");
            until_gauge(metrics, JOURNAL, 0.0).await;
            daemon.logged("grants are refused until").await;
            // The list still changes.
            node.remove_device("gpu", 3);
            offered(&kubelet, &gpu, 3).await;
            node.create_device("gpu", 3);
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().await.code(), Some(0), "{:#?}", daemon.log());
            drop(disk);
        }
        let _disk = mounts::Mounted::new(&image, &node.state());
        let daemon = node.start_daemon();
        daemon.logged("registered").await;
        assert_eq!(
            node.grants().into_iter().map(|grant| grant.alloc_id).collect::<Vec<_>>(),
            answered
        );
    });
}

/// A verdict may follow from an event that the kernel reports once.
#[test]
fn a_verdict_that_a_full_disk_refuses_is_recorded_when_there_is_room() {
    let Some(_dir) = inside(
        "storage::full_disk::a_verdict_that_a_full_disk_refuses_is_recorded_when_there_is_room",
        &NEEDS,
    ) else {
        return;
    };
    run(async {
        let (node, disk) = on_a_small_disk();
        let kubelet = node.start_kubelet().await;
        let daemon = node.start_daemon();
        let metrics = telemetry(&daemon).await;
        let gpu = name("example.com/gpu");
        offered(&kubelet, &gpu, 4).await;
        daemon.logged("registered").await;
        let mut api = dial(&kubelet, &node, &gpu).await;
        disk.fill();
        // The journal has some room of its own.
        let mut refused = 0;
        while refused < 20 {
            refused += usize::from(allocate(&mut api, &["dev:gpu1"]).await.is_err());
        }
        let cordoned = node.output(&["device", "cordon", "dev:gpu0", "--reason", "fan"]);
        let error = String::from_utf8_lossy(&cordoned.stderr);
        assert!(!cordoned.status.success() && error.contains("make room"), "{error}");
        until_gauge(metrics, JOURNAL, 0.0).await;
        disk.make_room();
        // The next scan judges again.
        node.create_device("gpu", 4);
        let recorded = || store::peek(&node.state()).unwrap().verdicts.len();
        until("the recorded verdict", recorded, |recorded| *recorded == 1).await;
    });
}
