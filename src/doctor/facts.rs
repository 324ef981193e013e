//! The facts about a node at one time. `None` means "unknown"; no check draws a conclusion from it.

use super::Redactor;
use super::claims::Dra;
use crate::config::Roots;
use crate::domain::{Moment, Timestamp};
use crate::hardware::NearMiss;
use crate::host::{InotifyLimits, Medium};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// All facts.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The root directories that were read.
    pub roots: Roots,
    /// The readers that exceeded the deadline, in words.
    pub hanging: Vec<&'static str>,
    /// Whether this process runs as root.
    pub is_root: bool,
    /// The first line of this process's `uid_map`.
    pub uid_map: Option<String>,
    /// The time of the facts.
    pub now: Moment,
    /// Requirements of the configuration, or its error.
    pub config: Option<Result<Requirements, String>>,
    /// The kubelet's directory.
    pub kubelet: Option<Kubelet>,
    /// The kubelet's resources, from its pod-resources API.
    pub listing: Option<Listing>,
    /// The daemon.
    pub daemon: Option<Daemon>,
    /// Every visible `holdfast run` of this node.
    pub processes: Option<Vec<Process>>,
    /// The resources, with the devices of this host for each.
    pub resources: Option<Vec<Resource>>,
    /// The state directory.
    pub state: Option<State>,
    /// The contents of the journal.
    pub ledger: Option<Ledger>,
    /// CDI, if a resource uses it.
    pub cdi: Option<Cdi>,
    /// What the driver for claims needs, if it is on.
    pub dra: Option<Dra>,
    /// Whether the API server answers questions about the clients of `/metrics`, or why not. Only
    /// with `telemetry.authorize`.
    pub reviews: Option<Result<(), String>>,
    /// Whether the programs for MPS are installed where this process finds them.
    pub mps_programs: Option<bool>,
    /// NVIDIA's driver.
    pub nvidia: Option<NvidiaFacts>,
    /// The host.
    pub host: Option<HostFacts>,
}

impl Facts {
    /// Facts with nothing known yet.
    #[must_use]
    pub fn unknown(roots: Roots, now: Moment) -> Self {
        Facts {
            roots,
            hanging: Vec::new(),
            is_root: false,
            uid_map: None,
            now,
            config: None,
            kubelet: None,
            listing: None,
            daemon: None,
            processes: None,
            resources: None,
            state: None,
            ledger: None,
            cdi: None,
            dra: None,
            reviews: None,
            mps_programs: None,
            nvidia: None,
            host: None,
        }
    }

    /// Whether this process can read everything on the host. Root of a user namespace is not root
    /// on the host.
    #[must_use]
    pub fn may_read_all(&self) -> bool {
        self.is_root && self.is_in_user_namespace() != Some(true)
    }

    /// Whether this process is in a user namespace. A map of one line from 0 to 0 is the host's
    /// (user_namespaces(7)).
    #[must_use]
    pub fn is_in_user_namespace(&self) -> Option<bool> {
        let mut numbers = self.uid_map.as_ref()?.split_whitespace();
        Some((numbers.next(), numbers.next()) != (Some("0"), Some("0")))
    }

    /// Removes the texts of operators and commands, for a report that is shared.
    #[must_use]
    pub fn without_texts(mut self) -> Facts {
        if let Some(Daemon { answer: Answer::Status(status), .. }) = &mut self.daemon {
            *status = Redactor::default().document(std::mem::take(status));
        }
        self
    }

    /// The daemon's own report, `status -o json`.
    #[must_use]
    pub fn status(&self) -> Option<&Value> {
        match &self.daemon.as_ref()?.answer {
            Answer::Status(status) => Some(status),
            _ => None,
        }
    }
}

/// Requirements of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requirements {
    /// The files that were read.
    pub files: Vec<PathBuf>,
    /// CRC-32 of the concatenated files in hex, as the daemon reports it for its loaded
    /// configuration.
    pub hash: String,
    /// The last modification of a file or of the drop-in directory.
    pub changed_at: Option<Timestamp>,
    /// Whether any resource is configured.
    pub has_resources: bool,
    /// Whether Holdfast writes CDI files.
    pub writes_cdi: bool,
    /// The resources that reach containers by CDI names only.
    pub cdi: Vec<String>,
    /// The resources whose control daemon of MPS Holdfast runs.
    pub mps: Vec<String>,
    /// Whether the driver for claims (`[dra]`) is on.
    pub dra: bool,
    /// Whether the API server decides who may read `/metrics` (`telemetry.authorize`).
    pub authorize: bool,
}

/// The object at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathState {
    /// Nothing.
    Missing,
    /// A directory that can be read.
    Directory,
    /// A socket with a listener.
    Listening,
    /// A socket without a listener.
    NoListener,
    /// A socket whose owner accepts no connection in time.
    Unresponsive,
    /// Another kind of object than required.
    Other,
    /// Access denied.
    Denied(String),
}

/// The kubelet's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubelet {
    /// The directory itself.
    pub dir: PathState,
    /// `device-plugins` in it.
    pub plugins: PathState,
    /// `device-plugins/kubelet.sock`.
    pub socket: PathState,
    /// Other directories of this host with a kubelet socket.
    pub elsewhere: Vec<PathBuf>,
    /// The `--root-dir` of a kubelet of this host.
    pub root_dir: Option<PathBuf>,
    /// Whether a file is mounted in place of one of the two directories.
    pub is_file_mount: bool,
    /// Whether the socket itself is a mount.
    pub socket_is_mounted: bool,
    /// In a container: whether the directory of the sockets is a mount.
    pub is_mounted: Option<bool>,
    /// Why the kubelet's checkpoint cannot be read; a missing one is not reported here.
    pub checkpoint: Option<String>,
    /// Sockets of other plugins that have a listener.
    pub others: Vec<String>,
    /// The SELinux label of `device-plugins`.
    pub label: Option<String>,
}

