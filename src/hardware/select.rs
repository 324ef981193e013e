//! Selection: which resource offers which device.

mod near;

pub use near::{NearMiss, Nearest, near_misses};

use super::profiles;
use crate::contract;
use crate::domain::{
    ContractKind, Device, DeviceClass, Object, Objects, PciAddress, PciFunction, Pf, ResourceName,
    ResourceSpec, Select, Sharing,
};
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
            spec.name, spec.class
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
            let remedy = if parts == profiles::MIG {
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

/// The resource of each selected device, by the device's key.
type Chosen<'a> = BTreeMap<&'a str, &'a ResourceSpec>;

/// Why a device is withheld although a resource selects it.
struct Exclusion {
    /// The reason, as the end of a sentence.
    why: String,
    /// The criterion, as in [`NearMiss`].
    criterion: &'static str,
    wanted: &'static str,
    found: String,
}

/// Why a selected device must not be offered; `None` where it may be.
///
/// - A disk that the host uses: a container would get the host's files.
/// - A GPU that its driver was configured to exclude: no process can open it.
/// - An accelerator without a node: a container would get nothing.
/// - A member of a pool that the host may use, unless the resource names it by address or id.
/// - An adapter with the host's default route, if a CNI plugin would move its interface into the
///   pod, unless the resource names it.
fn exclusion(spec: &ResourceSpec, device: &Device) -> Option<Exclusion> {
    let host = |why: String, found: &str| Exclusion {
        why,
        criterion: "host",
        wanted: "not in use by the host",
        found: found.to_owned(),
    };
    if let Some(by) = device.attribute("in_use") {
        return Some(host(format!("the host uses it: {by}"), by));
    }
    if device.attribute("excluded").is_some() {
        let why = "its driver is configured to exclude it".to_owned();
        return Some(Exclusion {
            why,
            criterion: "driver",
            wanted: "not excluded by its driver",
            found: "excluded".into(),
        });
    }
    if lacks_node(device) {
        let why = "it has no known node in `/dev`; the class `char` can offer a node by its path"
            .to_owned();
        let found =
            device.pci.as_ref().and_then(|function| function.driver.clone()).unwrap_or_default();
        return Some(Exclusion {
            why,
            criterion: "driver",
            wanted: "a driver that creates a node in /dev",
            found,
        });
    }
    if is_named_by(spec, device) {
        return None;
    }
    if let Some(pool) = device.attribute("member_of") {
        let why = format!(
            "it is part of {pool}, which the host may use; to offer it anyway, select it by address or id"
        );
        return Some(host(why, &format!("part of {pool}")));
    }
    let way = device.attribute("default_route").filter(|_| moves_interfaces(spec))?;
    let why = format!(
        "the host's default route uses {way}; to offer it anyway, select it by address or id"
    );
    Some(host(why, &format!("default route through {way}")))
}

/// Whether a CNI plugin moves the interfaces of this resource into the pod.
fn moves_interfaces(spec: &ResourceSpec) -> bool {
    spec.class == DeviceClass::Nic || spec.contract.kind() == ContractKind::Sriov
}

/// Whether a resource selects this device by id or address.
fn is_named_by(spec: &ResourceSpec, device: &Device) -> bool {
    let address = device.pci.as_ref().map(|function| &function.address);
    spec.select.id.contains(&device.id)
        || address.is_some_and(|address| spec.select.address.contains(address))
}

/// Withholds the devices of each resource with `uniform` that are of several kinds.
fn withhold_mixtures(devices: &[Arc<Device>], chosen: &mut Chosen<'_>, warnings: &mut Vec<String>) {
    let uniform: BTreeMap<&ResourceName, &ResourceSpec> = chosen
        .values()
        .filter(|spec| spec.select.uniform)
        .map(|spec| (&spec.name, *spec))
        .collect();
    for (name, spec) in uniform {
        let is_its = |device: &&Arc<Device>| {
            chosen.get(device.key.as_str()).is_some_and(|chosen| chosen.name == *name)
        };
        let its = devices.iter().filter(is_its).map(|device| &**device);
        if let Some(mixture) = profiles::mixture(its) {
            warnings.push(format!(
                "{name}: no device is offered, because `uniform` requires devices of one kind, \
                 and these are of several: {mixture}"
            ));
            chosen.retain(|_, of| of.name != spec.name);
        }
    }
}

fn withhold_excluded(devices: &[Arc<Device>], chosen: &mut Chosen<'_>, warnings: &mut Vec<String>) {
    for device in devices {
        let exclusion = chosen
            .get(device.key.as_str())
            .and_then(|spec| Some((&spec.name, exclusion(spec, device)?.why)));
        if let Some((name, why)) = exclusion {
            warnings.push(format!("{name}: {} is not offered, because {why}", device.id));
            chosen.remove(device.key.as_str());
        }
    }
}

/// Withholds devices that the contract cannot name to a container.
fn withhold_unanswerable(
    devices: &[Arc<Device>],
    chosen: &mut Chosen<'_>,
    warnings: &mut Vec<String>,
) {
    for device in devices {
        let why = chosen
            .get(device.key.as_str())
            .and_then(|spec| Some((spec.name.clone(), contract::unanswerable(spec, device)?)));
        if let Some((name, why)) = why {
            chosen.remove(device.key.as_str());
            warnings.push(format!("{name}: {} is not offered, because {why}", device.id));
        }
    }
}

/// Offers an object once where two devices lead to it:
///
/// - an IOMMU group, which a guest gets as a whole;
/// - a disk that several controllers reach, or that is also named by a partition;
/// - a node of `/dev` that a PCI function also has, where both resources are exclusive.
fn withhold_duplicate_paths(
    devices: &[Arc<Device>],
    chosen: &mut Chosen<'_>,
    warnings: &mut Vec<String>,
) {
    let mut given: Objects<usize> = Objects::default();
    // A second path to a disk comes after the device that has the disk's id.
    let (firsts, seconds): (Vec<_>, Vec<_>) = devices
        .iter()
        .enumerate()
        .partition(|(_, device)| device.attribute("second_path").is_none());
    for (index, device) in firsts.into_iter().chain(seconds) {
        let Some(spec) = chosen.get(device.key.as_str()) else { continue };
        let objects = device.objects();
        let may_stay = |other: &usize| {
            let other = chosen.get(devices[*other].key.as_str());
            let is_node = device.class == DeviceClass::Char;
            is_node && !(spec.is_exclusive() && other.is_some_and(|other| other.is_exclusive()))
        };
        if let Some(first) = given.conflict(&objects, may_stay).map(|first| &devices[*first]) {
            let object = common(&objects, first);
            warnings.push(format!(
                "{}: {} is not offered separately, because {object} is already offered with {}",
                spec.name, device.id, first.id
            ));
            chosen.remove(device.key.as_str());
        } else {
            given.hold(&index, objects);
        }
    }
}

/// A readable name for the object that a device shares with another one.
fn common(objects: &[Object], other: &Device) -> String {
    let mut of_other = Objects::default();
    of_other.hold(&(), other.objects());
    let shared = objects
        .iter()
        .filter(|object| of_other.conflict([*object], |()| false).is_some())
        .map(Object::as_str);
    let mut named: Vec<&str> = shared.collect();
    // An IOMMU group or a node of `/dev` is the most readable name.
    named.sort_by_key(|text| (!text.starts_with("iommu_group:"), !text.starts_with("node:")));
    let text = named.first().copied().unwrap_or_default();
    match text.split_once(':') {
        Some(("iommu_group", group)) => format!("IOMMU group {group}"),
        Some(("node", path)) => path.to_owned(),
        Some(("disk", id)) => format!("the disk {id}"),
        _ => text.to_owned(),
    }
}

/// Withholds physical functions whose hardware is offered through virtual functions: offering both
/// would grant the same hardware twice.
///
/// If a CNI plugin would move its interface into a pod, a function with virtual functions is
/// withheld even if no resource offers these.
///
/// Exceptions: the resource names the function by address or id, or the resource is a pool.
fn withhold_shared_parents(
    devices: &[Arc<Device>],
    chosen: &mut Chosen<'_>,
    warnings: &mut Vec<String>,
) {
    let vfs = devices.iter().filter(|device| chosen.contains_key(device.key.as_str()));
    let parents: BTreeSet<_> = vfs.filter_map(|device| device.pci.as_ref()?.physfn).collect();
    for device in devices {
        let (Some(function), Some(spec)) = (&device.pci, chosen.get(device.key.as_str())) else {
            continue;
        };
        if is_named_by(spec, device) || matches!(spec.sharing, Sharing::Pool(_)) {
            continue;
        }
        let why = if parents.contains(&function.address) {
            "its virtual functions are offered"
        } else if moves_interfaces(spec) && !function.virtfns.is_empty() {
            "it has virtual functions; to offer it anyway, select it by address or id"
        } else {
            continue;
        };
        warnings.push(format!("{}: {} is not offered, because {why}", spec.name, function.address));
        chosen.remove(device.key.as_str());
    }
}

/// Whether any configuration can offer the device. These cannot be offered:
///
/// - a whole that is cut into parts;
/// - an FPGA function without a port, or an NVMe controller without a disk: their classes are used
///   through nodes;
/// - a device without a driver and without a node. A new function has no driver yet, nor the link
///   that marks it as a virtual function.
fn is_usable(device: &Device) -> bool {
    let has_driver = device.pci.as_ref().is_none_or(|function| function.driver.is_some());
    let by_nodes = matches!(device.class, DeviceClass::Fpga | DeviceClass::Nvme) || !has_driver;
    device.attribute("parts").is_none() && !(by_nodes && device.nodes.is_empty())
}

/// Whether it is an accelerator without a node, which no container could use. Its PCI class does
/// not show how it is used, and its driver may provide no node.
fn lacks_node(device: &Device) -> bool {
    device.class == DeviceClass::Accelerator && device.nodes.is_empty()
}

/// Mediated devices are for guests: a resource gets them only if it names their type, UUID or id.
fn selects_mdev(select: &Select, device: &Device) -> bool {
    let is_named =
        !select.mdev_type.is_empty() || !select.uuid.is_empty() || select.id.contains(&device.id);
    device.attribute("part") != Some("mdev") || is_named
}

/// The devices by address: a device may be selected by attributes of another one.
struct Host<'a>(BTreeMap<PciAddress, &'a Device>);

