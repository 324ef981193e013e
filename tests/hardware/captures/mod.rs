//! Discovery on trees captured from real machines, compared with their known truth.
//!
//! `HOLDFAST_CAPTURES` names the archive (default `../shared/captures/public.tar.xz`); the truth is
//! in `truth/` next to it. Without them, or without `tar` and `xz`, the tests print that they are
//! skipped, and why.

mod archive;
mod classes;
mod damage;
mod doctor;
mod fault;
mod names;
mod placement;
mod rewrite;
mod signals;
mod slices;
mod topology;
mod verdicts;

use archive::{Capture, captures};
use holdfast::cli::discover::document;
use holdfast::domain::{DeviceClass, MigStrategy, ResourceSpec};
use holdfast::hardware::{DiscoverInput, defaults, discover, discover_with, scan};
use holdfast::host::HostRoot;
use rewrite::Mapping;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// `discover --all -o json` of a tree, without configuration, as rows by address.
fn rows(root: &Path) -> BTreeMap<String, Value> {
    let root = HostRoot::new(root);
    let found = discover(&root, &[], &BTreeMap::new());
    let document = serde_json::to_value(document(&root, &found, true)).unwrap();
    assert_eq!(document["schema"], 1);
    let rows = document["devices"].as_array().unwrap().clone();
    let ids: BTreeSet<_> = rows.iter().map(|row| row["id"].to_string()).collect();
    assert_eq!(ids.len(), rows.len(), "two devices share an id");
    let whole = rows.into_iter().filter(|row| row["attributes"]["part"].is_null());
    whole.map(|row| (row["pci_address"].as_str().unwrap().to_owned(), row)).collect()
}

/// A device of the truth, with the document's field names.
fn expected(truth: &Value) -> Value {
    let hex = |value: &Value| value.as_str().map(|text| text.trim_start_matches("0x").to_owned());
    json!({
        "pci_address": truth["bdf"],
        "pci_class": hex(&truth["class"]),
        "vendor_id": hex(&truth["vendor"]),
        "device_id": hex(&truth["device"]),
        "driver": truth["driver"],
        "numa_node": truth["numa_node"].as_u64(),
        "is_vf": truth["is_vf"],
        "pf": truth["physfn"],
        "vfs": truth["virtfns"],
        "iommu_group": truth["iommu_group"].as_str().map(|group| group.parse::<u32>().unwrap()),
        "bridges": truth["parents"],
        "net": sorted(&truth["net_ifs"]),
        "rdma": sorted(&truth["ib_devs"]),
        "nvme": sorted(&truth["nvme_ctrls"]),
    })
}