/// Result of pod-resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// Path of the socket.
    pub socket: PathBuf,
    /// The object at this path.
    pub is: PathState,
    /// Number of healthy devices of each resource in the kubelet, or the error.
    pub allocatable: Option<Result<BTreeMap<String, usize>, String>>,
    /// Whether the call is unimplemented; kubelets since 1.23 have it.
    pub is_old: bool,
}

/// The daemon's answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Its control socket has no listener.
    Absent,
    /// This process may not query it.
    Denied,
    /// It accepts the query, but does not answer.
    Unresponsive(String),
    /// `status -o json`.
    Status(Value),
}

/// The daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct Daemon {
    /// Its answer.
    pub answer: Answer,
    /// The process that owns the control socket.
    pub pid: Option<u32>,
    /// Whether systemd starts it at boot.
    pub is_enabled: bool,
    /// The process that holds the ledger's lock.
    pub lock_holder: Option<u32>,
}

/// A `holdfast run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Its `--kubelet-dir`.
    pub kubelet: PathBuf,
}

/// A resource, with the devices of this host for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resource {
    /// Resource name.
    pub name: String,
    /// The class of its devices.
    pub class: String,
    /// Number of devices that it selects.
    pub devices: usize,
    /// Devices that cannot be used now, each with the reason.
    pub unhealthy: Vec<(String, String)>,
    /// If it selects none: devices that fail a single criterion.
    pub near: Vec<NearMiss>,
    /// For a class of `/dev` nodes: the configured paths.
    pub paths: Vec<String>,
    /// If it selects none of them: why, as the scan reports it.
    pub why_none: Vec<String>,
    /// Whether only NVML could report devices that it may have.
    pub needs_nvml: bool,
    /// Whether its devices go to guests.
    pub is_for_guests: bool,
    /// Whether it has an NVIDIA device.
    pub is_nvidia: bool,
}

/// The state directory, and its file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// The directory, or its nearest existing parent.
    pub dir: PathBuf,
    /// The medium of its file system.
    pub medium: Option<Medium>,
    /// Free bytes.
    pub free_bytes: u64,
    /// Free inodes.
    pub free_inodes: u64,
    /// Further free bytes that only root may use.
    pub root_reserve_bytes: u64,
    /// Whether it is writable.
    pub writes: WriteAccess,
    /// Files that were moved aside there.
    pub moved_aside: Vec<PathBuf>,
}

/// The effect of a write to a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteAccess {
    /// It succeeds.
    Allowed,
    /// This mount is read-only; the file system is not.
    MountReadOnly,
    /// The file system is read-only.
    ReadOnly,
    /// The kernel refuses writes since an error. Existing data can be read.
    StoppedByError,
    /// Neither writes nor reads succeed; with the reason.
    DiskFailed(String),
}

/// The contents of the journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Why it cannot be read.
    pub unreadable: Option<String>,
    /// Problems that were found in it.
    pub findings: Vec<String>,
    /// Times of its records, to check the clock.
    pub clock: Clock,
}

/// Times of the ledger's records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Clock {
    /// The newest record.
    pub newest: Option<Timestamp>,
    /// The oldest grant of this boot.
    pub oldest_of_boot: Option<Timestamp>,
}

/// A configuration file of containerd.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerdFile {
    /// Its path on the host.
    pub path: PathBuf,
    /// The version of its format; 3 is containerd 2.
    pub version: Option<i64>,
    /// Whether CDI is enabled; `None` if not set.
    pub enable_cdi: Option<bool>,
    /// The directories of CDI files; `None` if not set.
    pub cdi_spec_dirs: Option<BTreeSet<PathBuf>>,
}

/// CDI, if a resource uses it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cdi {
    /// The directory that Holdfast writes to.
    pub directory: PathBuf,
    /// Whether it exists.
    pub exists: bool,
    /// containerd's configuration files on the host.
    pub containerd: Vec<ContainerdFile>,
    /// The directories of CRI-O; `None` if it is absent or has none configured.
    pub crio_dirs: Option<BTreeSet<PathBuf>>,
}

/// NVIDIA's driver. A root has no slash at its end, and that of the host is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvidiaFacts {
    /// The configured roots that do not exist: their key in `[nvidia]`, and the path.
    pub missing_roots: Vec<(&'static str, String)>,
    /// Whether `driver_root` is configured.
    pub is_configured: bool,
    /// Whether `dev_root` is configured.
    pub is_dev_configured: bool,
    /// The root whose `dev` has the driver's nodes; `None` if there are none.
    pub nodes_root: Option<String>,
    /// The root of the libraries in use, and their release; `None` if there are none.
    pub libraries: Option<(String, String)>,
    /// Why no libraries were found.
    pub no_libraries: Option<String>,
    /// Whether NVIDIA's program for hooks of containers is installed.
    pub has_hook: bool,
    /// Whether Holdfast defines CDI names of GPUs, which need the libraries and the program.
    pub needs_files: bool,
}

/// The host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Whether further inotify instances can be created; `None` for a tree that is not a running
    /// machine.
    pub inotify: Option<InotifyLimits>,
    /// Why the kernel log cannot be read; `None` if it can be read, or if there is none.
    pub kernel_log: Option<String>,
    /// Number of IOMMU groups; `None` if sysfs does not show them.
    pub iommu_groups: Option<usize>,
    /// Whether VFIO works without an IOMMU (unsafe mode).
    pub is_unsafe: bool,
    /// Whether SELinux is enforcing.
    pub is_enforcing: bool,
}
