//! Health signals: reads one device's symptoms from the files of its PCI function and of the
//! bridges above it.
//!
//! ```text
//!  Device ─▶ pci (config space, power, link) ─ aer ─┬─ by class: rdma, net, nvme, fpga, drm
//!                                                   └─ thermal ─▶ Signals
//! ```
//!
//! Nothing here judges: no clock, no state, no grace period. A probe only reads, opens no node of
//! `/dev`, and does not wake a suspended device. The kernel resumes a device for a read of its
//! configuration space, so polling would keep it powered for ever. Missing or malformed values are
//! unknown, and no symptom. A read may hang in the kernel while a device fails, so probes run on
//! threads that the daemon can abandon.
//!
//! For a part of a function (a MIG instance, a mediated device, a port) only its own files are
//! read. Symptoms of the whole function are reported for the function, and the judge applies them
//! to its parts.

mod aer;
mod drm;
mod fpga;
mod net;
mod nvme;
mod pci;
mod rdma;
mod thermal;

use super::pci::{folder, nearest};
use super::uevent::Identity;
use crate::domain::{
    Counter, Device, DeviceClass, PciAddress, PciFunction, Reason, Signals, Source, Symptom,
};
use crate::host::HostRoot;
use std::io;

/// Probes a device as discovery found it. A value that discovery saw and that is missing now is a
/// signal too. So the record of the device need not be the newest: a new scan no longer classes an
/// adapter without its RDMA device as an adapter.
///
/// A `/dev` node has no signals, nor has a function whose folder was removed: discovery reports
/// that.
#[must_use]
pub fn signals(root: &HostRoot, device: &Device) -> Signals {
    let root = &root.recording();
    let Some(function) = device.pci.as_ref() else { return Signals::default() };
    let mut probe =
        Probe { root, function, dir: folder(function.address), signals: Signals::default() };
    if !root.is_dir(&probe.dir) {
        probe.end(&ALL);
        return probe.signals;
    }
    if device.attribute("part").is_some() {
        if device.class == DeviceClass::Fpga {
            fpga::probe_ports(&mut probe, device);
            probe.end(&FPGA);
        }
        return probe.signals;
    }
    let is_powered = pci::probe(&mut probe, device.class);
    probe.end(&PCI);
    aer::probe(&mut probe);
    probe.end(&AER);
    match device.class {
        DeviceClass::Rdma => {
            rdma::probe(&mut probe);
            // The verdict on a port depends on the other ports, and an RDMA device that is not
            // found is reported as lost.
            probe.end_without(&RDMA);
        }
        DeviceClass::Nic => {
            net::probe(&mut probe);
            probe.end(&NET);
        }
        DeviceClass::Nvme => {
            nvme::probe(&mut probe);
            probe.end_without(&NVME);
        }
        DeviceClass::Fpga if is_powered => {
            fpga::probe(&mut probe, device);
            probe.end(&FPGA);
        }
        DeviceClass::Gpu => {
            drm::probe(&mut probe, is_powered);
            probe.end(&DRM);
        }
        _ => {}
    }
    if is_powered {
        thermal::probe(&mut probe);
        probe.end(&THERMAL);
    }
    probe.signals
}

/// The reasons that each step of a probe can report.
const PCI: [Reason; 2] = [Reason::PowerError, Reason::OffTheBus];
const AER: [Reason; 3] = [Reason::AerFatal, Reason::AerNonfatal, Reason::AerFatalAbove];
const RDMA: [Reason; 2] = [Reason::PortDown, Reason::RdmaLost];
const NET: [Reason; 1] = [Reason::NoCarrier];
const NVME: [Reason; 2] = [Reason::NvmeDead, Reason::NvmeNotLive];
const FPGA: [Reason; 3] = [Reason::FpgaError, Reason::NotReady, Reason::TooHot];
const DRM: [Reason; 2] = [Reason::NotReady, Reason::MemoryError];
const THERMAL: [Reason; 1] = [Reason::TooHot];
const ALL: [Reason; 14] = [
    Reason::PowerError,
    Reason::OffTheBus,
    Reason::AerFatal,
    Reason::AerNonfatal,
    Reason::AerFatalAbove,
    Reason::MemoryError,
    Reason::PortDown,
    Reason::RdmaLost,
    Reason::NoCarrier,
    Reason::NvmeDead,
    Reason::NvmeNotLive,
    Reason::FpgaError,
    Reason::NotReady,
    Reason::TooHot,
];

/// A probe in progress: where it reads, and what it found so far.
struct Probe<'a> {
    root: &'a HostRoot,
    function: &'a PciFunction,
    /// The function's folder.
    dir: String,
    signals: Signals,
}

