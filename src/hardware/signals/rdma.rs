//! RDMA devices and their ports (Linux `Documentation/ABI/stable/sysfs-class-infiniband`).
//!
//! A healthy port is `4: ACTIVE` and `5: LinkUp`. Other states that are no failure:
//!
//! - A port of an adapter in Ethernet mode is down while its interface is switched off.
//! - A virtual function's port may be down until its pod gets it: then its GUID and its link are
//!   set.
//! - No cable is plugged into the second port of an adapter with two.
//! - A missing RDMA device may be in a pod, if the host separates them (`netns_mode` of `ib_core`
//!   is `N`).

use super::super::pci::is_numbered;
use super::net::{self, Link};
use super::{Probe, number_of};
use crate::domain::Reason;

const DOWN: u32 = 1;
const ACTIVE: u32 = 4;
const LINK_UP: u32 = 5;

/// A port as its files describe it.
struct Port {
    /// `port 1`, with the adapter's name where the function has several.
    name: String,
    /// `1: DOWN, 2: Polling`.
    text: String,
    is_good: bool,
    is_down: bool,
    is_ethernet: bool,
}

pub(super) fn probe(probe: &mut Probe<'_>) {
    let adapters = probe.children("infiniband", &probe.function.rdma);
    if adapters.is_empty() {
        lost(probe);
        return;
    }
    let mut ports: Vec<Port> = Vec::new();
    for (adapter, dir) in &adapters {
        let prefix = if adapters.len() == 1 { String::new() } else { format!("{adapter} ") };
        let numbers = probe
            .root
            .entries(&format!("{dir}/ports"))
            .into_iter()
            .filter(|entry| is_numbered(entry, ""));
        ports.extend(numbers.filter_map(|number| {
            port(probe, &format!("{dir}/ports/{number}"), format!("{prefix}port {number}"))
        }));
    }
    let has_good = ports.iter().any(|port| port.is_good);
    let links: Vec<Link> = net::links(probe).into_iter().map(|(_, link)| link).collect();
    for port in ports.iter().filter(|port| !port.is_good) {
        let text = format!("{} is {}", port.name, port.text);
        let excuse = match port {
            Port { is_down: false, .. } => None,
            _ if has_good => Some("another port of the adapter is up"),
            Port { is_ethernet: true, .. }
                if !links.is_empty() && links.iter().all(|link| *link == Link::Off) =>
            {
                Some("its interface is down")
            }
            // Its link is not set up before a pod gets it.
            _ if probe.function.physfn.is_some() => Some("it belongs to a virtual function"),
            _ => None,
        };
        match excuse {
            Some(excuse) => probe.remark(format!("{text}; {excuse}")),
            None => probe.add_symptom(Reason::PortDown, text),
        }
    }
}

/// A port with a readable state; without one it is unknown.
fn port(probe: &Probe<'_>, dir: &str, name: String) -> Option<Port> {
    let text = probe.root.read(&format!("{dir}/state"))?;
    let state = number_of(&text)?;
    let physical = probe.root.read(&format!("{dir}/phys_state"));
    let is_linked = physical.as_deref().and_then(number_of).is_none_or(|state| state == LINK_UP);
    let is_ethernet = probe.root.read(&format!("{dir}/link_layer")).as_deref() == Some("Ethernet");
    let text = physical.map_or(text.clone(), |physical| format!("{text}, {physical}"));
    Some(Port {
        name,
        text,
        is_good: state == ACTIVE && is_linked,
        is_down: state == DOWN,
        is_ethernet,
    })
}

