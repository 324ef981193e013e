//! What is known of a node at one moment. `None` is "not known", of which nothing follows.

use super::Redactor;
use crate::config::Roots;
use crate::domain::{Moment, Timestamp};
use crate::hardware::NearMiss;
use crate::host::{InotifyRoom, Medium};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Everything.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Where it was looked.
    pub roots: Roots,
    /// The looks that have not ended in time, in words.
    pub hanging: Vec<&'static str>,
    /// Whether whoever looks is root.
    pub is_root: bool,
    /// The first line of this process' `uid_map`.
    pub uid_map: Option<String>,
    /// When it was looked.
    pub now: Moment,
    /// What the configuration asks for, or what is wrong with it.
    pub config: Option<Result<Wants, String>>,
    /// The kubelet's directory.
    pub kubelet: Option<Kubelet>,
    /// What the kubelet has, as its pod-resources API tells.
    pub listing: Option<Listing>,
    /// The daemon.
    pub daemon: Option<Daemon>,
    /// Every `holdfast run` of this node that can be seen.
    pub processes: Option<Vec<Process>>,
    /// The resources with what this host has for them.
    pub resources: Option<Vec<Resource>>,
    /// The state directory.
    pub state: Option<State>,
    /// What the journal tells.
    pub ledger: Option<Ledger>,
    /// CDI, where a resource uses it.
    pub cdi: Option<Cdi>,
    /// The host.
    pub host: Option<HostFacts>,
}

impl Facts {
    /// Nothing is known yet.
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
            host: None,
        }
    }

    /// Whether nothing of the host is kept from whoever looks: root of a user namespace is none of the host's.
    #[must_use]
    pub fn may_read_all(&self) -> bool {
        self.is_root && self.is_in_user_namespace() != Some(true)
    }

    /// Whether this process is in a user namespace: a map of one line from 0 to 0 is that of the host (user_namespaces(7)).
    #[must_use]
    pub fn is_in_user_namespace(&self) -> Option<bool> {
        let mut numbers = self.uid_map.as_ref()?.split_whitespace();
        Some((numbers.next(), numbers.next()) != (Some("0"), Some("0")))
    }

    /// The same without what operators and commands have written, for a report that is given away.
    #[must_use]
    pub fn without_words(mut self) -> Facts {
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

/// What the configuration asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wants {
    /// The files that were read.
    pub files: Vec<PathBuf>,
    /// CRC-32 of their texts, one after the other, in hex: what the daemon tells of those that it has loaded.
    pub hash: String,
    /// When one of them, or the folder of drop-ins, was changed last.
    pub changed_at: Option<Timestamp>,
    /// Whether a resource is configured at all.
    pub has_resources: bool,
    /// Whether Holdfast writes CDI files itself.
    pub writes_cdi: bool,
    /// The resources that are told by CDI names and by nothing else.
    pub cdi: Vec<String>,
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Is {
    /// Nothing.
    Missing,
    /// A directory that can be read.
    Directory,
    /// A socket on which somebody listens.
    Listening,
    /// A socket on which nobody listens.
    Deserted,
    /// A socket whose owner takes no connection in time.
    Silent,
    /// Something else than is needed there.
    Other,
    /// It may not be looked at.
    Denied(String),
}

/// The kubelet's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kubelet {
    /// The directory itself.
    pub dir: Is,
    /// `device-plugins` in it.
    pub plugins: Is,
    /// `device-plugins/kubelet.sock`.
    pub socket: Is,
    /// Other directories of this host that have one.
    pub elsewhere: Vec<PathBuf>,
    /// What a kubelet of this host was given as `--root-dir`.
    pub root_dir: Option<PathBuf>,
    /// Whether a file is mounted where one of the two directories belongs.
    pub is_file_mount: bool,
    /// Whether the socket itself was mounted.
    pub socket_is_mounted: bool,
    /// Where this process runs in a container: whether the directory of the sockets was mounted into it.
    pub is_mounted: Option<bool>,
    /// Why the kubelet's checkpoint cannot be read; one that is missing is not told here.
    pub checkpoint: Option<String>,
    /// Sockets of other plugins on which somebody listens.
    pub others: Vec<String>,
    /// The SELinux label of `device-plugins`.
    pub label: Option<String>,
}

