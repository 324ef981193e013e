//! Claims of DRA, by the ledger's own messages: what is answered is durable, and has one holder.

use crate::common::{name, run, soon};
use actix::{Actor, Addr, Arbiter, Handler, Message};
use holdfast::domain::{
    AllocId, Allocated, ClaimEvidence, ClaimHold, ClaimRef, ClaimedDevice, ContainerEdits,
    DeviceId, DraName, Durability, Grant, GrantState, GrantedDevice, KubeletGeneration, Object,
    PodRef, Timestamp,
};
use holdfast::kubelet::checkpoint::CheckpointReader;
use holdfast::kubelet::pod_resources::PodResources;
use holdfast::ledger::{LedgerActor, LedgerConfig};
use holdfast::messages::{Reconcile, Record, RecordClaim, RecordError, ReleaseClaim, WithReply};
use holdfast::store::{self, Store};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tokio::sync::{oneshot, watch};

const KUBELET: Option<KubeletGeneration> = Some(KubeletGeneration { inode: 1, made_ns: 1 });

/// A ledger of this directory, and the live grants that it publishes.
struct Ledger {
    actor: Addr<LedgerActor>,
    arbiter: Arbiter,
    grants: watch::Receiver<Arc<Vec<Arc<Grant>>>>,
}

impl Ledger {
    fn new(dir: &Path) -> Self {
        let root = dir.join("host/sys/fs/cgroup");
        fs::create_dir_all(root.join("kubepods")).unwrap();
        fs::write(root.join("cgroup.controllers"), "cpu\n").unwrap();
        let (store, _) = Store::open(&dir.join("state"), Durability::PowerLoss, None).unwrap();
        let (grants, published) = watch::channel(Arc::default());
        let config = LedgerConfig {
            kept: Arc::new(watch::Sender::new(store.kept())),
            store: Arc::new(Mutex::new(store)),
            recovered: Arc::default(),
            process_crash: false,
            plan: watch::channel(Arc::default()).1,
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
            claims: watch::channel(Arc::new(ClaimEvidence::default())).1,
            gate: Arc::default(),
            resend: Arc::default(),
        };
        let arbiter = Arbiter::new();
        let actor =
            LedgerActor::start_in_arbiter(&arbiter.handle(), move |_| LedgerActor::new(config, ()));
        Ledger { actor, arbiter, grants: published }
    }

    fn ask<M>(&self, message: M) -> oneshot::Receiver<M::Result>
    where
        M: Message + Send + 'static,
        M::Result: Send,
        LedgerActor: Handler<WithReply<M>, Result = ()>,
    {
        let (reply, answer) = oneshot::channel();
        assert!(self.actor.try_send(WithReply { message, reply }).is_ok());
        answer
    }

    async fn prepare(&self, grants: Vec<Grant>) -> Result<Vec<Arc<Grant>>, RecordError> {
        let grants = grants.into_iter().map(Arc::new).collect();
        soon("the answer", self.ask(RecordClaim { grants })).await.unwrap()
    }

    async fn unprepare(&self, uid: &str) {
        let answer = self.ask(ReleaseClaim { claim: claim(uid), pods: BTreeSet::new() });
        soon("the answer", answer).await.unwrap().unwrap();
    }
}

fn claim(uid: &str) -> ClaimRef {
    ClaimRef { uid: uid.into(), namespace: "ml".into(), name: format!("claim-{uid}") }
}

fn grant(alloc_id: &str, resource: &str, id: &str) -> Grant {
    Grant {
        alloc_id: AllocId::new(alloc_id),
        resource: name(resource),
        devices: vec![GrantedDevice {
            id: DeviceId::new(id),
            key: format!("dev:/dev/{id}"),
            numa_nodes: Vec::new(),
            nodes: Vec::new(),
            objects: vec![Object::node(&format!("/dev/{id}"))],
        }],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "boot".into(),
        kubelet: KUBELET,
        granted_at: Timestamp(1),
        version: "1".into(),
        state: GrantState::Granted,
    }
}

fn of_claim(alloc_id: &str, uid: &str, resource: &str, id: &str, pod: &str) -> Grant {
    let allocated = Allocated {
        request: "device".into(),
        name: DraName { pool: "n1/char".into(), device: id.into() },
        share_id: None,
        admin: false,
    };
    let claimed = ClaimedDevice {
        allocated,
        id: DeviceId::new(id),
        cdi_devices: vec![format!("k8s.holdfast.dev/claim={alloc_id}")],
        edits: ContainerEdits::default(),
        metadata: String::new(),
    };
    let hold = ClaimHold { claim: claim(uid), allocation: "digest".into(), devices: vec![claimed] };
    let pods = vec![PodRef { uid: pod.into(), namespace: None, name: None }];
    Grant {
        claim: Some(Arc::new(hold)),
        state: GrantState::Prepared { pods, prepared_at: Timestamp(1), unprepared_at: None },
        ..grant(alloc_id, resource, id)
    }
}

