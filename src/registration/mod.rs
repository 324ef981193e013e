//! The registration actor keeps every resource registered with the kubelet, for any behaviour of
//! the kubelet (I7).
//!
//! The kubelet holds one client for each resource *name*. So the late end of an old stream cuts off
//! the new one, a Register can succeed although no ListAndWatch comes, and an endpoint can be
//! stopped while its stream stays open. Each of these leads to another Register: the end of a
//! stream, a stream that does not come (or whose connection ends before it), a new kubelet socket,
//! a lost socket of ours. Two more Registers, 0.7 s and 12 s after such a recovery, settle the
//! cases that no signal shows (`core.rs` has the table of the machine).
//!
//! Consumes: the kubelet's socket and checkpoint from the host watch, the streams' events from
//! serving, the lists of health (watch). Emits: Register calls to the kubelet, `Bind` and `Retire`
//! to serving. Every registration has a socket of its own, which is never used again.

mod actor;
mod attempt;
pub(crate) mod audit;
mod config;
pub(crate) mod core;
mod following;
mod observe;
mod streams;

pub use actor::Registration;
pub use config::{RegistrationConfig, ResourceStatus};