/// What pod-resources tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// Its socket.
    pub socket: PathBuf,
    /// What is there.
    pub is: Is,
    /// How many healthy devices the kubelet has of each resource, or why it does not tell.
    pub allocatable: Option<Result<BTreeMap<String, usize>, String>>,
    /// Whether it does not know the question, which kubelets from 1.23 on do.
    pub is_old: bool,
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Nobody listens on its control socket.
    Absent,
    /// Who asks may not.
    Denied,
    /// It takes the question, and gives no answer.
    Silent(String),
    /// `status -o json`.
    Status(Value),
}

/// The daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct Daemon {
    /// What it answers.
    pub answer: Answer,
    /// The process behind the control socket.
    pub pid: Option<u32>,
    /// Whether systemd is to start it at boot.
    pub is_enabled: bool,
    /// The process that has the ledger.
    pub lock_holder: Option<u32>,
}

/// A `holdfast run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// The kubelet's directory that it was given.
    pub kubelet: PathBuf,
}

/// A resource, and what this host has for it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resource {
    /// Its name.
    pub name: String,
    /// The class of its devices.
    pub class: String,
    /// How many devices it selects.
    pub devices: usize,
    /// Those that cannot be used now, with the reason.
    pub unhealthy: Vec<(String, String)>,
    /// Where it selects none: those that it would but for one thing.
    pub near: Vec<NearMiss>,
    /// For a class of `/dev` nodes: the paths that it asks for.
    pub paths: Vec<String>,
    /// Whether only NVML could tell of devices that it may have.
    pub needs_nvml: bool,
    /// Whether its devices go to guests.
    pub is_for_guests: bool,
    /// Whether a device of it is NVIDIA's.
    pub is_nvidia: bool,
}

/// The state directory, and what it lies on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// The directory, or the nearest above it that is there.
    pub dir: PathBuf,
    /// On what it lies.
    pub medium: Option<Medium>,
    /// Bytes that may still be written.
    pub room: u64,
    /// Files that may still be made.
    pub files_left: u64,
    /// Bytes more than these that root may write.
    pub room_of_root: u64,
    /// Whether anything may be written.
    pub writes: Writes,
    /// What was moved aside there.
    pub moved_aside: Vec<PathBuf>,
}

/// What becomes of what is written to a file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writes {
    /// It is taken.
    Taken,
    /// This mount is read-only; the file system is not.
    RefusedHere,
    /// The file system is read-only.
    Refused,
    /// The kernel takes nothing more since an error. What is there can be read.
    Stopped,
    /// Nothing is taken or read any more: why.
    Gone(String),
}

/// What the journal tells.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Why it cannot be read.
    pub unreadable: Option<String>,
    /// What is wrong with it.
    pub findings: Vec<String>,
    /// What its records say of the clock.
    pub clock: Clock,
}

/// What the ledger's records say of the clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Clock {
    /// The newest record.
    pub newest: Option<Timestamp>,
    /// The oldest grant that was made in this boot.
    pub oldest_of_boot: Option<Timestamp>,
}

/// What containerd is configured to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerdFile {
    /// The file, as the host has it.
    pub path: PathBuf,
    /// Of its format: 3 is that of containerd 2.
    pub version: Option<i64>,
    /// Whether CDI is on; `None` where it does not say.
    pub enable_cdi: Option<bool>,
    /// Where CDI files are looked for; `None` where it does not say.
    pub cdi_spec_dirs: Option<BTreeSet<PathBuf>>,
}

/// CDI, where a resource uses it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cdi {
    /// Where Holdfast writes.
    pub directory: PathBuf,
    /// Whether that is there.
    pub is_there: bool,
    /// containerd's configuration, where the host has it.
    pub containerd: Vec<ContainerdFile>,
    /// Where CRI-O looks; `None` where it is not there, or does not say.
    pub crio_dirs: Option<BTreeSet<PathBuf>>,
}

/// The host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Whether files can still be watched; `None` of a tree that is no running machine.
    pub inotify: Option<InotifyRoom>,
    /// Why the kernel's log cannot be read; `None` where it can be, or where there is none to be read.
    pub kernel_log: Option<String>,
    /// How many IOMMU groups there are; `None` where sysfs does not tell.
    pub iommu_groups: Option<usize>,
    /// The directory in which a driver container has made NVIDIA's device nodes, where `/dev` has none of them.
    pub driver_nodes: Option<&'static str>,
    /// Whether VFIO goes without an IOMMU.
    pub is_unsafe: bool,
    /// Whether SELinux refuses what it does not allow.
    pub is_enforcing: bool,
}
