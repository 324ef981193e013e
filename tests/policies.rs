//! What the operator can choose where no answer is right for everybody. The full disk is in `tests/full_disk.rs`.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod common;

use actix::{Actor, Addr, Arbiter};
use common::{name, run, soon};
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceId, Durability, Entry, Grant, GrantState, GrantedDevice, KubeletGeneration, PodRef, Policy, Refuse,
    Timestamp,
};
use holdfast::ledger::{LedgerActor, LedgerConfig};
use holdfast::messages::{Reconcile, Record, RecordError};
use holdfast::store::{self, Store};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// A kubelet that has been there for long.
const KUBELET: Option<KubeletGeneration> = Some(KubeletGeneration { inode: 1, ctime_ns: 1 });

fn grant(alloc_id: &str, state: GrantState) -> Grant {
    Grant {
        alloc_id: AllocId::new(alloc_id),
        resource: name("example.com/gpu"),
        devices: vec![GrantedDevice { id: DeviceId::new("gpu0"), key: "dev:/dev/gpu0".into(), numa_nodes: Vec::new() }],
        edits: ContainerEdits::default(),
        boot_id: "boot".into(),
        kubelet: KUBELET,
        granted_at: Timestamp(1),
        version: "1".into(),
        state,
    }
}

/// A ledger that knows one pod, which runs: its sandbox and its container.
async fn ledger(dir: &Path, policy: Policy, arbiter: &Arbiter) -> Addr<LedgerActor> {
    let root = dir.join("host/sys/fs/cgroup");
    fs::create_dir_all(&root).unwrap();
    fs::write(root.join("cgroup.controllers"), "cpu\n").unwrap();
    for folder in ["kubepods", "kubepods/podu1", "kubepods/podu1/sandbox", "kubepods/podu1/main"] {
        fs::create_dir_all(root.join(folder)).unwrap();
        fs::write(root.join(folder).join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
    }
    let (mut store, _) = Store::open(&dir.join("state"), Durability::PowerLoss, None).unwrap();
    let pod = PodRef { uid: "u1".into(), namespace: Some("default".into()), name: Some("first".into()) };
    let held = GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(1) };
    store.append(&[Entry::Grant(Box::new(grant("first", held)))]).unwrap();
    let config = LedgerConfig {
        kept: Arc::new(watch::Sender::new(store.kept())),
        store: Arc::new(Mutex::new(store)),
        recovered: Arc::default(),
        process_crash: false,
        policy,
        grants: Arc::new(watch::Sender::default()),
        names: Arc::new(watch::Sender::default()),
        inventory: watch::channel(Arc::default()).1,
        device_plugins: dir.join("device-plugins"),
        pod_resources: dir.join("pod-resources.sock"),
        host_root: dir.join("host"),
        boot_id: "boot".into(),
        kubelet: watch::channel(KUBELET).1,
        gate: Arc::default(),
    };
    let ledger = LedgerActor::start_in_arbiter(&arbiter.handle(), move |_| LedgerActor::new(config, ()));
    ledger.send(Reconcile).await.unwrap();
    ledger
}

/// Asks for the device until the ledger has seen who runs: it looks behind its start.
async fn ask(ledger: &Addr<LedgerActor>, calls: usize) -> Vec<Result<(), RecordError>> {
    let mut answers = Vec::new();
    for call in 0..calls {
        let asked = Record { grant: grant(&format!("next-{call}"), GrantState::Granted), exclusive: true };
        answers.push(soon("the answer", ledger.send(asked)).await.unwrap());
    }
    answers
}

#[test]
fn a_device_that_another_pod_provably_has_is_refused_unless_the_operator_wants_it_granted() {
    run(async {
        let arbiter = Arbiter::new();
        let dir = tempfile::tempdir().unwrap();
        let refusing = ledger(dir.path(), Policy::default(), &arbiter).await;
        let refusal = async {
            loop {
                if let Some(Err(error)) = ask(&refusing, 1).await.pop() {
                    return error.to_string();
                }
            }
        };
        let refusal = soon("a refusal", refusal).await;
        assert!(refusal.contains("default/first") && refusal.contains("gpu0"), "{refusal}");

        let dir = tempfile::tempdir().unwrap();
        let granting = ledger(dir.path(), Policy { refuse: Refuse::Never, ..Policy::default() }, &arbiter).await;
        assert!(ask(&granting, 200).await.iter().all(Result::is_ok));
        let known = store::peek(&dir.path().join("state")).unwrap().grants;
        assert_eq!(known.len(), 201, "each of them is in the ledger, beside the one that has it");
        arbiter.stop();
    });
}