fn sorted(names: &Value) -> Vec<String> {
    let mut names: Vec<String> =
        names.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Whether Holdfast's class agrees with the kinds of the truth.
fn class_agrees(class: &str, kinds: &[&str]) -> bool {
    let is = |kind: &str| kinds.contains(&kind);
    match class {
        "gpu" => is("gpu"),
        "rdma" => is("rdma"),
        "nvme" => is("nvme"),
        "nic" => is("netctl") && !is("rdma"),
        "fpga" => is("accel-1200") || kinds == ["sriov-pf"],
        "accelerator" => is("accel-1200") || is("coprocessor-0b40"),
        // A virtio function that an FPGA's image presents has its own class, but cannot be offered.
        _ => !["gpu", "rdma", "nvme", "netctl", "coprocessor-0b40"].iter().any(|kind| is(kind)),
    }
}

#[test]
fn discovery_agrees_with_the_truth_of_every_capture() {
    let Some(captures) = captures() else { return };
    let mut differences = Vec::new();
    let mut compared = 0;
    for Capture { name, root, truth, .. } in &captures {
        let found = rows(root);
        let devices = truth["devices"].as_array().unwrap();
        let known: BTreeSet<&str> =
            devices.iter().map(|device| device["bdf"].as_str().unwrap()).collect();
        for extra in found.keys().filter(|address| !known.contains(address.as_str())) {
            differences.push(format!("{name} {extra}: found, but not in the truth"));
        }
        for device in devices {
            let address = device["bdf"].as_str().unwrap();
            let Some(row) = found.get(address) else {
                differences.push(format!("{name} {address}: not found"));
                continue;
            };
            for (field, wanted) in expected(device).as_object().unwrap() {
                compared += 1;
                if row[field] != *wanted {
                    differences.push(format!(
                        "{name} {address} {field}: {} instead of {wanted}",
                        row[field]
                    ));
                }
            }
            let kinds: Vec<&str> =
                device["kinds"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            if !class_agrees(row["class"].as_str().unwrap(), &kinds) {
                differences
                    .push(format!("{name} {address} class: {} of kinds {kinds:?}", row["class"]));
            }
        }
        differences.extend(record_differences(name, root, devices));
    }
    println!("{compared} values of {} captures compared", captures.len());
    assert!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// Differences in facts of the records that the document does not show.
fn record_differences(name: &str, root: &Path, devices: &[Value]) -> Vec<String> {
    let scan = scan(&HostRoot::new(root));
    let mut differences = Vec::new();
    for device in devices {
        let address = device["bdf"].as_str().unwrap();
        let Some(function) = scan.functions.get(&address.parse().unwrap()) else { continue };
        let hex = |number: Option<u16>| number.map(|number| format!("{number:#06x}"));
        let found = json!({
            "subsystem_vendor": hex(function.subsystem_vendor),
            "subsystem_device": hex(function.subsystem_device),
            "sriov_totalvfs": function.sriov_totalvfs,
        });
        for (field, value) in found.as_object().unwrap() {
            if *value != device[field] {
                differences.push(format!(
                    "{name} {address} {field}: {value} instead of {}",
                    device[field]
                ));
            }
        }
        if json!(function.drm) != json!(sorted(&device["drm_nodes"])) {
            differences.push(format!(
                "{name} {address} drm_nodes: {:?} instead of {}",
                function.drm, device["drm_nodes"]
            ));
        }
    }
    differences
}

#[test]
fn without_configuration_exactly_the_hardware_is_offered() {
    let Some(captures) = captures() else { return };
    let offered: BTreeMap<&str, BTreeMap<String, usize>> = captures
        .iter()
        .map(|capture| {
            let root = HostRoot::new(&capture.root);
            let functions = scan(&root);
            let specs: Vec<Arc<ResourceSpec>> =
                defaults::specs(&functions, MigStrategy::None).into_iter().map(Arc::new).collect();
            let found =
                discover_with(&root, functions, &specs, &DiscoverInput::first(&BTreeMap::new()));
            assert!(
                found.selection.warnings.is_empty(),
                "{}: {:?}",
                capture.name,
                found.selection.warnings
            );
            let counts = found
                .selection
                .resources
                .iter()
                .map(|(name, devices)| (name.to_string(), devices.len()));
            (capture.name.as_str(), counts.collect())
        })
        .filter(|(_, counts): &(_, BTreeMap<String, usize>)| !counts.is_empty())
        .collect();
    let expected = json!({
        "amd-corona-8xmi50": {"amd.com/gpu": 8},
        "dell-xe9680-8xh100": {"nvidia.com/gpu": 8},
        "ibm-ac922-lassen": {"nvidia.com/gpu": 4},
        "kvm-p100-passthrough": {"nvidia.com/gpu": 1},
        "laptop-iommu-nvme": {"gpu.intel.com/i915": 1},
        "nvidia-a2-vgpu": {"nvidia.com/gpu": 1},
    });
    assert_eq!(json!(offered), expected);
}

#[test]
fn a_port_of_an_fpga_card_is_offered_once_and_only_where_it_is() {
    let Some(captures) = captures() else { return };
    let spec = ResourceSpec::new("example.com/fpga".parse().unwrap(), DeviceClass::Fpga);
    for capture in captures.iter().filter(|capture| capture.name.starts_with("fpga-")) {
        let root = HostRoot::new(&capture.root);
        let found = discover(&root, &[Arc::new(spec.clone())], &BTreeMap::new());
        let offered = &found.selection.resources[&spec.name];
        let nodes: Vec<_> = offered
            .iter()
            .flat_map(|device| &device.nodes)
            .map(|node| node.host.as_str())
            .collect();
        assert_eq!(nodes, ["/dev/dfl-port.0"], "{}", capture.name);
        let document = serde_json::to_value(document(&root, &found, false)).unwrap();
        let row = document["devices"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["resource"] == "example.com/fpga")
            .unwrap();
        assert_eq!(
            (&row["health"], &row["reason"]),
            (&json!("Healthy"), &Value::Null),
            "{}",
            capture.name
        );
    }
}

/// A row with every address, bus, domain, node and name mapped.
fn mapped(row: &Value, mapping: &Mapping) -> Value {
    let text = |value: &Value| value.as_str().map_or(Value::Null, |text| json!(mapping.text(text)));
    let list = |value: &Value| value.as_array().unwrap().iter().map(text).collect::<Vec<_>>();
    let names = |value: &Value| {
        json!(sorted(&json!(value.as_array().unwrap().iter().map(text).collect::<Vec<_>>())))
    };
    let mut row = row.clone();
    for field in ["id", "pci_address", "pf"] {
        row[field] = text(&row[field]);
    }
    for field in ["vfs", "bridges"] {
        row[field] = json!(list(&row[field]));
    }
    for field in ["net", "rdma", "nvme", "nodes"] {
        row[field] = names(&row[field]);
    }
    for value in row["attributes"].as_object_mut().unwrap().values_mut() {
        *value = text(value);
    }
    row["numa_node"] = json!(row["numa_node"].as_u64().map(|node| mapping.numa(node)));
    row
}

/// Nodes are listed by name, and GPUs are counted by address, so a renaming can change their order.
fn without_order(mut row: Value) -> Value {
    row["nodes"] = json!(sorted(&row["nodes"]));
    row["attributes"].as_object_mut().unwrap().remove("index");
    row
}

#[test]
fn a_machine_with_other_addresses_and_names_is_described_by_them() {
    let Some(captures) = captures() else { return };
    let mapping = Mapping::Elsewhere;
    for capture in
        captures.iter().filter(|capture| !capture.truth["devices"].as_array().unwrap().is_empty())
    {
        let copy = rewrite::copy(&capture.root, &mapping);
        let wanted: BTreeMap<String, Value> = rows(&capture.root)
            .values()
            .map(|row| without_order(mapped(row, &mapping)))
            .map(|row| (row["pci_address"].as_str().unwrap().to_owned(), row))
            .collect();
        let found: BTreeMap<String, Value> = rows(copy.path())
            .into_iter()
            .map(|(address, row)| (address, without_order(row)))
            .collect();
        for (address, row) in &wanted {
            assert_eq!(found.get(address), Some(row), "{} {address}", capture.name);
        }
        assert_eq!(found.len(), wanted.len(), "{}", capture.name);
    }
}
