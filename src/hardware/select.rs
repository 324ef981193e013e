//! Selection: which resource offers which device.

mod criteria;
mod exclusion;
mod near;

pub use exclusion::uplink;
pub use near::{NearMiss, Nearest, near_misses};

use self::criteria::Host;
use self::exclusion::{
    Chosen, withhold_duplicate_paths, withhold_excluded, withhold_mixtures,
    withhold_shared_parents, withhold_unanswerable,
};
use crate::domain::{Device, DeviceClass, ResourceName, ResourceSpec};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The devices of every configured resource, as of this scan.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Every resource with its devices, sorted by id. A resource that nothing matches has an empty
    /// list.
    pub resources: BTreeMap<ResourceName, Vec<Arc<Device>>>,
    /// Warnings for the operator, one sentence each.
    pub warnings: Vec<String>,
}

impl Selection {
    /// The resource of each selected device, by the device's key.
    #[must_use]
    pub fn resource_of(&self) -> BTreeMap<&str, &ResourceName> {
        self.resources
            .iter()
            .flat_map(|(name, devices)| {
                devices.iter().map(move |device| (device.key.as_str(), name))
            })
            .collect()
    }
}

/// Puts every device into the first resource that selects it, and into no other.
///
/// `chars` maps the key of each `/dev` node to its resource. Its path was matched when the node was
/// found.
#[must_use]
pub fn select(
    devices: &[Arc<Device>],
    chars: &BTreeMap<String, ResourceName>,
    specs: &[Arc<ResourceSpec>],
) -> Selection {
    let mut selection = Selection::default();
    let mut chosen: Chosen<'_> = BTreeMap::new();
    let host = Host::of(devices);
    for device in devices {
        // One lookup for each node, not for each resource: there may be ten thousand nodes and a
        // hundred resources.
        let named = chars.get(&device.key);
        if let Some(spec) = specs.iter().find(|spec| host.offers(spec, device, named)) {
            chosen.insert(&device.key, spec);
        }
    }
    warn_of_wholes(devices, specs, &host, &chosen, &mut selection.warnings);
    withhold_mixtures(devices, &mut chosen, &mut selection.warnings);
    withhold_excluded(devices, &mut chosen, &mut selection.warnings);
    withhold_unanswerable(devices, &mut chosen, &mut selection.warnings);
    withhold_shared_parents(devices, &mut chosen, &mut selection.warnings);
    withhold_duplicate_paths(devices, &mut chosen, &mut selection.warnings);
    for (device, spec) in
        devices.iter().filter_map(|device| Some((device, chosen.get(device.key.as_str())?)))
    {
        let blocked = device.attribute("group_blocked_by").zip(device.iommu_group());
        selection.warnings.extend(blocked.map(|(by, group)| {
            format!(
                "{}: {} is unhealthy, because {by} blocks IOMMU group {group} for guests",
                spec.name, device.id
            )
        }));
    }
    let mut by_resource: BTreeMap<&ResourceName, Vec<Arc<Device>>> = BTreeMap::new();
    for device in devices {
        if let Some(spec) = chosen.get(device.key.as_str()) {
            by_resource.entry(&spec.name).or_default().push(Arc::clone(device));
        }
    }
    for spec in specs {
        // Two resources of one name are one resource.
        if selection.resources.contains_key(&spec.name) {
            continue;
        }
        let mut mine = by_resource.remove(&spec.name).unwrap_or_default();
        mine.sort_by(|a, b| a.id.cmp(&b.id));
        selection.resources.insert(spec.name.clone(), mine);
    }
    warn_of_nothing(devices, specs, &mut selection);
    selection
}

/// Warns of each resource without a device, and names the near misses. A glob without a match is
/// already reported with its text.
fn warn_of_nothing(
    devices: &[Arc<Device>],
    specs: &[Arc<ResourceSpec>],
    selection: &mut Selection,
) {
    let is_empty =
        |spec: &&Arc<ResourceSpec>| selection.resources.get(&spec.name).is_some_and(Vec::is_empty);
    let empty: Vec<_> =
        specs.iter().filter(|spec| spec.class != DeviceClass::Char).filter(is_empty).collect();
    if empty.is_empty() {
        return;
    }
    let taken = selection.resource_of();
    let mut named = BTreeSet::new();
    let mut warnings = Vec::new();
    for spec in empty.into_iter().filter(|spec| named.insert(&spec.name)) {
        let near = near_misses(devices, &taken, spec);
        let near = Nearest::of(&near).map(|nearest| format!("; {nearest}")).unwrap_or_default();
        warnings.push(format!(
            "{}: no device of class {} on this host matches{near}",
            spec.name,
            spec.class_word()
        ));
    }
    selection.warnings.extend(warnings);
}

