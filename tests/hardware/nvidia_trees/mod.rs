//! Hosts with NVIDIA's driver, made in temporary folders: which resources and ids are listed, and
//! the whole answer of an Allocate by each strategy, compared with golden files.
//!
//! The facts about the answers of NVIDIA's device plugin are from its release 0.20. In
//! `internal/plugin/server.go`:
//!
//! | fact | function |
//! | --- | --- |
//! | names in the variable, with commas | `updateResponseForDeviceListEnvVar` |
//! | a folder in the variable, a mount for each name | `updateResponseForDeviceMounts` |
//! | nodes: host path below the root of nodes, `rw` | `apiDeviceSpecs` |
//! | no nodes if all strategies use CDI | `getAllocateResponse` |
//! | `<vendor>/gpu=<name>` | `updateResponseForCDI` |
//! | the key of the annotation | `getCDIDeviceAnnotations` |
//!
//! In `internal/rm`:
//!
//! | fact | function |
//! | --- | --- |
//! | nodes of the driver as a whole come first | `nvmlResourceManager.GetDevicePaths` |
//! | nodes of a MIG instance | `nvmlMigDevice.GetPaths` |
//! | resources by MIG strategy | `AddDefaultResourcesToConfig` |
//! | the GPU of a Tegra system: `tegra`, number 0, no nodes | `tegraDevice` |
//!
//! Three differences are intended. The id of a MIG instance in the list is its place, not its UUID,
//! and without the numbers of NVML its name by index is its UUID. A node of several instances is
//! here once. The daemon adds an annotation of its own to the answer.

mod tree;

use holdfast::contract::{self, NvidiaExtras, Request};
use holdfast::domain::{
    AllocId, Contract, Device, DeviceIdStrategy, DeviceListStrategy, MigInstance, MigStrategy,
    NvidiaOptions, NvidiaRoots, NvmlGpu, NvmlSnapshot, ResourceSpec,
};
use holdfast::hardware::{self, DiscoverInput, Discovery, defaults};
use holdfast::host::HostRoot;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tree::Tree;

const H100: &str = "NVIDIA H100 80GB HBM3";
/// The vendor of the plugin's CDI names.
const VENDOR: &str = "k8s.device-plugin.nvidia.com";

/// What a daemon without configuration finds.
fn discovered(root: &HostRoot, mig: MigStrategy, nvml: &NvmlSnapshot) -> Discovery {
    let scan = hardware::scan(root);
    let specs: Vec<Arc<ResourceSpec>> = defaults::or_usual(&[], mig, &scan);
    let names = BTreeMap::new();
    let known = DiscoverInput { nvml, ..DiscoverInput::first(&names) };
    hardware::discover_with(root, scan, &specs, &known)
}

/// The answer of an Allocate for these devices.
fn answer(root: &HostRoot, spec: &ResourceSpec, devices: &[&Device], of: NvidiaOptions) -> Value {
    let options = NvidiaOptions { cdi_vendor: VENDOR.to_owned(), ..of };
    let spec = ResourceSpec { contract: Contract::Nvidia(options), ..spec.clone() };
    let request = Request {
        spec: &spec,
        devices,
        alloc_id: &AllocId::new("0199c2ae-7b4c-7f00-8000-000000000001"),
        node_exists: &|path| root.node_exists(path),
        nvidia: &NvidiaExtras::default(),
    };
    serde_json::to_value(contract::edits(&request)).unwrap()
}

/// The lists, and the answers for all devices of each resource by each strategy.
fn document(tree: &Tree, mig: MigStrategy, nvml: &NvmlSnapshot) -> Value {
    document_of(&HostRoot::new(tree.path()), mig, nvml)
}

fn document_of(root: &HostRoot, mig: MigStrategy, nvml: &NvmlSnapshot) -> Value {
    use DeviceListStrategy::{CdiAnnotations, CdiCri, EnvVar, VolumeMounts};
    let found = discovered(root, mig, nvml);
    let mut resources = Map::new();
    for (name, devices) in &found.selection.resources {
        let spec = found.specs.iter().find(|spec| spec.name == *name).unwrap();
        let health = |device: &Device| match found.health(root, device).unwrap().reason() {
            None => "healthy".to_owned(),
            Some(reason) => reason.to_string(),
        };
        let listed: Vec<Value> = devices
            .iter()
            .map(|device| json!([device.id.as_str(), health(device), device.numa_nodes]))
            .collect();
        let devices: Vec<&Device> = devices.iter().map(|device| &**device).collect();
        let mut answers = Map::new();
        for (key, strategy, pass_device_specs, device_id_strategy) in [
            ("envvar", EnvVar, false, DeviceIdStrategy::Uuid),
            ("envvar, by index", EnvVar, false, DeviceIdStrategy::Index),
            ("envvar, pass_device_specs", EnvVar, true, DeviceIdStrategy::Uuid),
            ("volume-mounts", VolumeMounts, false, DeviceIdStrategy::Uuid),
            ("cdi-cri, pass_device_specs", CdiCri, true, DeviceIdStrategy::Uuid),
            ("cdi-annotations", CdiAnnotations, false, DeviceIdStrategy::Uuid),
        ] {
            let options = NvidiaOptions {
                device_list_strategy: vec![strategy],
                pass_device_specs,
                device_id_strategy,
                ..NvidiaOptions::default()
            };
            answers.insert(key.to_owned(), answer(root, spec, &devices, options));
        }
        resources.insert(name.to_string(), json!({ "listed": listed, "answers": answers }));
    }
    json!({ "resources": resources, "warnings": found.selection.warnings })
}

