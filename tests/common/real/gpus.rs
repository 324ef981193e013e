//! A made node with GPUs of NVIDIA, whose driver is not loaded: plain files are the driver's
//! libraries, and the device nodes have numbers of the driver. As with the driver container of
//! NVIDIA's operator, all of them are below `/run/nvidia/driver`.

use super::sandbox::output;
use holdfast::lab::sim::hardware::{GPUS, SimNode};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The driver's major number (`Documentation/admin-guide/devices.txt`).
const MAJOR: u64 = 195;
pub(crate) const RELEASE: &str = "580.95.05";
pub(crate) const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// The nodes of the driver as a whole, with their minor numbers.
pub(crate) const SHARED_NODES: [(&str, u64); 3] =
    [("nvidiactl", 255), ("nvidia-uvm", 254), ("nvidia-uvm-tools", 253)];

/// Makes a character device with a node that every user may open.
pub(crate) fn make_node(path: &Path, major: u64, minor: u64) {
    let (mode, number) = (Mode::from_bits_truncate(0o666), makedev(major, minor));
    mknod(path, SFlag::S_IFCHR, mode, number).unwrap();
}

/// Makes the node's files below `root`, and the driver's files where the runtime finds them.
pub(crate) fn make(root: &Path) -> SimNode {
    let node = SimNode::create(root).unwrap();
    let driver = root.join("run/nvidia/driver");
    fs::create_dir_all(driver.join("dev")).unwrap();
    fs::create_dir_all(driver.join(LIBRARIES)).unwrap();
    let gpus = (0..GPUS).map(|gpu| (format!("nvidia{gpu}"), gpu as u64));
    let shared = SHARED_NODES.map(|(name, minor)| (name.to_owned(), minor));
    for (name, minor) in gpus.chain(shared) {
        fs::remove_file(root.join("dev").join(&name)).unwrap();
        make_node(&driver.join("dev").join(name), MAJOR, minor);
    }
    for library in ["libcuda.so", "libnvidia-ml.so"] {
        fs::write(driver.join(LIBRARIES).join(format!("{library}.{RELEASE}")), "").unwrap();
        std::os::unix::fs::symlink(
            format!("{library}.{RELEASE}"),
            driver.join(LIBRARIES).join(format!("{library}.1")),
        )
        .unwrap();
    }
    output(Command::new("mount").arg("--bind").arg(root.join("run/nvidia")).arg("/run/nvidia"));
    node
}
