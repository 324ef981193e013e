//! The ledger actor: records which container holds which device. A record is durable before its
//! Allocate is answered.
//!
//! - Consumes: `Record` and `CheckStart` from serving, `RecordClaim`, `ReleaseClaim` and
//!   `RestoreClaims` from dra, `RecordVerdicts` from health, `Remember` and `Found` from discovery,
//!   `Reconcile` from the host watch, dra and its own timer, `HookEnded` from the hook runner,
//!   `TakeOver` from the app and from its own passes, `Publish`, `FindPending` and `ReleaseStuck`
//!   from the admin interface, and the inventory (watch), whose ids it remembers for the next
//!   process.
//! - Emits: the live grants, the hooks that are due after a release, and the remembered names (all
//!   watch), and `Forget` to health.
//! - Promises: nothing is answered before the store has it (I1). A grant changes its state only by
//!   proof (I4). The actor knows exactly what the store knows, so a restarted actor reads it from
//!   there.
//!
//! It runs on an arbiter of its own, because it waits for the disk.
//!
//! The actor has three parts with their own state, and none of them knows the actor.
//! [`core::LedgerState`] has the ledger and the entries that wait for the next write, and decides;
//! the simulation drives it too. `reconciler` decides when the kubelet is observed. `upkeep` tracks
//! the state of the store. The other files handle messages.

mod actor;
mod claims;
mod committer;
mod config;
pub mod core;
mod forgetting;
mod hooks;
mod lacking;
mod maintain;
pub(crate) mod observe;
mod reconcile;
mod reconciler;
mod remember;
mod report;
mod sight;
mod take_over;
mod upkeep;

pub use actor::LedgerActor;
pub use config::{LedgerConfig, in_present_boot, release_hooks};
