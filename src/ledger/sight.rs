//! The evidence that an Allocate can wait for. It is collected only if a requested id is held.

use super::core::{Doubt, HOLDERS_MAX, Ledger, Proof, Sight, Watchlist, doubt};
use super::observe::KubeletObserver;
use super::report;
use crate::domain::{AllocId, Checkpoint, Grant, GrantState, Refusal, Refuse};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A running container has at least this number of populated cgroups below the pod's own: one may
/// be the sandbox's. If a runtime creates no cgroup for the sandbox, a pod of one container counts
/// only if the kubelet lists it.
const RUNNING_BELOW: usize = 2;

/// The kubelet is asked for at most this number of grants of a device. It gives an exclusive device
/// to one pod at a time: the grant that it lists is the latest, or of the same pod.
const ASKED_MAX: usize = 4;
/// With more grants than this, their pods are not queried one by one: all present pods are listed
/// once.
const ONE_BY_ONE_MAX: usize = 8;

/// The kubelet's evidence for an Allocate of a held id.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// The grants whose holders the kubelet lists.
    pub(super) listed: BTreeSet<AllocId>,
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
}

/// Refuses an exclusive grant if a living container of another pod has one of its devices (I2).
/// Without proof, or if the operator's policy is so, it is only logged.
pub(super) fn refusal(
    ledger: &Ledger,
    watchlist: &Watchlist,
    grant: &Grant,
    observer: &KubeletObserver,
    settled: bool,
    seen: &Seen,
    refuse: Refuse,
) -> Option<Refusal> {
    let doubt = doubt(
        ledger,
        watchlist,
        grant,
        &Now { pods: Pods::new(ledger, grant, observer), settled, seen },
    )?;
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

/// The holders of a grant's devices without a container that is seen to run. The kubelet is asked
/// for the latest ones of each device.
pub(super) fn unseen(
    ledger: &Ledger,
    grant: &Grant,
    observer: &KubeletObserver,
) -> Vec<Arc<Grant>> {
    let pods = Pods::new(ledger, grant, observer);
    let is_unseen = |holder: &&Arc<Grant>| {
        let (GrantState::Bound { pod, .. } | GrantState::Suspect { pod, .. }) = &holder.state
        else {
            return false;
        };
        pod.name.is_some() && pod.namespace.is_some() && pods.runs(&pod.uid) != Ok(true)
    };
    let latest = |id| {
        ledger
            .holders(&grant.resource, id)
            .rev()
            .take(HOLDERS_MAX)
            .filter(is_unseen)
            .take(ASKED_MAX)
    };
    let unseen: BTreeMap<&AllocId, &Arc<Grant>> = grant
        .devices
        .iter()
        .flat_map(|device| latest(&device.id))
        .map(|holder| (&holder.alloc_id, holder))
        .collect();
    unseen.into_values().cloned().collect()
}

/// The observed state of the holders' pods, each read once.
struct Pods<'a> {
    observer: &'a KubeletObserver,
    /// The pods with a cgroup, if there are too many to query each.
    present: Option<BTreeSet<String>>,
    seen: RefCell<BTreeMap<String, Result<bool, String>>>,
}

impl<'a> Pods<'a> {
    fn new(ledger: &Ledger, grant: &Grant, observer: &'a KubeletObserver) -> Self {
        let is_many = grant.devices.iter().any(|device| {
            ledger.holders(&grant.resource, &device.id).nth(ONE_BY_ONE_MAX).is_some()
        });
        Pods {
            observer,
            present: if is_many { observer.present() } else { None },
            seen: RefCell::default(),
        }
    }

