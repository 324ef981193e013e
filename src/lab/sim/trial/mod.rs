//! Holdfast on trial: its pure cores, put together as the actors put them together, on the node in memory.
//!
//! ```text
//!  World (seed) ─▶ the kubelet's version, its faults at every hook, the night's temper, a stranger, one resource or two
//!  Scenario (seed) ─▶ node: pods, restarts, crashes, lost files, another plugin
//!        └─▶ Daemon: registration, serving, health and ledger cores on a Disk that outlives it
//!                 └─▶ Oracles: looked at after every step, and once everything is quiet
//! ```
//!
//! What is on trial is every decision of the daemon; its shells (sockets, gRPC, files, actors) have tests of their own on
//! real sockets. [`Safeguard`](crate::domain::Safeguard) turns one decision off at a time, to see that an oracle notices.
//!
//! `HOLDFAST_SEEDS=10000 cargo test --release --lib trial -- --nocapture` runs that many nodes and prints what they came
//! through; a failure prints its seed, and `HOLDFAST_SEED=<seed>` plays it again with everything that happened.

mod auditing;
mod daemon;
mod durable;
mod hardware;
mod oracles;
mod registration;
mod scenario;
mod service;
mod stranger;
mod tests;
mod world;
