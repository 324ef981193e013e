//! Settings where no single answer fits every operator. The full disk is in `tests/full_disk.rs`.

use crate::common::{name, pause, run, soon, until};
use actix::{Actor, Addr, Arbiter};
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, Entry, Grant, GrantState, GrantedDevice,
    KubeletGeneration, Plan, PodRef, Policy, Refuse, Timestamp,
};
use holdfast::kubelet::checkpoint::CheckpointReader;
use holdfast::kubelet::pod_resources::PodResources;
use holdfast::ledger::{LedgerActor, LedgerConfig};
use holdfast::messages::{Publish, Record, WithReply};
use holdfast::store::{self, Store};
use holdfast::telemetry::metrics;
use holdfast::telemetry::table::Metric;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// An actor that has not answered for so long is taken to be in a write.
const HANGS: Duration = Duration::from_millis(500);
/// A kubelet that has run for long.
const KUBELET: Option<KubeletGeneration> = Some(KubeletGeneration { inode: 1, made_ns: 1 });

fn grant(alloc_id: &str, state: GrantState) -> Grant {
    Grant {
        alloc_id: AllocId::new(alloc_id),
        resource: name("example.com/policies"),
        devices: vec![GrantedDevice {
            id: DeviceId::new("gpu0"),
            key: "dev:/dev/gpu0".into(),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: Vec::new(),
        }],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "boot".into(),
        kubelet: KUBELET,
        granted_at: Timestamp(1),
        version: "1".into(),
        state,
    }
}

/// A ledger with one running pod: its sandbox and its container. Its first pass is complete.
async fn ledger(dir: &Path, policy: Policy, arbiter: &Arbiter) -> Addr<LedgerActor> {
    with_store(dir, policy, arbiter).await.0
}

/// The same, with its store.
async fn with_store(
    dir: &Path,
    policy: Policy,
    arbiter: &Arbiter,
) -> (Addr<LedgerActor>, Arc<Mutex<Store>>) {
    let root = dir.join("host/sys/fs/cgroup");
    fs::create_dir_all(&root).unwrap();
    fs::write(root.join("cgroup.controllers"), "cpu\n").unwrap();
    for folder in ["kubepods", "kubepods/podu1", "kubepods/podu1/sandbox", "kubepods/podu1/main"] {
        fs::create_dir_all(root.join(folder)).unwrap();
        fs::write(root.join(folder).join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
    }
    fs::create_dir_all(dir.join("host/var/log/pods/default_first_u1")).unwrap();
    let (mut store, _) = Store::open(&dir.join("state"), Durability::PowerLoss, None).unwrap();
    let pod = PodRef { uid: "u1".into(), namespace: None, name: None };
    let held = GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(1) };
    store.append(&[Entry::Grant(Arc::new(grant("first", held)))]).unwrap();
    let (grants, mut looked) = watch::channel(Arc::default());
    let kept = Arc::new(watch::Sender::new(store.kept()));
    let store = Arc::new(Mutex::new(store));
    let config = LedgerConfig {
        kept,
        store: Arc::clone(&store),
        recovered: Arc::default(),
        process_crash: false,
        plan: watch::channel(Arc::new(Plan { ledger: policy, ..Plan::default() })).1,
        grants: Arc::new(grants),
        due: Arc::new(watch::Sender::default()),
        forget: None,
        names: Arc::new(watch::Sender::default()),
        inventory: watch::channel(Arc::default()).1,
        checkpoint: CheckpointReader::new(dir.join("device-plugins")),
        pod_resources: PodResources::new(dir.join("pod-resources.sock")),
        host_root: dir.join("host"),
        boot_id: "boot".into(),
        kubelet: watch::channel(KUBELET).1,
        claims: watch::channel(Arc::default()).1,
        gate: Arc::default(),
        resend: Arc::default(),
    };
    let ledger =
        LedgerActor::start_in_arbiter(&arbiter.handle(), move |_| LedgerActor::new(config, ()));
    // A ledger with the pod's name has also read its cgroups.
    let is_named = |grants: &Arc<Vec<Arc<Grant>>>| {
        grants.iter().any(|grant| grant.pod().is_some_and(|pod| pod.name.is_some()))
    };
    drop(soon("the look", looked.wait_for(is_named)).await.unwrap());
    (ledger, store)
}

fn live(dir: &Path) -> Vec<String> {
    let grants = store::peek(&dir.join("state")).unwrap().grants;
    grants.into_iter().map(|grant| grant.alloc_id.to_string()).collect()
}

fn unanswered(id: &str) -> Record {
    Record { grant: Arc::new(grant(id, GrantState::Granted)), exclusive: false }
}

