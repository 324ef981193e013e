//! Health, with the reason that an operator reads, and what each reason weighs.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Why a device is not healthy. A closed list: it is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Discovery no longer finds the device.
    DeviceGone,
    /// Nothing could be read of the device since the daemon was started.
    Unread,
    /// A node in `/dev` that it needs is missing.
    NodeMissing,
    /// No driver, or another one than its resource selects.
    DriverLost,
    /// The configuration does not select it any more; a container still holds it.
    Deselected,
    /// The same node is held under another id: which it had before udev gave it a better name, or of another way to it. Or another
    /// resource had the device, and may still have given it to somebody.
    HeldAsOther,
    /// Another function of its IOMMU group is bound to a driver of the host, so that no guest can have the group.
    #[serde(rename = "iommu_group_not_viable")]
    GroupNotViable,
    /// Its PCI configuration space reads as ones: it has fallen off the bus.
    OffTheBus,
    /// The kernel could not bring it to the power state that it wanted (`power_state` is `error`).
    PowerError,
    /// A fatal error of PCI Express, at the device.
    AerFatal,
    /// A fatal error of PCI Express, at a bridge above the device.
    AerFatalAbove,
    /// Errors of PCI Express that are not corrected and not fatal, one poll after the other.
    AerNonfatal,
    /// The kernel recovers it from an error.
    ErrorRecovery,
    /// The kernel could not recover it.
    RecoveryFailed,
    /// Its driver has given it up.
    Wedged,
    /// NVIDIA's driver has reported an error after which the GPU needs a reset.
    Xid,
    /// An InfiniBand port has no link, or no subnet manager.
    PortDown,
    /// Its RDMA device is gone, and the function is still there: the driver has taken it down.
    RdmaLost,
    /// A network interface is up and has no carrier.
    NoCarrier,
    /// Its NVMe controller is dead.
    NvmeDead,
    /// Its NVMe controller does not get ready.
    NvmeNotLive,
    /// The FPGA reports an error.
    FpgaError,
    /// The card's management says that it is not ready.
    NotReady,
    /// A temperature is critical.
    TooHot,
    /// The check of its resource says that it is not well.
    CheckFailed,
    /// Looking at it does not end.
    ProbeStuck,
    /// It has failed too often; an operator is to decide.
    Flapping,
    /// An operator has taken it out.
    Cordoned,
    /// Its last holder has gone, and the hook after that has not ended yet.
    HookPending,
    /// The hook after its release has failed.
    HookFailed,
}

/// How much it takes to believe a reason, and to forget it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight {
    /// How long the complaint must last until the device is unhealthy. Zero is a hard one, believed at once.
    pub patience: Duration,
    /// How long nothing may speak against the device until it is healthy again, the first time.
    pub hold: Duration,
    /// Whether it stays although nothing speaks against the device any more, until there is evidence of a reset.
    pub is_sticky: bool,
}

/// The hold of what is seen completely: a node or a driver is there or it is not. Long enough for udev's rules.
const HOLD_OF_PRESENCE: Duration = Duration::from_secs(1);
/// The hold of everything else.
const HOLD: Duration = Duration::from_secs(30);

impl Weight {
    const PRESENCE: Weight = Weight { patience: Duration::ZERO, hold: HOLD_OF_PRESENCE, is_sticky: false };
    const HARD: Weight = Weight { patience: Duration::ZERO, hold: HOLD, is_sticky: false };
    const STICKY: Weight = Weight { patience: Duration::ZERO, hold: HOLD, is_sticky: true };

    /// Whether it is about being there: what is plugged in and out, bound and unbound.
    #[must_use]
    pub fn is_presence(self) -> bool {
        self == Weight::PRESENCE
    }

    const fn soft(seconds: u64) -> Weight {
        Weight { patience: Duration::from_secs(seconds), hold: HOLD, is_sticky: false }
    }
}

impl Reason {
    /// Whether a word of that reason is told of a device with which nothing is wrong: the configuration does not want it, or wants it
    /// otherwise than its holder has it.
    #[must_use]
    pub fn is_of_the_configuration(word: &str) -> bool {
        [Reason::Deselected, Reason::HeldAsOther].iter().any(|reason| reason.as_str() == word)
    }

    /// Whether it is a hook's, which ends with the hook and not by other evidence.
    #[must_use]
    pub fn is_of_hook(self) -> bool {
        matches!(self, Reason::HookPending | Reason::HookFailed)
    }

