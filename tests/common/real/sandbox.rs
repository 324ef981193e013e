//! The namespaces of the test, and its requirements.

use super::say;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Set inside: the directory of this run.
const INSIDE: &str = "HOLDFAST_SANDBOX_DIR";

/// Programs that must be on the `PATH`, and their Debian packages.
const TOOLS: [(&str, &str); 9] = [
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("containerd-shim-runc-v2", "containerd"),
    ("runc", "runc"),
    ("busybox", "busybox-static"),
    ("unshare", "util-linux"),
    ("mount", "mount"),
    ("tar", "tar"),
    ("sha256sum", "coreutils"),
];

/// Directories that this run has for itself inside the namespaces.
const OWN_DIRS: [&str; 10] = [
    "/var/lib/kubelet",
    "/var/log/pods",
    "/var/log/containers",
    "/run/containerd",
    // For pods with addresses of their own.
    "/run/netns",
    "/var/lib/cni",
    // For the DaemonSet.
    "/run/holdfast",
    "/var/lib/holdfast",
    // For CDI.
    "/var/run/cdi",
    "/run/nvidia",
];

/// Kernel settings that the kubelet and a network of pods require. They are set inside, so that the
/// machine's own settings do not change.
const SETTINGS: [(&str, &str); 7] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
    ("net/ipv4/ip_forward", "1"),
];

/// The directory of this run, inside.
pub(crate) fn work_dir() -> Option<PathBuf> {
    std::env::var_os(INSIDE).map(PathBuf::from)
}

/// The path of a program on the `PATH`.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    find_in(&std::env::var_os("PATH").unwrap_or_default(), program)
}

fn find_in(path: &OsStr, program: &str) -> Option<PathBuf> {
    std::env::split_paths(path).map(|dir| dir.join(program)).find(|path| path.is_file())
}

/// Runs a program to its end. Returns its output.
pub(crate) fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A run of this binary inside the namespaces.
#[derive(Debug)]
pub(crate) struct Sandbox<'a> {
    /// The variable that names what is tested with, and its value inside.
    pub(crate) variable: &'a str,
    pub(crate) value: PathBuf,
    /// The `PATH` inside.
    pub(crate) path: OsString,
    /// Programs that must be on it in addition to the usual ones, with their Debian packages.
    pub(crate) tools: &'a [(&'a str, &'a str)],
    /// Whether it has a network of its own, with nothing but a loopback interface that is down.
    pub(crate) has_network: bool,
}

/// Runs `test` of this binary again, inside the namespaces.
pub(crate) fn run(test: &str, kubelet: &Path) {
    assert!(kubelet.is_file(), "KUBELET_BIN names {}, which is no file", kubelet.display());
    let sandbox = Sandbox {
        variable: "KUBELET_BIN",
        value: fs::canonicalize(kubelet).unwrap(),
        path: std::env::var_os("PATH").unwrap_or_default(),
        tools: &[],
        has_network: false,
    };
    let (dir, has_succeeded) =
        sandbox.enter(|inside| inside.args(["--exact", test, "--nocapture"]));
    if !has_succeeded {
        panic!("the checks failed; the logs are in {}", dir.keep().display());
    }
}

impl Sandbox<'_> {
    /// Runs this binary inside to its end, with the arguments of `with`. Returns the directory of
    /// the run, and whether it has succeeded.
    pub(crate) fn enter(&self, with: impl FnOnce(&mut Command) -> &mut Command) -> (TempDir, bool) {
        self.check();
        // Ports and cgroups are shared with the machine.
        let lock_path = std::env::temp_dir().join("holdfast-real-kubelet.lock");
        let lock = File::create(&lock_path).unwrap();
        if lock.try_lock().is_err() {
            say(format_args!("another run holds {}: waiting for it", lock_path.display()));
            lock.lock().unwrap();
        }
        let kubelet_socket = Path::new("/var/lib/kubelet/device-plugins/kubelet.sock");
        let in_use = std::os::unix::net::UnixStream::connect(kubelet_socket).is_ok();
        assert!(
            !in_use,
            "a kubelet runs on this machine ({}): this test is not for nodes",
            kubelet_socket.display()
        );
        // A kubelet ends every process in the cgroups of pods that it does not know.
        let others = clear_cgroups();
        assert!(
            others.is_empty(),
            "pods run on this machine ({others:?}): this test would end them"
        );

        let dir = tempfile::Builder::new().prefix("real-kubelet").tempdir().unwrap();
        let mut inside = Command::new("unshare");
        inside.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        if self.has_network {
            inside.arg("--net");
        }
        inside.arg(std::env::current_exe().unwrap());
        let mut inside = with(&mut inside)
            .env(INSIDE, dir.path())
            .env(self.variable, &self.value)
            .env("PATH", &self.path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let held = inside.stdin.take();
        let status = inside.wait().unwrap();
        drop(held);
        let _left = clear_cgroups();
        (dir, status.success())
    }

    fn check(&self) {
        let variable = self.variable;
        assert!(
            nix::unistd::geteuid().is_root(),
            "{variable} is set, but a kubelet needs root: run this test as root, or unset it"
        );
        for (program, package) in TOOLS.iter().chain(self.tools) {
            assert!(
                find_in(&self.path, program).is_some(),
                "{variable} is set, but `{program}` is missing: apt-get install {package}"
            );
        }
    }
}

/// Turns the namespaces into a node. Runs inside only.
pub(crate) fn furnish(dir: &Path) {
    // This is the first process of its namespace. When the process outside ends, this one gets the
    // signal, and all processes here end with it.
    std::thread::spawn(|| {
        let _ended = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        #[expect(
            clippy::disallowed_methods,
            clippy::exit,
            reason = "the first process of a namespace is spared signals"
        )]
        std::process::exit(1);
    });
    for (index, path) in OWN_DIRS.iter().enumerate() {
        let own = dir.join(format!("own-{index}"));
        for path in [&own, Path::new(path)] {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(path).unwrap();
        }
        output(Command::new("mount").arg("--bind").arg(&own).arg(path));
    }
    for (name, value) in SETTINGS {
        let (own, path) = (dir.join(name.replace('/', ".")), Path::new("/proc/sys").join(name));
        fs::write(&own, format!("{value}\n")).unwrap();
        if path.exists() {
            output(Command::new("mount").arg("--bind").arg(&own).arg(path));
        }
    }
}

/// Removes the empty cgroups that a kubelet leaves behind. The kernel refuses to remove those with
/// processes; they are returned.
fn clear_cgroups() -> Vec<PathBuf> {
    fn clear(folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                clear(&entry.path());
            }
        }
        drop(fs::remove_dir(folder));
    }
    let mount = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_dir(mount).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut roots: Vec<PathBuf> =
        controllers.chain([mount.to_owned()]).map(|root| root.join("kubepods")).collect();
    roots.retain(|root| {
        clear(root);
        root.exists()
    });
    roots
}
