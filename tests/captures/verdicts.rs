//! What becomes of a device on a captured machine when it fails: scanned, probed and judged on virtual time. Each fault is told with
//! its reason, when its patience is over and not before; each is forgotten when its hold is over and not before. What only looks
//! like a fault changes nothing, on any machine.

use crate::archive::{Capture, captures, folder, link_tree};
use crate::fault::{Edit, Fault, ONES};
use holdfast::domain::{DeviceClass, DeviceEvent, DeviceId, EventKind, HealthPolicy, Reason, ResourceSpec};
use holdfast::hardware::{defaults, discover, scan};
use holdfast::host::HostRoot;
use holdfast::sim::health::HealthTrial;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A captured machine whose devices are offered, each class by a resource.
struct Machine {
    root: PathBuf,
    specs: Vec<Arc<ResourceSpec>>,
    /// The ids of everything that is there, by address; parts not among them.
    ids: BTreeMap<String, DeviceId>,
    _dir: tempfile::TempDir,
}

impl Machine {
    fn copy(capture: &Capture) -> Machine {
        let dir = folder();
        let root = dir.path().join("root");
        link_tree(&capture.root, &root);
        let host = HostRoot::new(&root);
        let mut specs: Vec<Arc<ResourceSpec>> = defaults::specs(&scan(&host)).into_iter().map(Arc::new).collect();
        for class in [DeviceClass::Rdma, DeviceClass::Nic, DeviceClass::Nvme, DeviceClass::Fpga, DeviceClass::Accelerator] {
            specs.push(Arc::new(ResourceSpec::new(format!("example.com/{class}").parse().unwrap(), class)));
        }
        let found = discover(&host, &specs, &BTreeMap::new());
        // Most captures have no `/dev`.
        for node in found.devices.iter().flat_map(|device| &device.nodes).filter(|node| node.required) {
            let path = root.join(node.host.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if !path.exists() {
                fs::write(path, "").unwrap();
            }
        }
        let wholes = found.devices.iter().filter(|device| device.attribute("part").is_none());
        let ids = wholes.filter_map(|device| Some((device.pci.as_ref()?.address.to_string(), device.id.clone()))).collect();
        Machine { root, specs, ids, _dir: dir }
    }

    fn named(name: &str) -> Option<Machine> {
        captures()?.iter().find(|capture| capture.name == name).map(Machine::copy)
    }

    fn start(&self) -> HealthTrial {
        HealthTrial::start(HostRoot::new(&self.root), self.specs.clone(), HealthPolicy::default(), at(1000))
    }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Lives on until this is so; so many half seconds at most. How many seconds it took.
fn wait(trial: &mut HealthTrial, most: u64, fits: impl Fn(&HealthTrial) -> bool) -> Option<Duration> {
    let began = trial.now();
    for _ in 0..=most * 2 {
        if fits(trial) {
            return Some(trial.now() - began);
        }
        trial.advance(trial.now() + Duration::from_millis(500));
    }
    None
}

/// How a failure ends.
enum Ends {
    /// When it is undone, so many seconds later.
    Undone(u64),
    /// When nothing more is seen of it, so many seconds after it was told.
    ByItself(u64),
    /// By evidence of a reset only.
    ByReset,
}

/// One row: the machine, the function, what is done to it; then why it is unhealthy, so many seconds later, and how that ends.
type Row<'a> = (&'a str, &'a str, &'a [Edit<'a>], Reason, u64, Ends);

const GPU: &str = "0000:08:00.0";
const PORT: &str = "0000:00:03.0";
const DISK: &str = "0000:05:00.0";
const CARD: &str = "0000:b1:00.0";
const A2: &str = "nvidia-a2-vgpu";
const IB: (&str, &str) = ("ibm-ac922-lassen", "0033:01:00.0");
const FPGA: &str = "fpga-n6000-sku1-vfs";

/// Faults begin three seconds after a poll, which comes every ten: what a probe finds, is found seven seconds later. What a scan
/// finds is found at once.
#[rustfmt::skip]
const FAULTS: &[Row<'_>] = {
    use Edit::{Gone, Text};
    use Ends::{ByItself, ByReset, Undone};
    &[
        // Presence: told at once, and over a second after it was seen to be back; what is to be probed first, another one later.
        (A2, DISK, &[Gone("sys/bus/pci/devices/0000:05:00.0")], Reason::DeviceGone, 0, Undone(2)),
        (A2, DISK, &[Gone("dev/nvme0n1")], Reason::NodeMissing, 0, Undone(1)),
        // Hard: at the first probe, and over half a minute after the first good one.
        (A2, DISK, &[Text("config", &ONES)], Reason::OffTheBus, 7, Undone(37)),
        (A2, DISK, &[Text("nvme/nvme0/state", b"dead\n")], Reason::NvmeDead, 7, Undone(37)),
        (FPGA, CARD, &[Text("fpga_region/region0/dfl-fme.0/errors/catfatal_errors", b"0x40\n")], Reason::FpgaError, 7, Undone(37)),
        // Soft: when it has lasted.
        (A2, DISK, &[Text("power_state", b"error\n")], Reason::PowerError, 37, Undone(37)),
        (A2, DISK, &[Text("nvme/nvme0/state", b"resetting\n")], Reason::NvmeNotLive, 67, Undone(37)),
        (A2, "0000:04:00.0", &[Text("net/eno49/carrier", b"0\n")], Reason::NoCarrier, 37, Undone(37)),
        (A2, DISK, &[Text("hwmon/hwmon9/temp1_crit_alarm", b"1\n")], Reason::TooHot, 37, Undone(37)),
        (IB.0, IB.1, &[Text("infiniband/mlx5_2/ports/1/state", b"1: DOWN\n"), Text("infiniband/mlx5_2/ports/1/phys_state", b"2: Polling\n")], Reason::PortDown, 37, Undone(37)),
        (IB.0, IB.1, &[Text("infiniband/mlx5_2/ports/1/state", b"2: INIT\n")], Reason::PortDown, 37, Undone(37)),
        // Counted by the bridge above: of what is below nothing more is known.
        (A2, PORT, &[Text("aer_dev_fatal", b"Undefined 0\nDLP 0\nTLP 1\nTOTAL_ERR_FATAL 1\n")], Reason::AerFatalAbove, 7, ByItself(40)),
        // Sticky.
        (A2, GPU, &[Text("aer_dev_fatal", b"Undefined 0\nDLP 0\nTLP 1\nTOTAL_ERR_FATAL 1\n")], Reason::AerFatal, 7, ByReset),
    ]
};

#[test]
fn every_fault_is_told_with_its_reason_at_its_time_and_forgotten_at_its_time() {
    if captures().is_none() {
        return;
    }
    for (name, address, edits, reason, after, ends) in FAULTS {
        let case = format!("{name} {address} {reason}");
        let machine = Machine::named(name).unwrap();
        let mut trial = machine.start();
        trial.advance(at(1013));
        let before = trial.ailing();
        let of = if *address == PORT { GPU } else { address };
        let of: BTreeSet<&DeviceId> = machine.ids.get(of).into_iter().collect();
        let is_told = |trial: &HealthTrial| trial.ailing().values().any(|told| told == reason);
        assert!(!is_told(&trial), "{case}: {before:?}");
        let fault = Fault::make(&machine.root, address, edits);
        // What changes a folder of sysfs or of /dev comes with an event.
        let is_heard = *after == 0;
        if is_heard {
            trial.scan();
        }
        assert_eq!(wait(&mut trial, 100, is_told), Some(at(*after)), "{case}: when it was told; {:?}", trial.ailing());
        let told: BTreeMap<_, _> = trial.ailing().into_iter().filter(|(id, _)| !before.contains_key(id)).collect();
        assert!(told.values().all(|told| told == reason), "{case}: {told:?}");
        // Nobody else ails; of a card that is offered by its parts all do.
        let is_below = |id: &DeviceId| {
            of.contains(id)
                || trial.inventory().resources.values().any(|offering| {
                    let device = offering.devices.get(id).and_then(|offered| offered.device.pci.as_ref());
                    device.is_some_and(|pci| pci.address.to_string() == *address || pci.physfn.is_some_and(|of| of.to_string() == GPU))
                })
        };
        assert!(told.keys().all(is_below), "{case}: {told:?}");
        let is_over = |trial: &HealthTrial| trial.ailing() == before;
        match ends {
            Ends::ByItself(seconds) => assert_eq!(wait(&mut trial, 100, is_over), Some(at(*seconds)), "{case}: when it was over"),
            Ends::Undone(seconds) => {
                // A free device that is gone leaves the list after a minute.
                trial.advance(at(if is_heard { 1043 } else { 1113 }));
                assert!(is_told(&trial), "{case}: it lasts");
                fault.mend();
                if is_heard {
                    trial.scan();
                }
                assert_eq!(wait(&mut trial, 100, is_over), Some(at(*seconds)), "{case}: when it was over; {:?}", trial.ailing());
                continue;
            }
            Ends::ByReset => {
                trial.advance(at(1313));
                assert!(is_told(&trial), "{case}: it lasts");
                trial.happened(&DeviceEvent { at: address.parse().unwrap(), whole_slot: false, kind: EventKind::Recovered });
                assert_eq!(wait(&mut trial, 100, is_over), Some(Duration::from_millis(30_500)), "{case}: when it was over");
            }
        }
        // It is not found again.
        trial.advance(trial.now() + at(100));
        assert!(is_over(&trial), "{case}: {:?}", trial.ailing());
    }
}

#[test]
fn what_the_kernel_tells_stays_until_a_reset_whatever_a_probe_shows() {
    let Some(machine) = Machine::named(A2) else { return };
    let event = |kind| DeviceEvent { at: GPU.parse().unwrap(), whole_slot: matches!(kind, EventKind::Xid(_)), kind };
    for (kind, reason) in [
        (EventKind::Xid(79), Reason::Xid),
        (EventKind::Wedged("rebind,bus-reset".into()), Reason::Wedged),
        (EventKind::RecoveryBegan, Reason::ErrorRecovery),
        (EventKind::RecoveryFailed, Reason::RecoveryFailed),
    ] {
        let mut trial = machine.start();
        trial.advance(at(1013));
        let before = trial.ailing();
        trial.happened(&event(kind.clone()));
        let told = trial.ailing();
        assert!(told.values().any(|told| *told == reason), "{kind:?}: {told:?}");
        trial.advance(at(1213));
        assert_eq!(trial.ailing(), told, "{kind:?} heals by itself");
        if reason != Reason::ErrorRecovery {
            trial.restart("first", at(1300));
            trial.advance(at(1360));
            assert_eq!(trial.ailing(), told, "{kind:?} does not outlive the daemon");
        }
        trial.restart("second", at(20));
        trial.advance(at(21));
        assert_eq!(trial.ailing(), before, "{kind:?} outlives the boot");
    }
}

/// What machines in order say too, of each device that has the file; what can be said at one time, on one line.
#[rustfmt::skip]
const LIES: &[&[(&str, &[u8])]] = &[
    &[("power_state", b"D3hot\n"), ("enable", b"0\n"), ("current_link_width", b"1\n"), ("current_link_speed", b"2.5 GT/s PCIe\n"), ("numa_node", b"-1\n")],
    &[("power_state", b"unknown\n"), ("current_link_speed", b"Unknown\n"), ("config", b""), ("aer_dev_correctable", b"RxErr 9\n")],
    &[("power_state", b"D3cold\n"), ("aer_dev_fatal", b"Undefined 0\nDL"), ("aer_rootport_total_err_fatal", b"9\n")],
];

#[test]
fn what_only_looks_like_a_fault_is_none_on_any_machine() {
    let Some(captures) = captures() else { return };
    let (mut listed, mut told_lies) = (0, 0);
    for capture in &captures {
        let machine = Machine::copy(capture);
        let addresses: Vec<String> = fs::read_dir(machine.root.join("sys/bus/pci/devices"))
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let mut trial = machine.start();
        trial.advance(at(1035));
        let before = trial.ailing();
        // One capture is put together from files of many machines: an interface there has no carrier.
        assert!(before.values().all(|reason| matches!(reason, Reason::NoCarrier | Reason::GroupNotViable)), "{}: {before:?}", capture.name);
        assert!(
            !before.values().any(|reason| *reason == Reason::NoCarrier) || capture.name == "procfs-mixed",
            "{}: {before:?}",
            capture.name
        );
        listed += trial.listed();
        let vfs: Vec<&String> =
            addresses.iter().filter(|at| machine.root.join("sys/bus/pci/devices").join(at).join("physfn").exists()).collect();
        let of_vfs: &[(&str, &[u8])] = &[("config", &ONES)];
        for (lies, of) in LIES.iter().map(|lies| (*lies, addresses.iter().collect())).chain([(of_vfs, vfs)]) {
            let mut faults = Vec::new();
            for (file, text) in lies {
                let has_file = |at: &&&String| machine.root.join("sys/bus/pci/devices").join(at).join(file).is_file();
                faults.extend(of.iter().filter(has_file).map(|at| Fault::make(&machine.root, at, &[Edit::Text(file, text)])));
            }
            if faults.is_empty() {
                continue;
            }
            told_lies += faults.len();
            trial.scan();
            // Longer than the patience with any of these.
            trial.advance(trial.now() + at(35));
            assert_eq!(trial.ailing(), before, "{}: {lies:?}", capture.name);
            faults.into_iter().for_each(Fault::mend);
        }
    }
    println!("{listed} devices listed on {} machines, {told_lies} lies told", captures.len());
    assert!(listed > 50 && told_lies > 500, "{listed} devices, {told_lies} lies");
}