    /// Whether a container of the pod runs, or why that cannot be read.
    fn runs(&self, uid: &str) -> Result<bool, String> {
        if self.present.as_ref().is_some_and(|present| !present.contains(uid)) {
            return Ok(false);
        }
        let mut seen = self.seen.borrow_mut();
        if let Some(runs) = seen.get(uid) {
            return runs.clone();
        }
        let running = self.observer.populated_below(uid);
        let runs = running
            .map(|running| running >= RUNNING_BELOW)
            .map_err(|error| format!("the cgroup of pod {uid} cannot be read: {error}"));
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
    use crate::domain::{
        ContainerEdits, DeviceId, GrantedDevice, KubeletGeneration, PodRef, Timestamp, Verdicts,
    };
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
            claim: None,
            boot_id: "boot".into(),
            kubelet: Some(KUBELET),
            granted_at: Timestamp(n),
            version: String::new(),
            state,
        }
    }

    fn bound(n: u64, id: &str) -> Grant {
        let pod =
            PodRef { uid: uid(n), namespace: Some("team".into()), name: Some(format!("pod-{n}")) };
        grant(n, id, GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(n) })
    }

    /// Makes a sandbox and a container of a pod run.
    fn run(host_root: &Path, n: u64) {
        let pod = host_root.join(format!("sys/fs/cgroup/kubepods/burstable/pod{}", uid(n)));
        for cgroup in ["sandbox", "main"] {
            fs::create_dir_all(pod.join(cgroup)).unwrap();
            fs::write(pod.join(cgroup).join("cgroup.events"), "populated 1\n").unwrap();
        }
    }

    fn ledger(grants: impl IntoIterator<Item = Grant>) -> Ledger {
        Ledger::from_recovered(
            grants,
            BTreeMap::new(),
            BTreeMap::new(),
            BTreeMap::new(),
            Verdicts::new(),
        )
    }

    #[tokio::test]
    async fn what_an_allocate_looks_at_does_not_grow_with_the_grants_that_nobody_releases() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("sys/fs/cgroup/kubepods/burstable")).unwrap();
        fs::create_dir_all(dir.path().join("kubelet/device-plugins")).unwrap();
        fs::write(dir.path().join("sys/fs/cgroup/cgroup.controllers"), "cpu").unwrap();
        let none = r#"{"Data":{"PodDeviceEntries":[],"RegisteredDevices":{}},"Checksum":1}"#;
        fs::write(dir.path().join("kubelet/device-plugins/kubelet_internal_checkpoint"), none)
            .unwrap();
        let observer = KubeletObserver::of(dir.path());
        let wanted = grant(9_999, "gpu0", GrantState::Granted);
        for holders in [3, 40, 2_000] {
            let ledger = ledger((1..=holders).map(|n| bound(n, "gpu0")));
            let asked = unseen(&ledger, &wanted, &observer);
            assert!(
                asked.len() <= ASKED_MAX
                    && asked.last().unwrap().alloc_id == bound(holders, "gpu0").alloc_id,
                "{holders}"
            );
            let pods = Pods::new(&ledger, &wanted, &observer);
            assert!((1..=holders).all(|n| pods.runs(&uid(n)) == Ok(false)));
            assert!(
                pods.seen.borrow().len() <= ONE_BY_ONE_MAX,
                "{holders}: each pod is queried alone"
            );
            let found = |refuse| {
                refusal(
                    &ledger,
                    &Watchlist::default(),
                    &wanted,
                    &observer,
                    true,
                    &Seen::default(),
                    refuse,
                )
            };
            assert_eq!(found(Refuse::Proven), None, "{holders}: nothing of them runs");
            // The running one is found at any position.
            for runs in [1, holders / 2 + 1, holders]
                .into_iter()
                .filter(|n| holders - n < HOLDERS_MAX as u64)
            {
                run(dir.path(), runs);
                let Some(Refusal::InUse { pod, .. }) = found(Refuse::Proven) else {
                    panic!("{holders}: {runs} runs")
                };
                assert_eq!(pod, format!("team/pod-{runs}"));
                fs::remove_dir_all(
                    dir.path().join(format!("sys/fs/cgroup/kubepods/burstable/pod{}", uid(runs))),
                )
                .unwrap();
            }
        }
        // Without visible cgroups no pod counts as removed: the kubelet is asked for the latest
        // grants.
        fs::remove_dir_all(dir.path().join("sys")).unwrap();
        let ledger = ledger((1..=40).map(|n| bound(n, "gpu0")));
        assert_eq!(unseen(&ledger, &wanted, &KubeletObserver::of(dir.path())).len(), ASKED_MAX);
    }

    #[tokio::test]
    async fn every_device_of_a_grant_has_its_holders_asked_for_and_a_grant_once() {
        let dir = tempfile::tempdir().unwrap();
        let several = |n, ids: &[&str]| Grant {
            devices: ids.iter().flat_map(|id| bound(n, id).devices).collect(),
            ..bound(n, ids[0])
        };
        let ledger = ledger([several(1, &["gpu0", "gpu1"]), several(2, &["gpu2"])]);
        let wanted = Grant { state: GrantState::Granted, ..several(3, &["gpu0", "gpu1", "gpu2"]) };
        let asked = unseen(&ledger, &wanted, &KubeletObserver::of(dir.path()));
        assert_eq!(asked.iter().map(|grant| grant.granted_at.0).collect::<Vec<_>>(), [1, 2]);
    }
}
