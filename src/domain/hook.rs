//! Hooks: what is done to a device before a container starts with it, and after its last holder has given it back.
//!
//! ```text
//!            the last holder has gone, in one commit with its release
//!                             │
//!                             ▼      the run has failed
//!                            Due ────────────────────────▶ Failed ◀─┐
//!                             │                               │  └──┘ tried again
//!                             │ the run has ended well        │
//!                             └────────────▶ Done ◀───────────┘
//! ```
//!
//! While another pod's container waits at the gate ([`Barred`]) the hook is run for it, although that pod holds the device.
//!
//! A [`Check`] is no hook: it changes nothing, and is run now and then to find out whether a device is well.
//!
//! A hook is **idempotent**: a daemon that dies between a run and its record runs it again. Until `Done` the free device is
//! unhealthy, with a reason of its own, and nobody gets it.

use super::device::DeviceId;
use super::grant::{AllocId, PodRef};
use super::health::Reason;
use super::object::Object;
use super::observation::CgroupState;
use super::resource::ResourceName;
use super::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What is done to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Its PCI function is reset: `1` is written into the function's `reset` in sysfs. Only for exclusive devices.
    Reset,
    /// A program is run, without a shell.
    Command {
        /// Its absolute path, and its arguments.
        argv: Vec<String>,
        /// It is killed, with everything in its process group, when it takes longer.
        limit: Duration,
    },
}

/// The hooks of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks {
    /// Before every start of a container, when the kubelet calls PreStartContainer.
    pub before_start: Option<Hook>,
    /// After the last holder of a device has gone.
    pub after_release: Option<Hook>,
    /// Now and then.
    pub check: Option<Check>,
}

/// A program that says whether a device is well: its end with status 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// The command; that it takes too long is a failure too.
    pub run: Hook,
    /// How often it is run.
    pub every: Duration,
}

/// What came of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckResult {
    /// The device is well.
    Passed,
    /// It is not, and how the check ended.
    Failed(String),
    /// It could not be run, which says nothing of the device.
    NotRun,
}

/// When a hook is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Before a container starts.
    BeforeStart,
    /// After the device was given back.
    AfterRelease,
    /// Now and then, whoever has it.
    Check,
}

impl Phase {
    /// The word of the configuration, of logs and metrics, and of the variable `HOLDFAST_PHASE`.
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

/// How far the hook of a release has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "hook", rename_all = "snake_case")]
pub enum HookState {
    /// It is yet to be run, or runs.
    Due,
    /// Its latest run has failed; it is run again.
    Failed {
        /// How many runs have failed.
        tries: u32,
        /// When the latest did.
        failed_at: Timestamp,
        /// Why, in one line.
        why: String,
    },
    /// Nothing is owed any more: it has ended well, or is not configured any more.
    Done,
}

/// The hook that is owed to a device after its release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwedHook {
    /// The resource.
    pub resource: ResourceName,
    /// The device as a whole; of a pool, the resource's name.
    pub device: DeviceId,
    /// Its physical key ([`super::Device::key`]) when it was granted; empty where nobody knew it.
    pub key: String,
    /// What was held with it ([`super::Device::objects`]); none where that was not noted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub objects: Vec<Object>,
    /// The grant of the last holder.
    pub alloc_id: AllocId,
    /// The pod that held it; `None` when it was never bound.
    pub pod: Option<PodRef>,
    /// The container, where it was bound.
    pub container: Option<String>,
    /// When it was given back.
    pub released_at: Timestamp,
    /// How far the hook has come.
    #[serde(flatten)]
    pub state: HookState,
}

impl OwedHook {
    /// Why its device is not healthy meanwhile.
    #[must_use]
    pub fn reason(&self) -> Reason {
        match self.state {
            HookState::Failed { .. } => Reason::HookFailed,
            HookState::Due | HookState::Done => Reason::HookPending,
        }
    }
}

/// Every hook that is owed, by resource and device.
pub type Owed = BTreeMap<ResourceName, BTreeMap<DeviceId, OwedHook>>;

/// The hooks that may run, by who waits for them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Due {
    /// Of devices that nobody holds: unhealthy until then.
    pub free: Owed,
    /// Of devices whose next holder is kept from starting. They are held, and as healthy as ever: a kubelet that starts again
    /// rejects a waiting pod with an unhealthy device.
    pub gated: Owed,
}

