//! A whole node in memory, for daemons under simulation: one thread, virtual time, and a seed that decides what happens
//! when, in which order and how long it takes.
//!
//! ```text
//!  Simulation ─ owns ─▶ Executor (seed, virtual time)
//!      └─▶ Node ─┬─ process() ─▶ Process ── bind(path, Plugin) ─▶ Bound      the daemon's side
//!                ├─ register, checkpoint, list_pods, cgroup, kubelet_socket  what a daemon calls and sees
//!                ├─ add_pod, delete_pod, restart_kubelet, reboot, ...        what happens to the node
//!                └─ view ─▶ what oracles look at
//! ```
//!
//! The kubelet is that of [`crate::lab::sim::kubelet`]: the same flows that speak gRPC elsewhere. A daemon is whatever
//! implements [`Plugin`] and runs its tasks in a [`Process`]; killing the process ends its tasks, sockets and
//! connections in one moment, with the files of its sockets left behind.
//!
//! A simulation is repeated exactly by its seed. So nothing in it may use a real clock, a thread, `tokio::select!`
//! without `biased`, or a map in random order; time and chance come from [`Node::handle`].

mod connection;
mod faults;
mod ground;
mod kubelet;
mod node;
mod plugin;
mod process;
mod sockets;

#[cfg(test)]
mod tests;

pub use self::faults::{Faults, Odds};
pub use self::kubelet::PodResourcesError;
pub use self::node::{Node, Simulation};
pub use self::plugin::{ConnectionId, ListStream, Plugin, RegisterRequest};
pub use self::process::{Bound, Process};
pub use crate::kubelet::register::RegisterError;
