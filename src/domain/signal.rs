//! What can be seen of a device's health: at a look (a probe), and as it happens (an event).
//!
//! Signals do not judge. What weighs how much, and what heals, is [`super::Reason`]'s table and the judge's business.

use super::health::Reason;
use super::pci::PciAddress;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Something that speaks against a device now. It is gone when a later look does not find it any more.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Complaint {
    /// What it is.
    pub reason: Reason,
    /// What was read, for a person: `port 1 is 2: INIT`.
    pub detail: String,
}

/// A number that only grows while a device is in order, and what it means when it has grown. A lower one than before
/// shows that the device was reset.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Counter {
    /// What a rise means.
    pub reason: Reason,
    /// Which function counts: the device's own, or one of the bridges above it.
    pub at: PciAddress,
}

/// A signal that a probe may have to do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// The device's PCI configuration space (`config`): more than its first 64 bytes need a capability, these do not.
    ConfigSpace,
    /// Error counters of PCI Express (`aer_dev_fatal`, `aer_dev_nonfatal`).
    Aer,
    /// Uevents of the kernel.
    Uevents,
    /// The kernel's log (`/dev/kmsg`), which has NVIDIA's Xid lines.
    KernelLog,
    /// NVIDIA's management library.
    Nvml,
}

impl Source {
    /// The word of `status`.
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

/// What one probe of one device has shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signals {
    /// What speaks against it.
    pub complaints: BTreeSet<Complaint>,
    /// Its counters, and those of the bridges above it.
    pub counters: BTreeMap<Counter, u64>,
    /// What speaks against nothing and is worth a line: a link that is slower than it was.
    pub remarks: BTreeSet<String>,
    /// What could not be read for want of a privilege.
    pub off: BTreeSet<Source>,
    /// What could not be looked for, since a read failed: that nothing of it is among the complaints shows nothing (I12).
    pub unread: BTreeSet<Reason>,
}

/// Something that happened to a device, as the kernel told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEvent {
    /// To which function it happened. All below it are concerned: a bridge's failed recovery is theirs.
    pub at: PciAddress,
    /// Whether all functions of its slot are concerned: lines of NVIDIA's driver name none.
    pub whole_slot: bool,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// The kernel began to recover it from a PCI error (`ERROR_EVENT=BEGIN_RECOVERY`): it is off line.
    RecoveryBegan,
    /// It has recovered (`ERROR_EVENT=SUCCESSFUL_RECOVERY`), which includes a reset.
    Recovered,
    /// It has not (`ERROR_EVENT=FAILED_RECOVERY`).
    RecoveryFailed,
    /// Its driver gave it up (`WEDGED=`, not `none`), with the ways out that the driver names: `rebind,bus-reset`.
    Wedged(String),
    /// The driver has reset it by itself, and it goes on (`WEDGED=none`): what ran on it is lost, it is well.
    WasReset,
    /// A driver took it, newly or again (`add`, `bind`).
    Bound,
    /// It went, or its driver let it go (`remove`, `unbind`).
    Unbound,
    /// NVIDIA's driver reported an error by its number.
    Xid(u32),
    /// NVIDIA's driver says what a GPU needs before it can be used, `GPU Reset Required`; `None` when it needs nothing any more.
    RecoveryAction(Option<String>),
}

impl EventKind {
    /// What it speaks of, if it speaks against a device.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            EventKind::RecoveryBegan => Some(Reason::ErrorRecovery),
            EventKind::RecoveryFailed => Some(Reason::RecoveryFailed),
            EventKind::Wedged(_) => Some(Reason::Wedged),
            EventKind::Xid(_) | EventKind::RecoveryAction(Some(_)) => Some(Reason::Xid),
            EventKind::Recovered | EventKind::WasReset | EventKind::Bound | EventKind::Unbound | EventKind::RecoveryAction(None) => None,
        }
    }
}