/// Makes processes of a pod run, or end.
fn runs(dir: &Path, uid: &str, populated: u8) {
    let pod = dir.join("host/sys/fs/cgroup/kubepods").join(format!("pod{uid}"));
    fs::create_dir_all(&pod).unwrap();
    fs::write(pod.join("cgroup.events"), format!("populated {populated}\nfrozen 0\n")).unwrap();
}

fn live(dir: &Path) -> Vec<String> {
    let grants = store::peek(&dir.join("state")).unwrap().grants;
    grants.iter().map(|grant| format!("{} {}", grant.alloc_id, grant.state_name())).collect()
}

fn ids(answer: &[Arc<Grant>]) -> Vec<&str> {
    answer.iter().map(|grant| grant.alloc_id.as_str()).collect()
}

#[test]
fn requests_for_one_claim_that_come_at_once_have_one_answer_and_it_is_durable() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::new(dir.path());
        let wanted = |n: usize| {
            vec![
                Arc::new(of_claim(&format!("a-{n}"), "c1", "example.com/a", "x", "u1")),
                Arc::new(of_claim(&format!("b-{n}"), "c1", "example.com/b", "y", "u1")),
            ]
        };
        // All of them wait in the mailbox before the first commit.
        let asked: Vec<_> =
            (0..10).map(|n| ledger.ask(RecordClaim { grants: wanted(n) })).collect();
        let first = soon("the first answer", futures_util::future::join_all(asked)).await;
        for answer in first {
            assert_eq!(ids(&answer.unwrap().unwrap()), ["a-0", "b-0"]);
        }
        assert_eq!(live(dir.path()), ["a-0 prepared", "b-0 prepared"]);
        // An Unprepare behind a Prepare of another pod, in one batch.
        let prepared = ledger.ask(RecordClaim {
            grants: vec![Arc::new(of_claim("a-20", "c1", "example.com/a", "x", "u2"))],
        });
        let unprepared = ledger.ask(ReleaseClaim { claim: claim("c1"), pods: BTreeSet::new() });
        soon("the Prepare", prepared).await.unwrap().unwrap();
        soon("the Unprepare", unprepared).await.unwrap().unwrap();
        assert_eq!(live(dir.path()), Vec::<String>::new(), "no process of any pod runs");
        ledger.unprepare("c1").await;
        ledger.arbiter.stop();
    });
}

#[test]
fn a_claim_and_an_allocate_never_have_one_device() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::new(dir.path());
        let allocate =
            |grant: Grant| ledger.ask(Record { grant: Arc::new(grant), exclusive: true });
        // Both in one batch: the first one has it.
        let by_name = ledger.ask(RecordClaim {
            grants: vec![Arc::new(of_claim("a-1", "c1", "example.com/a", "x", "u1"))],
        });
        let by_number = allocate(grant("p-1", "example.com/a", "x"));
        assert_eq!(ids(&soon("the claim", by_name).await.unwrap().unwrap()), ["a-1"]);
        let refused = soon("the refusal", by_number).await.unwrap().unwrap_err().to_string();
        assert!(refused.contains("is held by claim ml/claim-c1"), "{refused}");

        soon("an Allocate", allocate(grant("p-2", "example.com/a", "z"))).await.unwrap().unwrap();
        let refused = ledger.prepare(vec![of_claim("a-2", "c2", "example.com/other", "z", "u2")]);
        let refused = refused.await.unwrap_err().to_string();
        assert!(refused.contains("grant p-2"), "{refused}");
        let bad = ledger.prepare(vec![grant("p-3", "example.com/a", "w")]).await.unwrap_err();
        assert!(bad.to_string().contains("one claim"), "{bad}");
        assert_eq!(live(dir.path()), ["a-1 prepared", "p-2 granted"]);
        ledger.arbiter.stop();
    });
}

#[test]
fn a_force_deleted_pod_keeps_its_claim_until_its_last_process_has_ended() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger::new(dir.path());
        runs(dir.path(), "u1", 1);
        ledger.prepare(vec![of_claim("a-1", "c1", "example.com/a", "x", "u1")]).await.unwrap();
        ledger.unprepare("c1").await;
        let wanted = || vec![of_claim("a-2", "c2", "example.com/a", "x", "u2")];
        let refused = ledger.prepare(wanted()).await.unwrap_err().to_string();
        assert!(refused.contains("no process of its pods runs"), "{refused}");
        assert_eq!(live(dir.path()), ["a-1 prepared"], "also after a crash");
        runs(dir.path(), "u1", 0);
        // The refusal itself calls for the pass that finds the end.
        assert!(ledger.prepare(wanted()).await.is_err());
        let is_free = |grants: &Arc<Vec<Arc<Grant>>>| grants.is_empty();
        drop(soon("the release", ledger.grants.wait_for(is_free)).await.unwrap());
        assert_eq!(ids(&ledger.prepare(wanted()).await.unwrap()), ["a-2"]);
        ledger.actor.send(Reconcile).await.unwrap();
        ledger.arbiter.stop();
    });
}
