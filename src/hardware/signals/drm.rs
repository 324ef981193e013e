//! Signals of GPUs. sysfs and procfs show little of a failed GPU: its driver reports by uevents
//! (`WEDGED=`) and in the kernel's log (Xid).
//!
//! NVIDIA's `information` misleads: it has question marks for a UUID until the GPU's first use,
//! also for a healthy GPU.

use super::Probe;
use crate::domain::Reason;

/// Exists while an Intel card waits for its firmware to be flashed (Linux
/// `drivers/gpu/drm/xe/xe_survivability_mode.c`).
const SURVIVABILITY: &str = "survivability_mode";

pub(super) fn probe(probe: &mut Probe<'_>) {
    if probe.root.exists(&format!("{}/{SURVIVABILITY}", probe.dir)) {
        probe.add_symptom(
            Reason::NotReady,
            format!("{SURVIVABILITY} exists: the firmware must be flashed"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    #[test]
    fn a_card_that_waits_for_its_firmware_is_not_ready() {
        let host = Host::new("0000:03:00.0");
        assert_eq!(host.symptoms(), []);
        host.write(SURVIVABILITY, "Survivability mode type: Boot\n");
        assert_eq!(
            host.symptoms(),
            [(Reason::NotReady, "survivability_mode exists: the firmware must be flashed".into())]
        );
    }

    #[test]
    fn an_unused_gpu_is_healthy() {
        let host = Host::new("0000:03:00.0");
        let information = "GPU UUID: \t GPU-????????-????-????-????-????????????\nVideo BIOS: \t ??.??.??.??.??\n";
        host.write_at("proc/driver/nvidia/gpus/0000:03:00.0/information", information);
        assert_eq!(host.symptoms(), []);
    }
}
