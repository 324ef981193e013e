//! What can be seen while an Allocate waits. Only a held id makes it look.

use super::core::{Doubt, HOLDERS_MAX, Ledger, Proof, Sight, Watchlist, doubt};
use super::observe::KubeletObserver;
use super::report;
use crate::domain::{AllocId, Checkpoint, Grant, GrantState, Refusal, Refuse};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// So many cgroups below a pod's own are populated when a container runs: one of them may be the sandbox's. Where a runtime
/// gives that none, a pod of one container counts only if the kubelet lists it.
const RUNNING_BELOW: usize = 2;

/// Of so many grants of a device the kubelet is asked. It gives an exclusive one to one pod at a time: what it lists is the latest, or of
/// the same pod.
const ASKED_MAX: usize = 4;
/// The pods of more grants than this are not looked for one by one: those that there are, of all, are listed once.
const ONE_BY_ONE_MAX: usize = 8;

/// What was seen of the kubelet for an Allocate of a held id.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Grants whose holders it lists.
    pub(super) listed: BTreeSet<AllocId>,
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
}

/// Whether a living container of another pod has one of the devices of an exclusive grant (I2). Without proof it is only
/// told, and with it too where the operator wants it so.
pub(super) fn refusal(
    ledger: &Ledger,
    watchlist: &Watchlist,
    grant: &Grant,
    observer: &KubeletObserver,
    settled: bool,
    seen: &Seen,
    refuse: Refuse,
) -> Option<Refusal> {
    let doubt = doubt(ledger, watchlist, grant, &Now { pods: Pods::new(ledger, grant, observer), settled, seen })?;
    report::doubted(grant, &doubt, refuse);
    let Doubt { id, pod, container, proof } = doubt;
    let resource = grant.resource.clone();
    match proof {
        _ if refuse != Refuse::Proven => None,
        Proof::None => None,
        Proof::Unreadable(why) => Some(Refusal::Unreadable { resource, id, why }),
        Proof::Complete => Some(Refusal::InUse { resource, id, pod: pod.to_string(), container }),
    }
}

/// Whether a device of a grant has a holder.
pub(super) fn is_held(ledger: &Ledger, grant: &Grant) -> bool {
    grant.devices.iter().any(|device| ledger.holders(&grant.resource, &device.id).next().is_some())
}

/// Those that hold a device of a grant without a container that is seen to run: of them the kubelet is asked, of the latest of each device.
pub(super) fn unseen(ledger: &Ledger, grant: &Grant, observer: &KubeletObserver) -> Vec<Arc<Grant>> {
    let pods = Pods::new(ledger, grant, observer);
    let is_unseen = |holder: &&Arc<Grant>| {
        let (GrantState::Bound { pod, .. } | GrantState::Suspect { pod, .. }) = &holder.state else { return false };
        pod.name.is_some() && pod.namespace.is_some() && pods.runs(&pod.uid) != Ok(true)
    };
    let latest = |id| ledger.holders(&grant.resource, id).rev().take(HOLDERS_MAX).filter(is_unseen).take(ASKED_MAX);
    let unseen: BTreeMap<&AllocId, &Arc<Grant>> =
        grant.devices.iter().flat_map(|device| latest(&device.id)).map(|holder| (&holder.alloc_id, holder)).collect();
    unseen.into_values().cloned().collect()
}

/// What is seen of the pods of holders, each looked at once.
struct Pods<'a> {
    observer: &'a KubeletObserver,
    /// Those that have a cgroup, where they are too many to look for each.
    present: Option<BTreeSet<String>>,
    seen: RefCell<BTreeMap<String, Result<bool, String>>>,
}

impl<'a> Pods<'a> {
    fn new(ledger: &Ledger, grant: &Grant, observer: &'a KubeletObserver) -> Self {
        let is_many = grant.devices.iter().any(|device| ledger.holders(&grant.resource, &device.id).nth(ONE_BY_ONE_MAX).is_some());
        Pods { observer, present: if is_many { observer.present() } else { None }, seen: RefCell::default() }
    }

    /// Whether a container of it runs, or why that cannot be found out.
    fn runs(&self, uid: &str) -> Result<bool, String> {
        if self.present.as_ref().is_some_and(|present| !present.contains(uid)) {
            return Ok(false);
        }
        let mut seen = self.seen.borrow_mut();
        if let Some(runs) = seen.get(uid) {
            return runs.clone();
        }
        let running = self.observer.populated_below(uid);
        let runs =
            running.map(|running| running >= RUNNING_BELOW).map_err(|error| format!("the cgroup of pod {uid} cannot be read: {error}"));
        seen.insert(uid.to_owned(), runs.clone());
        runs
    }
}

struct Now<'a> {
    pods: Pods<'a>,
    settled: bool,
    seen: &'a Seen,
}

