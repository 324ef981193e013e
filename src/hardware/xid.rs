//! Errors that NVIDIA's driver reports in the kernel's log:
//! `NVRM: Xid (PCI:0000:9b:00): 119, pid=…` (NVIDIA's "XID Errors", the section on viewing them).
//!
//! The address names the slot, without a function. The reader of the log passes only messages of
//! the kernel itself: other writers could forge such lines.

use crate::domain::{DeviceEvent, EventKind, PciAddress};

/// The error in a line of the kernel's log, and its GPU.
///
/// The line must begin with the error: names that users choose appear in kernel messages, after the
/// kernel's own words.
#[must_use]
pub fn xid(line: &str) -> Option<DeviceEvent> {
    let (place, rest) = line.strip_prefix("NVRM: Xid (")?.split_once("): ")?;
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let code = rest[..digits].parse().ok()?;
    // Older drivers omit `PCI:`. For a part of a GPU, its instances follow the address.
    let slot = place.strip_prefix("PCI:").unwrap_or(place).split(' ').next()?;
    let slot = slot.split_once('.').map_or(slot, |(slot, _)| slot);
    let at: PciAddress = format!("{slot}.0").parse().ok()?;
    let action = || recovery_action(&rest[digits..]);
    let kind =
        if code == RECOVERY_ACTION { action() } else { None }.unwrap_or(EventKind::Xid(code));
    Some(DeviceEvent { at, whole_slot: true, kind })
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
            ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=1, Contained: SM", "0000:01:00.0", 94),
        ] {
            let event = DeviceEvent {
                at: slot.parse().unwrap(),
                whole_slot: true,
                kind: EventKind::Xid(code),
            };
            assert_eq!(xid(line), Some(event), "{line}");
        }
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
