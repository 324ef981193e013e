//! NVIDIA GPUs. The driver makes no class device in sysfs: identity and minor number are in
//! `/proc/driver/nvidia/gpus/<address>/information` (text of the driver's `nv-procfs.c`).

use super::facts::{Facts, optional, required};
use crate::domain::PciFunction;
use crate::host::HostRoot;

/// PCI vendor id of NVIDIA.
pub(super) const VENDOR: u16 = 0x10de;
/// The kernel driver whose GPUs CUDA can use.
pub(super) const DRIVER: &str = "nvidia";

pub(super) fn facts(root: &HostRoot, function: &PciFunction) -> Facts {
    let mut facts = Facts::default();
    if function.driver.as_deref() != Some(DRIVER) {
        return facts;
    }
    let information = root.read(&format!("proc/driver/nvidia/gpus/{}/information", function.address)).unwrap_or_default();
    let minor = field(&information, "Device Minor").filter(|minor| minor.parse::<u32>().is_ok());
    // Until a GPU was initialised once, its UUID is shown with question marks.
    let uuid = field(&information, "GPU UUID").filter(|uuid| !uuid.contains('?'));
    if let Some(minor) = &minor {
        facts.nodes.push(required(format!("/dev/nvidia{minor}")));
        if root.entries(&format!("proc/driver/nvidia/capabilities/gpu{minor}/mig")).iter().any(|entry| entry.starts_with("gi")) {
            facts.note("mig", Some("enabled".to_owned()));
        }
    }
    facts.nodes.push(required("/dev/nvidiactl"));
    // Made on first use (nvidia-modprobe), or never when the module is not loaded: their absence is no fault.
    facts.nodes.extend(["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"].map(optional));
    facts.note("minor", minor);
    facts.note("model", field(&information, "Model"));
    facts.note("uuid", uuid.clone());
    facts.identity = uuid.filter(|_| !function.is_vf());
    facts
}

/// The value of a line such as `GPU UUID: \t GPU-0473…`.
fn field(information: &str, name: &str) -> Option<String> {
    let value = information.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'))?.trim();
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    fn gpu() -> PciFunction {
        PciFunction { vendor: Some(VENDOR), driver: Some(DRIVER.into()), ..function("0004:04:00.0") }
    }

    #[test]
    fn identity_and_minor_come_from_procfs() {
        let dir = tempfile::tempdir().unwrap();
        let text = "Model: \t\t Tesla V100\nIRQ:   \t\t 33\nGPU UUID: \t GPU-04732404-7fc3\nDevice Minor: \t 3\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", text);
        let facts = facts(&HostRoot::new(dir.path()), &gpu());
        assert_eq!(facts.identity.as_deref(), Some("GPU-04732404-7fc3"));
        assert_eq!(facts.nodes[0].host, "/dev/nvidia3");
        assert_eq!(facts.attributes["model"], "Tesla V100");
    }

    #[test]
    fn a_uuid_of_question_marks_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let text = "GPU UUID: \t GPU-????????-????-????-????-????????????\nDevice Minor: \t 0\n";
        write(dir.path(), "proc/driver/nvidia/gpus/0004:04:00.0/information", text);
        let facts = facts(&HostRoot::new(dir.path()), &gpu());
        assert_eq!(facts.identity, None);
        assert!(!facts.attributes.contains_key("uuid"));
    }

    #[test]
    fn without_its_driver_a_gpu_has_no_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let facts = facts(&HostRoot::new(dir.path()), &PciFunction { driver: Some("nouveau".into()), ..gpu() });
        assert!(facts.nodes.is_empty());
    }
}