impl Due {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = &OwedHook> {
        self.free.values().chain(self.gated.values()).flat_map(BTreeMap::values)
    }

    /// The hook of a device.
    #[must_use]
    pub fn get(&self, resource: &ResourceName, device: &DeviceId) -> Option<&OwedHook> {
        [&self.free, &self.gated].into_iter().find_map(|owed| owed.get(resource)?.get(device))
    }
}

/// Who had a device before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Former {
    /// The pod.
    pub pod: PodRef,
    /// Its container.
    pub container: String,
}

impl fmt::Display for Former {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pod {} (container {})", self.pod, self.container)
    }
}

/// Why a container may not start yet with a device that another pod had. The kubelet shows the text and tries again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Barred {
    /// Something of the former pod runs, or may.
    #[error(
        "{former} had it before, and {}; its hook after_release comes first. The kubelet tries again by itself; if that pod does not end, \
         delete it or end its processes on the node", seen(*cgroup)
    )]
    Runs {
        /// Who had it.
        former: Former,
        /// What that pod's cgroup tells.
        cgroup: CgroupState,
    },
    /// The kubelet's checkpoint does not say which of two pods has it now.
    #[error(
        "{former} had it before, and the kubelet's checkpoint does not tell that it has it no more. The kubelet tries again by itself; if \
         that pod is over and this lasts, restart the kubelet, which writes the checkpoint anew"
    )]
    Remembered {
        /// Who had it.
        former: Former,
    },
    /// A grant of it is no container's as far as anybody has seen.
    #[error(
        "grant {alloc_id} of it, made before, is not known to be of any pod. That none got it is proven about a minute after it was made; \
         the kubelet tries again by itself"
    )]
    Unknown {
        /// The grant.
        alloc_id: AllocId,
    },
    /// The hook is about to be run, or runs.
    #[error("the hook after_release of {former}, which had it before, has not ended yet; the kubelet tries again by itself")]
    Due {
        /// Who had it: a pod, or the grant of nobody who is known.
        former: String,
    },
    /// The hook has failed.
    #[error(
        "the hook after_release of {former}, which had it before, has failed {}: {why}. It is run again by itself, and so does \
         the kubelet try again; mend what it says, or take the hook out of the configuration and have Holdfast read that (`systemctl reload \
         holdfast`, or SIGHUP)", times(u64::from(*tries))
    )]
    Failed {
        /// Who had it.
        former: String,
        /// How often it has failed.
        tries: u32,
        /// Why it did the last time.
        why: String,
    },
}

/// What earlier versions wrote behind the end of a command that failed, in front of its output.
const OUTPUT: &str = ", and said last: ";

/// How a command ended, without the output that earlier versions recorded with it.
#[must_use]
pub fn without_output(ended: &str) -> &str {
    ended.split_once(OUTPUT).map_or(ended, |(ended, _)| ended)
}

/// How often something has happened, in words.
#[must_use]
pub fn times(count: u64) -> String {
    if count == 1 { "once".into() } else { format!("{count} times") }
}

fn seen(cgroup: CgroupState) -> &'static str {
    match cgroup {
        CgroupState::Populated => "processes of it still run (its cgroup is populated)",
        CgroupState::Unknown => "whether anything of it runs cannot be seen, since the kubelet's cgroups are not found on this host",
        CgroupState::Empty | CgroupState::Gone => "it has just ended",
    }
}

impl OwedHook {
    /// Why a container has to wait for it.
    #[must_use]
    pub fn bars(&self) -> Barred {
        let former = match (&self.pod, &self.container) {
            (Some(pod), Some(container)) => Former { pod: pod.clone(), container: container.clone() }.to_string(),
            _ => format!("grant {}", self.alloc_id),
        };
        match &self.state {
            HookState::Failed { tries, why, .. } => Barred::Failed { former, tries: *tries, why: why.clone() },
            HookState::Due | HookState::Done => Barred::Due { former },
        }
    }
}

/// Takes note of how far a hook has come; one that is done is owed no more.
pub fn note_hook(owed: &mut Owed, hook: &OwedHook) {
    if hook.state != HookState::Done {
        owed.entry(hook.resource.clone()).or_default().insert(hook.device.clone(), hook.clone());
    } else if let Some(devices) = owed.get_mut(&hook.resource) {
        devices.remove(&hook.device);
        if devices.is_empty() {
            owed.remove(&hook.resource);
        }
    }
}
