//! The criteria of a resource: whether `class`, `select` and `exclude` match a device.

use crate::domain::{
    Device, DeviceClass, INTEGRATED_KEY, PciAddress, PciFunction, Pf, ResourceName, ResourceSpec,
    Select,
};
use crate::hardware::{nvidia, profiles, sf};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Whether any configuration can offer the device. These cannot be offered:
///
/// - a whole that is cut into parts;
/// - an FPGA function without a port, or an NVMe controller without a disk: their classes are used
///   through nodes;
/// - a device without a driver and without a node. A new function has no driver yet, nor the link
///   that marks it as a virtual function.
pub(super) fn is_usable(device: &Device) -> bool {
    let has_driver = device.pci.as_ref().is_none_or(|function| function.driver.is_some());
    let by_nodes = matches!(device.class, DeviceClass::Fpga | DeviceClass::Nvme) || !has_driver;
    device.attribute("parts").is_none() && !(by_nodes && device.nodes.is_empty())
}

/// Some parts are in a resource only if it asks for them by id or by another key. Mediated devices
/// are for guests: their type or UUID is such a key. A scalable function is selected by the ids of
/// the function that it is on, so a resource for that function must not get it: `part` is its key.
pub(super) fn selects_part(select: &Select, device: &Device) -> bool {
    let is_asked = match device.attribute("part") {
        Some("mdev") => !select.mdev_type.is_empty() || !select.uuid.is_empty(),
        Some(sf::KIND) => select.part == Some(true),
        _ => true,
    };
    is_asked || select.id.contains(&device.id)
}

/// The vendor of a device. The GPU of a Tegra system counts as one of NVIDIA's driver, so that a
/// resource selects the GPUs of all nodes.
pub(super) fn vendor(device: &Device) -> Option<u16> {
    let of_function = device.pci.as_ref().and_then(|function| function.vendor);
    of_function.or_else(|| is_integrated(device).then_some(nvidia::VENDOR))
}

/// The driver of a device; that of the GPU of a Tegra system is NVIDIA's.
pub(super) fn driver(device: &Device) -> Option<&str> {
    let of_function = device.pci.as_ref().and_then(|function| function.driver.as_deref());
    of_function.or_else(|| is_integrated(device).then_some(nvidia::DRIVER))
}

/// Whether a device is a virtual function; `None` for a node of `/dev`.
pub(super) fn is_vf(device: &Device) -> Option<bool> {
    let of_function = device.pci.as_ref().map(|function| function.is_vf());
    of_function.or_else(|| is_integrated(device).then_some(false))
}

fn is_integrated(device: &Device) -> bool {
    device.key == INTEGRATED_KEY
}

/// The devices by address: a device may be selected by attributes of another one.
pub(super) struct Host<'a>(BTreeMap<PciAddress, &'a Device>);

impl<'a> Host<'a> {
    pub(super) fn of(devices: &'a [Arc<Device>]) -> Self {
        let whole = devices.iter().filter(|device| device.attribute("part").is_none());
        Host(whole.filter_map(|device| Some((device.pci.as_ref()?.address, &**device))).collect())
    }

    /// Whether a resource would offer a device if it were the only resource. `named` is the
    /// resource of a `/dev` node.
    pub(super) fn offers(
        &self,
        spec: &ResourceSpec,
        device: &Device,
        named: Option<&ResourceName>,
    ) -> bool {
        let of_class = match spec.class {
            DeviceClass::Char => named == Some(&spec.name),
            _ => spec.takes(device.class) && is_usable(device),
        };
        let is_selected =
            |select: &Select| selects_part(select, device) && self.matches(select, device);
        of_class && spec.selections().any(is_selected) && !self.excludes(spec, device)
    }

    pub(super) fn excludes(&self, spec: &ResourceSpec, device: &Device) -> bool {
        spec.exclude.as_ref().is_some_and(|exclude| self.matches(exclude, device))
    }

    /// Whether each list that is not empty contains the device's value. An unknown value matches no
    /// list.
    pub(super) fn matches(&self, select: &Select, device: &Device) -> bool {
        fn holds<T: PartialEq>(list: &[T], value: Option<&T>) -> bool {
            list.is_empty() || value.is_some_and(|value| list.contains(value))
        }
        let has_text = |list: &[String], names: &[&str], is: &dyn Fn(&str, &str) -> bool| {
            let mut values = names.iter().filter_map(|name| device.attribute(name));
            list.is_empty() || values.any(|value| list.iter().any(|wanted| is(wanted, value)))
        };
        let function = device.pci.as_ref();
        let driver = driver(device);
        holds(&select.vendor, vendor(device).as_ref())
            && holds(&select.device, function.and_then(|function| function.device.as_ref()))
            && (select.driver.is_empty()
                || select.driver.iter().any(|wanted| Some(wanted.as_str()) == driver))
            && holds(&select.address, function.map(|function| &function.address))
            && holds(&select.id, Some(&device.id))
            && select.vf.is_none_or(|vf| is_vf(device) == Some(vf))
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
            && select.attribute.iter().all(|(name, globs)| {
                has_text(globs, &[name], &|glob, value| {
                    glob::Pattern::new(glob).is_ok_and(|glob| glob.matches(value))
                })
            })
    }

    /// Whether it is one of the virtual or scalable functions that `pf` selects.
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
    pub(super) fn link_type(&self, device: &Device) -> Option<String> {
        let of_pf = || self.0.get(&device.pci.as_ref()?.physfn?)?.attribute("link_type");
        device.attribute("link_type").or_else(of_pf).map(str::to_owned)
    }
}
