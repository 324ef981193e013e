//! Signals of NVMe controllers (Linux `drivers/nvme/host/sysfs.c`, attribute `state`).
//!
//! Only a reset of the function revives a `dead` controller. After a failed reset the driver
//! removes the controller, and the function stays: for its user that is the same failure. Its
//! sensors are not read, because that is a command to the controller.

use super::super::pci::is_numbered;
use super::Probe;
use crate::domain::Reason;

const DRIVER: &str = "nvme";

pub(super) fn probe(probe: &mut Probe<'_>) {
    let mut controllers = probe.children("nvme", &probe.function.nvme);
    controllers.retain(|(name, _)| is_numbered(name, "nvme"));
    for (name, dir) in &controllers {
        let Some(state) = probe.root.read(&format!("{dir}/state")) else { continue };
        match state.as_str() {
            "dead" => probe.add_symptom(Reason::NvmeDead, format!("{name} is dead")),
            // `deleting (no IO)` is also possible.
            "new" | "resetting" | "connecting" => {
                probe.add_symptom(Reason::NvmeNotLive, format!("{name} is {state}"));
            }
            _ if state.starts_with("deleting") => {
                probe.add_symptom(Reason::NvmeNotLive, format!("{name} is {state}"));
            }
            _ => {}
        }
    }
    // Discovery saw a controller, or would have seen one: not every capture has the class.
    let has_seen = !probe.function.nvme.is_empty() || probe.root.is_dir("sys/class/nvme");
    if controllers.is_empty()
        && has_seen
        && probe.function.driver.as_deref() == Some(DRIVER)
        && probe.keeps_driver()
    {
        probe.add_symptom(Reason::NvmeDead, "its driver is bound, but it has no controller");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;
    use crate::domain::DeviceClass;

    fn disk() -> Host {
        let mut host = Host::new("0000:05:00.0");
        host.device.class = DeviceClass::Nvme;
        host.function().nvme = vec!["nvme0".into()];
        host.function().driver = Some("nvme".into());
        host.write("uevent", "DRIVER=nvme\n");
        host
    }

    #[test]
    fn only_a_live_controller_is_healthy() {
        let host = disk();
        let symptom = |reason, text: &str| vec![(reason, text.to_owned())];
        for (state, expected) in [
            ("live\n", vec![]),
            ("", vec![]),
            ("a new word\n", vec![]),
            ("resetting\n", symptom(Reason::NvmeNotLive, "nvme0 is resetting")),
            ("connecting\n", symptom(Reason::NvmeNotLive, "nvme0 is connecting")),
            ("new\n", symptom(Reason::NvmeNotLive, "nvme0 is new")),
            ("deleting (no IO)\n", symptom(Reason::NvmeNotLive, "nvme0 is deleting (no IO)")),
            ("dead\n", symptom(Reason::NvmeDead, "nvme0 is dead")),
        ] {
            host.write("nvme/nvme0/state", state);
            assert_eq!(host.symptoms(), expected, "{state}");
        }
    }

    #[test]
    fn a_controller_that_its_driver_took_away_is_dead() {
        let mut host = disk();
        let dead =
            vec![(Reason::NvmeDead, "its driver is bound, but it has no controller".to_owned())];
        assert_eq!(host.symptoms(), dead);
        host.function().nvme.clear();
        assert_eq!(host.symptoms(), [], "a capture without such a class");
        host.write_at("sys/class/nvme/keep", "");
        assert_eq!(host.symptoms(), dead, "discovery did not see it any more either");
        host.write("uevent", "PCI_CLASS=10802\n");
        assert_eq!(host.symptoms(), [], "an unbound driver is another reason");
        host.write("uevent", "DRIVER=nvme\n");
        host.write("nvme/nvme3/state", "live");
        assert_eq!(host.symptoms(), [], "it has another number by now");
    }
}