/// Warns of each whole that a resource selects by `part = false` but that is cut into parts, where
/// no resource offers any part.
fn warn_of_wholes(
    devices: &[Arc<Device>],
    specs: &[Arc<ResourceSpec>],
    host: &Host<'_>,
    chosen: &Chosen<'_>,
    warnings: &mut Vec<String>,
) {
    let address = |device: &Device| device.pci.as_ref().map(|function| function.address);
    let is_offered = |device: &&Arc<Device>| chosen.contains_key(device.key.as_str());
    let cut = devices.iter().filter(is_offered).filter(|device| device.attribute("part").is_some());
    let cut: BTreeSet<_> = cut.filter_map(|device| address(device)).collect();
    for device in devices {
        let Some(parts) = device
            .attribute("parts")
            .filter(|_| !address(device).is_some_and(|whole| cut.contains(&whole)))
        else {
            continue;
        };
        let selects_whole = |spec: &&Arc<ResourceSpec>| {
            spec.class == device.class
                && spec.select.part == Some(false)
                && host.matches(&spec.select, device)
                && !host.excludes(spec, device)
        };
        if let Some(spec) = specs.iter().find(selects_whole) {
            let remedy = if parts == super::profiles::MIG {
                "offer them by `[nvidia] mig_strategy`, or in a resource with `part = true`"
            } else {
                "`part = false` selects whole devices only"
            };
            warnings.push(format!(
                "{}: {} is not offered, because it is split into parts ({parts}) and no resource \
                 offers them; {remedy}",
                spec.name, device.id,
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, device, spec};
    use super::*;
    use crate::domain::{
        Contract, ContractKind, DeviceNode, PciAddress, Scope, Select, Sharing, SriovOptions,
    };

    fn gpu(address: &str, vendor: u16, physfn: Option<&str>) -> Arc<Device> {
        let mut gpu = device(address, address);
        let PciAddress { bus, function, .. } = address.parse().unwrap();
        let number = 128 + u32::from(bus) * 8 + u32::from(function);
        gpu.nodes.push(DeviceNode::at(format!("/dev/dri/renderD{number}")));
        let function = gpu.pci.as_mut().unwrap();
        function.vendor = Some(vendor);
        function.physfn = physfn.map(|pf| pf.parse().unwrap());
        Arc::new(gpu)
    }

    fn chosen(selection: &Selection) -> Vec<(String, Vec<String>)> {
        let ids = |devices: &Vec<Arc<Device>>| {
            devices.iter().map(|device| device.id.to_string()).collect()
        };
        selection.resources.iter().map(|(name, devices)| (name.to_string(), ids(devices))).collect()
    }

    #[test]
    fn the_first_resource_that_matches_has_the_device() {
        let devices = [gpu("0000:01:00.0", 0x10de, None), gpu("0000:02:00.0", 0x1002, None)];
        let first = spec(
            "a.com/first",
            DeviceClass::Gpu,
            Select { vendor: vec![0x1002], ..Select::default() },
        );
        let second = spec("a.com/second", DeviceClass::Gpu, Select::default());
        let selection = select(&devices, &BTreeMap::new(), &[first, second]);
        let expected = [
            ("a.com/first".into(), vec!["0000:02:00.0".into()]),
            ("a.com/second".into(), vec!["0000:01:00.0".into()]),
        ];
        assert_eq!(chosen(&selection), expected);
        assert!(selection.warnings.is_empty());
    }

    #[test]
    fn a_pf_is_withheld_while_its_vfs_are_offered_unless_named() {
        let devices =
            [gpu("0000:01:00.0", 0x10de, None), gpu("0000:01:00.4", 0x10de, Some("0000:01:00.0"))];
        let any = spec("a.com/gpu", DeviceClass::Gpu, Select::default());
        let selection = select(&devices, &BTreeMap::new(), &[any]);
        assert_eq!(chosen(&selection), [("a.com/gpu".into(), vec!["0000:01:00.4".into()])]);
        assert_eq!(
            selection.warnings,
            ["a.com/gpu: 0000:01:00.0 is not offered, because its virtual functions are offered"]
        );

        let whole =
            spec("a.com/gpu", DeviceClass::Gpu, Select { vf: Some(false), ..Select::default() });
        let selection = select(&devices, &BTreeMap::new(), &[whole]);
        assert_eq!(chosen(&selection), [("a.com/gpu".into(), vec!["0000:01:00.0".into()])]);

        let address = devices.iter().map(|device| device.pci.as_ref().unwrap().address).collect();
        let named = spec("a.com/gpu", DeviceClass::Gpu, Select { address, ..Select::default() });
        assert_eq!(
            select(&devices, &BTreeMap::new(), &[named]).resources.values().next().unwrap().len(),
            2
        );
    }

    /// Two adapters with three virtual functions each.
    fn adapters() -> Vec<Arc<Device>> {
        let mut devices = Vec::new();
        for (bus, interface, link) in [("3b", "ens1f0", "ether"), ("af", "ib0", "infiniband")] {
            let pf: PciAddress = format!("0000:{bus}:00.0").parse().unwrap();
            for index in 0..4 {
                let address = PciAddress { function: index, ..pf };
                let mut card = device(&address.to_string(), &address.to_string());
                card.class = DeviceClass::Nic;
                let function = card.pci.as_mut().unwrap();
                function.driver = Some("mlx5_core".into());
                if index == 0 {
                    function.net = vec![interface.into()];
                    card.attributes.insert("link_type", link);
                } else {
                    function.physfn = Some(pf);
                    function.vf_index = Some(u32::from(index) - 1);
                }
                devices.push(Arc::new(card));
            }
        }
        devices
    }

    fn ids_of(devices: &[Arc<Device>], class: DeviceClass, wanted: Select) -> Vec<String> {
        let selection = select(devices, &BTreeMap::new(), &[spec("a.com/x", class, wanted)]);
        chosen(&selection).remove(0).1
    }

    #[test]
    fn virtual_functions_are_selected_by_their_physical_one_and_their_numbers() {
        let devices = adapters();
        let of = |pf: &[&str]| {
            let pf = pf.iter().map(|text| text.parse().unwrap()).collect();
            ids_of(&devices, DeviceClass::Nic, Select { pf, ..Select::default() })
        };
        assert_eq!(of(&["ens1f0#0,2"]), ["0000:3b:00.1", "0000:3b:00.3"]);
        assert_eq!(
            of(&["0000:af:00.0", "ens1f0#1-1"]),
            ["0000:3b:00.2", "0000:af:00.1", "0000:af:00.2", "0000:af:00.3"]
        );
        assert_eq!(of(&["ens9"]), Vec::<String>::new());
        let interface = vec!["ib0".to_owned(), "ens9".to_owned()];
        assert_eq!(
            ids_of(&devices, DeviceClass::Nic, Select { interface, ..Select::default() }),
            ["0000:af:00.0"]
        );
        let excluding = Select { pf: vec!["ens1f0#0-1".parse().unwrap()], ..Select::default() };
        let mut rest =
            (*spec("a.com/x", DeviceClass::Nic, Select { vf: Some(true), ..Select::default() }))
                .clone();
        rest.exclude = Some(excluding);
        let selection = select(&devices, &BTreeMap::new(), &[Arc::new(rest)]);
        assert_eq!(
            chosen(&selection)[0].1,
            ["0000:3b:00.3", "0000:af:00.1", "0000:af:00.2", "0000:af:00.3"]
        );
    }

    #[test]
    fn a_resource_has_the_devices_of_all_its_selections_and_classes() {
        let mut devices = adapters();
        // The second adapter has RDMA devices.
        for device in &mut devices[4..] {
            Arc::make_mut(device).class = DeviceClass::Rdma;
        }
        let mut controller = device("0000:01:00.0", "0000:01:00.0");
        controller.class = DeviceClass::Nvme;
        controller.nodes.push(DeviceNode::at("/dev/vfio/5"));
        controller.pci.as_mut().unwrap().vendor = Some(0x144d);
        devices.push(Arc::new(controller));
        let ids = |scope: Scope, class, wanted: Select, or: Vec<Select>| {
            let spec = (*spec("a.com/x", class, wanted)).clone();
            let spec = Arc::new(ResourceSpec { scope, or, ..spec });
            chosen(&select(&devices, &BTreeMap::new(), &[spec])).remove(0).1
        };
        let pf = |pf: &str| Select { pf: vec![pf.parse().unwrap()], ..Select::default() };
        let (first, second) = (pf("ens1f0#1"), pf("ib0#0,2"));
        let nic = DeviceClass::Nic;
        let both = vec![second.clone()];
        assert_eq!(ids(Scope::Class, nic, first.clone(), both.clone()), ["0000:3b:00.2"]);
        let network = ["0000:3b:00.2", "0000:af:00.1", "0000:af:00.3"];
        assert_eq!(ids(Scope::Network, nic, first, both), network);
        assert_eq!(ids(Scope::Network, nic, second, Vec::new()), network[1..]);
        let disk = Select { vendor: vec![0x144d], ..Select::default() };
        assert_eq!(ids(Scope::Pci, DeviceClass::Other, disk.clone(), Vec::new()), ["0000:01:00.0"]);
        assert!(ids(Scope::Network, nic, disk, Vec::new()).is_empty());
    }

    #[test]
    fn an_adapter_is_named_in_any_selection() {
        let devices = adapters();
        let named = |or: Select| {
            let first = Select { pf: vec!["ib0#0".parse().unwrap()], ..Select::default() };
            let spec = (*spec("a.com/x", DeviceClass::Nic, first)).clone();
            let spec = Arc::new(ResourceSpec { or: vec![or], ..spec });
            chosen(&select(&devices, &BTreeMap::new(), &[spec])).remove(0).1
        };
        let by_driver =
            Select { driver: vec!["mlx5_core".into()], vf: Some(false), ..Select::default() };
        assert_eq!(
            named(by_driver),
            ["0000:3b:00.0", "0000:af:00.1"],
            "not the whole of the latter"
        );
        let address = vec!["0000:af:00.0".parse().unwrap()];
        let by_address = Select { address, ..Select::default() };
        assert_eq!(named(by_address), ["0000:af:00.0", "0000:af:00.1"]);
    }

    #[test]
    fn attributes_select_by_globs_and_all_must_match() {
        let with = |address: &str, modes: &[(&'static str, &str)]| {
            let mut gpu = (*gpu(address, 0x1002, None)).clone();
            gpu.attributes.extend(modes.iter().copied());
            Arc::new(gpu)
        };
        let (compute, memory) = ("compute_partition", "memory_partition");
        let devices = [
            with("0000:01:00.0", &[(compute, "cpx"), (memory, "nps4")]),
            with("0000:02:00.0", &[(compute, "cpx"), (memory, "nps1")]),
            with("0000:03:00.0", &[]),
        ];
        let of = |wanted: &[(&str, &[&str])]| {
            let texts = |globs: &[&str]| globs.iter().map(ToString::to_string).collect();
            let attribute = wanted.iter().map(|(name, globs)| ((*name).to_owned(), texts(globs)));
            let select = Select { attribute: attribute.collect(), ..Select::default() };
            ids_of(&devices, DeviceClass::Gpu, select)
        };
        let all = ["0000:01:00.0", "0000:02:00.0"];
        assert_eq!(of(&[(compute, &["cpx"]), (memory, &["nps4", "nps8"])]), all[..1]);
        assert_eq!(of(&[(memory, &["nps?"])]), all);
        assert_eq!(of(&[(memory, &["nps"])]), Vec::<String>::new());
    }

    #[test]
    fn a_vf_without_a_visible_link_has_the_link_type_of_its_pf() {
        let wanted =
            Select { link_type: vec!["infiniband".into()], vf: Some(true), ..Select::default() };
        assert_eq!(
            ids_of(&adapters(), DeviceClass::Nic, wanted),
            ["0000:af:00.1", "0000:af:00.2", "0000:af:00.3"]
        );
    }

    #[test]
    fn models_uuids_numa_nodes_and_groups_select() {
        let with = |address: &str, model: &str, uuid: &str, numa: u32, group: u32| {
            let mut gpu = (*gpu(address, 0x10de, None)).clone();
            gpu.attributes = [("model", model), ("uuid", uuid)].into_iter().collect();
            gpu.numa_nodes = vec![numa];
            gpu.pci.as_mut().unwrap().iommu_group = Some(group);
            Arc::new(gpu)
        };
        let devices = [
            with("0000:01:00.0", "NVIDIA H100 80GB HBM3", "GPU-a", 0, 5),
            with("0000:02:00.0", "NVIDIA A2", "GPU-b", 1, 6),
        ];
        let text = |text: &str| vec![text.to_owned()];
        let second = ["0000:02:00.0"];
        for wanted in [
            Select { model: text("NVIDIA A*"), ..Select::default() },
            Select { uuid: text("gpu-B"), ..Select::default() },
            Select { numa_node: vec![1, 7], ..Select::default() },
            Select { iommu_group: vec![6], ..Select::default() },
        ] {
            assert_eq!(ids_of(&devices, DeviceClass::Gpu, wanted), second);
        }
    }

    #[test]
    fn a_whole_with_parts_is_not_offered_and_a_mediated_device_only_by_type() {
        let part = |kind: &str, name: &str, more: &[(&'static str, &str)]| {
            let mut part = (*gpu("0000:01:00.0", 0x10de, None)).clone();
            part.key = format!("{}/{name}", part.key);
            part.id = crate::domain::DeviceId::new(name);
            part.attributes =
                more.iter().chain(&[("part", kind)]).map(|(name, value)| (*name, *value)).collect();
            Arc::new(part)
        };
        let mut whole = (*gpu("0000:01:00.0", 0x10de, None)).clone();
        whole.attributes.insert("parts", "mig");
        let devices = [
            Arc::new(whole),
            part("mig", "gi1-ci0", &[]),
            part(
                "mdev",
                "vgpu",
                &[("mdev_type", "nvidia-754"), ("mdev_type_name", "NVIDIA A2-4Q")],
            ),
            gpu("0000:02:00.0", 0x10de, None),
        ];
        let of = |wanted: Select| ids_of(&devices, DeviceClass::Gpu, wanted);
        assert_eq!(of(Select::default()), ["0000:02:00.0", "gi1-ci0"]);
        assert_eq!(of(Select { part: Some(true), ..Select::default() }), ["gi1-ci0"]);
        assert_eq!(of(Select { part: Some(false), ..Select::default() }), ["0000:02:00.0"]);
        for kind in ["nvidia-754", "NVIDIA A2-4Q"] {
            assert_eq!(of(Select { mdev_type: vec![kind.into()], ..Select::default() }), ["vgpu"]);
        }
    }

    #[test]
    fn a_device_that_the_contract_cannot_name_is_not_offered() {
        let mut instance = (*gpu("0000:01:00.0", 0x10de, None)).clone();
        instance.attributes.insert("part", "mig");
        let devices = [Arc::new(instance), gpu("0000:02:00.0", 0x10de, None)];
        let mut named = (*spec("nvidia.com/gpu", DeviceClass::Gpu, Select::default())).clone();
        named.contract = ContractKind::Nvidia.into();
        let selection = select(&devices, &BTreeMap::new(), &[Arc::new(named)]);
        assert_eq!(chosen(&selection), [("nvidia.com/gpu".into(), vec!["0000:02:00.0".into()])]);
        assert!(
            selection.warnings[0]
                .starts_with("nvidia.com/gpu: 0000:01:00.0 is not offered, because the name"),
            "{:?}",
            selection.warnings
        );
    }

    #[test]
    fn an_iommu_group_is_offered_once_and_its_blocker_is_named() {
        let guest = |address: &str| {
            let mut gpu = (*gpu(address, 0x10de, None)).clone();
            gpu.nodes = ["/dev/vfio/vfio", "/dev/vfio/33"].map(DeviceNode::at).into();
            gpu.attributes.insert("group_blocked_by", "0000:01:00.2 (xhci_hcd)");
            gpu.pci.as_mut().unwrap().iommu_group = Some(33);
            Arc::new(gpu)
        };
        let devices = [guest("0000:01:00.0"), guest("0000:01:00.1")];
        let selection = select(
            &devices,
            &BTreeMap::new(),
            &[spec("a.com/gpu", DeviceClass::Gpu, Select::default())],
        );
        assert_eq!(chosen(&selection)[0].1, ["0000:01:00.0"]);
        let warnings = [
            "a.com/gpu: 0000:01:00.1 is not offered separately, because IOMMU group 33 is already offered with 0000:01:00.0",
            "a.com/gpu: 0000:01:00.0 is unhealthy, because 0000:01:00.2 (xhci_hcd) blocks IOMMU group 33 for guests",
        ];
        assert_eq!(selection.warnings, warnings);
    }

    #[test]
    fn a_disk_is_offered_once_and_never_while_the_host_uses_it() {
        let disk = |address: &str, node: &str, in_use: Option<&str>| {
            let mut disk = device(address, address);
            disk.class = DeviceClass::Nvme;
            disk.nodes = vec![DeviceNode::at(node)];
            disk.attributes.extend(in_use.map(|by| ("in_use", by.to_owned())));
            Arc::new(disk)
        };
        let devices = [
            disk("0000:01:00.0", "/dev/nvme0n1", Some("mounted at /")),
            disk("0000:02:00.0", "/dev/nvme1n1", None),
            disk("0000:03:00.0", "/dev/nvme1n1", None),
        ];
        let selection = select(
            &devices,
            &BTreeMap::new(),
            &[spec("a.com/disk", DeviceClass::Nvme, Select::default())],
        );
        assert_eq!(chosen(&selection)[0].1, ["0000:02:00.0"]);
        let warnings = [
            "a.com/disk: 0000:01:00.0 is not offered, because the host uses it: mounted at /",
            "a.com/disk: 0000:03:00.0 is not offered separately, because /dev/nvme1n1 is already offered with 0000:02:00.0",
        ];
        assert_eq!(selection.warnings, warnings);
    }

    #[test]
    fn devices_that_the_host_may_use_are_offered_only_by_name() {
        let with = |address: &str, class: DeviceClass, attribute: (&'static str, &str)| {
            let mut device = device(address, address);
            device.class = class;
            device.nodes = vec![DeviceNode::at(format!("/dev/nvme{address}n1"))];
            device.attributes.insert(attribute.0, attribute.1);
            Arc::new(device)
        };
        let devices = [
            with("0000:01:00.0", DeviceClass::Nvme, ("member_of", "a ZFS pool")),
            with("0000:02:00.0", DeviceClass::Rdma, ("default_route", "ens1f0")),
            with("0000:03:00.0", DeviceClass::Nic, ("master", "ovs-system")),
            with("0000:04:00.0", DeviceClass::Nvme, ("model", "Amazon Elastic Block Store")),
            with("0000:05:00.0", DeviceClass::Nvme, ("model", "Amazon EC2 NVMe Instance Storage")),
        ];
        let offered = |class: DeviceClass, contract: Contract, address: Option<&str>| {
            let address = address.map(|address| address.parse().unwrap()).into_iter().collect();
            let mut spec =
                (*spec("a.com/x", class, Select { address, ..Select::default() })).clone();
            spec.contract = contract;
            let selection = select(&devices, &BTreeMap::new(), &[Arc::new(spec)]);
            (
                chosen(&selection).remove(0).1,
                selection.warnings.into_iter().next().unwrap_or_default(),
            )
        };
        let sriov = || Contract::Sriov(SriovOptions::default());
        let (local, why) = offered(DeviceClass::Nvme, Contract::Generic, None);
        assert_eq!(local, ["0000:05:00.0"], "a network volume may be meant for a pod");
        assert!(
            why.contains("0000:01:00.0 is not offered, because it is part of a ZFS pool"),
            "{why}"
        );
        let volume = "0000:04:00.0";
        assert_eq!(offered(DeviceClass::Nvme, Contract::Generic, Some(volume)).0, [volume]);
        let (none, why) = offered(DeviceClass::Rdma, sriov(), None);
        assert!(
            none.is_empty() && why.contains("because the host's default route uses ens1f0"),
            "{why}"
        );
        let (none, why) = offered(DeviceClass::Nic, Contract::Generic, None);
        assert!(
            none.is_empty() && why.contains("because its interface is part of ovs-system"),
            "{why}"
        );
        assert_eq!(offered(DeviceClass::Nic, Contract::Generic, Some("0000:03:00.0")).0.len(), 1);
        // A device that is selected by address is offered. Without a CNI plugin that moves the
        // interface, the host keeps its route.
        let disk = "0000:01:00.0";
        assert_eq!(offered(DeviceClass::Nvme, Contract::Generic, Some(disk)).0, [disk]);
        let adapter = "0000:02:00.0";
        assert_eq!(offered(DeviceClass::Rdma, sriov(), Some(adapter)).0, [adapter]);
        assert_eq!(offered(DeviceClass::Rdma, Contract::Generic, None).0, [adapter]);
    }

    #[test]
    fn a_pf_with_vfs_is_offered_only_in_a_pool() {
        let mut devices = adapters();
        let pf = Arc::make_mut(&mut devices[0]);
        pf.pci.as_mut().unwrap().virtfns = vec!["0000:3b:00.1".parse().unwrap()];
        let whole = || Select { vf: Some(false), ..Select::default() };
        assert_eq!(ids_of(&devices, DeviceClass::Nic, whole()), ["0000:af:00.0"]);
        let address = vec!["0000:3b:00.0".parse().unwrap()];
        assert_eq!(
            ids_of(&devices, DeviceClass::Nic, Select { address, ..Select::default() }),
            ["0000:3b:00.0"]
        );

        // A shared adapter next to its virtual functions: no container has it exclusively.
        for device in &mut devices {
            Arc::make_mut(device).class = DeviceClass::Rdma;
        }
        let mut pool = (*spec("a.com/pool", DeviceClass::Rdma, whole())).clone();
        (pool.sharing, pool.contract) = (Sharing::Pool(100), Contract::RdmaShared);
        let vfs =
            spec("a.com/vf", DeviceClass::Rdma, Select { vf: Some(true), ..Select::default() });
        let selection = select(&devices, &BTreeMap::new(), &[Arc::new(pool), vfs]);
        assert_eq!(chosen(&selection)[0].1, ["0000:3b:00.0", "0000:af:00.0"]);
    }

    #[test]
    fn a_node_of_a_function_is_not_offered_by_path_too_unless_shared() {
        let node = |path: &str| {
            let mut node = device("0000:00:00.0", path);
            (node.class, node.pci, node.key) = (DeviceClass::Char, None, format!("dev:{path}"));
            node.nodes = vec![DeviceNode::at(path)];
            Arc::new(node)
        };
        let mut two = [gpu("0000:01:00.0", 0x10de, None), gpu("0000:02:00.0", 0x10de, None)];
        Arc::make_mut(&mut two[1]).nodes =
            vec![DeviceNode::at("/dev/dri/renderD129"), DeviceNode::at("/dev/kfd")];
        Arc::make_mut(&mut two[0]).nodes.push(DeviceNode::at("/dev/kfd"));
        let nodes = ["/dev/dri/renderD129", "/dev/kfd", "/dev/fuse"].map(node);
        let devices: Vec<_> = two.into_iter().chain(nodes).collect();
        let mut path = (*char_spec("a.com/path", &[])).clone();
        let chars =
            devices[2..].iter().map(|device| (device.key.clone(), path.name.clone())).collect();
        let offered = |path: &ResourceSpec| {
            let selection = select(
                &devices,
                &chars,
                &[spec("a.com/gpu", DeviceClass::Gpu, Select::default()), Arc::new(path.clone())],
            );
            (chosen(&selection)[1].1.clone(), selection.warnings)
        };
        let (ids, warnings) = offered(&path);
        assert_eq!(ids, ["/dev/fuse", "/dev/kfd"]);
        assert_eq!(
            warnings,
            [
                "a.com/path: /dev/dri/renderD129 is not offered separately, because /dev/dri/renderD129 is already offered with 0000:02:00.0"
            ]
        );
        path.sharing = Sharing::Replicas(4);
        assert_eq!(offered(&path).0.len(), 3);
    }

    #[test]
    fn a_gpu_that_its_driver_excludes_is_not_offered() {
        let mut excluded = device("0000:01:00.0", "0000:01:00.0");
        (excluded.class, excluded.pci.as_mut().unwrap().driver) =
            (DeviceClass::Gpu, Some("nvidia".into()));
        excluded.attributes.insert("excluded", "true");
        let devices = [Arc::new(excluded), gpu("0000:02:00.0", 0x10de, None)];
        let spec = spec("a.com/gpu", DeviceClass::Gpu, Select::default());
        let selection = select(&devices, &BTreeMap::new(), std::slice::from_ref(&spec));
        assert_eq!(chosen(&selection)[0].1, ["0000:02:00.0"]);
        assert_eq!(
            selection.warnings,
            [
                "a.com/gpu: 0000:01:00.0 is not offered, because its driver is configured to exclude it"
            ]
        );
        let misses = near_misses(&devices, &selection.resource_of(), &spec);
        let misses: Vec<_> = misses
            .iter()
            .map(|miss| (miss.device.as_str(), miss.criterion, miss.found.as_deref()))
            .collect();
        assert_eq!(misses, [("0000:01:00.0", "driver", Some("excluded"))]);
    }

    #[test]
    fn an_accelerator_without_a_node_is_not_offered() {
        let accelerator = |address: &str, driver: &str, node: Option<&str>| {
            let mut accelerator = device(address, address);
            accelerator.class = DeviceClass::Accelerator;
            accelerator.pci.as_mut().unwrap().driver = Some(driver.into());
            accelerator.nodes.extend(node.map(DeviceNode::at));
            Arc::new(accelerator)
        };
        let devices = [
            accelerator("0000:01:00.0", "qat_4xxx", None),
            accelerator("0000:02:00.0", "intel_vpu", Some("/dev/accel/accel0")),
            accelerator("0000:03:00.0", "uio_pci_generic", Some("/dev/uio0")),
            accelerator("0000:04:00.0", "vfio-pci", Some("/dev/vfio/33")),
        ];
        let spec = spec("a.com/x", DeviceClass::Accelerator, Select::default());
        let selection = select(&devices, &BTreeMap::new(), std::slice::from_ref(&spec));
        assert_eq!(chosen(&selection)[0].1, ["0000:02:00.0", "0000:03:00.0", "0000:04:00.0"]);
        let why = "it has no known node in `/dev`; the class `char` can offer a node by its path";
        assert_eq!(
            selection.warnings,
            [format!("a.com/x: 0000:01:00.0 is not offered, because {why}")]
        );
        let misses = near_misses(&devices, &selection.resource_of(), &spec);
        let misses: Vec<_> = misses
            .iter()
            .map(|miss| (miss.device.as_str(), miss.criterion, miss.found.as_deref()))
            .collect();
        assert_eq!(misses, [("0000:01:00.0", "driver", Some("qat_4xxx"))]);
    }

    #[test]
    fn a_resource_without_a_match_stays_with_a_warning() {
        let mut excluding = (*spec("a.com/gpu", DeviceClass::Gpu, Select::default())).clone();
        excluding.exclude = Some(Select { vendor: vec![0x10de], ..Select::default() });
        let specs = [Arc::new(excluding), char_spec("a.com/tty", &["/dev/ttyS*"])];
        let selection = select(&[gpu("0000:01:00.0", 0x10de, None)], &BTreeMap::new(), &specs);
        assert_eq!(
            chosen(&selection),
            [("a.com/gpu".into(), vec![]), ("a.com/tty".into(), vec![])]
        );
        let near = "0000:01:00.0 would be offered if not for `exclude`: wanted not excluded, found excluded";
        assert_eq!(
            selection.warnings,
            [format!("a.com/gpu: no device of class gpu on this host matches; {near}")]
        );
        let other = spec(
            "a.com/other",
            DeviceClass::Gpu,
            Select { vendor: vec![1], device: vec![1], ..Select::default() },
        );
        let selection = select(&[gpu("0000:01:00.0", 0x10de, None)], &BTreeMap::new(), &[other]);
        assert_eq!(
            selection.warnings,
            ["a.com/other: no device of class gpu on this host matches"],
            "two criteria exclude it"
        );
    }

    #[test]
    fn a_split_whole_without_offered_parts_causes_a_warning() {
        let disk = |id: &str, attribute: (&'static str, &str)| {
            let mut disk = device("0000:01:00.0", id);
            (disk.class, disk.pci.as_mut().unwrap().driver) =
                (DeviceClass::Nvme, Some("nvme".into()));
            disk.attributes.insert(attribute.0, attribute.1);
            disk.nodes.push(DeviceNode::at(format!("/dev/{id}")));
            Arc::new(disk)
        };
        let devices = [
            disk("nvme0", ("parts", "namespaces")),
            disk("nvme0n1", ("part", "namespace")),
            disk("nvme0n2", ("part", "namespace")),
        ];
        let wholes = spec(
            "a.com/whole",
            DeviceClass::Nvme,
            Select { part: Some(false), ..Select::default() },
        );
        let parts =
            spec("a.com/part", DeviceClass::Nvme, Select { part: Some(true), ..Select::default() });
        let warnings =
            |specs: &[Arc<ResourceSpec>]| select(&devices, &BTreeMap::new(), specs).warnings;
        let cut = "it is split into parts (namespaces) and no resource offers them; `part = false` selects whole devices only";
        assert_eq!(
            warnings(std::slice::from_ref(&wholes))[0],
            format!("a.com/whole: nvme0 is not offered, because {cut}")
        );
        assert!(
            warnings(&[wholes, parts])
                .iter()
                .all(|warning| !warning.contains("is split into parts ("))
        );
    }
}
