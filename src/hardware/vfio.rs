//! Functions for guests: VFIO and IOMMU groups (Linux `Documentation/driver-api/vfio.rst`).
//!
//! A guest gets the IOMMU group, not the function. It can have the group only while each function
//! in it has a VFIO driver, a driver that leaves its function alone, or no driver. Bridges do not
//! count (`drivers/iommu/iommu.c`).

use super::Scan;
use super::facts::{Facts, optional, required};
use super::pci::folder;
use crate::domain::{DeviceNode, PciAddress, PciFunction};
use crate::host::HostRoot;
use std::collections::BTreeMap;

/// Drivers that do not use their function, or leave its memory to others (`driver_managed_dma`).
/// The class of a function does not count: the driver of an ISA bridge or of an NVSwitch takes the
/// group for the host.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];

/// Class and sub-class of a bridge to another PCI bus.
const PCI_BRIDGE: u16 = 0x0604;

/// Whether the driver passes its function to guests: `vfio-pci`, or a driver for this hardware such
/// as `mlx5-vfio-pci`.
pub(super) fn is_bound(function: &PciFunction) -> bool {
    function.driver.as_deref().is_some_and(is_vfio)
}

fn is_vfio(driver: &str) -> bool {
    driver.replace('_', "-").ends_with("vfio-pci")
}

/// The IOMMU groups with the functions in them.
#[derive(Debug, Default)]
pub(super) struct Groups(BTreeMap<u32, Vec<Member>>);

#[derive(Debug)]
struct Member {
    address: PciAddress,
    is_bridge: bool,
    driver: Option<String>,
    /// Vendor and device.
    ids: (Option<u16>, Option<u16>),
}

impl Groups {
    pub(super) fn of(scan: &Scan) -> Self {
        let mut groups: BTreeMap<u32, Vec<Member>> = BTreeMap::new();
        for function in scan.functions.values() {
            let is_bridge = function.class16() == Some(PCI_BRIDGE);
            let member = || Member {
                address: function.address,
                is_bridge,
                driver: function.driver.clone(),
                ids: (function.vendor, function.device),
            };
            if let Some(group) = function.iommu_group {
                groups.entry(group).or_default().push(member());
            }
        }
        Groups(groups)
    }

    fn members(&self, function: &PciFunction) -> &[Member] {
        function.iommu_group.and_then(|group| self.0.get(&group)).map_or(&[], Vec::as_slice)
    }

    /// Replaces the nodes of the host's driver by the nodes that a guest gets.
    pub(super) fn use_guest_nodes(
        &self,
        root: &HostRoot,
        function: &PciFunction,
        facts: &mut Facts,
    ) {
        facts.nodes = nodes(root, function);
        let others =
            || self.members(function).iter().filter(|member| member.address != function.address);
        let is_in_the_way = |member: &&Member| {
            member
                .driver
                .as_deref()
                .is_some_and(|driver| !is_vfio(driver) && !HARMLESS.contains(&driver))
        };
        let blocking = others().find(is_in_the_way);
        facts.note(
            "group_blocked_by",
            blocking.map(|member| {
                format!("{} ({})", member.address, member.driver.as_deref().unwrap_or_default())
            }),
        );
        let is_twin = |member: &&Member| {
            member.ids == (function.vendor, function.device)
                && member.driver.as_deref().is_some_and(is_vfio)
        };
        let twins: Vec<String> =
            others().filter(is_twin).map(|twin| twin.address.to_string()).collect();
        facts.note("group_twins", (!twins.is_empty()).then(|| twins.join(",")));
        let mut members: Vec<PciAddress> = others()
            .filter(|member| !member.is_bridge)
            .map(|member| member.address)
            .chain([function.address])
            .collect();
        members.sort();
        let members: Vec<String> = members.iter().map(ToString::to_string).collect();
        facts.note("iommu_group", function.iommu_group);
        facts.note("group_members", function.iommu_group.map(|_| members.join(",")));
    }
}

