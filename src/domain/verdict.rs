//! What is remembered of a device's health, over scans, restarts and boots (I5).
//!
//! ```text
//!             soft complaint           it lasts            nothing speaks against it
//!   Healthy ────────────────▶ Suspect ──────────▶ Unhealthy ────────────────────────▶ Recovering
//!      ▲  │                      │    hard: at once   ▲ ▲                                │  │
//!      │  └──────────────────────┼────────────────────┘ └────────── a complaint ─────────┘  │
//!      └─────────────────────────┴──────────────────────────────── the hold time is over ───┘
//! ```
//!
//! The kubelet sees Healthy in the first two, Unhealthy in the others. A device without a record is in order and has never
//! been anything else.

use super::device::DeviceId;
use super::grant::AllocId;
use super::health::{Health, Reason};
use super::signal::Counter;
use super::time::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How far a device's failing or recovering has come. Times are of `CLOCK_BOOTTIME`, in the boot of the verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// Nothing speaks against it.
    #[default]
    Healthy,
    /// Something does, and may be over soon; the kubelet is not told.
    Suspect {
        /// What.
        reason: Reason,
        /// Since when it has been seen at every look.
        since: Duration,
    },
    /// It is not to be used.
    Unhealthy {
        /// Why.
        reason: Reason,
        /// When something last spoke against it.
        seen: Duration,
    },
    /// Nothing speaks against it any more.
    Recovering {
        /// Why it was unhealthy.
        reason: Reason,
        /// The first look that found nothing.
        since: Duration,
        /// How long nothing may be found until it is healthy.
        hold: Duration,
    },
}

impl State {
    /// The word of `status`.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            State::Healthy => "healthy",
            State::Suspect { .. } => "suspect",
            State::Unhealthy { .. } => "unhealthy",
            State::Recovering { .. } => "recovering",
        }
    }
}

/// An operator's word that a device is not to be given out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cordon {
    /// In the operator's words.
    pub reason: String,
    /// When it was said.
    pub at: Timestamp,
}

/// One failure, from the first complaint that counted to the end of the hold time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incident {
    /// Why.
    pub reason: Reason,
    /// What was read.
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

/// What is remembered of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The boot that the times are of (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// How far it has come.
    #[serde(flatten)]
    pub state: State,
    /// What stays until there is evidence of a reset, and what was read or told.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub faults: BTreeMap<Reason, String>,
    /// The last evidence of a reset: what happened before it is over.
    pub reset_at: Duration,
    /// At the last look it was not there, or had no driver: its return is evidence of a reset.
    pub is_away: bool,
    /// How many times it has become unhealthy, each soon after the other.
    pub flaps: u32,
    /// Since when it has been healthy, for the end of that count.
    pub healthy_since: Duration,
    /// It has failed too often, and waits for an operator.
    pub is_latched: bool,
    /// What an operator said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cordon: Option<Cordon>,
    /// The value of each counter that means nothing new.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty", with = "pairs")]
    pub baselines: BTreeMap<Counter, u64>,
    /// The last failures, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub incidents: Vec<Incident>,
}

impl Verdict {
    /// What the kubelet is told of a device with this verdict.
    #[must_use]
    pub fn health(&self) -> Health {
        match self.state {
            _ if self.cordon.is_some() => Health::Unhealthy(Reason::Cordoned),
            _ if self.is_latched => Health::Unhealthy(Reason::Flapping),
            State::Healthy | State::Suspect { .. } => Health::Healthy,
            State::Unhealthy { reason, .. } | State::Recovering { reason, .. } => Health::Unhealthy(reason),
        }
    }

    /// What is known of a reason for which the device is unhealthy. The words of an operator ([`Cordon`]) are not in it: logs and pages show
    /// it, and nobody knows what a person has written.
    #[must_use]
    pub fn detail(&self, reason: Reason) -> &str {
        let incident = self.incidents.last().filter(|incident| incident.reason == reason || reason == Reason::Flapping);
        self.faults.get(&reason).or(incident.map(|incident| &incident.detail)).map_or("", String::as_str)
    }

    /// Whether it says no more than that a device is in order, as no verdict does.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        *self == Verdict { boot_id: self.boot_id.clone(), reset_at: self.reset_at, healthy_since: self.healthy_since, ..Verdict::default() }
    }
}

/// The verdict of each device that has one.
pub type Verdicts = BTreeMap<DeviceId, Verdict>;

/// Takes note of a device's verdict; `None` forgets it.
pub fn note_verdict(verdicts: &mut Verdicts, device: &DeviceId, verdict: Option<Verdict>) {
    match verdict {
        Some(verdict) => drop(verdicts.insert(device.clone(), verdict)),
        None => drop(verdicts.remove(device)),
    }
}

/// What an operator asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "instruction", rename_all = "snake_case")]
pub enum Instruction {
    /// Give the device to nobody new, also when it is in order.
    Cordon {
        /// Why, in the operator's words.
        reason: String,
    },
    /// Take the cordon back; and where the device waits for a person, it need not wait any more.
    Uncordon,
}

impl fmt::Display for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}

/// A map whose keys are no texts, as a list of pairs: JSON has no other.
mod pairs {
    use super::super::Gather;
    use super::{BTreeMap, Counter, Deserialize};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(map: &BTreeMap<Counter, u64>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<Counter, u64>, D::Error> {
        Ok(Vec::<(Counter, u64)>::deserialize(deserializer)?.into_iter().gather())
    }
}
