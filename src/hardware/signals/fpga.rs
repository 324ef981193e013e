//! Signals of FPGAs: the Device Feature List framework and its predecessor (Linux
//! `Documentation/ABI/testing/sysfs-platform-dfl-fme`, `-dfl-port`, `sysfs-class-fpga-manager`),
//! and XRT's cards (attributes of its `xocl` and `xclmgmt` drivers).
//!
//! A manager's `state` is `unknown` on healthy cards, because it cannot find out. Only states that
//! end in `error` are errors. Errors of the management half concern the card; those of a port
//! concern the port.

use super::super::fpga::XILINX;
use super::super::pci::is_numbered;
use super::Probe;
use crate::domain::{Device, Reason};

/// The folders of regions, management half and port: of the framework, and of its predecessor.
const FRAMEWORKS: [(&str, &str, &str); 2] =
    [("fpga_region", "dfl-fme.", "dfl-port."), ("fpga", "intel-fpga-fme.", "intel-fpga-port.")];

pub(super) fn probe(probe: &mut Probe<'_>, device: &Device) {
    // Managers of other drivers are directly below the function.
    managers(probe, &probe.dir.clone());
    for (class, management, _) in FRAMEWORKS {
        for half in below(probe, class, management) {
            if let Some(errors) = nonzero(probe, &format!("{half}/errors/catfatal_errors")) {
                probe.add_symptom(Reason::FpgaError, format!("catfatal_errors is {errors}"));
            }
            managers(probe, &half);
            for entry in
                probe.root.entries(&half).iter().filter(|entry| is_numbered(entry, "dfl-fme-mgr."))
            {
                managers(probe, &format!("{half}/{entry}"));
            }
        }
    }
    probe_ports(probe, device);
    if probe.function.vendor == Some(XILINX) {
        xrt(probe);
    }
}

/// Probes the ports of a device: all ports of an uncut card, the one port of a part, none of a card
/// that is cut.
pub(super) fn probe_ports(probe: &mut Probe<'_>, device: &Device) {
    let is_own =
        |name: &str| device.nodes.iter().any(|node| node.host.strip_prefix("/dev/") == Some(name));
    for (class, _, port) in FRAMEWORKS {
        for dir in below(probe, class, port) {
            let name = dir.rsplit('/').next().unwrap_or_default();
            if !is_own(name) {
                continue;
            }
            if let Some(errors) = nonzero(probe, &format!("{dir}/errors/errors")) {
                probe.add_symptom(Reason::FpgaError, format!("errors of {name} is {errors}"));
            }
            // The card slows the accelerator down (first threshold), or almost stops it (second
            // threshold).
            for event in ["ap1_event", "ap2_event"] {
                if nonzero(probe, &format!("{dir}/{event}")).is_some() {
                    probe.add_symptom(
                        Reason::TooHot,
                        format!("{event} of {name}: the card has throttled it"),
                    );
                }
            }
        }
    }
}

/// The folders of this kind in the regions of the function.
fn below(probe: &Probe<'_>, class: &str, prefix: &str) -> Vec<String> {
    let regions = probe
        .root
        .entries(&format!("{}/{class}", probe.dir))
        .into_iter()
        .map(|region| format!("{}/{class}/{region}", probe.dir));
    let inside = |region: String| {
        let entries =
            probe.root.entries(&region).into_iter().filter(|entry| is_numbered(entry, prefix));
        entries.map(|entry| format!("{region}/{entry}")).collect::<Vec<_>>()
    };
    regions.flat_map(inside).collect()
}

fn managers(probe: &mut Probe<'_>, dir: &str) {
    for manager in probe.root.entries(&format!("{dir}/fpga_manager")) {
        let state = probe
            .root
            .read(&format!("{dir}/fpga_manager/{manager}/state"))
            .filter(|state| state.ends_with("error"));
        if let Some(state) = state {
            probe.add_symptom(Reason::FpgaError, format!("{manager} is in the state `{state}`"));
        }
    }
}

fn xrt(probe: &mut Probe<'_>) {
    for (file, wanted) in [("ready", 1), ("dev_offline", 0), ("device_bad_state", 0)] {
        let text = probe.read(file);
        if let Some(text) = text.filter(|text| number(text).is_some_and(|value| value != wanted)) {
            probe.add_symptom(Reason::NotReady, format!("{file} is {text}"));
        }
    }
}

/// The text of a number that is not zero.
fn nonzero(probe: &Probe<'_>, file: &str) -> Option<String> {
    probe.root.read(file).filter(|text| number(text).is_some_and(|value| value != 0))
}

