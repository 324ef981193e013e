//! Holdfast: one daemon per Kubernetes node that offers the node's devices to the kubelet and
//! always knows the container that holds a device. `ARCHITECTURE.md` describes the design. The
//! modules below are in the order of the layers. A layer imports only from the layers above it in
//! this list.

pub mod domain;

pub mod host;

pub mod config;
pub mod contract;
pub mod hardware;
pub mod hook;
pub mod kubelet;
pub mod picture;
pub mod reporting;
pub mod slices;
pub mod store;
pub mod telemetry;

#[cfg(feature = "cluster")]
pub mod cluster;
pub mod handover;
pub mod messages;

pub mod supervisor;

pub mod discovery;
pub mod health;
pub mod ledger;
pub mod registration;
pub mod serving;

pub mod admin;
mod tasks;

pub mod app;

pub mod daemon;
pub mod doctor;

pub mod console;

#[cfg(feature = "lab")]
pub mod lab;

pub mod cli;

#[cfg(any(test, fuzzing))]
pub mod fuzz;
