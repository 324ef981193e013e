//! Pods on the host: their log folders, which carry their names, and their cgroups, which show
//! whether their processes run.
//!
//! Both work for static pods: the UID in the folder's name, in the cgroup and in the kubelet's
//! checkpoint is the same hash of the manifest.

use super::failure::{call, is_absence, is_dir};
use crate::domain::{CgroupState, PodName};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The maximum depth of the kubelet's hierarchies below a cgroup mount. `kind` has them in a folder
/// `kubelet`, a container of a nested cluster in `system.slice/docker-….scope/…`.
const DEPTH_MAX: usize = 4;
/// The maximum number of folders in the search for them.
const FOLDERS_MAX: usize = 10_000;

/// Namespace and name of every pod with a log folder, `/var/log/pods/<namespace>_<name>_<uid>`, by
/// UID.
///
/// # Errors
/// If the folder cannot be read. If it does not exist, there are no pods.
pub fn names(host_root: &Path) -> io::Result<BTreeMap<String, PodName>> {
    let entries = match call(|| fs::read_dir(host_root.join("var/log/pods"))) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        Err(error) => return Err(error),
    };
    let mut names = BTreeMap::new();
    for entry in entries {
        names.extend(call(|| entry)?.file_name().to_str().and_then(name));
    }
    Ok(names)
}

/// Neither a namespace nor a pod's name nor a UID contains `_`.
fn name(folder: &str) -> Option<(String, PodName)> {
    let mut parts = folder.split('_');
    let (namespace, name, uid) = (parts.next()?, parts.next()?, parts.next()?);
    let sound = parts.next().is_none() && ![namespace, name, uid].contains(&"");
    sound.then(|| {
        (uid.to_owned(), PodName { namespace: namespace.to_owned(), name: name.to_owned() })
    })
}

/// The kubelet's cgroup hierarchies, found once and then queried for pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodCgroups {
    /// Every `kubepods` and `…kubepods.slice`: one per controller on cgroup v1, and stale ones of
    /// another driver.
    roots: BTreeSet<PathBuf>,
    /// Whether a folder could not be read, so that there may be other hierarchies. Then no pod
    /// counts as gone.
    is_incomplete: bool,
}

