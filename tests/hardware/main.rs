//! Captured machines, and what a real kernel has: disks, mounts, interfaces.

#![expect(clippy::unwrap_used, reason = "a helper of a test fails the test")]

mod captures;
#[path = "../common/mod.rs"]
mod common;
mod doctor_real;
mod nvidia_trees;
mod real_kernel;
