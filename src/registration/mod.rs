//! The registration actor: keeps every resource registered with the kubelet, whatever the kubelet does (I7).
//!
//! The kubelet holds one client for each resource *name*: the late end of an old stream cuts off the new one, a
//! Register can succeed without a ListAndWatch ever coming, and an endpoint can be stopped while its stream stays
//! open. So every end of a stream, every stream that does not come (or whose connection ends before it), every new kubelet socket and every lost socket of
//! our own leads to another Register, and 0.7 s and again 12 s after such a recovery one more Register settles what
//! no signal tells (`core.rs` draws the machine).
//!
//! Consumes: what the host watch sees of the kubelet's socket and checkpoint, what serving sees of the streams, the
//! inventory. Emits: Register calls
//! to the kubelet, `Bind` and `Retire` to serving. Every registration has a socket of its own, never used again.

mod actor;
mod attempt;
pub(crate) mod audit;
mod config;
pub(crate) mod core;
mod following;
mod sighting;
mod streams;

pub use actor::Registration;
pub use config::{RegistrationConfig, ResourceStatus};
