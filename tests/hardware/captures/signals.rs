//! Signals of failure on captured machines. Healthy machines give none, however odd their values
//! are. A copy with a fault gives exactly that fault, for exactly the affected devices, and none
//! again when the fault is undone.

use crate::hardware::captures::archive::{captures, copy_tree, folder, sample};
use crate::hardware::captures::fault::{Edit, Fault, ONES};
use holdfast::domain::{Device, DeviceEvent, EventKind, PciAddress, Reason, Signals};
use holdfast::hardware::{discover, event, signals, xid};
use holdfast::host::{HostRoot, KernelRecord, Uevent};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

fn devices(root: &HostRoot) -> Vec<Arc<Device>> {
    discover(root, &[], &BTreeMap::new()).devices
}

/// Complaints about the captures that are true. This capture combines files of many machines.
const TRUE_COMPLAINTS: [(&str, &str, Reason, &str); 1] =
    [("procfs-mixed", "0000:a2:00.0", Reason::NoCarrier, "enp162s0f0np0 is up and has no carrier")];

#[test]
fn a_healthy_machine_has_no_symptoms() {
    let Some(captures) = captures() else { return };
    let (mut looked_at, mut counters, mut wrong) = (0, 0, Vec::new());
    let mut remarks = BTreeSet::new();
    for capture in &captures {
        let root = HostRoot::new(&capture.root);
        for device in devices(&root) {
            let Signals { symptoms, counters: own, remarks: said, off, unread } =
                signals(&root, &device);
            looked_at += 1;
            counters += own.len();
            let address = device.pci.as_ref().unwrap().address.to_string();
            for symptom in symptoms {
                let known = (
                    capture.name.as_str(),
                    address.as_str(),
                    symptom.reason,
                    symptom.detail.as_str(),
                );
                if !TRUE_COMPLAINTS.contains(&known) {
                    wrong.push(format!(
                        "{} {address} ({}): {symptom:?}",
                        capture.name, device.class
                    ));
                }
            }
            wrong.extend(
                own.iter()
                    .filter(|(_, value)| **value != 0)
                    .map(|(counter, value)| format!("{} {counter:?}: {value}", capture.name)),
            );
            wrong.extend(unread.iter().map(|reason| {
                format!("{} {address}: {reason} could not be looked for", capture.name)
            }));
            wrong.extend(
                off.iter().map(|source| format!("{} {address}: {source} is off", capture.name)),
            );
            remarks.extend(
                said.into_iter().map(|remark| {
                    format!("{} {address} ({}): {remark}", capture.name, device.class)
                }),
            );
        }
    }
    println!(
        "{looked_at} devices of {} machines, {counters} counters; remarks:\n{}",
        captures.len(),
        remarks.iter().cloned().collect::<Vec<_>>().join("\n")
    );
    assert!(counters > 50, "hardly any machine had counters");
    // It works with half of its lanes, so this is only a remark.
    let expected =
        ["nvidia-a2-vgpu 0000:08:00.0 (gpu): its link has 8 lanes, but both ends support 16"];
    assert!(remarks.iter().eq(expected.iter()), "{remarks:?}");
    assert!(wrong.is_empty(), "{} are reported wrongly:\n{}", wrong.len(), wrong.join("\n"));
}

/// A copy of a captured machine; the tests replace single files and restore them.
struct Machine {
    root: PathBuf,
    devices: Vec<Arc<Device>>,
    whole: Seen,
    _dir: tempfile::TempDir,
}

/// The signals of all devices: by address, and by the function that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    symptoms: BTreeSet<(String, Reason, String)>,
    counters: BTreeSet<(String, Reason, String, u64)>,
    remarks: BTreeSet<(String, String)>,
}

impl Machine {
    fn copy(name: &str) -> Option<Self> {
        let capture = captures()?.into_iter().find(|capture| capture.name == name).unwrap();
        let dir = folder();
        let root = dir.path().join("root");
        copy_tree(&capture.root, &root);
        let devices = devices(&HostRoot::new(&root));
        let whole =
            Seen { symptoms: BTreeSet::new(), counters: BTreeSet::new(), remarks: BTreeSet::new() };
        let mut machine = Machine { root, devices, whole, _dir: dir };
        machine.whole = machine.seen();
        Some(machine)
    }

