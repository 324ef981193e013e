//! One look at the kubelet: its checkpoint, the pods' logs and cgroups, and where needed its listing.

use super::config::LedgerConfig;
use super::core::Agenda;
use crate::domain::{AllocId, CgroupState, Checkpoint, Grant, KubeletGeneration, Moment, Observation, PodName};
use crate::host::pods::{self, PodCgroups};
use crate::kubelet::checkpoint::CheckpointReader;
use crate::kubelet::pod_resources::PodResources;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::RwLock;

/// A kubelet younger than this has not heard of all its pods.
const SETTLED_AFTER: Duration = Duration::from_secs(60);

/// How long an Allocate may have to wait for what the kubelet says of the pods that hold its devices.
const GET_DEADLINE: Duration = Duration::from_millis(300);

/// What one look is for.
#[derive(Debug, Clone)]
pub(super) struct Wants {
    /// What is to be found out.
    pub(super) agenda: Agenda,
    /// The kubelet's socket.
    pub(super) kubelet: Option<KubeletGeneration>,
    /// Whether the kubelet has settled.
    pub(super) kubelet_settled: bool,
}

/// Since when the kubelet has been there.
#[derive(Debug, Default)]
pub(crate) struct KubeletAge {
    seen: Option<(Option<KubeletGeneration>, Duration)>,
    changed: bool,
}

impl KubeletAge {
    /// Whether this kubelet is older than a minute: by our own watch where it has come while we looked, else by its
    /// socket's time, which a jump of the wall clock could age.
    pub(crate) fn is_settled(&mut self, kubelet: Option<KubeletGeneration>, now: Moment) -> bool {
        let since = match self.seen {
            Some((seen, since)) if seen == kubelet => since,
            before => {
                self.changed = before.is_some();
                self.seen = Some((kubelet, now.boot));
                now.boot
            }
        };
        let Some(kubelet) = kubelet else { return false };
        let watched = now.boot.saturating_sub(since);
        let made = Duration::from_nanos(u64::try_from(kubelet.made_ns).unwrap_or_default());
        let by_socket = Duration::from_millis(now.wall.0).saturating_sub(made);
        watched >= SETTLED_AFTER || (!self.changed && by_socket >= SETTLED_AFTER)
    }
}

/// Looks. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct KubeletObserver {
    checkpoint: CheckpointReader,
    host_root: PathBuf,
    boot_id: String,
    /// Found once; found again when nothing of a holder is seen to run in them.
    cgroups: Arc<Mutex<Arc<PodCgroups>>>,
    pod_resources: PodResources,
    gate: Arc<RwLock<()>>,
}

impl KubeletObserver {
    pub(super) fn new(config: &LedgerConfig) -> Self {
        KubeletObserver {
            checkpoint: config.checkpoint.clone(),
            host_root: config.host_root.clone(),
            boot_id: config.boot_id.clone(),
            // Found with the first look: an actor is built anew in a moment.
            cgroups: Arc::default(),
            pod_resources: config.pod_resources.clone(),
            gate: Arc::clone(&config.gate),
        }
    }

    /// One that sees the host's files below this folder, and no kubelet.
    #[cfg(test)]
    pub(super) fn of(host_root: &std::path::Path) -> Self {
        KubeletObserver {
            checkpoint: CheckpointReader::new(host_root.join("kubelet/device-plugins")),
            host_root: host_root.to_owned(),
            boot_id: "boot".into(),
            cgroups: Arc::new(Mutex::new(Arc::new(PodCgroups::find(host_root, None)))),
            pod_resources: PodResources::new(host_root.join("kubelet/pod-resources.sock")),
            gate: Arc::default(),
        }
    }

    /// Whether something of the pod is seen to run. Whether it is gone [`KubeletObserver::cgroup`] tells.
    pub(super) fn lives(&self, uid: &str) -> bool {
        self.hierarchies().state(uid) == CgroupState::Populated
    }

    /// What the pod's cgroup tells now.
    pub(super) fn cgroup(&self, uid: &str) -> CgroupState {
        let seen = self.hierarchies().state(uid);
        if seen.is_dead() { self.find_hierarchies().state(uid) } else { seen }
    }

    /// The pod's names, by its log folder.
    pub(super) fn name(&self, uid: &str) -> Option<PodName> {
        pods::names(&self.host_root).ok()?.remove(uid)
    }

    /// In how many cgroups below the pod's own something runs now.
    ///
    /// # Errors
    /// When that cannot be found out.
    pub(super) fn populated_below(&self, uid: &str) -> io::Result<usize> {
        self.hierarchies().populated_below(uid)
    }

