//! The codes of the findings. They are stable: scripts and `docs/doctor.md` refer to them.

use self::Level::{Error, Note, Warning};
use serde::Serialize;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Devices are not served, or their records are in danger.
    Error,
    /// A function does not work as intended, or will soon fail.
    Warning,
    /// Information; no action is needed.
    Note,
    /// A check without a problem.
    Ok,
}

impl Level {
    /// The level as it is printed.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Error => "error",
            Warning => "warning",
            Note => "note",
            Level::Ok => "ok",
        }
    }
}

/// A kind of finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// Its name, which is never reused.
    pub name: &'static str,
    /// Its severity.
    pub level: Level,
    /// Its impact.
    pub why: &'static str,
}

/// Defines each code as a constant, and lists them all.
macro_rules! codes {
    ($($constant:ident = $name:literal $level:ident $why:literal;)*) => {
        $(pub(super) const $constant: Code = Code { name: $name, level: $level, why: $why };)*
        /// Every code.
        pub const ALL: &[Code] = &[$($constant),*];
    };
}

codes! {
    // The doctor itself.
    NOT_ROOT = "not-root" Note
        "much of a node is readable by root only, so some checks could not run";
    LOOK_HANGS = "look-hangs" Warning
        "an object that blocks a reader may block the daemon or a container in the same way";
    USER_NAMESPACE = "user-namespace" Error
        "root of a user namespace is another user to the host: the kubelet's sockets and the device nodes refuse it";

    // The kubelet.
    KUBELET_DIR_MISSING = "kubelet-dir-missing" Error "Holdfast registers with the kubelet there: no device is offered";
    KUBELET_DIR_OTHER = "kubelet-dir-other" Error
        "Holdfast waits for a kubelet in this directory, and no kubelet uses it: no device is \
         offered";
    KUBELET_DIR_UNUSABLE = "kubelet-dir-unusable" Error "the daemon does not start with it (exit code 4)";
    KUBELET_DIR_NOT_MOUNTED = "kubelet-dir-not-mounted" Error
        "the container sees a directory of its own that no kubelet uses: no device is offered";
    KUBELET_SOCKET_MOUNTED = "kubelet-socket-mounted" Error
        "the kubelet makes a new socket at every start, and the mount keeps the old one: after its next restart no device is offered";
    KUBELET_ABSENT = "kubelet-absent" Warning "until a kubelet listens there, no device is offered";
    KUBELET_HANGS = "kubelet-hangs" Error
        "the kubelet cannot receive device lists, and pods that request a device wait";
    KUBELET_TOO_OLD = "kubelet-too-old" Error "kubelets before 1.26 are not supported: their connection to a plugin is refused, so no device is offered";
    KUBELET_LACKS_DEVICES = "kubelet-lacks-devices" Error
        "no pod gets a device that the kubelet does not count as allocatable";
    KUBELET_CHECKPOINT_UNREADABLE = "kubelet-checkpoint-unreadable" Error
        "without it no new grant is bound to its pod, so its devices stay held when the pod ends";
    POD_RESOURCES_UNREACHABLE = "pod-resources-unreachable" Warning
        "without it grants are released late, and a list that the kubelet has lost is not noticed";
    OTHER_PLUGIN = "other-plugin" Error
        "two plugins of one resource replace each other at the kubelet, and each may grant devices \
         that the other has already granted";
    OTHER_PLUGIN_SOCKET = "other-plugin-socket" Warning
        "two plugins of one resource replace each other at the kubelet, and each may grant devices \
         that the other has already granted";

    // The daemon.
    DAEMON_ABSENT = "daemon-absent" Note "facts that only the daemon knows could not be checked";
    DAEMON_NOT_RUNNING = "daemon-not-running" Error
        "no process answers the kubelet: no device is offered";
    DAEMON_HANGS = "daemon-hangs" Error
        "the thread that does not answer here is the same one that answers the kubelet";
    DAEMON_NOT_READY = "daemon-not-ready" Warning "a condition that the start waits for is not met";
    DAEMON_OTHER_VERSION = "daemon-other-version" Note
        "the installed version takes effect only when the daemon runs it";
    TWO_DAEMONS = "two-daemons" Error
        "both register the same resources, and each knows only its own grants";
    RESOURCE_NOT_REGISTERED = "resource-not-registered" Error
        "the kubelet does not know its devices, so no pod gets one";
    HOOK_FAILED = "hook-failed" Warning
        "no container starts with the device until the hook after its release has succeeded";
    HOOK_NOT_RUN = "hook-not-run" Warning
        "devices and pods keep waiting for the hook, and a check reports no health until it runs";
    MPS_DOWN = "mps-down" Error
        "the shares of the resource are unhealthy: no new pod gets one";
    MPS_PROGRAMS_MISSING = "mps-programs-missing" Error
        "without them no control daemon of MPS runs: no pod gets a share";
    METRICS_UNDECIDED = "metrics-undecided" Warning
        "every request of /metrics and of the page is answered with 503, so nothing is scraped";
    SIGNALS_OFF = "signals-off" Note "device failures that only this signal shows are not detected";

    // The configuration and the devices.
    CONFIG_INVALID = "config-invalid" Error "the daemon does not start with it (exit code 3)";
    CONFIG_CHANGED = "config-changed" Warning
        "the daemon does not use the present content of the files";
    RESOURCE_SELECTS_NOTHING = "resource-selects-nothing" Warning
        "the resource has no device, so no pod gets one";
    DRIVER_NOT_BOUND = "driver-not-bound" Warning
        "a device without its driver has no device nodes, and is not offered";
    DRIVER_NODES_ELSEWHERE = "driver-nodes-elsewhere" Note
        "a container gets these nodes at their usual paths";
    DRIVER_ROOT = "driver-root" Note
        "a container gets these libraries at their paths below this root";
    DRIVER_ROOT_MISSING = "driver-root-missing" Warning
        "nothing of the driver is searched elsewhere: its GPUs are unhealthy (node_missing), or containers lack its libraries";
    DRIVER_LIBRARIES_MISSING = "driver-libraries-missing" Warning
        "the CDI names of GPUs are not defined, and the runtime refuses containers that have one";
    DRIVER_HOOK_MISSING = "driver-hook-missing" Warning
        "libraries of the driver are mounted at their names only, and an image of another \
         distribution may not find them";
    DEVICE_UNHEALTHY = "device-unhealthy" Warning "no new container gets it";
    DEVICE_SUSPECT = "device-suspect" Note "if the symptom persists, the device becomes unhealthy";
    DEVICE_CORDONED = "device-cordoned" Note "an operator cordoned it: no new container gets it";
    IOMMU_OFF = "iommu-off" Error "without an IOMMU no PCI function can be assigned to a guest";
    IOMMU_UNSAFE = "iommu-unsafe" Warning "a guest can read and write all of the host's memory through its device";

    // CDI.
    CDI_DIRECTORY_MISSING = "cdi-directory-missing" Warning
        "containers get CDI names that cannot be resolved, and do not start";
    CDI_OFF = "cdi-off" Error "the container runtime ignores CDI names, or refuses containers that have one";
    CDI_DIRECTORY_UNREAD = "cdi-directory-unread" Error "containers get CDI names that the runtime does not find, and do not start";

    // Claims.
    DRA_DIRECTORY_UNUSABLE = "dra-directory-unusable" Error
        "the kubelet does not find the driver for claims, and pods with claims wait";
    DRA_API_UNREACHABLE = "dra-api-unreachable" Error
        "no device is published for claims, and no claim is prepared";
    DRA_API_NOT_SERVED = "dra-api-not-served" Error
        "no device is published for claims, and no claim is prepared";
    DRA_NODE_UNKNOWN = "dra-node-unknown" Error
        "the scheduler does not use the devices of a node that does not exist, and the kubelet is \
         not permitted to prepare them";
    DRA_RIGHT_MISSING = "dra-right-missing" Error
        "devices are not published, or claims are not prepared";
    DRA_STATUS_RIGHT_MISSING = "dra-status-right-missing" Warning
        "the status of claims is not written; devices and claims work";
    DRA_POLICY_DENIES = "dra-policy-denies" Error
        "devices are not published; the right is not missing";
    DRA_PROBLEM = "dra-problem" Warning "the daemon reports it";

    // The ledger and its disk.
    STATE_DISK_FULL = "state-disk-full" Error "no grant can be recorded, so no Allocate is answered";
    STATE_DISK_LOW = "state-disk-low" Warning "when it is full no grant can be recorded, so no Allocate is answered";
    STATE_READ_ONLY = "state-read-only" Error "no grant can be recorded, so no Allocate is answered";
    STATE_IN_MEMORY = "state-in-memory" Error
        "the ledger is lost at a reboot or with the container, and with it the holders of all \
         devices";
    STATE_IN_CONTAINER = "state-in-container" Error
        "the ledger is lost with the container, and with it the holders of all devices";
    STATE_ON_NETWORK = "state-on-network" Warning
        "every Allocate waits for the network, and without end if the other machine does not answer";
    LEDGER_UNREADABLE = "ledger-unreadable" Error "the daemon does not start with it (exit code 5)";
    LEDGER_DAMAGED = "ledger-damaged" Warning "records may be missing";
    LEDGER_NOT_WRITTEN = "ledger-not-written" Error
        "grants made until it is fixed are lost when the daemon ends";
    LEDGER_ONE_COPY = "ledger-one-copy" Warning
        "if the journal is damaged now, it cannot be rebuilt";
    LEDGER_MOVED_ASIDE = "ledger-moved-aside" Note
        "it was damaged and rebuilt from the other copy; the damaged file is kept for inspection";
    CLOCK_MOVED_BACK = "clock-moved-back" Warning
        "times in the history are wrong, and records appear newer than they are";
    CLOCK_MOVED_FORWARD = "clock-moved-forward" Note "times in the history before the jump are too early";

    // The host.
    INOTIFY_EXHAUSTED = "inotify-exhausted" Error
        "a daemon that starts now gets no events of kubelet restarts or of devices that appear and \
         disappear";
    INOTIFY_LOW = "inotify-low" Warning
        "when none is left, a daemon that starts gets no events of kubelet restarts";
    KERNEL_LOG_UNREADABLE = "kernel-log-unreadable" Warning
        "NVIDIA's Xid errors appear only there: a failed GPU stays healthy";
    SELINUX_LABEL = "selinux-label" Warning
        "SELinux may prevent the daemon from creating its sockets there, and the kubelet from \
         connecting to them";
}
