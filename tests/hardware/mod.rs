//! Captured machines, and what a real kernel has: disks, mounts, interfaces.

mod captures;
mod doctor_real;
mod nvidia_trees;
mod real_kernel;
