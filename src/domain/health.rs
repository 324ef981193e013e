//! Health, with the reason that an operator reads.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a device is not healthy. A closed list: it is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Discovery no longer finds the device.
    DeviceGone,
    /// A node in `/dev` that it needs is missing.
    NodeMissing,
    /// No driver, or another one than its resource selects.
    DriverLost,
    /// The configuration does not select it any more; a container still holds it.
    Deselected,
    /// The same node is held under another id: which it had before udev gave it a better name, or of another way to it.
    HeldAsOther,
    /// Another function of its IOMMU group is bound to a driver of the host, so that no guest can have the group.
    GroupNotViable,
    /// Its last holder has gone, and the hook after that has not ended yet.
    HookPending,
    /// The hook after its release has failed.
    HookFailed,
}

impl Reason {
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
            Reason::NodeMissing => "node_missing",
            Reason::DriverLost => "driver_lost",
            Reason::Deselected => "deselected",
            Reason::HeldAsOther => "held_as_other",
            Reason::GroupNotViable => "iommu_group_not_viable",
            Reason::HookPending => "hook_pending",
            Reason::HookFailed => "hook_failed",
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
