//! Exclusions: devices that a resource selects and that must not be offered all the same.

use crate::contract;
use crate::domain::{
    ContractKind, Device, DeviceClass, Object, Objects, PciAddress, ResourceName, ResourceSpec,
    Sharing,
};
use crate::hardware::{profiles, routes};
use crate::host::{HostRoot, ReadFailure};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The models of network volumes. Local disks of these clouds have other ones.
const NETWORK_VOLUMES: [&str; 4] = [
    "Amazon Elastic Block Store",
    "nvme_card-pd",
    "MSFT NVMe Accelerator v1.0",
    "Alibaba Cloud Elastic Block Storage",
];

/// The resource of each selected device, by the device's key.
pub(super) type Chosen<'a> = BTreeMap<&'a str, &'a ResourceSpec>;

/// Why a device is withheld although a resource selects it.
pub(super) struct Exclusion {
    /// The reason, as the end of a sentence.
    pub(super) why: String,
    /// The criterion, as in [`NearMiss`](super::near::NearMiss).
    pub(super) criterion: &'static str,
    pub(super) wanted: &'static str,
    pub(super) found: String,
}

/// Why a selected device must not be offered; `None` where it may be.
///
/// - A disk that the host uses: a container would get the host's files.
/// - A GPU that its driver was configured to exclude: no process can open it.
/// - An accelerator without a node, or a function of no known class: a container would get nothing.
/// - A member of a pool that the host may use, unless the resource names it by address or id.
/// - A network volume of a cloud, which the kubelet may be about to mount, unless the resource
///   names it so or by its model.
/// - An adapter with the host's default route, or in a bond, a bridge or a switch, if a CNI plugin
///   would move its interface into the pod, unless the resource names it.
pub(super) fn exclusion(spec: &ResourceSpec, device: &Device) -> Option<Exclusion> {
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
    if lacks_node(spec, device) {
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
    let unless_named = |why: &str, found: &str| {
        host(format!("{why}; to offer it anyway, select it by {}", naming(device)), found)
    };
    if let Some(pool) = device.attribute("member_of") {
        let why = format!("it is part of {pool}, which the host may use");
        return Some(unless_named(&why, &format!("part of {pool}")));
    }
    let volume = device.attribute("model").filter(|_| device.class == DeviceClass::Nvme);
    if let Some(model) = volume.filter(|model| NETWORK_VOLUMES.contains(model))
        && spec.selections().all(|select| select.model.is_empty())
    {
        let why = format!(
            "it is a network volume ({model}), which may be meant for a pod; to offer it anyway, \
             select it by model, address or id"
        );
        return Some(host(why, model));
    }
    if !moves_interfaces(spec) {
        return None;
    }
    if let Some(way) = device.attribute("default_route") {
        let why = format!("the host's default route uses {way}");
        return Some(unless_named(&why, &format!("default route through {way}")));
    }
    let master = device.attribute("master")?;
    let part = format!("part of {master}");
    Some(unless_named(&format!("its interface is {part}"), &part))
}

/// How the host uses the interface of a device of this resource, which a CNI plugin would move into
/// a pod. A route sends no event, so an Allocate checks this again. `None` for a device that the
/// resource names.
///
/// # Errors
/// When that cannot be read.
pub fn uplink(
    root: &HostRoot,
    spec: &ResourceSpec,
    device: &Device,
) -> Result<Option<String>, ReadFailure> {
    let interfaces = device.pci.as_deref().map(|function| &function.net[..]).unwrap_or_default();
    if interfaces.is_empty() || !moves_interfaces(spec) || is_named_by(spec, device) {
        return Ok(None);
    }
    routes::use_of(root, interfaces)
}

/// Whether a CNI plugin moves the interfaces of this resource into the pod.
fn moves_interfaces(spec: &ResourceSpec) -> bool {
    spec.class == DeviceClass::Nic || spec.contract.kind() == ContractKind::Sriov
}

/// The address that names this device alone. That of a scalable function is its PCI function's.
fn own_address(device: &Device) -> Option<PciAddress> {
    let function = device.pci.as_ref().filter(|function| !function.is_scalable());
    function.map(|function| function.address)
}

/// The selectors that name one device.
fn naming(device: &Device) -> &'static str {
    if own_address(device).is_some() { "address or id" } else { "id" }
}

/// Whether a resource selects this device by id or address.
fn is_named_by(spec: &ResourceSpec, device: &Device) -> bool {
    let address = own_address(device);
    spec.selections().any(|select| {
        select.id.contains(&device.id)
            || address.is_some_and(|address| select.address.contains(&address))
    })
}

/// Withholds the devices of each resource with `uniform` that are of several kinds.
pub(super) fn withhold_mixtures(
    devices: &[Arc<Device>],
    chosen: &mut Chosen<'_>,
    warnings: &mut Vec<String>,
) {
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

pub(super) fn withhold_excluded(
    devices: &[Arc<Device>],
    chosen: &mut Chosen<'_>,
    warnings: &mut Vec<String>,
) {
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
pub(super) fn withhold_unanswerable(
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
pub(super) fn withhold_duplicate_paths(
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

/// Withholds physical functions whose hardware is offered through virtual or scalable functions:
/// offering both would grant the same hardware twice.
///
/// If a CNI plugin would move its interface into a pod, a function with virtual functions is
/// withheld even if no resource offers these.
///
/// Exceptions: the resource names the function by address or id, or the resource is a pool.
pub(super) fn withhold_shared_parents(
    devices: &[Arc<Device>],
    chosen: &mut Chosen<'_>,
    warnings: &mut Vec<String>,
) {
    let offered = devices.iter().filter(|device| chosen.contains_key(device.key.as_str()));
    let functions = offered.filter_map(|device| device.pci.as_ref());
    let parents: BTreeMap<_, _> =
        functions.filter_map(|function| Some((function.physfn?, function.is_scalable()))).collect();
    for device in devices {
        let (Some(function), Some(spec)) = (&device.pci, chosen.get(device.key.as_str())) else {
            continue;
        };
        let is_pool = matches!(spec.sharing, Sharing::Pool(_));
        if function.is_scalable() || is_named_by(spec, device) || is_pool {
            continue;
        }
        let why = if let Some(is_scalable) = parents.get(&function.address) {
            if *is_scalable {
                "its scalable functions are offered; to offer it anyway, select it by address or id"
            } else {
                "its virtual functions are offered"
            }
        } else if moves_interfaces(spec) && !function.virtfns.is_empty() {
            "it has virtual functions; to offer it anyway, select it by address or id"
        } else {
            continue;
        };
        warnings.push(format!("{}: {} is not offered, because {why}", spec.name, function.address));
        chosen.remove(device.key.as_str());
    }
}

/// Whether it is an accelerator, or a function of no known class, that no container could use: it
/// has no node, and the configuration adds none. Its PCI class does not show how it is used, and
/// its driver may provide no node.
fn lacks_node(spec: &ResourceSpec, device: &Device) -> bool {
    matches!(device.class, DeviceClass::Accelerator | DeviceClass::Other)
        && device.nodes.is_empty()
        && spec.nodes.is_empty()
}
