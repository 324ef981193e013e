//! Made trees of hosts with NVIDIA's driver, in temporary folders.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// The nodes of the driver as a whole.
const SHARED: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"];

/// A host in a temporary folder.
pub(super) struct Tree(tempfile::TempDir);

impl Tree {
    pub(super) fn new() -> Self {
        let tree = Tree(tempfile::tempdir().unwrap());
        // Without `/dev` the health of no device would be known.
        fs::create_dir(tree.0.path().join("dev")).unwrap();
        tree
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file and the folders above it.
    pub(super) fn write(&self, rel: &str, text: &str) {
        assert!(!rel.starts_with('/'), "{rel} would leave the tree");
        let path = self.0.path().join(rel);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Makes a link and the folders above it.
    pub(super) fn link(&self, target: &str, rel: &str) {
        let path = self.0.path().join(rel);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    /// Removes a file.
    pub(super) fn remove(&self, rel: &str) {
        fs::remove_file(self.0.path().join(rel)).unwrap();
    }

    /// A GPU: its PCI function, and the driver's file about it.
    pub(super) fn gpu(&self, address: &str, id: u16, minor: u32, model: &str, uuid: &str) {
        let function = format!("sys/bus/pci/devices/{address}");
        let uevent = format!("DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:{id:04X}\n");
        self.write(&format!("{function}/uevent"), &uevent);
        let text = format!(
            "Model: \t\t {model}\nIRQ:   \t\t 41\nGPU UUID: \t {uuid}\nBus Type: \t PCIe\n\
             Bus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        );
        self.write(&format!("proc/driver/nvidia/gpus/{address}/information"), &text);
        let version =
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n";
        self.write("proc/driver/nvidia/version", version);
    }

    /// The nodes of GPUs with these minor numbers, and of the driver as a whole, below a folder.
    pub(super) fn nodes(&self, folder: &str, minors: &[u32]) {
        for name in SHARED {
            self.write(&format!("{folder}/{name}"), "");
        }
        for minor in minors {
            self.write(&format!("{folder}/nvidia{minor}"), "");
        }
    }

    /// A MIG instance: the files of its two capabilities, and their nodes below a folder.
    pub(super) fn instance(&self, folder: &str, minor: u32, gi: u32, caps: [u32; 2]) {
        let mig = format!("proc/driver/nvidia/capabilities/gpu{minor}/mig/gi{gi}");
        for (file, cap) in [("access", caps[0]), ("ci0/access", caps[1])] {
            self.write(&format!("{mig}/{file}"), &format!("DeviceFileMinor: {cap}\n"));
            self.write(&format!("{folder}/nvidia-caps/nvidia-cap{cap}"), "");
        }
    }

    /// A NUMA node with these processors.
    pub(super) fn numa_node(&self, number: u32, processors: &str) {
        let file = format!("sys/devices/system/node/node{number}/cpulist");
        self.write(&file, &format!("{processors}\n"));
    }
}
