//! Follows the kubelet's record of claims (`dra_manager_state`): one reader for all parts.
//!
//! The kubelet prepares a claim once for all of its pods, and adds later pods to its record only.
//! It drops a pod that was deleted by force while its containers run. So the record is read at each
//! of its changes, and a pod that was dropped is kept here until the ledger has it.

use crate::domain::{ClaimEvidence, DRA_DRIVER, Grant, KubeletClaims};
use crate::host::{self, Change, DirWatch};
use crate::kubelet::dra::state::{ClaimStateError, FILE_NAME, read_record};
use crate::messages::{Mailbox, Reconcile};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// The interval of the poll. Events may be lost; the poll is not.
const POLL: Duration = Duration::from_secs(15);
/// The interval where inotify does not watch the directory.
const POLL_ALONE: Duration = Duration::from_secs(1);

/// The kubelet's record, or why it cannot be read.
pub(crate) type Record = Result<Arc<KubeletClaims>, Arc<ClaimStateError>>;

/// The live grants, as the ledger publishes them.
type Grants = watch::Receiver<Arc<Vec<Arc<Grant>>>>;

/// Reads the record. Cheap to clone; the clones share their state.
#[derive(Debug, Clone)]
pub(crate) struct Records(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The kubelet's directory.
    dir: PathBuf,
    grants: Grants,
    /// The last record that could be read, with the pods that the ledger lacks. One read at a time.
    kept: Mutex<Arc<KubeletClaims>>,
    latest: watch::Sender<Record>,
}

impl Records {
    /// Of this directory of the kubelet. Nothing is read yet.
    pub(crate) fn new(dir: PathBuf, grants: Grants) -> Self {
        let source = io::Error::other("it was not read yet");
        let first = ClaimStateError::Unreadable { path: dir.join(FILE_NAME), source };
        let latest = watch::Sender::new(Err(Arc::new(first)));
        Records(Arc::new(Shared { dir, grants, kept: Mutex::default(), latest }))
    }

    /// Each record that was read, and each failure.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Record> {
        self.0.latest.subscribe()
    }

    /// Reads the record now.
    pub(crate) async fn read(&self) -> Record {
        let shared = Arc::clone(&self.0);
        let reading = tokio::task::spawn_blocking(move || shared.read().0);
        reading.await.unwrap_or_else(|error| {
            // The reader has panicked, which is reported already.
            let (path, source) = (self.0.dir.join(FILE_NAME), io::Error::other(error));
            Err(Arc::new(ClaimStateError::Unreadable { path, source }))
        })
    }

    /// The UIDs of a claim's pods, by a read now. Those of the last record if it cannot be read.
    pub(crate) async fn pods_of(&self, uid: &str) -> BTreeSet<String> {
        let shared = Arc::clone(&self.0);
        let reading = tokio::task::spawn_blocking(move || shared.read().1);
        let kept = reading.await.unwrap_or_default();
        kept.claims.get(uid).map(|claim| claim.pods.clone()).unwrap_or_default()
    }
}

impl Shared {
    /// The record now, and the last one that could be read.
    fn read(&self) -> (Record, Arc<KubeletClaims>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let recorded = pods(&self.grants.borrow());
        let is_recorded = |uid: &str, pod: &str| {
            recorded.get(uid).is_some_and(|claim| claim.iter().all(|grant| grant.contains(pod)))
        };
        let record = match read_record(&self.dir, DRA_DRIVER) {
            Ok(mut found) => {
                found.keep_pods_of(&kept, is_recorded);
                *kept = Arc::new(found);
                Ok(Arc::clone(&kept))
            }
            Err(error) => Err(Arc::new(error)),
        };
        let former = self.latest.send_replace(record.clone());
        if let Err(error) = &record {
            let former = former.err().map(|former| former.to_string());
            let is_new = former != Some(error.to_string());
            if is_new && !error.is_absent() {
                tracing::warn!(%error, "cannot read the kubelet's record of claims");
            } else {
                tracing::debug!(%error, "no record of claims");
            }
        }
        (record, Arc::clone(&kept))
    }
}

/// The pods of each live claim, by its UID: one set for each of its grants.
fn pods(grants: &[Arc<Grant>]) -> BTreeMap<String, Vec<BTreeSet<String>>> {
    let mut claims: BTreeMap<String, Vec<BTreeSet<String>>> = BTreeMap::new();
    for grant in grants.iter().filter(|grant| grant.is_live()) {
        let Some(hold) = &grant.claim else { continue };
        let pods = grant.pods().map(|pod| pod.uid.clone()).collect();
        claims.entry(hold.claim.uid.clone()).or_default().push(pods);
    }
    claims
}

