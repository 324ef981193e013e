//! Hooks: actions on a device before a container starts with it, and after its last holder has
//! released it.
//!
//! ```text
//!            the last holder is released; the hook is in the same commit
//!                             │
//!                             ▼      a run fails
//!                            Due ────────────────────────▶ Failed ◀─┐
//!                             │                               │  └──┘ a retry fails
//!                             │ a run succeeds                │
//!                             └────────────▶ Done ◀───────────┘
//! ```
//!
//! While a container of another pod waits at the gate ([`StartBlocked`]), the hook is run for it,
//! although that pod already holds the device.
//!
//! A [`Check`] is not a hook: it changes nothing, and is run periodically to find out whether a
//! device is healthy.
//!
//! A hook must be **idempotent**: if the daemon dies between a run and its record, the hook is run
//! again. Until `Done` the free device is unhealthy, with a reason of its own, and no container
//! gets it.

use super::device_id::DeviceId;
use super::grant::AllocId;
use super::health::Reason;
use super::object::Object;
use super::observation::CgroupState;
use super::pod::PodRef;
use super::resource_name::ResourceName;
use super::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The action of a hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Resets the PCI function: writes `1` into the function's `reset` in sysfs. Only for exclusive
    /// devices.
    Reset,
    /// Runs a program, without a shell.
    Command {
        /// Its absolute path, and its arguments.
        argv: Vec<String>,
        /// The time limit. After it the whole process group is killed.
        limit: Duration,
    },
}

/// The hooks of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks {
    /// Before every start of a container, when the kubelet calls PreStartContainer.
    pub before_start: Option<Hook>,
    /// After the last holder of a device has released it.
    pub after_release: Option<Hook>,
    /// Periodically.
    pub check: Option<Check>,
}

/// A program that checks whether a device is healthy: status 0 means healthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The command. A timeout is a failure too.
    pub run: Hook,
    /// How often it is run.
    pub every: Duration,
}

/// The result of a health check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckResult {
    /// The device is healthy.
    Passed,
    /// The device is not healthy, with how the check ended.
    Failed(String),
    /// The check could not be run, which is no evidence about the device.
    NotRun,
}

/// When a hook is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Before a container starts.
    BeforeStart,
    /// After the device was released.
    AfterRelease,
    /// Periodically, with and without a holder.
    Check,
}

impl Phase {
    /// The word in the configuration, in logs and metrics, and in the variable `HOLDFAST_PHASE`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::BeforeStart => "before_start",
            Phase::AfterRelease => "after_release",
            Phase::Check => "check",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The progress of the hook of a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "hook", rename_all = "snake_case")]
pub enum HookState {
    /// It is waiting to run, or is running.
    Due,
    /// Its latest run has failed; it will be run again.
    Failed {
        /// How many runs have failed.
        tries: u32,
        /// When the latest run failed.
        failed_at: Timestamp,
        /// Why, in one line.
        why: String,
    },
    /// Nothing is pending any longer: a run has succeeded, or the hook is no longer configured.
    Done,
}

/// A pending hook after the release of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingHook {
    /// The resource.
    pub resource: ResourceName,
    /// The device as a whole; for a pool, the resource's name.
    pub device: DeviceId,
    /// The device's key ([`super::Device::key`]) at the grant; empty if it was unknown.
    pub key: String,
    /// The objects held with it ([`super::Device::objects`]); empty if they were not recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Object>,
    /// The grant of the last holder.
    pub alloc_id: AllocId,
    /// The pod that held it; `None` if the grant was never bound.
    pub pod: Option<PodRef>,
    /// The container; `None` if the grant was never bound.
    pub container: Option<String>,
    /// When it was released.
    pub released_at: Timestamp,
    /// The progress of the hook.
    #[serde(flatten)]
    pub state: HookState,
}

impl PendingHook {
    /// The reason why its device is unhealthy until then.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self.state {
            HookState::Failed { .. } => Reason::HookFailed,
            HookState::Due | HookState::Done => Reason::HookPending,
        }
    }
}

/// All pending hooks, by resource and device.
pub type PendingHooks = BTreeMap<ResourceName, BTreeMap<DeviceId, PendingHook>>;

/// The hooks that may run now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DueHooks {
    /// Of devices without a holder: they are unhealthy until the hook is done.
    pub free: PendingHooks,
    /// Of devices whose next holder waits at the gate. They are held, and their health does not
    /// change: a kubelet that restarts rejects a waiting pod with an unhealthy device.
    pub gated: PendingHooks,
}