/// The kubelet has got an error for this Allocate, and may give the device to another pod.
#[test]
fn an_allocate_that_failed_before_the_ledger_saw_it_is_not_recorded() {
    run(async {
        let (arbiter, dir) = (Arbiter::new(), tempfile::tempdir().unwrap());
        let ledger = ledger(dir.path(), Policy::default(), &arbiter).await;
        let (reply, answer) = tokio::sync::oneshot::channel();
        drop(answer);
        ledger.try_send(WithReply { message: unanswered("late"), reply }).unwrap();
        let next = crate::common::ledger::ask(&ledger, unanswered("next"));
        soon("the next answer", next).await.unwrap().unwrap();
        assert_eq!(live(dir.path()), ["first", "next"]);
        let past = store::peek_history(&dir.path().join("state")).unwrap().released;
        assert!(past.is_empty(), "{past:?}");
        arbiter.stop();
    });
}

/// Its write hangs until the kubelet has got an error.
#[test]
#[expect(clippy::await_holding_lock, reason = "the actor waits for it on a thread of its own")]
fn an_allocate_that_failed_while_it_was_written_holds_no_device() {
    run(async {
        let (arbiter, dir) = (Arbiter::new(), tempfile::tempdir().unwrap());
        let (ledger, store) = with_store(dir.path(), Policy::default(), &arbiter).await;
        let held = store.lock().unwrap();
        let late = crate::common::ledger::ask(&ledger, unanswered("late"));
        // An actor that answers is not in the write yet.
        let answers = || tokio::time::timeout(HANGS, ledger.send(Publish));
        while answers().await.is_ok() {
            pause().await;
        }
        drop((late, held));
        let next = crate::common::ledger::ask(&ledger, unanswered("next"));
        soon("the next answer", next).await.unwrap().unwrap();
        until("the release", || live(dir.path()), |live| *live == ["first", "next"]).await;
        arbiter.stop();
    });
}

#[test]
fn an_entry_that_no_record_can_hold_is_refused_alone() {
    run(async {
        let (arbiter, dir) = (Arbiter::new(), tempfile::tempdir().unwrap());
        let ledger =
            ledger(dir.path(), Policy { refuse: Refuse::Never, ..Policy::default() }, &arbiter)
                .await;
        let failures = metrics::counted(Metric::JournalFailures, &[]);
        let record = |grant: Grant| Record { grant: Arc::new(grant), exclusive: false };
        for round in 0..20 {
            let oversized = Grant {
                version: "1".repeat(3 << 20),
                ..grant(&format!("long-{round}"), GrantState::Granted)
            };
            let beside = |name: &str| {
                crate::common::ledger::ask(
                    &ledger,
                    record(grant(&format!("{name}-{round}"), GrantState::Granted)),
                )
            };
            let sent = futures_util::future::join3(
                beside("before"),
                crate::common::ledger::ask(&ledger, record(oversized)),
                beside("after"),
            );
            let (before, oversized, after) = soon("the answers", sent).await;
            let (before, oversized, after) = (before.unwrap(), oversized.unwrap(), after.unwrap());
            assert!(before.is_ok() && after.is_ok(), "round {round}: {before:?} {after:?}");
            assert!(oversized.is_err_and(|error| {
                error.to_string().contains("a record of the journal holds at most")
            }));
        }
        assert_eq!(
            metrics::counted(Metric::JournalFailures, &[]),
            failures,
            "the journal is in order"
        );
        assert_eq!(store::peek(&dir.path().join("state")).unwrap().grants.len(), 1 + 2 * 20);
        arbiter.stop();
    });
}

#[test]
fn a_device_provably_held_by_another_pod_is_refused_unless_configured_otherwise() {
    run(async {
        let arbiter = Arbiter::new();
        for (refuse, is_granted) in [(Refuse::Proven, false), (Refuse::Never, true)] {
            let dir = tempfile::tempdir().unwrap();
            let ledger = ledger(dir.path(), Policy { refuse, ..Policy::default() }, &arbiter).await;
            let asked =
                Record { grant: Arc::new(grant("next", GrantState::Granted)), exclusive: true };
            let answer =
                soon("the answer", crate::common::ledger::ask(&ledger, asked)).await.unwrap();
            assert_eq!(answer.is_ok(), is_granted, "{refuse:?}: {answer:?}");
            if let Err(refusal) = answer {
                let refusal = refusal.to_string();
                assert!(refusal.contains("default/first") && refusal.contains("gpu0"), "{refusal}");
            }
            let told =
                ["example.com/policies", "yes", if is_granted { "granted" } else { "refused" }];
            assert_eq!(metrics::counted(Metric::Doubts, &told), 1, "{refuse:?}");
            let known = store::peek(&dir.path().join("state")).unwrap().grants;
            assert_eq!(
                known.len(),
                1 + usize::from(is_granted),
                "{refuse:?}: in addition to the holder"
            );
        }
        arbiter.stop();
    });
}