impl PodCgroups {
    /// Finds the hierarchies below `<host-root>/sys/fs/cgroup`. With `cgroup_root` (the kubelet's
    /// `--cgroup-root`), only those below it.
    #[must_use]
    pub fn find(host_root: &Path, cgroup_root: Option<&str>) -> Self {
        let mount = host_root.join("sys/fs/cgroup");
        let mut found = PodCgroups::default();
        let mut list = |folder: &Path| {
            folders(folder).unwrap_or_else(|_| {
                found.is_incomplete = true;
                Vec::new()
            })
        };
        let mut below = vec![mount.clone()];
        if !is_v2(&mount) {
            below.extend(list(&mount));
        }
        if let Some(root) =
            cgroup_root.map(|root| root.trim_matches('/')).filter(|root| !root.is_empty())
        {
            // The systemd driver turns `/a/b` into `a.slice/a-b.slice`.
            let mut slices = PathBuf::new();
            let mut prefix = String::new();
            for part in root.split('/') {
                prefix = if prefix.is_empty() {
                    part.trim_end_matches(".slice").to_owned()
                } else {
                    format!("{prefix}-{part}")
                };
                slices.push(format!("{prefix}.slice"));
            }
            below =
                below.iter().flat_map(|mount| [mount.join(root), mount.join(&slices)]).collect();
        }
        let mut roots = BTreeSet::new();
        let mut level: BTreeSet<PathBuf> = below.into_iter().collect();
        let mut budget = FOLDERS_MAX;
        'levels: for _ in 0..DEPTH_MAX {
            let mut next = BTreeSet::new();
            for folder in level.iter().flat_map(|folder| list(folder)) {
                let Some(left) = budget.checked_sub(1) else {
                    break 'levels;
                };
                budget = left;
                match folder.file_name().and_then(|name| name.to_str()) {
                    Some(name)
                        if name == "kubepods"
                            || name == "kubepods.slice"
                            || name.ends_with("-kubepods.slice") =>
                    {
                        roots.insert(folder);
                    }
                    _ => drop(next.insert(folder)),
                }
            }
            level = next;
        }
        PodCgroups { roots, ..found }
    }

    /// The number of cgroups with processes below a pod's own. These are its containers, and with
    /// most runtimes a sandbox that outlives them briefly.
    ///
    /// # Errors
    /// If that cannot be determined.
    pub fn populated_below(&self, uid: &str) -> io::Result<usize> {
        if !is_uid(uid) {
            return Ok(0);
        }
        let mut most = 0;
        for pod in self.roots.iter().flat_map(|root| candidates(root, uid)) {
            let mut running = 0;
            for container in folders(&pod)? {
                match is_populated(&container) {
                    Ok(populated) => running += usize::from(populated),
                    // It was removed meanwhile.
                    Err(error) if is_absence(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            // On v1 every controller has all of them.
            most = most.max(running);
        }
        if self.is_incomplete && most == 0 {
            Err(io::Error::other("not all cgroup folders could be read"))
        } else {
            Ok(most)
        }
    }

    /// Whether a folder could not be read during the search for the hierarchies. Then the search
    /// must be repeated.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    /// The UIDs of all pods with a cgroup, in one pass; `None` if they cannot be listed.
    #[must_use]
    pub fn present(&self) -> Option<BTreeSet<String>> {
        let mut present = BTreeSet::new();
        let mut is_seen = false;
        for root in &self.roots {
            is_seen |= is_dir(root).ok()?;
            for folder in classes(root) {
                let entries = match call(|| fs::read_dir(&folder)) {
                    Ok(entries) => entries,
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(_) => return None,
                };
                for entry in entries {
                    present.extend(call(|| entry).ok()?.file_name().to_str().and_then(uid_of));
                }
            }
        }
        (is_seen && !self.is_incomplete).then_some(present)
    }

    /// The state of one pod's cgroups. `Populated` in one hierarchy is enough; `Absent` means
    /// absent from all.
    #[must_use]
    pub fn state(&self, uid: &str) -> CgroupState {
        if !is_uid(uid) {
            return CgroupState::Unknown;
        }
        self.try_state(uid).unwrap_or(CgroupState::Unknown)
    }

    /// The same. An error if a file cannot be read, or was removed during the check: the next check
    /// decides.
    fn try_state(&self, uid: &str) -> io::Result<CgroupState> {
        let mut state = CgroupState::Unknown;
        for root in &self.roots {
            if !is_dir(root)? {
                continue;
            }
            if state == CgroupState::Unknown {
                state = CgroupState::Absent;
            }
            for folder in candidates(root, uid) {
                if is_dir(&folder)? {
                    if is_populated(&folder)? {
                        return Ok(CgroupState::Populated);
                    }
                    state = CgroupState::Empty;
                }
            }
        }
        Ok(if self.is_incomplete { CgroupState::Unknown } else { state })
    }
}

/// A UID becomes part of a path, so it may only have letters, digits and `-`, as a UUID or a hash
/// has.
fn is_uid(uid: &str) -> bool {
    !uid.is_empty() && uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

/// The possible paths of a pod's cgroup: guaranteed pods are in the root itself, the others below
/// their QoS class.
fn candidates(root: &Path, uid: &str) -> Vec<PathBuf> {
    let name = root.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let Some(stem) = name.strip_suffix(".slice") else {
        let pod = format!("pod{uid}");
        return vec![
            root.join(&pod),
            root.join("burstable").join(&pod),
            root.join("besteffort").join(&pod),
        ];
    };
    // In a slice's name `-` separates the levels.
    let uid = uid.replace('-', "_");
    let class = |class: &str| {
        root.join(format!("{stem}-{class}.slice")).join(format!("{stem}-{class}-pod{uid}.slice"))
    };
    vec![root.join(format!("{stem}-pod{uid}.slice")), class("burstable"), class("besteffort")]
}

/// The folders with the cgroups of pods: the root itself, and one below it for each QoS class.
fn classes(root: &Path) -> [PathBuf; 3] {
    let name = root.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let class = |class: &str| match name.strip_suffix(".slice") {
        Some(stem) => root.join(format!("{stem}-{class}.slice")),
        None => root.join(class),
    };
    [root.to_owned(), class("burstable"), class("besteffort")]
}

/// The pod of a cgroup with this name, as [`candidates`] makes it: `pod<uid>`, or
/// `kubepods-burstable-pod<uid>.slice` with `_` for `-`.
fn uid_of(folder: &str) -> Option<String> {
    let uid = match folder.strip_suffix(".slice") {
        Some(stem) => stem.rsplit('-').next()?.strip_prefix("pod")?.replace('_', "-"),
        None => folder.strip_prefix("pod")?.to_owned(),
    };
    is_uid(&uid).then_some(uid)
}

/// Whether a process runs in a cgroup or below it.
fn is_populated(folder: &Path) -> io::Result<bool> {
    // In v2 the file covers the whole subtree.
    match call(|| fs::read_to_string(folder.join("cgroup.events"))) {
        Ok(events) => return Ok(events.lines().any(|line| line == "populated 1")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if !call(|| fs::read_to_string(folder.join("cgroup.procs")))?.trim().is_empty() {
        return Ok(true);
    }
    for below in folders(folder)? {
        match is_populated(&below) {
            Ok(false) => {}
            // A container's cgroup that was just removed has no process in it.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !below.exists() => {}
            populated => return populated,
        }
    }
    Ok(false)
}

/// Whether this is a cgroup v2 mount. On a hybrid host it is a tmpfs with v1 mounts and `unified`.
fn is_v2(mount: &Path) -> bool {
    call(|| mount.join("cgroup.controllers").metadata()).is_ok()
}

/// The real folders in a folder; v1 has links such as `cpu` that point to `cpu,cpuacct`.
fn folders(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match call(|| fs::read_dir(folder)) {
        Ok(entries) => entries,
        Err(error) if is_absence(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = call(|| entry)?;
        if call(|| entry.file_type())?.is_dir() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0a9c9d2e-5f0b-4c8e-9a51-6b9b1f7f2c11";
    const SLICED: &str = "0a9c9d2e_5f0b_4c8e_9a51_6b9b1f7f2c11";

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn v2() -> Self {
            Tree::v1().with("sys/fs/cgroup/cgroup.controllers", "cpu memory")
        }

        fn v1() -> Self {
            Tree(tempfile::tempdir().unwrap())
        }

        fn with(self, path: &str, content: &str) -> Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
            self
        }

        fn state(&self) -> CgroupState {
            PodCgroups::find(self.0.path(), None).state(UID)
        }
    }

    #[test]
    fn names_come_from_the_log_folders() {
        let tree = Tree::v1()
            .with("var/log/pods/default_web-0_u1/x", "")
            .with(
                "var/log/pods/kube-system_etcd-node.example_6c66f772555a04be4eb20709fe93c16a/x",
                "",
            )
            .with("var/log/pods/not-a-pod/x", "")
            .with("var/log/pods/a_b_/x", "")
            .with("var/log/pods/a_b_c_d/x", "");
        let pod = |namespace: &str, name: &str| PodName {
            namespace: namespace.into(),
            name: name.into(),
        };
        let wanted = BTreeMap::from([
            ("u1".to_owned(), pod("default", "web-0")),
            (
                "6c66f772555a04be4eb20709fe93c16a".to_owned(),
                pod("kube-system", "etcd-node.example"),
            ),
        ]);
        assert_eq!(names(tree.0.path()).unwrap(), wanted);
        assert!(names(Path::new("/nonexistent")).unwrap().is_empty());
    }

    #[test]
    fn the_pods_that_have_a_cgroup_are_listed_with_both_drivers_and_on_both_versions() {
        let others = ["0a", "1b", "2c"];
        let tree = Tree::v2()
            .with("sys/fs/cgroup/kubepods.slice/kubepods-pod0a.slice/cgroup.events", "populated 1")
            .with(&format!("sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICED}.slice/x"), "")
            .with("sys/fs/cgroup/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1b.slice/x", "");
        let present = |tree: &Tree| PodCgroups::find(tree.0.path(), None).present();
        assert_eq!(present(&tree), Some([UID, "0a", "1b"].map(str::to_owned).into()));
        let tree = Tree::v1()
            .with(&format!("sys/fs/cgroup/cpu/kubepods/burstable/pod{UID}/x"), "")
            .with("sys/fs/cgroup/memory/kubepods/pod2c/x", "")
            .with("sys/fs/cgroup/memory/kubepods/besteffort/x", "");
        assert_eq!(present(&tree), Some([UID, "2c"].map(str::to_owned).into()));
        for uid in others.iter().chain([&UID]) {
            let cgroups = PodCgroups::find(tree.0.path(), None);
            assert_eq!(
                cgroups.present().unwrap().contains(*uid),
                cgroups.state(uid) != CgroupState::Absent,
                "{uid}"
            );
        }
        assert_eq!(present(&Tree::v1()), None, "where nothing is seen nothing is absent");
        // A folder of a class that cannot be listed hides pods.
        let tree = Tree::v2()
            .with("sys/fs/cgroup/kubepods/pod2c/x", "")
            .with("sys/fs/cgroup/kubepods/burstable", "no folder");
        assert_eq!(present(&tree), None);
    }

    #[test]
    fn a_pod_is_found_with_both_drivers_and_in_every_qos_class_on_v2() {
        let folders = [
            format!("kubepods/pod{UID}"),
            format!("kubepods/burstable/pod{UID}"),
            format!("kubepods/besteffort/pod{UID}"),
            format!("kubepods.slice/kubepods-pod{SLICED}.slice"),
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICED}.slice"),
            format!(
                "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICED}.slice"
            ),
            format!("kubelet/kubepods/burstable/pod{UID}"),
            format!("kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICED}.slice"),
        ];
        for folder in folders {
            for (events, state) in [
                ("populated 1\nfrozen 0\n", CgroupState::Populated),
                ("populated 0\nfrozen 0\n", CgroupState::Empty),
            ] {
                let tree =
                    Tree::v2().with(&format!("sys/fs/cgroup/{folder}/cgroup.events"), events);
                assert_eq!(tree.state(), state, "{folder}");
            }
        }
    }

    #[test]
    fn on_v1_a_process_in_any_controller_and_any_depth_counts() {
        let pod =
            |controller: &str| format!("sys/fs/cgroup/{controller}/kubepods/besteffort/pod{UID}");
        let empty = || {
            Tree::v1()
                .with(&format!("{}/cgroup.procs", pod("memory")), "")
                .with(&format!("{}/cgroup.procs", pod("pids")), "")
        };
        assert_eq!(empty().state(), CgroupState::Empty);
        let tree = empty()
            .with(&format!("{}/abc/cgroup.procs", pod("pids")), "")
            .with(&format!("{}/abc/d/cgroup.procs", pod("pids")), "17\n");
        assert_eq!(tree.state(), CgroupState::Populated);
    }

    #[test]
    fn what_runs_below_a_pod_is_counted_once_for_all_controllers() {
        let pod = format!("sys/fs/cgroup/kubepods.slice/kubepods-pod{SLICED}.slice");
        let tree = Tree::v2()
            .with(&format!("{pod}/cgroup.events"), "populated 1\n")
            .with(&format!("{pod}/cri-containerd-a.scope/cgroup.events"), "populated 1\n")
            .with(&format!("{pod}/cri-containerd-b.scope/cgroup.events"), "populated 1\n")
            .with(&format!("{pod}/cri-containerd-c.scope/cgroup.events"), "populated 0\n");
        let count =
            |tree: &Tree| PodCgroups::find(tree.0.path(), None).populated_below(UID).unwrap();
        assert_eq!(count(&tree), 2);
        let v1 = |controller: &str| {
            format!("sys/fs/cgroup/{controller}/kubepods/pod{UID}/a/cgroup.procs")
        };
        assert_eq!(count(&Tree::v1().with(&v1("memory"), "7\n").with(&v1("pids"), "7\n")), 1);
        assert_eq!(count(&Tree::v2()), 0);
    }

    #[test]
    fn gone_needs_the_kubelets_hierarchy_and_without_it_nothing_is_known() {
        assert_eq!(Tree::v2().state(), CgroupState::Unknown);
        assert_eq!(Tree::v1().state(), CgroupState::Unknown);
        assert_eq!(
            Tree::v2().with("sys/fs/cgroup/system.slice/x.service/cgroup.procs", "1").state(),
            CgroupState::Unknown
        );
        let other = format!("sys/fs/cgroup/kubepods/pod{}/cgroup.events", UID.replace('0', "1"));
        assert_eq!(Tree::v2().with(&other, "populated 1\n").state(), CgroupState::Absent);
    }

    #[test]
    fn a_stale_hierarchy_of_the_other_driver_does_not_hide_a_living_pod() {
        let tree = Tree::v2().with("sys/fs/cgroup/kubepods/cgroup.procs", "").with(
            &format!("sys/fs/cgroup/kubepods.slice/kubepods-pod{SLICED}.slice/cgroup.events"),
            "populated 1\n",
        );
        assert_eq!(tree.state(), CgroupState::Populated);
    }

    #[test]
    fn a_given_cgroup_root_is_where_it_is_looked_for() {
        let tree = Tree::v2()
            .with(&format!("sys/fs/cgroup/a/b/kubepods/pod{UID}/cgroup.events"), "populated 1\n")
            .with("sys/fs/cgroup/kubepods/cgroup.procs", "");
        assert_eq!(
            PodCgroups::find(tree.0.path(), Some("/a/b")).state(UID),
            CgroupState::Populated
        );
        assert_eq!(PodCgroups::find(tree.0.path(), Some("/c")).state(UID), CgroupState::Unknown);
        let path = format!(
            "sys/fs/cgroup/a.slice/a-b.slice/a-b-kubepods.slice/a-b-kubepods-pod{SLICED}.slice/cgroup.events"
        );
        let tree = Tree::v2().with(&path, "populated 1\n");
        assert_eq!(
            PodCgroups::find(tree.0.path(), Some("/a/b")).state(UID),
            CgroupState::Populated
        );
    }

    #[test]
    fn a_uid_that_is_a_path_is_not_followed() {
        let tree = Tree::v2().with("sys/fs/cgroup/kubepods/x/cgroup.events", "populated 1\n");
        for uid in ["", "/../x", "..", "a/b"] {
            assert_eq!(PodCgroups::find(tree.0.path(), None).state(uid), CgroupState::Unknown);
        }
    }
}
