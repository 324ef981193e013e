//! Devices that a real kernel creates and removes, with a daemon that reads this machine's uevents,
//! `/dev` and sysfs. All of them belong to the test and end with it: disks in memory, files as
//! disks, and interfaces in a separate network namespace.
//!
//! Holdfast offers their nodes, by a resource of the class `char`. An interface without a PCI
//! function is never offered: it has no node, and a container gets it from a CNI plugin.
//!
//! This needs root, and a kernel with these devices; otherwise each test prints that it is skipped.

mod disks;
mod events;
mod machine;
mod taps;
