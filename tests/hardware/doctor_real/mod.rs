//! `holdfast doctor` on misconfigurations that are made for real: file systems that are full, read-only, broken or in layers,
//! mounts in the wrong place, limits of the kernel that are reached, a log that may not be read, root that is not root.
//!
//! Each test has mounts of its own, which end with it whatever becomes of it, and a kubelet and a daemon to which nothing is
//! wrong before. Only root can make them; elsewhere the tests say that they are skipped. The machine's own settings stay.
//! NFS is not among them: it would take a server of it, and a kernel that has both.

mod disks;
mod host;
mod scene;
