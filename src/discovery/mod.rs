//! The discovery actor: watches the host and says which devices there are.
//!
//! Consumes: hints (kernel uevents, changes in `/dev`), each only a reason to look again, and a slow poll, which is
//! the truth. Emits: `Remember` to the ledger for every device seen for the first time (its id is durable before it is
//! published, I6), then `Discovered` to health; and what NVML is to be asked for, whose answer is an input of a later scan. Runs on an arbiter of its own: a scan reads thousands of files.

mod actor;

pub(crate) use actor::held_nodes;
pub use actor::{DiscoveryActor, DiscoveryConfig};
#[cfg(feature = "lab")]
pub(crate) use actor::{evidence, held_devices};
