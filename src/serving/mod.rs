//! The serving actor: the device-plugin API on unix sockets.
//!
//! Owns the sockets, one for each registration; every version of the API is answered on each (`kubelet::api` translates).
//! Answers Allocate: the core decides whether the ids may be given and the contract says what the container gets, both in the
//! actor; the connection has the ledger make it durable, and only then is the kubelet answered (I1).
//! What must not wait for an actor does not: the options, the list and the preferred allocation are answered from the
//! published inventory alone, and an open ListAndWatch stream is a task of its own that outlives every actor (I10).
//!
//! A resource with a hook answers PreStartContainer: it asks the ledger whether the container may start with what it was given,
//! and runs the hook before start away from this thread.
//!
//! What comes while this instance hands over to another one waits, and is passed on to it (`pass_on.rs`): an Allocate that
//! fails is final for its pod.
//!
//! Consumes: the inventory and the grants (watch), `Bind` and `Retire` from registration, `Prepare` from the connections. Emits: `Record` and
//! `Pass` to the ledger, `Broken` to health, `StreamOpened`, `StreamEnded` and `HungUp` to registration.

mod actor;
mod affinity;
mod before_start;
pub(crate) mod core;
mod files;
mod pass_on;
pub mod placement;
mod plugin;
mod refusals;
mod sockets;

pub use actor::{Serving, ServingConfig};
pub use files::SpecFiles;
pub use plugin::{Affinity, Shared};
pub use refusals::{Refusals, Unrecorded};
pub use sockets::Sockets;