/// The group's node exists while a member is bound. A kernel with iommufd also has a node for each
/// function, and can be built without the nodes of groups.
fn nodes(root: &HostRoot, function: &PciFunction) -> Vec<DeviceNode> {
    let own = function.vfio_dev.as_ref().map(|name| format!("/dev/vfio/devices/{name}"));
    let group = function.iommu_group.map(|group| format!("/dev/vfio/{group}"));
    let without_iommu =
        root.read(&format!("{}/iommu_group/name", folder(function.address))).as_deref()
            == Some("vfio-noiommu");
    let mut nodes = Vec::new();
    let by_iommufd_only =
        own.is_some() && !root.node_exists("/dev/vfio/vfio") && root.node_exists("/dev/iommu");
    if !by_iommufd_only {
        nodes.push(required("/dev/vfio/vfio"));
        nodes.extend(group.map(|path| {
            let host = if without_iommu {
                path.replacen("/dev/vfio/", "/dev/vfio/noiommu-", 1)
            } else {
                path.clone()
            };
            DeviceNode { host, ..required(path) }
        }));
    }
    if let Some(own) = own {
        let node = if by_iommufd_only { required } else { optional };
        nodes.extend([node("/dev/iommu".to_owned()), node(own)]);
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::super::testing::{function, write};
    use super::*;

    fn member(address: &str, class: u32, driver: Option<&str>) -> PciFunction {
        PciFunction {
            class: Some(class),
            driver: driver.map(str::to_owned),
            iommu_group: Some(33),
            ..function(address)
        }
    }

    fn for_guest(dir: &tempfile::TempDir, functions: &[PciFunction]) -> Facts {
        let scan = Scan::of(
            functions.iter().map(|function| (function.address, function.clone())).collect(),
        );
        let mut facts = Facts::default();
        Groups::of(&scan).use_guest_nodes(&HostRoot::new(dir.path()), &functions[0], &mut facts);
        facts
    }

    #[test]
    fn a_sibling_that_the_host_uses_keeps_the_group_from_guests() {
        let dir = tempfile::tempdir().unwrap();
        let gpu = member("0000:01:00.0", 0x03_0000, Some("vfio-pci"));
        let with = |sibling: PciFunction| for_guest(&dir, &[gpu.clone(), sibling]).attributes;
        for driver in
            [None, Some("vfio-pci"), Some("mlx5_vfio_pci"), Some("pci-stub"), Some("pcieport")]
        {
            let attributes = with(member("0000:01:00.1", 0x04_0300, driver));
            assert!(!attributes.contains_key("group_blocked_by"), "{driver:?}");
            assert_eq!(&attributes["group_members"], "0000:01:00.0,0000:01:00.1");
        }
        let attributes = with(member("0000:01:00.1", 0x04_0300, Some("snd_hda_intel")));
        assert_eq!(&attributes["group_blocked_by"], "0000:01:00.1 (snd_hda_intel)");
        let bridge = with(member("0000:00:01.0", 0x06_0400, Some("pcieport")));
        assert!(!bridge.contains_key("group_blocked_by"), "its driver leaves the group to others");
        assert_eq!(&bridge["group_members"], "0000:01:00.0", "a guest cannot have a bridge");
        for (class, driver) in [(0x06_0100, "lpc_ich"), (0x06_8000, "nvidia")] {
            let other = with(member("0000:01:00.1", class, Some(driver)));
            assert_eq!(other["group_blocked_by"], format!("0000:01:00.1 ({driver})"));
        }
        let elsewhere = with(PciFunction {
            iommu_group: Some(34),
            ..member("0000:01:00.1", 0x04_0300, Some("snd_hda_intel"))
        });
        assert_eq!(&elsewhere["group_members"], "0000:01:00.0");
    }

    #[test]
    fn a_guest_gets_the_groups_node_and_with_iommufd_the_functions_own() {
        let dir = tempfile::tempdir().unwrap();
        let plain = member("0000:01:00.0", 0x03_0000, Some("vfio-pci"));
        let hosts = |facts: Facts| {
            facts.nodes.into_iter().map(|node| (node.host, node.required)).collect::<Vec<_>>()
        };
        let expected = |nodes: &[(&str, bool)]| {
            nodes.iter().map(|(host, required)| ((*host).to_owned(), *required)).collect::<Vec<_>>()
        };
        assert_eq!(
            hosts(for_guest(&dir, std::slice::from_ref(&plain))),
            expected(&[("/dev/vfio/vfio", true), ("/dev/vfio/33", true)])
        );

        let iommufd = PciFunction { vfio_dev: Some("vfio4".into()), ..plain.clone() };
        let both = expected(&[
            ("/dev/vfio/vfio", true),
            ("/dev/vfio/33", true),
            ("/dev/iommu", false),
            ("/dev/vfio/devices/vfio4", false),
        ]);
        assert_eq!(hosts(for_guest(&dir, std::slice::from_ref(&iommufd))), both);
        write(dir.path(), "dev/iommu", "");
        let alone = expected(&[("/dev/iommu", true), ("/dev/vfio/devices/vfio4", true)]);
        assert_eq!(
            hosts(for_guest(&dir, std::slice::from_ref(&iommufd))),
            alone,
            "a kernel without the nodes of groups"
        );
        write(dir.path(), "dev/vfio/vfio", "");
        assert_eq!(hosts(for_guest(&dir, std::slice::from_ref(&iommufd))), both);

        write(dir.path(), "sys/bus/pci/devices/0000:01:00.0/iommu_group/name", "vfio-noiommu\n");
        let node = for_guest(&dir, std::slice::from_ref(&plain)).nodes.remove(1);
        assert_eq!(
            (node.host.as_str(), node.container.as_str()),
            ("/dev/vfio/noiommu-33", "/dev/vfio/33")
        );
    }
}
