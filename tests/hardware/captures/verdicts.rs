//! Verdicts on failing devices of captured machines, with scans, probes and the judge on virtual
//! time.
//!
//! Each fault is reported with its reason exactly when its patience ends, and cleared exactly when
//! its hold ends. Values that only resemble a fault change nothing, on any machine.
//!
//! | made on a captured machine | held by |
//! | --- | --- |
//! | surprise removal, a missing node | [`FAULTS`], `device_gone`, `node_missing` |
//! | a lost driver, or another one in its place | [`FAULTS`], `driver_lost` |
//! | a lost driver of a held device | `a_held_device_without_its_driver_is_unhealthy_and_listed` |
//! | off the bus | [`FAULTS`], `off_the_bus` |
//! | a virtual function's all ones | `harmless_states_are_no_faults_on_any_machine` |
//! | AER at the device; at the root port alone | [`FAULTS`], `aer_fatal`, `aer_fatal_above` |
//! | a port down or in `INIT`; the RDMA device missing | [`FAULTS`], `port_down`, `rdma_lost` |
//! | a port in `INIT` for a short time | [`PASSING`] |
//! | NVMe dead, resetting; its folder missing | [`FAULTS`], `nvme_dead`, `nvme_not_live` |
//! | NVMe resetting, then live | [`PASSING`] |
//! | a narrow or slow link, no NUMA node | `harmless_states_are_no_faults_on_any_machine` |
//! | virtual functions removed | `removed_virtual_functions_return_unchanged` |
//! | a group that no guest can have | [`FAULTS`], `iommu_group_not_viable` |
//! | other numbers | `names::another_order_of_enumeration_renames_no_device` |
//! | a read that hangs | `a_stuck_probe_is_abandoned_and_other_devices_are_probed` |
//! | a read of a pipe without a writer | `signals`, `damage`, `tests/health.rs` |
//! | an event of the kernel | `a_kernel_event_counts_until_a_reset_in_spite_of_good_probes` |
//! | an event of the kernel, end to end | `tests/health.rs` |

use crate::hardware::captures::archive::{Capture, captures, copy_tree, folder};
use crate::hardware::captures::fault::{Edit, Fault, ONES};
use holdfast::domain::{
    AllocId, ContainerEdits, DeviceClass, DeviceEvent, DeviceId, EventKind, Grant, GrantState,
    GrantedDevice, HealthPolicy, MigStrategy, Reason, ResourceSpec, Select, Timestamp,
    VerdictState,
};
use holdfast::hardware::{Discovery, defaults, discover, scan};
use holdfast::host::HostRoot;
use holdfast::lab::sim::health::HealthSimulation;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A captured machine whose devices are offered, with one resource for each class.
struct Machine {
    root: PathBuf,
    specs: Vec<Arc<ResourceSpec>>,
    /// The ids of all whole devices, by address.
    ids: BTreeMap<String, DeviceId>,
    _dir: tempfile::TempDir,
}

impl Machine {
    fn copy(capture: &Capture) -> Machine {
        Machine::prepared(capture, false)
    }

