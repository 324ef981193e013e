//! Which device is offered by which resource.

use crate::domain::{Device, DeviceClass, ResourceName, ResourceSpec, Select};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The devices of every configured resource, as they are found now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Every resource, in the order of its devices' ids; one that nothing matches has none.
    pub resources: BTreeMap<ResourceName, Vec<Arc<Device>>>,
    /// What an operator should know, one sentence each.
    pub warnings: Vec<String>,
}

impl Selection {
    /// The resource of each selected device, by the device's key.
    #[must_use]
    pub fn resource_of(&self) -> BTreeMap<&str, &ResourceName> {
        self.resources.iter().flat_map(|(name, devices)| devices.iter().map(move |device| (device.key.as_str(), name))).collect()
    }
}

/// Puts every device into the first resource that selects it, and into no other.
///
/// `chars` says which resource each `/dev` node belongs to, by key: its path was matched when it was found.
#[must_use]
pub fn select(devices: &[Arc<Device>], chars: &BTreeMap<String, ResourceName>, specs: &[Arc<ResourceSpec>]) -> Selection {
    let mut selection = Selection::default();
    let mut chosen: BTreeMap<&str, &ResourceSpec> = BTreeMap::new();
    for device in devices {
        if let Some(spec) = specs.iter().find(|spec| offers(spec, device, chars)) {
            chosen.insert(&device.key, spec);
        }
    }
    withhold_shared_parents(devices, &mut chosen, &mut selection.warnings);
    for spec in specs {
        let mine = devices.iter().filter(|device| chosen.get(device.key.as_str()).is_some_and(|of| of.name == spec.name));
        let mut mine: Vec<Arc<Device>> = mine.cloned().collect();
        mine.sort_by(|a, b| a.id.cmp(&b.id));
        // A glob that matches nothing was reported with its text already.
        if mine.is_empty() && spec.class != DeviceClass::Char {
            selection.warnings.push(format!("{}: no device of class {} on this host matches", spec.name, spec.class));
        }
        selection.resources.entry(spec.name.clone()).or_insert(mine);
    }
    selection
}

/// A physical function is shared by its virtual functions: offered beside them, it would hand out the same hardware
/// twice. It is left out, unless its resource names it by address or id.
fn withhold_shared_parents(devices: &[Arc<Device>], chosen: &mut BTreeMap<&str, &ResourceSpec>, warnings: &mut Vec<String>) {
    let vfs = devices.iter().filter(|device| chosen.contains_key(device.key.as_str()));
    let parents: BTreeSet<_> = vfs.filter_map(|device| device.pci.as_ref()?.physfn).collect();
    for device in devices {
        let Some(address) = device.pci.as_ref().map(|function| function.address).filter(|address| parents.contains(address)) else {
            continue;
        };
        let named = |spec: &ResourceSpec| spec.select.address.contains(&address) || spec.select.id.contains(&device.id);
        if let Some(spec) = chosen.get(device.key.as_str()).filter(|spec| !named(spec)) {
            warnings.push(format!("{}: {address} is not offered, because its virtual functions are", spec.name));
            chosen.remove(device.key.as_str());
        }
    }
}

/// Whether a resource offers a device, were it the only resource.
fn offers(spec: &ResourceSpec, device: &Device, chars: &BTreeMap<String, ResourceName>) -> bool {
    let of_class = match spec.class {
        DeviceClass::Char => chars.get(&device.key) == Some(&spec.name),
        class => device.class == class && is_usable(device),
    };
    of_class && matches(&spec.select, device) && !spec.exclude.as_ref().is_some_and(|exclude| matches(exclude, device))
}

/// What no configuration can offer: the functions of an FPGA card that have no port, and a GPU that is cut into MIG
/// instances, whose whole can not be used any more.
fn is_usable(device: &Device) -> bool {
    let without_port = device.class == DeviceClass::Fpga && device.nodes.is_empty();
    !without_port && !device.attributes.contains_key("mig")
}

