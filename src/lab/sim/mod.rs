//! Simulators: a kubelet and a node's hardware, for the demo, the benchmarks and the tests.
//!
//! `kubelet` speaks real gRPC over real sockets. `memory` runs the same kubelet on a node in
//! memory, on an `executor` whose clock and random numbers come only from a seed: ten thousand runs
//! of a node, each repeatable. `health` runs the judge of health over a host's files, without
//! waiting. `api_server` is a Kubernetes API server with nodes, slices of devices, and claims.

pub mod api_server;
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
mod scenarios;
