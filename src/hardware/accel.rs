//! Accelerators with a node: those of the kernel's accel subsystem (Linux `Documentation/accel`),
//! those of Habana's older drivers (`Documentation/ABI/testing/sysfs-driver-habanalabs`), and NEC's
//! vector engines.

use super::facts::{Facts, optional, required};
use super::pci::{folder, is_numbered};
use crate::domain::PciFunction;
use crate::host::HostRoot;

/// Habana's driver. In addition to the compute node it makes a control node with the same number,
/// which only reports.
const HABANA: &str = "habanalabs";
/// The class of the older driver. Its nodes are not below the function; each states the function's
/// address.
const HABANA_CLASS: &str = "sys/class/habanalabs";

pub(super) fn facts(root: &HostRoot, function: &PciFunction) -> Facts {
    let mut facts = Facts::default();
    let is_habana = function.driver.as_deref() == Some(HABANA);
    if is_habana {
        // Habana's own driver has it; that of Linux does not.
        facts.note("module_id", root.read(&format!("{}/module_id", folder(function.address))));
    }
    let below =
        |class: &str| numbers(root, &format!("{}/{class}", folder(function.address)), class);
    for number in below("accel") {
        facts.nodes.push(required(format!("/dev/accel/accel{number}")));
        facts
            .nodes
            .extend(is_habana.then(|| optional(format!("/dev/accel/accel_controlD{number}"))));
    }
    facts.nodes.extend(below("ve").iter().map(|number| required(format!("/dev/ve{number}"))));
    if is_habana && facts.nodes.is_empty() {
        let address =
            |number: &str| root.read(&format!("{HABANA_CLASS}/hl{number}/pci_addr"))?.parse().ok();
        for number in numbers(root, HABANA_CLASS, "hl")
            .iter()
            .filter(|number| address(number) == Some(function.address))
        {
            facts.nodes.extend([
                required(format!("/dev/hl{number}")),
                optional(format!("/dev/hl_controlD{number}")),
            ]);
        }
    }
    facts
}

/// The numbers of the entries of a folder that are `prefix` followed by a number.
fn numbers(root: &HostRoot, folder: &str, prefix: &str) -> Vec<String> {
    let names = root.entries(folder).into_iter().filter(|name| is_numbered(name, prefix));
    names.map(|name| name[prefix.len()..].to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::discover;
    use super::super::testing::{function, spec, write};
    use super::*;
    use crate::domain::{DeviceClass, Select};
    use std::collections::BTreeMap;

    const PLACE: &str = "sys/bus/pci/devices/0000:33:00.0";

    /// The nodes of an accelerator with this driver below a root with these files, and whether each
    /// is required.
    fn nodes(driver: &str, files: &[&str]) -> Vec<(String, bool)> {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in files.iter().map(|file| file.split_once(" = ").unwrap_or((file, ""))) {
            write(dir.path(), file, text);
        }
        let function = PciFunction { driver: Some(driver.into()), ..function("0000:33:00.0") };
        facts(&HostRoot::new(dir.path()), &function)
            .nodes
            .into_iter()
            .map(|node| (node.host, node.required))
            .collect()
    }

    #[test]
    fn an_accelerator_has_the_node_that_the_accel_subsystem_gives_it() {
        let dev = format!("{PLACE}/accel/accel3/dev");
        assert_eq!(nodes("intel_vpu", &[&dev]), [("/dev/accel/accel3".into(), true)]);
        assert_eq!(nodes("ve_drv", &[&format!("{PLACE}/ve/ve2/dev")]), [("/dev/ve2".into(), true)]);
        let both =
            [("/dev/accel/accel3".into(), true), ("/dev/accel/accel_controlD3".into(), false)];
        assert_eq!(nodes("habanalabs", &[&dev]), both);
    }

    #[test]
    fn an_accelerator_is_offered_with_its_node() {
        let dir = tempfile::tempdir().unwrap();
        write(
            dir.path(),
            &format!("{PLACE}/uevent"),
            "DRIVER=intel_vpu\nPCI_CLASS=120000\nPCI_ID=8086:7D1D\n",
        );
        write(dir.path(), &format!("{PLACE}/accel/accel0/dev"), "261:0\n");
        let specs = [spec("a.com/npu", DeviceClass::Accelerator, Select::default())];
        let found = discover(&HostRoot::new(dir.path()), &specs, &BTreeMap::new());
        assert_eq!(found.selection.warnings, Vec::<String>::new());
        assert_eq!(
            found.selection.resources[&specs[0].name][0].nodes,
            [required("/dev/accel/accel0")]
        );
    }

    #[test]
    fn older_habana_drivers_show_the_address_next_to_each_node() {
        let other = "sys/class/habanalabs/hl0/pci_addr = 0000:19:00.0\n";
        let control = "sys/class/habanalabs/hl_controlD1/dev";
        let mine = "sys/class/habanalabs/hl1/pci_addr = 0000:33:00.0\n";
        assert_eq!(
            nodes("habanalabs", &[other, control, mine]),
            [("/dev/hl1".into(), true), ("/dev/hl_controlD1".into(), false)]
        );
        assert_eq!(nodes("habanalabs", &[other]), []);
        assert_eq!(nodes("vfio-pci", &[mine]), []);
    }

    #[test]
    fn a_gaudi_has_the_number_of_its_module_where_its_driver_states_it() {
        let dir = tempfile::tempdir().unwrap();
        let module = |driver: &str| {
            let gaudi = PciFunction { driver: Some(driver.into()), ..function("0000:33:00.0") };
            let facts = facts(&HostRoot::new(dir.path()), &gaudi);
            facts.attributes.get("module_id").map(str::to_owned)
        };
        assert_eq!(module(HABANA), None);
        write(dir.path(), &format!("{PLACE}/module_id"), "5\n");
        assert_eq!((module(HABANA).as_deref(), module("vfio-pci")), (Some("5"), None));
    }
}
