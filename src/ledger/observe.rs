//! One observation of the kubelet: its checkpoint, the pods' logs and cgroups, and, where needed,
//! its report of pods.

use super::config::LedgerConfig;
use super::core::{Agenda, PodQuery};
use crate::domain::{
    AllocId, CgroupState, Checkpoint, ClaimEvidence, Grant, KubeletGeneration, Moment, Observation,
    PodName, PodReport,
};
use crate::host::pods::{self, PodCgroups};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{RwLock, watch};

/// A kubelet younger than this may not know all its pods yet.
const SETTLED_AFTER: Duration = Duration::from_secs(60);
/// A kubelet that is found so soon after the first pass was there before us: the host watch starts
/// after the ledger.
const FOUND_WITHIN: Duration = Duration::from_secs(2);

/// The longest time that an Allocate may wait for the kubelet's report on the pods that hold its
/// devices.
const GET_DEADLINE: Duration = Duration::from_millis(300);

/// How long a pass waits for the kubelet's answers about single pods. The next pass begins with
/// another pod, so that a slow kubelet is asked for each of them in the end.
const REPORT_DEADLINE: Duration = Duration::from_secs(2);

/// The purpose of one observation.
#[derive(Debug, Clone)]
pub(super) struct Wants {
    /// The questions to answer.
    pub(super) agenda: Agenda,
    /// The kubelet's socket.
    pub(super) kubelet: Option<KubeletGeneration>,
    /// Whether the kubelet has settled.
    pub(super) kubelet_settled: bool,
}

/// The age of the running kubelet.
#[derive(Debug, Default)]
pub(crate) struct KubeletAge {
    /// The time of the first look.
    first: Option<Duration>,
    /// The kubelet, and when it started by the clock since the boot.
    seen: Option<(KubeletGeneration, Duration)>,
}

impl KubeletAge {
    /// Whether this kubelet is older than a minute. One that was there before us is as old as its
    /// socket, by the wall clock at that moment. From then on our own clock counts, which does not
    /// jump.
    pub(crate) fn is_settled(&mut self, kubelet: Option<KubeletGeneration>, now: Moment) -> bool {
        let first = *self.first.get_or_insert(now.boot);
        let Some(kubelet) = kubelet else { return false };
        let since = match self.seen {
            Some((seen, since)) if seen == kubelet => since,
            before => {
                let was_there = before.is_none() && now.boot.saturating_sub(first) < FOUND_WITHIN;
                let made = Duration::from_nanos(u64::try_from(kubelet.made_ns).unwrap_or_default());
                let by_socket = Duration::from_millis(now.wall.0).saturating_sub(made);
                let age = if was_there { by_socket } else { Duration::ZERO };
                let since = now.boot.saturating_sub(age);
                self.seen = Some((kubelet, since));
                since
            }
        };
        now.boot.saturating_sub(since) >= SETTLED_AFTER
    }
}

/// Observes the kubelet. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct KubeletObserver {
    checkpoint: CheckpointReader,
    host_root: PathBuf,
    boot_id: String,
    /// Found once, and searched again if no process of a holder is seen in them.
    cgroups: Arc<Mutex<Arc<PodCgroups>>>,
    pod_resources: PodResources,
    gate: Arc<RwLock<()>>,
    claims: watch::Receiver<Arc<ClaimEvidence>>,
    /// The number of passes that asked for single pods.
    passes: Arc<AtomicUsize>,
}

impl KubeletObserver {
    pub(super) fn new(config: &LedgerConfig) -> Self {
        KubeletObserver {
            checkpoint: config.checkpoint.clone(),
            host_root: config.host_root.clone(),
            boot_id: config.boot_id.clone(),
            // Found by the first observation: a new actor must be built within a moment.
            cgroups: Arc::default(),
            pod_resources: config.pod_resources.clone(),
            gate: Arc::clone(&config.gate),
            claims: config.claims.clone(),
            passes: Arc::default(),
        }
    }

    /// An observer of the host's files below this folder, without a kubelet.
    #[cfg(test)]
    pub(super) fn of(host_root: &std::path::Path) -> Self {
        KubeletObserver {
            checkpoint: CheckpointReader::new(host_root.join("kubelet/device-plugins")),
            host_root: host_root.to_owned(),
            boot_id: "boot".into(),
            cgroups: Arc::new(Mutex::new(Arc::new(PodCgroups::find(host_root, None)))),
            pod_resources: PodResources::new(host_root.join("kubelet/pod-resources.sock")),
            gate: Arc::default(),
            claims: watch::channel(Arc::default()).1,
            passes: Arc::default(),
        }
    }

    /// Whether a process of the pod is seen to run. [`KubeletObserver::cgroup`] shows whether the
    /// pod was removed.
    pub(super) fn lives(&self, uid: &str) -> bool {
        self.hierarchies().state(uid) == CgroupState::Populated
    }