    /// The word of JSON, metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::DeviceGone => "device_gone",
            Reason::Unread => "unread",
            Reason::NodeMissing => "node_missing",
            Reason::DriverLost => "driver_lost",
            Reason::Deselected => "deselected",
            Reason::HeldAsOther => "held_as_other",
            Reason::GroupNotViable => "iommu_group_not_viable",
            Reason::OffTheBus => "off_the_bus",
            Reason::PowerError => "power_error",
            Reason::AerFatal => "aer_fatal",
            Reason::AerFatalAbove => "aer_fatal_above",
            Reason::AerNonfatal => "aer_nonfatal",
            Reason::ErrorRecovery => "error_recovery",
            Reason::RecoveryFailed => "recovery_failed",
            Reason::Wedged => "wedged",
            Reason::Xid => "xid",
            Reason::PortDown => "port_down",
            Reason::RdmaLost => "rdma_lost",
            Reason::NoCarrier => "no_carrier",
            Reason::NvmeDead => "nvme_dead",
            Reason::NvmeNotLive => "nvme_not_live",
            Reason::FpgaError => "fpga_error",
            Reason::NotReady => "not_ready",
            Reason::TooHot => "too_hot",
            Reason::CheckFailed => "check_failed",
            Reason::ProbeStuck => "probe_stuck",
            Reason::Flapping => "flapping",
            Reason::Cordoned => "cordoned",
            Reason::HookPending => "hook_pending",
            Reason::HookFailed => "hook_failed",
        }
    }

    /// What it takes to believe it, and to forget it. Soft ones are those that a device in order shows for a while too: a port
    /// that waits for its subnet manager, a controller that is reset.
    #[must_use]
    pub fn weight(self) -> Weight {
        match self {
            Reason::DeviceGone
            | Reason::Unread
            | Reason::NodeMissing
            | Reason::DriverLost
            | Reason::Deselected
            | Reason::HeldAsOther
            | Reason::GroupNotViable
            | Reason::Cordoned
            | Reason::Flapping
            | Reason::HookPending
            | Reason::HookFailed => Weight::PRESENCE,
            // A dead controller comes to life by a reset only.
            Reason::OffTheBus | Reason::AerFatalAbove | Reason::FpgaError | Reason::CheckFailed | Reason::NvmeDead => Weight::HARD,
            Reason::AerFatal | Reason::ErrorRecovery | Reason::RecoveryFailed | Reason::Wedged | Reason::Xid => Weight::STICKY,
            Reason::PowerError
            | Reason::AerNonfatal
            | Reason::PortDown
            | Reason::RdmaLost
            | Reason::NoCarrier
            | Reason::NotReady
            | Reason::TooHot
            | Reason::ProbeStuck => Weight::soft(30),
            // A controller may take a minute by its own account.
            Reason::NvmeNotLive => Weight::soft(60),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// What the kubelet is told of a device. It has no place for the reason; `discover`, `status` and `/metrics` have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// The kubelet may give it to a container.
    Healthy,
    /// The kubelet keeps it from new containers; those that hold it run on.
    Unhealthy(Reason),
}

impl Health {
    /// Whether it may be given to a container.
    #[must_use]
    pub fn is_healthy(self) -> bool {
        self == Health::Healthy
    }

    /// The API's exact words: the kubelet takes every text but `Healthy` as unhealthy.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        if self.is_healthy() { "Healthy" } else { "Unhealthy" }
    }

    /// Why it is unhealthy.
    #[must_use]
    pub fn reason(self) -> Option<Reason> {
        match self {
            Health::Healthy => None,
            Health::Unhealthy(reason) => Some(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reason, as serde lists them where a word is none.
    fn all() -> Vec<Reason> {
        let error = serde_json::from_str::<Reason>("\"no such reason\"").unwrap_err().to_string();
        let words = error.split_once("one of ").unwrap().1.split('`').skip(1).step_by(2);
        words.map(|word| serde_json::from_str(&format!("\"{word}\"")).unwrap()).collect()
    }

    #[test]
    fn a_reason_has_one_word_everywhere() {
        let all = all();
        assert!(all.len() > 25, "{all:?}");
        for reason in all {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }

    #[test]
    fn the_operators_page_has_a_row_for_every_reason_with_its_weight() {
        let page = include_str!("../../docs/health.md");
        for reason in all() {
            let Weight { patience, hold, is_sticky } = reason.weight();
            let seconds = |time: Duration| format!("{} s", time.as_secs());
            let (kind, heals) = match reason {
                Reason::Cordoned | Reason::Flapping => ("operator", "uncordon".to_owned()),
                _ if reason.is_of_hook() => ("hook", "its hook".to_owned()),
                _ if is_sticky => ("sticky", seconds(hold)),
                _ if reason.weight().is_presence() => ("presence", seconds(hold)),
                _ if patience.is_zero() => ("hard", seconds(hold)),
                _ => ("soft", seconds(hold)),
            };
            let after = if patience.is_zero() { "at once".to_owned() } else { seconds(patience) };
            let row = format!("\n| `{reason}` | {kind} | {after} | {heals} | ");
            assert_eq!(page.matches(&row).count(), 1, "docs/health.md has no row `{}`", row.trim());
        }
    }
}
