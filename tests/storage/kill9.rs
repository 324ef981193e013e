//! A daemon that is killed at any moment: no grant that was answered is missing afterwards (I1),
//! and it serves again.
//!
//! `HOLDFAST_BIN` names another binary, such as the release build, `HOLDFAST_KILLS` another number
//! of kills, and `HOLDFAST_SEED` repeats the moments of an earlier run. Times are printed, not
//! judged: the machine may be busy.

use crate::common::{Daemon, HANG, Node, Random, allocate, dial, name, percentiles, run, soon};
use actix::{Actor, Arbiter};
use futures_util::future::join_all;
use holdfast::domain::{AllocId, ContainerEdits, Durability, Grant, GrantState, Timestamp};
use holdfast::kubelet::checkpoint::CheckpointReader;
use holdfast::kubelet::pod_resources::PodResources;
use holdfast::kubelet::proto::v1beta1::device_plugin_client::DevicePluginClient;
use holdfast::lab::sim::kubelet::{Event, EventKind, Kubelet};
use holdfast::ledger::{LedgerActor, LedgerConfig};
use holdfast::messages::{Record, Remember};
use holdfast::store::{self, Store};
use nix::sys::signal::Signal;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tonic::transport::Channel;

const DEVICES: usize = 64;
const CALLERS: usize = 4;

type Api = DevicePluginClient<Channel>;

/// What became of the kills so far.
#[derive(Debug, Default)]
struct Tally {
    answered: BTreeSet<AllocId>,
    /// Kills that left at least one Allocate without an answer.
    between: usize,
    /// Kills of a daemon that did not serve yet.
    starting: usize,
    starts: Vec<Duration>,
    calls: Vec<Duration>,
}

impl Tally {
    fn usual_call(&self) -> Duration {
        let mut calls = self.calls.clone();
        calls.sort();
        calls.get(calls.len() / 2).copied().unwrap_or(Duration::from_millis(1))
    }

    fn note(&mut self, answers: Vec<Result<AllocId, tonic::Status>>) {
        if answers.iter().any(Result::is_err) {
            self.between += 1;
        }
        self.answered.extend(answers.into_iter().flatten());
    }

    /// Everything that was answered is in the ledger; what was killed before its answer may be
    /// there too.
    fn check(&self, node: &Node) {
        let mut known: BTreeSet<AllocId> =
            node.grants().into_iter().map(|grant| grant.alloc_id).collect();
        if !self.answered.is_subset(&known) {
            // No pod of the kubelet's checkpoint has these grants: after a minute they count as
            // never started.
            let store::History { released, problem, .. } =
                store::peek_history(&node.state()).unwrap();
            assert!(problem.is_none(), "{problem:?}");
            known.extend(released.into_iter().map(|grant| grant.alloc_id));
        }
        let missing: Vec<_> = self.answered.difference(&known).collect();
        assert!(
            missing.is_empty(),
            "{} of {} answered grants are missing: {missing:?}",
            missing.len(),
            self.answered.len()
        );
    }
}

/// Kills from a thread of its own, since a timer of the runtime knows no microseconds.
fn kill_after(daemon: &Daemon, wait: Duration) -> std::thread::JoinHandle<()> {
    let (pid, at) = (daemon.pid(), Instant::now() + wait);
    std::thread::spawn(move || {
        std::thread::sleep(
            (at - Duration::from_micros(200)).saturating_duration_since(Instant::now()),
        );
        while Instant::now() < at {
            std::hint::spin_loop();
        }
        nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    })
}

/// Starts the daemon and waits for its list. How long that took, from before the process was made
/// until the kubelet had it.
async fn serve(node: &Node, kubelet: &Kubelet) -> (Daemon, Duration) {
    let began = kubelet.now();
    let daemon = node.start_daemon();
    let is_list =
        |event: &&Event| event.at > began && matches!(event.kind, EventKind::Listed { .. });
    let listed = kubelet
        .wait_for_some(|view| view.events().iter().find(is_list).map(|event| event.at), HANG)
        .await
        .unwrap();
    (daemon, listed - began)
}

/// One Allocate, and a kill before its answer or just after.
async fn kill_between(daemon: &Daemon, api: &mut Api, random: &mut Random, tally: &mut Tally) {
    let warm = Instant::now();
    let first = allocate(api, &["dev:gpu0"]).await;
    tally.calls.push(warm.elapsed());
    assert!(first.is_ok(), "{first:?}");
    tally.note(vec![first]);

    let id = format!("dev:gpu{}", random.below(DEVICES as u64));
    let window = u64::try_from(tally.usual_call().as_micros()).unwrap();
    let killer = kill_after(daemon, Duration::from_micros(random.below(window)));
    let answer = soon("an Allocate of a killed daemon", allocate(api, &[&id])).await;
    tally.note(vec![answer]);
    killer.join().unwrap();
}

/// Many callers allocate as fast as they can, until the first error. Each answer is checked as it
/// comes.
async fn load(api: &Api, answered: impl Fn()) -> Vec<Result<AllocId, tonic::Status>> {
    let caller = async |caller: usize| {
        let (mut api, mut answers) = (api.clone(), Vec::new());
        for call in 0.. {
            let id = format!("dev:gpu{}", (caller + CALLERS * call) % DEVICES);
            answers.push(allocate(&mut api, &[&id]).await);
            if answers.last().is_some_and(Result::is_err) {
                break;
            }
            answered();
        }
        answers
    };
    let answers = soon("callers of a killed daemon", join_all((0..CALLERS).map(caller))).await;
    answers.into_iter().flatten().collect()
}