impl Sight for Now<'_> {
    fn kubelet_settled(&self) -> bool {
        self.settled
    }

    fn has_running_container(&self, uid: &str) -> Result<bool, String> {
        self.pods.runs(uid)
    }

    fn is_listed(&self, alloc_id: &AllocId) -> bool {
        self.seen.listed.contains(alloc_id)
    }

    fn checkpoint(&self) -> Option<&Checkpoint> {
        self.seen.checkpoint.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{ContainerEdits, DeviceId, GrantedDevice, KubeletGeneration, PodRef, Timestamp, Verdicts};
    use std::fs;
    use std::path::Path;

    const KUBELET: KubeletGeneration = KubeletGeneration { inode: 1, made_ns: 1 };

    fn uid(n: u64) -> String {
        format!("00000000-0000-4000-8000-{n:012}")
    }

    fn grant(n: u64, id: &str, state: GrantState) -> Grant {
        Grant {
            alloc_id: AllocId::new(format!("00000000-0000-7000-8000-{n:012}")),
            resource: "example.com/gpu".parse().unwrap(),
            devices: vec![GrantedDevice {
                id: DeviceId::new(id),
                key: format!("dev:/dev/{id}"),
                numa_nodes: Vec::new(),
                nodes: Vec::new(),
                objects: Vec::new(),
            }],
            edits: ContainerEdits::default(),
            boot_id: "boot".into(),
            kubelet: Some(KUBELET),
            granted_at: Timestamp(n),
            version: String::new(),
            state,
        }
    }

    fn bound(n: u64, id: &str) -> Grant {
        let pod = PodRef { uid: uid(n), namespace: Some("team".into()), name: Some(format!("pod-{n}")) };
        grant(n, id, GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(n) })
    }

    /// A pod of which a sandbox and a container run.
    fn run(host_root: &Path, n: u64) {
        let pod = host_root.join(format!("sys/fs/cgroup/kubepods/burstable/pod{}", uid(n)));
        for cgroup in ["sandbox", "main"] {
            fs::create_dir_all(pod.join(cgroup)).unwrap();
            fs::write(pod.join(cgroup).join("cgroup.events"), "populated 1\n").unwrap();
        }
    }

    fn ledger(grants: impl IntoIterator<Item = Grant>) -> Ledger {
        Ledger::from_recovered(grants, BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), Verdicts::new())
    }

    #[tokio::test]
    async fn what_an_allocate_looks_at_does_not_grow_with_the_grants_that_nobody_releases() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("sys/fs/cgroup/kubepods/burstable")).unwrap();
        fs::create_dir_all(dir.path().join("kubelet/device-plugins")).unwrap();
        fs::write(dir.path().join("sys/fs/cgroup/cgroup.controllers"), "cpu").unwrap();
        let none = r#"{"Data":{"PodDeviceEntries":[],"RegisteredDevices":{}},"Checksum":1}"#;
        fs::write(dir.path().join("kubelet/device-plugins/kubelet_internal_checkpoint"), none).unwrap();
        let observer = KubeletObserver::of(dir.path());
        let wanted = grant(9_999, "gpu0", GrantState::Granted);
        for holders in [3, 40, 2_000] {
            let ledger = ledger((1..=holders).map(|n| bound(n, "gpu0")));
            let asked = unseen(&ledger, &wanted, &observer);
            assert!(asked.len() <= ASKED_MAX && asked.last().unwrap().alloc_id == bound(holders, "gpu0").alloc_id, "{holders}");
            let pods = Pods::new(&ledger, &wanted, &observer);
            assert!((1..=holders).all(|n| pods.runs(&uid(n)) == Ok(false)));
            assert!(pods.seen.borrow().len() <= ONE_BY_ONE_MAX, "{holders}: each pod is looked for by itself");
            let found = |refuse| refusal(&ledger, &Watchlist::default(), &wanted, &observer, true, &Seen::default(), refuse);
            assert_eq!(found(Refuse::Proven), None, "{holders}: nothing of them runs");
            // One that runs is found among them, wherever it is.
            for runs in [1, holders / 2 + 1, holders].into_iter().filter(|n| holders - n < HOLDERS_MAX as u64) {
                run(dir.path(), runs);
                let Some(Refusal::InUse { pod, .. }) = found(Refuse::Proven) else { panic!("{holders}: {runs} runs") };
                assert_eq!(pod, format!("team/pod-{runs}"));
                fs::remove_dir_all(dir.path().join(format!("sys/fs/cgroup/kubepods/burstable/pod{}", uid(runs)))).unwrap();
            }
        }
        // Where no cgroup can be seen nothing is taken for gone: the kubelet is asked of the latest.
        fs::remove_dir_all(dir.path().join("sys")).unwrap();
        let ledger = ledger((1..=40).map(|n| bound(n, "gpu0")));
        assert_eq!(unseen(&ledger, &wanted, &KubeletObserver::of(dir.path())).len(), ASKED_MAX);
    }

    #[tokio::test]
    async fn every_device_of_a_grant_has_its_holders_asked_for_and_a_grant_once() {
        let dir = tempfile::tempdir().unwrap();
        let several = |n, ids: &[&str]| Grant { devices: ids.iter().flat_map(|id| bound(n, id).devices).collect(), ..bound(n, ids[0]) };
        let ledger = ledger([several(1, &["gpu0", "gpu1"]), several(2, &["gpu2"])]);
        let wanted = Grant { state: GrantState::Granted, ..several(3, &["gpu0", "gpu1", "gpu2"]) };
        let asked = unseen(&ledger, &wanted, &KubeletObserver::of(dir.path()));
        assert_eq!(asked.iter().map(|grant| grant.granted_at.0).collect::<Vec<_>>(), [1, 2]);
    }
}
