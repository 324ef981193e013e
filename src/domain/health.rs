//! Health, its reasons as shown to an operator, and the timings of each reason.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// Why a device is unhealthy. This is a closed set: it is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Discovery no longer finds the device.
    DeviceGone,
    /// The device could not be read since the daemon was started.
    Unread,
    /// A node in `/dev` that the device requires is missing.
    NodeMissing,
    /// The device has no driver, or another driver than its resource selects.
    DriverLost,
    /// The configuration no longer selects the device; a container still holds it.
    Deselected,
    /// A container may hold the same object under another id or of another resource. The object had
    /// another id before udev gave it a better name, or there is another way to it. Or another
    /// resource offered the device until now, and may still have granted it.
    HeldAsOther,
    /// Another function of its IOMMU group is bound to a driver of the host. No guest can get the
    /// group.
    #[serde(rename = "iommu_group_not_viable")]
    GroupNotViable,
    /// Its PCI configuration space reads as ones: it has fallen off the bus.
    OffTheBus,
    /// The kernel could not bring it to the requested power state (`power_state` is `error`).
    PowerError,
    /// A fatal PCI Express error at the device.
    AerFatal,
    /// A fatal PCI Express error at a bridge above the device.
    AerFatalAbove,
    /// Uncorrected, non-fatal PCI Express errors, in poll after poll.
    AerNonfatal,
    /// The kernel is recovering the device from an error.
    ErrorRecovery,
    /// The kernel could not recover the device.
    RecoveryFailed,
    /// Its driver has declared it wedged.
    Wedged,
    /// NVIDIA's driver has reported an error after which the GPU needs a reset.
    Xid,
    /// AMD's driver counts an error of the GPU's memory that it could not correct.
    MemoryError,
    /// An InfiniBand port has no link, or no subnet manager.
    PortDown,
    /// Its RDMA device is absent while the function is present: the driver has removed it.
    RdmaLost,
    /// A network interface is up and has no carrier.
    NoCarrier,
    /// Its NVMe controller is dead.
    NvmeDead,
    /// Its NVMe controller does not become ready.
    NvmeNotLive,
    /// The FPGA reports an error.
    FpgaError,
    /// The card's management reports that it is not ready.
    NotReady,
    /// A temperature is critical.
    TooHot,
    /// The health check of its resource failed.
    CheckFailed,
    /// A probe of the device does not return.
    ProbeStuck,
    /// The device has failed too often; an operator must decide.
    Flapping,
    /// An operator has cordoned the device.
    Cordoned,
    /// Its last holder has released it, and the hook after release has not ended yet.
    HookPending,
    /// The hook after its release has failed.
    HookFailed,
    /// The MPS control daemon of its resource does not answer. The shares have it, not the device.
    MpsDown,
}

/// How long a reason must last to count, and how long it must be absent to be cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthTimings {
    /// How long a symptom must last until the device is unhealthy. Zero: a hard symptom, which
    /// counts at once.
    pub fail_after: Duration,
    /// How long a device must be without symptoms until it is healthy again, at the first
    /// failure.
    pub recover_after: Duration,
    /// Whether the reason stays without further symptoms, until there is evidence of a reset.
    pub is_sticky: bool,
}

/// The recovery time of presence: a node or a driver is present or absent, with no state between.
/// Long enough for udev's rules.
const RECOVER_AFTER_PRESENCE: Duration = Duration::from_secs(1);
/// The recovery time of everything else.
const RECOVER_AFTER: Duration = Duration::from_secs(30);

impl HealthTimings {
    const PRESENCE: HealthTimings = HealthTimings {
        fail_after: Duration::ZERO,
        recover_after: RECOVER_AFTER_PRESENCE,
        is_sticky: false,
    };
    const HARD: HealthTimings = HealthTimings {
        fail_after: Duration::ZERO,
        recover_after: RECOVER_AFTER,
        is_sticky: false,
    };
    const STICKY: HealthTimings =
        HealthTimings { fail_after: Duration::ZERO, recover_after: RECOVER_AFTER, is_sticky: true };

    /// Whether it is about presence: a device is plugged in or out, a driver is bound or unbound.
    #[must_use]
    pub fn is_presence(self) -> bool {
        self == HealthTimings::PRESENCE
    }

    const fn soft(seconds: u64) -> HealthTimings {
        HealthTimings {
            fail_after: Duration::from_secs(seconds),
            recover_after: RECOVER_AFTER,
            is_sticky: false,
        }
    }
}

