//! Simulators: a kubelet and a node's hardware, for the demo, the benchmarks and the tests.

pub mod hardware;
pub mod kubelet;
