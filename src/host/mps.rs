//! The surroundings of NVIDIA's MPS control daemon: its folders, its shared memory, and the root in
//! which its program runs.
//!
//! A client in a container and the server of the control daemon share memory in `/dev/shm`. Every
//! container with a share gets `<mps_root>/shm` there (the contract `nvidia`), so the control
//! daemon must have the same folder at its own `/dev/shm`. Where it has not, the thread that starts
//! it gets a mount namespace of its own (`unshare(2)`), which the control daemon inherits. The
//! thread also gets a umask of its own: the pipes are for the users of containers, and the daemon's
//! files for root alone.

use super::failure::call;
use super::private::make_open_folder;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, chroot};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The label of the pipe directory, as NVIDIA's plugin sets it
/// (`cmd/mps-control-daemon/mps/daemon.go`): containers may use the files.
const LABEL: &str = "system_u:object_r:container_file_t:s0";

/// Where the programs of the driver run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsPlace {
    /// The folder of the control daemons (`mps_root`).
    pub mps_root: PathBuf,
    /// The root of the programs, if it is not this process's own.
    pub chroot: Option<PathBuf>,
    /// Whether a control daemon may be started here. A question needs no surroundings.
    pub launches: bool,
    /// Whether this is a running host. In a simulated one nothing is mounted.
    pub is_live: bool,
}

/// Makes the folders of a resource's control daemon, and the folder of shared memory. That one
/// becomes a tmpfs of its own where this process may mount: containers fill it, and `/run` must not
/// be full. The kernel limits a tmpfs to half the machine's memory (tmpfs(5)).
///
/// # Errors
/// The folder that cannot be made, with the error.
pub fn make_mps_folders(place: &MpsPlace, pipe: &Path, log: &Path) -> Result<(), String> {
    let shm = place.mps_root.join("shm");
    for folder in [pipe, log, &shm] {
        make_open_folder(folder).map_err(|error| failed("make", folder, &error))?;
    }
    if place.is_live && !is_mount(&shm) {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        let mode = Some("mode=1777");
        if let Err(error) = mount(Some("shm"), &shm, Some("tmpfs"), flags, mode) {
            tracing::info!(folder = %shm.display(), %error, "cannot mount a tmpfs for the shared memory of MPS; it takes memory of the file system above it");
        }
    }
    fs::set_permissions(&shm, Permissions::from_mode(0o1777))
        .map_err(|error| failed("set the mode of", &shm, &error))?;
    label(pipe).map_err(|error| failed("set the SELinux label of", pipe, &error))
}

/// Whether a folder is the root of another file system than the folder above it.
fn is_mount(folder: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|about| about.dev()).ok();
    device(folder) != folder.parent().and_then(device)
}

/// Labels the pipe directory where SELinux is active. Files that are made in it inherit the type.
fn label(pipe: &Path) -> io::Result<()> {
    match call(|| fs::metadata("/sys/fs/selinux")) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    let flags = rustix::fs::XattrFlags::empty();
    match rustix::fs::setxattr(pipe, "security.selinux", LABEL.as_bytes(), flags) {
        // The directory exists also on systems where SELinux is compiled in and not active.
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        result => Ok(result?),
    }
}