impl DueHooks {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &PendingHook> {
        self.free.values().chain(self.gated.values()).flat_map(BTreeMap::values)
    }

    /// The hook of a device.
    #[must_use]
    pub fn get(&self, resource: &ResourceName, device: &DeviceId) -> Option<&PendingHook> {
        [&self.free, &self.gated].into_iter().find_map(|hooks| hooks.get(resource)?.get(device))
    }
}

/// The former holder of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormerHolder {
    /// The pod.
    pub pod: PodRef,
    /// Its container.
    pub container: String,
}

impl fmt::Display for FormerHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {} (container {})", self.pod, self.container)
    }
}

/// Why a container must not start yet with a device that another pod had. The kubelet shows the
/// text and tries again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartBlocked {
    /// Processes of the former pod run, or may run.
    #[error(
        "{former} had the device before, and {}; its hook after_release must run first. The kubelet retries; \
         if that pod does not end, delete it or end its processes on the node", seen(*cgroup)
    )]
    Runs {
        /// The former holder.
        former: FormerHolder,
        /// The state of that pod's cgroup.
        cgroup: CgroupState,
    },
    /// The kubelet's checkpoint does not show which of two pods has the device now.
    #[error(
        "{former} had the device before, and the kubelet's checkpoint does not show that the pod no longer has it. \
         The kubelet retries; if that pod is finished and this persists, restart the kubelet, which rewrites the checkpoint"
    )]
    CheckpointUnclear {
        /// The former holder.
        former: FormerHolder,
    },
    /// A grant of the device is not matched to any container yet.
    #[error(
        "grant {alloc_id} of the device, made before, is not matched to a pod yet. It is released after about a minute \
         if no pod claims it; the kubelet retries"
    )]
    Unknown {
        /// The grant.
        alloc_id: AllocId,
    },
    /// The hook is about to be run, or is running.
    #[error(
        "the hook after_release of {former}, which had the device before, has not ended yet; the kubelet retries"
    )]
    Due {
        /// The former holder: a pod, or the id of a grant that was never bound.
        former: String,
    },
    /// The hook has failed.
    #[error(
        "the hook after_release of {former}, which had the device before, has failed {}: {why}. Holdfast retries the hook, and the \
         kubelet retries the pod; fix the cause, or remove the hook from the configuration and reload it (`systemctl reload \
         holdfast`, or SIGHUP)", times(u64::from(*tries))
    )]
    Failed {
        /// The former holder.
        former: String,
        /// How many runs have failed.
        tries: u32,
        /// Why the latest run failed.
        why: String,
    },
}

/// The text that earlier versions wrote between the end of a failed command and its output.
const OUTPUT: &str = ", and said last: ";

/// How a command ended, without the output that earlier versions recorded with it.
#[must_use]
pub fn without_output(ended: &str) -> &str {
    ended.split_once(OUTPUT).map_or(ended, |(ended, _)| ended)
}

/// A count in words: `once`, `2 times`.
#[must_use]
pub fn times(count: u64) -> String {
    if count == 1 { "once".into() } else { format!("{count} times") }
}

fn seen(cgroup: CgroupState) -> &'static str {
    match cgroup {
        CgroupState::Populated => "processes of that pod still run (its cgroup is populated)",
        CgroupState::Unknown => {
            "it is unknown whether its processes run, because the kubelet's cgroups were not found on this host"
        }
        CgroupState::Empty | CgroupState::Absent => "the pod has just ended",
    }
}

impl PendingHook {
    /// Why a container must wait for the hook.
    #[must_use]
    pub fn start_blocked(&self) -> StartBlocked {
        let former = match (&self.pod, &self.container) {
            (Some(pod), Some(container)) => {
                FormerHolder { pod: pod.clone(), container: container.clone() }.to_string()
            }
            _ => format!("grant {}", self.alloc_id),
        };
        match &self.state {
            HookState::Failed { tries, why, .. } => {
                StartBlocked::Failed { former, tries: *tries, why: why.clone() }
            }
            HookState::Due | HookState::Done => StartBlocked::Due { former },
        }
    }
}

/// Records the progress of a hook. A hook that is done is removed.
pub fn note_hook(hooks: &mut PendingHooks, hook: &PendingHook) {
    if hook.state != HookState::Done {
        hooks.entry(hook.resource.clone()).or_default().insert(hook.device.clone(), hook.clone());
    } else if let Some(devices) = hooks.get_mut(&hook.resource) {
        devices.remove(&hook.device);
        if devices.is_empty() {
            hooks.remove(&hook.resource);
        }
    }
}
