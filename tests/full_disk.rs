//! A file system that is full or read-only, under the ledger: new grants are refused with a reason, nothing that was
//! confirmed is lost, and it goes on by itself when there is room again.
//!
//! What sled does on a disk without room is not tested here: after an error it may never end.
//!
//! Each test has small file systems of its own, in memory; only root can mount them, elsewhere the tests say that they are
//! skipped.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod common;

use common::inside::{command, inside};
use common::ledger::{Load, Model};
use common::{Node, Random, allocate, dial, http_get, name, offered, resource, run, telemetry, until};
use holdfast::domain::{DeviceId, Durability, Entry};
use holdfast::store::{Store, StoreError};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const NEEDS: [&str; 1] = ["mount"];

/// A file system of a few megabytes.
#[derive(Debug)]
struct Small {
    at: PathBuf,
}

impl Small {
    fn mount(at: PathBuf) -> Small {
        fs::create_dir_all(&at).unwrap();
        command(Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "tmpfs"]).arg(&at));
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

    fn remount(&self, how: &str) {
        command(Command::new("mount").arg("-o").arg(format!("remount,{how}")).arg(&self.at));
    }
}

fn open(state: &Path) -> (Store, Model) {
    let (store, recovered) = Store::open(state, Durability::PowerLoss, Some("this boot")).unwrap();
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
    let names = fs::read_dir(state).unwrap().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("quarantine")).collect()
}

#[test]
fn a_read_only_disk_lets_the_ledger_start_and_refuses_grants_until_it_can_be_written() {
    let Some(dir) = inside("a_read_only_disk_lets_the_ledger_start_and_refuses_grants_until_it_can_be_written", &NEEDS) else { return };
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
        let (mut closed, recovered) = Store::open(&state, Durability::PowerLoss, Some(boot)).unwrap();
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
fn what_was_refused_for_want_of_room_is_not_believed_by_a_start_without_room() {
    let Some(dir) = inside("what_was_refused_for_want_of_room_is_not_believed_by_a_start_without_room", &NEEDS) else { return };
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
    let mut refused = vec![Entry::Named { key: "pci:refused".into(), id: DeviceId::new("GPU-refused") }];
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

fn kept(address: std::net::SocketAddr) -> String {
    let metrics = http_get(address, "/metrics").1;
    metrics.lines().find(|line| line.contains("holdfast_ledger_kept{copy=\"journal\"}")).unwrap_or_default().to_owned()
}

#[test]
fn the_daemon_says_once_that_its_disk_is_full_and_once_that_it_is_not() {
    let Some(_dir) = inside("the_daemon_says_once_that_its_disk_is_full_and_once_that_it_is_not", &NEEDS) else { return };
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
        let disk = Small::mount(node.state());
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
                until("the gauge", || kept(metrics), |line| line.ends_with(" 1"));
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
            until("the gauge", || kept(metrics), |line| line.ends_with(" 0"));
            disk.make_room();
            answered.push(allocate(&mut api, &["dev:gpu2"]).await.unwrap());
            until("the gauge", || kept(metrics), |line| line.ends_with(" 1"));
            daemon.logged("the ledger can be written again").await;
            let log = daemon.log();
            let refusals = ["grants are refused until", "no grant can be recorded"];
            let told: Vec<_> = log.iter().filter(|line| refusals.iter().any(|words| line.contains(words))).collect();
            assert_eq!(told.len(), 1, "once, not for each Allocate: {told:#?}");
            daemon.kill();
            let known: Vec<_> = node.grants().into_iter().map(|grant| grant.alloc_id).collect();
            assert!(answered.iter().all(|id| known.contains(id)), "{answered:?} were answered, {known:?} are known");
        }
    });
}