/// Prepares this thread, and no other, for the programs of the driver. Processes that it starts
/// inherit this. The thread must not be used for anything else afterwards.
///
/// # Errors
/// The step that failed, with the error.
pub fn enter_mps_place(place: &MpsPlace) -> Result<(), String> {
    let step = |what: &str, result: nix::Result<()>| {
        result.map_err(|error| format!("cannot {what}: {}", io::Error::from(error)))
    };
    let rights = "(this needs CAP_SYS_ADMIN: the drop-in mps.conf, or the component mps)";
    if place.launches {
        step(&format!("give a thread a umask of its own {rights}"), unshare(CloneFlags::CLONE_FS))?;
        umask(Mode::from_bits_truncate(0o022));
    }
    let shm = place.mps_root.join("shm");
    let root = place.chroot.as_deref().unwrap_or(Path::new("/"));
    let own_shm = root.join("dev/shm");
    let binds_shm = place.launches && place.is_live && !is_same(&shm, &own_shm);
    if place.chroot.is_none() && !binds_shm {
        return Ok(());
    }
    step(&format!("make a mount namespace {rights}"), unshare(CloneFlags::CLONE_NEWNS))?;
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    step("keep mounts to itself", mount(NONE, "/", NONE, slave, NONE))?;
    let bind = |from: &Path, to: &Path| {
        let what = format!("mount {} on {}", from.display(), to.display());
        step(&what, mount(Some(from), to, NONE, MsFlags::MS_BIND | MsFlags::MS_REC, NONE))
    };
    if binds_shm {
        bind(&shm, &own_shm)?;
    }
    if let Some(chroot_to) = &place.chroot {
        let inside = below(chroot_to, &place.mps_root);
        // A read-only root has the folder if the host has it.
        drop(make_open_folder(&inside));
        bind(&place.mps_root, &inside)?;
        step("change the root", chroot(chroot_to.as_path()))?;
        step("change to the new root", chdir("/"))?;
    }
    Ok(())
}

const NONE: Option<&str> = None;

/// An absolute path as it is below a root.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn is_same(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| fs::metadata(path).map(|about| (about.dev(), about.ino())).ok();
    place(one).is_some_and(|found| place(other) == Some(found))
}

fn failed(what: &str, folder: &Path, error: &io::Error) -> String {
    format!("cannot {what} {}: {error}", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn the_folders_are_for_the_users_of_containers() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let root = dir.path().join("mps");
        let (pipe, log) = (root.join("a.b/c/pipe"), root.join("a.b/c/log"));
        let place = |mps_root: &Path| MpsPlace {
            mps_root: mps_root.to_owned(),
            chroot: None,
            launches: true,
            is_live: false,
        };
        make_mps_folders(&place(&root), &pipe, &log).unwrap();
        make_mps_folders(&place(&root), &pipe, &log).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(&pipe), mode(&log), mode(&root.join("shm"))), (0o755, 0o755, 0o1777));

        fs::write(dir.path().join("file"), "").unwrap();
        let wrong = make_mps_folders(&place(&dir.path().join("file")), &pipe, &log).unwrap_err();
        assert!(wrong.contains("cannot make") && wrong.contains("file/shm"), "{wrong}");
    }

    /// The file modes and `/dev/shm` as a child process of this thread sees them.
    #[test]
    fn only_the_thread_has_another_umask_and_another_shared_memory() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let mps_root = dir.path().to_owned();
        fs::create_dir(mps_root.join("shm")).unwrap();
        fs::write(mps_root.join("shm/mark"), "").unwrap();
        let place =
            MpsPlace { mps_root: mps_root.clone(), chroot: None, launches: true, is_live: true };
        let entered = std::thread::spawn(move || {
            enter_mps_place(&place).map(|()| {
                let made = mps_root.join("made");
                let script = format!("test -e /dev/shm/mark && touch {}", made.display());
                let status = std::process::Command::new("/bin/sh").args(["-c", &script]).status();
                (status.unwrap().success(), fs::metadata(made).map(|about| about.mode() & 0o777))
            })
        });
        let outside = || {
            let missing = fs::metadata("/dev/shm/mark").unwrap_err();
            assert_eq!(missing.kind(), ErrorKind::NotFound);
        };
        match entered.join().unwrap() {
            Ok((sees_shm, mode)) => assert_eq!((sees_shm, mode.unwrap()), (true, 0o644)),
            // Without CAP_SYS_ADMIN the error names what it needs.
            Err(error) => assert!(error.contains("CAP_SYS_ADMIN"), "{error}"),
        }
        outside();
    }
}
