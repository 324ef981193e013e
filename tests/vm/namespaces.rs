//! Namespaces of NVMe that are detached and attached, and a second path to one.

use crate::hardware::{EMPTY, PATHS};
use crate::machine::Machine;
use crate::node::Node;
use serde_json::json;

const RESOURCE: &str = "example.com/disk";
const RESOURCES: &str = r#"
[[resource]]
name = "example.com/disk"
class = "nvme"
"#;

/// The kernel's name of the controller in a slot.
fn controller(machine: &Machine, slot: u8) -> String {
    let address = machine.address_in(slot);
    machine.wait("the driver of the controller", || {
        let dir = format!("/sys/bus/pci/devices/{address}/nvme");
        let (_, name, _) = machine.try_run(&format!("ls {dir}"));
        (!name.is_empty()).then_some(name)
    })
}

/// Attaches the namespace to its first controller, or detaches it.
fn order(machine: &Machine, verb: &str) {
    let controller = controller(machine, PATHS);
    machine.run(&format!("nvme {verb} /dev/{controller} --namespace-id=1 --controllers=0"));
}

/// The id of the namespace in the subsystem with several paths, which a pod gets.
fn hold(machine: &Machine, node: &Node<'_>) -> (String, String) {
    let before = node.wait("the disks that are always there", |node| {
        Some(node.healthy(RESOURCE)).filter(|ids| ids.len() == 3)
    });
    order(machine, "detach-ns");
    let id = node.wait("one of them leaves", |node| {
        let healthy = node.healthy(RESOURCE);
        let gone: Vec<_> = before.iter().filter(|id| !healthy.contains(id)).collect();
        (gone.len() == 1).then(|| gone[0].clone())
    });
    order(machine, "attach-ns");
    node.wait_for_health(RESOURCE, &id, "");
    let pods = ["first", "second", "third"].map(|name| node.pod(name, RESOURCE));
    let holder = pods.iter().find(|pod| pod.devices[0] == id).unwrap().name.clone();
    (id, holder)
}

/// How soon its holder's device is unhealthy, in seconds. The next scan without an event may be
/// half a minute away.
const SOON: f64 = 10.0;

pub(crate) fn come_and_go(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    let (id, holder) = hold(machine, &node);
    let detached_at = machine.uptime();
    order(machine, "detach-ns");
    node.wait_for_health(RESOURCE, &id, "node_missing");
    let took = machine.uptime() - detached_at;
    assert!(took < SOON, "{took} s");
    assert_eq!(node.holders(&id), [holder.as_str()]);
    // Another daemon finds the controller without its namespace.
    node.kill_daemon();
    node.start_daemon();
    node.wait_for_health(RESOURCE, &id, "node_missing");
    assert_eq!(node.holders(&id), [holder.as_str()]);

    order(machine, "attach-ns");
    node.wait_for_health(RESOURCE, &id, "");
    assert_eq!(node.holders(&id), [holder.as_str()]);
    let failures = node.failures(&id);
    assert_eq!(failures.last().unwrap()["reason"], "node_missing", "{failures:#?}");
    node.end_daemon();
}

/// The number of paths to namespaces.
fn paths(machine: &Machine) -> usize {
    let links = machine.run("find /sys/class/nvme-subsystem/*/ -name 'nvme*' -type l");
    links.lines().count()
}

pub(crate) fn have_two_paths(machine: &Machine) {
    let node = Node::start(machine, RESOURCES);
    let (id, holder) = hold(machine, &node);
    let ids = node.listed();
    let one = paths(machine);
    let (slot, bus) = EMPTY[0];
    machine.plug(&json!({
        "driver": "nvme", "id": "path", "serial": "SLOT8", "bus": bus, "subsys": "subsystem",
    }));
    controller(machine, slot);
    node.wait("a second path", |_| (paths(machine) > one).then_some(()));
    node.wait_for_scan();
    assert_eq!(node.listed(), ids);
    assert_eq!(node.holders(&id), [holder.as_str()]);

    // The ledger is lost. The kubelet's checkpoint has the id of the one path.
    node.kill_daemon();
    machine.run(&format!("rm -r {}", node.state()));
    node.start_daemon();
    node.wait_for_holders(&id, &[&holder]);
    assert_eq!(node.listed(), ids);
    let refused = node.try_pod("refused", RESOURCE);
    assert!(refused.rejected.is_some(), "{refused:?}");

    machine.unplug("path");
    node.wait("one path", |_| (paths(machine) == one).then_some(()));
    node.wait_for_scan();
    assert_eq!(node.listed(), ids);
    assert_eq!(node.holders(&id), [holder.as_str()]);
    node.end_daemon();
}