    /// The pods that have a cgroup now; `None` where they cannot be listed.
    pub(super) fn present(&self) -> Option<BTreeSet<String>> {
        self.hierarchies().present()
    }

    /// Which of these the kubelet lists (`Get`, which frees nothing): the container that holds the grant, with its devices.
    /// Asked for no longer than an Allocate can wait; what is not answered is not listed.
    pub(super) async fn listed(&self, holders: &[Arc<Grant>]) -> BTreeSet<AllocId> {
        let mut listed = BTreeSet::new();
        let ask = async {
            for holder in holders {
                if self.is_listed(holder).await == Some(true) {
                    listed.insert(holder.alloc_id.clone());
                }
            }
        };
        // What has been answered by then counts.
        let _ = tokio::time::timeout(GET_DEADLINE, ask).await;
        listed
    }

    async fn is_listed(&self, holder: &Grant) -> Option<bool> {
        let pod = holder.pod()?;
        let found = self.pod_resources.get(pod.namespace.as_deref()?, pod.name.as_deref()?).await;
        let found = found.inspect_err(|error| tracing::debug!(%error, "the kubelet does not tell of the pod")).ok()??;
        let container = found.containers.into_iter().find(|container| Some(container.name.as_str()) == holder.container())?;
        let ids = container.devices.get(&holder.resource)?;
        Some(holder.devices.iter().all(|device| ids.contains(&device.id)))
    }

    /// The kubelet's checkpoint, now: read away from the actor's thread, since a large one takes a while.
    pub(super) fn checkpoint(&self) -> impl Future<Output = Option<Arc<Checkpoint>>> + use<> {
        let reader = self.checkpoint.clone();
        async move { tokio::task::spawn_blocking(move || reader.read()).await.ok().flatten() }
    }

    fn hierarchies(&self) -> Arc<PodCgroups> {
        let known = Arc::clone(&self.cgroups.lock().unwrap_or_else(PoisonError::into_inner));
        if known.is_incomplete() { self.find_hierarchies() } else { known }
    }

    /// The kubelet makes its hierarchy with its first pod, and another one when it is given another cgroup driver. The former stays
    /// behind, and says of every pod that came since that it is gone.
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
                tracing::warn!(%error, "the kubelet's files could not be looked at");
                return Observation::default();
            }
        };
        if wants.agenda.needs_listing(&observation) {
            observation.pods = self.pod_resources.list_when_idle(&self.gate).await;
        }
        observation
    }

    /// The files, on a thread that may wait.
    fn read(&self, wants: &Wants) -> Observation {
        let all_live = wants.agenda.pods.iter().all(|uid| self.lives(uid));
        let hierarchies = if all_live { self.hierarchies() } else { self.find_hierarchies() };
        let checkpoint = self.checkpoint.read();
        let names = pods::names(&self.host_root).unwrap_or_default();
        let uids = wants.agenda.pods.iter().chain(names.keys());
        let cgroups = uids.map(|uid| (uid.clone(), hierarchies.state(uid))).collect();
        let Wants { kubelet, kubelet_settled, .. } = *wants;
        Observation { boot_id: self.boot_id.clone(), kubelet, kubelet_settled, checkpoint, pods: None, names, cgroups }
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
        let kubelet = |secs: i64| Some(KubeletGeneration { inode: 1, made_ns: secs * 1_000_000_000 });
        let mut age = KubeletAge::default();
        assert!(!age.is_settled(None, at(100, 1_000)));
        assert!(!age.is_settled(kubelet(1_000), at(100, 1_000)));
        // The wall clock jumps by an hour; the kubelet came while we watched.
        assert!(!age.is_settled(kubelet(1_000), at(159, 4_600)));
        assert!(age.is_settled(kubelet(1_000), at(160, 4_600)));

        let mut age = KubeletAge::default();
        assert!(age.is_settled(kubelet(1_000), at(100, 1_060)), "it was there before us");
        assert!(!age.is_settled(kubelet(2_000), at(101, 3_000)), "a new one has to be watched");
    }

    /// `/kubepods` stays when the kubelet goes over to systemd's slices, with nothing in it.
    #[tokio::test]
    async fn a_pod_that_came_with_another_cgroup_driver_is_seen_to_live_by_a_look_and_at_the_gate() {
        let agenda = Agenda { pods: BTreeSet::from(["u1".to_owned()]), ..Agenda::default() };
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