/// Parses a register, in hexadecimal with `0x` or decimal.
fn number(text: &str) -> Option<u64> {
    text.strip_prefix("0x")
        .map_or_else(|| text.parse().ok(), |digits| u64::from_str_radix(digits, 16).ok())
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::domain::{DeviceClass, DeviceNode};

    fn card(ports: &[&str]) -> Host {
        let mut host = Host::new("0000:b1:00.0");
        host.device.class = DeviceClass::Fpga;
        host.device.nodes =
            ports.iter().map(|port| DeviceNode::at(format!("/dev/{port}"))).collect();
        host
    }

    #[test]
    fn a_manager_without_an_error_state_is_healthy() {
        let host = card(&[]);
        let below = "fpga_region/region0/dfl-fme.0";
        for (file, state, is_bad) in [
            (format!("{below}/dfl-fme-mgr.0/fpga_manager/fpga0/state"), "unknown", false),
            (format!("{below}/dfl-fme-mgr.0/fpga_manager/fpga0/state"), "firmware request", false),
            (format!("{below}/dfl-fme-mgr.0/fpga_manager/fpga0/state"), "write error", true),
            (format!("{below}/fpga_manager/fpga0/state"), "firmware request error", true),
            ("fpga_manager/fpga0/state".into(), "write complete error", true),
            ("fpga_manager/fpga0/state".into(), "operating", false),
        ] {
            host.write(&file, state);
            let expected = if is_bad {
                vec![(Reason::FpgaError, format!("fpga0 is in the state `{state}`"))]
            } else {
                Vec::new()
            };
            assert_eq!(host.symptoms(), expected, "{file} {state}");
            host.write(&file, "unknown");
        }
    }

    #[test]
    fn errors_of_the_management_half_are_the_cards_and_those_of_a_port_the_ports() {
        for [class, fme, port] in [
            ["fpga_region/region0", "dfl-fme.0", "dfl-port."],
            ["fpga/intel-fpga-dev.0", "intel-fpga-fme.0", "intel-fpga-port."],
        ] {
            let mut host = card(&[]);
            host.write(&format!("{class}/{fme}/errors/catfatal_errors"), "0x0\n");
            host.write(&format!("{class}/{fme}/errors/inject_errors"), "0x7\n");
            host.write(&format!("{class}/{port}0/errors/errors"), "0x0\n");
            host.write(&format!("{class}/{port}1/errors/errors"), "0x800\n");
            assert_eq!(host.symptoms(), [], "the card is cut: the port is another device");
            host.write(&format!("{class}/{fme}/errors/catfatal_errors"), "0x40\n");
            assert_eq!(host.symptoms(), [(Reason::FpgaError, "catfatal_errors is 0x40".into())]);
            host.device.attributes.insert("part", "port");
            host.device.nodes = vec![DeviceNode::at(format!("/dev/{port}0"))];
            assert_eq!(host.symptoms(), []);
            host.device.nodes = vec![DeviceNode::at(format!("/dev/{port}1"))];
            assert_eq!(
                host.symptoms(),
                [(Reason::FpgaError, format!("errors of {port}1 is 0x800"))]
            );
        }
    }

    #[test]
    fn a_port_that_is_throttled_is_too_hot() {
        let host = card(&["dfl-port.0"]);
        host.write("fpga_region/region0/dfl-port.0/ap1_event", "0\n");
        host.write("fpga_region/region0/dfl-port.0/ap2_event", "1\n");
        assert_eq!(
            host.symptoms(),
            [(Reason::TooHot, "ap2_event of dfl-port.0: the card has throttled it".into())]
        );
    }

    #[test]
    fn xrt_cards_report_whether_they_are_ready() {
        let mut host = card(&[]);
        host.write("ready", "0x0");
        assert_eq!(host.symptoms(), [], "another maker's `ready` may mean anything");
        host.function().vendor = Some(XILINX);
        assert_eq!(host.symptoms(), [(Reason::NotReady, "ready is 0x0".into())]);
        for (file, good, bad) in
            [("ready", "0x1", "0"), ("dev_offline", "0", "1"), ("device_bad_state", "0", "1")]
        {
            host.write(file, bad);
            host.write("ready", if file == "ready" { bad } else { "1" });
            assert_eq!(host.symptoms(), [(Reason::NotReady, format!("{file} is {bad}"))]);
            host.write(file, good);
            assert_eq!(host.symptoms(), []);
        }
    }

    #[test]
    fn a_suspended_card_is_not_probed() {
        let host = card(&["dfl-port.0"]);
        host.write("fpga_region/region0/dfl-port.0/errors/errors", "0xffffffffffffffff");
        host.write("power/runtime_status", "suspended");
        assert_eq!(host.symptoms(), []);
        host.write("power/runtime_status", "active");
        assert_eq!(host.symptoms().len(), 1);
    }
}
