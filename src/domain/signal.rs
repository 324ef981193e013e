//! Signals of a device's health, from a probe or from an event.
//!
//! Signals do not judge. The table of [`super::Reason`] has the weights and the recovery, and the
//! health actor makes the verdict.

use super::health::Reason;
use super::pci::PciAddress;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// A present symptom of a device. It ends when a later probe no longer finds it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Symptom {
    /// The kind of the symptom.
    pub reason: Reason,
    /// The reading, for logs and status: `port 1 is 2: INIT`.
    pub detail: String,
}

/// A counter that does not grow on a healthy device, and the meaning of a rise. A lower value than
/// before shows that the device was reset.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Counter {
    /// The meaning of a rise.
    pub reason: Reason,
    /// The function that counts: the device's own, or one of the bridges above it.
    pub at: PciAddress,
}

/// A source of signals that may be unavailable to a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The device's PCI configuration space (`config`). Its first 64 bytes need no capability; the
    /// rest does.
    ConfigSpace,
    /// Error counters of PCI Express (`aer_dev_fatal`, `aer_dev_nonfatal`).
    Aer,
    /// Uevents of the kernel.
    Uevents,
    /// NVIDIA's Xid errors: lines of the kernel's log (`/dev/kmsg`), or NVML's events in their
    /// place.
    KernelLog,
    /// NVIDIA's management library.
    Nvml,
}

impl Source {
    /// The word in `status`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Source::ConfigSpace => "config_space",
            Source::Aer => "aer",
            Source::Uevents => "uevents",
            Source::KernelLog => "kernel_log",
            Source::Nvml => "nvml",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The result of one probe of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signals {
    /// The present symptoms.
    pub symptoms: BTreeSet<Symptom>,
    /// Its counters, and those of the bridges above it.
    pub counters: BTreeMap<Counter, u64>,
    /// Observations for the log that are not symptoms, such as a link that is slower than before.
    pub remarks: BTreeSet<String>,
    /// Sources that cannot be read without a privilege.
    pub off: BTreeSet<Source>,
    /// Reasons that could not be checked because a read failed. That they are not among the
    /// symptoms is no evidence (I12).
    pub unread: BTreeSet<Reason>,
}

/// An event of a device, as reported by the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceEvent {
    /// The function of the event. All functions below it are affected too: a failed recovery of a
    /// bridge is also theirs.
    pub at: PciAddress,
    /// Whether all functions of its slot are affected: lines of NVIDIA's driver do not name a
    /// function.
    pub whole_slot: bool,
    /// The only affected part of the function, where the driver names it.
    pub instance: Option<GpuInstance>,
    /// The kind of event.
    pub kind: EventKind,
}

/// The MIG instance of an event, by the driver's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    /// The GPU instance.
    pub gi: u32,
    /// The compute instance; `None` if all of the GPU instance are affected.
    pub ci: Option<u32>,
}

/// The kind of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventKind {
    /// The kernel began to recover the device from a PCI error (`ERROR_EVENT=BEGIN_RECOVERY`): it
    /// is offline.
    RecoveryBegan,
    /// The recovery succeeded (`ERROR_EVENT=SUCCESSFUL_RECOVERY`), which includes a reset.
    Recovered,
    /// The recovery failed (`ERROR_EVENT=FAILED_RECOVERY`).
    RecoveryFailed,
    /// Its driver declared it wedged (`WEDGED=`, not `none`), with the recovery methods that the
    /// driver names: `rebind,bus-reset`.
    Wedged(String),
    /// The driver has reset the device (`WEDGED=none`). The work on it is lost; the device is
    /// healthy.
    WasReset,
    /// A driver bound the device, for the first time or again (`add`, `bind`).
    Bound,
    /// The device was removed, or its driver unbound (`remove`, `unbind`).
    Unbound,
    /// NVIDIA's driver reported an error, by its number.
    Xid(u32),
    /// NVIDIA's driver reported the action that a GPU needs, such as `GPU Reset Required`; `None`
    /// when it needs none any longer.
    RecoveryAction(Option<String>),
}

impl EventKind {
    /// Whether the event is evidence of a reset, after which the device works again.
    #[must_use]
    pub fn is_reset(&self) -> bool {
        // If the driver no longer needs an action, a reset has ended.
        matches!(
            self,
            EventKind::Recovered
                | EventKind::WasReset
                | EventKind::Bound
                | EventKind::RecoveryAction(None)
        )
    }

    /// The reason that the event stands for, if it is a symptom.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            EventKind::RecoveryBegan => Some(Reason::ErrorRecovery),
            EventKind::RecoveryFailed => Some(Reason::RecoveryFailed),
            EventKind::Wedged(_) => Some(Reason::Wedged),
            EventKind::Xid(_) | EventKind::RecoveryAction(Some(_)) => Some(Reason::Xid),
            EventKind::Recovered
            | EventKind::WasReset
            | EventKind::Bound
            | EventKind::Unbound
            | EventKind::RecoveryAction(None) => None,
        }
    }
}
