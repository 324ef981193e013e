//! Errors that NVIDIA's driver reports in the kernel's log:
//! `NVRM: Xid (PCI:0000:9b:00): 119, pid=…` (NVIDIA's "XID Errors", the section on viewing them).
//!
//! The address names the slot, without a function. In MIG mode the driver adds the numbers of the
//! GPU instance and of the compute instance if it knows them (`PCI:0000:01:00 GPU-I:05 GPU-CI:00`).
//! The reader of the log passes only messages of the kernel itself: other writers could forge such
//! lines.

use crate::domain::{DeviceEvent, EventKind, GpuInstance, PciAddress};

/// The error in a line of the kernel's log, and its GPU.
///
/// The line must begin with the error: names that users choose appear in kernel messages, after the
/// kernel's own words.
#[must_use]
pub fn xid(line: &str) -> Option<DeviceEvent> {
    let (place, rest) = line.strip_prefix("NVRM: Xid (")?.split_once("): ")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let code = rest[..digits].parse().ok()?;
    // Older drivers omit `PCI:`.
    let slot = place.strip_prefix("PCI:").unwrap_or(place).split(' ').next()?;
    let slot = slot.split_once('.').map_or(slot, |(slot, _)| slot);
    let at: PciAddress = format!("{slot}.0").parse().ok()?;
    let action = || recovery_action(&rest[digits..]);
    let kind =
        if code == RECOVERY_ACTION { action() } else { None }.unwrap_or(EventKind::Xid(code));
    // The action is the one of the whole GPU.
    let instance = instance(place).filter(|_| matches!(kind, EventKind::Xid(_)));
    Some(DeviceEvent { at, whole_slot: true, instance, kind })
}

/// Whether NVIDIA's driver begins to run: `NVRM: loading NVIDIA UNIX x86_64 Kernel Module  …`, or
/// `… Open Kernel Module …`. Errors before it are of GPUs that the driver has reset since.
#[must_use]
pub fn is_driver_start(line: &str) -> bool {
    line.starts_with("NVRM: loading NVIDIA UNIX ")
}

/// The MIG instance behind the address.
fn instance(place: &str) -> Option<GpuInstance> {
    let number =
        |name: &str| place.split(' ').find_map(|word| word.strip_prefix(name)?.parse().ok());
    Some(GpuInstance { gi: number("GPU-I:")?, ci: number("GPU-CI:") })
}

/// The code for the recovery action that a GPU needs after any error, in drivers since 565.
const RECOVERY_ACTION: u32 = 154;

/// The recovery action that a GPU needs now:
/// `GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)`. The actions are those
/// of NVML's `nvmlDeviceGpuRecoveryAction_t`.
fn recovery_action(rest: &str) -> Option<EventKind> {
    let (_, change) = rest.split_once("GPU recovery action changed from ")?;
    let (_, now) = change.split_once(" to 0x")?;
    let (number, name) = now.split_once(" (")?;
    let name = name.split_once(')')?.0;
    let is_none = u32::from_str_radix(number, 16).ok()? == 0;
    Some(EventKind::RecoveryAction((!is_none).then(|| name.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xid_lines_are_parsed_in_every_form() {
        for (line, slot, code) in [
            (
                "NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, Timeout after 6s of waiting",
                "0000:9b:00.0",
                119,
            ),
            (
                "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception",
                "0000:cb:00.0",
                13,
            ),
            ("NVRM: Xid (0000:01:00): 31, Ch 00000010, engmask 00000101", "0000:01:00.0", 31),
            // From an H100 with driver 580: a program wrote to an unmapped address.
            (
                "NVRM: Xid (PCI:0000:00:06): 31, pid=755, name=bad, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC1 \
                 GPCCLIENT_T1_8 faulted @ 0x0_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
                "0000:00:06.0",
                31,
            ),
            ("NVRM: Xid (PCI:00000000:3B:00): 79, GPU has fallen off the bus.", "0000:3b:00.0", 79),
            ("NVRM: Xid (PCI:10000:01:00): 48", "10000:01:00.0", 48),
            ("NVRM: Xid (PCI:0000:01:00.0): 48, x", "0000:01:00.0", 48),
        ] {
            let event = DeviceEvent {
                at: slot.parse().unwrap(),
                whole_slot: true,
                instance: None,
                kind: EventKind::Xid(code),
            };
            assert_eq!(xid(line), Some(event), "{line}");
        }
    }

    #[test]
    fn the_mig_instance_of_an_error_is_parsed() {
        let of = |line: &str| {
            let event = xid(line).unwrap();
            (event.at.to_string(), event.instance.map(|instance| (instance.gi, instance.ci)))
        };
        for (place, instance) in [
            ("GPU-I:05", Some((5, None))),
            ("GPU-I:13 GPU-CI:00", Some((13, Some(0)))),
            ("GPU-CI:00", None),
            ("GPU-I:x GPU-CI:1", None),
        ] {
            let line = format!("NVRM: Xid (PCI:0000:01:00 {place}): 94, pid=1, Contained: SM");
            assert_eq!(of(&line), ("0000:01:00.0".to_owned(), instance), "{line}");
        }
        let action = "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)";
        assert_eq!(of(action).1, None);
    }

    #[test]
    fn recovery_actions_are_parsed() {
        let line = |rest: &str| format!("NVRM: Xid (PCI:0018:02:00): 154, {rest}");
        for (rest, kind) in [
            (
                "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
                EventKind::RecoveryAction(Some("GPU Reset Required".into())),
            ),
            (
                "pid=7, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)",
                EventKind::RecoveryAction(Some("Node Reboot Required".into())),
            ),
            (
                "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)",
                EventKind::RecoveryAction(None),
            ),
            (
                "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)",
                EventKind::RecoveryAction(Some("Drain P2P".into())),
            ),
            (
                "GPU recovery action changed from 0x3 (Drain P2P) to 0x4 (Drain and Reset)",
                EventKind::RecoveryAction(Some("Drain and Reset".into())),
            ),
            (
                "GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)",
                EventKind::RecoveryAction(None),
            ),
            // The name depends on the release, so the number decides.
            (
                "GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)",
                EventKind::RecoveryAction(Some("OS Reboot".into())),
            ),
            ("GPU recovery action changed", EventKind::Xid(154)),
            ("GPU recovery action changed from 0x0 (None) to 0x (None)", EventKind::Xid(154)),
        ] {
            assert_eq!(xid(&line(rest)).map(|event| event.kind), Some(kind), "{rest}");
        }
        let other = "NVRM: Xid (PCI:0018:02:00): 13, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)";
        assert_eq!(xid(other).map(|event| event.kind), Some(EventKind::Xid(13)));
    }

    #[test]
    fn similar_lines_are_ignored() {
        for line in [
            "",
            "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
            "NVRM: Xid",
            "NVRM: Xid (PCI:0000:9b:00)",
            "NVRM: Xid (PCI:0000:9b:00): , pid=1",
            "NVRM: Xid (PCI:0000:9b:00): 4294967296, pid=1",
            "NVRM: Xid (PCI:0000:9b): 79, x",
            "NVRM: Xid (PCI:gpu): 79, x",
            "NVRM: Xid (): 79",
            "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 20034, Non-fatal, Link 34",
            "usb 1-1: Product: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.",
            " NVRM: Xid (PCI:0000:9b:00): 79, x",
        ] {
            assert_eq!(xid(line), None, "{line}");
        }
    }
}
