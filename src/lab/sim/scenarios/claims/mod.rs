//! Claims of Dynamic Resource Allocation on a node in memory: the daemon dies between any two steps
//! of Prepare and Unprepare, the power is cut, the kubelet and the control plane do everything that
//! a driver must expect of them.
//!
//! ```text
//!  Run (seed) ─▶ Cluster: claims, their allocation, pods      ┐
//!        ├─────▶ Kubelet: its file, Prepare and Unprepare     ├─▶ World: what outlives a process
//!        └─────▶ Daemon: ClaimPreparer, ledger core, slices   ┘        └─▶ Oracles
//! ```
//!
//! The daemon's own code decides: [`ClaimPreparer`](crate::serving::claims::ClaimPreparer) with its
//! files on a real folder, the cores of the ledger, the publisher of slices. Around them is what
//! the ledger actor does: one commit at a time, entries that are written and not yet synced,
//! snapshots that are published later.
//!
//! `HOLDFAST_SEEDS`, `HOLDFAST_SEED` and the others work as in the other scenarios.

mod cluster;
mod daemon;
mod kubelet;
mod ledger;
mod machine;
mod oracles;
mod run;
mod slices;
mod tests;
mod world;