impl Reason {
    /// Whether a reason, by its word, comes from the configuration, and not from a failure. The
    /// configuration does not select the device, or selects it in another way than its holder has
    /// it.
    #[must_use]
    pub fn is_of_the_configuration(word: &str) -> bool {
        [Reason::Deselected, Reason::HeldAsOther].iter().any(|reason| reason.as_str() == word)
    }

    /// Whether it is the reason of a hook. It ends with the hook, and not by other evidence.
    #[must_use]
    pub fn is_of_hook(self) -> bool {
        matches!(self, Reason::HookPending | Reason::HookFailed)
    }

    /// Whether a container would lack a part of the device: it, its driver or a node is missing.
    #[must_use]
    pub fn is_of_presence(self) -> bool {
        matches!(
            self,
            Reason::DeviceGone
                | Reason::Unread
                | Reason::NodeMissing
                | Reason::DriverLost
                | Reason::GroupNotViable
        )
    }

    /// Whether the list has it from outside of the device's own case: from a hook, or from the MPS
    /// control daemon. No evidence about the device ends it.
    #[must_use]
    pub fn is_of_the_list(self) -> bool {
        self.is_of_hook() || self == Reason::MpsDown
    }

    /// The word in JSON, metrics and logs.
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
            Reason::MemoryError => "memory_error",
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
            Reason::MpsDown => "mps_down",
        }
    }

    /// The timings of the reason. A reason is soft if a healthy device can also show it for a time:
    /// a port that waits for its subnet manager, a controller during a reset.
    #[must_use]
    pub fn timings(self) -> HealthTimings {
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
            | Reason::HookFailed
            | Reason::MpsDown => HealthTimings::PRESENCE,
            // A dead controller recovers only by a reset.
            Reason::OffTheBus
            | Reason::AerFatalAbove
            | Reason::FpgaError
            | Reason::CheckFailed
            | Reason::NvmeDead => HealthTimings::HARD,
            Reason::AerFatal
            | Reason::ErrorRecovery
            | Reason::RecoveryFailed
            | Reason::Wedged
            | Reason::Xid
            | Reason::MemoryError => HealthTimings::STICKY,
            Reason::PowerError
            | Reason::AerNonfatal
            | Reason::PortDown
            | Reason::RdmaLost
            | Reason::NoCarrier
            | Reason::NotReady
            | Reason::TooHot
            | Reason::ProbeStuck => HealthTimings::soft(30),
            // A controller may need a minute by its own specification.
            Reason::NvmeNotLive => HealthTimings::soft(60),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The health of a device in the kubelet's list. The list has no field for the reason; `discover`,
/// `status` and `/metrics` show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// The kubelet may give it to a container.
    Healthy,
    /// The kubelet gives it to no new container. Containers that hold it continue to run.
    Unhealthy(Reason),
}

impl Health {
    /// Whether the kubelet may give it to a container.
    #[must_use]
    pub fn is_healthy(self) -> bool {
        self == Health::Healthy
    }

    /// Whether the device itself is there with all of its parts, healthy or not.
    #[must_use]
    pub fn is_present(self) -> bool {
        self.reason().is_none_or(|reason| !reason.is_of_presence())
    }

    /// The API's exact words: the kubelet treats every text but `Healthy` as unhealthy.
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

    /// Every reason, parsed from serde's error message for an unknown one.
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
    fn health_md_has_a_row_for_every_reason_with_its_timings() {
        let page = include_str!("../../docs/health.md");
        for reason in all() {
            let HealthTimings { fail_after, recover_after, is_sticky } = reason.timings();
            let seconds = |time: Duration| format!("{} s", time.as_secs());
            let (kind, heals) = match reason {
                Reason::Cordoned | Reason::Flapping => ("operator", "uncordon".to_owned()),
                _ if reason.is_of_hook() => ("hook", "its hook".to_owned()),
                Reason::MpsDown => ("MPS", "its answer".to_owned()),
                _ if is_sticky => ("sticky", seconds(recover_after)),
                _ if reason.timings().is_presence() => ("presence", seconds(recover_after)),
                _ if fail_after.is_zero() => ("hard", seconds(recover_after)),
                _ => ("soft", seconds(recover_after)),
            };
            let after =
                if fail_after.is_zero() { "at once".to_owned() } else { seconds(fail_after) };
            let row = format!("\n| `{reason}` | {kind} | {after} | {heals} | ");
            assert_eq!(page.matches(&row).count(), 1, "docs/health.md has no row `{}`", row.trim());
        }
    }
}
