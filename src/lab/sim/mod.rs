//! Simulators: a kubelet and a node's hardware, for the demo, the benchmarks and the tests.
//!
//! `kubelet` speaks real gRPC over real sockets. `memory` puts the same kubelet on a node in memory, on an `executor`
//! whose only clock and chance is a seed: ten thousand nights of a node, each of which can be had again. `health` puts the judge
//! of health before a host's files, without waiting.

pub mod executor;
#[cfg(test)]
mod faults;
pub mod hardware;
pub mod health;
#[cfg(test)]
mod held_objects;
pub mod kubelet;
pub mod memory;
pub mod random;
#[cfg(test)]
mod trial;