fn compare(name: &str, document: &Value) {
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hardware/nvidia_trees/golden").join(name);
    let known = std::fs::read_to_string(golden).unwrap_or_default();
    let text = serde_json::to_string_pretty(document).unwrap() + "\n";
    assert!(known == text, "{name} should be:\n{text}");
}

/// The names and profiles that NVML has of MIG instances, by GPU and GPU instance.
fn nvml(instances: &[(&str, u32, &str, &str)]) -> NvmlSnapshot {
    let mut snapshot = NvmlSnapshot::default();
    for (gpu, gi, uuid, profile) in instances {
        let gpu: &mut NvmlGpu = snapshot.gpus.entry(gpu.parse().unwrap()).or_default();
        let (uuid, profile) = ((*uuid).to_owned(), Some((*profile).to_owned()));
        gpu.instances.insert((*gi, 0), MigInstance { uuid, profile, index: None });
    }
    snapshot
}

/// Two GPUs whose driver runs in a container. `specs` of the plugin with its root of nodes
/// `/run/nvidia/driver` have the host path there, and the usual path in the container.
fn driver_container(folder: &str) -> Tree {
    let tree = Tree::new();
    tree.gpu("0000:3b:00.0", 0x2330, 0, H100, "GPU-00000000-1111-4222-8333-444444444444");
    tree.gpu("0000:af:00.0", 0x2330, 1, H100, "GPU-00000001-1111-4222-8333-444444444444");
    tree.nodes(folder, &[0, 1]);
    tree
}

#[test]
fn a_driver_in_a_container() {
    let tree = driver_container("run/nvidia/driver/dev");
    let document = document(&tree, MigStrategy::None, &NvmlSnapshot::empty());
    compare("driver-container.json", &document);
}

