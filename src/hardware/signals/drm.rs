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
/// Errors of the memory of AMD's server GPUs since the driver was loaded, or the GPU was reset:
/// lines `ue: 0` for those that were not corrected, and `ce: 3` (Linux
/// `drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c`).
const MEMORY_ERRORS: &str = "ras/umc_err_count";

pub(super) fn probe(probe: &mut Probe<'_>, is_powered: bool) {
    // The driver asks the GPU for them.
    let errors = is_powered.then(|| probe.read(MEMORY_ERRORS)).flatten();
    let uncorrected = errors.as_deref().and_then(uncorrected);
    probe.count(Reason::MemoryError, probe.function.address, uncorrected);
    if probe.root.exists(&format!("{}/{SURVIVABILITY}", probe.dir)) {
        probe.add_symptom(
            Reason::NotReady,
            format!("{SURVIVABILITY} exists: the firmware must be flashed"),
        );
    }
}

fn uncorrected(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.trim().strip_prefix("ue:")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::domain::Counter;

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
    fn uncorrected_errors_of_the_memory_are_counted() {
        let host = Host::new("0000:03:00.0");
        let at = "0000:03:00.0".parse().unwrap();
        let counter = Counter { reason: Reason::MemoryError, at };
        let counted = |host: &Host| host.signals().counters.get(&counter).copied();
        assert_eq!(counted(&host), None);
        for (text, expected) in [
            ("ue: 2\nce: 31\n", Some(2)),
            ("ue: 0\nce: 0\nde: 0\n", Some(0)),
            ("ue:\nce: 1\n", None),
            ("ce: 1\n", None),
            ("Query failed\n", None),
        ] {
            host.write(MEMORY_ERRORS, text);
            assert_eq!(counted(&host), expected, "{text}");
            assert_eq!(host.symptoms(), [], "only a rise is a symptom");
        }
    }

    #[test]
    fn an_unused_gpu_is_healthy() {
        let host = Host::new("0000:03:00.0");
        let information = "GPU UUID: \t GPU-????????-????-????-????-????????????\nVideo BIOS: \t ??.??.??.??.??\n";
        host.write_at("proc/driver/nvidia/gpus/0000:03:00.0/information", information);
        assert_eq!(host.symptoms(), []);
    }
}
