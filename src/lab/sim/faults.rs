//! Makes host calls fail, one at a time and many at once, below every reader of the host (I12).
//!
//! A daemon's scans, probes and verdicts run on virtual time over a node with every class of
//! device. No failing call may make a device leave its list, get another id, become unhealthy or
//! healthy, or count as free. `HOLDFAST_FAULTS` sets the number of runs.

use super::hardware::SimNode;
use super::health::HealthSimulation;
use super::random::Random;
use crate::domain::{
    AllocId, CharPath, ContainerEdits, DeviceClass, DeviceId, Grant, GrantState, GrantedDevice,
    HealthPolicy, Inventory, ResourceName, ResourceSpec, Select, Sharing, Timestamp,
};
use crate::host::faults::{ERRORS, with_faults};
use crate::host::pods::PodCgroups;
use crate::host::{HostRoot, pods};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const RUNNING_POD: &str = "aaaaaaaa-0000-4000-8000-000000000001";

/// A node with a device of every class, and resources for all of them.
struct Node {
    _dir: tempfile::TempDir,
    root: HostRoot,
    specs: Vec<Arc<ResourceSpec>>,
}

fn write(root: &Path, rel: &str, text: &str) {
    let path = root.join(rel);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn link(root: &Path, target: &str, rel: &str) {
    let path = root.join(rel);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

/// A PCI function with these files, directly in the bus's folder.
fn function(
    root: &Path,
    address: &str,
    class: &str,
    ids: &str,
    driver: &str,
    files: &[(&str, &str)],
) {
    let place = format!("sys/bus/pci/devices/{address}");
    write(
        root,
        &format!("{place}/uevent"),
        &format!("DRIVER={driver}\nPCI_CLASS={class}\nPCI_ID={ids}\nMODALIAS=pci\n"),
    );
    write(root, &format!("{place}/config"), "abcd");
    for (file, text) in files {
        write(root, &format!("{place}/{file}"), text);
    }
}

/// AMD: a GPU that is split into two partitions.
fn create_gpu(root: &Path) {
    let drm = [
        ("drm/card1/dev", "226:1\n"),
        ("drm/renderD128/dev", "226:128\n"),
        ("unique_id", "5a1f2c3d4e5f6071\n"),
    ];
    function(root, "0000:0a:00.0", "120000", "1002:74A1", "amdgpu", &drm);
    for (number, minor, unique) in [(1, 128, 7), (2, 129, 8)] {
        let text = format!(
            "simd_count 80\ndrm_render_minor {minor}\nunique_id {unique}\nlocation_id 2560\ndomain 0\n"
        );
        write(root, &format!("sys/class/kfd/kfd/topology/nodes/{number}/properties"), &text);
    }
    fs::create_dir_all(root.join("sys/devices/platform/amdgpu_xcp_0/drm/renderD129")).unwrap();
}

/// NVMe: a disk for pods, a disk of the host, and a disk with two namespaces.
fn create_disks(root: &Path) {
    for (address, number, serial) in
        [("0000:05:00.0", 0, "FREE"), ("0000:06:00.0", 1, "HOST"), ("0000:07:00.0", 2, "TWO")]
    {
        let controller = format!("nvme/nvme{number}");
        let (model, serial_file) = (format!("{controller}/model"), format!("{controller}/serial"));
        let state = format!("{controller}/state");
        let files = [
            (model.as_str(), "Disk\n"),
            (serial_file.as_str(), serial),
            (state.as_str(), "live\n"),
        ];
        function(root, address, "010802", "144D:A808", "nvme", &files);
        for namespace in 1..=if serial == "TWO" { 2 } else { 1 } {
            let disk = format!("nvme{number}n{namespace}");
            write(
                root,
                &format!("sys/bus/pci/devices/{address}/{controller}/{disk}/wwid"),
                &format!("eui.00{number}{namespace}\n"),
            );
            write(
                root,
                &format!("sys/bus/pci/devices/{address}/{controller}/{disk}/nsid"),
                &format!("{namespace}\n"),
            );
            write(
                root,
                &format!("sys/class/block/{disk}/dev"),
                &format!("259:{}\n", number * 10 + namespace),
            );
            write(root, &format!("dev/{disk}"), "");
        }
    }
    write(root, "sys/class/block/nvme1n1/holders/dm-0/dev", "253:0\n");
    write(root, "proc/1/mountinfo", "36 35 253:0 / / rw shared:1 - ext4 /dev/mapper/root rw\n");
    write(root, "proc/swaps", "Filename Type Size Used Priority\n");
}

/// Interfaces: the host needs one of them.
fn create_interfaces(root: &Path) {
    for (address, name) in [("0000:41:00.0", "eth0"), ("0000:42:00.0", "eth1")] {
        function(
            root,
            address,
            "020000",
            "8086:1572",
            "i40e",
            &[
                (&format!("net/{name}/type"), "1\n"),
                (&format!("net/{name}/flags"), "0x1003\n"),
                (&format!("net/{name}/carrier"), "1\n"),
            ],
        );
        link(
            root,
            &format!("../../bus/pci/devices/{address}/net/{name}"),
            &format!("sys/class/net/{name}"),
        );
    }
    let route = "Iface Destination Gateway Flags RefCnt Use Metric Mask\neth0 00000000 0101A8C0 0003 0 0 0 00000000\n";
    write(root, "proc/1/net/route", route);
}

/// A device for guests, and the nodes of the devices.
fn create_guest_device(root: &Path) {
    function(root, "0000:81:00.0", "030000", "10DE:2204", "vfio-pci", &[]);
    link(
        root,
        "../../../../kernel/iommu_groups/20",
        "sys/bus/pci/devices/0000:81:00.0/iommu_group",
    );
    for node in ["vfio/vfio", "vfio/20", "kfd", "dri/card1", "dri/renderD128", "dri/renderD129"] {
        write(root, &format!("dev/{node}"), "");
    }
}

/// Nodes with udev's links, and disks by their nodes: a free one, and one that the host uses.
fn create_links_and_block_nodes(root: &Path) {
    for number in 0..3 {
        write(root, &format!("dev/ttyUSB{number}"), "");
        link(root, &format!("../../ttyUSB{number}"), &format!("dev/serial/by-path/pci-{number}"));
        link(root, &format!("../../ttyUSB{number}"), &format!("dev/serial/by-id/usb-{number}"));
    }
    for (disk, holder) in [("sdx", None), ("sdy", Some("dm-1"))] {
        write(root, &format!("dev/{disk}"), "");
        write(root, &format!("sys/class/block/{disk}/dev"), "8:0\n");
        if let Some(holder) = holder {
            fs::create_dir_all(root.join(format!("sys/class/block/{disk}/holders/{holder}")))
                .unwrap();
        }
    }
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        SimNode::create(dir.path()).unwrap();
        let root = dir.path();
        create_gpu(root);
        create_disks(root);
        create_interfaces(root);
        create_guest_device(root);
        create_links_and_block_nodes(root);
        // A pod that runs.
        let pod = format!(
            "sys/fs/cgroup/kubepods.slice/kubepods-pod{}.slice",
            RUNNING_POD.replace('-', "_")
        );
        write(root, "sys/fs/cgroup/cgroup.controllers", "cpu\n");
        for folder in [pod.clone(), format!("{pod}/cri-a.scope"), format!("{pod}/cri-b.scope")] {
            write(root, &format!("{folder}/cgroup.events"), "populated 1\n");
        }
        fs::create_dir_all(root.join(format!("var/log/pods/ml_train_{RUNNING_POD}"))).unwrap();
        let root = HostRoot::new(dir.path());
        Node { _dir: dir, root, specs: specs() }
    }
}

fn specs() -> Vec<Arc<ResourceSpec>> {
    let of = |name: &str, class| ResourceSpec::new(name.parse().unwrap(), class);
    let vendor = |vendor| Select { vendor: vec![vendor], ..Select::default() };
    let driver = |driver: &str| Select { driver: vec![driver.to_owned()], ..Select::default() };
    let char = |name: &str, globs: &[&str]| {
        let path = |glob: &&str| CharPath {
            host: (*glob).into(),
            container: None,
            permissions: "rw".into(),
            udev: Vec::new(),
        };
        ResourceSpec { paths: globs.iter().map(path).collect(), ..of(name, DeviceClass::Char) }
    };
    let specs = [
        ResourceSpec { select: driver("nvidia"), ..of("a.com/nvidia", DeviceClass::Gpu) },
        ResourceSpec {
            select: vendor(0x1002),
            sharing: Sharing::Replicas(2),
            ..of("a.com/amd", DeviceClass::Gpu)
        },
        ResourceSpec { select: driver("vfio-pci"), ..of("a.com/guest", DeviceClass::Gpu) },
        ResourceSpec {
            select: Select { vf: Some(true), ..Select::default() },
            ..of("a.com/vf", DeviceClass::Rdma)
        },
        ResourceSpec { sharing: Sharing::Pool(4), ..of("a.com/hca", DeviceClass::Rdma) },
        of("a.com/disk", DeviceClass::Nvme),
        of("a.com/nic", DeviceClass::Nic),
        of("a.com/fpga", DeviceClass::Fpga),
        char("a.com/tty", &["/dev/ttyUSB*"]),
        char("a.com/raw", &["/dev/sdx", "/dev/sdy"]),
    ];
    specs.into_iter().map(Arc::new).collect()
}

fn grant(number: u32, resource: &ResourceName, id: &DeviceId, inventory: &Inventory) -> Arc<Grant> {
    let device = &inventory.resources[resource].devices[id].device;
    Arc::new(Grant {
        alloc_id: AllocId::new(format!("a-{number}")),
        resource: resource.clone(),
        devices: vec![GrantedDevice {
            id: id.clone(),
            key: device.key.clone(),
            numa_nodes: device.numa_nodes.clone(),
            nodes: Vec::new(),
            objects: device.objects(),
        }],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "first".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state: GrantState::Granted,
    })
}

/// Every id with its health, by resource.
fn list(inventory: &Inventory) -> BTreeMap<(String, String), String> {
    let of = |(name, offering): (&ResourceName, &Arc<crate::domain::Offering>)| {
        let devices = offering.devices.iter().map(|(id, offered)| {
            let health = offered
                .health
                .reason()
                .map_or_else(|| "ok".to_owned(), |reason| reason.to_string());
            ((name.to_string(), id.to_string()), health)
        });
        devices.collect::<Vec<_>>()
    };
    inventory.resources.iter().flat_map(of).collect()
}

/// Selects the calls of a run that fail, and their errno.
fn plan(random: &mut Random, calls: u64) -> impl FnMut(u64) -> Option<i32> + use<> {
    let errno = ERRORS[random.below(ERRORS.len())];
    let at = random.number() % calls.max(1);
    let (from, to) = match random.below(5) {
        // One call, some in a row, all of them, or 3 % at random.
        0 | 1 => (at, at + 1),
        2 => (at, at + 1 + random.number() % 50),
        3 => (0, u64::MAX),
        _ => (u64::MAX, u64::MAX),
    };
    let mut own = Random::new(random.number());
    move |call| {
        let is_in = (from..to).contains(&call) || from == u64::MAX && own.chance(0.03);
        is_in.then_some(errno)
    }
}

/// Breaks two devices for real: a failing read must neither clear nor worsen their verdicts.
fn fail_some(root: &Path) {
    fs::remove_file(root.join("dev/dri/renderD129")).unwrap();
    fs::write(root.join("sys/bus/pci/devices/0000:05:00.0/nvme/nvme0/state"), "dead\n").unwrap();
}

#[test]
fn a_failing_host_call_changes_no_id_and_no_health_and_releases_nothing() {
    let runs: u64 =
        std::env::var("HOLDFAST_FAULTS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(60);
    let node = Node::new();
    let start = |now| {
        HealthSimulation::start(node.root.clone(), node.specs.clone(), HealthPolicy::default(), now)
    };
    let mut simulation = start(Duration::from_secs(60));
    let all = list(simulation.inventory());
    assert!(all.values().all(|health| health == "ok"), "{all:?}");
    assert!(
        all.len() > 30
            && !all
                .keys()
                .any(|(_, id)| id.contains("HOST") || id == "dev:sdy" || id == "0000:41:00.0"),
        "{all:?}"
    );
    fail_some(node.root.path("").as_path());
    let inventory = simulation.inventory().clone();
    let held = [
        ("a.com/nvidia", 0),
        ("a.com/tty", 1),
        ("a.com/disk", 1),
        ("a.com/amd", 0),
        ("a.com/vf", 2),
    ]
    .map(|(name, at)| {
        let name: ResourceName = name.parse().unwrap();
        let id = inventory.resources[&name].devices.keys().nth(at).unwrap().clone();
        grant(at as u32, &name, &id, &inventory)
    });
    simulation.hold(held.to_vec());
    simulation.scan();
    simulation.advance(Duration::from_secs(200));
    let settled = list(simulation.inventory());
    let unhealthy: Vec<_> = settled
        .iter()
        .filter(|(_, health)| *health != "ok")
        .map(|((_, id), health)| format!("{id}: {health}"))
        .collect();
    assert_eq!(unhealthy.len(), 3, "{unhealthy:?}");

    let (_, calls) = with_faults(|_| None, || simulation.scan());
    assert!(calls > 500, "{calls}");
    let mut now = Duration::from_secs(200);
    for seed in 0..runs {
        let mut random = Random::new(seed);
        // Two or more rounds take longer than the minute that an absent device stays in a list.
        for _ in 0..1 + random.below(4) {
            now += Duration::from_secs(40);
            let (fault, until) = (plan(&mut random, calls), now);
            with_faults(fault, || {
                simulation.scan();
                simulation.advance(until);
            });
            assert_eq!(list(simulation.inventory()), settled, "seed {seed}");
        }
        if seed % 10 == 0 {
            // A daemon that starts meanwhile has no memory: it offers only devices that exist,
            // under the same ids.
            let fault = plan(&mut random, calls);
            let (fresh, _) = with_faults(fault, || start(now));
            let known = |(key, health): (&(String, String), &String)| {
                all.contains_key(key) && (health == "ok" || settled[key] != "ok")
            };
            assert!(
                list(fresh.inventory()).iter().all(known),
                "seed {seed}: {:?}",
                list(fresh.inventory())
            );
        }
        let fault = plan(&mut random, 20);
        let root = node.root.path("");
        let ((state, running, names), _) = with_faults(fault, || {
            let cgroups = PodCgroups::find(&root, None);
            (cgroups.state(RUNNING_POD), cgroups.populated_below(RUNNING_POD), pods::names(&root))
        });
        assert!(!state.is_dead(), "seed {seed}: the pod runs");
        assert!(running.is_err() || running.is_ok_and(|running| running == 2), "seed {seed}");
        assert!(names.is_err() || names.is_ok_and(|names| names.len() == 1), "seed {seed}");
    }
    simulation.scan();
    simulation.advance(now + Duration::from_secs(40));
    assert_eq!(list(simulation.inventory()), settled);
}