    /// The signals of every device as discovered before any fault.
    fn seen(&self) -> Seen {
        let root = HostRoot::new(&self.root);
        let mut seen =
            Seen { symptoms: BTreeSet::new(), counters: BTreeSet::new(), remarks: BTreeSet::new() };
        for device in &self.devices {
            let address = device.pci.as_ref().unwrap().address.to_string();
            let found = signals(&root, device);
            seen.symptoms.extend(
                found
                    .symptoms
                    .into_iter()
                    .map(|symptom| (address.clone(), symptom.reason, symptom.detail)),
            );
            seen.counters.extend(found.counters.into_iter().map(|(counter, value)| {
                (address.clone(), counter.reason, counter.at.to_string(), value)
            }));
            seen.remarks.extend(found.remarks.into_iter().map(|remark| (address.clone(), remark)));
        }
        seen
    }

    /// The signals with a fault; afterwards checks that the machine is as before.
    fn with(&self, address: &str, edits: &[Edit<'_>]) -> Seen {
        let fault = Fault::make(&self.root, address, edits);
        let seen = self.seen();
        fault.mend();
        assert!(self.seen() == self.whole, "{address} was not mended");
        seen
    }

    /// Checks that exactly these symptoms are made about exactly these devices.
    #[track_caller]
    fn shows(&self, address: &str, edits: &[Edit<'_>], expected: &[(&str, Reason, &str)]) {
        let seen = self.with(address, edits);
        let expected: BTreeSet<_> = expected
            .iter()
            .map(|(at, reason, detail)| ((*at).to_owned(), *reason, (*detail).to_owned()))
            .collect();
        assert_eq!(seen.symptoms, expected);
        assert_eq!(seen.counters, self.whole.counters);
    }

    /// Checks that there is no symptom, and no remark that was not there before.
    #[track_caller]
    fn is_silent(&self, address: &str, edits: &[Edit<'_>]) {
        let seen = self.with(address, edits);
        assert_eq!(seen.symptoms, self.whole.symptoms);
        assert!(seen.remarks.is_subset(&self.whole.remarks), "{:?}", seen.remarks);
    }

    /// Checks that exactly these counters changed, and nothing else.
    #[track_caller]
    fn counts(&self, address: &str, edits: &[Edit<'_>], expected: &[(&str, Reason, &str, u64)]) {
        let seen = self.with(address, edits);
        let other: BTreeSet<_> = seen.counters.difference(&self.whole.counters).cloned().collect();
        let expected = expected
            .iter()
            .map(|(of, reason, at, value)| ((*of).to_owned(), *reason, (*at).to_owned(), *value));
        assert_eq!(other, expected.collect());
        assert_eq!(seen.counters.len(), self.whole.counters.len());
        assert_eq!(seen.symptoms, self.whole.symptoms);
    }

    /// The virtual functions of a physical one; some are split into parts.
    fn vfs(&self, pf: &str) -> BTreeSet<String> {
        let pf: PciAddress = pf.parse().unwrap();
        let functions = self.devices.iter().filter_map(|device| device.pci.as_ref());
        functions
            .filter(|function| function.physfn == Some(pf))
            .map(|function| function.address.to_string())
            .collect()
    }
}

/// The GPU of `nvidia-a2-vgpu`, the port above it, its first virtual function, and the machine's
/// disk.
const GPU: &str = "0000:08:00.0";
const PORT: &str = "0000:00:03.0";
const VF: &str = "0000:08:00.4";
const DISK: &str = "0000:05:00.0";

#[test]
fn a_device_off_the_bus_is_reported_with_its_virtual_functions() {
    let Some(machine) = Machine::copy("nvidia-a2-vgpu") else { return };
    assert!(machine.whole.symptoms.is_empty());
    let vfs = machine.vfs(GPU);
    assert_eq!(vfs.len(), 16);
    let of_pf = format!("the configuration space of its physical function {GPU} reads ffffffff");
    let mut expected = vec![(GPU, Reason::OffTheBus, "the configuration space reads ffffffff")];
    expected.extend(vfs.iter().map(|vf| (vf.as_str(), Reason::OffTheBus, of_pf.as_str())));
    let off = || Edit::Text("config", &ONES);
    machine.shows(GPU, &[off()], &expected);
    machine.shows(
        GPU,
        &[
            off(),
            Edit::Text("power_state", b"D3hot\n"),
            Edit::Text("power/runtime_status", b"active\n"),
        ],
        &expected,
    );
    machine.shows(
        DISK,
        &[off()],
        &[(DISK, Reason::OffTheBus, "the configuration space reads ffffffff")],
    );
    // These values are misleading: a virtual function always reads as all ones, and a suspended
    // device is not probed.
    machine.is_silent(VF, &[off()]);
    machine.is_silent(GPU, &[off(), Edit::Text("power/runtime_status", b"suspended\n")]);
    machine.is_silent(GPU, &[off(), Edit::Text("power_state", b"D3cold\n")]);
    machine.is_silent(GPU, &[Edit::Pipe("config")]);
    machine.is_silent(GPU, &[Edit::Text("config", b"")]);
}

#[test]
fn of_power_link_and_driver_only_a_power_error_is_a_symptom() {
    let Some(machine) = Machine::copy("nvidia-a2-vgpu") else { return };
    machine.shows(
        GPU,
        &[Edit::Text("power_state", b"error\n")],
        &[(GPU, Reason::PowerError, "power_state is error")],
    );
    for state in ["unknown\n", "D3hot\n", "D0\n"] {
        machine.is_silent(GPU, &[Edit::Text("power_state", state.as_bytes())]);
    }
    machine.is_silent(GPU, &[Edit::Text("enable", b"0\n")]);
    machine.is_silent(GPU, &[Edit::Text("current_link_speed", b"8.0 GT/s PCIe\n")]);
    machine.is_silent(
        GPU,
        &[Edit::Text("current_link_speed", b"Unknown\n"), Edit::Text("current_link_width", b"0\n")],
    );
    let narrow = machine.with(GPU, &[Edit::Text("current_link_width", b"1\n")]);
    assert!(narrow.symptoms.is_empty());
    assert!(
        narrow
            .remarks
            .contains(&(GPU.into(), "its link has 1 lanes, but both ends support 16".into()))
    );
    // A missing driver or device is discovery's to report.
    machine.is_silent(
        DISK,
        &[Edit::Gone("driver"), Edit::Text("uevent", b"PCI_ID=144D:A808\n"), Edit::Gone("nvme")],
    );
    machine.is_silent(
        GPU,
        &[
            Edit::Gone("sys/bus/pci/devices/0000:08:00.4"),
            Edit::Gone("virtfn0"),
            Edit::Text("sriov_numvfs", b"0\n"),
        ],
    );
    let gone =
        machine.with(DISK, &[Edit::Gone("sys/devices/pci0000:00/0000:00:02.0/0000:05:00.0")]);
    assert!(gone.symptoms.is_empty() && !gone.counters.iter().any(|(of, ..)| of == DISK));
}

#[test]
fn errors_are_counted_at_the_device_and_at_the_port_above_it() {
    let Some(machine) = Machine::copy("nvidia-a2-vgpu") else { return };
    let one = b"Undefined 0\nDLP 0\nSDES 1\nTLP 0\nTOTAL_ERR_FATAL 1\n";
    machine.counts(GPU, &[Edit::Text("aer_dev_fatal", one)], &[(GPU, Reason::AerFatal, GPU, 1)]);
    machine.counts(
        GPU,
        &[Edit::Text("aer_dev_nonfatal", b"Data Link Protocol 2\nMalformed TLP 3\n")],
        &[(GPU, Reason::AerNonfatal, GPU, 5)],
    );
    // Only the port has seen it: it counts as "above" for the GPU and all its virtual functions,
    // and as its own for the port.
    let vfs = machine.vfs(GPU);
    let mut expected =
        vec![(PORT, Reason::AerFatal, PORT, 1), (GPU, Reason::AerFatalAbove, PORT, 1)];
    expected.extend(vfs.iter().map(|vf| (vf.as_str(), Reason::AerFatalAbove, PORT, 1)));
    machine.counts(PORT, &[Edit::Text("aer_dev_fatal", one)], &expected);
    let seen = machine.with(
        PORT,
        &[
            Edit::Text("aer_rootport_total_err_fatal", b"9\n"),
            Edit::Text("aer_dev_correctable", b"RxErr 9\n"),
        ],
    );
    assert_eq!(seen, machine.whole, "reports of functions below, and corrected errors");
    // A truncated file is not a reset of the counter.
    let cut = machine.with(GPU, &[Edit::Text("aer_dev_fatal", b"Undefined 0\nDL")]);
    assert_eq!(cut.counters.len(), machine.whole.counters.len() - 1);
}

#[test]
fn a_disk_is_healthy_while_its_controller_is_live() {
    let Some(machine) = Machine::copy("nvidia-a2-vgpu") else { return };
    let state = |text: &'static str| Edit::Text("nvme/nvme0/state", text.as_bytes());
    for (text, reason, detail) in [
        ("resetting\n", Reason::NvmeNotLive, "nvme0 is resetting"),
        ("connecting\n", Reason::NvmeNotLive, "nvme0 is connecting"),
        ("dead\n", Reason::NvmeDead, "nvme0 is dead"),
    ] {
        machine.shows(DISK, &[state(text)], &[(DISK, reason, detail)]);
    }
    machine.is_silent(DISK, &[state("live\n")]);
    let none = [(DISK, Reason::NvmeDead, "its driver is bound, but it has no controller")];
    machine.shows(DISK, &[Edit::Gone("nvme")], &none);
    machine.shows(DISK, &[Edit::Gone("nvme"), Edit::Gone("sys/class/nvme/nvme0")], &none);
    // This alarm is not the critical one, and reading that one would send a command to the
    // controller.
    machine.is_silent(DISK, &[Edit::Text("nvme/nvme0/hwmon0/temp1_alarm", b"1\n")]);
    machine.shows(
        GPU,
        &[Edit::Text("hwmon/hwmon9/temp1_crit_alarm", b"1\n")],
        &[(GPU, Reason::TooHot, "temp1 is critical")],
    );
    machine.is_silent(GPU, &[Edit::Text("hwmon/hwmon9/temp1_crit_alarm", b"0\n")]);
}

#[test]
fn an_interface_that_is_up_has_a_carrier() {
    let Some(machine) = Machine::copy("nvidia-a2-vgpu") else { return };
    const CARD: &str = "0000:04:00.0";
    let lost = [(CARD, Reason::NoCarrier, "eno49 is up and has no carrier")];
    machine.shows(
        CARD,
        &[Edit::Text("net/eno49/carrier", b"0\n"), Edit::Text("net/eno49/operstate", b"down\n")],
        &lost,
    );
    machine.is_silent(CARD, &[Edit::Text("net/eno49/operstate", b"unknown\n")]);
    // The interface was switched off; the kernel then refuses to report the carrier.
    machine.is_silent(
        CARD,
        &[Edit::Text("net/eno49/flags", b"0x1002\n"), Edit::Text("net/eno49/carrier", b"")],
    );
    // The interface is in a pod.
    machine.is_silent(CARD, &[Edit::Gone("net"), Edit::Gone("sys/class/net/eno49")]);
}

#[test]
fn a_port_of_an_adapter_is_active_and_linked() {
    for (name, address, adapter) in [
        ("mic-mlx4-nvme", "0000:82:00.0", "mlx4_0"),
        ("amd-corona-8xmi50", "0000:c4:00.0", "mlx5_0"),
        ("ibm-ac922-lassen", "0033:01:00.0", "mlx5_2"),
    ] {
        let Some(machine) = Machine::copy(name) else { return };
        let [state, physical] =
            ["state", "phys_state"].map(|file| format!("infiniband/{adapter}/ports/1/{file}"));
        let port = |logical: &'static str, link: &'static str| {
            [Edit::Text(&state, logical.as_bytes()), Edit::Text(&physical, link.as_bytes())]
        };
        let down = |detail| [(address, Reason::PortDown, detail)];
        machine.shows(
            address,
            &port("1: DOWN\n", "2: Polling\n"),
            &down("port 1 is 1: DOWN, 2: Polling"),
        );
        machine.shows(
            address,
            &port("2: INIT\n", "5: LinkUp\n"),
            &down("port 1 is 2: INIT, 5: LinkUp"),
        );
        machine.shows(
            address,
            &port("4: ACTIVE\n", "6: LinkErrorRecovery\n"),
            &down("port 1 is 4: ACTIVE, 6: LinkErrorRecovery"),
        );
        machine.is_silent(address, &port("4: ACTIVE\n", "5: LinkUp\n"));
        machine.is_silent(address, &[Edit::Pipe(&state)]);
        let lost = format!("{adapter} has disappeared, but its function still has its driver");
        machine.shows(address, &[Edit::Gone("infiniband")], &[(address, Reason::RdmaLost, &lost)]);
        machine.is_silent(
            address,
            &[
                Edit::Gone("infiniband"),
                Edit::Gone("driver"),
                Edit::Text("uevent", b"PCI_CLASS=20700\n"),
            ],
        );
    }
}

#[test]
fn an_fpga_reports_its_errors() {
    let Some(machine) = Machine::copy("fpga-n6000-sku1-vfs") else { return };
    const CARD: &str = "0000:b1:00.0";
    let half = "fpga_region/region0/dfl-fme.0";
    let [state, fatal, nonfatal] = [
        "dfl-fme-mgr.0/fpga_manager/fpga0/state",
        "errors/catfatal_errors",
        "errors/nonfatal_errors",
    ]
    .map(|file| format!("{half}/{file}"));
    let [port, hot] =
        ["errors/errors", "ap2_event"].map(|file| format!("fpga_region/region0/dfl-port.0/{file}"));
    for (file, text, reason, detail) in [
        (&state, "write error\n", Reason::FpgaError, "fpga0 is in the state `write error`"),
        (&fatal, "0x40\n", Reason::FpgaError, "catfatal_errors is 0x40"),
        (&port, "0x1\n", Reason::FpgaError, "errors of dfl-port.0 is 0x1"),
        (&hot, "1\n", Reason::TooHot, "ap2_event of dfl-port.0: the card has throttled it"),
    ] {
        machine.shows(CARD, &[Edit::Text(file, text.as_bytes())], &[(CARD, reason, detail)]);
    }
    machine.is_silent(CARD, &[Edit::Text(&state, b"unknown\n")]);
    machine.is_silent(CARD, &[Edit::Text(&state, b"operating\n")]);
    machine.is_silent(CARD, &[Edit::Text(&nonfatal, b"0x1\n")]);
    machine.is_silent(CARD, &[Edit::Gone("fpga_region")]);
}

#[test]
fn recorded_events_are_read() {
    let Some(recorded) = sample("uevents-real/pci-unbind-bind-change.bin") else { return };
    let mut rest = recorded.as_slice();
    let mut uevents = Vec::new();
    while let Some((length, tail)) = rest.split_first_chunk() {
        let (datagram, tail) = tail.split_at(usize::try_from(u32::from_le_bytes(*length)).unwrap());
        uevents.push(Uevent::parse(datagram).unwrap());
        rest = tail;
    }
    let numbers: Vec<u64> = uevents.iter().map(|uevent| uevent.sequence.unwrap()).collect();
    assert!(
        uevents.len() == 8 && numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
        "{numbers:?}"
    );
    let at = "0000:00:05.0".parse().unwrap();
    let told: Vec<DeviceEvent> = uevents.iter().filter_map(event).collect();
    assert_eq!(
        told,
        [EventKind::Unbound, EventKind::Bound].map(|kind| DeviceEvent {
            at,
            whole_slot: false,
            instance: None,
            kind
        })
    );
}

#[test]
fn recorded_lines_of_the_kernel_are_read() {
    let (Some(log), Some(dmesg)) =
        (sample("kmsg-samples/kmsg-format.1.txt"), sample("kmsg-samples/nvidia-xid-119.dmesg.txt"))
    else {
        return;
    };
    let log = String::from_utf8(log).unwrap();
    let records: Vec<KernelRecord> =
        log.lines().filter_map(|line| KernelRecord::parse(line.as_bytes())).collect();
    assert!(
        records.len() > 20
            && records.windows(2).all(|pair| pair[0].sequence < pair[1].sequence
                && pair[0].since_boot <= pair[1].since_boot)
    );
    assert!(records.iter().all(|record| xid(&record.text).is_none()));
    let dmesg = String::from_utf8(dmesg).unwrap();
    let told: BTreeSet<String> = dmesg
        .lines()
        .filter_map(|line| xid(line.split_once("] ")?.1))
        .map(|event| format!("{event:?}"))
        .collect();
    let at: PciAddress = "0000:9b:00.0".parse().unwrap();
    assert_eq!(
        told,
        [format!(
            "{:?}",
            DeviceEvent { at, whole_slot: true, instance: None, kind: EventKind::Xid(119) }
        )]
        .into()
    );
}
