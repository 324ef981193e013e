//! A simulation of Holdfast's pure cores, combined as the actors combine them, on the node in
//! memory.
//!
//! ```text
//!  Parameters (seed) ─▶ the kubelet's version, its faults at every hook, the run's bias,
//!                  another plugin, one resource or two
//!  Scenario (seed) ─▶ node: pods, restarts, crashes, lost files, another plugin
//!        └─▶ Daemon: registration, serving, health and ledger cores on a Disk that outlives it
//!                 └─▶ Oracles: checked after every step, and in the idle phase
//! ```
//!
//! The ledger's actor is the same [`LedgerState`](crate::ledger::core::LedgerState) as in the
//! daemon, with its group commit, and it may die with any commit (`ledger`). In a part of the runs
//! the GPUs have a hook after their release, with the gate before a container starts (`hooks`). The
//! grants of a foreign plugin are taken over, as on a node that moves to Holdfast (`daemon`).
//!
//! It tests every decision of the daemon; the shells (sockets, gRPC, files, actors) have tests of
//! their own on real sockets. [`Safeguard`](crate::domain::Safeguard) turns one decision off at a
//! time, to check that an oracle notices.
//!
//! `HOLDFAST_SEEDS=10000 cargo test --lib scenarios -- --nocapture` runs that many nodes and prints
//! the coverage, faster with `CARGO_PROFILE_DEV_OPT_LEVEL=2`. With `HOLDFAST_MINUTES=60` it runs as
//! many as begin within an hour, and `HOLDFAST_FIRST_SEED` continues where an earlier one ended. A
//! failure prints its seed, and `HOLDFAST_SEED=<seed>` repeats it with all its events.

mod actor;
mod auditing;
mod claims;
mod daemon;
mod durable;
mod hardware;
mod hooks;
mod ledger;
mod oracles;
mod parameters;
mod registration;
mod rival_plugin;
mod scenario;
mod seeds;
mod service;
mod tests;
