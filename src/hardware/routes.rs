//! The interfaces that the host uses: those of its default routes and the ones below these, and the
//! members of a bond, a bridge or a switch.
//!
//! Open vSwitch does not link its bridge with its ports: the default route is over `br-ex`, and the
//! `master` of the uplink is `ovs-system`.
//!
//! The routes are in `/proc/net/route` and `/proc/net/ipv6_route` (Linux `net/ipv4/fib_trie.c` and
//! `net/ipv6/route.c`). The interfaces below are the links `lower_*` (Linux
//! `Documentation/ABI/testing/sysfs-class-net`).

use crate::host::{HostRoot, ReadFailure, is_absence};
use std::collections::BTreeSet;

/// The routes of the host's first process.
const ROUTES: &str = "proc/1/net/route";

/// Flags of a route: it is in force; it rejects packets (`include/uapi/linux/route.h`).
const UP: u32 = 0x1;
const REJECT: u32 = 0x200;

/// Interfaces of default routes, with those below a bond, a bridge or a VLAN.
#[derive(Debug, Default)]
pub(super) struct DefaultRoutes(BTreeSet<String>);

impl DefaultRoutes {
    pub(super) fn read(root: &HostRoot) -> Self {
        // The routes of the host's first process: the reader's own may be those of a pod.
        let of_4 = root.read_all(ROUTES).unwrap_or_else(|error| {
            // Every kernel with a network has this file. A captured tree may lack it.
            if root.is_live() && is_absence(&error) {
                root.repeat_failures(&[ReadFailure {
                    path: format!("/{ROUTES}"),
                    error: error.to_string(),
                }]);
            }
            String::new()
        });
        let of_6 = root.read_all("proc/1/net/ipv6_route").unwrap_or_default();
        let mut found = BTreeSet::new();
        let mut above: Vec<String> = of_4
            .lines()
            .filter_map(by_4)
            .chain(of_6.lines().filter_map(by_6))
            .map(str::to_owned)
            .collect();
        while let Some(interface) = above.pop() {
            let entries = root.entries(&format!("sys/class/net/{interface}"));
            if found.insert(interface) {
                above.extend(
                    entries
                        .iter()
                        .filter_map(|entry| entry.strip_prefix("lower_"))
                        .map(str::to_owned),
                );
            }
        }
        DefaultRoutes(found)
    }

    /// The first of these interfaces with a default route.
    pub(super) fn among<'a>(&self, interfaces: &'a [String]) -> Option<&'a str> {
        interfaces.iter().map(String::as_str).find(|interface| self.0.contains(*interface))
    }
}

/// The bond, bridge or switch that the first of these interfaces with one belongs to.
pub(super) fn master(root: &HostRoot, interfaces: &[String]) -> Option<String> {
    let of = |interface: &String| root.link_name(&format!("sys/class/net/{interface}/master"));
    interfaces.iter().find_map(of)
}

/// How the host uses one of these interfaces.
///
/// # Errors
/// When that cannot be read.
pub(super) fn use_of(
    root: &HostRoot,
    interfaces: &[String],
) -> Result<Option<String>, ReadFailure> {
    let root = root.recording();
    let route = || {
        let way = DefaultRoutes::read(&root).among(interfaces).map(str::to_owned);
        way.map(|way| format!("default route through {way}"))
    };
    let used = master(&root, interfaces).map(|master| format!("part of {master}")).or_else(route);
    match (used, root.take_failures().pop()) {
        (None, Some(failure)) => Err(failure),
        (used, _) => Ok(used),
    }
}

/// `Iface Destination Gateway Flags RefCnt Use Metric Mask …`, numbers in hexadecimal.
fn by_4(line: &str) -> Option<&str> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [interface, "00000000", _, flags, _, _, _, "00000000", ..] = fields[..] else {
        return None;
    };
    leads_out(flags, interface)
}

/// `destination length source length next-hop metric references use flags interface`, numbers in
/// hexadecimal.
fn by_6(line: &str) -> Option<&str> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [destination, "00", _, _, _, _, _, _, flags, interface] = fields[..] else { return None };
    leads_out(flags, interface).filter(|_| destination.bytes().all(|byte| byte == b'0'))
}

fn leads_out<'a>(flags: &str, interface: &'a str) -> Option<&'a str> {
    let flags = u32::from_str_radix(flags, 16).ok()?;
    (flags & UP != 0 && flags & REJECT == 0 && interface != "lo").then_some(interface)
}

#[cfg(test)]
mod tests {
    use super::super::testing::write;
    use super::*;

    #[test]
    fn a_default_route_over_a_bond_uses_its_members() {
        let dir = tempfile::tempdir().unwrap();
        let route = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                     bond0.7\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                     ens9\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                     ens8\t00000000\t010200C0\t0002\t0\t0\t0\t00000000\t0\t0\t0\n";
        write(dir.path(), "proc/1/net/route", route);
        let (zeros, gateway) = ("0".repeat(32), "fe80".to_owned() + &"0".repeat(28));
        let six = format!(
            "{zeros} 00 {zeros} 00 {gateway} 00000400 00000001 00000000 00450003   ens5f1\n\
             fd00{} 40 {zeros} 00 {zeros} 00000100 00000001 00000000 00000001     ens7\n\
             {zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n",
            "0".repeat(28)
        );
        write(dir.path(), "proc/1/net/ipv6_route", &six);
        for link in [
            "bond0.7/lower_bond0",
            "bond0/lower_ens1f0",
            "bond0/lower_ens1f1",
            "ens1f0/upper_bond0",
        ] {
            write(dir.path(), &format!("sys/class/net/{link}"), "");
        }
        let routes = DefaultRoutes::read(&HostRoot::new(dir.path()));
        let found: Vec<_> = routes.0.iter().map(String::as_str).collect();
        assert_eq!(found, ["bond0", "bond0.7", "ens1f0", "ens1f1", "ens5f1"]);
        assert_eq!(routes.among(&["ens1f0np0".into(), "ens1f1".into()]), Some("ens1f1"));
    }

    #[test]
    fn a_member_of_a_switch_is_in_use_without_a_route() {
        let dir = tempfile::tempdir().unwrap();
        let route = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
                     br-ex\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                     ens9\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n";
        write(dir.path(), "proc/1/net/route", route);
        write(dir.path(), "sys/class/net/ens1/address", "02:00:00:00:00:01\n");
        let link = dir.path().join("sys/class/net/ens1/master");
        std::os::unix::fs::symlink("../../../../virtual/net/ovs-system", link).unwrap();
        let root = HostRoot::new(dir.path());
        let used = |interface: &str| use_of(&root, &[interface.to_owned()]).unwrap();
        assert_eq!(used("ens1").as_deref(), Some("part of ovs-system"));
        assert_eq!(used("ens9").as_deref(), Some("default route through ens9"));
        assert_eq!(used("ens2"), None);
    }

    #[test]
    fn without_route_files_there_are_no_routes() {
        let dir = tempfile::tempdir().unwrap();
        assert!(DefaultRoutes::read(&HostRoot::new(dir.path())).0.is_empty());
    }
}
