//! Temperatures: the sensors of the function itself (Linux
//! `Documentation/hwmon/sysfs-interface.rst`).
//!
//! Only the critical alarm of a sensor counts. The limit in a neighbouring file is not compared,
//! because zeros and placeholders are common there.

use super::super::pci::is_numbered;
use super::Probe;
use crate::domain::Reason;

pub(super) fn probe(probe: &mut Probe<'_>) {
    let sensors = format!("{}/hwmon", probe.dir);
    for chip in probe.root.entries(&sensors).into_iter().filter(|name| is_numbered(name, "hwmon")) {
        let dir = format!("{sensors}/{chip}");
        for file in probe.root.entries(&dir) {
            let Some(sensor) =
                file.strip_suffix("_crit_alarm").filter(|sensor| is_numbered(sensor, "temp"))
            else {
                continue;
            };
            if probe.root.read(&format!("{dir}/{file}")).as_deref() == Some("1") {
                let label = probe
                    .root
                    .read(&format!("{dir}/{sensor}_label"))
                    .map_or_else(String::new, |label| format!(" ({label})"));
                probe.add_symptom(Reason::TooHot, format!("{sensor}{label} is critical"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Host;
    use super::*;

    #[test]
    fn a_critical_alarm_of_its_own_sensors_is_a_symptom() {
        let host = Host::new("0000:03:00.0");
        host.write("hwmon/hwmon7/temp1_crit_alarm", "0\n");
        host.write("hwmon/hwmon7/temp2_crit_alarm", "0\n");
        host.write("hwmon/hwmon7/temp2_label", "junction\n");
        // These are no critical temperatures.
        host.write("hwmon/hwmon7/temp1_max_alarm", "1\n");
        host.write("hwmon/hwmon7/in0_crit_alarm", "1\n");
        host.write("hwmon/hwmon7/temp1_crit", "0\n");
        host.write("hwmon/hwmon7/temp1_input", "45000\n");
        assert_eq!(host.symptoms(), []);
        host.write("hwmon/hwmon7/temp1_crit_alarm", "1\n");
        host.write("hwmon/hwmon7/temp2_crit_alarm", "1\n");
        let critical = ["temp1 is critical", "temp2 (junction) is critical"]
            .map(|text| (Reason::TooHot, text.to_owned()));
        assert_eq!(host.symptoms(), critical);
        host.write("power/runtime_status", "suspended\n");
        assert_eq!(host.symptoms(), [], "a sensor may not answer while the device is suspended");
    }
}
