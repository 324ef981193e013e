//! Events of a device from the kernel's uevents.
//!
//! Sources: uevents of the PCI function itself (its error recovery, Linux `pci_uevent_ers`; binding
//! and unbinding of its driver), and of a GPU's driver that gives up (`drm_dev_wedged_event`).
//!
//! Any process that may write to sysfs can repeat an event, as udev does with every device at boot.
//! Such an event has `SYNTH_UUID` and is ignored.

use crate::domain::{DeviceEvent, EventKind, PciAddress};
use crate::host::Uevent;

/// The event of a device, and which device; `None` for all other uevents.
#[must_use]
pub fn event(uevent: &Uevent) -> Option<DeviceEvent> {
    if uevent.field("SYNTH_UUID").is_some() {
        return None;
    }
    let (at, is_itself) = function_of(&uevent.devpath)?;
    let is_itself = is_itself && uevent.subsystem.as_deref() == Some("pci");
    let kind = match (uevent.action.as_str(), uevent.field("WEDGED")) {
        ("change", Some("none")) => EventKind::WasReset,
        ("change", Some(ways_out)) => EventKind::Wedged(ways_out.to_owned()),
        ("change", None) if is_itself => match uevent.field("ERROR_EVENT")? {
            "BEGIN_RECOVERY" => EventKind::RecoveryBegan,
            "SUCCESSFUL_RECOVERY" => EventKind::Recovered,
            "FAILED_RECOVERY" => EventKind::RecoveryFailed,
            _ => return None,
        },
        ("add" | "bind", _) if is_itself => EventKind::Bound,
        ("remove" | "unbind", _) if is_itself => EventKind::Unbound,
        _ => return None,
    };
    Some(DeviceEvent { at, whole_slot: false, instance: None, kind })
}

/// The nearest function to a path below `/sys`, which is the last address in it, and whether the
/// path is the function's own.
fn function_of(devpath: &str) -> Option<(PciAddress, bool)> {
    let mut parts = devpath.rsplit('/').map(str::parse);
    let last = parts.next()?;
    let is_itself = last.is_ok();
    last.ok().or_else(|| parts.find_map(Result::ok)).map(|at| (at, is_itself))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: &str = "/devices/pci0000:00/0000:00:02.0/0000:03:00.0";

    fn parsed(action: &str, devpath: &str, fields: &str) -> Option<DeviceEvent> {
        let text = format!(
            "{action}@{devpath}\0ACTION={action}\0{}\0SEQNUM=7\0",
            fields.replace(' ', "\0")
        );
        event(&Uevent::parse(text.as_bytes()).unwrap())
    }

    fn at(address: &str, kind: EventKind) -> Option<DeviceEvent> {
        Some(DeviceEvent { at: address.parse().unwrap(), whole_slot: false, instance: None, kind })
    }

    #[test]
    fn recovery_events_are_parsed_for_functions_and_bridges() {
        for (word, kind) in [
            ("BEGIN_RECOVERY", EventKind::RecoveryBegan),
            ("SUCCESSFUL_RECOVERY", EventKind::Recovered),
            ("FAILED_RECOVERY", EventKind::RecoveryFailed),
        ] {
            let fields = format!("SUBSYSTEM=pci ERROR_EVENT={word} DEVICE_ONLINE=0");
            assert_eq!(parsed("change", CARD, &fields), at("0000:03:00.0", kind.clone()));
            assert_eq!(
                parsed("change", "/devices/pci0000:00/0000:00:02.0", &fields),
                at("0000:00:02.0", kind)
            );
        }
        for nothing in [
            "SUBSYSTEM=pci",
            "SUBSYSTEM=pci ERROR_EVENT=",
            "SUBSYSTEM=pci ERROR_EVENT=what?",
            "SUBSYSTEM=net ERROR_EVENT=BEGIN_RECOVERY",
        ] {
            assert_eq!(parsed("change", CARD, nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_driver_gives_a_gpu_up_or_has_reset_it() {
        let card = format!("{CARD}/drm/card0");
        let wedged = EventKind::Wedged("rebind,bus-reset".into());
        assert_eq!(
            parsed(
                "change",
                &card,
                "SUBSYSTEM=drm DEVNAME=dri/card0 WEDGED=rebind,bus-reset PID=7"
            ),
            at("0000:03:00.0", wedged)
        );
        assert_eq!(
            parsed("change", &card, "SUBSYSTEM=drm WEDGED=none"),
            at("0000:03:00.0", EventKind::WasReset)
        );
        assert_eq!(parsed("change", &card, "SUBSYSTEM=drm HOTPLUG=1"), None);
        assert_eq!(
            parsed(
                "change",
                "/devices/platform/amdgpu_xcp_3/drm/card4",
                "SUBSYSTEM=drm WEDGED=unknown"
            ),
            None
        );
    }

    #[test]
    fn bind_events_of_child_devices_are_ignored() {
        let own = "SUBSYSTEM=pci PCI_SLOT_NAME=0000:03:00.0";
        for (action, kind) in [
            ("add", EventKind::Bound),
            ("bind", EventKind::Bound),
            ("unbind", EventKind::Unbound),
            ("remove", EventKind::Unbound),
        ] {
            assert_eq!(parsed(action, CARD, own), at("0000:03:00.0", kind));
            assert_eq!(parsed(action, &format!("{CARD}/virtio4"), "SUBSYSTEM=virtio"), None);
            assert_eq!(parsed(action, &format!("{CARD}/drm/card0"), "SUBSYSTEM=drm"), None);
            assert_eq!(
                parsed(action, &format!("{CARD}/0000:03:00.0:pcie001"), "SUBSYSTEM=pci_express"),
                None
            );
        }
        assert_eq!(parsed("move", CARD, own), None);
        let behind_vmd = "/devices/pci0000:6f/0000:6f:00.5/pci10001:80/10001:80:07.0/10001:84:00.0";
        assert_eq!(parsed("bind", behind_vmd, own), at("10001:84:00.0", EventKind::Bound));
    }

    #[test]
    fn synthetic_events_are_ignored() {
        for fields in [
            "SUBSYSTEM=pci SYNTH_UUID=0",
            "SUBSYSTEM=pci SYNTH_UUID=fe4d7c9d-b8c6-4a70-9ef1-3d8a58d18eed SYNTH_ARG_ERROR_EVENT=X",
        ] {
            for action in ["add", "bind", "remove", "unbind", "change"] {
                assert_eq!(parsed(action, CARD, fields), None, "{action} {fields}");
            }
        }
        let forged = "SUBSYSTEM=drm SYNTH_UUID=0 WEDGED=none";
        assert_eq!(parsed("change", &format!("{CARD}/drm/card0"), forged), None);
    }
}
