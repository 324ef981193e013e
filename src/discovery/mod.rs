//! The discovery actor: watches the host and publishes the devices that exist.
//!
//! Consumes: events (kernel uevents, changes in `/dev`), each only a reason to rescan, and a slow
//! poll, which is authoritative.
//!
//! Emits: `Remember` to the ledger for every new device, whose id is durable before it is published
//! (I6). Then `Discovered` to health. It also publishes the question for NVML, whose answer is an
//! input of a later scan.
//!
//! It runs on its own arbiter, because a scan reads thousands of files.

mod actor;
mod evidence;
mod plan;

pub use actor::{DiscoveryActor, DiscoveryConfig};
pub(crate) use evidence::held_nodes;
#[cfg(feature = "lab")]
pub(crate) use evidence::{evidence, held_devices};