impl<'a> Host<'a> {
    fn of(devices: &'a [Arc<Device>]) -> Self {
        let whole = devices.iter().filter(|device| device.attribute("part").is_none());
        Host(whole.filter_map(|device| Some((device.pci.as_ref()?.address, &**device))).collect())
    }

    /// Whether a resource would offer a device if it were the only resource. `named` is the
    /// resource of a `/dev` node.
    fn offers(&self, spec: &ResourceSpec, device: &Device, named: Option<&ResourceName>) -> bool {
        let of_class = match spec.class {
            DeviceClass::Char => named == Some(&spec.name),
            class => {
                device.class == class && is_usable(device) && selects_mdev(&spec.select, device)
            }
        };
        of_class && self.matches(&spec.select, device) && !self.excludes(spec, device)
    }

    fn excludes(&self, spec: &ResourceSpec, device: &Device) -> bool {
        spec.exclude.as_ref().is_some_and(|exclude| self.matches(exclude, device))
    }

    /// Whether each list that is not empty contains the device's value. An unknown value matches no
    /// list.
    fn matches(&self, select: &Select, device: &Device) -> bool {
        fn holds<T: PartialEq>(list: &[T], value: Option<&T>) -> bool {
            list.is_empty() || value.is_some_and(|value| list.contains(value))
        }
        let has_text = |list: &[String], names: &[&str], is: &dyn Fn(&str, &str) -> bool| {
            let mut values = names.iter().filter_map(|name| device.attribute(name));
            list.is_empty() || values.any(|value| list.iter().any(|wanted| is(wanted, value)))
        };
        let function = device.pci.as_ref();
        holds(&select.vendor, function.and_then(|function| function.vendor.as_ref()))
            && holds(&select.device, function.and_then(|function| function.device.as_ref()))
            && holds(&select.driver, function.and_then(|function| function.driver.as_ref()))
            && holds(&select.address, function.map(|function| &function.address))
            && holds(&select.id, Some(&device.id))
            && select.vf.is_none_or(|vf| function.is_some_and(|function| function.is_vf() == vf))
            && select.part.is_none_or(|part| device.attribute("part").is_some() == part)
            && (select.pf.is_empty()
                || function.is_some_and(|function| self.is_vf_of(select, function)))
            && (select.interface.is_empty()
                || function.is_some_and(|function| {
                    function.net.iter().any(|name| select.interface.contains(name))
                }))
            && holds(&select.link_type, self.link_type(device).as_ref())
            && has_text(&select.model, &["model"], &|glob, model| {
                glob::Pattern::new(glob).is_ok_and(|glob| glob.matches(model))
            })
            && (select.mig_profile.is_empty()
                || device
                    .attribute("mig_profile")
                    .is_some_and(|profile| profiles::is_selected(select, profile)))
            && has_text(&select.uuid, &["uuid", "mdev_uuid"], &str::eq_ignore_ascii_case)
            && has_text(&select.mdev_type, &["mdev_type", "mdev_type_name"], &|wanted, kind| {
                wanted == kind
            })
            && (select.numa_node.is_empty()
                || device.numa_nodes.iter().any(|node| select.numa_node.contains(node)))
            && holds(&select.iommu_group, device.iommu_group().as_ref())
    }

