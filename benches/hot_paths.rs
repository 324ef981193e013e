//! Micro-benchmarks of the hot paths: `cargo bench`.

#![expect(clippy::unwrap_used, reason = "a benchmark that cannot be set up has nothing to measure")]

use divan::{Bencher, black_box};
use holdfast::admin::write_held;
use holdfast::domain::{
    AllocId, ContainerEdits, Device, DeviceId, Durability, Entry, Grant, GrantState, GrantedDevice,
    Health, Inventory, MigStrategy, Offered, Offering, PodRef, Reason, ResourceSpec, Timestamp,
};
use holdfast::hardware;
use holdfast::host::HostRoot;
use holdfast::kubelet::api::v1beta1;
use holdfast::lab::sim::hardware::SimNode;
use holdfast::serving::placement::choose_near;
use holdfast::store::Store;
use holdfast::telemetry::metrics;
use prost::Message;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

fn main() {
    divan::main();
}

fn grant(number: u64) -> Entry {
    let device = |n: u64| GrantedDevice {
        id: DeviceId::new(format!("GPU-{n:032x}")),
        key: format!("pci:{n:x}"),
        numa_nodes: vec![0],
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Entry::Grant(Arc::new(Grant {
        alloc_id: AllocId::new(format!("00000000-0000-7000-8000-{number:012x}")),
        resource: "nvidia.com/gpu".parse().unwrap(),
        devices: (0..2).map(|n| device(number * 2 + n)).collect(),
        edits: ContainerEdits {
            envs: BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".into(), "GPU".repeat(20))]),
            ..ContainerEdits::default()
        },
        claim: None,
        boot_id: "00000000-0000-4000-8000-000000000000".into(),
        kubelet: None,
        granted_at: Timestamp(1_700_000_000_000 + number),
        version: "0.1.0".into(),
        state: GrantState::Granted,
    }))
}

/// One scan of the simulated node, with the selection by the default resources.
#[divan::bench]
fn discover(bencher: Bencher<'_, '_>) {
    let dir = tempfile::tempdir().unwrap();
    let node = SimNode::create(dir.path()).unwrap();
    let root = HostRoot::new(node.root());
    let specs: Vec<_> = hardware::defaults::specs(&hardware::scan(&root), MigStrategy::None)
        .into_iter()
        .map(Arc::new)
        .collect();
    bencher.bench_local(|| hardware::discover(&root, &specs, &BTreeMap::new()));
}

/// One scan of a large server with 560 functions, as many as the largest captured ones have.
#[divan::bench]
fn discover_560(bencher: Bencher<'_, '_>) {
    let dir = tempfile::tempdir().unwrap();
    let root = large_server(dir.path());
    let specs: Vec<_> = hardware::defaults::specs(&hardware::scan(&root), MigStrategy::None)
        .into_iter()
        .map(Arc::new)
        .collect();
    bencher.bench_local(|| hardware::discover(&root, &specs, &BTreeMap::new()));
}

/// One probe of the signals of all devices of such a server.
#[divan::bench]
fn signals_560(bencher: Bencher<'_, '_>) {
    let dir = tempfile::tempdir().unwrap();
    let root = large_server(dir.path());
    let devices = hardware::discover(&root, &[], &BTreeMap::new()).devices;
    bencher.bench_local(|| {
        devices.iter().map(|device| hardware::signals(&root, device).counters.len()).sum::<usize>()
    });
}

fn large_server(dir: &Path) -> HostRoot {
    let root = HostRoot::new(SimNode::create_large(dir, 560, 0).unwrap().root());
    assert_eq!(hardware::scan(&root).functions.len(), 560);
    root
}

/// One ListAndWatch message of 8 or 512 ids, from the inventory to the bytes on the wire.
#[divan::bench(args = [8, 512])]
fn encode_list(bencher: Bencher<'_, '_>, ids: u32) {
    let dir = tempfile::tempdir().unwrap();
    let node = SimNode::create(dir.path()).unwrap();
    let root = HostRoot::new(node.root());
    let scan = hardware::scan(&root);
    let spec = Arc::new(hardware::defaults::specs(&scan, MigStrategy::None).remove(0));
    let device =
        hardware::discover(&root, &[Arc::clone(&spec)], &BTreeMap::new()).devices.remove(0);
    let offered = |n: u32| {
        (device.id.share(n), Offered { device: Arc::clone(&device), health: Health::Healthy })
    };
    let offering = Offering { spec, devices: (0..ids).map(offered).collect() };
    bencher.bench_local(|| v1beta1::list(black_box(&offering)).encode_to_vec());
}

/// The preferred 8 of 64 or 512 devices on a node with two sockets and many switches, near 16
/// devices of another resource.
#[divan::bench(args = [64, 512])]
fn prefer(bencher: Bencher<'_, '_>, devices: u32) {
    let dir = tempfile::tempdir().unwrap();
    let node = SimNode::create(dir.path()).unwrap();
    let root = HostRoot::new(node.root());
    let spec =
        Arc::new(hardware::defaults::specs(&hardware::scan(&root), MigStrategy::None).remove(0));
    let device =
        hardware::discover(&root, &[Arc::clone(&spec)], &BTreeMap::new()).devices.remove(0);
    let offered = |n: u32| {
        let (mut device, id) = ((*device).clone(), device.id.share(n));
        let function = device.pci.as_mut().unwrap();
        let bridge =
            |bus: u32| format!("0000:{:02x}:{:02x}.0", bus % 256, n / 128).parse().unwrap();
        function.address = format!("{:04x}:{:02x}:00.0", 1 + n / 256, n % 256).parse().unwrap();
        function.bridges = vec![bridge(n / 64), bridge(64 + n / 16), bridge(128 + n / 4)];
        (device.id, device.numa_nodes) = (id.clone(), vec![n % 2]);
        (id, Offered { device: Arc::new(device), health: Health::Healthy })
    };
    let offering = Offering { spec, devices: (0..devices).map(offered).collect() };
    let free: Vec<DeviceId> = offering
        .devices
        .keys()
        .step_by(2)
        .chain(offering.devices.keys().skip(1).step_by(2))
        .cloned()
        .collect();
    let neighbours: Vec<_> = offering
        .devices
        .values()
        .step_by(devices as usize / 16)
        .map(|offered| Arc::clone(&offered.device))
        .collect();
    bencher.bench_local(|| choose_near(&offering, &neighbours, black_box(&free), &[], 8).unwrap());
}

/// Compares two inventories of this many devices in eight resources that differ in the health of
/// one device. This runs after each scan.
#[divan::bench(args = [512, 10_000])]
fn inventory_diff(bencher: Bencher<'_, '_>, devices: u64) {
    let dir = tempfile::tempdir().unwrap();
    let node = SimNode::create(dir.path()).unwrap();
    let root = HostRoot::new(node.root());
    let first = hardware::defaults::specs(&hardware::scan(&root), MigStrategy::None).remove(0);
    let device =
        hardware::discover(&root, &[Arc::new(first.clone())], &BTreeMap::new()).devices.remove(0);
    let inventory = |ill: u64| {
        let id = |n: u64| DeviceId::new(format!("GPU-{n:032x}"));
        let health =
            |n: u64| if n == ill { Health::Unhealthy(Reason::Xid) } else { Health::Healthy };
        // Each scan creates new devices.
        let offered = |n: u64| {
            (
                id(n),
                Offered {
                    device: Arc::new(Device { id: id(n), ..(*device).clone() }),
                    health: health(n),
                },
            )
        };
        let offering = |resource: u64| {
            let name = format!("example.com/resource-{resource}")
                .parse::<holdfast::domain::ResourceName>()
                .unwrap();
            let spec = Arc::new(ResourceSpec { name: name.clone(), ..first.clone() });
            (
                name,
                Arc::new(Offering {
                    spec,
                    devices: (resource * devices / 8..(resource + 1) * devices / 8)
                        .map(offered)
                        .collect(),
                }),
            )
        };
        Inventory { resources: (0..8).map(offering).collect() }
    };
    let (before, now) = (inventory(devices), inventory(devices - 1));
    assert!(before != now && before == inventory(devices));
    bencher.bench_local(|| black_box(&before) != black_box(&now));
}

/// One scrape of a node with 512 devices, one in eight of them unhealthy, and 200 pods with two
/// devices each.
#[divan::bench]
fn scrape(bencher: Bencher<'_, '_>) {
    let dir = tempfile::tempdir().unwrap();
    let node = SimNode::create(dir.path()).unwrap();
    let root = HostRoot::new(node.root());
    let first = hardware::defaults::specs(&hardware::scan(&root), MigStrategy::None).remove(0);
    let device =
        hardware::discover(&root, &[Arc::new(first.clone())], &BTreeMap::new()).devices.remove(0);
    let name = |n: u64| {
        format!("example.com/resource-{n}").parse::<holdfast::domain::ResourceName>().unwrap()
    };
    let id = |n: u64| DeviceId::new(format!("GPU-{n:032x}"));
    let health =
        |n: u64| if n.is_multiple_of(8) { Health::Unhealthy(Reason::Xid) } else { Health::Healthy };
    let offering = |resource: u64| {
        let offered = |n: u64| {
            (
                id(n),
                Offered {
                    device: Arc::new(Device { id: id(n), ..(*device).clone() }),
                    health: health(n),
                },
            )
        };
        let spec = Arc::new(ResourceSpec { name: name(resource), ..first.clone() });
        (
            name(resource),
            Arc::new(Offering {
                spec,
                devices: (resource * 64..resource * 64 + 64).map(offered).collect(),
            }),
        )
    };
    let inventory = Inventory { resources: (0..8).map(offering).collect() };
    let held = |n: u64| {
        let Entry::Grant(grant) = grant(n) else { unreachable!("a grant is made") };
        let mut grant = Arc::unwrap_or_clone(grant);
        let pod = PodRef {
            uid: format!("{n:032x}"),
            namespace: Some(format!("team-{}", n % 10)),
            name: Some(format!("train-{n}-worker-0")),
        };
        grant.state = GrantState::Bound { pod, container: "main".into(), bound_at: Timestamp(1) };
        grant.resource = name(n % 8);
        Arc::new(grant)
    };
    let grants: Vec<Arc<Grant>> = (0..200).map(held).collect();
    for resource in (0..8).map(name) {
        metrics::offered(resource.as_str());
        for us in (0..2000).step_by(7) {
            metrics::allocated(resource.as_str(), us % 100 != 0, Duration::from_micros(us));
            metrics::registration_took(resource.as_str(), Duration::from_micros(us));
        }
    }
    let text = metrics::page(|page| write_held(page, &inventory, &grants));
    assert!(text.lines().count() > 700, "{text}");
    bencher.bench_local(|| {
        metrics::page(|page| write_held(page, black_box(&inventory), black_box(&grants)))
    });
}

/// One durable grant: written, synced, and put into the query database.
#[divan::bench(args = [Durability::PowerLoss, Durability::ProcessCrash])]
fn commit(bencher: Bencher<'_, '_>, durability: Durability) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut store, _) = Store::open(dir.path(), durability, None).unwrap();
    let mut number = 0;
    bencher.bench_local(|| {
        number += 1;
        store.append(&[grant(number)]).unwrap();
    });
}

/// A start with this many live grants.
#[divan::bench(args = [100, 1000])]
fn replay(bencher: Bencher<'_, '_>, grants: u64) {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut store, _) = Store::open(dir.path(), Durability::ProcessCrash, None).unwrap();
    store.append(&(0..grants).map(grant).collect::<Vec<_>>()).unwrap();
    store.close().unwrap();
    bencher.bench_local(|| {
        Store::open(dir.path(), Durability::ProcessCrash, None).unwrap().0.close().unwrap();
    });
}