    /// The same; with `guest` after [`for_guests`], and with a resource for guests.
    fn prepared(capture: &Capture, guest: bool) -> Machine {
        let dir = folder();
        let root = dir.path().join("root");
        copy_tree(&capture.root, &root);
        if guest {
            for_guests(&root);
        }
        let host = HostRoot::new(&root);
        let mut specs: Vec<Arc<ResourceSpec>> =
            defaults::specs(&scan(&host), MigStrategy::None).into_iter().map(Arc::new).collect();
        for class in [
            DeviceClass::Rdma,
            DeviceClass::Nic,
            DeviceClass::Nvme,
            DeviceClass::Fpga,
            DeviceClass::Accelerator,
        ] {
            specs.push(Arc::new(ResourceSpec::new(
                format!("example.com/{class}").parse().unwrap(),
                class,
            )));
        }
        specs.extend(guest.then(|| {
            let select = Select { driver: vec!["vfio-pci".into()], ..Select::default() };
            Arc::new(ResourceSpec {
                select,
                ..ResourceSpec::new("example.com/guest".parse().unwrap(), DeviceClass::Gpu)
            })
        }));
        let found = discover(&host, &specs, &BTreeMap::new());
        complete(&root, &found);
        let found = discover(&host, &specs, &BTreeMap::new());
        // Most captures have no `/dev`.
        for node in
            found.devices.iter().flat_map(|device| &device.nodes).filter(|node| node.required)
        {
            let path = root.join(node.host.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if !path.exists() {
                fs::write(path, "").unwrap();
            }
        }
        let wholes = found.devices.iter().filter(|device| device.attribute("part").is_none());
        let ids = wholes
            .filter_map(|device| {
                Some((device.pci.as_ref()?.address.to_string(), device.id.clone()))
            })
            .collect();
        Machine { root, specs, ids, _dir: dir }
    }

    fn named(name: &str) -> Option<Machine> {
        let captures = captures()?;
        let named = |name| captures.iter().find(|capture| capture.name == name).unwrap();
        Some(Machine::prepared(named(if name == GUESTS { A2 } else { name }), name == GUESTS))
    }

    fn start(&self) -> HealthSimulation {
        HealthSimulation::start(
            HostRoot::new(&self.root),
            self.specs.clone(),
            HealthPolicy::default(),
            at(1000),
        )
    }
}

/// Adds nodes that some captures lack though the driver makes them for containers: a render node,
/// that of RDMA verbs.
fn complete(root: &Path, found: &Discovery) {
    for (number, (id, missing)) in found.unfulfilled.iter().enumerate() {
        let device = found.devices.iter().find(|device| device.id == *id).unwrap();
        let function = device.pci.as_ref().unwrap();
        let (file, text) = match missing.rsplit('/').next().unwrap() {
            "renderD" => (format!("drm/renderD{}/dev", 200 + number), "226:200\n".to_owned()),
            "uverbs" => (
                format!("infiniband_verbs/uverbs{}/ibdev", 200 + number),
                format!("{}\n", function.rdma[0]),
            ),
            other => panic!("{id} lacks {other}"),
        };
        let path = root.join(format!("sys/bus/pci/devices/{}/{file}", function.address));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

/// Gives the GPU's virtual functions to guests, and the whole group of the display, which is
/// declared a GPU.
fn for_guests(root: &Path) {
    let vfs: Vec<String> = (0..16).map(|n| vf(root, n)).collect();
    for address in vfs.iter().map(String::as_str).chain(GROUP) {
        Fault::make(root, address, &VFIO);
    }
    Fault::make(root, DISPLAY, &[Edit::Text("vendor", b"0x10de\n")]);
}

/// The address of the GPU's virtual function.
fn vf(root: &Path, index: usize) -> String {
    let link = root.join(format!("sys/bus/pci/devices/{GPU}/virtfn{index}"));
    fs::read_link(link).unwrap().file_name().unwrap().to_str().unwrap().to_owned()
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Advances in half seconds until the condition holds, for at most `most` seconds. Returns the time
/// that it took.
fn wait(
    simulation: &mut HealthSimulation,
    most: u64,
    fits: impl Fn(&HealthSimulation) -> bool,
) -> Option<Duration> {
    let began = simulation.now();
    for _ in 0..=most * 2 {
        if fits(simulation) {
            return Some(simulation.now() - began);
        }
        simulation.advance(simulation.now() + Duration::from_millis(500));
    }
    None
}

/// How a failure ends.
enum Ends {
    /// This many seconds after it is undone.
    Undone(u64),
    /// This many seconds after it was reported, when its cause is no longer seen.
    ByItself(u64),
    /// By evidence of a reset only.
    ByReset,
}

/// One row: the machine, the function, the edits, the reason, the seconds until it is reported, and
/// how it ends.
type Row<'a> = (&'a str, &'a str, &'a [Edit<'a>], Reason, u64, Ends);

const GPU: &str = "0000:08:00.0";
const PORT: &str = "0000:00:03.0";
const DISK: &str = "0000:05:00.0";
const CARD: &str = "0000:b1:00.0";
const A2: &str = "nvidia-a2-vgpu";
const IB: (&str, &str) = ("ibm-ac922-lassen", "0033:01:00.0");
const FPGA: &str = "fpga-n6000-sku1-vfs";
/// [`A2`] after [`for_guests`].
const GUESTS: &str = "nvidia-a2-vgpu for guests";
const DISPLAY: &str = "0000:01:00.1";
const SIBLING: &str = "0000:01:00.2";
/// The group 33.
const GROUP: [&str; 4] = ["0000:01:00.0", DISPLAY, SIBLING, "0000:01:00.4"];
const VFIO: [Edit<'_>; 2] = [
    Edit::Leads("driver", "../../../../bus/pci/drivers/vfio-pci"),
    Edit::Text("uevent", b"DRIVER=vfio-pci\n"),
];
const NO_DRIVER: [Edit<'_>; 2] = [Edit::Gone("driver"), Edit::Text("uevent", b"PCI_CLASS=0\n")];
/// A disk without its driver has no controller.
const NO_DISK: [Edit<'_>; 3] =
    [Edit::Gone("driver"), Edit::Text("uevent", b"PCI_CLASS=0\n"), Edit::Gone("nvme")];

/// Faults begin three seconds after a poll, which comes every ten: a probe finds them seven seconds
/// later, a scan at once.
#[rustfmt::skip]
const FAULTS: &[Row<'_>] = {
    use Edit::{Gone, Leads, Text};
    use Ends::{ByItself, ByReset, Undone};
    &[
        // Presence: reported at once, and cleared a second after the scan that sees it again. A
        // device that must be probed first needs another second.
        (A2, DISK, &[Gone("sys/bus/pci/devices/0000:05:00.0")], Reason::DeviceGone, 0, Undone(2)),
        (A2, DISK, &[Gone("dev/nvme0n1")], Reason::NodeMissing, 0, Undone(1)),
        (A2, GPU, &NO_DRIVER, Reason::DriverLost, 0, Undone(2)),
        (A2, GPU, &VFIO, Reason::DriverLost, 0, Undone(2)),
        (A2, DISK, &NO_DISK, Reason::DriverLost, 0, Undone(2)),
        (IB.0, IB.1, &[Gone("driver"), Gone("infiniband"), Gone("sys/class/infiniband/mlx5_2"), Gone("net")], Reason::DriverLost, 0, Undone(2)),
        (GUESTS, DISPLAY, &NO_DRIVER, Reason::DriverLost, 0, Undone(2)),
        (GUESTS, SIBLING, &[Leads("driver", "../../../../bus/pci/drivers/hpilo"), Text("uevent", b"DRIVER=hpilo\n")], Reason::GroupNotViable, 0, Undone(1)),
        // Hard: reported at the first probe, and cleared half a minute after the first good one.
        (A2, DISK, &[Text("config", &ONES)], Reason::OffTheBus, 7, Undone(37)),
        (A2, DISK, &[Text("nvme/nvme0/state", b"dead\n")], Reason::NvmeDead, 7, Undone(37)),
        // The scan sees at once that its folder is back: the hold begins there.
        (A2, DISK, &[Gone("nvme")], Reason::NvmeDead, 7, Undone(30)),
        (FPGA, CARD, &[Text("fpga_region/region0/dfl-fme.0/errors/catfatal_errors", b"0x40\n")], Reason::FpgaError, 7, Undone(37)),
        // Soft: reported when it has lasted.
        (A2, DISK, &[Text("power_state", b"error\n")], Reason::PowerError, 37, Undone(37)),
        (A2, DISK, &[Text("nvme/nvme0/state", b"resetting\n")], Reason::NvmeNotLive, 67, Undone(37)),
        (A2, "0000:04:00.0", &[Text("net/eno49/carrier", b"0\n")], Reason::NoCarrier, 37, Undone(37)),
        (A2, DISK, &[Text("hwmon/hwmon9/temp1_crit_alarm", b"1\n")], Reason::TooHot, 37, Undone(37)),
        (IB.0, IB.1, &[Text("infiniband/mlx5_2/ports/1/state", b"1: DOWN\n"), Text("infiniband/mlx5_2/ports/1/phys_state", b"2: Polling\n")], Reason::PortDown, 37, Undone(37)),
        (IB.0, IB.1, &[Text("infiniband/mlx5_2/ports/1/state", b"2: INIT\n")], Reason::PortDown, 37, Undone(37)),
        (IB.0, IB.1, &[Gone("infiniband")], Reason::RdmaLost, 37, Undone(30)),
        // Counted by the bridge above: the devices below it show no further sign.
        (A2, PORT, &[Text("aer_dev_fatal", b"Undefined 0\nDLP 0\nTLP 1\nTOTAL_ERR_FATAL 1\n")], Reason::AerFatalAbove, 7, ByItself(40)),
        // Sticky.
        (A2, GPU, &[Text("aer_dev_fatal", b"Undefined 0\nDLP 0\nTLP 1\nTOTAL_ERR_FATAL 1\n")], Reason::AerFatal, 7, ByReset),
    ]
};

/// Whether a listed device is at this address, or a virtual function of the GPU.
fn is_below(simulation: &HealthSimulation, owner: &str, id: &DeviceId) -> bool {
    simulation.inventory().resources.values().any(|offering| {
        let device = offering.devices.get(id).and_then(|offered| offered.device.pci.as_ref());
        device.is_some_and(|pci| {
            pci.address.to_string() == owner || pci.physfn.is_some_and(|of| of.to_string() == GPU)
        })
    })
}

#[test]
fn every_fault_is_reported_and_cleared_at_its_time_with_its_reason() {
    if captures().is_none() {
        return;
    }
    let mut machines = BTreeMap::new();
    for (name, address, edits, reason, after, ends) in FAULTS {
        let case = format!("{name} {address} {reason}");
        let machine = machines.entry(name).or_insert_with(|| Machine::named(name).unwrap());
        let mut simulation = machine.start();
        simulation.advance(at(1013));
        let before = simulation.unhealthy();
        // The device that the fault affects.
        let owner = match *address {
            PORT => GPU,
            SIBLING => DISPLAY,
            own => own,
        };
        let of: BTreeSet<&DeviceId> = machine.ids.get(owner).into_iter().collect();
        let is_told = |simulation: &HealthSimulation| {
            simulation.unhealthy().values().any(|told| told == reason)
        };
        assert!(!is_told(&simulation), "{case}: {before:?}");
        let fault = Fault::make(&machine.root, address, edits);
        // A change of a folder in sysfs or `/dev` comes with an event.
        let is_heard = edits.iter().any(|edit| matches!(edit, Edit::Gone(_) | Edit::Leads(..)));
        if is_heard {
            simulation.scan();
        }
        assert_eq!(
            wait(&mut simulation, 100, is_told),
            Some(at(*after)),
            "{case}: when it was reported; {:?}",
            simulation.unhealthy()
        );
        let told: BTreeMap<_, _> =
            simulation.unhealthy().into_iter().filter(|(id, _)| !before.contains_key(id)).collect();
        assert!(told.values().all(|told| told == reason), "{case}: {told:?}");
        // No other device is affected. If a card is offered by its parts, all parts are.
        let is_affected = |id: &DeviceId| of.contains(id) || is_below(&simulation, owner, id);
        assert!(told.keys().all(is_affected), "{case}: {told:?}");
        let is_over = |simulation: &HealthSimulation| simulation.unhealthy() == before;
        match ends {
            Ends::ByItself(seconds) => assert_eq!(
                wait(&mut simulation, 100, is_over),
                Some(at(*seconds)),
                "{case}: when it was over"
            ),
            Ends::Undone(seconds) => {
                // A free device that is absent leaves the list after a minute.
                simulation.advance(simulation.now() + at(if *after == 0 { 30 } else { 33 }));
                assert!(is_told(&simulation), "{case}: it lasts");
                fault.mend();
                if is_heard {
                    simulation.scan();
                }
                assert_eq!(
                    wait(&mut simulation, 100, is_over),
                    Some(at(*seconds)),
                    "{case}: when it was over; {:?}",
                    simulation.unhealthy()
                );
                continue;
            }
            Ends::ByReset => {
                simulation.advance(at(1313));
                assert!(is_told(&simulation), "{case}: it lasts");
                simulation.deliver_event(&DeviceEvent {
                    at: address.parse().unwrap(),
                    whole_slot: false,
                    instance: None,
                    kind: EventKind::Recovered,
                });
                assert_eq!(
                    wait(&mut simulation, 100, is_over),
                    Some(Duration::from_millis(30_500)),
                    "{case}: when it was over"
                );
            }
        }
        // It is not reported again.
        simulation.advance(simulation.now() + at(100));
        assert!(is_over(&simulation), "{case}: {:?}", simulation.unhealthy());
        fault.mend();
    }
}

/// Faults that end before their patience does: the machine, the function, the edits, the reason
/// that is not reported, and the seconds that it lasts.
#[rustfmt::skip]
const PASSING: &[(&str, &str, &[Edit<'_>], Reason, u64)] = &[
    (A2, DISK, &[Edit::Text("nvme/nvme0/state", b"resetting\n")], Reason::NvmeNotLive, 55),
    (IB.0, IB.1, &[Edit::Text("infiniband/mlx5_2/ports/1/state", b"2: INIT\n")], Reason::PortDown, 25),
    (A2, "0000:04:00.0", &[Edit::Text("net/eno49/carrier", b"0\n")], Reason::NoCarrier, 25),
];

#[test]
fn a_short_fault_is_never_reported() {
    for (name, address, edits, reason, lasts) in PASSING {
        let Some(machine) = Machine::named(name) else { return };
        let mut simulation = machine.start();
        simulation.advance(at(1013));
        let (before, id) = (simulation.unhealthy(), &machine.ids[*address]);
        let fault = Fault::make(&machine.root, address, edits);
        let is_told = |simulation: &HealthSimulation| simulation.unhealthy() != before;
        assert_eq!(
            wait(&mut simulation, *lasts, is_told),
            None,
            "{name} {reason}: {:?}",
            simulation.unhealthy()
        );
        let state = simulation.verdict(id).map(|verdict| verdict.state);
        assert!(
            matches!(state, Some(VerdictState::Suspect { reason: seen, .. }) if seen == *reason),
            "{name} {reason}: it was seen: {state:?}"
        );
        fault.mend();
        assert_eq!(
            wait(&mut simulation, 100, is_told),
            None,
            "{name} {reason}: {:?}",
            simulation.unhealthy()
        );
        let state = simulation.verdict(id).map(|verdict| verdict.state);
        assert!(
            matches!(state, None | Some(VerdictState::Healthy)),
            "{name} {reason}: it is forgotten: {state:?}"
        );
    }
}

#[test]
fn a_held_device_without_its_driver_is_unhealthy_and_listed() {
    for (name, address, edits) in [
        (A2, GPU, &NO_DRIVER[..]),
        (A2, GPU, &VFIO),
        (A2, DISK, &NO_DISK),
        (GUESTS, DISPLAY, &NO_DRIVER),
    ] {
        let Some(machine) = Machine::named(name) else { return };
        let mut simulation = machine.start();
        simulation.advance(at(1013));
        let id = &machine.ids[address];
        simulation.hold(vec![grant(&simulation, id)]);
        let fault = Fault::make(&machine.root, address, edits);
        simulation.scan();
        // It stays in the list for as long as it is held.
        for until in [1014, 1200] {
            simulation.advance(at(until));
            assert_eq!(
                simulation.unhealthy().get(id),
                Some(&Reason::DriverLost),
                "{name} {address} {until}"
            );
        }
        fault.mend();
        simulation.scan();
        assert_eq!(
            wait(&mut simulation, 10, |simulation| !simulation.unhealthy().contains_key(id)),
            Some(at(2)),
            "{name} {address}"
        );
    }
}

/// A grant of this device to a container.
fn grant(simulation: &HealthSimulation, id: &DeviceId) -> Arc<Grant> {
    let mut offered = simulation.inventory().resources.iter();
    let (resource, device) = offered
        .find_map(|(name, offering)| Some((name, &offering.devices.get(id)?.device)))
        .unwrap();
    let device = GrantedDevice {
        id: id.clone(),
        key: device.key.clone(),
        numa_nodes: device.numa_nodes.clone(),
        nodes: Vec::new(),
        objects: Vec::new(),
    };
    Arc::new(Grant {
        alloc_id: AllocId::new("a-1"),
        resource: resource.clone(),
        devices: vec![device],
        edits: ContainerEdits::default(),
        claim: None,
        boot_id: "first".into(),
        kubelet: None,
        granted_at: Timestamp(1),
        version: "1".into(),
        state: GrantState::Granted,
    })
}

#[test]
fn removed_virtual_functions_return_unchanged() {
    let Some(machine) = Machine::named(GUESTS) else { return };
    let mut simulation = machine.start();
    let guests = "example.com/guest".parse().unwrap();
    let listed = |simulation: &HealthSimulation| {
        simulation.inventory().resources[&guests].devices.keys().cloned().collect::<BTreeSet<_>>()
    };
    let vfs: Vec<String> = (0..16).map(|index| vf(&machine.root, index)).collect();
    let of_vfs: BTreeSet<DeviceId> = vfs.iter().map(|vf| machine.ids[vf].clone()).collect();
    simulation.advance(at(1013));
    let (before, all) = (simulation.unhealthy(), listed(&simulation));
    assert!(before.is_empty() && of_vfs.is_subset(&all), "{before:?}");
    let held = machine.ids[&vfs[3]].clone();
    simulation.hold(vec![grant(&simulation, &held)]);

    // `echo 0 > sriov_numvfs`: first the functions disappear, then their links.
    let gone: Vec<Fault> = vfs
        .iter()
        .map(|vf| {
            Fault::make(&machine.root, vf, &[Edit::Gone(&format!("sys/bus/pci/devices/{vf}"))])
        })
        .collect();
    simulation.scan();
    let links: Vec<String> = (0..16).map(|index| format!("virtfn{index}")).collect();
    let edits: Vec<Edit<'_>> = links
        .iter()
        .map(|link| Edit::Gone(link))
        .chain([Edit::Text("sriov_numvfs", b"0\n")])
        .collect();
    let unlinked = Fault::make(&machine.root, GPU, &edits);
    simulation.scan();
    let told = simulation.unhealthy();
    assert!(
        told.keys().eq(&of_vfs) && told.values().all(|reason| *reason == Reason::DeviceGone),
        "{told:?}"
    );
    simulation.advance(at(1100));
    assert_eq!(
        simulation.unhealthy(),
        [(held.clone(), Reason::DeviceGone)].into(),
        "what is free leaves the list after a minute"
    );

    // They come back, each without the links that make it a virtual function, and without a driver.
    let bare: Vec<Fault> = {
        gone.into_iter().for_each(Fault::mend);
        let bare = |vf: &String| {
            Fault::make(&machine.root, vf, &[Edit::Gone("physfn"), NO_DRIVER[0], NO_DRIVER[1]])
        };
        vfs.iter().map(bare).collect()
    };
    simulation.scan();
    simulation.advance(at(1101));
    let offered: BTreeSet<DeviceId> = simulation
        .inventory()
        .resources
        .values()
        .flat_map(|offering| offering.devices.keys().cloned())
        .collect();
    assert_eq!(
        offered.intersection(&of_vfs).collect::<Vec<_>>(),
        [&held],
        "no resource gets a function before its owner is known"
    );
    assert!(
        !simulation.unhealthy().values().any(|reason| *reason == Reason::Deselected),
        "{:?}",
        simulation.unhealthy()
    );
    unlinked.mend();
    simulation.scan();
    bare.into_iter().for_each(Fault::mend);
    simulation.scan();
    let are_back = |simulation: &HealthSimulation| {
        listed(simulation) == all
            && of_vfs.iter().all(|vf| !simulation.unhealthy().contains_key(vf))
    };
    assert_eq!(wait(&mut simulation, 70, are_back), Some(at(2)), "{:?}", simulation.unhealthy());
    // Meanwhile their physical function was offered itself.
    assert_eq!(simulation.unhealthy(), [(machine.ids[GPU].clone(), Reason::Deselected)].into());
}

#[test]
fn a_stuck_probe_is_abandoned_and_other_devices_are_probed() {
    let Some(machine) = Machine::named(A2) else { return };
    let mut simulation = machine.start();
    simulation.advance(at(1013));
    let (disk, gpu) = (&machine.ids[DISK], &machine.ids[GPU]);
    simulation.hang_probes(disk);
    let other = Fault::make(&machine.root, GPU, &[Edit::Text("config", &ONES)]);
    assert_eq!(
        wait(&mut simulation, 20, |simulation| simulation.unhealthy().contains_key(gpu)),
        Some(at(7)),
        "as if nothing hung"
    );
    simulation.advance(at(1022));
    assert!(
        matches!(
            simulation.verdict(disk).unwrap().state,
            VerdictState::Suspect { reason: Reason::ProbeStuck, .. }
        ),
        "given up two seconds later"
    );
    // Its patience begins there.
    assert_eq!(
        wait(&mut simulation, 100, |simulation| simulation.unhealthy().contains_key(disk)),
        Some(at(30))
    );
    assert_eq!(simulation.unhealthy()[disk], Reason::ProbeStuck);
    simulation.advance(at(1113));
    other.mend();
    assert_eq!(
        wait(&mut simulation, 100, |simulation| !simulation.unhealthy().contains_key(gpu)),
        Some(at(37)),
        "as if nothing hung"
    );
    // The result of a probe from a minute ago is no evidence; the next probe is requested at once.
    simulation.release_probes(disk);
    assert_eq!(simulation.unhealthy()[disk], Reason::ProbeStuck);
    assert_eq!(
        wait(&mut simulation, 100, |simulation| simulation.unhealthy().is_empty()),
        Some(at(31))
    );
}

#[test]
fn a_kernel_event_counts_until_a_reset_in_spite_of_good_probes() {
    let Some(machine) = Machine::named(A2) else { return };
    let event = |kind| DeviceEvent {
        at: GPU.parse().unwrap(),
        whole_slot: matches!(kind, EventKind::Xid(_)),
        instance: None,
        kind,
    };
    for (kind, reason) in [
        (EventKind::Xid(79), Reason::Xid),
        (EventKind::Wedged("rebind,bus-reset".into()), Reason::Wedged),
        (EventKind::RecoveryBegan, Reason::ErrorRecovery),
        (EventKind::RecoveryFailed, Reason::RecoveryFailed),
    ] {
        let mut simulation = machine.start();
        simulation.advance(at(1013));
        let before = simulation.unhealthy();
        simulation.deliver_event(&event(kind.clone()));
        let told = simulation.unhealthy();
        assert!(told.values().any(|told| *told == reason), "{kind:?}: {told:?}");
        simulation.advance(at(1213));
        assert_eq!(simulation.unhealthy(), told, "{kind:?} is cleared without a reset");
        if reason != Reason::ErrorRecovery {
            simulation.restart("first", at(1300));
            simulation.advance(at(1360));
            assert_eq!(simulation.unhealthy(), told, "{kind:?} is lost at a restart of the daemon");
        }
        simulation.restart("second", at(20));
        simulation.advance(at(21));
        assert_eq!(simulation.unhealthy(), before, "{kind:?} is kept over a reboot");
    }
}

/// Values that healthy machines show too, for each device that has the file. A line holds edits
/// that can be made together.
#[rustfmt::skip]
const LIES: &[&[Edit<'_>]] = {
    use Edit::{Gone, Text};
    &[
        &[Text("power_state", b"D3hot\n"), Text("enable", b"0\n"), Text("current_link_width", b"1\n"), Text("current_link_speed", b"2.5 GT/s PCIe\n"), Text("numa_node", b"-1\n")],
        &[Text("power_state", b"unknown\n"), Text("current_link_speed", b"Unknown\n"), Text("config", b""), Text("aer_dev_correctable", b"RxErr 9\n"), Gone("numa_node")],
        &[Text("power_state", b"D3cold\n"), Text("aer_dev_fatal", b"Undefined 0\nDL"), Text("aer_rootport_total_err_fatal", b"9\n")],
    ]
};

#[test]
fn harmless_states_are_no_faults_on_any_machine() {
    let Some(captures) = captures() else { return };
    let (mut listed, mut told_lies) = (0, 0);
    for capture in &captures {
        let machine = Machine::copy(capture);
        let addresses: Vec<String> = fs::read_dir(machine.root.join("sys/bus/pci/devices"))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut simulation = machine.start();
        simulation.advance(at(1035));
        let before = simulation.unhealthy();
        // One capture combines files of many machines: one of its interfaces has no carrier.
        assert!(
            before
                .values()
                .all(|reason| matches!(reason, Reason::NoCarrier | Reason::GroupNotViable)),
            "{}: {before:?}",
            capture.name
        );
        assert!(
            !before.values().any(|reason| *reason == Reason::NoCarrier)
                || capture.name == "procfs-mixed",
            "{}: {before:?}",
            capture.name
        );
        listed += simulation.listed();
        let vfs: Vec<&String> = addresses
            .iter()
            .filter(|at| machine.root.join("sys/bus/pci/devices").join(at).join("physfn").exists())
            .collect();
        let of_vfs = &[Edit::Text("config", &ONES)][..];
        for (lies, of) in
            LIES.iter().map(|lies| (*lies, addresses.iter().collect())).chain([(of_vfs, vfs)])
        {
            let mut faults = Vec::new();
            for lie in lies {
                let has_file = |at: &&&String| {
                    machine.root.join("sys/bus/pci/devices").join(at).join(lie.file()).is_file()
                };
                faults.extend(
                    of.iter().filter(has_file).map(|at| Fault::make(&machine.root, at, &[*lie])),
                );
            }
            if faults.is_empty() {
                continue;
            }
            told_lies += faults.len();
            simulation.scan();
            // Longer than the patience with any of these.
            simulation.advance(simulation.now() + at(35));
            assert_eq!(simulation.unhealthy(), before, "{}: {lies:?}", capture.name);
            faults.into_iter().for_each(Fault::mend);
        }
    }
    println!("{listed} devices listed on {} machines, {told_lies} false reports", captures.len());
    assert!(listed > 50 && told_lies > 500, "{listed} devices, {told_lies} lies");
}
