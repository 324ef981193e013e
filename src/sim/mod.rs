//! Simulators: a kubelet and a node's hardware, for the demo, the benchmarks and the tests; and the executor that lets a
//! seed decide what happens when.

pub mod executor;
pub mod hardware;
pub mod kubelet;
pub mod memory;
pub mod random;
