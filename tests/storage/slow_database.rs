//! A daemon whose history cannot be read for some time, because another process has its database:
//! it serves, reports that, and has everything once the database is open. The same for a disk that
//! reports errors. `src/store/slow_tests.rs` tests how slow a database may be, and its other
//! faults.

use crate::common::inside::{command, inside};
use crate::common::ledger::{Load, Model};
use crate::common::{
    Node, Random, allocate, dial, http_get, name, offered, resource, run, telemetry, until,
    until_blocking,
};
use holdfast::domain::Durability;
use holdfast::store::Store;
use nix::sys::signal::Signal;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::process::Command;

const UNREADABLE: &str = "holdfast_ledger_unreadable_since_time_seconds";

/// Appends to a ledger, and returns what it has then.
fn fill(store: &mut Store, appends: usize) -> Model {
    let (mut load, mut model) = (Load::new(Random::of(3), 0), Model::default());
    for _ in 0..appends {
        let entries = load.entries(&model);
        store.append(&entries).unwrap();
        entries.iter().for_each(|entry| model.apply(entry));
    }
    model
}

/// Writes a ledger as a daemon of this boot has left it. Returns how many grants were given back.
fn write(node: &Node) -> usize {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let (mut store, _) =
        Store::open(&node.state(), Durability::ProcessCrash, Some(boot.trim())).unwrap();
    let model = fill(&mut store, 200);
    store.close().unwrap();
    model.released.len()
}

fn has(metrics: SocketAddr, name: &str) -> bool {
    http_get(metrics, "/metrics").1.lines().any(|line| line.starts_with(name))
}

fn quarantined(node: &Node) -> usize {
    let names = fs::read_dir(node.state())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains("quarantine")).count()
}

#[test]
fn a_daemon_serves_without_its_history_and_reports_it_until_it_is_readable() {
    run(async {
        let node = Node::with(&[("gpu", 4)]);
        node.write_config(&format!("[telemetry]\nlisten = \"127.0.0.1:0\"\n{}", resource("gpu")));
        let released = write(&node);
        // As sled locks it.
        let lock = || {
            let file = File::open(node.state().join("db/db")).unwrap();
            file.try_lock().unwrap();
            file
        };
        let mut held = Some(lock());
        let kubelet = node.start_kubelet().await;
        for stop in [Signal::SIGTERM, Signal::SIGKILL] {
            let mut daemon = node.start_daemon();
            let metrics = telemetry(&daemon).await;
            offered(&kubelet, &name("example.com/gpu"), 4).await;
            let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
            let granted = allocate(&mut api, &["dev:gpu1"]).await.unwrap();
            until(
                "that the history cannot be read",
                || has(metrics, UNREADABLE),
                |unreadable| *unreadable,
            )
            .await;
            daemon.logged("the query database stays closed, and is tried again").await;
            let status = String::from_utf8(node.output(&["status"]).stdout).unwrap();
            assert!(
                status.contains(
                    "the history cannot be read: its database could not be opened since 2"
                ),
                "{status}"
            );
            assert!(
                node.grants().iter().any(|grant| grant.alloc_id == granted),
                "who holds what is known"
            );
            let history = node.output(&["history", "-o", "json"]);
            let document: serde_json::Value = serde_json::from_slice(&history.stdout).unwrap();
            assert!(
                document["problem"].as_str().unwrap().contains("is not open yet"),
                "{document}"
            );
            assert!(
                String::from_utf8_lossy(&history.stderr)
                    .contains("some released grants are missing here"),
                "{history:?}"
            );
            // The daemon ends, and the next one begins, in every state of the database.
            daemon.signal(stop);
            daemon.exited().await;
        }
        let daemon = node.start_daemon();
        let metrics = telemetry(&daemon).await;
        until(
            "that the history cannot be read",
            || has(metrics, UNREADABLE),
            |unreadable| *unreadable,
        )
        .await;
        drop(held.take());
        until(
            "that the history can be read",
            || has(metrics, UNREADABLE),
            |unreadable| !*unreadable,
        )
        .await;
        daemon.logged("the query database is open, and has what the journal has").await;
        let document = node.json(&["history"]);
        let told = document["grants"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|grant| grant["state"] == "released")
            .count();
        assert!(
            document["problem"].is_null() && told == released,
            "{told} of {released} released grants"
        );
        assert_eq!(quarantined(&node), 0, "nothing was damaged");
        let verified = node.json(&["ledger", "verify"]);
        assert_eq!(verified["sound"], true, "{verified}");
    });
}

/// As with a bad sector: the file is there, and reading it is EIO.
#[test]
fn a_database_that_the_disk_cannot_read_is_not_damaged() {
    let test = "storage::slow_database::a_database_that_the_disk_cannot_read_is_not_damaged";
    let Some(dir) = inside(test, &["mount", "umount"]) else { return };
    let (mut store, _) = crate::storage::open(&dir, Some("this boot"));
    let model = fill(&mut store, 50);
    store.close().unwrap();
    for boot in ["this boot", "next boot"] {
        // Nothing is mapped at its beginning.
        let unreadable = format!("/proc/{}/mem", std::process::id());
        let file = dir.join("db/db");
        command(Command::new("mount").arg("--bind").arg(unreadable).arg(&file));
        let (store, recovered) = crate::storage::open(&dir, Some(boot));
        assert!(recovered.report.is_clean(), "{}", recovered.report);
        assert_eq!(Model::of(recovered).live, model.live);
        let error = store.history(usize::MAX, |_| true).unwrap_err().to_string();
        assert!(error.contains("Input/output error"), "{error}");
        command(Command::new("umount").arg(&file));
        let history = || store.history(usize::MAX, |_| true);
        let history = until_blocking("the history can be read", history, Result::is_ok).unwrap();
        assert_eq!(history.len(), model.released.len());
        assert!(store.load().report.is_clean(), "{}", store.load().report);
        store.close().unwrap();
    }
}