/// Every list that is not empty holds one match. What is unknown of a device matches no list.
fn matches(select: &Select, device: &Device) -> bool {
    fn holds<T: PartialEq>(list: &[T], value: Option<&T>) -> bool {
        list.is_empty() || value.is_some_and(|value| list.contains(value))
    }
    let function = device.pci.as_ref();
    holds(&select.vendor, function.and_then(|function| function.vendor.as_ref()))
        && holds(&select.device, function.and_then(|function| function.device.as_ref()))
        && holds(&select.driver, function.and_then(|function| function.driver.as_ref()))
        && holds(&select.address, function.map(|function| &function.address))
        && holds(&select.id, Some(&device.id))
        && select.vf.is_none_or(|vf| function.is_some_and(|function| function.is_vf() == vf))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{char_spec, device, spec};
    use super::*;

    fn gpu(address: &str, vendor: u16, physfn: Option<&str>) -> Arc<Device> {
        let mut gpu = device(address, address);
        let function = gpu.pci.as_mut().unwrap();
        function.vendor = Some(vendor);
        function.physfn = physfn.map(|pf| pf.parse().unwrap());
        Arc::new(gpu)
    }

    fn chosen(selection: &Selection) -> Vec<(String, Vec<String>)> {
        let ids = |devices: &Vec<Arc<Device>>| devices.iter().map(|device| device.id.to_string()).collect();
        selection.resources.iter().map(|(name, devices)| (name.to_string(), ids(devices))).collect()
    }

    #[test]
    fn the_first_resource_that_matches_has_the_device() {
        let devices = [gpu("0000:01:00.0", 0x10de, None), gpu("0000:02:00.0", 0x1002, None)];
        let first = spec("a.com/first", DeviceClass::Gpu, Select { vendor: vec![0x1002], ..Select::default() });
        let second = spec("a.com/second", DeviceClass::Gpu, Select::default());
        let selection = select(&devices, &BTreeMap::new(), &[first, second]);
        let expected = [("a.com/first".into(), vec!["0000:02:00.0".into()]), ("a.com/second".into(), vec!["0000:01:00.0".into()])];
        assert_eq!(chosen(&selection), expected);
        assert!(selection.warnings.is_empty());
    }

    #[test]
    fn a_parent_is_withheld_while_its_virtual_functions_are_offered_unless_it_is_named() {
        let devices = [gpu("0000:01:00.0", 0x10de, None), gpu("0000:01:00.4", 0x10de, Some("0000:01:00.0"))];
        let any = spec("a.com/gpu", DeviceClass::Gpu, Select::default());
        let selection = select(&devices, &BTreeMap::new(), &[any]);
        assert_eq!(chosen(&selection), [("a.com/gpu".into(), vec!["0000:01:00.4".into()])]);
        assert_eq!(selection.warnings, ["a.com/gpu: 0000:01:00.0 is not offered, because its virtual functions are"]);

        let whole = spec("a.com/gpu", DeviceClass::Gpu, Select { vf: Some(false), ..Select::default() });
        let selection = select(&devices, &BTreeMap::new(), &[whole]);
        assert_eq!(chosen(&selection), [("a.com/gpu".into(), vec!["0000:01:00.0".into()])]);

        let address = devices.iter().map(|device| device.pci.as_ref().unwrap().address).collect();
        let named = spec("a.com/gpu", DeviceClass::Gpu, Select { address, ..Select::default() });
        assert_eq!(select(&devices, &BTreeMap::new(), &[named]).resources.values().next().unwrap().len(), 2);
    }

    #[test]
    fn a_resource_without_a_match_stays_with_a_warning() {
        let mut excluding = (*spec("a.com/gpu", DeviceClass::Gpu, Select::default())).clone();
        excluding.exclude = Some(Select { vendor: vec![0x10de], ..Select::default() });
        let specs = [Arc::new(excluding), char_spec("a.com/tty", &["/dev/ttyS*"])];
        let selection = select(&[gpu("0000:01:00.0", 0x10de, None)], &BTreeMap::new(), &specs);
        assert_eq!(chosen(&selection), [("a.com/gpu".into(), vec![]), ("a.com/tty".into(), vec![])]);
        assert_eq!(selection.warnings, ["a.com/gpu: no device of class gpu on this host matches"]);
    }
}
