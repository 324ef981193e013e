//! The ledger actor: who holds what, durable before it is answered.
//!
//! Consumes: `Record` and `CheckStart` from serving, `TakeOver` from the app, `Remember` and `Found` from discovery, `Reconcile` from the host watch and its own timer, the
//! inventory (watch), whose ids it remembers for the next process, `HookEnded` from the runner of hooks. Emits: the live
//! grants, the hooks that are due after a release, and the remembered names (watch), `Forget` to health. Promises: nothing is answered before the store has it (I1), a grant moves on only by proof (I4), and what the
//! actor knows is what the store knows: a new life reads it from there.
//! Runs on an arbiter of its own, since it waits for the disk.
//!
//! The actor has three parts with their own state, none of which knows the actor: [`committer`] gathers what is written together,
//! [`reconciler`] decides when the kubelet is looked at, [`upkeep`] knows how the store is kept. The other files handle messages.

mod actor;
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
pub use config::{LedgerConfig, release_hooks};
