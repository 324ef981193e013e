//! The serving actor: the device-plugin API on unix sockets.
//!
//! Owns the sockets, one for each registration. Each answers every version of the API
//! (`kubelet::api` translates). A call is answered on its own connection, which outlives every
//! actor (I10). For an Allocate, the core decides whether the ids may be granted, and the contract
//! defines what the container gets (`prepare.rs`). The ledger makes the grant durable, and only
//! then the kubelet gets its answer (I1). The options, the list and the preferred allocation need
//! only the published lists.
//!
//! A resource with a hook answers PreStartContainer. It checks with the ledger whether the
//! container may start with its devices, and runs the hook before start on another thread.
//!
//! Claims are decided next to it (`claims`), over the inventory and the same ledger. The DRA driver
//! (`tasks/dra`) calls that code; this actor does not.
//!
//! Calls that come while this instance hands over wait in their sockets (`handover`), because a
//! failed Allocate is final for its pod.
//!
//! Consumes: the lists and the grants (watch), `Bind` and `Retire` from registration. Emits:
//! `Record` and `CheckStart` to the ledger, `ReportUnusable` to health, `StreamOpened`,
//! `StreamEnded` and `ClosedEarly` to registration.

mod actor;
mod affinity;
mod before_start;
pub mod claims;
mod connections;
pub(crate) mod core;
mod dra_sockets;
mod files;
mod gpu_specs;
mod nvidia_extras;
mod nvidia_features;
pub mod placement;
mod plugin;
mod prepare;
mod recorded;
mod refusals;
mod shared;
mod sockets;

pub use actor::{Serving, serve_passed};
pub use affinity::Affinity;
pub use files::SpecFiles;
pub use gpu_specs::GpuSpecs;
pub use prepare::{MetadataFacts, Preparer};
pub use recorded::RECORDED_WITHIN;
pub(crate) use recorded::hold_until_recorded;
pub use refusals::{Refusals, Unrecorded};
pub use shared::Shared;
pub use sockets::Sockets;