/// A kill while the callers allocate.
async fn kill_under_load(daemon: &Daemon, api: &Api, random: &mut Random, tally: &mut Tally) {
    let killer = kill_after(daemon, Duration::from_micros(random.below(10_000)));
    tally.note(load(api, || {}).await);
    killer.join().unwrap();
}

/// A kill in the instant of an answer: what is not on disk by then never will be.
async fn kill_at_an_answer(daemon: &Daemon, api: &Api, random: &mut Random, tally: &mut Tally) {
    let left = Cell::new(random.below(20));
    let answered = || match left.get() {
        0 => daemon.signal(Signal::SIGKILL),
        n => left.set(n - 1),
    };
    tally.note(load(api, answered).await);
}

#[test]
fn a_daemon_killed_at_any_time_has_every_answered_grant_and_serves_again() {
    run(async {
        let kills = std::env::var("HOLDFAST_KILLS").map_or(100, |text| text.parse().unwrap());
        let (mut random, mut tally) = (Random::new(), Tally::default());
        let node = Node::with(&[("gpu", DEVICES)]);
        let kubelet = node.start_kubelet().await;
        for kill in 0..kills {
            if kill % 10 == 9 {
                // Recovery itself is cut off.
                let mut daemon = node.start_daemon();
                let usual = tally.starts[tally.starts.len() / 2];
                kill_after(&daemon, usual.mul_f64(random.below(1000) as f64 / 1e3)).join().unwrap();
                daemon.kill();
                tally.starting += 1;
                tally.check(&node);
                continue;
            }
            let (mut daemon, took) = serve(&node, &kubelet).await;
            tally.starts.push(took);
            tally.check(&node);
            let mut api = dial(&kubelet, &node, &name("example.com/gpu")).await;
            match kill % 3 {
                0 => kill_between(&daemon, &mut api, &mut random, &mut tally).await,
                1 => kill_under_load(&daemon, &api, &mut random, &mut tally).await,
                _ => kill_at_an_answer(&daemon, &api, &mut random, &mut tally).await,
            }
            daemon.kill();
            tally.check(&node);
        }

        let (daemon, took) = serve(&node, &kubelet).await;
        tally.starts.push(took);
        let exported = node.json(&["ledger", "export"]);
        let exported: BTreeSet<&str> = exported["grants"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["alloc_id"].as_str().unwrap())
            .collect();
        assert!(
            tally.answered.iter().all(|id| exported.contains(id.as_str())),
            "the export misses a grant"
        );
        assert_eq!(kubelet.panicked(), None);
        assert!(
            tally.between * 3 >= kills,
            "only {} of {kills} kills fell between a request and its answer",
            tally.between
        );
        println!(
            "{kills} kills: {} between a request and its answer, {} during a start; {} grants were answered, {} more were recorded\n\
             from the process's start to its list at the kubelet: {}",
            tally.between,
            tally.starting,
            tally.answered.len(),
            exported.len() - tally.answered.len(),
            percentiles(tally.starts)
        );
        drop(daemon);
    });
}

/// A kill almost never falls between an answer and a write that comes microseconds later. A journal
/// that cannot be written in that time shows the order every time.
#[test]
fn no_grant_is_answered_before_the_journal_has_it() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(dir.path(), Durability::PowerLoss, None).unwrap();
        let store = Arc::new(Mutex::new(store));
        let config = LedgerConfig {
            store: Arc::clone(&store),
            recovered: Arc::default(),
            process_crash: false,
            plan: watch::channel(Arc::default()).1,
            kept: Arc::new(watch::Sender::new(store.lock().unwrap().kept())),
            grants: Arc::new(watch::Sender::default()),
            due: Arc::new(watch::Sender::default()),
            forget: None,
            names: Arc::new(watch::Sender::default()),
            inventory: watch::channel(Arc::default()).1,
            checkpoint: CheckpointReader::new(dir.path().join("device-plugins")),
            pod_resources: PodResources::new(dir.path().join("pod-resources.sock")),
            host_root: dir.path().to_owned(),
            boot_id: "boot".into(),
            kubelet: watch::channel(None).1,
            claims: watch::channel(Arc::default()).1,
            gate: Arc::default(),
            resend: Arc::default(),
        };
        let arbiter = Arbiter::new();
        let ledger =
            LedgerActor::start_in_arbiter(&arbiter.handle(), move |_| LedgerActor::new(config, ()));
        // The actor has started when it answers; then only its commits need the store.
        ledger.send(Remember(Vec::new())).await.unwrap().unwrap();

        let grant = Grant {
            alloc_id: AllocId::new("a-1"),
            resource: name("example.com/gpu"),
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            claim: None,
            boot_id: "boot".into(),
            kubelet: None,
            granted_at: Timestamp(0),
            version: "1".into(),
            state: GrantState::Granted,
        };
        // A thread holds the store, as a disk does that is stuck.
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (stuck, is_stuck) = std::sync::mpsc::channel();
        let holder = std::thread::spawn(move || {
            let _guard = store.lock().unwrap();
            stuck.send(()).unwrap();
            released.recv()
        });
        is_stuck.recv().unwrap();
        let answer =
            crate::common::ledger::ask(&ledger, Record { grant: Arc::new(grant), exclusive: true });
        tokio::pin!(answer);
        // Longer than any answer takes; a busy machine can only hide a wrong order, not spoil a
        // right one.
        assert!(
            tokio::time::timeout(Duration::from_millis(300), &mut answer).await.is_err(),
            "answered before the append"
        );
        assert!(store::peek(dir.path()).unwrap().grants.is_empty());
        release.send(()).unwrap();
        holder.join().unwrap().unwrap();
        soon("the answer", answer).await.unwrap().unwrap();
        assert_eq!(store::peek(dir.path()).unwrap().grants.len(), 1);
        arbiter.stop();
    });
}
