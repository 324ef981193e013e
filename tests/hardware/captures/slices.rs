//! The ResourceSlices of every captured machine: within every limit of the API, with the places
//! that sysfs shows, and for two machines exactly as recorded.

use crate::hardware::captures::archive::{Capture, captures};
use holdfast::cli::discover::document;
use holdfast::cli::slices::{List, offerings, wanted_of};
use holdfast::domain::{DeviceClass, MigStrategy, ResourceSpec, Select, Sharing, Verdicts};
use holdfast::hardware::{DiscoverInput, Discovery, defaults, discover, discover_with, scan};
use holdfast::host::HostRoot;
use holdfast::slices::api::{Attribute, ResourceSlice, limits};
use holdfast::slices::attributes::vendors::Vendor;
use holdfast::slices::attributes::{Facts, PCI_BUS_ID, PCIE_ROOT, violations};
use holdfast::slices::names::{NodeName, is_pool_name, is_subdomain};
use holdfast::slices::wanted::Layout;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// Every device of the machine, with two shares of each GPU.
fn everything(root: &HostRoot) -> Discovery {
    let spec = |class: &str| {
        let name = format!("example.com/{class}").parse().unwrap();
        let class: DeviceClass = serde_json::from_str(&format!("\"{class}\"")).unwrap();
        let sharing = Sharing::replicas(if class == DeviceClass::Gpu { 2 } else { 1 });
        let select = Select::default();
        Arc::new(ResourceSpec { class, select, sharing, ..ResourceSpec::orphan(name) })
    };
    let specs: Vec<_> = ["gpu", "fpga", "rdma", "nic", "nvme", "accelerator"].map(spec).into();
    discover(root, &specs, &BTreeMap::new())
}

/// What a machine without a configuration offers.
fn usual(root: &HostRoot) -> Discovery {
    let functions = scan(root);
    let specs = defaults::or_usual(&[], MigStrategy::None, &functions);
    discover_with(root, functions, &specs, &DiscoverInput::first(&BTreeMap::new()))
}

fn slices(root: &HostRoot, found: &Discovery) -> Vec<ResourceSlice> {
    slices_with(root, found, Facts::default())
}

fn slices_with(root: &HostRoot, found: &Discovery, facts: Facts<'_>) -> Vec<ResourceSlice> {
    let node = NodeName::new("node-1.example.org").unwrap();
    let resources = offerings(&document(root, found, true), found);
    let wanted = wanted_of(&node, &resources, &[], &Verdicts::new(), facts);
    assert!(wanted.dropped.is_empty(), "{:?}", wanted.dropped);
    Layout::new(node).followed_by(&wanted).objects()
}

/// What the API server would refuse.
fn refused(slices: &[ResourceSlice]) -> Vec<String> {
    let mut refused = Vec::new();
    let mut names: BTreeSet<(&str, &str)> = BTreeSet::new();
    for slice in slices {
        let pool = slice.spec.pool.name.as_str();
        let of_pool = slices.iter().filter(|other| other.spec.pool.name == pool).count();
        if !is_pool_name(pool)
            || !is_subdomain(&slice.metadata.name)
            || slice.spec.devices.len() > limits::DEVICES
            || slice.spec.pool.resource_slice_count != i64::try_from(of_pool).unwrap()
        {
            refused.push(format!("{}: {:?}", slice.metadata.name, slice.spec.pool));
        }
        for device in &slice.spec.devices {
            refused.extend(violations(device));
            if !names.insert((pool, &device.name)) {
                refused.push(format!("{pool}/{} is there twice", device.name));
            }
        }
    }
    refused
}

#[test]
fn the_slices_of_every_machine_fulfil_every_limit() {
    let Some(captures) = captures() else { return };
    let (mut devices, mut vendors) = (0, BTreeSet::new());
    for Capture { name, root, truth, .. } in &captures {
        let host = HostRoot::new(root);
        let found = everything(&host);
        let slices = slices(&host, &found);
        assert_eq!(refused(&slices), [""; 0], "{name}");
        let facts = Facts { vendors: true, nvidia_driver: Some("580.95.05"), nvml: None, taken: 0 };
        let with_vendors = slices_with(&host, &found, facts);
        assert_eq!(refused(&with_vendors), [""; 0], "{name}");
        for device in with_vendors.iter().flat_map(|slice| &slice.spec.devices) {
            for vendor in Vendor::ALL {
                let domain = format!("{}/", vendor.driver());
                if device.attributes.keys().any(|name| name.starts_with(&domain)) {
                    vendors.insert(vendor.driver());
                }
            }
        }
        let published = slices.iter().map(|slice| slice.spec.devices.len()).sum::<usize>();
        let offered = offerings(&document(&host, &found, true), &found);
        assert_eq!(published, offered.values().map(|it| it.devices.len()).sum::<usize>(), "{name}");
        devices += published;
        let parents: BTreeMap<&str, Option<&str>> = truth["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| (it["bdf"].as_str().unwrap(), it["parents"][0].as_str()))
            .collect();
        for device in slices.iter().flat_map(|slice| &slice.spec.devices) {
            let text = |name: &str| match &device.attributes[name] {
                Attribute::Text(text) => text.as_str(),
                other => panic!("{name} {}: {other:?}", device.name),
            };
            let (address, root) = (text(PCI_BUS_ID), text(PCIE_ROOT));
            if let Some(first) = parents[address] {
                let expected = format!("pci{}", &first[..first.len() - "00.0".len() - 1]);
                assert_eq!(root, expected, "{name} {address}");
            }
        }
    }
    assert!(devices > 100, "only {devices} devices");
    // No captured machine has a virtual function of a network adapter.
    let captured = [Vendor::Nvidia, Vendor::Amd, Vendor::Intel].map(Vendor::driver);
    assert_eq!(vendors, BTreeSet::from(captured));
}

#[test]
fn the_slices_of_two_machines_are_as_recorded() {
    let Some(captures) = captures() else { return };
    for (name, recorded) in [
        ("amd-corona-8xmi50", include_str!("slices/amd-corona-8xmi50.json")),
        ("dell-xe9680-8xh100", include_str!("slices/dell-xe9680-8xh100.json")),
    ] {
        let capture = captures.iter().find(|capture| capture.name == name).unwrap();
        let root = HostRoot::new(&capture.root);
        let list = List::of(slices(&root, &usual(&root)));
        let text = serde_json::to_string_pretty(&list).unwrap() + "\n";
        if text != recorded {
            // For a wanted change: the file to compare, and to copy.
            let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("slices-{name}.json"));
            std::fs::write(&file, &text).unwrap();
            panic!("{name} has other slices now: {}", file.display());
        }
    }
}