/// Whether a live claim has a pod in the record that a grant of it lacks.
fn has_new_pod(record: &KubeletClaims, grants: &[Arc<Grant>]) -> bool {
    pods(grants).iter().any(|(uid, grants)| {
        let listed = record.claims.get(uid).map(|claim| &claim.pods);
        listed.is_some_and(|listed| grants.iter().any(|known| !listed.is_subset(known)))
    })
}

/// The task.
pub(crate) struct RecordsTask {
    pub(crate) records: Records,
    pub(crate) grants: Grants,
    /// Its part about the kubelet.
    pub(crate) evidence: watch::Sender<Arc<ClaimEvidence>>,
    pub(crate) reconcile: Mailbox<Reconcile>,
}

impl RecordsTask {
    /// Reads each change, and has the ledger record new pods of its claims.
    pub(crate) async fn run(mut self) {
        let mut watch = self.watch();
        let (mut latest, mut is_due) = (self.records.subscribe(), true);
        loop {
            if std::mem::take(&mut is_due) {
                // A failure is published too.
                drop(self.records.read().await);
            }
            self.publish(latest.borrow_and_update().clone());
            let is_whole = watch.as_ref().is_some_and(DirWatch::is_whole);
            let poll = host::until_tick(if is_whole { POLL } else { POLL_ALONE });
            tokio::select! {
                () = change(&mut watch) => is_due = true,
                changed = latest.changed() => if changed.is_err() { return },
                changed = self.grants.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(poll) => {
                    is_due = true;
                    match &mut watch {
                        Some(watch) => watch.rearm(),
                        None => watch = self.watch(),
                    }
                }
            }
        }
    }

    fn watch(&self) -> Option<DirWatch> {
        let failed = |error: &io::Error| tracing::debug!(%error, "inotify is not available; the record of claims is polled");
        DirWatch::new([self.records.0.dir.clone()]).inspect_err(failed).ok()
    }

    fn publish(&mut self, record: Record) {
        let grants = self.grants.borrow_and_update().clone();
        let has_new_pod = record.as_ref().is_ok_and(|record| has_new_pod(record, &grants));
        let kubelet = record.ok().map(|record| KubeletClaims::clone(&record));
        self.evidence.send_if_modified(|known| {
            let is_changed = known.kubelet != kubelet;
            if is_changed {
                Arc::make_mut(known).kubelet = kubelet;
            }
            is_changed
        });
        if has_new_pod {
            self.reconcile.send(Reconcile);
        }
    }
}