/// The function still has its driver, but the RDMA device that discovery saw is missing. The driver
/// removed it, as after a firmware error.
fn lost(probe: &mut Probe<'_>) {
    let names = probe.function.rdma.join(", ");
    if names.is_empty() || !probe.keeps_driver() {
        return;
    }
    if probe.root.read("sys/module/ib_core/parameters/netns_mode").as_deref() == Some("N") {
        probe.remark(format!("{names} is not visible; it may be in a pod"));
    } else {
        probe.add_symptom(
            Reason::RdmaLost,
            format!("{names} has disappeared, but its function still has its driver"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::domain::DeviceClass;

    fn adapter() -> Host {
        let mut host = Host::new("0000:1b:00.0");
        host.device.class = DeviceClass::Rdma;
        host.function().rdma = vec!["mlx5_0".into()];
        host.function().driver = Some("mlx5_core".into());
        host.write("uevent", "DRIVER=mlx5_core\n");
        host
    }

    fn port(host: &Host, number: u32, layer: &str, state: &str, physical: &str) {
        for (file, text) in [("link_layer", layer), ("state", state), ("phys_state", physical)] {
            host.write(&format!("infiniband/mlx5_0/ports/{number}/{file}"), text);
        }
    }

    fn down(text: &str) -> Vec<(Reason, String)> {
        vec![(Reason::PortDown, text.into())]
    }

    #[test]
    fn a_port_is_good_when_it_is_active_and_linked() {
        let host = adapter();
        for (state, physical, expected) in [
            ("4: ACTIVE", "5: LinkUp", vec![]),
            ("4: ACTIVE", "", vec![]),
            ("1: DOWN", "2: Polling", down("port 1 is 1: DOWN, 2: Polling")),
            ("2: INIT", "5: LinkUp", down("port 1 is 2: INIT, 5: LinkUp")),
            (
                "4: ACTIVE",
                "6: LinkErrorRecovery",
                down("port 1 is 4: ACTIVE, 6: LinkErrorRecovery"),
            ),
            ("5: ACTIVE_DEFER", "", down("port 1 is 5: ACTIVE_DEFER")),
            ("", "2: Polling", vec![]),
            ("what?", "2: Polling", vec![]),
        ] {
            port(&host, 1, "InfiniBand", state, physical);
            assert_eq!(host.symptoms(), expected, "{state} {physical}");
        }
    }

    #[test]
    fn a_second_port_may_be_unused() {
        let host = adapter();
        port(&host, 1, "InfiniBand", "4: ACTIVE", "5: LinkUp");
        port(&host, 2, "InfiniBand", "1: DOWN", "2: Polling");
        assert_eq!(host.symptoms(), []);
        assert_eq!(
            host.remarks(),
            ["port 2 is 1: DOWN, 2: Polling; another port of the adapter is up"]
        );
        // The link is up, but the port never becomes active.
        port(&host, 2, "InfiniBand", "2: INIT", "5: LinkUp");
        assert_eq!(host.symptoms(), down("port 2 is 2: INIT, 5: LinkUp"));
        port(&host, 1, "InfiniBand", "1: DOWN", "2: Polling");
        port(&host, 2, "InfiniBand", "1: DOWN", "3: Disabled");
        assert_eq!(host.symptoms().len(), 2);
    }

    #[test]
    fn a_port_in_ethernet_mode_follows_its_interface() {
        let mut host = adapter();
        host.function().net = vec!["ens1".into()];
        port(&host, 1, "Ethernet", "1: DOWN", "3: Disabled");
        assert_eq!(host.symptoms().len(), 1, "no interface excuses it");
        host.write("net/ens1/flags", "0x1002");
        assert_eq!(host.symptoms(), []);
        assert_eq!(host.remarks(), ["port 1 is 1: DOWN, 3: Disabled; its interface is down"]);
        host.write("net/ens1/flags", "0x1003");
        host.write("net/ens1/carrier", "0");
        assert_eq!(host.symptoms(), down("port 1 is 1: DOWN, 3: Disabled"));
    }

    #[test]
    fn a_virtual_functions_port_is_set_up_for_its_pod() {
        let mut host = adapter();
        host.function().physfn = "0000:1b:00.1".parse().ok();
        for layer in ["InfiniBand", "Ethernet"] {
            port(&host, 1, layer, "1: DOWN", "2: Polling");
            assert_eq!(host.symptoms(), [], "{layer}");
        }
        port(&host, 1, "InfiniBand", "2: INIT", "5: LinkUp");
        assert_eq!(host.symptoms().len(), 1, "its link is up, but no subnet manager is active");
        port(&host, 1, "Ethernet", "1: DOWN", "3: Disabled");
        host.write("net/ens1v0/flags", "0x1003");
        host.write("net/ens1v0/carrier", "0");
        assert_eq!(host.symptoms(), [], "the host's switch connects it when a pod gets it");
    }

    #[test]
    fn an_rdma_device_that_its_driver_took_down_is_lost() {
        let host = adapter();
        let lost = vec![(
            Reason::RdmaLost,
            "mlx5_0 has disappeared, but its function still has its driver".to_owned(),
        )];
        assert_eq!(host.symptoms(), lost);
        host.write_at("sys/module/ib_core/parameters/netns_mode", "Y\n");
        assert_eq!(host.symptoms(), lost);
        host.write_at("sys/module/ib_core/parameters/netns_mode", "N\n");
        assert_eq!(host.symptoms(), []);
        assert_eq!(host.remarks(), ["mlx5_0 is not visible; it may be in a pod"]);
        host.write_at("sys/module/ib_core/parameters/netns_mode", "Y\n");
        for uevent in ["DRIVER=vfio-pci\n", "PCI_CLASS=20000\n"] {
            host.write("uevent", uevent);
            assert_eq!(host.symptoms(), [], "an unbound driver is another reason");
        }
        host.write("uevent", "DRIVER=mlx5_core\n");
        // It came back under another name.
        host.write("infiniband/mlx5_7/ports/1/state", "4: ACTIVE");
        assert_eq!(host.symptoms(), []);
    }
}
