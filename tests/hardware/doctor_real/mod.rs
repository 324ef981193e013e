//! `holdfast doctor` on real misconfigurations: full, read-only, broken or layered file systems,
//! mounts in the wrong place, reached limits of the kernel, an unreadable log, and root without
//! root's rights.
//!
//! Each test has private mounts, which end with it in every case, and a kubelet and a daemon
//! without any fault at first. Only root can create them; otherwise the tests print that they are
//! skipped. The machine's own settings stay. NFS is not covered: it would need a server, and a
//! kernel with both sides.

mod disks;
mod host;
mod scene;
