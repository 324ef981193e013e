//! Verdicts: the remembered health of a device, over scans, restarts and boots (I5).
//!
//! ```text
//!              soft symptom           it lasts              no symptoms
//!   Healthy ────────────────▶ Suspect ──────────▶ Unhealthy ────────────────▶ Recovering
//!    ▲ ▲ │                       │                   ▲ ▲                         │ │
//!    │ │ └── hard symptom ───────┼───────────────────┘ └─────── a symptom ───────┘ │
//!    │ └──── no symptoms ────────┘                                                 │
//!    └──────────────────────────── the hold time is over ──────────────────────────┘
//! ```
//!
//! The kubelet's list has Healthy for the first two states and Unhealthy for the others. A device
//! without a record is healthy and always was.

use super::device_id::DeviceId;
use super::grant::AllocId;
use super::health::{Health, Reason};
use super::signal::Counter;
use super::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The progress of a device's failure or recovery. Times are of `CLOCK_BOOTTIME`, in the boot of
/// the verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum VerdictState {
    /// No symptoms.
    #[default]
    Healthy,
    /// A symptom that may end soon; the kubelet's list does not show it.
    Suspect {
        /// The symptom.
        reason: Reason,
        /// Since when every probe has found it.
        since: Duration,
    },
    /// The device must not be used.
    Unhealthy {
        /// Why.
        reason: Reason,
        /// The time of the last symptom.
        seen: Duration,
    },
    /// There are no symptoms any longer.
    Recovering {
        /// Why it was unhealthy.
        reason: Reason,
        /// The first probe without symptoms.
        since: Duration,
        /// How long the device must be without symptoms until it is healthy.
        hold: Duration,
    },
}

impl VerdictState {
    /// The word in `status`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            VerdictState::Healthy => "healthy",
            VerdictState::Suspect { .. } => "suspect",
            VerdictState::Unhealthy { .. } => "unhealthy",
            VerdictState::Recovering { .. } => "recovering",
        }
    }
}

/// An operator's order that a device must not be granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cordon {
    /// The operator's text.
    pub reason: String,
    /// When it was ordered.
    pub at: Timestamp,
    /// Whether the control plane deletes the pods that use the device by a claim: the taint in the
    /// `ResourceSlice` has the effect `NoExecute`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evicts: bool,
}

/// One failure, from the first symptom that counted to the end of the hold time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incident {
    /// Why.
    pub reason: Reason,
    /// The reading.
    pub detail: String,
    /// When it was found.
    pub at: Timestamp,
    /// When the device was healthy again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
    /// The grants that held the device when it was found.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held_by: Vec<AllocId>,
}

/// The record of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The boot of its times (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Its progress.
    #[serde(flatten)]
    pub state: VerdictState,
    /// Reasons that stay until there is evidence of a reset, with the reading or the report.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub faults: BTreeMap<Reason, String>,
    /// The last evidence of a reset: earlier events no longer count.
    pub reset_at: Duration,
    /// Whether the device was absent or without a driver at the last scan. Its return is evidence
    /// of a reset.
    pub is_away: bool,
    /// The number of failures in quick succession.
    pub flaps: u32,
    /// Since when it has been healthy. After some time the count of failures ends.
    pub healthy_since: Duration,
    /// Whether it has failed too often, and waits for an operator.
    pub is_latched: bool,
    /// An operator's cordon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<Cordon>,
    /// The known value of each counter; only a change is new.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "pairs")]
    pub baselines: BTreeMap<Counter, u64>,
    /// The latest failures, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub incidents: Vec<Incident>,
}

impl Verdict {
    /// Whether an operator wants the pods of the device's claims to be deleted.
    #[must_use]
    pub fn evicts(&self) -> bool {
        self.cordon.as_ref().is_some_and(|cordon| cordon.evicts)
    }

    /// The health of a device with this verdict, for the kubelet's list.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.state {
            _ if self.cordon.is_some() => Health::Unhealthy(Reason::Cordoned),
            _ if self.is_latched => Health::Unhealthy(Reason::Flapping),
            VerdictState::Healthy | VerdictState::Suspect { .. } => Health::Healthy,
            VerdictState::Unhealthy { reason, .. } | VerdictState::Recovering { reason, .. } => {
                Health::Unhealthy(reason)
            }
        }
    }

    /// The reading for a reason why the device is unhealthy. It does not contain the text of a
    /// [`Cordon`]: logs and pages show the reading, and the operator's text may contain anything.
    #[must_use]
    pub fn detail(&self, reason: Reason) -> &str {
        let incident = self
            .incidents
            .last()
            .filter(|incident| incident.reason == reason || reason == Reason::Flapping);
        self.faults
            .get(&reason)
            .or(incident.map(|incident| &incident.detail))
            .map_or("", String::as_str)
    }

    /// Whether it contains only the information of a missing verdict: the device is healthy.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        *self
            == Verdict {
                boot_id: self.boot_id.clone(),
                reset_at: self.reset_at,
                healthy_since: self.healthy_since,
                ..Verdict::default()
            }
    }
}

/// The verdict of each device that has one.
pub type Verdicts = BTreeMap<DeviceId, Verdict>;

/// Records a device's verdict; `None` removes it.
pub fn note_verdict(verdicts: &mut Verdicts, device: &DeviceId, verdict: Option<Verdict>) {
    match verdict {
        Some(verdict) => drop(verdicts.insert(device.clone(), verdict)),
        None => drop(verdicts.remove(device)),
    }
}

/// An order of an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "instruction", rename_all = "snake_case")]
pub enum OperatorRequest {
    /// Give the device to no new container, even if it is healthy.
    Cordon {
        /// Why, in the operator's words.
        reason: String,
    },
    /// The same, and delete the pods that use the device by a claim. It is an instruction of its
    /// own, so that an earlier version refuses it.
    CordonAndEvict {
        /// Why, in the operator's words.
        reason: String,
    },
    /// Remove the cordon. A latched device is released from its wait for an operator. Failures that
    /// stay until a reset, such as an Xid, count as ended: the next observation decides.
    Uncordon,
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}

/// A map with keys that are not texts, as a list of pairs: JSON maps only have text keys.
mod pairs {
    use super::{BTreeMap, Counter, Deserialize};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        map: &BTreeMap<Counter, u64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<Counter, u64>, D::Error> {
        Ok(Vec::<(Counter, u64)>::deserialize(deserializer)?.into_iter().collect())
    }
}
