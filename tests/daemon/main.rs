//! The daemon with a simulated kubelet, subject by subject, and the output of its verbs.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper of a test fails the test, and prints its figures"
)]

mod actors;
mod affinity;
mod answers;
mod bad_input;
mod bench;
#[path = "../common/mod.rs"]
mod common;
mod demo;
mod doctor;
#[cfg(feature = "cluster")]
mod dra;
#[cfg(feature = "cluster")]
mod dra_both;
#[cfg(feature = "cluster")]
mod dra_crash;
#[cfg(feature = "cluster")]
mod dra_evidence;
#[cfg(feature = "cluster")]
mod dra_handover;
#[cfg(feature = "cluster")]
mod dra_migrate;
#[cfg(all(feature = "cluster", feature = "nvml"))]
mod dra_nvml;
#[cfg(feature = "cluster")]
mod dra_operator;
#[cfg(feature = "cluster")]
mod dra_status;
mod edges;
mod growth;
mod handover;
#[path = "../hardware/mod.rs"]
mod hardware;
mod health;
mod hooks;
mod kubelets;
mod lifecycle;
mod limits;
mod metrics;
mod migrate;
mod modes;
mod mps;
mod narrow;
mod node_labels;
mod nodes;
mod nvml;
mod nvml_events;
mod output;
mod page;
mod process_limits;
mod questions;
mod reach;
#[cfg(all(feature = "cluster", feature = "nvml"))]
mod real_gpu;
mod reload;
#[cfg(feature = "cluster")]
mod reporting;
mod secrets;
#[cfg(feature = "cluster")]
mod secured;
mod start;
#[path = "../storage/mod.rs"]
mod storage;
#[path = "../common/systemd.rs"]
mod systemd;
mod versions;
