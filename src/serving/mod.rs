//! The serving actor: the device-plugin API on unix sockets.
//!
//! Owns the sockets, one for each registration; every version of the API is answered on each (`kubelet::api` translates).
//! A call is answered on the connection that it came on, which outlives every actor (I10). Allocate: the core decides whether the ids
//! may be given and the contract says what the container gets (`prepare.rs`); the ledger makes it durable, and only then is the
//! kubelet answered (I1). The options, the list and the preferred allocation come from the published inventory alone.
//!
//! A resource with a hook answers PreStartContainer: it asks the ledger whether the container may start with what it was given,
//! and runs the hook before start away from this thread.
//!
//! What comes while this instance hands over to another one waits in its socket (`handover`): an Allocate that fails is final for
//! its pod.
//!
//! Consumes: the inventory and the grants (watch), `Bind` and `Retire` from registration. Emits: `Record` and `Pass` to the ledger,
//! `Broken` to health, `StreamOpened`, `StreamEnded` and `HungUp` to registration.

mod actor;
mod affinity;
mod before_start;
mod connections;
pub(crate) mod core;
mod files;
pub mod placement;
mod plugin;
mod prepare;
mod refusals;
mod sockets;

pub use actor::{Serving, serve_passed};
pub use files::SpecFiles;
pub use plugin::{Affinity, Shared};
pub use prepare::Preparer;
pub use refusals::{Refusals, Unrecorded};
pub use sockets::Sockets;