    /// Whether it is one of the virtual functions that `pf` selects.
    fn is_vf_of(&self, select: &Select, function: &PciFunction) -> bool {
        let Some(address) = function.physfn else { return false };
        let interfaces = self
            .0
            .get(&address)
            .and_then(|pf| pf.pci.as_ref())
            .map(|pf| pf.net.as_slice())
            .unwrap_or_default();
        let is_meant = |pf: &Pf| match pf {
            Pf::Interface(name) => interfaces.contains(name),
            Pf::Address(named) => *named == address,
        };
        select.pf.iter().any(|wanted| is_meant(&wanted.pf) && wanted.has(function.vf_index))
    }

    /// The link type of the device, else that of its physical function: the interface of a virtual
    /// function may be in a pod.
    fn link_type(&self, device: &Device) -> Option<String> {
        let of_pf = || self.0.get(&device.pci.as_ref()?.physfn?)?.attribute("link_type");
        device.attribute("link_type").or_else(of_pf).map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, device, spec};
    use super::*;
    use crate::domain::{Contract, DeviceNode, SriovOptions};

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
        let (none, why) = offered(DeviceClass::Nvme, Contract::Generic, None);
        assert!(
            none.is_empty()
                && why.contains("0000:01:00.0 is not offered, because it is part of a ZFS pool"),
            "{why}"
        );
        let (none, why) = offered(DeviceClass::Rdma, sriov(), None);
        assert!(
            none.is_empty() && why.contains("because the host's default route uses ens1f0"),
            "{why}"
        );
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
