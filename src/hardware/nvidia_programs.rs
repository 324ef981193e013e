//! The programs of NVIDIA's driver that Holdfast runs, with the root in which they find their
//! libraries: this process's own (a package of the host, or NVIDIA's runtime in a container), the
//! driver's container, or the host below `--host-root` (`[nvidia] driver_root`).

use super::nvidia_driver::PROGRAM_FOLDERS;
use crate::host::{HostRoot, ReadFailure};
use std::path::PathBuf;

/// The programs of one driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvidiaPrograms {
    /// The root that they need as their own; `None`: they run in this process's root.
    pub root: Option<PathBuf>,
    /// `nvidia-cuda-mps-control`, as a process in this root runs it.
    pub mps_control: PathBuf,
    /// `nvidia-smi`, in the same way.
    pub smi: PathBuf,
}

/// The programs of the first root that has both; `None` if none has.
///
/// # Errors
/// If none was found and a file could not be read: then it is unknown whether they are installed.
pub fn nvidia_programs(host: &HostRoot) -> Result<Option<NvidiaPrograms>, ReadFailure> {
    let host = host.recording();
    let own = host.is_live().then(|| HostRoot::new("/").recording());
    // A simulated host has no libraries: there the programs run in this process's root.
    let enters = host.is_live();
    let found = own.iter().find_map(|own| programs(own, false)).or_else(|| {
        // A driver in a container excludes a working one of the host.
        let mut others = host.nvidia().of_driver().into_iter().rev();
        others.find_map(|below| programs(&host.rooted_at(below), enters))
    });
    let failures = own.iter().flat_map(HostRoot::take_failures).chain(host.take_failures()).next();
    match (found, failures) {
        (None, Some(failure)) => Err(failure),
        (found, _) => Ok(found),
    }
}

/// The programs in a root, which a process enters or not.
fn programs(root: &HostRoot, enters: bool) -> Option<NvidiaPrograms> {
    let program = |name: &str| {
        let installed =
            PROGRAM_FOLDERS.iter().filter_map(|folder| root.installed(&format!("{folder}/{name}")));
        let path = installed.into_iter().find(|file| file.is_program)?.path;
        Some(if enters { PathBuf::from(path) } else { root.path(&path) })
    };
    Some(NvidiaPrograms {
        mps_control: program("nvidia-cuda-mps-control")?,
        smi: program("nvidia-smi")?,
        root: enters.then(|| root.path("/")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::NvidiaRoots;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn install(folder: &Path, name: &str, mode: u32) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(name), "").unwrap();
        fs::set_permissions(folder.join(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn both_programs_come_from_one_root_and_that_of_the_drivers_container_is_first() {
        let dir = tempfile::tempdir().unwrap();
        let find = || nvidia_programs(&HostRoot::new(dir.path())).unwrap();
        assert_eq!(find(), None);
        let host = dir.path().join("usr/bin");
        install(&host, "nvidia-cuda-mps-control", 0o755);
        install(&host, "nvidia-smi", 0o644);
        assert_eq!(find(), None, "nvidia-smi is no program");
        install(&host, "nvidia-smi", 0o755);
        let expected = |folder: &Path| NvidiaPrograms {
            root: None,
            mps_control: folder.join("nvidia-cuda-mps-control"),
            smi: folder.join("nvidia-smi"),
        };
        assert_eq!(find(), Some(expected(&host)));

        let driver = dir.path().join("run/nvidia/driver/usr/bin");
        install(&driver, "nvidia-cuda-mps-control", 0o755);
        assert_eq!(find(), Some(expected(&host)));
        install(&driver, "nvidia-smi", 0o755);
        assert_eq!(find(), Some(expected(&driver)));

        // A configured root is the only one.
        let below = |driver: &str| {
            let roots = NvidiaRoots { driver: Some(driver.to_owned()), dev: None };
            nvidia_programs(&HostRoot::new(dir.path()).with_nvidia(&roots)).unwrap()
        };
        assert_eq!(below(""), Some(expected(&host)));
        assert_eq!(below("/opt/driver"), None);
    }

    #[test]
    fn the_programs_of_a_running_host_run_in_its_root() {
        let dir = tempfile::tempdir().unwrap();
        install(&dir.path().join("usr/bin"), "nvidia-cuda-mps-control", 0o755);
        install(&dir.path().join("usr/bin"), "nvidia-smi", 0o755);
        let root = HostRoot::new(dir.path());
        let found = programs(&root, true).unwrap();
        assert_eq!(found.root, Some(root.path("/")));
        assert_eq!(found.mps_control, Path::new("/usr/bin/nvidia-cuda-mps-control"));
    }
}
