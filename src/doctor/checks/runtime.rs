//! The container runtime, as far as CDI needs it.
//!
//! containerd supports CDI since 1.7, but only with `enable_cdi`. It is enabled by default in 2.0,
//! whose files have version 3 (a file of version 2 may belong to either). CRI-O enables it since
//! 1.23.

use super::super::codes::{CDI_DIRECTORY_MISSING, CDI_DIRECTORY_UNREAD, CDI_OFF};
use super::super::{Cdi, ContainerdFile, Facts, Finding};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Default directories of a runtime without configured ones (`/var/run` is `/run`).
const DEFAULT_DIRS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Version of the configuration files of containerd 2.0.
const VERSION_2_0: i64 = 3;

pub(super) fn cdi(facts: &Facts) -> Option<Vec<Finding>> {
    let wants = facts.config.as_ref()?.as_ref().ok()?;
    if wants.cdi.is_empty() {
        return Some(Vec::new());
    }
    let cdi = facts.cdi.as_ref()?;
    let mut found = Vec::new();
    if wants.writes_cdi && !cdi.exists && facts.status().is_some() {
        let todo = "make the directory writable for the daemon; in a container, mount it from the host (components/cdi)";
        let what = format!(
            "{} uses CDI names, but the directory of the CDI files does not exist",
            wants.cdi.join(", ")
        );
        found.push(Finding::new(&CDI_DIRECTORY_MISSING, cdi.directory.display(), what, todo));
    }
    found.extend(by_containerd(cdi).filter_map(is_off));
    found.extend(wants.writes_cdi.then(|| unread(cdi)).flatten());
    Some(found)
}

/// The files of each containerd, which reads them in this order: a later one overrides an earlier
/// one. A distribution has one file for its own containerd.
fn by_containerd(cdi: &Cdi) -> impl Iterator<Item = &[ContainerdFile]> {
    let is_drop_in = |one: &ContainerdFile, other: &ContainerdFile| {
        [one, other].iter().all(|file| file.path.starts_with("/etc/containerd"))
    };
    cdi.containerd.chunk_by(is_drop_in)
}

fn is_off(files: &[ContainerdFile]) -> Option<Finding> {
    let version = files.iter().filter_map(|file| file.version).max();
    let is_2 = |version: Option<i64>| version.is_some_and(|version| version >= VERSION_2_0);
    let set = files.iter().rev().find(|file| file.enable_cdi.is_some());
    let (file, found) = match set {
        Some(file) if file.enable_cdi == Some(false) => (file, "`enable_cdi` is false"),
        Some(_) => return None,
        None if is_2(version) => return None,
        None => {
            (files.first()?, "`enable_cdi` is not set; its default is false before containerd 2.0")
        }
    };
    // A file has the tables of its own version.
    let table = if is_2(file.version.or(version)) {
        "io.containerd.cri.v1.runtime"
    } else {
        "io.containerd.grpc.v1.cri"
    };
    let todo = format!("set `enable_cdi = true` in [plugins.\"{table}\"] and restart containerd");
    Some(
        Finding::new(&CDI_OFF, file.path.display(), found, todo).by("systemctl restart containerd"),
    )
}

fn unread(cdi: &Cdi) -> Option<Finding> {
    let of_containerd = by_containerd(cdi)
        .filter_map(|files| files.iter().rev().find_map(|file| file.cdi_spec_dirs.as_ref()));
    let configured: Vec<&BTreeSet<PathBuf>> = of_containerd.chain(&cdi.crio_dirs).collect();
    let is_read = |dirs: &BTreeSet<PathBuf>| dirs.iter().any(|dir| is_same(dir, &cdi.directory));
    let usual: BTreeSet<PathBuf> = DEFAULT_DIRS.iter().map(PathBuf::from).collect();
    let has_runtime = !cdi.containerd.is_empty() || cdi.crio_dirs.is_some();
    let dirs = if configured.is_empty() && has_runtime { vec![&usual] } else { configured };
    let dirs = dirs.into_iter().find(|dirs| !is_read(dirs))?;
    let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    let found = format!("CDI files are written here, but the runtime reads {}", dirs.join(", "));
    let todo = "set `directory` in [cdi] of the configuration to one of the runtime's directories, \
                or add this one to its `cdi_spec_dirs`";
    Some(Finding::new(&CDI_DIRECTORY_UNREAD, cdi.directory.display(), found, todo))
}

/// Compares paths; `/var/run` is a link to `/run`.
fn is_same(one: &Path, other: &Path) -> bool {
    let short = |path: &Path| {
        path.strip_prefix("/var/run")
            .map_or_else(|_| path.to_owned(), |rest| Path::new("/run").join(rest))
    };
    short(one) == short(other)
}
