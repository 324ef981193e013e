//! The health actor: judges the evidence of discovery and publishes the inventory.
//!
//! Consumes: `Discovered` from discovery, `ReportUnusable` from serving, `DeviceEventSeen` from the
//! host watch, the kernel log and NVML, `Checked` from the checks, `ApplyOperatorRequest` from the
//! admin interface, `Forget` from the ledger. Also (watch) the grants and the due hooks of the
//! ledger, the kubelet's start and the states of MPS. Emits: the inventory, the lists for the
//! device plugin and the verdicts (all watch), `RecordVerdicts` to the ledger, `Rescan` to
//! discovery, and one log line for each change.
//!
//! Promises: a held id never leaves the list (I3), and a free one is unhealthy for a time before it
//! does. No device becomes healthy again without evidence newer than its last failure (I5).

mod actor;
mod config;
pub(crate) mod core;
mod prober;
mod probing;
mod report;
mod since;

pub(crate) use self::core::{LEAVE_AFTER, pool};
pub use actor::HealthActor;
pub use config::{HealthConfig, Judgement};
#[cfg(feature = "lab")]
pub(crate) use prober::PROBE_DEADLINE;
pub use prober::ProbeDevice;
