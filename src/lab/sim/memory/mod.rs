//! A whole node in memory for simulated daemons: one thread, virtual time, and a seed that decides
//! the order and duration of everything.
//!
//! ```text
//!  Simulation ─ owns ─▶ Executor (seed, virtual time)
//!      └─▶ Node ─┬─ process() ─▶ Process ── bind(path, Plugin) ─▶ Bound      the daemon's side
//!                ├─ register, checkpoint, list_pods, cgroup, kubelet_socket  a daemon's calls
//!                ├─ add_pod, delete_pod, restart_kubelet, reboot, ...        actions on the node
//!                └─ view ─▶ input of the oracles
//! ```
//!
//! The kubelet is that of [`crate::lab::sim::kubelet`]: the same flows that speak gRPC elsewhere. A
//! daemon is any type that implements [`Plugin`] and runs its tasks in a [`Process`]. Killing the
//! process ends its tasks, sockets and connections at one point in time; the files of its sockets
//! stay.
//!
//! The seed repeats a simulation exactly. So nothing in it may use a real clock, a thread,
//! `tokio::select!` without `biased`, or a randomly ordered map. Time and random numbers come from
//! [`Node::handle`].

mod connection;
mod environment;
mod faults;
mod kubelet;
mod node;
mod node_state;
mod plugin;
mod process;
mod sockets;

#[cfg(test)]
mod tests;

pub use self::faults::{Faults, Probabilities};
pub use self::kubelet::PodResourcesError;
pub use self::node::{Node, Simulation};
pub use self::plugin::{ConnectionId, ListStream, Plugin, RegisterRequest};
pub use self::process::{Bound, Process};
pub use crate::kubelet::register::RegisterError;
