//! The facts of each class beyond its PCI record, compared with the truth of the captures.

use crate::hardware::captures::archive::{Capture, captures};
use holdfast::domain::{Device, DeviceClass, ResourceSpec, Select};
use holdfast::hardware::{Discovery, discover};
use holdfast::host::HostRoot;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

fn found(root: &Path) -> Discovery {
    discover(&HostRoot::new(root), &[], &BTreeMap::new())
}

/// The whole function at an address, and its parts.
fn at<'a>(found: &'a Discovery, address: &Value) -> Vec<&'a Arc<Device>> {
    let is_there = |device: &&Arc<Device>| {
        device.pci.as_ref().is_some_and(|function| function.address.to_string() == *address)
    };
    found.devices.iter().filter(is_there).collect()
}

fn numbers(list: &Value) -> BTreeSet<u64> {
    list.as_array().unwrap().iter().filter_map(Value::as_u64).collect()
}

#[test]
fn adapters_and_disks_are_described_as_they_are() {
    let Some(captures) = captures() else { return };
    let (mut compared, mut differences) = (0, Vec::new());
    for Capture { name, root, truth, .. } in &captures {
        let found = found(root);
        let mut compare = |what: &str, found: Option<&str>, wanted: Option<&str>| {
            compared += 1;
            if found != wanted {
                differences.push(format!("{name} {what}: {found:?} instead of {wanted:?}"));
            }
        };
        for adapter in truth["infiniband"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|adapter| adapter["bdf"].is_string())
        {
            let device = at(&found, &adapter["bdf"])[0];
            assert_eq!(device.class, DeviceClass::Rdma, "{name}");
            for attribute in ["node_guid", "sys_image_guid"] {
                compare(attribute, device.attribute(attribute), adapter[attribute].as_str());
            }
            let layer = adapter["ports"][0]["link_layer"].as_str();
            compare("link_layer", device.attribute("link_layer"), layer);
            compare(
                "link_type",
                device.attribute("link_type"),
                layer.map(|layer| if layer == "InfiniBand" { "infiniband" } else { "ether" }),
            );
            compare("firmware", device.attribute("firmware"), adapter["fw_ver"].as_str());
        }
        for controller in truth["nvme"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|controller| controller["bdf"].is_string())
        {
            let devices = at(&found, &controller["bdf"]);
            for attribute in ["serial", "model", "state"] {
                compare(attribute, devices[0].attribute(attribute), controller[attribute].as_str());
            }
            let disks: BTreeSet<_> = devices
                .iter()
                .flat_map(|device| &device.nodes)
                .map(|node| node.host.replace("/dev/", ""))
                .collect();
            let wanted: BTreeSet<String> = controller["namespaces"]
                .as_array()
                .unwrap()
                .iter()
                .map(|disk| disk.as_str().unwrap().to_owned())
                .collect();
            assert_eq!(disks, wanted, "{name}");
        }
    }
    assert!(compared >= 30, "only {compared} values were there to be compared");
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn ports_of_fpga_cards_have_their_function_and_their_interface() {
    let Some(captures) = captures() else { return };
    let expected = [
        (
            "fpga-d5005-legacy",
            "0000:05:00.0",
            Some("f7df405cbd7acf7222f144b0b93acd18"),
            "9346116da52d5ca8b06aa9a389ef7c8d",
        ),
        ("fpga-n6000-sku1-vfs", "0000:b1:00.0", None, "ce3139c959cf528ca27751c50829797a"),
    ];
    for (name, address, afu_id, interface_id) in expected {
        let capture = captures.iter().find(|capture| capture.name == name).unwrap();
        let found = found(&capture.root);
        let card = at(&found, &address.into())[0];
        let of = |attribute: &str| card.attribute(attribute);
        assert_eq!(
            (of("afu_id"), of("interface_id"), of("fme_node")),
            (afu_id, Some(interface_id), Some("/dev/dfl-fme.0")),
            "{name}"
        );
        assert!(
            !card.nodes.iter().any(|node| node.host.contains("fme")),
            "the management half is named, not given"
        );
    }
}

/// The kernel names the node of an engine: `DEVNAME` in its uevent.
#[test]
fn vector_engines_have_the_node_that_the_kernel_names() {
    let Some(captures) = captures() else { return };
    let capture = captures.iter().find(|capture| capture.name == "nec-ve8-plx").unwrap();
    let found = found(&capture.root);
    let engines: Vec<_> =
        found.devices.iter().filter(|device| device.class == DeviceClass::Accelerator).collect();
    assert_eq!(engines.len(), 8);
    for engine in engines {
        let [node] = engine.nodes.as_slice() else { panic!("{}: {:?}", engine.id, engine.nodes) };
        let name = node.host.trim_start_matches("/dev/");
        let uevent = fs::read_to_string(
            capture.root.join(format!("sys/bus/pci/devices/{}/ve/{name}/uevent", engine.id)),
        )
        .unwrap();
        assert!(uevent.contains(&format!("\nDEVNAME={name}\n")), "{uevent}");
    }
}

#[test]
fn mediated_devices_are_offered_to_guests_by_their_type_and_not_as_gpus() {
    let Some(captures) = captures() else { return };
    let capture = captures.iter().find(|capture| capture.name == "nvidia-a2-vgpu").unwrap();
    let spec = |name: &str, select: Select| {
        let name = format!("example.com/{name}").parse().unwrap();
        Arc::new(ResourceSpec { class: DeviceClass::Gpu, select, ..ResourceSpec::orphan(name) })
    };
    let vgpu = Select {
        mdev_type: ["nvidia-754", "nvidia-751"].map(str::to_owned).into(),
        ..Select::default()
    };
    let specs = [
        spec("vgpu", vgpu),
        spec("vf", Select { vendor: vec![0x10de], vf: Some(true), ..Select::default() }),
    ];
    let found = discover(&HostRoot::new(&capture.root), &specs, &BTreeMap::new());
    let all: Vec<(&str, &str)> = found
        .devices
        .iter()
        .filter(|device| device.attribute("part") == Some("mdev"))
        .map(|device| (device.id.as_str(), device.nodes[1].host.as_str()))
        .collect();
    let expected = [
        ("f715f63c-0d00-4007-9c5a-b07b0c6c05de", "/dev/vfio/106"),
        ("3deab9a4-200a-4c54-99b1-5eb0722d1d81", "/dev/vfio/108"),
        ("c728e022-f16f-434b-ad2c-9665ee634d3d", "/dev/vfio/107"),
    ];
    assert_eq!(all, expected);
    let offered =
        |name: &str| &found.selection.resources[&format!("example.com/{name}").parse().unwrap()];
    let vgpus: BTreeSet<&str> = offered("vgpu").iter().map(|device| device.id.as_str()).collect();
    assert_eq!(vgpus, expected[..2].iter().map(|(id, _)| *id).collect());
    assert_eq!(
        offered("vf").len(),
        13,
        "of 16 virtual functions, three are used by a mediated device"
    );
}

/// The capture has only the machine's compute topology; the test adds the functions and render
/// nodes that belong to it.
#[test]
fn the_partitions_of_amd_gpus_are_grouped_as_they_are() {
    let Some(captures) = captures() else { return };
    let capture = captures.iter().find(|capture| capture.name == "amd-mi308-kfd").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    fs::create_dir_all(dir.path().join("sys/class")).unwrap();
    symlink(capture.root.join("sys/class/kfd"), dir.path().join("sys/class/kfd")).unwrap();
    let nodes: BTreeMap<u64, &Value> = capture.truth["kfd_nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| (node["node"].as_u64().unwrap(), node))
        .collect();
    let groups: BTreeMap<String, BTreeSet<u64>> = capture.truth["kfd_physical_gpus"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(id, list)| (id.clone(), numbers(list)))
        .collect();
    for (group, members) in groups.values().enumerate() {
        for (partition, number) in members.iter().enumerate() {
            let (node, minor) =
                (nodes[number], nodes[number]["drm_render_minor"].as_u64().unwrap());
            if partition == 0 {
                let function = format!(
                    "sys/bus/pci/devices/{}",
                    node["bdf_from_location_id"].as_str().unwrap()
                );
                for (file, text) in [
                    ("vendor", "0x1002"),
                    ("device", "0x74a2"),
                    ("class", "0x120000"),
                    ("uevent", "DRIVER=amdgpu"),
                ] {
                    write(&format!("{function}/{file}"), text);
                }
                write(
                    &format!("{function}/unique_id"),
                    &format!(
                        "{:016x}",
                        node["unique_id"].as_str().unwrap().parse::<u64>().unwrap()
                    ),
                );
                write(&format!("{function}/drm/renderD{minor}/dev"), "226:128");
            } else {
                write(
                    &format!(
                        "sys/devices/platform/amdgpu_xcp_{}/drm/renderD{minor}/dev",
                        group * 3 + partition
                    ),
                    "226:129",
                );
            }
        }
    }
    let found = found(dir.path());
    let mut by_gpu: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    let mut rendered = BTreeSet::new();
    for part in found.devices.iter().filter(|device| device.attribute("part") == Some("partition"))
    {
        let unique = u64::from_str_radix(part.attribute("unique_id").unwrap(), 16).unwrap();
        let number: u64 = part.attribute("kfd_node").unwrap().parse().unwrap();
        by_gpu.entry(unique.to_string()).or_default().insert(number);
        let render = &part.nodes.last().unwrap().host;
        assert_eq!(*render, format!("/dev/dri/renderD{}", nodes[&number]["drm_render_minor"]));
        rendered.insert(render);
        assert_eq!(
            part.id.as_str(),
            format!("{unique:016x}-partition{}", part.attribute("partition").unwrap())
        );
    }
    assert_eq!(by_gpu, groups);
    assert_eq!(rendered.len(), 32);
    assert_eq!(
        found.devices.iter().filter(|device| device.attribute("parts").is_some()).count(),
        8
    );
}
