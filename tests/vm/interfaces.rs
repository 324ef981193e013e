//! An interface that a pod has in its own network namespace.

use crate::hardware::ADAPTER;
use crate::machine::Machine;
use crate::node::Node;

const RESOURCE: &str = "example.com/adapter";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/adapter"
class = "nic"
"#;

pub(crate) fn of_a_pod(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    let adapter = machine.address_in(ADAPTER);
    node.wait_for_healthy(RESOURCE, std::slice::from_ref(&adapter));
    node.pod("holder", RESOURCE);
    let dir = format!("/sys/bus/pci/devices/{adapter}/net");
    let interface = machine.run(&format!("ls {dir}"));
    machine.run("unshare --net sleep 100000 > /dev/null 2>&1 & echo $! > /run/sleep.pid");
    let pid = machine.run("cat /run/sleep.pid");
    machine.wait("another network namespace", || {
        let (code, _, _) = machine.try_run(&format!(
            "test $(readlink /proc/{pid}/ns/net) != $(readlink /proc/self/ns/net)"
        ));
        (code == Some(0)).then_some(())
    });
    machine.run(&format!("ip link set {interface} netns {pid}"));
    assert_eq!(machine.run(&format!("ls {dir}")), "", "sysfs shows the host's interfaces");

    // Also to a daemon that starts meanwhile.
    let is_held = |node: &Node<'_>| {
        node.wait_for_scan();
        assert_eq!(node.listed(), [(adapter.clone(), String::new())]);
        node.wait_for_healthy(RESOURCE, std::slice::from_ref(&adapter));
        assert_eq!(node.holders(&adapter), ["holder"]);
        let refused = node.try_pod("refused", RESOURCE);
        assert!(refused.rejected.is_some(), "{refused:?}");
    };
    is_held(&node);
    node.kill_daemon();
    node.start_daemon();
    is_held(&node);

    // The kernel returns the interface when the namespace ends.
    machine.run(&format!("kill {pid}"));
    machine.wait("the interface returns", || {
        let (_, found, _) = machine.try_run(&format!("ls {dir}"));
        (found == interface).then_some(())
    });
    is_held(&node);
    assert_eq!(node.failures(&adapter), [""; 0]);
    node.end_daemon();
}
