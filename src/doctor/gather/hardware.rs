//! The resources, with the devices of this host for each: one scan as in `holdfast discover`,
//! without NVML.

use super::super::{Facts, Resource};
use super::{AddFacts, ReaderInput};
use crate::domain::{ContractKind, Device, ResourceSpec, requests_names};
use crate::hardware::{self, Discovery, near_misses};
use crate::host::HostRoot;
use crate::store;
use std::sync::Arc;

const NVIDIA: u16 = 0x10de;

/// An unreadable folder is no evidence.
pub(super) fn mps_programs(input: &ReaderInput) -> AddFacts {
    let Some(config) = &input.config else { return Box::new(|_| ()) };
    let root = HostRoot::new(&input.target.roots.host).with_nvidia(&config.nvidia_roots);
    let found = hardware::nvidia_programs(&root).ok().map(|programs| programs.is_some());
    Box::new(move |facts: &mut Facts| facts.mps_programs = found)
}

pub(super) fn resources(input: &ReaderInput) -> AddFacts {
    let Some(config) = &input.config else { return Box::new(|_| ()) };
    let root = HostRoot::new(&input.target.roots.host).with_nvidia(&config.nvidia_roots);
    let scan = hardware::scan(&root);
    let specs = hardware::defaults::or_usual(&config.resources, config.mig_strategy, &scan);
    let names =
        store::peek(&input.target.roots.state).map(|recovered| recovered.names).unwrap_or_default();
    let found =
        hardware::discover_with(&root, scan, &specs, &hardware::DiscoverInput::first(&names));
    let asks_nvml = requests_names(&hardware::nvml_query(&root, &found.selection, false));
    let taken = found.selection.resource_of();
    let resource = |spec: &Arc<ResourceSpec>| {
        let devices =
            found.selection.resources.get(&spec.name).map(Vec::as_slice).unwrap_or_default();
        Resource {
            name: spec.name.to_string(),
            class: spec.class_word().to_owned(),
            devices: devices.len(),
            unhealthy: devices
                .iter()
                .filter_map(|device| unhealthy(&root, &found, device))
                .collect(),
            near: if devices.is_empty() {
                near_misses(&found.devices, &taken, spec)
            } else {
                Vec::new()
            },
            needs_nvml: asks_nvml && spec.contract.kind() == ContractKind::Nvidia,
            paths: spec
                .device_paths()
                .map(|path| path.host.to_string())
                .chain(spec.usb.iter().map(ToString::to_string))
                .collect(),
            why_none: why_none(&found, spec, devices),
            is_for_guests: is_for_guests(spec, devices),
            is_nvidia: devices.iter().any(|device| {
                device.pci.as_ref().is_some_and(|function| function.vendor == Some(NVIDIA))
            }),
        }
    };
    // `specs` contains no pattern of "one resource for each node" that has no node.
    let resources = found.specs.iter().map(resource).collect();
    Box::new(|facts: &mut Facts| facts.resources = Some(resources))
}

/// The warnings of the scan about a resource without devices.
fn why_none(found: &Discovery, spec: &ResourceSpec, devices: &[Arc<Device>]) -> Vec<String> {
    if !devices.is_empty() {
        return Vec::new();
    }
    let own = format!("{}: ", spec.name);
    let warnings = found.selection.warnings.iter();
    warnings.filter_map(|warning| warning.strip_prefix(&own).map(str::to_owned)).collect()
}

fn unhealthy(root: &HostRoot, found: &Discovery, device: &Device) -> Option<(String, String)> {
    let reason = found.health(root, device)?.reason()?;
    Some((device.id.to_string(), reason.to_string()))
}

/// Whether its devices go to guests: by its contract, by the driver that it selects, or by the
/// driver of its devices.
fn is_for_guests(spec: &ResourceSpec, devices: &[Arc<Device>]) -> bool {
    let by_contract = spec.contract.kind() == ContractKind::Kubevirt;
    let mut drivers = spec.selections().flat_map(|select| &select.driver);
    let asks = drivers.any(|driver| driver.replace('_', "-").ends_with("vfio-pci"));
    let has =
        |device: &Arc<Device>| device.nodes.iter().any(|node| node.host.starts_with("/dev/vfio/"));
    by_contract || asks || devices.iter().any(has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{CharPath, DeviceClass};
    use std::collections::BTreeMap;

    #[test]
    fn a_resource_whose_nodes_another_one_has_names_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("dev")).unwrap();
        std::fs::write(dir.path().join("dev/rtc0"), "").unwrap();
        let spec = |name: &str| {
            let mut spec = ResourceSpec::new(name.parse().unwrap(), DeviceClass::Char);
            spec.paths = vec![CharPath {
                host: "/dev/rtc0".into(),
                container: None,
                permissions: "rw".into(),
                udev: Vec::new(),
            }];
            Arc::new(spec)
        };
        let specs = [spec("a.b/clock"), spec("a.b/rtc0"), spec("a.b/rtc")];
        let found = hardware::discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
        let why = |spec: &ResourceSpec| {
            let devices = found.selection.resources.get(&spec.name).map(Vec::as_slice);
            why_none(&found, spec, devices.unwrap_or_default())
        };
        assert_eq!(why(&specs[0]), Vec::<String>::new());
        let expected = "the nodes of /dev/rtc0 already belong to a.b/clock, the first resource \
                        that matches them";
        assert_eq!(why(&specs[1]), [expected]);
        assert_eq!(why(&specs[2]), [expected], "not that of a resource whose name is longer");
    }
}
