//! Configuration space, power state and link of a function (Linux
//! `Documentation/ABI/testing/sysfs-bus-pci`).
//!
//! Values that mislead:
//!
//! - The first four bytes of a virtual function are ones by the standard. So its physical function
//!   is read, as the kernel does (`pci_device_is_present`).
//! - `power_state` is `unknown` without a driver, and `D3hot` at idle.
//! - `enable` shows nothing.
//! - A link without traffic lowers its speed automatically.

use super::super::pci::folder;
use super::Probe;
use crate::domain::{DeviceClass, Reason, Source};
use crate::host::HostRoot;

/// Vendor and device id of an absent device: the bus answers with ones.
const ALL_ONES: [u8; 4] = [0xff; 4];

/// Probes the function. Returns whether the device is powered.
pub(super) fn probe(probe: &mut Probe<'_>, class: DeviceClass) -> bool {
    if probe.read("power_state").as_deref() == Some("error") {
        probe.add_symptom(Reason::PowerError, "power_state is error");
    }
    let function = probe.function;
    let is_powered = is_powered(probe.root, &probe.dir);
    let present = function.physfn.map_or_else(|| probe.dir.clone(), folder);
    if if function.is_vf() { self::is_powered(probe.root, &present) } else { is_powered } {
        // All users may read these bytes. If a rule of the system forbids it, the source is off.
        let config = probe.root.first_bytes(&format!("{present}/config"), ALL_ONES.len() as u64);
        if probe.allowed(Source::ConfigSpace, config).is_some_and(|bytes| bytes == ALL_ONES) {
            let whose = function
                .physfn
                .map_or_else(String::new, |pf| format!(" of its physical function {pf}"));
            probe.add_symptom(
                Reason::OffTheBus,
                format!("the configuration space{whose} reads ffffffff"),
            );
        }
    }
    if is_powered {
        link(probe, class);
    }
    is_powered
}

/// Whether a read resumes no device. A read would resume a suspended or suspending one. A device
/// that the kernel does not manage (`unsupported`) or does not report keeps its state.
fn is_powered(root: &HostRoot, dir: &str) -> bool {
    let runtime = root.read(&format!("{dir}/power/runtime_status"));
    let is_suspended = matches!(runtime.as_deref(), Some("suspended" | "suspending"));
    // In D3hot the configuration space answers; for D3cold the power would be switched on.
    !is_suspended && root.read(&format!("{dir}/power_state")).as_deref() != Some("D3cold")
}

/// Remarks on a link that is narrower or slower than both ends allow. A lower speed is not remarked
/// for GPUs: an idle GPU lowers it automatically.
fn link(probe: &mut Probe<'_>, class: DeviceClass) {
    let Some(port) = probe.function.bridges.last().map(|bridge| folder(*bridge)) else { return };
    // Without a driver it has no work. A virtual function has no link of its own, and the link of a
    // bridge may be the one below it.
    if probe.function.driver.is_none() || probe.function.is_vf() || class == DeviceClass::Other {
        return;
    }
    let now = |file: &str| probe.read(&format!("current_link_{file}"));
    let best = |file: &str| {
        Some((
            probe.read(&format!("max_link_{file}"))?,
            probe.root.read(&format!("{port}/max_link_{file}"))?,
        ))
    };
    let width = now("width")
        .and_then(|text| lanes(&text))
        .zip(best("width").and_then(|(own, port)| Some(lanes(&own)?.min(lanes(&port)?))));
    let speed = now("speed")
        .and_then(|text| rate(&text))
        .zip(best("speed").and_then(|(own, port)| Some(rate(&own)?.min(rate(&port)?))));
    if let Some((now, best)) = width.filter(|(now, best)| now < best) {
        probe.remark(format!("its link has {now} lanes, but both ends support {best}"));
    }
    if let Some((now, best)) = speed.filter(|(now, best)| now < best && class != DeviceClass::Gpu) {
        probe.remark(format!("its link runs at {now} GT/s, but both ends support {best}"));
    }
}

/// The lanes of a link. The kernel writes 0 or 255 where it is unknown.
fn lanes(text: &str) -> Option<u32> {
    text.parse().ok().filter(|lanes| (1..=32).contains(lanes))
}

