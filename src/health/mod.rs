//! The health actor: judges the evidence of discovery and publishes the inventory.
//!
//! Consumes: `Discovered` from discovery, `ReportUnusable` from serving, the held devices and the
//! due hooks of the ledger (watch). Emits: the inventory (watch), and one log line for each change.
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