    /// The current state of the pod's cgroup. Only a running process needs no second search: before
    /// the first pass no hierarchy is known.
    pub(super) fn cgroup(&self, uid: &str) -> CgroupState {
        let seen = self.hierarchies().state(uid);
        if seen == CgroupState::Populated { seen } else { self.find_hierarchies().state(uid) }
    }

    /// The current states of these pods' cgroups. The hierarchies are searched again if a pod has
    /// no running process.
    pub(super) fn cgroups<'a>(
        &self,
        uids: impl Iterator<Item = &'a str>,
    ) -> BTreeMap<String, CgroupState> {
        let uids: BTreeSet<&str> = uids.collect();
        let all_live = uids.iter().all(|uid| self.lives(uid));
        let hierarchies = if all_live { self.hierarchies() } else { self.find_hierarchies() };
        uids.into_iter().map(|uid| (uid.to_owned(), hierarchies.state(uid))).collect()
    }

    /// The pods with a log folder, by UID. Without any if that cannot be read.
    pub(super) fn names(&self) -> BTreeMap<String, PodName> {
        pods::names(&self.host_root).unwrap_or_default()
    }

    /// The pod's names, by its log folder.
    pub(super) fn name(&self, uid: &str) -> Option<PodName> {
        self.names().remove(uid)
    }

    /// The number of populated cgroups below the pod's own.
    ///
    /// # Errors
    /// If that cannot be read.
    pub(super) fn populated_below(&self, uid: &str) -> io::Result<usize> {
        self.hierarchies().populated_below(uid)
    }

    /// The pods that have a cgroup now; `None` if they cannot be listed.
    pub(super) fn present(&self) -> Option<BTreeSet<String>> {
        self.hierarchies().present()
    }

    /// The grants of `holders` that the kubelet lists with their container and devices (`Get`,
    /// which frees nothing). The call takes no longer than an Allocate can wait; a holder without
    /// an answer is not listed.
    pub(super) async fn listed(&self, holders: &[Arc<Grant>]) -> BTreeSet<AllocId> {
        let mut listed = BTreeSet::new();
        let ask = async {
            for holder in holders {
                if self.is_listed(holder).await == Some(true) {
                    listed.insert(holder.alloc_id.clone());
                }
            }
        };
        // The answers that came in time count.
        let _ = tokio::time::timeout(GET_DEADLINE, ask).await;
        listed
    }

    async fn is_listed(&self, holder: &Grant) -> Option<bool> {
        let (namespace, name) = holder.pod()?.names()?;
        let found = self.pod_resources.get(namespace, name).await;
        let found = found
            .inspect_err(|error| tracing::debug!(%error, "the kubelet did not return the pod"))
            .ok()??;
        let container = found
            .containers
            .into_iter()
            .find(|container| Some(container.name.as_str()) == holder.container())?;
        let ids = container.devices.get(&holder.resource)?;
        Some(holder.devices.iter().all(|device| ids.contains(&device.id)))
    }

    /// The kubelet's checkpoint as it is now. It is read off the actor's thread, because a large
    /// one takes time.
    pub(super) fn checkpoint(&self) -> impl Future<Output = Option<Arc<Checkpoint>>> + use<> {
        let reader = self.checkpoint.clone();
        async move { tokio::task::spawn_blocking(move || reader.read()).await.ok().flatten() }
    }

    fn hierarchies(&self) -> Arc<PodCgroups> {
        let known = Arc::clone(&self.cgroups.lock().unwrap_or_else(PoisonError::into_inner));
        if known.is_incomplete() { self.find_hierarchies() } else { known }
    }

    /// The kubelet creates its hierarchy with its first pod, and another one after a change of the
    /// cgroup driver. The old hierarchy stays, and every later pod is absent from it.
    fn find_hierarchies(&self) -> Arc<PodCgroups> {
        let found = Arc::new(PodCgroups::find(&self.host_root, None));
        *self.cgroups.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&found);
        found
    }

    pub(super) async fn look(self, wants: Wants) -> Observation {
        let files = {
            let (this, wants) = (self.clone(), wants.clone());
            move || this.read(&wants)
        };
        let mut observation = match tokio::task::spawn_blocking(files).await {
            Ok(observation) => observation,
            Err(error) => {
                tracing::warn!(%error, "failed to read the kubelet's files");
                return Observation::default();
            }
        };
        while let Some(query) = wants.agenda.query(&observation) {
            observation.pods = self.ask(query).await;
            if observation.pods == PodReport::Nothing {
                break;
            }
        }
        observation
    }

    async fn ask(&self, query: PodQuery) -> PodReport {
        match query {
            PodQuery::Named(names) => {
                let mut names: Vec<PodName> = names.into_iter().collect();
                let begin = self.passes.fetch_add(1, Ordering::Relaxed) % names.len().max(1);
                names.rotate_left(begin);
                self.pod_resources.report(names, REPORT_DEADLINE, &self.gate).await
            }
            PodQuery::All => self.pod_resources.list_when_idle(&self.gate).await,
        }
    }

    /// Reads the files, on a thread that may block.
    fn read(&self, wants: &Wants) -> Observation {
        let Agenda { pods, claim_pods, .. } = &wants.agenda;
        let all_live = pods.union(claim_pods).all(|uid| self.lives(uid));
        let hierarchies = if all_live { self.hierarchies() } else { self.find_hierarchies() };
        let checkpoint = self.checkpoint.read();
        let names = self.names();
        let uids = pods.iter().chain(claim_pods).chain(names.keys());
        let cgroups = uids.map(|uid| (uid.clone(), hierarchies.state(uid))).collect();
        let Wants { kubelet, kubelet_settled, .. } = *wants;
        Observation {
            boot_id: self.boot_id.clone(),
            kubelet,
            kubelet_settled,
            checkpoint,
            pods: PodReport::Nothing,
            names,
            cgroups,
            claims: self.claims.borrow().clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Timestamp;
    use std::fs;

    fn at(boot_secs: u64, wall_secs: u64) -> Moment {
        Moment { boot: Duration::from_secs(boot_secs), wall: Timestamp(wall_secs * 1000) }
    }

    #[test]
    fn a_kubelet_settles_a_minute_after_its_start() {
        let kubelet =
            |secs: i64| Some(KubeletGeneration { inode: 1, made_ns: secs * 1_000_000_000 });
        let mut age = KubeletAge::default();
        assert!(!age.is_settled(None, at(100, 1_000)));
        assert!(!age.is_settled(kubelet(1_000), at(100, 1_000)));
        // The wall clock jumps by an hour; the kubelet came while we watched.
        assert!(!age.is_settled(kubelet(1_000), at(159, 4_600)));
        assert!(age.is_settled(kubelet(1_000), at(160, 4_600)));

        let mut age = KubeletAge::default();
        assert!(!age.is_settled(None, at(99, 1_059)), "the host watch has not started");
        assert!(age.is_settled(kubelet(1_000), at(100, 1_060)), "it was there before us");
        assert!(!age.is_settled(kubelet(2_000), at(101, 3_000)), "a new one has to be watched");

        let mut age = KubeletAge::default();
        assert!(!age.is_settled(None, at(100, 1_000)));
        assert!(!age.is_settled(kubelet(1_000), at(102, 4_600)), "it may be new");
        assert!(age.is_settled(kubelet(1_000), at(162, 4_660)));

        let mut age = KubeletAge::default();
        assert!(!age.is_settled(kubelet(1_000), at(100, 1_030)));
        assert!(!age.is_settled(kubelet(1_000), at(129, 4_600)), "the wall clock has jumped");
        assert!(age.is_settled(kubelet(1_000), at(130, 4_601)));
    }

    /// `/kubepods` stays, empty, when the kubelet changes to systemd's slices.
    #[tokio::test]
    async fn a_pod_that_came_with_another_cgroup_driver_is_seen_to_live_by_a_look_and_at_the_gate()
    {
        let mut agenda = Agenda::default();
        agenda.pods.insert("u1".to_owned());
        let wants = Wants { agenda, kubelet: None, kubelet_settled: true };
        let look = |observer: &KubeletObserver| observer.read(&wants).cgroups["u1"];
        let gate = |observer: &KubeletObserver| observer.cgroup("u1");
        for see in [&look as &dyn Fn(&KubeletObserver) -> CgroupState, &gate] {
            let dir = tempfile::tempdir().unwrap();
            let observer = KubeletObserver {
                checkpoint: CheckpointReader::new(dir.path().join("device-plugins")),
                host_root: dir.path().to_owned(),
                boot_id: String::new(),
                cgroups: Arc::default(),
                pod_resources: PodResources::new(dir.path().join("pod-resources.sock")),
                gate: Arc::default(),
                claims: watch::channel(Arc::default()).1,
                passes: Arc::default(),
            };
            let cgroups = dir.path().join("sys/fs/cgroup");
            fs::create_dir_all(cgroups.join("kubepods")).unwrap();
            observer.find_hierarchies();
            assert_eq!(see(&observer), CgroupState::Absent);
            let pod = cgroups.join("kubepods.slice/kubepods-podu1.slice");
            fs::create_dir_all(&pod).unwrap();
            fs::write(pod.join("cgroup.events"), "populated 1\n").unwrap();
            assert_eq!(see(&observer), CgroupState::Populated);
        }
    }
}