#[test]
fn nodes_of_the_host_come_first() {
    let host = driver_container("dev");
    let on_host = document(&host, MigStrategy::None, &NvmlSnapshot::empty());
    assert!(!on_host.to_string().contains("/run/nvidia/driver"));
    // The nodes are in both places.
    host.nodes("run/nvidia/driver/dev", &[0, 1]);
    assert_eq!(document(&host, MigStrategy::None, &NvmlSnapshot::empty()), on_host);
    // The root of the container is there, and empty: it has not started yet.
    let early = driver_container("dev");
    std::fs::create_dir_all(early.path().join("run/nvidia/driver/dev")).unwrap();
    assert_eq!(document(&early, MigStrategy::None, &NvmlSnapshot::empty()), on_host);
    // One node of the host is missing.
    host.remove("dev/nvidia1");
    let mixed = document(&host, MigStrategy::None, &NvmlSnapshot::empty());
    let nodes =
        mixed["resources"]["nvidia.com/gpu"]["answers"]["envvar, pass_device_specs"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|node| node["host"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>();
    assert_eq!(
        nodes,
        [
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidia-modeset",
            "/dev/nvidia0",
            "/run/nvidia/driver/dev/nvidia1"
        ]
    );
}

#[test]
fn an_empty_root_of_a_driver_leaves_the_gpus_without_their_nodes() {
    let tree = driver_container("elsewhere");
    std::fs::create_dir_all(tree.path().join("run/nvidia/driver/dev")).unwrap();
    let document = document(&tree, MigStrategy::None, &NvmlSnapshot::empty());
    let listed = &document["resources"]["nvidia.com/gpu"]["listed"];
    assert_eq!(listed[0][1], "node_missing");
    assert_eq!(listed[1][1], "node_missing");
}

#[test]
fn a_driver_in_a_container_may_have_another_root() {
    let usual = driver_container("run/nvidia/driver/dev");
    let usual = document(&usual, MigStrategy::None, &NvmlSnapshot::empty());
    let other = driver_container("opt/driver/dev");
    let root = HostRoot::new(other.path())
        .with_nvidia(&NvidiaRoots { driver: Some("/opt/driver".into()), dev: None });
    let found = document_of(&root, MigStrategy::None, &NvmlSnapshot::empty());
    let expected = usual.to_string().replace("/run/nvidia/driver/dev/", "/opt/driver/dev/");
    assert_eq!(found.to_string(), expected);
    // The root may be a link.
    let linked = driver_container("opt/driver/dev");
    linked.link("../../opt/driver", "run/nvidia/driver");
    assert_eq!(document(&linked, MigStrategy::None, &NvmlSnapshot::empty()), usual);
}

/// A GPU in MIG mode with two instances, and a whole one, or one with an equal instance.
fn mig(profiles: [&str; 2], second: Option<&str>) -> (Tree, NvmlSnapshot) {
    let tree = Tree::new();
    let [first, other] = ["0000:3b:00.0", "0000:af:00.0"];
    tree.gpu(first, 0x2330, 0, H100, "GPU-00000000-1111-4222-8333-444444444444");
    tree.gpu(other, 0x2330, 1, H100, "GPU-00000001-1111-4222-8333-444444444444");
    tree.nodes("dev", &[0, 1]);
    tree.instance("dev", 0, 1, [12, 13]);
    tree.instance("dev", 0, 2, [21, 22]);
    let mut names = vec![
        (first, 1, "MIG-11111111-1111-5111-8111-111111111111", profiles[0]),
        (first, 2, "MIG-22222222-2222-5222-8222-222222222222", profiles[1]),
    ];
    if let Some(profile) = second {
        tree.instance("dev", 1, 1, [147, 148]);
        names.push((other, 1, "MIG-33333333-3333-5333-8333-333333333333", profile));
    }
    (tree, nvml(&names))
}

#[test]
fn mig_mixed() {
    let (tree, nvml) = mig(["1g.10gb", "3g.40gb"], None);
    compare("mig-mixed.json", &document(&tree, MigStrategy::Mixed, &nvml));
}

#[test]
fn mig_single() {
    let (tree, nvml) = mig(["3g.40gb", "3g.40gb"], Some("3g.40gb"));
    compare("mig-single.json", &document(&tree, MigStrategy::Single, &nvml));
}

#[test]
fn nodes_of_mig_capabilities_may_be_below_the_root_of_the_driver_only() {
    let (tree, nvml) = mig(["3g.40gb", "3g.40gb"], Some("3g.40gb"));
    for cap in [12, 13, 21, 22, 147, 148] {
        tree.remove(&format!("dev/nvidia-caps/nvidia-cap{cap}"));
        tree.write(&format!("run/nvidia/driver/dev/nvidia-caps/nvidia-cap{cap}"), "");
    }
    let text = document(&tree, MigStrategy::Single, &nvml).to_string();
    assert!(!text.contains("node_missing"), "{text}");
    assert!(text.contains(r#""host":"/run/nvidia/driver/dev/nvidia-caps/nvidia-cap148""#));
    assert!(!text.contains(r#""host":"/run/nvidia/driver/dev/nvidia0""#));
}

/// A board with an Orin: the names of its nodes are those of the platform's list of release 36.
fn orin() -> Tree {
    let tree = Tree::new();
    tree.write("etc/nv_tegra_release", "# R36 (release), REVISION: 4.0, GCID: 37537400\n");
    tree.write("sys/devices/soc0/family", "Tegra\n");
    tree.link(
        "../../../bus/platform/drivers/gk20a",
        "sys/bus/platform/devices/17000000.gpu/driver",
    );
    for node in ["nvgpu/igpu0/ctrl", "nvgpu/igpu0/channel", "nvhost-ctrl-gpu", "nvmap", "nvidia0"] {
        tree.write(&format!("dev/{node}"), "");
    }
    let lists = "etc/nvidia-container-runtime/host-files-for-container.d";
    tree.write(
        &format!("{lists}/devices.csv"),
        "dev, /dev/nvgpu/igpu0/*\ndev, /dev/nvmap\ndev, /dev/nvidia0\ndev, /dev/fb0\n",
    );
    tree
}

/// The plugin lists one device on every Tegra system (`buildTegraDeviceMap`).
#[test]
fn a_jetson() {
    let document = document(&orin(), MigStrategy::None, &NvmlSnapshot::empty());
    compare("jetson.json", &document);
}

#[test]
fn a_jetson_is_healthy_while_its_nodes_are_there() {
    let tree = orin();
    let health = || {
        let document = document(&tree, MigStrategy::None, &NvmlSnapshot::empty());
        document["resources"]["nvidia.com/gpu"]["listed"][0].clone()
    };
    assert_eq!(health()[1], "healthy");
    tree.remove("dev/nvmap");
    assert_eq!(health(), json!(["tegra", "node_missing", []]));
    tree.write("dev/nvmap", "");
    for node in ["nvgpu/igpu0/ctrl", "nvhost-ctrl-gpu"] {
        tree.remove(&format!("dev/{node}"));
    }
    assert_eq!(health(), json!(["tegra", "node_missing", []]), "its driver is not loaded");
}

/// Four superchips. The memory of each GPU is a NUMA node without processors, and each GPU has a
/// PCI domain of its own. The plugin reports the node in `numa_node` (`GetNumaNode`).
#[test]
fn a_grace_hopper() {
    let tree = Tree::new();
    for number in 0..4_u32 {
        let address = format!("{:04x}:01:00.0", 0x10 * number + 9);
        let uuid = format!("GPU-0000000{number}-1111-4222-8333-444444444444");
        tree.gpu(&address, 0x2342, number, "NVIDIA GH200 120GB", &uuid);
        let function = format!("sys/bus/pci/devices/{address}");
        let processors = format!("{}-{}", 72 * number, 72 * number + 71);
        // The second one states the node of its own memory.
        let stated = if number == 1 { 12 } else { number };
        tree.write(&format!("{function}/numa_node"), &format!("{stated}\n"));
        tree.write(&format!("{function}/local_cpulist"), &format!("{processors}\n"));
        tree.numa_node(number, &processors);
        for memory in 0..8 {
            tree.numa_node(4 + 8 * number + memory, "");
        }
    }
    tree.nodes("dev", &[0, 1, 2, 3]);
    let document = document(&tree, MigStrategy::None, &NvmlSnapshot::empty());
    compare("grace-hopper.json", &document);
}

/// A DGX Spark: an ordinary GPU on PCI whose memory is that of the machine.
#[test]
fn a_spark_is_an_ordinary_gpu() {
    let tree = Tree::new();
    let uuid = "GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5";
    tree.gpu("000f:01:00.0", 0x2e12, 0, "NVIDIA GB10", uuid);
    tree.nodes("dev", &[0]);
    let document = document(&tree, MigStrategy::None, &NvmlSnapshot::empty());
    let gpus = &document["resources"]["nvidia.com/gpu"];
    assert_eq!(gpus["listed"], json!([[uuid, "healthy", []]]));
    assert_eq!(gpus["answers"]["envvar"]["envs"], json!({ "NVIDIA_VISIBLE_DEVICES": uuid }));
}

/// A Thor: its own GPU is on PCI, and another card is in a slot. NVIDIA's toolkit knows the first
/// one by its model (`HasAnIntegratedGPU`) and by number 0, the card by number 1
/// (`pkg/nvcdi/lib-csv.go`).
#[test]
fn a_thor_has_its_own_gpu_and_may_have_a_card() {
    let tree = Tree::new();
    tree.write("etc/nv_tegra_release", "# R38 (release), REVISION: 2.0\n");
    tree.gpu("0000:01:00.0", 0x2b00, 0, "NVIDIA Thor", "GPU-54d0709b-558d-5a59-9c65-0c5fc14a21a4");
    tree.gpu("0003:01:00.0", 0x2bb1, 1, "NVIDIA RTX PRO 6000", "GPU-1");
    tree.nodes("dev", &[0, 1, 2]);
    tree.write("dev/nvmap", "");
    let lists = "etc/nvidia-container-runtime/host-files-for-container.d";
    tree.write(
        &format!("{lists}/devices.csv"),
        "dev, /dev/nvidia0\ndev, /dev/nvidia1\ndev, /dev/nvidia2\ndev, /dev/nvmap\n",
    );
    let root = HostRoot::new(tree.path());
    let found = discovered(&root, MigStrategy::None, &NvmlSnapshot::empty());
    let [card, own] = &found.selection.resources.values().next().unwrap()[..] else {
        panic!("{:?}", found.selection)
    };
    assert_eq!((card.id.as_str(), card.attribute("index")), ("GPU-1", Some("1")));
    assert_eq!((own.id.as_str(), own.attribute("index")), ("tegra", Some("0")));
    let nodes: Vec<&str> = own.nodes.iter().map(|node| node.host.as_str()).collect();
    assert!(nodes.contains(&"/dev/nvmap") && nodes.contains(&"/dev/nvidia2"), "{nodes:?}");
    assert!(!nodes.contains(&"/dev/nvidia1"), "the card's node: {nodes:?}");
    let visible = |devices: &[&Device], device_id_strategy| {
        let options = NvidiaOptions { device_id_strategy, ..NvidiaOptions::default() };
        answer(&root, &found.specs[0], devices, options)["envs"]["NVIDIA_VISIBLE_DEVICES"].clone()
    };
    assert_eq!(visible(&[own, card], DeviceIdStrategy::Uuid), "tegra,GPU-1");
    assert_eq!(visible(&[own, card], DeviceIdStrategy::Index), "0,1");
}
