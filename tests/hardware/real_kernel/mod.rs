//! Devices that a real kernel makes and takes away, under a daemon that sees this machine: its uevents, its `/dev` and its
//! sysfs. Everything that is made here is the test's own and ends with it: disks in memory, files as disks, and
//! interfaces in a network of their own.
//!
//! What Holdfast offers of these are nodes that a resource of the class `char` names. An interface without a PCI function
//! is never offered: it has no node, and a container gets it from a CNI plugin.
//!
//! Only root may do that, on a kernel that has the devices; elsewhere each test says that it is skipped.

mod disks;
mod events;
mod machine;
mod taps;
