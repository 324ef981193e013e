//! Error counters of PCI Express (Linux
//! `Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats`).
//!
//! An error is counted by the end of the link that saw it, which may be the bridge. So all bridges
//! up to the root port are read too. Their `aer_rootport_*` files are not read, because they count
//! errors of any device below.
//!
//! A missing file counts nothing, and its source is not off. Either the device lacks the
//! capability, or the firmware keeps it; no privilege would change that. If no function of the host
//! has such a file, `status` reports it once.

use super::super::pci::folder;
use super::Probe;
use crate::domain::{PciAddress, Reason, Source};

const FATAL: &str = "aer_dev_fatal";
const NONFATAL: &str = "aer_dev_nonfatal";

pub(super) fn probe(probe: &mut Probe<'_>) {
    let function = probe.function;
    read(probe, function.address, FATAL, Reason::AerFatal);
    read(probe, function.address, NONFATAL, Reason::AerNonfatal);
    for bridge in &function.bridges {
        read(probe, *bridge, FATAL, Reason::AerFatalAbove);
        read(probe, *bridge, NONFATAL, Reason::AerNonfatal);
    }
}

fn read(probe: &mut Probe<'_>, at: PciAddress, file: &str, reason: Reason) {
    let text = probe.root.try_read(&format!("{}/{file}", folder(at)));
    let sum = probe.allowed(Source::Aer, text).and_then(|text| sum(&text));
    probe.count(reason, at, sum);
}

/// The sum of all lines except the total. Kernels name them differently (`DLP 0`,
/// `Data Link Protocol 0`); the number is the last word. `None` if a line has no number: a sum
/// without it would appear as a reset.
fn sum(text: &str) -> Option<u64> {
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with("TOTAL_"));
    let numbers = lines
        .map(|line| line.split_whitespace().next_back()?.parse::<u64>().ok())
        .collect::<Option<Vec<u64>>>()?;
    (!numbers.is_empty())
        .then(|| numbers.iter().fold(0, |sum: u64, number| sum.saturating_add(*number)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::domain::Counter;

    #[test]
    fn all_lines_except_totals_are_summed() {
        assert_eq!(sum("Undefined 0\nDLP 1\nTLP 2\nTOTAL_ERR_FATAL 3\n"), Some(3));
        assert_eq!(sum("Data Link Protocol 2\nMalformed TLP 40\nTOTAL_ERR_NONFATAL 42"), Some(42));
        assert_eq!(sum("Undefined 0\n"), Some(0));
        assert_eq!(sum(&format!("DLP {}\nTLP 1\n", u64::MAX)), Some(u64::MAX));
        for unknown in ["", "TOTAL_ERR_FATAL 3", "DLP 1\nTLP", "DLP -1", "DLP 1\n\u{fffd}\u{fffd}"]
        {
            assert_eq!(sum(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn the_device_and_every_bridge_above_it_count() {
        let mut host = Host::new("0000:18:00.0");
        let [root_port, switch, absent] =
            ["0000:15:01.0", "0000:16:00.0", "0000:17:00.0"].map(|text| text.parse().unwrap());
        host.function().bridges = vec![root_port, switch, absent];
        host.write("aer_dev_fatal", "DLP 1\nTOTAL_ERR_FATAL 1");
        host.write("aer_dev_nonfatal", "DLP 2\nTOTAL_ERR_NONFATAL 2");
        host.write_at("sys/bus/pci/devices/0000:15:01.0/aer_dev_fatal", "DLP 3\n");
        host.write_at("sys/bus/pci/devices/0000:15:01.0/aer_rootport_total_err_fatal", "99\n");
        host.write_at("sys/bus/pci/devices/0000:16:00.0/aer_dev_nonfatal", "DLP 4\n");
        let signals = host.signals();
        let own = "0000:18:00.0".parse().unwrap();
        let expected = [
            (Reason::AerFatal, own, 1),
            (Reason::AerNonfatal, own, 2),
            (Reason::AerFatalAbove, root_port, 3),
            (Reason::AerNonfatal, switch, 4),
        ];
        assert_eq!(
            signals.counters,
            expected.map(|(reason, at, value)| (Counter { reason, at }, value)).into()
        );
        assert!(
            signals.symptoms.is_empty() && signals.off.is_empty(),
            "a missing file is no signal that is off"
        );
    }
}
