//! Small values and trees for the tests of this module.

use crate::domain::{
    Attributes, CharPath, Device, DeviceClass, DeviceId, PciFunction, ResourceSpec, Select,
};
use crate::hardware::{DiscoverInput, Discovery, discover_with, scan};
use crate::host::HostRoot;
use crate::host::faults::with_faults;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A function with only an address.
pub(super) fn function(address: &str) -> PciFunction {
    PciFunction::at(address.parse().unwrap())
}

/// A GPU at an address, with an id.
pub(crate) fn device(address: &str, id: &str) -> Device {
    Device {
        id: DeviceId::new(id),
        key: format!("pci:{address}/10de:2330"),
        class: DeviceClass::Gpu,
        pci: Some(Box::new(function(address))),
        numa_nodes: Vec::new(),
        nodes: Vec::new(),
        attributes: Attributes::default(),
    }
}

/// A resource that selects by class and list.
pub(crate) fn spec(name: &str, class: DeviceClass, select: Select) -> Arc<ResourceSpec> {
    Arc::new(ResourceSpec { select, ..ResourceSpec::new(name.parse().unwrap(), class) })
}

/// A `char` resource with globs.
pub(super) fn char_spec(name: &str, globs: &[&str]) -> Arc<ResourceSpec> {
    let path = |glob: &&str| CharPath {
        host: (*glob).into(),
        container: None,
        permissions: "rw".into(),
        udev: Vec::new(),
    };
    let mut spec = (*spec(name, DeviceClass::Char, Select::default())).clone();
    spec.paths = globs.iter().map(path).collect();
    Arc::new(spec)
}

/// Writes a file and the folders above it.
pub(super) fn write(root: &Path, rel: &str, text: &str) {
    let path = root.join(rel);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// Discovers the devices of the first resource again, with another host call failing each time. No
/// failure may change what was found `before`. Returns how many of how many failures were of this
/// resource.
pub(crate) fn fail_each_call(
    root: &Path,
    specs: &[Arc<ResourceSpec>],
    before: &Discovery,
) -> (usize, u64) {
    let (host, names) = (HostRoot::new(root), BTreeMap::new());
    let again = || {
        let input = DiscoverInput { former: Some(before), ..DiscoverInput::first(&names) };
        discover_with(&host, scan(&host), specs, &input)
    };
    let (whole, calls) = with_faults(|_| None, again);
    assert_eq!(whole.selection.resources, before.selection.resources);
    let mut unread = 0;
    for failing in 0..calls {
        let one = move |call: u64| (call == failing).then_some(24);
        let (after, _) = with_faults(one, again);
        assert_eq!(after.selection.resources, before.selection.resources, "call {failing}");
        unread += usize::from(after.unread.resources.contains_key(&specs[0].name));
    }
    (unread, calls)
}