/// Waits until the record may have changed.
async fn change(watch: &mut Option<DirWatch>) {
    let Some(watching) = watch else { return std::future::pending().await };
    loop {
        match watching.next().await {
            Ok(Change::Entry { name, .. }) if name != FILE_NAME => {}
            Ok(_) => return,
            Err(error) => {
                tracing::warn!(%error, "inotify failed; falling back to polling");
                *watch = None;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{
        AllocId, ClaimHold, ClaimRef, ContainerEdits, GrantState, PodRef, ResourceName, Timestamp,
    };
    use crate::messages::{CallError, Deliver};
    use futures_util::future::BoxFuture;
    use std::fs;
    use std::path::Path;

    /// Replaces the record as the kubelet does it. Each claim has a device of this driver.
    fn write(dir: &Path, claims: &[(&str, &[&str])]) {
        let claim = |(uid, pods): &(&str, &[&str])| {
            let pods: BTreeMap<&str, [(); 0]> = pods.iter().map(|pod| (*pod, [])).collect();
            let pods = serde_json::to_string(&pods).unwrap().replace("[]", "{}");
            format!(
                r#"{{"ClaimUID":"{uid}","ClaimName":"c","Namespace":"ml","PodUIDs":{pods},"DriverState":{{"{DRA_DRIVER}":{{"Devices":[]}}}}}}"#
            )
        };
        let claims: Vec<String> = claims.iter().map(claim).collect();
        let data = format!(
            r#"{{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":[{}]}}"#,
            claims.join(",")
        );
        let document =
            serde_json::json!({ "Checksum": crc32fast::hash(data.as_bytes()), "Data": data });
        let temporary = dir.join(".1234567");
        fs::write(&temporary, document.to_string()).unwrap();
        fs::rename(temporary, dir.join(FILE_NAME)).unwrap();
    }

    /// A live grant of the claim `c1` with these pods.
    fn grants(pods: &[&str]) -> Arc<Vec<Arc<Grant>>> {
        let pod = |uid: &&str| PodRef { uid: (*uid).to_owned(), namespace: None, name: None };
        let claim = ClaimRef { uid: "c1".into(), namespace: "ml".into(), name: "c".into() };
        let name: ResourceName = "example.com/gpu".parse().unwrap();
        let grant = Grant {
            alloc_id: AllocId::new("a-1"),
            resource: name,
            devices: Vec::new(),
            edits: ContainerEdits::default(),
            claim: Some(Arc::new(ClaimHold { claim, allocation: "x".into(), devices: Vec::new() })),
            boot_id: String::new(),
            kubelet: None,
            granted_at: Timestamp(0),
            version: String::new(),
            state: GrantState::Prepared {
                pods: pods.iter().map(pod).collect(),
                prepared_at: Timestamp(0),
                unprepared_at: None,
            },
        };
        Arc::new(vec![Arc::new(grant)])
    }

    async fn pods_of(records: &Records) -> Vec<String> {
        records.pods_of("c1").await.into_iter().collect()
    }

    #[tokio::test]
    async fn a_pod_that_the_kubelet_drops_is_kept_until_the_ledger_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let (ledger, live) = watch::channel(Arc::default());
        let records = Records::new(dir.path().to_owned(), live);
        assert!(records.read().await.unwrap_err().is_absent());
        // The Prepare for the first pod is not recorded yet.
        write(dir.path(), &[("c1", &["p1", "p2"])]);
        assert_eq!(pods_of(&records).await, ["p1", "p2"]);
        write(dir.path(), &[("c1", &["p1"])]);
        assert_eq!(pods_of(&records).await, ["p1", "p2"]);
        ledger.send_replace(grants(&["p1"]));
        assert_eq!(pods_of(&records).await, ["p1", "p2"]);
        // A record that cannot be read takes nothing away.
        fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
        fs::create_dir(dir.path().join(FILE_NAME)).unwrap();
        assert_eq!(pods_of(&records).await, ["p1", "p2"]);
        assert!(!records.subscribe().borrow().as_ref().unwrap_err().is_absent());
        fs::remove_dir(dir.path().join(FILE_NAME)).unwrap();
        write(dir.path(), &[("c1", &["p1"])]);
        let record = records.read().await.unwrap();
        assert!(record.claims["c1"].pods.contains("p2"));
        ledger.send_replace(grants(&["p1", "p2"]));
        assert_eq!(pods_of(&records).await, ["p1"]);
        // It is another life of the claim.
        write(dir.path(), &[]);
        assert_eq!(pods_of(&records).await, [""; 0]);
    }

    struct Ledger(watch::Sender<u32>);

    impl Deliver<Reconcile> for Ledger {
        fn call(&self, _: Reconcile, _: Duration) -> BoxFuture<'static, Result<(), CallError>> {
            Box::pin(std::future::ready(Ok(())))
        }

        fn send(&self, _: Reconcile) {
            self.0.send_modify(|count| *count += 1);
        }
    }

    /// Polls are 15 s apart, so they cannot be what sees three changes in a row.
    #[tokio::test]
    async fn each_change_is_read_and_a_new_pod_of_a_live_claim_is_reported_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (ledger, live) = watch::channel(grants(&["p1"]));
        let (asked, mut asks) = watch::channel(0);
        let evidence = watch::Sender::new(Arc::<ClaimEvidence>::default());
        let mut seen = evidence.subscribe();
        let task = RecordsTask {
            records: Records::new(dir.path().to_owned(), live.clone()),
            grants: live,
            evidence,
            reconcile: Mailbox::new(Ledger(asked)),
        };
        let task = tokio::spawn(task.run());
        let soon = Duration::from_secs(4);
        let mut listed = vec!["p1".to_owned()];
        for pod in ["p2", "p3", "p4"] {
            listed.push(pod.to_owned());
            let names: Vec<&str> = listed.iter().map(String::as_str).collect();
            write(dir.path(), &[("c1", &names), ("other", &["p9"])]);
            let has_all = |evidence: &Arc<ClaimEvidence>| {
                let record = evidence.kubelet.as_ref();
                record.is_some_and(|it| {
                    it.claims.get("c1").is_some_and(|it| it.pods.len() == names.len())
                })
            };
            drop(tokio::time::timeout(soon, seen.wait_for(has_all)).await.expect(pod).unwrap());
            let before = *asks.borrow_and_update();
            // The ledger records the pod, and then another read brings nothing new.
            ledger.send_replace(grants(&names));
            assert!(before > 0, "{pod}");
        }
        let count = *asks.borrow_and_update();
        write(dir.path(), &[("c1", &["p1"])]);
        let one = |evidence: &Arc<ClaimEvidence>| {
            evidence.kubelet.as_ref().is_some_and(|it| it.claims["c1"].pods.len() == 1)
        };
        drop(tokio::time::timeout(soon, seen.wait_for(one)).await.expect("dropped").unwrap());
        assert_eq!(*asks.borrow(), count, "nothing is lacking");
        task.abort();
    }
}