/// The rate of `8 GT/s` (older kernels) or `8.0 GT/s PCIe`; none of `Unknown`.
fn rate(text: &str) -> Option<f32> {
    text.split_once(" GT/s")?.0.parse().ok().filter(|rate: &f32| rate.is_finite())
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    const ONES: [u8; 64] = [0xff; 64];

    fn lost(host: &Host) -> bool {
        host.symptoms().iter().any(|(reason, _)| *reason == Reason::OffTheBus)
    }

    #[test]
    fn a_function_whose_first_bytes_are_ones_has_fallen_off_the_bus() {
        let host = Host::new("0000:18:00.0");
        let config = "sys/bus/pci/devices/0000:18:00.0/config";
        host.write_at(config, b"\xde\x10\x30\x23");
        assert_eq!(host.symptoms(), []);
        host.write_at(config, ONES);
        assert_eq!(
            host.symptoms(),
            [(Reason::OffTheBus, "the configuration space reads ffffffff".into())]
        );
        for too_short in [&b""[..], b"\xff\xff\xff"] {
            host.write_at(config, too_short);
            assert_eq!(host.symptoms(), [], "unknown, as in a tree captured without the privilege");
        }
    }

    #[test]
    fn a_suspended_device_is_not_resumed() {
        let host = Host::new("0000:18:00.0");
        host.write_at("sys/bus/pci/devices/0000:18:00.0/config", ONES);
        for (runtime, power, is_read) in [
            ("active", "D0", true),
            ("active", "D3hot", true),
            ("unsupported", "unknown", true),
            ("", "", true),
            ("suspended", "D3hot", false),
            ("suspended", "D3cold", false),
            ("suspending", "D0", false),
            ("", "D3cold", false),
        ] {
            host.write("power/runtime_status", runtime);
            host.write("power_state", power);
            assert_eq!(lost(&host), is_read, "{runtime} {power}");
        }
    }

    #[test]
    fn a_virtual_function_is_there_while_its_physical_one_is() {
        let mut host = Host::new("0000:18:00.4");
        host.function().physfn = "0000:18:00.0".parse().ok();
        let pf = "sys/bus/pci/devices/0000:18:00.0";
        host.write_at("sys/bus/pci/devices/0000:18:00.4/config", ONES);
        assert_eq!(host.symptoms(), [], "nothing is known of the physical one");
        host.write_at(&format!("{pf}/config"), b"\xde\x10\xb6\x25");
        assert_eq!(host.symptoms(), []);
        host.write_at(&format!("{pf}/config"), ONES);
        let text = "the configuration space of its physical function 0000:18:00.0 reads ffffffff";
        assert_eq!(host.symptoms(), [(Reason::OffTheBus, text.into())]);
        host.write_at(&format!("{pf}/power/runtime_status"), "suspended\n");
        assert_eq!(host.symptoms(), []);
    }

    #[test]
    fn only_the_power_state_error_is_a_symptom() {
        let host = Host::new("0000:18:00.0");
        for state in ["D0", "D1", "D2", "D3hot", "D3cold", "unknown", "0x0", ""] {
            host.write("power_state", state);
            assert_eq!(host.symptoms(), [], "{state}");
        }
        host.write("power_state", "error\n");
        assert_eq!(host.symptoms(), [(Reason::PowerError, "power_state is error".into())]);
    }

    #[test]
    fn a_narrow_link_is_remarked_where_both_ends_can_do_more() {
        let mut host = Host::new("0000:18:00.0");
        host.function().bridges =
            vec!["0000:00:01.0".parse().unwrap(), "0000:17:03.0".parse().unwrap()];
        host.function().driver = Some("nvme".into());
        host.device.class = DeviceClass::Nvme;
        let mut link = |own: [&str; 4], port: [&str; 2], class| {
            let names =
                ["current_link_width", "current_link_speed", "max_link_width", "max_link_speed"];
            names.iter().zip(own).for_each(|(name, text)| host.write(name, text));
            names[2..].iter().zip(port).for_each(|(name, text)| {
                host.write_at(&format!("sys/bus/pci/devices/0000:17:03.0/{name}"), text);
            });
            host.device.class = class;
            assert_eq!(host.symptoms(), []);
            host.remarks()
        };
        let (disk, gpu) = (DeviceClass::Nvme, DeviceClass::Gpu);
        let quick = "16.0 GT/s PCIe";
        assert_eq!(link(["4", quick, "4", quick], ["16", "32.0 GT/s PCIe"], disk), [""; 0]);
        assert_eq!(
            link(["4", quick, "16", quick], ["4", quick], disk),
            [""; 0],
            "the slot has only 4 lanes"
        );
        assert_eq!(
            link(["4", quick, "16", quick], ["16", quick], gpu),
            ["its link has 4 lanes, but both ends support 16"]
        );
        assert_eq!(
            link(["16", "2.5 GT/s PCIe", "16", quick], ["16", "8 GT/s"], gpu),
            [""; 0],
            "it is idle"
        );
        let slow = ["its link runs at 2.5 GT/s, but both ends support 8"];
        assert_eq!(link(["16", "2.5 GT/s PCIe", "16", quick], ["16", "8 GT/s"], disk), slow);
        assert_eq!(link(["0", "Unknown", "255", "Unknown speed"], ["16", quick], disk), [""; 0]);
        assert_eq!(
            link(["4", quick, "16", quick], ["16", quick], DeviceClass::Other),
            [""; 0],
            "a bridge"
        );
    }
}