impl Probe<'_> {
    /// Ends a step of the probe. After a failed read, the reasons of this step that were not seen
    /// count as unread.
    fn end(&mut self, reasons: &[Reason]) -> bool {
        let has_failed = !self.root.take_failures().is_empty();
        if has_failed {
            self.signals.unread.extend(reasons);
        }
        has_failed
    }

    /// The same for a step that also concludes from absence: after a failed read none of its
    /// symptoms count.
    fn end_without(&mut self, reasons: &[Reason]) {
        if self.end(reasons) {
            self.signals.symptoms.retain(|symptom| !reasons.contains(&symptom.reason));
        }
    }

    /// Reads a file in the function's folder.
    fn read(&self, file: &str) -> Option<String> {
        self.root.read(&format!("{}/{file}", self.dir))
    }

    fn add_symptom(&mut self, reason: Reason, detail: impl Into<String>) {
        self.signals.symptoms.insert(Symptom { reason, detail: detail.into() });
    }

    fn remark(&mut self, text: impl Into<String>) {
        self.signals.remarks.insert(text.into());
    }

    fn count(&mut self, reason: Reason, at: PciAddress, value: Option<u64>) {
        if let Some(value) = value {
            self.signals.counters.insert(Counter { reason, at }, value);
        }
    }

    /// The result of a read. A read without the needed privilege marks its source as off.
    fn allowed<T>(&mut self, source: Source, result: io::Result<T>) -> Option<T> {
        if result.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied) {
            self.signals.off.insert(source);
        }
        result.ok()
    }

    /// Whether the driver that discovery saw is still bound. Then a missing part is a failure, not
    /// an unbinding.
    fn keeps_driver(&self) -> bool {
        let link = self.root.link_name(&format!("{}/driver", self.dir));
        // A capture may lack the link.
        let of_capture = || Identity::of_uevent(&self.read("uevent")?).driver;
        let driver = link.or_else(|| if self.root.is_live() { None } else { of_capture() });
        driver.is_some() && driver == self.function.driver
    }

    /// The folders of a class below the function, each with its name. `seen` has the names that
    /// discovery found. They are needed for captures with `class/` only, and for functions with a
    /// level between (`virtio0/net/ens3`).
    fn children(&self, class: &str, seen: &[String]) -> Vec<(String, String)> {
        let below = format!("{}/{class}", self.dir);
        let mut children: Vec<(String, String)> = self
            .root
            .entries(&below)
            .into_iter()
            .map(|name| (format!("{below}/{name}"), name))
            .map(|(dir, name)| (name, dir))
            .collect();
        for name in seen {
            let dir = format!("sys/class/{class}/{name}");
            let target = self
                .root
                .link_target(&dir)
                .or_else(|| self.root.link_target(&format!("{dir}/device")));
            // By now the name may be that of another device.
            let above = nearest(target.as_deref().unwrap_or_default());
            if above == Some(self.function.address)
                && children.iter().all(|(known, _)| known != name)
                && self.root.is_dir(&dir)
            {
                children.push((name.clone(), dir));
            }
        }
        children
    }
}

/// The number at the start of a state: `4` of `4: ACTIVE`.
fn number_of(state: &str) -> Option<u32> {
    state.split(':').next()?.trim().parse().ok()
}

#[cfg(test)]
mod testing;

#[cfg(test)]
mod tests {
    use super::testing::Host;
    use super::*;

    #[test]
    fn a_forbidden_source_is_off_and_a_missing_file_is_not() {
        let host = Host::new("0000:18:00.0");
        let mut probe = host.probe();
        let refused: io::Result<()> = Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(probe.allowed(Source::Aer, refused), None);
        assert_eq!(
            probe.allowed::<()>(Source::ConfigSpace, Err(io::ErrorKind::NotFound.into())),
            None
        );
        assert_eq!(probe.allowed(Source::ConfigSpace, Ok(1)), Some(1));
        assert_eq!(probe.signals.off, [Source::Aer].into());
    }

    #[test]
    fn an_absent_function_and_a_dev_node_have_no_signals() {
        let mut host = Host::new("0000:18:00.0");
        host.device.class = DeviceClass::Nvme;
        host.function().driver = Some("nvme".into());
        let mut node = host.device.clone();
        node.pci = None;
        assert_eq!(signals(&host.root, &node), Signals::default());
        std::fs::remove_dir_all(host.path("")).unwrap();
        assert_eq!(host.signals(), Signals::default());
    }

    #[test]
    fn a_part_is_not_blamed_for_its_function() {
        let mut host = Host::new("0000:18:00.0");
        host.write("power_state", "error");
        host.write("config", "\u{0}");
        host.write("aer_dev_fatal", "DLP 1\n");
        assert_eq!(host.signals().symptoms.len(), 1);
        host.device.attributes.insert("part", "mig");
        assert_eq!(host.signals(), Signals::default());
    }
}
