//! Network interfaces (Linux `Documentation/ABI/testing/sysfs-class-net`).
//!
//! An interface that is up and has no carrier has lost its link. One that is down was switched off
//! on purpose; then the kernel does not report its carrier. `operstate` is `unknown` for drivers
//! that do not set it. An interface in a pod is not visible from the host, so no symptom of it is
//! reported.
//!
//! The carrier of a virtual or scalable function is a setting: the host's switch connects the
//! function when a pod gets it (`mlx5e_rep_close` of Linux `drivers/net/ethernet/mellanox/mlx5`).
//! The link of its physical function counts for it.

use super::Probe;
use crate::domain::Reason;

/// Flag of `flags` (Linux `if.h`): the interface was switched on.
const IFF_UP: u32 = 1;

/// The state of an interface's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Link {
    /// Switched on, with a link.
    Carrier,
    /// Switched on, without a link.
    NoCarrier,
    /// Switched off.
    Off,
    /// Unknown.
    Unknown,
}

pub(super) fn probe(probe: &mut Probe<'_>) {
    for (name, link) in links(probe) {
        let text = format!("{name} is up and has no carrier");
        match link {
            Link::NoCarrier if probe.function.physfn.is_some() => {
                probe.remark(format!("{text}; it belongs to a virtual function"));
            }
            Link::NoCarrier => probe.add_symptom(Reason::NoCarrier, text),
            _ => {}
        }
    }
}

/// The function's interfaces. Representors of its virtual functions (`pf0vf3`) follow the state of
/// these, and are left out.
pub(super) fn links(probe: &Probe<'_>) -> Vec<(String, Link)> {
    let children = probe.children("net", &probe.function.net);
    let own = children.into_iter().filter(|(_, dir)| {
        !probe.root.read(&format!("{dir}/phys_port_name")).is_some_and(|port| stands_for(&port))
    });
    own.map(|(name, dir)| (name, link(probe, &dir))).collect()
}

fn link(probe: &Probe<'_>, dir: &str) -> Link {
    let flags = probe
        .root
        .read(&format!("{dir}/flags"))
        .and_then(|flags| u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok());
    match (
        flags.map(|flags| flags & IFF_UP != 0),
        probe.root.read(&format!("{dir}/carrier")).as_deref(),
    ) {
        (Some(true), Some("1")) => Link::Carrier,
        (Some(true), Some("0")) => Link::NoCarrier,
        (Some(false), _) => Link::Off,
        _ => Link::Unknown,
    }
}

/// Whether the name of a switch's port is that of a representor: `pf0vf3`, `c1pf0vf3`, `pf0sf88`,
/// `pf0` of a DPU's host.
fn stands_for(port: &str) -> bool {
    port.split_once("pf").is_some_and(|(controller, function)| {
        (controller.is_empty() || controller.starts_with('c'))
            && function.starts_with(|c: char| c.is_ascii_digit())
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::domain::DeviceClass;

    fn card() -> Host {
        let mut host = Host::new("0000:3b:00.0");
        host.device.class = DeviceClass::Nic;
        host.function().net = vec!["ens1".into()];
        host
    }

    #[test]
    fn an_interface_that_is_on_and_has_no_carrier_has_lost_its_link() {
        let host = card();
        let (on, off) = ("0x1003\n", "0x1002\n");
        for (flags, carrier, is_bad) in [
            (on, "1\n", false),
            (on, "0\n", true),
            (on, "", false),
            (off, "", false),
            (off, "0\n", false),
            ("", "0\n", false),
            ("?", "0", false),
        ] {
            host.write("net/ens1/flags", flags);
            host.write("net/ens1/carrier", carrier);
            // This value means neither.
            host.write("net/ens1/operstate", "unknown\n");
            let expected: &[(Reason, String)] =
                &[(Reason::NoCarrier, "ens1 is up and has no carrier".into())];
            assert_eq!(host.symptoms(), if is_bad { expected } else { &[] }, "{flags} {carrier}");
        }
        std::fs::remove_dir_all(host.path("net")).unwrap();
        assert_eq!(host.symptoms(), [], "it is in a pod");
    }

    #[test]
    fn a_virtual_function_that_no_switch_connects_yet_is_healthy() {
        let mut host = card();
        host.function().physfn = Some("0000:3a:00.0".parse().unwrap());
        host.write("net/ens1/flags", "0x1003");
        host.write("net/ens1/carrier", "0");
        assert_eq!(host.symptoms(), []);
    }

    #[test]
    fn a_vf_representor_is_not_a_link_of_the_card() {
        let host = card();
        for (port, is_bad) in
            [("pf0vf3", false), ("c1pf0vf3", false), ("pf1sf88", false), ("p0", true), ("", true)]
        {
            host.write("net/ens1/flags", "0x1003");
            host.write("net/ens1/carrier", "0");
            host.write("net/ens1/phys_port_name", port);
            assert_eq!(!host.symptoms().is_empty(), is_bad, "{port}");
        }
    }

    #[test]
    fn an_interface_that_is_not_right_below_is_found_by_its_class() {
        let host = card();
        host.write("virtio0/net/ens1/flags", "0x1003");
        host.write("virtio0/net/ens1/carrier", "0");
        host.write_at("sys/class/net/keep", "");
        let link = host.path("../../../../class/net/ens1");
        std::os::unix::fs::symlink("../../bus/pci/devices/0000:3b:00.0/virtio0/net/ens1", &link)
            .unwrap();
        assert_eq!(host.symptoms().len(), 1);
        // By now another device has the name.
        std::fs::remove_file(&link).unwrap();
        host.write_at("sys/bus/pci/devices/0000:99:00.0/net/ens1/flags", "0x1003");
        host.write_at("sys/bus/pci/devices/0000:99:00.0/net/ens1/carrier", "0");
        std::os::unix::fs::symlink("../../bus/pci/devices/0000:99:00.0/net/ens1", &link).unwrap();
        assert_eq!(host.symptoms(), []);
    }
}
