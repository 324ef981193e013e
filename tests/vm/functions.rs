//! Virtual functions of a network adapter (SR-IOV).

use crate::hardware::ADAPTER;
use crate::machine::Machine;
use crate::node::Node;

const RESOURCE: &str = "example.com/function";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/function"
class = "nic"
select = { vf = true }
"#;

/// The same functions by driver, for virtual machines and for containers.
const KERNEL: &str = "example.com/kernel";
const VFIO: &str = "example.com/vfio";
const BY_DRIVER: &str = r#"
[[resource]]
name = "example.com/kernel"
class = "nic"
select = { vf = true, driver = ["igbvf"] }
[[resource]]
name = "example.com/vfio"
class = "nic"
select = { vf = true, driver = ["vfio-pci"] }
"#;

/// Sets the number of virtual functions, which the kernel changes from and to 0 only. Returns
/// their addresses.
fn set(machine: &Machine, count: usize) -> Vec<String> {
    let adapter = machine.address_in(ADAPTER);
    let dir = format!("/sys/bus/pci/devices/{adapter}");
    machine.run(&format!("echo {count} > {dir}/sriov_numvfs"));
    let links = machine.run(&format!("find {dir}/ -name 'virtfn*' -exec readlink {{}} ';'"));
    let mut functions: Vec<String> =
        links.lines().map(|link| link.trim_start_matches("../").to_owned()).collect();
    functions.sort();
    assert_eq!(functions.len(), count, "{links}");
    functions
}

/// Unbinds a function from its driver.
pub(crate) fn unbind(machine: &Machine, function: &str) {
    let dir = format!("/sys/bus/pci/devices/{function}");
    machine.run(&format!("echo {function} > {dir}/driver/unbind"));
}

/// Binds a function to this driver, or to its usual one if that is empty.
pub(crate) fn bind(machine: &Machine, function: &str, driver: &str) {
    machine.run(&format!(
        "echo {driver} > /sys/bus/pci/devices/{function}/driver_override && \
         echo {function} > /sys/bus/pci/drivers_probe"
    ));
}

fn reasons(node: &Node<'_>, reason: &str) -> Vec<String> {
    let listed = node.listed().into_iter().filter(|(_, each)| each == reason);
    listed.map(|(id, _)| id).collect()
}

pub(crate) fn keep_their_ids(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    assert_eq!(node.listed(), []);
    let four = set(machine, 4);
    node.wait_for_healthy(RESOURCE, &four);
    let pod = node.pod("holder", RESOURCE);
    let held = pod.devices[0].clone();

    // All of them are removed: each is listed for a while longer, and the held one for as long as
    // it is held.
    assert_eq!(set(machine, 0), [""; 0]);
    node.wait_for_healthy(RESOURCE, &[]);
    assert_eq!(reasons(&node, "device_gone"), four);
    node.wait("only the held function is listed", |node| {
        (node.listed() == [(held.clone(), "device_gone".to_owned())]).then_some(())
    });
    assert_eq!(node.holders(&held), ["holder"]);
    let refused = node.try_pod("refused", RESOURCE);
    assert!(refused.rejected.is_some(), "{refused:?}");

    // A daemon that starts meanwhile has it from its ledger.
    node.kill_daemon();
    node.start_daemon();
    assert_eq!(node.listed(), [(held.clone(), "device_gone".to_owned())]);
    assert_eq!(node.healthy(RESOURCE), [""; 0]);

    let seven = set(machine, 7);
    assert!(four.iter().all(|function| seven.contains(function)), "{four:?} {seven:?}");
    node.wait_for_healthy(RESOURCE, &seven);
    assert_eq!(node.listed().len(), 7);
    assert_eq!(node.holders(&held), ["holder"]);
    for number in 1..7 {
        let other = node.pod(&format!("other-{number}"), RESOURCE);
        assert_ne!(other.devices[0], held);
    }
    let failures = node.failures(&held);
    let of_holder = failures.iter().filter(|failure| failure["held_by"][0] == *pod.alloc_id());
    assert!(of_holder.clone().any(|failure| failure["reason"] == "device_gone"), "{failures:#?}");
    node.end_daemon();
    set(machine, 0);
}

pub(crate) fn change_their_drivers(machine: &Machine) {
    let functions = set(machine, 2);
    let node = Node::start(machine, BY_DRIVER);
    node.wait_for_healthy(KERNEL, &functions);
    let held = node.pod("holder", KERNEL).devices[0].clone();
    let free = functions.iter().find(|function| **function != held).unwrap().clone();

    unbind(machine, &held);
    node.wait_for_health(KERNEL, &held, "driver_lost");
    node.wait_for_healthy(KERNEL, std::slice::from_ref(&free));
    // The other resource has it now, and must not give it away.
    bind(machine, &held, "vfio-pci");
    node.wait_for_health(VFIO, &held, "held_as_other");
    assert_eq!(node.healthy(VFIO), [""; 0]);
    assert_eq!(node.holders(&held), ["holder"]);

    // A free function moves to the other resource, and back.
    unbind(machine, &free);
    bind(machine, &free, "vfio-pci");
    node.wait_for_healthy(VFIO, std::slice::from_ref(&free));
    node.wait_for_healthy(KERNEL, &[]);
    unbind(machine, &free);
    bind(machine, &free, "");
    node.wait_for_healthy(VFIO, &[]);
    node.wait_for_healthy(KERNEL, std::slice::from_ref(&free));

    unbind(machine, &held);
    bind(machine, &held, "");
    node.wait_for_healthy(KERNEL, &functions);
    assert_eq!(node.holders(&held), ["holder"]);
    node.end_daemon();
    set(machine, 0);
}
